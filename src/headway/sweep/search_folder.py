"""The folder of a search that is made of several sweeps or runs: its settings, and how it is continued."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from pydantic import Field

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import expect_empty_folder, write_atomically
from headway.core.recipe import LoadedRecipe, RecipePart, read_recipe
from headway.core.recipe_yaml import dump_tree
from headway.core.run_folder import RunFolder
from headway.setup.recipe import TrainRecipe
from headway.sweep.sweep_folder import (
    SEARCHES,
    SweepFolder,
    describe_sweep_resume,
    expect_no_search,
    read_base_recipe,
    write_provenance,
)


class SearchRecipe(RecipePart):
    """Settings of a search. A kind of search adds its own."""

    recipe: dict[str, Any]
    """The recipe that is searched, with its overrides."""
    batches: tuple[int, ...]
    """Batches of a step."""
    slots: int | None = Field(default=None, ge=1)
    """Processes that train at once; null: one for each GPU, else one for each core."""


S = TypeVar("S", bound=SearchRecipe)


@final
@dataclass(frozen=True, kw_only=True)
class SearchFolder(Generic[S]):
    """The settings of a search, in `settings/` of its folder.

    Attributes:
        folder: the folder.
        kind: class of the settings.
        place: path of the settings in the folder, a key of `SEARCHES`.
        parts: names of the folders in it.
    """

    folder: Path
    kind: type[S]
    place: str
    parts: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that makes such a folder."""
        return SEARCHES[self.place]

    @property
    def path(self) -> Path:
        """The file of the settings."""
        return self.folder / self.place

    @property
    def resume_command(self) -> str:
        """The command that continues the search."""
        return f"{self.command} --resume {shlex.quote(str(self.folder))}"

    def create(self, settings: S, loaded: LoadedRecipe[TrainRecipe]) -> None:
        """Creates the folder and writes the settings; see `expect_new`."""
        self.expect_new()
        for part in (self.path.parent, *(self.folder / name for name in self.parts)):
            part.mkdir(parents=True, exist_ok=True)
        write_provenance(self.path.parent, loaded)
        tree = settings.model_dump(mode="json")
        # Last: the folder can be resumed from now on.
        write_atomically(self.path, dump_tree(tree))

    def expect_new(self) -> None:
        """Raises UsageError if the folder exists and is not empty."""
        if self.path.exists():
            fix = f"Continue: {self.resume_command}. Or name another one with --out."
            raise UsageError(f"{self.command} has been here before", where=str(self.folder), fix=fix)
        # The settings are written last, so a folder without them is none yet.
        expect_empty_folder(self.folder, "--out", unfinished=("provenance.json", self.path.name))

    def expect_begun(self) -> None:
        """Raises UsageError if no such search has begun in the folder."""
        if self.path.is_file():
            return
        expect_no_search(self.folder)
        if SweepFolder(self.folder).settings_path.is_file():
            what = f"this is the folder of a sweep with a space, and not one of {self.command}"
            fix = f"Continue it: {describe_sweep_resume(self.folder)}"
            raise UsageError(what, where=str(self.folder), fix=fix)
        what = f"{self.command} has not begun here (there is no {self.place})"
        raise UsageError(what, where=str(self.folder), fix=f"Begin it: {self.command} RECIPE.")

    def read_settings(self) -> tuple[S, LoadedRecipe[TrainRecipe]]:
        """Reads the settings, and the recipe that is searched.

        Raises:
            RecipeError: they are damaged.
        """
        settings = read_recipe(self.path, (), self.kind, kind=f"settings of {self.command}").recipe
        return settings, read_base_recipe(self.path.parent, settings.recipe)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the folder against other processes for the duration of the block.

        Raises:
            UsageError: another process holds the lock.
        """
        with RunFolder(self.path.parent).lock():
            yield

    def explain_stop(self) -> HeadwayError:
        """Returns the error that says how a search that a signal has stopped is continued."""
        what = "the search was stopped, and what it has found is kept"
        return HeadwayError(what, fix=f"Continue: {self.resume_command}")
