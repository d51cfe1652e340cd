"""Recipe section `observe`: measurements of a run while it trains."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, field_validator, model_validator

from headway.core.recipe import RecipePart, check_patterns


class ObserveRecipe(RecipePart):
    """Measurements while the run trains, for the report's sections Large batches and Time. They do not change the
    run."""

    utilisation: bool = True
    """Sample the utilisation of GPU and CPU twice per second, in a thread of its own. NVIDIA GPUs need the package
    nvidia-ml-py."""
    trace_steps: int = Field(default=0, ge=0)
    """Number of steps whose stages are traced, from the eleventh on. Writes trace-RANK.json for ui.perfetto.dev."""
    prometheus_port: int | None = Field(default=None, ge=1, le=65_535)
    """Port of `sinks: [prometheus]`. Unset: 9400."""
    prometheus_address: str | None = None
    """IP address of this host to listen on. Unset: 127.0.0.1, for processes of this host only. With `0.0.0.0` or `::`
    it listens on all interfaces, and anyone who reaches them can read the numbers without a password."""
    layer_rates: bool = False
    """At logging steps, record the norms of each layer's weights, gradient and step, and its local learning rate."""
    layer_times: bool = False
    """At logging steps, record the time of each module in the forward and in the backward pass, and of the optimizer's
    step. The hooks make such a step slower."""
    activations: tuple[str, ...] = ()
    """Regular expressions (re.fullmatch) on module names. At logging steps, record percentiles of the outputs of these
    modules, and of the inputs of batch norms."""
    noise_scale: bool = False
    """Measure the gradient noise scale: the batch above which a larger one saves few steps. Several ranks measure it at
    every step from the gradients that they send anyway, with two passes over them. For one process see
    `noise_every_steps`."""
    noise_every_steps: int | None = Field(default=None, ge=1)
    """Steps between two measurements of the noise scale with one process. Unset: `log_every_steps`. A measurement uses
    the micro-batches of a step, or two halves of the batch, which then pass through the network a second time."""
    noise_window: int = Field(default=64, ge=8)
    """Number of measurements in an estimate of the noise scale. With several ranks: number of logging intervals."""
    on_divergence: Literal["ignore", "warn", "stop"] = "warn"
    """Reaction if loss, gradients or weights diverge: `ignore` it, `warn` and name the first layer, or also `stop` the
    run."""

    @field_validator("prometheus_address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is not None:
            try:
                # Checked here, so that a wrong address is refused before the run begins.
                ipaddress.ip_address(address)
            except ValueError:
                raise ValueError(
                    f"{address!r} is not an IP address; set one of this host's, or 0.0.0.0 for all"
                ) from None
        return address

    @field_validator("activations")
    @classmethod
    def _check_activations(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        check_patterns(*patterns)
        return patterns

    @model_validator(mode="after")
    def _check_combination(self) -> ObserveRecipe:
        if self.noise_every_steps is not None and not self.noise_scale:
            raise ValueError("noise_every_steps is of noise_scale: set noise_scale: true, or remove it")
        return self
