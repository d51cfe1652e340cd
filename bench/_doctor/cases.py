"""Cases: jobs with one injector or two, drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, final

from bench._accuracy.results import digest
from bench._doctor.injectors import INJECTORS, NONE, Injected, Injector
from bench._doctor.jobs import BASES, Job


@final
@dataclass(frozen=True)
class Case:
    """A job in which something is slow.

    Attributes:
        number: in the order of its seed.
        family: of the base that the injectors were put into.
    """

    seed: int
    number: int
    family: str
    injected: tuple[Injected, ...]

    @property
    def text(self) -> str:
        return " + ".join(one.text for one in self.injected)

    def job(self, without: str | None = None) -> Job:
        """Args: without: the name of an injector that is left out; None: all are in it."""
        job = BASES[self.family]
        for one in self.injected:
            job = (one.off if one.name == without else one.on)(job)
        return job

    def without(self) -> dict[str, Job]:
        """The job without each of its injectors, by their names."""
        return {one.name: self.job(one.name) for one in self.injected}

    def settings(self) -> str:
        """What a kept measurement of it has to share to count."""
        jobs = [self.job(), *self.without().values()]
        return digest([[job.to_json() for job in jobs], [one.truth for one in self.injected]])

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "number": self.number,
            "settings": self.settings(),
            "case": self.text,
            "injected": [one.name for one in self.injected],
            "truth": {one.name: list(one.truth) for one in self.injected},
        }


def draws(seed: int) -> Iterator[Case]:
    """Cases without end: each third one is a pair, the others are single. The single ones are all injectors in an order
    drawn by chance, then all again in another order."""
    for number in count():
        random = Random(f"case {number} of {seed}")
        if number % 3 < 2:
            yield drawn(seed, number, random, [_single(seed, number)])
        else:
            yield _pair(seed, number, random)


def drawn(seed: int, number: int, random: Random, injectors: list[Injector], family: str | None = None) -> Case:
    """A case of these injectors, in a family that all of them are for: any such, or this one."""
    family = family or random.choice([name for name in BASES if all(name in one.families for one in injectors)])
    return Case(seed, number, family, tuple(one.draw(random, family) for one in injectors))


def _single(seed: int, number: int) -> Injector:
    place = number // 3 * 2 + number % 3
    everything = [*INJECTORS, NONE]
    turn, place = divmod(place, len(everything))
    Random(f"turn {turn} of {seed}").shuffle(everything)
    return everything[place]


def _pair(seed: int, number: int, random: Random) -> Case:
    """Of two that change different things and slow different stages down."""
    while True:
        first, second = random.sample(INJECTORS, 2)
        if not first.slots & second.slots and set(first.families) & set(second.families):
            case = drawn(seed, number, random, [first, second])
            if not set(case.injected[0].truth) & set(case.injected[1].truth):
                return case
