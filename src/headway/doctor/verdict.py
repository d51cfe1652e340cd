"""Names the stage that limits a recipe's run, the next limit, and how far to trust the prediction.

These rules compare predicted gains of measured stages. `loop_verdict` uses other rules, because a watched loop only
shows shares of its time: the two share the kinds of verdicts (`core.profile.Kind`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from headway.core.profile import UNCONFIRMED, CodeActivity, CodeLine, LimitKind, ShortRun, StageCeiling, Verdict
from headway.doctor.throughput_model import ThroughputModel

# Largest relative error at which a prediction counts as confirmed.
CONFIRMED = 0.10

# A line with this share of a stage is called all of it.
MOST = 0.9

# Kind of verdict by stage; `normalise` and `transform` depend on the device.
KIND_BY_STAGE: dict[str, LimitKind] = {
    "storage": "host/IO limited",
    "decode": "host/IO limited",
    "augment": "host/IO limited",
    "collate": "host/IO limited",
    "copy": "host/IO limited",
    "launch": "launch limited",
    "optimizer": "launch limited",
    "other": "launch limited",
    "compute": "device limited",
    "python": "host/IO limited",
    "sleep": "host/IO limited",
    "lock": "host/IO limited",
    "file": "host/IO limited",
    "gc": "host/IO limited",
    "sync": "sync limited",
    "exchange": "communication limited",
    "sharing": "launch limited",
    "reduce": "communication limited",
    "slow rank": "communication limited",
    "evaluate": "stall limited",
    "checkpoint": "stall limited",
    "log": "stall limited",
}

# How the stage `normalise` was measured, if the loop also augments.
AUGMENT_NOTE = "normalising and augmenting a batch"

# Each stage as a phrase in a sentence.
STAGE_WORDS = {
    "storage": "reading the records",
    "decode": "decoding the images",
    "augment": "crop, flip and shift while decoding",
    "collate": "collating samples into batches",
    "copy": "copying batches to the device",
    "normalise": "normalising the batch in the loop",
    "transform": "the recipe's transform",
    "launch": "the fixed time of forward and backward",
    "compute": "forward and backward",
    "sync": "host-device syncs in the loop",
    "python": "the recipe's own Python code",
    "sleep": "sleeping or waiting in the recipe's own code",
    "lock": "waiting for a lock in the recipe's own code",
    "file": "reading or writing files in the recipe's own code",
    "gc": "garbage collection",
    "exchange": "waiting for values of other ranks",
    "sharing": "computing in the parts of several ranks",
    "reduce": "summing gradients over the ranks",
    "slow rank": "waiting for the slowest rank",
    "evaluate": "evaluations",
    "checkpoint": "checkpoints",
    "log": "records and the progress display",
    "other": "the loop itself",
    "optimizer": "the optimizer",
}


def choose_kind(stage: str, device: str) -> LimitKind:
    """Returns the kind of verdict for a limiting stage on a device."""
    if stage in ("normalise", "transform"):
        return "host/IO limited" if device == "cpu" else "device limited"
    return KIND_BY_STAGE[stage]


def conclude_verdict(
    model: ThroughputModel,
    device: str,
    run: ShortRun | None,
    laps: Sequence[StageCeiling] = (),
    ceilings: Sequence[StageCeiling] = (),
) -> Verdict:
    """Names the limit: the stage whose removal would help most, see `ThroughputModel.rank_gains`.

    Args:
        device: cpu or cuda. run: of the whole job, if it ran. laps: the loop's stages during that run.
        ceilings: the stages, for the user's lines in them.
    """
    (stage, gain), *others = model.rank_gains()
    # The next limit is found by the same rule, with the first limit removed.
    behind = model.without_stage(stage).rank_gains()
    following = behind[0][0] if behind else (others[0][0] if others else stage)
    # A transform beside the loop runs on the host.
    kind = choose_kind(stage, "cpu" if model.seconds["input"].get(stage) else device)
    code = next((one.code[0] for one in ceilings if one.stage == stage and one.code), None)
    # A CPU launches no kernels: its fixed time is that of Python and of each operation's call.
    why = " (kernel launches)" if stage == "launch" and device != "cpu" else ""
    what = _describe_stage(stage, ceilings) + why + _format_code(code, stage, ceilings)
    unexplained, confirmed = "", False
    if run is not None and run.error is not None and run.images_s is not None:
        confirmed = abs(run.error) <= CONFIRMED
        if not confirmed:
            unexplained = _explain_gap(model, run, laps)
    share = 1 - 1 / gain if gain > 1 else 0.0
    text = f"The run is {kind}: {what} takes {share:.0%} of its time"
    if share < 0.005:
        text = f"The run is {kind}: {what} takes longest, but something else takes as long at the same time"
    text += f". Without that it would give at most {max(gain, 1.0):.2f} times the images/s"
    text += f", and {_describe_stage(following, ceilings)} would limit it." if following != stage else "."
    if unexplained:
        text += UNCONFIRMED
    return Verdict(
        kind=kind,
        stage=stage,
        sentence=text,
        next_stage=following,
        most=max(gain, 1.0),
        code=code,
        confirmed=confirmed,
        unexplained=unexplained,
    )


def _describe_stage(stage: str, ceilings: Sequence[StageCeiling]) -> str:
    """Returns the stage as a phrase. Augmentation is named only if the recipe has some in the loop."""
    if stage == "normalise" and any(one.stage == stage and one.how == AUGMENT_NOTE for one in ceilings):
        return "normalising and augmenting the batch in the loop"
    return STAGE_WORDS[stage]


def _format_code(code: CodeLine | None, stage: str, ceilings: Sequence[StageCeiling]) -> str:
    """Names the user's line, and its share of the stage unless it is all of it."""
    if code is None:
        return ""
    whole = sum(one.seconds for one in ceilings if one.stage == stage)
    share = code.seconds / whole if whole else 1.0
    return f" ({code})" if share >= MOST else f" ({code}: {share:.0%} of it)"


def _explain_gap(model: ThroughputModel, run: ShortRun, laps: Sequence[StageCeiling]) -> str:
    """Explains the part of a run that its stages do not predict."""
    assert run.images_s is not None
    assert run.error is not None
    measured_over_predicted = 1 / (1 + run.error)
    if run.error < 0:
        text = f"The whole job has {measured_over_predicted:.2f} times the images/s that its stages predict"
        return f"{text}: they were measured in a slower moment."
    off = 1 - measured_over_predicted
    alone_of = {**model.seconds["loop"]}
    # One lap of the Clock covers several stages, so their times are added up before the comparison.
    alone_of["compute"] = sum(alone_of.get(stage, 0.0) for stage in ("compute", "launch", *get_args(CodeActivity)))
    alone_of["transform"] = alone_of.get("transform", 0.0) + alone_of.get("normalise", 0.0)
    worst = max(laps, key=lambda one: one.seconds - alone_of.get(one.stage, 0.0), default=None)
    text = f"{off:.0%} of the whole job's time is not explained by its stages, not even with loader and loop at once"
    if worst is None:
        return f"{text}."
    alone = alone_of.get(worst.stage, 0.0)
    if alone <= 0:
        return f"{text}."
    return f"{text}; {STAGE_WORDS[worst.stage]} takes {worst.seconds / alone:.1f} times as long there as alone."
