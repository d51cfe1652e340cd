"""The same recipe in each precision, side by side: curves, final accuracy, speed, and memory.

train: the arms are `headway train` with precision fp32, bf16 (on a GPU fp16 too), and bf16 with half_weights (on a GPU
fp16 with half_weights too). `bf16_state` is fp32 with `optimizer.precision: bf16`, and `bf16_all` bf16 with
half_weights and that. All start with the same weights and get the same batches. They take turns, an epoch each, and
every round starts with another one. Ratios are computed within a round; the first round, in which kernels are chosen,
is left out. The clock leaves out evaluations, which come after each turn.

ARM_vs_fp32            time of an epoch in fp32 over the arm's: above 1, the arm is faster
ARM_accuracy           points of accuracy at the end over those of fp32, with the same seed; median over the seeds
ARM_curve              largest distance of the arm's evaluation loss from fp32's at the end of an epoch, both averaged
                       over the seeds, relative to fp32's

step: one step of an optimizer on ResNet-50's 161 tensors, with random gradients; bytes are those of tensors that live.

memory_ratio_16bit     weights and state of AdamW with `optimizer.precision: bf16` and half_weights, over those of fp32
memory_ratio_state     the same without half_weights
OPTIMIZER_step_16bit   time of such a step over that of fp32 weights and state, for nag, lars, adamw and lamb

Without --data it uses scikit-learn's digits and `small_net`; with --data a packed CIFAR-10, and the network and
hyper-parameters of recipes/cifar10.yaml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bench._arms import ROOT
from bench._common import Claim, add_only, median, parser, run_parts, table, take_turns
from bench._family import run_bench
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.model import resnet50
from headway.optim import MasterWeights, build_optimizer, convert_to_bf16, read_optimizer
from headway.optim.footprint import estimate_footprint
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.evaluate import evaluate
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

BIG = 10**9
DIGITS = """
data: {train: digits.packed/train, eval: digits.packed/eval}
augment: {translate: 1}
model: {factory: 'headway.model:small_net'}
optimizer: {name: nag, lr: 0.05, weight_decay: 0.0005}
schedule: {name: triangular, start: 0.2, peak: 0.3, end: 0.02}
batch: 64
epochs: 10
"""
Curve = list[tuple[float, float]]
"""Loss and accuracy of the evaluation after each epoch."""


def arms(device: str) -> dict[str, tuple[str, ...]]:
    """Overrides of each."""
    found: dict[str, tuple[str, ...]] = {"fp32": ("precision=fp32",), "bf16": ("precision=bf16",)}
    found["bf16_half"] = ("precision=bf16", "half_weights=true")
    found["bf16_all"] = (*found["bf16_half"], "optimizer.precision=bf16")
    found["bf16_state"] = ("precision=fp32", "optimizer.precision=bf16")
    if device == "cuda":
        found["fp16"] = ("precision=fp16",)
        found["fp16_half"] = ("precision=fp16", "half_weights=true")
    return found


def trainers(
    stack: ExitStack, recipe: Path, base: tuple[str, ...], folder: Path, device: str, names: list[str]
) -> dict[str, Trainer]:
    made = {}
    never = (f"evaluate.every_epochs={BIG}", f"checkpoint={{every_steps: {BIG}}}", f"log_every_steps={BIG}")
    for name in names:
        overrides = (*base, f"device={device}", *arms(device)[name], *never)
        loaded = read_recipe(recipe, overrides, TrainRecipe)
        setup = build_setup(loaded)
        stack.enter_context(closing(setup.inputs))
        made[name] = stack.enter_context(closing(Trainer(setup, RunFolder.create(folder / name), SilentDisplay())))
    return made


def side_by_side(
    made: dict[str, Trainer], epochs: int, wait: Callable[[], object]
) -> tuple[dict[str, list[float]], dict[str, Curve]]:
    """Seconds of a step in each round, and the curve, of each arm."""
    names = list(made)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[str, Curve] = {name: [] for name in names}
    steps = made[names[0]].setup.steps
    ends = np.linspace(0, steps, epochs + 1).round().astype(int)
    for number in range(epochs):
        # The last step brings an evaluation and a checkpoint with it: it is taken, and not timed.
        timed = int(ends[number + 1] - ends[number]) - (number == epochs - 1)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            trainer = made[name]
            wait()
            started = perf_counter()
            trainer.run(timed)
            wait()
            seconds[name].append((perf_counter() - started) / timed)
            if number == epochs - 1:
                trainer.run()
            assert trainer.setup.eval is not None
            found = evaluate(trainer.setup, trainer.setup.eval).metrics
            curves[name].append((found["loss"], found["accuracy"]))
    return seconds, curves


def packed_digits(folder: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    from headway.data.pack import pack

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for number, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        (folder / "digits" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "digits" / str(label) / f"{number:04d}.png")
    pack(folder / "digits", folder / "digits.packed", split=0.2, threads=1)


def compare_training(folder: Path, options: argparse.Namespace) -> list[Claim]:
    seeds, epochs = (1, 3) if options.quick else (options.seeds, options.epochs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[list[float]]] = {}
    curves: dict[str, list[Curve]] = {}
    if options.data is None:
        packed_digits(folder)
        recipe, base = folder / "recipe.yaml", (f"epochs={epochs}", f"model.args.width={8 if options.quick else 32}")
        recipe.write_text(DIGITS)
    else:
        data = options.data.resolve()
        recipe = ROOT / "recipes/cifar10.yaml"
        base = (f"epochs={epochs}", f"data.train={data}/train", f"data.eval={data}/eval")
    names = [name for name in arms(device) if name == "fp32" or name in (options.arms or arms(device))]
    for seed in range(seeds):
        with ExitStack() as stack:
            made = trainers(stack, recipe, (*base, f"seed={seed}"), folder / f"seed-{seed}", device, names)
            found, lines = side_by_side(made, epochs, wait)
        for name in found:
            times.setdefault(name, []).append(found[name])
            curves.setdefault(name, []).append(lines[name])
        print(f"seed {seed} is done", file=sys.stderr)

    mean = {name: np.mean(found, axis=0) for name, found in curves.items()}
    rows: list[tuple[str, ...]] = [("epoch", *(f"{name}: loss, accuracy" for name in mean))]
    for number in range(epochs):
        rows.append((str(number + 1), *(f"{one[number][0]:.4f}, {one[number][1]:.2%}" for one in mean.values())))
    print("Evaluation after each epoch, mean over the seeds:")
    table(rows)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    claims = []
    for name in mean:
        if name == "fp32":
            continue
        rounds = [
            one / other
            for mine, theirs in zip(times["fp32"], times[name], strict=True)
            for one, other in zip(mine[1:], theirs[1:], strict=True)
        ]
        middle, low, high = median(rounds)
        how = f"median of {len(rounds)} rounds [{low:.3f}, {high:.3f}]; {where}"
        claims.append(Claim(f"{name}_vs_fp32", middle, "", how))
        points = [100 * (a[-1][1] - b[-1][1]) for a, b in zip(curves[name], curves["fp32"], strict=True)]
        how = f"median of {seeds} seeds [{min(points):.2f}, {max(points):.2f}]"
        claims.append(Claim(f"{name}_accuracy", float(np.median(points)), "points", how))
        gap = np.abs(mean[name][:, 0] / mean["fp32"][:, 0] - 1)
        worst = int(gap.argmax())
        claims.append(Claim(f"{name}_curve", float(gap[worst]), "", f"after epoch {worst + 1}; mean of {seeds} seeds"))
    return claims


class Stepped:
    """ResNet-50's parameters with gradients, and an optimizer that steps them.

    Args:
        width: fp32; `masters`: 16-bit weights with fp32 copies; `state`: a state in bf16; `all`: 16-bit weights, too.
    """

    def __init__(self, name: str, width: str, device: str) -> None:
        torch.manual_seed(0)
        self.model = resnet50(num_classes=1000).to(device, memory_format=torch.channels_last)
        precision = "bf16" if width in ("state", "all") else "fp32"
        recipe = read_optimizer(name=name, lr=1e-3, weight_decay=5e-5, precision=precision)
        self.optimizer = build_optimizer(recipe, self.model)
        self.masters = MasterWeights(self.model, self.optimizer, torch.bfloat16) if width == "masters" else None
        if width == "all":
            convert_to_bf16(self.model)
        self.gradients = [1e-3 * torch.randn_like(parameter) for parameter in self.model.parameters()]

    def step(self) -> None:
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        if self.masters is not None:
            self.masters.take_gradients()
        self.optimizer.step()
        if self.masters is not None:
            self.masters.write_back()

    def count_bytes(self) -> int:
        """Counts the bytes of weights, of their fp32 copies, and of state after a step."""
        kept = {id(value): value for value in self.model.parameters()}
        kept |= {id(value): value for group in self.optimizer.param_groups for value in group["params"]}
        kept |= {id(value): value for state in self.optimizer.state.values() for value in state.values()}
        return sum(value.numel() * value.element_size() for value in kept.values())

    def count_moved_bytes(self) -> int:
        """Counts the bytes that a step reads and writes at least, with copies of masters and their gradients."""
        copied = 0
        if self.masters is not None:
            own = {id(value) for value in self.model.parameters()}
            copied = sum(12 * value.numel() for _, value in self.masters.named_parameters() if id(value) not in own)
        return estimate_footprint(self.optimizer).moved_bytes + copied


def compare_steps(folder: Path, options: argparse.Namespace) -> list[Claim]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows = [("optimizer", "width", "bytes a weight: kept", "moved by a step", "ms a step (95 %)")]
    claims: list[Claim] = []
    for name in ("nag", "lars", "adamw", "lamb"):
        made = {width: Stepped(name, width, device) for width in ("fp32", "masters", "state", "all")}
        count = sum(one.numel() for one in made["fp32"].gradients)
        turns = {width: one.step for width, one in made.items()}
        taken = take_turns(turns, 1 if options.quick else 21, wait, warm=1 if options.quick else 2)
        for width, one in made.items():
            middle, low, high = (1e3 * value for value in median(taken[width]))
            kept, moved = one.count_bytes() / count, one.count_moved_bytes() / count
            rows.append((name, width, f"{kept:.2f}", f"{moved:.1f}", f"{middle:.1f} [{low:.1f}, {high:.1f}]"))
        ratios = [a / b for a, b in zip(taken["all"], taken["fp32"], strict=True)]
        middle, low, high = median(ratios)
        claims.append(
            Claim(f"{name}_step_16bit", middle, "", f"median of {len(ratios)} rounds [{low:.3f}, {high:.3f}]")
        )
        if name == "adamw":
            whole = made["fp32"].count_bytes()
            for claim, width in (("memory_ratio_16bit", "all"), ("memory_ratio_state", "state")):
                claims.append(Claim(claim, made[width].count_bytes() / whole, "", "AdamW, ResNet-50, counted"))
    table(rows)
    return claims


def main() -> None:
    asked = parser(__doc__ or "")
    parts = {"train": compare_training, "step": compare_steps}
    add_only(asked, parts)
    asked.add_argument("--data", type=Path, metavar="PACKED", help="a packed CIFAR-10 with train and eval parts")
    asked.add_argument("--seeds", type=int, default=3, help="how many runs of each arm (default: 3; 1 if --quick)")
    asked.add_argument("--epochs", type=int, default=10, help="of each run (default: 10; 3 if --quick)")
    asked.add_argument("--arms", nargs="+", choices=arms("cuda"), help="arms of `train` beside fp32 (default: all)")
    run_parts(parts, asked.parse_args())


if __name__ == "__main__":
    run_bench(main)
