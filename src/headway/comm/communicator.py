"""Communicator: all-reduce over all ranks by several algorithms, several operations at a time.

| algorithm         | how it works                                                                                    |
|-------------------|-------------------------------------------------------------------------------------------------|
| `ring`            | Gloo's or NCCL's all-reduce over all ranks, host by host, so that each link is crossed once     |
| `tree`            | binomial tree: sums go up, the result comes down; log2(N) steps either way                      |
| `leader`          | ranks reduce to their host's first rank, these ring, and broadcast the sum (arXiv 1807.11205)   |
| `two_dimensional` | reduce-scatter inside hosts, all-reduce of each slice between hosts, all-gather inside          |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import final, get_args
from zlib import crc32

import torch

from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.phase_thread import PhaseThread
from headway.comm.wire_codec import WireCodec
from headway.core.errors import UsageError
from headway.core.world import CollectiveWork, Group, World

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

# Operations that the log keeps.
LOG_LENGTH = 64

# Smaller operations use one rail: a second one costs about 0.2 ms of software on either side.
STRIPED_BYTES = 1 << 20

DIGEST_BITS = 24


@final
class LoggedOperation:
    """One operation of the log."""

    # `World` sets `done` on its own entries, too.
    __slots__ = ("algorithm", "bytes", "done", "issued_s", "seq", "tag")

    def __init__(self, seq: int, tag: str, algorithm: str, nbytes: int) -> None:
        self.seq, self.tag, self.algorithm, self.bytes = seq, tag, algorithm, nbytes
        self.issued_s, self.done = monotonic(), False


@final
class PendingAllReduce:
    """An all-reduce under way."""

    def __init__(self, entry: LoggedOperation) -> None:
        self._entry, self._ended = entry, threading.Event()
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None
        self._callbacks: list[Callable[[PendingAllReduce], None]] = []
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits until it has completed; on CUDA only the current stream waits.

        Raises:
            GenerationEndedError: the generation was given up. CommunicationError: it failed or timed out.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def add_done_callback(self, callback: Callable[[PendingAllReduce], None]) -> None:
        """Calls `callback` on completion, from any thread; at once if it has completed already."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def _end(self, error: BaseException | None = None) -> None:
        self._error, self._entry.done = error, error is None
        with self._lock:
            self._ended.set()
        for callback in self._callbacks:
            callback(self)


@final
class _AllReduceJob:
    """One all-reduce on its way through the phases."""

    __slots__ = ("algorithm", "buffer", "codec", "pending", "piece", "works")

    def __init__(
        self, buffer: torch.Tensor, algorithm: Algorithm, codec: WireCodec | None, pending: PendingAllReduce
    ) -> None:
        self.buffer, self.algorithm, self.codec, self.pending = buffer, algorithm, codec, pending
        self.piece = buffer
        self.works: list[CollectiveWork] = []


@final
class Communicator:
    """All-reduces of one world. Close it after use; all ranks build, use and close theirs in the same order.

    Args:
        rails: number of groups over which large operations between hosts are striped.

    Attributes:
        algorithms: those that this world supports.
        digest: hash of all operations issued so far, 24 bits: ranks that issued other operations have another one.
        log: the newest operations, oldest first.
    """

    def __init__(self, world: World, *, rails: int = 1) -> None:
        if rails < 1:
            raise UsageError(f"{rails} rails", fix="Set 1 or more.")
        self.world = world
        self.digest = self._seq = 0
        self.log: deque[LoggedOperation] = deque(maxlen=LOG_LENGTH)
        world.journal = self._log_operation
        self._codecs: dict[str, WireCodec] = {}
        self._phases: list[PhaseThread[_AllReduceJob]] = []
        local, first = world.hosts[world.host], [ranks[0] for ranks in world.hosts]
        even = len({len(ranks) for ranks in world.hosts}) == 1
        # Slices of a bucket go from rank to rank of equal places, so every host needs as many ranks.
        self.algorithms = tuple(name for name in ALGORITHMS if even or name != "two_dimensional")
        # Operations of one group run in the order of issue, which has to be the same on all ranks: two ranks that issue
        # collectives of one shape in different orders would sum the wrong tensors without any error. So each phase of
        # an algorithm has a group and a thread of its own, and hands over in order; several buckets are in different
        # phases at the same time.
        self._rings = [world.create_group(name="ring") for _ in range(rails)]
        self._steps = world.create_group(name="steps")
        self._down, self._up = world.create_group(local, name="down"), world.create_group(local, name="up")
        self._across: list[Group] = []
        if even:
            slot = [ranks[world.local_rank] for ranks in world.hosts]
            self._across = [world.create_group(slot, name="across") for _ in range(rails)]
        self._leaders = [world.create_group(first, name="leaders") for _ in range(rails)] if world.rank in first else []
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        if self._stream is None and world.size > 1:
            gather = _build_phase("gather", self._gather_in_host)
            cross = _build_phase("cross", self._reduce_between_hosts, gather)
            self._scatter = _build_phase("scatter", self._reduce_in_host, cross)
            self._flat = _build_phase("flat", self._run_stepwise)
            self._ring = _build_phase("ring", self._finish_ring)
            self._phases = [self._scatter, cross, gather, self._flat, self._ring]

    def all_reduce(
        self, buffer: torch.Tensor, *, algorithm: Algorithm = "ring", wire: Wire = "fp32", tag: str = ""
    ) -> PendingAllReduce:
        """Begins to sum a tensor over all ranks, in place. Every rank gets the same bits.

        Args:
            buffer: contiguous; must not be touched before completion. `two_dimensional` saves a copy if the ranks of a
                host divide its length evenly.
            wire: form of float32 between hosts (of `ring` and `tree`: between ranks). Sums are computed in fp32,
                except by `ring`. Other types are sent unchanged.
            tag: its name in errors and in the digest.

        Raises:
            UsageError: the world does not support the algorithm, or the buffer is not contiguous.
        """
        if algorithm not in self.algorithms:
            fix = f"Use {', '.join(self.algorithms)}."
            raise UsageError(f"{algorithm!r} needs as many ranks on each host as on the others", fix=fix)
        if not buffer.is_contiguous():
            what = "an all-reduce works in place, and this tensor is not contiguous"
            raise UsageError(what, fix="Pass tensor.contiguous() and copy the result back.")
        flat = buffer.view(-1)
        entry = self._log_operation(tag, flat.numel() * flat.element_size(), algorithm)
        # Any difference between ranks in order, size, type, algorithm or wire changes the digest.
        label = f"{tag}|{flat.numel()}|{flat.dtype}|{algorithm}|{wire}".encode()
        self.digest = crc32(label, self.digest) & ((1 << DIGEST_BITS) - 1)
        codec = None
        if wire != "fp32" and flat.dtype == torch.float32:
            codec = self._codecs.get(wire) or self._codecs.setdefault(wire, WireCodec(wire, self.world.device))
        job = _AllReduceJob(flat, algorithm, codec, PendingAllReduce(entry))
        if self.world.size == 1:
            job.pending._end()
        elif self._stream is not None:
            self._run_on_stream(job, self._stream)
        elif algorithm in ("leader", "two_dimensional"):
            self._scatter.put(job)
        elif algorithm == "ring" and codec is None:
            # Issued by the caller itself, so that Gloo begins at once; the thread only waits.
            job.works = _start_striped_all_reduce(self._rings, job.buffer)
            self._ring.put(job)
        else:
            self._flat.put(job)
        return job.pending

    def _log_operation(self, tag: str, nbytes: int, algorithm: str = "bytes") -> LoggedOperation:
        self._seq += 1
        entry = LoggedOperation(self._seq, tag, algorithm, nbytes)
        self.log.append(entry)
        return entry

    def count_lost_numbers(self) -> torch.Tensor:
        """Counts the numbers that this rank's 16-bit messages flushed to zero or found not finite.

        Returns:
            float32 scalar on the device.
        """
        total = torch.zeros((), device=self.world.device)
        for codec in self._codecs.values():
            total = total + codec.lost_numbers
        return total

    def close(self) -> None:
        """Ends its threads, after the operations under way have completed or failed."""
        for phase in self._phases:
            phase.close()
        self._phases = []

    def _reduce_in_host(self, job: _AllReduceJob) -> None:
        # Phase 1: each rank gets its host's sum of one slice; for `leader` its first rank gets the whole sum.
        group, buffer = self._down, job.buffer
        if group.size == 1:
            return
        if job.algorithm == "leader":
            whole, none = [buffer.numel()], [0]
            leads = group.rank == 0
            parts = buffer.new_empty(buffer.numel() * group.size if leads else 0)
            sent, got = whole + none * (group.size - 1), (whole if leads else none) * group.size
            group.all_to_all(parts, buffer, got, sent).wait()
            if leads:
                torch.sum(parts.view(group.size, -1), 0, dtype=buffer.dtype, out=buffer)
            return
        job.piece = _pad_to_multiple(buffer, group.size)
        parts = torch.empty_like(job.piece)
        group.all_to_all(parts, job.piece).wait()
        job.piece = torch.sum(parts.view(group.size, -1), 0, dtype=buffer.dtype)

    def _reduce_between_hosts(self, job: _AllReduceJob) -> None:
        # Phase 2: sum of the slice over the hosts; for `leader` of the whole over their first ranks.
        groups = self._leaders if job.algorithm == "leader" else self._across
        if groups and groups[0].size > 1:
            self._sum_over(groups, job.piece, job.codec)

    def _gather_in_host(self, job: _AllReduceJob) -> None:
        # Phase 3: every rank of the host gets the whole sum.
        group, buffer = self._up, job.buffer
        if group.size == 1:
            return
        if job.algorithm == "leader":
            group.broadcast(buffer).wait()
            return
        whole = buffer
        if job.piece.numel() * group.size != buffer.numel():
            whole = buffer.new_empty(job.piece.numel() * group.size)
        group.all_gather(whole, job.piece).wait()
        if whole is not buffer:
            buffer.copy_(whole[: buffer.numel()])

    def _sum_over(self, groups: list[Group], values: torch.Tensor, codec: WireCodec | None) -> None:
        if codec is None:
            for work in _start_striped_all_reduce(groups, values):
                work.wait()
            return
        # With 16-bit messages each rank sums one part in fp32: the library would sum in 16 bits.
        group = groups[0]
        padded = _pad_to_multiple(values, group.size)
        parts = padded.view(group.size, padded.numel() // group.size)
        sent = torch.empty(group.size, parts.shape[1] + 1, dtype=codec.type, device=values.device)
        for part, message in zip(parts, sent, strict=True):
            codec.encode(part, message)
        got = torch.empty_like(sent)
        group.all_to_all(got.view(-1), sent.view(-1)).wait()
        mine = parts[group.rank]
        codec.decode(got[0], mine)
        for message in got[1:]:
            codec.decode(message, mine, add=True)
        codec.encode(mine, sent[0])
        group.all_gather(got.view(-1), sent[0]).wait()
        for part, message in zip(parts, got, strict=True):
            codec.decode(message, part)
        if padded is not values:
            values.copy_(padded[: values.numel()])

    def _finish_ring(self, job: _AllReduceJob) -> None:
        for work in job.works:
            work.wait()

    def _run_stepwise(self, job: _AllReduceJob) -> None:
        # The algorithms of several steps over all ranks: the tree, and the ring of 16-bit numbers.
        if job.algorithm == "tree":
            self._reduce_by_tree(job.buffer, job.codec)
        else:
            assert job.codec is not None
            self._reduce_by_encoded_ring(job.buffer, job.codec)

    def _reduce_by_encoded_ring(self, values: torch.Tensor, codec: WireCodec) -> None:
        # The library sums the messages themselves: they need one common scale, and room for the sum.
        group = self._steps
        largest = values.abs().amax()
        group.all_reduce(largest, "max").wait()
        message = codec.allocate_message(values.numel(), values.device)
        codec.encode_with_largest(values, message, largest * group.size)
        exponent = message[-1].clone()
        group.all_reduce(message[:-1]).wait()
        message[-1] = exponent
        codec.decode(message, values)

    def _reduce_by_tree(self, values: torch.Tensor, codec: WireCodec | None) -> None:
        group, rank = self._steps, self._steps.rank
        got = codec.allocate_message(values.numel(), values.device) if codec else torch.empty_like(values)
        # Up: add the sums of the children.
        distance = 1
        while distance < group.size and rank % (2 * distance) == 0:
            if rank + distance < group.size:
                group.recv(got, rank + distance).wait()
                codec.decode(got, values, add=True) if codec else values.add_(got)
            distance *= 2
        message = got if codec else values
        if codec and (rank or group.size > 1):
            codec.encode(values, message)
        # A rank's parent is the rank without its lowest bit.
        if rank:
            group.send(message, rank - distance).wait()
            group.recv(message, rank - distance).wait()
        # Down: pass the result on to the children.
        distance //= 2
        while distance:
            if rank + distance < group.size:
                group.send(message, rank + distance).wait()
            distance //= 2
        # The root decodes its own message, too: every rank gets the same bits.
        if codec:
            codec.decode(message, values)

    def _run_on_stream(self, job: _AllReduceJob, stream: torch.cuda.Stream) -> None:
        # On CUDA the host issues all phases at once; one side stream keeps their order.
        stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(stream):
            if job.algorithm in ("leader", "two_dimensional"):
                self._reduce_in_host(job)
                self._reduce_between_hosts(job)
                self._gather_in_host(job)
            elif job.algorithm == "ring" and job.codec is None:
                job.works = _start_striped_all_reduce(self._rings, job.buffer)
                self._finish_ring(job)
            else:
                self._run_stepwise(job)
            # The caching allocator must not reuse the buffer while the side stream works on it.
            job.buffer.record_stream(stream)
            job.pending._event = stream.record_event()
        job.pending._end()


def _build_phase(
    name: str, work: Callable[[_AllReduceJob], None], after: PhaseThread[_AllReduceJob] | None = None
) -> PhaseThread[_AllReduceJob]:
    then = after.put if after is not None else lambda job: job.pending._end()
    return PhaseThread(f"comm-{name}", work, then=then, on_error=lambda job, error: job.pending._end(error))


def _start_striped_all_reduce(groups: list[Group], values: torch.Tensor) -> list[CollectiveWork]:
    if len(groups) == 1 or values.numel() * values.element_size() < STRIPED_BYTES:
        return [groups[0].all_reduce(values)]
    return [group.all_reduce(part) for group, part in zip(groups, values.tensor_split(len(groups)), strict=True)]


def _pad_to_multiple(values: torch.Tensor, ranks: int) -> torch.Tensor:
    # The tensor itself if `ranks` divide its length already.
    missing = -values.numel() % ranks
    return torch.nn.functional.pad(values, (0, missing)) if missing else values
