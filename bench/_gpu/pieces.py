"""The pieces of bench.gpu: one command each, with the question that it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MINUTES = 8.0
"""Longest time of a piece. Split a longer one."""
TESTS = (
    (
        "data/test_augment.py",
        "data/test_ops.py",
        "data/test_augment_policy.py",
        "data/test_ops_resize.py",
        "data/tiers/test_memory.py",
        "doctor/test_device_copy.py",
        "export/test_onnx_target.py",
        "observe/test_nvml.py",
        "observe/test_host_syncs.py",
        "observe/test_layer_times.py",
        "watch/test_watch_torch.py",
        "optim/test_fused_optimizer.py",
        "optim/test_optimizer.py",
        "optim/test_soap.py",
        "optim/test_stochastic_rounding.py",
    ),
    (
        "setup/test_compilation.py",
        "checkpoint/test_checkpoint_hostile.py",
        "setup/test_inputs.py",
        "setup/test_precision.py",
        "training/test_sync.py",
        "checkpoint/test_tensors_file.py",
        "comm/test_batch_norm.py",
    ),
)
"""The files in tests/ with tests marked `gpu`. Other files may import packages that a GPU machine lacks."""


@final
@dataclass(frozen=True)
class Piece:
    """One command.

    Attributes:
        answers: the question, for the table.
        command: arguments of `python -m`. `{out}` becomes the folder of the records.
        dry: the arguments of a dry run, on the CPU with a tiny network. Empty: the dry run of another piece tries the
            same code.
        minutes: expected time.
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
    answers = f"Do the tests marked `gpu` pass? ({rooms})"
    # Without a GPU the tests are collected and skipped. One file shows that this works.
    return Piece(f"tests-{number}", answers, (*command, *files), (*command, files[-1]) if number == 1 else ())


def _bench(
    name: str, answers: str, *arguments: str, minutes: float = 4.0, bench: str = "", has_dry_run: bool = True
) -> Piece:
    module = f"bench.{bench or name}"
    # A dry run keeps no results, since they are not from a GPU.
    kept = arguments.index("--results") if "--results" in arguments else len(arguments)
    dry = (*arguments[:kept], *arguments[kept + 2 :])
    return Piece(name, answers, (module, *arguments), (module, *dry, "--quick") if has_dry_run else (), minutes)


PIECES = (
    *(_tests(number, names) for number, names in enumerate(TESTS, 1)),
    _bench(
        "strategies",
        "Does each strategy of `parallel` train as one process does? (two processes on one GPU)",
        bench="_gpu.strategies",
        minutes=3.0,
    ),
    _bench("optim", "How much does a step of LARS and LAMB cost beside torch's fused SGD and AdamW?"),
    _bench("loop", "How much time does the Trainer add to a hand-written loop?", minutes=2.0),
    _bench(
        "device-resnet50", "How many images/s does ResNet-50 train, beside a plain loop?", bench="device", minutes=6.0
    ),
    _bench(
        "device-resnet18",
        "How many images/s does ResNet-18 train, beside a plain loop?",
        "--network",
        "resnet18",
        bench="device",
        minutes=4.0,
        has_dry_run=False,
    ),
    _bench(
        "device-alexnet",
        "How many images/s does AlexNet train, beside a plain loop?",
        "--network",
        "alexnet",
        bench="device",
        has_dry_run=False,
    ),
    _bench(
        "device-vit",
        "How many images/s does ViT-S/16 train, beside a plain loop?",
        "--network",
        "vit_small",
        bench="device",
        minutes=6.0,
        has_dry_run=False,
    ),
    _bench(
        "precision", "How fast are bf16, fp16 and half weights, and how much accuracy do they cost?", "--seeds", "1"
    ),
    _bench("compile", "How much faster are compiled networks and CUDA graphs?", minutes=6.0),
    _bench("input", "How many images/s does the input deliver, beside DALI?", minutes=7.5),
    _bench(
        "regimes", "Does the doctor tell a device-limited run from a host-limited one?", "--regimes", bench="doctor"
    ),
    _bench(
        "time_to_accuracy",
        "How long is the time to accuracy on CIFAR-10, beside a port of the published record?",
        "--results",
        "{out}/gpu-time_to_accuracy.jsonl",
        minutes=7.5,
    ),
)


def fill_command(command: tuple[str, ...], out: Path) -> list[str]:
    """Returns a command with the folder of the records in it."""
    return [one.replace("{out}", str(out)) for one in command]
