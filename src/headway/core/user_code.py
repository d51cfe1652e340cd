"""The user's own code by import path: `package.module:attribute` or `file.py:attribute`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from headway.core.errors import RecipeError, UserCodeError, suggest_nearest

FORM = "Write 'package.module:attribute' or 'path/to/file.py:attribute'."


def import_user_object(path: str, *, base: Path, what: str) -> Any:
    """What stands under `path`: an attribute of an installed module or of a user's file.

    A file is loaded once in a process, whatever the number of paths that name it; the modules that lie beside it
    can be imported by it, after everything installed.

    Args:
        path: `package.module:attribute` or `file.py:attribute`; the attribute may be dotted.
        base: folder to which a file's path is relative.
        what: the recipe's key that holds the path; it stands before every error.

    Raises:
        RecipeError: the path is malformed, or there is no such module, file or attribute.
        UserCodeError: the module itself failed while it was imported; the cause carries its traceback.
    """
    source, _, attribute = path.rpartition(":")
    if not source or not all(part.isidentifier() for part in attribute.split(".")):
        raise RecipeError(f"{path!r} is no import path", where=what, fix=FORM)
    if source.endswith(".py"):
        module = _import_file(base / Path(source).expanduser(), what)
    elif all(part.isidentifier() for part in source.split(".")):
        module = _import_module(source, what)
    else:
        raise RecipeError(f"{path!r} is no import path", where=what, fix=FORM)

    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [name for name in dir(found) if not name.startswith("_")]
            raise RecipeError(f"{source!r} has no {part!r}", where=what, fix=_suggest(part, public)) from None
        except (Exception, SystemExit) as error:  # a package that imports its parts when they are asked for
            _raise_user_error(source, what, error)
    return found


def _import_module(name: str, what: str) -> ModuleType:
    # Parent by parent: a module that is absent is told from one that fails to import something itself.
    parent: ModuleType | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = ".".join(parts[:depth])
        try:
            if module not in sys.modules and not _module_exists(module, parent):
                siblings = [item.name for item in pkgutil.iter_modules(getattr(parent, "__path__", []))]
                fix = _suggest(parts[depth - 1], siblings) if parent else f"Install it, or name a file. {FORM}"
                raise RecipeError(f"there is no module {module!r}", where=what, fix=fix)
            parent = importlib.import_module(module)
        except RecipeError:
            raise
        except (Exception, SystemExit) as error:
            _raise_user_error(module, what, error)
    assert parent is not None
    return parent


def _module_exists(module: str, parent: ModuleType | None) -> bool:
    if parent is not None and not hasattr(parent, "__path__"):
        return False  # find_spec would raise: the parent is a plain module
    return importlib.util.find_spec(module) is not None


def _import_file(file: Path, what: str) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        beside = [item.name for item in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise RecipeError(f"there is no file {str(file)!r}", where=what, fix=_suggest(file.name, beside))
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    name = f"headway_user_{digest}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _raise_user_error(str(file), what, error)
    return module


def _raise_user_error(source: str, what: str, error: BaseException) -> NoReturn:
    message = f"{source!r} failed while it was imported: {type(error).__name__}: {error}"
    raise UserCodeError(message, where=what) from error


def _suggest(word: str, known: Iterable[str]) -> str:
    # A short list is shown whole; of a long one (torch has 1,400 names) only the close ones are worth reading.
    names = list(known)
    return suggest_nearest(word, names, only_close=len(names) > 20)
