"""The pieces of bench.gpu: one command each, and the question that it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MINUTES = 8.0
"""Of one piece. A longer one has to be split."""
TESTS = (
    (
        "data/test_augment.py",
        "data/test_ops.py",
        "data/test_augment_policy.py",
        "data/tiers/test_memory.py",
        "doctor/test_device_copy.py",
        "observe/test_nvml.py",
        "observe/test_host_syncs.py",
        "watch/test_watch_torch.py",
        "optim/test_fused_optimizer.py",
        "optim/test_optimizer.py",
    ),
    (
        "setup/test_compilation.py",
        "checkpoint/test_checkpoint_hostile.py",
        "setup/test_inputs.py",
        "setup/test_precision.py",
        "train/test_sync.py",
        "checkpoint/test_tensors_file.py",
    ),
)
"""Files in tests/ that have tests marked `gpu`, and no others: those may import what a GPU machine lacks."""


@final
@dataclass(frozen=True)
class Piece:
    """One command.

    Attributes:
        answers: the question, for the table.
        command: what `python -m` is given. `{out}` becomes the folder of the records.
        dry: the same for a dry run: a processor, a tiny network.
        minutes: how long it is expected to take.
    """

    name: str
    answers: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    minutes: float = 4.0

    @property
    def is_tests(self) -> bool:
        return self.command[0] == "pytest"


def _tests(number: int, names: tuple[str, ...]) -> Piece:
    files = [f"tests/{name}" for name in names]
    rooms = ", ".join(sorted({name.partition("/")[0] for name in names}))
    command = ("pytest", "-m", "gpu", "-q")
    answers = f"do the tests that need a GPU pass ({rooms})"
    # Without a GPU they are collected and skip: one file is enough to show that.
    return Piece(f"tests-{number}", answers, (*command, *files), (*command, files[-1]))


def _bench(name: str, answers: str, *arguments: str, minutes: float = 4.0, bench: str = "") -> Piece:
    module = f"bench.{bench or name}"
    # A dry run keeps what it measures nowhere; its records are of no GPU.
    kept = arguments.index("--results") if "--results" in arguments else len(arguments)
    dry = (*arguments[:kept], *arguments[kept + 2 :])
    return Piece(name, answers, (module, *arguments), (module, *dry, "--quick"), minutes)


PIECES = (
    *(_tests(number, names) for number, names in enumerate(TESTS, 1)),
    _bench("optim", "what an optimizer step costs beside torch's fused ones: at most 1.5 times"),
    _bench("loop", "what the Trainer's loop adds to a hand-written one", minutes=2.0),
    _bench("device-resnet50", "images/s beside a plain loop, and the share of the peak", bench="device", minutes=6.0),
    _bench("device-alexnet", "the same of AlexNet", "--network", "alexnet", bench="device"),
    _bench("device-vit", "the same of ViT-S/16", "--network", "vit_small", bench="device", minutes=6.0),
    _bench("precision", "what bf16, fp16 and half weights give, and what they cost in accuracy", "--seeds", "1"),
    _bench("compile", "what compiling and CUDA graphs give, by network and batch", minutes=6.0),
    _bench("input", "images/s of the input beside DALI, also where that decodes on the GPU", minutes=7.5),
    _bench("regimes", "does the doctor tell a device-limited run from a host-limited one", "--regimes", bench="doctor"),
    _bench(
        "time_to_accuracy",
        "time to accuracy on CIFAR-10 beside a port of the published record",
        "--results",
        "{out}/gpu-time_to_accuracy.jsonl",
        minutes=7.5,
    ),
)


def filled(command: tuple[str, ...], out: Path) -> list[str]:
    """A command with the folder of the records in it."""
    return [one.replace("{out}", str(out)) for one in command]
