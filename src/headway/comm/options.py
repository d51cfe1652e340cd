"""The part of a recipe that says how ranks meet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headway.core.recipe import RecipePart


class CommRecipe(RecipePart):
    """How gradients meet, and what happens when a rank is lost; of no effect in a run of one process."""

    algorithm: Literal["auto", "ring", "tree", "leader", "two_dimensional"] = "auto"
    """How a bucket is summed over the ranks; auto: the one that the measured links predict to be fastest, by bucket."""
    wire: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Form in which gradients cross between hosts. fp16 and bf16 halve the bytes; sums stay in fp32."""
    bucket_mb: Annotated[float, Field(gt=0, le=4096)] | Literal["auto"] = "auto"
    """Gradients that travel together, in 1e6 bytes; auto: from the measured links and the size of the network."""
    rails: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Connections over which a large bucket is striped; auto: as many as were measured to be fastest."""
    batch_norm: Literal["per_rank", "sync"] = "per_rank"
    """Statistics of each rank's own samples, or of all ranks' samples (one more exchange a layer)."""
    interface: str | None = None
    """Network interface between hosts; unset: that of the route to rank 0's host."""
    timeout_s: float = Field(default=10.0, ge=0.5, allow_inf_nan=False)
    """Silence of a process after which the launcher takes it for lost."""
    stall_s: float = Field(default=300.0, ge=1, allow_inf_nan=False)
    """How long ranks wait in a collective for one that is alive and does not come; compilation counts too."""
    on_loss: Literal["auto", "continue", "restart"] = "auto"
    """What the launcher does when a process is lost: the others go on without it, or all begin again from the last
    checkpoint; auto: continue on CPUs, restart on GPUs."""

    @model_validator(mode="after")
    def _fits(self) -> CommRecipe:
        if self.stall_s < self.timeout_s:
            raise ValueError(
                f"stall_s {self.stall_s:g} is below timeout_s {self.timeout_s:g}: a rank that is alive gets at least "
                "as much time as one that is silent"
            )
        return self
