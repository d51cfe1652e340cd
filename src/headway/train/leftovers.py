"""Past: what a run has left on the disk, for ranks of which none holds its state any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from headway.checkpoint.checkpoints import Checkpoint, Checkpoints
from headway.checkpoint.locations import step_of
from headway.core.errors import CheckpointError, HeadwayError, TrainingError
from headway.core.recipe import load
from headway.core.run import Run
from headway.setup.build import TrainSetup
from headway.setup.recipe import TrainRecipe

MACHINE_KEYS = ("device", "data.cache", "augment.where")
"""What `auto` of these stood for is no part of a run: it is chosen anew where the run goes on."""
PROCESS_KEYS = (*MACHINE_KEYS, "micro_batch")
"""What ranks may have otherwise than each other."""


def collect_shared_settings(setup: TrainSetup) -> dict[str, Any]:
    """Returns the settings that must be equal on all ranks: recipe and data, without machine-specific settings."""
    recipe = _select_compared(dict(setup.loaded.leaves()), setup)
    data = setup.inputs.state(setup.recipe)
    return {**recipe, **{f"the data's {name}": data[name] for name in ("fingerprint", "channels", "classes")}}


def _select_compared(leaves: Mapping[str, Any], setup: TrainSetup) -> dict[str, Any]:
    found = {key: value for key, value in leaves.items() if key not in PROCESS_KEYS}
    return {**found, "precision": "auto"} if setup.precision.chosen else found


@final
class SavedRun:
    """The files of the run, as far as this process sees them.

    Args:
        setup: of this process, with which it would go on. run, checkpoints: what it sees.
    """

    def __init__(self, setup: TrainSetup, run: Run, checkpoints: Checkpoints) -> None:
        self._setup, self._run, self._checkpoints = setup, run, checkpoints

    def precision(self) -> Any:
        """The precision that the run has, as rank 0 wrote it down; None where it cannot be seen from here."""
        if not self._run.recipe_path.is_file():
            return None
        return load(self._run.recipe_path, (), TrainRecipe).recipe.precision

    def is_ahead(self, step: int) -> bool:
        """Tells whether a later step has a complete checkpoint. If none has, this only lists the names."""
        try:
            paths = self._checkpoints.paths()
            if not paths or (step_of(paths[0].name) or 0) <= step:
                return False
            newest = self._checkpoints.newest(lambda text: None)
        except HeadwayError:  # damaged, or out of reach: nobody would go on from it
            return False
        return newest is not None and newest.step > step

    def look(self) -> dict[str, Any]:
        """Summarises the run folder and its newest checkpoint, for JSON.

        Returns:
            `step` of the newest checkpoint by its name (-1: none), whether the run folder is `seen`, how many steps
            were `recorded` in it, and the `error` if the checkpoints are out of reach.
        """
        found: dict[str, Any] = {
            "step": -1,
            "seen": self._run.recipe_path.is_file(),
            "recorded": self._recorded(),
            "error": None,
        }
        try:
            if paths := self._checkpoints.paths():
                found["step"] = step_of(paths[0].name)
        except HeadwayError as error:
            found["error"] = {"what": error.what, "where": error.where, "fix": error.fix}
        return found

    def read(self) -> tuple[Checkpoint, list[str]]:
        """The newest checkpoint that is whole, and what there is to say of damaged ones.

        Raises:
            CheckpointError: there is none. TrainingError: this process was started with another recipe.
        """
        said: list[str] = []
        checkpoint = self._checkpoints.newest(said.append)
        if checkpoint is None:
            raise CheckpointError("the checkpoints have gone", where=self._checkpoints.place.shown)
        self._expect_own_recipe()
        return checkpoint, said

    def without_state(self, recorded: int) -> HeadwayError:
        """The error of a run that cannot go on, of which so many steps were recorded."""
        what = "no process is left that holds the state of the run, and no checkpoint of it can be seen from here"
        if not recorded:
            fix = f"Start it on the hosts that see its folder: {self._run.go_on}"
            return TrainingError(what, where=str(self._run.folder), fix=fix)
        what = f"no process is left that holds the state of the run, and there was no checkpoint yet: {recorded} steps"
        fix = f"A smaller checkpoint.every_steps would have kept more. Begin anew: {self._run.go_on}"
        return TrainingError(f"{what} are lost", where=str(self._run.folder), fix=fix)

    def _recorded(self) -> int:
        """Steps that something was written down of, at least 1 where anything was."""
        step = max((record["step"] for record in self._run.metrics()), default=0)
        files = (self._run.quarantine_path, *self._run.folder.glob("ids*.bin"))
        return max(step, int(any(path.exists() and path.stat().st_size > 0 for path in files)))

    def _expect_own_recipe(self) -> None:
        """Where some rank holds the state, a newcomer is compared with that; here with what lies in the run folder."""
        if not self._run.recipe_path.is_file():
            return
        recorded = load(self._run.recipe_path, (), TrainRecipe)
        theirs = _select_compared(dict(recorded.leaves()), self._setup)
        ours = _select_compared(dict(self._setup.loaded.leaves()), self._setup)
        if unlike := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
            key = unlike[0]
            what = f"{key} is {ours.get(key)!r} in the recipe, and the run began with {theirs.get(key)!r}"
            fix = f"Go on with the run's own recipe: {self._run.go_on}"
            raise TrainingError(what, where=str(self._run.folder), fix=fix)
