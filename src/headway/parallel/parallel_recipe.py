"""The `parallel` part of a recipe: how several processes share the work."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headway.core.recipe import RecipePart


class DataParallelRecipe(RecipePart):
    """Each process trains a copy of the network on its own share of the batch."""

    strategy: Literal["data"] = "data"

    @property
    def sharing(self) -> int:
        """Number of processes that share an image."""
        return 1


class SpatialRecipe(RecipePart):
    """Some processes share each image: each computes some of its rows and columns. For images, or maps, that are too
    large for one device, and for batches with fewer images than devices."""

    strategy: Literal["spatial"] = "spatial"
    ranks: int = Field(default=2, ge=2, le=64)
    """Processes that share an image."""
    grid: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    """Rows and columns of these processes. Unset: rows alone, which exchange the least."""

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


AnyParallelRecipe = Annotated[DataParallelRecipe | SpatialRecipe, Field(discriminator="strategy")]
"""The recipe of one strategy; `strategy` says which one."""
