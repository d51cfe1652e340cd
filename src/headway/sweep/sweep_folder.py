"""The folder of a sweep: its settings, its journal, and a run folder for each trial."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import BeforeValidator, Field, PlainSerializer

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import expect_empty_folder, write_atomically
from headway.core.recipe import LoadedRecipe, RecipePart, find_leaf_origins, read_recipe
from headway.core.recipe_override import collect_given_values
from headway.core.recipe_yaml import dump_tree
from headway.core.run_folder import collect_provenance
from headway.setup.recipe import TrainRecipe
from headway.sweep.budget import Method
from headway.sweep.space_recipe import SpaceRecipe

# A killed coordinator's workers save their trials and end: seconds until a new one gives up on them.
WORKERS_END_S = 120.0
RATES_SETTINGS, CURVE_SETTINGS = "settings/rates.yaml", "settings/curve.yaml"
SEARCHES = {RATES_SETTINGS: "headway sweep --lr", CURVE_SETTINGS: "headway curve"}
"""Settings of searches in their folders, which are none of a sweep with a space, and the commands that make them."""


def _read_fraction(value: Any) -> Fraction:
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{value!r} is not a number. Write for example 8, or 1/27") from None


FuseMode = Literal["off", "auto"]

AnyFraction = Annotated[Fraction, BeforeValidator(_read_fraction), PlainSerializer(str, return_type=str)]


class SweepRecipe(RecipePart):
    """The settings of a sweep, as `sweep.yaml` in its folder has them. `SweepOptions` has the defaults."""

    recipe: dict[str, Any]
    """The recipe that all trials share, with what the first look at data and machine has decided."""
    space: SpaceRecipe
    """The values that differ between trials."""
    objective: str
    """The metric by which trials are compared."""
    higher_is_better: bool
    """Direction of the objective."""
    samples: int = Field(ge=1)
    """Size of the training set."""
    method: Method
    """Which trials go on: random (all), halving, hyperband, asha or pbt."""
    budget: AnyFraction
    """Most work, in full trainings."""
    eta: int
    """One trial of `eta` goes on from a rung."""
    smallest: AnyFraction
    """Least fraction of a training after which trials are compared."""
    max_trials: int | None
    """Most trials."""
    seed: int
    """Seed of the trials' values. Not that of the trainings, which the recipe has."""
    slots: int = Field(ge=0)
    """Processes that train at once on the coordinator's machine; 0: none, others join."""
    hosts: str | None
    """Other machines with their numbers of processes, such as a:4,b:4."""
    joinable: bool
    """Workers on other machines can join."""
    lease_s: float = Field(ge=0.5)
    """Silence after which a worker on another machine is lost."""
    together: int = Field(ge=1)
    """Most trials that take turns in one process."""
    seeds: int = Field(ge=0)
    """Trainings of the winner with new seeds."""
    measures: bool
    """Measure costs before the first trial."""
    fuse: FuseMode
    """Trials of one process take forward and backward together: `auto`, where a measurement says that it pays."""

    @property
    def is_shared(self) -> bool:
        """True if other machines take part."""
        return self.joinable or self.hosts is not None or not self.slots


@final
class SweepFolder:
    """Paths of a sweep's folder, and its settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings_path = folder / "sweep.yaml"
        self.trials = folder / "trials"
        self.retrained = folder / "retrained"
        self.logs = folder / "logs"
        self.feeding_path = folder / "feeding.json"

    @staticmethod
    def create(folder: Path) -> SweepFolder:
        """Creates the folder of a new sweep, or takes over one whose sweep was killed before it had its settings.

        Raises:
            UsageError: the folder is a sweep already, holds other files, or is a file.
        """
        SweepFolder.expect_free(folder)
        sweep = SweepFolder(folder)
        for part in (folder, sweep.trials, sweep.logs):
            part.mkdir(parents=True, exist_ok=True)
        return sweep

    @staticmethod
    def expect_free(folder: Path) -> None:
        """Checks a folder for a new sweep before any long work. Raises UsageError as `create` does."""
        if SweepFolder(folder).settings_path.exists():
            fix = f"Continue it: {describe_sweep_resume(folder)}. Or name another one with --out."
            raise UsageError("this sweep exists", where=str(folder), fix=fix)
        # The settings are written last, so a folder without them is not a sweep yet.
        expect_empty_folder(folder, "--out", unfinished=("provenance.json", "sweep.yaml"))

    @staticmethod
    def open(folder: Path) -> SweepFolder:
        """Opens the folder of a sweep. Raises UsageError: there is none."""
        sweep = SweepFolder(folder)
        if not sweep.settings_path.is_file():
            expect_no_search(folder)
            what = "this is not the folder of a sweep (it has no sweep.yaml)"
            raise UsageError(what, where=str(folder), fix="Begin one: headway sweep RECIPE --space SPACE --budget 8.")
        return sweep

    def write_settings(self, settings: SweepRecipe, loaded: LoadedRecipe[TrainRecipe]) -> None:
        """Writes the settings, and where the values of the recipe come from."""
        write_provenance(self.folder, loaded)
        tree = settings.model_dump(mode="json", exclude_unset=True)
        # Last: a folder is a sweep from now on.
        write_atomically(self.settings_path, dump_tree(tree))

    def read_settings(self) -> tuple[SweepRecipe, LoadedRecipe[TrainRecipe]]:
        """Reads the settings, and the recipe that all trials share.

        Raises:
            RecipeError: they are damaged.
        """
        settings = read_recipe(self.settings_path, (), SweepRecipe, kind="settings of the sweep").recipe
        return settings, read_base_recipe(self.folder, settings.recipe)

    def write_feeding(self, feeds: bool) -> None:
        """Notes whether one process decodes for several slots, for a sweep that is continued without a measurement."""
        write_atomically(self.feeding_path, json.dumps({"feeds": feeds}) + "\n")

    def read_feeding(self) -> bool:
        """Returns what `write_feeding` noted; False if it has noted nothing."""
        try:
            return bool(json.loads(self.feeding_path.read_text()) == {"feeds": True})
        except (OSError, ValueError):
            return False

    def find_trial(self, trial: int) -> Path:
        """Returns the run folder of a trial."""
        return self.trials / str(trial)

    def find_retrained(self, seed: int) -> Path:
        """Returns the run folder of the winner with another seed."""
        return self.retrained / str(seed)

    @contextmanager
    def hold_as_worker(self) -> Iterator[None]:
        """Tells coordinators, for the duration of the block, that a process trains trials of this sweep."""
        handle = os.open(self.folder / ".workers", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # A file system without locks.
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)

    def wait_for_workers(self, say: Any) -> None:
        """Waits until no process of an earlier coordinator trains any more.

        Raises:
            UsageError: one does not end.
        """
        handle = os.open(self.folder / ".workers", os.O_RDWR | os.O_CREAT, 0o666)
        began, told = time.monotonic(), False
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if not told:
                        say("Waiting for processes of this sweep that still save their trials.")
                        told = True
                except OSError:
                    return
                if time.monotonic() - began > WORKERS_END_S:
                    fix = "End them, and try again."
                    raise UsageError("processes of this sweep still train", where=str(self.folder), fix=fix)
                time.sleep(0.1)
        finally:
            os.close(handle)


def describe_sweep_resume(folder: Path) -> str:
    """Returns the command that continues the sweep, or the search, of a folder."""
    commands = (command for place, command in SEARCHES.items() if (folder / place).is_file())
    return f"{next(commands, 'headway sweep')} --resume {shlex.quote(str(folder))}"


def expect_no_search(folder: Path) -> None:
    """Raises UsageError if a folder is that of a search, and not of a sweep with a space."""
    for place, command in SEARCHES.items():
        if (folder / place).is_file():
            fix = f"Continue it: {describe_sweep_resume(folder)}"
            raise UsageError(f"this is the folder of {command}", where=str(folder), fix=fix)


def read_base_recipe(folder: Path, tree: dict[str, Any]) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe of settings, with the origins and the folder that the provenance beside them names.

    Raises:
        RecipeError: it is none. HeadwayError: the provenance cannot be read.
    """
    recipe = TrainRecipe.model_validate(tree)
    try:
        about = json.loads((folder / "provenance.json").read_text())
        origins, base, path = about["origins"], Path(about["base"]), about["recipe"]
    except (OSError, ValueError, KeyError) as error:
        what, fix = f"provenance.json cannot be read ({error})", "Copy it from a backup, or begin anew."
        raise HeadwayError(what, where=str(folder), fix=fix) from None
    leaves = find_leaf_origins(recipe, origins, "recipe")
    return LoadedRecipe(recipe, leaves, base, None if path is None else Path(path))


def write_provenance(folder: Path, loaded: LoadedRecipe[TrainRecipe]) -> None:
    """Writes where the values of a recipe come from, for `read_base_recipe`."""
    path = None if loaded.path is None else str(loaded.path)
    about = collect_provenance(loaded.origins, loaded.base, recipe=path)
    write_atomically(folder / "provenance.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def write_found_recipe(folder: Path, loaded: LoadedRecipe[TrainRecipe], comments: Sequence[str]) -> Path:
    """Writes a recipe that was found, below lines of comment that say how; returns its path.

    Its relative paths start where the provenance beside it says, as those of a run's recipe do.
    """
    folder.mkdir(exist_ok=True)
    write_provenance(folder, loaded)
    tree = collect_given_values(loaded)
    body = dump_tree(tree)
    write_atomically(folder / "recipe.yaml", "\n".join([*(f"# {line}" for line in comments), body]))
    return folder / "recipe.yaml"
