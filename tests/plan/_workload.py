"""A network's workload, made by hand."""

from __future__ import annotations

from headway.core.workload import (
    Workload,
    WorkloadExchange,
    WorkloadInput,
    WorkloadLayer,
    WorkloadPhase,
    WorkloadRun,
    WorkloadStep,
    WorkloadUpdate,
    WorkloadWindow,
)

WINDOW = WorkloadWindow(rows=28, row_bytes=256 * 28 * 4, kernel=3, padding=1)


def layer(
    name: str,
    kind: str,
    parameters: int,
    adds: int,
    ready: int,
    shape: tuple[int, ...],
    windows: tuple[WorkloadWindow, ...] = (),
) -> WorkloadLayer:
    return WorkloadLayer(
        name=name, kind=kind, parameters=parameters, weight_bytes=4 * parameters, gradient_bytes=4 * parameters,
        ready=ready, input_shape=shape, output_shape=shape, forward_multiply_adds=adds,
        backward_multiply_adds=2 * adds, activation_bytes=1000, saved_bytes=10**6, saved_bytes_fixed=0, windows=windows,
    )  # fmt: skip


def workload(*, dense: int = 1_000_000, convolutions: int = 10, name: str = "photos") -> Workload:
    """Ten convolutions of 2 million weights and 0.4 G multiply-adds each, and a fully connected layer; 100,000 images,
    32 a step, 10 epochs."""
    layers = [
        layer(f"features.{at}", "Conv2d", 2_000_000, 400_000_000, convolutions - at, (256, 28, 28), (WINDOW,))
        for at in range(convolutions)
    ]
    layers.append(layer("head", "Linear", dense, dense, 0, (1000,)))
    gradients = sum(one.gradient_bytes for one in layers)
    return Workload(
        name=name,
        layers=tuple(layers),
        input=WorkloadInput(
            height=224, width=224, channels=3, decoded_bytes=150_528, encoded_bytes=110_000.0, source_pixels=2e5,
            on_host=(), on_device=(),
        ),
        step=WorkloadStep(
            batch=32, micro_batch=None, precision="fp32", half_weights=False, compiled=False,
            update=WorkloadUpdate(optimizer="sgd", state_bytes=gradients, passes=4.0),
            exchange=WorkloadExchange(
                gradient_bytes=gradients, statistics_bytes=0, algorithm="auto", wire_ratio=1.0, bucket_bytes=None,
                sync_batch_norm=False,
            ),
        ),
        run=WorkloadRun(
            samples=100_000, epochs=10.0, steps=31_250,
            phases=(WorkloadPhase(steps=31_250, batch=32, height=224, width=224, forward_multiply_adds=4_000_000_000),),
            evaluations=10, evaluation_samples=5_000, checkpoints=1, checkpoint_bytes=10**8,
        ),
    )  # fmt: skip
