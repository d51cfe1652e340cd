"""Codec of float32 numbers for slow links: fp16 or bf16 messages with a power of two as their scale.

A message of k numbers has k + 1 elements; the last is the exponent s of the scale 2^s. fp16 has 5 bits of exponent, so
each message is scaled such that its largest number lies in [2^14, 2^15): nothing saturates, and only numbers below
2^-39 of the largest are flushed to zero. bf16 has the range of fp32 and s = 0.
"""

from __future__ import annotations

from typing import Literal, final

import torch

Wire = Literal["fp32", "fp16", "bf16"]
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

# Exponent of the largest number after scaling. fp16 ends just below 2^16: sums of two messages' parts still fit.
TARGET_EXPONENT = 15


@final
class WireCodec:
    """Encodes and decodes messages, and counts the numbers that they flush to zero.

    Args:
        wire: dtype of the messages, fp16 or bf16.
        device: device of the tensors.

    Attributes:
        dtype: dtype of the messages.
        num_flushed: float32 scalar on the device: numbers flushed to zero, and messages with a non-finite number.
    """

    def __init__(self, wire: Literal["fp16", "bf16"], device: torch.device) -> None:
        self.dtype, self._is_scaled = WIRE_DTYPES[wire], wire == "fp16"
        self.num_flushed = torch.zeros((), device=device)

    def allocate_message(self, numbers: int, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised message [numbers + 1]."""
        return torch.empty(numbers + 1, dtype=self.dtype, device=device)

    def encode(self, values: torch.Tensor, message: torch.Tensor, max_abs: torch.Tensor | None = None) -> None:
        """Encodes float32 values [k] into a message [k + 1], in place.

        Args:
            max_abs: float32 scalar that fp16 is scaled for; default: the largest magnitude of the values. Give all
                ranks the same one, times their number, if the messages are to be summed without overflow.
        """
        if max_abs is None:
            max_abs = values.abs().amax() if values.numel() else values.new_zeros(())
        body = message[:-1]
        if self._is_scaled:
            exponent = TARGET_EXPONENT - torch.frexp(max_abs).exponent
            # A sum with infinity in it stays infinite at any scale; 2^126 is the largest that is still a normal number.
            exponent = torch.where(torch.isfinite(max_abs) & (max_abs > 0), exponent.clamp(-126, 126), 0)
            torch.mul(values, torch.ldexp(torch.ones_like(max_abs), exponent), out=body)
            message[-1] = exponent
        else:
            body.copy_(values)
            message[-1] = 0
        # Counted on the device, so that no message waits for the host.
        flushed = torch.count_nonzero(values) - torch.count_nonzero(body)
        self.num_flushed += flushed + (~torch.isfinite(max_abs)).int()

    def decode(self, message: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """Decodes a message [k + 1] into `out`, float32 [k]; with `add` adds it to `out`."""
        scale = torch.ldexp(torch.ones((), device=out.device), -message[-1].float())
        if add:
            out.addcmul_(message[:-1].float(), scale)
        else:
            # In two steps: a product of the two would be computed in the message's dtype.
            out.copy_(message[:-1]).mul_(scale)
