"""What every verb says to its user, and how: the result on standard output, all else on standard error."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from headway.core.printable import escape_controls

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]


def say(text: str) -> None:
    """A message for the user, apart from the result; control characters of names in it are shown, not obeyed."""
    print(escape_controls(text), file=sys.stderr, flush=True)


def print_result(result: Any, as_json: bool, text: str) -> None:
    """The result, as one line of JSON or as a text."""
    print(json.dumps(result, default=str) if as_json else escape_controls(text), flush=True)


def can_print(text: str) -> bool:
    """Whether the encoding of standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
