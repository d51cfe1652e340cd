"""The Profile: wall time of one training step on a machine, stage by stage, with the verdict and its remedies.

`headway doctor RECIPE` writes it; the planner and the report read it. Times without another unit are seconds per
sample of this process.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from headway.core.json_record import JsonRecord, read_record

# Ratio of short runs up to which they agree: quiet machines gave up to 1.13, busy ones 1.8 to 5.
MOST_DISAGREEMENT = 1.25
# Share of the processor up to which other programs leave a measured gain true: a stage slows by about as much.
MOST_OTHER_LOAD = 0.1
# Ends a verdict that a short run of the whole job does not confirm; one that begins with "Not confirmed" goes without.
UNCONFIRMED = " A short run of the whole job does not confirm that; other work on the machine may be why."

# The resource that a stage uses: disks, the network to the storage, the loader's threads, the bus to the device, the
# training loop with its device, the links between ranks; `stall`: everything waits.
StageResource = Literal["disk", "network", "host", "copy", "device", "links", "stall"]

# Sides of the pipeline, which run at the same time: the loader makes batches, the loop consumes them, stalls hold both.
PipelineSide = Literal["input", "loop", "stall"]

LimitKind = Literal[
    "device limited",
    "host/IO limited",
    "communication limited",
    "launch limited",
    "sync limited",
    "stall limited",
]

# The activity of a line of the user's own code; each is a stage of its own.
CodeActivity = Literal["python", "sync", "sleep", "lock", "file", "gc"]

_ACTIVITY_NAMES = {"sync": "reads of values", "lock": "wait for a lock", "gc": "garbage collection", "python": "Python"}


class Throughput(JsonRecord):
    """Images per second: the median over windows with its 95 % interval."""

    value: float = Field(gt=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)
    windows: int = Field(ge=1)


class CodeLine(JsonRecord):
    """A line of the user's own code and its share of a stage."""

    file: str
    line: int = Field(ge=1)
    within: str
    """Part of a step that runs it: transform, forward, backward, or the called function, such as loss."""
    what: CodeActivity
    """Its activity: Python or NumPy, reading values of tensors, sleeping or waiting for something external, waiting for
    a lock, using a file or a connection, triggering garbage collections."""
    seconds: float = Field(ge=0)
    """Seconds per sample."""

    def __str__(self) -> str:
        """`sleep at net.py:41 in forward`"""
        return f"{_ACTIVITY_NAMES.get(self.what, self.what)} at {Path(self.file).name}:{self.line} in {self.within}"


class StageCeiling(JsonRecord):
    """One stage, measured while nothing else runs."""

    stage: str
    """Name. In the loader: storage, decode, augment, collate, copy. In the loop: normalise, transform, launch, compute,
    optimizer, log, other; python, sync, sleep, lock, file and gc for the user's own lines outside the transform; with
    several ranks also exchange, sharing, reduce and slow rank. Stalls: evaluate, checkpoint."""
    side: PipelineSide
    resource: StageResource
    seconds: float = Field(ge=0)
    """Wall seconds per sample of this process; 0: the stage does not occur, or is too short to measure."""
    how: str
    """Method of measurement, or the reason why it was not measured."""
    code: tuple[CodeLine, ...] = ()
    """The user's lines in this stage, the longest first."""

    @property
    def images_s(self) -> float | None:
        """Images/s if nothing else took time; None if the stage does not limit."""
        return 1 / self.seconds if self.seconds > 0 else None


class JointTiming(JsonRecord):
    """Loader and loop, each alone and each while the other runs without pause; seconds per sample."""

    input_alone: float = Field(gt=0)
    loop_alone: float = Field(gt=0)
    input_beside: float = Field(gt=0)
    loop_beside: float = Field(gt=0)
    cores: int = Field(ge=1)
    """Cores that both may use."""


class ShortRun(JsonRecord):
    """A short run of the whole job."""

    name: Literal["synthetic", "replay", "warm", "cold"]
    steps: int = Field(ge=0)
    # Measurement and prediction, which the verdict compares.
    images_s: Throughput | None
    """None: it was not run."""
    predicted: float | None
    """Images/s predicted from the stages alone; None: no prediction for it."""
    wait_share: float | None
    """Share of its time in which the loop waited for batches."""
    note: str
    """Its conclusion, or the reason why it was not run."""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.images_s is None or self.predicted is None:
            return None
        return self.predicted / self.images_s.value - 1


class EnvironmentFinding(JsonRecord):
    """An observation about the environment."""

    what: str
    """A sentence."""
    cure: str
    """Remedy; empty: nothing is wrong, or it is only for information."""


class ThreadScaling(JsonRecord):
    """Throughput of the loader by its number of threads."""

    threads: tuple[int, ...]
    images_s: tuple[float, ...]
    serial_s: float = Field(ge=0)
    """Serial part of the fit seconds = serial + parallel / threads, up to the number of cores."""
    parallel_s: float = Field(ge=0)


class Knob(JsonRecord):
    """A setting that can be changed, with its predicted effect."""

    name: str
    cures: str
    """Stage that it shortens."""
    override: str
    """Override for `headway train RECIPE OVERRIDE`, or a command; empty: no recipe key sets it."""
    images_s: float = Field(gt=0)
    """Predicted images/s with it."""
    gain: float = Field(gt=0)
    """Ratio to the prediction without it."""
    measured: bool
    """The stage was measured with it, not computed."""
    exact: bool
    """The recipe's mathematics stay the same up to rounding."""
    cost: str
    """Possible drawbacks; empty: none."""


class Verdict(JsonRecord):
    """The limit of the run."""

    kind: LimitKind
    stage: str
    sentence: str
    next_stage: str
    """The next limit."""
    most: float = Field(ge=1)
    """Speed-up if the first limit were removed."""
    code: CodeLine | None = None
    """The user's line that takes most of the stage; None: none of the stage is the user's code."""
    confirmed: bool
    """Prediction and measurement of the whole job are within 10 %, and no short run contradicts another."""
    unexplained: str
    """The difference that the stages do not explain, as a sentence; empty: none."""


class Profile(JsonRecord):
    """Wall time of one step of a recipe on a machine, stage by stage."""

    version: Literal[1] = 1
    name: str
    """Name of the recipe."""
    quick: bool
    machine: dict[str, Any]
    """Processor, cores, memory, device, versions."""
    environment: tuple[EnvironmentFinding, ...]
    batch: int = Field(ge=1)
    """Samples of one step of this process."""
    ranks: int = Field(ge=1)
    regime: Literal["first epoch", "later epochs"]
    """Regime of the verdict: files are read from the disk, or from memory."""
    # Measurements of parts.
    ceilings: tuple[StageCeiling, ...]
    together: JointTiming | None
    """None: the data are synthetic."""
    threads: ThreadScaling | None
    launch: dict[str, float]
    """Seconds of forward and backward by the number of samples."""
    multiply_adds: int | None
    """Forward multiply-adds of one image."""
    # By-products of the measurements, for the report and the planner.
    facts: dict[str, float]
    """Other counts: host-device syncs per step, encoded bytes per image, bytes/s of the storage, and so on."""
    # The whole job, and the conclusions.
    predicted: float = Field(gt=0)
    """Images/s of the whole job, stalls included."""
    measured: float | None = Field(gt=0)
    """Images/s of the short run that resembles the job."""
    runs: tuple[ShortRun, ...]
    verdict: Verdict
    knobs: tuple[Knob, ...]
    """Settings to change, the best first."""
    augment_where: Literal["host", "device", "device_crops"] | None = None
    """`augment.where` of the examined run; None: it has nothing to place, or an older doctor wrote this."""
    not_measured: tuple[str, ...]
    """Measurements that failed, with the reason."""
    seconds: float = Field(ge=0)
    """Duration of the examination."""
    other_load: float | None = Field(default=None, ge=0, le=1)
    """Share of the usable cores that other programs took during the examination; None: unknown."""

    @property
    def is_disturbed(self) -> bool:
        """True if other programs took so much of the processor that small gains cannot be told from their noise."""
        return self.other_load is not None and self.other_load > MOST_OTHER_LOAD

    @property
    def disagreement(self) -> float:
        """Largest ratio of two short runs' speeds, each over its own prediction; 1: all errors are alike.

        The same stages predict all runs, except for the first epoch's reading. If one run was faster than predicted and
        another slower, the machine changed meanwhile. Quiet machines stay below `MOST_DISAGREEMENT`.
        """
        # The first epoch reads from the disk, which the stages of later epochs do not predict.
        known = (run.error for run in self.runs if run.name != "cold")
        off = [1 + error for error in known if error is not None]
        return max(off) / min(off) if off else 1.0

    def mark_contradictions(self) -> Profile:
        """Returns the profile, with a verdict that begins with "Not confirmed" if measurements contradict each other.

        That is so if short runs contradict each other, if a larger batch took less time than a smaller one, or if the
        stages do not explain a short run.
        """
        passes = sorted((int(samples), seconds) for samples, seconds in self.launch.items())
        # More samples in clearly less time: impossible on a quiet machine.
        fallen = [(few, many) for (few, long), (many, short) in pairwise(passes) if long > MOST_DISAGREEMENT * short]
        why = self.verdict.unexplained
        others = "; other work on the machine may be why. Examine again when it is quiet."
        if self.disagreement > MOST_DISAGREEMENT:
            why = f"The short runs contradict each other by {self.disagreement:.1f} times{others}"
        elif fallen:
            few, many = fallen[0]
            why = f"Passes of {many:,} samples were measured to take less time than those of {few:,}{others}"
        if not why:
            return self
        # Idempotent: a verdict that is already marked gets no second mark.
        sentence = "Not confirmed: " + self.verdict.sentence.removeprefix("Not confirmed: ").removesuffix(UNCONFIRMED)
        changes = {"confirmed": False, "sentence": sentence, "unexplained": why}
        return self.model_copy(update={"verdict": self.verdict.model_copy(update=changes)})

    def find_ceiling(self, stage: str) -> StageCeiling | None:
        """Returns the ceiling of a stage, or None if the stage was not measured."""
        return next((one for one in self.ceilings if one.stage == stage), None)

    @staticmethod
    def read(path: Path) -> Profile:
        """Reads a Profile. Raises UsageError if there is no such file, or it is not a Profile of this version."""
        return read_record(path, Profile, "headway doctor RECIPE writes one.")
