"""Ranks that speak through the Horovod names, as torchrun would start them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank
from torch import Tensor

import headway.comm.hvd as hvd


def variables(rank: Rank) -> dict[str, str]:
    """torchrun's, with the store of `run_ranks` as that of its agent."""
    local = sum(host == rank.hosts[rank.rank] for host in rank.hosts[: rank.rank])
    return {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(sum(host == rank.hosts[rank.rank] for host in rank.hosts)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rank.store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def started(rank: Rank, **options: Any) -> Iterator[None]:
    """Between `init` and `shutdown`."""
    os.environ.update(variables(rank))
    hvd.init(**options)
    try:
        yield
    finally:
        hvd.shutdown()


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What a rank brings: small whole numbers, so that every type can hold their sums and products."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    found = torch.randint(1, 4, shape, generator=generator)
    return found.bool() if dtype == torch.bool else found.to(dtype)


def refused(kind: type[BaseException], action: Callable[[], Any], *words: str) -> str:
    """The message of an error that has to come, and has to say these words."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert all(word in text for word in words), f"{words} are not all in: {text}"
    return text
