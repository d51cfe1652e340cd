"""Spatial parallelism: devices of a node share each image in strips of rows. Its exchanges by time and bytes.

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

# Statistics and sums are fp32, and so are normalised images before autocast.
FLOAT_BYTES = 4


@final
@dataclass(frozen=True)
class SplitWindow:
    """A convolution or pooling, and its share of a sample's compute time forward and backward."""

    window: WorkloadWindow
    forward: float = 0.0
    backward: float = 0.0


class SplitRows(NamedTuple):
    """Rows of a map that become a sample's, or the other way round, and bytes of one of them.

    0 rows stand for the means of a map: each rank sends its sums of all channels, as large as one row.
    """

    rows: int
    row_bytes: float

    def count_sent_bytes(self, images: float, ranks: int) -> list[tuple[float, float]]:
        """Counts the bytes that each rank sends (to the ranks that own samples, to those that own rows)."""
        own, whole = images / ranks, self.rows or ranks
        parts = [one.length for one in divide(self.rows, ranks)] if self.rows else [1] * ranks
        return [((images - own) * rows * self.row_bytes, own * (whole - rows) * self.row_bytes) for rows in parts]


NO_ROWS = SplitRows(0, 0)


@final
@dataclass(frozen=True)
class SplitNetwork:
    """The values of a sample that devices exchange if they share its image."""

    windows: tuple[SplitWindow, ...] = ()
    # Channels of each batch norm.
    norm_channels: tuple[int, ...] = ()
    # Images, and the maps where strips become samples.
    image: SplitRows = NO_ROWS
    end: SplitRows = NO_ROWS


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
    rows = SplitRows(image.height, FLOAT_BYTES * image.width * image.channels)
    return SplitNetwork(tuple(windows), tuple(norms), rows, _find_end(workload))


def is_batch_norm(layer: WorkloadLayer) -> bool:
    """Returns True if a layer is a batch norm, by the name of its class."""
    return "BatchNorm" in layer.kind


def _find_end(workload: Workload) -> SplitRows:
    """Finds the last map of a sample, or its means if a global pooling follows."""
    maps = [layer for layer in workload.layers if layer.windows and len(layer.output_shape or ()) == 3]
    after = workload.layers[workload.layers.index(maps[-1]) + 1 :] if maps else ()
    linear = next((one for one in after if "Linear" in one.kind and one.input_shape), None)
    if linear is None or linear.input_shape is None or maps[-1].output_shape is None:
        return NO_ROWS
    channels, rows, columns = maps[-1].output_shape
    # A head with as many inputs as there are channels has their means, in fp32; another one has whole maps.
    if linear.input_shape[-1] == channels:
        return SplitRows(0, FLOAT_BYTES * channels)
    return SplitRows(rows, workload.step.value_bytes * channels * columns)


def estimate_split_s(split: SplitNetwork, network: Network, images: float, ranks: int, computing_s: float) -> float:
    """Estimates the seconds of a micro-batch for which devices wait for the exchanges of images that they share.

    The exchange of a convolution runs beside it: only the rest of it counts.

    Args:
        network: of one node. images: those that these ranks share. computing_s: compute time of the micro-batch.
    """
    link = network.inside
    place = Network(1, ranks, link, network.between, network.reduce_bytes_s)
    total = 0.0
    for one in split.windows:
        counts = one.window.count_exchanged_bytes(ranks)
        # Both directions of a link at once; the slowest rank counts, as all of them meet in every exchange.
        most = images * max(max(pair) for pair in counts)
        if not most:
            continue
        total += max(0.0, link.seconds(most) - one.forward * computing_s)
        if one.window.needs_gradient:
            total += max(0.0, link.seconds(most) - one.backward * computing_s)
    ring = collectives.predict_cost("ring", place)
    for channels in split.norm_channels:
        # Mean, squares and count of each rank are gathered; backward, two sums a channel are all-reduced.
        total += (ranks - 1) * link.seconds(FLOAT_BYTES * (2 * channels + 1))
        total += ring.seconds(FLOAT_BYTES * 2 * channels)
    given = max(rows for _, rows in split.image.count_sent_bytes(images, ranks))
    ends = [max(sizes) for sizes in zip(*split.end.count_sent_bytes(images, ranks), strict=True)]
    return total + sum(link.seconds(nbytes) for nbytes in (given, *ends))


def count_split_bytes(split: SplitNetwork, images: float, ranks: int) -> float:
    """Counts the bytes that the busiest of these devices sends in a micro-batch, without those of weights."""
    images_sent, ends_sent = (one.count_sent_bytes(images, ranks) for one in (split.image, split.end))
    sent = [given[1] + sum(ends) for given, ends in zip(images_sent, ends_sent, strict=True)]
    for one in split.windows:
        for rank, (forward, backward) in enumerate(one.window.count_exchanged_bytes(ranks)):
            sent[rank] += images * (forward + backward * one.window.needs_gradient)
    # As above; a ring sends 2 (S - 1) / S of an array.
    norms = sum(
        FLOAT_BYTES * (ranks - 1) * ((2 * channels + 1) + 4 * channels / ranks) for channels in split.norm_channels
    )
    return max(sent) + norms
