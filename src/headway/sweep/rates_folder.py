"""The folder of `headway sweep --lr`: its settings, and the rows that are there so far."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import yaml
from pydantic import Field

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import expect_empty_folder, write_atomically
from headway.core.recipe import LoadedRecipe, RecipePart, read_recipe
from headway.core.recipe_yaml import RecipeDumper
from headway.core.run_folder import RunFolder
from headway.setup.recipe import TrainRecipe
from headway.sweep.rate_table import RateRow
from headway.sweep.sweep_folder import (
    RATES_SETTINGS,
    SweepFolder,
    describe_sweep_resume,
    read_base_recipe,
    write_provenance,
)


class RatesRecipe(RecipePart):
    """The settings of `headway sweep --lr`, as `settings/rates.yaml` in its folder has them."""

    recipe: dict[str, Any]
    """The recipe whose rate is wanted, with its overrides."""
    batches: tuple[int, ...]
    """Batches of a step."""
    optimizers: tuple[str, ...]
    """Names of optimizers."""
    slots: int | None = Field(default=None, ge=1)
    """Processes that train at once; null: one for each GPU, else one for each core."""


@final
class RatesFolder:
    """Paths of the folder, its settings and its rows.

    A row is written after its range test, and again after its trainings. A row that has failed is not written, so that
    `--resume` tries it again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._settings_path = folder / RATES_SETTINGS
        self._settings = self._settings_path.parent

    @staticmethod
    def create(folder: Path, settings: RatesRecipe, loaded: LoadedRecipe[TrainRecipe]) -> RatesFolder:
        """Creates the folder and writes the settings; see `expect_new`."""
        rates = RatesFolder(folder)
        rates.expect_new()
        for part in (rates._settings, folder / "rows", folder / "sweeps"):
            part.mkdir(parents=True, exist_ok=True)
        write_provenance(rates._settings, loaded)
        tree = settings.model_dump(mode="json")
        # Last: the folder can be resumed from now on.
        write_atomically(
            rates._settings_path, yaml.dump(tree, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=120)
        )
        return rates

    def expect_new(self) -> None:
        """Raises UsageError if the folder exists and is not empty."""
        if self._settings_path.exists():
            folder = shlex.quote(str(self.folder))
            fix = f"Continue: headway sweep --lr --resume {folder}. Or name another one with --out."
            raise UsageError("learning rates have been searched here before", where=str(self.folder), fix=fix)
        # The settings are written last, so a folder without them is none yet.
        expect_empty_folder(self.folder, "--out", unfinished=("provenance.json", "rates.yaml"))

    @staticmethod
    def open(folder: Path) -> RatesFolder:
        """Opens the folder of an earlier call. Raises UsageError: there is none."""
        rates = RatesFolder(folder)
        if not rates._settings_path.is_file():
            if SweepFolder(folder).settings_path.is_file():
                what = "this is the folder of a sweep with a space, and not one of headway sweep --lr"
                fix = f"Continue it: {describe_sweep_resume(folder)}"
                raise UsageError(what, where=str(folder), fix=fix)
            what = "headway sweep --lr has not begun here (there is no settings/rates.yaml)"
            raise UsageError(what, where=str(folder), fix="Begin it: headway sweep --lr RECIPE.")
        return rates

    def read_settings(self) -> tuple[RatesRecipe, LoadedRecipe[TrainRecipe]]:
        """Reads the settings, and the recipe whose rate is wanted.

        Raises:
            RecipeError: they are damaged.
        """
        settings = read_recipe(self._settings_path, (), RatesRecipe, kind="settings of headway sweep --lr").recipe
        return settings, read_base_recipe(self._settings, settings.recipe)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the folder against other processes for the duration of the block.

        Raises:
            UsageError: another process holds the lock.
        """
        with RunFolder(self._settings).lock():
            yield

    def explain_stop(self) -> HeadwayError:
        """Returns the error that says how a search that a signal has stopped is continued."""
        fix = f"Continue: headway sweep --lr --resume {shlex.quote(str(self.folder))}"
        return HeadwayError("the search was stopped, and what it has found is kept", fix=fix)

    def find_sweep(self, row: RateRow) -> Path:
        """Returns the folder of the trainings of a row."""
        return self.folder / "sweeps" / f"{row.optimizer}-{row.batch}"

    def write_row(self, row: RateRow) -> None:
        """Writes a row as it is so far."""
        write_atomically(self._find_row(row.optimizer, row.batch), json.dumps(row.to_json()) + "\n")

    def read_row(self, optimizer: str, batch: int) -> RateRow | None:
        """Reads a row; None if its range test has not ended.

        Raises:
            HeadwayError: it is damaged.
        """
        path = self._find_row(optimizer, batch)
        try:
            return RateRow.from_json(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"this row cannot be read ({error})"
            raise HeadwayError(what, where=str(path), fix="Remove it: its range test is then made again.") from None

    def _find_row(self, optimizer: str, batch: int) -> Path:
        return self.folder / "rows" / f"{optimizer}-{batch}.json"
