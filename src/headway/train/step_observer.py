"""Observer: what a recipe's part `observe` asks for, taken around single steps and read on logging steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.comm.gradient_noise import NoiseScale, compute_local_term, compute_squared_norm
from headway.comm.reducer import StepReduction
from headway.core.errors import CheckpointError
from headway.core.modules import preserve_training_state
from headway.observe import activations, layer_statistics
from headway.observe.activations import ActivationPercentiles
from headway.observe.divergence import DivergenceDetector
from headway.observe.layer_statistics import LayerStatistics
from headway.optim.layer_rates import measure_layer_rates
from headway.setup.build import Setup
from headway.setup.run_log import RunLog

Parts = Sequence[tuple[Tensor, ...]]
"""(images, labels, weights, weights with noise) of each micro-batch."""


@final
class Observer:
    """Of one run; on several ranks each has one, and the one that leads writes what its own samples show.

    A step is looked at where it is a logging step by its number. At all others there is nothing to do but compare
    numbers; what is taken stays on the device until `look` and `record`.
    """

    def __init__(self, setup: Setup) -> None:
        recipe = setup.recipe
        self._setup, self._options = setup, recipe.observe
        options, every = recipe.observe, recipe.log_every_steps
        self._layers: LayerStatistics | None = None
        self._divergence: DivergenceDetector | None = None
        if options.layer_rates or options.on_divergence != "ignore":
            named = (setup.masters or setup.model).named_parameters()
            self._layers = LayerStatistics(named, setup.optimizer, partial(measure_layer_rates, setup.optimizer))
        if options.on_divergence != "ignore" and self._layers is not None:
            weights, batch = self._layers.measure_weights(), setup.plan.get_batch_size(0)
            self._divergence = DivergenceDetector(self._layers.names, self._layers.sizes, weights, batch)
        self._activations: ActivationPercentiles | None = None
        if options.activations:
            self._activations = ActivationPercentiles(setup.model, options.activations)
        self._noise: NoiseScale | None = None
        self._noise_every = options.noise_every_steps or every
        if options.noise_scale:
            self._noise = NoiseScale(options.noise_window)
        self._local: list[Tensor] = []
        self._whole: list[Tensor] = []
        self._parts = 1
        self._norms: NDArray[np.float32] | None = None
        self._handles: list[Any] = []

    def begin(self, step: int, parts: Parts, ranks: int = 1) -> None:
        """Before the forward pass of a step, whose number it is once it is done."""
        if self._handles:  # that step did not come about
            self._end_noise()
        if self._noise is not None and ranks == 1 and step % self._noise_every == 0:
            if len(parts) > 1:
                self._hang_on(parts)
            else:
                self._pass_halves(parts[0])
        if step % self._setup.recipe.log_every_steps:
            return
        if self._layers is not None:
            self._layers.arm()
        if self._activations is not None:
            self._activations.arm()
            if self._setup.recipe.compile:  # hooks have no place in the compiled network
                with preserve_training_state(self._setup.model), torch.no_grad(), self._setup.precision.autocast():
                    self._setup.model(parts[0][0])
                self._activations.disarm()

    def stepped(self, step: int, size: int, verdict: StepReduction | None, ranks: int) -> None:
        """A step of so many samples over all ranks has come about."""
        if self._noise is None:
            return
        if verdict is not None and ranks > 1:
            last = step % self._setup.recipe.log_every_steps == 0
            self._noise.update(verdict.local_sq, verdict.reduced_sq, size / ranks, size, last=last)
        elif self._handles:
            local, whole, parts = torch.stack(self._local).sum(), torch.stack(self._whole).sum(), self._parts
            self._end_noise()
            self._noise.update(local, whole, size / parts, size)

    def look(self, step: int, losses: NDArray[np.float64], loss_scale: float | None) -> str | None:
        """On a logging step, after the losses since the last one are read: the sentence where the run diverges."""
        found = self._layers.read() if self._layers is not None else None
        self._norms, gradient = (None, None) if found is None else found
        if self._divergence is None:
            return None
        lr = self._setup.lr_at(self._setup.plan.find_position(step - 1))
        return self._divergence.check(step, losses, self._norms, gradient, loss_scale, lr)

    def culprit(self) -> str:
        """The layer that blew up first, as a sentence; empty where none is known."""
        return "" if self._divergence is None else self._divergence.describe_culprit()

    def record(self, log: RunLog, step: int, position: int) -> dict[str, float]:
        """After `look`: writes the rows of what was looked at, and returns what a record has besides."""
        if self._norms is not None and self._options.layer_rates and self._layers is not None:
            log.row("layers", self._layers.names, layer_statistics.COLUMNS, position, step, self._norms)
        self._norms = None
        if self._activations is not None and (found := self._activations.read()) is not None:
            log.row("activations", self._activations.names, activations.COLUMNS, position, step, found)
        if self._noise is None:
            return {}
        known = self._noise.estimate()
        return {"noise_scale": known.scale, "noise_scale_low": known.low, "noise_scale_high": known.high}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON; waits for the device."""
        return {
            "divergence": None if self._divergence is None else self._divergence.state_dict(),
            "noise": self._noise and {key: value.tolist() for key, value in self._noise.state_dict().items()},
        }

    def take(self, state: dict[str, Any] | None, where: str) -> None:
        """Goes on from such a state. Raises CheckpointError: it is none."""
        if state is None:
            return
        divergence, noise = state.get("divergence"), state.get("noise")
        if self._divergence is not None and divergence is not None:
            try:
                self._divergence.load_state_dict(divergence)
            except ValueError as error:
                what = f"its manifest has no good scalars.observer.divergence ({error})"
                raise CheckpointError(what, where=where) from None
        if self._noise is not None and noise is not None:
            try:
                kept = {key: torch.tensor(noise[key], dtype=torch.float64) for key in ("pairs", "open")}
                if kept["open"].shape != self._noise.state_dict()["open"].shape:
                    raise ValueError
                self._noise.load_state_dict(kept)
            except (TypeError, ValueError, LookupError, RuntimeError):
                raise CheckpointError("its manifest has no good scalars.observer.noise", where=where) from None

    def _hang_on(self, parts: Parts) -> None:
        """Takes the gradient of each micro-batch as what it adds to the sum: a copy of the gradients, no further
        pass through the network."""
        sizes = [len(part[0]) for part in parts]
        shares = [size / sum(sizes) for size in sizes]
        self._local, self._whole, self._parts = [], [], len(parts)
        seen: dict[Tensor, tuple[int, Tensor | None]] = {}

        def ready(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            number, before = seen.get(parameter, (0, None))
            with torch.no_grad():
                self._local.append(
                    compute_local_term([grad if before is None else grad.float() - before], shares[number])
                )
                if number == len(shares) - 1:
                    self._whole.append(compute_squared_norm([grad]))
                seen[parameter] = (number + 1, grad.clone().float() if number < len(shares) - 1 else None)

        self._handles = [one.register_post_accumulate_grad_hook(ready) for one in self._trained()]

    def _end_noise(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._local, self._whole = [], [], []

    def _pass_halves(self, part: tuple[Tensor, ...]) -> None:
        """Takes the gradients of two halves of the batch, which go through the network apart from the step itself."""
        setup, size, trained = self._setup, len(part[0]), self._trained()
        sums: list[Tensor | None] = [None] * len(trained)
        terms = []
        with preserve_training_state(setup.model):
            for images, labels, _, weights in zip(*(tensor.tensor_split(2) for tensor in part), strict=True):
                with setup.precision.autocast():
                    outputs = setup.model(images)
                losses = setup.task.loss(outputs.float(), labels)
                found = torch.autograd.grad(losses, trained, weights, allow_unused=True)
                terms.append(compute_local_term([grad for grad in found if grad is not None], len(images) / size))
                sums = [
                    one if other is None else other if one is None else one + other
                    for one, other in zip(sums, found, strict=True)
                ]
        assert self._noise is not None
        whole = compute_squared_norm([grad for grad in sums if grad is not None])
        self._noise.update(torch.stack(terms).sum(), whole, size / 2, size)

    def _trained(self) -> list[Tensor]:
        """In this step: some may be frozen by now."""
        return [one for one in self._setup.model.parameters() if one.requires_grad]
