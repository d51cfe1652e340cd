"""The whole pipeline of a run as two modules: Resize makes an image's pixels, Pipeline makes its answer.

Both are traced by the exporters, so they use plain tensor operations alone. Each of them computes what an evaluation
computes: the tests compare them with `headway.training.evaluate` and with the Pillow reference.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from headway.core.modules import replace_modules
from headway.export.dense_mixture import densify_mixture
from headway.setup.task import Activation, activate_outputs
from headway.setup.train_setup import TrainSetup
from headway.training.average_outputs import average_outputs
from headway.training.evaluate import average_views

BLOCK = 16
"""Output pixels of a resize that are computed together."""


@final
class Pipeline(nn.Module):
    """From pixels to answers: normalisation, network, views at test time, mean over the members, activation.

    Input: uint8 [b, H, W, C] of the run's size; output: float32 [b, outputs]: probabilities of classes or labels, or
    numbers. Everything is computed in float32. `build_pipeline` makes one.

    Args:
        members: the networks, each with its normalisation; several are an ensemble.
        activation: the last step; None: a task of the user's own that states none, whose outputs stay as they are.
        size: (height, width) of the images.
        channels: 1 or 3.
        outputs: number of outputs.
    """

    def __init__(
        self,
        members: Sequence[Member],
        activation: Activation | None,
        *,
        size: tuple[int, int],
        channels: int,
        outputs: int,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.activation, self.size, self.channels, self.outputs = activation, size, channels, outputs
        self.eval()
        self.requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        outputs = [member(pixels) for member in self.members]
        merged = outputs[0] if len(outputs) == 1 else average_outputs(self.activation, outputs)
        return activate_outputs(self.activation, merged)


@final
class Member(nn.Module):
    """One network with its normalisation and its views at test time.

    Args:
        network: takes float32 [b, C, H, W], or uint8 without `mean` and `std`.
        mean: of each channel, in 0 to 255; None: the network gets the bytes.
        std: likewise.
        flip: average over the image and its mirror image.
        shift: average over the image and copies moved by so many pixels; see `build_views`.
        views_below: take the average only where the highest class probability of the image alone is below this.
    """

    def __init__(
        self,
        network: nn.Module,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        *,
        flip: bool = False,
        shift: int = 0,
        views_below: float | None = None,
    ) -> None:
        super().__init__()
        self.network, self.flip, self.shift, self.views_below = network, flip, shift, views_below
        self.mean: Tensor | None
        self.inv_std: Tensor | None
        known = mean is not None and std is not None
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32) if known else None)
        # The same arithmetic as `Augment.normalise`, to the last bit.
        self.register_buffer("inv_std", 1 / torch.tensor(std, dtype=torch.float32) if known else None)

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels
        if self.mean is not None and self.inv_std is not None:
            images = (pixels.float() - self.mean) * self.inv_std
        # A traced graph has no branches: all views of all images are computed.
        return average_views(
            self._run,
            images.permute(0, 3, 1, 2),
            flip=self.flip,
            shift=self.shift,
            below=self.views_below,
            selects=False,
        )

    def _run(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.network(images)
        return outputs.float()


def build_pipeline(setup: TrainSetup) -> Pipeline:
    """Builds the pipeline of a run or an ensemble, on the CPU and in evaluation mode. The setup stays as it is.

    Args:
        setup: of `load_trained(run, wide=True)`: its weights are float32.
    """
    return Pipeline(
        [_build_member(one) for one in setup.members or (setup,)],
        setup.task.activation,
        size=setup.size,
        channels=setup.channels,
        outputs=setup.task.outputs,
    )


def _build_member(setup: TrainSetup) -> Member:
    # A copy: the evaluation that the pipeline is compared with runs the network as it was.
    network = replace_modules(copy.deepcopy(setup.model).cpu(), densify_mixture)
    augment, options = setup.recipe.augment, setup.recipe.evaluate
    mean, std = augment.mean, augment.std
    # The recipe of a run is resolved: mean and std are numbers.
    assert mean != "auto"
    assert std != "auto"
    return Member(
        network,
        mean if augment.normalise else None,
        std if augment.normalise else None,
        flip=options.flip,
        shift=options.shift,
        views_below=options.views_below,
    )


@final
class Resize(nn.Module):
    """From an image of any size to the pixels that an evaluation sees: centre crop, antialiased bilinear resize.

    Input: uint8 [1, h, w, C]; output: uint8 [1, H, W, C].

    The boxes are those of `HostTransform.compute_boxes`, whose sides need not be whole pixels, and the kernel is
    Pillow's antialiased triangle. The result is rounded once, at the end, as in the native core. Pillow also rounds
    between its two passes, whose order depends on its version: it differs by 1 at most.

    Each direction is a matrix product with its weights: operators that every runtime has, for any box. ONNX's `Resize`
    has no box of fractions of a pixel. Most weights are zero, so `BLOCK` output pixels at a time are computed from the
    pixels near them alone: for 12 megapixels in 0.4 of the time.

    Args:
        size: (H, W).
        share: share of each side of the centred box that is kept.
    """

    def __init__(self, size: tuple[int, int], share: float = 1.0) -> None:
        super().__init__()
        self.size, self.share = size, share

    def forward(self, pixels: Tensor) -> Tensor:
        height, width, channels = pixels.shape[1], pixels.shape[2], pixels.shape[3]
        h, w = _make_number(height), _make_number(width)
        ratio = self.size[1] / self.size[0]
        box_h, box_w = torch.minimum(h, w / ratio), torch.minimum(w, h * ratio)
        down, across = self._shrink((h - box_h) / 2, box_h), self._shrink((w - box_w) / 2, box_w)
        # Rows are contiguous: the first pass reads whole ones, and makes the image small for the second.
        rows = _resize_rows(pixels[0].reshape(height, width * channels), *down, self.size[0])
        columns = rows.reshape(self.size[0], width, channels).permute(1, 0, 2).reshape(width, self.size[0] * channels)
        columns = _resize_rows(columns, *across, self.size[1])
        resized = (columns + 0.5).floor().clamp(0.0, 255.0).to(torch.uint8)
        return resized.reshape(self.size[1], self.size[0], channels).permute(1, 0, 2).unsqueeze(0)

    def _shrink(self, start: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        """Returns start and end of the part of a side that is kept, in float32 as the decoders get it."""
        start, side = start.float(), side.float()
        if self.share < 1:
            start = start + side * float(torch.tensor((1 - self.share) / 2, dtype=torch.float32))
            side = side * float(torch.tensor(self.share, dtype=torch.float32))
        # Pillow gets the end as float32 too.
        return start, (start.double() + side.double()).float()


def _make_number(size: int) -> Tensor:
    """Returns a dimension as float64 [1]."""
    # The last index and one: a tensor, so that a trace keeps it variable.
    return torch.arange(size, dtype=torch.float64)[-1:] + 1


def _resize_rows(rows: Tensor, start: Tensor, end: Tensor, count: int) -> Tensor:
    """Resizes rows [n, m] to float32 [count, m].

    Args:
        start: of the box, float32 [1].
        end: of the box, float32 [1].
        count: number of output rows.
    """
    n = rows.shape[0]
    # Pillow's `precompute_coeffs`: a triangle around the centre of each output row, wider if the image shrinks.
    scale = (end - start).double() / count
    support = scale.clamp(min=1.0)
    blocks = -(-count // BLOCK)
    # [blocks, BLOCK, 1]; the last block may have more output rows than are asked for.
    number = torch.arange(blocks * BLOCK, dtype=torch.float64).reshape(blocks, BLOCK, 1)
    centers = start.double() + (number + 0.5) * scale
    # Rows that a block may need, from its first one on. Of whole numbers alone: a trace cannot hold a size that depends
    # on values. The scale is n / count at most, and 6 rows are for the support, the rounding and the start.
    reach = (BLOCK + 1) * n // count + 6
    first = (centers[:, :1] - support - 1).floor().clamp(min=0.0)
    index = first + torch.arange(reach, dtype=torch.float64)
    weights = (1 - ((index - centers + 0.5) / support).abs()).clamp(min=0.0)
    # Rows beyond the border do not count: the weights of those inside are divided by their own sum.
    weights = weights * (index < n).to(weights.dtype)
    # Output rows that are not asked for may have no weights.
    weights = (weights / weights.sum(dim=2, keepdim=True).clamp(min=1e-9)).float()
    taken = rows.index_select(0, index.reshape(-1).clamp(max=n - 1).long()).float()
    resized = weights @ taken.reshape(blocks, reach, rows.shape[1])
    return resized.reshape(blocks * BLOCK, rows.shape[1])[:count]
