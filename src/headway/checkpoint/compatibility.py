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
from headway.core.weight_copies import HasWeights
from headway.data.batch_plan import BatchPlan
from headway.optim.state_check import describe_tensor, find_state_fault

# Entries of `data` that checkpoints of older versions do not have.
ADDED_DATA_KEYS = ("channels", "classes", "partition")


def select_by_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}


def expect_tensors(
    tensors: Mapping[str, Tensor],
    where: str,
    weights: HasWeights,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Checks the tensors `model/NAME` and `optimizer/PARAMETER/STATE` against the network and optimizer.

    Raises CheckpointError if a tensor is missing, unknown, or has another shape or dtype.
    """
    state_dict: dict[str, Any] = weights.state_dict()
    # The network first: a wrong network makes every optimizer state wrong too, and its message is the clearer one.
    if mismatch := find_mismatch(select_by_prefix(tensors, "model/"), state_dict):
        raise CheckpointError(f"this checkpoint belongs to another network: {mismatch}", where=where)
    state_by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, value in select_by_prefix(tensors, "optimizer/").items():
        parameter_name, _, key = name.rpartition("/")
        state_by_parameter.setdefault(parameter_name, {})[key] = value
    # Frozen parameters have no optimizer state, so only those in a parameter group are expected.
    optimized_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in weights.named_parameters() if id(parameter) in optimized_ids}
    if unknown := sorted(state_by_parameter.keys() - parameters.keys()):
        what = f"it has the optimizer's state of {unknown[0]!r}, which this run does not train"
        raise CheckpointError(what, where=where)
    for name, parameter in parameters.items():
        if fault := find_state_fault(optimizer, parameter, state_by_parameter.get(name, {})):
            what = f"the optimizer's state of {name!r} does not fit: {fault}"
            raise CheckpointError(what, where=where, fix="It belongs to another optimizer, or was damaged.")


def find_mismatch(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Returns a description of the first tensor that does not match, or an empty string."""
    # Sorted, since the order of a set differs between processes: all ranks name the same tensor.
    if missing := sorted(expected.keys() - saved.keys()):
        return f"{missing[0]!r} is missing"
    if unknown := sorted(saved.keys() - expected.keys()):
        return f"{unknown[0]!r} is not known here"
    for name, value in saved.items():
        like = expected[name]
        if value.shape != like.shape or value.dtype != like.dtype:
            forms = [describe_tensor(tensor.shape, tensor.dtype) for tensor in (value, like)]
            return f"{name!r} is {forms[0]}, and should be {forms[1]}"
    return ""


def _is_metrics(value: Any) -> bool:
    # A metric may be NaN or infinite; JSON as Python writes it says so.
    return isinstance(value, dict) and all(map(is_any_number, value.values()))


def _is_best(value: Any) -> bool:
    return _is_metrics(value) and is_whole_number(value.get("step")) and is_number(value.get("epoch"), 0)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(seconds, 0, 1e12) for seconds in value.values())


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _is_end(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    reason, step = value.get("reason"), value.get("evaluated_step")
    if not isinstance(value.get("limits", {}), dict):
        return False
    return isinstance(reason, str | None) and type(value.get("is_final")) is bool and type(step) is int


def _or_none(is_valid: Check) -> Check:
    return lambda value: value is None or is_valid(value)


SCALARS: Checks = {
    "position": (is_whole_number, "a whole number of samples"),
    "data": (is_object, "an object that says what the data are"),
    "precision": (_is_numbers, "an object of numbers"),
    "best": (_or_none(_is_best), "an object of metrics with step and epoch, or null"),
    "metrics": (_or_none(_is_metrics), "an object of metrics, or null"),
    "reached_s": (_or_none(lambda value: is_number(value, 0, 1e12)), "seconds, or null"),
    "damaged": (is_whole_number, "a whole number"),
    "seconds": (_is_seconds, "an object of seconds by stage"),
    # The entries of these are checked by the code that restores them.
    "observer": (_or_none(is_object), "an object, or null"),
    "callbacks": (_or_none(is_object), "an object, or null"),
    "early_stopping": (_or_none(is_object), "an object, or null"),
    "ended": (_or_none(_is_end), "an object with reason, is_final and evaluated_step, or null"),
}
"""Entries that a run writes into a manifest beside its tensors."""
ADDED_SCALARS = ("observer", "callbacks", "early_stopping", "ended")
"""Entries of SCALARS that checkpoints of older versions do not have."""


def expect_scalars(scalars: Mapping[str, Any], where: str) -> None:
    """Checks the scalars of a manifest. Raises CheckpointError if an entry is missing or wrong, and names it."""
    try:
        expect_entries({**dict.fromkeys(ADDED_SCALARS), **scalars}, SCALARS, "scalars.")
    except JsonError as error:
        raise CheckpointError(f"its manifest is damaged: {error}", where=where) from None


def expect_position(position: int, step: int, plan: BatchPlan, where: str) -> None:
    """Raises CheckpointError if the plan of batches does not begin the checkpoint's step at its sample `position`."""
    # With another batch the step begins at another sample: samples would be repeated or left out.
    if (planned_position := plan.find_position(step)) != position:
        what = f"it stands at sample {position:,}, and step {step:,} of this recipe begins at {planned_position:,}"
        raise CheckpointError(what, where=where, fix="Put batch back to what the run began with.")


def expect_same_data(recorded: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Raises TrainingError if data, seed or decoder are not those of the run's start, and names the difference."""
    for name, value in current.items():
        # A checkpoint of an older version says nothing of it, so nothing can differ.
        if name not in recorded and name in ADDED_DATA_KEYS:
            continue
        recorded_value = recorded.get(name)
        if recorded_value != value:
            subject = f"the data's {name}" if name in ("fingerprint", *ADDED_DATA_KEYS) else f"the {name}"
            verb = "differ" if name.endswith("s") else "differs"
            values = ""
            if all(type(shown) in (int, str) and len(str(shown)) < 20 for shown in (value, recorded_value)):
                values = f" ({recorded_value!r} then, {value!r} now)"
            what = f"the data, the seed or the decoder is not what this run began with: {subject} {verb}{values}"
            raise TrainingError(what, where=where, fix="Put the data back, or start a new run.")
