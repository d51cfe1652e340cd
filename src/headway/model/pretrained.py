"""Loads weights from a safetensors file into a network whose last layer may differ in size."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, read_regular

MOST_NAMES = 5
"""Most names of each kind that an error lists."""


def load_weights(model: torch.nn.Module, path: Path) -> list[str]:
    """Copies the tensors of a file into the network, and returns the names of the tensors that were left out.

    All names must match. If a shape of the head differs, the head is left out and keeps its fresh initialisation. The
    head is the last module with parameters, in the order of `model.named_modules()`. If the weights do not fit, the
    network is left unchanged.

    Raises:
        UsageError: no such file, no safetensors file, or names, shapes or types that do not fit.
    """
    stored = _read(path)
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    differing = [name for name in wanted if name in stored and wanted[name].shape != stored[name].shape]
    head = _list_head(model)
    # The whole head is left out if one of its shapes differs.
    left_out = [name for name in wanted if name in head] if head.intersection(differing) else []

    # Files from before PyTorch 0.4.1 (2018) lack this count; it matters only to batch norm without momentum.
    missing = [name for name in wanted if name not in stored and not name.endswith("num_batches_tracked")]
    unexpected = sorted(stored.keys() - wanted.keys())
    misshapen = [
        f"{name} ({_describe_shape(stored[name])} in the file, {_describe_shape(wanted[name])} in the network)"
        for name in differing
        if name not in head
    ]
    # Half precision may be loaded as full precision, and the other way round. Whole numbers are counts and indices.
    mistyped = [
        f"{name} ({stored[name].dtype} in the file, {value.dtype} in the network)"
        for name, value in wanted.items()
        if name in stored and _number_kind(stored[name]) != _number_kind(value)
    ]
    # All faults are listed at once, before anything is copied.
    faults = [
        _list_fault(missing, "missing in the file"),
        _list_fault(unexpected, "unknown to the network"),
        _list_fault(misshapen, "of another shape"),
        _list_fault(mistyped, "of another kind"),
    ]
    if any(faults):
        what = f"the weights do not fit the network: {'; '.join(filter(None, faults))}"
        raise UsageError(what, where=str(path), fix="Only the last layer may differ, and only in size.")
    with torch.no_grad():
        for name, value in stored.items():
            if name not in left_out:
                wanted[name].copy_(value)
    return left_out


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        # Read, not mapped: if another process truncates a mapped file, this one dies of a bus error.
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
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    if not owners:
        return set()
    prefix = f"{owners[-1]}." if owners[-1] else ""
    return {prefix + name for name in model.get_submodule(owners[-1]).state_dict()}


def _number_kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _describe_shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _list_fault(names: list[str], kind: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{kind}: {', '.join(names[:MOST_NAMES])}{more}"
