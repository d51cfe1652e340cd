"""The gate: compares the outputs of an export with those of its run over a whole evaluation set, and refuses it.

Both sides start from the same pixels, or each from the files. It looks at answers and metrics, not at logits: int8
moves logits by 2 without a change of an answer, while an image that is shifted by one pixel costs accuracy.

- fp32, same pixels: no answer changes, and no output moves by more than `MAX_DIFFERENCE`.
- fp32, files: an answer may change where the run's two best ones lie within `NEAR_GAP`; numbers follow the next rule.
- bf16, int8: the metric drops by at most `allowed`, and that of a class by at most `CLASS_FACTOR` times as much.

For classes and several labels the drop is in percentage points of accuracy. For numbers it is the growth of the
absolute error in per cent of the run's own: 0.5 allows an error of 2.000 to become 2.010. Each number counts like a
class: they have different units, so that an age would hide a share. The outputs of a task of the user's own that have
another form (`own`) are only compared in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.export.drop_bound import compute_flip_bound, compute_mean_bound
from headway.export.verdict import METRICS, Flip, GatePrecision, GroupDrop, PixelSource, Verdict
from headway.setup.prediction_columns import THRESHOLD

NEAR_GAP = 0.01
"""Answers whose probabilities lie this close together may swap if the images were decoded and resized anew."""
MAX_DIFFERENCE = 1e-3
"""Largest difference of an output in fp32: a probability, or a share of the range of this number of the run.

Other orders of summation move probabilities by 1e-7 to 1e-5; wrong constants that flip no answer of a small set move
them by more than this.
"""
ROUNDING_SHARE = 1e-5
"""Difference of a number in float32 that is rounding, as a share of its size: also of one that is always the same."""
MAX_FILE_DIFFERENCE = 0.02
"""The same for outputs of a task of the user's own from files, as a resize lies in between."""
CLASS_FACTOR = 3
"""So many times the drop of all samples is allowed for a class, or one of several numbers."""
MIN_CLASS_SAMPLES = 50
"""Smaller classes are not judged alone: one of 49 samples is 2 points."""
MAX_NAMED = 3
"""Flips that a message names."""
ROUNDING = 1e-9
"""Points by which a drop may exceed the limit: 100 * 3 / 600 is not 0.5 to the last digit for every such number."""

Outputs = NDArray[np.floating[Any]]


def judge(
    kind: str,
    reference: Outputs,
    outputs: Outputs,
    labels: NDArray[Any] | None,
    precision: GatePrecision = "fp32",
    allowed: float = 0.5,
    *,
    source: PixelSource = "pixels",
    samples: NDArray[np.int64] | None = None,
    names: Sequence[str] = (),
    more_faults: Sequence[str] = (),
) -> Verdict:
    """Judges the outputs of an export.

    Args:
        kind: kind of the labels: `class`, `multi` or `value`; `own`: outputs that only the user's code reads.
        reference, outputs: outputs [n, outputs] of the run and of the export, after the activation.
        labels: whole numbers [n] (classes), 0 or 1 [n, outputs] (several labels), or numbers [n] or [n, outputs].
            Not used for `own`.
        precision: what the export states.
        allowed: the largest drop that passes; not used for fp32 from the same pixels.
        source: where both pipelines started.
        samples: index of each sample in its data set, for messages; default 0, 1, 2, ...
        names: names of the classes, for messages.
        more_faults: reasons to refuse it that were found elsewhere.

    Raises:
        UsageError: `kind`, `precision` or `allowed` is none that exists, or labels do not fit the run's outputs.
    """
    _check_arguments(kind, reference, labels, precision, allowed)
    verdict = Verdict(
        precision=precision, source=source, metric=METRICS[kind], samples=len(reference), allowed=float(allowed)
    )
    # Nothing can be compared after one of these.
    if faults := tuple(_find_broken_outputs(kind, reference, outputs)):
        return replace(verdict, faults=(*more_faults, *faults))
    if kind in ("value", "own"):
        reference, outputs = reference.astype(np.float64), outputs.astype(np.float64)
    ids = np.arange(len(reference)) if samples is None else samples
    flips = list(_find_flips(kind, reference, outputs, ids))
    verdict = replace(verdict, flips=len(flips), difference=float(np.abs(reference - outputs).max()))
    if labels is not None and kind != "own":
        labels = labels if kind == "class" else labels.reshape(reference.shape)
        before, after, drop, bound = _compare_metrics(kind, reference, outputs, labels)
        verdict = replace(verdict, reference=before, value=after, drop=drop, bound=bound)
    is_exact = precision == "fp32" and (kind != "value" or source == "pixels")
    if labels is None or is_exact or kind == "own":
        near = tuple(flip for flip in flips if source == "files" and flip.gap <= NEAR_GAP)
        others = [flip for flip in flips if source == "pixels" or flip.gap > NEAR_GAP]
        found = _find_differences(kind, reference, outputs, source, others, names)
        return replace(verdict, near=near, allowed=0.0, faults=(*more_faults, *found))
    verdict = replace(verdict, worst=_find_worst_group(kind, reference, outputs, labels, names))
    return replace(verdict, faults=(*more_faults, *_find_drops(verdict)))


def _check_arguments(
    kind: str, reference: Outputs, labels: NDArray[Any] | None, precision: str, allowed: float
) -> None:
    if kind not in METRICS:
        raise UsageError(f"there is no kind of labels {kind!r}", where="gate", fix=f"Use one of {', '.join(METRICS)}.")
    if precision not in ("fp32", "bf16", "int8"):
        raise UsageError(f"there is no precision {precision!r}", where="gate", fix="Use fp32, bf16 or int8.")
    if not 0 <= allowed <= 100:
        fix = "Set the percentage points that the metric may drop, such as 0.5."
        raise UsageError(f"{allowed} is not from 0 to 100", where="gate", fix=fix)
    if reference.ndim != 2 or not reference.size:
        what = f"the run's outputs have the shape {list(reference.shape)}, not [samples, outputs]"
        raise UsageError(what, where="gate", fix="Give at least one sample.")
    if kind == "own":
        if precision != "fp32":
            what = f"{precision} may change answers, and the metric of this task of your own is not known"
            fix = "Export it in fp32; or set its activation to softmax, sigmoid or identity, with an output per class."
            raise UsageError(what, where="task", fix=fix)
        return
    if labels is None:
        raise UsageError("there are no labels", where="gate", fix="Give the labels of the same samples.")
    shapes = [(len(reference),)] if kind == "class" else [reference.shape]
    if kind == "value" and reference.shape[1] == 1:
        shapes.append((len(reference),))
    if labels.shape not in shapes:
        what = f"labels of the shape {list(labels.shape)} do not fit outputs of the shape {list(reference.shape)}"
        raise UsageError(what, where="gate", fix="Give the labels of the same samples.")
    if kind != "class":
        return
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= reference.shape[1]:
        what = f"labels are not numbers of {reference.shape[1]} classes"
        raise UsageError(what, where="gate", fix="Give whole numbers from 0 on.")


def _find_broken_outputs(kind: str, reference: Outputs, outputs: Outputs) -> Iterator[str]:
    """Yields the reasons for which outputs cannot be compared at all."""
    if outputs.ndim != 2 or len(outputs) != len(reference):
        yield f"It gives outputs of the shape {list(outputs.shape)}, and the run {list(reference.shape)}."
        return
    if outputs.shape != reference.shape:
        what = {"class": "classes", "multi": "labels"}.get(kind, "numbers")
        yield f"It answers with {outputs.shape[1]} {what}, and the run with {reference.shape[1]}."
        return
    for who, values in (("The run", reference), ("It", outputs)):
        if bad := int((~np.isfinite(values)).any(axis=1).sum()):
            yield f"{who} gives NaN or infinity for {bad:,} of {len(values):,} samples."
        # A set of one sample has nothing to differ from.
        elif len(values) > 1 and (values == values[0]).all():
            yield f"{who} gives the same outputs for every sample."
    if kind in ("class", "multi") and np.isfinite(outputs).all():
        if outputs.min() < -MAX_DIFFERENCE or outputs.max() > 1 + MAX_DIFFERENCE:
            yield f"Its outputs are no probabilities: they reach from {outputs.min():.4g} to {outputs.max():.4g}."
        # 8 bits of a probability are steps of 1/255, in each of the classes.
        elif kind == "class" and np.abs(outputs.sum(axis=1) - 1).max() > 0.05:
            yield "Its probabilities of the classes do not add up to 1."


def _answer(kind: str, outputs: Outputs) -> NDArray[np.int64]:
    """Returns the predicted class [n], or which labels are predicted [n, outputs]."""
    return outputs.argmax(axis=1) if kind == "class" else (outputs > THRESHOLD).astype(np.int64)


def count_flips(kind: str, reference: Outputs, outputs: Outputs) -> int:
    """Counts the answers that differ; numbers have none. Args: see `judge`."""
    return 0 if kind in ("value", "own") else int((_answer(kind, reference) != _answer(kind, outputs)).sum())


def _find_flips(kind: str, reference: Outputs, outputs: Outputs, ids: NDArray[np.int64]) -> Iterator[Flip]:
    """Yields the answers that differ. Numbers have none."""
    if kind in ("value", "own"):
        return
    ours, theirs = _answer(kind, reference), _answer(kind, outputs)
    if kind == "class":
        for row in np.flatnonzero(ours != theirs):
            # The class of the export may be the third best of the run, so the gap is that to the class it chose.
            gap = float(reference[row, ours[row]] - reference[row, theirs[row]])
            yield Flip(sample=int(ids[row]), answers=(int(ours[row]), int(theirs[row])), gap=gap)
        return
    for row, column in zip(*np.nonzero(ours != theirs), strict=True):
        # The two answers for a label have the probabilities p and 1 - p, as the threshold is one half.
        gap = float(abs(2 * reference[row, column] - 1))
        yield Flip(sample=int(ids[row]), answers=(int(column), int(column)), gap=gap)


def _score(kind: str, outputs: Outputs, labels: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the metric of each sample, [n]."""
    if kind == "class":
        return np.asarray(outputs.argmax(axis=1) == labels, np.float64)
    each: NDArray[Any] = (outputs > THRESHOLD) == (labels > 0.5) if kind == "multi" else np.abs(outputs - labels)
    scores: NDArray[np.float64] = np.mean(each, axis=1, dtype=np.float64)
    return scores


def _compare_metrics(
    kind: str, reference: Outputs, outputs: Outputs, labels: NDArray[Any]
) -> tuple[float, float, float, float]:
    """Returns the metric of the run and of the export, the drop in points, and its bound."""
    ours, theirs = _score(kind, reference, labels), _score(kind, outputs, labels)
    # Sorted, because a sum of floats depends on its order, and samples have none.
    before, after = float(np.sort(ours).mean()), float(np.sort(theirs).mean())
    if kind == "class":
        lost, won = int((ours > theirs).sum()), int((ours < theirs).sum())
        # From counts: the difference of two means has an error in its last digit.
        drop, bound = (lost - won) / len(ours), compute_flip_bound(lost, won, len(ours))
    elif kind == "multi":
        drop, bound = float(np.sort(ours - theirs).mean()), compute_mean_bound(ours - theirs)
    else:
        drop, bound = (_divide(value, before) for value in (after - before, compute_mean_bound(theirs - ours)))
    return before, after, 100 * drop, 100 * bound


def _divide(growth: float, error: float) -> float:
    """Divides the growth of an error by the error. Without an error, any growth is infinite."""
    if error > 0:
        return growth / error
    return 0.0 if growth <= 0 else math.inf


def _find_differences(
    kind: str,
    reference: Outputs,
    outputs: Outputs,
    source: PixelSource,
    flips: Sequence[Flip],
    names: Sequence[str],
) -> Iterator[str]:
    """Yields the reasons to refuse an export in fp32."""
    if flips:
        named = ", ".join(_describe_flip(kind, flip, names) for flip in flips[:MAX_NAMED])
        rule = "none may" if source == "pixels" else f"only those within {NEAR_GAP} may"
        more = f" and {len(flips) - MAX_NAMED:,} more" if len(flips) > MAX_NAMED else ""
        yield f"{len(flips):,} answers change, and {rule}: {named}{more}."
    if source != "pixels" and kind != "own":
        return
    limits = np.full(reference.shape[1], MAX_DIFFERENCE if source == "pixels" else MAX_FILE_DIFFERENCE)
    if kind in ("value", "own"):
        # Each number has a unit of its own, so its own range is the measure.
        limits = np.maximum(limits * np.ptp(reference, axis=0), _compute_rounding(reference))
    differences = np.abs(reference - outputs).max(axis=0)
    worst = int((differences - limits).argmax())
    if differences[worst] > limits[worst]:
        yield (
            f"Output {_get_name(names, worst)} differs by {differences[worst]:.3g}, and {limits[worst]:.3g} is the "
            "most that rounding explains."
        )


def _compute_rounding(reference: Outputs) -> NDArray[np.float64]:
    """Returns the difference of each number that is rounding, [outputs]."""
    return np.asarray(ROUNDING_SHARE * np.abs(reference).max(axis=0), np.float64)


def _get_name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else str(number)


def _describe_flip(kind: str, flip: Flip, names: Sequence[str]) -> str:
    ours, theirs = (_get_name(names, number) for number in flip.answers)
    change = f"{ours} becomes {theirs}" if kind == "class" else f"the label {ours} changes"
    return f"sample {flip.sample} ({change}; {flip.gap:.3f} apart)"


def _find_worst_group(
    kind: str, reference: Outputs, outputs: Outputs, labels: NDArray[Any], names: Sequence[str]
) -> GroupDrop | None:
    """Finds the largest drop of a class, of the samples that have or have not a label, or of one of several numbers."""
    if kind == "value":
        found = list(_compare_numbers(reference, outputs, labels, names))
        return max(found, key=lambda group: group.points)
    found = []
    for number in range(reference.shape[1]):
        name = _get_name(names, number)
        if kind == "class":
            groups = {name: labels == number}
            ours, theirs = (values.argmax(axis=1) == number for values in (reference, outputs))
        else:
            # A label that is never predicted any more, and one that always is, must both be seen.
            groups = {name: labels[:, number] > 0.5, f"not {name}": labels[:, number] <= 0.5}
            ours, theirs = (
                (values[:, number] > THRESHOLD) == (labels[:, number] > 0.5) for values in (reference, outputs)
            )
        for title, members in groups.items():
            count = int(members.sum())
            if count >= MIN_CLASS_SAMPLES:
                change = int(ours[members].sum()) - int(theirs[members].sum())
                found.append(GroupDrop(name=title, samples=count, points=100 * change / count))
    return max(found, key=lambda group: group.points, default=None)


def _compare_numbers(
    reference: Outputs, outputs: Outputs, labels: NDArray[Any], names: Sequence[str]
) -> Iterator[GroupDrop]:
    """Yields the growth of the error of each number, in per cent of the run's own."""
    before, after = (np.sort(np.abs(values - labels), axis=0).mean(axis=0) for values in (reference, outputs))
    # The error of a number that the run always gets right may not grow at all, but for rounding.
    growth = np.where(after - before > _compute_rounding(reference), after - before, 0.0)
    for number in range(reference.shape[1]):
        points = 100 * _divide(float(growth[number]), float(before[number]))
        yield GroupDrop(name=_get_name(names, number), samples=len(reference), points=points)


def _find_drops(verdict: Verdict) -> Iterator[str]:
    """Yields the reasons to refuse an export that may lose something."""
    has_numbers = verdict.metric == METRICS["value"]
    unit = "% of the error" if has_numbers else "points"
    if verdict.drop > verdict.allowed + ROUNDING:
        change = "grows" if has_numbers else "drops"
        yield (
            f"{verdict.metric} {change} by {verdict.drop:.3g} {unit}, more than {verdict.allowed:g} "
            f"(upper 95 % bound {verdict.bound:.3g})."
        )
    worst, limit = verdict.worst, CLASS_FACTOR * verdict.allowed
    if worst is not None and worst.points > limit + ROUNDING:
        change = f"The error of {worst.name} grows" if has_numbers else f"{worst.name} drops"
        unit = "%" if has_numbers else "points"
        yield f"{change} by {worst.points:.3g} {unit} on {worst.samples:,} samples, more than {limit:g}."
