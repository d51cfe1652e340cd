"""Processes on this machine as forks of one server, which has imported torch and the bench once for all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing

# All that bench.parallel imports, for every child imports the main module again.
PRELOADED = tuple(
    f"bench._parallel.{name}"
    for name in ("asynchronous", "balance", "full_shards", "local_claims", "menu", "operations", "saved")
)


def make_context() -> ForkServerContext:
    """Returns the context of such processes. An import of torch in each would take two seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_ranks(function: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Calls `function(rank, *args)` in a process for each rank, and waits for all of them.

    Raises:
        ProcessExitedException: a process was killed.
        ProcessRaisedException: a process raised an error.
    """
    make_context()
    torch.multiprocessing.start_processes(function, args, nprocs=ranks, start_method="forkserver")
