"""Checks that a checkpoint fits a run before anything is restored from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway.core.errors import CheckpointError, TrainingError
from headway.core.untrusted_json import (
    Check,
    Checks,
    JsonError,
    expect_entries,
    is_any_number,
    is_number,
    is_object,
    is_whole_number,
)
from headway.data.batch_plan import BatchPlan
from headway.optim import MasterWeights
from headway.optim.state_check import describe_tensor, find_state_fault

# Entries of `data` that checkpoints of older versions do not have.
ADDED = ("channels", "classes")


def expect_tensors(
    tensors: Mapping[str, Tensor], where: str, whole: torch.nn.Module | MasterWeights, optimizer: torch.optim.Optimizer
) -> None:
    """Checks the tensors `model/NAME` and `optimizer/PARAMETER/STATE` against the network and optimizer.

    Raises CheckpointError: a tensor is missing, unknown, or has another shape or dtype.
    """
    mine: dict[str, Any] = whole.state_dict()
    # The network first: a wrong network makes every optimizer state wrong too, and its message is the clearer one.
    saved = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    if fault := find_mismatch(saved, mine):
        raise CheckpointError(f"this checkpoint belongs to another network: {fault}", where=where)
    states: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer/"):
            parameter, _, state = name.removeprefix("optimizer/").rpartition("/")
            states.setdefault(parameter, {})[state] = value
    # Frozen parameters have no optimizer state, so only those in a parameter group are expected.
    optimized = {id(one) for group in optimizer.param_groups for one in group["params"]}
    parameters = {name: one for name, one in whole.named_parameters() if id(one) in optimized}
    if unknown := sorted(states.keys() - parameters.keys()):
        what = f"it has the optimizer's state of {unknown[0]!r}, which this run does not train"
        raise CheckpointError(what, where=where)
    for name, one in parameters.items():
        if fault := find_state_fault(optimizer, one, states.get(name, {})):
            what = f"the optimizer's state of {name!r} does not fit: {fault}"
            raise CheckpointError(what, where=where, fix="It belongs to another optimizer, or was damaged.")


def find_mismatch(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Describes the first tensor that does not match, or returns an empty string."""
    # Sorted, since the order of a set differs between processes: all ranks name the same tensor.
    if lacking := sorted(wanted.keys() - saved.keys()):
        return f"{lacking[0]!r} is missing"
    if unknown := sorted(saved.keys() - wanted.keys()):
        return f"{unknown[0]!r} is not known here"
    for name, value in saved.items():
        like = wanted[name]
        if value.shape != like.shape or value.dtype != like.dtype:
            said, wanted_form = (describe_tensor(one.shape, one.dtype) for one in (value, like))
            return f"{name!r} is {said}, and should be {wanted_form}"
    return ""


def _is_metrics(value: Any) -> bool:
    # A metric may be NaN or infinite; JSON as Python writes it says so.
    return isinstance(value, dict) and all(map(is_any_number, value.values()))


def _is_best(value: Any) -> bool:
    return _is_metrics(value) and is_whole_number(value.get("step")) and is_number(value.get("epoch"), 0)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(one, 0, 1e12) for one in value.values())


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(one) for one in value.values())


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


SCALARS: Checks = {
    "position": (is_whole_number, "a whole number of samples"),
    "data": (is_object, "an object that says what the data are"),
    "precision": (_is_numbers, "an object of numbers"),
    "best": (_or_none(_is_best), "an object of metrics with step and epoch, or null"),
    "metrics": (_or_none(_is_metrics), "an object of metrics, or null"),
    "reached_s": (_or_none(lambda value: is_number(value, 0, 1e12)), "seconds, or null"),
    "damaged": (is_whole_number, "a whole number"),
    "seconds": (_is_seconds, "an object of seconds by stage"),
    # Its entries are checked by the code that restores it. Older checkpoints have none.
    "observer": (_or_none(is_object), "an object, or null"),
}
"""Entries that a run writes into a manifest beside its tensors."""


def expect_scalars(scalars: Mapping[str, Any], where: str) -> None:
    """Checks the scalars of a manifest. Raises CheckpointError that names the first missing or wrong entry."""
    try:
        expect_entries({"observer": None, **scalars}, SCALARS, "scalars.")
    except JsonError as error:
        raise CheckpointError(f"its manifest is damaged: {error}", where=where) from None


def expect_position(position: int, step: int, plan: BatchPlan, where: str) -> None:
    """Checks that a checkpoint's step begins at its position under the plan of batches. Raises CheckpointError."""
    # With another batch the step begins at another sample: samples would be repeated or left out.
    if (begins := plan.find_position(step)) != position:
        what = f"it stands at sample {position:,}, and step {step:,} of this recipe begins at {begins:,}"
        raise CheckpointError(what, where=where, fix="Put batch back to what the run began with.")


def expect_same_data(recorded: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Checks that data, seed and decoder are those of the run's start. Raises TrainingError that names the change."""
    for name, value in now.items():
        # A checkpoint of an older version says nothing of it, so nothing can differ.
        if name not in recorded and name in ADDED:
            continue
        if recorded.get(name) != value:
            of = f"the data's {name}" if name in ("fingerprint", *ADDED) else f"the {name}"
            more = ""
            if all(type(one) in (int, str) and len(str(one)) < 20 for one in (value, recorded.get(name))):
                more = f" ({recorded[name]!r} then, {value!r} now)"
            verb = "differ" if name in ADDED else "differs"
            what = "the data, the seed or the decoder is not what this run began with"
            raise TrainingError(f"{what}: {of} {verb}{more}", where=where, fix="Put the data back, or start a new run.")
