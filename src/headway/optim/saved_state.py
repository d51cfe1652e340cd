"""The state of an optimizer as tensors of a checkpoint, and back without a change.

A tensor state is saved as `optimizer/PARAMETER/STATE`. Everything else that a foreign optimizer keeps in `state` and in
its parameter groups (Python numbers, lists, tensors inside of them) becomes JSON in one tensor of bytes, `VALUES`. So
a state comes back with its types: beta ** 3 in Python is float64, with a tensor for the 3 it would be float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.core.errors import CheckpointError, UsageError
from headway.core.untrusted_json import JsonError, parse_object
from headway.optim.state_check import knows_states

VALUES = "optimizer_values"
"""Name of the tensor that holds the values as JSON; only foreign optimizers have one."""
NESTED = "optimizer_nested/"
"""Prefix of the tensors that lie inside such a value."""
UNSAVED_OPTIONS = frozenset({"params", "lr", "initial_lr", "lr_scale", "name"})
"""Options of a group that a checkpoint does not hold: the recipe and the schedule set them."""
Named = Iterable[tuple[str, Tensor]]


@final
@dataclass
class SavedValues:
    """The values of a checkpoint that are no tensor states.

    Attributes:
        states: by parameter, then by state.
        options: options of each parameter group.
        contiguous: tensor states (`PARAMETER/STATE`) with contiguous strides although their parameter has others.
    """

    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    contiguous: frozenset[str] = frozenset()


def collect_state(optimizer: Optimizer, parameters: Named) -> dict[str, Tensor]:
    """Returns the state of an optimizer as tensors by name, not copied.

    Args:
        parameters: (name, parameter) of the network.

    Raises:
        UsageError: a state is of a type that no checkpoint can hold.
    """
    is_known = knows_states(optimizer)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"states": {}, "options": [], "contiguous": []}
    for name, parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            path = f"{name}/{key}"
            if isinstance(value, Tensor):
                tensors[f"optimizer/{path}"] = value
                # A state of the parameter's shape takes the parameter's strides when it is restored. The exceptions are
                # noted here.
                has_other_strides = value.shape == parameter.shape and value.stride() != parameter.stride()
                if not is_known and has_other_strides and value.is_contiguous():
                    values["contiguous"].append(path)
            elif not is_known:
                values["states"].setdefault(name, {})[key] = _encode(value, path, tensors)
            # PyTorch's own optimizers have None where there is no buffer yet, and may count steps in a Python number.
            elif value is not None:
                tensors[f"optimizer/{path}"] = torch.as_tensor(value)
    if not is_known:
        values["options"] = [
            _encode_options(group, index, tensors) for index, group in enumerate(optimizer.param_groups)
        ]
    if any(values["options"]) or values["states"] or values["contiguous"]:
        # Sorted, so that all ranks write the same bytes.
        text = json.dumps(values, sort_keys=True)
        tensors[VALUES] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def _encode_options(group: Mapping[str, Any], index: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    encoded = {}
    for key, value in group.items():
        # An option such as a function or a device is a setting, and no state.
        if key not in UNSAVED_OPTIONS and _is_plain(value):
            encoded[key] = _encode(value, f"group {index}/{key}", tensors)
    return encoded


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) in (str, int) and _is_plain(inner) for key, inner in value.items())
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Returns a value as an object for JSON; tensors inside of it are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors[NESTED + path] = value
        return {"tensor": path}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(inner, f"{path}.{index}", tensors) for index, inner in enumerate(value)]}
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        # As pairs: a key may be a whole number, and JSON's keys are texts.
        return {"dict": [[key, _encode(inner, f"{path}.{key}", tensors)] for key, inner in value.items()]}
    what = f"the optimizer keeps a {type(value).__name__} as {path!r}, which no checkpoint can hold"
    raise UsageError(what, fix="Keep tensors, numbers, texts, lists and dictionaries in its state.")


def read_values(optimizer: Optimizer, tensors: Mapping[str, Tensor], where: str) -> SavedValues:
    """Reads the values of a checkpoint for an optimizer; its nested tensors stay on the CPU.

    Args:
        where: the checkpoint, for the error.

    Raises:
        CheckpointError: they are damaged, or belong to another optimizer.
    """
    if VALUES not in tensors:
        return SavedValues()
    if knows_states(optimizer):
        raise CheckpointError(f"it belongs to another optimizer than {type(optimizer).__name__}", where=where)
    try:
        found = parse_object(tensors[VALUES].to(torch.uint8).numpy().tobytes())
        values = SavedValues(
            states={
                name: {key: _decode(value, tensors) for key, value in states.items()}
                for name, states in found["states"].items()
            },
            options=[{key: _decode(value, tensors) for key, value in group.items()} for group in found["options"]],
            contiguous=frozenset(found["contiguous"]),
        )
    except (JsonError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the values of its optimizer are damaged ({error})", where=where) from None
    if len(values.options) != len(optimizer.param_groups):
        what = f"it has {len(values.options)} parameter groups, and the optimizer {len(optimizer.param_groups)}"
        raise CheckpointError(what, where=where, fix="Put optimizer.groups back to what the run began with.")
    return values


def _decode(encoded: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    # Exactly one entry: anything else raises ValueError, which is reported as damage.
    ((kind, value),) = encoded.items()
    if kind == "tensor":
        return tensors[NESTED + value]
    if kind == "value" and (value is None or type(value) in (bool, int, float, str)):
        return value
    if kind in ("list", "tuple"):
        inner = [_decode(one, tensors) for one in value]
        return inner if kind == "list" else tuple(inner)
    if kind == "dict":
        return {key: _decode(one, tensors) for key, one in value}
    raise ValueError(f"{kind!r} is no kind of value")


def restore_state(optimizer: Optimizer, parameters: Named, tensors: Mapping[str, Tensor], values: SavedValues) -> None:
    """Restores the state of an optimizer from tensors by name, each in its own type. Check them before.

    Args:
        parameters: (name, parameter) of the network.
        tensors: the tensors of a checkpoint.
        values: from `read_values`.
    """
    states_by_name: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer/"):
            # What follows the last slash is the state, whatever the name of the parameter.
            parameter_name, _, key = name.removeprefix("optimizer/").rpartition("/")
            states_by_name.setdefault(parameter_name, {})[key] = value
    group_by_id = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters:
        states, others = states_by_name.get(name, {}), values.states.get(name, {})
        # Frozen parameters, and those before a first step, have no state.
        if not states and not others:
            continue
        group = group_by_id[id(parameter)]
        optimizer.state[parameter] = {
            key: _place(key, value, parameter, group, is_contiguous=f"{name}/{key}" in values.contiguous)
            for key, value in states.items()
        } | {key: _copy_to(parameter.device, value) for key, value in others.items()}
    for group, options in zip(optimizer.param_groups, values.options, strict=False):
        group.update({key: _copy_to(group["params"][0].device, value) for key, value in options.items()})


def _place(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any], *, is_contiguous: bool) -> Tensor:
    """Returns a copy of a state on the device and with the strides that the optimizer expects."""
    if value.shape == parameter.shape and not is_contiguous:
        # torch's fused kernels read parameter and state as flat memory, so both need the same memory format.
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    # A step count lies on the device only for fused and capturable optimizers. Elsewhere reading it would be a
    # host-device sync in every step.
    is_on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.to("cpu" if is_on_host else parameter.device, copy=True)


def _copy_to(device: torch.device, value: Any) -> Any:
    """Returns a value with its tensors, at any depth, copied to a device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copy_to(device, inner) for inner in value)
    if isinstance(value, dict):
        return {key: _copy_to(device, inner) for key, inner in value.items()}
    return value
