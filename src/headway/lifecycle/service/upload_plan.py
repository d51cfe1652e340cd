"""JSON files beside the bytes of an upload: its first request, and the job that uses the bytes."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import Any, final

from headway.core.untrusted_json import (
    JsonError,
    expect_entries,
    is_any_number,
    is_sha256,
    is_text,
    is_whole_number,
    parse_object,
)
from headway.lifecycle.service.digests import Expected


def _is_optional_text(value: Any) -> bool:
    return value is None or is_text(value)


_CHECKS = {
    "id": (is_text, "a text"),
    "principal": (is_text, "a text"),
    "target": (is_text, "a text"),
    "content_type": (is_text, "a text"),
    "created_s": (is_any_number, "a number"),
    "length": (lambda value: value is None or is_whole_number(value), "a length"),
    "if_match": (lambda value: value is None or (isinstance(value, list) and all(map(is_text, value))), "a list"),
    "key": (_is_optional_text, "a text"),
    "digest_algorithm": (_is_optional_text, "a text"),
    "digest": (_is_optional_text, "a text"),
    "is_resumable": (lambda value: isinstance(value, bool), "a truth value"),
    "message": (is_text, "a text"),
}
_JOB_CHECKS = {
    "id": (is_text, "a text"),
    "fingerprint": (is_sha256, "a SHA-256"),
    "expected": (_is_optional_text, "a text"),
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class UploadPlan:
    """An upload as its first request describes it.

    Attributes:
        principal: name of the token that began it.
        target: data set that the bytes are for.
        content_type: of the whole upload.
        length: bytes of the whole upload; None: not known yet.
        if_match: entity tags of the first request; None: it had no If-Match.
        key: its Idempotency-Key; None: it had none.
        message: what the client says about its change.
        is_resumable: False for a request that comes as a whole: its client cannot continue it.
        digest_algorithm, digest: what the whole upload has to have, the digest in hexadecimal; None: nothing was said.
        id: random, so that nobody can guess it.
        created_s: seconds since 1970.
    """

    principal: str
    target: str
    content_type: str
    length: int | None = None
    if_match: tuple[str, ...] | None = None
    key: str | None = None
    digest_algorithm: str | None = None
    digest: str | None = None
    is_resumable: bool = True
    message: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created_s: float = field(default_factory=time.time)

    @property
    def expected(self) -> Expected | None:
        """Digest that the whole upload has to have."""
        if self.digest_algorithm is None or self.digest is None:
            return None
        return Expected(self.digest_algorithm, bytes.fromhex(self.digest))

    def to_json(self) -> str:
        """Returns the content of its file."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: bytes) -> UploadPlan:
        """Reads the content of its file. Raises JsonError."""
        tree = parse_object(text)
        expect_entries(tree, _CHECKS)
        if extra := tree.keys() - _CHECKS.keys():
            raise JsonError(f"it has {min(extra)[:40]!r}")
        tags = tree["if_match"]
        return UploadPlan(**tree | {"if_match": None if tags is None else tuple(tags)})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class JobNote:
    """The job that uses the bytes of an upload.

    Attributes:
        id: of the job.
        fingerprint: SHA-256 of the bytes.
        expected: ID of the version that they change; None: any.
    """

    id: str
    fingerprint: str
    expected: str | None = None

    def to_json(self) -> str:
        """Returns the content of its file."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: bytes) -> JobNote:
        """Reads the content of its file. Raises JsonError."""
        tree = parse_object(text)
        expect_entries(tree, _JOB_CHECKS)
        return JobNote(id=tree["id"], fingerprint=tree["fingerprint"], expected=tree["expected"])
