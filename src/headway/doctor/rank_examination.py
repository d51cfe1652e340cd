"""Examines a recipe on several processes: the exposed cost of summing gradients, and the rank that slows the others
down.

First all ranks measure their own part at the same time, each with its share of the batch and as if it were alone, so
that they share cores, memory and disks as in the run. Then they train together. A step without any exchange takes as
long as the slowest rank alone; the extra time of a step together is the exposed part of the exchange.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, final

import torch

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import CommunicationError, UsageError
from headway.core.exchange_waits import select_exchanges
from headway.core.launcher_environment import read_launcher_environment
from headway.core.messages import mute_messages, show_messages
from headway.core.profile import EnvironmentFinding, Knob, Profile, ShortRun, StageCeiling, Throughput
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.core.text_format import format_bytes, pluralise
from headway.core.world import World
from headway.data.data_recipe import SYNTHETIC
from headway.doctor import environment
from headway.doctor.budget import FULL, QUICK, Budget, WallTime
from headway.doctor.examination import examine_job
from headway.doctor.loop_measurement import measure_loop
from headway.doctor.measurement_job import LOG, MeasurementJob, list_measured_values, with_values
from headway.doctor.rank_exchange import (
    GAIN,
    TOGETHER_S,
    CommTrial,
    ExchangeMeasurement,
    JointRate,
    measure_exchange,
    measure_together,
    try_alternatives,
)
from headway.doctor.throughput_model import ThroughputModel
from headway.doctor.verdict import conclude_verdict
from headway.doctor.whole_job import run_whole_job
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch
from headway.launch.ranks import Ranks
from headway.parallel.parallel_recipe import divides_weights
from headway.setup.build import build_setup
from headway.setup.checks import check_batch_size
from headway.setup.rates import resolve_batch
from headway.setup.recipe import TrainRecipe
from headway.training.progress import SilentDisplay
from headway.training.runs import load_recipe
from headway.training.trainer import Trainer

# A rank counts as slow if it takes this many times the median; less is the noise of shared cores.
SLOWER = 1.1
# Exposed share of a step below which other buckets and algorithms are not tried.
WORTH = 0.02
# Seconds for trying them.
TRIES_S = 10.0
# Strategies in which ranks exchange values inside of the network.
SHARING = ("spatial", "hybrid", "experts", "towers")
# Strategies that may take other buckets and algorithms while they train.
TRIED = ("data", "spatial", "hybrid", "experts")
NARROW_COST = "gradients cross between hosts in 16 bits; sums stay in fp32"


def examine_ranks(
    recipe: Path, overrides: Sequence[str], *, procs: int | None, hosts: str | None, quick: bool = False
) -> Profile:
    """Measures a recipe on several processes that this process launches.

    Args:
        procs, hosts: as `headway train` takes them.

    Raises:
        UsageError: recipe or hosts are wrong, or a launcher started this process. CommunicationError: a process failed;
            its own message says why.
    """
    on = parse_hosts(procs, hosts)
    if (above := read_launcher_environment()) is not None:
        fix = "Leave --procs and --hosts out."
        raise UsageError(f"a launcher ({above.launcher}) started this process, so it cannot launch others", fix=fix)
    num_ranks = sum(host.procs for host in on)
    loaded = resolve_batch(load_recipe(recipe, overrides), num_ranks)
    check_batch_size(loaded.recipe, num_ranks)
    with tempfile.TemporaryDirectory(prefix="headway-doctor-", dir=Path.cwd() if hosts else None) as folder:
        target = Path(folder) / "profile.json"
        asked = {"recipe": str(recipe.resolve()), "overrides": list(overrides), "quick": quick, "folder": folder}
        LOG.info("Measuring on all processes at once. This takes a little longer than with one process.")
        # Each process runs this module again, see `main`.
        status = launch(
            ["-m", "headway.doctor.rank_examination", json.dumps(asked)],
            on,
            timeout_s=loaded.recipe.comm.timeout_s,
            respawn=False,
            on_rank_failure="continue",
        )
        if status or not target.exists():
            raise CommunicationError("a process failed while it was measured", fix="See its message above.")
        return Profile.read(target)


def main(asked: dict[str, Any], budget: Budget | None = None) -> None:
    """Runs one of the processes. Rank 0 writes the profile.

    Args:
        budget: of the measurements; None: as `asked["quick"]` says.
    """
    show_messages()
    begun = perf_counter()
    recipe, quick = Path(asked["recipe"]), bool(asked["quick"])
    whole_budget = budget or (QUICK if quick else FULL)
    loaded = load_recipe(recipe, asked["overrides"])

    ranks = Ranks.from_environment(loaded.recipe.comm)
    assert ranks is not None
    # The user reads the messages of the examination alone, and from one rank.
    with mute_messages(), mute_messages(["doctor"], unless=lambda: ranks.is_lead), ranks:
        loaded = resolve_batch(loaded, ranks.launched_size)
        check_batch_size(loaded.recipe, ranks.launched_size)
        parallel, share = loaded.recipe.parallel, loaded.recipe.global_batch
        if not parallel.takes_whole_batches:
            share //= ranks.launched_size
        setup = build_setup(with_values(loaded, list_measured_values(loaded.recipe), "as it is measured"), ranks=ranks)
        with closing(setup.inputs):
            where = RunFolder(Path(asked["folder"]) / "run")
            if ranks.is_lead:
                RunFolder.create(where.folder)
            with closing(Trainer(setup, where, SilentDisplay(), ranks)) as trainer:
                trainer.recovery.meet()
                control = ranks.world.control
                # A rank alone measures its share of the batch, with a micro-batch that is no larger.
                norm = {"batch": share}
                if isinstance(micro := loaded.recipe.micro_batch, int):
                    norm["micro_batch"] = min(micro, share)
                with closing(MeasurementJob.from_recipe(loaded, norm)) as job:
                    control.barrier()
                    shorter, wall = split_wall_time(whole_budget, begun, tries_s=0.0 if quick else TRIES_S)
                    # Every rank measures its own part at the same time: they share cores, memory and disks as in a run.
                    mine = examine_job(job, shorter, quick, barrier=control.barrier, begun=begun)
                    around = examine_surroundings(mine.environment, job, ranks.world)
                    mine = mine.model_copy(update={"environment": around})
                    reports = control.gather_bytes(mine.model_dump_json().encode())
                    profiles = [Profile.model_validate_json(text) for text in reports]
                    # The others wait at the barrier, so that this process has all cores.
                    single = (
                        _measure_single_process(loaded, wall.allot("single"), shorter.side) if ranks.is_lead else 0.0
                    )
                    control.barrier()
                    batches = job.load_batches()
                    setup.inputs.batch_source = lambda *_: itertools.cycle(batches)
                    now = measure_together(trainer, ranks, limit_s=wall.allot("replay"))
                    # Asynchronous training sums no gradients.
                    alone = None
                    if parallel.strategy != "async":
                        alone = measure_exchange(trainer, ranks, limit_s=wall.allot("exchange"))
                    steps = _StepTimes.from_profiles(profiles, now.rate)
                    # All ranks must take the same branch, so rank 0 decides.
                    worth = json.loads(control.broadcast_bytes(json.dumps(steps.exposed > WORTH * steps.step).encode()))
                    others, late = list[CommTrial](), list[str]()
                    if worth and not quick and parallel.strategy in TRIED:
                        LOG.info("Trying other bucket sizes and all-reduce algorithms.")
                        others, late = try_alternatives(
                            trainer, ranks, loaded.recipe.comm, now, limit_s=wall.allot("tries")
                        )
                setup.inputs.batch_source = None
                # The next step opens the loader. Not `meet`, after which ranks would look for parameters of rank 0.
                trainer.close_stream()
                whole = measure_together(trainer, ranks, limit_s=wall.allot("whole"))
                if ranks.is_lead:
                    narrow = len(ranks.world.hosts) > 1 and loaded.recipe.comm.wire == "fp32"
                    narrow = narrow and not divides_weights(parallel)
                    device = setup.device.type
                    profile = join_profiles(
                        profiles,
                        now,
                        whole,
                        device,
                        between=narrow,
                        single=single,
                        alone=alone,
                        others=others,
                        strategy=parallel.strategy,
                    )
                    missing = (f"{one}: not tried, no time left." for one in late)
                    more = {"seconds": perf_counter() - begun, "not_measured": (*profile.not_measured, *missing)}
                    profile.model_copy(update=more).write(Path(asked["folder"]) / "profile.json")
                ranks.world.control.barrier()
        ranks.is_complete = True


def examine_surroundings(
    alone: Sequence[EnvironmentFinding], job: MeasurementJob, world: World
) -> tuple[EnvironmentFinding, ...]:
    """Returns the environment that one process found; with several hosts, including the network between them."""
    if len(world.hosts) == 1:
        return tuple(alone)
    return environment.examine_environment(job.loaded.recipe, job.setup.device, job.setup.train, world.interfaces)


def split_wall_time(budget: Budget, begun: float, *, tries_s: float) -> tuple[Budget, WallTime]:
    """Divides the wall time between the measurements of each rank and those of all ranks together.

    Args:
        begun: the time of `perf_counter` from which the limit counts.
        tries_s: seconds for trying other buckets and algorithms.
    """
    wants = {
        "single": budget.whole,
        "replay": TOGETHER_S,
        "exchange": budget.side,
        "tries": tries_s,
        "whole": TOGETHER_S,
    }
    return replace(budget, wall=budget.wall - sum(wants.values())), WallTime(budget.wall, wants, begun)


def _measure_single_process(loaded: LoadedRecipe[TrainRecipe], limit_s: float, side_s: float) -> float:
    """Returns images/s of one process with all cores of this host, while the others wait."""
    cores, before = count_usable_cores(), torch.get_num_threads()
    changes = {} if loaded.recipe.data.train == SYNTHETIC else {"data.threads": max(1, cores - 1)}
    torch.set_num_threads(cores)
    try:
        with closing(MeasurementJob.from_recipe(loaded, changes)) as job:
            if job.is_synthetic:
                return measure_loop(job, limit_s=min(side_s, limit_s), passes_s=min(side_s, limit_s)).rate.value
            return run_whole_job(job, limit_s=limit_s).rate.value
    finally:
        torch.set_num_threads(before)


@final
@dataclass(frozen=True)
class _StepTimes:
    """Times of a step."""

    # Seconds of a step of each rank, as if there were no others.
    alone: list[float]
    # Seconds of the median rank, and the extra time of the slowest one.
    middle: float
    slow: float
    # Seconds of a step of all ranks together.
    step: float
    # Part of `step` that the rest does not explain.
    exposed: float

    @staticmethod
    def from_profiles(profiles: Sequence[Profile], now: Throughput) -> _StepTimes:
        loops = [sum(one.seconds for one in profile.ceilings if one.side == "loop") for profile in profiles]
        alone = [seconds * profile.batch for seconds, profile in zip(loops, profiles, strict=True)]
        middle, most = statistics.median_low(alone), max(alone)
        # Below SLOWER the difference is noise, and all of the rest counts as exposed exchange.
        slow = most - middle if most >= SLOWER * middle else 0.0
        step = sum(profile.batch for profile in profiles) / now.value
        return _StepTimes(alone, middle, slow, step, max(0.0, step - most))


def join_profiles(
    profiles: Sequence[Profile],
    now: JointRate,
    whole: JointRate,
    device: str,
    *,
    between: bool,
    single: float = 0.0,
    alone: ExchangeMeasurement | None = None,
    others: Sequence[CommTrial] = (),
    strategy: str = "data",
) -> Profile:
    """Builds one profile of all ranks: the stages of the median rank, and the cost of the others.

    Args:
        profiles: of each rank, measured with its share of the batch.
        now: steps of all ranks with ready batches. whole: the same with the loader's batches.
        between: gradients cross between hosts in fp32.
        single: images/s of one process with all cores of its host; 0: not measured.
        alone: the exchange with nothing else running. others: other buckets and algorithms that were faster.
        strategy: of the recipe's `parallel`.
    """
    count, steps = len(profiles), _StepTimes.from_profiles(profiles, now.rate)
    base = profiles[steps.alone.index(steps.middle)]
    slowest, exposed = steps.alone.index(max(steps.alone)), steps.exposed
    exchanges = select_exchanges(now.waits)
    inside = min(exposed, sum(exchanges.values()))
    exposed -= inside
    # Ranks alone compute whole images with the whole network. Parts of them take longer, and that is no exchange.
    sharing = max(0.0, exposed - now.waits.get("reduce", 0.0)) if strategy in SHARING else 0.0
    exposed -= sharing
    more = [
        StageCeiling(
            stage="slow rank",
            side="loop",
            resource="links",
            seconds=steps.slow / base.batch,
            how=f"rank {slowest} takes {max(steps.alone) / steps.middle:.2f} times as long for a step as the median "
            "rank",
        ),
        StageCeiling(
            stage="reduce",
            side="loop",
            resource="links",
            seconds=exposed / base.batch,
            how=_describe_exchange(exposed, alone),
        ),
    ]
    if exchanges:
        seconds, how = inside / base.batch, _describe_waits(exchanges, steps.step)
        more.append(StageCeiling(stage="exchange", side="loop", resource="links", seconds=seconds, how=how))
    if sharing:
        how = "extra time of a step of all ranks that is spent in no exchange"
        seconds = sharing / base.batch
        more.append(StageCeiling(stage="sharing", side="loop", resource="device", seconds=seconds, how=how))
    ceilings = (*base.ceilings, *more)
    model = ThroughputModel.from_ceilings(ceilings, base.together)
    predicted, steady = count * model.predict_images_s(), count * model.predict_images_s(stalls=False)
    runs = [one for one in base.runs if one.name == "synthetic"]
    note = "all ranks, with ready batches"
    runs.append(ShortRun(name="replay", steps=now.steps, images_s=now.rate, predicted=None, wait_share=None, note=note))
    note = "the whole job on all ranks, files in memory, without stalls"
    warm = ShortRun(name="warm", steps=whole.steps, images_s=whole.rate, predicted=steady, wait_share=None, note=note)
    measured = 1 / (1 / whole.rate.value + model.sum_seconds("stall") / count)
    facts = base.facts | {f"rank {rank} seconds a step": seconds for rank, seconds in enumerate(steps.alone)}
    facts["exchange seconds a step"] = exposed
    facts |= {f"waiting for {name}, seconds a step": seconds for name, seconds in exchanges.items()}
    if alone is not None:
        facts["exchange alone seconds a step"] = alone.seconds
        facts["exchange bytes a step"] = float(alone.bytes)
        facts["exchange bytes/s"] = alone.bytes / alone.seconds
        facts["exchange latency seconds"] = alone.latency_s
    knobs = [_scale_knob(one, model, count) for one in base.knobs]
    knobs += _suggest_half_bytes(model, count) if between and exposed else []
    knobs += [
        knob for one in others if (knob := _build_comm_knob(one, model, count, steps.step / base.batch)).gain >= GAIN
    ]
    if strategy == "spatial":
        knobs.append(_suggest_data_parallel(model, count))
    if single:
        facts["one process images/s"] = single
        alone_s = 1 / (1 / single + model.sum_seconds("stall"))
        if alone_s > predicted:
            knobs.append(_suggest_one_process(alone_s, predicted))
    # The laps of one rank say nothing about all ranks, so none are given.
    verdict = conclude_verdict(model, device, warm, (), ceilings)
    if verdict.stage in ("exchange", "sharing"):
        sentence = f"{verdict.sentence} To have less of it: {_list_cures(strategy)}."
        verdict = verdict.model_copy(update={"sentence": sentence})
    return base.model_copy(
        update={
            "ranks": count,
            "ceilings": ceilings,
            "facts": facts,
            "runs": (*runs, warm),
            "predicted": predicted,
            "measured": measured,
            "verdict": verdict,
            "knobs": tuple(sorted(knobs, key=lambda one: -one.images_s)),
        }
    )


def _describe_exchange(exposed: float, alone: ExchangeMeasurement | None) -> str:
    """Describes how long the exchange is, and which part of it is exposed."""
    what = "extra time of a step of all ranks over the slowest rank alone"
    if alone is None:
        return what
    sums = f"{format_bytes(alone.bytes)} in {pluralise(alone.buckets, 'bucket')}"
    raw, here = f"{alone.seconds * 1e3:.3g} ms", f"{exposed * 1e3:.3g} ms"
    if exposed <= alone.seconds:
        return f"{what}: {here} of {raw} are exposed ({sums}, most by {alone.algorithm})"
    return f"{what}: {here}; the exchange alone takes {raw} ({sums}, most by {alone.algorithm}), the rest is waiting"


def _describe_waits(exchanges: Mapping[str, float], step: float) -> str:
    """Describes what a step waits for inside of the network."""
    parts = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in exchanges.items())
    share = sum(exchanges.values()) / step
    return f"{share:.0%} of a step, on the rank that waits least: {parts}"


def _list_cures(strategy: str) -> str:
    """Lists what makes the exchange of a strategy, or its share of a step, less."""
    cures = ["a larger batch", *(["parallel.until"] if strategy == "spatial" else []), "fewer processes"]
    return ", ".join(cures) + (" or parallel={strategy: data}" if strategy in SHARING else "")


def _scale_knob(knob: Knob, model: ThroughputModel, count: int) -> Knob:
    """Scales a knob that was tried on one rank's part to all ranks: it saves the same time of a sample, and no more."""
    now = 1 / model.predict_images_s()
    saved = (1 - 1 / knob.gain) * min(now, 1 / (knob.images_s / knob.gain))
    predicted = 1 / (now - saved)
    changed: dict[str, Any] = {"images_s": count * predicted, "gain": predicted * now}
    if knob.override.startswith("batch="):
        batch = int(knob.override.removeprefix("batch=")) * count
        changed["override"] = f"batch={batch}"
    return knob.model_copy(update=changed)


def _suggest_one_process(images_s: float, predicted: float) -> Knob:
    """Suggests one process: more are not always faster, on shared cores or with an exchange that costs more than it
    saves."""
    return Knob(
        name="one process: leave --procs and --hosts out",
        cures="reduce",
        override="",
        images_s=images_s,
        gain=images_s / predicted,
        measured=True,
        exact=True,
        cost="batch norm sees the whole batch",
    )


def _suggest_data_parallel(model: ThroughputModel, count: int) -> Knob:
    """Suggests that each rank has whole images of its own: as many gradients are summed, and nothing else."""
    predicted = model.with_seconds({"exchange": 0.0, "sharing": 0.0}).predict_images_s()
    return Knob(
        name="data parallel: no image is shared",
        cures="exchange",
        override="parallel={strategy: data}",
        images_s=count * predicted,
        gain=predicted / model.predict_images_s(),
        measured=False,
        exact=False,
        cost="each process keeps the maps of whole images, and batch norm sees its own images alone",
    )


def _build_comm_knob(tried: CommTrial, model: ThroughputModel, count: int, a_sample: float) -> Knob:
    """Builds a knob from a trial: it takes from the exchange the time that it saved of a step, at most all of it."""
    reduce = model.seconds["loop"]["reduce"]
    changed = model.with_seconds({"reduce": max(0.0, reduce - a_sample * (1 - 1 / tried.gain))})
    predicted = changed.predict_images_s()
    return Knob(
        name=tried.name,
        cures="reduce",
        override=tried.override,
        images_s=count * predicted,
        gain=predicted / model.predict_images_s(),
        measured=True,
        exact=True,
        cost="",
    )


def _suggest_half_bytes(model: ThroughputModel, count: int) -> list[Knob]:
    """Suggests fp16 on the wire: half the bytes take half the time if bandwidth, and not latency, limits."""
    seconds = model.seconds["loop"]["reduce"]
    changed = model.with_seconds({"reduce": seconds / 2})
    predicted = changed.predict_images_s()
    return [
        Knob(
            name="half the bytes between hosts",
            cures="reduce",
            override="comm.wire=fp16",
            images_s=count * predicted,
            gain=predicted / model.predict_images_s(),
            measured=False,
            exact=False,
            cost=NARROW_COST,
        )
    ]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
