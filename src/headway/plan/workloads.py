"""Workloads of well-known networks, from the catalog by name; `python -m bench._plan.workloads` counts them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from headway.core.errors import UsageError, suggest_nearest
from headway.core.workload import Workload, WorkloadLayer, WorkloadWindow

PRECISIONS = ("fp32", "bf16", "fp16")
# What people call the batch in a recipe, here and elsewhere.
BATCH_KEYS = ("batch", "batch_size", "global_batch", "per_device", "per_device_batch")


def list_workloads() -> list[str]:
    """Lists the names of the workloads in the catalog, in alphabetical order."""
    folder = files("headway.plan").joinpath("catalog", "workloads")
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def find_workload(name: str, overrides: tuple[str, ...] = ()) -> Workload:
    """Finds a workload of the catalog by its name.

    Args:
        overrides: may hold `precision=bf16` or `precision=fp16`; the catalog's workloads compute in fp32.

    Raises UsageError if there is no such workload, or another value is overridden.
    """
    if name not in list_workloads():
        fix = f"{suggest_nearest(name, list_workloads())} Or give a recipe, or the file of headway train --dry-run."
        problem = "there is no such file, and no such workload in the catalog"
        raise UsageError(problem, where=name, fix=fix)
    workload = _read_workload(name)
    for text in overrides:
        key, _, value = text.partition("=")
        if key != "precision" or value not in PRECISIONS:
            problem = f"{text!r} cannot be overridden in a network of the catalog"
            raise UsageError(problem, where=name, fix=_suggest_override(key, value))
        workload = convert_precision(_read_workload(name), value)
    return workload


def _suggest_override(key: str, value: str) -> str:
    """Suggests what to write in place of an override that a network of the catalog does not take."""
    if key == "precision":
        return suggest_nearest(value, PRECISIONS)
    if key in BATCH_KEYS:
        return f"Write --batch {value or 512} for all devices together, or --per-device N for each of them."
    near = suggest_nearest(key, ["precision"], only_close=True)
    return f"{near} It takes precision={'|'.join(PRECISIONS)} alone; a recipe takes every value.".strip()


@cache
def _read_workload(name: str) -> Workload:
    text = files("headway.plan").joinpath("catalog", "workloads", f"{name}.json").read_text(encoding="utf-8")
    return Workload.model_validate_json(text)


def _narrow_window(window: WorkloadWindow) -> WorkloadWindow:
    columns = None if window.columns is None else _narrow_window(window.columns)
    return window.model_copy(update={"row_bytes": window.row_bytes // 2, "columns": columns})


def convert_precision(workload: Workload, precision: str) -> Workload:
    """Returns an fp32 workload as it computes in another precision: activations take 2 bytes, weights stay fp32.

    Gradients stay 4 bytes wide, as those of autocast do. Norms and softmax, which autocast keeps in fp32, count as 16
    bits too.
    """
    if precision == "fp32":
        return workload

    def narrow(layer: WorkloadLayer) -> WorkloadLayer:
        windows = tuple(map(_narrow_window, layer.windows))
        halves = {name: getattr(layer, name) // 2 for name in ("activation_bytes", "saved_bytes")}
        return layer.model_copy(update={"windows": windows, **halves})

    layers = tuple(map(narrow, workload.layers))
    step = workload.step.model_copy(update={"precision": precision})
    return workload.model_copy(update={"layers": layers, "step": step})
