"""Writes the planner's catalog of workloads: `python -m bench._plan.workloads` counts each network's layers anew.

Nothing is measured: the layers run on tensors without values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from bench._plan.networks import PLACES, BertLarge, build_googlenet, build_vgg
from headway import model
from headway.core.workload import (
    Workload,
    WorkloadExchange,
    WorkloadInput,
    WorkloadPhase,
    WorkloadRun,
    WorkloadStep,
    WorkloadUpdate,
)
from headway.model.batch_norm import list_running_statistics
from headway.model.fake_tensors import use_fake_tensors
from headway.model.layer_profile import PROFILE_BATCH_SIZES, profile_layers

FOLDER = Path(__file__).parents[2] / "src/headway/plan/catalog/workloads"
# Bytes of a mean ImageNet file: MLPerf Storage. Pixels: 469 x 387, the mean size that is usually quoted.
ENCODED_BYTES, SOURCE_PIXELS = 114_660.0, 469.0 * 387.0
TRAINED, EVALUATED = 1_281_167, 50_000
# Passes over the weights' bytes, and state bytes over those of the weights. sgd: momentum; reads and writes weight and
# momentum, reads the gradient. lars reads weight and gradient once more for their norms. lamb has two states.
UPDATES = {"sgd": (5.0, 1), "lars": (7.0, 1), "lamb": (9.0, 2)}


@final
@dataclass(frozen=True)
class Network:
    """Attributes: size: pixels of a side; 0: sequences of tokens. per_device: samples of a device in a step."""

    build: Callable[[], nn.Module]
    size: int
    optimizer: str
    per_device: int
    epochs: float


# per_device: what deck 001 trains ResNet-50 and AlexNet with, TensorFlow's benchmarks of 2017 VGG, else what an old
# device has room for. epochs: 90 of the decks, and 74 of VGG's paper; BERT-large: its second phase by LAMB, see below.
NETWORKS = {
    "resnet50": Network(model.resnet50, 224, "lars", 64, 90),
    "resnet18": Network(model.resnet18, 224, "sgd", 64, 90),
    "alexnet": Network(model.alexnet, 227, "sgd", 128, 90),
    "vgg11": Network(lambda: build_vgg(11), 224, "sgd", 64, 74),
    "vgg16": Network(lambda: build_vgg(16), 224, "sgd", 64, 74),
    "googlenet": Network(build_googlenet, 224, "sgd", 64, 90),
    "bert-large": Network(BertLarge, 0, "lamb", 8, 1),
}
# You et al. 2019 (arXiv 1904.00962): 1,562 steps of 32,768 sequences of 512 tokens follow the phase of short sequences.
SEQUENCES = 1562 * 32_768


def build_workload(name: str) -> Workload:
    """Counts the layers of one network, in fp32 and training mode."""
    network = NETWORKS[name]
    built = network.build().train()
    shape = (3, network.size, network.size) if network.size else (PLACES,)
    with use_fake_tensors(built, torch.zeros(max(PROFILE_BATCH_SIZES), *shape)) as (given,):
        layers = profile_layers(built, given, nullcontext)
    gradients = sum(layer.gradient_bytes for layer in layers)
    forward = sum(layer.forward_multiply_adds for layer in layers)
    passes, states = UPDATES[network.optimizer]
    images = network.size > 0
    samples = TRAINED if images else SEQUENCES
    steps = -(-round(samples * network.epochs) // network.per_device)
    height, width = (network.size, network.size) if images else (1, PLACES)
    return Workload(
        name=name,
        layers=layers,
        input=WorkloadInput(
            height=height, width=width, channels=3 if images else 1,
            # A word piece takes four bytes.
            decoded_bytes=3 * network.size**2 if images else 4 * PLACES,
            encoded_bytes=ENCODED_BYTES if images else 4.0 * PLACES,
            source_pixels=SOURCE_PIXELS if images else None,
            on_host=("random crop", "flip") if images else (), on_device=("normalise",) if images else (),
        ),
        step=WorkloadStep(
            batch=network.per_device, per_device=network.per_device, micro_batch=None, precision="fp32",
            half_weights=False, compiled=False,
            update=WorkloadUpdate(optimizer=network.optimizer, state_bytes=states * gradients, passes=passes),
            exchange=WorkloadExchange(
                gradient_bytes=gradients,
                statistics_bytes=sum(one.numel() * one.element_size() for one in list_running_statistics(built)),
                algorithm="auto", wire_ratio=1.0, bucket_bytes=None, sync_batch_norm=False,
            ),
        ),
        run=WorkloadRun(
            samples=samples, epochs=network.epochs, steps=steps,
            phases=(
                WorkloadPhase(
                    steps=steps, batch=network.per_device, height=height, width=width, forward_multiply_adds=forward
                ),
            ),
            evaluations=round(network.epochs) if images else 0, evaluation_samples=EVALUATED if images else 0,
            checkpoints=round(network.epochs), checkpoint_bytes=(1 + states) * gradients,
        ),
    )  # fmt: skip


def format_workload(workload: Workload) -> str:
    """Formats a workload as JSON with a line for each layer, so that a change shows which."""
    values = workload.model_dump(mode="json")
    layers = ",\n".join(json.dumps(one, separators=(",", ":")) for one in values.pop("layers"))
    return json.dumps(values)[:-1] + ', "layers": [\n' + layers + "\n]}\n"


if __name__ == "__main__":
    for name in NETWORKS:
        workload = build_workload(name)
        (FOLDER / f"{name}.json").write_text(format_workload(workload), encoding="utf-8")
        print(f"{name}: {workload.parameters:,} weights, {workload.forward_multiply_adds:,} multiply-adds")
