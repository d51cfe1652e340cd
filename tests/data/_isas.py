"""A native decoder of each instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from headway.data.decode import Decoder, build_decoder

ISAS = ("portable", "avx2", "avx512")
"""One that the processor lacks is its best one once more."""


@contextmanager
def each_isa() -> Iterator[list[Decoder]]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        found = []
        for name in ISAS:
            patch.setenv("HEADWAY_ISA", name)
            found.append(build_decoder(1, "native"))
            stack.callback(found[-1].close)
        patch.undo()
        yield found
