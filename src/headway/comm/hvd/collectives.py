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
from headway.core.group import Group
from headway.core.group import Op as GroupOp
from headway.core.world import World

# Data that is only moved is sent as bytes, so that every element type works; small tensors that travel together share a
# buffer. CUDA tensors go through NCCL on a stream of their own if torch has it, else through host memory and Gloo.

CPU = torch.device("cpu")
HAS_NCCL = hasattr(torch._C, "_nccl_version")

# An all-gather pads pieces of unlike sizes to the longest if the result then has at most so many bytes, or at most
# doubles; else each rank broadcasts its own piece.
MAX_PADDED_BYTES = 1 << 16


@final
class ProcessSetCollectives:
    """The collectives of one process set.

    Args:
        world: its groups carry the transfers.
        name: name of its groups, unique among the process sets.
        members: ranks of the world, in the order of the set.
        communicator: sums over all ranks of the world on CPU; None except for the set of all ranks.
    """

    def __init__(self, world: World, name: str, members: Sequence[int], communicator: Communicator | None) -> None:
        self._world, self._name, self._members, self._communicator = world, name, tuple(members), communicator
        self._gloo = world.create_group(members, name=name, backend="gloo")
        self._nccl: Group | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._intra_host: Group | None = None
        self._inter_host: Group | None = None

    def begin(self, response: Response, operations: list[SubmittedOperation]) -> Finish:
        """Begins the transfers of a response for `operations`; returns the function that finishes them."""
        begin = {
            "allreduce": self._allreduce,
            "allgather": self._allgather,
            "broadcast": self._broadcast,
            "alltoall": self._alltoall,
            "reducescatter": self._reducescatter,
        }[response.kind]
        if operations[0].request.device == "cpu":
            return begin(response, operations, self._gloo)
        if self._nccl is None and HAS_NCCL:
            self._nccl = self._world.create_group(self._members, name=self._name, backend="nccl")
        device = operations[0].inputs[0].device
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            # The inputs are computed on the caller's stream.
            for operation in operations:
                if operation.inputs_ready is not None:
                    stream.wait_event(operation.inputs_ready)
            finish = begin(response, operations, self._nccl or self._gloo)

        def finish_on_stream() -> None:
            with torch.cuda.stream(stream):
                finish()
            stream.synchronize()

        return finish_on_stream

    def close(self) -> None:
        """Closes the groups; nothing may be under way any more."""
        for group in (self._gloo, self._nccl, self._intra_host, self._inter_host):
            if group is not None:
                group.close()

    def _get_device(self, group: Group, operations: list[SubmittedOperation]) -> torch.device:
        return CPU if group is self._gloo else operations[0].inputs[0].device

    def _allreduce(self, response: Response, operations: list[SubmittedOperation], group: Group) -> Finish:
        request = operations[0].request
        transfers = []
        pairs = [pair for operation in operations for pair in zip(operation.inputs, operation.outputs, strict=True)]
        # One buffer per dtype.
        for dtype in dict.fromkeys(source.dtype for source, _ in pairs):
            dtype_pairs = [pair for pair in pairs if pair[0].dtype == dtype]
            buffer, unpack = _pack(dtype_pairs, self._get_device(group, operations))
            scale_in_place(buffer, request.prescale)
            wait = self._reduce(response, request.op, group, buffer, [source.numel() for source, _ in dtype_pairs])
            transfers.append((buffer, wait, unpack))

        def finish() -> None:
            for buffer, wait, unpack in transfers:
                wait()
                scale_in_place(buffer, request.postscale, group.size if request.op == "average" else 1)
                unpack()
            for operation in operations:
                operation.result = tuple(operation.outputs)

        return finish

    def _reduce(self, response: Response, op: Op, group: Group, buffer: torch.Tensor, counts: Sequence[int]) -> Finish:
        """Begins to reduce a buffer in place, and returns the function that waits; `counts`: elements per tensor."""
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
        if self._intra_host is None or self._inter_host is None:
            world = self._world
            same_local_rank = [ranks[world.local_rank] for ranks in world.hosts]
            self._intra_host = world.create_group(world.hosts[world.host], name=f"{self._name}-inside", backend="nccl")
            self._inter_host = world.create_group(same_local_rank, name=f"{self._name}-between", backend="nccl")
        self._intra_host.all_reduce(buffer).wait()
        scale_in_place(buffer, 1.0, self._intra_host.size)
        adasum_all_reduce(buffer, counts, self._inter_host)

    def _allgather(self, response: Response, operations: list[SubmittedOperation], group: Group) -> Finish:
        pieces = [_view_bytes(source) for operation in operations for source in operation.inputs]
        own_bytes = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).to(self._get_device(group, operations))
        # Bytes of each tensor from each rank.
        sizes = [
            [count * _count_row_bytes(source) for count in counts]
            for operation, rows in zip(operations, response.rows, strict=True)
            for source, counts in zip(operation.inputs, rows, strict=True)
        ]
        sizes_by_rank = [list(column) for column in zip(*sizes, strict=True)]
        wait_for_segments = begin_gather(group, own_bytes, list(map(sum, sizes_by_rank)))

        def finish() -> None:
            segments = zip(wait_for_segments(), sizes_by_rank, strict=True)
            # For each tensor: the pieces of all ranks.
            pieces_by_tensor = zip(*(segment.split(sizes) for segment, sizes in segments), strict=True)
            for operation, rows in zip(operations, response.rows, strict=True):
                operation.result = tuple(
                    _view_typed(torch.cat(next(pieces_by_tensor)), source, sum(counts))
                    for source, counts in zip(operation.inputs, rows, strict=True)
                )

        return finish

    def _broadcast(self, response: Response, operations: list[SubmittedOperation], group: Group) -> Finish:
        # A request names the root by its rank in the world; groups count from 0.
        root = self._members.index(operations[0].request.root)
        pairs = [
            (_view_bytes(operation.inputs[0]), operation.outputs[0].view(-1).view(torch.uint8))
            for operation in operations
        ]
        buffer, unpack = _pack(pairs, self._get_device(group, operations), filled=group.rank == root)
        work = group.broadcast(buffer, root)

        def finish() -> None:
            work.wait()
            unpack()
            for operation in operations:
                operation.result = tuple(operation.outputs)

        return finish

    def _alltoall(self, response: Response, operations: list[SubmittedOperation], group: Group) -> Finish:
        device = self._get_device(group, operations)
        transfers = []
        for operation, rows in zip(operations, response.rows, strict=True):
            source, row_bytes = operation.inputs[0], _count_row_bytes(operation.inputs[0])
            # The table has the rows that each rank sends to each.
            send_counts, receive_counts = rows[group.rank], [row[group.rank] for row in rows]
            received = torch.empty(sum(receive_counts) * row_bytes, dtype=torch.uint8, device=device)
            sent = _view_bytes(source)[: sum(send_counts) * row_bytes].to(device)
            receive_splits = [count * row_bytes for count in receive_counts]
            send_splits = [count * row_bytes for count in send_counts]
            work = group.all_to_all(received, sent, receive_splits, send_splits)
            transfers.append((operation, work, received, receive_counts))

        def finish() -> None:
            for operation, work, received, receive_counts in transfers:
                work.wait()
                counts = operation.outputs[0].new_tensor(receive_counts)
                operation.result = (_view_typed(received, operation.inputs[0], sum(receive_counts)), counts)

        return finish

    def _reducescatter(self, response: Response, operations: list[SubmittedOperation], group: Group) -> Finish:
        # An all-to-all of the rows, which each rank then sums: splits may be uneven.
        request, device = operations[0].request, self._get_device(group, operations)
        transfers = []
        for operation in operations:
            for source in operation.inputs:
                row_counts, row_numel = split_rows(source.shape[0], group.size), prod(source.shape[1:])
                # A copy, if prescale changes it: the caller's tensor stays as it is.
                sent = source.reshape(-1).to(device, copy=request.prescale != 1.0)
                scale_in_place(sent, request.prescale)
                own_numel = row_counts[group.rank] * row_numel
                received = torch.empty(group.size * own_numel, dtype=source.dtype, device=device)
                send_splits = [count * row_numel for count in row_counts]
                work = group.all_to_all(received, sent, [own_numel] * group.size, send_splits)
                transfers.append((operation, source, work, received))

        def finish() -> None:
            results: dict[SubmittedOperation, list[torch.Tensor]] = {operation: [] for operation in operations}
            for operation, source, work, received in transfers:
                work.wait()
                piece = torch.sum(received.view(group.size, -1), 0, dtype=received.dtype)
                scale_in_place(piece, request.postscale, group.size if request.op == "average" else 1)
                row_count = split_rows(source.shape[0], group.size)[group.rank]
                results[operation].append(piece.view(row_count, *source.shape[1:]).to(source.device))
            for operation, tensors in results.items():
                operation.result = tuple(tensors)

        return finish


def begin_gather(group: Group, own_bytes: torch.Tensor, sizes: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
    """Begins to send the bytes of every rank to all.

    Args:
        own_bytes: bytes of this rank, uint8, flat.
        sizes: number of bytes of each rank; any may be 0.

    Returns:
        a function that waits, and returns the bytes of each rank.
    """
    max_size, total = max(sizes), sum(sizes)
    if max_size * group.size <= max(MAX_PADDED_BYTES, 2 * total):
        padded = (
            own_bytes
            if len(own_bytes) == max_size
            else torch.nn.functional.pad(own_bytes, (0, max_size - len(own_bytes)))
        )
        out = own_bytes.new_empty(group.size * max_size)
        works = [group.all_gather(out, padded)] if max_size else []
        segments = [row[:size] for row, size in zip(out.view(group.size, max_size), sizes, strict=True)]
    else:
        out = own_bytes.new_empty(total)
        segments = list(out.split(list(sizes)))
        segments[group.rank].copy_(own_bytes)
        works = [group.broadcast(segment, rank) for rank, segment in enumerate(segments) if len(segment)]

    def finish() -> list[torch.Tensor]:
        for work in works:
            work.wait()
        return segments

    return finish


def split_rows(rows: int, ranks: int) -> list[int]:
    """Returns the number of rows of each rank; the first ranks get one more if `ranks` does not divide the rows."""
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
        pairs: (source, out), which may be the same tensor; all of one dtype.
        device: device of the buffer.
        filled: if False, leaves the buffer uninitialised.
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


def _view_typed(data: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    return data.view(like.dtype).view(rows, *like.shape[1:]).to(like.device)
