"""A transform of the user's own on each image: after decoding, with random numbers of its key, by any worker."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data._loaders import SEED, SIZE, mixed

from headway.core.errors import HeadwayError, UsageError, UserCodeError
from headway.data import opening
from headway.data.batch import Batch
from headway.data.dataset import Dataset
from headway.data.loader import Loader
from headway.data.workers.image_transform import ImageTransform

HERE = Path(__file__).name
Sample = tuple[int, int, int, bytes]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return opening.open(mixed(tmp_path_factory.mktemp("transforms")))


@contextmanager
def opened(data: Dataset, transform: Callable[..., Any], **options: Any) -> Iterator[Loader[Batch]]:
    options = {"batch": 7, "seed": SEED, "size": SIZE, "crop": "random", "flip": True, "threads": 1, **options}
    with closing(Loader(data, transform=transform, **options)) as found:
        yield found


def rows(batches: Any, count: int | None = None) -> list[Sample]:
    out = []
    for batch in islice(batches, count):
        columns = (batch.positions.tolist(), batch.samples.tolist(), batch.labels.tolist(), batch.images)
        out += [(*row, image.numpy().tobytes()) for *row, image in zip(*columns, strict=True)]
    return out


def served(data: Dataset, transform: Callable[..., Any], **options: Any) -> list[Sample]:
    """Three epochs."""
    with opened(data, transform, **options) as loader:
        return [row for _ in range(3) for row in rows(loader)]


def jitter(image: np.ndarray) -> torch.Tensor:
    """Draws from all three global generators."""
    assert image.shape == (*SIZE, 3)
    assert image.dtype == np.uint8
    scale = random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)
    return torch.from_numpy(image).permute(2, 0, 1).float() * scale + torch.rand(1)


def rotate(image: np.ndarray, rng: np.random.Generator, key: int, generator: torch.Generator) -> np.ndarray:
    turns = int(rng.integers(4)) + key + int(torch.randint(4, (), generator=generator))
    # Its result has negative strides, or is the input itself.
    return np.rot90(image, 2 * (turns % 2))


def test_workers_of_any_kind_and_number_give_the_same(data: Dataset) -> None:
    expected = served(data, jitter, workers=0)
    assert served(data, jitter, workers=2) == expected
    with opened(data, jitter, workers=1) as first, opened(data, jitter, workers=2) as second:
        taken = rows(first, 2)
        second.load_state_dict(first.state_dict())
        assert taken + rows(second) + rows(second) == expected[:49]
        # An epoch that is left while its batches are in the hands of the workers.
        assert rows(first) == expected[28:49]
    by_rank = [served(data, jitter, workers=0, rank=rank, world=2) for rank in range(2)]
    assert sorted(row for rank in by_rank for row in rank) == sorted(expected)


def test_threads_take_a_transform_with_a_generator_of_its_own(data: Dataset) -> None:
    expected = served(data, rotate, workers=0)
    assert served(data, rotate, workers=2, worker_kind="thread") == expected
    assert served(data, rotate, workers=1) == expected


def test_it_sees_what_is_served_without_it(data: Dataset) -> None:
    plain: dict[str, Any] = {"batch": 7, "seed": SEED, "size": SIZE, "crop": "random", "flip": True}
    loader = Loader(data, **plain)
    assert served(data, lambda image: image, workers=1) == [row for _ in range(3) for row in rows(loader)]


def test_a_transform_draws_other_numbers_in_each_epoch(data: Dataset) -> None:
    drawn = served(data, lambda image: np.array([np.random.rand(), random.random()]), workers=0)
    assert len({row[3] for row in drawn}) == len(drawn)


def test_the_training_loop_keeps_its_random_numbers(data: Dataset) -> None:
    torch.manual_seed(1)
    alone = torch.rand(2)
    torch.manual_seed(1)
    beside = [torch.rand(1)]
    with opened(data, jitter, workers=0) as loader:
        rows(loader)
    assert torch.equal(torch.cat([*beside, torch.rand(1)]), alone)


def test_stats_have_its_stage_and_a_cheap_one_needs_no_process(data: Dataset) -> None:
    with opened(data, lambda image: image) as loader:
        rows(loader)
        assert loader.stats().stage_s["transform"] > 0
    with opened(data, lambda image: time.sleep(0.002) or image, workers=1, stop=math.inf) as loader:
        rows(loader, 2)
        # Decoded images that wait in the ring are not taken for images that were transformed in no time.
        assert loader.stats().stage_images_s["transform"] < 500
    with opened(data, lambda image: image) as loader:
        rows(loader)
        assert loader.stats().images == 28


# The forms of the libraries. Stand-ins for the user's side: neither library can be installed here.


def library(name: str, source: str) -> Any:
    """Executes the source as a module of that name."""
    module = ModuleType(name)
    exec(source, module.__dict__)
    return module


ALBUMENTATIONS = """
import numpy as np

class Compose:
    def __init__(self):
        self.set_random_seed(None)

    def set_random_seed(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, *args, force_apply=False, **data):
        assert not args
        data["image"] = data["image"] + self.generator.integers(0, 9, dtype=np.uint8)
        return data
"""

TORCHVISION = """
import torch

class Compose(torch.nn.Module):
    def forward(self, image):
        assert image.dtype == torch.uint8 and image.shape[0] in (1, 3) and image.is_contiguous()
        return image.float() / 255 + torch.rand(1)
"""

OLD = """
import numpy as np

class ToTensor:
    def __call__(self, image):
        return np.asarray(image).astype(np.float32) / 255 + image.width
"""


def test_libraries_get_images_in_their_own_form(data: Dataset) -> None:
    albumentations = library("albumentations.core.composition", ALBUMENTATIONS).Compose()
    torchvision = library("torchvision.transforms.v2._container", TORCHVISION).Compose()
    old = library("torchvision.transforms.transforms", OLD).ToTensor()

    def keyword(*, image: np.ndarray) -> dict[str, np.ndarray]:
        return {"image": image, "mask": image}

    for transform, kind, shape in (
        (albumentations, "albumentations", (*SIZE, 3)),
        (keyword, "albumentations", (*SIZE, 3)),
        (torchvision, "torchvision", (3, *SIZE)),
        (torch.nn.Sequential(torchvision), "torchvision", (3, *SIZE)),
        (old, "pillow", (*SIZE, 3)),
        (jitter, "array", (3, *SIZE)),
        (np.flipud, "array", (*SIZE, 3)),
    ):
        assert ImageTransform(transform).kind == kind
        with opened(data, transform, workers=0) as loader:
            assert next(iter(loader)).images.shape[1:] == shape
    # Their random numbers come from the key, too.
    assert served(data, albumentations, workers=1) == served(data, albumentations, workers=0)
    with opened(data, old, channels=1, workers=0) as loader:
        assert next(iter(loader)).images.shape[1:] == SIZE


# What goes wrong


@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (1, "process"), (1, "thread")])
def test_an_error_names_sample_and_line(data: Dataset, workers: int, kind: Any) -> None:
    calls = 0

    def fails(image: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        # The first two are the tries with noise.
        return image if calls < 7 else {}["the user's own key"]  # here: fails

    line = Path(__file__).read_text().split("# here: fails")[0].count("\n") + 1
    with opened(data, fails, workers=workers, worker_kind=kind, seed=None, crop="center", flip=False) as loader:
        message = rf"{HERE}:{line}: the transform .*fails' of sample 4 failed: KeyError"
        with pytest.raises(UserCodeError, match=message) as found:
            rows(loader)
        assert "# here: fails" in str(found.value.__cause__)


def test_results_of_several_shapes_are_a_sentence(data: Dataset) -> None:
    for workers in (0, 2):
        message = r"returned \(\d,\).* for sample \d+ and \(\d,\).*one shape and type"
        with (
            opened(data, lambda image, key: np.zeros(key % 9 if key else 9), workers=workers) as loader,
            pytest.raises(UserCodeError, match=message),
        ):
            rows(loader)
    with opened(data, lambda image: {"image": image}) as loader, pytest.raises(UserCodeError, match="returned a dict"):
        rows(loader)


def test_a_killed_worker_is_a_sentence(data: Dataset) -> None:
    me = os.getpid()

    def ends(image: np.ndarray) -> np.ndarray:
        if os.getpid() != me:
            os.kill(os.getpid(), signal.SIGKILL)
        return image

    with opened(data, ends, workers=1) as loader, pytest.raises(HeadwayError, match="was killed by SIGKILL"):
        rows(loader)


def test_wrong_options_are_refused(data: Dataset) -> None:
    for options, message in (
        ({"transform": 3}, "this int cannot be called"),
        ({"transform": Image.Image}, "Image is a class"),
        ({"workers": 2}, "workers: it is for a transform or a data set of your own"),
        ({"transform": rotate, "worker_kind": "threads"}, "Did you mean 'thread'"),
        ({"transform": rotate, "collate": list}, "collate: it is for a data set of your own"),
    ):
        with pytest.raises(UsageError, match=message):
            Loader(data, **{"batch": 7, "size": SIZE, **options})
    global_draws = {"worker_kind": "thread", "workers": 1}
    with opened(data, jitter, **global_draws) as loader, pytest.raises(UsageError, match="global random generator"):
        rows(loader)
