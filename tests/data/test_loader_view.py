"""What the loader makes of each image on the host: crops, flips, shifts, sizes that grow."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headway.core.errors import UsageError
from headway.core.random_keys import make_keys
from headway.data import native, opening
from headway.data.crops import draw_flip_masks, draw_flips, draw_random_resized_boxes, draw_shifts
from headway.data.data_recipe import CropRecipe
from headway.data.dataset import Dataset
from headway.data.loader import Loader
from headway.data.ops.move import flip_and_translate
from headway.data.order import Order
from headway.data.pack import pack
from headway.data.reference import decode_one
from headway.data.resolution import ProgressiveRecipe

N, SEED, SIZE = 29, 3, (20, 24)
BACKENDS = ["pillow", pytest.param("native", marks=pytest.mark.skipif(not native.is_available(), reason="not built"))]
Samples = dict[int, bytes]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Photograph-like JPEGs of every subsampling and a few PNGs, packed as seekable ones where that can be."""
    root, random = tmp_path_factory.mktemp("view"), np.random.default_rng(0)
    for number in range(N):
        width, height = 40 + 13 * (number % 5), 30 + 17 * (number % 4)
        coarse = random.integers(0, 256, (4, 5, 3), np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        path = root / "src" / "ab"[number % 2] / f"{number:02d}.{'png' if number % 7 == 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            image.save(path)
        else:
            image.convert("L" if number % 6 == 5 else "RGB").save(path, quality=90, subsampling=number % 3)
    pack(root / "src", root / "dst")
    return opening.open(root / "dst")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Pixels of one size."""
    root, random = tmp_path_factory.mktemp("raw"), np.random.default_rng(1)
    for number in range(N):
        path = root / "src" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8)).save(path)
    pack(root / "src", root / "dst", mode="raw", format="raw")
    return opening.open(root / "dst")


def loader(data: Dataset, batch: int = 8, **options: Any) -> Loader:
    given = {"order": Order(len(data), SEED), "size": SIZE, "crop": "random", "flip": True, "translate": 3}
    options = given | {"threads": 1, "cache": "none"} | options
    if options["order"] is not None:
        options.setdefault("stop", math.inf)
    return Loader(data, batch=batch, **options)


def served(batches: Any, count: int | None = None) -> Samples:
    """Pixels at each position, copied, since a batch is a slot of the ring."""
    found = {}
    for batch in islice(batches, count):
        found |= {int(p): image.numpy().tobytes() for p, image in zip(batch.positions, batch.images, strict=True)}
    return found


# The bytes of a batch depend on seed, position and backend, and on nothing else


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [2, 8])
def test_threads_change_nothing(data: Dataset, backend: str, threads: int) -> None:
    assert served(loader(data, backend=backend, threads=threads), 9) == served(loader(data, backend=backend), 9)


@pytest.mark.thin(2)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_ranks_of_any_world_together_serve_what_one_serves(data: Dataset, world: int) -> None:
    together: Samples = {}
    for rank in range(world):
        together |= served(loader(data, rank=rank, world=world), 9)
    assert together == served(loader(data), 9)


@pytest.mark.parametrize("start", [1, 8, 28, 29, 60])
def test_a_loader_that_starts_later_serves_the_tail(data: Dataset, start: int) -> None:
    whole = served(loader(data, batch=5), 20)
    tail = served(loader(data, batch=5, start=start), 3)
    assert len(tail) == 15
    assert all(whole[position] == pixels for position, pixels in tail.items() if position in whole)


def test_the_size_of_the_batch_changes_no_sample(data: Dataset) -> None:
    small, large = served(loader(data, batch=3), 20), served(loader(data, batch=20), 3)
    assert small == large


def test_epochs_differ(data: Dataset) -> None:
    assert len(set(served(loader(data, batch=N), 2).values())) == 2 * N


# Each image is what the reference makes of its key


def drawn_by_the_reference(data: Dataset, position: int, flip: str = "random") -> np.ndarray[Any, Any]:
    epochs, samples = Order(N, SEED)(np.array([position]))
    key, out = make_keys(SEED, epochs, samples), np.zeros((*SIZE, 3), np.uint8)
    box = draw_random_resized_boxes(key, data.width[samples], data.height[samples])[0]
    decode_one(data.read(samples)[0], out, box)
    first = make_keys(SEED, 0, samples) if flip == "alternating" else key
    mirrored, moved = draw_flips(first, epochs, flip), draw_shifts(key, 3)
    return flip_and_translate(torch.from_numpy(out[None]), mirrored, moved)[0].numpy()


@pytest.mark.parametrize("flip", ["random", "alternating"])
@pytest.mark.parametrize(("backend", "far"), [("pillow", 0), ("native", 1)])
def test_an_image_is_cropped_flipped_and_moved_by_its_key(data: Dataset, backend: str, far: int, flip: str) -> None:
    if backend == "native" and not native.is_available():
        pytest.skip("the native core is not built")
    for position, pixels in served(loader(data, backend=backend, flip=flip), 8).items():
        found = np.frombuffer(pixels, np.uint8).reshape(*SIZE, 3).astype(int)
        assert np.abs(found - drawn_by_the_reference(data, position, flip)).max() <= far


def test_a_flip_alone_mirrors_what_is_there_without_it(data: Dataset) -> None:
    """A flip while decoding and a flip of the decoded image are the same pixels."""
    plain = loader(data, flip=False, translate=0)
    mirrored = loader(data, flip=True, translate=0)
    count = 0
    for one, other in islice(zip(plain, mirrored, strict=True), 6):
        assert other.flips is not None
        assert one.boxes is not None
        assert (one.boxes == other.boxes).all()
        expected = torch.where(torch.from_numpy(other.flips)[:, None, None, None], one.images.flip(2), one.images)
        assert torch.equal(expected, other.images)
        count += int(other.flips.sum())
    assert 8 < count < 40


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("flip", "translate"), [("vertical", 0), ("both", 0), ("both", 3)])
def test_a_vertical_flip_turns_what_is_there_without_it_upside_down(
    data: Dataset, backend: str, flip: str, translate: int
) -> None:
    plain = loader(data, flip=False, translate=0, backend=backend)
    mirrored = loader(data, flip=flip, translate=translate, backend=backend)
    masks: list[tuple[bool, bool]] = []
    for one, other in islice(zip(plain, mirrored, strict=True), 6):
        assert other.vertical_flips is not None
        assert (other.flips is None) == (flip == "vertical")
        expected = flip_and_translate(one.images, other.flips, other.shifts, other.vertical_flips)
        assert torch.equal(expected, other.images)
        horizontal = np.zeros(len(other.images), bool) if other.flips is None else other.flips
        masks += zip(horizontal.tolist(), other.vertical_flips.tolist(), strict=True)
        drawn = draw_flip_masks("vertical", other.keys())[1]
        assert (drawn == other.vertical_flips).all()
    # Each combination comes about equally often: the two directions are independent.
    counts = Counter(masks)
    assert set(counts) == {(h, v) for h in ((False,) if flip == "vertical" else (False, True)) for v in (False, True)}
    assert min(counts.values()) > len(masks) / len(counts) / 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_images_are_gathered_as_the_op_moves_them(raw: Dataset, backend: str) -> None:
    options = {"size": None, "crop": "center", "backend": backend}
    still = served(loader(raw, flip=False, translate=0, **options), 9)
    for batch in islice(loader(raw, **options), 9):
        assert batch.boxes is None
        before = np.stack([np.frombuffer(still[int(p)], np.uint8).reshape(12, 16, 3) for p in batch.positions])
        assert torch.equal(flip_and_translate(torch.from_numpy(before), batch.flips, batch.shifts), batch.images)


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_images_are_cropped_and_resized_too(raw: Dataset, backend: str) -> None:
    assert served(loader(raw, size=(8, 8), backend=backend), 4) != {}
    gray = next(iter(loader(raw, size=(8, 8), channels=1, backend=backend)))
    assert gray.images.shape == (8, 8, 8, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("verify", ["first", "never"])
def test_a_raw_record_that_is_cut_off_is_substituted(raw: Dataset, tmp_path: Path, backend: str, verify: str) -> None:
    shutil.copytree(raw.folder, tmp_path / "copy")
    data = opening.open(tmp_path / "copy")
    shard = tmp_path / "copy" / data.description.shards[0].name
    lost = int(np.argmax(data.offset))
    with shard.open("r+b") as file:
        file.truncate(int(data.offset[lost]) + 100)
    batches = list(loader(data, size=None, crop="center", backend=backend, verify=verify, stop=N))
    found = {bad.asked: bad.served for batch in batches for bad in batch.bad}
    assert set(found) == {lost}
    assert found[lost] not in (-1, lost)


def test_the_box_of_a_substituted_sample_is_its_own(data: Dataset, tmp_path: Path) -> None:
    shutil.copytree(data.folder, tmp_path / "copy")
    copy = opening.open(tmp_path / "copy")
    small = int(np.argmin(copy.width.astype(int) * copy.height))
    copy.crc32c = np.where(np.arange(N) == small, copy.crc32c, copy.crc32c + 1)  # all others are damaged
    for batch in islice(loader(copy, batch=4), 5):
        assert batch.boxes is not None
        assert set(batch.served) == {small}
        right, bottom = batch.boxes[:, 0] + batch.boxes[:, 2], batch.boxes[:, 1] + batch.boxes[:, 3]
        assert (right <= copy.width[small]).all()
        assert (bottom <= copy.height[small]).all()


@pytest.mark.filterwarnings("ignore:This process")  # Python 3.12 warns of a fork among threads
def test_a_forked_child_is_told_that_it_has_no_threads(data: Dataset) -> None:
    batches = iter(loader(data))
    next(batches)
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            next(batches)
        except UsageError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(batches).positions[0] == 8
    batches.close()  # type: ignore[attr-defined]


# Sizes


def test_sizes_grow_with_the_epochs_without_another_loader(data: Dataset) -> None:
    growing = ProgressiveRecipe(start=8, until_epoch=3, step=4)
    found = [tuple(batch.images.shape[1:3]) for batch in islice(loader(data, batch=N, progressive=growing), 5)]
    assert found[0] == (8, 8)
    assert found[3:] == [SIZE, SIZE]
    assert all(a <= b for a, b in pairwise(found))


def test_a_size_may_be_one_number(data: Dataset) -> None:
    assert next(iter(loader(data, size=16))).images.shape == (8, 16, 16, 3)


def test_a_centred_crop_takes_a_share(data: Dataset) -> None:
    crop = CropRecipe(share=0.5)
    batch = next(iter(Loader(data, batch=4, size=SIZE, crop=crop, cache="none")))
    whole = next(iter(Loader(data, batch=4, size=SIZE, cache="none")))
    assert batch.boxes is not None
    assert whole.boxes is not None
    np.testing.assert_allclose(batch.boxes[:, 2:], whole.boxes[:, 2:] / 2, rtol=1e-6)
    centre = batch.boxes[:, :2] + batch.boxes[:, 2:] / 2
    np.testing.assert_allclose(centre, whole.boxes[:, :2] + whole.boxes[:, 2:] / 2, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_decoding_gives_nearly_the_same_image(data: Dataset, backend: str) -> None:
    small = {"size": (8, 8), "crop": "center", "flip": False, "translate": 0, "backend": backend}
    exact, scaled = (next(iter(loader(data, scaled=scaled, **small))).images.int() for scaled in (False, True))
    difference = (exact - scaled).abs().float()
    assert 0 < difference.mean() < 3


def test_a_smaller_decode_is_never_made_of_kept_pixels(raw: Dataset, data: Dataset) -> None:
    with pytest.raises(UsageError, match="kept decoded"):
        next(iter(loader(raw, size=(4, 4), cache="memory", scaled=True)))
    assert loader(raw, size=(4, 4), cache="auto", scaled=True).tier.name == "none"


@pytest.mark.parametrize(
    ("rank", "ranks", "slots"), [(0, "2", (0, 5)), (1, "2", (0, 5)), (3, "2", (5, 10)), (2, "", None)]
)
def test_a_cache_is_told_what_its_host_takes(
    data: Dataset, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: str, slots: tuple[int, int] | None
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    found = loader(data, batch=10, rank=rank, world=4)._decoding._find_host_slots()
    if slots is None:
        assert found is None
    else:
        assert found is not None
        assert np.flatnonzero(found.select_owned(np.arange(30))).tolist() == [
            step + slot for step in (0, 10, 20) for slot in range(*slots)
        ]


# What cannot be


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": None}, "order"),
        ({"order": None, "crop": "center", "flip": False}, "order"),
        ({"translate": 20}, "19"),
        ({"progressive": ProgressiveRecipe(start=20, until_epoch=1)}, "start"),
        ({"flip": "no"}, "unknown flip 'no'"),
        ({"flip": "alternatin"}, "Did you mean 'alternating'"),
        ({"crop": "randm"}, "Did you mean 'random'"),
        ({"backend": "opencv"}, "unknown decoder 'opencv'"),
        ({"size": "224"}, "not a size"),
        ({"size": 0}, "not a size"),
        ({"size": (4, 4, 3)}, "not a size"),
        ({"start": 200, "stop": 100}, "200 to 100"),
        ({"start": -1}, "from -1"),
    ],
)
def test_impossible_views_are_refused(data: Dataset, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loader(data, **options)


def test_objects_print_shortly(data: Dataset) -> None:
    some = loader(data, stop=16)
    batch = next(iter(some))
    assert repr(batch) == "Batch of 8 x 20 x 24 x 3 from position 0"
    assert "2 steps of 8" in repr(some)
    assert len(repr(some)) < 200
    assert "images/s" in repr(some.stats())


# Statistics


def test_the_loader_tells_what_it_measured(data: Dataset) -> None:
    some = loader(data, stop=5 * 8)
    assert some.stats().images == 0
    for _ in some:
        pass
    found = some.stats()
    assert (found.images, found.batches, found.stage_images) == (40, 5, 40)
    assert found.record_bytes == int(data.length[Order(N, SEED)(np.arange(40))[1]].sum())
    assert found.seconds >= found.wait_s >= 0
    assert 0 <= found.waiting_share <= 1
    assert 0 <= found.occupancy <= found.prefetch_batches
    assert set(found.stage_images_s) <= set(found.stage_s) == {"order", "read", "decode", "labels"}
    assert found.cores.images == 8  # one batch of 16 is timed
    assert Path(str(data.folder)).exists()
