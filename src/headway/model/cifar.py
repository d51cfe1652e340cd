"""cifar_net: a small, fast network for 32-pixel images with whitened patches, three blocks and eight weight layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.errors import UsageError

MIN_SIDE = 24
"""Smallest shorter side of an image in pixels."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}

WHITENING_EPSILON = 5e-4
"""Added to the eigenvalues, so that the flattest directions of the patches, which are mostly noise, stay small."""


def cifar_net(
    num_classes: int = 10,
    in_channels: int = 3,
    *,
    widths: Sequence[int] = (64, 256, 256),
    whiten_kernel: int = 2,
    scaling: float = 1 / 9,
    batchnorm_momentum: float = 0.6,
    batchnorm_eps: float = 1e-12,
    activation: Literal["gelu", "silu"] = "gelu",
) -> CifarNet:
    """Builds the network of Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024, arXiv 2404.00498).

    Input: normalised images, float [N, in_channels, H, W], H and W at least 24; output: logits [N, num_classes].
    Call `initialise(images)` before training: it sets the first layer, which is random otherwise.

    Args:
        widths: channels of each block; a block halves the image.
        whiten_kernel: side of the whitened patches in pixels.
        scaling: factor on the logits.
        batchnorm_momentum: fraction of the running statistics that one step keeps (PyTorch's `momentum` is 1 - this).
        batchnorm_eps: added to the variances. With the source's 1e-12, each batch norm amplifies the rounding errors of
            constant channels, which gray images stored as RGB have, and a run can diverge. The first gradient of 32
            such images in fp32 had a norm of 1e5 with 1e-12 and with 1e-3, 700 with 0.01, and 1 with 0.1.
        activation: function after each batch norm: `gelu`, or `silu`, which github.com/hiverge/cifar10-speedrun takes.
            The whitened patches always go through GELU.

    Raises:
        UsageError: batchnorm_eps is not above 0, or there is no such activation.
    """
    if not batchnorm_eps > 0:
        what = f"cifar_net has batchnorm_eps={batchnorm_eps!r}"
        raise UsageError(what, fix="Give it a number above 0, for example 0.1.")
    if activation not in ACTIVATIONS:
        raise UsageError(f"cifar_net has activation={activation!r}", fix=f"Set it to {' or '.join(ACTIVATIONS)}.")
    return CifarNet(
        num_classes, in_channels, widths, whiten_kernel, scaling, batchnorm_momentum, batchnorm_eps, activation
    )


@final
class CifarNet(nn.Module):
    """Whitening, blocks, global max pooling, a linear head without bias. Made by `cifar_net`."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        widths: Sequence[int],
        whiten_kernel: int,
        scaling: float,
        batchnorm_momentum: float,
        batchnorm_eps: float,
        activation: str,
    ) -> None:
        super().__init__()
        patch_size = in_channels * whiten_kernel**2
        self.whiten = nn.Conv2d(in_channels, 2 * patch_size, whiten_kernel)
        # Only the bias of the whitening layer is trained.
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]  # bias is a tensor, as bias=True
        channel_pairs = pairwise([2 * patch_size, *widths])
        self.blocks = nn.Sequential(
            *(
                CifarNetBlock(in_width, out_width, batchnorm_momentum, batchnorm_eps, activation)
                for in_width, out_width in channel_pairs
            )
        )
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.scaling = scaling

    def forward(self, images: Tensor) -> Tensor:
        if min(images.shape[2:]) < MIN_SIDE:
            what = f"cifar_net needs images of {MIN_SIDE} pixels or more, not {images.shape[2]} x {images.shape[3]}"
            raise UsageError(what, fix=f"Set data.size to {MIN_SIDE} or more, or use headway.model:small_net.")
        hidden = self.blocks(F.gelu(self.whiten(images)))
        # Not amax: compiled by torch 2.13, its bf16 gradient is NaN.
        logits: Tensor = self.head(F.adaptive_max_pool2d(hidden, 1).flatten(1))
        return logits * self.scaling

    @torch.no_grad()
    def initialise(self, images: Tensor) -> None:
        """Sets the first layer's filters in place, so that they whiten the patches of these images.

        Filters: eigenvectors of the patches' second moment, each over the square root of its eigenvalue, largest
        first, then their negations. Computed in float64 on the CPU, signs fixed, so that any machine gets the same.

        Args:
            images: float [N, in_channels, H, W], normalised as in training; some hundred are enough.
        """
        weight = self.whiten.weight
        patch_size = weight[0].numel()
        moment = torch.zeros(patch_size, patch_size, dtype=torch.float64)
        count = 0
        # Float64 patches of 256 images of 32 pixels: 24 MB.
        for chunk in images.split(256):
            patches = F.unfold(chunk.to("cpu", torch.float64), weight.shape[2:]).transpose(0, 1).flatten(1)
            # The second moment, without subtracting the mean, as in the source.
            moment += patches @ patches.T
            count += patches.shape[1]
        # Ascending eigenvalues; `flip` puts the largest first.
        eigenvalues, eigenvectors = torch.linalg.eigh(moment / count)
        # eigh leaves the signs open: the largest entry of each vector becomes positive.
        eigenvectors = eigenvectors * torch.sign(eigenvectors.gather(0, eigenvectors.abs().argmax(0, keepdim=True)))
        filters = (eigenvectors / (eigenvalues + WHITENING_EPSILON).sqrt()).T.flip(0)
        weight.copy_(torch.cat([filters, -filters]).view_as(weight))


@final
class CifarNetBlock(nn.Module):
    """Two 3x3 convolutions with a max pool after the first: [N, C, H, W] -> [N, out_channels, H // 2, W // 2]."""

    def __init__(
        self, in_channels: int, out_channels: int, batchnorm_momentum: float, batchnorm_eps: float, activation: str
    ) -> None:
        super().__init__()
        self.activation = activation
        self.conv1 = _build_conv(in_channels, out_channels)
        self.norm1 = _build_norm(out_channels, batchnorm_momentum, batchnorm_eps)
        self.conv2 = _build_conv(out_channels, out_channels)
        self.norm2 = _build_norm(out_channels, batchnorm_momentum, batchnorm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.norm1(F.max_pool2d(self.conv1(hidden), 2)))
        return activate(self.norm2(self.conv2(hidden)))


def _build_conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    # The first filters pass their input on; the others begin random.
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:in_channels])
    return conv


def _build_norm(width: int, momentum: float, eps: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, eps=eps, momentum=1 - momentum)
    # The scale stays 1, as in the source: only the bias is trained.
    norm.weight.requires_grad_(False)
    return norm
