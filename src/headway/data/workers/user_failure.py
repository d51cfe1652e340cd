"""UserFailure: an error of the user's code in a worker process, brought to the process that trains."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn, final

from headway.core.errors import UserCodeError

_HEADWAY = f"{Path(__file__).resolve().parents[2]}/"
_LIBRARIES = tuple(f"{Path(sysconfig.get_paths()[name]).resolve()}/" for name in ("stdlib", "platstdlib"))
_PACKAGES = ("/site-packages/", "/dist-packages/")


class WorkerTraceback(Exception):  # noqa: N818
    """Traceback of an error in another process, as text."""


@final
@dataclass(frozen=True, slots=True)
class UserFailure:
    """An error as plain text, because the error itself may not survive the way between processes.

    Attributes:
        what: the failing call, such as `sample 17 of your data set`.
        place: file and line in the user's code.
    """

    what: str
    error: str
    place: str
    text: str

    @staticmethod
    def describe(what: str, error: BaseException) -> UserFailure:
        """Describes an error that is being handled."""
        text = "".join(traceback.format_exception(error))
        return UserFailure(what, f"{type(error).__name__}: {error}", find_user_place(error), text)

    def raise_error(self) -> NoReturn:
        """Raises the error as UserCodeError; its cause shows the traceback of the worker."""
        raise UserCodeError(f"{self.what} failed: {self.error}", where=self.place) from WorkerTraceback(
            f"in a worker\n{self.text}"
        )


def find_user_place(error: BaseException) -> str:
    """Returns `file:line` of the innermost line of the user's own code, or of any line if there is none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in frames if is_user_file(place[0])]
    if not frames:
        return ""
    file, line = (own or frames)[-1]
    return f"{file}:{line}"


@cache
def is_user_file(file: str) -> bool:
    """Returns True if a source file belongs to the user: to no package, to no library and not to Headway."""
    if file.startswith("<"):
        return False
    path = str(Path(file).resolve())
    return not path.startswith((_HEADWAY, *_LIBRARIES)) and not any(folder in path for folder in _PACKAGES)
