"""The load that training puts on storage: many objects of very different size, read in random order, seldom written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench._storage.store import Store
from headway.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Load:
    """Objects, and the mixture of operations on them. Equal loads give equal objects and operations."""

    objects: int
    mean_bytes: float
    # Standard deviation of the sizes over their mean.
    variation: float
    # Reads for one write; None: nothing is written.
    reads_per_write: int | None
    seed: int = 0
    # Of the order in which they are read; clients that read the same objects take different ones.
    order_seed: int = 0
    # The client that reads and writes; others have other names.
    client: str = "alone"

    def draw_sizes(self) -> NDArray[np.int64]:
        """Bytes of each object, log-normal: file sizes of images have a long tail above and none below 0."""
        sigma = np.log1p(self.variation**2) ** 0.5
        mu = np.log(self.mean_bytes) - sigma**2 / 2
        return np.maximum(1, np.random.default_rng(self.seed).lognormal(mu, sigma, self.objects)).astype(np.int64)

    def list_operations(self, stream: int, streams: int = 1) -> Iterator[tuple[bool, int]]:
        """(is a write, object) of one of several streams, without end.

        Together the streams read every object once before any is read again, as in an epoch.
        """
        order, random = np.random.default_rng(self.order_seed), np.random.default_rng((self.order_seed, stream))
        done = 0
        while True:
            for number in order.permutation(self.objects)[stream::streams]:
                if self.reads_per_write and done % (self.reads_per_write + 1) == self.reads_per_write:
                    yield True, int(random.integers(self.objects))
                    done += 1
                yield False, int(number)
                done += 1


@dataclass
class Count:
    """What one stream did."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    # Seconds of each read.
    taken: list[float] = field(default_factory=list)


def name_object(number: int) -> str:
    """Names an object; a thousand of them lie in one folder."""
    return f"objects/{number // 1000:06d}/{number % 1000:03d}"


def lay_objects(load: Load, store: Store) -> int:
    """Writes the objects that are not there yet. Returns how many this client has written.

    Several clients that do it at once share the work: each goes its own way through the objects, and looks for each of
    them just before it writes it.

    Raises UsageError if objects are missing where nothing can be written.
    """
    sizes, written, missing = load.draw_sizes(), 0, 0
    content = np.random.default_rng(load.seed).bytes(int(sizes.max()))
    way = np.random.default_rng(list(load.client.encode())).permutation(load.objects)
    for number in way.tolist():
        if store.measure(name_object(number)) == sizes[number]:
            continue
        missing += 1
        if not store.is_read_only:
            store.write(name_object(number), content[: sizes[number]])
            written += 1
    if missing > written:
        fix = (
            "Lay them down first: run the bench with --keep and the same options on the folder that the server serves."
        )
        raise UsageError(f"{missing:,} of {load.objects:,} objects are not on the server", where=store.place, fix=fix)
    return written


def run_stream(
    load: Load, store: Store, stream: int, streams: int, seconds: float, operations: int | None = None
) -> Count:
    """Reads and writes as one of several streams, for so many seconds, or so many operations if that is sooner."""
    sizes, found = load.draw_sizes(), Count()
    content = np.random.default_rng(load.seed).bytes(int(sizes.max()))
    started = time.perf_counter()
    for done, (is_write, number) in enumerate(load.list_operations(stream, streams)):
        begun = time.perf_counter()
        if begun - started >= seconds or done == operations:
            break
        if is_write:
            # Results go beside the objects, each stream's to its own place, as checkpoints and logs do.
            store.write(f"written/{load.client}/{stream}/{number % 1000:03d}", content[: sizes[number]])
            found.writes += 1
            found.written_bytes += int(sizes[number])
            continue
        found.read_bytes += store.read(name_object(number), int(sizes[number]))
        found.reads += 1
        found.taken.append(time.perf_counter() - begun)
    found.seconds = time.perf_counter() - started
    return found
