"""Output of all verbs: the result on standard output, messages on standard error."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated, Any

import typer

from headway.core.printable import escape_controls

LOG = logging.getLogger("headway.cli")

# The option of every verb with a result, and the argument of every verb that takes a recipe.
Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
Target = Annotated[str | None, typer.Option(help="Target of an export: onnx, int8, openvino... Default: onnx.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Override recipe values, for example `batch=128`.")
]


def print_result(result: Any, as_json: bool, text: str) -> None:
    """Prints the result on standard output, as one line of JSON or as text."""
    # JSON escapes control characters itself.
    print(json.dumps(result, default=str) if as_json else escape_controls(text), flush=True)


def list_given_options(context: typer.Context) -> set[str]:
    """Returns the names of the arguments and options on the command line; a default must not look like a choice."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def can_print(text: str) -> bool:
    """Returns True if the encoding of standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
