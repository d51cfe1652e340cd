"""What every verb says to its user, and how: the result on standard output, all else on standard error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.core.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]


def say(text: str) -> None:
    """A message for the user, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def writable(*files: Path | None) -> None:
    """Raises UsageError: a file that is asked for cannot be written there. It is called before the work, not after."""
    for path in files:
        if path is None:
            continue
        folder = path.expanduser().resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError("nothing can be written there", where=str(path), fix="Name another place.")


def show(result: Any, as_json: bool, text: str) -> None:
    """The result, as one line of JSON or as a text."""
    print(json.dumps(result, default=str) if as_json else text, flush=True)
