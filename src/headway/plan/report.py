"""A plan as a whole: answers, what moves them, other ways; and what of it is said on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from headway.core.workload import Workload
from headway.plan.answer import PAYS, Answer, Job, Moved, answers, pays_until, sensitivity
from headway.plan.ask import Known, is_official
from headway.plan.choices import Choice, Memory, choices, memory, useful_nodes
from headway.plan.cluster import Cluster
from headway.plan.convergence import Epochs, Suggestion, official, suggest
from headway.plan.growth import Growth, PowerLaw, growth, power_law
from headway.plan.words import count

MOST_MOVED = 4
"""Inputs that are named."""


@final
@dataclass(frozen=True)
class Grown:
    """Attributes: error, size: by samples. sizes: of sets that are asked for."""

    error: PowerLaw
    size: PowerLaw | None
    sizes: tuple[Growth, ...]


def grown(
    workload: Workload,
    errors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]] = (),
    samples: float | None = None,
) -> Grown:
    """What more data would give.

    Args:
        errors: (samples, error). sizes: (samples, parameters of the best network).
        samples: of a set that is asked for; default: 2, 5, 10 and 100 times the largest of `errors`.

    Raises:
        UsageError: see `power_law` and `growth`.
    """
    error, size = power_law(errors), power_law(sizes) if sizes else None
    asked = [error.high * times for times in (2, 5, 10, 100)] if samples is None else [samples]
    found = [
        growth(
            one, error, size=size, flops_per_sample=workload.operations, now_parameters=workload.parameters,
            epochs=workload.run.epochs,
        )
        for one in asked
    ]  # fmt: skip
    return Grown(error, size, tuple(found))


@final
@dataclass(frozen=True)
class Plan:
    """Attributes: pays: the most nodes that do; of one count that one. moved, choices, memory: at that many. tight:
    counts of nodes with which a device's memory does not hold its samples.
    epochs_from: where epochs come from. lars: learning rate and warm-up for each answer's batch, of ResNet-50 on
    ImageNet by LARS; None: the batch is not among those, or it is another job. useful: nodes within the batches that
    were measured; None: they were not. deadline_h: hours; in_time: the fewest nodes that keep it; None: none do."""

    name: str
    job: Job
    cluster: Cluster
    known: Known
    epochs_from: str
    answers: tuple[Answer, ...]
    pays: int
    moved: tuple[Moved, ...]
    choices: tuple[Choice, ...]
    memory: Memory
    tight: tuple[int, ...]
    lars: tuple[Suggestion | None, ...]
    useful: int | None
    deadline_h: float | None = None
    grown: Grown | None = None

    @property
    def best(self) -> Answer:
        """Of the most nodes that pay."""
        return next(one for one in self.answers if one.nodes == self.pays)

    @property
    def in_time(self) -> int | None:
        return next((one.nodes for one in self.answers if one.hours <= (self.deadline_h or 0.0)), None)

    def to_json(self) -> dict[str, Any]:
        """For programs; what is infinite or unknown is null."""
        rows = [
            {
                **asdict(one),
                "step_s": one.step.seconds,
                "communication_ratio": one.step.communication_ratio,
                "efficiency": one.efficiency,
                "lars": None if lr is None else asdict(lr),
            }
            for one, lr in zip(self.answers, self.lars, strict=True)
        ]
        found = {
            "name": self.name,
            "cluster": self.cluster.model_dump(mode="json"),
            "compute": asdict(self.known),
            "epochs_from": self.epochs_from,
            "answers": rows,
            "pays_until": self.pays,
            "moved": [asdict(one) for one in self.moved],
            "choices": [asdict(one) for one in self.choices],
            "memory": {**asdict(self.memory), "fits": self.memory.fits},
            "nodes_without_room": list(self.tight),
            "warnings": warnings(self),
            "useful_nodes": self.useful,
            "deadline_hours": self.deadline_h,
            "nodes_in_time": self.in_time,
            "growth": None if self.grown is None else asdict(self.grown),
        }
        plain: dict[str, Any] = _finite(found)
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan(
    workload: Workload,
    job: Job,
    cluster: Cluster,
    known: Known,
    epochs_from: str,
    nodes: Sequence[int],
    *,
    deadline_h: float | None = None,
) -> Plan:
    """Raises UsageError: see `answers`."""
    found = answers(job, cluster, nodes)
    pays = pays_until(job, cluster, nodes)
    if pays not in nodes:
        found = answers(job, cluster, [*nodes, pays])
    law, useful = job.epochs, None
    capacity = cluster.of.memory_bytes
    held = {one.nodes: memory(workload, job.per_device_of(one.devices), capacity, one.devices) for one in found}
    if isinstance(law, Epochs) and law.low < law.high and job.per_device is not None:
        useful = useful_nodes(law.high, job.per_device * job.accumulate, cluster.devices)
    lars: list[Suggestion | None] = [None] * len(found)
    if is_official(workload):
        lars = [
            one if one is not None and one.inside else None for one in (suggest(a.batch, official()) for a in found)
        ]
    return Plan(
        workload.name,
        job,
        cluster,
        known,
        epochs_from,
        tuple(found),
        pays,
        tuple(sensitivity(job, cluster, pays)),
        tuple(choices(workload, job, cluster, pays)),
        held[pays],
        tuple(nodes for nodes, one in held.items() if not one.fits),
        tuple(lars),
        useful,
        deadline_h,
    )


COLUMNS = (
    *("nodes", "devices", "batch", "images/s", "step", "comm", "by", "scaling", "learning", "epochs"),
    *("lr", "warm-up", "time", "90 %", "kWh", "cost", "limit"),
)
SHORT = {
    "two_dimensional": "2d",
    "double_tree": "2 trees",
    "halving_doubling": "halving",
    "parameter_server": "servers",
    "shared_server": "servers",
}


def text(found: Plan) -> str:
    """Lines for a terminal."""
    job, known, compute = found.job, found.known, found.known.compute
    lines = [
        f"{found.name} on {found.cluster.title}",
        f"  step      {milliseconds(compute.fixed_s)} and {milliseconds(compute.sample_s)} a sample, by {known.how}",
        f"  exchange  {sum(one.nbytes for one in job.gradients) / 1e6:,.1f} MB of gradients",
        f"  epochs    {found.epochs_from}",
        f"  memory    {remembered(found)}",
        f"  input     {fed(found)}",
        "",
        *(warned := warnings(found)),
        *([""] if warned else []),
        *table(rows(found)),
        "",
        *verdicts(found),
        moving(found),
        *others(found),
    ]
    if found.grown is not None:
        lines += ["", f"The error falls as samples to the power of {found.grown.error.exponent:.3f}."]
        lines += table(growing(found.grown))
    return "\n".join([*lines, *notes(found)])


def warnings(found: Plan) -> list[str]:
    """Why what is planned would not be done so."""
    lines = list(found.known.warnings)
    if found.tight:
        at = f"{found.tight[0]:,} to " * (len(found.tight) > 1) + count(found.tight[-1], "node")
        fix = "more nodes, or micro-batches (--accumulate)"
        if found.job.per_device is not None:
            fix = "fewer samples of each (--per-device), a batch for all together (--batch), or micro-batches of fewer"
        lines.append(f"A device's memory does not hold its samples with {at}: plan {fix}.")
    large = [one for one in found.answers if one.batch > found.job.samples]
    if large:
        what = f"a step is of {large[0].batch:,.0f} samples, and the set has {found.job.samples:,}"
        lines.append(f"From {count(large[0].nodes, 'node')} on {what}: plan a smaller batch (--per-device, --batch).")
    return lines


def verdicts(found: Plan) -> list[str]:
    """How many nodes pay, keep the deadline, and still learn."""
    lines = [verdict(found)] if len(found.answers) > 1 else []
    if found.deadline_h is not None:
        few = found.in_time
        keep = "None of them keeps" if few is None else f"{count(few, 'node')} keep{'s' if few == 1 else ''}"
        lines.append(f"{keep} the deadline of {span(found.deadline_h)}.")
    law, best = found.job.epochs, found.best
    if isinstance(law, Epochs):
        regime = law.regime(best.batch)
        lines.append(f"A batch of {best.batch:,.0f} of a critical {law.critical:,.0f}: {regime}.")
    if found.useful is not None and isinstance(law, Epochs):
        most = f"{law.high:,.0f}, the largest that was measured"
        where = f"Up to {count(found.useful, 'node')}" if found.useful else "With no node"
        lines.append(f"{where} the batch stays within {most}.")
    if found.best.strips > 1:
        lines.append(f"There are more devices than samples: {found.best.strips} share an image, in strips.")
    return lines


def milliseconds(seconds: float) -> str:
    """`3.1 ms`, `1,020 ms`: three digits at least, and every one before the point."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def fed(found: Plan) -> str:
    """What is known of the way from the disks to the devices."""
    best, far = found.best, found.cluster.storage
    free = best.input_images_s == math.inf
    if free and math.isclose(best.first_images_s, best.images_s, rel_tol=1e-9):
        said = "loading and storage are not known, and taken not to limit"
    elif free:
        said = f"{best.first_images_s:,.0f} images/s in the first epoch, later ones do not wait"
    else:
        rate, where = best.input_images_s, count(best.nodes, "node")
        said = f"{rate:,.0f} images/s at {where}, {best.first_images_s:,.0f} trained in the first epoch"
    if not found.job.encoded_bytes and (far.node_gb_s or far.shared_gb_s):
        said += "; bytes of an image are not known (--image-kb), and storage's bandwidth is left out"
    return said


UNITS = (("d", 24.0, 48.0), ("h", 1.0, 1.0), ("min", 1 / 60, 1 / 60), ("s", 1 / 3600, 0.0))
"""(unit, its hours, hours from which on it is used)."""


def unit_of(hours: float) -> tuple[str, float]:
    """(unit, its hours) in which so many are said."""
    return next((unit, each) for unit, each, least in UNITS if hours >= least)


def span(hours: float) -> str:
    """`3.2 h`, `8.7 min`, `4.2 s` or `0.042 s`; of two days and more, days."""
    unit, each = unit_of(hours)
    value = hours / each
    return f"{value:,.1f} {unit}" if value >= 1 else f"{value:.2g} {unit}"


def between(low: float, high: float) -> str:
    """`9.9-12 min`, in the unit of the higher one."""
    unit, each = unit_of(high)
    return f"{low / each:.3g}-{high / each:.3g} {unit}"


def rows(found: Plan) -> list[tuple[str, ...]]:
    """The heading, and one for each count of nodes; columns of which nothing is known are left out."""
    result = [COLUMNS]
    for one, lr in zip(found.answers, found.lars, strict=True):
        result.append(
            (
                f"{one.nodes:,}",
                f"{one.devices:,}",
                f"{one.batch:,.0f}",
                f"{one.images_s:,.0f}",
                f"{one.step.seconds * 1e3:,.1f} ms",
                f"{one.step.communication_ratio:.2f}",
                "+".join(SHORT.get(name, name) for name in one.step.algorithms) or "-",
                f"{one.scaling:.0%}",
                f"{one.statistical:.0%}",
                f"{one.epochs:.3g}",
                "-" if lr is None else f"{lr.lr:.3g}",
                "-" if lr is None else f"{lr.warmup:.2g}",
                span(one.hours),
                between(one.low_hours, one.high_hours),
                "-" if one.kwh is None else f"{one.kwh:,.3g}",
                "-" if one.cost is None else f"{one.cost:,.3g}",
                limit(found, one),
            )
        )
    keep = [at for at in range(len(COLUMNS)) if any(row[at] != "-" for row in result[1:])]
    return [tuple(row[at] for at in keep) for row in result]


def limit(found: Plan, one: Answer) -> str:
    """What limits it; and that it finds no room in memory."""
    return f"{one.limit}, no room" if one.nodes in found.tight else one.limit


def table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Numbers to the right, the last column to the left."""
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if at == last else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def notes(found: Plan) -> list[str]:
    """Where epochs are not known: of the first plan on either side of what was measured."""
    epochs = found.job.epochs
    if not isinstance(epochs, Epochs):
        return []
    above = next((one for one in found.answers if one.batch > epochs.high), None)
    below = next((one for one in reversed(found.answers) if one.batch < epochs.low), None)
    sides = ((below, "Up to"), (above, "From"))
    return [f"{side} {count(one.nodes, 'node')}: {one.warning}." for one, side in sides if one is not None]


def growing(found: Grown) -> list[tuple[str, ...]]:
    """The heading, and one for each set."""
    result: list[tuple[str, ...]] = [
        ("samples", "error", "95 %", "parameters", "PF/s-days", "years of a server without a GPU", "measured up to")
    ]
    for one in found.sizes:
        band = f"{one.low:.3g} to {one.high:.3g}" if one.high < float("inf") else "of two points unknown"
        result.append(
            (
                f"{one.samples:,.3g}",
                f"{one.error:.3g}",
                band,
                "-" if one.parameters is None else f"{one.parameters:,.3g}",
                "-" if one.pf_s_days is None else f"{one.pf_s_days:,.3g}",
                "-" if one.cpu_years is None else f"{one.cpu_years:,.3g}",
                f"1/{one.extrapolated:.3g} of it" if one.extrapolated > 1 else "more",
            )
        )
    return result


def verdict(found: Plan) -> str:
    """How many nodes pay."""
    best, most = found.best, found.answers[-1]
    least = 2**PAYS
    learns = "" if isinstance(found.job.epochs, Epochs) else ", if larger batches need no more epochs"
    room = " Their samples find no room in memory, see above." if best.nodes in found.tight else ""
    if best.nodes == most.nodes:
        return f"All {most.nodes:,} pay{learns}: twice the nodes are at least {least:.2f} times as fast.{room}"
    more, faster = most.nodes / best.nodes, best.hours / most.hours
    over = f"More than {count(best.nodes, 'node')} {'does' if best.nodes == 1 else 'do'} not pay"
    after = next(one for one in found.answers if one.nodes > best.nodes)
    if min(after.batch, 2 * best.batch) > found.job.samples:
        return f"{over}: a step would be of more samples than the set has.{room}"
    return f"{over}: {most.nodes:,} are {more:.3g} times as many and {faster:.2f} times as fast{learns}.{room}"


def remembered(found: Plan) -> str:
    """What a device has to hold."""
    held = found.memory
    used, there = held.used / 1e9, held.capacity / 1e9
    room = f"up to {held.most_samples:,} samples a device find room"
    return f"{used:.1f} of {there:g} GB{'' if held.fits else ', which does not fit'}; {room}"


def moving(found: Plan) -> str:
    """The inputs that matter."""
    named = [one for one in found.moved if one.size >= 0.005][:MOST_MOVED]
    parts = [f"{one.name} ({one.less - 1:+.0%} with 20 % less, {one.more - 1:+.0%} with more)" for one in named]
    return f"The time at {count(found.pays, 'node')} is moved most by: {'; '.join(parts) or 'nothing'}."


def others(found: Plan) -> list[str]:
    """Ways to spread it that are sooner; or where plain data parallelism finds no room, those that do."""
    at, fits = count(found.pays, "node"), found.memory.fits
    named = [one for one in found.choices if one.memory.fits and (one.gain > 1.01 or not fits)]
    if fits and not named:
        return [f"At {at} no other way to spread it is sooner at the target than data parallelism."]
    if not named:
        return [f"At {at} no other way to spread it finds room in a device's memory."]
    room = "" if fits else "there is room with "
    return [f"At {at} {room}{one.name}: {one.gain:.2f} times as fast to the target ({one.note})." for one in named]
