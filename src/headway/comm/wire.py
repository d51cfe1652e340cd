"""What 32-bit numbers look like on a slow link: fp16 or bf16 messages, scaled by a power of two that travels with them.

A message of k numbers is k + 1 elements; the last is the exponent s of the scale 2^s. fp16 has 5 bits of exponent, so
each message is scaled such that its largest number lies in [2^14, 2^15): nothing saturates, and what is flushed to
zero is smaller than 2^-39 of the largest. bf16 has the range of fp32 and s = 0.
"""

from __future__ import annotations

from typing import Literal, final

import torch

Wire = Literal["fp32", "fp16", "bf16"]
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOP = 15
"""fp16's largest number is just below 2^16: sums of two messages' parts still fit."""


@final
class Codec:
    """Makes messages and reads them; counts what they lost.

    Args:
        wire: fp16 or bf16. device: of the tensors.

    Attributes:
        lost: float32 scalar on the device: numbers flushed to zero, and numbers that were not finite.
    """

    def __init__(self, wire: Literal["fp16", "bf16"], device: torch.device) -> None:
        self.type, self._scaled = TYPES[wire], wire == "fp16"
        self.lost = torch.zeros((), device=device)

    def message(self, numbers: int, device: torch.device) -> torch.Tensor:
        """An empty message for so many numbers."""
        return torch.empty(numbers + 1, dtype=self.type, device=device)

    def encode(self, values: torch.Tensor, message: torch.Tensor, terms: int = 1) -> None:
        """Writes float32 values [k] into a message [k + 1].

        Args:
            terms: leaves room for a sum of so many such messages.
        """
        largest = values.abs().amax() if values.numel() else values.new_zeros(())
        self.encode_below(values, message, largest * terms)

    def encode_below(self, values: torch.Tensor, message: torch.Tensor, largest: torch.Tensor) -> None:
        """The same, where the largest magnitude (float32 scalar) is known or agreed on."""
        body = message[:-1]
        if self._scaled:
            exponent = TOP - torch.frexp(largest).exponent
            # A sum with infinity in it stays infinite at any scale; 2^126 is the largest that is still a normal number.
            exponent = torch.where(torch.isfinite(largest) & (largest > 0), exponent.clamp(-126, 126), 0)
            torch.mul(values, torch.ldexp(torch.ones_like(largest), exponent), out=body)
            message[-1] = exponent
        else:
            body.copy_(values)
            message[-1] = 0
        self.lost += (torch.count_nonzero(values) - torch.count_nonzero(body)) + (~torch.isfinite(largest)).int()

    def decode(self, message: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """Reads a message [k + 1] into float32 [k], or adds it to what is there."""
        back = torch.ldexp(torch.ones((), device=out.device), -message[-1].float())
        if add:
            out.addcmul_(message[:-1].float(), back)
        else:
            out.copy_(message[:-1]).mul_(back)  # a product of the two would be computed in the message's type
