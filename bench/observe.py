"""The cost of observing: the time that the Trainer spends on watching itself, timed call by call while it trains.

It times the marks of the Clock; the Observer, before and after a step and on logging steps; its hooks on the
optimizer's step; the board on which ranks write their step times; and the CPU time of the thread that samples the load
of the machine. The overhead of the timing itself is measured on an empty call and subtracted. Everything that is on by
default is on. A block is 50 steps, one of which logs. The images lie on the device.

observe_share          time of observing over time of a step: convolutions of bench.loop, a step of 3 to 10 ms
observe_share_cifar    the same with the network of recipes/cifar10.yaml, in batches of 64
observe_share_procs2   the first one, on rank 0 of two processes, which share the cores
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import clock_gettime_ns, perf_counter_ns, pthread_getcpuclockid
from typing import Any, final

from bench import _synthetic as synthetic
from bench._common import Claim, median, parser, report
from bench._family import run_bench
from headway.comm.comm_recipe import CommRecipe
from headway.core.messages import show_messages
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch
from headway.launch.ranks import Ranks
from headway.training.monitors import run_monitors
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

SAMPLER = "headway-sampler"
"""Name of the thread that samples."""
PARTS = ("clock", "observer", "layers", "board", "sampler")
CASES: dict[str, tuple[str, tuple[int, int], int]] = {
    "observe_share": ("bench.loop:convolutions", (16, 16), 32),
    "observe_share_cifar": ("headway.model:cifar_net", (32, 32), 64),
}
"""Network, height and width, batch."""

Block = dict[str, float]
"""Microseconds a step of each part, and of the whole `step`."""


@final
class Meter:
    """Adds up the time of the methods that it is put around."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)

    def around(self, part: str, owner: Any, *names: str) -> None:
        """From now on these methods of one object are timed."""
        for name in names:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*positional: Any, **named: Any) -> Any:
            self.calls[part] += 1
            begun = perf_counter_ns()
            try:
                return method(*positional, **named)
            finally:
                self.ns[part] += perf_counter_ns() - begun

        return timed


@final
class Nothing:
    def lap(self, stage: str) -> None:
        pass


def empty_ns(calls: int = 100_000) -> float:
    """What a call that does nothing takes by the meter."""
    meter, nothing = Meter(), Nothing()
    meter.around("nothing", nothing, "lap")
    for _ in range(calls):
        nothing.lap("stage")
    return meter.ns["nothing"] / calls


def metered(trainer: Trainer) -> Meter:
    """A meter around all by which a Trainer watches itself."""
    meter, observer = Meter(), trainer.accumulator.observer
    meter.around("clock", trainer.clock, "lap")
    meter.around("observer", observer, "begin_step", "end_step", "check_divergence", "write_rows")
    if observer._layers is not None:
        meter.around("layers", observer._layers, "_before_step", "_after_step")
    if trainer.ranks is not None:
        meter.around("board", trainer.ranks.rank_timings, "write", "read")
    return meter


def sampler_ns() -> int:
    """CPU time so far of the thread that samples; 0 where there is none."""
    found = [one.ident for one in threading.enumerate() if one.name == SAMPLER]
    return sum(clock_gettime_ns(pthread_getcpuclockid(ident)) for ident in found if ident is not None)


def measured(trainer: Trainer, blocks: int) -> list[Block]:
    """A block after the other; the first one warms up and is left out."""
    steps, off = trainer.setup.recipe.log_every_steps, empty_ns()
    meter, found = metered(trainer), []
    for _ in range(1 + blocks):
        meter.ns.clear()
        meter.calls.clear()
        begun, sampled = perf_counter_ns(), sampler_ns()
        trainer.run(steps)
        taken, sampled = perf_counter_ns() - begun, sampler_ns() - sampled
        block = {part: max(0.0, meter.ns[part] - off * meter.calls[part]) / steps / 1e3 for part in PARTS}
        found.append({**block, "sampler": sampled / steps / 1e3, "step": taken / steps / 1e3})
    return found[1:]


@contextmanager
def trainer_of(case: str, folder: Path, *overrides: str, ranks: Ranks | None = None) -> Iterator[Trainer]:
    factory, size, batch = CASES[case]
    setup = synthetic.setup(factory, size, batch, folder, *overrides, ranks=ranks)
    trainer = synthetic.trainer(setup, folder, SilentDisplay(), ranks)
    try:
        with run_monitors(trainer):
            yield trainer
    finally:
        trainer.close()


def alone(case: str, blocks: int, *overrides: str) -> list[Block]:
    with tempfile.TemporaryDirectory() as name, trainer_of(case, Path(name), *overrides) as trainer:
        return measured(trainer, blocks)


def together(blocks: int) -> list[Block]:
    """By two ranks, each with the batch of one process."""
    with tempfile.TemporaryDirectory() as name:
        if status := launch(["-m", "bench.observe", "--rank", json.dumps([name, blocks])], parse_hosts(2, None)):
            sys.exit(status)
        found: list[Block] = json.loads((Path(name) / "blocks.json").read_text())
        return found


def rank(folder: Path, blocks: int) -> None:
    ranks = Ranks.from_environment(CommRecipe())
    assert ranks is not None
    whole = f"batch={2 * CASES['observe_share'][2]}"
    with ranks, trainer_of("observe_share", folder, whole, ranks=ranks) as trainer:
        trainer.recovery.meet()
        found = measured(trainer, blocks)
        if ranks.is_lead:
            (folder / "blocks.json").write_text(json.dumps(found))


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--rank", metavar="JSON", help="what one of two ranks is asked; not for use by hand")
    options = asked.parse_args()
    show_messages()
    if options.rank:
        folder, blocks = json.loads(options.rank)
        rank(Path(folder), blocks)
        return
    blocks = 3 if options.quick else 41
    found = {"observe_share": alone("observe_share", blocks)}
    if options.quick:
        found["observe_share_cifar"] = alone("observe_share_cifar", 1, "batch=4", "log_every_steps=5")
    else:
        found["observe_share_cifar"] = alone("observe_share_cifar", 7)
    found["observe_share_procs2"] = together(blocks)
    rows = [("", "step, ms", *(f"{part}, us" for part in PARTS), "share (95 %)")]
    claims = []
    for name, all_blocks in found.items():
        share = median([sum(one[part] for part in PARTS) / one["step"] for one in all_blocks])
        parts = [median([one[part] for one in all_blocks])[0] for part in PARTS]
        step = median([one["step"] for one in all_blocks])[0]
        spread = f"{share[0]:.3%} [{share[1]:.3%}, {share[2]:.3%}]"
        rows.append((name, f"{step / 1e3:.3f}", *(f"{part:.2f}" for part in parts), spread))
        how = f"median of {len(all_blocks)} logging intervals, steps of {step / 1e3:.2f} ms"
        claims.append(Claim(name, share[0], "", f"{how}; [{share[1]:.5f}, {share[2]:.5f}]"))
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
