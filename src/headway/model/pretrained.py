"""Loads weights of a file into a network whose last layer may differ in size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.model.weights_file import read_weights

LOG = logging.getLogger("headway.model")

MAX_LISTED_NAMES = 5
"""Largest number of names of each kind that an error lists."""

COMPILED = "_orig_mod."
"""Part of the names that torch.compile adds, at their beginning or before a compiled block's own name."""

AVERAGE_COUNT = "n_averaged"
"""Entry that torch.optim.swa_utils.AveragedModel keeps beside the network, whose names begin with `module.`."""

# DistributedDataParallel in an averaged model in a LightningModule has three.
MOST_PREFIXES = 4


def load_weights(model: torch.nn.Module, path: Path) -> list[str]:
    """Copies the tensors of a file into the network in place, and returns the names of the tensors left out.

    All names must match, without `module.` of DataParallel, `_orig_mod.` of torch.compile, or another part that all
    names of the file begin with. If a shape of the head differs, or the file has no head, the head is left out and
    keeps its fresh initialisation. The head is the module that timm's `pretrained_cfg` names, else the last one with
    parameters in the order of `model.named_modules()`. If the weights do not fit, the network is left unchanged.

    Args:
        path: a safetensors file, or one of torch.save (.pth, .pt, .bin).

    Raises:
        UsageError: the file cannot be read, is damaged or needs code to be loaded, or names, shapes or types do not
            fit.
    """
    file = read_weights(path)
    if choice := file.describe_choice():
        LOG.info(f"{path.name}: {choice}.")
    model_tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    file_tensors = _strip_prefixes(file.tensors, model_tensors)
    differing = [
        name for name in model_tensors if name in file_tensors and model_tensors[name].shape != file_tensors[name].shape
    ]
    head = _list_head(model)
    # The whole head is left out if one of its shapes differs, or the file has weights of a backbone alone.
    is_new = bool(head.intersection(differing)) or not head.intersection(file_tensors)
    left_out = [name for name in model_tensors if name in head] if is_new else []

    if not file_tensors.keys() & model_tensors.keys():
        theirs, ours = (", ".join(map(repr, list(names)[:3])) for names in (file.tensors, model_tensors))
        what = "the weights do not fit the network, no name is the same: "
        what += f"the file has {theirs}; the network has {ours}"
        fix = "Set model.factory to the network from which the file was saved."
        raise UsageError(what, where=str(path), fix=fix)
    # Files from before PyTorch 0.4.1 (2018) lack this count; it matters only to batch norm without momentum.
    missing = [
        name
        for name in model_tensors
        if name not in file_tensors and name not in left_out and not name.endswith("num_batches_tracked")
    ]
    unexpected = sorted(file_tensors.keys() - model_tensors.keys())
    shape_faults = [
        f"{name} ({_describe_shape(file_tensors[name])} in the file, "
        f"{_describe_shape(model_tensors[name])} in the network)"
        for name in differing
        if name not in left_out
    ]
    # Half precision may be loaded as full precision, and the other way round. Whole numbers are counts and indices.
    type_faults = [
        f"{name} ({_describe_type(file_tensors[name])} in the file, {_describe_type(value)} in the network)"
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
        raise UsageError(what, where=str(path), fix=_suggest_fix(file_tensors, model_tensors, differing))
    with torch.no_grad():
        for name, value in file_tensors.items():
            if name not in left_out:
                model_tensors[name].copy_(value)
    return left_out


def _strip_prefixes(file_tensors: Mapping[str, Tensor], model_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors under the names that fit the network best, without prefixes that wrappers add."""
    compiles = any(COMPILED in name for name in model_tensors)
    best = found = (
        dict(file_tensors) if compiles else {name.replace(COMPILED, ""): one for name, one in file_tensors.items()}
    )
    for _ in range(MOST_PREFIXES):
        # The count stands beside the network of an AveragedModel, not below its prefix.
        names = [name for name in found if name != AVERAGE_COUNT]
        prefix = names[0].partition(".")[0] + "." if names else ""
        if not names or not all(name.startswith(prefix) and name != prefix for name in names):
            break
        found = {name.removeprefix(prefix): found[name] for name in names}
        if len(found.keys() & model_tensors.keys()) > len(best.keys() & model_tensors.keys()):
            best = found
    return best


def _list_head(model: torch.nn.Module) -> set[str]:
    """Returns the names of the tensors of the head."""
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    if not owners:
        return set()
    heads = owners[-1:]
    # A distilled transformer has two heads.
    config = getattr(model, "pretrained_cfg", None)
    named = config.get("classifier") if isinstance(config, Mapping) else None
    if named:
        heads = [named] if isinstance(named, str) else list(named)
    modules = dict(model.named_modules())
    # A head that timm replaced by nothing (num_classes: 0) has no tensors.
    return {
        f"{name}.{inner}" if name else inner
        for name in heads
        if name in modules
        for inner in modules[name].state_dict()
    }


def _suggest_fix(file_tensors: Mapping[str, Tensor], model_tensors: Mapping[str, Tensor], differing: list[str]) -> str:
    first = next((name for name in model_tensors if model_tensors[name].ndim == 4), None)
    # The first convolution of a network for gray images, and weights for colour, or the other way round.
    if first in differing:
        shapes = file_tensors[first].shape, model_tensors[first].shape
        channels = shapes[0][1] if len(shapes[0]) == 4 else 0
        if channels in (1, 3) and shapes[0][:1] == shapes[1][:1] and shapes[0][2:] == shapes[1][2:]:
            return f"The weights take images of {channels} channel{'s'[: channels > 1]}: set data.channels={channels}."
    return "Only the last layer may differ, and only in size."


def _get_number_kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    # Sparse and quantised tensors, and tensors without data (meta), cannot be copied into a plain one.
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return tensor.is_floating_point(), tensor.is_complex(), is_plain


def _describe_shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _describe_type(tensor: Tensor) -> str:
    kind = "" if tensor.layout == torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return f"{tensor.dtype}{kind or (' without data' if tensor.is_meta else '')}"


def _list_fault(names: list[str], description: str) -> str:
    if not names:
        return ""
    others = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return f"{description}: {', '.join(names[:MAX_LISTED_NAMES])}{others}"
