"""Checks names and docstrings of `src`: functions are verbs, a docstring's first line is complete in itself, and the
names that it refers to exist.

`make lint` runs it. It prints FILE:LINE and how to fix what it finds, and fails if there is anything.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
REFERENCE = re.compile(r"\bsee `([\w.]+)`")
OPENINGS = re.compile(r"(Of|What|Where|Whether)\b")
# Participles that do not end in "ed", and prepositions. Words that are also a base form ("read", "set") are absent.
IRREGULAR = re.compile(
    r"""beside|between|begun|bound|brought|built|bought|caught|chosen|done|drawn|fed|felt|forgotten|found|given|gone
    |grown|held|hidden|kept|known|laid|left|lent|lost|made|meant|met|of|paid|said|seen|sent|shown|slept|sold|spent|stood
    |sunk|taken|taught|thought|thrown|told|under|understood|within|woken|won|worn|written""",
    re.VERBOSE,
)
# Base forms that end in "ed"; then names that Horovod and torch have given: `grouped_allreduce`, `named_parameters`.
ALLOWED = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "shred", "speed", "grouped", "named"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_functions(tree: ast.AST) -> Iterator[Function]:
    """Yields each function that is no property: a property is a value, so its name is a noun."""
    for node in ast.walk(tree):
        if isinstance(node, Function) and not any(
            re.search(r"property|\.setter", ast.unparse(one)) for one in node.decorator_list
        ):
            yield node


def is_participle(name: str) -> bool:
    """Tells whether a function's name begins with a participle or a preposition in the place of a verb."""
    word = name.strip("_").split("_")[0]
    return word not in ALLOWED and (IRREGULAR.fullmatch(word) is not None or word.endswith("ed"))


def find_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and text of every string that documents a module, a class, a function or a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def list_names(tree: ast.AST) -> Iterator[str]:
    """Yields every name that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def check(path: Path, known: set[str]) -> Iterator[str]:
    """Yields a sentence for each fault of a file; `known`: names that may be referred to."""
    tree = ast.parse(path.read_text())
    for function in find_functions(tree):
        if is_participle(function.name):
            yield f"{path}:{function.lineno}: `{function.name}` is no verb. Name what it does, such as `build_loader`."
    for line, text in find_docstrings(tree):
        if found := OPENINGS.match(text):
            yield f'{path}:{line}: the docstring begins with "{found[0]}". Say what the thing is, or what it does.'
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for name in REFERENCE.findall(line):
            if not known.issuperset(name.split(".")):
                yield f"{path}:{number}: see `{name}`: there is no such name. Write its present one."


def main() -> int:
    """Prints all faults; returns 1 if there are any."""
    paths = sorted(SOURCE.rglob("*.py"))
    known = {part for path in paths for part in path.relative_to(SOURCE).with_suffix("").parts}
    known |= {name for path in paths for name in list_names(ast.parse(path.read_text()))}
    faults = [fault for path in paths for fault in check(path, known)]
    print("\n".join(faults) or "prose: functions are verbs, docstrings are complete, names exist")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
