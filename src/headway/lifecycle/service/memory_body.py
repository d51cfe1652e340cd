"""MemoryBody: a short list of changes, in memory. Nobody can continue it, so it needs neither a file nor the disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import final

from headway.lifecycle.service.upload_plan import UploadPlan

MEMORY_BYTES = 64 << 10
"""Longest body that is kept in memory: as many bytes as uvicorn reads ahead for each connection anyway."""


@final
@dataclass(frozen=True, slots=True)
class MemoryBody:
    """The body of a request that came as a whole; `Requests` takes it as it takes an `Upload`."""

    plan: UploadPlan
    data: bytes

    def compute_sha256(self) -> str:
        """Returns the SHA-256 in hexadecimal. Raises ProblemError (400) if the client has announced another digest."""
        if (expected := self.plan.expected) is not None:
            expected.check_bytes(self.data)
        return hashlib.sha256(self.data).hexdigest()
