"""The loop never waits for the device between logging steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests._support import damage, free_port, packed_digits, write_recipe
from tests._waits import counted, waits_refused
from tests.comm._ranks import Rank, run_ranks

from headway.core.launcher_environment import LaunchedProcess
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import LogLines
from headway.training.trainer import Trainer

LOG_EVERY = 6

USER = """
def reads(images, labels, keys):
    if images.sum().item() > 1e30:
        labels = labels * 0
    return images, labels

def branches(images, labels, keys):
    return (images if images.max() > 0 else -images), labels

def plain(images, labels, keys):
    return images * 1.5, labels
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sync")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", batch=12, epochs=4, log_every_steps=LOG_EVERY, evaluate={"every_epochs": 2})
    (folder / "user.py").write_text(USER)
    return folder


CASES: dict[str, tuple[str, ...]] = {
    "sgd, clipped": ("optimizer={name: sgd, lr: 0.01, clip_norm: 1.0}",),
    "adamw, clipped": ("optimizer={name: adamw, lr: 0.001, clip_norm: 1.0, weight_decay: 0.1}",),
    "nag, cosine": ("optimizer={name: nag, lr: 0.01}", "schedule={name: cosine, warmup_epochs: 1}"),
    "bf16": ("precision=bf16",),
    "16-bit weights, averaged, clipped": (
        "precision=bf16",
        "half_weights=true",
        "model={factory: net.py:dropout, ema: {half_life_steps: 4}}",
        "optimizer={name: lars, lr: 0.1, clip_norm: 1.0}",
    ),
    "computed again": (
        "model={factory: net.py:dropout, batch_norm: {ghost: 5}}",
        "activation_checkpointing=['^[1-4]$']",
    ),
    "batch norm and dropout": ("model.factory=net.py:dropout",),
    "averaged weights and ghost batches": (
        "model={factory: net.py:dropout, ema: {half_life_steps: 4, every_steps: 2}, batch_norm: {ghost: 5}}",
    ),
    "micro-batches": ("micro_batch=5",),
    "flip and translate": ("augment={flip: true, translate: 2}",),
    "every augmentation": (
        "augment={flip: alternating, rotation: 20, policy: auto, "
        "jitter: {brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1}, "
        "cutout: 2, random_erasing: {fill: random}, cutmix: {}, mixup: {}}",
    ),
    "stop_at": ("stop_at={accuracy: 1, loss: -1}",),
    "ids": ("log_ids=true",),
    "a plain transform": ("transform=user.py:plain",),
    "checked bytes, masked": ("data.verify=always", "data.on_bad=mask"),
    "label smoothing, not channels last": ("task.args={label_smoothing: 0.1}", "channels_last=false"),
    "all is observed": (
        "model.factory=net.py:dropout",
        "observe={layer_rates: true, activations: ['.*'], noise_scale: true, on_divergence: stop}",
        "optimizer={name: lamb, lr: 0.01}",
    ),
    "the noise of micro-batches": ("observe={noise_scale: true, noise_every_steps: 1}", "micro_batch=5"),
    "the noise of halves": ("observe={noise_scale: true, noise_every_steps: 1}", "model.factory=net.py:dropout"),
    "muon, all moments of a run": (
        "model={factory: headway.model:small_net, args: {width: 4}}",
        "model.freeze_after=[{match: layer1, after_epochs: 0.5}]",
        "optimizer={name: muon, lr: 0.02, lr_rest: 0.05, normalise: true, lookahead: {every_steps: 3, power: 2}, "
        "gradient_noise: 0.2}",
        "data.progressive={start: 4, until_epoch: 0.5, step: 2}",
        "batch_growth={milestones_epochs: [0.3], factor: 2}",
        "checkpoint.every_epochs=4",
    ),
    "macro-batches with layer rates, lookahead": (
        "optimizer={name: lbsgd, lr: 0.01, batch_scale: 2, warmup: lars, lookahead: {every_steps: 2}, clip_norm: 1.0}",
    ),
    "macro-batches that warm up, noise": (
        "optimizer={name: lbsgd, lr: 0.01, batch_scale: 3, warmup_epochs: 1, gradient_noise: 0.2}",
    ),
    "novograd, its rates observed": ("optimizer={name: novograd, lr: 0.01}", "observe={layer_rates: true}"),
    "from rmsprop to sgd, frozen later": (
        "optimizer={name: rmsprop_sgd, lr: 0.01, center_epochs: 0.4, period_epochs: 0.4}",
        "model={factory: net.py:dropout, freeze_after: [{match: '^0', after_epochs: 0.5}]}",
    ),
    "synthetic": ("data=synthetic", "model.factory=headway.model:small_net", "model.args={width: 4}"),
}


@contextmanager
def trainer_of(folder: Path, run: Path, overrides: tuple[str, ...]) -> Iterator[Trainer]:
    trainer = Trainer(
        build_setup(read_recipe(folder / "recipe.yaml", overrides, TrainRecipe)),
        RunFolder.create(run),
        LogLines(),
    )
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.mark.thin(10)
@pytest.mark.parametrize("case", CASES)
def test_no_wait_between_logging_steps(folder: Path, tmp_path: Path, case: str) -> None:
    with trainer_of(folder, tmp_path / "run", CASES[case]) as trainer, counted() as found:
        trainer.run(1)  # makes the ring of host buffers, which are numpy arrays too
        for steps in (LOG_EVERY - 2, LOG_EVERY - 1):
            found.clear()
            trainer.run(steps)
            assert found == {}, f"steps up to {trainer.step}"
            trainer.run(1)
            assert found.total() > 0, "the counter does not see a logging step"


@pytest.mark.parametrize(("transform", "seen"), [("reads", "item"), ("branches", "__bool__")])
def test_a_transform_that_waits_is_counted(folder: Path, tmp_path: Path, transform: str, seen: str) -> None:
    with trainer_of(folder, tmp_path / "run", (f"transform=user.py:{transform}",)) as trainer, counted() as found:
        trainer.run(LOG_EVERY - 1)
    assert found[seen] == found["_local_scalar_dense"] == LOG_EVERY - 1


def test_masked_samples_make_no_wait(tmp_path: Path) -> None:
    packed_digits(tmp_path)
    rare = {"evaluate": {"every_epochs": 9}, "checkpoint": {"every_epochs": 9}}
    write_recipe(tmp_path / "recipe.yaml", batch=60, epochs=4, log_every_steps=LOG_EVERY, **rare)
    damage(tmp_path / "digits.packed/train", 17)
    overrides = ("data.on_bad=mask", "data.max_bad_share=1")
    with trainer_of(tmp_path, tmp_path / "run", overrides) as trainer, counted() as found:
        trainer.run(1)
        found.clear()
        trainer.run(LOG_EVERY - 2)  # more than an epoch, so the damaged sample has been served
        assert found == {}
        trainer.run(1)
    assert trainer.accumulator.damaged > 0


RANKS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "clipped, micro-batches": ("optimizer={name: nag, lr: 0.01, clip_norm: 1.0}", "micro_batch=4"),
    "batch norm": ("model.factory=net.py:dropout",),
    "small buckets, noise scale": ("comm.bucket_mb=0.001", "observe.noise_scale=true"),
    "all is observed": CASES["all is observed"],
}


@contextmanager
def trainer_of_ranks(rank: Rank, folder: Path, run: Path, overrides: tuple[str, ...], port: int) -> Iterator[Trainer]:
    seat = LaunchedProcess(rank.rank, rank.size, rank.rank, rank.size, "127.0.0.1", port, "torchrun")
    loaded = read_recipe(folder / "recipe.yaml", overrides, TrainRecipe)
    with Ranks(loaded.recipe.comm, seat, None) as ranks:
        setup = build_setup(loaded, ranks=ranks)
        trainer = Trainer(setup, RunFolder.create(run / str(rank.rank)), LogLines(), ranks)
        try:
            trainer.recovery.meet()
            yield trainer
        finally:
            trainer.close()


def reads_of_ranks(rank: Rank, folder: Path, run: Path, overrides: tuple[str, ...], port: int) -> list[dict[str, int]]:
    with trainer_of_ranks(rank, folder, run, overrides, port) as trainer, counted() as found:
        trainer.run(1)  # after it the order of gradients is known
        out = []
        for steps in (LOG_EVERY - 2, LOG_EVERY - 1):
            found.clear()
            trainer.run(steps)
            out.append({name: count / steps for name, count in found.items()})
            trainer.run(1)
        return out


@pytest.mark.thin(1)
@pytest.mark.parametrize("case", ["batch norm", "small buckets, noise scale", "all is observed"])
def test_ranks_on_a_cpu_read_the_verdict_and_nothing_else(folder: Path, tmp_path: Path, case: str) -> None:
    """There the host waits for the sums in any case: two reads, of what was agreed on and of who used what."""
    for found in run_ranks(2, reads_of_ranks, folder, tmp_path, RANKS[case], free_port()):
        assert found == [{"tolist": 2.0}] * 2


def runs_on_a_gpu(rank: Rank, folder: Path, run: Path, overrides: tuple[str, ...], port: int) -> int:
    with trainer_of_ranks(rank, folder, run, (*overrides, "device=cuda"), port) as trainer:
        trainer.run(LOG_EVERY)
        with waits_refused():
            trainer.run(LOG_EVERY - 1)
        return trainer.step


@pytest.mark.gpu
@pytest.mark.parametrize("case", RANKS)
def test_ranks_on_gpus_make_no_wait(folder: Path, tmp_path: Path, case: str) -> None:
    """Two where there are two, over NCCL; one rank alone uses the same Reducer."""
    size = min(2, torch.cuda.device_count())
    steps = run_ranks(size, runs_on_a_gpu, folder, tmp_path, RANKS[case], free_port())
    assert steps == [2 * LOG_EVERY - 1] * size


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, "fp16", "fp16, clipped", "16-bit fp16 weights, clipped"])
def test_no_wait_on_a_gpu(folder: Path, tmp_path: Path, case: str) -> None:
    fp16 = ("precision=fp16", "optimizer={name: nag, lr: 0.01, clip_norm: 1.0}")
    overrides = CASES.get(case, fp16[: 1 + case.endswith("clipped")])
    if case.startswith("16-bit fp16"):
        overrides += ("half_weights=true",)
    with trainer_of(folder, tmp_path / "run", (*overrides, "device=cuda")) as trainer:
        trainer.run(LOG_EVERY)  # libraries set themselves up in the first steps
        with waits_refused():
            trainer.run(LOG_EVERY - 1)
        assert trainer.step == 2 * LOG_EVERY - 1
