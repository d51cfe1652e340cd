"""Runs a watched script inside its own process, as Python would, and finds its training loop.

The loop is the one over the first torch DataLoader or `headway.Loader` on whose batches an optimizer steps, or over one
that the script creates anew from the same data set in each epoch. Its networks are the outermost modules that have
weights of that optimizer. Once they are known, `headway.watch.watch` does the rest.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from headway.core.files import write_atomically
from headway.data.dataset import Dataset
from headway.data.loader import Loader
from headway.observe.step_marks import WARM_UP_STEPS
from headway.watch.loop_watch import LoopWatch, WatchedIterator

AnyLoader = DataLoader[Any] | Loader[Any]

# Seconds that an optimizer may step outside of any loop over a loader before the script is ended.
MAX_UNWATCHED_S = 30.0
# It must also step more often than this: one step may take long.
MIN_UNWATCHED_STEPS = 3


@final
class WatchEnded(BaseException):
    """Ends the script from within its loop. `except Exception` in the script does not catch a BaseException."""


@final
class ScriptSession:
    """Watches one script.

    Args:
        result: JSON file to write.
        steps: most steps of the watch, after the warm-up; None: no limit.
        seconds: longest duration of the watch; None: no limit.
    """

    def __init__(self, result: Path, steps: int | None, seconds: float | None) -> None:
        self._result = result
        self._steps, self._seconds = steps, seconds
        self._loader: AnyLoader | None = None
        self._newest_loader: AnyLoader | None = None
        self._models: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._watch: LoopWatch[Any] | None = None
        self._forward_depth = 0
        self._updates = 0
        self._first_step_s = self._began_s = 0.0
        self._search_hooks: list[Callable[[], object]] = []
        self._step_hooks: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Installs the hooks that look for the loop."""
        # torch.compile warns about the global module hooks below.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        # Every loop over any loader passes here, before it is known which one trains.
        DataLoader.__iter__ = self._build_iterate(DataLoader.__iter__)  # type: ignore[method-assign,assignment]
        Loader.__iter__ = self._build_iterate(Loader.__iter__)  # type: ignore[method-assign]
        pre_hook = register_module_forward_pre_hook(self._on_forward_begin)
        post_hook = register_module_forward_hook(self._on_forward_end, always_call=True)
        self._search_hooks = [pre_hook.remove, post_hook.remove]
        self._step_hooks = [register_optimizer_step_pre_hook(self._on_optimizer_step).remove]

    def _build_iterate(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def iterate(loader: Any) -> Iterator[Any]:
            return self.iterate(loader, partial(original, loader))

        return iterate

    def end(self) -> None:
        """Removes the hooks that look for the loop; a watch that has begun continues."""
        for hooks in (self._search_hooks, self._step_hooks):
            while hooks:
                hooks.pop()()

    def write_result(self, **fields: Any) -> None:
        """Writes fields to the result file, as JSON. Only the first call has an effect."""
        # The verdict at the limit counts, not the exit of the script that follows it.
        if not self._result.exists():
            write_atomically(self._result, json.dumps(fields))

    def write_verdict(self) -> None:
        """Writes the verdict, or the reason why no training loop was found."""
        if self._watch is not None:
            self.write_result(observed=self._watch.verdict().to_json())
            return
        optimizer_text = (
            f"its optimizer stepped {self._updates} times" if self._updates else "no torch optimizer stepped"
        )
        times_text = "never" if self._loader is None else "at most once"
        what = "no training loop over a torch DataLoader or a headway.Loader was seen in this process"
        self.write_result(missing=f"{what}: {optimizer_text}, {times_text} in a loop over one")

    def iterate(self, loader: AnyLoader, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns the iterator of a loop over a loader of the script. It replaces the loader's `__iter__`.

        Args:
            make_iterator: calls the original `__iter__`.
        """
        if self._watch is not None and self._is_watched_loader(loader):
            return LoopProxy(self, loader, self._watch.iterate(make_iterator), watched=True)
        return LoopProxy(self, loader, make_iterator(), watched=False)

    def on_request(self, loader: AnyLoader) -> None:
        """Handles the request of a loop for its next batch: begins the watch, or ends the script at its limit."""
        if self._watch is None and self._optimizers and self._is_watched_loader(loader):
            # The optimizer has stepped once, so every network of a step has been called.
            trained_ids = {
                id(parameter)
                for optimizer in self._optimizers.values()
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
            trained_modules = [
                module
                for module in self._models.values()
                if any(id(parameter) in trained_ids for parameter in module.parameters())
            ]
            while self._search_hooks:
                # The global hooks slow every module down, so they go as soon as the loop is known.
                self._search_hooks.pop()()
            models = trained_modules or [
                module for module in self._models.values() if any(True for _ in module.parameters())
            ]
            self._watch = LoopWatch(loader, models, list(self._optimizers.values()), {})
            self._began_s = monotonic()
        if self._watch is not None:
            has_enough_steps = self._steps is not None and self._watch.steps >= self._steps + WARM_UP_STEPS
            if has_enough_steps or (self._seconds is not None and monotonic() - self._began_s >= self._seconds):
                self._end_script()

    def on_batch(self, loader: AnyLoader) -> None:
        """Remembers the loader of the newest batch."""
        self._newest_loader = loader

    def take_over(self, loader: AnyLoader, iterator: Iterator[Any], served: int) -> WatchedIterator[Any] | None:
        """Returns an iterator that watches the rest of a loop; None: the loop is not over the watched loader.

        Args:
            iterator: the original iterator of the loop.
            served: number of batches that the loop has got from it.
        """
        if self._watch is None or not self._is_watched_loader(loader):
            return None
        return self._watch.iterate(lambda: iterator, index=served - 1)

    def _is_watched_loader(self, loader: AnyLoader) -> bool:
        """Returns True if a loader is the watched one, or has the same data set, batch size and type of sampler."""
        # Some scripts make a new loader for each epoch.
        watched_loader = self._loader
        return loader is watched_loader or (
            watched_loader is not None and _describe_serving(loader) == _describe_serving(watched_loader)
        )

    def _end_script(self) -> NoReturn:
        if self._watch is not None:
            self._watch.close()
        self.write_verdict()
        raise WatchEnded

    def _on_forward_begin(self, module: nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling():
            # Depth 1: an outermost call. Inner modules are parts of a network that is counted already.
            self._forward_depth += 1
            if self._forward_depth == 1 and torch.is_grad_enabled():
                self._models[id(module)] = module

    def _on_forward_end(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._forward_depth -= 1

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._updates += 1
        now = monotonic()
        self._first_step_s = self._first_step_s or now
        if self._watch is not None:
            is_late = self._seconds is not None and now - self._began_s > self._seconds + MAX_UNWATCHED_S
        else:
            # An optimizer belongs to the loop that got the newest batch.
            if self._newest_loader is not None:
                self._loader = self._newest_loader if self._loader is None else self._loader
                self._optimizers[id(optimizer)] = optimizer
            is_late = self._updates > MIN_UNWATCHED_STEPS and now - self._first_step_s > MAX_UNWATCHED_S
        if is_late:
            # The script asks for no more batches, which is the usual moment to end it.
            self._end_script()


@final
class LoopProxy:
    """One loop over a loader of the script."""

    def __init__(self, session: ScriptSession, loader: AnyLoader, inner: Iterator[Any], *, watched: bool) -> None:
        self._session = session
        self._loader = loader
        self._inner, self._watched = inner, watched
        self._served = 0

    def __iter__(self) -> LoopProxy:
        return self

    def __next__(self) -> Any:
        self._session.on_request(self._loader)
        if (
            not self._watched
            and (watched_iterator := self._session.take_over(self._loader, self._inner, self._served)) is not None
        ):
            self._inner, self._watched = watched_iterator, True
        batch = next(self._inner)
        self._served += 1
        self._session.on_batch(self._loader)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def _describe_serving(loader: AnyLoader) -> tuple[Any, ...]:
    """Returns what a loader serves, in facts that also differ between training and evaluation on one data set."""
    if isinstance(loader, Loader):
        # A Loader of a path opens the data set anew.
        dataset = loader.dataset.fingerprint if isinstance(loader.dataset, Dataset) else id(loader.dataset)
        return Loader, dataset, loader.spec.batch, loader.spec.draws_order
    return DataLoader, id(loader.dataset), loader.batch_size, type(loader.sampler)


def main(result: str, limits: str, script: str, *arguments: str) -> None:
    """Runs the script and writes its result.

    Args:
        result: JSON file to write.
        limits: JSON of the arguments `steps` and `seconds` of `ScriptSession`.
        script: path of the script.
        arguments: its command-line arguments.
    """
    session = ScriptSession(Path(result), **json.loads(limits))
    # As Python does when it runs a script.
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    session.begin()
    try:
        runpy.run_path(script, run_name="__main__")
    except WatchEnded:
        pass
    except SystemExit as exit_request:
        if exit_request.code not in (None, 0):
            if not isinstance(exit_request.code, int):
                print(exit_request.code, file=sys.stderr)
            session.write_result(
                failed=f"it left with status {exit_request.code if isinstance(exit_request.code, int) else 1}"
            )
    except Exception as error:
        traceback.print_exception(type(error), error, _skip_own_frames(error.__traceback__, script))
        session.write_result(failed=f"{type(error).__name__}: {error}")
    finally:
        session.end()
    session.write_verdict()


def _skip_own_frames(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Returns the traceback from the script's first frame on, as Python shows it."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(*sys.argv[1:])
