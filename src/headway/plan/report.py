"""A plan as a whole: answers, what moves them, other ways; and what of it is said on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from headway.core.profile import Workload
from headway.plan.answer import PAYS, Answer, Job, Moved, answers, pays_until, sensitivity
from headway.plan.ask import Known
from headway.plan.choices import Choice, Memory, choices, memory, useful_nodes
from headway.plan.cluster import Cluster
from headway.plan.convergence import Epochs, Suggestion, official, suggest
from headway.plan.growth import Growth, PowerLaw, growth, power_law

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
    flops = 2.0 * (workload.forward_multiply_adds + workload.backward_multiply_adds)
    asked = [error.high * times for times in (2, 5, 10, 100)] if samples is None else [samples]
    found = [
        growth(
            one, error, size=size, flops_per_sample=flops, now_parameters=workload.parameters,
            epochs=workload.run.epochs,
        )
        for one in asked
    ]  # fmt: skip
    return Grown(error, size, tuple(found))


@final
@dataclass(frozen=True)
class Plan:
    """Attributes: pays: the most nodes that do. moved, choices: at that many. epochs_from: where epochs come from.
    lr: base learning rate of LARS and warm-up at that batch, of ResNet-50 on ImageNet; None: the batch is not among
    those."""

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
    lr: Suggestion | None
    useful: int | None
    grown: Grown | None = None

    @property
    def best(self) -> Answer:
        """Of the most nodes that pay."""
        return next(one for one in self.answers if one.nodes == self.pays)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        rows = [
            {**asdict(one), "step_s": one.step.seconds, "communication_ratio": one.step.communication_ratio,
             "efficiency": one.efficiency, "input_images_s": _finite(one.input_images_s)}
            for one in self.answers
        ]  # fmt: skip
        return {
            "name": self.name,
            "cluster": self.cluster.model_dump(mode="json"),
            "compute": asdict(self.known),
            "epochs_from": self.epochs_from,
            "answers": rows,
            "pays_until": self.pays,
            "moved": [asdict(one) for one in self.moved],
            "choices": [asdict(one) for one in self.choices],
            "memory": {**asdict(self.memory), "fits": self.memory.fits},
            "lars": None if self.lr is None else asdict(self.lr),
            "useful_nodes": self.useful,
            "growth": None if self.grown is None else asdict(self.grown),
        }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def plan(workload: Workload, job: Job, cluster: Cluster, known: Known, epochs_from: str, nodes: Sequence[int]) -> Plan:
    """Raises UsageError: see `answers`."""
    found = answers(job, cluster, nodes)
    pays = pays_until(found)
    best = next(one for one in found if one.nodes == pays)
    each = job.per_device_of(best.devices)
    useful = None
    if isinstance(job.epochs, Epochs) and job.per_device is not None:
        useful = useful_nodes(job.epochs.high, each * job.accumulate, cluster.devices)
    lr = suggest(best.batch, official()) if "resnet50" in workload.name.lower() else None
    return Plan(
        workload.name, job, cluster, known, epochs_from, tuple(found), pays,
        tuple(sensitivity(job, cluster, pays)), tuple(choices(workload, job, cluster, pays)),
        memory(workload, each, cluster.of.memory_gb * 1e9), lr if lr is not None and lr.inside else None, useful,
    )  # fmt: skip


COLUMNS = (
    "nodes", "devices", "batch", "images/s", "step", "comm/comp", "scaling", "learning", "epochs", "time", "90 %",
    "kWh", "cost", "limit",
)  # fmt: skip


def text(found: Plan) -> str:
    """Lines for a terminal."""
    job, known = found.job, found.known
    compute = known.compute
    lines = [
        f"{found.name} on {found.cluster.title}",
        f"  step      {compute.fixed_s * 1e3:,.3g} ms and {compute.sample_s * 1e3:,.3g} ms a sample, by {known.how}",
        f"  exchange  {sum(one.nbytes for one in job.buckets) / 1e6:,.1f} MB in {count(len(job.buckets), 'bucket')}",
        f"  epochs    by {found.epochs_from}",
        f"  memory    {remembered(found)}",
        "",
        *table(rows(found)),
        "",
        verdict(found),
    ]
    if found.useful is not None:
        assert isinstance(job.epochs, Epochs)
        regime = job.epochs.regime(found.best.batch)
        lines.append(f"At a batch of {found.best.batch:,.0f} of a critical {job.epochs.critical:,.0f}: {regime}.")
        most = f"{job.epochs.high:,.0f}, the largest that was measured"
        lines.append(f"Up to {count(found.useful, 'node')} the batch stays within {most}.")
    if found.lr is not None:
        lr = found.lr
        lines.append(f"LARS at that batch: learning rate {lr.lr:.3g}, warm-up {lr.warmup:.2g} epochs (official runs).")
    lines += [moving(found), *others(found)]
    if found.grown is not None:
        lines += ["", f"The error falls as samples to the power of {found.grown.error.exponent:.3f}."]
        lines += table(growing(found.grown))
    lines += notes(found)
    return "\n".join(lines)


def notes(found: Plan) -> list[str]:
    """Where epochs are not known: of the first plan on either side of what was measured."""
    epochs = found.job.epochs
    if not isinstance(epochs, Epochs):
        return []
    above = next((one for one in found.answers if one.batch > epochs.high), None)
    below = next((one for one in reversed(found.answers) if one.batch < epochs.low), None)
    result = []
    for one, side in ((below, "Up to"), (above, "From")):
        if one is not None:
            result.append(f"{side} {count(one.nodes, 'node')}: {one.warning}{'.' * (not one.warning.endswith('.'))}")
    return result


def count(number: int, name: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def span(hours: float) -> str:
    """`3.2 h`, `8.7 min` or `4.2 s`; of more than two days, days."""
    if hours >= 48:
        return f"{hours / 24:,.1f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.1f} min" if hours >= 1 / 60 else f"{hours * 3600:.1f} s"


def rows(found: Plan) -> list[tuple[str, ...]]:
    """The heading, and one for each count of nodes."""
    result = [COLUMNS]
    for one in found.answers:
        result.append(
            (
                f"{one.nodes:,}",
                f"{one.devices:,}",
                f"{one.batch:,.0f}",
                f"{one.images_s:,.0f}",
                f"{one.step.seconds * 1e3:,.1f} ms",
                f"{one.step.communication_ratio:.2f}",
                f"{one.scaling:.0%}",
                f"{one.statistical:.0%}",
                f"{one.epochs:.3g}",
                span(one.hours),
                f"{span(one.low_hours)} to {span(one.high_hours)}",
                "-" if one.kwh is None else f"{one.kwh:,.3g}",
                "-" if one.cost is None else f"{one.cost:,.3g}",
                one.limit,
            )
        )
    keep = [at for at, name in enumerate(COLUMNS) if name != "cost" or any(row[at] != "-" for row in result[1:])]
    return [tuple(row[at] for at in keep) for row in result]


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
    if best.nodes == most.nodes:
        return f"All {most.nodes:,} pay: each doubling leaves {PAYS:.0%} or more of its nodes as time saved."
    more, faster = most.nodes / best.nodes, best.hours / most.hours
    over = f"More than {count(best.nodes, 'node')} do not pay"
    return f"{over}: {most.nodes:,} are {more:.3g} times as many and {faster:.2f} times as fast."


def remembered(found: Plan) -> str:
    """What a device has to hold."""
    held = found.memory
    used, there = (held.weights + held.activations) / 1e9, held.capacity / 1e9
    room = f"up to {held.most_samples:,} samples a device find room"
    return f"{used:.1f} of {there:g} GB: {room if held.fits else f'it does not fit, {room}'}"


def moving(found: Plan) -> str:
    """The inputs that matter."""
    named = [one for one in found.moved if one.size >= 0.005][:MOST_MOVED]
    parts = [f"{one.name} ({one.less - 1:+.0%} with 20 % less, {one.more - 1:+.0%} with more)" for one in named]
    return f"The time at {count(found.pays, 'node')} is moved most by: {'; '.join(parts) or 'nothing'}."


def others(found: Plan) -> list[str]:
    """Ways to spread it that are not worse."""
    better = [one for one in found.choices if one.gain > 1.01]
    if not better:
        return [f"At {count(found.pays, 'node')} no other way to spread it is faster than data parallelism."]
    at = count(found.pays, "node")
    return [f"At {at} {one.name}: {one.gain:.2f} times the images/s ({one.note})." for one in better]
