"""Hybrid parallelism in a plan: fully connected layers whose outputs all devices share; see `core.layer_division`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.core.layer_division import DenseLayer, Scheme, count_divided_bytes
from headway.core.workload import Workload, WorkloadLayer

# Smallest share of the gradients in fully connected layers at which sharding these layers is considered.
MIN_DENSE_SHARE = 0.1


def find_dense_layers(workload: Workload) -> list[DenseLayer]:
    """Finds the fully connected layers with one row of inputs a sample, if they hold at least a tenth of the gradients.

    Returns none otherwise.
    """
    dense = [
        DenseLayer(one.name, one.input_shape[0], one.output_shape[0], one.gradient_bytes)
        for one in workload.layers
        if one.kind == "Linear" and one.gradient_bytes and one.input_shape and one.output_shape
        # More dimensions are rows of a sample, which cannot be divided.
        if len(one.input_shape) == len(one.output_shape) == 1
    ]
    total = workload.step.exchange.gradient_bytes
    return dense if sum(one.gradient_bytes for one in dense) >= MIN_DENSE_SHARE * total else []


def choose_dense_layers(dense: Sequence[DenseLayer], batch: float, ranks: int, value_bytes: int) -> list[DenseLayer]:
    """Chooses the layers that send fewer bytes in parts than their gradients do; all, if none does."""
    large = [one for one in dense if one.outputs >= ranks]
    fewer = [
        one
        for one in large
        if count_divided_bytes(one, batch, ranks, value_bytes=value_bytes, scheme="all")
        < 2 * (ranks - 1) / ranks * one.gradient_bytes
    ]
    return fewer or large


def count_gathered_bytes(
    layers: Sequence[DenseLayer], batch: float, ranks: int, value_bytes: int, scheme: Scheme
) -> float:
    """Counts the bytes of other devices' inputs that a device keeps for the backward pass; with `turns` only those of
    one turn of the largest layer."""
    each = [(ranks - 1) / ranks * batch * value_bytes * one.inputs for one in layers]
    return sum(each) if scheme == "all" else max(each) / ranks


def shard_layers(workload: Workload, names: set[str], parts: int) -> Workload:
    """Returns the workload of one device if the layers of these names are split into parts."""

    def shard(layer: WorkloadLayer) -> WorkloadLayer:
        if layer.name not in names:
            return layer
        less = {"weight_bytes": layer.weight_bytes // parts, "gradient_bytes": layer.gradient_bytes // parts}
        return layer.model_copy(update=less)

    return replace_layers(workload, tuple(map(shard, workload.layers)))


def replace_layers(workload: Workload, layers: Sequence[WorkloadLayer]) -> Workload:
    """Returns the workload of a device that has these layers, or parts of layers, instead of all."""
    # Optimizer state shrinks with the weights that it belongs to.
    share = sum(one.gradient_bytes for one in layers) / sum(one.gradient_bytes for one in workload.layers)
    update = workload.step.update
    less = {"state_bytes": round(share * update.state_bytes), "beside_bytes": round(share * update.beside_bytes)}
    step = workload.step.model_copy(update={"update": update.model_copy(update=less)})
    return workload.model_copy(update={"layers": tuple(layers), "step": step})


def format_patterns(layers: Sequence[DenseLayer]) -> str:
    """Formats the value of `parallel.layers` for these layers."""
    return "[" + ", ".join(f"'^{re.escape(one.name)}$'" for one in layers) + "]"
