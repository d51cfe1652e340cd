"""StepObserver: the measurements of a recipe's part `observe`, taken in single steps and written on logging steps."""

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
from headway.observe import activations, layer_statistics, layer_times
from headway.observe.activations import ActivationPercentiles
from headway.observe.divergence import DivergenceDetector
from headway.observe.layer_statistics import LayerStatistics
from headway.observe.layer_times import LayerTimes
from headway.optim.layer_rates import measure_layer_rates
from headway.parallel.parallel_recipe import AsyncRecipe
from headway.setup.run_log import RunLog
from headway.setup.train_setup import TrainSetup

MicroBatches = Sequence[tuple[Tensor, ...]]
"""(images, labels, weights, weights with gradient noise) of each micro-batch."""


@final
class StepObserver:
    """Observes layers, activations, the noise scale and divergence of a run.

    Only logging steps are observed (the noise scale: every `noise_every_steps`); on all others it compares numbers.
    Measurements stay on the device until `check_divergence` and `write_rows`. On several ranks each has an observer,
    and the lead writes the measurements of its own samples.
    """

    def __init__(self, setup: TrainSetup) -> None:
        recipe = setup.recipe
        self._setup, self._options = setup, recipe.observe
        options, every = recipe.observe, recipe.log_every_steps
        self._layers: LayerStatistics | None = None
        self._divergence: DivergenceDetector | None = None
        # Divergence is judged by the update rates of the layers, so it needs them too.
        if options.layer_rates or options.on_divergence != "ignore":
            named = setup.stepped.named_parameters()
            rates = partial(measure_layer_rates, setup.optimizer)
            self._layers = LayerStatistics(named, setup.optimizer, rates, owners=setup.owners)
        if options.on_divergence != "ignore" and self._layers is not None:
            weights, batch = self._layers.measure_weights(), setup.plan.get_batch_size(0)
            self._divergence = DivergenceDetector(self._layers.names, self._layers.sizes, weights, batch)
        self._activations: ActivationPercentiles | None = None
        if options.activations:
            self._activations = ActivationPercentiles(setup.model, options.activations)
        self._times: LayerTimes | None = None
        if options.layer_times:
            self._times = LayerTimes(setup.model, setup.optimizer, setup.device)
        self._noise: NoiseScale | None = None
        self._noise_every = options.noise_every_steps or every
        if options.noise_scale:
            self._noise = NoiseScale(options.noise_window)
        self._local: list[Tensor] = []
        self._whole: list[Tensor] = []
        self._parts = 1
        self._norms: NDArray[np.float32] | None = None
        self._handles: list[Any] = []
        # The network's weights change between two steps of a worker, and not by its own gradient.
        self._steps_elsewhere = isinstance(recipe.parallel, AsyncRecipe)

    def begin_step(self, step: int, parts: MicroBatches, ranks: int = 1) -> None:
        """Begins a step, before its forward pass. Args: step: the first one is 1."""
        # The hooks of a step that failed are still there.
        if self._handles:
            self._remove_hooks()
        # On several ranks the gradients of the ranks are the samples of the noise; alone, parts of a batch are.
        if self._noise is not None and ranks == 1 and step % self._noise_every == 0:
            if len(parts) > 1:
                self._hook_gradients(parts)
            else:
                self._measure_halves(parts[0])
        if self._steps_elsewhere or not self._setup.rounds.is_due(step, self._setup.recipe.log_every_steps):
            return
        # First: the hooks of the layers remove themselves from the optimizer, which only its last one can do.
        if self._times is not None:
            self._times.arm()
        if self._layers is not None:
            # Copies the weights before the step, for the relative size of its update.
            self._layers.arm()
        if self._activations is not None:
            self._activations.arm()
            # A compiled network runs no hooks, so the plain network sees the first micro-batch once more.
            if self._setup.recipe.compile:
                with preserve_training_state(self._setup.model), torch.no_grad(), self._setup.precision.autocast():
                    self._setup.model(parts[0][0])
                self._activations.disarm()

    def end_step(self, step: int, size: int, reduction: StepReduction | None, ranks: int) -> None:
        """Ends a completed step. Args: size: samples over all ranks. reduction: the reduction, with several ranks."""
        if self._times is not None:
            self._times.disarm()
        if self._noise is None:
            return
        # The all-reduce measures the gradient's norm before and after; alone, the hooks do.
        if reduction is not None and ranks > 1:
            last = step % self._setup.recipe.log_every_steps == 0
            self._noise.update(reduction.local_sq, reduction.reduced_sq, size / ranks, size, last=last)
        elif self._handles:
            local, whole, parts = torch.stack(self._local).sum(), torch.stack(self._whole).sum(), self._parts
            self._remove_hooks()
            self._noise.update(local, whole, size / parts, size)

    def check_divergence(self, step: int, losses: NDArray[np.float64], loss_scale: float | None) -> str | None:
        """Returns a sentence if the run diverges; called on logging steps. Args: losses: those since the last one."""
        # Kept for `write_rows`: reading twice would wait for the device twice.
        statistics = self._layers.read() if self._layers is not None else None
        self._norms, gradient = (None, None) if statistics is None else statistics
        if self._divergence is None:
            return None
        lr = self._setup.lr_at(self._setup.plan.find_position(step - 1))
        return self._divergence.check(step, losses, self._norms, gradient, loss_scale, lr)

    @property
    def start_loss(self) -> float | None:
        """The loss of the first step; None if it is not known."""
        return None if self._divergence is None else self._divergence.start_loss

    def find_culprit(self) -> str:
        """Returns a sentence that names the layer that diverged first; empty if none is known."""
        return "" if self._divergence is None else self._divergence.describe_culprit()

    def write_rows(self, log: RunLog, step: int, position: int) -> dict[str, float]:
        """Writes the measurements of the newest step, after `check_divergence`; returns additions to its record."""
        if self._norms is not None and self._options.layer_rates and self._layers is not None:
            log.write_rows("layers", self._layers.names, layer_statistics.COLUMNS, position, step, self._norms)
        self._norms = None
        if self._activations is not None and (percentiles := self._activations.read()) is not None:
            log.write_rows("activations", self._activations.names, activations.COLUMNS, position, step, percentiles)
        if self._times is not None and (measured := self._times.read()) is not None:
            names, times, step_s = measured
            # A network may call some modules in some steps only.
            log.write_rows("layer_times", names, layer_times.COLUMNS, position, step, times, keeps_names=True)
            row = np.array([[step_s]], np.float32)
            log.write_rows("optimizer_times", ("optimizer",), layer_times.STEP_COLUMNS, position, step, row)
        if self._noise is None:
            return {}
        known = self._noise.estimate()
        return {"noise_scale": known.scale, "noise_scale_low": known.low, "noise_scale_high": known.high}

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, for JSON. This waits for the device."""
        return {
            "divergence": None if self._divergence is None else self._divergence.state_dict(),
            "noise": self._noise and {key: value.tolist() for key, value in self._noise.state_dict().items()},
        }

    def load_state(self, state: dict[str, Any] | None, where: str) -> None:
        """Restores such a state. Raises CheckpointError: it is damaged."""
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

    def _hook_gradients(self, parts: MicroBatches) -> None:
        """Measures the noise scale from the micro-batches of a step.

        Hooks take each micro-batch's gradient as the change of the accumulated one. That needs a copy of the gradients,
        but no further pass through the network.
        """
        # The last micro-batch may be smaller, so each has its share.
        sizes = [len(part[0]) for part in parts]
        shares = [size / sum(sizes) for size in sizes]
        self._local, self._whole, self._parts = [], [], len(parts)
        seen: dict[Tensor, tuple[int, Tensor | None]] = {}

        def on_gradient(parameter: Tensor) -> None:
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

        self._handles = [one.register_post_accumulate_grad_hook(on_gradient) for one in self._list_trained()]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._local, self._whole = [], [], []

    def _measure_halves(self, part: tuple[Tensor, ...]) -> None:
        """Measures the noise scale from the gradients of the two halves of a batch, in two extra passes."""
        setup, size, trained = self._setup, len(part[0]), self._list_trained()
        # A parameter without a gradient in one half may have one in the other.
        sums: list[Tensor | None] = [None] * len(trained)
        terms = []
        # Batch norm would count these passes, and dropout would move the generators.
        with preserve_training_state(setup.model):
            for images, labels, _, weights in zip(*(tensor.tensor_split(2) for tensor in part), strict=True):
                with setup.precision.autocast():
                    outputs = setup.model(images)
                losses = setup.task.loss(outputs.float(), labels)
                gradients = torch.autograd.grad(losses, trained, weights, allow_unused=True)
                terms.append(compute_local_term([grad for grad in gradients if grad is not None], len(images) / size))
                sums = [
                    one if other is None else other if one is None else one + other
                    for one, other in zip(sums, gradients, strict=True)
                ]
        assert self._noise is not None
        whole = compute_squared_norm([grad for grad in sums if grad is not None])
        self._noise.update(torch.stack(terms).sum(), whole, size / 2, size)

    def _list_trained(self) -> list[Tensor]:
        """Lists the parameters that are trained in this step; others are frozen by now."""
        return [one for one in self._setup.model.parameters() if one.requires_grad]
