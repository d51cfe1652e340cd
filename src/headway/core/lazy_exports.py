"""Public names of a package that are imported on first use (PEP 562), so that `import headway` stays fast."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def build_lazy_exports(
    package: str, homes: Mapping[str, str], *, rooms: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Builds `__getattr__` and `__dir__` for a package.

    Args:
        package: full name of the package.
        homes: module inside the package that defines each public name.
        rooms: subpackages that are public as a whole.
    """

    # Python calls a module's `__getattr__` only for names that are not there, so each import happens once.
    def get_attribute(name: str) -> Any:
        if name in rooms:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    def list_names() -> list[str]:
        return sorted([*homes, *rooms])

    return get_attribute, list_names
