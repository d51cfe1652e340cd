"""Digests of bodies: RFC 9530 (Content-Digest, Repr-Digest, Want-Repr-Digest), and the checksums of tus.

Content-Digest is about the bytes of one message, Repr-Digest about the whole upload.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.structured_fields import format_bytes, parse_bytes, parse_weights

# MD5 and SHA-1 are of no use against somebody who chooses the bytes; tus asks for SHA-1, to find damage.
ALGORITHMS = {"sha-256": "sha256", "sha-512": "sha512"}
TUS_ALGORITHMS = ("sha256", "sha1")


@final
@dataclass(frozen=True, slots=True)
class Expected:
    """A digest that bytes have to have.

    Attributes:
        algorithm: of hashlib.
        value: the digest.
        kind: of the problem if it is another one.
    """

    algorithm: str
    value: bytes
    kind: str = "wrong-digest"

    def start(self) -> Any:
        """Returns a hash object."""
        return hashlib.new(self.algorithm)

    def check_bytes(self, data: bytes) -> None:
        """Raises ProblemError (400, 460 for tus) if the bytes have another digest."""
        self.check(hashlib.new(self.algorithm, data).digest())

    def check(self, digest: bytes) -> None:
        """Raises ProblemError (400, 460 for tus) if the digest is another one."""
        if not hmac.compare_digest(digest, self.value):
            what = f"the {self.algorithm} of the bytes is {digest.hex()}, not {self.value.hex()}"
            raise refuse(self.kind, what, "Send them again.")


def read_digest(name: str, text: str | None) -> Expected | None:
    """Returns the digest that a header asks for; None if there is none with a known algorithm.

    Raises:
        ProblemError: the header is malformed (400).
    """
    values = parse_bytes(name, text)
    for algorithm, local in ALGORITHMS.items():
        if algorithm in values:
            expected = Expected(local, values[algorithm])
            if len(expected.value) != expected.start().digest_size:
                raise refuse("malformed", f"{name} has {len(expected.value)} bytes as {algorithm}")
            return expected
    return None


def read_checksum(text: str | None) -> Expected | None:
    """Returns the checksum that tus' Upload-Checksum asks for. Raises ProblemError (400)."""
    if text is None:
        return None
    algorithm, _, value = text.partition(" ")
    if algorithm not in TUS_ALGORITHMS:
        known = ", ".join(TUS_ALGORITHMS)
        raise refuse("malformed", f"Upload-Checksum has the algorithm {algorithm[:20]}", f"Use one of {known}.")
    try:
        digest = base64.b64decode(value.strip(), validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != hashlib.new(algorithm).digest_size:
        raise refuse(
            "malformed", "Upload-Checksum is not valid", "Send the algorithm, a blank, and the digest in base64."
        )
    return Expected(algorithm, digest, "checksum")


def choose_answer_digest(headers: Mapping[str, str]) -> str | None:
    """Returns the algorithm for Repr-Digest of an answer; None if the client wants none. Raises ProblemError (400)."""
    weights = parse_weights("Want-Repr-Digest", headers.get("want-repr-digest"))
    if not weights:
        return "sha-256"
    known = {name: weights.get(name, 0) for name in ALGORITHMS}
    best = max(known, key=lambda name: known[name])
    return best if known[best] else None


def format_digest(algorithm: str, data: bytes) -> str:
    """Returns the value of Repr-Digest for the bytes of an answer."""
    return format_bytes(algorithm, hashlib.new(ALGORITHMS[algorithm], data).digest())
