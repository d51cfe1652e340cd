"""Training on synthetic data on a GPU: images/s of Headway's settings, and of a plain PyTorch loop.

Each arm has its own network with the same initial weights (ResNet-50 v1.5 or the one of --network, 1,000 classes, 224 x
224), and the same batch, which lies on the device as uint8 as an input pipeline leaves it. So nothing waits for input.
A step normalises it, and runs forward, loss with label smoothing, backward and fused SGD with momentum and weight
decay.

plain        a hand-written loop: eager, autocast bf16, channels last, torch's fused SGD, cudnn.benchmark
bf16, ...    the Trainer as `headway train` runs it, log, clock and learning-rate schedule included: bf16 by autocast or
             with half_weights, each eager and by the recipe's compile: true, graphs, max-autotune (with --autotune:
             on an H100 its compiler takes more than three minutes)

The arms take turns in one process, and each round starts with another arm. Ratios are computed within a round. The
compile time is printed and not part of the times. An arm that runs out of memory, or fails, is left out and named.

device_images_s   images/s of Headway's fastest arm
device_vs_plain   images/s of that arm over the plain loop's
device_peak_share operations/s of that arm over those of a bf16 product of two 8,192 x 8,192 matrices on this GPU

Claims for AlexNet and ViT-S/16 end with the network's name.

For comparison: one A100 80 GB trains ResNet-50 v1.5 on ImageNet at 2,470 images/s by PyTorch and 3,411 by MXNet (NVIDIA
DeepLearningExamples, AMP, input by DALI); MLPerf on an H200 is at 7,950. Operations per second count six for each
multiply-add of the forward pass. The peak is measured in the same process, between the arms' rounds and the report.

--quick runs fewer rounds and arms. Without a GPU only --quick works: a tiny network, as a test, with no claim.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from torch.nn import functional as F

from bench import _synthetic as synthetic
from bench._common import Claim, median, parser, report, take_turns
from bench._family import run_bench
from headway.core.messages import show_messages
from headway.setup.train_setup import TrainSetup
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

PLAIN = "plain"
HALF = ("half_weights=true",)
ARMS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "bf16 half": HALF,
    "compiled": ("compile=true",),
    "compiled half": ("compile=true", *HALF),
    "graphs": ("compile=graphs",),
    "graphs half": ("compile=graphs", *HALF),
    "autotuned half": ("compile=max-autotune", *HALF),
}
"""Headway's, each with what it changes in the recipe."""
SLOW = ("autotuned half",)
QUICK = {"cuda": ("bf16", "bf16 half", "compiled half"), "cpu": ("bf16", "bf16 half")}
# Without a GPU compiling takes longer than all else, and bench.compile tries it.
LR, MOMENTUM, DECAY, SMOOTHING = 0.001, 0.9, 5e-5, 0.1
WARM_STEPS = 4
"""Of each arm before the rounds: the first compiles, CUDA graphs are recorded in the second and third."""
ROUNDS, QUICK_ROUNDS = 11, 3


@dataclass(frozen=True)
class Size:
    """What is trained, and how long a turn is."""

    factory: str
    side: int
    classes: int
    batch: int
    steps: int


NETWORKS = {
    "resnet50": ("headway.model:resnet50", "headway.model:small_net"),
    "resnet18": ("headway.model:resnet18", "headway.model:small_net"),
    "alexnet": ("headway.model:alexnet", "headway.model:small_net"),
    "vit_small": ("bench._vit:vit_small", "bench._vit:vit_tiny"),
}
"""Each with the tiny one that is trained where there is no GPU."""
TINY = Size("headway.model:small_net", 16, 10, 8, 2)
PEAK_SIDE, PEAK_ROUNDS = 8192, 20


def fitting_batch(memory_bytes: int) -> int:
    """Images of a step, a power of two of at most 256: eager bf16 keeps some 90 MB an image for the backward pass, and
    recorded graphs keep their memory, so that three times as much has to fit."""
    return int(min(256, 2 ** max(3, math.floor(math.log2(memory_bytes / (3 * 90e6))))))


def setup_of(size: Size, overrides: tuple[str, ...], folder: Path, device: torch.device) -> TrainSetup:
    options = (
        f"data.synthetic.classes={size.classes}",
        f"task.args.label_smoothing={SMOOTHING}",
        f"optimizer={{name: sgd, lr: {LR}, momentum: {MOMENTUM}, weight_decay: {DECAY}}}",
        "precision=bf16",
        f"device={device.type}",
    )
    sides = (size.side, size.side)
    return synthetic.setup(size.factory, sides, size.batch, folder, *options, *overrides)


def headway_arm(trainer: Trainer, steps: int) -> Callable[[], None]:
    def run() -> None:
        torch.backends.cudnn.benchmark = False  # as `headway train` leaves it
        trainer.run(steps)

    return run


def plain_arm(setup: TrainSetup, steps: int) -> Callable[[], None]:
    """The hand-written loop, over the network and the batch of a setup that is not trained otherwise."""
    device, model = setup.device, setup.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True)
    batch = next(iter(setup.batches(0)))
    images, labels = batch.images, batch.labels
    mean = torch.tensor(setup.recipe.augment.mean, device=device)
    inverse_std = 1 / torch.tensor(setup.recipe.augment.std, device=device)

    def run() -> None:
        torch.backends.cudnn.benchmark = True
        for _ in range(steps):
            inputs = ((images.float() - mean) * inverse_std).permute(0, 3, 1, 2)
            with torch.autocast(device.type, torch.bfloat16):
                outputs = model(inputs)
                loss = F.cross_entropy(outputs, labels, label_smoothing=SMOOTHING)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def built(
    name: str, size: Size, folder: Path, device: torch.device, stack: ExitStack
) -> tuple[Callable[[], None], int | None]:
    """An arm, and the multiply-adds of its network for one image."""
    folder.mkdir(parents=True)
    setup = setup_of(size, ARMS.get(name, ()), folder, device)
    stack.enter_context(closing(setup.inputs))
    counted = None if setup.counts is None else setup.counts.multiply_adds
    if name == PLAIN:
        return plain_arm(setup, size.steps), counted
    trainer = stack.enter_context(closing(synthetic.trainer(setup, folder, SilentDisplay())))
    return headway_arm(trainer, size.steps), counted


def peak(device: torch.device) -> float:
    """Operations/s of a bf16 matrix product of random numbers, the median of some."""
    one, other = torch.randn(2, PEAK_SIDE, PEAK_SIDE, device=device, dtype=torch.bfloat16).unbind()
    taken = take_turns({"product": lambda: torch.mm(one, other)}, PEAK_ROUNDS, torch.cuda.synchronize, warm=3)
    return float(2 * PEAK_SIDE**3 / median(taken["product"])[0])


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--batch", type=int, help="images of a step (default: by the GPU's memory, at most 256)")
    asked.add_argument("--network", choices=NETWORKS, default="resnet50", help="default: resnet50")
    asked.add_argument("--arms", type=lambda text: text.split(","), metavar="A,B", help=f"of {', '.join(ARMS)}")
    asked.add_argument("--autotune", action="store_true", help="compile: max-autotune too")
    asked.add_argument("--steps", type=int, default=20, help="of a turn (default: 20)")
    options = asked.parse_args()
    if unknown := set(options.arms or ()) - set(ARMS):
        asked.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    show_messages()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        print("bench.device needs a CUDA GPU, and PyTorch sees none here.")
        report([], options)
        return
    factory, tiny = NETWORKS[options.network]
    size = replace(TINY, factory=tiny)
    if device.type == "cuda":
        batch = options.batch or fitting_batch(torch.cuda.get_device_properties(device).total_memory)
        size = Size(factory, 224, 1000, batch, options.steps)
    before = torch.backends.cudnn.benchmark
    with tempfile.TemporaryDirectory() as temporary:
        try:
            compared(size, device, Path(temporary), options)
        finally:
            torch.backends.cudnn.benchmark = before


def compared(size: Size, device: torch.device, folder: Path, options: argparse.Namespace) -> None:
    """Builds the arms, warms them up, lets them take turns, and reports."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    arms: dict[str, Callable[[], None]] = {}
    multiply_adds: int | None = None
    with ExitStack() as stack:
        every = [name for name in ARMS if options.autotune or name not in SLOW]
        names = tuple(options.arms or (QUICK[device.type] if options.quick else every))
        for name in (PLAIN, *names):
            own = ExitStack()
            started = perf_counter()
            try:
                arm, counted = built(name, size, folder / name.replace(" ", "-"), device, own)
                for _ in range(math.ceil(WARM_STEPS / size.steps)):
                    arm()
                wait()
            except Exception as error:  # of memory, or of the compiler: the other arms are worth having
                own.close()
                print(f"{name}: left out ({type(error).__name__}: {str(error).strip().splitlines()[0][:200]})")
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            stack.push(own)
            print(f"{name}: built, and warmed up in {perf_counter() - started:.1f} s")
            arms[name], multiply_adds = arm, counted
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        taken = take_turns(arms, rounds, wait, warm=1) if arms else {}
    images = size.batch * size.steps
    rates = {name: median([images / seconds for seconds in times]) for name, times in taken.items()}
    ratios = {
        name: median([a / b for a, b in zip(taken[PLAIN], times, strict=True)])
        for name, times in taken.items()
        if PLAIN in taken
    }
    rows = [("arm", "images/s (95 %)", "over plain (95 %)", "ms a step", "model TFLOP/s")]
    for name, (middle, low, high) in rates.items():
        over = "{:.3f} [{:.3f}, {:.3f}]".format(*ratios[name]) if name in ratios else "-"
        done = "-" if multiply_adds is None else f"{6 * multiply_adds * middle / 1e12:.4g}"
        step_ms = 1e3 * size.batch / middle
        rows.append((name, f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]", over, f"{step_ms:.2f}", done))
    print()
    found = []
    if device.type == "cuda":
        share = None if multiply_adds is None else 6 * multiply_adds / peak(device)
        found = claims(rates, ratios, size, rounds, "" if options.network == "resnet50" else options.network, share)
    report(found, options, rows)


def claims(
    rates: dict[str, tuple[float, float, float]],
    ratios: dict[str, tuple[float, float, float]],
    size: Size,
    rounds: int,
    network: str,
    share: float | None,
) -> list[Claim]:
    """Of the fastest of Headway's arms; none, where all were left out.

    Args:
        network: what stands behind the claims' names.
        share: of the GPU's peak, for one image a second.
    """
    mine = [name for name in rates if name != PLAIN]
    if not mine:
        return []
    best = max(mine, key=lambda name: rates[name][0])
    where = f"batch {size.batch}, {size.side} x {size.side}, synthetic; {torch.cuda.get_device_name()}"
    how = f"{best}; median of {rounds} rounds of {size.steps} steps"
    _, low, high = rates[best]
    more = f"_{network}" if network else ""
    found = [Claim(f"device_images_s{more}", rates[best][0], "images/s", f"{how} [{low:,.0f}, {high:,.0f}]; {where}")]
    if share is not None:
        peak_how = f"{how}; over a bf16 product of {PEAK_SIDE} x {PEAK_SIDE}; {where}"
        found.append(Claim(f"device_peak_share{more}", share * rates[best][0], "", peak_how))
    if best in ratios:
        middle, low, high = ratios[best]
        found.append(Claim(f"device_vs_plain{more}", middle, "", f"{how} [{low:.3f}, {high:.3f}]; {where}"))
    return found


if __name__ == "__main__":
    run_bench(main)
