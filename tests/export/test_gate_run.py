"""The gate compares whole pipelines over the whole evaluation set, whatever the sizes of batches and data sets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests._support import damage, digits_arrays, headway, packed_digits, write_recipe

from headway.core.errors import DataError, UsageError
from headway.core.run_folder import RunFolder
from headway.data import opening
from headway.data.order import Order
from headway.data.pack import pack
from headway.data.reference import read_image
from headway.export import gate_run, resized_files
from headway.export.calibration import draw_calibration
from headway.export.gate_run import Gate, find_kind
from headway.export.pipeline import Resize, build_pipeline
from headway.export.verdict import Verdict
from headway.setup.task import activate_outputs
from headway.setup.train_setup import TrainSetup
from headway.training.evaluate import open_evaluation_set
from headway.training.runs import load_trained

Pixels = NDArray[np.uint8]
Answer = Callable[[Pixels], NDArray[np.float32]]


class Session:
    """A session that a function answers for; it keeps the sizes of its batches."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self.batches = answer, list[int]()

    def run(self, pixels: Pixels) -> NDArray[np.float32]:
        self.batches.append(len(pixels))
        return self._answer(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits: 180 training and 60 evaluation images of 8 x 8, decoded in batches of 25."""
    folder = tmp_path_factory.mktemp("gate")
    packed_digits(folder, mode="seekable")
    recipe = write_recipe(folder / "recipe.yaml", model={"factory": "net.py:dropout"}, evaluate={"batch": 25})
    headway("train", recipe, "--run", folder / "run")
    return folder


@pytest.fixture
def setup(folder: Path) -> Iterator[TrainSetup]:
    setup = load_trained(RunFolder.open_trained(folder / "run"), wide=True)
    with closing(setup.inputs):
        yield setup


@pytest.fixture
def evaluation(folder: Path, setup: TrainSetup) -> Iterator[Any]:
    with closing(open_evaluation_set(setup, None, folder / "run")) as dataset:
        yield dataset


def answer_with(setup: TrainSetup) -> Answer:
    """The run's pipeline in PyTorch."""
    pipeline = build_pipeline(setup)

    def answer(pixels: Pixels) -> NDArray[np.float32]:
        with torch.no_grad():
            return pipeline(torch.from_numpy(pixels)).numpy()  # type: ignore[no-any-return]

    return answer


def test_a_sound_pipeline_passes_with_the_accuracy_of_an_evaluation(
    folder: Path, setup: TrainSetup, evaluation: Any
) -> None:
    session, shown = Session(answer_with(setup)), list[tuple[int, int]]()
    verdict = Gate(setup, evaluation, show=lambda done, total: shown.append((done, total))).check(session, "fp32")
    assert verdict.passed, verdict.faults
    assert (verdict.samples, verdict.flips, verdict.drop) == (60, 0, 0)
    found = headway("evaluate", folder / "run", "--json").json()
    assert verdict.reference == pytest.approx(found["accuracy"])
    # The small batches come first, and each image once.
    assert session.batches == [1, 2, 3, 7, 12, 25, 10]
    assert shown[-1] == (60, 60)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_pixels_that_are_decoded_again_give_the_same_verdict(
    setup: TrainSetup, evaluation: Any, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blur(pixels: Pixels) -> NDArray[np.float32]:
        return answer_with(setup)(pixels // 64 * 64)

    kept = Gate(setup, evaluation).check(Session(blur), precision)
    monkeypatch.setattr(gate_run, "MAX_KEPT_BYTES", 0)
    again = Gate(setup, evaluation).check(Session(blur), precision)
    assert kept.flips > 0
    assert kept == again


def test_the_run_answers_once_for_several_checks(
    setup: TrainSetup, evaluation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = [], gate_run.evaluate_batches
    monkeypatch.setattr(gate_run, "evaluate_batches", lambda *args: calls.append(1) or real(*args))
    gate = Gate(setup, evaluation)
    first = gate.check(Session(answer_with(setup)), "fp32")
    assert gate.check(Session(answer_with(setup)), "fp32") == first
    gate.set_resize(lambda pixels: pixels)
    pixels, files = gate.check_all(Session(answer_with(setup)), "fp32")
    assert pixels == first
    assert files.reference == first.reference
    assert len(calls) == 1


def freeze(answer: Answer) -> Answer:
    def run(pixels: Pixels) -> NDArray[np.float32]:
        if len(pixels) != 25:
            raise ValueError("Got invalid dimensions for input: pixels\nindex 0, expected 25")
        return answer(pixels)

    return run


BROKEN: dict[str, Callable[[Answer], Answer]] = {
    "It fails on a batch of 1: ValueError: Got invalid dimensions for input: pixels.": freeze,
    "It gives the shape [1, 10] for a batch of 2.": lambda answer: lambda pixels: answer(pixels)[:1],
    "It gives the shape [10] for a batch of 1.": lambda answer: lambda pixels: answer(pixels)[0],
    "It gives NaN or infinity for 60 of 60 samples.": lambda answer: lambda pixels: answer(pixels) * np.float32("nan"),
    "It answers with 9 classes, and the run with 10.": lambda answer: lambda pixels: answer(pixels)[:, :9],
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_session_that_does_not_do_its_work_is_refused(setup: TrainSetup, evaluation: Any, fault: str) -> None:
    session = Session(BROKEN[fault](answer_with(setup)))
    verdict = Gate(setup, evaluation).check(session, "int8")
    assert verdict.faults == (fault,)
    assert not verdict.passed


CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "mirrored": lambda pixels: pixels[:, :, ::-1],
    "one pixel to the side": lambda pixels: np.roll(pixels, 1, axis=2),
    "another range": lambda pixels: pixels // 16,
    "negative": lambda pixels: 255 - pixels,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_pixels_are_refused(setup: TrainSetup, evaluation: Any, change: str) -> None:
    answer = answer_with(setup)
    verdict = Gate(setup, evaluation).check(
        Session(lambda pixels: answer(np.ascontiguousarray(CHANGES[change](pixels)))), "fp32"
    )
    assert "answers change" in verdict.faults[0]


def test_damaged_samples_are_left_out(folder: Path, setup: TrainSetup, tmp_path: Path) -> None:
    """The run and the export see the same images, those that an evaluation counts."""
    bad = tmp_path / "eval"
    shutil.copytree(folder / "digits.packed/eval", bad)
    damage(bad, 3, 30)
    recipe = setup.loaded.resolve_all({"data.on_bad": ("mask", "test"), "data.max_bad_share": (0.5, "test")})
    object.__setattr__(setup, "loaded", recipe)
    with closing(opening.open(bad)) as dataset:
        gate = Gate(setup, dataset)
        verdict = gate.check(Session(answer_with(setup)), "fp32")
        about = gate.describe_data()
    assert verdict.passed, verdict.faults
    assert verdict.samples == 58
    assert about == {"evaluation": dataset.fingerprint, "evaluation_samples": 58, "evaluation_damaged": 2}


def test_a_set_of_which_too_much_is_damaged_judges_nothing(folder: Path, setup: TrainSetup, tmp_path: Path) -> None:
    """Else one sample that is left would accept any export."""
    bad = tmp_path / "eval"
    shutil.copytree(folder / "digits.packed/eval", bad)
    damage(bad, *range(1, 60))
    words = r"59 of 60 samples are damaged, more than data\.max_bad_share 0\.01"
    with closing(opening.open(bad)) as dataset, pytest.raises(DataError, match=words):
        Gate(setup, dataset).check(Session(answer_with(setup)), "fp32")


def enlarge(folder: Path, count: int = 120) -> Path:
    """Digits of 15 to 40 pixels, which the run's resize shrinks to 8."""
    from PIL import Image

    images, labels = digits_arrays()
    random = np.random.default_rng(3)
    for number in range(count):
        side = random.integers(15, 41, 2).tolist()
        path = folder / "large" / str(labels[number]) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(images[number] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize(side, Image.Resampling.BICUBIC).save(path)
    pack(folder / "large", folder / "large.packed", mode="keep", threads=1)
    return folder / "large.packed"


Resizes = Callable[[Pixels], Pixels]


def resize_with(setup: TrainSetup) -> Resizes:
    """The resize of an export, in PyTorch."""
    module = Resize(setup.size, setup.recipe.data.crop.share)
    return lambda pixels: module(torch.from_numpy(pixels)).numpy()  # type: ignore[no-any-return]


def check_files(setup: TrainSetup, dataset: Any, resize: Resizes, precision: Any = "fp32") -> Verdict:
    """The verdict about a sound network behind a resize."""
    gate = Gate(setup, dataset)
    gate.set_resize(resize)
    return gate.check_files(Session(answer_with(setup)), precision)


def test_files_go_through_the_resize_of_the_export(setup: TrainSetup, tmp_path: Path) -> None:
    resize, seen = resize_with(setup), list[tuple[int, ...]]()

    def shrink(pixels: Pixels) -> Pixels:
        seen.append(pixels.shape)
        return resize(pixels)

    with closing(opening.open(enlarge(tmp_path))) as dataset:
        verdict = check_files(setup, dataset, shrink)
        assert verdict.passed, verdict.faults
        assert (verdict.source, verdict.samples) == ("files", 120)
        assert verdict.pixel_difference < 0.2
        assert verdict.largest_pixel_difference <= 1
        assert len(set(seen)) > 60, "each has its own size"
        for name, change in CHANGES.items():
            wrong = check_files(setup, dataset, lambda pixels: change(resize(pixels)).copy())  # noqa: B023
            assert "levels on average, more than 0.5" in wrong.faults[0], name
            assert "only those within 0.01 may" in wrong.faults[2], name
        assert not check_files(setup, dataset, lambda pixels: take_nearest(pixels, 8)).passed
        broken = check_files(setup, dataset, lambda pixels: np.zeros((1, 7, 7, 1), np.uint8))
        assert broken.faults[0].startswith("Its resize gives the shape [1, 7, 7, 1] and not [1, 8, 8, 1] for sample ")
        with_error = check_files(setup, dataset, lambda pixels: resize(pixels[0]))
        assert with_error.faults[0].startswith("Its resize fails on sample ")
        assert not with_error.passed


def test_a_border_of_other_pixels_is_refused(setup: TrainSetup, tmp_path: Path) -> None:
    """Few pixels of it differ, by 16 levels, and no answer changes."""
    resize = resize_with(setup)

    def darken(pixels: Pixels) -> Pixels:
        found = resize(pixels).astype(int)
        found[:, 0, 0] += np.where(found[:, 0, 0] < 128, 16, -16)
        return found.astype(np.uint8)

    with closing(opening.open(enlarge(tmp_path))) as dataset:
        verdict = check_files(setup, dataset, darken, "int8")
    (fault,) = verdict.faults
    assert "differs by 17 levels, more than 2." in fault or "differs by 16 levels, more than 2." in fault
    assert verdict.pixel_difference < 0.5


def test_all_targets_are_judged_on_the_same_resized_pixels(setup: TrainSetup, tmp_path: Path) -> None:
    resize, answer, seen = resize_with(setup), answer_with(setup), list[Pixels]()

    def count(pixels: Pixels) -> Pixels:
        seen.append(pixels)
        return resize(pixels)

    with closing(opening.open(enlarge(tmp_path))) as dataset:
        gate = Gate(setup, dataset)
        assert gate.not_from_files is not None
        assert len(gate.check_all(Session(answer), "fp32")) == 1
        gate.set_resize(count)
        assert gate.not_from_files is None
        for precision in ("fp32", "int8"):
            session = Session(answer)
            pixels, files = gate.check_all(session, precision)  # type: ignore[arg-type]
            assert (pixels.source, files.source, files.precision) == ("pixels", "files", precision)
            # Each file is predicted alone.
            assert session.batches[-120:] == [1] * 120
        assert len(seen) == 120
        # One that is refused already is not put through files.
        assert len(gate.check_all(Session(lambda pixels: answer(255 - pixels)), "int8")) == 1


def take_nearest(pixels: Pixels, side: int) -> Pixels:
    """Takes one pixel for each of the output, as a resize without antialiasing does."""
    rows, columns = (((np.arange(side) + 0.5) * size / side).astype(int) for size in pixels.shape[1:3])
    return pixels[:, rows][:, :, columns].copy()


@pytest.mark.parametrize(("limit", "value"), [("FILE_SAMPLES", 20), ("MAX_FILE_BYTES", 20 * 64)])
def test_a_sample_of_a_large_set_is_drawn_by_the_order(
    setup: TrainSetup, evaluation: Any, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(resized_files, limit, value)
    seen = list[Pixels]()

    def keep(pixels: Pixels) -> Pixels:
        seen.append(pixels)
        return pixels

    verdict = check_files(setup, evaluation, keep)
    assert verdict.passed
    assert verdict.samples == len(seen) == 20
    _, drawn = Order(60, setup.recipe.seed)(np.arange(20))
    expected = [np.asarray(read_image(evaluation, int(sample))) for sample in drawn]
    assert all(np.array_equal(one[0, :, :, 0], other) for one, other in zip(seen, expected, strict=True))


def test_the_kind_of_a_task_is_that_of_its_outputs(setup: TrainSetup) -> None:
    task = setup.task
    assert find_kind(task, "class", 10) == "class"
    # A task of the user's own may have other outputs than one per class, or give no probabilities.
    assert find_kind(task, "class", 9) == "own"
    assert find_kind(task, "value", 0) == "own"


def test_calibration_images_are_drawn_from_the_training_set(folder: Path, setup: TrainSetup, evaluation: Any) -> None:
    with closing(opening.open(folder / "digits.packed/train")) as train:
        found = draw_calibration(setup, train, evaluation, 40)
        _, drawn = Order(180, setup.recipe.seed)(np.arange(40))
        judged = {record_of(evaluation, sample) for sample in range(60)}
        kept = [sample for sample in drawn.tolist() if record_of(train, sample) not in judged]
        assert list(found.samples) == kept
        assert found.images.shape == (len(kept), 8, 8, 1)
        assert found.images.dtype == np.uint8
        for row, sample in enumerate(kept):
            assert np.array_equal(found.images[row, :, :, 0], np.asarray(read_image(train, sample)))
        assert found.to_json() == {"fingerprint": train.fingerprint, "seed": setup.recipe.seed, "samples": kept}
        # More than there are: each once.
        assert len(set(draw_calibration(setup, train, None, 999).samples)) == 180


def record_of(dataset: Any, sample: int) -> tuple[int, int]:
    return int(dataset.length[sample]), int(dataset.crc32c[sample])


def test_calibration_never_sees_what_the_gate_sees(folder: Path, setup: TrainSetup, evaluation: Any) -> None:
    with pytest.raises(UsageError, match="the training set is the evaluation set"):
        draw_calibration(setup, evaluation, evaluation)
    # The same images packed in another way have another fingerprint.
    both = folder / "both.packed"
    if not both.exists():
        pack(folder / "digits", both, threads=1)
    with closing(opening.open(both)) as train:
        found = draw_calibration(setup, train, evaluation, 240)
        judged = {record_of(evaluation, sample) for sample in range(60)}
        assert len(judged) == 60
        assert len(found.samples) == 180
        assert not judged & {record_of(train, sample) for sample in found.samples}
        with pytest.raises(UsageError, match="all 60 training images drawn for calibration are in the evaluation set"):
            draw_calibration(setup, evaluation, train)


def test_activations() -> None:
    outputs = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    assert torch.allclose(activate_outputs("softmax", outputs).sum(1), torch.ones(2))
    assert torch.equal(activate_outputs("sigmoid", outputs), outputs.sigmoid())
    assert activate_outputs("identity", outputs) is outputs
    assert activate_outputs(None, outputs) is outputs
