"""Averages of the weights of several networks: soups of runs, and stochastic weight averaging of checkpoints.

Unlike an ensemble, an average is one network, as fast as each of them. It is only of use if the networks lie in one
basin of the loss: checkpoints of one run (SWA, Izmailov et al. 2018, arXiv 1803.05407), or runs that begin from the
same pretrained weights (Wortsman et al. 2022, arXiv 2203.05482).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.checkpoint.compatibility import find_mismatch
from headway.core.errors import HeadwayError, UsageError
from headway.core.run_folder import RunFolder
from headway.data.data_recipe import SYNTHETIC
from headway.data.dataset import Dataset
from headway.model.batch_norm import list_running_statistics
from headway.setup.inputs import open_dataset
from headway.setup.task import is_better
from headway.setup.train_setup import TrainSetup
from headway.training.averages import recompute_from_images
from headway.training.evaluate import evaluate

LOG = logging.getLogger("headway.training")

SoupKind = Literal["uniform", "greedy"]
STATISTICS_SAMPLES = 4096
"""Training images over which the statistics of batch norm are recomputed."""
# Images per forward pass, as for landscapes.
MAX_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Soup:
    """An average of weights.

    Attributes:
        kind: `uniform`: the mean of all. `greedy`: the mean of those that did not make it worse.
        chosen: places of the members in the mean, in the order in which they were added.
        state: the averaged tensors by name.
        metrics: its evaluation.
        recomputed: the statistics of batch norm were computed anew.
    """

    kind: SoupKind
    chosen: tuple[int, ...]
    state: dict[str, Tensor]
    metrics: dict[str, float]
    recomputed: bool


def average_weights(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the mean of several states of one network; whole numbers, such as counts of batches, are the first's.

    Sums are in float64, so the mean of equal states is that state, bit for bit, and the order of states does not
    matter beyond the last bit.

    Raises:
        UsageError: names, shapes or types differ.
    """
    first = states[0]
    for state in states[1:]:
        if fault := find_mismatch(dict(state), dict(first)):
            fix = "Average runs of one network, or make an ensemble of them: leave --soup out."
            raise UsageError(f"weights of different networks cannot be averaged: {fault}", fix=fix)
    mean = {}
    for name, value in first.items():
        if value.is_floating_point():
            # Not from zero: 0 + -0 is 0.
            total = value.double()
            for state in states[1:]:
                total = total + state[name]
            mean[name] = (total / len(states)).to(value.dtype)
        else:
            mean[name] = value.clone()
    return mean


def read_state(run: RunFolder) -> dict[str, Tensor]:
    """Reads the weights of a run, on the CPU."""
    return load_file(run.weights_path)


def make_soup(kind: SoupKind, setup: TrainSetup, states: Sequence[Mapping[str, Tensor]], dataset: Dataset) -> Soup:
    """Averages weights, and evaluates the average.

    `greedy` goes through the members from the best one to the worst one, and keeps each in the average if the primary
    metric does not get worse (Wortsman et al. 2022, algorithm 1). The evaluation set then chose the soup.

    Args:
        setup: a setup of this network; its weights are replaced.
        dataset: the evaluation set.

    Raises:
        UsageError: the states are of different networks. HeadwayError: the training set cannot be read, and the network
            has batch norm.
    """
    if kind == "uniform":
        return _evaluate_average(kind, setup, states, tuple(range(len(states))), dataset)
    alone = [_evaluate_average(kind, setup, states, (place,), dataset) for place in range(len(states))]
    primary, sign = setup.task.primary, -1.0 if setup.task.higher_is_better else 1.0
    best, *others = sorted(alone, key=lambda one: sign * one.metrics[primary])
    for one in others:
        tried = _evaluate_average(kind, setup, states, (*best.chosen, *one.chosen), dataset)
        # Kept on a tie too, as in the paper, whatever the loss.
        if tried.metrics[primary] == best.metrics[primary] or is_better(setup.task, tried.metrics, best.metrics):
            best = tried
    return best


def _evaluate_average(
    kind: SoupKind,
    setup: TrainSetup,
    states: Sequence[Mapping[str, Tensor]],
    chosen: tuple[int, ...],
    dataset: Dataset,
) -> Soup:
    state, recomputed = build_average(setup, [states[place] for place in chosen])
    metrics = evaluate(setup, dataset).metrics
    return Soup(kind=kind, chosen=chosen, state=state, metrics=metrics, recomputed=recomputed)


def build_average(setup: TrainSetup, states: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], bool]:
    """Returns the mean of the states with statistics of batch norm that fit it, and leaves it in the network.

    The statistics are recomputed over training images, since those of the parents are of other activations. If all
    parents have the same weights, their own statistics fit.

    Returns:
        the state, and True if statistics were recomputed.
    """
    state = average_weights(states)
    setup.model.load_state_dict(state)
    ids = {id(value) for value in list_running_statistics(setup.model)}
    names = [name for name, value in setup.model.named_buffers() if id(value) in ids]
    if not names or all(torch.equal(state[name], states[0][name]) for name in state):
        return state, False
    _recompute(setup)
    now = setup.model.state_dict()
    return state | {name: now[name].detach().cpu().to(state[name].dtype) for name in names}, True


def _recompute(setup: TrainSetup) -> None:
    """Recomputes the statistics of batch norm over images of the run's training set."""
    options, loaded = setup.recipe.data, setup.loaded
    why = "the mean of weights needs new statistics of batch norm, from images of the training set"
    if options.train == SYNTHETIC:
        raise UsageError(f"{why}, and these runs had synthetic data", where="data.train", fix="Leave --soup out.")
    try:
        dataset = open_dataset(loaded.base, options.train)
    except HeadwayError as error:
        raise type(error)(f"{error.what} ({why})", where=error.where or options.train, fix=error.fix) from error
    with closing(dataset):
        recompute_from_images(setup, _read_images(setup, dataset))


def _read_images(setup: TrainSetup, dataset: Dataset) -> Iterator[Tensor]:
    """Yields batches of training images, uint8 [b, H, W, C], cropped as in an evaluation."""
    micro = setup.recipe.micro_batch
    count = min(STATISTICS_SAMPLES, len(dataset))
    size = min(micro if isinstance(micro, int) else MAX_BATCH, MAX_BATCH, count)
    # A fixed seed: the same soup again has the same statistics, bit for bit.
    for batch in setup.inputs.build_sample_loader(setup.recipe, dataset, count, size, seed=0):
        # The last batch is full too: positions from `count` on do not belong to the sample. Masked ones are -1.
        good = torch.from_numpy((batch.served >= 0) & (batch.positions < count)).to(batch.images.device)
        # Batch norm over a single sample has no variance.
        if int(good.sum()) > 1:
            yield batch.images[good]
