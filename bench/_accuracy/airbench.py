"""airbench94's recipe with SGD, ported: network, data, training and multi-crop evaluation, in PyTorch alone. The loop
runs the port of a later record too (bench/_accuracy/record.py).

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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Precision = Literal["fp32", "bf16", "fp16"]
Jitter = Callable[[Tensor], Tensor]

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
    """Batch norm without a trained scale."""

    def __init__(self, width: int, kept: float) -> None:
        super().__init__(width, eps=1e-12, momentum=1 - kept)
        self.weight.requires_grad_(False)


def network(
    widths: Sequence[int] = WIDTHS, activation: type[nn.Module] = nn.GELU, kept: float = KEPT_STATISTICS
) -> nn.Sequential:
    """Whitening, three groups of two convolutions, the largest of each channel, a linear head; 8 layers.

    Args:
        activation: of the groups; that of the whitened patches is GELU.
        kept: share of the running statistics that a step keeps.
    """
    whiten = nn.Conv2d(3, 24, 2)
    nn.init.zeros_(whiten.bias)  # type: ignore[arg-type]
    whiten.weight.requires_grad_(False)
    groups = []
    for before, after in pairwise((24, *widths)):
        first, second = _conv(before, after), _conv(after, after)
        layers = [first, nn.MaxPool2d(2), Norm(after, kept), activation(), second, Norm(after, kept), activation()]
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

    def epoch(self, number: int, batch: int, jitter: Jitter | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches, the last one only if it is whole: each image moved by up to two pixels, and all of them
        mirrored against the epoch before."""
        assert self._padded is not None
        images = moved(self._padded, self.normal.shape[2])
        if number % 2:
            images = images.flip(3)
        if jitter is not None:
            images = jitter(images)
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
    """A network of a recipe with its optimizers, ready to be trained.

    Args:
        net: on the device, in the type of its weights.
        optimizers: each with its schedule.
        smoothing: of the labels.
        scale: of the logits.
    """

    def __init__(
        self,
        how: How,
        net: nn.Sequential,
        optimizers: Sequence[tuple[Optimizer, LambdaLR]],
        *,
        smoothing: float,
        scale: float,
    ) -> None:
        self.net, self.how, self.optimizers, self.smoothing, self.scale = net, how, optimizers, smoothing, scale
        self._device = net[-1].weight.device
        mode = "max-autotune" if self._device.type == "cuda" else "default"
        self._forward: Callable[[Tensor], Tensor] = torch.compile(net, mode=mode) if how.compiled else net

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Forward, backward, and the optimizers."""
        logits = self.logits(images).float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.smoothing, reduction="sum")
        for optimizer, _ in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer, _ in self.optimizers:
            optimizer.step()

    def advance(self) -> None:
        """Takes the learning rates to the next step."""
        for _, schedule in self.optimizers:
            schedule.step()

    def train_bias(self, trained: bool) -> None:
        """Whether the whitening layer's bias is trained."""
        bias = self.net[0].bias
        assert isinstance(bias, Tensor)
        bias.requires_grad_(trained)
        if not trained:
            bias.grad = None

    def logits(self, images: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.how.precision == "bf16"):
            return self._forward(images) * self.scale

    def warm_up(self, images: Tensor, labels: Tensor, held_out: Sequence[Tensor]) -> None:
        """Steps on data that mean nothing, of every kind that training has, and an evaluation by views; without effect.

        Args:
            held_out: the images of a batch of each size that the evaluation has.
        """
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        states = [optimizer.state_dict() for optimizer, _ in self.optimizers]
        for trained in (True, False):
            self.train_bias(trained)
            for _ in range(2):
                self.step(images, torch.randint_like(labels, 10))
        self.train_bias(True)
        self.net.eval()
        with torch.no_grad():
            for batch in held_out:
                for _, view in views(batch):
                    self.logits(view)
        self.net.train()
        self.net.load_state_dict(before)
        for (optimizer, _), state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def build(how: How, device: torch.device, steps: int, widths: Sequence[int], batch: int) -> Arm:
    """airbench94, for a run of so many steps of a batch."""
    net = network(widths).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if how.precision == "fp16":
        net = net.half()
        # Batch norm stays in fp32.
        for module in net.modules():
            if isinstance(module, Norm):
                module.float()
    kilostep = 1024 * (1 + 1 / (1 - MOMENTUM))
    lr, decay = LR / kilostep, DECAY * batch / kilostep
    biases, others = norm_biases(net)
    groups = [
        {"params": biases, "lr": lr * BIAS_SCALE, "weight_decay": decay / (lr * BIAS_SCALE)},
        {"params": others, "lr": lr, "weight_decay": decay / lr},
    ]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True, fused=True)
    schedule = LambdaLR(optimizer, lambda step: factor(step, steps))
    return Arm(how, net, [(optimizer, schedule)], smoothing=SMOOTHING, scale=SCALE)


def norm_biases(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The trained parameters of batch norms, and all others."""
    biases = [module.bias for module in net.modules() if isinstance(module, Norm)]
    known = {id(bias) for bias in biases}
    return biases, [value for value in net.parameters() if value.requires_grad and id(value) not in known]


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


@final
@dataclass(frozen=True)
class Method:
    """What the ports of two recipes do differently in one training loop.

    Attributes:
        build: makes the arm, of how, device, steps, widths and batch.
        batch, epochs: of the source.
        bias_epochs: of training of the whitening layer's bias.
        whitened: images that the whitening is computed from.
        holds_back: whether there are slow weights.
        jitter: of colours; None: there is none.
        evaluate: accuracy with views.
        sizes: of the batches of that evaluation.
    """

    build: Callable[[How, torch.device, int, Sequence[int], int], Arm]
    batch: int
    epochs: float
    bias_epochs: float
    whitened: int
    holds_back: bool
    jitter: Jitter | None
    evaluate: Callable[[Arm, Images], float]
    sizes: tuple[int, ...]


AIRBENCH = Method(
    build,
    BATCH,
    EPOCHS,
    BIAS_EPOCHS,
    WHITENED,
    holds_back=True,
    jitter=None,
    evaluate=lambda arm, held_out: accuracy(arm, held_out, multi_crop=True),
    sizes=(HELD_OUT,),
)


def train(
    method: Method, data: Images, held_out: Images, how: How, *, seed: int, epochs: float, widths: Sequence[int]
) -> dict[str, Any]:
    """One run. `seconds`: of training alone; `tta_seconds`: of the evaluation with views after it."""
    torch.manual_seed(seed)
    device = data.normal.device
    # A quick run has fewer images than a batch.
    batch = min(method.batch, len(data))
    by_epoch = len(data) // batch
    steps = math.ceil(by_epoch * epochs)
    bias_steps = math.ceil(by_epoch * method.bias_epochs)
    arm = method.build(how, device, steps, widths, batch)
    whiten(arm.net[0], data.normal[: method.whitened])  # type: ignore[arg-type]
    data.prepare()
    arm.net.train()
    arm.warm_up(data.normal[:batch], data.labels[:batch], [held_out.normal[:size] for size in method.sizes])
    slow = SlowWeights(arm.net) if method.holds_back else None
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started, done = perf_counter(), 0
    while done < steps:
        for images, labels in data.epoch(done // by_epoch, batch, method.jitter):
            arm.train_bias(done < bias_steps)
            arm.step(images, labels)
            arm.advance()
            done += 1
            if slow is not None and done % LOOKAHEAD_STEPS == 0:
                slow.update(LOOKAHEAD_DECAY * (done / steps) ** 3)
            if done == steps:
                break
    if slow is not None:
        slow.update(1.0)
    wait()
    seconds = perf_counter() - started
    plain = accuracy(arm, held_out, multi_crop=False)
    started = perf_counter()
    multi_crop = method.evaluate(arm, held_out)
    return {
        "seconds": seconds,
        "tta_seconds": perf_counter() - started,
        "accuracy": plain,
        "accuracy_tta": multi_crop,
        "steps": steps,
        "how": str(how),
    }
