"""Settings of the data service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError

MIB = 1 << 20
GIB = 1 << 30


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSettings:
    """Limits of `headway serve-data`.

    Attributes:
        body_bytes: longest body or upload; beyond, the answer is 413.
        json_bytes: longest list of changes as JSON, which is parsed in memory.
        image_bytes: longest image file.
        image_pixels: largest image, width x height, that is decoded. A small file can describe a huge image.
        files: most files in one request.
        job_files: files from which a request is answered 202 and goes on as a job.
        open_uploads: most unfinished uploads of one token; beyond, the answer is 429.
        upload_age_s: seconds after which an unfinished upload, and the answer of a finished one, are removed.
        key_age_s: seconds for which an Idempotency-Key is kept.
        jobs: most jobs that run at once.
        queued_jobs: most jobs that wait; beyond, the answer is 429.
        refusals_minute: requests with a wrong token from one address that are answered in a minute; beyond, 429.
        read_s: seconds in which a client has to send the headers, and then each 64 KiB of a body.
        idle_s: seconds after which a connection without a request is closed.
        connections: most open connections.
        linger_s: seconds that a server which stops still waits for requests on connections that are open and idle.
        drain_s: seconds after which a server that stops drops what is still unanswered.

    Raises:
        UsageError: a limit is not above 0.
    """

    body_bytes: int = 8 * GIB
    json_bytes: int = 16 * MIB
    image_bytes: int = 64 * MIB
    image_pixels: int = 100_000_000
    files: int = 1_000_000
    job_files: int = 1_000
    open_uploads: int = 32
    upload_age_s: float = 86_400.0
    key_age_s: float = 86_400.0
    jobs: int = 2
    queued_jobs: int = 16
    refusals_minute: int = 60
    read_s: float = 15.0
    idle_s: float = 75.0
    connections: int = 1024
    linger_s: float = 1.0
    drain_s: float = 15.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}", fix="Set it to more than 0.")
