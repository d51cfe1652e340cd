"""Checks that a checkpoint fits a run, all of it before any of it is restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headway.core.errors import CheckpointError, TrainingError
from headway.core.untrusted_json import describe_kind, is_any_number, is_number, is_whole_number
from headway.data.batch_plan import BatchPlan
from headway.optim import Masters
from headway.optim.states import describe, fault_of

Check = Callable[[Any], bool]

ADDED = ("channels", "classes")
"""Entries of `data` that older checkpoints do not have."""


def expect_tensors(
    tensors: Mapping[str, Tensor], where: str, whole: torch.nn.Module | Masters, optimizer: torch.optim.Optimizer
) -> None:
    """Looks at `model/NAME` and `optimizer/PARAMETER/STATE`.

    Raises CheckpointError: one is missing, of another shape or type, or unknown.
    """
    mine: dict[str, Any] = whole.state_dict()
    saved = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    if fault := fault_among(saved, mine):
        raise CheckpointError(f"this checkpoint belongs to another network: {fault}", where=where)
    states: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer/"):
            parameter, _, state = name.removeprefix("optimizer/").rpartition("/")
            states.setdefault(parameter, {})[state] = value
    optimized = {id(one) for group in optimizer.param_groups for one in group["params"]}
    parameters = {name: one for name, one in whole.named_parameters() if id(one) in optimized}
    if unknown := sorted(states.keys() - parameters.keys()):
        what = f"it has the optimizer's state of {unknown[0]!r}, which this run does not train"
        raise CheckpointError(what, where=where)
    for name, one in parameters.items():
        if fault := fault_of(optimizer, one, states.get(name, {})):
            what = f"the optimizer's state of {name!r} does not fit: {fault}"
            raise CheckpointError(what, where=where, fix="It belongs to another optimizer, or was damaged.")


def fault_among(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Describes the first tensor that does not match, or returns an empty string."""
    if lacking := sorted(wanted.keys() - saved.keys()):
        return f"{lacking[0]!r} is missing"
    if unknown := sorted(saved.keys() - wanted.keys()):
        return f"{unknown[0]!r} is not known here"
    for name, value in saved.items():
        like = wanted[name]
        if value.shape != like.shape or value.dtype != like.dtype:
            return f"{name!r} is {describe(value.shape, value.dtype)}, and should be {describe(like.shape, like.dtype)}"
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


SCALARS: Mapping[str, tuple[Check, str]] = {
    "position": (is_whole_number, "a whole number of samples"),
    "data": (lambda value: isinstance(value, dict), "an object that says what the data are"),
    "precision": (_is_numbers, "an object of numbers"),
    "best": (_or_none(_is_best), "an object of metrics with step and epoch, or null"),
    "metrics": (_or_none(_is_metrics), "an object of metrics, or null"),
    "reached_s": (_or_none(lambda value: is_number(value, 0, 1e12)), "seconds, or null"),
    "damaged": (is_whole_number, "a whole number"),
    "seconds": (_is_seconds, "an object of seconds by stage"),
}
"""What a run writes into a manifest beside its tensors; `observer` is looked at by whoever takes it."""


def expect_scalars(scalars: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError that names the first entry that is missing or wrong."""
    for name, (check, wanted) in SCALARS.items():
        if name not in scalars:
            raise CheckpointError(f"its manifest lacks scalars.{name}", where=where)
        if not check(scalars[name]):
            found = scalars[name] if type(scalars[name]) in (int, float, str) else describe_kind(scalars[name])
            raise CheckpointError(f"its manifest has {found!r:.100} as scalars.{name}, not {wanted}", where=where)
    observer = scalars.get("observer")
    if observer is not None and not isinstance(observer, dict):
        raise CheckpointError(
            f"its manifest has {describe_kind(observer)} as scalars.observer, not an object", where=where
        )


def expect_position(position: int, step: int, plan: BatchPlan, where: str) -> None:
    """Raises CheckpointError: the step of a checkpoint does not begin at its position."""
    if (begins := plan.position_of(step)) != position:
        what = f"it stands at sample {position:,}, and step {step:,} of this recipe begins at {begins:,}"
        raise CheckpointError(what, where=where, fix="Put batch back to what the run began with.")


def expect_same_data(recorded: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raises TrainingError that names what differs of what a run's samples depend on."""
    for name, value in now.items():
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
