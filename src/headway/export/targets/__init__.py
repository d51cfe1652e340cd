"""Targets: one file for each runtime, all with the interface of `target`. `get_target` finds them by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from headway.core.errors import UsageError, suggest_nearest
from headway.export.targets.target import Target

_HOMES = {
    "onnx": "onnx:OnnxTarget",
    "openvino": "openvino:OpenVinoTarget",
    "openvino-bf16": "openvino:OpenVinoBf16Target",
    "aoti": "aoti:AotiTarget",
    "int8": "int8:Int8Target",
    "tensorrt": "tensorrt:TensorRtTarget",
}
"""File and class of each target, in the order in which they are built: later ones may use the files of earlier ones."""

TARGETS = tuple(_HOMES)
"""Names of all targets."""


def get_target(name: str) -> Target:
    """Returns a target by its name. Raises UsageError if there is no such target."""
    if name not in _HOMES:
        raise UsageError(f"there is no target {name!r}", where="--to", fix=suggest_nearest(name, TARGETS))
    # Imported when it is used: each target imports the package of its runtime.
    file, _, class_name = _HOMES[name].partition(":")
    target: Target = getattr(import_module(f"{__name__}.{file}"), class_name)()
    return target


def order_targets(names: Sequence[str]) -> list[Target]:
    """Returns the targets named and those whose files they use, each once, in the order in which they are built.

    Raises:
        UsageError: there is no such target, or no name.
    """
    if not names:
        raise UsageError("there is no target", where="--to", fix=f"Name one or more of {', '.join(TARGETS)}.")
    found = {name: get_target(name) for name in names}
    for target in list(found.values()):
        if target.after is not None and target.after not in found:
            found[target.after] = get_target(target.after)
    return [found[name] for name in TARGETS if name in found]
