"""Every name of Headway that tests, benches, examples or documentation import exists.

mypy checks `src` alone, and many of these imports stand inside strings: programs that a test starts, blocks of a page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
# The statement may follow a quote, and its names may stand in brackets over several lines.
IMPORT = re.compile(
    r"""(?<![\w.])(?:
    from\s+(?P<module>headway(?:\.\w+)*)\s+import\s+(?P<names>\([^)]*\)|\w+(?:\ as\ \w+)?(?:,\ *\w+(?:\ as\ \w+)?)*)
    |import\s+(?P<modules>headway(?:\.\w+)*(?:\ as\ \w+)?(?:,\ *headway(?:\.\w+)*)*)
    )""",
    re.VERBOSE,
)


def list_imports(text: str) -> Iterator[tuple[str, str]]:
    """Yields (module, name) for each import of Headway in a text; the name is empty for `import headway.core`."""
    for found in IMPORT.finditer(text):
        if found["modules"]:
            yield from ((one.split()[0], "") for one in found["modules"].split(","))
        else:
            names = re.sub(r"#.*", "", found["names"]).strip("()").split(",")
            yield from ((found["module"], one.split()[0]) for one in names if one.strip())


@cache
def list_names(module: str) -> frozenset[str] | None:
    """Returns the names of a module, from its source alone; None if there is no such module."""
    path = SOURCE.joinpath(*module.split("."))
    # The public names of a package that loads them lazily are in its stub.
    stub = path / "__init__.pyi"
    file = stub if stub.is_file() else path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    names = {one.stem for one in path.glob("*")} if path.is_dir() else set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return frozenset(names)


def list_faults(text: str) -> list[str]:
    """Lists the imports of a text that would fail."""
    faults = []
    for module, name in list_imports(text):
        names = list_names(module)
        if names is None:
            faults.append(f"there is no {module}")
        elif name and name not in names:
            faults.append(f"{module} has no {name}")
    return faults


@pytest.mark.parametrize("place", ["tests", "bench", "examples", "docs", "README.md"])
def test_every_imported_name_exists(place: str) -> None:
    path = ROOT / place
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.suffix in (".py", ".md")]
    assert files
    faults = {str(one.relative_to(ROOT)): list_faults(one.read_text()) for one in files if one != Path(__file__)}
    assert {name: found for name, found in faults.items() if found} == {}


def test_a_name_that_is_gone_is_found() -> None:
    assert list_faults("import headway, headway.core.errors as e") == []
    assert list_faults("'from headway.core.errors import DataError, no_such_name; x'") == [
        "headway.core.errors has no no_such_name"
    ]
    text = "from headway.core.errors import (\n    DataError,  # a reason\n    gone as here,\n)\nimport headway.gone"
    assert list_faults(text) == ["headway.core.errors has no gone", "there is no headway.gone"]
    assert list_faults("from headway import Loader, open") == []
