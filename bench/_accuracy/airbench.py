"""airbench94's recipe with SGD, ported: network, data, training and multi-crop evaluation, in PyTorch alone.

The recipe is that of Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024, arXiv 2404.00498) and of
github.com/KellerJordan/cifar10-airbench, legacy/airbench94.py; the code is written anew. What differs from there: any
device; on CPUs fp32, or bf16 by autocast, in place of half-precision weights (bf16 has too few digits for these);
pixels are normalised and padded before the clock starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Precision = Literal["fp32", "bf16", "fp16"]

EPOCHS = 9.9
BATCH = 1024
LR, MOMENTUM, DECAY = 11.5, 0.85, 0.0153  # rate and decay per 1,024 examples, apart from each other and the momentum
BIAS_SCALE = 64.0  # of the learning rate of batch norm's biases
SMOOTHING = 0.2
BIAS_EPOCHS = 3  # of training of the whitening layer's bias
TRANSLATE = 2
WIDTHS = (64, 256, 256)
KEPT_STATISTICS = 0.6
SCALE = 1 / 9
LOOKAHEAD_STEPS, LOOKAHEAD_DECAY = 5, 0.95**5
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
WHITENED, EPSILON = 5000, 5e-4
HELD_OUT = 2000  # images of a batch of the evaluation


@final
@dataclass(frozen=True)
class How:
    """What the recipe leaves to the machine."""

    precision: Precision
    compiled: bool

    def __str__(self) -> str:
        return f"{self.precision}, {'compiled' if self.compiled else 'eager'}"


@final
class Norm(nn.BatchNorm2d):
    """Batch norm without a trained scale, in fp32 whatever goes through it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-12, momentum=1 - KEPT_STATISTICS)
        self.weight.requires_grad_(False)


def network(widths: Sequence[int] = WIDTHS) -> nn.Sequential:
    """Whitening, three groups of two convolutions, the largest of each channel, a linear head; 8 layers."""
    whiten = nn.Conv2d(3, 24, 2)
    nn.init.zeros_(whiten.bias)  # type: ignore[arg-type]
    whiten.weight.requires_grad_(False)
    groups = []
    for before, after in pairwise((24, *widths)):
        first, second = _conv(before, after), _conv(after, after)
        layers = [first, nn.MaxPool2d(2), Norm(after), nn.GELU(), second, Norm(after), nn.GELU()]
        groups.append(nn.Sequential(*layers))
    head = nn.Linear(widths[-1], 10, bias=False)
    return nn.Sequential(whiten, nn.GELU(), *groups, nn.MaxPool2d(3), nn.Flatten(), head)


def _conv(before: int, after: int) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:before])
    return conv


@torch.no_grad()
def whiten(layer: nn.Conv2d, images: Tensor) -> None:
    """Filters that make the images' 2 x 2 patches white, and their negations.

    Args:
        images: normalised, [n, 3, H, W].
    """
    patches = F.unfold(images.float(), 2).transpose(1, 2).reshape(-1, 12)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + EPSILON).sqrt()).T.flip(0).view(12, 3, 2, 2)
    layer.weight.copy_(torch.cat([filters, -filters]))


@final
class Images:
    """A set in memory, normalised; and its training batches.

    Args:
        pixels: uint8 [n, 32, 32, 3].
    """

    def __init__(self, pixels: Tensor, labels: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        scaled = (pixels.to(device).to(torch.float32) / 255 - torch.tensor(MEAN, device=device)) / torch.tensor(
            STD, device=device
        )
        self.normal = scaled.permute(0, 3, 1, 2).to(dtype)  # channels last in memory
        self.labels = labels.to(device)
        self._padded: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def prepare(self) -> None:
        """What is done once a run: half of the images are mirrored, and all padded."""
        mirrored = torch.rand(len(self), device=self.normal.device) < 0.5
        start = torch.where(mirrored.view(-1, 1, 1, 1), self.normal.flip(3), self.normal)
        self._padded = F.pad(start, (TRANSLATE,) * 4, "reflect").contiguous(memory_format=torch.channels_last)

    def epoch(self, number: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches, the last one only if it is whole: each image moved by up to two pixels, and all of them
        mirrored against the epoch before."""
        assert self._padded is not None
        images = moved(self._padded, self.normal.shape[2])
        if number % 2:
            images = images.flip(3)
        order = torch.randperm(len(self), device=images.device)
        for low in range(0, len(self) - batch + 1, batch):
            chosen = order[low : low + batch]
            yield images[chosen], self.labels[chosen]


def moved(padded: Tensor, side: int) -> Tensor:
    """A random window of each padded image: [n, C, side + 2 r, ...] to [n, C, side, side]."""
    spare = padded.shape[2] - side
    offsets = torch.randint(0, spare + 1, (len(padded), 2), device=padded.device)
    out = torch.empty_like(padded[:, :, :side, :side], memory_format=torch.channels_last)
    for down in range(spare + 1):
        for right in range(spare + 1):
            here = (offsets == torch.tensor([down, right], device=padded.device)).all(1).nonzero().squeeze(1)
            out[here] = padded[here, :, down : down + side, right : right + side]
    return out


@final
class SlowWeights:
    """Lookahead of weights and statistics, which holds more back the later it is."""

    def __init__(self, net: nn.Module) -> None:
        self._now = [value for value in net.state_dict().values() if value.is_floating_point()]
        self._slow = [value.clone() for value in self._now]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """slow = decay * slow + (1 - decay) * now, and the network goes on from there."""
        torch._foreach_lerp_(self._slow, self._now, 1 - decay)
        torch._foreach_copy_(self._now, self._slow)


@final
class Arm:
    """A network of this recipe with its optimizer, ready to be trained.

    Args:
        steps: of the whole run.
    """

    def __init__(self, how: How, device: torch.device, steps: int, widths: Sequence[int], batch: int) -> None:
        net = network(widths).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if how.precision == "fp16":
            net = net.half()
            for module in net.modules():
                if isinstance(module, Norm):
                    module.float()
        self.net, self.how, self._device = net, how, device
        mode = "max-autotune" if device.type == "cuda" else "default"
        self._forward: Callable[[Tensor], Tensor] = torch.compile(net, mode=mode) if how.compiled else net
        kilostep = 1024 * (1 + 1 / (1 - MOMENTUM))
        lr, decay = LR / kilostep, DECAY * batch / kilostep
        biases = [value for module in net.modules() if isinstance(module, Norm) for value in [module.bias]]
        others = [value for value in net.parameters() if value.requires_grad and all(value is not b for b in biases)]
        groups = [
            {"params": biases, "lr": lr * BIAS_SCALE, "weight_decay": decay / (lr * BIAS_SCALE)},
            {"params": others, "lr": lr, "weight_decay": decay / lr},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: factor(step, steps))

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Forward, backward, and the optimizer."""
        loss = F.cross_entropy(self.logits(images).float(), labels, label_smoothing=SMOOTHING, reduction="sum")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def train_bias(self, trained: bool) -> None:
        """Whether the whitening layer's bias is trained."""
        bias = self.net[0].bias
        assert isinstance(bias, Tensor)
        bias.requires_grad_(trained)
        if not trained:
            bias.grad = None

    def logits(self, images: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.how.precision == "bf16"):
            return self._forward(images) * SCALE

    def warm_up(self, images: Tensor, labels: Tensor, held_out: Tensor) -> None:
        """Steps on data that mean nothing, of every kind that training has, and an evaluation by views; without effect.

        Args:
            held_out: the images of a batch of the evaluation.
        """
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        for trained in (True, False):
            self.train_bias(trained)
            for _ in range(2):
                self.step(images, torch.randint_like(labels, 10))
        self.train_bias(True)
        self.net.eval()
        with torch.no_grad():
            for _, view in views(held_out):
                self.logits(view)
        self.net.train()
        self.net.load_state_dict(before)
        self.optimizer.state.clear()


def factor(step: int, steps: int) -> float:
    """On the learning rate: from 0.2 along a line to 1 after 23 % of the steps, and to 0.07 at the end."""
    rising = int(steps * 0.23)
    if step < rising:
        return 0.2 + 0.8 * step / rising
    return 1 - 0.93 * (step - rising) / (steps - rising)


def views(images: Tensor) -> list[tuple[float, Tensor]]:
    """(weight, images) of the six views at test time: the middle of weight 1/2, one pixel up and left, and down and
    right, of 1/4 each; each half as it is and half mirrored."""
    padded, side = F.pad(images, (1,) * 4, "reflect"), images.shape[2]
    windows = [(0.5, images)] + [(0.25, padded[:, :, at : at + side, at : at + side]) for at in (0, 2)]
    return [(weight / 2, view) for weight, one in windows for view in (one, one.flip(3))]


@torch.no_grad()
def accuracy(arm: Arm, held_out: Images, *, multi_crop: bool, batch: int = HELD_OUT) -> float:
    """Share of the images that the network names rightly."""
    arm.net.eval()
    right = 0
    for images, labels in zip(held_out.normal.split(batch), held_out.labels.split(batch), strict=True):
        seen = views(images) if multi_crop else [(1.0, images)]
        logits = sum(weight * arm.logits(view).float() for weight, view in seen)
        assert isinstance(logits, Tensor)
        right += int((logits.argmax(1) == labels).sum())
    arm.net.train()
    return right / len(held_out)


def train(
    data: Images, held_out: Images, how: How, *, seed: int, epochs: float = EPOCHS, widths: Sequence[int] = WIDTHS
) -> dict[str, Any]:
    """One run. `seconds`: of training alone; `tta_seconds`: of the multi-crop evaluation after it."""
    torch.manual_seed(seed)
    device = data.normal.device
    steps = math.ceil(len(data) // BATCH * epochs)
    arm = Arm(how, device, steps, widths, BATCH)
    whiten(arm.net[0], data.normal[:WHITENED])  # type: ignore[arg-type]
    data.prepare()
    arm.net.train()
    arm.warm_up(data.normal[:BATCH], data.labels[:BATCH], held_out.normal[:HELD_OUT])
    slow = SlowWeights(arm.net)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started, done = perf_counter(), 0
    for epoch in range(math.ceil(epochs)):
        arm.train_bias(epoch < BIAS_EPOCHS)
        for images, labels in data.epoch(epoch, BATCH):
            arm.step(images, labels)
            arm.schedule.step()
            done += 1
            if done % LOOKAHEAD_STEPS == 0:
                slow.update(LOOKAHEAD_DECAY * (done / steps) ** 3)
            if done == steps:
                slow.update(1.0)
                break
    wait()
    seconds = perf_counter() - started
    plain = accuracy(arm, held_out, multi_crop=False)
    started = perf_counter()
    multi_crop = accuracy(arm, held_out, multi_crop=True)
    return {
        "seconds": seconds,
        "tta_seconds": perf_counter() - started,
        "accuracy": plain,
        "accuracy_tta": multi_crop,
        "steps": steps,
        "how": str(how),
    }
