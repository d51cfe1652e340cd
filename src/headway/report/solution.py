"""Trained network of a run with fixed samples of its data, to be measured at any place of its weight space."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from headway.core.errors import HeadwayError, UsageError
from headway.core.modules import switch_to_evaluation
from headway.core.run_folder import RunFolder
from headway.data.data_recipe import SYNTHETIC
from headway.observe import directions
from headway.observe.directions import WeightVector
from headway.observe.sharpness import (
    EpsilonSharpness,
    HessianEigenvalue,
    ProgressCallback,
    SharpnessObjective,
    find_largest_eigenvalue,
    measure_epsilon_sharpness,
)
from headway.setup.checks import check_labels
from headway.setup.inputs import open_dataset
from headway.setup.train_setup import TrainSetup
from headway.training import runs
from headway.training.averages import recompute_from_images

LOG = logging.getLogger("headway.report")

# Loss and metrics; None if one is not finite.
SolutionMetrics = dict[str, float | None]
# One value per place, by data set and metric.
MetricCurves = dict[str, dict[str, list[float | None]]]

TRAINING, EVALUATION = "training", "evaluation"
# Images per forward pass; the same for every run, whatever its batch, so that numbers agree.
MAX_BATCH = 256
# Keskar et al. take ten iterations. Power iteration needs more products the closer the two largest eigenvalues are.
ASCENTS, ASCENT_STEPS, PRODUCTS = 2, 10, 30


@final
@dataclass(frozen=True)
class DataSample:
    """Images (uint8 [b, H, W, C]) and labels of part of a data set, in batches on the device; `count` in all."""

    batches: list[tuple[torch.Tensor, torch.Tensor]]
    count: int


@final
@dataclass(kw_only=True)
class Solution:
    """A trained network with samples of its data. Close it after use."""

    name: str
    run: RunFolder
    setup: TrainSetup
    samples: dict[str, DataSample]
    # Called after every place, and every step of the sharpness.
    tick: ProgressCallback = field(default=lambda: None)

    def close(self) -> None:
        self.setup.inputs.close()

    @property
    def sharpness_steps(self) -> int:
        """Most ticks of `measure_sharpness`, unless a second power iteration is needed."""
        return 2 + ASCENTS * ASCENT_STEPS + 2 * PRODUCTS

    def should_recompute(self, wanted: bool) -> bool:
        """Returns True if recomputing the statistics of batch norm is wanted and the network has any."""
        return wanted and self._has_statistics()

    def describe_statistics(self, recompute: bool) -> str:
        """Returns `recomputed`, `kept` or `none`: the treatment of the statistics of batch norm."""
        return ("recomputed" if recompute else "kept") if self._has_statistics() else "none"

    def _has_statistics(self) -> bool:
        return any(isinstance(one, _BatchNorm) and one.track_running_stats for one in self.setup.model.modules())

    def measure(self, *, recompute: bool) -> dict[str, SolutionMetrics]:
        """Measures loss and metrics of every sample at the present weights."""
        if recompute:
            self._recompute_statistics()
        with switch_to_evaluation(self.setup.model), torch.no_grad():
            metrics = {name: self._measure_sample(sample) for name, sample in self.samples.items()}
        self.tick()
        return metrics

    def measure_line(self, places: Sequence[Sequence[tuple[float, WeightVector]]], *, recompute: bool) -> MetricCurves:
        """Measures places that differ from the present weights by sums of factor x direction."""
        return self._measure_points(places, {}, recompute)

    def measure_plane(
        self,
        x: Sequence[float],
        y: Sequence[float],
        u: WeightVector,
        v: WeightVector,
        origin: WeightVector,
        *,
        recompute: bool,
    ) -> dict[str, dict[str, list[list[float | None]]]]:
        """Measures a plane at origin + x u + y v, with rows of constant y. An empty origin: the present weights."""
        places = [[(a, u), (b, v)] for b in y for a in x]
        curves, width = self._measure_points(places, origin, recompute), len(x)
        return {
            name: {
                metric: [values[low : low + width] for low in range(0, len(values), width)]
                for metric, values in curve.items()
            }
            for name, curve in curves.items()
        }

    def _measure_points(
        self, places: Sequence[Sequence[tuple[float, WeightVector]]], origin: WeightVector, recompute: bool
    ) -> MetricCurves:
        out: MetricCurves = {}
        for place in places:
            with directions.move_weights(self.setup.model, origin, place):
                for name, numbers in self.measure(recompute=recompute).items():
                    for metric, value in numbers.items():
                        out.setdefault(name, {}).setdefault(metric, []).append(value)
        return out

    def measure_sharpness(
        self, epsilon: float, seed: int
    ) -> tuple[EpsilonSharpness | None, HessianEigenvalue | None, HessianEigenvalue | None]:
        """Measures Keskar's sharpness, and the largest eigenvalue of the Hessian, plain and by relative change.

        All on the training sample. None: the loss is not finite, or the network has no second derivative.
        """
        model = self.setup.model
        trained, norms = directions.get_trained_parameters(model), directions.compute_filter_norms(model)
        objective = SharpnessObjective(list(trained.values()), self._compute_losses, self.tick)
        # Directions without a filter norm (biases, norms) are left out of the relative change.
        scale = [
            norms[name].expand_as(one) if name in norms else torch.zeros_like(one) for name, one in trained.items()
        ]
        with switch_to_evaluation(model):
            if not math.isfinite(objective.compute_value_and_gradient()[0]):
                return None, None, None
            given = {"steps": ASCENT_STEPS, "starts": ASCENTS}
            keskar = measure_epsilon_sharpness(objective, epsilon=epsilon, seed=seed, **given)
            try:
                plain = find_largest_eigenvalue(objective, products=PRODUCTS, seed=seed)
                relative = find_largest_eigenvalue(objective, scale=scale, products=PRODUCTS, seed=seed)
            except RuntimeError as error:
                # Some operations of torch have no second derivative, and say so with these words only.
                if "not implemented" not in str(error):
                    raise
                return _drop_nonfinite(keskar), None, None
        return _drop_nonfinite(keskar), plain, relative

    def _compute_losses(self) -> Iterator[torch.Tensor]:
        # Summands of the mean loss, one per batch, so that only one graph is in memory.
        sample = self.samples[TRAINING]
        for images, labels in sample.batches:
            yield self.setup.task.loss(self._compute_outputs(images), labels).sum() / sample.count

    def _compute_outputs(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.setup.model(self.setup.augment.normalise(images))
        return outputs.float()

    def _measure_sample(self, sample: DataSample) -> SolutionMetrics:
        sums: dict[str, torch.Tensor] = {}
        for images, labels in sample.batches:
            outputs = self._compute_outputs(images)
            metrics = {"loss": self.setup.task.loss(outputs, labels), **self.setup.task.metrics(outputs, labels)}
            for name, values in metrics.items():
                # Sums stay on the device: one host-device sync at the end instead of one per batch.
                total = values.double().sum()
                sums[name] = sums[name] + total if name in sums else total
        numbers = {name: float(value) / sample.count for name, value in sums.items()}
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

    def _recompute_statistics(self) -> None:
        recompute_from_images(self.setup, (images for images, _ in self.samples[TRAINING].batches))


def _drop_nonfinite(sharpness: EpsilonSharpness) -> EpsilonSharpness | None:
    return sharpness if math.isfinite(sharpness.percent) else None


def open_solution(name: str, run: RunFolder, sets: str, count: int, seed: int) -> Solution:
    """Loads a run's best weights in float32, and `count` samples of its data sets, drawn by `seed`.

    Args:
        sets: both, train or eval.

    Raises:
        UsageError: The run has no weights or no real data, or no evaluation set although only that is wanted.
        HeadwayError: A data set cannot be opened, or all its samples are damaged.
    """
    setup = runs.load_trained(run, wide=True)
    try:
        uris = _list_uris(setup, run, sets)
        samples = {which: _load_sample(setup, uri, count, seed, sets) for which, uri in uris.items()}
    except BaseException:
        setup.inputs.close()
        raise
    return Solution(name=name, run=run, setup=setup, samples=samples)


def _list_uris(setup: TrainSetup, run: RunFolder, sets: str) -> dict[str, str]:
    options, where = setup.recipe.data, str(run.folder)
    if options.train == SYNTHETIC:
        fix = "Train on real data first."
        raise UsageError("the run was trained on synthetic data, so there is nothing to draw", where=where, fix=fix)
    uris = {}
    if sets != "eval":
        uris[TRAINING] = options.train
    if sets != "train" and options.eval is not None:
        uris[EVALUATION] = options.eval
    elif sets == "eval":
        fix = "Draw its training set: --sets train."
        raise UsageError("the run has no evaluation set", where=where, fix=fix)
    elif sets == "both":
        LOG.info(f"{run.folder} has no evaluation set: only its training set is drawn.")
    return uris


def _load_sample(setup: TrainSetup, uri: str, count: int, seed: int, sets: str) -> DataSample:
    try:
        dataset = open_dataset(setup.loaded.base, uri)
    except HeadwayError as error:
        other = " Or draw only the other set: --sets train, or --sets eval --no-sharpness." if sets == "both" else ""
        raise type(error)(error.what, where=error.where or uri, fix=f"{error.fix}{other}".strip()) from error
    with closing(dataset):
        check_labels(setup.target, dataset)
        micro = setup.recipe.micro_batch
        most = min(micro, MAX_BATCH) if isinstance(micro, int) else MAX_BATCH
        count = min(count, len(dataset))
        batches = []
        for batch in setup.inputs.build_sample_loader(setup.recipe, dataset, count, min(most, count), seed):
            # The last batch is full too: positions from `count` on do not belong to the sample. Masked ones are -1.
            kept = torch.from_numpy((batch.served >= 0) & (batch.positions < count)).to(batch.labels.device)
            if kept.any():
                batches.append((batch.images[kept], batch.labels[kept]))
    good = sum(len(labels) for _, labels in batches)
    if not good:
        raise HeadwayError("every sample is damaged", where=uri, fix="Run headway verify on it, then pack it again.")
    if good < count:
        LOG.warning(f"{count - good:,} of {count:,} samples of {uri} are damaged and left out.")
    return DataSample(batches, good)
