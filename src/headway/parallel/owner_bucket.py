"""OwnerBucket: gradients of which each rank gets the sums of those that it owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn

from headway.comm.buckets import NamedParameter, describe_names, is_gapless, view_like
from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import Communicator, PendingOperation
from headway.comm.wire_codec import WireCodec
from headway.core.group import Group
from headway.core.rows import Range


@final
class OwnerBucket:
    """Some gradients, in the order of their owners. Only a rank's own sums stay in its memory.

    It takes the gradients away from the parameters when it is filled, and holds them until they are sent.

    Args:
        parameters: (name, parameter), of one dtype and device.
        get_owner: returns the rank that owns a parameter.
        group: all ranks, in their order.
        round_bytes: bytes of a message to one owner; a larger bucket takes several rounds, so that an owner of a large
            tensor need not receive all of it from all ranks at once.

    Attributes:
        names, parameters, num_missing: as in Bucket.
    """

    def __init__(
        self, parameters: Sequence[NamedParameter], get_owner: Callable[[str], int], group: Group, round_bytes: int
    ) -> None:
        ordered = sorted(parameters, key=lambda named: get_owner(named[0]))
        self._owners = [get_owner(name) for name, _ in ordered]
        self.names, self.parameters = [name for name, _ in ordered], [parameter for _, parameter in ordered]
        self.num_missing = len(ordered)
        self._group = group
        first = self.parameters[0]
        self._ends = [0, *accumulate(parameter.numel() for parameter in self.parameters)]
        sizes = [0] * group.size
        for owner, parameter in zip(self._owners, self.parameters, strict=True):
            sizes[owner] += parameter.numel()
        self._sections = [Range(*pair) for pair in pairwise([0, *accumulate(sizes)])]
        self._round = max(1, round_bytes // first.element_size())
        self._kind = torch.empty(self._ends[-1], dtype=first.dtype, device="meta")
        self._flat: Tensor | None = None
        self._own: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self._kind.element_size()

    @property
    def numel(self) -> int:
        return self._ends[-1]

    def describe(self) -> str:
        return describe_names(self.names)

    def fill(self) -> list[Tensor]:
        """Takes the gradients of the parameters; those without one count as zeros."""
        first = self.parameters[0]
        # A large tensor has a bucket of its own. Its gradient is sent as it is: a copy would need as much again.
        if len(self.parameters) == 1 and first.grad is not None and _can_be_flat(first.grad, first):
            self._flat = first.grad.detach().as_strided((first.numel(),), (1,))
        else:
            self._flat = first.new_empty(self.numel)
            gradients = [(view, parameter.grad) for view, parameter in zip(self._view(), self.parameters, strict=True)]
            if missing := [view for view, gradient in gradients if gradient is None]:
                torch._foreach_zero_(missing)
            there = [(view, gradient) for view, gradient in gradients if gradient is not None]
            if there:
                views, values = map(list, zip(*there, strict=True))
                torch._foreach_copy_(views, values)
        self._drop_gradients()
        return self._view()

    def clear(self) -> None:
        self._flat = self.parameters[0].new_zeros(self.numel)
        self._drop_gradients()

    def start_sum(self, communicator: Communicator, *, algorithm: Algorithm, wire: Wire, tag: str) -> PendingOperation:
        """Sends each part of the gradients to its owner, which adds those of all ranks."""
        codec = communicator.get_codec(wire, self._kind.dtype)

        def run() -> None:
            flat, section = self._flat, self._sections[self._group.rank]
            assert flat is not None
            # Not before the bucket's turn: the sums of all buckets would be there beside the gradients.
            own = flat if section.length == self.numel else flat.new_empty(section.length)
            if flat.is_cuda:
                # It is freed here, while the side stream may still send it.
                flat.record_stream(torch.cuda.current_stream(flat.device))
            for start in range(0, max(section.length for section in self._sections), self._round):
                parts = [_cut(section, start, start + self._round) for section in self._sections]
                mine = parts[self._group.rank]
                out = own[mine.start - section.start : mine.stop - section.start]
                _add_up(flat, parts, out, self._group, codec)
            self._flat, self._own = None, own

        return communicator.run_in_order(run, self._kind, kind="to owners", wire=wire, tag=tag)

    def take_sums(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Returns this rank's own sums, and keeps nothing."""
        own, self._own = self._own, None
        assert own is not None
        if own.is_cuda:
            # It belongs to the side stream.
            own.record_stream(torch.cuda.current_stream(own.device))
        first = self._sections[self._group.rank].start
        places = zip(self.names, self.parameters, pairwise(self._ends), self._owners, strict=True)
        return [
            (name, parameter, view_like(own[start - first : stop - first], parameter))
            for name, parameter, (start, stop), owner in places
            if owner == self._group.rank
        ]

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _view(self) -> list[Tensor]:
        flat = self._flat
        assert flat is not None
        return [
            view_like(flat[start:stop], parameter)
            for parameter, (start, stop) in zip(self.parameters, pairwise(self._ends), strict=True)
        ]


def _cut(section: Range, start: int, stop: int) -> Range:
    """Returns elements `start` to `stop` of a section, as far as it has them."""
    return Range(min(section.start + start, section.stop), min(section.start + stop, section.stop))


def _can_be_flat(gradient: Tensor, parameter: nn.Parameter) -> bool:
    return gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride() and is_gapless(gradient)


def _add_up(flat: Tensor, parts: Sequence[Range], out: Tensor, group: Group, codec: WireCodec | None) -> None:
    """Sends part r of `flat` to rank r, and adds what comes in pairs, as the tree does; `out` may lie in `flat`."""
    # A message of 16 bits has one more element, its scale.
    extra = codec is not None
    sizes = [part.length + (1 if extra and part.length else 0) for part in parts]
    if codec is not None:
        sent = torch.empty(sum(sizes), dtype=codec.dtype, device=flat.device)
        for part, message in zip(parts, sent.split(sizes), strict=True):
            if part.length:
                codec.encode(flat[slice(*part)], message)
    elif sum(sizes) == flat.numel():
        sent = flat
    else:
        sent = torch.cat([flat[slice(*part)] for part in parts])
    mine = sizes[group.rank]
    received = sent.new_empty(mine * group.size)
    group.all_to_all(received, sent, [mine] * group.size, sizes).wait()
    if not mine:
        return
    messages = received.view(group.size, mine)
    if codec is None:
        out.copy_(_add_in_pairs(messages))
        return
    for rank, message in enumerate(messages):
        codec.decode(message, out, add=rank > 0)


def _add_in_pairs(messages: Tensor) -> Tensor:
    """Returns the sum of the rows [ranks, n], which it overwrites: of neighbours first, then of these sums."""
    # The tree of `Communicator` adds in this order, so that owners have the bits of its all-reduce.
    distance = 1
    while distance < len(messages):
        for rank in range(0, len(messages) - distance, 2 * distance):
            messages[rank].add_(messages[rank + distance])
        distance *= 2
    return messages[0]
