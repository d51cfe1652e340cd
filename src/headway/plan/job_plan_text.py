"""A job plan as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from headway.core.text_format import align_table, format_bytes, pluralise
from headway.plan.convergence import EpochsLaw
from headway.plan.growth_text import format_growth
from headway.plan.job_plan import JobPlan, list_warnings
from headway.plan.prediction import Prediction
from headway.plan.published import tabulate_published
from headway.plan.scaling import SPEEDUP_EXPONENT, find_paying_devices
from headway.plan.wording import format_hours, format_hours_range, format_milliseconds

# Number of inputs that the summary names.
MAX_SENSITIVITIES = 4
WITHIN_NODE_TITLE = "On some of the devices of one node"
# All-reduce algorithms as the column `by` writes them.
SHORT_NAMES = {
    "two_dimensional": "2d",
    "double_tree": "2 trees",
    "halving_doubling": "halving",
    "parameter_server": "servers",
    "shared_server": "servers",
}


def format_plan(plan: JobPlan) -> str:
    """Formats a plan: warnings, inputs, a table of node counts, then conclusions."""
    # The job's own time of a sample, which is a mean if its images grow.
    estimate, compute = plan.estimate, plan.job.compute
    step = f"{format_milliseconds(compute.fixed_s)} and {format_milliseconds(compute.sample_s)} a sample"
    warned = list_warnings(plan)
    lines = [
        f"{plan.name} on {plan.cluster.title}",
        *warned,
        *([""] if warned else []),
        f"  step      {step}, by {estimate.how}",
        f"  exchange  {format_bytes(sum(one.nbytes for one in plan.job.gradients))} of gradients",
        f"  batch     {describe_batch(plan)}",
        f"  epochs    {plan.epochs_from}",
        f"  memory    {describe_memory(plan)}",
        f"  input     {describe_input(plan)}",
        "",
        *align_table(tabulate_predictions(plan), left=-1),
        "",
        *tabulate_grown(plan),
        *tabulate_within_node(plan),
        *tabulate_published(plan.published),
        *list_verdicts(plan),
        describe_sensitivities(plan),
        *describe_strategies(plan),
        "",
        *align_table(tabulate_strategies(plan), left=-1),
    ]
    if plan.growth is not None:
        lines += ["", *format_growth(plan.growth)]
    return "\n".join([*lines, *list_notes(plan)])


def list_verdicts(plan: JobPlan) -> list[str]:
    """Lists the conclusions: how many nodes pay, which keep the deadline, and whether their batch still learns."""
    # Only several node counts can tell which of them pay.
    lines = [describe_paying_nodes(plan)] if len(plan.predictions) > 1 else []
    if plan.deadline_h is not None:
        lines.append(describe_deadline(plan.deadline_h, plan.nodes_in_time, plan.nodes_surely_in_time))
    law, best = plan.job.epochs, plan.best
    # The rate that the devices alone would reach, against what storage and loading let through.
    idle = 1 - best.images_s / (best.batch / best.step.seconds)
    if best.limit in ("loading", "storage"):
        at = pluralise(best.nodes, "node")
        lines.append(f"At {at} {best.limit} limits: the devices idle {idle:.0%} of the time.")
    if isinstance(law, EpochsLaw):
        regime = law.classify_batch(best.batch)
        lines.append(f"The batch of {best.batch:,.0f} against a critical batch of {law.critical:,.0f}: {regime}.")
    if plan.useful_nodes is not None and isinstance(law, EpochsLaw):
        largest = f"{law.high:,.0f}, the largest measured one"
        if plan.useful_nodes:
            lines.append(f"Up to {pluralise(plan.useful_nodes, 'node')} the batch stays within {largest}.")
        else:
            lines.append(f"On any number of nodes the batch exceeds {largest}.")
    if best.strips > 1:
        lines.append(f"There are more devices than samples: {best.strips} devices share each image, in strips.")
    return lines


def describe_deadline(hours: float, few: int | None, surely: int | None) -> str:
    """Says how many nodes keep the deadline, by the planned time and by the upper end of its band."""
    deadline = f"the deadline of {format_hours(hours)}"
    if few is None:
        return f"None of them keeps {deadline}."
    keeps = f"{pluralise(few, 'node')} keep{'s' if few == 1 else ''} {deadline}"
    if surely is None:
        return f"{keeps}, but the 90 % band of none ends before it."
    if surely == few:
        return f"{keeps}, and so does the whole 90 % band."
    return f"{keeps}; with {pluralise(surely, 'node')} the whole 90 % band does."


def describe_batch(plan: JobPlan) -> str:
    """Says how the batch of a step depends on the number of devices."""
    job, parts = plan.job, f" in {plan.job.accumulate:,} micro-batches" * (plan.job.accumulate > 1)
    if job.per_device is not None:
        each = f"{job.per_device * job.accumulate:g} samples on each device{parts}"
        return f"{each}, so that it grows with the nodes; --batch keeps it the same"
    return f"{job.batch:,.0f} samples on any number of nodes{parts}"


def describe_input(plan: JobPlan) -> str:
    """Describes the rate of storage and loading, as far as it is known."""
    best, far, unit = plan.best, plan.cluster.storage, plan.job.unit
    # An infinite rate is an unknown one. The first epoch may still be limited: caches are cold.
    free = best.input_images_s == math.inf
    if free and math.isclose(best.first_images_s, best.images_s, rel_tol=1e-9):
        known = far.node_gb_s or far.shared_gb_s
        what = "loading is unknown and taken" if known else "loading and storage are unknown and taken"
        text = f"{what} not to limit"
    elif free:
        text = f"{best.first_images_s:,.0f} {unit}/s in the first epoch, no limit later"
    else:
        rate, at = best.input_images_s, pluralise(best.nodes, "node")
        text = f"{rate:,.0f} {unit}/s at {at}, {best.first_images_s:,.0f} trained in the first epoch"
    if plan.loading_from:
        text = plan.loading_from if free else f"{text}; {plan.loading_from}"
    if not plan.job.encoded_bytes and (far.node_gb_s or far.shared_gb_s):
        text += "; the bandwidth of the storage is ignored, since bytes per image are unknown (--image-kb)"
    return text


def tabulate_predictions(plan: JobPlan) -> list[tuple[str, ...]]:
    """Tabulates the predictions: a heading, then a row per node count. Columns without any value are left out."""
    columns = (
        *("nodes", "devices", "batch", f"{plan.job.unit}/s", "step", "comm", "by", "scaling", "learning", "epochs"),
        *("lr", "warm-up", "time", "90 %", "kWh", "cost", "limit"),
    )
    table: list[tuple[str, ...]] = [columns]
    for one, lr in zip(plan.predictions, plan.lars, strict=True):
        algorithms = "+".join(SHORT_NAMES.get(name, name) for name in one.step.algorithms) or "-"
        row = (
            f"{one.nodes:,}", f"{one.devices:,}", f"{one.batch:,.0f}", f"{one.images_s:,.0f}",
            f"{one.step.seconds * 1e3:,.1f} ms", f"{one.step.communication_ratio:.2f}", algorithms,
            f"{one.scaling:.0%}", f"{one.statistical:.0%}", f"{one.epochs:.3g}",
            "-" if lr is None else f"{lr.lr:.3g}", "-" if lr is None else f"{lr.warmup:.2g}",
            format_hours(one.hours), format_hours_range(one.low_hours, one.high_hours),
            "-" if one.kwh is None else f"{one.kwh:,.3g}", "-" if one.cost is None else f"{one.cost:,.3g}",
            describe_bottleneck(plan, one),
        )  # fmt: skip
        table.append(row)
    # Prices, energy and learning rates are often unknown: an empty column would only widen the table.
    keep = [at for at in range(len(columns)) if any(row[at] != "-" for row in table[1:])]
    return [tuple(row[at] for at in keep) for row in table]


def tabulate_grown(plan: JobPlan) -> list[str]:
    """Tabulates the same node counts with a batch that grows with them; no lines if the plan itself does that."""
    if not plan.grown:
        return []
    return [f"{describe_grown(plan)}:", *align_table(list_brief_rows(plan, "nodes", plan.grown), left=-1), ""]


def describe_grown(plan: JobPlan) -> str:
    """Returns the title of the table whose batch grows."""
    return f"With {plan.grown_per_device} samples on each device, the batch grows with the nodes"


def tabulate_within_node(plan: JobPlan) -> list[str]:
    """Tabulates the job on some devices of one node, and says how many of them pay; no lines if a node has one."""
    if len(plan.within_node) < 2:
        return []
    table = align_table(list_brief_rows(plan, "devices", plan.within_node), left=-1)
    return [f"{WITHIN_NODE_TITLE}:", *table, describe_paying_devices(plan), ""]


def describe_paying_devices(plan: JobPlan) -> str:
    """Says how many devices of one node pay."""
    best, most = find_paying_devices(plan.within_node), plan.within_node[-1]
    if best == most.devices:
        return f"On one node all {most.devices} devices pay."
    after = next(one for one in plan.within_node if one.devices > best)
    faster = next(one for one in plan.within_node if one.devices == best).hours / after.hours
    many = after.devices
    return f"On one node {many} devices do not pay, take {best}: {many} are {faster:.2f} times as fast."


def list_brief_rows(
    plan: JobPlan, unit: Literal["nodes", "devices"], predictions: Sequence[Prediction]
) -> list[tuple[str, ...]]:
    """Lists predictions with the columns that matter most: a heading, then a row for each."""
    rate = f"{plan.job.unit}/s"
    table: list[tuple[str, ...]] = [(unit, "batch", rate, "scaling", "epochs", "time", "90 %", "limit")]
    for one in predictions:
        hours = (format_hours(one.hours), format_hours_range(one.low_hours, one.high_hours))
        # A step's micro-batches need no more memory than the largest of them.
        parts = plan.job.count_micro_batches(one.devices)
        fits = one.batch / one.devices / parts <= plan.memory.most_samples
        table.append(
            (f"{getattr(one, unit):,}", f"{one.batch:,.0f}", f"{one.images_s:,.0f}", f"{one.scaling:.0%}",
             f"{one.epochs:.3g}", *hours, _describe_limit(plan, one, fits=fits))
        )  # fmt: skip
    return table


def describe_bottleneck(plan: JobPlan, prediction: Prediction) -> str:
    """Names the limiting part of a prediction, and says so if memory or the training set is too small."""
    return _describe_limit(plan, prediction, fits=prediction.nodes not in plan.nodes_over_memory)


def _describe_limit(plan: JobPlan, prediction: Prediction, *, fits: bool) -> str:
    """Names the limiting part of a prediction; `fits`: its samples fit the memory."""
    room = "" if fits else ", no room"
    return f"{prediction.limit}{room}{', more than the set' if prediction.batch > plan.job.samples else ''}"


def list_notes(plan: JobPlan) -> list[str]:
    """Lists the doubts about epochs: the nearest node count on either side of the measured batches."""
    law = plan.job.epochs
    if not isinstance(law, EpochsLaw):
        return []
    above = next((one for one in plan.predictions if one.batch > law.high), None)
    below = next((one for one in reversed(plan.predictions) if one.batch < law.low), None)
    sides = ((below, "Up to"), (above, "From"))
    return [f"{side} {pluralise(one.nodes, 'node')}: {one.warning}." for one, side in sides if one is not None]


def describe_paying_nodes(plan: JobPlan) -> str:
    """Says how many nodes pay, and why more do not."""
    best, most = plan.best, plan.predictions[-1]
    learns = "" if isinstance(plan.job.epochs, EpochsLaw) else ", if larger batches need no more epochs"
    room = " Their samples do not fit a device's memory, see above." if best.nodes in plan.nodes_over_memory else ""
    if best.nodes == most.nodes:
        least = 2**SPEEDUP_EXPONENT
        return f"All {most.nodes:,} pay{learns}: twice the nodes are at least {least:.2f} times as fast.{room}"
    more, faster = most.nodes / best.nodes, best.hours / most.hours
    over = f"More than {pluralise(best.nodes, 'node')} {'does' if best.nodes == 1 else 'do'} not pay"
    after = next(one for one in plan.predictions if one.nodes > best.nodes)
    # The search also tried twice the nodes: it stopped there because of the batch, not of the speed.
    if min(after.batch, 2 * best.batch) > plan.job.samples:
        return f"{over}: a step would have more samples than the training set.{room}"
    return f"{over}: {most.nodes:,} are {more:.3g} times as many and {faster:.2f} times as fast{learns}.{room}"


def describe_memory(plan: JobPlan) -> str:
    """Compares the memory that a device needs with its capacity."""
    held = plan.memory
    fits = "" if held.fits else ", too much"
    return (
        f"{format_bytes(held.used)} of {format_bytes(held.capacity)}{fits}; a device has room for up to"
        f" {held.most_samples:,} samples"
    )


def describe_sensitivities(plan: JobPlan) -> str:
    """Names the inputs that change the time most."""
    # Below half a per cent an input is not worth measuring.
    named = [one for one in plan.sensitivities if one.magnitude >= 0.005][:MAX_SENSITIVITIES]
    parts = [f"{one.name} ({one.less - 1:+.0%} with 20 % less, {one.more - 1:+.0%} with more)" for one in named]
    return f"The time at {pluralise(plan.paying_nodes, 'node')} depends most on: {'; '.join(parts) or 'nothing'}."


def describe_strategies(plan: JobPlan) -> list[str]:
    """Describes the strategies that beat data parallelism, or that fit in memory if it does not."""
    at, fits = pluralise(plan.paying_nodes, "node"), plan.memory.fits
    named = [one for one in plan.strategies if one.memory.fits and (one.gain > 1.01 or not fits)]
    if fits and not named:
        return [f"At {at} no other strategy reaches the target sooner than data parallelism."]
    if not named:
        return [f"At {at} no strategy fits in a device's memory."]
    room = "" if fits else "there is room with "
    return [f"At {at} {room}{one.name}: {one.gain:.2f} times as fast to the target ({one.note})." for one in named]


def tabulate_strategies(plan: JobPlan) -> list[tuple[str, ...]]:
    """Tabulates the menu of strategies: a heading, then a row for each, the fastest first."""
    rate = f"{plan.job.unit}/s"
    table: list[tuple[str, ...]] = [("strategy", rate, "sent", "memory", "time", "times as fast", "recipe")]
    for one in plan.strategies:
        memory = f"{format_bytes(one.memory.used)}{'' if one.memory.fits else ', too much'}"
        table.append(
            (one.name, f"{one.images_s:,.0f}", format_bytes(one.sent_bytes), memory, format_hours(one.hours),
             f"{one.gain:.2f}", one.recipe)
        )  # fmt: skip
    return table
