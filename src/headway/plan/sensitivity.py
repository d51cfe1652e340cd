"""Sensitivity of the predicted time to each input, and the 90 % band that the errors of all inputs give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from headway.plan.calibration import StepParameters, compute_root
from headway.plan.cluster import Cluster
from headway.plan.job import TrainingJob
from headway.plan.prediction import Prediction, get_losses, predict

# Relative change of an input whose effect is reported.
PERTURBATION = 0.2
# Assumed standard deviations of inputs that no run calibrates, in logarithms: data sheets and load from day to day
# leave this open. `bench.plan` counts how many published runs lie in the resulting band. The error of a node's loading
# is in the cluster: a measured speed is surer than an assumed one.
INPUT_ERRORS = {
    "latency between nodes": 0.5,
    "storage to a node": 0.1,
    "shared storage": 0.1,
    "opens a second": 0.3,
}
# Error of epochs outside the measured batches: fits of ResNet-50's official points up to 13,000 are 12 to 18 % off at
# 33,000 to 68,000.
EXTRAPOLATION_ERROR = 0.15
# Half-width of a normal distribution's 90 % interval, in standard deviations.
Z_90 = 1.645

# Factor -> the job and the cluster with one input multiplied by it.
Perturbation = Callable[[float], tuple[TrainingJob, Cluster]]


@final
@dataclass(frozen=True)
class InputSensitivity:
    """Effect of one input on the time to the target."""

    name: str
    # Time over the planned time with 20 % less of the input, and with 20 % more.
    less: float
    more: float

    @property
    def magnitude(self) -> float:
        """Larger of the two effects, as a logarithm."""
        return max(abs(math.log(self.less)), abs(math.log(self.more)))


def list_perturbations(job: TrainingJob, cluster: Cluster) -> dict[str, Perturbation]:
    """Lists the inputs of a prediction by name, each with a function that multiplies it by a factor."""
    compute, epochs = job.compute, job.epochs

    def scale_part(name: str, key: str) -> Perturbation:
        part = getattr(cluster, name)
        # A box without a link between nodes has nothing to scale there.
        if part is None:
            return lambda by: (job, cluster)
        value = getattr(part, key)
        return lambda by: (job, cluster.model_copy(update={name: part.model_copy(update={key: value * by})}))

    def scale_compute(**changes: float) -> TrainingJob:
        return replace(job, compute=replace(compute, **changes))

    def scale_loss(key: str) -> Perturbation:
        value = getattr(job.losses, key)
        # No share exceeds 1.
        return lambda by: (
            replace(job, losses=replace(job.losses, **{key: min(1.0, value * by) if key == "hidden" else value * by})),
            cluster,
        )

    def scale_jitter(by: float) -> tuple[TrainingJob, Cluster]:
        known = get_losses(job, cluster).jitter
        return job, cluster.model_copy(update={"jitter": known * by})

    perturbations: dict[str, Perturbation] = {
        # A faster device needs less time: this one divides.
        "speed of a device": lambda by: (
            scale_compute(sample_s=compute.sample_s / by, update_s=compute.update_s / by),
            cluster,
        ),
        "fixed time of a step": lambda by: (scale_compute(fixed_s=compute.fixed_s * by), cluster),
        "bandwidth between nodes": scale_part("between", "gbit_s"),
        "latency between nodes": scale_part("between", "latency_us"),
        "bandwidth inside a node": scale_part("inside", "gb_s"),
        "jitter of devices": scale_jitter,
        "contention in a node": scale_loss("contention"),
        "exchange hidden": scale_loss("hidden"),
    }
    if not isinstance(epochs, int | float):
        law = epochs
        perturbations["critical batch"] = lambda by: (
            replace(job, epochs=replace(law, critical=law.critical * by)),
            cluster,
        )
    if cluster.node.images_s is not None:
        perturbations["loading of a node"] = scale_part("node", "images_s")
    for key, name in (
        ("node_gb_s", "storage to a node"),
        ("shared_gb_s", "shared storage"),
        ("opens_s", "opens a second"),
        ("cache_gb", "cache of a node"),
    ):
        if getattr(cluster.storage, key):
            perturbations[name] = scale_part("storage", key)
    return perturbations


def rank_sensitivities(job: TrainingJob, cluster: Cluster, nodes: int) -> list[InputSensitivity]:
    """Ranks the inputs by their effect on the time to the target, the largest first."""
    planned = predict(job, cluster, nodes).hours

    def compare(perturb: Perturbation, by: float) -> float:
        return predict(*perturb(by), nodes).hours / planned

    sensitivities = [
        InputSensitivity(name, compare(perturb, 1 - PERTURBATION), compare(perturb, 1 + PERTURBATION))
        for name, perturb in list_perturbations(job, cluster).items()
    ]
    return sorted(sensitivities, key=lambda one: -one.magnitude)


def compute_band(job: TrainingJob, cluster: Cluster, planned: Prediction) -> tuple[float, float]:
    """Computes the 90 % band of the hours to the target. Returns (low, high)."""
    # The errors of a step's parameters depend on each other: each column of the covariance's root is a joint one of
    # them. Columns and errors of other inputs are independent: their effects, in logarithms, add up in squares.
    squares, parameters = 0.0, StepParameters(job.compute, job.losses)
    if job.covariance is not None:
        for column in compute_root(job.covariance).T:
            moved = parameters.move(column)
            other = predict(replace(job, compute=moved.compute, losses=moved.losses), cluster, planned.nodes)
            squares += math.log(other.hours / planned.hours) ** 2
    errors = {**INPUT_ERRORS, "loading of a node": cluster.node.loading_error}
    for name, perturb in list_perturbations(job, cluster).items():
        if error := errors.get(name, 0.0):
            squares += math.log(predict(*perturb(math.exp(-error)), planned.nodes).hours / planned.hours) ** 2
    # Two batches always lie on a hyperbola: the error of that fit is unknown, and 20 % is assumed.
    law = job.epochs
    if not isinstance(law, int | float):
        squares += (PERTURBATION if law.error is None else law.error) ** 2
        squares += EXTRAPOLATION_ERROR**2 * (not law.low <= planned.batch <= law.high)
    width = Z_90 * math.sqrt(squares)
    return planned.hours * math.exp(-width), planned.hours * math.exp(width)
