"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError

MIB = 1 << 20
_OPTIONS = {
    "deadline_ms": "--deadline-ms",
    "image_pixels": "--megapixels",
    "read_s": "--read-timeout",
    "drain_s": "--drain",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Limits of `headway serve`.

    Attributes:
        batch: most images that are computed at once.
        queue: most images that wait; a request beyond is answered 503.
        threads: threads that compute, and threads that decode; None: as many as this process may use.
        deadline_ms: deadline of a request that names none; None: it may wait as long as it takes.
        body_bytes: longest body of a request.
        held_bytes: most bytes of all bodies that are in memory at once; a request beyond is answered 503.
        image_pixels: largest image, width x height, that is decoded. A small file can describe a huge image.
        images: most images in one request. Together they have at most `decoded_pixels`.
        read_s: seconds that a client may take to send a request.
        idle_s: seconds after which a connection without a request is closed.
        connections: most open connections. Beyond, the one that has been idle longest is closed.
        linger_s: seconds that a server which stops still waits for requests on connections that are open and idle.
        drain_s: seconds after which a server that stops drops what is still unanswered.

    Raises:
        UsageError: a limit is not above 0, or `queue` or `images` cannot hold a batch.
    """

    batch: int = 32
    queue: int = 256
    threads: int | None = None
    deadline_ms: float | None = None
    body_bytes: int = 16 * MIB
    held_bytes: int = 256 * MIB
    image_pixels: int = 50_000_000
    images: int = 256
    read_s: float = 15.0
    idle_s: float = 75.0
    connections: int = 4096
    linger_s: float = 1.0
    drain_s: float = 30.0

    @property
    def decoded_pixels(self) -> int:
        """Most pixels of all images of a request, and of a batch, unless one request has more: seconds of decoding."""
        return 2 * self.image_pixels

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{value:g} is not above 0", where=_OPTIONS.get(name, name), fix="Give more than 0.")
        if self.queue < self.batch:
            what = f"a queue of {self.queue} images cannot hold a batch of {self.batch}"
            raise UsageError(what, fix=f"Set --queue to at least {self.batch}, or lower --batch.")
        if self.held_bytes < self.body_bytes:
            what = f"{self.held_bytes:,} bytes for all bodies are fewer than the {self.body_bytes:,} of one"
            raise UsageError(what, fix="Lower --body-mb.")
