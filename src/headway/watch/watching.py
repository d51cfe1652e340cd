"""`headway.watch.watch`: where the time of any PyTorch training loop goes, without a change to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from headway.core.cpu_count import count_rank_cores
from headway.core.errors import UsageError
from headway.core.gloo import gather_json
from headway.doctor.loop_observation import Facts, Observed, RankTime
from headway.observe.step_marks import BACKWARD, StepMarks, StepSeries
from headway.observe.tensor_taps import add_listener, remove_listener
from headway.watch.findings import concluded
from headway.watch.hooks import Hooks

B = TypeVar("B")

WINDOW = 50
"""Steps whose mean is one number of a rank, where the ranks are compared."""
MOST_PLACES = 8


def watch(
    loader: Iterable[B],
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    every: Mapping[str, int] | None = None,
) -> Watch[B]:
    """Watches a training loop: waiting for batches, forward, loss, backward, optimizer, all else; what limits it.

    ```python
    with headway.watch.watch(loader, model, optimizer) as seen:
        for images, labels in seen.loader:
            ...
    print(seen.verdict())
    ```

    It never waits for the device. It takes about 24 us a step, 6 of them for torch's calling of hooks at all, and some
    8 us for each of the first 1,000 values that Python reads, whose places it looks up (one core of a busy two-core
    machine, torch 2.13; median of 41 pairs of 1,000 steps of 95 us, quartiles 21 to 26 us). Without `with`,
    `seen.close()` takes the hooks off.

    Args:
        loader: gives the batches. model: as the loop calls it, compiled or in DistributedDataParallel as it may be; or
            several. optimizer: likewise.
        every: what the loop does now and then, by name: `{"logging": 50}`, in steps. Stalls are matched with it.

    Raises:
        UsageError: one of them is something else.
    """
    models = _several(model, nn.Module, "model", "a torch.nn.Module")
    optimizers = _several(optimizer, torch.optim.Optimizer, "optimizer", "a torch.optim.Optimizer")
    if not hasattr(loader, "__iter__"):
        what = f"an object of type {type(loader).__name__} gives no batches"
        raise UsageError(what, where="loader", fix="Give what the loop is over.")
    for name, steps in (every or {}).items():
        if not isinstance(steps, int) or steps < 1:
            raise UsageError(f"{name!r} is done every {steps!r} steps", where="every", fix="Give a number of steps.")
    return Watch(loader, models, optimizers, dict(every or {}))


@final
class Watch(Generic[B]):
    """What `watch` gives.

    Attributes:
        loader: to loop over, in the place of the loader that was given; has its attributes and its length.
    """

    def __init__(
        self,
        loader: Iterable[B],
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        every: Mapping[str, int],
    ) -> None:
        self._given, self._models, self._optimizers, self._every = loader, models, optimizers, every
        self._device = torch.device("cpu")
        self._samples: int | None = None
        self._current: object = None
        self._marks = StepMarks()
        self._hooks: Hooks | None = Hooks(models, optimizers, self._marks)
        self._autocast: bool | None = None
        self.loader = WatchedLoader(loader, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the hooks off; a loop that still goes on is not watched any more."""
        if self._current is not None:
            self._leave(self._current)
        if self._hooks is not None:
            self._autocast = self._hooks.autocast
            self._hooks.remove()
            self._hooks = None

    @property
    def steps(self) -> int:
        """Steps that were seen to their end, the first few, which do not count, among them."""
        return self._marks.steps

    def verdict(self, *, across_ranks: bool = False) -> Observed:
        """What was seen so far, and what limits the loop; may be asked for at any time.

        Args:
            across_ranks: compare the ranks of torch.distributed: all of them have to call this then, it is a collective
                operation. Nothing is exchanged before.

        Raises:
            UsageError: across_ranks, and torch.distributed is not initialised.
        """
        series = StepSeries.from_rows(list(self._marks.rows))
        if not across_ranks:
            return concluded(series, tuple(self._marks.starts), self._facts())
        if not _distributed():
            fix = "Call torch.distributed.init_process_group first, or leave across_ranks out."
            raise UsageError("torch.distributed is not initialised", where="across_ranks", fix=fix)
        ranks, windows = _gathered(series)
        return concluded(series, tuple(self._marks.starts), self._facts(), ranks=ranks, windows=windows)

    def iterate(self, make: Callable[[], Iterator[B]], *, index: int = -1) -> WatchedIterator[B]:
        """Watches one loop.

        Args:
            make: makes its iterator. index: number of the newest batch that it gave already, from 0 on.
        """
        token = object()
        if self._hooks is None:
            return WatchedIterator(make(), self, token)
        self._device = next((one.device for model in self._models for one in model.parameters()), self._device)
        self._marks.is_device_idle, self._marks.will_exchange = _drained(self._device), _exchanges(self._models)
        if self._current is None:
            add_listener(self._marks)
        self._current = token
        self._marks.begin_loop(index)
        try:
            inner = make()
        except BaseException:
            self._leave(token)
            raise
        self._marks.finish_iterator()
        return WatchedIterator(inner, self, token)

    def _leave(self, token: object) -> None:
        """A loop is given up."""
        if self._current is token:
            self._marks.leave_loop()
            self._done()

    def _done(self) -> None:
        self._current = None
        remove_listener(self._marks)

    def _facts(self) -> Facts:
        loader, device = self._given, self._device
        torchs = loader if isinstance(loader, DataLoader) else None
        read = self._marks.places.most_common(MOST_PLACES)
        places = ((f"{name} at {Path(file).name}:{line}", times) for (name, file, line), times in read if file)
        try:
            batches = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            batches = None
        cuda = device.type == "cuda"
        return Facts(
            device=device.type,
            samples=self._samples,
            batches=batches or None,
            torch_loader=torchs is not None,
            workers=None if torchs is None else torchs.num_workers,
            persistent=torchs is not None and torchs.persistent_workers,
            pinned=torchs is not None and torchs.pin_memory,
            prefetch=None if torchs is None else torchs.prefetch_factor,
            cores=count_rank_cores(),
            threads=torch.get_num_threads(),
            compiled=any(_compiled(model) for model in self._models),
            autocast=self._autocast if self._hooks is None else self._hooks.autocast,
            bf16=cuda and torch.cuda.get_device_capability(device) >= (8, 0),
            fusable=any(_fusable(optimizer) for optimizer in self._optimizers),
            exchange=_exchange(self._models),
            elsewhere=self._marks.elsewhere,
            every=tuple(self._every.items()),
            places=tuple(places),
        )


@final
class WatchedLoader(Generic[B]):
    """A loader whose loops are watched; all else of it is the loader's own."""

    def __init__(self, loader: Iterable[B], watched: Watch[B]) -> None:
        self._loader, self._watched = loader, watched

    def __iter__(self) -> WatchedIterator[B]:
        return self._watched.iterate(lambda: iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._loader, name)


@final
class WatchedIterator(Generic[B]):
    """One loop over a loader; `Watch.iterate` makes it."""

    def __init__(self, inner: Iterator[B], watched: Watch[B], token: object) -> None:
        self._inner, self._watched, self._token = inner, watched, token
        self._marks = watched._marks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        watched, marks = self._watched, self._marks
        if watched._current is not self._token:  # it is over, or another loop over the same loader began since
            return next(self._inner)
        marks.request_batch()
        try:
            batch = next(self._inner)
        except StopIteration:
            marks.end_loop()
            watched._done()
            raise
        except BaseException:
            watched._leave(self._token)
            raise
        marks.receive_batch()
        if watched._samples is None:
            watched._samples = _length(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a loop that was left with `break`
            self._watched._leave(self._token)


def _several(given: Any, kind: type, where: str, what: str) -> tuple[Any, ...]:
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not found:
        raise UsageError("there is none", where=where, fix=f"Give {what}, or several.")
    for one in found:
        if not isinstance(one, kind):
            fix = f"Give {what}, or a list of them; where one wraps another, the inner one."
            raise UsageError(f"an object of type {type(one).__name__} is not {what}", where=where, fix=fix)
    return found


def _drained(device: torch.device) -> Callable[[], bool | None] | None:
    """Asks whether a device has nothing left to do in its current stream, which takes 2 us and waits for nothing."""
    if device.type != "cuda":
        return None

    def ask() -> bool | None:
        try:
            return bool(torch.cuda.current_stream(device).query())
        except RuntimeError:  # another thread captures a graph, and nothing may be asked meanwhile
            return None

    return ask


def _exchanges(models: Sequence[nn.Module]) -> Callable[[], bool] | None:
    """Asks whether the next backward exchanges gradients."""
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return lambda: bool(model.require_backward_grad_sync)
    return None


def _length(batch: Any) -> int | None:
    """Samples of a batch: the first dimension of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((found for one in batch if (found := _length(one)) is not None), None)
    return None


def _compiled(model: nn.Module) -> bool:
    return model._compiled_call_impl is not None or type(model).__name__ == "OptimizedModule"


def _fusable(optimizer: torch.optim.Optimizer) -> bool:
    return "fused" in optimizer.defaults and not any(group.get("fused") for group in optimizer.param_groups)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _exchange(models: Sequence[nn.Module]) -> str:
    """What of the steps' stages is an exchange, in a sentence."""
    if not _distributed() or torch.distributed.get_world_size() == 1:
        return ""
    if any(isinstance(model, nn.parallel.DistributedDataParallel) for model in models):
        return "backward contains the exchange of gradients, and the waiting for other ranks"
    if any(
        "FullyShard" in kind.__name__ or kind.__name__ == "FSDPModule" for model in models for kind in type(model).mro()
    ):
        return "forward and backward contain the exchange of weights and gradients, and the waiting for other ranks"
    return "several ranks train; what they exchange is in the stages in which your loop does it"


def _gathered(series: StepSeries) -> tuple[tuple[RankTime, ...], np.ndarray[Any, np.dtype[np.float64]]]:
    """Of all ranks their steps, and [windows, ranks] the seconds of a step that each takes itself.

    Own is all but backward, in which the ranks wait for each other: as long as one of them computes there, the others
    wait.
    """
    steady = series.select(series.index > 0)
    step, own = steady.seconds.sum(1), steady.seconds.sum(1) - steady.seconds[:, BACKWARD]
    windows = [float(own[first : first + WINDOW].mean()) for first in range(0, len(own) - WINDOW + 1, WINDOW)]
    mine = (float(step.mean()), float(np.percentile(step, 99)), float(own.mean())) if len(step) else None
    everyone = gather_json((mine, windows))
    shortest = min(len(found) for _, found in everyone)
    ranks = tuple(
        RankTime(rank=rank, step_s=times[0], p99_s=times[1], own_s=times[2])
        for rank, (times, _) in enumerate(everyone)
        if times is not None
    )
    return ranks, np.array([found[:shortest] for _, found in everyone], np.float64).T
