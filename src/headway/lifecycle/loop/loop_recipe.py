"""LOOP.yaml: the settings of a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from headway.core.errors import UsageError, suggest_nearest
from headway.core.recipe import LoadedRecipe, RecipePart, read_recipe
from headway.data.store_address import StoreAddress, is_store_address
from headway.export.targets import TARGETS
from headway.lifecycle.mining.choose import LEAST_RANDOM_SHARE, RANDOM_SHARE, Strategy
from headway.lifecycle.mining.mine_result import MineOptions
from headway.lifecycle.mining.quotas import Share
from headway.lifecycle.service.labelling.parsing import MOST_PICKS

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MineRecipe(RecipePart):
    """How images are chosen in each round; as the options of `headway mine`."""

    strategy: Strategy = "margin"
    """margin, entropy, bald, k-center, badge or random."""
    count: int = Field(default=100, ge=1, le=MOST_PICKS)
    """Images to label in a round. At most 100,000: they are one queue of the label page."""
    random_share: float = Field(default=RANDOM_SHARE, ge=LEAST_RANDOM_SHARE, le=1)
    """Share of them that is random."""
    weights: dict[str, Positive] = {}
    """Factors on the scores of classes, or of names by a pattern."""
    quotas: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    """Shares of the picks for classes, or for names by a pattern."""
    keep_copies: bool = False
    """Do not look for near copies."""

    def build_options(self, seed: int) -> MineOptions:
        """Returns the options of a round."""
        return MineOptions(
            strategy=self.strategy,
            count=self.count,
            random_share=self.random_share,
            weights=tuple(Share(name, value) for name, value in self.weights.items()),
            quotas=tuple(Share(name, value) for name, value in self.quotas.items()),
            seed=seed,
            keeps_copies=self.keep_copies,
        )


class LabelsRecipe(RecipePart):
    """When the labels of a round are there."""

    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the picks that must have a label, or be removed, before the loop goes on."""
    poll_s: float = Field(default=2.0, ge=0.05, le=3600)
    """Seconds between two looks at the store."""


class GateRecipe(RecipePart):
    """When a new network takes the place of the accepted one."""

    drop: float = Field(default=0.0, ge=0, le=100)
    """Largest drop of accuracy on the pinned evaluation split, in percentage points."""
    bound: float | None = Field(default=None, ge=0, le=100)
    """Largest drop that the upper 95 % bound may show. Unset: the bound is told, and refuses nothing."""


def _check_target(name: str) -> str:
    if name not in TARGETS:
        raise ValueError(f"there is no target {name!r}. {suggest_nearest(name, TARGETS)}")
    return name


class ExportRecipe(RecipePart):
    """How an accepted network is exported; as the options of `headway export`."""

    to: tuple[Annotated[str, AfterValidator(_check_target)], ...] = Field(default=("onnx",), min_length=1)
    """Targets."""
    gate: float = Field(default=0.5, ge=0, le=100)
    """Largest drop from the run to its export, in percentage points."""


class VerifyRecipe(RecipePart):
    """A program of your own, such as a simulation, whose number decides on an exported network too."""

    command: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """Program and arguments, run in the folder of LOOP.yaml. Two more arguments follow: the folder of the export, and
    that of the round."""
    metric: str = Field(min_length=1, max_length=100)
    """Name of the number in the JSON object that the program prints as its last line."""
    better: Literal["higher", "lower"] = "higher"
    """Which of two numbers is better."""
    drop: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """By how much the number may be worse than that of the accepted network, in its own unit."""
    timeout_s: float = Field(default=3600.0, gt=0, le=30 * 86400)
    """Seconds after which the program and the processes of its group are ended, and the loop stops with an error."""


def _check_data(text: str) -> str:
    if not is_store_address(text):
        raise ValueError(f"{text!r} is not in a store. Write store:NAME or store:FOLDER//NAME")
    try:
        address = StoreAddress.parse(text)
    except UsageError as error:
        raise ValueError(f"{error.what}. {error.fix}") from None
    if address.version or address.split:
        raise ValueError("a loop follows the newest version of a data set. Write store:NAME without version and split")
    return text


class LoopRecipe(RecipePart):
    """The settings of a loop."""

    name: str = Field(default="loop", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of its folder, loops/NAME."""
    data: Annotated[str, AfterValidator(_check_data)]
    """Data set in a store, with the splits `train`, `eval` and `unlabelled`: store:NAME or store:FOLDER//NAME."""
    recipe: str
    """Recipe of the members. The loop sets its data.train and data.eval, and counts its seed up from member to
    member."""
    members: int = Field(default=3, ge=1, le=100)
    """Networks that are trained in each round. The first one is shipped; all of them choose images."""
    rounds: int = Field(default=3, ge=1, le=1000)
    """Times that images are mined, labelled and trained on."""
    mine: MineRecipe = MineRecipe()
    """How images are chosen."""
    labels: LabelsRecipe = LabelsRecipe()
    """When the labels of a round are there."""
    gate: GateRecipe = GateRecipe()
    """When a new network is accepted."""
    export: ExportRecipe | None = ExportRecipe()
    """How an accepted network is exported; null: it is not."""
    verify: VerifyRecipe | None = None
    """A program of your own that judges the export; null: none."""

    @model_validator(mode="after")
    def _expect_export(self) -> LoopRecipe:
        if self.verify is not None and self.export is None:
            raise ValueError(
                "verify judges the export, and export is null. Name targets of an export, or remove verify"
            )
        return self


CHANGEABLE = ("rounds", "labels", "gate", "export", "verify")
"""Settings that may change while a loop goes on: they decide on what comes, and not on what was trained."""


def read_loop(path: Path) -> LoadedRecipe[LoopRecipe]:
    """Reads LOOP.yaml. Raises RecipeError, which names the line, if it is none."""
    return read_recipe(path, (), LoopRecipe, kind="loop", fix="docs/loop.md lists the settings.")
