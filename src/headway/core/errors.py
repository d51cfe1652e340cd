"""All errors of Headway: each message says what happened, where, and how to fix it.

The command line prints `str(error)` and exits with `error.exit_status`; the library raises them as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headway.core.printable import escape_controls, hide_credentials


class HeadwayError(Exception):
    """Base of all errors that a user may see.

    Args:
        what: a sentence without its full stop.
        where: a file, a key or a step; empty if the sentence names it.
        fix: what the user can do, in the imperative.
    """

    # Exit statuses of the command line: 1 for failures of a run, 2 for wrong usage, as argparse and typer do.
    exit_status = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        # Whatever quotes a URL of a configuration: messages get into logs and bug reports.
        what, where, fix = map(hide_credentials, (what, where, fix))
        self.what, self.where, self.fix = what, where, fix
        # `where` is often the name of a foreign file: newlines and escape sequences in it must not reach the terminal.
        text = f"{escape_controls(where, lines=False)}: {what}" if where else what
        # The parts are joined here once, so that `str(error)` is the same in a log, a traceback and on the terminal.
        super().__init__(" ".join(_end_sentence(part) for part in (text, fix) if part))


def _end_sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "\n")) else f"{text}."


class UsageError(HeadwayError):
    """Wrong usage: an argument, a path that the user gave, a folder that exists already."""

    exit_status = 2


class RecipeError(UsageError):
    """The recipe cannot be run: an unknown key, a wrong type, an impossible combination."""


class DataError(HeadwayError):
    """The data cannot be used: a damaged record, a file that is not an image, shards of different packs."""


class CheckpointError(HeadwayError):
    """The checkpoint is incomplete, damaged or of another run."""


class TrainingError(HeadwayError):
    """The run cannot continue: a non-finite loss, a network that does not fit its task."""


class CommunicationError(HeadwayError):
    """A collective failed, timed out, or was issued in another order by another rank."""


class CollectiveTimeoutError(CommunicationError):
    """A collective exceeded its time-out: some rank is alive and did not join it."""


class GenerationEndedError(CommunicationError):
    """This generation is over: a member was lost or a new one waits. The members continue in the next generation."""


class FencedError(CommunicationError):
    """This process was declared lost while it was silent. The others continued without it, so it has to exit."""


class UserCodeError(HeadwayError):
    """The user's own code failed. The cause carries its traceback, which is always shown."""


_MIN_SHORT_FORM = 3
"""Letters from which the beginning of a known word stands for it."""


def suggest_nearest(word: str, known: Iterable[str], *, only_close: bool = False, prefix: str = "") -> str:
    """Returns "Did you mean 'x'?" for the closest known word, or a list of the known words if none is close.

    Args:
        only_close: return an empty text if none is close.
        prefix: text before the suggested word, such as the key above it.
    """
    # 0.6 is difflib's default: `momentm` finds `momentum`, and `lr` does not find `loss`.
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    # `acc` is short for `accuracy`, and less similar than 0.6.
    if not close and len(word) >= _MIN_SHORT_FORM:
        longer = [name for name in names if name.startswith(word)]
        close = longer if len(longer) == 1 else []
    if close:
        return f"Did you mean {prefix + close[0]!r}?"
    return f"Known here: {', '.join(names)}." if names and not only_close else ""


def list_similar(pattern: str, names: Iterable[str]) -> str:
    """Lists three names that look like a pattern that matches none of them, or the first ones."""
    known = list(names)
    return ", ".join(difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3])
