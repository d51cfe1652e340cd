"""Spatial parallelism: devices of a node share each image, in strips of rows or in a grid. Its exchanges by time and
bytes.

A convolution or pooling needs rows of the neighbours forward, and gradients of them go back. A batch norm has the
statistics of the whole maps. Strips become samples where the maps end, and images strips before the first layer.
Jin, Ginsburg and Keutzer 2018 (ICLR workshop, "Spatially Parallel Convolutions"); the cost of a halo is that of Dryden
et al. 2019 (arXiv 1903.06681).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from headway.core import collectives
from headway.core.collectives import Network
from headway.core.rows import divide
from headway.core.workload import Workload, WorkloadLayer, WorkloadWindow
from headway.plan.step import ComputeTime

# Rows and columns of the ranks that share an image.
Grid = tuple[int, int]
# Statistics and sums are fp32, and so are normalised images before autocast.
FLOAT_BYTES = 4


@final
@dataclass(frozen=True)
class SplitWindow:
    """A convolution or pooling, and its share of a sample's compute time forward and backward."""

    window: WorkloadWindow
    forward: float = 0.0
    backward: float = 0.0


class WholeMap(NamedTuple):
    """A map whose parts become a sample's, or the other way round, and bytes of one place of it.

    0 rows stand for the means of a map: each rank sends its sums of all channels, as large as one place.
    """

    rows: int
    columns: int
    place_bytes: float

    def count_sent_bytes(self, images: float, grid: Grid) -> list[tuple[float, float]]:
        """Counts the bytes that each rank sends (to the ranks that own samples, to those that own parts)."""
        ranks = grid[0] * grid[1]
        parts, own, each = [1] * ranks, images / ranks, self.place_bytes
        if self.rows:
            down, across = divide(self.rows, grid[0]), divide(self.columns, grid[1])
            parts = [rows.length * columns.length for rows in down for columns in across]
        return [((images - own) * part * each, own * (sum(parts) - part) * each) for part in parts]


NO_MAP = WholeMap(0, 0, 0)


@final
@dataclass(frozen=True)
class SplitNetwork:
    """The values of a sample that devices exchange if they share its image."""

    windows: tuple[SplitWindow, ...] = ()
    # Channels of each batch norm.
    norm_channels: tuple[int, ...] = ()
    # Images, and the maps where strips become samples.
    image: WholeMap = NO_MAP
    end: WholeMap = NO_MAP


def describe_split(workload: Workload) -> SplitNetwork:
    """Describes what devices exchange that share the images of a workload."""
    windows = []
    adds = max(1, workload.forward_multiply_adds + workload.backward_multiply_adds)
    for layer in workload.layers:
        # Poolings have no multiply-adds, and nothing runs beside their exchange.
        many = max(1, sum(one.is_convolution for one in layer.windows))
        forward, backward = (
            value / adds / many for value in (layer.forward_multiply_adds, layer.backward_multiply_adds)
        )
        windows += [
            SplitWindow(one, forward, backward) if one.is_convolution else SplitWindow(one) for one in layer.windows
        ]
    norms = [layer.input_shape[0] for layer in workload.layers if is_batch_norm(layer) and layer.input_shape]
    image = workload.input
    whole = WholeMap(image.height, image.width, FLOAT_BYTES * image.channels)
    return SplitNetwork(tuple(windows), tuple(norms), whole, _find_end(workload))


def is_batch_norm(layer: WorkloadLayer) -> bool:
    """Returns True if a layer is a batch norm, by the name of its class."""
    return "BatchNorm" in layer.kind


def _find_end(workload: Workload) -> WholeMap:
    """Finds the last map of a sample, or its means if a global pooling follows."""
    maps = [layer for layer in workload.layers if layer.windows and len(layer.output_shape or ()) == 3]
    after = workload.layers[workload.layers.index(maps[-1]) + 1 :] if maps else ()
    linear = next((one for one in after if "Linear" in one.kind and one.input_shape), None)
    if linear is None or linear.input_shape is None or maps[-1].output_shape is None:
        return NO_MAP
    channels, rows, columns = maps[-1].output_shape
    # A head with as many inputs as there are channels has their means, in fp32; another one has whole maps.
    if linear.input_shape[-1] == channels:
        return WholeMap(0, 0, FLOAT_BYTES * channels)
    return WholeMap(rows, columns, workload.step.value_bytes * channels)


def choose_grid(split: SplitNetwork, ranks: int) -> Grid | None:
    """Chooses the grid of the ranks that share an image.

    Strips of rows, as training has by default, if the smallest map has a row for each of them; else the fewest columns
    with which each rank has something of every map.

    Returns None if there is no such grid, or nothing to split.
    """
    rows = min((one.window.rows for one in split.windows), default=0)
    known = all(one.window.columns is not None for one in split.windows)
    columns = min((one.window.columns.rows for one in split.windows if one.window.columns is not None), default=0)
    for across in range(1, (columns if known else 1) + 1):
        if ranks % across == 0 and ranks // across <= rows:
            return ranks // across, across
    return None


def choose_parts(split: SplitNetwork, ranks: int) -> Grid:
    """Chooses the grid of ranks that have to share an image: strips where `choose_grid` knows of none."""
    return choose_grid(split, ranks) or (ranks, 1)


def estimate_split_s(split: SplitNetwork, network: Network, images: float, grid: Grid, compute: ComputeTime) -> float:
    """Estimates how much longer a micro-batch takes if devices share its images: exchanges, and uneven parts.

    The exchange of a convolution runs beside it: only the rest of it counts. In each convolution the others wait for
    the device with most of its outputs, such as 2 of 7 rows where four devices share them.

    Args:
        network: of one node. images: those that these ranks share. compute: time of a device's samples.
    """
    link, ranks = network.inside, grid[0] * grid[1]
    samples = images / ranks
    computing_s = compute.seconds(samples)
    place = Network(1, ranks, link, network.between, network.reduce_bytes_s)
    total = 0.0
    for one in split.windows:
        uneven = one.window.find_largest_part(grid) - 1
        total += uneven * (one.forward + one.backward) * compute.sample_s * samples
        for exchange in one.window.list_exchanges(grid):
            # Both directions of a link at once; the slowest rank counts, as all of them meet in every exchange.
            seconds = link.seconds(images * max(map(max, exchange.counts)))
            beside_s = computing_s if exchange.is_beside else 0.0
            total += max(0.0, seconds - one.forward * beside_s)
            if one.window.needs_gradient:
                total += max(0.0, seconds - one.backward * beside_s)
    ring = collectives.predict_cost("ring", place)
    for channels in split.norm_channels:
        # Mean, squares and count of each rank are gathered; backward, two sums a channel are all-reduced.
        total += (ranks - 1) * link.seconds(FLOAT_BYTES * (2 * channels + 1))
        total += ring.seconds(FLOAT_BYTES * 2 * channels)
    given = max(parts for _, parts in split.image.count_sent_bytes(images, grid))
    ends = [max(sizes) for sizes in zip(*split.end.count_sent_bytes(images, grid), strict=True)]
    return total + sum(link.seconds(nbytes) for nbytes in (given, *ends))


def count_split_bytes(split: SplitNetwork, images: float, grid: Grid) -> float:
    """Counts the bytes that the busiest of these devices sends in a micro-batch, without those of weights."""
    ranks = grid[0] * grid[1]
    images_sent, ends_sent = (one.count_sent_bytes(images, grid) for one in (split.image, split.end))
    sent = [given[1] + sum(ends) for given, ends in zip(images_sent, ends_sent, strict=True)]
    for one in split.windows:
        for exchange in one.window.list_exchanges(grid):
            for rank, (forward, backward) in enumerate(exchange.counts):
                sent[rank] += images * (forward + backward * one.window.needs_gradient)
    # As above; a ring sends 2 (S - 1) / S of an array.
    norms = sum(
        FLOAT_BYTES * (ranks - 1) * ((2 * channels + 1) + 4 * channels / ranks) for channels in split.norm_channels
    )
    return max(sent) + norms
