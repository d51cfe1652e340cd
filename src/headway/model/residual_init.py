"""Residual blocks that begin as the identity."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def zero_init(module: nn.Module) -> list[str]:
    """Sets the scale of the last batch norm of every residual block to zero, so that the block begins as the identity
    (Goyal et al. 2017, arXiv 1706.02677, section 5.1).

    A block says which one that is, as `last_norm`; or it is built as torchvision's and timm's ResNets are: with a
    `downsample`, and `bn3` or else `bn2` the last one.

    Returns:
        the names of these batch norms.
    """
    found = []
    for name, block in module.named_modules():
        norm = getattr(block, "last_norm", None)
        if norm is None and hasattr(block, "downsample"):
            norm = getattr(block, "bn3", None) or getattr(block, "bn2", None)
        if isinstance(norm, _BatchNorm) and norm.affine:
            nn.init.zeros_(norm.weight)
            inner = next(key for key, one in block.named_modules() if one is norm)
            found.append(f"{name}.{inner}" if name else inner)
    return found
