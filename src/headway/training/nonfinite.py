"""The error of a run that stops because its numbers are no longer finite, or diverge."""

from __future__ import annotations

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.errors import TrainingError
from headway.core.run_folder import RunFolder


def build_nonfinite_error(
    what: str, lr: float, run: RunFolder, checkpoints: Checkpoints, culprit: str = "", *, precision: str
) -> TrainingError:
    """Builds the error: what happened, what is kept of the run, and how the next run may do better.

    Args:
        what: what happened, as a clause. lr: the learning rate of that step.
        culprit: a sentence that names the layer at fault. precision: the precision of the run.
    """
    saved, weights = checkpoints.paths(), run.weights_path.resolve()
    kept = f"The checkpoint {saved[0].name} is kept" if saved else "There was no checkpoint yet"
    culprit = f".{culprit.rstrip('.')}" if culprit else ""
    remedies = ["a lower optimizer.lr", "a longer warm-up", "optimizer.clip_norm"]
    if precision != "fp32":
        remedies.append("precision=fp32")
    return TrainingError(
        f"{what} (learning rate {lr:.4g}); training has stopped{culprit}. {kept}",
        where=str(run.folder),
        fix=f"Start a new run with {', '.join(remedies[:-1])} or {remedies[-1]}"
        + (f", from its best weights if you like: model.weights={weights}." if weights.exists() else "."),
    )
