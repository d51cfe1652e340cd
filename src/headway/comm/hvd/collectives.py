"""Executes the operations of a response over the groups of a process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import cast, final

import torch

from headway.comm.comm_recipe import Algorithm
from headway.comm.communicator import Communicator
from headway.comm.hvd.adasum import adasum_all_reduce
from headway.comm.hvd.executor import Finish, SubmittedOperation, do_nothing
from headway.comm.hvd.requests import Op, Response
from headway.core.world import Group, World
from headway.core.world import Op as GroupOp

# Data that is only moved is sent as bytes, so that every element type works; small tensors that travel together share a
# buffer. CUDA tensors go through NCCL on a stream of their own if torch has it, else through host memory and Gloo.

CPU = torch.device("cpu")
HAS_NCCL = hasattr(torch._C, "_nccl_version")

# An all-gather pads pieces of unlike sizes to the longest if the result then has at most these bytes, or at most
# doubles; else each rank broadcasts its own piece.
PADDED_BYTES = 1 << 16


@final
class ProcessSetCollectives:
    """The collectives of one process set.

    Args:
        name: of its groups; another one for each process set.
        members: ranks of the world, in the order of the set.
        communicator: sums over all ranks of the world on CPU; only for the set of all ranks.
    """

    def __init__(self, world: World, name: str, members: Sequence[int], communicator: Communicator | None) -> None:
        self._world, self._name, self._members, self._communicator = world, name, tuple(members), communicator
        self._gloo = world.create_group(members, name=name, backend="gloo")
        self._nccl: Group | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._inside: Group | None = None
        self._between: Group | None = None

    def begin(self, response: Response, entries: list[SubmittedOperation]) -> Finish:
        """Begins the transfers of a response; `entries` are the operations of its names."""
        begin = {
            "allreduce": self._allreduce,
            "allgather": self._allgather,
            "broadcast": self._broadcast,
            "alltoall": self._alltoall,
            "reducescatter": self._reducescatter,
        }[response.kind]
        if entries[0].request.device == "cpu":
            return begin(response, entries, self._gloo)
        if self._nccl is None and HAS_NCCL:
            self._nccl = self._world.create_group(self._members, name=self._name, backend="nccl")
        device = entries[0].inputs[0].device
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            # The inputs are computed on the caller's stream.
            for entry in entries:
                if entry.ready is not None:
                    stream.wait_event(entry.ready)
            finish = begin(response, entries, self._nccl or self._gloo)

        def finish_on_stream() -> None:
            with torch.cuda.stream(stream):
                finish()
            stream.synchronize()

        return finish_on_stream

    def close(self) -> None:
        """Closes the groups; nothing may be under way any more."""
        for group in (self._gloo, self._nccl, self._inside, self._between):
            if group is not None:
                group.close()

    def _get_device(self, group: Group, entries: list[SubmittedOperation]) -> torch.device:
        return CPU if group is self._gloo else entries[0].inputs[0].device

    def _allreduce(self, response: Response, entries: list[SubmittedOperation], group: Group) -> Finish:
        request, sums = entries[0].request, []
        pairs = [pair for entry in entries for pair in zip(entry.inputs, entry.outputs, strict=True)]
        # One buffer per element type.
        for dtype in dict.fromkeys(source.dtype for source, _ in pairs):
            alike = [pair for pair in pairs if pair[0].dtype == dtype]
            buffer, unpack = _pack(alike, self._get_device(group, entries))
            scale_in_place(buffer, request.prescale)
            wait = self._reduce(response, request.op, group, buffer, [source.numel() for source, _ in alike])
            sums.append((buffer, wait, unpack))

        def finish() -> None:
            for buffer, wait, unpack in sums:
                wait()
                scale_in_place(buffer, request.postscale, group.size if request.op == "average" else 1)
                unpack()
            for entry in entries:
                entry.result = tuple(entry.outputs)

        return finish

    def _reduce(self, response: Response, op: Op, group: Group, buffer: torch.Tensor, counts: Sequence[int]) -> Finish:
        if op == "adasum":
            self._adasum(buffer, counts, group)
            return do_nothing
        if op in ("average", "sum"):
            # The core's algorithms, where it has them: sums over all ranks on CPU.
            if self._communicator is not None and group is self._gloo:
                algorithm = cast(Algorithm, response.algorithm)
                return self._communicator.all_reduce(buffer, algorithm=algorithm, tag=response.names[0]).wait
            return group.all_reduce(buffer).wait
        return group.all_reduce(buffer, cast(GroupOp, op)).wait

    def _adasum(self, buffer: torch.Tensor, counts: Sequence[int], group: Group) -> None:
        # On NCCL it averages inside each host first, and combines over hosts: scripts that scale their learning rate
        # for Adasum expect that.
        if group is self._gloo:
            adasum_all_reduce(buffer, counts, group)
            return
        if self._inside is None or self._between is None:
            world = self._world
            same_place = [ranks[world.local_rank] for ranks in world.hosts]
            self._inside = world.create_group(world.hosts[world.host], name=f"{self._name}-inside", backend="nccl")
            self._between = world.create_group(same_place, name=f"{self._name}-between", backend="nccl")
        self._inside.all_reduce(buffer).wait()
        scale_in_place(buffer, 1.0, self._inside.size)
        adasum_all_reduce(buffer, counts, self._between)

    def _allgather(self, response: Response, entries: list[SubmittedOperation], group: Group) -> Finish:
        pieces = [_view_bytes(source) for entry in entries for source in entry.inputs]
        mine = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).to(self._get_device(group, entries))
        # Bytes of each tensor from each rank.
        sizes = [
            [count * _count_row_bytes(source) for count in counts]
            for entry, rows in zip(entries, response.rows, strict=True)
            for source, counts in zip(entry.inputs, rows, strict=True)
        ]
        wait_for_segments = begin_gather(group, mine, [sum(column) for column in zip(*sizes, strict=True)])

        def finish() -> None:
            found = [
                segment.split(list(column))
                for segment, column in zip(wait_for_segments(), zip(*sizes, strict=True), strict=True)
            ]
            # For each tensor: the pieces of all ranks.
            parts = iter(zip(*found, strict=True))
            for entry, rows in zip(entries, response.rows, strict=True):
                entry.result = tuple(
                    _view_typed(torch.cat(next(parts)), source, sum(counts))
                    for source, counts in zip(entry.inputs, rows, strict=True)
                )

        return finish

    def _broadcast(self, response: Response, entries: list[SubmittedOperation], group: Group) -> Finish:
        # A request names the root by its rank in the world; groups count from 0.
        root = self._members.index(entries[0].request.root)
        pairs = [(_view_bytes(entry.inputs[0]), entry.outputs[0].view(-1).view(torch.uint8)) for entry in entries]
        buffer, unpack = _pack(pairs, self._get_device(group, entries), filled=group.rank == root)
        work = group.broadcast(buffer, root)

        def finish() -> None:
            work.wait()
            unpack()
            for entry in entries:
                entry.result = tuple(entry.outputs)

        return finish

    def _alltoall(self, response: Response, entries: list[SubmittedOperation], group: Group) -> Finish:
        # The table has the rows that each rank sends to each: row `me` is sent, column `me` received.
        device, moves = self._get_device(group, entries), []
        for entry, table in zip(entries, response.rows, strict=True):
            source, me = entry.inputs[0], group.rank
            sent, got = table[me], [row[me] for row in table]
            size = _count_row_bytes(source)
            out = torch.empty(sum(got) * size, dtype=torch.uint8, device=device)
            into = _view_bytes(source)[: sum(sent) * size].to(device)
            work = group.all_to_all(out, into, [count * size for count in got], [count * size for count in sent])
            moves.append((entry, work, out, got))

        def finish() -> None:
            for entry, work, out, got in moves:
                work.wait()
                counts = entry.outputs[0].new_tensor(got)
                entry.result = (_view_typed(out, entry.inputs[0], sum(got)), counts)

        return finish

    def _reducescatter(self, response: Response, entries: list[SubmittedOperation], group: Group) -> Finish:
        # An all-to-all of the rows, which each rank then sums: splits may be uneven.
        device, moves = self._get_device(group, entries), []
        for entry in entries:
            for source in entry.inputs:
                rows, row = split_rows(source.shape[0], group.size), prod(source.shape[1:])
                # A copy, if prescale changes it: the caller's tensor stays as it is.
                into = source.reshape(-1).to(device, copy=entry.request.prescale != 1.0)
                scale_in_place(into, entry.request.prescale)
                mine = rows[group.rank] * row
                out = torch.empty(group.size * mine, dtype=source.dtype, device=device)
                work = group.all_to_all(out, into, [mine] * group.size, [count * row for count in rows])
                moves.append((entry, source, work, out))

        def finish() -> None:
            results: dict[SubmittedOperation, list[torch.Tensor]] = {entry: [] for entry in entries}
            for entry, source, work, out in moves:
                work.wait()
                piece = torch.sum(out.view(group.size, -1), 0, dtype=out.dtype)
                scale_in_place(piece, entry.request.postscale, group.size if entry.request.op == "average" else 1)
                rows = split_rows(source.shape[0], group.size)[group.rank]
                results[entry].append(piece.view(rows, *source.shape[1:]).to(source.device))
            for entry, found in results.items():
                entry.result = tuple(found)

        return finish


def begin_gather(group: Group, mine: torch.Tensor, sizes: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
    """Begins to send the bytes of every rank to all.

    Args:
        mine: uint8, flat.
        sizes: bytes of each rank; any may be 0.

    Returns:
        a function that waits, and returns the bytes of each rank.
    """
    longest, total = max(sizes), sum(sizes)
    if longest * group.size <= max(PADDED_BYTES, 2 * total):
        padded = mine if len(mine) == longest else torch.nn.functional.pad(mine, (0, longest - len(mine)))
        out = mine.new_empty(group.size * longest)
        works = [group.all_gather(out, padded)] if longest else []
        segments = [row[:size] for row, size in zip(out.view(group.size, longest), sizes, strict=True)]
    else:
        out = mine.new_empty(total)
        segments = list(out.split(list(sizes)))
        segments[group.rank].copy_(mine)
        works = [group.broadcast(segment, rank) for rank, segment in enumerate(segments) if len(segment)]

    def finish() -> list[torch.Tensor]:
        for work in works:
            work.wait()
        return segments

    return finish


def split_rows(rows: int, ranks: int) -> list[int]:
    """Splits rows over ranks; the first ranks get one more if they cannot all get as many."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def scale_in_place(buffer: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Computes buffer * factor / divisor, in place; integers in float64, truncated towards zero."""
    if factor == 1.0 and divisor == 1:
        return
    if buffer.is_floating_point():
        buffer.div_(divisor) if factor == 1.0 else buffer.mul_(factor / divisor)
    else:
        buffer.copy_(buffer.double().mul_(factor).div_(divisor).trunc_())


def _pack(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device, *, filled: bool = True
) -> tuple[torch.Tensor, Finish]:
    """Packs all sources into a flat buffer; returns it, and a function that copies it to all outs.

    Args:
        pairs: (source, out), which may be the same tensor; all of one type.
        filled: False: leave the buffer uninitialised.
    """
    # A single out on the right device is the buffer itself, which saves a copy.
    if len(pairs) == 1 and pairs[0][1].device == device:
        source, out = pairs[0]
        if source.data_ptr() != out.data_ptr() and filled:
            out.copy_(source)
        return out.view(-1), do_nothing
    counts = [source.numel() for source, _ in pairs]
    buffer = torch.empty(sum(counts), dtype=pairs[0][0].dtype, device=device)
    parts = buffer.split(counts)
    for part, (source, _) in zip(parts, pairs, strict=True):
        if filled:
            part.copy_(source.reshape(-1))

    def unpack() -> None:
        for part, (_, out) in zip(parts, pairs, strict=True):
            out.copy_(part.view(out.shape))

    return buffer, unpack


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _count_row_bytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape[1:]) * tensor.element_size()


def _view_typed(found: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    return found.view(like.dtype).view(rows, *like.shape[1:]).to(like.device)
