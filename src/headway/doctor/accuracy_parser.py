"""Reads training and validation accuracy from the output of a training script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from headway.core.errors import UsageError
from headway.core.untrusted_json import parse_object

AccuracyKind = Literal["train", "val"]

KINDS: dict[str, AccuracyKind] = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluate", "evaluation", "test", "testing", "dev"), "val"),
}
# `top`, `prec` and `precision` count only with a 1 behind them: top1, prec@1.
METRICS = ("acc", "accuracy", "top", "prec", "precision")
# In a name or right before it, these mark a number that is not the current accuracy. `step`: the accuracy of one batch.
OTHERS = ("best", "target", "goal", "required", "threshold", "step", "balanced")
# A number behind one of these words belongs to the word.
CLOSED = ("loss", "lr", "epoch", "step", "time", "batch", "iter", "iteration", "eta")

# Allowed between a name and its number.
FILLERS = ("is", "was", "of", "at")

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# A number (`81.2 %`, `9855/10000`, `80.5 (79.9)`), or a word (`val_acc`, `train/accuracy`).
TOKEN = re.compile(
    rf"(?P<number>{NUMBER})(?:\s*/\s*(?P<of>\d+))?(?P<percent>\s*%)?(?:\s*\(\s*(?P<mean>{NUMBER})(?P<mean_percent>\s*%)?\s*\))?"
    r"|(?P<word>[A-Za-z][A-Za-z0-9_@]*(?:[-/.][A-Za-z][A-Za-z0-9_@]*)*)"
)
# Splits `valTop1` and `val_top1` into val, top, 1.
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
TOP = re.compile(r"\btop[-_ ](\d+)\b", re.IGNORECASE)
ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|\][^\x07]*\x07)")


@final
@dataclass(frozen=True)
class AccuracyReading:
    """One accuracy in a line; `percent` None: the line does not say whether it is in percent."""

    kind: AccuracyKind
    number: float
    percent: bool | None


@final
class AccuracyParser:
    """Finds accuracies in lines.

    The name of an accuracy says whether it is training or validation (`val_acc`, `train/accuracy`), or a word before it
    (`valid: loss 0.3 acc 81.2 %`). If neither does, it is training accuracy if the line also names a validation
    accuracy, or is a Keras progress bar. JSON lines are read by their keys.

    Args:
        train, val: regular expressions that replace the usual names; the number is the first group, or the whole match.
        scale: of numbers without a %: `fraction` of 1, `percent`, or `auto`: percent once a number is above 1.

    Attributes:
        unclear: the first line with an accuracy that is neither marked as training nor as validation.

    Raises:
        UsageError: a pattern is not a regular expression, or the scale is unknown.
    """

    def __init__(self, train: str | None = None, val: str | None = None, scale: str = "auto") -> None:
        if scale not in ("auto", "fraction", "percent"):
            raise UsageError(f"there is no scale {scale!r}", where="--scale", fix="Set auto, fraction or percent.")
        self._patterns: dict[AccuracyKind, re.Pattern[str]] = {}
        if train is not None:
            self._patterns["train"] = _compile_pattern(train, "--train-pattern")
        if val is not None:
            self._patterns["val"] = _compile_pattern(val, "--val-pattern")
        self._auto, self._percent = scale == "auto", scale == "percent"
        self.unclear: str | None = None

    def read(self, line: str) -> list[AccuracyReading]:
        """Returns the accuracies of a line, in order."""
        plain = TOP.sub(r"top\1", ANSI.sub("", line))
        out = [reading for kind in self._patterns for reading in self._match_pattern(kind, plain)]
        if len(self._patterns) < 2:
            readings = list(_parse_line(plain))
            named = {kind for kind, _ in readings}
            bare: AccuracyKind | None = "train" if "val" in named or _is_keras_bar(plain) else None
            # PyTorch's ImageNet example prints validation as ` * Acc@1 ...`.
            bare = "val" if bare is None and plain.lstrip().startswith("* ") else bare
            if None in named and bare is None and self.unclear is None:
                self.unclear = plain.strip()
            for kind, one in readings:
                what = kind or bare
                if what is not None and what not in self._patterns:
                    out.append(replace(one, kind=what))
        # A number outside of 0 to 100 is on no scale of accuracies.
        out = [reading for reading in out if 0 <= reading.number <= 100]
        if self._auto and any(one.percent is None and one.number > 1 for one in out):
            self._percent = True
        return out

    def to_fraction(self, reading: AccuracyReading) -> float:
        """Converts a reading to a fraction of 1, by the scale that is known so far."""
        percent = self._percent if reading.percent is None else reading.percent
        return reading.number / 100 if percent else reading.number

    def to_least_fraction(self, reading: AccuracyReading) -> float:
        """Converts a reading to the lowest fraction it can be: until the scale is known, a number without % may be
        percent."""
        return reading.number / 100 if self._auto and reading.percent is None else self.to_fraction(reading)

    def _match_pattern(self, kind: AccuracyKind, line: str) -> Iterator[AccuracyReading]:
        for match in self._patterns[kind].finditer(line):
            group = 1 if match.re.groups and match.group(1) is not None else 0
            number = re.compile(NUMBER).search(line, match.start(group), match.end(group))
            if number is not None:
                sign = line[number.end() :].lstrip().startswith("%")
                yield AccuracyReading(kind, float(number.group()), True if sign else None)


def _compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        fix = r"For example: 'accuracy on the test images: ([\d.]+)'."
        raise UsageError(f"'{pattern}' is not a regular expression ({error})", where=where, fix=fix) from None


def _parse_line(line: str) -> Iterator[tuple[AccuracyKind | None, AccuracyReading]]:
    """Yields (kind, accuracy) of a JSON line by its keys, and of any other line by its words."""
    if line.lstrip().startswith("{"):
        try:
            tree = parse_object(line)
        except ValueError:
            pass
        else:
            yield from _parse_tree(tree, None)
            return
    yield from _parse_words(line)


def _parse_tree(
    tree: dict[str, Any], around: AccuracyKind | None
) -> Iterator[tuple[AccuracyKind | None, AccuracyReading]]:
    """Yields the accuracies of a JSON object; `around` is the kind that the keys above it name."""
    # A value such as `"split": "val"` names the kind of its neighbours.
    kinds = [KINDS[value.lower()] for value in tree.values() if isinstance(value, str) and value.lower() in KINDS]
    around = kinds[0] if kinds else around
    for key, value in tree.items():
        kind, is_metric = _parse_name(key)
        kind = kind or around
        if isinstance(value, dict):
            yield from _parse_tree(value, kind)
        elif is_metric and isinstance(value, int | float) and not isinstance(value, bool):
            yield kind, AccuracyReading(kind or "train", float(value), None)


def _parse_words(line: str) -> Iterator[tuple[AccuracyKind | None, AccuracyReading]]:
    """Yields accuracies of plain text. A number counts if it stands behind the name of an accuracy (`acc 0.8`), behind
    a colon after more words (`accuracy on the 10000 test images: 54 %`), or behind its kind (`acc: train 0.9, val
    0.8`)."""
    # context: the last kind that a word named. own: the kind in the accuracy's own name. active: an accuracy was named.
    # awaits: its number was not seen yet. other: the words right before name another number, such as the best one.
    context: AccuracyKind | None = None
    own: AccuracyKind | None = None
    awaits = active = other = False
    # The last word, and the end of the last token.
    before, end = "", 0
    for token in TOKEN.finditer(line):
        gap, end = line[end : token.start()], token.end()
        word = token["word"]
        if word is not None:
            kind, is_metric = _parse_name(word)
            if is_metric:
                own, active, awaits = kind, not other, not other
            elif word.lower() in KINDS:
                context = KINDS[word.lower()]
            elif _claims_next_number(word):
                # `accuracy after epoch 3: 0.9` still awaits its number.
                active = awaits = awaits and word.lower() == "epoch"
            other = word.lower() in OTHERS or (other and word.lower() in KINDS)
            before = before if word.lower() in FILLERS else word.lower()
            continue
        follows = bool(before) and (_parse_name(before)[1] or (before in KINDS and active and own is None))
        colon = awaits and not _claims_next_number(before) and any(sign in gap for sign in ":=")
        if active and ((awaits and follows) or colon or (follows and before in KINDS)):
            yield own or context, _build_reading(token, own or context or "train")
            awaits = False
        before, other = "", False


def _build_reading(token: re.Match[str], kind: AccuracyKind) -> AccuracyReading:
    """Reads `9855/10000`, `81.2 %`, or `80.5 (79.9)`: the newest batch, and in brackets the mean of all."""
    if token["of"] is not None and float(token["of"]) >= float(token["number"]) and float(token["of"]) > 0:
        return AccuracyReading(kind, float(token["number"]) / float(token["of"]), False)
    which = "mean" if token["mean"] is not None and token["mean_percent"] == token["percent"] else "number"
    return AccuracyReading(kind, float(token[which]), True if token["percent"] else None)


def _parse_name(word: str) -> tuple[AccuracyKind | None, bool]:
    """Returns (kind, is it an accuracy) of a name."""
    parts = [part.lower() for part in PARTS.findall(word)]
    kind = next((KINDS[part] for part in parts if part in KINDS), None)
    for place, part in enumerate(parts):
        if part in METRICS:
            number = next((one for one in parts[place + 1 :] if one.isdigit() or one not in ("top", "at")), "")
            by_rank = part in ("top", "prec", "precision")
            if (number == "1" or (not by_rank and not number.isdigit())) and not set(parts) & set(OTHERS):
                return kind, True
    return kind, False


def _claims_next_number(word: str) -> bool:
    """Returns True if the number behind a word is its own, as in `loss 0.3`."""
    parts = [part.lower() for part in PARTS.findall(word)]
    return any(part in CLOSED or part in METRICS for part in parts) and not _parse_name(word)[1]


def _is_keras_bar(line: str) -> bool:
    """Recognises `391/391 - 12s 31ms/step - accuracy: 0.4520 - loss: 1.5200`."""
    return re.search(r" - (?:acc|accuracy): ", line) is not None and re.search(r"\bloss: ", line) is not None
