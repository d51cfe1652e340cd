"""Summary of a loop, from its journal: the rounds, what is accepted, and what it has cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from headway.core.statistics import compute_interval
from headway.core.text_format import align_table, pluralise
from headway.lifecycle.loop.answers import Gain, Verdict
from headway.lifecycle.loop.loop_folder import LoopFolder, Stage
from headway.lifecycle.loop.loop_recipe import LoopRecipe
from headway.lifecycle.loop.verification import Verification
from headway.lifecycle.mining.review import Arm
from headway.lifecycle.mining.review import Gain as ArmGain

LoopState = Literal["finished", "waiting", "running"]


@final
@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """One round. What is not done yet is None, or empty.

    Attributes:
        number: of the round; 0 before the first one.
        version: number of the version that its networks were trained on.
        images: images in its split `train`.
        accuracy: of each member on the pinned evaluation split.
        labelled: labels that the round has brought.
        people_s: seconds that people took for them in the label page.
        arms: what the picks of each arm gave, judged by the networks of the round before.
        arm_gains: wrong proposals that each arm found beyond the random one.
        verdict: of the gate.
        gain: mean accuracy of the members less that of the accepted round's.
        gain_in_all: the same, less that of round 0.
        export: folder, relative to that of the loop; empty: none.
        exported: False if the export was refused by its own gate; None: it was not tried.
        verification: what the program of the user has said about the export.
        stages: what is done.
    """

    number: int
    version: int | None
    images: int | None
    accuracy: tuple[float, ...]
    labelled: int
    people_s: float
    arms: tuple[Arm, ...]
    arm_gains: tuple[ArmGain, ...]
    verdict: Verdict | None
    gain: Gain | None
    gain_in_all: Gain | None
    export: str
    exported: bool | None
    verification: Verification | None
    stages: tuple[Stage, ...]

    def sum_seconds(self, *names: str) -> float:
        """Returns the wall time of these stages; without names, of all."""
        return sum(stage.seconds for stage in self.stages if not names or stage.name in names)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all stages."""
        return sum(stage.cpu_s for stage in self.stages)

    def describe_accuracy(self) -> str:
        """Returns the mean accuracy of the members, with its 95 % interval over members if there are several."""
        if not self.accuracy:
            return "-"
        mean, half = compute_interval(self.accuracy)
        return f"{mean:.1%}" if len(self.accuracy) < 2 else f"{mean:.1%} +- {100 * half:.1f}"

    def describe_gate(self) -> str:
        """Returns what became of the round's network."""
        if self.verdict is None:
            return "first" if self.number == 0 and self.accuracy else "-"
        if not self.verdict.passed:
            return "refused"
        if self.exported is False:
            return "export refused"
        is_refused = self.verification is not None and not self.verification.passed
        return "verification refused" if is_refused else "accepted"


@final
@dataclass(frozen=True, kw_only=True)
class LoopSummary:
    """A loop.

    Attributes:
        folder: its folder.
        name, data: its name, and the address of its data set.
        state: `waiting` for labels, `finished`, or `running`.
        missing: labels that are waited for.
        planned: rounds that are planned.
        eval_images: images of the pinned evaluation split.
        rounds: what is done of each round.
        accepted: number of the round whose first member is accepted.
    """

    folder: Path
    name: str
    data: str
    state: LoopState
    missing: int
    planned: int
    eval_images: int
    rounds: tuple[RoundSummary, ...]
    accepted: int

    @property
    def network(self) -> Path:
        """The run folder of the accepted network."""
        return LoopFolder(self.folder).find_member(self.accepted, 1)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        rounds = []
        for one in self.rounds:
            tree = {**asdict(one), "stages": [{"name": stage.name, "seconds": stage.seconds} for stage in one.stages]}
            tree["arms"] = [asdict(arm) | {"share": arm.share} for arm in one.arms]
            for name, found in (("verdict", one.verdict), ("verification", one.verification)):
                tree[name] = None if found is None else found.to_json()
            rounds.append(tree)
        return {
            "folder": str(self.folder),
            "state": self.state,
            "missing": self.missing,
            "accepted": self.accepted,
            "network": str(self.network),
            "rounds": rounds,
        }

    def describe(self) -> str:
        """Returns the rounds, for the terminal."""
        rows = [["round", "version", "images", "accuracy, %", "gain over round 0, points", "network"]]
        for one in self.rounds:
            gain = "-" if one.gain_in_all is None else one.gain_in_all.describe()
            version, images = (
                "-" if value is None else f"{unit}{value:,}" for unit, value in (("v", one.version), ("", one.images))
            )
            accuracy = one.describe_accuracy().replace("%", "")
            rows.append([f"{one.number}", version, images, accuracy, gain, one.describe_gate()])
        lines = align_table(rows)
        verified = [(one.number, one.verification) for one in self.rounds if one.verification is not None]
        lines += [f"Verification of round {number}: {found.describe()}." for number, found in verified[-1:]]
        if self.state == "waiting":
            lines.append(f"It waits for {pluralise(self.missing, 'label')}. Set them, and run the same command again.")
        lines.append(f"Network: {self.network}")
        exports = [one.export for one in self.rounds if one.number == self.accepted and one.export]
        lines += [f"Export: {self.folder / export}" for export in exports]
        lines.append(f"Page: {LoopFolder(self.folder).page_path}")
        return "\n".join(lines)


def find_accepted(folder: LoopFolder, before: int | None = None, *, verifies: bool = False) -> int:
    """Returns the newest round whose network passed all gates; 0, whose network begins, if there is none.

    Args:
        before: only rounds before this one count; None: all.
        verifies: a network that waits for its verification is not accepted yet.
    """
    accepted = 0
    for stage in folder.stages:
        if stage.name == "gate" and stage.facts["passed"] and (before is None or stage.round < before):
            later = [folder.find(stage.round, name) for name in ("export", "verify")]
            is_refused = any(one is not None and not one.facts["passed"] for one in later)
            if not is_refused and not (verifies and is_verification_due(folder, stage.round)):
                accepted = max(accepted, stage.round)
    return accepted


def is_verification_due(folder: LoopFolder, number: int) -> bool:
    """Returns True for a round whose network passed its gate, and is judged before the next round begins."""
    gate, export = folder.find(number, "gate"), folder.find(number, "export")
    is_refused = any(one is not None and not one.facts["passed"] for one in (gate, export))
    # A round before the newest one was judged by what LOOP.yaml said then.
    is_past = folder.find(number, "verify") is not None or folder.find(number + 1, "mine") is not None
    return gate is not None and not is_refused and not is_past


def summarise_loop(folder: LoopFolder, settings: LoopRecipe, missing: int = 0) -> LoopSummary:
    """Returns the summary of a loop.

    Args:
        missing: labels that are waited for, if they were counted.
    """
    numbers = sorted({stage.round for stage in folder.stages})
    rounds = tuple(_summarise_round(folder, number) for number in numbers)
    first, last = folder.find(0, "train"), numbers[-1] if numbers else 0
    mined = folder.find(last, "mine")
    state: LoopState = "running"
    gate = folder.find(last, "gate")
    if gate is not None:
        exports = settings.export is not None and gate.facts["passed"] and folder.find(last, "export") is None
        verifies = settings.verify is not None and is_verification_due(folder, last)
        state = "running" if exports or verifies or last < settings.rounds else "finished"
    elif mined is not None and folder.find(last, "label") is None:
        state = "waiting" if mined.facts["picks"] else "finished"
    return LoopSummary(
        folder=folder.folder,
        name=settings.name,
        data=settings.data,
        state=state,
        missing=missing,
        planned=settings.rounds,
        eval_images=first.facts["eval_images"] if first is not None else 0,
        rounds=rounds,
        accepted=find_accepted(folder, verifies=settings.verify is not None),
    )


def _summarise_round(folder: LoopFolder, number: int) -> RoundSummary:
    stages = {stage.name: stage for stage in folder.stages if stage.round == number}
    facts = {name: stage.facts for name, stage in stages.items()}
    train, label, gate, export, verify = (
        facts.get(name, {}) for name in ("train", "label", "gate", "export", "verify")
    )
    review = label.get("review", {})
    verdict: dict[str, Any] = {name: gate.get(name) for name in Verdict.__dataclass_fields__}
    return RoundSummary(
        number=number,
        version=(facts.get("begin") or label).get("number"),
        images=train.get("images"),
        accuracy=tuple(train.get("accuracy", ())),
        labelled=label.get("labelled", 0),
        people_s=label.get("people_s", 0.0),
        arms=tuple(Arm(**{name: arm[name] for name in Arm.__dataclass_fields__}) for arm in review.get("arms", ())),
        arm_gains=tuple(ArmGain(**gain) for gain in review.get("gains", ())),
        verdict=Verdict(**verdict) if gate else None,
        gain=Gain(**gate["gain"]) if gate else None,
        gain_in_all=Gain(**gate["gain_in_all"]) if gate else None,
        export=export.get("folder", "") if export.get("passed") else "",
        exported=export.get("passed"),
        verification=Verification.from_json(verify) if verify else None,
        stages=tuple(stages.values()),
    )
