"""Examines a recipe: measures its stages one by one, predicts the whole job from them, runs it, and names the limit."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, final

import numpy as np
import torch

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import UsageError
from headway.core.profile import PipelineSide, Profile, ShortRun, StageCeiling, StageResource, ThreadScaling
from headway.core.run_folder import collect_provenance
from headway.core.text_format import pluralise
from headway.data.augment_recipe import AugmentPlace
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.tiers.remote_dataset import RemoteShards
from headway.doctor import environment, storage
from headway.doctor.batch_reduction import open_reduced_job
from headway.doctor.budget import FULL, LOOK_SHARE, QUICK, Budget, WallTime
from headway.doctor.contention import add_handover, measure_contention, measure_handover
from headway.doctor.device_copy import measure_copy
from headway.doctor.input_transform import find_transform_lines
from headway.doctor.knob_search import KnobSearch
from headway.doctor.loader_measurement import (
    LoaderMeasurement,
    measure_augmentation,
    measure_by_threads,
    measure_loader,
)
from headway.doctor.loop_measurement import LoopMeasurement, measure_loop
from headway.doctor.measurement_job import LOG, MeasurementJob
from headway.doctor.page_cache import evict, restore_residency
from headway.doctor.roofline import measure_roofline
from headway.doctor.stalls import measure_checkpoint, measure_evaluation
from headway.doctor.throughput_model import ThroughputModel
from headway.doctor.verdict import AUGMENT_NOTE, conclude_verdict
from headway.doctor.whole_job import MOST_STEPS, WholeJobRun, run_whole_job
from headway.observe.host_load import OtherLoadMeter
from headway.setup.augment_place import has_place
from headway.setup.train_setup import TrainSetup
from headway.training.runs import load_recipe

# Least number of steps of a short run and of a first-epoch run; if they do not fit into the time, the run is left out.
RUN_STEPS, COLD_STEPS = 3, 3
WANTING = "no time left"
# Notes on runs without a loader.
NOTES = {
    "synthetic": "the loop, with noise images",
    "replay": "the loop, with ready batches",
}
# Lines of the user's that a row of the table names.
NAMED = 3

RESOURCES: dict[str, StageResource] = {
    "storage": "disk",
    "decode": "host",
    "augment": "host",
    "transform": "host",
    "collate": "host",
    "copy": "copy",
}


def examine_recipe(
    recipe: Path, overrides: Sequence[str], *, quick: bool = False, cold: bool = False, begun: float | None = None
) -> Profile:
    """Measures a recipe on this machine, in this process.

    Args:
        cold: conclude on the first epoch, whose files are read from the disk, instead of the later ones.
        begun: the time of `perf_counter` from which the limit of wall time counts; None: now.

    Raises:
        HeadwayError: recipe, data, network or task are wrong. UsageError: `cold`, and the first epoch is like the
            others.
    """
    begun = perf_counter() if begun is None else begun
    budget = QUICK if quick else FULL
    with open_reduced_job(load_recipe(recipe, overrides), budget.step) as job:
        profile = examine_job(job, budget, quick, cold=cold, begun=begun)
    return profile.model_copy(update={"seconds": perf_counter() - begun})


def examine_job(
    job: MeasurementJob,
    budget: Budget,
    quick: bool,
    *,
    cold: bool = False,
    barrier: Callable[[], object] | None = None,
    begun: float | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Profile:
    """Measures a job that is set up already.

    Args:
        barrier: waits for other processes that measure the same; called before each part.
        begun: the clock's time from which the limit of wall time counts; None: now.
    """
    wall = WallTime(budget.wall, budget.list_parts(), clock() if begun is None else begun, clock)
    return _Examination(job, budget, wall, quick, cold, barrier).measure()


@final
class _Examination:
    def __init__(
        self,
        job: MeasurementJob,
        budget: Budget,
        wall: WallTime,
        quick: bool,
        cold: bool,
        barrier: Callable[[], object] | None,
    ) -> None:
        self._wall = wall
        self._barrier, self._others = barrier or (lambda: None), barrier is not None
        self._job, self._budget, self._quick, self._cold = job, budget, quick, cold
        self._missing = [job.batch_note] if job.batch_note else []
        self._facts: dict[str, float] = {}
        self._runs = list[ShortRun]()
        # Seconds of a sample that the loop loses by taking batches from the loader's thread.
        self._handed_s = 0.0
        self._step_s = 0.0

    def measure(self) -> Profile:
        """Measures all parts and builds the profile."""
        job, budget, setup, begun = self._job, self._budget, self._job.setup, perf_counter()
        other_load = OtherLoadMeter()
        # Before the first measurement: reading the first batches pays for opening files and the decoder.
        job.load_batches()
        if self._cold and (reason := self._explain_no_cold_epoch()):
            fix = "Leave --cold out: all epochs take the same time."
            raise UsageError(f"the first epoch does not differ from the others: {reason}", where="--cold", fix=fix)
        self._barrier()
        fed_warm, threads = self._measure_input()
        self._barrier()
        # The loop must not wait for input here: batches are replayed from memory.
        LOG.info("Measuring the training loop with ready batches.")
        loop = measure_loop(job, limit_s=self._allot("loop") / (1 + LOOK_SHARE), passes_s=self._allot("passes"))
        self._facts["syncs a step"] = loop.syncs.count
        height, width = job.load_batches()[0].images.shape[1:3]
        self._facts |= {"height": float(height), "width": float(width), **measure_roofline(job)}
        together = None
        if fed_warm is not None:
            self._barrier()
            # Loader and loop share cores, so each is measured again while the other one runs.
            LOG.info("Measuring loader and loop at the same time.")
            together = measure_contention(
                job, 1 / fed_warm.rate.value, 1 / loop.rate.value, limit_s=self._allot("beside")
            )
            self._handed_s = measure_handover(job, 1 / loop.rate.value, limit_s=self._allot("handover"))
            together = add_handover(together, self._handed_s)
        is_beside = fed_warm is not None and "transform" in fed_warm.seconds
        ceilings = [
            *self._measure_input_ceilings(fed_warm),
            *_build_loop_ceilings(
                loop,
                self._handed_s,
                has_transform=not is_beside or job.setup.transform is not None,
                augments=_augments_batches(setup),
            ),
            *self._measure_stalls(),
        ]
        warm = ThroughputModel.from_ceilings(ceilings, together)
        self._barrier()
        LOG.info("Running the whole job for a few steps.")
        self._ran = self._run_whole_job(warm)
        model, ceilings = self._measure_first_epoch(warm, ceilings)
        measured = self._find_run("cold" if self._cold else "warm")
        device = setup.device.type
        concluded = conclude_verdict(model, device, measured, _build_lap_ceilings(self._ran), ceilings)
        LOG.info("Trying other settings.")
        knobs = KnobSearch(job, model, together, fed_warm, threads, loop, budget.side, self._allot("tries"))
        candidates = knobs.search(setup.device, quick=self._quick)
        self._missing += knobs.missing
        stalls = model.sum_seconds("stall")
        # Short runs have no evaluations and checkpoints: the time that these add is computed.
        whole = None
        if measured is not None and measured.images_s is not None:
            whole = 1 / (1 / measured.images_s.value + stalls)
        return Profile(
            name=job.loaded.recipe.name,
            quick=self._quick,
            machine=describe_machine(setup.device),
            environment=environment.examine_environment(job.loaded.recipe, setup.device, setup.train),
            batch=job.batch,
            ranks=1,
            regime="first epoch" if self._cold else "later epochs",
            ceilings=tuple(ceilings),
            together=together,
            threads=threads,
            launch={str(count): seconds for count, seconds in loop.launch.items()},
            multiply_adds=None if setup.counts is None else setup.counts.multiply_adds,
            facts=self._facts,
            predicted=model.predict_images_s(),
            measured=whole,
            runs=tuple(self._runs),
            verdict=concluded,
            knobs=tuple(candidates),
            augment_where=find_augment_place(setup),
            not_measured=tuple(self._missing),
            seconds=perf_counter() - begun,
            other_load=other_load.read_share(),
        )

    def _measure_input(self) -> tuple[LoaderMeasurement | None, ThreadScaling | None]:
        """Measures the loader alone, and with other thread counts; None for synthetic data."""
        job = self._job
        if job.is_synthetic:
            self._missing.append("The data are synthetic: there is no loader to measure.")
            return None, None
        LOG.info("Measuring the loader alone.")
        loader = measure_loader(job, limit_s=self._allot("loader") / 1.2)
        self._facts["encoded bytes"] = loader.record_bytes
        if (stage_s := loader.seconds.get("transform", 0.0)) > 0:
            LOG.info("Finding the lines of your transform that take its time.")
            code = find_transform_lines(job, stage_s=stage_s, limit_s=self._budget.side / 2)
            loader = replace(loader, code=code)
        most = count_usable_cores()
        LOG.info("Measuring the loader with other numbers of threads.")
        return loader, measure_by_threads(job, loader, most, limit_s=self._allot("threads") / 2)

    def _measure_input_ceilings(self, measured: LoaderMeasurement | None) -> list[StageCeiling]:
        """Divides the loader's time among its stages."""
        if measured is None:
            return []
        job, seconds = self._job, dict(measured.seconds)
        taken = measure_augmentation(job, measured, limit_s=self._allot("augment"))
        # Augmentation happens while decoding, and the copy while collating: their shares are moved.
        seconds["decode"] -= taken
        seconds["augment"] = taken
        tier = job.setup.inputs.loader.tier if job.setup.inputs.loader is not None else None
        # Stays None if the set lies on the device already.
        copied = None
        if tier is None or tier.name != "device":
            copied = measure_copy(job.load_batches()[0], job.setup.device, limit_s=self._allot("copy"))
        seconds["copy"] = min(copied or 0.0, seconds["collate"])
        seconds["collate"] -= seconds["copy"]
        decoding = "gathering decoded images" if tier is not None and tier.name in ("memory", "device") else "decoding"
        how = {
            "storage": "reading or fetching the records, files in memory",
            "decode": f"{decoding}, {pluralise(measured.threads, 'thread')}",
            "augment": "with crop, flip and shift, minus without them",
            "collate": "order, keys, labels, hand-over to the loop",
        }
        if copied is not None:
            how["copy"] = "pinned memory to the device, on its own stream"
        code = {"transform": measured.code}
        if "transform" in seconds:
            how["transform"] = "; ".join(["the recipe's transform, beside the loop", *map(str, measured.code[:NAMED])])
        return [
            StageCeiling(
                stage=stage,
                side="input",
                resource=RESOURCES[stage],
                seconds=max(0.0, seconds[stage]),
                how=text,
                code=code.get(stage, ()),
            )
            for stage, text in how.items()
        ]

    def _measure_stalls(self) -> list[StageCeiling]:
        measured = dict[str, Any]()
        measured["evaluate"] = measure_evaluation(self._job, limit_s=self._allot("evaluate"))
        measured["checkpoint"] = measure_checkpoint(self._job, limit_s=self._allot("checkpoint"))
        out = []
        for stage, stall in measured.items():
            how = "there is no evaluation set"
            if stall is not None:
                self._facts[f"{stage} seconds"] = stall.once_s
                how = f"{stall.once_s:.3g} s every {stall.every:,.0f} images: {stall.how}"
            seconds = 0.0 if stall is None else stall.seconds
            out.append(StageCeiling(stage=stage, side="stall", resource="stall", seconds=seconds, how=how))
        return out

    def _run_whole_job(self, model: ThroughputModel) -> WholeJobRun:
        """Runs the loop on noise and on replayed batches, and the whole job with files in memory."""
        job, loop = self._job, 1 / (model.sum_seconds("loop") - self._handed_s)
        self._step_s = job.batch / loop
        whole_s = RUN_STEPS * self._step_s
        for name, batches in (("synthetic", job.make_noise), ("replay", job.load_batches)):
            if not self._wall.fits(whole_s, keeps_s=whole_s):
                self._add_run(name, None, None, WANTING)
                continue
            self._add_run(name, run_whole_job(job, limit_s=self._allot(name), batches=batches()), loop, NOTES[name])
        ran = run_whole_job(job, limit_s=self._allot("whole"))
        note = f"the whole job, {'synthetic data' if job.is_synthetic else 'files in memory'}, without stalls"
        self._add_run("warm", ran, model.predict_images_s(stalls=False), note)
        return ran

    def _allot(self, part: str) -> float:
        """Returns the seconds that a part may take of the wall time that is left."""
        return self._wall.allot(part)

    def _add_run(self, name: Any, ran: WholeJobRun | None, predicted: float | None, note: str) -> None:
        steps, rate, wait = (0, None, None) if ran is None else (ran.steps, ran.rate, ran.wait_share)
        self._runs.append(
            ShortRun(name=name, steps=steps, images_s=rate, predicted=predicted, wait_share=wait, note=note)
        )

    def _find_run(self, name: str) -> ShortRun | None:
        return next((one for one in self._runs if one.name == name), None)

    def _measure_first_epoch(
        self, model: ThroughputModel, ceilings: list[StageCeiling]
    ) -> tuple[ThroughputModel, list[StageCeiling]]:
        """Runs the first epoch with cold files; returns the model and ceilings to conclude on, changed only with
        `--cold`."""
        job, budget, dataset = self._job, self._budget, self._job.setup.train
        reason = self._explain_no_cold_epoch()
        if not reason and self._others:
            # Evicting the files would take them from the other ranks as well.
            reason = "only one process alone can measure it: run headway doctor without --procs and --hosts"
            self._missing.append(f"The first epoch: {reason}.")
        # Without --cold the first epoch is only a side result, so it must fit into the time left.
        if not reason and not self._cold and not self._wall.fits(COLD_STEPS * self._step_s):
            reason = WANTING
        if reason or dataset is None:
            if dataset is not None and isinstance(dataset.source, RemoteShards):
                self._measure_storage(dataset, Order(len(dataset), job.setup.recipe.seed, job.setup.recipe.data.window))
            self._add_run("cold", None, None, reason or "the data are synthetic")
            return model, ceilings
        recipe = job.setup.recipe
        # The order of the run itself, so that exactly the records are evicted that its first steps read.
        order = Order(len(dataset), recipe.seed, recipe.data.window)
        most = min(len(dataset), (MOST_STEPS + recipe.data.prefetch_batches + 2) * job.batch)
        spans = storage.build_span_finder(dataset)(order(np.arange(most))[1])
        self._measure_storage(dataset, order)
        with restore_residency(spans):
            evicted = evict(spans)
            if not evicted.held:
                self._missing.append(f"The first epoch: {evicted.note}")
            # Each record is read cold only once, so the loader gets as many batches as fit into the time.
            count = 2 + round(budget.side / max(model.sum_seconds("input") * job.batch, 1e-6))
            alone = measure_loader(job, limit_s=budget.side, batches=min(count, MOST_STEPS))
            # Again, because measuring the loader has brought the records back into memory.
            evicted = evict(spans)
            ran = run_whole_job(job, limit_s=budget.whole / 2, once=True)
        # Noise can make the cold loader the faster one, and a stage cannot take less than no time.
        extra = max(0.0, 1 / alone.rate.value - model.sum_seconds("input"))
        first = model.with_seconds({"storage": model.seconds["input"]["storage"] + extra})
        state = "files from the disk" if evicted.held else "files as they lay"
        note = f"the whole job in its first epoch, {state}, without stalls"
        self._add_run("cold", ran, first.predict_images_s(stalls=False), note)
        if not self._cold:
            return model, ceilings
        self._ran = ran
        how = f"{state}: time that the loader takes longer than with files in memory"
        changed = {"seconds": first.seconds["input"]["storage"], "how": how}
        return first, [one.model_copy(update=changed) if one.stage == "storage" else one for one in ceilings]

    def _measure_storage(self, dataset: Dataset, order: Order) -> None:
        """Measures reading the records alone, without decoding."""
        threads, seconds = self._job.setup.recipe.data.threads, self._budget.side
        for cold in (True,) if isinstance(dataset.source, RemoteShards) else (True, False):
            rate = storage.measure_storage(dataset, order, self._job.batch, cold=cold, seconds=seconds, threads=threads)
            which = "cold" if cold else "warm"
            if rate.cold == cold:
                self._facts[f"storage {which} images/s"] = rate.images_s.value
                self._facts[f"storage {which} bytes/s"] = rate.bytes_s
            else:
                self._missing.append(f"Storage, {which}: {rate.note}")

    def _explain_no_cold_epoch(self) -> str:
        """Returns why the first epoch is like the others; empty: it differs."""
        job = self._job
        if job.is_synthetic:
            return "the data are synthetic"
        loader = job.setup.inputs.loader
        assert loader is not None
        name = loader.tier.name
        if name in ("memory", "device"):
            return (
                f"the whole set is loaded into {'memory' if name == 'memory' else 'the device'} before the first step"
            )
        if not storage.list_files(job.setup.inputs.train):  # type: ignore[arg-type]
            return "the data are remote, and are measured as they arrive"
        return ""


# How each stage of the loop was measured, for the table.
LOOP_STAGES = {
    "normalise": AUGMENT_NOTE,
    "transform": "the recipe's transform, timed in turns with normalising",
    "launch": "forward and backward: fixed time, by a line through two batch sizes",
    "compute": "forward and backward: the rest",
    "python": "Python and NumPy in the recipe's own code",
    "sync": "host-device syncs",
    "sleep": "sleeping, or waiting for something outside, in the recipe's own code",
    "lock": "waiting for locks in the recipe's own code",
    "file": "reading and writing files in the recipe's own code",
    "gc": "garbage collection",
    "optimizer": "the optimizer's step",
    "log": "records and the progress display",
    "other": "the rest of the loop, and taking batches from the loader's thread",
}


def _build_loop_ceilings(
    loop: LoopMeasurement, handed_s: float, *, has_transform: bool, augments: bool
) -> list[StageCeiling]:
    """Builds the ceilings of the loop, one for each stage.

    Args:
        has_transform: the loop runs a transform, or nothing does.
        augments: the loop augments batches.
    """
    how = LOOP_STAGES | {"sync": f"{loop.syncs.count:.3g} reads of tensor values per step"}
    if not augments:
        how["normalise"] = "normalising a batch"
    seconds = {**loop.seconds, "other": loop.seconds["other"] + handed_s}
    side: PipelineSide = "loop"
    ceilings = []
    for stage, text in how.items():
        if stage == "transform" and not has_transform:
            continue
        lines = loop.code.get(stage, ())
        note = "; ".join([text, *map(str, lines[:NAMED])])
        one = StageCeiling(stage=stage, side=side, resource="device", seconds=seconds[stage], how=note, code=lines)
        ceilings.append(one)
    return ceilings


def find_augment_place(setup: TrainSetup) -> AugmentPlace | None:
    """Returns the place of crop, flip and translate; None if the run has none of them."""
    where = setup.recipe.augment.where
    return None if setup.train is None or where == "auto" or not has_place(setup.recipe) else where


def _augments_batches(setup: TrainSetup) -> bool:
    """Returns True if the recipe augments batches in the loop, in more than the user's transform."""
    return setup.augment.needs_keys or setup.augment.needs_epochs


def _build_lap_ceilings(ran: WholeJobRun) -> list[StageCeiling]:
    """Returns the loop's stages as they were during a run."""
    laps = ran.laps
    # The trainer's laps keep forward, loss and backward apart; the measured stage holds all three.
    both = sum(laps.get(name, 0.0) for name in ("forward", "loss", "backward"))
    stages = {"transform": laps.get("augment", 0.0), "compute": both, "optimizer": laps.get("optimizer", 0.0)}
    return [
        StageCeiling(stage=stage, side="loop", resource="device", seconds=seconds, how="in the whole job")
        for stage, seconds in stages.items()
    ]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns processor, cores, memory, device and versions."""
    provenance = collect_provenance({}, Path.cwd())
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    more = {"usable_cores": count_usable_cores(), "torch_threads": torch.get_num_threads(), "device": named}
    return {**provenance["host"], **provenance["versions"], "python": platform.python_version(), **more}
