"""Mistakes that newcomers make, and what Headway answers. `python -m tests.journeys.mistakes` prints both as a table.

Each answer has to name what is wrong, where, and how to fix it; `test_mistakes.py` holds it to that.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from contextlib import chdir
from pathlib import Path

import numpy as np
from PIL import Image
from tests._support import NET, headway, packed_digits
from tests.journeys._data_mistakes import DATA_MISTAKES, USER
from tests.journeys._mistake import GOOD_RECIPE, Mistake
from tests.journeys._recipe_mistakes import RECIPE_MISTAKES

MISTAKES = [*RECIPE_MISTAKES, *DATA_MISTAKES]


def write_image(path: Path) -> None:
    """Writes a colour image of 16 x 16 pixels, a different one for each path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(zlib.crc32(os.fsencode(path))).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(path)


def build_workshop(folder: Path) -> Path:
    """Makes the folder of a newcomer whose data and recipe are right."""
    packed_digits(folder, per_class=24)
    for name, text in (("recipe.yaml", GOOD_RECIPE), ("net.py", NET), ("user.py", USER)):
        (folder / name).write_text(text)
    return folder


def find_answer(mistake: Mistake, workshop: Path, here: Path) -> str:
    """Makes a mistake in the empty folder `here`, and returns what Headway says: an error's sentence, or warnings."""
    for path in workshop.iterdir():
        # Links: nothing of a mistake may write into the good data.
        os.symlink(path, here / path.name) if path.is_dir() else shutil.copy(path, here / path.name)
    for name in mistake.images:
        write_image(here / name)
    for name, text in mistake.texts.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    for name, original in mistake.copies.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(here / original, here / name)
    with chdir(here):
        said = headway(*_split_command(mistake.command), status=mistake.status)
    assert "Traceback" not in said.err, said.err
    answer = said.err.partition("headway: ")[2] if mistake.status else said.err
    for folder in (here.resolve(), here, workshop.resolve(), workshop):
        answer = answer.replace(f"{folder}/", "").replace(str(folder), ".")
    return answer.strip()


def _split_command(command: str) -> list[str]:
    """Splits at blanks that are not inside braces, as a shell with quotes does."""
    words: list[str] = []
    for word in command.split(" "):
        is_inside = bool(words) and words[-1].count("{") > words[-1].count("}")
        words[-1:] = [f"{words[-1]} {word}"] if is_inside else [*words[-1:], word]
    return words


def _print_table() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        workshop = build_workshop(folder / "workshop")
        print("| mistake | command | answer |\n|---|---|---|")
        for number, mistake in enumerate(MISTAKES):
            here = folder / str(number)
            here.mkdir()
            lines = find_answer(mistake, workshop, here).splitlines()
            # Of warnings among other lines of a command, those that are meant.
            lines = lines if mistake.status else [line for line in lines if mistake.what in line]
            answer = " ".join(line.strip() for line in lines).replace("|", "\\|")
            print(f"| {mistake.name} | `headway {mistake.command}` | {answer} |")


if __name__ == "__main__":
    _print_table()
