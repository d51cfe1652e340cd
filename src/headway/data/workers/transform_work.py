"""TransformImages: applies a transform of the user's own to a part of a batch, in memory that workers share."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.workers.image_transform import ImageTransform
from headway.data.workers.user_failure import UserFailure
from headway.data.workers.worker_pool import Work


class TransformTask(NamedTuple):
    """A part of a batch that lies in a slot.

    Attributes:
        shape: of the whole batch's images.
        places: (low, high) of the part.
        samples, keys: those of the part.
    """

    slot: int
    shape: tuple[int, ...]
    places: tuple[int, int]
    samples: NDArray[np.int64]
    keys: NDArray[np.uint64]


class TransformedPart(NamedTuple):
    """Shape and type of each image of a part that was transformed, and the seconds that it took."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    first_sample: int
    seconds: float


@final
@dataclass
class TransformImages(Work):
    """Transforms images of one slot into another.

    Attributes:
        inputs, outputs: flat uint8 memory of each slot.
        shares_generators: the workers are threads.
    """

    transform: ImageTransform
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    shares_generators: bool = False

    def start(self, number: int, workers: int) -> None:
        """Needs nothing."""

    def __call__(self, task: TransformTask) -> TransformedPart | UserFailure | None:
        """Transforms the images of a part, and writes the results to the same places of the output."""
        begun, (low, high) = perf_counter(), task.places
        size = int(np.prod(task.shape))
        images = self.inputs[task.slot][:size].view(task.shape).numpy()
        output, form = self.outputs[task.slot], None
        for place, sample, key in zip(range(low, high), task.samples.tolist(), task.keys.tolist(), strict=True):
            try:
                result = self.transform.transform_image(images[place], key, shares_generators=self.shares_generators)
                if form is None:
                    form = TransformedPart(tuple(result.shape), result.dtype, sample, 0.0)
                check_form(form, result, sample)
                end = (place + 1) * result.nbytes
                if end > len(output):
                    raise ValueError(f"it returned an image of shape {tuple(result.shape)}, larger than the first one")
            except (Exception, SystemExit) as error:
                return UserFailure.describe(f"the transform {self.transform.name!r} of sample {sample}", error)
            output[place * result.nbytes : end].view(result.dtype).view(result.shape).copy_(result)
        # A part may be empty if a batch has fewer images than there are workers.
        return None if form is None else form._replace(seconds=perf_counter() - begun)


def check_form(form: TransformedPart, result: torch.Tensor, sample: int) -> None:
    """Raises ValueError if an image has another shape or type than the first one."""
    if (tuple(result.shape), result.dtype) != form[:2]:
        raise ValueError(
            f"it returned {tuple(form.shape)} {form.dtype} for sample {form.first_sample} and {tuple(result.shape)} "
            f"{result.dtype} for sample {sample}: return one shape and type, for example by a resize at its end"
        )
