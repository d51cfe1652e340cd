"""What a run says that stops before its end because its numbers have gone wrong."""

from __future__ import annotations

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.errors import TrainingError
from headway.core.run import Run


def nonfinite_error(
    what: str, lr: float, run: Run, checkpoints: Checkpoints, culprit: str = "", *, precision: str
) -> TrainingError:
    """The error: what has happened, what is kept of the run, and how the next one may do better.

    Args:
        what: a clause. lr: the learning rate of that step. culprit: the layer that is to blame, as a sentence.
        precision: that of the run.
    """
    saved, weights = checkpoints.paths(), run.weights_path.resolve()
    kept = f"The checkpoint {saved[0].name} is kept" if saved else "There was no checkpoint yet"
    culprit = f".{culprit.rstrip('.')}" if culprit else ""
    cures = ["a lower optimizer.lr", "a longer warm-up", "optimizer.clip_norm", "precision=fp32"]
    cures = cures[: 3 if precision == "fp32" else 4]
    return TrainingError(
        f"{what} (learning rate {lr:.4g}); training has stopped{culprit}. {kept}",
        where=str(run.folder),
        fix=f"Start a new run with {', '.join(cures[:-1])} or {cures[-1]}"
        + (f", from its best weights if you like: model.weights={weights}." if weights.exists() else "."),
    )
