"""The decorator `run`: continues training with the remaining workers, or with new ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from headway.comm.hvd import lifecycle
from headway.comm.hvd.elastic.state import State
from headway.comm.hvd.errors import HorovodInternalError, HostsUpdatedInterrupt

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Wraps a training function whose first argument is a State, so that it survives changes of the workers.

    The wrapper synchronises the state and calls the function. If a collective fails, as it does when a worker is lost,
    the state goes back to its last commit; if new workers wait, it stays as it is. In both cases the present workers
    connect, the reset callbacks are called, and the function is called again. Run no collective before it: new workers
    begin here.

    Raises:
        HorovodInternalError: a worker was lost, and there is no launcher to bring the others together again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        # Each iteration is one set of workers.
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                # Without Headway's launcher nobody tells the remaining workers who is left.
                if not lifecycle.can_reinitialise():
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            lifecycle.reinitialise()
            state.on_reset()

    return wrapper
