"""Base of the records that Headway writes as JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, read_text, write_atomically
from headway.core.untrusted_json import JsonError, parse_object
from headway.core.value_errors import describe_error

# Version of the Workload and Profile schemas; files of another version are refused.
VERSION = 1


class JsonRecord(BaseModel):
    """Base of all records in JSON files: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def write(self, path: Path) -> None:
        """Writes the record as JSON."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")


R = TypeVar("R", bound=JsonRecord)


def read_record(path: Path, kind: type[R], fix: str) -> R:
    """Reads a record that `write` wrote; `fix` says how to make one.

    Raises:
        UsageError: the file cannot be read, or is no such record of this version.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        what = f"it cannot be read ({describe_os_error(error)})"
        raise UsageError(what, where=str(path), fix=fix) from None
    no_record = f"this is not a {kind.__name__} of version {VERSION}"
    # pydantic's own JSON parser accepts duplicate keys and any depth.
    try:
        parse_object(text)
    except JsonError as error:
        raise UsageError(f"{no_record}: {error}", where=str(path), fix=fix) from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        what = f"{no_record} ({describe_error(error.errors(include_url=False)[0])})"
        raise UsageError(what, where=str(path), fix=fix) from None
