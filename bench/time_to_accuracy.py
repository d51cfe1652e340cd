"""Time to the accuracy of airbench94 on CIFAR-10: `recipes/cifar10-fast.yaml`, by Headway's Trainer, against ports of
airbench94's SGD recipe (bench/_accuracy/airbench.py) and of the later record's (record.py), which are PyTorch alone.

A seed is a round: the three arms, one after the other, each in a process of its own with all cores; every second round
goes the other way. Headway with a port is a pair. Before the first round a short timing chooses the precision and the
compile setting that suit the port of airbench94 best; the other arms use the same.

time_ratio_tta     seconds of Headway over the port's, training and the evaluation by views; mean of the pairs
time_ratio         the same for training alone, without views
time_vs_record     as time_ratio_tta, against the port of the record

On a CPU, all arms keep freed memory in the process, as Headway does: the ports' steps take 1.2 to 1.5 times as long
without it. The clock is the same for all: it runs from the first batch of the first epoch to the end of the last step,
augmentation, optimizer and averages included. It leaves out reading and decoding into memory, building the network,
whitening, compiling and warming up. The ports' pixels are normalised and padded before the clock starts; Headway's
within it.

A ratio is void, and printed as such, unless
- the port is right: its mean accuracy is 91.0 +- 0.3 % with the views, and airbench94's 89.9 +- 0.3 % without;
- ours is as accurate: its mean is not below the port's by more than one standard error of the difference, nor by more
  than 0.15 points;
- at least three pairs were run on this machine, in each of which a fixed piece of work took the same time within 10 %
  in both arms, as the mean of before and after.

A run may take most of an hour. Each finished run is appended to the results file, and a later call continues from
there. Runs of a port count as long as arm.py, its files and its arguments are unchanged; ours as long as the recipe,
arm.py, airbench.py, ours.py, the native core and all files of src/headway that their process had imported by its end
are unchanged. So the arms of a pair may come from different times; the fixed piece of work tells if the machine had the
same speed.

`--in-turn ROUNDS` compares the seconds on a machine whose speed changes: the arms take turns on a sixteenth of the
images, all of their epochs, in runs of some minutes. Accuracies mean nothing there. Each arm's seconds of a step, times
the steps of a whole run, give

time_ratio_in_turn      seconds of Headway's training over the port's; mean of the rounds
time_vs_record_in_turn  the same over the port of the record
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from bench._accuracy import airbench, cifar, ours
from bench._accuracy.arm import METHODS, ArmEndedError, native_sources, run
from bench._accuracy.costs import SAMPLES, method_cost, recipe_cost
from bench._accuracy.results import FOLDER, Results, commit, digest, hashes, sources, this_machine
from bench._arms import ROOT
from bench._common import Claim, parser, report, take_turns
from bench._family import run_bench
from headway.core.statistics import compute_interval

ARMS = ("port", "headway", "record")
LIBRARY = ROOT / "src/headway"
PORT, RECORD, OURS, ARM = (ROOT / f"bench/_accuracy/{name}.py" for name in ("airbench", "record", "ours", "arm"))
NAMES = {"port": "the port", "record": "the record's port"}
WITH_VIEWS = ("accuracy_tta", 0.910, "with the views")
EXPECTED = {"port": (WITH_VIEWS, ("accuracy", 0.899, "without views")), "record": (WITH_VIEWS,)}
"""Accuracies that each port must reach. Both sources reach 94.0 % with views on the original images, of which these are
JPEG copies; the record's accuracy without views is not published as a target."""
TOLERANCE, NOT_BELOW, SAME_SPEED = 0.003, 0.0015, 0.10
CHOOSING_BATCH = {"cpu": 128, "cuda": 1000}
"""Images of a step of the short timing: on a slow CPU one of the whole batch takes ten seconds."""
IN_TURN = 310
"""Training images of each class for `--in-turn`: whole batches of both ports, but for 28 images."""
QUICK_WIDTHS, QUICK_EPOCHS = (8, 16, 16), 4.0


@dataclass(frozen=True)
class Verdict:
    """A ratio with its spread over the pairs, and why it is void, if it is."""

    ratios: list[float]
    reasons: list[str]


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--seeds", type=int, default=3, metavar="N", help="pairs in all, those kept already included")
    asked.add_argument(
        "--in-turn", type=parse_rounds, metavar="ROUNDS", help="compare the seconds alone, in short runs"
    )
    asked.add_argument("--results", type=Path, default=FOLDER / "time_to_accuracy.jsonl", metavar="FILE")
    options = asked.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="headway-accuracy-") as folder:
            run_rounds(options, Path(folder))
    except ArmEndedError as error:
        sys.exit(str(error))


def run_rounds(options: argparse.Namespace, folder: Path) -> None:
    """Runs what is missing, or the arms in turn, and prints tables and claims."""
    if options.quick:
        options.seeds, options.results = 1, folder / "results.jsonl"
    data = cifar.part(folder, 110, 20) if options.quick else cifar.packed()
    results = Results(options.results)
    asked_of = jobs(options, results, data)
    if options.in_turn:
        tell_in_turn(run_in_turn(options.in_turn, asked_of, folder), options)
        return
    for seed in range(1, options.seeds + 1):
        one_round(results, asked_of, seed, data)
    tell([one for arm in ARMS for one in kept_runs(results, arm, asked_of)], options, asked_of)


def settings_of(arm: str, asked_of: dict[str, dict[str, Any]]) -> str:
    """Computes a digest of what a kept run of an arm has to share to count, but for what it imports of Headway.

    It is what the arm is asked and its files; for Headway also the recipe and the port of airbench94.
    """
    if arm != "headway":
        return digest([asked_of[arm], sources(ROOT, [ARM, PORT] if arm == "port" else [ARM, PORT, RECORD])])
    values = yaml.safe_load(ours.RECIPE.read_text(encoding="utf-8"))  # its comments do not count
    return digest([asked_of[arm], values, sources(ROOT, [ARM, PORT, OURS])])


def code_of(files: list[str]) -> str | None:
    """Returns the version of files of this repository; None where one is not there any more."""
    try:
        return sources(ROOT, [ROOT / one for one in files])
    except FileNotFoundError:
        return None


def kept_runs(results: Results, arm: str, asked_of: dict[str, dict[str, Any]], **key: Any) -> list[dict[str, Any]]:
    """Returns an arm's runs on this machine that count."""
    found = results.where(arm=arm, machine=this_machine(), settings=settings_of(arm, asked_of), **key)
    return [one for one in found if arm != "headway" or one["code"] == code_of(one["imported"])]


def jobs(options: argparse.Namespace, results: Results, data: Path) -> dict[str, dict[str, Any]]:
    """Returns what each arm is asked to do, but for the seed."""
    widths = QUICK_WIDTHS if options.quick else airbench.WIDTHS
    here, port_code = this_machine(), sources(ROOT, [ARM, PORT])
    chosen = next(iter(results.where(arm="choose", machine=here, code=port_code)), None)
    if chosen is None and options.quick:
        chosen = {"precision": "fp32", "compiled": False, "step_ms": {}}  # a compilation takes longer than all else
    if chosen is None:
        batch = CHOOSING_BATCH["cuda" if torch.cuda.is_available() else "cpu"]
        found = run(arm="choose", packed=str(data), widths=widths, batch=batch, rounds=7)
        chosen = {"arm": "choose", "machine": here, "code": port_code, "batch": batch, **found}
        results.add(chosen)
    for how, (middle, low, high) in chosen["step_ms"].items():
        print(f"the port's step of {chosen['batch']} images, {how:<16} {middle:.1f} ms [{low:.1f}, {high:.1f}]")
    same = {"precision": chosen["precision"], "compiled": chosen["compiled"], "widths": widths}
    asked: dict[str, dict[str, Any]] = {
        arm: same | {"epochs": QUICK_EPOCHS if options.quick else method.epochs} for arm, method in METHODS.items()
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    more = ours.taken_from(chosen["precision"], chosen["compiled"], device)
    asked["headway"] = {"overrides": [*more, *overrides(options.quick)]}
    # An optional key, so that what a kept run has been asked stays the same.
    return {arm: asked[arm] | ({"probe_steps": 1} if options.quick else {}) for arm in ARMS}


def overrides(quick: bool) -> list[str]:
    """Returns the overrides that cut a run to a small part; none for a whole run."""
    if not quick:
        return []
    full = ours.recipe(Path("packed")).recipe
    assert isinstance(full.epochs, float)
    part = QUICK_EPOCHS / full.epochs
    late = ", ".join(
        f"{{match: {one.match!r}, after_epochs: {one.after_epochs * part}}}" for one in full.model.freeze_after
    )
    out = [f"model.args={{widths: {list(QUICK_WIDTHS)}}}", f"epochs={QUICK_EPOCHS}", f"model.freeze_after=[{late}]"]
    if (progressive := full.data.progressive) is not None:
        for key in ("from_epoch", "until_epoch"):
            out.append(f"data.progressive.{key}={getattr(progressive, key) * part}")
    return out


def one_round(results: Results, asked_of: dict[str, dict[str, Any]], seed: int, data: Path) -> None:
    """Runs what is missing of a seed."""
    for arm in ARMS if seed % 2 else ARMS[::-1]:
        if kept_runs(results, arm, asked_of, seed=seed):
            continue
        settings, before = settings_of(arm, asked_of), hashes(ROOT, [*LIBRARY.rglob("*.py"), *native_sources()])
        print(f"seed {seed}, {arm}: since {time.strftime('%H:%M')}", file=sys.stderr)
        found = run(arm=arm, packed=str(data), seed=seed, **asked_of[arm])
        files = found["imported"] if arm == "headway" else found.pop("imported")
        if settings_of(arm, asked_of) != settings or (arm == "headway" and changed(before, files)):
            sys.exit(f"{arm} of seed {seed} has ended, but recipe or code changed meanwhile: it is not kept")
        key = {"machine": this_machine(), "seed": seed, "settings": settings}
        if arm == "headway":
            key["code"] = code_of(files)
        results.add({"arm": arm, **key, "commit": commit(), "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **found})


def changed(before: dict[str, str], files: list[str]) -> bool:
    """Returns True if one of the files is not what it was before."""
    there = [ROOT / one for one in files if (ROOT / one).exists()]
    return hashes(ROOT, there) != {one: before.get(one) for one in files}


def verdict(kept: list[dict[str, Any]], *, views: bool, against: str = "port") -> Verdict:
    """Judges the pairs of the kept runs of one machine and setting; `kept` may hold other records too."""
    metric = "accuracy_tta" if views else "accuracy"
    theirs, ours_ = ({one["seed"]: one for one in kept if one.get("arm") == arm} for arm in (against, "headway"))
    pairs = [(theirs[seed], ours_[seed]) for seed in sorted(theirs.keys() & ours_.keys())]
    steady = [pair for pair in pairs if is_steady(*pair)]
    reasons = []
    if len(steady) < 3:
        unsteady = (
            f", and {len(pairs) - len(steady)} on a machine whose speed changed" if len(steady) < len(pairs) else ""
        )
        reasons.append(f"{len(steady)} pairs of at least 3{unsteady}")
    if pairs:
        port, mine = ([one[metric] for one in side] for side in zip(*pairs, strict=True))
        for name, expected, how in EXPECTED[against]:
            reached = statistics.fmean(one[name] for one, _ in pairs)
            if abs(reached - expected) > TOLERANCE:
                said = f"{reached:.2%} {how}, not {expected:.1%} +- {TOLERANCE:.1%}"
                reasons.append(f"{NAMES[against]} reaches {said}")
        below = statistics.fmean(port) - statistics.fmean(mine)
        allowed = min(NOT_BELOW, standard_error(port, mine))
        if below > allowed:
            reasons.append(f"ours is {1e2 * below:.2f} points less accurate, and {1e2 * allowed:.2f} are allowed")

    def seconds(one: dict[str, Any]) -> float:
        return float(one["seconds"] + (one["tta_seconds"] if views else 0))

    return Verdict([seconds(mine) / seconds(port) for port, mine in steady], reasons)


def is_steady(port: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Returns True if the machine was as fast in one run of a pair as in the other."""
    ours_s, theirs_s = (statistics.fmean(one["probe_s"]) for one in (mine, port))
    return abs(ours_s / theirs_s - 1) <= SAME_SPEED


def standard_error(one: list[float], other: list[float]) -> float:
    """Returns the standard error of the difference of two means; 0 for a single run."""
    if len(one) < 2:
        return 0.0
    return math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))


def parse_rounds(text: str) -> int:
    """Reads a number of rounds, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds, 1 or more")
    return int(text)


def run_in_turn(rounds: int, asked_of: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[float]]:
    """Runs the arms in turn on few images, and returns each arm's seconds of a whole training, one per round."""
    data = cifar.part(folder / "in-turn", IN_TURN, 20)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    steps = {arm: count_steps(arm, asked_of[arm]) for arm in ARMS}

    def run_arm(arm: str) -> None:
        found = run(arm=arm, packed=str(data), seed=1, **(asked_of[arm] | {"probe_steps": 1}))
        seconds[arm].append(found["seconds"] / found["steps"] * steps[arm])
        print(f"{arm}: {found['seconds']:.1f} s for {found['steps']} steps of {steps[arm]}", file=sys.stderr)

    take_turns({arm: partial(run_arm, arm) for arm in ARMS}, rounds)
    return seconds


def count_steps(arm: str, asked: dict[str, Any]) -> int:
    """Counts the steps of a whole training: those of a port take whole batches alone."""
    if arm != "headway":
        return math.ceil(SAMPLES // METHODS[arm].batch * asked["epochs"])
    recipe = ours.recipe(Path("packed"), asked["overrides"]).recipe
    assert isinstance(recipe.epochs, float)
    return int(SAMPLES * recipe.epochs / recipe.batch)


def tell_in_turn(seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Prints the seconds of each round and the claims."""
    rows = [("round", *(f"{arm}, s" for arm in seconds))]
    for number, taken in enumerate(zip(*seconds.values(), strict=True), 1):
        rows.append((str(number), *(f"{one:.0f}" for one in taken)))
    claims = []
    for name, against in (("time_ratio_in_turn", "port"), ("time_vs_record_in_turn", "record")):
        ratios = [mine / theirs for mine, theirs in zip(seconds["headway"], seconds[against], strict=True)]
        claims.append(claim(name, ratios, against, "rounds"))
    report(claims, options, rows)


def claim(name: str, ratios: list[float], against: str = "port", runs: str = "pairs") -> Claim:
    """Returns the mean as a claim, beside it the median and the range."""
    spread = f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    how = f"mean of {len(ratios)} {runs}, {spread}; seconds, Headway over {NAMES[against]}"
    return Claim(name, statistics.fmean(ratios), "", how)


def tell(kept: list[dict[str, Any]], options: argparse.Namespace, asked_of: dict[str, dict[str, Any]]) -> None:
    """Prints table and claims."""
    rows = [("seed", "arm", "how", "training s", "views s", "accuracy", "with views", "probe ms")]
    for one in sorted(kept, key=lambda one: (one.get("seed", 0), one["arm"])):
        probe = " ".join(f"{1e3 * value:.1f}" for value in one["probe_s"])
        times = (f"{one['seconds']:.1f}", f"{one['tta_seconds']:.1f}")
        rows.append(
            (
                str(one["seed"]),
                one["arm"],
                one["how"],
                *times,
                f"{one['accuracy']:.2%}",
                f"{one['accuracy_tta']:.2%}",
                probe,
            )
        )
    for arm in ARMS:
        mine = [one for one in kept if one["arm"] == arm]
        if len(mine) > 1:
            means = [compute_interval([one[key] for one in mine]) for key in ("accuracy", "accuracy_tta")]
            said = ", with views ".join(f"{mean:.2%} +- {half:.2%}" for mean, half in means)
            print(f"{arm}: {said} (mean of {len(mine)} runs and its 95 % interval)")
    mine = recipe_cost(ours.recipe(Path("packed"), asked_of["headway"]["overrides"]).recipe)
    for arm, method in METHODS.items():
        cost = method_cost(method, asked_of[arm]["widths"], asked_of[arm]["epochs"])
        print(f"multiply-adds of training: Headway {mine:.4g}, {NAMES[arm]} {cost:.4g}, ratio {mine / cost:.3f}")
    print()
    claims = []
    asked_for = (("time_ratio_tta", True, "port"), ("time_ratio", False, "port"), ("time_vs_record", True, "record"))
    for name, views, against in asked_for:
        found = verdict(kept, views=views, against=against)
        reasons = (["a quick run"] if options.quick else []) + found.reasons
        if reasons:
            seen = ", ".join(f"{ratio:.3f}" for ratio in found.ratios) or "none"
            print(f"{name}: void ({'; '.join(reasons)}); ratios of the pairs: {seen}")
        else:
            claims.append(claim(name, found.ratios, against))
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
