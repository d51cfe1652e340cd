"""Holds the observations of a training loop, as a record (JSON) and as a text of at most 30 lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import Field

from headway.core.json_record import JsonRecord
from headway.core.profile import LimitKind

# A parent process that only reads the record needs no torch.
if TYPE_CHECKING:
    from headway.doctor.loader_facts import LoaderFacts

# Lines of each list in the text; the record has all.
MOST_PATTERNS, MOST_ADVICE, MOST_UNKNOWN = 4, 5, 4
# Characters of such a line.
LONGEST = 200

PatternKind = Literal["workers", "first batch", "period", "drift", "slow rank"]


@final
@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """Facts about a loop apart from its times."""

    # Device type, as torch names it.
    device: str
    # Samples of a batch, and batches of an epoch.
    samples: int | None = None
    batches: int | None = None
    # Facts about a headway.Loader; None: the loader is another one.
    loader: LoaderFacts | None = None
    # The loader is a torch DataLoader; otherwise the next four are unknown.
    torch_loader: bool = False
    # Worker processes; 0: the loop makes its batches itself.
    workers: int | None = None
    persistent: bool = False
    pinned: bool = False
    # Batches prefetched by each worker.
    prefetch: int | None = None
    # Cores that this process may use: its affinity and its control group's quota, divided by the ranks.
    cores: int = 1
    # Threads of torch.
    threads: int = 1
    # True: at least one of the networks is compiled.
    compiled: bool = False
    # Lower precision was on in a forward pass; None: no forward pass was seen.
    autocast: bool | None = None
    # The device has bf16 units.
    bf16: bool = False
    # The optimizer has a fused form and does not use it.
    fusable: bool = False
    # What the ranks exchange, and in which stages; empty: one process, or the network is not shared.
    exchange: str = ""
    # Another thread than the training thread asks for the batches.
    elsewhere: bool = False
    # Known intervals in steps, by name.
    every: tuple[tuple[str, int], ...] = ()
    # Code that read values, with the number of reads, the most frequent first.
    places: tuple[tuple[str, int], ...] = ()

    @property
    def is_asynchronous(self) -> bool:
        """True if the device works asynchronously: then the host's clock shows the time to launch the work."""
        return self.device != "cpu"


@final
class StageTime(JsonRecord):
    """One stage of a step."""

    # wait, first batch, forward, loss, backward, optimizer, other.
    stage: str
    # Mean of a step; time that occurs once an epoch is spread over its steps.
    seconds: float = Field(ge=0)
    share: float = Field(ge=0)


@final
class LoopPattern(JsonRecord):
    """A pattern in the times: something repeats, drifts, or stays behind."""

    kind: PatternKind
    sentence: str
    # Probability of seeing it by chance; None: it was counted, not tested.
    p_value: float | None


@final
class Advice(JsonRecord):
    """A change to make, with the reason."""

    why: str
    # The exact change.
    change: str


@final
class RankTime(JsonRecord):
    """Times of a rank's steps."""

    rank: int
    step_s: float
    p99_s: float
    # Without backward, in which the ranks wait for each other.
    own_s: float


@final
class LoopObservation(JsonRecord):
    """Observations of a training loop, and its limit."""

    version: Literal[1] = 1
    # None: unknown.
    kind: LimitKind | None
    sentence: str
    # Upper bound of the speed-up if the limit cost nothing; None: unknown.
    gain: float | None = Field(default=None, ge=1)
    device: str
    # Counted steps, without warm-up.
    steps: int = Field(ge=0)
    warm_up_steps: int = Field(ge=0)
    # Loops over the loader that ended or were left.
    epochs: int = Field(ge=0)
    # Samples.
    batch: int | None
    # Mean, including the first batches of epochs.
    step_s: float | None
    p99_s: float | None
    samples_s: float | None
    wait_share: float | None
    wait_low: float | None
    # 95 % interval of the share.
    wait_high: float | None
    stages: tuple[StageTime, ...] = ()
    # Extra seconds of an epoch's first batch over any other batch's wait.
    first_batch_s: float | None = None
    # Between two loops over the loader: evaluation, checkpoints. Not contained in any share.
    between_epochs_s: float | None = None
    # Host-device syncs per step; None: the device is the host.
    syncs: float | None = None
    # Share of the time.
    sync_share: float | None = None
    # Values of host tensors that Python read per step.
    reads: float | None = None
    # Code that read the first of these values, the most frequent first: `item at train.py:41`.
    read_at: tuple[str, ...] = ()
    # Own statistics of a headway.Loader; empty: the loader is another one.
    loader: str = ""
    # Share of steps in which the device was idle when a batch came; None: unknown.
    starved: float | None = None
    patterns: tuple[LoopPattern, ...] = ()
    advice: tuple[Advice, ...] = ()
    ranks: tuple[RankTime, ...] = ()
    # Facts that could not be determined or separated.
    unknown: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON data."""
        return self.model_dump(mode="json")

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Formats the record for a terminal: at most 30 lines."""
        lines = [f"{self.kind or 'no verdict'}: {self.sentence}."]
        if self.step_s is not None and self.stages:
            lines += [self._format_summary(), "", *self._format_table()]
        if reads := self._format_reads():
            lines.append(reads)
        if self.loader:
            lines.append(f"{self.loader}.")
        patterns = [f"{one.sentence}{_format_p_value(one.p_value)}" for one in self.patterns]
        lines += _format_list("Patterns:", patterns, MOST_PATTERNS)
        advice = [f"{one.why}: {one.change}" for one in self.advice]
        lines += _format_list("What to change:", advice, MOST_ADVICE)
        lines += _format_list("Not separated:", self.unknown, MOST_UNKNOWN)
        return "\n".join(lines)

    def _format_summary(self) -> str:
        assert self.step_s is not None
        assert self.p99_s is not None
        of = "" if self.batch is None else f" of {self.batch:,} samples"
        rate = "" if self.samples_s is None else f", {self.samples_s:,.0f} samples/s"
        step, most = _format_seconds(self.step_s), _format_seconds(self.p99_s)
        summary = f"{self.steps:,} steps{of} on {self.device}: {step} each (99 % within {most}){rate}"
        if self.between_epochs_s is not None and self.between_epochs_s > self.step_s:
            summary += f"; {_format_seconds(self.between_epochs_s)} between epochs, not counted"
        return f"{summary}."

    def _format_table(self) -> list[str]:
        lines = [f"  {'stage':<12}{'a step':>12}{'share':>9}"]
        for one in self.stages:
            lines.append(f"  {one.stage:<12}{_format_seconds(one.seconds):>12}{100 * one.share:>7.1f} %")
        return lines

    def _format_reads(self) -> str:
        where = f", mostly {self.read_at[0]}" if self.read_at else ""
        if self.syncs is not None and self.sync_share is not None:
            text = f"Python waited for a value on the device {self.syncs:.2g} times a step{where if self.syncs else ''}"
            return f"{text}: {format_share(self.sync_share)} of the time."
        if self.reads:
            many = f"{self.reads:.2g} value{'' if self.reads == 1 else 's'}"
            text = f"Python read {many} a step{where}"
            return f"{text}: free on a CPU; on a GPU each of them waits for the device."
        return ""


def _format_list(head: str, value: Any, most: int) -> list[str]:
    """Formats a heading and a line per item; if there are too many, the last line counts the rest."""
    shown = [one if len(one) <= LONGEST else f"{one[: LONGEST - 3]}..." for one in value]
    if len(shown) > most:
        shown = [*shown[: most - 1], f"and {len(shown) - most + 1} more; the JSON has them"]
    return [head, *(f"  - {one}" for one in shown)] if shown else []


def _format_p_value(p_value: float | None) -> str:
    if p_value is None:
        return ""
    return " (p < 0.0001)" if p_value < 1e-4 else f" (p = {p_value:.2g})"


def _format_seconds(seconds: float) -> str:
    value, unit = (1e3 * seconds, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def format_share(share: float) -> str:
    """Formats a share: `63 %`, `1.3 %`."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
