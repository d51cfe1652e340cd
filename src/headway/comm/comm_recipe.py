"""The `comm` part of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from headway.core.recipe import RecipePart

Algorithm = Literal["ring", "tree", "leader", "two_dimensional"]
Wire = Literal["fp32", "fp16", "bf16"]


class CommRecipe(RecipePart):
    """How gradients are summed over ranks, and how a run reacts to a lost rank. No effect with one process."""

    algorithm: Literal["auto", Algorithm] = "auto"
    """All-reduce algorithm. auto: for each bucket the fastest one, as predicted from the measured links."""
    wire: Wire = "fp32"
    """Dtype of gradients between hosts. fp16 and bf16 halve the bytes; sums stay in fp32."""
    bucket_mb: Annotated[float, Field(gt=0, le=4096)] | Literal["auto"] = "auto"
    """Size of a gradient bucket in MB (10^6 bytes). auto: chosen for the measured links and the size of the network."""
    rails: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Number of parallel connections on each network interface that share a large bucket. auto: the number that was
    fastest when measured."""
    batch_norm: Literal["per_rank", "sync"] = "per_rank"
    """Statistics of batch norm over the samples of each rank, or (`sync`) over those of all ranks, with one more
    collective per layer."""
    interface: str | tuple[str, ...] | None = None
    """Network interface for traffic between hosts, or a list of them on CPUs: large messages are shared by all. Unset:
    the one that leads to the host of rank 0."""
    timeout_s: float = Field(default=10.0, ge=0.5, allow_inf_nan=False)
    """Seconds without a heartbeat after which the launcher declares a process lost."""
    stall_s: float = Field(default=300.0, ge=1, allow_inf_nan=False)
    """Seconds that ranks wait in a collective for a rank that is alive but has not joined it. Make it longer than your
    compilation, which counts too."""
    on_rank_failure: Literal["auto", "continue", "restart"] = "auto"
    """Reaction to a lost process: the others `continue` without it, or all `restart` from the last checkpoint. auto:
    continue on CPUs, restart on GPUs."""

    @field_validator("interface")
    @classmethod
    def _check_interface(cls, interface: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(interface, str) and "," in interface:
            raise ValueError(f"write a list of network interfaces as [{', '.join(interface.split(','))}]")
        if isinstance(interface, tuple) and not (0 < len(set(interface)) == len(interface) and all(interface)):
            raise ValueError("name one or more network interfaces, each once, such as [eth0, eth1]")
        return interface

    @model_validator(mode="after")
    def _check_timeouts(self) -> CommRecipe:
        # Both limits declare a rank lost; the shorter one is for ranks that do not even send heartbeats.
        if self.stall_s < self.timeout_s:
            raise ValueError(
                f"stall_s {self.stall_s:g} is below timeout_s {self.timeout_s:g}: a rank that is alive gets at least "
                "as much time as one that is silent"
            )
        return self
