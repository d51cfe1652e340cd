"""Loads weights from a safetensors file into a network whose last layer may differ in size."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, read_regular

MAX_LISTED_NAMES = 5
"""Largest number of names of each kind that an error lists."""


def load_weights(model: torch.nn.Module, path: Path) -> list[str]:
    """Copies the tensors of a file into the network in place, and returns the names of the tensors left out.

    All names must match. If a shape of the head differs, the head is left out and keeps its fresh initialisation. The
    head is the last module with parameters, in the order of `model.named_modules()`. If the weights do not fit, the
    network is left unchanged.

    Raises:
        UsageError: the file cannot be read or is not a safetensors file, or names, shapes or types do not fit.
    """
    file_tensors = _read_file(path)
    model_tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    differing = [
        name for name in model_tensors if name in file_tensors and model_tensors[name].shape != file_tensors[name].shape
    ]
    head = _list_head(model)
    # The whole head is left out if one of its shapes differs.
    left_out = [name for name in model_tensors if name in head] if head.intersection(differing) else []

    # Files from before PyTorch 0.4.1 (2018) lack this count; it matters only to batch norm without momentum.
    missing = [name for name in model_tensors if name not in file_tensors and not name.endswith("num_batches_tracked")]
    unexpected = sorted(file_tensors.keys() - model_tensors.keys())
    shape_faults = [
        f"{name} ({_describe_shape(file_tensors[name])} in the file, "
        f"{_describe_shape(model_tensors[name])} in the network)"
        for name in differing
        if name not in head
    ]
    # Half precision may be loaded as full precision, and the other way round. Whole numbers are counts and indices.
    type_faults = [
        f"{name} ({file_tensors[name].dtype} in the file, {value.dtype} in the network)"
        for name, value in model_tensors.items()
        if name in file_tensors and _get_number_kind(file_tensors[name]) != _get_number_kind(value)
    ]
    # All faults are listed at once, before anything is copied.
    faults = [
        _list_fault(missing, "missing in the file"),
        _list_fault(unexpected, "unknown to the network"),
        _list_fault(shape_faults, "of another shape"),
        _list_fault(type_faults, "of another kind"),
    ]
    if any(faults):
        what = f"the weights do not fit the network: {'; '.join(filter(None, faults))}"
        raise UsageError(what, where=str(path), fix="Only the last layer may differ, and only in size.")
    with torch.no_grad():
        for name, value in file_tensors.items():
            if name not in left_out:
                model_tensors[name].copy_(value)
    return left_out


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    """Reads a safetensors file. Raises UsageError if it is none."""
    try:
        # Read, not memory-mapped: if another process truncated a mapped file, this one would get SIGBUS.
        data = read_regular(path)
    except OSError as error:
        raise UsageError(f"the weights cannot be read: {describe_os_error(error)}", where=str(path)) from None
    try:
        return load_tensors(data)
    except SafetensorError as error:
        # A zip archive of torch.save begins with PK, a bare pickle with 0x80.
        if data[:2] != b"PK" and data[:1] != b"\x80":
            fix = "Write one with safetensors.torch.save_file."
            raise UsageError(f"no safetensors file, or a damaged one: {error}", where=str(path), fix=fix) from None
    convert = "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'weights.safetensors')"
    what = "this is a pickle, no safetensors file; Headway unpickles nothing, as a pickle can run any code"
    raise UsageError(what, where=str(path), fix=f"If you trust the file, convert it once yourself: {convert}.")


def _list_head(model: torch.nn.Module) -> set[str]:
    """Returns the names of the tensors of the last module with parameters."""
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    if not owners:
        return set()
    prefix = f"{owners[-1]}." if owners[-1] else ""
    return {prefix + name for name in model.get_submodule(owners[-1]).state_dict()}


def _get_number_kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _describe_shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _list_fault(names: list[str], description: str) -> str:
    if not names:
        return ""
    others = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return f"{description}: {', '.join(names[:MAX_LISTED_NAMES])}{others}"
