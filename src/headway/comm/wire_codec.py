"""Codec of float32 numbers for slow links: fp16 or bf16 messages with a power of two as their scale.

A message of k numbers has k + 1 elements; the last is the exponent s of the scale 2^s. fp16 has 5 bits of exponent, so
each message is scaled such that its largest number lies in [2^14, 2^15): nothing saturates, and only numbers below
2^-39 of the largest are flushed to zero. bf16 has the range of fp32 and s = 0.
"""

from __future__ import annotations

from typing import Literal, final

import torch

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

# fp16's largest number is just below 2^16: sums of two messages' parts still fit.
TOP_EXPONENT = 15


@final
class WireCodec:
    """Encodes and decodes messages, and counts the numbers that they lose.

    Args:
        wire: fp16 or bf16. device: of the tensors.

    Attributes:
        lost_numbers: float32 scalar on the device: numbers flushed to zero, and numbers that were not finite.
    """

    def __init__(self, wire: Literal["fp16", "bf16"], device: torch.device) -> None:
        self.type, self._scaled = TYPES[wire], wire == "fp16"
        self.lost_numbers = torch.zeros((), device=device)

    def allocate_message(self, numbers: int, device: torch.device) -> torch.Tensor:
        """Allocates an empty message."""
        return torch.empty(numbers + 1, dtype=self.type, device=device)

    def encode(self, values: torch.Tensor, message: torch.Tensor, terms: int = 1) -> None:
        """Encodes float32 values [k] into a message [k + 1].

        Args:
            terms: leaves room for a sum of this many messages.
        """
        largest = values.abs().amax() if values.numel() else values.new_zeros(())
        self.encode_with_largest(values, message, largest * terms)

    def encode_with_largest(self, values: torch.Tensor, message: torch.Tensor, largest: torch.Tensor) -> None:
        """Encodes values for a known largest magnitude (float32 scalar), for example one that ranks agreed on."""
        body = message[:-1]
        if self._scaled:
            exponent = TOP_EXPONENT - torch.frexp(largest).exponent
            # A sum with infinity in it stays infinite at any scale; 2^126 is the largest that is still a normal number.
            exponent = torch.where(torch.isfinite(largest) & (largest > 0), exponent.clamp(-126, 126), 0)
            torch.mul(values, torch.ldexp(torch.ones_like(largest), exponent), out=body)
            message[-1] = exponent
        else:
            body.copy_(values)
            message[-1] = 0
        flushed = torch.count_nonzero(values) - torch.count_nonzero(body)
        self.lost_numbers += flushed + (~torch.isfinite(largest)).int()

    def decode(self, message: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """Decodes a message [k + 1] into float32 [k], or adds it to `out`."""
        back = torch.ldexp(torch.ones((), device=out.device), -message[-1].float())
        if add:
            out.addcmul_(message[:-1].float(), back)
        else:
            # In two steps: a product of the two would be computed in the message's type.
            out.copy_(message[:-1]).mul_(back)
