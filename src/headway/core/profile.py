"""What a planner reads: the schemas of the Workload, which is what a step is made of, without the code, and of the
Profile, which is what a machine takes for it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, read_text, write_atomically
from headway.core.untrusted_json import JsonError, parse_object

VERSION = 1
"""Of both schemas; a file of another one is refused."""


MOST_DISAGREEMENT = 1.25
"""Times between short runs that are no contradiction: quiet machines gave up to 1.13, busy ones 1.8 to 5."""
UNCONFIRMED = " A short run of the whole job does not confirm that; other work on the machine may be why."
"""With which a verdict ends where that is so; one that begins with it does not say it twice."""


class JsonRecord(BaseModel):
    """Base of what is written as JSON: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


R = TypeVar("R", bound=JsonRecord)


class WorkloadLayer(JsonRecord):
    """One module of the network, without what is inside of its children; a module that does nothing itself is none.

    What a module calls as functions (`F.relu`, a sum, a matrix product with a weight of its own) is its own. Numbers
    without another unit are of one sample, in training mode, at the run's last image size.
    """

    name: str
    """Dotted, as in the state dict; empty: of the network itself."""
    kind: str
    """Its class."""
    parameters: int = Field(ge=0)
    """Weights that lie here; tied ones count for the first layer that has them."""
    weight_bytes: int = Field(ge=0)
    """Of these, as they are kept between steps."""
    gradient_bytes: int = Field(ge=0)
    """Of those that are trained: what the ranks sum up in each step."""
    ready: int | None = Field(ge=0)
    """Layers whose gradients are complete before this one's are; None: it has none."""
    input_shape: tuple[int, ...] | None
    """Of its first input, without the samples' dimension; None: no tensor, or it was never called."""
    output_shape: tuple[int, ...] | None
    """Of its first output, likewise."""
    forward_multiply_adds: int = Field(ge=0)
    """Of convolutions and matrix products."""
    backward_multiply_adds: int = Field(ge=0)
    activation_bytes: int = Field(ge=0)
    """Of its output tensors."""
    saved_bytes: int = Field(ge=0)
    """What its forward pass keeps for the backward pass; memory that several layers keep counts for the first one."""
    saved_bytes_fixed: int = Field(ge=0)
    """The same for a micro-batch of any size: weights in low precision, say."""


class WorkloadInput(JsonRecord):
    """One sample, from the disk to the network."""

    height: int = Field(ge=1)
    width: int = Field(ge=1)
    channels: int = Field(ge=1)
    decoded_bytes: int = Field(ge=1)
    """As it goes to the device, uint8."""
    encoded_bytes: float | None = Field(ge=0)
    """As it lies on the disk, in the mean; None: the data were not there."""
    source_pixels: float | None = Field(ge=0)
    """Height times width before crop and resize, in the mean; None likewise."""
    on_host: tuple[str, ...]
    """Augmentations that the loader does."""
    on_device: tuple[str, ...]
    """Those that are done to the batch on the device, in their order."""


class WorkloadUpdate(JsonRecord):
    """The optimizer's step."""

    optimizer: str
    state_bytes: int = Field(ge=0)
    passes: float = Field(ge=0)
    """How often the memory of the trained weights, or as much of gradients and state, is read or written in a step. The
    matrix products of `muon` are not in it."""
    beside_bytes: int = Field(default=0, ge=0)
    """What else stays on a device, whatever its samples: fp32 masters and their gradients, the network's buffers,
    averaged weights, and what looking at the layers takes in a logging step."""


class WorkloadExchange(JsonRecord):
    """What the ranks tell each other in a step, and how the recipe wants it."""

    gradient_bytes: int = Field(ge=0)
    """Of all layers, in the parameters' own type."""
    statistics_bytes: int = Field(ge=0)
    """Running statistics of batch norm, which become their mean over the ranks."""
    algorithm: str
    """As of `headway.core.collectives`, or `auto`."""
    wire_ratio: float = Field(gt=0, le=1)
    """Bytes between hosts over bytes of the gradients."""
    bucket_bytes: int | None = Field(ge=1)
    """None: as suits the links."""
    sync_batch_norm: bool
    """One more exchange a batch norm, forward and backward."""


class WorkloadStep(JsonRecord):
    """One step at the beginning of the run."""

    batch: int = Field(ge=1)
    """Samples over all ranks."""
    ranks: int = Field(default=1, ge=1)
    """That the dry run was of."""
    micro_batch: int | None = Field(ge=1)
    """Samples that go through the network at once; None: a rank's share of the batch."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Of forward and backward."""
    half_weights: bool
    """The weights and their gradients are 16 bit wide, too; the optimizer steps fp32 copies."""
    compiled: bool
    """The layers were measured without compilation, which saves less for backward."""
    update: WorkloadUpdate
    exchange: WorkloadExchange

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2


class WorkloadPhase(JsonRecord):
    """Steps that are alike."""

    steps: int = Field(ge=1)
    batch: int = Field(ge=1)
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    forward_multiply_adds: int = Field(ge=0)
    """Of one sample of this size."""


class WorkloadRun(JsonRecord):
    """The run."""

    samples: int = Field(ge=1)
    """Of the training set."""
    epochs: float = Field(gt=0)
    steps: int = Field(ge=1)
    phases: tuple[WorkloadPhase, ...]
    """In their order; their steps add up to `steps`."""
    evaluations: int = Field(ge=0)
    evaluation_samples: int | None = Field(ge=0)
    """Of one evaluation; None: the evaluation set was not there."""
    checkpoints: int = Field(ge=0)
    checkpoint_bytes: int = Field(ge=0)
    """Of one, over all ranks."""


class Workload(JsonRecord):
    """What a step is made of, without the code; `headway train RECIPE --dry-run` writes it, a planner reads it."""

    version: Literal[1] = 1
    name: str
    """Of the recipe."""
    layers: tuple[WorkloadLayer, ...]
    """In the order in which they are first called."""
    input: WorkloadInput
    step: WorkloadStep
    run: WorkloadRun

    @property
    def parameters(self) -> int:
        """Number of parameters of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_multiply_adds(self) -> int:
        """Multiply-adds of the forward pass of one sample."""
        return sum(layer.forward_multiply_adds for layer in self.layers)

    @property
    def backward_multiply_adds(self) -> int:
        """Multiply-adds of the backward pass of one sample."""
        return sum(layer.backward_multiply_adds for layer in self.layers)

    @property
    def operations(self) -> int:
        """Operations of one sample, forward and backward; a multiply-add counts as two."""
        return 2 * (self.forward_multiply_adds + self.backward_multiply_adds)

    def saved_bytes(self, samples: int) -> int:
        """Bytes that the forward pass of so many samples keeps for the backward pass, without the weights."""
        return sum(samples * layer.saved_bytes + layer.saved_bytes_fixed for layer in self.layers)

    def order_by_gradient(self) -> list[WorkloadLayer]:
        """The layers that have gradients, in the order in which these are complete."""
        found = [(layer.ready, place) for place, layer in enumerate(self.layers) if layer.ready is not None]
        return [self.layers[place] for _, place in sorted(found)]

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Workload:
        """Reads what `write` wrote. Raises UsageError: there is no such file, or it is no Workload of this version."""
        return _read_record(path, Workload, "headway train RECIPE --dry-run writes one.")


StageResource = Literal["disk", "network", "host", "copy", "device", "links", "stall"]
"""What a stage keeps busy: disks, what lies behind a network, the loader's threads, the bus to the device, the training
loop with its device, the links between ranks; or all of them stand still meanwhile."""

PipelineSide = Literal["input", "loop", "stall"]
"""What goes on at the same time: the loader makes batches while the loop uses others up; stalls hold both."""

LimitKind = Literal[
    "device limited",
    "host/IO limited",
    "communication limited",
    "launch limited",
    "sync limited",
    "stall limited",
]


class Throughput(JsonRecord):
    """Images a second, the median over windows, with its 95 % interval."""

    value: float = Field(gt=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)
    windows: int = Field(ge=1)


CodeActivity = Literal["python", "sync", "sleep", "lock", "file", "gc"]
"""What a line of the user's own code does; as many stages."""


class CodeLine(JsonRecord):
    """A line of the user's own code, and what it takes of a stage."""

    file: str
    line: int = Field(ge=1)
    within: str
    """The part of a step that runs it: transform, forward, backward, or the function that was called, such as loss."""
    what: CodeActivity
    """What it does: Python or NumPy, reading values of tensors, sleeping or waiting for something outside, waiting for
    a lock, dealing with a file or a connection, setting off garbage collections."""
    seconds: float = Field(ge=0)
    """Of a sample."""

    def __str__(self) -> str:
        """`sleep at net.py:41 in forward`"""
        what = {"sync": "reads of values", "lock": "wait for a lock", "gc": "garbage collection", "python": "Python"}
        return f"{what.get(self.what, self.what)} at {Path(self.file).name}:{self.line} in {self.within}"


class StageCeiling(JsonRecord):
    """One stage, as it is when nothing else runs."""

    stage: str
    """Of the loader: storage, decode, augment, collate, copy. Of the loop: normalise, transform, launch, compute,
    optimizer, log, other; python, sync, sleep, lock, file and gc, which the user's own lines outside of the transform
    make; with other ranks also reduce, slow rank. Of stalls: evaluate, checkpoint."""
    side: PipelineSide
    resource: StageResource
    seconds: float = Field(ge=0)
    """Wall seconds that a sample of this process takes in it; 0: it does not occur, or takes nothing that shows."""
    how: str
    """How it was measured; or why it was not."""
    code: tuple[CodeLine, ...] = ()
    """The user's lines in it, the longest first."""

    @property
    def images_s(self) -> float | None:
        """Images/s if nothing else took time; None if it does not limit."""
        return 1 / self.seconds if self.seconds > 0 else None


class JointTiming(JsonRecord):
    """Loader and loop, each alone and while the other one runs without a pause; seconds of a sample."""

    input_alone: float = Field(gt=0)
    loop_alone: float = Field(gt=0)
    input_beside: float = Field(gt=0)
    loop_beside: float = Field(gt=0)
    cores: int = Field(ge=1)
    """That both may use."""


class ShortRun(JsonRecord):
    """A short run of the whole job."""

    name: Literal["synthetic", "replay", "warm", "cold"]
    steps: int = Field(ge=0)
    images_s: Throughput | None
    """None: it was not run."""
    predicted: float | None
    """Images a second, from the stages alone; None: nothing was predicted for it."""
    wait_share: float | None
    """Of its time, in which the loop waited for batches."""
    note: str
    """What it tells; or why it was not run."""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.images_s is None or self.predicted is None:
            return None
        return self.predicted / self.images_s.value - 1


class EnvironmentFinding(JsonRecord):
    """Something of the environment."""

    what: str
    """A sentence."""
    cure: str
    """Empty: all is well, or it is only good to know."""


class ThreadScaling(JsonRecord):
    """What the loader gives by its number of threads."""

    threads: tuple[int, ...]
    images_s: tuple[float, ...]
    serial_s: float = Field(ge=0)
    """Of the fit seconds = serial + parallel / threads, up to the cores there are."""
    parallel_s: float = Field(ge=0)


class Knob(JsonRecord):
    """Something that can be set otherwise, and what it would give."""

    name: str
    cures: str
    """The stage."""
    override: str
    """As `headway train RECIPE OVERRIDE` takes it; a command where it is one; empty: nothing of a recipe sets it."""
    images_s: float = Field(gt=0)
    """Predicted, with it."""
    gain: float = Field(gt=0)
    """Over what is predicted without it."""
    measured: bool
    """Whether the stage was measured with it; else it was computed."""
    exact: bool
    """Whether the recipe's mathematics stay as they are, up to rounding."""
    cost: str
    """What it may cost; empty: nothing."""


class Verdict(JsonRecord):
    """What limits the run."""

    kind: LimitKind
    stage: str
    sentence: str
    next_stage: str
    """The limit behind it."""
    most: float = Field(ge=1)
    """How many times the images/s, if the first limit were gone."""
    code: CodeLine | None = None
    """The user's line that takes most of the stage; None: none of it is the user's."""
    confirmed: bool
    """Whether prediction and measurement of the whole job are within 10 %, and no short run contradicts another."""
    unexplained: str
    """What the stages do not explain, in a sentence; empty: nothing."""


class Profile(JsonRecord):
    """What one step of a recipe takes on a machine, stage by stage; `headway doctor RECIPE` writes it."""

    version: Literal[1] = 1
    name: str
    """Of the recipe."""
    quick: bool
    machine: dict[str, Any]
    """Processor, cores, memory, device, versions."""
    environment: tuple[EnvironmentFinding, ...]
    batch: int = Field(ge=1)
    """Samples of one step of this process."""
    ranks: int = Field(ge=1)
    regime: Literal["first epoch", "later epochs"]
    """Which the verdict is about: files that are read from the disk, or from memory."""
    ceilings: tuple[StageCeiling, ...]
    together: JointTiming | None
    """None: the data are synthetic."""
    threads: ThreadScaling | None
    launch: dict[str, float]
    """`batch` -> seconds of forward and backward, by the number of samples."""
    multiply_adds: int | None
    """Of one image, forward."""
    facts: dict[str, float]
    """Syncs of a step, encoded bytes of an image, bytes/s of the storage, and what else was counted on the way."""
    predicted: float = Field(gt=0)
    """Images/s of the whole job, stalls included."""
    measured: float | None = Field(gt=0)
    """The same, of the short run that is like it."""
    runs: tuple[ShortRun, ...]
    verdict: Verdict
    knobs: tuple[Knob, ...]
    """The best first."""
    not_measured: tuple[str, ...]
    """What could not be, and why."""
    seconds: float = Field(ge=0)
    """That all this took."""

    @property
    def disagreement(self) -> float:
        """How many times as fast one short run was as another, each over its prediction; 1: they are off alike.

        The same stages predict them all, the first epoch's reading left out: where one was faster than they say and
        another slower, the machine changed meanwhile. Up to `AGREE` it is as a quiet machine gives it.
        """
        known = (run.error for run in self.runs if run.name != "cold")
        off = [1 + error for error in known if error is not None]
        return max(off) / min(off) if off else 1.0

    def check_confirmed(self) -> Profile:
        """The same; where short runs contradict each other, more samples go through the network in less time than
        fewer, or a short run is not what the stages say, with a verdict that begins with that."""
        passes = sorted((int(samples), seconds) for samples, seconds in self.launch.items())
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
        sentence = "Not confirmed: " + self.verdict.sentence.removeprefix("Not confirmed: ").removesuffix(UNCONFIRMED)
        changes = {"confirmed": False, "sentence": sentence, "unexplained": why}
        return self.model_copy(update={"verdict": self.verdict.model_copy(update=changes)})

    def ceiling(self, stage: str) -> StageCeiling | None:
        """Returns the ceiling of a stage, or None if the stage was not measured."""
        return next((one for one in self.ceilings if one.stage == stage), None)

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Profile:
        """Reads what `write` wrote. Raises UsageError: there is no such file, or it is no Profile of this version."""
        return _read_record(path, Profile, "headway doctor RECIPE writes one.")


def _read_record(path: Path, kind: type[R], fix: str) -> R:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        what = f"it cannot be read ({describe_os_error(error)})"
        raise UsageError(what, where=str(path), fix=fix) from None
    try:
        parse_object(text)
    except JsonError as error:
        raise UsageError(
            f"this is no {kind.__name__} of version {VERSION}: {error}", where=str(path), fix=fix
        ) from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        what = f"this is no {kind.__name__} of version {VERSION} ({key + ': ' if key else ''}{first['msg']})"
        raise UsageError(what, where=str(path), fix=fix) from None
