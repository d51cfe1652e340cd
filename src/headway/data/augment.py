"""Augmentation of a batch on its device, random by each sample's key, then normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import UInt64, draw_uniform
from headway.data import augment_draws, augment_policy
from headway.data.augment_draws import Boxes
from headway.data.augment_recipe import HOST_AUGMENTATIONS, AugmentRecipe, PolicyRecipe
from headway.data.crops import Float64, draw_flip_masks, draw_shifts
from headway.data.ops import colour, mix
from headway.data.ops.blocks import CPU_BLOCK_VALUES
from headway.data.ops.erase import erase, make_noise
from headway.data.ops.move import flip_and_translate
from headway.data.ops.rotate import rotate
from headway.data.random_streams import STREAM_BRIGHTNESS, STREAM_CONTRAST, STREAM_MIX, STREAM_SATURATION
from headway.data.upload import to_device

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class AugmentParameters:
    """Random parameters of each sample of a batch, as numpy arrays; None if the recipe does not use them.

    A box is (left, top, width, height) in pixels; a box without area changes nothing.
    """

    flips: Bool | None = None
    """bool [b]: samples to mirror left to right."""
    vertical_flips: Bool | None = None
    """bool [b]: samples to mirror top to bottom."""
    shifts: Int64 | None = None
    """int64 [b, 2]: down, right, in pixels."""
    angles: Float64 | None = None
    """float64 [b]: degrees, counter-clockwise."""
    operations: Int64 | None = None
    """int64 [b, n]: indices in `headway.data.augment_policy.OPERATIONS`."""
    strengths: Float64 | None = None
    """float64 [b, n], in the unit of each operation."""
    brightness: Float64 | None = None
    """float64 [b]: factor of the brightness."""
    contrast: Float64 | None = None
    """float64 [b]: factor of the contrast."""
    saturation: Float64 | None = None
    """float64 [b]: factor of the saturation."""
    hue: Float64 | None = None
    """float64 [b]: shift of the hue, in turns of the colour wheel."""
    cutout: Boxes | None = None
    """int32 [b, 4]: boxes that are filled with the mean."""
    erasing: Boxes | None = None
    """int32 [b, 4]: boxes of random erasing."""
    partner: Int64 | None = None
    """int64 [b]: index in the batch of the sample that each sample is mixed with."""
    cutmix: Boxes | None = None
    """int32 [b, 4]: the box that comes from the partner."""
    mixup: Float64 | None = None
    """float64 [b]: weight of the sample's own pixels (lambda)."""
    label_weight: Float64 | None = None
    """float64 [b]: weight of the sample's own label."""


@final
class Augment:
    """Turns uint8 [b, H, W, C] into augmented, normalised float32 [b, C, H, W], on the images' device.

    Args:
        recipe: the augmentations; mean and std must be numbers.
        device: device of the images.
        channels_last: memory format of the result: torch.channels_last, or contiguous, which costs a copy.
        num_classes: number of classes, needed by mixup and cutmix; None if labels are not classes.
        done_by_loader: augmentations that the loader applies already, and that are skipped here: "flip", "translate".
        reuse_output: on a CPU, write each result into the memory of the previous one. For a loop that does not need a
            batch any more when it asks for the next.

    Attributes:
        needs_keys: True if a call needs `keys`.
        needs_epochs: True if a call also needs `epochs` and `first_epoch_keys`.

    Raises:
        UsageError: mean or std are unknown; or mixup or cutmix is asked for labels that are not classes.
    """

    def __init__(
        self,
        recipe: AugmentRecipe,
        device: torch.device | str,
        channels_last: bool = True,
        *,
        num_classes: int | None = None,
        done_by_loader: frozenset[str] = frozenset(),
        reuse_output: bool = False,
    ) -> None:
        if recipe.mean == "auto" or recipe.std == "auto":
            raise UsageError(
                "mean and std are not known", fix="Give both, or measure them: headway.data.augment.measure_mean_std."
            )
        if not done_by_loader <= HOST_AUGMENTATIONS:
            raise UsageError(
                f"{sorted(done_by_loader - HOST_AUGMENTATIONS)} cannot be done by a loader", fix="Leave it out."
            )
        for name in ("cutmix", "mixup"):
            if getattr(recipe, name) is not None and num_classes is None:
                what = f"{name} mixes classes, and these labels are not classes (or num_classes was not given)"
                raise UsageError(what, where=f"augment.{name}", fix=f"Remove augment.{name}.")
        # A part that the loader does already must not be done twice.
        self._recipe: Final = recipe
        self._num_classes = num_classes
        self._flip = None if "flip" in done_by_loader else recipe.flip_mode
        self._translate = 0 if "translate" in done_by_loader else recipe.translate
        self._channels_last = channels_last
        self.needs_epochs = self._flip == "alternating"
        self.needs_keys = bool(recipe.list_augmentations() - done_by_loader)
        self._mean = torch.tensor(recipe.mean, dtype=torch.float32, device=device)
        # A multiplication takes less time than a division, and every pixel needs one.
        self._inv_std = 1 / torch.tensor(recipe.std, dtype=torch.float32, device=device)
        # Erased and uncovered pixels get the mean, so they are about 0 after normalisation.
        self._fill = self._mean.round().clamp(0, 255).to(torch.uint8)
        self._reuse_output = reuse_output
        self._output_buffer = torch.empty(0)
        self._mean_inv_std_rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        keys: UInt64 | None,
        *,
        epochs: Int64 | None = None,
        first_epoch_keys: UInt64 | None = None,
        masked: Bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Augments and normalises a training batch.

        Args:
            images: uint8 [b, H, W, C]; not changed.
            labels: as the data set has them; class numbers, int64 [b], if the recipe mixes samples.
            keys: uint64 [b], the samples' keys; may be None unless `needs_keys`.
            epochs: int64 [b], for an alternating flip.
            first_epoch_keys: uint64 [b], the samples' keys in epoch 0, for an alternating flip.
            masked: bool [b], masked samples: no other sample is mixed with them.

        Returns:
            images float32 [b, C, H, W]; and the labels, or, if the recipe mixes samples, class probabilities, float32
            [b, num_classes].

        Raises:
            UsageError: keys, or keys of the first epoch, are needed and missing.
        """
        if not self.needs_keys:
            return self.normalise(images), labels
        if keys is None:
            raise UsageError("augmentation needs the samples' keys", fix="Give batch.keys().")
        parameters = self.draw_parameters(
            keys, (images.shape[1], images.shape[2]), epochs=epochs, first_epoch_keys=first_epoch_keys, masked=masked
        )
        recipe = self._recipe
        # The order of the recipe's keys: first moves, then colours, erasing, and mixing of finished images.
        moves = parameters.flips, parameters.shifts, parameters.vertical_flips
        if any(move is not None for move in moves):
            images = flip_and_translate(images, *moves)
        if recipe.rotation is not None and parameters.angles is not None:
            border_fill = self._fill if recipe.rotation.border == "mean" else None
            images = rotate(images, parameters.angles, border_fill)
        if parameters.operations is not None and parameters.strengths is not None:
            images = augment_policy.apply_operations(images, parameters.operations, parameters.strengths, self._fill)
        if parameters.brightness is not None:
            images = colour.adjust_brightness(images, parameters.brightness)
        if parameters.contrast is not None:
            images = colour.adjust_contrast(images, parameters.contrast)
        if parameters.saturation is not None:
            images = colour.adjust_saturation(images, parameters.saturation)
        if parameters.hue is not None:
            images = colour.shift_hue(images, parameters.hue)
        if parameters.cutout is not None:
            images = erase(images, parameters.cutout, self._fill)
        if parameters.erasing is not None:
            images = erase(images, parameters.erasing, self._make_erasing_fill(images, keys))
        if parameters.partner is not None and parameters.label_weight is not None and self._num_classes is not None:
            # Partners are taken after all other augmentations, so both halves of a mixed image are augmented.
            partner_images = images[to_device(parameters.partner, images.device)]
            if parameters.cutmix is not None:
                images = mix.apply_cutmix(images, partner_images, parameters.cutmix)
            if parameters.mixup is not None:
                images = mix.apply_mixup(images, partner_images, parameters.mixup)
            labels = mix.mix_labels(labels, parameters.partner, parameters.label_weight, self._num_classes)
        return self.normalise(images), labels

    def draw_parameters(
        self,
        keys: UInt64,
        size: tuple[int, int],
        *,
        epochs: Int64 | None = None,
        first_epoch_keys: UInt64 | None = None,
        masked: Bool | None = None,
    ) -> AugmentParameters:
        """Draws the parameters that `__call__` uses for the same arguments and images of `size` (height, width).

        Raises UsageError if the recipe has an alternating flip and `first_epoch_keys` is None.
        """
        recipe = self._recipe
        parameters: dict[str, NDArray[np.generic] | None] = {}
        if self._flip is not None:
            flips, vertical_flips = draw_flip_masks(self._flip, keys, epochs, first_epoch_keys)
            parameters |= {"flips": flips, "vertical_flips": vertical_flips}
        # Each part draws from other streams, so removing one does not change the others.
        if self._translate:
            parameters["shifts"] = draw_shifts(keys, self._translate)
        if recipe.rotation is not None:
            parameters["angles"] = augment_draws.draw_angles(keys, recipe.rotation.degrees, recipe.rotation.p)
        if recipe.policy is not None:
            parameters["operations"], parameters["strengths"] = _draw_operations(recipe.policy, keys, size)
        if recipe.jitter is not None:
            streams = {"brightness": STREAM_BRIGHTNESS, "contrast": STREAM_CONTRAST, "saturation": STREAM_SATURATION}
            for name, stream in streams.items():
                if spread := getattr(recipe.jitter, name):
                    parameters[name] = augment_draws.draw_factors(keys, stream, spread)
            if recipe.jitter.hue:
                parameters["hue"] = augment_draws.draw_hue_shifts(keys, recipe.jitter.hue)
        if recipe.cutout is not None:
            parameters["cutout"] = augment_draws.draw_cutout_boxes(keys, recipe.cutout, size)
        if (erasing := recipe.random_erasing) is not None:
            parameters["erasing"] = augment_draws.draw_erasing_boxes(
                keys, size, p=erasing.p, scale=erasing.scale, ratio=erasing.ratio
            )
        if recipe.cutmix is not None or recipe.mixup is not None:
            parameters |= self._draw_mixing_parameters(keys, size, masked)
        return AugmentParameters(**parameters)  # type: ignore[arg-type]

    def _draw_mixing_parameters(
        self, keys: UInt64, size: tuple[int, int], masked: Bool | None
    ) -> dict[str, NDArray[np.generic]]:
        """Draws partners, boxes and weights of cutmix and mixup; the keys are fields of `AugmentParameters`."""
        recipe = self._recipe
        partner = augment_draws.draw_partners(keys)
        # A masked partner would mix zeros into a good sample, so that sample stays as it is.
        has_no_partner = np.zeros(len(keys), bool) if masked is None else masked[partner]
        # With both in the recipe, each sample takes cutmix or mixup. A weight of 1 keeps the whole sample.
        uses_cutmix = np.full(len(keys), recipe.cutmix is not None)
        if recipe.cutmix is not None and recipe.mixup is not None:
            uses_cutmix = draw_uniform(keys, STREAM_MIX) < 0.5
        parameters: dict[str, NDArray[np.generic]] = {"partner": partner}
        label_weight = np.ones(len(keys))
        if recipe.cutmix is not None:
            lam = augment_draws.draw_symmetric_beta(keys, recipe.cutmix.alpha)
            boxes = augment_draws.draw_cutmix_boxes(keys, np.where(uses_cutmix & ~has_no_partner, lam, 1), size)
            # The area after cutting at the border, not the drawn one, because labels follow the pixels.
            label_weight = augment_draws.compute_kept_area(boxes, size)
            parameters["cutmix"] = boxes
        if recipe.mixup is not None:
            mixup_weight = np.where(
                uses_cutmix | has_no_partner, 1, augment_draws.draw_symmetric_beta(keys, recipe.mixup.alpha)
            )
            label_weight = label_weight * mixup_weight
            parameters["mixup"] = mixup_weight
        return parameters | {"label_weight": label_weight}

    def _make_erasing_fill(self, images: torch.Tensor, keys: UInt64) -> torch.Tensor:
        assert self._recipe.random_erasing is not None
        fill = self._recipe.random_erasing.fill
        if fill == "random":
            return make_noise(images, keys)
        # A number is the same for all channels.
        return self._fill if fill == "mean" else torch.full_like(self._fill, round(fill))

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Computes (images - mean) / std as float32 [b, C, H, W], without augmentation, for evaluation and prediction.

        If the recipe does not normalise, the result is the bytes themselves.
        """
        b, height, width, channels = images.shape
        if not self._recipe.normalise:
            normalised = images
        elif images.device.type == "cpu":
            normalised = self._normalise_in_blocks(images)
        else:
            normalised = (images.float() - self._mean).mul_(self._inv_std)
        # NHWC memory seen as NCHW is channels_last already; only a contiguous result needs a copy.
        normalised = normalised.view(b, height, width, channels).permute(0, 3, 1, 2)
        return normalised if self._channels_last else normalised.contiguous()

    def restore_bytes(self, images: torch.Tensor) -> torch.Tensor:
        """Returns uint8 [b, H, W, C] of normalised images [b, C, H, W]: the inverse of `normalise`, rounded."""
        pixels = images.detach().float().permute(0, 2, 3, 1)
        if self._recipe.normalise:
            pixels = pixels / self._inv_std + self._mean
        return pixels.round().clamp(0, 255).to(torch.uint8)

    def _normalise_in_blocks(self, images: torch.Tensor) -> torch.Tensor:
        """Normalises a few images at a time, so that all three operations find them in the CPU's L2 cache.

        Returns float32 [b, H, W * C].
        """
        # A dimension of W * C values is six times as fast on a CPU as one of 3 channels.
        b, height, width, channels = images.shape
        # Widths are few: one, or some with progressive resolution.
        if width not in self._mean_inv_std_rows:
            self._mean_inv_std_rows[width] = self._mean.repeat(width), self._inv_std.repeat(width)
        mean, inv_std = self._mean_inv_std_rows[width]
        normalised = self._allocate_output(images.numel()).view(b, height, width * channels)
        rows = images.reshape(b, height, width * channels)
        block_images = max(1, CPU_BLOCK_VALUES // max(1, height * width * channels))
        # In place on the output: no temporary of the size of the batch.
        for low in range(0, b, block_images):
            normalised[low : low + block_images].copy_(rows[low : low + block_images]).sub_(mean).mul_(inv_std)
        return normalised

    def _allocate_output(self, num_values: int) -> torch.Tensor:
        # New memory costs a page fault every 4 KiB: for 128 images of 224 x 224, more time than the arithmetic.
        if not self._reuse_output:
            return torch.empty(num_values, dtype=torch.float32)
        if self._output_buffer.numel() < num_values:
            self._output_buffer = torch.empty(num_values, dtype=torch.float32)
        return self._output_buffer[:num_values]


def _draw_operations(policy: PolicyRecipe, keys: UInt64, size: tuple[int, int]) -> tuple[Int64, Float64]:
    if policy.name == "rand":
        return augment_policy.draw_rand_augment(keys, size, n=policy.n, m=policy.m)
    if policy.name == "auto":
        return augment_policy.draw_auto_augment(keys, size, policy.table)
    return augment_policy.draw_trivial_augment(keys, size)


def measure_mean_std(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns (mean, std) of each channel of uint8 [n, H, W, C], in 0 to 255; a constant channel gets the std 1."""
    count = images[..., 0].numel()
    channels = images.shape[-1]
    # Sums in int64 are exact. One image at a time, because its int64 copy is 8 times as large.
    sums = torch.zeros(2, channels, dtype=torch.int64)
    for image in images:
        values = image.reshape(-1, channels).long()
        sums += torch.stack([values.sum(dim=0), values.square().sum(dim=0)]).cpu()
    mean, mean_square = (sums.double() / count).tolist()
    std = [max(0.0, s - m * m) ** 0.5 for m, s in zip(mean, mean_square, strict=True)]
    return tuple(round(value, 4) for value in mean), tuple(round(value, 4) or 1.0 for value in std)
