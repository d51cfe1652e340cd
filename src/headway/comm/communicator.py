"""Communicator: sums over all ranks by several algorithms, several at a time.

| algorithm         | what happens                                                                                    |
|-------------------|-------------------------------------------------------------------------------------------------|
| `ring`            | Gloo's or NCCL's all-reduce over all ranks, host by host, so that each link is crossed once      |
| `tree`            | binomial tree: sums go up, the result comes down; log2(N) steps either way                       |
| `leader`          | each host's ranks give to its first, the first ones ring, and hand the sum on (arXiv 1807.11205) |
| `two_dimensional` | each rank sums a slice of its host's, meets the same slice of other hosts, and slices are spread |

Operations of one group run in the order of issue, which is the same on all ranks: collectives of one shape that two
ranks issue in different orders would add up the wrong tensors without any error. So each phase of an algorithm has a
group and a thread of its own, and hands on in order; several buckets are in different phases at the same time.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Literal, final
from zlib import crc32

import torch

from headway.comm.wire import Codec, Wire
from headway.core.errors import UsageError
from headway.core.world import CollectiveWork, Group, World

Algorithm = Literal["ring", "tree", "leader", "two_dimensional"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "leader", "two_dimensional")

LOGGED = 64
"""Operations that the log keeps."""

STRIPED_BYTES = 1 << 20
"""Below it an operation uses one rail: a second one costs about 0.2 ms of software on either side."""

DIGEST_BITS = 24


@final
class Entry:
    """One operation of the log: which, when it was issued, and whether it has ended."""

    __slots__ = ("algorithm", "bytes", "done", "issued_s", "seq", "tag")

    def __init__(self, seq: int, tag: str, algorithm: str, nbytes: int) -> None:
        self.seq, self.tag, self.algorithm, self.bytes = seq, tag, algorithm, nbytes
        self.issued_s, self.done = monotonic(), False


@final
class Pending:
    """A sum under way."""

    def __init__(self, entry: Entry) -> None:
        self._entry, self._ended = entry, threading.Event()
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None
        self._callbacks: list[Callable[[Pending], None]] = []
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits for its end; on CUDA only the current stream does.

        Raises:
            GenerationEndedError: the generation was given up. CommunicationError: it failed or timed out.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> bool:
        """Whether it has ended, well or not; on CUDA: has been issued."""
        return self._ended.is_set()

    def add_done_callback(self, callback: Callable[[Pending], None]) -> None:
        """Calls it at the end, from whichever thread; at once where that has come."""
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
class _Job:
    """One sum on its way through the phases."""

    __slots__ = ("algorithm", "buffer", "codec", "pending", "piece", "works")

    def __init__(self, buffer: torch.Tensor, algorithm: Algorithm, codec: Codec | None, pending: Pending) -> None:
        self.buffer, self.algorithm, self.codec, self.pending = buffer, algorithm, codec, pending
        self.piece = buffer
        self.works: list[CollectiveWork] = []


@final
class _Phase:
    """A thread that takes jobs in order, does its part of each, and hands it on."""

    def __init__(self, name: str, work: Callable[[_Job], None], after: _Phase | None) -> None:
        self._work, self._after = work, after
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"headway-comm-{name}", daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._work(job)
            except BaseException as error:  # whoever waits for it must hear of it, whatever it is
                job.pending._end(error)
                continue
            if self._after is not None:
                self._after.put(job)
            else:
                job.pending._end()


@final
class Communicator:
    """The sums of one world. Close it after use; all ranks make, use and close theirs in the same order.

    Args:
        rails: groups over which large operations between hosts are striped.

    Attributes:
        algorithms: those that this world can do.
        digest: hash of all operations issued so far, 24 bits: ranks that issued others have another.
        log: the newest operations, the oldest first.
    """

    def __init__(self, world: World, *, rails: int = 1) -> None:
        if rails < 1:
            raise UsageError(f"{rails} rails", fix="Set 1 or more.")
        self.world = world
        self.digest = self._seq = 0
        self.log: deque[Entry] = deque(maxlen=LOGGED)
        world.journal = self._note
        self._codecs: dict[str, Codec] = {}
        self._phases: list[_Phase] = []
        local, first = world.hosts[world.host], [ranks[0] for ranks in world.hosts]
        even = len({len(ranks) for ranks in world.hosts}) == 1
        self.algorithms = ALGORITHMS if even else ALGORITHMS[:3]
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
            gather = _Phase("gather", self._spread, None)
            cross = _Phase("cross", self._cross, gather)
            self._scatter, self._flat = _Phase("scatter", self._collect, cross), _Phase("flat", self._step, None)
            self._ring = _Phase("ring", self._end_ring, None)
            self._phases = [self._scatter, cross, gather, self._flat, self._ring]

    def all_reduce(
        self, buffer: torch.Tensor, *, algorithm: Algorithm = "ring", wire: Wire = "fp32", tag: str = ""
    ) -> Pending:
        """Sums a tensor over all ranks, in place. Every rank has the same bits afterwards.

        Args:
            buffer: contiguous; nobody may touch it before the end. For `two_dimensional` a length that the ranks of a
                host divide evenly saves a copy.
            wire: the form in which float32 crosses between hosts (of `ring` and `tree`: between ranks); the sums
                themselves are in fp32, but for `ring`. Other types go as they are.
            tag: its name in errors and in the digest.

        Raises:
            UsageError: an algorithm this world cannot do, or a buffer that is not contiguous.
        """
        if algorithm not in self.algorithms:
            fix = f"Take {', '.join(self.algorithms)}."
            raise UsageError(f"{algorithm!r} wants as many ranks on each host as on the others", fix=fix)
        if not buffer.is_contiguous():
            raise UsageError("a sum over ranks is done in place, and this tensor is not contiguous")
        flat = buffer.view(-1)
        entry = self._note(tag, flat.numel() * flat.element_size(), algorithm)
        what = f"{tag}|{flat.numel()}|{flat.dtype}|{algorithm}|{wire}".encode()
        self.digest = crc32(what, self.digest) & ((1 << DIGEST_BITS) - 1)
        codec = None
        if wire != "fp32" and flat.dtype == torch.float32:
            codec = self._codecs.get(wire) or self._codecs.setdefault(wire, Codec(wire, self.world.device))
        job = _Job(flat, algorithm, codec, Pending(entry))
        if self.world.size == 1:
            job.pending._end()
        elif self._stream is not None:
            self._on_stream(job, self._stream)
        elif algorithm in ("leader", "two_dimensional"):
            self._scatter.put(job)
        elif algorithm == "ring" and codec is None:
            self._begin_ring(job)
        else:
            self._flat.put(job)
        return job.pending

    def _note(self, tag: str, nbytes: int, algorithm: str = "bytes") -> Entry:
        self._seq += 1
        entry = Entry(self._seq, tag, algorithm, nbytes)
        self.log.append(entry)
        return entry

    def lost(self) -> torch.Tensor:
        """How many numbers this rank's 16-bit messages flushed to zero or found not finite; float32 on the device."""
        total = torch.zeros((), device=self.world.device)
        for codec in self._codecs.values():
            total = total + codec.lost
        return total

    def close(self) -> None:
        """Ends its threads; what is under way ends before, or fails."""
        for phase in self._phases:
            phase.close()
        self._phases = []

    def _collect(self, job: _Job) -> None:
        """Inside the host: each rank gets the sum of its slice; or its first rank that of the whole."""
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
        length = -(-buffer.numel() // group.size)
        if length * group.size != buffer.numel():
            job.piece = torch.nn.functional.pad(buffer, (0, length * group.size - buffer.numel()))
        parts = torch.empty_like(job.piece)
        group.all_to_all(parts, job.piece).wait()
        job.piece = torch.sum(parts.view(group.size, -1), 0, dtype=buffer.dtype)

    def _cross(self, job: _Job) -> None:
        """Between hosts: the sum of a slice over the hosts; or of the whole over their first ranks."""
        groups = self._leaders if job.algorithm == "leader" else self._across
        if groups and groups[0].size > 1:
            self._meet(groups, job.piece, job.codec)

    def _spread(self, job: _Job) -> None:
        """Inside the host: every rank gets the whole."""
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

    def _meet(self, groups: list[Group], values: torch.Tensor, codec: Codec | None) -> None:
        """The sum over a group that spans hosts, in place; with 16-bit messages each rank sums a part of it in fp32."""
        if codec is None:
            for work in _striped(groups, values):
                work.wait()
            return
        group = groups[0]
        length = -(-values.numel() // group.size)
        padded = values
        if length * group.size != values.numel():
            padded = torch.nn.functional.pad(values, (0, length * group.size - values.numel()))
        parts = padded.view(group.size, length)
        sent = torch.empty(group.size, length + 1, dtype=codec.type, device=values.device)
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

    def _begin_ring(self, job: _Job) -> None:
        job.works = _striped(self._rings, job.buffer)
        self._ring.put(job)

    def _end_ring(self, job: _Job) -> None:
        for work in job.works:
            work.wait()

    def _step(self, job: _Job) -> None:
        """The algorithms of several steps over all ranks: the tree, and the ring of 16-bit numbers."""
        if job.algorithm == "tree":
            self._tree(job.buffer, job.codec)
        else:
            assert job.codec is not None
            self._ring_of_messages(job.buffer, job.codec)

    def _ring_of_messages(self, values: torch.Tensor, codec: Codec) -> None:
        """The library sums the messages themselves: they need one scale, and room for the sum."""
        group = self._steps
        largest = values.abs().amax()
        group.all_reduce(largest, "max").wait()
        message = codec.message(values.numel(), values.device)
        codec.encode_below(values, message, largest * group.size)
        exponent = message[-1].clone()
        group.all_reduce(message[:-1]).wait()
        message[-1] = exponent
        codec.decode(message, values)

    def _tree(self, values: torch.Tensor, codec: Codec | None) -> None:
        group, rank = self._steps, self._steps.rank
        got = codec.message(values.numel(), values.device) if codec else torch.empty_like(values)
        distance = 1
        while distance < group.size and rank % (2 * distance) == 0:
            if rank + distance < group.size:
                group.recv(got, rank + distance).wait()
                codec.decode(got, values, add=True) if codec else values.add_(got)
            distance *= 2
        message = got if codec else values
        if codec and (rank or group.size > 1):
            codec.encode(values, message)
        if rank:  # its parent is the rank without its lowest bit
            group.send(message, rank - distance).wait()
            group.recv(message, rank - distance).wait()
        distance //= 2
        while distance:
            if rank + distance < group.size:
                group.send(message, rank + distance).wait()
            distance //= 2
        if codec:
            codec.decode(message, values)  # the root too: every rank has the same bits

    def _on_stream(self, job: _Job, stream: torch.cuda.Stream) -> None:
        """On CUDA the host issues all phases at once, on one side stream that keeps their order."""
        stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(stream):
            if job.algorithm in ("leader", "two_dimensional"):
                self._collect(job)
                self._cross(job)
                self._spread(job)
            elif job.algorithm == "ring" and job.codec is None:
                job.works = _striped(self._rings, job.buffer)
                self._end_ring(job)
            else:
                self._step(job)
            job.buffer.record_stream(stream)
            job.pending._event = stream.record_event()
        job.pending._end()


def _striped(groups: list[Group], values: torch.Tensor) -> list[CollectiveWork]:
    """One all-reduce, or a part of it on each rail."""
    if len(groups) == 1 or values.numel() * values.element_size() < STRIPED_BYTES:
        return [groups[0].all_reduce(values)]
    return [group.all_reduce(part) for group, part in zip(groups, values.tensor_split(len(groups)), strict=True)]
