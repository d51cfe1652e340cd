"""Runs a watched script inside its own process, as Python would, and finds its training loop.

The loop is the one over the first torch DataLoader on whose batches an optimizer steps, or over one that the script
creates anew from the same data set in each epoch. Its networks are the outermost modules that have weights of that
optimizer. Once they are known, `headway.watch.watch` does the rest.
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
from headway.observe.step_marks import WARM_UP_STEPS
from headway.watch.loop_watch import LoopWatch, WatchedIterator

# Seconds that an optimizer may step outside of any loop over a DataLoader before the script is ended.
LOST_S = 30.0
# It must also step more often than this: one step may take long.
FEW = 3


@final
class WatchEnded(BaseException):
    """Ends the script from inside of its loop. Not an Exception, so that `except Exception` in the script does not
    catch it."""


@final
class ScriptSession:
    """Watches one script.

    Args:
        steps, seconds: limits of the watch; None: no limit.
    """

    def __init__(self, result: Path, steps: int | None, seconds: float | None) -> None:
        self._result, self._steps, self._seconds = result, steps, seconds
        self._loader: DataLoader[Any] | None = None
        self._newest: DataLoader[Any] | None = None
        self._models: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._watch: LoopWatch[Any] | None = None
        self._depth, self._updates = 0, 0
        self._first_step = self._began = 0.0
        self._look_out: list[Callable[[], object]] = []
        self._remove: list[Callable[[], object]] = []
        self._original = DataLoader.__iter__

    def begin(self) -> None:
        """Installs the hooks that look for the loop."""
        # torch.compile warns about the global module hooks below.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        # Every loop over any DataLoader passes here, before it is known which one trains.
        original, session = self._original, self

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return session.iterate(loader, partial(original, loader))

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
        entered = register_module_forward_pre_hook(self._on_forward_begin)
        left = register_module_forward_hook(self._on_forward_end, always_call=True)
        self._look_out = [entered.remove, left.remove]
        self._remove = [register_optimizer_step_pre_hook(self._on_optimizer_step).remove]

    def end(self) -> None:
        """Removes the hooks that look for the loop; a watch that has begun continues."""
        for hooks in (self._look_out, self._remove):
            while hooks:
                hooks.pop()()

    def write_result(self, **said: Any) -> None:
        """Writes the result file, once."""
        if not self._result.exists():
            write_atomically(self._result, json.dumps(said))

    def write_verdict(self) -> None:
        """Writes the verdict, or that there was no loop."""
        if self._watch is not None:
            self.write_result(observed=self._watch.verdict().to_json())
            return
        stepped = f"its optimizer stepped {self._updates} times" if self._updates else "no torch optimizer stepped"
        times = "never" if self._loader is None else "at most once"
        what = "no training loop over a torch.utils.data.DataLoader was seen in this process"
        self.write_result(missing=f"{what}: {stepped}, {times} in a loop over one")

    def iterate(self, loader: DataLoader[Any], make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Replaces iter(loader)."""
        if self._watch is not None and self._is_watched_loader(loader):
            return LoopProxy(self, loader, self._watch.iterate(make), watched=True)
        return LoopProxy(self, loader, make(), watched=False)

    def on_request(self, loader: DataLoader[Any]) -> None:
        """Called when a loop asks for its next batch."""
        if self._watch is None and self._optimizers and self._is_watched_loader(loader):
            # The optimizer has stepped once, so every network of a step has been called.
            own = {
                id(one) for opt in self._optimizers.values() for group in opt.param_groups for one in group["params"]
            }
            trained = [one for one in self._models.values() if any(id(weight) in own for weight in one.parameters())]
            while self._look_out:
                # The global hooks slow every module down, so they go as soon as the loop is known.
                self._look_out.pop()()
            models = trained or [one for one in self._models.values() if any(True for _ in one.parameters())]
            self._watch, self._began = LoopWatch(loader, models, list(self._optimizers.values()), {}), monotonic()
        if self._watch is not None:
            steps = self._steps is not None and self._watch.steps >= self._steps + WARM_UP_STEPS
            if steps or (self._seconds is not None and monotonic() - self._began >= self._seconds):
                self._end_script()

    def on_batch(self, loader: DataLoader[Any]) -> None:
        """Called when a loop got a batch."""
        self._newest = loader

    def take_over(self, loader: DataLoader[Any], inner: Iterator[Any], served: int) -> WatchedIterator[Any] | None:
        """Returns the iterator watched from here on; None: it is not over the watched loader."""
        if self._watch is None or not self._is_watched_loader(loader):
            return None
        return self._watch.iterate(lambda: inner, index=served - 1)

    def _is_watched_loader(self, loader: DataLoader[Any]) -> bool:
        """Returns True if a loader is the loop's, or was made in the same way: same data set, batch size and kind of
        sampler."""
        one = self._loader
        return loader is one or (
            one is not None
            and loader.dataset is one.dataset
            and loader.batch_size == one.batch_size
            and type(loader.sampler) is type(one.sampler)
        )

    def _end_script(self) -> NoReturn:
        if self._watch is not None:
            self._watch.close()
        self.write_verdict()
        raise WatchEnded

    def _on_forward_begin(self, module: nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling():
            # Depth 1: an outermost call. Inner modules are parts of a network that is counted already.
            self._depth += 1
            if self._depth == 1 and torch.is_grad_enabled():
                self._models[id(module)] = module

    def _on_forward_end(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._depth -= 1

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._updates += 1
        now = monotonic()
        self._first_step = self._first_step or now
        if self._watch is not None:
            late = self._seconds is not None and now - self._began > self._seconds + LOST_S
        else:
            # An optimizer belongs to the loop that got the newest batch.
            if self._newest is not None:
                self._loader = self._newest if self._loader is None else self._loader
                self._optimizers[id(optimizer)] = optimizer
            late = self._updates > FEW and now - self._first_step > LOST_S
        if late:
            # The script asks for no more batches, which is the usual moment to end it.
            self._end_script()


@final
class LoopProxy:
    """One loop over a DataLoader of the script."""

    def __init__(self, session: ScriptSession, loader: DataLoader[Any], inner: Iterator[Any], *, watched: bool) -> None:
        self._session, self._loader, self._inner, self._watched, self._served = session, loader, inner, watched, 0

    def __iter__(self) -> LoopProxy:
        return self

    def __next__(self) -> Any:
        self._session.on_request(self._loader)
        if (
            not self._watched
            and (other := self._session.take_over(self._loader, self._inner, self._served)) is not None
        ):
            self._inner, self._watched = other, True
        batch = next(self._inner)
        self._served += 1
        self._session.on_batch(self._loader)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def main(result: str, limits: str, script: str, *arguments: str) -> None:
    """Runs the script and writes its result to the file `result`."""
    session = ScriptSession(Path(result), **json.loads(limits))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    session.begin()
    try:
        runpy.run_path(script, run_name="__main__")
    except WatchEnded:
        pass
    except SystemExit as left:
        if left.code not in (None, 0):
            if not isinstance(left.code, int):
                print(left.code, file=sys.stderr)
            session.write_result(failed=f"it left with status {left.code if isinstance(left.code, int) else 1}")
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
