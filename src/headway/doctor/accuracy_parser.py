"""Scores: training and validation accuracy, read from what a training script prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from headway.core.errors import UsageError
from headway.core.outside import parse_object

AccuracyKind = Literal["train", "val"]

KINDS: dict[str, AccuracyKind] = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluate", "evaluation", "test", "testing", "dev"), "val"),
}
METRICS = ("acc", "accuracy", "top", "prec", "precision")
"""The last three count with a 1 behind them only: top1, prec@1."""
OTHERS = ("best", "target", "goal", "required", "threshold", "step", "balanced")
"""In a name or right before one: not the accuracy now. A step's is that of one batch."""
CLOSED = ("loss", "lr", "epoch", "step", "time", "batch", "iter", "iteration", "eta")
"""The number behind such a word is its own."""

FILLERS = ("is", "was", "of", "at")
"""Between a name and its number."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
TOKEN = re.compile(
    rf"(?P<number>{NUMBER})(?:\s*/\s*(?P<of>\d+))?(?P<percent>\s*%)?(?:\s*\(\s*(?P<mean>{NUMBER})(?P<mean_percent>\s*%)?\s*\))?"
    r"|(?P<word>[A-Za-z][A-Za-z0-9_@]*(?:[-/.][A-Za-z][A-Za-z0-9_@]*)*)"
)
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
TOP = re.compile(r"\btop[-_ ](\d+)\b", re.IGNORECASE)
ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|\][^\x07]*\x07)")


@final
@dataclass(frozen=True)
class AccuracyReading:
    """One accuracy as a line shows it; `percent` None: the line does not say whether it is one."""

    kind: AccuracyKind
    number: float
    percent: bool | None


@final
class AccuracyParser:
    """Finds accuracies in lines.

    Of what an accuracy is, says its name (`val_acc`, `train/accuracy`), or a word before it (`valid: loss 0.3 acc 81.2
    %`). Where neither does, it is that of training if the line also names one of validation, or is a bar of Keras's.
    JSON lines are read by their keys.

    Args:
        train, val: regular expressions in place of the usual names; the number is in the first group, or in the whole.
        scale: of numbers without a %: `fraction` of 1, `percent`, or `auto`: percent once one is above 1.

    Attributes:
        unclear: the first line with an accuracy that says of nothing what it is of.

    Raises:
        UsageError: a pattern is no regular expression, or a scale is unknown.
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
        """The accuracies of a line, in its order."""
        plain = TOP.sub(r"top\1", ANSI.sub("", line))
        out = [reading for kind in self._patterns for reading in self._match_pattern(kind, plain)]
        if len(self._patterns) < 2:
            found = list(_parse_line(plain))
            named = {kind for kind, _ in found}
            bare: AccuracyKind | None = "train" if "val" in named or _is_keras_bar(plain) else None
            bare = "val" if bare is None and plain.lstrip().startswith("* ") else bare  # PyTorch's ImageNet example
            if None in named and bare is None and self.unclear is None:
                self.unclear = plain.strip()
            for kind, one in found:
                what = kind or bare
                if what is not None and what not in self._patterns:
                    out.append(replace(one, kind=what))
        out = [reading for reading in out if 0 <= reading.number <= 100]
        if self._auto and any(one.percent is None and one.number > 1 for one in out):
            self._percent = True
        return out

    def to_fraction(self, reading: AccuracyReading) -> float:
        """Returns the score as a fraction of 1, by the scale that the script is known to use."""
        percent = self._percent if reading.percent is None else reading.percent
        return reading.number / 100 if percent else reading.number

    def to_least_fraction(self, reading: AccuracyReading) -> float:
        """The same as low as it can turn out: while the scale is not known, a number without a % may be percent."""
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
        raise UsageError(f"'{pattern}' is no regular expression ({error})", where=where, fix=fix) from None


def _parse_line(line: str) -> Iterator[tuple[AccuracyKind | None, AccuracyReading]]:
    """(what it is of, accuracy): of a JSON line by its keys, of another by its words."""
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
    """Args: around: what the keys above say. A value such as `"split": "val"` says it of its neighbours."""
    said = [KINDS[value.lower()] for value in tree.values() if isinstance(value, str) and value.lower() in KINDS]
    around = said[0] if said else around
    for key, value in tree.items():
        kind, is_metric = _parse_name(key)
        kind = kind or around
        if isinstance(value, dict):
            yield from _parse_tree(value, kind)
        elif is_metric and isinstance(value, int | float) and not isinstance(value, bool):
            yield kind, AccuracyReading(kind or "train", float(value), None)


def _parse_words(line: str) -> Iterator[tuple[AccuracyKind | None, AccuracyReading]]:
    """The number behind the name of an accuracy (`acc 0.8`), behind a colon after more words (`accuracy of the network
    on the 10000 test images: 54 %`), or behind what it is of (`acc: train 0.9, val 0.8`)."""
    context: AccuracyKind | None = None  # the last word that says of what
    own: AccuracyKind | None = None  # what the accuracy's own name says
    awaits = False  # an accuracy was named, its number not yet seen
    active = False  # an accuracy was named
    other = False  # the words right before say that it is not the one of now
    before, end = "", 0  # the word right before, and where the last token ended
    for token in TOKEN.finditer(line):
        gap, end = line[end : token.start()], token.end()
        word = token["word"]
        if word is not None:
            kind, is_metric = _parse_name(word)
            if is_metric:
                own, active, awaits = kind, not other, not other
            elif word.lower() in KINDS:
                context = KINDS[word.lower()]
            elif _claims_next_number(word):  # `accuracy after epoch 3: 0.9` still awaits its number
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
    """`9855/10000`, `81.2 %`, or `80.5 (79.9)`: of the newest batch, and in the mean of all."""
    if token["of"] is not None and float(token["of"]) >= float(token["number"]) and float(token["of"]) > 0:
        return AccuracyReading(kind, float(token["number"]) / float(token["of"]), False)
    which = "mean" if token["mean"] is not None and token["mean_percent"] == token["percent"] else "number"
    return AccuracyReading(kind, float(token[which]), True if token["percent"] else None)


def _parse_name(word: str) -> tuple[AccuracyKind | None, bool]:
    """(what a name is of, whether it is that of an accuracy)."""
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
    parts = [part.lower() for part in PARTS.findall(word)]
    return any(part in CLOSED or part in METRICS for part in parts) and not _parse_name(word)[1]


def _is_keras_bar(line: str) -> bool:
    """`391/391 - 12s 31ms/step - accuracy: 0.4520 - loss: 1.5200`."""
    return re.search(r" - (?:acc|accuracy): ", line) is not None and re.search(r"\bloss: ", line) is not None
