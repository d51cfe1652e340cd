"""Import of the user's own code by path: `package.module:attribute` or `file.py:attribute`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from headway.core.errors import HeadwayError, RecipeError, UserCodeError, suggest_nearest

GIVEN = "python:"
"""Beginning of the path of an object that a Python program gave, and that no import finds."""

_given: ContextVar[Mapping[str, Any]] = ContextVar("headway_given_objects", default=MappingProxyType({}))

FORM = "Write 'package.module:attribute' or 'path/to/file.py:attribute'."


def import_user_object(path: str, *, base: Path, what: str) -> Any:
    """Imports an attribute of an installed module or of a user's file.

    A file is executed once per process, however many paths name it. It can import modules of its own folder, which
    comes last on `sys.path`.

    Args:
        path: `package.module:attribute` or `file.py:attribute`; the attribute may be dotted.
        base: folder that a file's path is relative to.
        what: recipe key that holds the path; errors name it.

    Raises:
        RecipeError: the path is malformed, or there is no such module, file or attribute.
        UserCodeError: the module failed while it was imported; the cause carries its traceback.
    """
    if path.startswith(GIVEN):
        return _find_given_object(path, what)
    # From the right: a file's path may contain colons.
    source, _, attribute = path.rpartition(":")
    if not source or not all(part.isidentifier() for part in attribute.split(".")):
        raise RecipeError(f"{path!r} is not an import path", where=what, fix=FORM)
    if source.endswith(".py"):
        module = _import_file(base / Path(source).expanduser(), what)
    elif all(part.isidentifier() for part in source.split(".")):
        module = _import_module(source, what)
    else:
        raise RecipeError(f"{path!r} is not an import path", where=what, fix=FORM)

    # Attribute by attribute, so that the message names the first one that is missing.
    value: Any = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            public = [name for name in dir(value) if not name.startswith("_")]
            raise RecipeError(f"{source!r} has no {part!r}", where=what, fix=_suggest(part, public)) from None
        # A package with lazy imports runs code on attribute access.
        except (Exception, SystemExit) as error:
            _raise_user_error(source, what, error)
    return value


@contextmanager
def give_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Makes objects of the running program importable by paths that begin with `GIVEN`, inside the block."""
    token = _given.set({**_given.get(), **objects})
    try:
        yield
    finally:
        _given.reset(token)


def _find_given_object(path: str, what: str) -> Any:
    if path not in _given.get():
        name = path.removeprefix(GIVEN)
        fix = "Give it again: headway.resume(run, model=...), headway.Run(run, model=...)."
        raise RecipeError(f"{name} was given by a Python program and cannot be imported", where=what, fix=fix)
    return _given.get()[path]


def check_arguments(
    function: Callable[..., Any], path: str, *given: Any, arguments: Mapping[str, Any], where: str, **more: Any
) -> None:
    """Checks that a user's function can be called as `function(*given, **more, **arguments)`.

    Args:
        function: the function or class.
        path: its import path.
        given, more: the arguments that Headway passes; their values do not matter.
        arguments: the arguments of the recipe.
        where: recipe key that holds `arguments`.

    Raises:
        RecipeError: it has no such argument (the nearest one is named), or needs another one.
    """
    try:
        signature = inspect.signature(function)
    # Some functions written in C have no signature.
    except (TypeError, ValueError):
        return
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.POSITIONAL_ONLY)]
        free_names = [name for name in names[len(given) :] if name not in more]
        for name in arguments:
            if name not in free_names:
                what = f"{path!r} has no argument {name!r}"
                raise RecipeError(what, where=f"{where}.{name}", fix=suggest_nearest(name, free_names))
    try:
        signature.bind(*given, **more, **arguments)
    except TypeError as error:
        raise RecipeError(f"{path!r} cannot be called: {error}", where=where) from None


def read_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a user's function by name; none if it has no signature, as some of C have not."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


@contextmanager
def name_user_errors(path: str, what: str) -> Iterator[None]:
    """Turns an error of the user's code in the block into a UserCodeError that names its import path.

    Args:
        what: recipe key that holds the path.
    """
    try:
        yield
    except HeadwayError:
        raise
    except Exception as error:
        raise UserCodeError(f"{path!r} failed: {type(error).__name__}: {error}", where=what) from error


def make_absolute(path: str, base: Path) -> str:
    """Returns an import path that means the same from every folder: that of a file gets its whole path."""
    source, _, attribute = path.rpartition(":")
    if not source.endswith(".py"):
        return path
    return f"{(base / Path(source).expanduser()).resolve()}:{attribute}"


def _import_module(name: str, what: str) -> ModuleType:
    # Parent by parent, to tell a missing module from one whose own imports fail.
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
    # `find_spec` raises if the parent is a module and no package.
    if parent is not None and not hasattr(parent, "__path__"):
        return False
    return importlib.util.find_spec(module) is not None


def _import_file(file: Path, what: str) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        beside = [item.name for item in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise RecipeError(f"there is no file {str(file)!r}", where=what, fix=_suggest(file.name, beside))
    # The name has to be unique per path: two folders may each have a `net.py`.
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    name = f"headway_user_{digest}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pickle look their module up in sys.modules.
    sys.modules[name] = module
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
    # Show a short list whole, but of a long one (torch has 1,400 names) only a close match.
    names = list(known)
    return suggest_nearest(word, names, only_close=len(names) > 20)
