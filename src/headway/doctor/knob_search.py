"""Tries other settings of a recipe, and predicts the gain of each from the stage measured with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Any, final

import torch

from headway.core.errors import HeadwayError
from headway.core.messages import mute_messages
from headway.core.profile import JointTiming, Knob, ThreadScaling
from headway.core.text_format import pluralise
from headway.data.batch import Batch
from headway.data.columns import FLAG_RAW, PACK_FORMATS
from headway.data.pack_mode import PackMode
from headway.doctor.contention import add_handover, measure_contention, measure_handover
from headway.doctor.loader_measurement import LoaderMeasurement, measure_loader
from headway.doctor.loop_measurement import LONG_STEP_S, LoopMeasurement, measure_loop_rate
from headway.doctor.measurement_job import LOG, MeasurementJob, format_override
from headway.doctor.memory_cache_estimate import fits_in_memory, fits_on_device, measure_memory_loader
from headway.doctor.pack_estimate import (
    FirstRecords,
    build_pack_command,
    choose_smaller_mode,
    fits_in_disk_cache,
    list_lossless_modes,
)
from headway.doctor.smaller_images import choose_smaller_side, shrink_batch
from headway.doctor.stalls import measure_checkpoint
from headway.doctor.throughput_model import ThroughputModel
from headway.model.graph_breaks import collect_break_notes, list_graph_breaks
from headway.model.winograd import can_use_winograd
from headway.setup.precision import list_candidates

# Smaller gains are noise.
WORTH = 1.01
# If removing a whole side gives less than this, no knob of that side is measured.
SIDE_WORTH = 1.02
# Evaluations and checkpoints are made this many times less often.
LATER = 4
# Factor of the batch.
LARGER = 4
# Steps by which a changed loop is measured if steps are long.
TRIED_STEPS = 5
# Seconds that must be left to try a compiler.
LONG_S = 20.0

# What each knob costs, shown to the user behind "It costs:".
BATCH_COST = "other learning rates, and maybe less accuracy: see docs/large-batches.md"
BF16_COST = "8 bits of precision in forward and backward; parameters stay fp32"
FP16_COST = "11 bits of precision in forward and backward, and a scaled loss; parameters stay fp32"
FP32_COST = "memory: activations take 32 bits"
EVALUATE_COST = "fewer evaluations from which the best weights are chosen"
PACK_COST = "disk space for a copy of the set, whose samples then come in another order"
WINOGRAD_COST = "rounding: a relative error of up to 7e-5 in 3x3 convolutions"
PIXELS_COST = "other pixels: compare the accuracy"
CODE_COST = "a change of your own code; the gain is an upper bound, as if this line took no time"
COMPILE_COST = "the first step takes longer, for the compilation"

CHECKPOINT_COST = "more steps lost in a crash"


@final
class KnobSearch:
    """Searches for settings that make a recipe faster. `missing` lists settings that were not tried, with the
    reason."""

    def __init__(
        self,
        job: MeasurementJob,
        model: ThroughputModel,
        together: JointTiming | None,
        loader: LoaderMeasurement | None,
        threads: ThreadScaling | None,
        loop: LoopMeasurement,
        side_s: float,
        tries_s: float,
    ) -> None:
        self._job, self._model, self._together, self._loader, self._threads = job, model, together, loader, threads
        self._loop, self._side_s = loop, side_s
        self._until = perf_counter() + tries_s
        step_s = job.batch / loop.rate.value
        # Least time of a trial once it has begun.
        self._least_s = TRIED_STEPS * step_s if step_s > LONG_STEP_S else 0.0
        read = 0.0 if loader is None else loader.seconds["storage"]
        # Extra seconds to read a sample in the first epoch; 0 unless the first epoch is examined.
        self._cold_s = max(0.0, model.seconds["input"].get("storage", 0.0) - read)
        self.missing = list[str]()

    def search(self, device: torch.device, *, quick: bool) -> list[Knob]:
        """Returns the knobs that help, the best first."""
        out = list[Knob]()
        sides: dict[str, list[Callable[[], Iterator[Knob]]]] = {
            "input": [self._suggest_input, lambda: self._suggest_caches(device), self._suggest_packs],
            "loop": [lambda: self._suggest_augmentation_place(device), lambda: self._suggest_loop(device)],
        }
        # The side that limits comes first, in case the time runs out.
        first = sorted(sides, key=lambda side: -self._compute_gain_without(*self._model.seconds[side]))
        makers = [
            self._suggest_own_code,
            self._suggest_stalls,
            *(make for side in first for make in sides[side]),
            self._suggest_smaller_images,
        ]
        if not quick:
            # Compilation takes longer than all other trials, so it comes last.
            makers.append(self._suggest_compile)
        for make in makers:
            try:
                for knob in make():
                    out.append(knob)
            except HeadwayError as error:
                # Data or the network do not support the setting.
                self.missing.append(f"A setting: {error}")
        worth = [one for one in out if one.gain >= WORTH]
        return sorted(worth, key=lambda one: -one.images_s)

    def _build_knob(
        self,
        name: str,
        cures: str,
        changes: Mapping[str, Any],
        model: ThroughputModel,
        *,
        measured: bool,
        cost: str = "",
        exact: bool = True,
        command: str = "",
    ) -> Knob:
        predicted, now = model.predict_images_s(), self._model.predict_images_s()
        return Knob(
            name=name,
            cures=cures,
            override=command or format_override(changes),
            images_s=predicted,
            gain=predicted / now,
            measured=measured,
            exact=exact,
            cost=cost,
        )

    def _is_worth_trying(self, side: str) -> bool:
        return self._compute_gain_without(*self._model.seconds[side]) >= SIDE_WORTH

    def _compute_gain_without(self, *stages: str) -> float:
        """Returns the speed-up if these stages took no time."""
        return self._model.with_seconds(dict.fromkeys(stages, 0.0)).predict_images_s() / self._model.predict_images_s()

    def _is_out_of_time(self, what: str, needs_s: float = 0.0) -> bool:
        if perf_counter() + max(needs_s, self._least_s) < self._until:
            return False
        self.missing.append(f"{what}: not tried, no time left.")
        return True

    def _suggest_own_code(self) -> Iterator[Knob]:
        """Computes the gain if the longest line of a stage took no time; no setting of the recipe does that."""
        of_input = {"transform": self._loader.code} if self._loader is not None and self._loader.code else {}
        for stage, (line, *_) in [*self._loop.code.items(), *of_input.items()]:
            changed = self._model.with_less(stage, line.seconds)
            yield self._build_knob(str(line), stage, {}, changed, measured=False, cost=CODE_COST)

    def _suggest_stalls(self) -> Iterator[Knob]:
        """Computes the gain of rarer evaluations and checkpoints, and measures asynchronous checkpoints."""
        recipe, model, stalls = self._job.loaded.recipe, self._model, self._model.seconds["stall"]
        if stalls.get("evaluate", 0.0) > 0:
            changed = model.with_seconds({"evaluate": stalls["evaluate"] / LATER})
            changes = {"evaluate.every_epochs": LATER * recipe.evaluate.every_epochs}
            yield self._build_knob(
                "rarer evaluations", "evaluate", changes, changed, measured=False, cost=EVALUATE_COST
            )
        taken = stalls.get("checkpoint", 0.0)
        if taken <= 0 or not self._is_worth_trying("stall"):
            return
        options = recipe.checkpoint
        changed = model.with_seconds({"checkpoint": taken / LATER})
        if options.every_steps is None:
            changes = {"checkpoint.every_epochs": LATER * options.every_epochs}
        else:
            changes = {"checkpoint.every_steps": LATER * options.every_steps}
        yield self._build_knob(
            "rarer checkpoints", "checkpoint", changes, changed, measured=False, cost=CHECKPOINT_COST
        )
        if not options.asynchronous and not self._is_out_of_time("checkpoint.asynchronous"):
            part = options.model_copy(update={"asynchronous": True})
            loaded = replace(self._job.loaded, recipe=recipe.model_copy(update={"checkpoint": part}))
            other = MeasurementJob(loaded, self._job.setup)
            other.replace_batches(self._job.load_batches())
            changed = model.with_seconds({"checkpoint": measure_checkpoint(other, limit_s=self._side_s).seconds})
            changes = {"checkpoint.asynchronous": True}
            cost = "memory for a copy of the state"
            yield self._build_knob("asynchronous checkpoints", "checkpoint", changes, changed, measured=True, cost=cost)

    def _suggest_input(self) -> Iterator[Knob]:
        """Measures loaders with other threads, caches and decoders."""
        job, loader = self._job, self._loader
        if loader is None or not self._is_worth_trying("input"):
            return
        yield from self._suggest_threads(loader)
        train, options = job.setup.inputs.train, job.setup.recipe.data
        assert train is not None
        # A cache is filled from the same storage before the first step, so it does not help the first epoch.
        if (
            options.cache in ("none", "disk")
            and not self._cold_s
            and fits_in_memory(job)
            and not self._is_out_of_time("data.cache=memory")
        ):
            changed = self._replace_input(measure_memory_loader(job, limit_s=self._side_s), loader)
            cost = "memory for the decoded set, which is filled before the first step"
            changes = {"data.cache": "memory"}
            yield self._build_knob("decoded images in memory", "decode", changes, changed, measured=True, cost=cost)
        encoded = not bool((train.flags & FLAG_RAW).any())
        if encoded and not options.scaled and options.cache in ("none", "disk") and options.size is not None:
            other = measure_loader(job, limit_s=self._side_s, scaled=True)
            cost = "slightly different pixels"
            changed = self._replace_input(other, loader)
            scaled = {"data.scaled": True}
            yield self._build_knob("smaller decodes", "decode", scaled, changed, measured=True, exact=False, cost=cost)
        if options.decoder == "pillow":
            other = measure_loader(job, limit_s=self._side_s, backend="native")
            changed = self._replace_input(other, loader)
            changes = {"data.decoder": "native"}
            cost = "pixels that differ by 1 at most, by rounding"
            yield self._build_knob("the native core", "decode", changes, changed, measured=True, cost=cost)

    def _suggest_threads(self, loader: LoaderMeasurement) -> Iterator[Knob]:
        """Measures loader and loop at the same time for thread counts that made the loader alone faster."""
        threads = self._threads
        if threads is None:
            return
        for count, rate in zip(threads.threads, threads.images_s, strict=True):
            if count == loader.threads or rate <= loader.rate.value:
                continue
            what = f"{count} decoding threads"
            if self._is_out_of_time(what):
                continue
            measured = measure_contention(
                self._job, 1 / rate, 1 / self._loop.rate.value, limit_s=self._side_s, threads=count
            )
            changed = self._scale_input(loader.rate.value / rate)
            changed = changed.with_contention(measured)
            yield self._build_knob(what, "decode", {"data.threads": count}, changed, measured=True)

    def _scale_input(self, ratio: float, read: float = 1.0) -> ThroughputModel:
        """Scales the input's time. In the first epoch the extra time of the storage does not scale with `ratio`, but
        with the bytes that are read (`read` times as many)."""
        changed = {stage: seconds * ratio for stage, seconds in self._model.seconds["input"].items()}
        if self._cold_s:
            changed["storage"] += self._cold_s * (read - ratio)
        return self._model.with_seconds(changed)

    def _replace_input(self, other: LoaderMeasurement, loader: LoaderMeasurement) -> ThroughputModel:
        return self._scale_input(loader.rate.value / other.rate.value)

    def _suggest_caches(self, device: torch.device) -> Iterator[Knob]:
        """Computes the gain of caches that the first epoch fills and later epochs read."""
        job, loader, options = self._job, self._loader, self._job.setup.recipe.data
        if loader is None or self._cold_s or options.cache not in ("none", "disk", "memory"):
            return
        fetched = (
            options.cache == "none" and self._compute_gain_without("storage") >= SIDE_WORTH and fits_in_disk_cache(job)
        )
        if fetched and not self._is_out_of_time("data.cache=disk", 2 * self._side_s):
            near = FirstRecords(job).pack(PackMode(kind="keep"), limit_s=self._side_s)
            if near.count:
                seconds = {"storage": near.measure_loader(limit_s=self._side_s).seconds["storage"]}
                changes, changed = {"data.cache": "disk"}, self._model.with_seconds(seconds)
                cost = "space on the local disk; the first epoch is not faster"
                yield self._build_knob(
                    "records on the local disk", "storage", changes, changed, measured=False, cost=cost
                )
        if device.type == "cuda" and fits_on_device(job):
            gone = dict.fromkeys(("storage", "decode", "augment"), 0.0)
            changes, cost = {"data.cache": "device"}, "memory of the device for the decoded set"
            changed = self._model.with_seconds(gone)
            yield self._build_knob(
                "decoded images on the device", "decode", changes, changed, measured=False, cost=cost
            )

    def _suggest_packs(self) -> Iterator[Knob]:
        """Measures the loader over records as a pack would store them, made from the first records of the run."""
        job, loader, options = self._job, self._loader, self._job.setup.recipe.data
        if loader is None or options.cache not in ("none", "disk"):
            return
        stages = {"keep": ("storage", "collate")}
        modes = [
            mode
            for mode in (*list_lossless_modes(job), choose_smaller_mode(job))
            if mode and self._compute_gain_without(*stages.get(mode.kind, ("decode", "augment"))) >= SIDE_WORTH
        ]
        first, train, as_it_is = FirstRecords(job), job.setup.inputs.train, None
        assert train is not None
        for mode in modes:
            if self._is_out_of_time(f"headway pack --mode {mode}", 2 * self._side_s):
                continue
            LOG.info(f"Trying images as headway pack --mode {mode} would store them.")
            packed = first.pack(mode, limit_s=self._side_s)
            if not packed.count:
                continue
            other = packed.measure_loader(limit_s=self._side_s)
            if train.description.format in PACK_FORMATS:
                # A pack is compared with the same samples in the same place, unchanged.
                if as_it_is is None:
                    kept = first.pack(PackMode(kind="keep"), limit_s=self._side_s)
                    as_it_is = kept.measure_loader(limit_s=self._side_s)
                changed = self._replace_records(as_it_is, other)
            else:
                changed = self._replace_records(loader, other)
            exact = mode.kind != "encode"
            cost = PACK_COST if exact else f"{PIXELS_COST}; {PACK_COST}"
            name = {"keep": "a pack of the files", "seekable": "a seekable pack"}.get(
                mode.kind, f"images stored with a shorter side of {mode.side}"
            )
            command, cures = (
                build_pack_command(job, mode).format_command(job.loaded),
                "storage" if mode.kind == "keep" else "decode",
            )
            # The first epoch's time is computed from the bytes, not measured.
            tried = not self._cold_s
            yield self._build_knob(name, cures, {}, changed, measured=tried, exact=exact, cost=cost, command=command)

    def _replace_records(self, now: LoaderMeasurement, other: LoaderMeasurement) -> ThroughputModel:
        read = other.record_bytes / now.record_bytes if now.record_bytes else 1.0
        return self._scale_input(now.rate.value / other.rate.value, read)

    def _suggest_smaller_images(self) -> Iterator[Knob]:
        job, options = self._job, self._job.setup.recipe.data
        height, width = job.setup.inputs.size
        side = choose_smaller_side(height)
        if job.is_synthetic or height != width or side is None or options.progressive is not None:
            return
        if options.cache == "device":
            # Images on the device cannot be resized.
            return
        changes = {"data.size": side}
        text = format_override(changes)
        if self._is_out_of_time(text, 2 * self._side_s):
            return
        ratio = self._measure_ratio(text, changes, batches=[shrink_batch(batch, side) for batch in job.load_batches()])
        if ratio is None:
            return
        changed = self._model
        if self._loader is not None:
            changed = self._replace_input(measure_loader(job, limit_s=self._side_s, size=(side, side)), self._loader)
        changed = changed.with_seconds(self._scale_loop(ratio))
        cures = "decode" if self._model.sum_seconds("input") > self._model.sum_seconds("loop") else "compute"
        name = f"images of {side} pixels"
        yield self._build_knob(name, cures, changes, changed, measured=True, exact=False, cost=PIXELS_COST)

    def _suggest_loop(self, device: torch.device) -> Iterator[Knob]:
        if not self._is_worth_trying("loop"):
            return
        recipe, job = self._job.setup.recipe, self._job
        seconds = self._model.seconds["loop"]
        # These settings change forward and backward only: they need a tenth of the loop's time.
        heavy = seconds.get("compute", 0.0) + seconds.get("launch", 0.0)
        if heavy >= 0.1 * self._model.sum_seconds("loop"):
            best = [name for name in list_candidates(device) if name != "fp32"]
            if recipe.precision == "fp32" and best and not recipe.half_weights:
                cost = FP16_COST if best[0] == "fp16" else BF16_COST
                yield from self._try_loop(best[0], "compute", {"precision": best[0]}, exact=False, cost=cost)
            elif recipe.precision == "bf16" and not best and not recipe.half_weights:
                yield from self._try_loop("fp32", "compute", {"precision": "fp32"}, exact=False, cost=FP32_COST)
            other = not recipe.channels_last
            yield from self._try_loop(f"channels {'last' if other else 'first'}", "compute", {"channels_last": other})
            could_differ = device.type == "cpu" and recipe.precision == "fp32" and recipe.compile is False
            if could_differ and can_use_winograd(job.setup.model):
                yield from self._try_loop("Winograd's filtering", "compute", {"winograd": True}, cost=WINOGRAD_COST)
            if recipe.activation_checkpointing is not False:
                changes, cost = {"activation_checkpointing": False}, "memory for activations"
                yield from self._try_loop("no second forward pass", "compute", changes, cost=cost)
        # A larger batch spreads the fixed costs of a step over more samples.
        fixed = sum(seconds.get(one, 0.0) for one in ("launch", "optimizer", "other"))
        if fixed >= 0.1 * self._model.sum_seconds("loop") and recipe.batch_growth is None and not job.batch_note:
            yield from self._suggest_larger_batch(job.loaded.recipe.enlarge_batch(LARGER))
        log, every = seconds.get("log", 0.0), job.loaded.recipe.log_every_steps
        if every < 50 and log > 0:
            changed = self._model.with_seconds({"log": log * every / 50})
            yield self._build_knob("fewer records", "log", {"log_every_steps": 50}, changed, measured=False)

    def _suggest_larger_batch(self, changes: Mapping[str, Any]) -> Iterator[Knob]:
        text = format_override(changes)
        if self._is_out_of_time(text, 4 * self._side_s):
            return

        seen = list[tuple[LoaderMeasurement, JointTiming]]()

        def measure_input(other: MeasurementJob, rate: float) -> None:
            loader = self._job.setup.inputs.loader
            if self._loader is None or loader is None:
                return
            into = measure_loader(other, limit_s=self._side_s, tier=loader.tier)
            both = measure_contention(other, 1 / into.rate.value, 1 / rate, limit_s=self._side_s, tier=loader.tier)
            seen.append((into, add_handover(both, measure_handover(other, 1 / rate, limit_s=self._side_s))))

        ratio = self._measure_ratio(text, changes, measure_also=measure_input)
        if ratio is None:
            return
        changed = self._model.with_seconds(self._scale_loop(ratio))
        if seen and self._loader is not None:
            (into, both), loop = seen[0], self._model.sum_seconds("loop")
            changed = self._replace_input(into, self._loader).with_seconds(self._scale_loop(both.loop_alone / loop))
            changed = changed.with_contention(both)
        yield self._build_knob(
            "a larger batch", "launch", changes, changed, measured=True, exact=False, cost=BATCH_COST
        )

    def _suggest_compile(self) -> Iterator[Knob]:
        """Measures the loop with a compiled network, and lists the lines that break its graph."""
        recipe, changes = self._job.setup.recipe, {"compile": True}
        text = format_override(changes)
        if (
            recipe.compile is not False
            or recipe.activation_checkpointing is not False
            or not self._is_worth_trying("loop")
            or self._job.refuses(changes)
            or self._is_out_of_time(text, LONG_S)
        ):
            return
        with collect_break_notes() as notes:
            ratio = self._measure_ratio(text, changes)
        # A variant has the classes of the job's network, which are all that names a line.
        broken = [one.describe() for one in list_graph_breaks(self._job.setup.model, notes)]
        self.missing += [f"{text} leaves a part of the network to Python: {one}." for one in broken]
        if ratio is not None:
            cost, many = COMPILE_COST, len(broken) > 1
            if broken:
                lines, run = pluralise(len(broken), "line"), "run" if many else "runs"
                cost += f"; {lines} of the network still {run} in Python, see Not measured"
            changed = self._model.with_seconds(self._scale_loop(ratio))
            yield self._build_knob("a compiled network", "launch", changes, changed, measured=True, cost=cost)

    def _suggest_augmentation_place(self, device: torch.device) -> Iterator[Knob]:
        """Measures flips and shifts at the other place, host or device, if they take time where they are."""
        loader, other_place = self._loader, self._job.setup.recipe.augment.find_other_place(device.type)
        if loader is None or other_place is None:
            return
        place, options = other_place
        cures, text = "augment" if place == "device" else "normalise", format_override({"augment.where": place})
        if self._compute_gain_without(cures) < SIDE_WORTH or self._is_out_of_time(text, 2 * self._side_s):
            return
        if (ratio := self._measure_ratio(text, changes := {"augment.where": place})) is not None:
            other = measure_loader(self._job, limit_s=self._side_s, **options)
            changed = self._replace_input(other, loader).with_seconds(self._scale_loop(ratio))
            yield self._build_knob(f"augmentation on the {place}", cures, changes, changed, measured=True)

    def _try_loop(
        self, name: str, cures: str, changes: Mapping[str, Any], *, exact: bool = True, cost: str = ""
    ) -> Iterator[Knob]:
        """Measures the loop with other values."""
        text = format_override(changes)
        if self._is_out_of_time(text):
            return
        ratio = self._measure_ratio(text, changes)
        if ratio is not None:
            changed = self._model.with_seconds(self._scale_loop(ratio))
            yield self._build_knob(name, cures, changes, changed, measured=True, exact=exact, cost=cost)

    # The set-up of a variant would tell the user what the job's own has told.
    @mute_messages()
    def _measure_ratio(
        self,
        text: str,
        changes: Mapping[str, Any],
        *,
        batches: Sequence[Batch] | None = None,
        measure_also: Callable[[MeasurementJob, float], None] | None = None,
    ) -> float | None:
        """Returns the loop's time with other values over its time without.

        None: the recipe refuses the values, or the trial failed, and `missing` says why.

        Args:
            batches: to be replayed; None: the job's own. measure_also: called with the changed job and the images/s of
                its loop.
        """
        if self._job.refuses(changes):
            return None
        LOG.info(f"Trying {text}.")
        try:
            with closing(self._job.build_variant(changes)) as other:
                if batches is not None:
                    other.replace_batches(list(batches))
                rate = measure_loop_rate(other, limit_s=self._side_s)
                if measure_also is not None:
                    measure_also(other, rate.value)
        except Exception as error:
            # A trial may fail in many ways, such as a missing compiler or too little memory; the others go on.
            first = (str(error).strip().splitlines() or [""])[0]
            reason = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {first}"
            self.missing.append(f"{text}: {reason}")
            return None
        return self._loop.rate.value / rate.value

    def _scale_loop(self, ratio: float) -> dict[str, float]:
        return {stage: seconds * ratio for stage, seconds in self._model.seconds["loop"].items()}
