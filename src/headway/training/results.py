"""Results of a run that has ended: its summary, and the panels of its newest evaluation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headway.core.cpu_count import count_usable_cores
from headway.core.exchange_waits import describe_exchanges
from headway.setup.train_setup import TrainSetup
from headway.training.evaluate import evaluate
from headway.training.evaluation_panels import build_evaluation_panels
from headway.training.trainer import Trainer

CLOCK_EXCLUDES = (
    "start of the process, imports, opening the data and filling their caches, measuring mean and std, building the "
    "network and its init; "
    "it includes the first batch, compilation, evaluations, checkpoints and logging"
)


def describe_network_size(setup: TrainSetup) -> dict[str, Any]:
    """Returns parameters and multiply-adds of the network by name; empty if they were not counted."""
    return {} if setup.counts is None else asdict(setup.counts)


def write_results(trainer: Trainer, summary: dict[str, Any], *, has_panels: bool) -> None:
    """Writes summary.json, and the panels of the newest evaluation if this process has not written them yet."""
    if not has_panels:
        write_evaluation_panels(trainer)
    # The summary is the last file: if it says `finished`, nothing is missing.
    trainer.run_folder.write_json("summary", summary)


def write_evaluation_panels(trainer: Trainer) -> None:
    """Writes the panels of the newest evaluation to the run folder, and to the sinks while they are open."""
    setup, run, evaluation = trainer.setup, trainer.run_folder, trainer.evaluation
    if setup.eval is None:
        return
    is_whole = setup.divided is None
    if evaluation is None and is_whole and trainer.finished and not (run.panels / "worst.json").exists():
        # The process was killed between its last checkpoint and its panels.
        with trainer.use_averages():
            evaluation = evaluate(setup, setup.eval)
    if evaluation is not None:
        which = f"the weights of epoch {trainer.position / setup.epoch:.4g}"
        panels = build_evaluation_panels(setup.eval, evaluation, which)
        trainer.accumulator.log.write_panels(panels, trainer.step)


def summarise(trainer: Trainer) -> dict[str, Any]:
    """Returns summary.json of a run that has ended or stopped."""
    setup, seconds = trainer.setup, trainer.clock.seconds
    # The first batch includes the start of the loader's threads.
    rest = sum(seconds.get(stage, 0.0) for stage in ("evaluate", "checkpoint", "first batch"))
    training = max(trainer.clock.total_seconds() - rest, 1e-9)
    images = trainer.position
    summary = {
        "finished": trainer.finished,
        "step": trainer.step,
        "steps": setup.steps,
        "epochs": trainer.position / setup.epoch,
        "seconds": trainer.clock.total_seconds(),
        "seconds_by_stage": seconds,
        "clock_excludes": CLOCK_EXCLUDES,
        **describe_network_size(setup),
        "images_s": images / training,
        "wait_share": seconds.get("wait", 0.0) / training,
        **describe_exchanges(seconds, training),
        "damaged_samples": trainer.accumulator.damaged,
        "host_syncs": trainer.host_syncs.to_json(),
    }
    # Synthetic data have no loader, nor has a trial whose batches all came from another process.
    if setup.inputs.loader is not None:
        stats = setup.inputs.loader.stats()
        summary["input"] = {**stats.to_json(), "batches": stats.batches, "cores": count_usable_cores()}
    if setup.inputs.fed_batches:
        summary.setdefault("input", {})["fed_batches"] = setup.inputs.fed_batches
    if trainer.metrics is not None:
        summary |= {**trainer.metrics, "best": trainer.best}
    if trainer.end.reason is not None and trainer.step < setup.steps:
        summary["ended"] = trainer.end.reason
    if setup.recipe.stop_at is not None:
        summary["stop_at"] = {"goal": setup.recipe.stop_at, "seconds_to_reach": trainer.end.reached_s}
    return summary
