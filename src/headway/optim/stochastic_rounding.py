"""Stochastic rounding of float32 to bfloat16: up or down at random, such that the mean is the value itself.

Rounding to the nearest number loses every update of less than half a last digit, 1/256 of a weight. Rounded
stochastically, such an update moves the weight in one step out of many, and by as much on average (Gupta et al. 2015,
arXiv 1502.02551). So weights need no float32 copy, and a second moment with beta2 0.999 does not stand still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.core.random_keys import GOLDEN, mix_int

CHUNK_NUMEL = 1 << 24
"""Most elements that are rounded at once. Random bits take 4 temporary numbers of 4 bytes for each."""
# Signed forms of the two factors of lowbias32 (native/update.h).
_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)


@final
class StochasticRounding:
    """Rounds the weights and the state of an optimizer with random bits that depend on a seed.

    The bits are those of (seed, parameter, step, array, element): they are alike on any number of threads, on all ranks
    with whole parameters, and after a resume. The native core computes the same ones.

    Args:
        seed: of the random bits.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._words: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def check(self, parameter: Tensor) -> None:
        """Raises UsageError if a parameter is neither float32 nor bfloat16."""
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            what = f"a state in bfloat16 is for parameters in float32 or bfloat16, and one is {parameter.dtype}"
            raise UsageError(what, fix="Convert the network to one of them, or leave out use_bf16.")

    def compute_key(self, number: int) -> int:
        """Returns the 64-bit key of a parameter from its number in the optimizer."""
        return mix_int(mix_int(self.seed) + (number + 1) * GOLDEN)

    def round_(self, values: list[Tensor], numbers: Sequence[int], steps: Tensor, array: int) -> None:
        """Rounds float32 tensors to numbers of bfloat16, in place. Infinities and NaN stay as they are.

        Args:
            values: tensors without gaps in memory.
            numbers: numbers of their parameters in the optimizer.
            steps: the number of this step for each parameter, from 1 on, [n] on the device.
            array: 0 for weights, 1 and 2 for first and second states.
        """
        words = [self._make_words(number, values[0].device) for number in numbers]
        low, high = (torch.stack(half) for half in zip(*words, strict=True))
        bases = _mix(low ^ (4 * steps.to(torch.int32) + array))
        keys = _mix(high ^ bases)
        base_by_value, key_by_value = bases.unbind(), keys.unbind()
        # In the order of memory, as the native core counts elements.
        flat = [value.as_strided((value.numel(),), (1,)) for value in values]
        for pieces in _divide([len(one) for one in flat]):
            sizes = [end - begin for _, begin, end in pieces]
            counter = torch.arange(max(sizes), dtype=torch.int32, device=values[0].device)
            # A piece in the middle of a tensor is rare, and costs a kernel.
            firsts = [base_by_value[index] + begin if begin else base_by_value[index] for index, begin, _ in pieces]
            elements = torch.cat([counter[:size] for size in sizes])
            elements += torch.cat([first.expand(size) for first, size in zip(firsts, sizes, strict=True)])
            second = torch.cat([key_by_value[index].expand(end - begin) for index, begin, end in pieces])
            random = _mix(elements, second).bitwise_and_(0xFFFF)
            parts = [flat[index][begin:end] for index, begin, end in pieces]
            rounded = torch.cat(parts)
            # One that carries would become infinite, or 0.
            is_nan = rounded.isnan()
            rounded.view(torch.int32).add_(random).bitwise_and_(-0x10000)
            rounded.masked_fill_(is_nan, torch.nan)
            torch._foreach_copy_(parts, list(rounded.split(sizes)))

    def _make_words(self, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns both halves of a parameter's key, int32 scalars on a device."""
        if (number, device) not in self._words:
            key = self.compute_key(number)
            halves = [(word & 0xFFFFFFFF) - ((word & 0x80000000) << 1) for word in (key, key >> 32)]
            # Filled on the device: a copy from the host would be a host-device sync.
            low, high = (torch.full((), half, dtype=torch.int32, device=device) for half in halves)
            self._words[number, device] = low, high
        return self._words[number, device]


def _mix(words: Tensor, key: Tensor | None = None) -> Tensor:
    """Mixes 32-bit words one to one, in place: Wellons 2018, "Prospecting for hash functions", lowbias32.

    Args:
        words: int32, whose products wrap around.
        key: a second word for each, which enters between the two halves.
    """
    # The masks make the shift of a negative number one of an unsigned word.
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _FIRST_FACTOR
    if key is not None:
        words ^= key
    words ^= (words >> 15).bitwise_and_(0x1FFFF)
    words *= _SECOND_FACTOR
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


def _divide(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields lists of pieces (tensor, begin, end) of CHUNK_NUMEL elements together at most; none is empty."""
    pieces: list[tuple[int, int, int]] = []
    free = CHUNK_NUMEL
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + free)
            pieces.append((index, begin, end))
            free -= end - begin
            begin = end
            if free == 0:
                yield pieces
                pieces, free = [], CHUNK_NUMEL
    if pieces:
        yield pieces
