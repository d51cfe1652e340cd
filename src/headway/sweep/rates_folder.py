"""The folder of `headway sweep --lr`: its settings, and the rows that are there so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import final

from headway.core.errors import HeadwayError
from headway.core.files import write_atomically
from headway.sweep.rate_table import RateRow
from headway.sweep.search_folder import SearchFolder, SearchRecipe
from headway.sweep.sweep_folder import RATES_SETTINGS


class RatesRecipe(SearchRecipe):
    """The settings of `headway sweep --lr`, as `settings/rates.yaml` in its folder has them."""

    optimizers: tuple[str, ...]
    """Names of optimizers."""


@final
class RatesFolder:
    """The rows of a search for rates, in its folder.

    A row is written after its range test, and again after its trainings. A row that has failed is not written, so that
    `--resume` tries it again.

    Attributes:
        search: the settings.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.search = SearchFolder(folder=folder, kind=RatesRecipe, place=RATES_SETTINGS, parts=("rows", "sweeps"))

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
