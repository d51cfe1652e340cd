"""Gate: puts an evaluation set through a run and through its exports, and judges what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.dataset import Dataset
from headway.export.gate import judge
from headway.export.resized_files import Pixels, ResizedFiles, resize_files
from headway.export.targets.target import take_first_line
from headway.export.verdict import METRICS, GatePrecision, PixelSource, Verdict
from headway.setup.task import Activation, Task, activate_outputs
from headway.setup.train_setup import TrainSetup
from headway.training.evaluate import evaluate_batches, expect_few_damaged

FIRST_BATCHES = (1, 2, 3, 7)
"""Sizes of the first batches: a graph that works for one size only must fail here, whatever the evaluation's batch."""
MAX_KEPT_BYTES = 256 << 20
"""Decoded pixels of a set up to this size are kept between checks, since int8 may need many of them."""
NO_RESIZE = "the target onnx, which has resize.onnx, is not part of this export"
"""The reason for which nothing is judged from files by default."""
ACTIVATION_KINDS: dict[Activation, str] = {"softmax": "class", "sigmoid": "multi", "identity": "value"}


class Runs(Protocol):
    """The part of a session that the gate uses."""

    def run(self, pixels: Pixels) -> NDArray[np.float32]:
        """Returns float32 [b, outputs] for uint8 [b, H, W, C]."""


def find_kind(task: Task, kind: str, classes: int) -> str:
    """Returns the kind of labels by which the gate judges a task; `own`: a task of the user's own, of another form.

    Args:
        kind: kind of the labels.
        classes: number of classes.
    """
    fits = task.activation is not None and ACTIVATION_KINDS[task.activation] == kind
    return kind if fits and (kind == "value" or task.outputs == classes) else "own"


@final
class Gate:
    """Judges the exports of one run over one evaluation set. The run answers once, at the first check.

    Args:
        setup: the run, with its weights in float32: `load_trained(run, wide=True)`.
        dataset: the evaluation set.
        allowed: the largest drop of bf16 and int8 in points; see `headway.export.gate`.
        show: called with (samples done, samples) of each pass.

    Attributes:
        kind: kind of the labels by which it judges; see `find_kind`.
        not_from_files: why exports are not judged from files; None: they are.
    """

    def __init__(
        self,
        setup: TrainSetup,
        dataset: Dataset,
        *,
        allowed: float = 0.5,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._setup, self._dataset, self._allowed, self._show = setup, dataset, allowed, show
        self.kind = find_kind(setup.task, setup.target.kind, len(setup.target.classes))
        self._answers: _Answers | None = None
        self._damaged = 0
        self._resize: Callable[[Pixels], Pixels] | None = None
        self._files: ResizedFiles | None = None
        self.not_from_files: str | None = NO_RESIZE

    def describe_data(self) -> dict[str, Any]:
        """Returns the evaluation set, and how many of its samples are compared, for pipeline.json."""
        compared = len(self._answer_all().samples)
        about = {"evaluation": self._dataset.fingerprint, "evaluation_samples": compared}
        return about | ({"evaluation_damaged": self._damaged} if self._damaged else {})

    def check(self, session: Runs, precision: GatePrecision) -> Verdict:
        """Judges an export on the whole evaluation set, from the same pixels.

        Raises:
            UsageError: the metric of a task of the user's own is not known, and the precision may change answers.
            DataError: more than `max_bad_share` of the samples are damaged.
        """
        found = self._answer_all()
        outputs, fault = _run_all(session.run, self._read_pixels(found), self._show, len(found.samples))
        return self._judge(found, outputs, [fault] if fault else [], precision, "pixels")

    def set_resize(self, resize: Callable[[Pixels], Pixels]) -> None:
        """Sets the export's resize, from uint8 [1, h, w, C] to [1, H, W, C]: all later checks also start from files."""
        # A check from whole images would differ from such a run by its resize alone.
        if self._setup.recipe.data.scaled:
            self.not_from_files = (
                "data.scaled decodes large JPEGs at a smaller scale, and the gate decodes whole images"
            )
        else:
            self._resize, self._files, self.not_from_files = resize, None, None

    def check_all(self, session: Runs, precision: GatePrecision) -> list[Verdict]:
        """Judges an export from the same pixels, and from files unless `not_from_files` says why not."""
        found = [self.check(session, precision)]
        # A network that answers wrongly on the pixels is refused already.
        if found[0].passed and self._resize is not None:
            found.append(self.check_files(session, precision))
        return found

    def check_files(self, session: Runs, precision: GatePrecision) -> Verdict:
        """Judges an export on samples from their files, one by one; see `resize_files`. Call `set_resize` before."""
        assert self._resize is not None
        whole = self._answer_all()
        if self._files is None:
            self._files = resize_files(self._setup, self._dataset, self._resize, whole.samples, self._show)
        files, outputs, fault = self._files, None, ""
        if files.pixels is not None:
            # One by one: so are files that a user predicts.
            images = (files.pixels[row : row + 1] for row in range(len(files.pixels)))
            outputs, fault = _run_all(session.run, images, self._show, len(files.samples))
        faults = [*files.faults, *filter(None, [fault])]
        verdict = self._judge(whole.select(files.samples), outputs, faults, precision, "files")
        return replace(
            verdict, pixel_difference=files.mean_difference, largest_pixel_difference=files.largest_difference
        )

    def _judge(
        self,
        found: _Answers,
        outputs: NDArray[np.float32] | None,
        faults: Sequence[str],
        precision: GatePrecision,
        source: PixelSource,
    ) -> Verdict:
        if outputs is None:
            return Verdict(
                precision=precision,
                source=source,
                metric=METRICS[self.kind],
                samples=len(found.samples),
                allowed=self._allowed,
                faults=tuple(faults),
            )
        return judge(
            self.kind,
            found.reference,
            outputs,
            found.labels,
            precision,
            self._allowed,
            source=source,
            samples=found.samples,
            # Outputs of the user's own have no names.
            names=self._setup.target.classes if self.kind != "own" else (),
            more_faults=faults,
        )

    def _answer_all(self) -> _Answers:
        """Lets the run answer for the whole evaluation set, once."""
        if self._answers is not None:
            return self._answers
        keeps = len(self._dataset) * self._setup.size[0] * self._setup.size[1] * self._setup.channels <= MAX_KEPT_BYTES
        parts, served = [], list[NDArray[np.int64]]()
        with _use_whole_float32():
            for outputs, labels, batch in evaluate_batches(self._setup, self._dataset):
                served.append(batch.served)
                good = batch.served >= 0
                mask = torch.from_numpy(good).to(outputs.device)
                answers = activate_outputs(self._setup.task.activation, outputs[mask]).cpu().numpy()
                # Copies, since a loader uses the memory of its batches again.
                pixels = batch.images[mask].cpu().numpy() if keeps else None
                parts.append((answers, labels[mask].cpu().numpy(), batch.served[good], pixels))
        # A few samples that are left would pass with anything.
        limit = self._setup.recipe.data.max_bad_share
        self._damaged = expect_few_damaged(np.concatenate(served), limit, self._dataset)
        self._answers = _Answers.join(parts)
        return self._answers

    def _read_pixels(self, found: _Answers) -> Iterator[Pixels]:
        """Yields batches of the pixels that the run has answered for, the first ones small."""
        batches = found.pixels if found.pixels is not None else self._decode_again()
        is_first = True
        for pixels in batches:
            if is_first:
                ends = np.minimum(np.cumsum(FIRST_BATCHES), len(pixels))
                yield from (part for part in np.split(pixels, ends) if len(part))
            else:
                yield pixels
            is_first = False

    def _decode_again(self) -> Iterator[Pixels]:
        for batch in self._setup.inputs.build_evaluation_loader(self._setup.recipe, self._dataset):
            yield batch.images[torch.from_numpy(batch.served >= 0).to(batch.images.device)].cpu().numpy()


@final
class _Answers:
    """The answers of a run for samples. `pixels`: the decoded images in batches; None if they are too many."""

    def __init__(
        self,
        reference: NDArray[np.float32],
        labels: NDArray[np.generic],
        samples: NDArray[np.int64],
        pixels: Sequence[Pixels] | None,
    ) -> None:
        self.reference, self.labels, self.samples, self.pixels = reference, labels, samples, pixels

    def select(self, samples: NDArray[np.int64]) -> _Answers:
        """Returns the answers for some of the samples, without pixels."""
        rows = {sample: row for row, sample in enumerate(self.samples.tolist())}
        places = [rows[sample] for sample in samples.tolist()]
        return _Answers(self.reference[places], self.labels[places], samples, None)

    @staticmethod
    def join(
        parts: Sequence[tuple[NDArray[np.float32], NDArray[np.generic], NDArray[np.int64], Pixels | None]],
    ) -> _Answers:
        reference, labels, samples = (np.concatenate([part[place] for part in parts]) for place in range(3))
        pixels = [part[3] for part in parts if part[3] is not None]
        return _Answers(reference, labels, samples, pixels if len(pixels) == len(parts) else None)


@contextmanager
def _use_whole_float32() -> Iterator[None]:
    """Turns TF32 off: on a GPU, convolutions of float32 keep 10 bits of the mantissa by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _run_all(
    answer: Callable[[Pixels], NDArray[np.float32]],
    batches: Iterable[Pixels],
    show: Callable[[int, int], None],
    total: int,
) -> tuple[NDArray[np.float32] | None, str]:
    """Returns the answers of an export for all batches; or None, and why it failed."""
    out, done = [], 0
    for pixels in batches:
        try:
            answers = answer(pixels)
        # A runtime raises anything; whatever it is, the export does not do its work.
        except Exception as error:
            return None, f"It fails on a batch of {len(pixels)}: {type(error).__name__}: {take_first_line(error)}."
        if answers.ndim != 2 or len(answers) != len(pixels):
            return None, f"It gives the shape {list(answers.shape)} for a batch of {len(pixels)}."
        out.append(answers)
        done += len(pixels)
        show(done, total)
    return np.concatenate(out), ""
