"""Counts a convolution network for images of another size than its workload has."""

from __future__ import annotations

import math

from headway.core.errors import UsageError
from headway.core.workload import Workload, WorkloadLayer, WorkloadWindow

Shape = tuple[int, ...] | None


def resize_workload(workload: Workload, side: int) -> Workload | None:
    """Counts the layers of a network for square images of `side` pixels: multiply-adds, shapes and outputs.

    Convolutions and poolings tell the size of each map. Fully connected layers keep their inputs, as in networks that
    average their maps to one size before these layers. The memory that is kept for the backward pass stays as it was.

    Returns None if the images are too small, if maps of one size in the workload have several here, or if something
    else than convolutions and poolings makes maps of another size, or sequences.
    """
    sizes = find_map_sizes(workload, side)
    if sizes is None:
        return None

    # An average to one size, of which no window tells, has that size for all images.
    def resize(shape: Shape) -> Shape:
        if shape is None or len(shape) != 3:
            return shape
        channels, rows, columns = shape
        return channels, sizes.get(rows, rows), sizes.get(columns, columns)

    def resize_window(window: WorkloadWindow) -> WorkloadWindow:
        # A row has as many values as the map has columns, and the other way round; maps are square where it is unknown.
        across = window.columns or window
        columns = None if window.columns is None else resize_line(across, window.rows)
        return resize_line(window, across.rows).model_copy(update={"columns": columns})

    def resize_line(window: WorkloadWindow, length: int) -> WorkloadWindow:
        row_bytes = window.row_bytes * sizes[length] // length
        return window.model_copy(update={"rows": sizes[window.rows], "row_bytes": row_bytes})

    def resize_layer(layer: WorkloadLayer) -> WorkloadLayer:
        inputs, outputs = resize(layer.input_shape), resize(layer.output_shape)
        larger = _divide_areas(outputs, layer.output_shape)
        # A transposed convolution multiplies each value of its input by its weights; any other makes each output so.
        is_transposed = any(one.is_transposed for one in layer.windows)
        work = _divide_areas(inputs, layer.input_shape) if is_transposed else larger
        changes = {
            "input_shape": inputs, "output_shape": outputs, "windows": tuple(map(resize_window, layer.windows)),
            "forward_multiply_adds": round(work * layer.forward_multiply_adds),
            "backward_multiply_adds": round(work * layer.backward_multiply_adds),
            "activation_bytes": round(larger * layer.activation_bytes),
        }  # fmt: skip
        return layer.model_copy(update=changes)

    image = workload.input.model_copy(
        update={"height": side, "width": side, "decoded_bytes": side**2 * workload.input.channels}
    )
    return workload.model_copy(update={"input": image, "layers": tuple(map(resize_layer, workload.layers))})


def find_map_sizes(workload: Workload, side: int) -> dict[int, int] | None:
    """Finds the side of each map for images of `side` pixels, by its side in the workload. None: as above."""
    shapes = [shape for layer in workload.layers for shape in (layer.input_shape, layer.output_shape) if shape]
    # Sequences of patches are no maps, and networks without windows are made for one size.
    if not all(len(shape) in (1, 3) for shape in shapes) or not any(layer.windows for layer in workload.layers):
        return None
    sizes = {workload.input.height: side, workload.input.width: side}
    for layer in workload.layers:
        for window in (line for one in layer.windows for line in (one, one.columns) if line is not None):
            # Something else than windows made this map, such as an interpolation.
            if window.rows not in sizes:
                return None
            try:
                made = window.model_copy(update={"rows": sizes[window.rows]}).count_outputs()
            except UsageError:
                return None
            if sizes.setdefault(window.count_outputs(), made) != made:
                return None
    return sizes


def _divide_areas(new: Shape, old: Shape) -> float:
    """Returns how many times as many places a map has; 1 for values that are no map."""
    return math.prod(new[1:]) / math.prod(old[1:]) if new and old and len(old) == 3 else 1.0
