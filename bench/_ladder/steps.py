"""Claims of the slides about a step: graphs, 16 bit, large batches. Measured with random images on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import final

import torch

from bench import _synthetic as synthetic
from bench._common import median, table, take_turns
from bench._ladder.contestants import BATCH
from bench._ladder.decks import Found, Ratio, quotient
from bench._ladder.rungs import CIFAR_NET, LENET, Network, times
from headway.core.messages import mute_messages
from headway.setup.precision import list_candidates
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

SIDE = 32
WARM_STEPS = 4
"""The first compiles, CUDA graphs are recorded in the second and third."""


@final
@dataclass(frozen=True)
class Sizes:
    """What is tried, and for how long."""

    networks: tuple[Network, ...]
    batches: tuple[int, ...]
    compiled: tuple[int, ...]
    rounds: int
    turn_s: float


FULL = Sizes((LENET, CIFAR_NET), (16, 64, 256, 1024), (8, 64, 1024), 7, 0.5)
QUICK = Sizes((LENET,), (16, 256), (), 3, 0.1)
"""Without compiling, which takes most of the time."""


@final
@dataclass(frozen=True)
class Case:
    """A recipe's batch, and what else it says."""

    batch: int
    overrides: tuple[str, ...] = ()


def measure(folder: Path, sizes: Sizes, device: torch.device) -> dict[str, Found]:
    """All that the slides claim of a step."""
    how = f"median of {sizes.rounds} rounds"
    graphs = "graphs" if device.type == "cuda" else "true"
    units = "" if "bf16" in list_candidates(device) else ", emulated: no units for it here"
    found: dict[str, Found] = {}
    gains: dict[tuple[str, int], Ratio] = {}
    for network in sizes.networks:
        least, most = min(sizes.batches), max(sizes.batches)
        cases = {f"batch {batch}": Case(batch) for batch in sizes.batches}
        taken = rates(network, cases, folder / f"{network.name}-batches", sizes)
        if (ratio := over(taken, f"batch {most}", f"batch {least}")) is not None:
            found[f"large_batch_{network.name.lower()}"] = Found(
                ratio, f"batch {most} over {least}, {how}", sizes.rounds
            )
        for batch in sizes.compiled:
            cases = {"eager": Case(batch), "compiled": Case(batch, (f"compile={graphs}",))}
            taken = rates(network, cases, folder / f"{network.name}-compiled-{batch}", sizes)
            if (ratio := over(taken, "compiled", "eager")) is not None:
                gains[network.name, batch] = ratio
        cases = {"fp32": Case(BATCH), "bf16": Case(BATCH, ("precision=bf16",))}
        taken = rates(network, cases, folder / f"{network.name}-bf16", sizes)
        if (ratio := over(taken, "bf16", "fp32")) is not None:
            found[f"bf16_{network.name.lower()}"] = Found(ratio, f"batch {BATCH}, {how}{units}", sizes.rounds)
    return found | compiled(gains, how, sizes.rounds)


def compiled(gains: Mapping[tuple[str, int], Ratio], how: str, rounds: int) -> dict[str, Found]:
    """Whether small batches and small networks gain most.

    Args:
        gains: by network and batch.
    """
    found = {}
    batches = sorted(batch for name, batch in gains if name == LENET.name)
    if len(batches) > 1:
        small, large = (gains[LENET.name, batches[place]] for place in (0, -1))
        text = f"{times(small)} at {batches[0]}, {times(large)} at {batches[-1]}, {how}"
        found["compile_small_batch"] = Found(quotient(small, large), text, rounds)
    both = sorted(batch for batch in batches if (CIFAR_NET.name, batch) in gains)
    if both:
        lenet, other = gains[LENET.name, both[0]], gains[CIFAR_NET.name, both[0]]
        text = f"{times(lenet)} and {times(other)} at batch {both[0]}, {how}"
        found["compile_small_network"] = Found(quotient(lenet, other), text, rounds)
    return found


def over(taken: Mapping[str, list[float]], one: str, other: str) -> Ratio | None:
    """Images/s of one over another's in the same round; None where one is missing."""
    if one not in taken or other not in taken:
        return None
    return median([a / b for a, b in zip(taken[one], taken[other], strict=True)])


def rates(network: Network, cases: Mapping[str, Case], folder: Path, sizes: Sizes) -> dict[str, list[float]]:
    """images/s of each case in each round; they take turns of turn_s or one step. What fails is said and left out."""
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    arms: dict[str, Callable[[], None]] = {}
    images: dict[str, int] = {}
    with ExitStack() as stack:
        for name, case in cases.items():
            try:
                trainer = _trainer(network, case, folder / name.replace(" ", "-"), stack)
                trainer.run(WARM_STEPS)
                wait()
                started = perf_counter()
                trainer.run(1)
                wait()
            except Exception as error:  # of memory, or of the compiler: the other cases are worth having
                said = str(error).strip().splitlines() or [""]
                print(f"{network.name}, {name}: left out ({type(error).__name__}: {said[0][:200]})")
                continue
            steps = max(1, round(sizes.turn_s / (perf_counter() - started)))
            arms[name], images[name] = partial(trainer.run, steps), steps * case.batch
        taken = take_turns(arms, sizes.rounds, wait) if arms else {}
    torch._dynamo.reset()  # the next batch is compiled for itself, not for any batch
    found = {name: [images[name] / seconds for seconds in one] for name, one in taken.items()}
    _show(network, cases, found)
    return found


def _trainer(network: Network, case: Case, folder: Path, stack: ExitStack) -> Trainer:
    folder.mkdir(parents=True)
    with mute_messages():  # they would be the same for every case; later ones name graph breaks
        setup = synthetic.setup(network.factory, (SIDE, SIDE), case.batch, folder, *case.overrides)
    stack.enter_context(closing(setup.inputs))
    return stack.enter_context(closing(synthetic.trainer(setup, folder, SilentDisplay())))


def _show(network: Network, cases: Mapping[str, Case], found: Mapping[str, list[float]]) -> None:
    first = next(iter(found), "")
    rows: list[tuple[str, ...]] = [(f"{network.name}, a step", "batch", "images/s (95 %)", "ms", f"over {first}")]
    for name, taken in found.items():
        middle, low, high = median(taken)
        batch = cases[name].batch
        shown = f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]"
        rows.append((name, str(batch), shown, f"{batch / middle * 1e3:.3g}", times(over(found, name, first))))
    table(rows)
