"""One family of errors: what happened, where, and how to mend it.

The command line prints `str(error)` and leaves with `error.exit_status`; the library raises them as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headway.core.printable import escape_controls


class HeadwayError(Exception):
    """What went wrong, where it was seen, and how to mend it.

    Args:
        what: a sentence, without a full stop at its end.
        where: a file, a key or a step; empty where the sentence says it already.
        fix: what the user can do about it, as an order.
    """

    exit_status = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        # A place is a name, often of a file of somebody else: it stays in its line, and moves no cursor.
        text = f"{escape_controls(where, lines=False)}: {what}" if where else what
        super().__init__(" ".join(_end_sentence(part) for part in (text, fix) if part))


def _end_sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "\n")) else f"{text}."


class UsageError(HeadwayError):
    """Wrong usage: an argument, a path given by the user, a folder that exists already."""

    exit_status = 2


class RecipeError(UsageError):
    """A recipe that cannot be run: an unknown key, a wrong type, an impossible combination."""


class DataError(HeadwayError):
    """Data that cannot be used: a damaged record, a file that is no image, shards of different packs."""


class CheckpointError(HeadwayError):
    """A checkpoint that is torn, damaged or of another run."""


class TrainingError(HeadwayError):
    """A run that cannot go on: a non-finite loss, a network that does not fit its task."""


class CommunicationError(HeadwayError):
    """A collective that failed, timed out, or was issued in another order by another rank."""


class CollectiveTimeoutError(CommunicationError):
    """A collective waited for longer than its time-out: some rank is alive and does not come."""


class GenerationEndedError(CommunicationError):
    """This generation is over: a member was lost, or a new one waits. The members go on in the next generation."""


class FencedError(CommunicationError):
    """This process was declared lost while it was silent; the others went on without it, and it has to end."""


class UserCodeError(HeadwayError):
    """The user's own code failed; the cause carries their traceback, which is always shown."""


def suggest_nearest(word: str, known: Iterable[str], *, only_close: bool = False, prefix: str = "") -> str:
    """`did you mean 'x'?` for the closest known word, or the list of known words where none is close.

    Args:
        only_close: nothing where none is. prefix: of the word that is meant.
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {prefix + close[0]!r}?"
    return f"Known here: {', '.join(names)}." if names and not only_close else ""
