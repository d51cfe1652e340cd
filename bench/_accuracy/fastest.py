"""Finds the fastest precision and compile setting for the port on this machine, by short timings in turns."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from bench._accuracy.airbench import Arm, How, Images, build
from bench._common import median

HOPELESS = 1.6  # times the fastest one's second step: not timed any further


def candidates(device: torch.device) -> list[How]:
    """Lists all that the device can do: half precision is that of airbench on a GPU, and emulated on CPUs."""
    kinds = ("fp16", "bf16", "fp32") if device.type == "cuda" else ("fp32", "bf16")
    return [How(precision, compiled) for compiled in (False, True) for precision in kinds]


def fastest(
    sets: dict[How, Images], widths: Sequence[int], batch: int, rounds: int
) -> tuple[How, dict[str, tuple[float, float, float]]]:
    """Returns the fastest, and (median, low, high) of the milliseconds of a step of each worth more than two steps.

    Args:
        sets: of each candidate the training images in its type.
        batch: samples of a step; fewer than in training where the machine is slow.
    """
    arms, taken = dict[How, Arm](), dict[How, list[float]]()
    for how, images in sets.items():
        device = images.normal.device
        torch.manual_seed(0)
        try:
            arm = build(how, device, 1, widths, batch)
            seconds(arm, images, batch)  # of the first step, or of the compilation
            taken[how] = [seconds(arm, images, batch)]
        except Exception as error:  # no compiler here, or a type that the device does not have
            print(f"{how}: not here ({type(error).__name__}: {str(error).splitlines()[0][:100]})")
            continue
        arms[how] = arm
    best = min(times[0] for times in taken.values())
    worth = [how for how in arms if taken[how][0] <= HOPELESS * best]
    for how in worth:
        taken[how].clear()
    for number in range(rounds):
        first = number % len(worth)
        for how in worth[first:] + worth[:first]:
            taken[how].append(seconds(arms[how], sets[how], batch))
    found = {how: median([1e3 * one for one in times]) for how, times in taken.items()}
    return min(worth, key=lambda how: found[how][0]), {str(how): times for how, times in found.items()}


def seconds(arm: Arm, images: Images, batch: int) -> float:
    """Measures the seconds of one step."""
    wait = torch.cuda.synchronize if images.normal.device.type == "cuda" else lambda: None
    part, labels = images.normal[:batch], images.labels[:batch]
    wait()
    started = perf_counter()
    arm.step(part, labels)
    wait()
    return perf_counter() - started
