"""The methods once more, each as a straightforward program that hears of one result after the other."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from headway.core.random_keys import draw_integers, make_keys
from headway.sweep.budget import Plan

# ("new", trial), ("up", trial, rung), ("stop", trial, rung), ("fork", trial, parent, rung)
Words = tuple[object, ...]


def order(plan: Plan, scores: dict[int, float | None]) -> list[int]:
    """Trials without the failed ones, the best first."""
    whole = {trial: score for trial, score in scores.items() if score is not None}
    return sorted(whole, key=lambda trial: (-whole[trial] if plan.higher_is_better else whole[trial], trial))


class Synchronous:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rungs: list[tuple[set[int], dict[int, float | None], int, int]] = []

    def begin(self) -> Iterator[Words]:
        first = 0
        for number, bracket in enumerate(self.plan.brackets):
            members = set(range(first, first := first + bracket.sizes[0]))
            self.rungs.append((members, {}, number, 0))
            yield from (("new", trial) for trial in sorted(members))

    def hear(self, trial: int, rung: int, score: float | None) -> Iterator[Words]:
        place = next(place for place, one in enumerate(self.rungs) if trial in one[0])
        members, scores, number, level = self.rungs[place]
        assert level == rung
        scores[trial] = score
        sizes = self.plan.brackets[number].sizes
        if len(scores) < len(members) or level + 1 == len(sizes):
            return
        ranked = order(self.plan, scores)
        above = set(ranked[: sizes[level + 1]])
        self.rungs[place] = (above, {}, number, level + 1)
        for one in sorted(ranked):
            yield ("up", one, level + 1) if one in above else ("stop", one, level)


class Promotion:
    def __init__(self, plan: Plan, slots: int) -> None:
        self.plan, self.slots, self.left, self.trials, self.running = plan, slots, plan.budget, 0, 0
        self.levels = plan.brackets[0].levels
        self.rungs: list[dict[int, float | None]] = [{} for _ in self.levels]
        self.promoted: list[set[int]] = [set() for _ in self.levels]

    def begin(self) -> Iterator[Words]:
        while self.running < self.slots and (job := self.get_job()):
            self.running += 1
            yield job

    def get_job(self) -> Words | None:
        for rung in reversed(range(len(self.levels) - 1)):
            cost = self.levels[rung + 1] - self.levels[rung]
            best = order(self.plan, self.rungs[rung])[: len(self.rungs[rung]) // self.plan.eta]
            promotable = [trial for trial in best if trial not in self.promoted[rung]]
            if promotable and cost <= self.left:
                self.left -= cost
                self.promoted[rung].add(promotable[0])
                return ("up", promotable[0], rung + 1)
        if self.levels[0] <= self.left and self.trials < self.plan.brackets[0].sizes[0]:
            self.left -= self.levels[0]
            self.trials += 1
            return ("new", self.trials - 1)
        return None

    def hear(self, trial: int, rung: int, score: float | None) -> Iterator[Words]:
        self.rungs[rung][trial] = score
        self.running -= 1
        return self.begin()


class Population:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.level = plan, 0
        self.members = list(range(plan.brackets[0].sizes[0]))
        self.next = len(self.members)
        self.scores: dict[int, float | None] = {}

    def begin(self) -> Iterator[Words]:
        yield from (("new", trial) for trial in self.members)

    def hear(self, trial: int, rung: int, score: float | None) -> Iterator[Words]:
        self.scores[trial] = score
        if len(self.scores) < len(self.members) or self.level + 1 == len(self.plan.brackets[0].levels):
            return
        ranked = order(self.plan, self.scores)
        failed = len(self.members) - len(ranked)
        share = max(1, len(self.members) // 5)
        parents, kept = ranked[:share], list(ranked)
        # From the worst on, until a fifth is gone; parents stay.
        while kept and failed + len(ranked) - len(kept) < share and kept[-1] not in parents:
            kept.pop()
        forks = range(self.next, self.next + len(self.members) - len(kept) if parents else self.next)
        self.next = forks.stop
        for fork in forks:
            key = make_keys(self.plan.seed, rung, [fork], 1)
            parent = parents[int(draw_integers(key, 0, 0, len(parents))[0])]
            yield ("fork", fork, parent, rung + 1)
        yield from (("stop", one, rung) for one in sorted(set(ranked) - set(kept)))
        yield from (("up", one, rung + 1) for one in sorted(kept))
        self.members, self.scores, self.level = sorted([*kept, *forks]), {}, rung + 1


def build_reference(plan: Plan, slots: int) -> Synchronous | Promotion | Population:
    if plan.method == "asha":
        return Promotion(plan, slots)
    return Population(plan) if plan.method == "pbt" else Synchronous(plan)


def spend(plan: Plan, words: list[Words]) -> Fraction:
    """The work of decisions: each pays from the level of the rung before."""
    work, firsts = Fraction(0), [(bracket.first_trial, bracket.levels) for bracket in plan.brackets]
    for kind, trial, *rest in words:
        levels = [levels for first, levels in firsts if isinstance(trial, int) and first <= trial][-1]
        rung = 0 if kind == "new" else rest[-1]
        if kind != "stop" and isinstance(rung, int):
            work += levels[rung] - (levels[rung - 1] if rung else 0)
    return work
