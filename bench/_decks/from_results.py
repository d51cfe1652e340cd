"""What was measured: claims, published figures, and the kept runs of `bench.large_batch`, the studies and others.

Each function takes the part of a figure's `ours` behind the colon.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench._accuracy import batch_curve, batch_error
from bench._accuracy.batch_arms import EPOCHS, LARGE, LARGEST, SMALL, Cell
from bench._accuracy.batch_table import BASELINE, LAST_LARGE, Tables
from bench._accuracy.results import FOLDER, Results
from bench._arms import ROOT
from bench._decks import statements, studies
from bench._decks.figure import Ours
from bench._decks.studies import Runs, average, has_diverged
from bench._sweep import recurrent
from headway.core.statistics import compute_interval

CLAIMS = FOLDER / "claims.jsonl"
PUBLISHED = Path(__file__).with_name("published.csv")


@cache
def read_claims() -> dict[str, dict[str, Any]]:
    """Reads the stored claims by name."""
    return {one["name"]: one for one in Results(CLAIMS).all()}


def find_claim(name: str) -> Ours:
    """Finds a claim of bench/results/claims.jsonl."""
    one = read_claims()[name]
    return Ours("measured", one["value"], one.get("about", ""), one.get("low"), one.get("high"))


def find_statement(asked: str) -> Ours:
    """Finds what was measured of a statement in bench/results/statements.jsonl: NAME, or NAME/KEY of another value."""
    name, _, key = asked.partition("/")
    (one,) = Results(statements.RESULTS).where(name=name)
    value, error = one[key or "value"], None if key else one.get("error")
    ends = (None, None) if error is None else (value - error, value + error)
    return Ours("measured", value, "[statements](statements.md)", *ends)


def derive_pixels(name: str) -> Ours:
    """Derives images/s at 352 pixels over 480 from the claim of their ratio over that of 1 / pixels."""
    one, law = read_claims()[f"{name}_gain"], (480 / 352) ** 2
    return Ours("measured", law * one["value"], f"1 / pixels would give {law:.2f}")


@cache
def read_published() -> dict[str, dict[str, str]]:
    """Reads figures that others have published, by name."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return {one["id"]: one for one in csv.DictReader(file)}


def find_published(name: str) -> Ours:
    """Finds a figure that others have published."""
    one = read_published()[name]
    return Ours("published", float(one["value"]), one["source"])


@cache
def read_tables() -> Tables:
    """Reads the kept runs of `bench.large_batch`."""
    return Tables(Results(FOLDER / "large_batch.jsonl").all())


def read_large_batch(asked: str) -> Ours:
    """Reads from the tables of `bench.large_batch`: accuracy/ARM, gain/ARM/ARM, loss/ARM, knee, longer.

    Accuracies are those of the small network on CIFAR-10 at a batch of 8,192.
    """
    kind, *arms = asked.split("/")
    tables = read_tables()
    if kind == "longer":
        epochs = tables.epochs_to_equal(LAST_LARGE)
        assert isinstance(epochs, float)
        return Ours("measured", epochs / EPOCHS, f"CIFAR-10: {epochs:g} epochs where 256 takes {EPOCHS:g}")
    if kind == "knee":
        batches, curve = (SMALL, LARGE, LARGEST), read_error_curve()
        means = [statistics.fmean(curve.list_errors(batch)) for batch in batches]
        errors = ", ".join(f"{mean:.1f}" for mean in means)
        more = f"CIFAR-10, [error {errors} %](accuracy.md#error-against-the-batch) at {SMALL}, {LARGE:,}, {LARGEST:,}"
        return Ours("measured", (means[2] - means[1]) / (means[1] - means[0]), more)
    where = f"CIFAR-10, batch {LARGEST:,}"
    found = [[100 * one for one in tables.accuracies(Cell(LARGEST, arm))] for arm in arms]
    if kind == "accuracy":
        return Ours("measured", statistics.fmean(found[0]), where)
    if kind == "loss":
        small = [100 * one for one in tables.accuracies(BASELINE)]
        return _compare(small, found[0], f"CIFAR-10, 256 to {LARGEST:,}")
    return _compare(found[1], found[0], where)


@cache
def read_error_curve() -> batch_error.ErrorCurve:
    """Reads the kept runs of `bench.large_batch --error`."""
    return batch_error.ErrorCurve(Results(FOLDER / "large_batch.jsonl").all())


def _compare(one: Sequence[float], other: Sequence[float], more: str) -> Ours:
    """The mean difference of pairs of seeds, with its 95 % interval."""
    mean, half = compute_interval([a - b for a, b in zip(one, other, strict=True)])
    return Ours("measured", mean, more, mean - half, mean + half)


@cache
def read_curve() -> batch_curve.Curve:
    """Reads the kept runs of SGD to 60 %."""
    return batch_curve.Curve(Results(FOLDER / "large_batch.jsonl").all())


def read_batch_curve(asked: str) -> Ours:
    """Reads from the curve of steps against the batch.

    Args:
        asked: steps/B/B, epochs/B/B, perfect-to, lowest-rate, rate-exponent/B/B (of the best rate in the
            batch).
    """
    kind, *batches = asked.split("/")
    curve, where = read_curve(), "CIFAR-10, a small network, to 60 %"
    if kind == "rate-exponent":
        return _fit_rate_exponent(*map(int, batches))
    if kind == "lowest-rate":
        rates = {batch: curve.curve.search(batch)[1] for batch, *_ in curve.points()}
        lowest = min((lr, batch) for batch, lr in rates.items() if lr is not None)
        return Ours("measured", lowest[0], f"best rate at a batch of {lowest[1]}, the lowest of all batches")
    if kind == "perfect-to":
        largest = max(batch for batch, _, regime in curve.points() if regime == "perfect")
        return Ours("measured", largest, where)
    large, small = (curve.steps(int(batch)) for batch in batches)
    assert large is not None
    assert small is not None
    ratio = int(batches[0]) / int(batches[1]) if kind == "epochs" else 1.0
    return Ours("measured", large / small * ratio, where)


def _read_best_rate(batch: int) -> float:
    lr = read_curve().curve.search(batch)[1]
    assert lr is not None
    return lr


def _fit_rate_exponent(large: int, small: int) -> Ours:
    ratio = _read_best_rate(large) / _read_best_rate(small)
    more = f"CIFAR-10: the best rate grows {ratio:g}-fold from {small:,} to {large:,}"
    return Ours("measured", math.log(ratio) / math.log(large / small), more)


def read_recurrent(name: str) -> Ours:
    """Reads a claim of the lab on recurrent networks."""
    (claim,) = [one for one in _read_recurrent_claims() if one.name == name]
    half = float(claim.how.partition("+- ")[2].partition(";")[0])
    return Ours("measured", claim.value, "digits", claim.value - half, claim.value + half)


def compare_lamb(batch: str) -> Ours:
    """Compares LAMB with LARS of LARC's trust on the lab's GRU: points of accuracy."""
    one, other = (
        _read_recurrent_table().list_accuracies(recurrent.Cell("recurrent", int(batch), arm))
        for arm in ("lamb", recurrent.TRUST)
    )
    return _compare(one, other, f"a GRU on digits, batch {batch}")


@cache
def _read_recurrent_table() -> recurrent.Table:
    return recurrent.Table(Results(FOLDER / "recurrent.jsonl").all())


@cache
def _read_recurrent_claims() -> Sequence[Any]:
    return _read_recurrent_table().build_claims()


def read_recipe_value(asked: str) -> Ours:
    """Reads a value of a recipe in recipes/: NAME/KEY.KEY."""
    name, path = asked.split("/")
    value = yaml.safe_load((ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8"))
    for key in path.split("."):
        value = value[key]
    return Ours("taken over", float(value), f"`recipes/{name}.yaml`")


@cache
def read_runs() -> Runs:
    """Reads the kept runs of the studies."""
    return Runs(Results(studies.RESULTS).all())


def read_study(asked: str) -> Ours | None:
    """Reads what a study shows; None until its runs are there. Names are those of figures.csv."""
    kind, *rest = asked.split("/")
    return _STUDIES[kind](*rest)


def _read_batch(batch: str, what: str) -> Ours | None:
    mean = average(read_runs().select("batch", batch=int(batch)), lambda run: run["epochs"][-1][what])
    more = f"CIFAR-10, learning rate {studies.BATCH_LR:g}"
    return None if mean is None else Ours("measured", mean, more)


def _compare_batches(what: str) -> Ours | None:
    small, large = (
        [100 * run["epochs"][-1][what] for run in read_runs().select("batch", batch=batch)]
        for batch in (studies.BATCHES[0], studies.BATCHES[-1])
    )
    return None if len(large) < len(studies.SEEDS) else _compare(small, large, "CIFAR-10, one learning rate")


def _share_batches() -> Ours | None:
    small, large = (_read_batch(str(batch), "val") for batch in (studies.BATCHES[0], studies.BATCHES[-1]))
    if small is None or large is None:
        return None
    assert small.value is not None
    assert large.value is not None
    return Ours("measured", large.value / small.value, large.more)


_LOGS = f"CIFAR-10 at 16 pixels, all at a rate of {studies.LOG_LR * studies.LOG_SCALE:g}"


def _read_log(arm: str, what: str) -> Ours | None:
    def read(run: Mapping[str, Any]) -> float:
        epochs = run["epochs"]
        return float(max(one["val"] for one in epochs) if what == "best" else epochs[-1][what])

    mean = average(read_runs().select("optimizers", arm=arm), read)
    return None if mean is None else Ours("measured", mean, _LOGS)


def _compare_logs(arm: str, other: str) -> Ours | None:
    found = [
        [100 * run["epochs"][-1]["val"] for run in read_runs().select("optimizers", arm=name)] for name in (arm, other)
    ]
    if min(map(len, found)) < len(studies.SEEDS):
        return None
    return _compare(found[0], found[1], _LOGS)


def _compare_rules(factor: str) -> Ours | None:
    batch, lr = studies.RULE_BATCH * int(factor), read_runs().find_rule_rate()
    linear, root = (
        [100 * run["accuracy"] for run in read_runs().select("rules", arm=arm, batch=batch, lr=lr)]
        for arm in ("linear", "root")
    )
    if min(len(linear), len(root)) < len(studies.SEEDS):
        return None
    edge = ", at the edge of its sweep" if read_runs().is_rule_rate_at_edge() else ""
    more = f"CIFAR-10 at 16 pixels, {studies.RULE_BATCH} to {batch:,}; at {studies.RULE_BATCH} the rate is {lr:g}{edge}"
    return _compare(linear, root, more)


def _count_diverged(arm: str) -> Ours | None:
    found = read_runs().select("divergence", arm=arm)
    if len(found) < len(studies.SEEDS):
        return None
    reached = ", ".join(f"{100 * run['accuracy']:.0f} %" for run in found)
    more = f"CIFAR-10, batch 2,048, three seeds; accuracy {reached}"
    return Ours("measured", float(sum(map(has_diverged, found))), more)


def _best_norm_rate(arm: str) -> float | None:
    means = {
        lr: average(read_runs().select("norm", arm=arm, lr=lr), lambda run: run["accuracy"])
        for lr in studies.NORM_RATES
    }
    known = {lr: mean for lr, mean in means.items() if mean is not None}
    return max(known, key=lambda lr: known[lr]) if len(known) == len(means) else None


def _compare_norms(read: Callable[[Mapping[str, Any]], float]) -> Ours | None:
    rates = [_best_norm_rate(arm) for arm in studies.NORM]
    if None in rates:
        return None
    found = [
        [100 * read(run) for run in read_runs().select("norm", arm=arm, lr=lr)]
        for arm, lr in zip(studies.NORM, rates, strict=True)
    ]
    return _compare(found[0], found[1], "digits, three layers of sigmoids")


def _compare_norm_rates() -> Ours | None:
    highest = []
    for arm in studies.NORM:
        best = _best_norm_rate(arm)
        if best is None:
            return None
        means = {
            lr: statistics.fmean(run["accuracy"] for run in read_runs().select("norm", arm=arm, lr=lr))
            for lr in studies.NORM_RATES
        }
        highest.append(max(lr for lr, mean in means.items() if mean >= means[best] - 0.01))
    return Ours("measured", highest[0] / highest[1], f"{highest[0]:g} with, {highest[1]:g} without; digits")


def _list_decay(arm: str) -> list[float] | None:
    """Lists the accuracies of an arm of `alexnet`, in percent; None until all are there."""
    lr = read_runs().find_decay_rate(arm)
    found = [100 * run["accuracy"] for run in read_runs().select("alexnet", arm=arm, lr=lr)]
    return found if len(found) == len(studies.SEEDS) else None


def _describe_decay(*arms: str) -> str:
    runs = read_runs()
    rates = [f"{runs.find_decay_rate(arm):g}{', at the edge' * runs.is_decay_at_edge(arm)}" for arm in arms]
    return f"a narrow AlexNet-BN, CIFAR-10, LARS, batch {studies.LARGE_BATCH:,}, rate {' and '.join(rates)}"


def _read_decay(arm: str) -> Ours | None:
    found = _list_decay(arm)
    return None if found is None else Ours("measured", statistics.fmean(found), _describe_decay(arm))


def _compare_decay() -> Ours | None:
    every, weights = map(_list_decay, studies.DECAY)
    if every is None or weights is None:
        return None
    return _compare(weights, every, _describe_decay(*studies.DECAY))


_STUDIES: Mapping[str, Callable[..., Ours | None]] = {
    "batch": _read_batch,
    "batch-loss": _compare_batches,
    "batch-share": _share_batches,
    "log": _read_log,
    "log-gain": _compare_logs,
    "rules": _compare_rules,
    "diverged": _count_diverged,
    "norm-gain": lambda: _compare_norms(lambda run: float(run["accuracy"])),
    "norm-first": lambda: _compare_norms(lambda run: float(run["epochs"][0]["val"])),
    "norm-rates": _compare_norm_rates,
    "decay": _read_decay,
    "decay-gain": _compare_decay,
}
