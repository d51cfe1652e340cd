"""ImageTransform: calls a transform of the user's own on one image, as its library expects it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from headway.core.errors import UsageError
from headway.core.user_code import read_parameters
from headway.data.workers.sample_seeds import preserve_generators, read_states, seed_generators

Kind = Literal["array", "albumentations", "torchvision", "pillow"]

# Parameters of a plain function that get random numbers of the sample.
RANDOM_PARAMETERS = ("rng", "generator", "key")


@final
class ImageTransform:
    """Applies a transform to uint8 images [H, W, C], one at a time.

    Args:
        keeps_form: results must be uint8 images of the given shape, for a recipe, which goes on with them. A tensor [C,
            H, W] is taken for an image [H, W, C].

    Attributes:
        kind: the form in which the transform takes images. `albumentations`: `t(image=array)["image"]`, for its classes
            and anything that is called alike. `torchvision`: a uint8 tensor [C, H, W], for torchvision.transforms.v2.
            `pillow`: a PIL image, for the older torchvision.transforms. `array`: a numpy array [H, W, C], for any other
            callable.
    """

    def __init__(self, transform: Any, *, keeps_form: bool = False) -> None:
        if not callable(transform):
            what = f"a transform is called with one image, and this {type(transform).__name__} cannot be called"
            raise UsageError(what, where="transform", fix="Give a function, or an object of a transform's class.")
        if isinstance(transform, type):
            what = f"{transform.__name__} is a class, not an object of it"
            raise UsageError(what, where="transform", fix=f"Give {transform.__name__}(...).")
        self._transform, self._keeps_form = transform, keeps_form
        self.kind = find_kind(transform)
        accepted = read_parameters(transform) if self.kind == "array" else {}
        self._random = [name for name in RANDOM_PARAMETERS if name in accepted]
        # Albumentations draws from generators of its own, not from the global ones.
        self._reseed = getattr(transform, "set_random_seed", None)

    @property
    def name(self) -> str:
        """Name of the function or class, for messages."""
        return getattr(self._transform, "__qualname__", type(self._transform).__qualname__)

    def transform_image(self, image: NDArray[np.uint8], key: int, *, shares_generators: bool = False) -> torch.Tensor:
        """Returns what the transform returns for an image [H, W, C], as a tensor.

        Args:
            key: 64 bits; every random number that the transform draws depends on them alone.
            shares_generators: the global generators belong to other threads too, and are left alone.

        Raises:
            TypeError, ValueError: it is not an image, or not of the form that is kept. Anything the transform raises.
        """
        if not shares_generators:
            seed_generators(key)
        if self._reseed is not None:
            self._reseed(key & 0xFFFFFFFF)
        if self.kind == "albumentations":
            found = self._transform(image=image)["image"]
        elif self.kind == "torchvision":
            found = self._transform(torch.from_numpy(image).permute(2, 0, 1).contiguous())
        elif self.kind == "pillow":
            found = self._transform(Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0]))
        else:
            found = self._transform(image, **{name: _make_random(name, key) for name in self._random})
        result = to_tensor(found)
        return keep_form(result, image.shape) if self._keeps_form else result

    def try_out(self, size: tuple[int, int, int]) -> tuple[torch.Tensor, bool]:
        """Calls the transform on one image of noise, of (height, width, channels).

        Returns:
            its result, and True if it drew from a global generator.
        """
        noise = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        with preserve_generators():
            seed_generators(0)
            before = read_states()
            # Without seeding inside, so that a changed state can only come from a draw.
            result = self.transform_image(noise, 0, shares_generators=True)
            return result, read_states() != before


def to_tensor(result: Any) -> torch.Tensor:
    """Returns the result of a transform as a tensor. Raises TypeError if it is not an image."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, Image.Image | np.ndarray | np.generic):
        # Torch takes no read-only memory and no negative strides.
        return torch.from_numpy(np.require(result, requirements=["C", "W"]))
    raise TypeError(f"it returned a {type(result).__name__}: return one array or tensor of one shape for each image")


def keep_form(result: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a result as a uint8 image [H, W, C] of a shape. Raises ValueError if it is none."""
    height, width, channels = shape
    if result.dtype == torch.uint8:
        # First, so that an image whose sides equal its channels stays as it is.
        if tuple(result.shape) == shape:
            return result
        if tuple(result.shape) == (channels, height, width):
            return result.permute(1, 2, 0)
        if tuple(result.shape) == (height, width) and channels == 1:
            return result[:, :, None]
    what = f"it returned {tuple(result.shape)} {result.dtype}, and got {shape} torch.uint8"
    if result.dtype != torch.uint8:
        raise ValueError(f"{what}: return uint8, without ToTensor, ToDtype and Normalize, since the recipe normalises")
    raise ValueError(f"{what}: return images of that size; data.size and data.crop set it")


def find_kind(transform: Any) -> Kind:
    """Finds the form in which a transform takes images, by its module and by the way it is called."""
    modules = {base.__module__ for one in _list_parts(transform) for base in type(one).__mro__}
    if any(name.partition(".")[0].startswith("albumentations") for name in modules) or _takes_keyword_image(transform):
        return "albumentations"
    # Before the older package, whose name its own begins with.
    if any(name.startswith("torchvision.transforms.v2") for name in modules):
        return "torchvision"
    if any(name.startswith("torchvision.transforms") for name in modules):
        return "pillow"
    return "array"


def _list_parts(transform: Any) -> Iterable[Any]:
    """Lists a transform and the transforms that it is made of: torchvision's may stand in an nn.Sequential."""
    if isinstance(transform, torch.nn.Module):
        return transform.modules()
    inner = getattr(transform, "transforms", ())
    return [transform, *(inner if isinstance(inner, list | tuple) else ())]


def _takes_keyword_image(transform: Any) -> bool:
    parameters = read_parameters(transform)
    image = parameters.get("image")
    return "force_apply" in parameters or (image is not None and image.kind is inspect.Parameter.KEYWORD_ONLY)


def _make_random(name: str, key: int) -> Any:
    if name == "rng":
        return np.random.default_rng(key)
    return torch.Generator().manual_seed(key) if name == "generator" else key
