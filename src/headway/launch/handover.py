"""Brings the ranks of a new generation to one state.

Ranks that are behind take the state of the lowest rank that is ahead. A new process has no state. If every rank with
the state was lost, one rank loads the newest checkpoint and sends it to the others. No rank restarts at step 0 a run
that others have trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from headway.checkpoint.checkpoints import Checkpoint
from headway.core.errors import HeadwayError
from headway.core.world import Group, World

TransferredState = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
"""Scalars, as JSON, and tensors by name."""


class AgreedChoice(Protocol):
    """A choice that all ranks make together from the votes of each."""

    def get_vote(self) -> Any:
        """Returns the vote of this rank, as JSON values."""

    def agree_on_votes(self, votes: Sequence[Any]) -> str:
        """Decides from the votes of all ranks, in the same order on each. Returns a message, or an empty string."""


class SavedFiles(Protocol):
    """The files of a run on the disk, as this rank sees them."""

    def is_ahead(self, step: int) -> bool:
        """Returns True if a later step has a complete checkpoint."""

    def describe(self) -> dict[str, Any]:
        """Describes the files, for JSON.

        Keys: `step` of the newest checkpoint (-1: none), `seen` (True if the run folder exists here), `recorded` (steps
        in its metrics), and `error` (`what`, `where`, `fix`) if the checkpoints cannot be reached.
        """

    def read(self) -> tuple[Checkpoint, list[str]]:
        """Reads the newest intact checkpoint, with messages about skipped ones. Raises HeadwayError without one."""

    def explain_missing_state(self, recorded: int) -> HeadwayError:
        """Builds the error of a run that cannot continue, with its number of recorded steps."""


class StateCarrier(Protocol):
    """Carries the training state from generation to generation. The Trainer's `Recovery` is one."""

    @property
    def step(self) -> int:
        """Number of steps done."""

    @property
    def precision(self) -> AgreedChoice:
        """The choice of precision, which all ranks make together."""

    @property
    def past(self) -> SavedFiles:
        """The files to continue from if no rank holds the state."""

    def collect_settings(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks, for JSON."""

    @property
    def progress(self) -> int:
        """A number that grows with each action, the same on all ranks; -1 without a state."""

    def is_saving(self) -> bool:
        """Returns True if a checkpoint is being written; it may still fail."""

    def state(self) -> TransferredState:
        """Returns the state. Called on the rank that is ahead."""

    def load_state(self, scalars: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Loads the state of the rank that is ahead. Called on ranks that are behind."""

    def go_back(self, checkpoint: Checkpoint | None, progress: int) -> None:
        """Continues from a checkpoint, or from the beginning if it is None, with `progress` from now on."""


class HandoverResult(NamedTuple):
    """Result of a handover.

    Attributes:
        unsaved: True if a rank was writing a checkpoint.
        names: names of all processes.
    """

    unsaved: bool
    names: tuple[str, ...]


def hand_over(
    world: World, name: str, carrier: StateCarrier, say: Callable[[str], object], *, was_lead: bool
) -> HandoverResult:
    """Brings all ranks of a world to the state of the rank that is ahead.

    Args:
        name: name of this process.
        say: shows a message to the user, once for all ranks.
        was_lead: True if this process was rank 0 of the last generation.

    Raises:
        HeadwayError: no rank has the state and no checkpoint can be loaded; on all ranks.
        CommunicationError: a rank was lost.
    """
    control, mine = world.control, carrier.progress
    # A new leader looks for checkpoints of later steps: the former leader may have saved a step that it alone had
    # reached, and the logs must not be cut back behind that.
    overtaken = world.is_lead and not was_lead and mine >= 0 and carrier.past.is_ahead(carrier.step)
    reports = _exchange_values(control, [mine, carrier.is_saving(), overtaken, name])
    progress, unsaved, passed, names = zip(*reports, strict=True)
    result = HandoverResult(any(unsaved), names)
    # Only a rank that has trained, or has received a whole state, reports progress of 0 or more.
    if (ahead := max(progress)) < 0 or any(passed):
        # One more than any rank reported: nobody takes an older state for this one.
        _go_back(control, carrier, ahead + 1, say)
        result = result._replace(unsaved=False)
        progress = tuple(_exchange_values(control, carrier.progress))
        ahead = max(progress)
    # One rank sends its state to those behind; ranks at the same progress have equal states.
    if min(progress) < ahead:
        root = _find_lowest(control, [one == ahead for one in progress])
        scalars = tensors = None
        if control.rank == root:
            state, values = carrier.state()
            scalars = json.dumps(state).encode()
            # A safetensors file, not a pickle: loading it runs no code of another process.
            tensors = save_tensors({name: value.detach().cpu().contiguous() for name, value in values.items()})
        # A broadcast is a collective: ranks that have the state take part too, and drop the bytes.
        scalars, tensors = control.broadcast_bytes(scalars, root), control.broadcast_bytes(tensors, root)
        if progress[control.rank] < ahead:
            carrier.load_state(json.loads(scalars), load_tensors(tensors))
    return result


def _go_back(control: Group, carrier: StateCarrier, progress: int, say: Callable[[str], object]) -> None:
    """Lets the lowest rank that sees the newest checkpoint load it.

    Without a checkpoint, and if no step was recorded yet, the lowest rank that sees the run folder begins anew.
    """
    views = _exchange_values(control, carrier.past.describe())
    # Checkpoints may lie on a disk that only some hosts see.
    newest = max(view["step"] for view in views)
    if newest < 0:
        # Checkpoints that cannot be reached may exist, so the run must not begin anew.
        for view in views:
            if view["error"]:
                raise HeadwayError(**view["error"])
        if (recorded := max(view["recorded"] for view in views)) or not any(view["seen"] for view in views):
            raise carrier.past.explain_missing_state(recorded)
        root = _find_lowest(control, [view["seen"] for view in views])
        if control.rank == root:
            carrier.go_back(None, progress)
        say("No rank has the state of the run any more, and no step was recorded yet: the run begins anew.")
        return
    root = _find_lowest(control, [view["step"] == newest for view in views])
    outcome: dict[str, Any] | None = None
    error: HeadwayError | None = None
    if control.rank == root:
        # The outcome is sent to all ranks: otherwise they would wait for a rank that has failed.
        try:
            checkpoint, warnings = carrier.past.read()
            carrier.go_back(checkpoint, progress)
            origin = f"it continues from the checkpoint of step {checkpoint.step} ({checkpoint.path})"
            text = f"No rank has the state of the run any more: {origin}, and repeats the steps after it."
            outcome = {"messages": [*warnings, text]}
        except HeadwayError as caught:
            error, outcome = caught, {"error": {"what": caught.what, "where": caught.where, "fix": caught.fix}}
    shared = json.loads(control.broadcast_bytes(None if outcome is None else json.dumps(outcome).encode(), root))
    # The rank that failed raises its own error, with its traceback; the others raise a copy.
    if "error" in shared:
        raise error or HeadwayError(**shared["error"])
    for text in shared["messages"]:
        say(text)


def _exchange_values(control: Group, value: Any) -> list[Any]:
    """Exchanges a value and returns the values of all ranks, by their place in the group."""
    return [json.loads(text) for text in control.gather_bytes(json.dumps(value).encode())]


def _find_lowest(control: Group, fits: Sequence[bool]) -> int:
    """Returns the place in the group of the lowest rank that fits."""
    return min((rank, place) for place, rank in enumerate(control.ranks) if fits[place])[1]
