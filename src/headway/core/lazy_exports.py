"""Public names of a package that are imported on first use (PEP 562), so that `import headway` stays fast."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def build_lazy_exports(package: str, path: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Builds `__getattr__` and `__dir__` for a package, whose public names stand in its `__init__.pyi`.

    Args:
        package: full name of the package.
        path: of its `__init__.py`.
    """
    # Type checkers read the same file, so each name is listed once: `from MODULE import NAME as NAME`.
    stub = Path(path).with_suffix(".pyi").read_text(encoding="utf-8")
    homes = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", stub, re.MULTILINE)}

    # Python calls a module's `__getattr__` only for names that are not there, so each import happens once.
    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # A name from the package itself is a subpackage, public as a whole: `headway.optim`.
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    return get_attribute, lambda: sorted(homes)
