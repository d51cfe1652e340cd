"""Cases with slow user code: its kind and its place, with a random strength."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, final

from bench._accuracy.results import digest
from bench._doctor import user_code
from bench._doctor.jobs import BASES, Job, network
from bench._doctor.user_code import AMOUNT, DOES

MODULE = "bench._doctor.user_code"
RANGES = {
    "sleep": (20.0, 45.0),
    "numpy": (800.0, 1600.0),
    "lock": (50.0, 80.0),
    "collect": (20.0, 60.0),
    "read": (80.0, 200.0),
    "log": (1200.0, 2800.0),
    "reads": (700.0, 1600.0),
}
"""Milliseconds, thousands of numbers, milliseconds, thousands of objects, MB, lines, and values.

Each costs one to four steps of the base, which takes some 11 ms in batches of 32 on two cores with AVX2 alone. In
batches of 128 it takes 22 to 33 ms there: forward and backward limited 4 of 20 cases of seed 77, and the verdicts that
said so were right. Of a lock a step waits for what is left after its own work. A collection costs more, since it also
looks at some 100 ms' worth of torch's own objects."""
BATCH = {"batch": 32}
"""The batch of all other jobs: small enough for the slow code to limit the job on a slow processor."""
FEW = {"batch": 8, "log_every_steps": 200}
"""What the job with `reads` differs in: 700 values take some 4 ms, which is little beside more images.

To launch such a step alone took 4.4 ms on a slow processor, where 449 values took 3.7: launching limited it, as the
verdict said. So 400 values are too few to be a case's truth."""
STAGES = {
    "sleep": "sleep",
    "numpy": "python",
    "lock": "lock",
    "collect": "gc",
    "read": "file",
    "log": "python",
    "reads": "sync",
}
"""That are right where the code is not the transform's, which is a stage of its own."""
PLACES = ("transform", "forward", "loss", "metrics")
INJECTORS = (
    *((place, does) for does in ("sleep", "numpy") for place in PLACES),
    *(("forward or loss", does) for does in ("lock", "collect", "read", "log")),
    ("forward", "reads"),
)
"""Thirteen: where, and what."""


@final
@dataclass(frozen=True)
class UserCase:
    """A job whose user's code is slow.

    Attributes:
        number: in the order of its seed. where: transform, forward, loss or metrics. does: of `user_code.ALL`.
    """

    seed: int
    number: int
    where: str
    does: str
    amount: float

    @property
    def text(self) -> str:
        return f"{self.does} in {self.where} ({self.amount:g})"

    @property
    def stage(self) -> str:
        return "transform" if self.where == "transform" else STAGES[self.does]

    @property
    def place(self) -> str:
        return f"{Path(user_code.__file__).name}:{user_code.line_of(self.does)}"

    def job(self) -> Job:
        base = BASES["cifar"].but(FEW if self.does == "reads" else BATCH)
        args = {"does": self.does, "amount": self.amount}
        if self.where == "transform":
            return base.but({"transform": f"{MODULE}:transform"}, {DOES: self.does, AMOUNT: f"{self.amount}"})
        if self.where == "forward":
            return base.but(network(f"{MODULE}:Net", **args))
        task = {"task.factory": f"{MODULE}:Slow", "task.args": {"where": self.where, **args}}
        # Metrics of training are those of the steps that are logged.
        return base.but(task | ({"log_every_steps": 1} if self.where == "metrics" else {}))

    def settings(self) -> str:
        """What a kept measurement of it has to share to count."""
        return digest([self.job().to_json(), self.stage, Path(user_code.__file__).read_text(encoding="utf-8")])

    def to_json(self) -> dict[str, Any]:
        return {
            "user_code": True,
            "seed": self.seed,
            "number": self.number,
            "settings": self.settings(),
            "case": self.text,
            "truth": [self.stage, self.place],
        }


def user_draws(seed: int) -> Iterator[UserCase]:
    """Cases without end: all injectors in an order drawn by chance, then all again in another one."""
    for number in count():
        turn, place = divmod(number, len(INJECTORS))
        order = list(INJECTORS)
        Random(f"user code, turn {turn} of {seed}").shuffle(order)
        where, does = order[place]
        random = Random(f"user code, case {number} of {seed}")
        low, high = RANGES[does]
        amount = float(f"{low * (high / low) ** random.random():.3g}")
        yield UserCase(seed, number, random.choice(where.split(" or ")), does, amount)
