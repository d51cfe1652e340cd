"""One mistake of a newcomer, and what it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

GOOD_RECIPE = """
data: {train: digits.packed/train, eval: digits.packed/eval, threads: 1}
model: {factory: 'net.py:linear'}
optimizer: {name: sgd, lr: 0.02}
batch: 30
epochs: 2
precision: fp32
log_every_steps: 1
"""


@final
@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake, made in the newcomer's folder, which has digits/, digits.packed, recipe.yaml and user.py.

    Attributes:
        name: what the newcomer did, for the table.
        command: the command line, without `headway`.
        what: a part of the answer: what is wrong. where: the place. fix: how to mend it.
        images: images to write first. texts: files to write, by name. copies: files to copy, by the name of the copy.
        status: exit status; 0: the answer is a warning.
        trains: it takes a training run to see it.
    """

    name: str
    command: str
    what: str
    where: str
    fix: str
    images: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    status: int = 2
    trains: bool = False


def set_key(name: str, override: str, what: str, fix: str, where: str = "command line: ") -> Mistake:
    """A mistake in a value for the recipe, on the command line."""
    return Mistake(name=name, command=f"train recipe.yaml {override}", what=what, where=where, fix=fix)


def edit_recipe(name: str, before: str, after: str, what: str, fix: str) -> Mistake:
    """A mistake in the recipe's file."""
    assert before in GOOD_RECIPE
    texts = {"mine.yaml": GOOD_RECIPE.replace(before, after)}
    return Mistake(name=name, command="train mine.yaml", what=what, where="mine.yaml", fix=fix, texts=texts)


def pack_list(name: str, text: str, what: str, where: str, fix: str) -> Mistake:
    """A mistake in a list of the images a.jpg and b.jpg."""
    texts = {"list.csv": text}
    images = ("a.jpg", "b.jpg")
    return Mistake(
        name=name, command="pack list.csv out", what=what, where=where, fix=fix, images=images, texts=texts, status=1
    )


def pack_photos(name: str, images: Sequence[str], what: str, fix: str, **more: Any) -> Mistake:
    """A mistake in a folder of photographs."""
    command, where = more.pop("command", "pack photos out"), more.pop("where", "photos: ")
    paths = tuple(f"photos/{image}" for image in images)
    return Mistake(name=name, command=command, what=what, where=where, fix=fix, images=paths, **{"status": 1} | more)


def use_code(
    name: str, override: str, what: str, where: str, fix: str, *, status: int = 2, trains: bool = True
) -> Mistake:
    """A mistake in the newcomer's own code, or one that a run shows."""
    command = f"train recipe.yaml {override}"
    return Mistake(name=name, command=command, what=what, where=where, fix=fix, status=status, trains=trains)
