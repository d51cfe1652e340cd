"""Brings the ranks of a new generation to one state.

Ranks that are behind take the state of the lowest rank that is ahead. A new process has no state. If every rank with
the state was lost, one rank loads the newest checkpoint and sends it to the others. No rank restarts at step 0 a run
that others have trained.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from headway.checkpoint.checkpoints import Checkpoint
from headway.core.errors import HeadwayError
from headway.core.group import Group
from headway.core.world import World

LOG = logging.getLogger("headway.launch")

TransferredState = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
"""Scalars, as JSON, and tensors by name."""


class AgreedChoice(Protocol):
    """A choice that all ranks make together from the vote of each."""

    def get_vote(self) -> Any:
        """Returns the vote of this rank, for JSON."""

    def agree_on_votes(self, votes: Sequence[Any]) -> str:
        """Decides from the votes of all ranks, in one order. Returns a message for the user, or an empty string."""


class SavedFiles(Protocol):
    """The files of a run on the disk, as this rank sees them."""

    def is_ahead(self, step: int) -> bool:
        """Returns True if a later step has a complete checkpoint."""

    def summarise(self) -> dict[str, Any]:
        """Summarises the files, for JSON.

        Keys: `step` of the newest checkpoint (-1: none), `seen` (True if the run folder exists here), `recorded` (steps
        in its metrics), and `error` (`what`, `where`, `fix`) if the checkpoints cannot be reached.
        """

    def read_checkpoint(self) -> tuple[Checkpoint, list[str]]:
        """Returns the newest intact checkpoint, and messages about skipped ones. Raises HeadwayError without one."""

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
    def saved_files(self) -> SavedFiles:
        """The files to continue from if no rank holds the state."""

    def get_shared_settings(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks, for JSON."""

    def get_progress(self) -> int:
        """Returns a number that grows with each action, the same on all ranks; -1 without a state."""

    def is_saving(self) -> bool:
        """Returns True if a checkpoint is being written; it may still fail."""

    def state_dict(self) -> TransferredState:
        """Returns the state. Called on the rank that is ahead."""

    def load_state_dict(self, scalars: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Loads the state of the rank that is ahead. Called on ranks that are behind."""

    def restart_from(self, checkpoint: Checkpoint | None, progress: int) -> None:
        """Continues from a checkpoint, or from the beginning if it is None, with `progress` from now on."""


class HandoverResult(NamedTuple):
    """Result of a handover.

    Attributes:
        unsaved: True if a rank was writing a checkpoint.
        names: names of all processes.
    """

    unsaved: bool
    names: tuple[str, ...]


def hand_over(world: World, name: str, carrier: StateCarrier, *, was_lead: bool) -> HandoverResult:
    """Brings all ranks of a world to the state of the rank that is ahead. Every rank calls it.

    Ranks that are behind load that state into `carrier`. If no rank has a state, one rank restarts from the newest
    checkpoint first.

    Args:
        name: name of this process.
        was_lead: True if this process was rank 0 of the last generation.

    Raises:
        HeadwayError: no rank has the state and no checkpoint can be loaded; on all ranks.
        CommunicationError: a rank was lost.
    """
    control, own_progress = world.control, carrier.get_progress()
    # A new leader looks for checkpoints of later steps: the former leader may have saved a step that it alone had
    # reached, and the logs must not be cut back behind that.
    is_overtaken = world.is_lead and not was_lead and own_progress >= 0 and carrier.saved_files.is_ahead(carrier.step)
    reports = _gather_values(control, [own_progress, carrier.is_saving(), is_overtaken, name])
    all_progress, all_saving, all_overtaken, names = zip(*reports, strict=True)
    result = HandoverResult(any(all_saving), names)
    # Only a rank that has trained, or has received a whole state, reports progress of 0 or more.
    if (max_progress := max(all_progress)) < 0 or any(all_overtaken):
        # One more than any rank reported: nobody takes an older state for this one.
        _restart_lowest_rank(control, carrier, max_progress + 1)
        result = result._replace(unsaved=False)
        all_progress = tuple(_gather_values(control, carrier.get_progress()))
        max_progress = max(all_progress)
    # One rank sends its state to those behind; ranks at the same progress have equal states.
    if min(all_progress) < max_progress:
        root = _find_lowest(control, [progress == max_progress for progress in all_progress])
        scalar_bytes = tensor_bytes = None
        if control.rank == root:
            scalars, tensors = carrier.state_dict()
            scalar_bytes = json.dumps(scalars).encode()
            # A safetensors file, not a pickle: loading it runs no code of another process.
            # Copies: safetensors refuses tensors that share memory, as weights of two names do.
            tensor_bytes = save_tensors({name: _copy_to_host(value) for name, value in tensors.items()})
        # A broadcast is a collective: ranks that have the state take part too, and drop the bytes.
        scalar_bytes = control.broadcast_bytes(scalar_bytes, root)
        tensor_bytes = control.broadcast_bytes(tensor_bytes, root)
        if all_progress[control.rank] < max_progress:
            carrier.load_state_dict(json.loads(scalar_bytes), load_tensors(tensor_bytes))
    return result


def _restart_lowest_rank(control: Group, carrier: StateCarrier, progress: int) -> None:
    """Lets the lowest rank that sees the newest checkpoint load it.

    Without a checkpoint, and if no step was recorded yet, the lowest rank that sees the run folder begins anew.

    Raises:
        HeadwayError: the checkpoints cannot be reached or read, or there is none and steps were recorded; on all ranks.
    """
    summaries = _gather_values(control, carrier.saved_files.summarise())
    # Checkpoints may lie on a disk that only some hosts see.
    newest_step = max(summary["step"] for summary in summaries)
    if newest_step < 0:
        # Checkpoints that cannot be reached may exist, so the run must not begin anew.
        for summary in summaries:
            if summary["error"]:
                raise HeadwayError(**summary["error"])
        recorded = max(summary["recorded"] for summary in summaries)
        if recorded or not any(summary["seen"] for summary in summaries):
            raise carrier.saved_files.explain_missing_state(recorded)
        root = _find_lowest(control, [summary["seen"] for summary in summaries])
        if control.rank == root:
            carrier.restart_from(None, progress)
        LOG.warning("No rank has the state of the run any more, and no step was recorded yet: the run begins anew.")
        return
    root = _find_lowest(control, [summary["step"] == newest_step for summary in summaries])
    outcome: dict[str, Any] | None = None
    error: HeadwayError | None = None
    if control.rank == root:
        # The outcome is sent to all ranks: otherwise they would wait for a rank that has failed.
        try:
            checkpoint, warnings = carrier.saved_files.read_checkpoint()
            carrier.restart_from(checkpoint, progress)
            origin = f"it continues from the checkpoint of step {checkpoint.step} ({checkpoint.path})"
            text = f"No rank has the state of the run any more: {origin}, and repeats the steps after it."
            outcome = {"messages": [*warnings, text]}
        except HeadwayError as caught:
            error = caught
            outcome = {"error": {"what": caught.what, "where": caught.where, "fix": caught.fix}}
    shared_outcome = json.loads(
        control.broadcast_bytes(None if outcome is None else json.dumps(outcome).encode(), root)
    )
    # The rank that failed raises its own error, with its traceback; the others raise a copy.
    if "error" in shared_outcome:
        raise error or HeadwayError(**shared_outcome["error"])
    for text in shared_outcome["messages"]:
        LOG.warning(text)


def _gather_values(control: Group, value: Any) -> list[Any]:
    """Returns the values of all ranks, by their index in the group."""
    return [json.loads(text) for text in control.gather_bytes(json.dumps(value).encode())]


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _find_lowest(control: Group, is_candidate: Sequence[bool]) -> int:
    """Returns the index in the group of the lowest rank that is a candidate."""
    return min((rank, index) for index, rank in enumerate(control.ranks) if is_candidate[index])[1]
