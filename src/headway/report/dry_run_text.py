"""Text of a dry run, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from headway.core.text_format import format_bytes, pluralise
from headway.core.workload import Workload
from headway.parallel.parallel_recipe import divides_weights
from headway.setup.rates import describe_batch
from headway.training.dry_run import DryRun

# Epochs in a row of learning rates.
RATES_PER_ROW = 10
# Rows of learning rates; a longer run shows every second epoch, every third, and so on.
MAX_RATE_ROWS = 12


def format_dry_run(dry_run: DryRun) -> str:
    """Formats steps, batch, network, memory, exchange, learning rates and kinds of layers."""
    work, recipe = dry_run.workload, dry_run.loaded.recipe
    run, step, images = work.run, work.step, work.input
    # Frozen layers have no gradients, so their parameters do not count.
    trained = sum(one.parameters * one.gradient_bytes // one.weight_bytes for one in work.layers if one.weight_bytes)
    rows = [
        ("steps", f"{run.steps:,} in {run.epochs:.4g} epochs of {run.samples:,} samples"),
        ("batch", _describe_batch(dry_run)),
        ("images", _describe_images(work)),
        ("on host", ", ".join(("decode", *images.on_host))),
        ("on device", ", ".join(images.on_device) or "no augmentation"),
        *_describe_augment_place(dry_run),
        ("network", f"{work.parameters:,} parameters ({trained:,} trained) in {len(work.layers)} layers"),
        (
            "",
            f"{format_count(work.forward_multiply_adds)} multiply-adds forward, "
            f"{format_count(work.backward_multiply_adds)} backward",
        ),
        (
            "",
            f"per image; {format_count(step.batch * (work.forward_multiply_adds + work.backward_multiply_adds))} "
            "per step",
        ),
        ("precision", step.precision),
        *_describe_compile(dry_run),
        (
            "optimizer",
            f"{step.update.optimizer}: {format_bytes(step.update.state_bytes, 4)} of state, "
            f"{step.update.passes:.1f} passes over the weights",
        ),
        ("exchange", _describe_exchange(dry_run)),
    ]
    if run.evaluations:
        of = f" of {run.evaluation_samples:,} samples" if run.evaluation_samples is not None else ""
        rows.append(("evaluations", f"{run.evaluations:,}{of}"))
    rows.append(("checkpoints", f"{run.checkpoints:,} of {format_bytes(run.checkpoint_bytes, 4)}"))
    if len(run.phases) > 1:
        rows += [
            (
                "phases" if place == 0 else "",
                f"{one.steps:,} steps of {one.batch:,} images of {one.height} x {one.width}",
            )
            for place, one in enumerate(run.phases)
        ]
    lines = [f"{recipe.name}: dry run, nothing was trained", ""]
    lines += [f"{name:<13}{text}" for name, text in rows]
    lines += ["", *_list_memory(dry_run), "", *_list_rates(dry_run.rates), "", *_list_layer_kinds(work)]
    return "\n".join([*lines, *(["", *dry_run.notes] if dry_run.notes else [])])


def format_count(number: float) -> str:
    """Formats a large number, such as `4.089 billion`."""
    for unit, name in ((1e15, " x 10^15"), (1e12, " x 10^12"), (1e9, " billion"), (1e6, " million")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:,.0f}"


def _describe_batch(dry_run: DryRun) -> str:
    work, step = dry_run.workload, dry_run.workload.step
    batch = f"{step.batch:,}" if step.per_device is None else describe_batch(step.per_device, step.ranks)
    largest = max(phase.batch for phase in work.run.phases)
    if largest > step.batch:
        batch = f"{batch}, growing to {largest:,}"
    ranks = pluralise(dry_run.ranks, "rank")
    if dry_run.hosts > 1:
        ranks += f" on {dry_run.hosts:,} hosts"
    about = "" if dry_run.micro_batch * dry_run.accumulation * dry_run.ranks == largest else " at most"
    return f"{batch}: {dry_run.micro_batch:,} in a micro-batch x {dry_run.accumulation:,} accumulated x {ranks}{about}"


def _describe_augment_place(dry_run: DryRun) -> list[tuple[str, str]]:
    place, moves = dry_run.augment_place, {"flip", "translate"}
    if place is None:
        return []
    # Without a device that crops, only these have a choice.
    there = "crops, flip and translate on the device" if place.where == "device_crops" else ""
    if moves & {*dry_run.workload.input.on_host, *dry_run.workload.input.on_device}:
        there = there or f"flip and translate on the {place.where}"
    return [("", f"{there or 'crops on the host'}: {place.reason}")]


def _describe_images(work: Workload) -> str:
    images = work.input
    text = f"{images.channels} x {images.height} x {images.width}, {format_bytes(images.decoded_bytes, 4)} decoded"
    if images.encoded_bytes is not None:
        text += f", {format_bytes(images.encoded_bytes, 4)} on the disk"
    return text


def _describe_compile(dry_run: DryRun) -> list[tuple[str, str]]:
    """Describes the graphs that torch.compile makes of the network, even if the recipe does not compile it."""
    asked, fits = dry_run.loaded.recipe.compile, dry_run.compilable
    word = str(asked).lower()
    if fits is None:
        return [("compile", word)]
    takes = "takes" if asked else "would take"
    if fits.is_whole:
        return [("compile", f"{word}: torch.compile {takes} the network whole, as one graph")]
    # Compiling is one word in the recipe, so the result is worth showing before anybody asks for it.
    parts = {0: "nothing of the network", 1: "a part of the network, as one graph"}
    text = parts.get(fits.graphs, f"the network in {fits.graphs} graphs")
    if not fits.breaks:
        return [("compile", f"{word}: torch.compile {takes} {text}, and gives no reason")]
    return [
        ("compile", f"{word}: torch.compile {takes} {text}; it stops at"),
        *(("", one.describe()) for one in fits.breaks),
    ]


def _describe_exchange(dry_run: DryRun) -> str:
    exchange = dry_run.workload.step.exchange
    text = f"{format_bytes(exchange.gradient_bytes, 4)} of gradients per step"
    if exchange.statistics_bytes:
        text += f", {format_bytes(exchange.statistics_bytes, 4)} of running statistics"
    if dry_run.ranks == 1:
        return f"{text}; none with one process"
    who = "host" if dry_run.hosts > 1 else "rank"
    # `auto` chooses by the measured links, and a dry run measures none: the ring stands for it.
    name = "ring" if exchange.algorithm == "auto" else exchange.algorithm
    if divides_weights(dry_run.loaded.recipe.parallel):
        name = "weights twice, gradients once"
    return f"{text}; each {who} sends {format_bytes(dry_run.sent_bytes, 4)} ({name})"


def _list_memory(dry_run: DryRun) -> list[str]:
    places = [where for where in ("device", "host") if any(part.where == where for part in dry_run.memory)]
    lines = ["memory per rank, estimated; without temporary memory of layers and without the cache of the data"]
    for where in places:
        parts = [part for part in dry_run.memory if part.where == where]
        on = f"  on the {where}" if len(places) > 1 else ""
        lines += [f"  {part.name:<22}{format_bytes(part.bytes, 4):>10}{on}  {part.what}".rstrip() for part in parts]
        lines.append(f"  {'total':<22}{format_bytes(sum(part.bytes for part in parts), 4):>10}{on}")
    return lines


def _list_rates(rates: Sequence[tuple[float, float]]) -> list[str]:
    # The last entry is the last step; all others are beginnings of epochs.
    of_epochs, (end, last) = rates[:-1], rates[-1]
    every = max(1, ceil(len(of_epochs) / (RATES_PER_ROW * MAX_RATE_ROWS)))
    shown = [rate for rate in of_epochs if int(rate[0]) % every == 0]
    lines = [f"learning rate at the start of {'each epoch' if every == 1 else f'every {every} epochs'}"]
    for place in range(0, len(shown), RATES_PER_ROW):
        row = shown[place : place + RATES_PER_ROW]
        lines.append(f"  {row[0][0]:>5.0f}  " + " ".join(f"{lr:>8.4g}" for _, lr in row))
    return [*lines, f"  at the last step, epoch {end:.4g}: {last:.4g}"]


def _list_layer_kinds(work: Workload) -> list[str]:
    """Lists the layers by kind, those with the most multiply-adds first."""
    header = ("layers", "", "parameters", "multiply-adds", "saved per sample")
    rows = []
    for kind in {layer.kind: None for layer in work.layers}:
        mine = [layer for layer in work.layers if layer.kind == kind]
        sums = [
            sum(values)
            for values in zip(
                *((one.forward_multiply_adds, one.parameters, one.saved_bytes) for one in mine), strict=True
            )
        ]
        rows.append((sums, (kind, f"{len(mine)}", f"{sums[1]:,}", format_count(sums[0]), format_bytes(sums[2], 4))))
    rows.sort(key=lambda row: row[0], reverse=True)
    cells = [header, *(row for _, row in rows)]
    # Names are flush left, numbers flush right.
    wide = [max(len(row[place]) for row in cells) for place in range(len(header))]
    return [
        "  ".join([row[0].ljust(wide[0]), *(cell.rjust(size) for cell, size in zip(row[1:], wide[1:], strict=True))])
        for row in cells
    ]
