"""Callbacks of a run: calls the hooks, keeps their state, and refuses what would break an exact resume."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from headway.core.errors import CheckpointError, HeadwayError, RecipeError, TrainingError, UserCodeError
from headway.data.workers.user_failure import find_user_place
from headway.setup.user_callbacks import NamedCallback
from headway.training.callback_context import CallbackContext
from headway.training.callback_guard import TrainingGuard, separate_generators
from headway.training.callback_state import decode_state, encode_state, fingerprint_attributes

if TYPE_CHECKING:
    from headway.training.trainer import Trainer

LOG = logging.getLogger("headway.training")


@final
class _Entry:
    """A callback on this rank.

    Attributes:
        calls: hooks called so far.
        attributes: fingerprints of its attributes after `on_start`, to find state that no checkpoint holds.
        loaded_step: step of the state that was loaded into it; None without one.
    """

    def __init__(self, named: NamedCallback, key: str) -> None:
        self.callback, self.name, self.place, self.key = named.callback, named.name, named.place, key
        self.is_started = False
        self.calls = 0
        self.attributes: dict[str, Any] = {}
        self.loaded_step: int | None = None

    @property
    def has_state(self) -> bool:
        return hasattr(self.callback, "state_dict") and hasattr(self.callback, "load_state_dict")

    @property
    def runs_on_every_rank(self) -> bool:
        return bool(getattr(self.callback, "every_rank", False))

    @property
    def changes_training(self) -> bool:
        return bool(getattr(self.callback, "changes_training", False))


@final
class Callbacks:
    """The callbacks of one trainer. Without any, each of its methods returns at once.

    A callback runs on rank 0; with the attribute `every_rank = True`, on all ranks. Its random numbers are drawn from
    generators of their own. With `changes_training = True` it may change the weights, buffers and the optimizer's
    state, which a checkpoint holds; all other changes of the training are refused.

    Args:
        trainer: a proxy, because a reference cycle would keep the trainer's tensors.
    """

    def __init__(self, trainer: Trainer, callbacks: Sequence[NamedCallback]) -> None:
        self._trainer = trainer
        # A checkpoint tells two callbacks of one class apart by their numbers.
        seen: Counter[str] = Counter()
        self._entries = []
        for named in callbacks:
            seen[named.name] += 1
            number = seen[named.name]
            self._entries.append(_Entry(named, named.name if number == 1 else f"{named.name} ({number})"))
        # The guard lists all tensors of the network: a run without callbacks does not pay for that.
        self._guard = TrainingGuard(trainer.setup) if callbacks else None
        self._context = CallbackContext(trainer, self._guard.renew if self._guard else lambda: None)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def start(self) -> None:
        """Calls `on_start`, before the first step of this process."""
        ranks = self._trainer.ranks
        for entry in self._entries:
            if entry.changes_training and not entry.runs_on_every_rank and ranks is not None and ranks.world.size > 1:
                what = f"{entry.name!r} changes the training on rank 0 alone, and the ranks would drift apart"
                raise RecipeError(what, where=entry.place, fix="Set every_rank = True in its class.")
        self._run_hook("on_start")
        self.flush()

    def step(self) -> None:
        """Calls `on_step`, after a step."""
        if self._entries:
            self._run_hook("on_step")
            self._trainer.clock.lap("callbacks")

    def evaluate(self) -> None:
        """Calls `on_evaluate`, after an evaluation."""
        self._run_hook("on_evaluate")
        self.flush()

    def epoch(self) -> None:
        """Calls `on_epoch`, after an epoch and its evaluation."""
        self._run_hook("on_epoch")
        self.flush()

    def end(self) -> None:
        """Calls `on_end`, when the run is at its end or stops."""
        self._run_hook("on_end")
        self.flush()

    def flush(self) -> None:
        """Writes the numbers that the callbacks have logged; waits for the device if they are tensors."""
        trainer, context = self._trainer, self._context
        seconds = trainer.clock.total_seconds()
        for step, position, numbers in context.pending:
            values = {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}
            at = {"step": step, "position": position, "epoch": position / trainer.setup.epoch}
            trainer.accumulator.write({"kind": "callback", **at, **values, "seconds": seconds})
        context.pending.clear()

    def state(self) -> dict[str, Any] | None:
        """Returns the state of the callbacks that run on this rank, for a checkpoint; None if there are no callbacks.

        Raises:
            TrainingError: a callback has a state that is not saved. UserCodeError: its state_dict failed.
        """
        if not self._entries:
            return None
        states: dict[str, Any] = {}
        for entry in filter(self._is_active, self._entries):
            # Before `on_start` there are no fingerprints to compare with.
            if entry.is_started:
                self._expect_saved_state(entry)
            states[entry.key] = self._read_state(entry) if entry.has_state else None
        return states

    def load_state(self, states: Any, step: int, where: str) -> None:
        """Restores such a state. Raises CheckpointError: it is damaged. UserCodeError: a load_state_dict failed."""
        # Older checkpoints, and ranks that run no callbacks, have none.
        if states is None:
            states = {}
        if not isinstance(states, dict):
            raise CheckpointError("its manifest has no good scalars.callbacks", where=where)
        for entry in self._entries:
            if (encoded := states.get(entry.key)) is None:
                if entry.has_state and self._is_active(entry):
                    LOG.warning(f"{where} has no state of the callback {entry.name!r}: it goes on as it is.")
                continue
            if not entry.has_state:
                what = f"it has a state of the callback {entry.name!r}, which has no load_state_dict now"
                raise CheckpointError(what, where=where, fix=f"Give it one: {entry.place}.")
            try:
                state = decode_state(encoded)
            # Whatever decoding a foreign or damaged value can raise: a checkpoint is not trusted.
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                what = f"its state of the callback {entry.name!r} is damaged ({error})"
                raise CheckpointError(what, where=where) from None
            self._call(entry, "load_state_dict", state)
            entry.loaded_step = step
        gone = sorted(states.keys() - {entry.key for entry in self._entries})
        if gone:
            LOG.warning(f"The run goes on without the callback {gone[0]!r}, which it had before.")

    def _is_active(self, entry: _Entry) -> bool:
        return self._trainer.is_lead or entry.runs_on_every_rank

    def _run_hook(self, hook: str) -> None:
        # Counted over all callbacks, also those that do not run here: the number seeds the generators, and must not
        # depend on the rank.
        for number, entry in enumerate(self._entries):
            if not self._is_active(entry):
                continue
            if not entry.is_started:
                entry.is_started = True
                # The former lead was lost, and its callbacks with it.
                if hook != "on_start":
                    self._tell_takeover(entry)
                self._call_guarded(entry, number, "on_start")
                entry.attributes = fingerprint_attributes(entry.callback)
            if hook != "on_start":
                self._call_guarded(entry, number, hook)

    def _call_guarded(self, entry: _Entry, number: int, hook: str) -> None:
        """Calls a hook, if the callback has it, with generators of its own, and refuses changes of the training."""
        if not hasattr(entry.callback, hook):
            return
        trainer, guard, context = self._trainer, self._guard, self._context
        assert guard is not None
        entry.calls += 1
        # Reading all weights waits for the device: at calls 1, 2, 4, 8, ... only.
        is_deep = entry.calls & (entry.calls - 1) == 0
        context.begin_hook(entry.name)
        guard.begin(deep=is_deep and not entry.changes_training)
        with separate_generators(trainer.setup.device, trainer.setup.recipe.seed, trainer.position, number):
            self._call(entry, hook, context)
        if change := guard.find_change(allows_weights=entry.changes_training):
            what, fix = change
            raise TrainingError(f"{hook} of the callback {entry.name!r} {what}", where=_find_hook(entry, hook), fix=fix)
        # The fingerprints are taken after `on_start`, and no checkpoint follows `on_end`.
        if is_deep and hook not in ("on_start", "on_end"):
            self._expect_saved_state(entry)
        if context.panels:
            trainer.accumulator.log.write_panels(context.panels, trainer.step)
            context.panels.clear()

    def _call(self, entry: _Entry, method: str, *arguments: Any) -> Any:
        try:
            return getattr(entry.callback, method)(*arguments)
        # Its message says what, where and how to fix it already.
        except HeadwayError:
            raise
        except Exception as error:
            what = f"{method} of the callback {entry.name!r} failed: {type(error).__name__}: {error}"
            raise UserCodeError(what, where=find_user_place(error)) from error

    def _read_state(self, entry: _Entry) -> Any:
        state = self._call(entry, "state_dict")
        try:
            return encode_state(state)
        except TypeError as error:
            what = f"state_dict of the callback {entry.name!r} cannot be saved: {error}"
            fix = "Return numbers, texts, lists, tuples, dicts with texts as keys, arrays and tensors"
            raise TrainingError(what, where=_find_hook(entry, "state_dict"), fix=fix) from None

    def _expect_saved_state(self, entry: _Entry) -> None:
        """Raises TrainingError if a callback without state_dict changes an attribute."""
        if entry.has_state:
            return
        unsaved = getattr(entry.callback, "unsaved", ())
        now = fingerprint_attributes(entry.callback)
        for name in sorted(now.keys() | entry.attributes.keys()):
            if now.get(name) != entry.attributes.get(name) and name not in unsaved:
                what = f"the callback {entry.name!r} changes its attribute {name!r}, which no checkpoint would hold"
                fix = f'Give its class state_dict and load_state_dict, or unsaved = ("{name}",) if a resume may lose it'
                raise TrainingError(what, where=entry.place, fix=fix)

    def _tell_takeover(self, entry: _Entry) -> None:
        if entry.has_state:
            since = "its first state" if entry.loaded_step is None else f"its state of step {entry.loaded_step:,}"
            what = f"The callback {entry.name!r} goes on here with {since}: what it saw on the lost rank is gone"
            LOG.warning(f"{what}. With every_rank = True each rank has the state.")


def _find_hook(entry: _Entry, method: str) -> str:
    """Returns `file:line` of a method of a callback, or the place of its class."""
    code = getattr(getattr(entry.callback, method, None), "__code__", None)
    return entry.place if code is None else f"{code.co_filename}:{code.co_firstlineno}"
