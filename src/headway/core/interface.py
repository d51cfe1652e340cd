"""The names of options in messages: those of the command line, or those of the Python functions that do the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_from_python: ContextVar[bool] = ContextVar("headway_from_python", default=False)


@contextmanager
def use_python_names() -> Iterator[None]:
    """Makes messages name arguments of Python functions inside the block, in place of options of commands."""
    token = _from_python.set(True)
    try:
        yield
    finally:
        _from_python.reset(token)


def choose_wording(*, command: str, python: str) -> str:
    """Returns the wording for what the user called: a command of the shell, or a Python function."""
    return python if _from_python.get() else command
