"""Accuracies are found in what training scripts of all styles print."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.doctor.accuracy_parser import AccuracyParser

Found = list[tuple[str, float]]


def found(line: str, **how: str) -> Found:
    scores = AccuracyParser(**how)
    return [(reading.kind, round(scores.to_fraction(reading), 6)) for reading in scores.read(line)]


KERAS = "Epoch 3/10 - 12s 31ms/step - accuracy: 0.4520 - loss: 1.5200 - val_accuracy: 0.5000 - val_loss: 1.2"
BAR = "Epoch 4: 100%|###| 391/391 [00:10<00:00, 38.2it/s, v_num=0, train_loss=0.5, val_acc=0.81, train_acc_step=1.0]"

LINES: list[tuple[str, Found]] = [
    ("val_acc: 0.81", [("val", 0.81)]),
    ("val accuracy 81.2 %", [("val", 0.812)]),
    ("Validation accuracy is 0.5", [("val", 0.5)]),
    ("train_acc=0.91 val_acc=0.88", [("train", 0.91), ("val", 0.88)]),
    ("valAcc=0.5", [("val", 0.5)]),
    ("\x1b[32mval_acc\x1b[0m: 0.6", [("val", 0.6)]),
    ("Accuracy/val 0.4", [("val", 0.4)]),
    ("accuracy (val): 0.7", [("val", 0.7)]),
    ("acc: train 0.9, val 0.8", [("train", 0.9), ("val", 0.8)]),
    ("Epoch 5: train loss 0.3, acc 0.9; val loss 0.4, acc 0.8", [("train", 0.9), ("val", 0.8)]),
    ("Epoch 1 | Train Loss: .3 | Train Acc: 90.1% | Val. Loss: .3 | Val. Acc: 85%", [("train", 0.901), ("val", 0.85)]),
    ("training accuracy after epoch 3: 0.91", [("train", 0.91)]),
    ("Training finished: test accuracy was 0.8", [("val", 0.8)]),
    # the scripts of PyTorch's own examples
    ("Test set: Average loss: 0.0431, Accuracy: 9855/10000 (99%)", [("val", 0.9855)]),
    ("Accuracy of the network on the 10000 test images: 54 %", [("val", 0.54)]),
    ("Test: [195/196] Loss 0.9 (0.8) Acc@1  81.25 ( 80.10) Acc@5  95.0 ( 94.1)", [("val", 0.801)]),
    (" * Acc@1 70.100 Acc@5 89.300", [("val", 0.701)]),
    ("validation top-1 71.2 top-5 90.1", [("val", 0.712)]),
    # Keras, Lightning, Hugging Face, MXNet, Headway
    (KERAS, [("train", 0.452), ("val", 0.5)]),
    ("391/391 [====] - 12s 31ms/step - loss: 1.52 - accuracy: 0.452", [("train", 0.452)]),
    (BAR, [("val", 0.81)]),
    ("│        test_acc           │    0.8713   │", [("val", 0.8713)]),
    ("{'eval_loss': 0.3, 'eval_accuracy': 0.9, 'epoch': 1.0}", [("val", 0.9)]),
    ("INFO:root:Epoch[0] Validation-accuracy=0.95", [("val", 0.95)]),
    ("evaluate  epoch 1.00  step 25  loss 0.8169  accuracy 0.74", [("val", 0.74)]),
    ("train     epoch 0.04  step 1  loss 2.296  accuracy 0.1562  lr 0.1", [("train", 0.1562)]),
    # JSON lines
    ('{"epoch": 3, "train": {"acc": 0.9}, "val_acc": 0.8}', [("train", 0.9), ("val", 0.8)]),
    ('{"kind": "evaluate", "accuracy": 0.9}', [("val", 0.9)]),
    ('{"train_acc1": 71.2, "test_acc1": 81.3, "test_acc5": 95.1}', [("train", 0.712), ("val", 0.813)]),
    ('{"val_acc": null, "val_accuracy": "0.9", "val_acc1": true}', []),
    ('{"not json, val_acc: 0.7', [("val", 0.7)]),
    # no accuracies of now
    ("Best val acc: 0.99", []),
    ("target validation accuracy: 0.9", []),
    ("val acc: nan", []),
    ("val_acc: 812", []),
    ("val_loss: 0.3 epoch 4", []),
    ("accuracy: 0.7", []),
    ("", []),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line[:40] for line, _ in LINES])
def test_the_usual_lines(line: str, expected: Found) -> None:
    assert found(line) == expected


@settings(max_examples=25, deadline=None)
@given(st.text())
def test_no_line_is_too_odd(line: str) -> None:
    AccuracyParser().read(line)
    AccuracyParser("a(.*)b", ".").read(line)


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
def test_json_lines_are_read_to_the_last_digit(train: float, val: float) -> None:
    scores = AccuracyParser(scale="fraction")
    readings = scores.read(json.dumps({"train_accuracy": train, "valid": {"accuracy": val}}))
    assert [(one.kind, scores.to_fraction(one)) for one in readings] == [("train", train), ("val", val)]


def test_a_script_that_shows_percent_is_known_by_a_value_above_1() -> None:
    scores = AccuracyParser()
    (early,) = scores.read("val_acc: 0.9")
    assert scores.to_fraction(early) == 0.9
    assert scores.to_least_fraction(early) == pytest.approx(0.009)
    assert AccuracyParser(scale="fraction").to_least_fraction(early) == 0.9
    scores.read("val_acc: 12.5")
    assert scores.to_fraction(early) == pytest.approx(0.009), "what was read before is read anew"
    (sure,) = scores.read("train acc 9/10")
    assert scores.to_fraction(sure) == 0.9
    assert found("val_acc: 0.9", scale="percent") == [("val", 0.009)]
    assert found("val_acc: 1.0 %") == [("val", 0.01)]


def test_patterns_of_ones_own() -> None:
    line = "score A=0.7 score B=81.5% acc: 0.3 val acc 0.4"
    assert found(line, train=r"score A=([\d.]+)") == [("train", 0.7), ("val", 0.4)]
    assert found(line, train=r"score A=\S+", val=r"score B=([\d.]+)") == [("train", 0.7), ("val", 0.815)]
    assert found(line, val=r"none=([\d.]+)") == [("train", 0.3)] or found(line, val="none") == []


def test_a_line_that_says_of_nothing_what_it_is_of_is_kept() -> None:
    scores = AccuracyParser()
    assert scores.read("epoch 3 accuracy: 0.7") == []
    scores.read("epoch 4 accuracy: 0.8")
    assert scores.unclear == "epoch 3 accuracy: 0.7"


def test_bad_patterns_and_scales() -> None:
    with pytest.raises(UsageError, match=r"--val-pattern: '\(' is not a regular expression"):
        AccuracyParser(val="(")
    with pytest.raises(UsageError, match="there is no scale 'much'"):
        AccuracyParser(scale="much")


def test_a_wrong_pattern_is_shown_as_it_was_typed() -> None:
    with pytest.raises(UsageError) as caught:
        AccuracyParser(val=r"acc=([\d.]+")
    assert r"'acc=([\d.]+' is not a regular expression" in str(caught.value)
