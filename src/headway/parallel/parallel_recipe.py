"""The `parallel` part of a recipe: how several processes share the work."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headway.core.recipe import RecipePart

Compensate = Literal["none", "constant", "adaptive"]


class StrategyRecipe(RecipePart):
    """Base of the recipes of the strategies."""

    @property
    def sharing(self) -> int:
        """Number of processes that share an image, as far as it is known before the network is."""
        return 1

    @property
    def takes_whole_batches(self) -> bool:
        """True if each process takes whole batches of its own, so that a batch may be smaller than their number."""
        return False


class PlacesRecipe(StrategyRecipe):
    """Base of the recipes of strategies whose processes exchange values in the forward and backward pass."""

    across_hosts: bool = False
    """Let the processes that share an image, the experts or the towers of a network lie on several hosts. Each layer
    that exchanges values then waits for the network."""


class DataParallelRecipe(StrategyRecipe):
    """Each process trains a copy of the network on its own share of the batch."""

    strategy: Literal["data"] = "data"


class SpatialRecipe(PlacesRecipe):
    """Some processes share each image: each computes some of its rows and columns. For images, or maps, that are too
    large for one device, and for batches with fewer images than devices."""

    strategy: Literal["spatial"] = "spatial"
    ranks: int = Field(default=2, ge=2, le=64)
    """Processes that share an image."""
    grid: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    """Rows and columns of these processes. Unset: rows alone, which exchange the least."""
    until: str | None = None
    """Name of the layer, such as `layer4`, before which each process gets whole maps of its own samples, and from which
    on it is as in data parallel training. `auto`: the last one up to which a process has four rows of each map. Unset:
    none, so that images are shared until the maps end."""

    @model_validator(mode="after")
    def _check_grid(self) -> SpatialRecipe:
        if self.grid is not None and self.grid[0] * self.grid[1] != self.ranks:
            rows, columns = self.grid
            raise ValueError(
                f"a grid of {rows} x {columns} is one of {rows * columns} processes, and ranks is {self.ranks}: make"
                " them equal"
            )
        return self

    @property
    def sharing(self) -> int:
        """Number of processes that share an image."""
        return self.ranks

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of processes."""
        return self.grid or (self.ranks, 1)


class HybridRecipe(StrategyRecipe):
    """Fully connected layers are divided over all processes by their outputs; the rest is data parallel. For large
    layers behind slow links: their gradients stay where they are, and their inputs are exchanged instead."""

    strategy: Literal["hybrid"] = "hybrid"
    layers: Literal["auto"] | Annotated[tuple[str, ...], Field(min_length=1)] = "auto"
    """Regular expressions for the names of the divided layers, such as '^fc6$'. `auto`: those whose division saves more
    than 5 % of the exchange by the measured links; if none does, the run is refused."""
    scheme: Literal["all", "turns"] = "all"
    """`all`: the inputs of all samples are gathered at once; `turns`: in parts, which need less memory."""


class ExpertsRecipe(PlacesRecipe):
    """Some processes share the experts of the network's mixtures of experts; all else is data parallel. For networks
    whose experts do not fit into one device, or get too few tokens of one process."""

    strategy: Literal["experts"] = "experts"
    ranks: int = Field(default=2, ge=2, le=1024)
    """Processes that share the experts of each mixture: each holds an equal number."""


class ShardedRecipe(StrategyRecipe):
    """Data parallel, with the optimizer's state, or all of the training state, divided over all processes. For
    optimizers with much state, and for networks that leave no memory for their images."""

    strategy: Literal["sharded"] = "sharded"
    what: Literal["optimizer", "all"] = "optimizer"
    """`optimizer`: each process has the optimizer's state (and fp32 masters of 16-bit weights) of the tensors that it
    owns, steps these and sends them to the others; the exchange has as many bytes as without it. `all`: each has rows
    of the weights, the gradients and the optimizer's state, and gathers the weights of a block before it runs, which
    has half as many bytes again."""


class AsyncRecipe(StrategyRecipe):
    """Each process takes whole batches, and its gradients are applied without waiting for the others. For processes of
    unequal speed. The gradients are of weights that are some updates old."""

    strategy: Literal["async"] = "async"
    servers: int = Field(default=1, ge=1, le=64)
    """Number of processes that also hold a share of the weights, momenta and statistics, which the workers read and
    send gradients to."""
    compensate: Compensate = "adaptive"
    """Correction of a gradient for the updates since its weights were read (DC-ASGD, Zheng et al. 2017, arXiv
    1609.08326): `none`, `constant`, or `adaptive` to the size of the gradients."""
    strength: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Factor of the correction, lambda_0 of the paper. Unset: 2 for `adaptive`, 0.04 for `constant`. Larger ones may
    diverge."""
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the mean square of the gradients, for `adaptive`. Unset: 0.95; the paper has 0 for ImageNet."""
    ahead: int | None = Field(default=None, ge=0)
    """Updates that a process may be ahead of the slowest one when it begins a batch; else it waits. After the batch it
    is ahead by one more. Unset: no limit. 0: they take turns."""

    @model_validator(mode="after")
    def _check_compensation(self) -> AsyncRecipe:
        if self.strength is not None and self.compensate == "none":
            raise ValueError("strength counts only with a compensation: set compensate, or remove strength")
        if self.decay is not None and self.compensate != "adaptive":
            raise ValueError("decay counts only with compensate: adaptive: set that, or remove decay")
        return self

    @property
    def takes_whole_batches(self) -> bool:
        """True: a batch is one update, by one process."""
        return True

    @property
    def used_strength(self) -> float:
        """The strength, or its default for the rule."""
        return self.strength if self.strength is not None else {"constant": 0.04}.get(self.compensate, 2.0)

    @property
    def used_decay(self) -> float:
        """The decay, or its default."""
        return 0.95 if self.decay is None else self.decay


class TowersRecipe(PlacesRecipe):
    """Modules that run side by side, such as the two towers of AlexNet, are computed by a process each; as many
    processes as there are towers share their samples. For networks that do not fit into a device as a whole."""

    strategy: Literal["towers"] = "towers"
    match: str = r"^towers\.(\d+)"
    """Regular expression for the names of the towers' modules; its group is the number of the tower."""

    @field_validator("match")
    @classmethod
    def _check_match(cls, match: str) -> str:
        try:
            groups = re.compile(match).groups
        except re.error as error:
            raise ValueError(f"{match!r} is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(rf"{match!r} has {groups} groups: put one around the number, as in '^towers\.(\d+)'")
        return match


class OuterRecipe(RecipePart):
    """The outer optimizer of DiLoCo (Douillard et al. 2023, arXiv 2311.08105): SGD with Nesterov's momentum, which
    steps the common weights by the mean change of a round."""

    lr: float = Field(default=0.7, gt=0, allow_inf_nan=False)
    """Learning rate on the mean change: 1 takes it over as it is."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum factor: the fraction of earlier changes that each step keeps."""


class LocalRecipe(StrategyRecipe):
    """Each process makes some steps alone; then all take the mean of their weights. For slow links: with 16 steps a
    round, a sixteenth of the bytes of data parallel."""

    strategy: Literal["local"] = "local"
    every_steps: int = Field(default=16, ge=1)
    """Steps of a round: those that each process makes alone before all take the mean of their weights."""
    from_epoch: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """Epoch from which on the processes train in rounds; before it they are data parallel (post-local SGD). auto: half
    of the run; with `outer` 0."""
    outer: OuterRecipe | None = None
    """Step by the mean change with an optimizer of its own (DiLoCo), which suits long rounds. Unset: take the mean."""


SEVERAL_RUNS = {
    "ensemble": "headway ensemble RUN RUN averages runs with several seeds",
    "sweep": "headway sweep RECIPE --space SPACE.yaml --budget 8 trains many",
}
"""Names that sound like strategies, and the command for several runs that they stand for."""


def _expand_strategy(value: Any) -> Any:
    # `parallel: hybrid` is short for `parallel: {strategy: hybrid}`.
    if isinstance(value, str):
        value = {"strategy": value}
    name = value.get("strategy") if isinstance(value, dict) else None
    if isinstance(name, str) and name in SEVERAL_RUNS:
        raise ValueError(f"{name} is no strategy of one run, but several runs: {SEVERAL_RUNS[name]}")
    return value


AnyParallelRecipe = Annotated[
    DataParallelRecipe
    | SpatialRecipe
    | HybridRecipe
    | TowersRecipe
    | ExpertsRecipe
    | AsyncRecipe
    | ShardedRecipe
    | LocalRecipe,
    Field(discriminator="strategy"),
    BeforeValidator(_expand_strategy),
]
"""The recipe of one strategy; `strategy` says which one, or its name alone."""


def divides_weights(recipe: AnyParallelRecipe) -> bool:
    """Returns True if each process has rows of all weights, and none has whole ones between steps."""
    return isinstance(recipe, ShardedRecipe) and recipe.what == "all"
