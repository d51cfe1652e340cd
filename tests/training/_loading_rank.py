"""A rank that loads a checkpoint into runs of several strategies, and saves each: _loading_rank.py ASKED, as JSON."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.run_folder import RunFolder
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.training.actions import Action
from headway.training.progress import SilentDisplay
from headway.training.runs import load_recipe
from headway.training.trainer import Trainer


def load_and_save(recipe: Path, overrides: list[str], run: Path, to: Path, port: int) -> None:
    """Loads the newest checkpoint of a run, and saves it in another folder."""
    os.environ["MASTER_PORT"] = str(port)
    loaded = load_recipe(recipe, overrides)
    checkpoint = Checkpoints(run / "checkpoints").newest()
    assert checkpoint is not None
    ranks = Ranks.from_environment(loaded.recipe.comm)
    with nullcontext() if ranks is None else ranks:
        setup = build_setup(loaded, fresh=False, ranks=ranks)
        where = RunFolder(to)
        if ranks is None or ranks.is_lead:
            RunFolder.create(to)
        with closing(setup.inputs), closing(Trainer(setup, where, SilentDisplay(), ranks)) as trainer:
            trainer.resume(checkpoint)
            if ranks is not None:
                trainer.recovery.meet()
            trainer.recovery.queue(Action.CHECKPOINT, Action.SETTLE)
            trainer.run(0)


if __name__ == "__main__":
    for one in json.loads(sys.argv[1]):
        load_and_save(Path(one["recipe"]), one["overrides"], Path(one["run"]), Path(one["to"]), one["port"])
