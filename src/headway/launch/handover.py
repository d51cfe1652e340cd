"""Handover: the ranks of a new generation come to one state.

Those that are behind take over the state of the lowest rank that is ahead. A process that has just been started has no
state, however far it has come in joining. Where all that held the state were lost meanwhile, one rank loads the newest
checkpoint, and gives it to the others; nobody begins at step 0 what others had trained already.
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

State = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
"""Scalars (for JSON) and tensors."""


class Choice(Protocol):
    """Something that ranks agree on by what each has found."""

    def finding(self) -> Any:
        """Returns what this rank has found, for JSON."""

    def agree(self, findings: Sequence[Any]) -> str:
        """Given the findings of all, in one order; decides, and returns what there is to say."""


class Fallback(Protocol):
    """The files that a run has left on the disk, as this rank sees them."""

    def is_ahead(self, step: int) -> bool:
        """Tells whether a later step has a complete checkpoint."""

    def look(self) -> dict[str, Any]:
        """For JSON: `step` of the newest checkpoint (-1: none), whether the run folder is `seen`, the steps `recorded`
        there, and the `error` (`what`, `where`, `fix`) where the checkpoints are out of reach."""

    def read(self) -> tuple[Checkpoint, list[str]]:
        """The newest checkpoint that is whole, and what there is to say of others. Raises HeadwayError: none is."""

    def without_state(self, recorded: int) -> HeadwayError:
        """The error of a run that cannot go on, of which so many steps were recorded."""


class Traveller(Protocol):
    """Carries a state from generation to generation: `Recovery` of the Trainer."""

    @property
    def step(self) -> int:
        """Number of steps done."""

    @property
    def precision(self) -> Choice:
        """The choice of precision, which all ranks make together."""

    @property
    def past(self) -> Fallback:
        """The files to continue from if no rank holds the state."""

    def identity(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks, for JSON."""

    def progress(self) -> int:
        """How far it is: grows alike on all ranks; -1: it has no state yet."""

    def unsaved(self) -> bool:
        """Tells whether a checkpoint is being written; it may still fail."""

    def state(self) -> State:
        """Asked of the rank that is ahead."""

    def take(self, scalars: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Given the state of the rank that is ahead, on those that are behind."""

    def go_back(self, checkpoint: Checkpoint | None, progress: int) -> None:
        """Goes on from a checkpoint, or where there is none from its own beginning, and is so far from now on."""


class Met(NamedTuple):
    """How a handover went. `unsaved`: some rank was writing a checkpoint. `names`: of all processes."""

    unsaved: bool
    names: tuple[str, ...]


def hand_over(world: World, name: str, traveller: Traveller, say: Callable[[str], object], *, led: bool) -> Met:
    """Brings all ranks of a world to the state of the one that is ahead.

    Args:
        name: of this process. say: tells the user, once for all ranks.
        led: this process led before. One that did not, and leads now, looks for checkpoints of later steps: whoever led
            may have saved a step that it alone had come to, and the logs are not cut back behind that.

    Raises:
        HeadwayError: nobody holds the state, and there is nothing to go on from; on all ranks. CommunicationError: some
            rank was lost.
    """
    control, mine = world.control, traveller.progress()
    overtaken = world.is_lead and not led and mine >= 0 and traveller.past.is_ahead(traveller.step)
    found = _tell(control, [mine, traveller.unsaved(), overtaken, name])
    told, unsaved, passed, names = zip(*found, strict=True)
    met = Met(any(unsaved), names)
    # Only a rank that has taken part, or has taken over a state whole, says that it is at 0 or further.
    if (ahead := max(told)) < 0 or any(passed):
        _go_back(control, traveller, ahead + 1, say)
        met = met._replace(unsaved=False)
        told = tuple(_tell(control, traveller.progress()))
        ahead = max(told)
    if min(told) < ahead:
        root = _lowest(control, [progress == ahead for progress in told])
        scalars = tensors = None
        if control.rank == root:
            given, values = traveller.state()
            scalars = json.dumps(given).encode()
            tensors = save_tensors({name: value.detach().cpu().contiguous() for name, value in values.items()})
        scalars, tensors = control.broadcast_bytes(scalars, root), control.broadcast_bytes(tensors, root)
        if told[control.rank] < ahead:
            traveller.take(json.loads(scalars), load_tensors(tensors))
    return met


def _go_back(control: Group, traveller: Traveller, progress: int, say: Callable[[str], object]) -> None:
    """The lowest rank that sees the newest checkpoint loads it. Where there is none, and nothing of the run was written
    down yet, the lowest rank that sees its folder begins it anew."""
    seen = _tell(control, traveller.past.look())
    newest = max(one["step"] for one in seen)
    if newest < 0:
        for one in seen:
            if one["error"]:
                raise HeadwayError(**one["error"])
        if (recorded := max(one["recorded"] for one in seen)) or not any(one["seen"] for one in seen):
            raise traveller.past.without_state(recorded)
        root = _lowest(control, [one["seen"] for one in seen])
        if control.rank == root:
            traveller.go_back(None, progress)
        say("No process was left that held the state of the run, and no step was recorded yet: it begins anew.")
        return
    root = _lowest(control, [one["step"] == newest for one in seen])
    outcome: dict[str, Any] | None = None
    error: HeadwayError | None = None
    if control.rank == root:
        try:
            checkpoint, said = traveller.past.read()
            traveller.go_back(checkpoint, progress)
            why = f"it goes on from the checkpoint of step {checkpoint.step} ({checkpoint.path})"
            text = f"No process was left that held the state of the run: {why}, and makes the steps after it again."
            outcome = {"said": [*said, text]}
        except HeadwayError as found:
            error, outcome = found, {"error": {"what": found.what, "where": found.where, "fix": found.fix}}
    told = json.loads(control.broadcast_bytes(None if outcome is None else json.dumps(outcome).encode(), root))
    if "error" in told:
        raise error or HeadwayError(**told["error"])
    for text in told["said"]:
        say(text)


def _tell(control: Group, value: Any) -> list[Any]:
    """What each rank tells the others, by its place in the group."""
    return [json.loads(text) for text in control.gather_bytes(json.dumps(value).encode())]


def _lowest(control: Group, fits: Sequence[bool]) -> int:
    """Place in the group of the lowest of the ranks that fit."""
    return min((rank, place) for place, rank in enumerate(control.ranks) if fits[place])[1]
