"""Output of all verbs: the result on standard output, messages on standard error."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from headway.core.printable import escape_controls

# The option of every verb with a result, and the argument of every verb that takes a recipe.
Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Override recipe values, for example `batch=128`.")
]


def say(text: str) -> None:
    """Prints a message on standard error, with control characters escaped."""
    # Names of files and classes come from the user's data: an escape sequence in them could change the terminal.
    print(escape_controls(text), file=sys.stderr, flush=True)


def print_result(result: Any, as_json: bool, text: str) -> None:
    """Prints the result on standard output, as one line of JSON or as text."""
    # JSON escapes control characters itself.
    print(json.dumps(result, default=str) if as_json else escape_controls(text), flush=True)


def can_print(text: str) -> bool:
    """Returns True if the encoding of standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
