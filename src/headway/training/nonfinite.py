"""The error of a run that stops because its numbers are no longer finite, or diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headway.core.errors import TrainingError

if TYPE_CHECKING:
    from headway.training.trainer import Trainer


def build_nonfinite_error(trainer: Trainer, what: str, step: int, culprit: str = "") -> TrainingError:
    """Builds the error: what happened, what is kept of the run, and how the next run may do better.

    Args:
        what: what happened, as a clause.
        step: the step in which it happened.
        culprit: a sentence that names the layer at fault.
    """
    setup, run, best = trainer.setup, trainer.run_folder, trainer.best
    lr = setup.lr_at(setup.plan.find_position(step - 1))
    saved = trainer.checkpoints.paths()
    kept = f"The checkpoint {saved[0].name} is kept" if saved else "There was no checkpoint yet"
    culprit = f".{culprit.rstrip('.')}" if culprit else ""
    remedies = ["a lower optimizer.lr", "a longer warm-up", "optimizer.clip_norm"]
    if trainer.precision.name != "fp32":
        remedies.append("precision=fp32")
    start = ""
    start_loss = trainer.accumulator.observer.start_loss
    if best is not None and can_start_from(best, start_loss) and run.weights_path.exists():
        weights = run.weights_path.resolve()
        start = f", from the weights of epoch {best['epoch']:.4g} if you like: model.weights={weights}"
    return TrainingError(
        f"{what} (learning rate {lr:.4g}); training has stopped{culprit}. {kept}",
        where=str(run.folder),
        fix=f"Start a new run with {', '.join(remedies[:-1])} or {remedies[-1]}{start}.",
    )


def can_start_from(best: Mapping[str, float], start_loss: float | None) -> bool:
    """Returns True if another run may start from the best weights of a run that diverged.

    Their evaluation may have come after the run began to diverge, and accuracy hides that: a network that has blown up
    is right by chance as often as an untrained one. So its loss has to be finite, and below that of the start.
    """
    return all(map(math.isfinite, best.values())) and (start_loss is None or best["loss"] < start_loss)
