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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import final, get_args
from zlib import crc32

import torch

from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.phase_thread import PhaseThread
from headway.comm.rails import StripedGroup, StripedWork
from headway.comm.wire_codec import WireCodec
from headway.core.errors import UsageError
from headway.core.world import World

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

MAX_LOG_ENTRIES = 64

DIGEST_BITS = 24


@final
class LoggedOperation:
    """One operation of the log.

    Attributes:
        seq: running number, from 1.
        tag: name of the operation.
        bytes: size of its tensor.
        issued_s: time (`monotonic`) of its start.
        done: True once it has completed without an error; `World` sets it for its own operations.
    """

    __slots__ = ("algorithm", "bytes", "done", "issued_s", "seq", "tag")

    def __init__(self, seq: int, tag: str, algorithm: str, nbytes: int) -> None:
        self.seq, self.tag, self.algorithm, self.bytes = seq, tag, algorithm, nbytes
        self.issued_s, self.done = monotonic(), False


@final
class PendingOperation:
    """An operation under way."""

    def __init__(self, entry: LoggedOperation) -> None:
        self._entry, self._done_event = entry, threading.Event()
        self._error: BaseException | None = None
        self._cuda_event: torch.cuda.Event | None = None
        self._callbacks: list[Callable[[PendingOperation], None]] = []
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits until it has completed; on CUDA only the current stream waits.

        Raises:
            GenerationEndedError: the generation was given up.
            CommunicationError: it failed or timed out.
        """
        self._done_event.wait()
        if self._error is not None:
            raise self._error
        if self._cuda_event is not None:
            torch.cuda.current_stream().wait_event(self._cuda_event)

    def add_done_callback(self, callback: Callable[[PendingOperation], None]) -> None:
        """Calls `callback` on completion, from any thread; at once if it has completed already."""
        with self._lock:
            if not self._done_event.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def _complete(self, error: BaseException | None = None) -> None:
        self._error, self._entry.done = error, error is None
        with self._lock:
            self._done_event.set()
        # Outside of the lock, which a callback may need.
        for callback in self._callbacks:
            callback(self)


@final
class _AllReduceJob:
    """One all-reduce on its way through the phases.

    Attributes:
        shard: part of the buffer that this rank reduces between hosts.
        work: collective under way.
    """

    __slots__ = ("algorithm", "buffer", "codec", "pending", "shard", "work")

    def __init__(
        self, buffer: torch.Tensor, algorithm: Algorithm, codec: WireCodec | None, pending: PendingOperation
    ) -> None:
        self.buffer, self.algorithm, self.codec, self.pending = buffer, algorithm, codec, pending
        self.shard = buffer
        self.work: StripedWork | None = None


@final
@dataclass(frozen=True)
class _OtherJob:
    run: Callable[[], None]
    pending: PendingOperation


@final
class Communicator:
    """All-reduces of one world. Close it after use; all ranks build, use and close theirs in the same order.

    Args:
        world: its `journal` is set to the log of this object.
        rails: groups on each network interface over which large operations between hosts are striped.
        rates_bytes_s: measured rate of each interface of the world, see `links.measure_rates`; empty: equal.

    Attributes:
        algorithms: algorithms that this world supports.
        digest: hash of all operations issued so far, 24 bits: ranks that issued other operations have another one.
        log: the newest operations, oldest first.
    """

    def __init__(self, world: World, *, rails: int = 1, rates_bytes_s: Sequence[float] = ()) -> None:
        self.world = world
        self.digest = self._seq = 0
        self.log: deque[LoggedOperation] = deque(maxlen=MAX_LOG_ENTRIES)
        world.journal = self._log_operation
        self._codecs: dict[str, WireCodec] = {}
        self._phases: list[PhaseThread[_AllReduceJob]] = []
        self._other_phase: PhaseThread[_OtherJob] | None = None
        host_ranks, leader_ranks = world.hosts[world.host], [ranks[0] for ranks in world.hosts]
        # `two_dimensional` sums a shard over the ranks of one local rank, which every host has to have.
        has_equal_hosts = len({len(ranks) for ranks in world.hosts}) == 1
        # Slices of a bucket go from rank to rank of equal places, so every host needs as many ranks.
        self.algorithms = tuple(name for name in ALGORITHMS if has_equal_hosts or name != "two_dimensional")
        # Operations of one group run in the order of issue, which has to be the same on all ranks: two ranks that issue
        # collectives of one shape in different orders would sum the wrong tensors without any error. So each phase of
        # an algorithm has a group and a thread of its own, and hands over in order; several buckets are in different
        # phases at the same time.
        create = partial(StripedGroup.create, world, rates_bytes_s=rates_bytes_s)
        self._ring_group = create(name="ring", connections=rails)
        self._stepwise_group = create(name="steps")
        self._scatter_group = world.create_group(host_ranks, name="down")
        self._gather_group = world.create_group(host_ranks, name="up")
        self._inter_host_group: StripedGroup | None = None
        self._leader_group: StripedGroup | None = None
        if has_equal_hosts:
            same_local_rank = [ranks[world.local_rank] for ranks in world.hosts]
            self._inter_host_group = create(same_local_rank, name="across", connections=rails)
        if world.rank in leader_ranks:
            self._leader_group = create(leader_ranks, name="leaders", connections=rails)
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        if self._stream is None and world.size > 1:
            gather_phase = _build_phase("gather", self._all_gather_intra_host)
            cross_phase = _build_phase("cross", self._all_reduce_inter_host, gather_phase)
            self._scatter_phase = _build_phase("scatter", self._reduce_scatter_intra_host, cross_phase)
            self._stepwise_phase = _build_phase("flat", self._run_stepwise)
            self._ring_phase = _build_phase("ring", self._wait_for_work)
            self._phases = [self._scatter_phase, cross_phase, gather_phase, self._stepwise_phase, self._ring_phase]

    def all_reduce(
        self, buffer: torch.Tensor, *, algorithm: Algorithm = "ring", wire: Wire = "fp32", tag: str = ""
    ) -> PendingOperation:
        """Begins to sum a tensor over all ranks, in place. Every rank gets the same bits.

        Args:
            buffer: contiguous; must not be touched before completion. `two_dimensional` saves a copy if the ranks of a
                host divide its length evenly.
            wire: dtype of float32 tensors between hosts (of `ring` and `tree`: between ranks). Sums are computed in
                fp32, except by `ring`. Tensors of other dtypes are sent unchanged.
            tag: name in errors and in the digest.

        Returns:
            the all-reduce under way; wait for it before you read `buffer`.

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
        pending = self._begin(tag, flat, algorithm, wire)
        job = _AllReduceJob(flat, algorithm, self.get_codec(wire, flat.dtype), pending)
        if self.world.size == 1:
            job.pending._complete()
        elif self._stream is not None:
            self._run_on_stream(job, self._stream)
        elif algorithm in ("leader", "two_dimensional"):
            self._scatter_phase.put(job)
        elif algorithm == "ring" and job.codec is None:
            # Issued by the caller itself, so that Gloo begins at once; the thread only waits.
            job.work = self._ring_group.all_reduce(job.buffer)
            self._ring_phase.put(job)
        else:
            self._stepwise_phase.put(job)
        return job.pending

    def run_in_order(
        self, run: Callable[[], None], like: torch.Tensor, *, kind: str, wire: Wire = "fp32", tag: str = ""
    ) -> PendingOperation:
        """Begins another operation of all ranks: a function that is called behind those that were begun before.

        On a CPU a thread calls it, on CUDA this one does with the side stream as the current one.

        Args:
            run: uses groups that nothing else uses meanwhile.
            like: a tensor of the same size and type on all ranks, for the log of operations.
            kind, wire, tag: what it is, for the digest and errors.
        """
        pending = self._begin(tag, like, kind, wire)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
            with torch.cuda.stream(self._stream):
                run()
                pending._cuda_event = self._stream.record_event()
            pending._complete()
            return pending
        if self._other_phase is None:
            self._other_phase = PhaseThread(
                "other",
                lambda job: job.run(),
                on_done=lambda job: job.pending._complete(),
                on_error=lambda job, error: job.pending._complete(error),
            )
        self._other_phase.put(_OtherJob(run, pending))
        return pending

    def note(self, tag: str, like: torch.Tensor, *, kind: str) -> None:
        """Adds an operation of all ranks, which has completed in another group, to the log and the digest.

        Args: as for `run_in_order`.
        """
        self._begin(tag, like, kind, "fp32")._complete()

    def get_codec(self, wire: Wire, dtype: torch.dtype) -> WireCodec | None:
        """Returns the codec for tensors of a dtype; None if they are sent as they are."""
        if wire == "fp32" or dtype != torch.float32:
            return None
        return self._codecs.get(wire) or self._codecs.setdefault(wire, WireCodec(wire, self.world.device))

    def _begin(self, tag: str, tensor: torch.Tensor, kind: str, wire: Wire) -> PendingOperation:
        entry = self._log_operation(tag, tensor.numel() * tensor.element_size(), kind)
        # Any difference between ranks in order, size, dtype, algorithm or wire changes the digest.
        signature = f"{tag}|{tensor.numel()}|{tensor.dtype}|{kind}|{wire}".encode()
        self.digest = crc32(signature, self.digest) & ((1 << DIGEST_BITS) - 1)
        return PendingOperation(entry)

    def _log_operation(self, tag: str, nbytes: int, algorithm: str = "bytes") -> LoggedOperation:
        self._seq += 1
        entry = LoggedOperation(self._seq, tag, algorithm, nbytes)
        self.log.append(entry)
        return entry

    def count_flushed(self) -> torch.Tensor:
        """Counts the numbers that this rank's 16-bit messages flushed to zero or found not finite.

        Returns:
            float32 scalar on the device.
        """
        return sum((codec.num_flushed for codec in self._codecs.values()), torch.zeros((), device=self.world.device))

    def close(self) -> None:
        """Ends its threads after the operations under way have completed or failed."""
        for phase in self._phases:
            phase.close()
        self._phases = []
        if self._other_phase is not None:
            self._other_phase.close()
            self._other_phase = None

    def _reduce_scatter_intra_host(self, job: _AllReduceJob) -> None:
        """Phase 1: each rank gets its host's sum of one shard; for `leader` the first rank gets the whole sum."""
        group, buffer = self._scatter_group, job.buffer
        if group.size == 1:
            return
        if job.algorithm == "leader":
            numel, is_leader = buffer.numel(), group.rank == 0
            received = buffer.new_empty(numel * group.size if is_leader else 0)
            receive_splits = [numel if is_leader else 0] * group.size
            send_splits = [numel] + [0] * (group.size - 1)
            group.all_to_all(received, buffer, receive_splits, send_splits).wait()
            if is_leader:
                torch.sum(received.view(group.size, -1), 0, dtype=buffer.dtype, out=buffer)
            return
        padded = _pad_to_multiple(buffer, group.size)
        received = torch.empty_like(padded)
        group.all_to_all(received, padded).wait()
        job.shard = torch.sum(received.view(group.size, -1), 0, dtype=buffer.dtype)

    def _all_reduce_inter_host(self, job: _AllReduceJob) -> None:
        """Phase 2: sums the shard over the hosts; for `leader` the whole buffer over their first ranks."""
        group = self._leader_group if job.algorithm == "leader" else self._inter_host_group
        if group and group.size > 1:
            self._all_reduce_encoded(group, job.shard, job.codec)

    def _all_gather_intra_host(self, job: _AllReduceJob) -> None:
        """Phase 3: every rank of the host gets the whole sum."""
        group, buffer = self._gather_group, job.buffer
        if group.size == 1:
            return
        if job.algorithm == "leader":
            group.broadcast(buffer).wait()
            return
        padded = buffer
        # If the ranks do not divide the length, the shards are those of a padded buffer.
        if job.shard.numel() * group.size != buffer.numel():
            padded = buffer.new_empty(job.shard.numel() * group.size)
        group.all_gather(padded, job.shard).wait()
        if padded is not buffer:
            buffer.copy_(padded[: buffer.numel()])

    def _all_reduce_encoded(self, group: StripedGroup, values: torch.Tensor, codec: WireCodec | None) -> None:
        if codec is None:
            group.all_reduce(values).wait()
            return
        # With 16-bit messages each rank sums one shard in fp32: the library would sum in 16 bits.
        padded = _pad_to_multiple(values, group.size)
        shards = padded.view(group.size, padded.numel() // group.size)
        sent = torch.empty(group.size, shards.shape[1] + 1, dtype=codec.dtype, device=values.device)
        for shard, message in zip(shards, sent, strict=True):
            codec.encode(shard, message)
        received = torch.empty_like(sent)
        group.all_to_all(received.view(-1), sent.view(-1)).wait()
        own_shard = shards[group.rank]
        codec.decode(received[0], own_shard)
        for message in received[1:]:
            codec.decode(message, own_shard, add=True)
        codec.encode(own_shard, sent[0])
        group.all_gather(received.view(-1), sent[0]).wait()
        for shard, message in zip(shards, received, strict=True):
            codec.decode(message, shard)
        if padded is not values:
            values.copy_(padded[: values.numel()])

    def _wait_for_work(self, job: _AllReduceJob) -> None:
        assert job.work is not None
        job.work.wait()

    def _run_stepwise(self, job: _AllReduceJob) -> None:
        """Runs an algorithm of several steps over all ranks: the tree, or the ring of 16-bit numbers."""
        if job.algorithm == "tree":
            self._reduce_by_tree(job.buffer, job.codec)
        else:
            assert job.codec is not None
            self._reduce_by_encoded_ring(job.buffer, job.codec)

    def _reduce_by_encoded_ring(self, values: torch.Tensor, codec: WireCodec) -> None:
        # The library sums the messages themselves: they need one common scale, and room for the sum.
        group = self._stepwise_group
        max_abs = values.abs().amax()
        group.all_reduce(max_abs, "max").wait()
        message = codec.allocate_message(values.numel(), values.device)
        codec.encode(values, message, max_abs * group.size)
        exponent = message[-1].clone()
        group.all_reduce(message[:-1]).wait()
        message[-1] = exponent
        codec.decode(message, values)

    def _reduce_by_tree(self, values: torch.Tensor, codec: WireCodec | None) -> None:
        group, rank = self._stepwise_group, self._stepwise_group.rank
        received = codec.allocate_message(values.numel(), values.device) if codec else torch.empty_like(values)
        # Up: add the sums of the children.
        distance = 1
        while distance < group.size and rank % (2 * distance) == 0:
            if rank + distance < group.size:
                group.recv(received, rank + distance).wait()
                codec.decode(received, values, add=True) if codec else values.add_(received)
            distance *= 2
        message = received if codec else values
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
                self._reduce_scatter_intra_host(job)
                self._all_reduce_inter_host(job)
                self._all_gather_intra_host(job)
            elif job.algorithm == "ring" and job.codec is None:
                self._ring_group.all_reduce(job.buffer).wait()
            else:
                self._run_stepwise(job)
            # The caching allocator must not reuse the buffer while the side stream works on it.
            job.buffer.record_stream(stream)
            job.pending._cuda_event = stream.record_event()
        job.pending._complete()


def _build_phase(
    name: str, run_phase: Callable[[_AllReduceJob], None], next_phase: PhaseThread[_AllReduceJob] | None = None
) -> PhaseThread[_AllReduceJob]:
    on_done = next_phase.put if next_phase is not None else lambda job: job.pending._complete()
    return PhaseThread(
        f"comm-{name}", run_phase, on_done=on_done, on_error=lambda job, error: job.pending._complete(error)
    )


def _pad_to_multiple(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Returns a zero-padded copy whose length is a multiple of `divisor`; the tensor itself if its length is one."""
    missing = -values.numel() % divisor
    return torch.nn.functional.pad(values, (0, missing)) if missing else values
