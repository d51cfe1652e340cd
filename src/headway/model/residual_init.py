"""Zero initialisation of residual blocks, which then begin as the identity."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def zero_init(module: nn.Module) -> list[str]:
    """Sets the scale of the last batch norm of every residual block to zero in place.

    The block then begins as the identity (Goyal et al. 2017, arXiv 1706.02677, section 5.1).

    A block names its last batch norm by a property `last_norm`; or it is built like the ResNets of torchvision and
    timm: it has a `downsample`, and its last batch norm is `bn3`, or `bn2` if there is no `bn3`.

    Returns:
        Names of these batch norms.
    """
    names = []
    for name, block in module.named_modules():
        # None if the block has no shortcut.
        norm = getattr(block, "last_norm", None)
        if norm is None and hasattr(block, "downsample"):
            norm = getattr(block, "bn3", None) or getattr(block, "bn2", None)
        if isinstance(norm, _BatchNorm) and norm.affine:
            nn.init.zeros_(norm.weight)
            norm_name = next(key for key, submodule in block.named_modules() if submodule is norm)
            names.append(f"{name}.{norm_name}" if name else norm_name)
    return names
