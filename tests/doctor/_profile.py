"""A Profile such as a small network on two cores gives."""

from __future__ import annotations

from typing import Any

from headway.core.profile import (
    EnvironmentFinding,
    JointTiming,
    Knob,
    Profile,
    ShortRun,
    StageCeiling,
    ThreadScaling,
    Throughput,
    Verdict,
)

DECODE = "The run is host/IO limited: decoding the images takes 53% of its time. Without that it would give at most "


def ceilings() -> tuple[StageCeiling, ...]:
    us = 1e-6
    return (
        StageCeiling(
            stage="storage", side="input", resource="disk", seconds=4 * us, how="finding the records, in memory"
        ),
        StageCeiling(stage="decode", side="input", resource="host", seconds=271 * us, how="decoding, 2 threads"),
        StageCeiling(stage="augment", side="input", resource="host", seconds=12 * us, how="with crop, less without"),
        StageCeiling(stage="collate", side="input", resource="host", seconds=3.1 * us, how="order, keys, labels"),
        StageCeiling(stage="transform", side="loop", resource="device", seconds=18 * us, how="normalising a batch"),
        StageCeiling(stage="launch", side="loop", resource="device", seconds=21 * us, how="what a line starts from"),
        StageCeiling(stage="compute", side="loop", resource="device", seconds=190 * us, how="forward and backward"),
        StageCeiling(stage="optimizer", side="loop", resource="device", seconds=9 * us, how="the optimizer's step"),
        StageCeiling(stage="sync", side="loop", resource="device", seconds=0.0, how="0 reads of values a step"),
        StageCeiling(stage="other", side="loop", resource="device", seconds=2.5 * us, how="the rest of the loop"),
        StageCeiling(
            stage="evaluate", side="stall", resource="stall", seconds=7 * us, how="0.35 s every 50,000 images"
        ),
        StageCeiling(
            stage="checkpoint", side="stall", resource="stall", seconds=0.4 * us, how="0.02 s every 50,000 images"
        ),
    )


def runs() -> tuple[ShortRun, ...]:
    def rate(value: float) -> Throughput:
        return Throughput(value=value, low=0.99 * value, high=1.012 * value, windows=9)

    return (
        ShortRun(
            name="synthetic", steps=0, images_s=rate(4740), predicted=None, wait_share=None,
            note="forward and backward alone",
        ),
        ShortRun(
            name="replay", steps=0, images_s=rate(4100), predicted=4158, wait_share=0.0,
            note="the loop, with ready batches",
        ),
        ShortRun(
            name="warm", steps=140, images_s=rate(3040), predicted=3182, wait_share=0.313,
            note="the whole job, files in memory, without stalls",
        ),
        ShortRun(
            name="cold", steps=0, images_s=None, predicted=None, wait_share=None,
            note="the whole set was brought into memory before the first step",
        ),
    )  # fmt: skip


def knobs() -> tuple[Knob, ...]:
    def knob(name: str, cures: str, override: str, gain: float, **more: Any) -> Knob:
        given = {"measured": True, "exact": True, "cost": "", "images_s": 3120 * gain}
        return Knob(name=name, cures=cures, override=override, gain=gain, **given | more)

    return (
        knob("images decoded once", "decode", "data.cache=memory", 1.31, cost="0.6 GB of memory"),
        knob("a larger batch", "launch", "batch=512", 1.08, exact=False, cost="other learning rates"),
        knob(
            "one pass over the set at pack time", "decode",
            "headway pack data/train data/train-32 --mode resize=32,quality=90 --shard-mb 256 --threads 2", 1.06,
        ),
        knob("rarer evaluations", "evaluate", "evaluate.every_epochs=4", 1.02, measured=False),
        knob("a processor with more cores", "decode", "", 1.01, measured=False),
    )  # fmt: skip


def profile(**changes: Any) -> Profile:
    given: dict[str, Any] = {
        "name": "cifar10",
        "quick": False,
        "machine": {
            "name": "node7",
            "processor": "A processor at 2.20GHz",
            "cores": 2,
            "memory_bytes": 8 * 2**30,
            "device": "cpu",
            "versions": {"python": "3.12.3", "torch": "2.13.0"},
        },
        "environment": (
            EnvironmentFinding(what="OMP_NUM_THREADS is 1, and 2 cores may be used.", cure="Unset it, or set it to 2."),
            EnvironmentFinding(what="The data are on a network file system (nfs4).", cure="Set data.cache=disk."),
            EnvironmentFinding(what="The processor has AVX2, and torch uses it.", cure=""),
            EnvironmentFinding(what="libjpeg-turbo decodes with SIMD.", cure=""),
        ),
        "batch": 128,
        "ranks": 1,
        "regime": "later epochs",
        "ceilings": ceilings(),
        "together": JointTiming(
            input_alone=290e-6, loop_alone=240e-6, input_beside=330e-6, loop_beside=251e-6, cores=2
        ),
        "threads": ThreadScaling(
            threads=(1, 2, 3, 4), images_s=(1900, 3450, 3500, 3480), serial_s=54e-6, parallel_s=472e-6
        ),
        "launch": {"8": 4.21e-3, "32": 8.77e-3, "128": 27e-3, "512": 100e-3},
        "multiply_adds": 41_000_000,
        "facts": {
            "syncs a step": 0.0,
            "encoded bytes": 2411.0,
            "height": 32.0,
            "width": 32.0,
            "images of the batch's size": 1.0,
            "peak_flops": 2.1e12,
            "peak_bytes_s": 21e9,
            "intensity": 80.0,
        },
        "predicted": 3120.0,
        "measured": 2980.0,
        "runs": runs(),
        "verdict": Verdict(
            kind="host/IO limited",
            stage="decode",
            sentence=f"{DECODE}1.34 times the images/s, and forward and backward would limit it.",
            next_stage="compute",
            most=1.34,
            confirmed=True,
            unexplained="",
        ),
        "knobs": knobs(),
        "not_measured": ("torch.compile: not tried, no time left.",),
        "seconds": 61.3,
    }
    return Profile(**given | changes)
