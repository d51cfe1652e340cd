"""The part of a recipe that says what is watched while a run trains."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, field_validator, model_validator

from headway.core.recipe import RecipePart, check_patterns


class ObserveRecipe(RecipePart):
    """What is watched while the run trains, for the report's sections Large batches and Time; nothing of it changes the
    run."""

    utilisation: bool = True
    """How busy the device and the processor are, twice a second, by a thread of its own. Of an NVIDIA GPU it takes the
    package nvidia-ml-py."""
    trace_steps: int = Field(default=0, ge=0)
    """Steps, from the eleventh on, whose stages are written to trace-RANK.json, for ui.perfetto.dev."""
    prometheus_port: int | None = Field(default=None, ge=1, le=65_535)
    """Port at which `sinks: [prometheus]` answers; unset: 9400."""
    prometheus_address: str | None = None
    """IP address of this host at which it answers; unset: 127.0.0.1, for processes of this host alone. `0.0.0.0` and
    `::` are all of its interfaces: anyone who reaches them reads the numbers, without a password."""
    layer_rates: bool = False
    """Norms of each layer's weights, gradient and step, and its local learning rate, at logging steps."""
    activations: tuple[str, ...] = ()
    """Regular expressions (re.fullmatch) on names of modules: percentiles of what they give, at logging steps; of a
    batch norm also of what it is given."""
    noise_scale: bool = False
    """Measure the gradient noise scale, the batch beyond which a larger one saves ever fewer steps. Several ranks: in
    every step, from what they send anyway, by two passes over the gradients. One process: see `noise_every_steps`."""
    noise_every_steps: int | None = Field(default=None, ge=1)
    """Steps between two measurements of one process; unset: `log_every_steps`. Each is made from the micro-batches of
    a step, or where there are none from two halves of the batch, which go through the network once more."""
    noise_window: int = Field(default=64, ge=8)
    """Measurements that an estimate of the noise scale is made of; of several ranks, logging intervals."""
    on_divergence: Literal["ignore", "warn", "stop"] = "warn"
    """A loss, gradients or weights that blow up: say so with the layer that did first, or also stop the run."""

    @field_validator("prometheus_address")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is not None:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise ValueError(f"{address!r} is no IP address; set one of this host's, or 0.0.0.0 for all") from None
        return address

    @field_validator("activations")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        check_patterns(*patterns)
        return patterns

    @model_validator(mode="after")
    def _fits(self) -> ObserveRecipe:
        if self.noise_every_steps is not None and not self.noise_scale:
            raise ValueError("noise_every_steps is of noise_scale: set noise_scale: true, or remove it")
        return self
