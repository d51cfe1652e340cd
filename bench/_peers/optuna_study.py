"""Optuna over a plain PyTorch loop: trials of a network on JPEG files, read by a DataLoader, ended early by a pruner.

`python -m bench._peers.optuna_study JSON` runs a study until it has taken so many core seconds, and prints what it
found as one line of JSON. It is written as the documentations of Optuna and PyTorch advise: the loaders and their
workers live as long as the study, OpenCV decodes, intermediate values are reported after each epoch, the weights of
the best epoch are kept.

Runs in .venv-peers: imports nothing of Headway.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import optuna
import psutil
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from bench._peers.serve import answer, argument
from bench._sweep import networks

Item = tuple[NDArray[np.uint8], int]
EVALUATION_BATCH = 250


class Files(Dataset[Item]):
    """JPEG files in folders of their classes, decoded, cropped, and resized to `side` pixels."""

    def __init__(self, folder: Path, side: int, scale: tuple[float, float] | None) -> None:
        classes = sorted(one.name for one in folder.iterdir())
        self.files = [
            (str(file), label) for label, name in enumerate(classes) for file in sorted((folder / name).iterdir())
        ]
        self.side, self.scale = side, scale

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item:
        path, label = self.files[index]
        pixels = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
        flips = False
        if self.scale is not None:
            left, top, width, height = draw_box(pixels.shape[1], pixels.shape[0], self.scale)
            pixels, flips = pixels[top : top + height, left : left + width], random.random() < 0.5
        pixels = cv2.resize(pixels, (self.side, self.side), interpolation=cv2.INTER_AREA)
        return (cv2.flip(pixels, 1) if flips else pixels), label


def draw_box(width: int, height: int, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """Draws (left, top, width, height) as torchvision's RandomResizedCrop does."""
    for _ in range(10):
        area = width * height * random.uniform(*scale)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def use_one_thread(_: int) -> None:
    """Keeps OpenCV from starting threads of its own in a worker."""
    cv2.setNumThreads(0)


def build_loader(folder: Path, asked: Mapping[str, Any], *, is_training: bool) -> DataLoader[Item]:
    """Builds a loader whose worker lives as long as it does."""
    scale = tuple(asked["scale"]) if is_training else None
    return DataLoader(
        Files(folder, asked["side"], scale),
        asked["batch"] if is_training else EVALUATION_BATCH,
        shuffle=is_training,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=4 if is_training else 2,
        worker_init_fn=use_one_thread,
    )


class Normalise(nn.Module):
    """Turns uint8 images [n, h, w, 3] into floats [n, 3, h, w]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.permute(0, 3, 1, 2) - self.mean) / self.std


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader[Item]) -> float:
    """Returns the accuracy."""
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)  # type: ignore[arg-type]


def count_core_s() -> float:
    """Returns the core seconds of this process and of its workers so far."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


class Training:
    """The objective of the study.

    Attributes:
        epochs: epochs that were trained and evaluated.
        best: the highest accuracy of all evaluations, and the weights that had it.
        history: (core seconds, best accuracy) after each epoch.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        images = Path(asked["images"])
        self.asked = asked
        self.train = build_loader(images / "train", asked, is_training=True)
        self.val = build_loader(images / "val", asked, is_training=False)
        self.classes = len(list((images / "train").iterdir()))
        self.epochs = 0
        self.best: tuple[float, dict[str, torch.Tensor]] = (0.0, {})
        self.history: list[tuple[float, float]] = []

    def build(self) -> nn.Sequential:
        """Builds the network, with the same weights in each trial."""
        torch.manual_seed(self.asked["seed"])
        network = getattr(networks, self.asked["network"])(self.classes, 3, width=self.asked["width"])
        return nn.Sequential(Normalise(), network)

    def __call__(self, trial: optuna.Trial) -> float:
        values = {name: getattr(trial, f"suggest_{kind}")(name, *ends, **more) for name, kind, ends, more in SPACE}
        model, epochs = self.build(), self.asked["epochs"]
        optimizer = torch.optim.SGD(model.parameters(), **values)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(self.train))
        accuracy = 0.0
        for epoch in range(1, epochs + 1):
            model.train()
            for images, labels in self.train:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            accuracy = evaluate(model, self.val)
            if self.note(accuracy, model):
                trial.study.stop()
                raise optuna.TrialPruned
            trial.report(accuracy, epoch)
            if epoch < epochs and trial.should_prune():
                raise optuna.TrialPruned
        return accuracy

    def note(self, accuracy: float, model: nn.Module) -> bool:
        """Notes an epoch; returns True if the core seconds are spent."""
        self.epochs += 1
        if accuracy > self.best[0]:
            self.best = accuracy, copy.deepcopy(model.state_dict())
        self.history.append((count_core_s(), self.best[0]))
        return self.history[-1][0] >= self.asked["core_s"]


SPACE: tuple[tuple[str, str, tuple[float, float], dict[str, bool]], ...] = (
    ("lr", "float", (0.001, 1.0), {"log": True}),
    ("momentum", "float", (0.5, 0.98), {}),
    ("weight_decay", "float", (1e-6, 0.01), {"log": True}),
)


def build_pruner(name: str, epochs: int) -> optuna.pruners.BasePruner:
    """Builds a pruner by its name."""
    builders: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "hyperband": lambda: optuna.pruners.HyperbandPruner(1, epochs, 3),
        "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(1, 3, 0),
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5),
    }
    return builders[name]()


def run_study(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the study; returns what it found."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    random.seed(asked["seed"])
    training = Training(asked)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study = optuna.create_study(
        direction="maximize",
        sampler=samplers[asked["sampler"]](seed=asked["seed"]),
        pruner=build_pruner(asked["pruner"], asked["epochs"]),
    )
    study.optimize(training)
    core_s, (score, weights) = count_core_s(), training.best
    model = training.build()
    model.load_state_dict(weights)
    test = build_loader(Path(asked["images"]) / "test", asked, is_training=False)
    return {
        "epochs": training.epochs,
        "core_s": core_s,
        "score": score,
        "test": evaluate(model, test),
        "trials": len(study.trials),
        "complete": sum(one.state == optuna.trial.TrialState.COMPLETE for one in study.trials),
        "history": training.history,
    }


def time_parts(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns core seconds of a batch from the loader alone, and of a step on one that is kept."""
    torch.set_num_threads(1)
    training = Training(asked)
    for images, labels in training.train:
        kept = images, labels
    began, batches = count_core_s(), 0
    for _ in range(asked["rounds"]):
        for _ in training.train:
            batches += 1
    decode_s = (count_core_s() - began) / batches
    model = training.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for number in range(5 + 10 * asked["rounds"]):
        if number == 5:
            began = time.process_time()
        loss = F.cross_entropy(model(kept[0]), kept[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"decode_s": decode_s, "step_s": (time.process_time() - began) / (10 * asked["rounds"])}


if __name__ == "__main__":
    asked = argument()
    found = time_parts(asked) if asked.get("parts") else run_study(asked)
    versions = f"Optuna {optuna.__version__}, torch {torch.__version__}, OpenCV {cv2.__version__}"
    answer(**found, version=versions)
