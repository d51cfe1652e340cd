"""The Workload: the work of one training step and run, without the code. A planner reads it instead of the network.

`headway train RECIPE --dry-run` writes it. All byte and operation counts are exact, not measured. Numbers without
another unit are per sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from headway.core.json_record import JsonRecord, read_record
from headway.core.rows import Need, TransposedWindow, Window, divide, list_pieces


class WindowExchange(NamedTuple):
    """An exchange of the ranks that share a sample, for a window of the network."""

    counts: tuple[tuple[float, float], ...]
    """Bytes that each rank (sends, receives), row by row of their grid."""
    is_beside: bool
    """The convolution runs beside it."""


class _Line(NamedTuple):
    """A rank's rows or columns of the input of a window; by default those of a rank that has all."""

    moved: tuple[int, int] = (0, 0)
    """Numbers that it (sends, receives)."""
    own: int = 1
    needed: int = 1
    padded: int = 1
    """Rows or columns that it needs, and with those of padding."""
    outputs: int = 1


class WorkloadWindow(JsonRecord):
    """One call of a convolution or a pooling, along the rows of its input.

    Ranks that share an image exchange the rows that the windows of their outputs need of others. Interpolations need
    some too, and do not count.
    """

    rows: int = Field(ge=1)
    """Rows of its input."""
    row_bytes: int = Field(ge=1)
    """Bytes of one of them, of one sample."""
    # As in PyTorch.
    kernel: int = Field(ge=1)
    stride: int = Field(default=1, ge=1)
    padding: int = Field(default=0, ge=0)
    dilation: int = Field(default=1, ge=1)
    ceil_mode: bool = False
    is_transposed: bool = False
    output_padding: int = Field(default=0, ge=0)
    is_convolution: bool = True
    """False: a pooling."""
    needs_gradient: bool = True
    """False: its input is the image, so that no gradients go back."""
    columns: WorkloadWindow | None = None
    """The same call along the columns, whose numbers and bytes its `rows` are. None: unknown, as in earlier files."""

    def list_exchanges(self, grid: tuple[int, int]) -> list[WindowExchange]:
        """Lists the exchanges of the ranks that share a sample, in the order of the forward pass.

        The backward pass sends the gradients of what was received, if the input has any.

        Args:
            grid: rows and columns of ranks. With several columns, `columns` must be known.
        """
        down = self._list_lines(grid[0])
        across = [_Line()] if self.columns is None or grid[1] == 1 else self.columns._list_lines(grid[1])
        assert len(across) == grid[1], "the columns of the window are unknown"
        # Bytes of a row, or of what the window along the columns counts in it.
        each = self.row_bytes / (1 if len(across) == 1 or self.columns is None else self.columns.rows)
        ranks = [(row, column) for row in down for column in across]
        # What runs beside the exchange of rows has its columns before, with the padding at the border of the map.
        has_idle = any(not line.own or not line.outputs for line in (*down, *across))
        moves_rows = any(max(line.moved) for line in down)
        is_split = self.is_convolution and not self.is_transposed and not has_idle and (moves_rows or len(down) == 1)
        if is_split and min(grid) > 1:
            first = [(column.moved, row.own) for row, column in ranks]
            second = [(row.moved, column.padded) for row, column in ranks]
        else:
            first = [(row.moved, column.own) for row, column in ranks]
            second = [(column.moved, row.own if is_split else row.needed) for row, column in ranks]
        exchanges = [
            [(each * sent * width, each * received * width) for (sent, received), width in moves]
            for moves in (first, second)
        ]
        found = [counts for counts in exchanges if any(map(max, counts))]
        return [WindowExchange(tuple(counts), is_split and counts is found[-1]) for counts in found]

    def _list_lines(self, parts: int) -> list[_Line]:
        """Lists what each of the ranks along the rows has of the input, and needs of it."""
        window, owned, made = self._window, divide(self.rows, parts), divide(self.count_outputs(), parts)
        if isinstance(window, TransposedWindow):
            needs = [Need(window.find_rows(one, self.rows), 0, 0) for one in made]
        else:
            needs = [window.find_need(one, self.rows) for one in made]
        needed = [need.rows for need in needs]
        lines = []
        for rank, need in enumerate(needs):
            # Whatever a rank owns itself is in both lists.
            kept = owned[rank].intersect(need.rows).length
            sent, received = (sum(one.length for one in pieces) - kept for pieces in list_pieces(owned, needed, rank))
            padded = need.rows.length + need.before + need.after
            lines.append(_Line((sent, received), owned[rank].length, need.rows.length, padded, made[rank].length))
        return lines

    def find_largest_part(self, grid: tuple[int, int]) -> float:
        """Returns the outputs of the rank of a grid that has most of them, over the mean of the ranks."""
        found = 1.0
        for window, parts in zip((self, self.columns), grid, strict=True):
            if window is not None:
                made = window.count_outputs()
                found *= divide(made, parts)[-1].length * parts / made
        return found

    def count_outputs(self) -> int:
        """Counts the rows of its output. Raises UsageError if there would be none."""
        return self._window.count_outputs(self.rows)

    @property
    def _window(self) -> Window | TransposedWindow:
        if self.is_transposed:
            return TransposedWindow(self.kernel, self.stride, self.padding, self.output_padding, self.dilation)
        return Window(self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode)


class WorkloadLayer(JsonRecord):
    """One module of the network, without its children. Modules that compute nothing themselves are left out.

    Functions that a module calls (`F.relu`, a sum, a matrix product with its own weight) count as its own. Numbers
    without another unit are per sample, in training mode, at the run's last image size.
    """

    name: str
    """Dotted name as in the state dict; empty for the network itself."""
    kind: str
    """Class name."""
    # Weights and gradients. Tied weights count once, so that sums over layers are those of the network.
    parameters: int = Field(ge=0)
    """Weights of this layer; tied weights count for the first layer that has them."""
    weight_bytes: int = Field(ge=0)
    """Bytes of these weights between steps."""
    gradient_bytes: int = Field(ge=0)
    """Bytes of the gradients of trained weights, which the ranks reduce in each step."""
    ready: int | None = Field(ge=0)
    """Number of layers whose gradients are complete before this one's; None: it has no gradients."""
    input_shape: tuple[int, ...] | None
    """Shape of its first input without the batch dimension; None: no tensor, or it was never called."""
    output_shape: tuple[int, ...] | None
    """Shape of its first output, likewise."""
    # Arithmetic and memory of forward and backward.
    forward_multiply_adds: int = Field(ge=0)
    """Multiply-adds of convolutions and matrix products."""
    backward_multiply_adds: int = Field(ge=0)
    activation_bytes: int = Field(ge=0)
    """Bytes of its output tensors."""
    saved_bytes: int = Field(ge=0)
    """Bytes that forward saves for backward; memory that several layers save counts for the first."""
    update_multiply_adds: float = Field(default=0.0, ge=0)
    """Multiply-adds of the matrix products that the optimizer makes for its weights in a step, as Muon and SOAP do."""
    windows: tuple[WorkloadWindow, ...] = ()
    """Its convolutions and poolings over rows, in the order of their calls."""
    saved_bytes_fixed: int = Field(ge=0)
    """Saved bytes that do not depend on the micro-batch, such as weights cast to low precision."""


class WorkloadInput(JsonRecord):
    """One sample on its way from the disk to the network."""

    # The size that the network sees, after crop and resize.
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    channels: int = Field(ge=1)
    decoded_bytes: int = Field(ge=1)
    """Bytes copied to the device, uint8."""
    encoded_bytes: float | None = Field(ge=0)
    """Mean bytes on the disk; None: the data were not available."""
    source_pixels: float | None = Field(ge=0)
    """Mean height times width before crop and resize; None likewise."""
    on_host: tuple[str, ...]
    """Augmentations that the loader's workers run."""
    on_device: tuple[str, ...]
    """Augmentations that run on the batch on the device, in order."""


class WorkloadUpdate(JsonRecord):
    """The optimizer step."""

    optimizer: str
    state_bytes: int = Field(ge=0)
    passes: float = Field(ge=0)
    """Memory traffic of a step in multiples of the trained weights' bytes, read or written, without the matrix products
    of `muon` and `soap`, which the layers count."""
    product_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of these products on a GPU."""
    beside_bytes: int = Field(default=0, ge=0)
    """Other device memory that does not depend on the batch: fp32 masters and their gradients, the network's buffers,
    averaged weights, and the observer's memory in a logging step."""


class WorkloadExchange(JsonRecord):
    """The communication of a step between ranks, and its settings in the recipe."""

    gradient_bytes: int = Field(ge=0)
    """Gradient bytes of all layers, in the parameters' own type."""
    statistics_bytes: int = Field(ge=0)
    """Bytes of the running statistics of batch norm, which are averaged over the ranks."""
    algorithm: str
    """An algorithm of `headway.core.collectives`, or `auto`."""
    wire_ratio: float = Field(gt=0, le=1)
    """Bytes between hosts over bytes of the gradients."""
    bucket_bytes: int | None = Field(ge=1)
    """Bucket size; None: chosen for the links."""
    sync_batch_norm: bool
    """One more collective per batch norm, forward and backward."""


class WorkloadStep(JsonRecord):
    """One step at the start of the run."""

    # How the batch is split.
    batch: int = Field(ge=1)
    """Samples over all ranks."""
    per_device: int | None = Field(default=None, ge=1)
    """Samples of a rank, however many ranks there are; None: the recipe gives the global batch."""
    ranks: int = Field(default=1, ge=1)
    """Number of ranks in the dry run."""
    micro_batch: int | None = Field(ge=1)
    """Samples per forward pass; None: a rank's share of the batch."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Precision of forward and backward."""
    half_weights: bool
    """Weights and gradients are 16 bit wide as well."""
    compiled: bool
    """The run compiles the layers, which saves less for backward; they were measured without compilation."""
    update: WorkloadUpdate
    exchange: WorkloadExchange
    refused_strategies: tuple[str, ...] = ()
    """Strategies of `parallel` that the recipe refuses; `sharded all` is the one with what: all. Files without this
    list refuse none."""
    refused_with_micro_batches: tuple[str, ...] = ()
    """Those that it refuses if the batch of a rank is split into micro-batches."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2


class WorkloadPhase(JsonRecord):
    """Consecutive steps with the same batch and image size."""

    steps: int = Field(ge=1)
    # Progressive resizing and batch schedules change these during a run.
    batch: int = Field(ge=1)
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    forward_multiply_adds: int = Field(ge=0)
    """Multiply-adds of one sample of this size."""


class WorkloadRun(JsonRecord):
    """The whole run."""

    samples: int = Field(ge=1)
    """Samples of the training set."""
    epochs: float = Field(gt=0)
    steps: int = Field(ge=1)
    phases: tuple[WorkloadPhase, ...]
    """Phases in order; their steps add up to `steps`."""
    evaluations: int = Field(ge=0)
    evaluation_samples: int | None = Field(ge=0)
    """Samples of one evaluation; None: the evaluation set was not available."""
    checkpoints: int = Field(ge=0)
    checkpoint_bytes: int = Field(ge=0)
    """Bytes of one checkpoint over all ranks."""


class Workload(JsonRecord):
    """The work of a step and of the run that a recipe describes."""

    version: Literal[1] = 1
    name: str
    """Name of the recipe."""
    layers: tuple[WorkloadLayer, ...]
    """Layers in the order of their first call."""
    input: WorkloadInput
    step: WorkloadStep
    run: WorkloadRun

    @property
    def sample_name(self) -> str:
        """Noun for its samples: `images`, or `sequences` if they have a single row."""
        return "images" if self.input.height > 1 else "sequences"

    @property
    def parameters(self) -> int:
        """Number of parameters of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_multiply_adds(self) -> int:
        """Multiply-adds of the forward pass of one sample."""
        return sum(layer.forward_multiply_adds for layer in self.layers)

    @property
    def backward_multiply_adds(self) -> int:
        """Multiply-adds of the backward pass of one sample."""
        return sum(layer.backward_multiply_adds for layer in self.layers)

    @property
    def operations(self) -> int:
        """Operations of one sample, forward and backward; a multiply-add counts as two."""
        # Vendors state peak operations this way.
        return 2 * (self.forward_multiply_adds + self.backward_multiply_adds)

    def count_saved_bytes(self, samples: int) -> int:
        """Returns the bytes that the forward pass of `samples` saves for backward, without the weights."""
        return sum(samples * layer.saved_bytes + layer.saved_bytes_fixed for layer in self.layers)

    def order_by_gradient(self) -> list[WorkloadLayer]:
        """Returns the layers with gradients in the order in which these are complete."""
        # `place` breaks ties, so that layers themselves are never compared.
        places = [(layer.ready, place) for place, layer in enumerate(self.layers) if layer.ready is not None]
        return [self.layers[place] for _, place in sorted(places)]

    @staticmethod
    def read(path: Path) -> Workload:
        """Reads a Workload. Raises UsageError if there is no such file, or it is not a Workload of this version."""
        return read_record(path, Workload, "headway train RECIPE --dry-run writes one.")
