"""Tunes a recipe: applies knobs one by one, the best predicted first, and keeps those that help in runs of the whole
job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import yaml

from headway.core.errors import HeadwayError, UsageError, suggest_nearest
from headway.core.files import expect_writable, read_text, write_atomically
from headway.core.messages import RUN_ROOMS, mute_messages
from headway.core.profile import Knob, Profile, Throughput
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.core.recipe_editor import edit_recipe
from headway.core.statistics import compute_median_interval
from headway.core.text_format import pluralise
from headway.doctor.budget import FULL, QUICK, Budget
from headway.doctor.examination import describe_machine, examine_job
from headway.doctor.measurement_job import LOG, MeasurementJob, format_override
from headway.doctor.pack_estimate import PackCommand
from headway.doctor.tune_packs import TrialPacks
from headway.doctor.whole_job import run_whole_job
from headway.setup.recipe import TrainRecipe
from headway.training.runs import load_recipe

# Changes of the mathematics that may be allowed, and the recipe's keys that each stands for.
ALLOWED = {
    "precision": ("precision",),
    "batch": ("batch", "batch.per_device"),
    "data.size": ("data.size", "data.scaled"),
}
COSTS = {
    "precision": "other bits of precision in forward and backward (bf16 8, fp16 11): compare the accuracy",
    "batch": "fewer steps per epoch: check learning rate and accuracy, see docs/large-batches.md",
    "data.size": "other pixels: compare the accuracy",
}
# A smaller predicted gain is not worth runs of the whole job.
WORTH = 1.03
NOTHING = f"No setting that may be changed promises {WORTH:g} times the images/s, so none was tried."
# Runs with and without a knob, in turns. The interval from the smallest to the largest of six gains is a 95 % interval.
TURNS = 6
# Factor of the batches that are prefetched.
AHEAD = 2
# Examinations: after each knob that was kept, knobs are looked for again, because another stage limits then.
ROUNDS = 6


@final
@dataclass(frozen=True)
class TuneTrial:
    """A knob that was applied."""

    override: str
    name: str
    predicted: float
    # before, after: images/s, in turns.
    before: float
    after: float
    low: float
    high: float
    # True: it helped beyond the noise.
    kept: bool
    why: str

    @property
    def gain(self) -> float:
        """Images/s with the knob over those without it."""
        return self.after / self.before


@final
@dataclass
class TuneResult:
    """Result of `tune`."""

    recipe: Path
    written: Path
    # before, after: images/s of the recipe as it was and as it is written.
    before: Throughput | None = None
    after: Throughput | None = None
    tries: list[TuneTrial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> list[TuneTrial]:
        """Knobs that were kept."""
        return [one for one in self.tries if one.kept]

    def to_json(self) -> dict[str, Any]:
        """Returns everything for `--json`."""

        def dump_rate(rate: Throughput | None) -> Any:
            return None if rate is None else rate.model_dump()

        return {
            "recipe": str(self.recipe),
            "written": str(self.written),
            "before": dump_rate(self.before),
            "after": dump_rate(self.after),
            "steps": [asdict(one) | {"gain": one.gain} for one in self.tries],
            "notes": self.notes,
        }

    def to_text(self) -> str:
        """Returns everything as lines for a terminal."""
        lines = []
        for one in self.tries:
            what = "kept" if one.kept else "left"
            lines.append(
                f"{what}  {one.override:<32} {one.before:>9,.0f} -> {one.after:>9,.0f} images/s, {one.gain:.2f} times "
                f"[{one.low:.2f}, {one.high:.2f}], predicted {one.predicted:.2f}{f'; {one.why}' if one.why else ''}"
            )
        if self.before is not None and self.after is not None:
            gain = self.after.value / self.before.value
            lines.append(
                f"{self.before.value:,.0f} images/s before, {self.after.value:,.0f} after: {gain:.2f} times as many."
            )
        lines += self.notes
        if self.kept:
            lines.append(f"Wrote {self.written}: headway train {self.written}")
        else:
            why = (
                f"Nothing helped beyond the noise: {self.written} is the unchanged recipe, with the trials as comments."
            )
            lines.append(why if self.tries else f"{NOTHING} {self.written} is the unchanged recipe.")
        return "\n".join(lines)


def tune(
    recipe: Path,
    overrides: Sequence[str],
    *,
    allow: str = "",
    out: Path | None = None,
    quick: bool = False,
    overwrite: bool = False,
) -> TuneResult:
    """Writes RECIPE.tuned.yaml: the recipe's own text with the knobs that help, and the evidence as comments above it.

    Args:
        allow: names of ALLOWED, separated by commas.

    Raises:
        UsageError: a name is unknown, or the file exists. HeadwayError: the recipe cannot be set up.
    """
    allowed = _parse_allowed(allow)
    target = out or recipe.with_suffix(".tuned.yaml")
    # Before any measurement: a mistake in the options must not cost minutes.
    if target.resolve().parent != recipe.resolve().parent:
        what = "the tuned recipe has the recipe's relative paths, so it must be in the same folder"
        raise UsageError(what, where="--out", fix=f"Name a file in {recipe.resolve().parent}.")
    if target.exists() and not overwrite:
        raise UsageError("this file exists", where=str(target), fix="Replace it with --overwrite, or name --out.")
    expect_writable(target)
    loaded = load_recipe(recipe, overrides)
    result, budget = TuneResult(recipe, target), QUICK if quick else FULL
    with TrialPacks() as packs:
        values = _search(loaded, result, packs, allowed, budget, quick)
        result.notes += packs.notes
        result.before, result.after = _compare_final(loaded, values, budget.whole / TURNS)
        for name in sorted({key for one in result.kept for key in _list_costly_keys(one.override)}):
            result.notes.append(f"{name} was changed: {COSTS[name]}.")
        text = edit_recipe(recipe, overrides, values, TrainRecipe)
        result.notes += _note_lost_comments(recipe, text)
        # Comments of an earlier tune stay below this evidence, separated by an empty line.
        write_atomically(target, _format_evidence(recipe, result) + "\n" * text.startswith("#") + text)
        # Check that the written recipe loads.
        read_recipe(target, (), TrainRecipe)
        packs.keep(values.get("data.train"))
    return result


def _search(
    loaded: LoadedRecipe[TrainRecipe],
    result: TuneResult,
    packs: TrialPacks,
    allowed: set[str],
    budget: Budget,
    quick: bool,
) -> dict[str, Any]:
    """Returns the values that were kept; all trials go into `found`. Only a knob that was kept requires a new
    examination."""
    values: dict[str, Any] = {}
    refused = set[str]()
    for number in range(ROUNDS):
        kept = None
        with ExitStack() as stack:
            # The set-up is the same in later rounds, so its messages are shown once.
            with mute_messages((*RUN_ROOMS, "doctor") if number else ["doctor"]):
                job = stack.enter_context(closing(MeasurementJob.from_recipe(with_tuned_values(loaded, values))))
                examined = examine_job(job, budget, quick)
            for knob in [*examined.knobs, *suggest_more_prefetch(job, examined)]:
                if knob.override in refused or not _is_allowed(knob, allowed):
                    continue
                # Tried once: another round would suggest the same knob, and the noise might then favour it.
                refused.add(knob.override)
                if (kept := _try_knob(job, loaded, values, knob, result, packs, budget.whole / TURNS)) is not None:
                    break
        if kept is None:
            break
        values |= kept
    return values


def suggest_more_prefetch(job: MeasurementJob, profile: Profile) -> list[Knob]:
    """Suggests more prefetched batches if the loop waits though the loader is faster: some batches take longer than
    others. At best no wait is left."""
    run = next((one for one in profile.runs if one.name == "warm"), None)
    sides = profile.together
    if run is None or not run.wait_share or sides is None or sides.input_beside >= sides.loop_beside:
        return []
    # The bound of 0.01 keeps a loop that only waits from promising an infinite gain.
    gain = 1 / max(1 - run.wait_share, 0.01)
    return [
        Knob(
            name="more batches ready",
            cures="collate",
            override=format_override({"data.prefetch_batches": AHEAD * job.setup.recipe.data.prefetch_batches}),
            images_s=profile.predicted * gain,
            gain=gain,
            measured=False,
            exact=True,
            cost="memory for those batches",
        )
    ]


def _try_knob(
    job: MeasurementJob,
    loaded: LoadedRecipe[TrainRecipe],
    values: dict[str, Any],
    knob: Knob,
    result: TuneResult,
    packs: TrialPacks,
    each_s: float,
) -> dict[str, Any] | None:
    """Tries a knob, and returns its changes if it helps."""
    LOG.info(f"Trying {knob.override}: predicted {knob.gain:.2f} times the images/s.")
    changes: dict[str, Any] | None = parse_changes(knob.override)
    if (packing := PackCommand.parse(knob.override)) is not None:
        assert job.setup.inputs.train is not None
        changes = packs.make(packing, job.setup.inputs.train)
    if changes is None:
        return None
    one = _run_trial(job, loaded, values | changes, knob, each_s)
    if one is not None:
        result.tries.append(one)
        if one.kept:
            return changes
    else:
        result.notes.append(f"{knob.override} could not be tried: the recipe does not accept it.")
    packs.remove(changes.get("data.train"))
    return None


def _parse_allowed(text: str) -> set[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ALLOWED:
            raise UsageError(f"{name!r} cannot be allowed", where="--allow", fix=suggest_nearest(name, list(ALLOWED)))
    return {key for name in names for key in ALLOWED[name]}


def _is_allowed(knob: Knob, allowed: set[str]) -> bool:
    keys = set(parse_changes(knob.override))
    # The runs of the whole job have no evaluations, checkpoints and records, so they cannot show such a gain.
    between = knob.cures in ("evaluate", "checkpoint", "log")
    known = bool(keys) or PackCommand.parse(knob.override) is not None
    return known and knob.gain >= WORTH and (knob.exact or (bool(keys) and keys <= allowed)) and not between


def _list_costly_keys(text: str) -> list[str]:
    return [name for name, keys in ALLOWED.items() if set(keys) & set(parse_changes(text))]


def parse_changes(text: str) -> dict[str, Any]:
    """Parses `data.threads=2 precision=bf16` into values by key; empty for a command."""
    parts = [part.partition("=") for part in text.split()]
    if not all(equals and not key.startswith("-") for key, equals, _ in parts):
        return {}
    return {key: yaml.safe_load(value) for key, _, value in parts}


def with_tuned_values(loaded: LoadedRecipe[TrainRecipe], values: dict[str, Any]) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe with these values, marked as tuned."""
    return loaded.resolve_all({key: (value, "tuned") for key, value in values.items()}) if values else loaded


@mute_messages()
def _run_trial(
    job: MeasurementJob, loaded: LoadedRecipe[TrainRecipe], values: dict[str, Any], knob: Knob, each_s: float
) -> TuneTrial | None:
    """Runs the whole job with a knob's values and without them, in turns."""
    try:
        other = MeasurementJob.from_recipe(with_tuned_values(loaded, values))
    except HeadwayError:
        # The recipe refuses the value, or its combination with a value that was kept.
        return None
    with closing(other):
        pairs = _run_in_turns([job, other], each_s)
    ratio, low, high = compute_median_interval([b / a for a, b in pairs])
    kept = low > 1.0
    why = "" if kept else "within the noise" if high > 1.0 else "slower"
    LOG.info(f"{knob.override}: {ratio:.2f} times as fast [{low:.2f}, {high:.2f}]{'' if kept else ', left out'}.")
    middle = compute_median_interval([before for before, _ in pairs])[0]
    return TuneTrial(
        override=knob.override,
        name=knob.name,
        predicted=knob.gain,
        before=middle,
        after=middle * ratio,
        low=low,
        high=high,
        kept=kept,
        why=why,
    )


def _run_in_turns(jobs: Sequence[MeasurementJob], each_s: float) -> list[tuple[float, ...]]:
    """Returns images/s of each job by round; each round begins with another job, and one warm-up round comes first."""
    out = []
    for number in range(TURNS + 1):
        order = list(range(len(jobs)))
        # The first of a round may find warm or cold caches. In turns, that cancels out.
        order = order[number % len(jobs) :] + order[: number % len(jobs)]
        rates = {place: run_whole_job(jobs[place], limit_s=each_s).rate.value for place in order}
        if number:
            out.append(tuple(rates[place] for place in range(len(jobs))))
    return out


@mute_messages()
def _compare_final(
    loaded: LoadedRecipe[TrainRecipe], values: dict[str, Any], each_s: float
) -> tuple[Throughput | None, Throughput | None]:
    """Measures the original recipe and the tuned one in turns; returns (before, after)."""
    if not values:
        return None, None
    LOG.info("Measuring the original and the tuned recipe once more.")
    with (
        closing(MeasurementJob.from_recipe(loaded)) as first,
        closing(MeasurementJob.from_recipe(with_tuned_values(loaded, values))) as second,
    ):
        pairs = _run_in_turns([first, second], each_s)
    sides = [compute_median_interval(side) for side in zip(*pairs, strict=True)]
    before, after = (Throughput(value=mid, low=low, high=high, windows=TURNS) for mid, low, high in sides)
    return before, after


def _note_lost_comments(recipe: Path, text: str) -> list[str]:
    """Returns a note if comment lines of the recipe are missing in a text."""
    lines = [line.strip() for line in read_text(recipe).splitlines()]
    lost = [line for line in lines if line.startswith("#") and line not in text]
    return [f"{pluralise(len(lost), 'comment line')} of the recipe could not be kept: {lost[0]}"] if lost else []


def _format_evidence(recipe: Path, result: TuneResult) -> str:
    import torch

    here = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    head = [f"{recipe.name}, tuned on {here['processor']}, {here['usable_cores']} cores, {here['device']}."]
    if result.before is not None and result.after is not None:
        gain = result.after.value / result.before.value
        before, after = (f"{one.value:,.0f} [{one.low:,.0f}, {one.high:,.0f}]" for one in (result.before, result.after))
        head.append(f"{before} images/s before, {after} after: {gain:.2f} times.")
    else:
        head.append("Nothing that was tried helped beyond the noise." if result.tries else NOTHING)
    for one in result.tries:
        what = "kept" if one.kept else "left"
        interval = f"[{one.low:.2f}, {one.high:.2f}]"
        head.append(f"  {what}: {one.override}: {one.gain:.2f} times {interval}, predicted {one.predicted:.2f}")
    return "".join(f"# {line}\n" for line in (*head, *result.notes))
