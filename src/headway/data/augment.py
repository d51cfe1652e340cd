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
from headway.data.augment_recipe import HOST_AUGMENTATIONS, AugmentRecipe
from headway.data.crops import Float64, draw_flips, draw_shifts
from headway.data.ops import colour, mix
from headway.data.ops.erase import erase, make_noise
from headway.data.ops.move import flip_and_translate
from headway.data.random_streams import STREAM_BRIGHTNESS, STREAM_CONTRAST, STREAM_MIX, STREAM_SATURATION
from headway.data.upload import to_device

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]


# Numbers that the CPU normalises at a time: half a MiB of float32, which fits into the second-level cache.
NORMALISE_BLOCK = 1 << 17


@dataclass(frozen=True, kw_only=True)
class AugmentParameters:
    """Random parameters of each sample of a batch, as numpy arrays; None if the recipe does not use them.

    A box is (left, top, width, height) in pixels; a box without area changes nothing.
    """

    flips: Bool | None = None
    """[b]"""
    shifts: Int64 | None = None
    """[b, 2]: down, right, in pixels."""
    operations: Int64 | None = None
    """[b, n]: numbers of `headway.data.augment_policy.OPERATIONS`."""
    strengths: Float64 | None = None
    """[b, n], in each operation's own unit."""
    brightness: Float64 | None = None
    """Factors, [b]."""
    contrast: Float64 | None = None
    saturation: Float64 | None = None
    cutout: Boxes | None = None
    """int32 [b, 4]"""
    erasing: Boxes | None = None
    """int32 [b, 4]"""
    partner: Int64 | None = None
    """[b]: place in the batch of each sample's mixing partner."""
    cutmix: Boxes | None = None
    """int32 [b, 4]: the box that comes from the partner."""
    mixup: Float64 | None = None
    """[b]: share of the sample's own pixels."""
    kept: Float64 | None = None
    """[b]: share of the sample's own label."""


@final
class Augment:
    """Turns uint8 [b, H, W, C] into augmented, normalised float32 [b, C, H, W], on the images' device.

    Args:
        recipe: the augmentations; mean and std must be numbers.
        device: device of the images.
        channels_last: memory format of the result: channels_last without a copy, or contiguous with one.
        num_classes: number of classes, needed by mixup and cutmix; None if labels are not classes.
        done_by_loader: of "flip" and "translate", those that the loader has done already.
        reuse_output: on a CPU, write each result over the one before. For a loop that is done with a batch when it asks
            for the next.

    Attributes:
        needs_keys: True if training batches need keys.
        needs_epochs: True if they also need epochs, and the keys of epoch 0.

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
        # Keys that are unset by default are the other augmentations.
        others = [name for name, field in AugmentRecipe.model_fields.items() if field.default is None]
        is_any_set = any(getattr(recipe, name) is not None for name in others)
        self.needs_keys = self._flip is not None or self._translate > 0 or is_any_set
        self._mean = torch.tensor(recipe.mean, dtype=torch.float32, device=device)
        self._inverse_std = 1 / torch.tensor(recipe.std, dtype=torch.float32, device=device)
        # Erased and uncovered pixels get the mean, so they are about 0 after normalisation.
        self._fill = self._mean.round().clamp(0, 255).to(torch.uint8)
        self._reuse_output = reuse_output
        self._memory = torch.empty(0)
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

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
            labels: [b], or as the data set has them.
            keys: uint64 [b], the samples' keys; may be None unless `needs_keys`.
            epochs: int64 [b], for an alternating flip.
            first_epoch_keys: uint64 [b], the samples' keys in epoch 0, for an alternating flip.
            masked: bool [b], masked samples: no other sample is mixed with them.

        Returns:
            images float32 [b, C, H, W]; and the labels, or, if the recipe mixes samples, the shares of the classes,
            float32 [b, num_classes].
        """
        if not self.needs_keys:
            return self.normalise(images), labels
        if keys is None:
            raise UsageError("augmentation needs the samples' keys", fix="Give batch.keys().")
        drawn = self.draw_parameters(
            keys, (images.shape[1], images.shape[2]), epochs=epochs, first_epoch_keys=first_epoch_keys, masked=masked
        )
        # The order of the recipe's keys: first moves, then colours, erasing, and mixing of finished images.
        if drawn.flips is not None or drawn.shifts is not None:
            images = flip_and_translate(images, drawn.flips, drawn.shifts)
        if drawn.operations is not None and drawn.strengths is not None:
            images = augment_policy.apply_operations(images, drawn.operations, drawn.strengths, self._fill)
        if drawn.brightness is not None:
            images = colour.adjust_brightness(images, drawn.brightness)
        if drawn.contrast is not None:
            images = colour.adjust_contrast(images, drawn.contrast)
        if drawn.saturation is not None:
            images = colour.adjust_saturation(images, drawn.saturation)
        if drawn.cutout is not None:
            images = erase(images, drawn.cutout, self._fill)
        if drawn.erasing is not None:
            images = erase(images, drawn.erasing, self._make_erasing_fill(images, keys))
        if drawn.partner is not None and drawn.kept is not None and self._num_classes is not None:
            others = images[to_device(drawn.partner, images.device)]
            if drawn.cutmix is not None:
                images = mix.apply_cutmix(images, others, drawn.cutmix)
            if drawn.mixup is not None:
                images = mix.apply_mixup(images, others, drawn.mixup)
            labels = mix.mix_labels(labels, drawn.partner, drawn.kept, self._num_classes)
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
        """Draws the parameters of a call with the same arguments, for images of `size` (height, width)."""
        recipe, found = self._recipe, dict[str, NDArray[np.generic]]()
        if self._flip is not None:
            if self._flip == "alternating" and first_epoch_keys is None:
                what = "an alternating flip needs the samples' keys in the first epoch"
                raise UsageError(what, fix="Give first_epoch_keys=headway.make_keys(seed, 0, samples), and epochs.")
            found["flips"] = draw_flips(
                keys if first_epoch_keys is None or self._flip == "random" else first_epoch_keys, epochs, self._flip
            )
        # Each part draws from streams of its own, so removing one changes no other.
        if self._translate:
            found["shifts"] = draw_shifts(keys, self._translate)
        if recipe.policy is not None:
            rand = recipe.policy.name == "rand"
            chosen = (
                augment_policy.draw_rand_augment(keys, size, n=recipe.policy.n, m=recipe.policy.m) if rand else None
            )
            found["operations"], found["strengths"] = chosen or augment_policy.draw_trivial_augment(keys, size)
        if recipe.jitter is not None:
            streams = {"brightness": STREAM_BRIGHTNESS, "contrast": STREAM_CONTRAST, "saturation": STREAM_SATURATION}
            for name, stream in streams.items():
                if spread := getattr(recipe.jitter, name):
                    found[name] = augment_draws.draw_factors(keys, stream, spread)
        if recipe.cutout is not None:
            found["cutout"] = augment_draws.draw_cutout_boxes(keys, recipe.cutout, size)
        if (erasing := recipe.random_erasing) is not None:
            found["erasing"] = augment_draws.draw_erasing_boxes(
                keys, size, p=erasing.p, scale=erasing.scale, ratio=erasing.ratio
            )
        if recipe.cutmix is not None or recipe.mixup is not None:
            found |= self._draw_mixing(keys, size, masked)
        return AugmentParameters(**found)  # type: ignore[arg-type]

    def _draw_mixing(self, keys: UInt64, size: tuple[int, int], masked: Bool | None) -> dict[str, NDArray[np.generic]]:
        """Draws partners and shares of cutmix and mixup."""
        recipe, partner = self._recipe, augment_draws.draw_partners(keys)
        # A masked partner would mix zeros into a good sample, so that sample stays as it is.
        alone = np.zeros(len(keys), bool) if masked is None else masked[partner]
        # With both in the recipe, each sample takes cutmix or mixup. A share of 1 keeps the whole sample.
        pasted = np.full(len(keys), recipe.cutmix is not None)
        if recipe.cutmix is not None and recipe.mixup is not None:
            pasted = draw_uniform(keys, STREAM_MIX) < 0.5
        out: dict[str, NDArray[np.generic]] = {"partner": partner}
        kept = np.ones(len(keys))
        if recipe.cutmix is not None:
            share = augment_draws.draw_symmetric_beta(keys, recipe.cutmix.alpha)
            boxes = augment_draws.draw_cutmix_boxes(keys, np.where(pasted & ~alone, share, 1), size)
            kept = augment_draws.compute_kept_share(boxes, size)
            out["cutmix"] = boxes
        if recipe.mixup is not None:
            own = np.where(pasted | alone, 1, augment_draws.draw_symmetric_beta(keys, recipe.mixup.alpha))
            kept = kept * own
            out["mixup"] = own
        return out | {"kept": kept}

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
            out = images
        elif images.device.type == "cpu":
            out = self._normalise_in_blocks(images)
        else:
            out = (images.float() - self._mean).mul_(self._inverse_std)
        # NHWC memory seen as NCHW is channels_last already; only a contiguous result needs a copy.
        out = out.view(b, height, width, channels).permute(0, 3, 1, 2)
        return out if self._channels_last else out.contiguous()

    def _normalise_in_blocks(self, images: torch.Tensor) -> torch.Tensor:
        """Normalises a few images at a time on a CPU, so that all three operations find them in the second cache."""
        # Rows of pixels as one dimension are six times as fast on a CPU as 3 numbers at a time.
        b, height, width, channels = images.shape
        # Widths are few: one, or some with progressive resolution.
        if width not in self._rows:
            self._rows[width] = self._mean.repeat(width), self._inverse_std.repeat(width)
        mean, inverse_std = self._rows[width]
        out = self._allocate_output(images.numel()).view(b, height, width * channels)
        rows = images.reshape(b, height, width * channels)
        step = max(1, NORMALISE_BLOCK // max(1, height * width * channels))
        # In place on the output: no temporary of the size of the batch.
        for low in range(0, b, step):
            out[low : low + step].copy_(rows[low : low + step]).sub_(mean).mul_(inverse_std)
        return out

    def _allocate_output(self, numbers: int) -> torch.Tensor:
        # New memory costs a page fault every 4 KiB: for 128 images of 224 x 224, more time than the arithmetic.
        if not self._reuse_output:
            return torch.empty(numbers, dtype=torch.float32)
        if self._memory.numel() < numbers:
            self._memory = torch.empty(numbers, dtype=torch.float32)
        return self._memory[:numbers]


def measure_mean_std(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measures (mean, std) of each channel of uint8 [n, H, W, C]; a channel without variation gets the std 1."""
    count, channels = images[..., 0].numel(), images.shape[-1]
    # Sums in int64 are exact. One image at a time, because its int64 copy is 8 times as large.
    total = torch.zeros(2, channels, dtype=torch.int64)
    for image in images:
        values = image.reshape(-1, channels).long()
        total += torch.stack([values.sum(dim=0), values.square().sum(dim=0)]).cpu()
    mean, square = (total.double() / count).tolist()
    std = [max(0.0, s - m * m) ** 0.5 for m, s in zip(mean, square, strict=True)]
    return tuple(round(value, 4) for value in mean), tuple(round(value, 4) or 1.0 for value in std)
