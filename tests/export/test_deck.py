"""The decks' figures beside those of an inference table: a verdict for each row about the same network."""

from __future__ import annotations

from typing import Any

import pytest
from tests.export.test_table import build_row, build_table

from headway.export.deck import OTHER_BASELINE, compare_with_deck, judge_gain
from headway.export.table_engines import EAGER, NO_ONEDNN
from headway.export.table_record import InferenceTable, Row

RESNET50 = "headway.model:resnet50"
MISSING = "not measurable here: TensorRT needs an NVIDIA GPU"


def build_rows(gain: float, delta: float = 0.0) -> list[Row]:
    """A row with and one without oneDNN, which is so much slower."""
    with_it = build_row(EAGER, 100.0 * gain, top1=0.75, top5=0.9375)
    slow = build_row(NO_ONEDNN, 100.0, top1=0.75 - delta, top5=0.9375)
    cells = tuple(cell.model_copy(update={"p50_ms": gain * cell.p50_ms}) for cell in slow.cells)
    return [with_it, slow.model_copy(update={"cells": cells})]


def compare(factory: str, *rows: Row, **more: Any) -> dict[str, tuple[str, str]]:
    """What is here and the verdict, by row."""
    table = build_table(*rows, **{"image": (224, 224, 3)} | more)
    return {one.row: (one.here, one.verdict) for one in compare_with_deck(factory, table)}


def test_each_row_about_the_network_has_a_verdict() -> None:
    found = compare(RESNET50, *build_rows(1.25))
    assert found == {
        "ResNet-50 v1, ms at batch 1": ("1.25 → 1 (1.25x)", f"undecided here: {OTHER_BASELINE}"),
        # 8 is the largest batch of these rows.
        "ResNet-50 v1, images/s at batch 128": ("200 → 250 at 8 (1.25x)", f"undecided here: {OTHER_BASELINE}"),
        "ResNet-50 V1, change of top-1, top-5": ("0.00000000, 0.00000000", "reproduced, on 597 samples"),
        "ResNet-50, TensorRT on Titan V": ("-", MISSING),
    }
    # The deck has 7.45 and 15.9.
    verdicts = [verdict for _, verdict in compare(RESNET50, *build_rows(6.0)).values()]
    assert verdicts[:2] == ["reproduced", f"undecided here: {OTHER_BASELINE}"]
    assert list(compare(RESNET50, *build_rows(13.0)).values())[1][1] == "reproduced"


def test_a_loss_is_a_refutation_and_a_small_gain_none() -> None:
    assert judge_gain(7.0, 0.8, 0.9) == "refuted here: oneDNN costs time"
    assert judge_gain(7.0, 0.8, 1.1) == judge_gain(7.0, 0.8) == f"undecided here: {OTHER_BASELINE}"


def test_a_changed_accuracy_is_a_refutation() -> None:
    found = compare("headway.model:resnet18", *build_rows(1.0, delta=0.25))
    assert found.pop("ResNet-18 V1, change of top-1, top-5") == ("0.25000000, 0.00000000", "refuted here")
    assert found == {f"ResNet-18, TensorRT on {device}": ("-", MISSING) for device in ("Titan V", "Jetson TX1")}


@pytest.mark.parametrize("factory", ["headway.model:small_net", "net.py:resnet50", "resnet50"])
def test_other_networks_have_no_rows(factory: str) -> None:
    assert compare(factory, *build_rows(1.0)) == {}


def test_what_cannot_be_compared_says_why() -> None:
    small = compare(RESNET50, *build_rows(20.0), image=(64, 64, 3))
    verdicts = [verdict for _, verdict in small.values()]
    assert verdicts[:2] == ["not comparable: the deck's images have 224 x 224 pixels"] * 2
    assert verdicts[2].startswith("reproduced")
    alone = compare(RESNET50, build_rows(1.0)[0], missing={NO_ONEDNN: "its process ended"})
    assert set(list(alone.values())[:3]) == {("-", "not measured: its process ended")}
    assert set(list(compare(RESNET50, build_rows(1.0)[0]).values())[:3]) == {
        ("-", "not measured: the table has no row eager, no oneDNN")
    }
    bare = [row.model_copy(update={"cells": (), "top1": None, "top5": None}) for row in build_rows(1.0)]
    assert list(compare(RESNET50, *bare).values())[:3] == [
        ("-", "not measured"),
        ("-", "not measured"),
        ("-", "not measured: there is no evaluation set with classes"),
    ]


def test_the_verdicts_stand_below_the_table() -> None:
    table: InferenceTable = build_table(*build_rows(1.25), image=(224, 224, 3))
    text = table.model_copy(update={"deck": compare_with_deck(RESNET50, table)}).describe()
    line = (
        f"ResNet-50 v1, ms at batch 1: 97.19 → 13.04 (7.45x); here 1.25 → 1 (1.25x): undecided here: {OTHER_BASELINE}"
    )
    assert line in text.splitlines()
    assert "deck's rows" in text
    assert "deck's rows" not in table.describe()
