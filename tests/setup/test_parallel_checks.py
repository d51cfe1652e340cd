"""A strategy says why it does not work with a key, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from headway.setup.parallel_checks import ADVICE, _list_refused
from headway.setup.recipe import TrainRecipe

REQUIRED: dict[str, Any] = {
    "data": {"train": "x"},
    "model": {"factory": "headway.model:small_net"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "batch": 8,
    "epochs": 1,
}


def parse(parallel: dict[str, Any], **changes: Any) -> TrainRecipe:
    return TrainRecipe.model_validate(REQUIRED | {"parallel": parallel} | changes)


@pytest.mark.parametrize(
    ("parallel", "changes", "said"),
    [
        (
            {"strategy": "towers"},
            {"optimizer": {"name": "muon", "lr": 0.1}},
            "parallel.strategy towers does not work with optimizer.name: muon, as it needs whole weights, of which a"
            " process has a part: take for example sgd, adamw or lamb, or take another strategy",
        ),
        (
            {"strategy": "local"},
            {"optimizer": {"name": "adamw", "lr": 0.1, "precision": "bf16"}},
            "parallel.strategy local does not work with optimizer.precision: bf16, as its rounding is alike on all"
            " processes for whole weights that all of them step together: set it to fp32, or take another strategy",
        ),
        (
            {"strategy": "async"},
            {"half_weights": True, "precision": "bf16"},
            "parallel.strategy async does not work with half_weights, as its processes take no steps together: set it"
            " to false, or take another strategy",
        ),
    ],
)
def test_a_refusal_has_a_reason_and_a_way_out(parallel: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(parallel, **changes)


@pytest.mark.parametrize("strategy", ["spatial", "hybrid", "towers", "experts", "sharded", "all", "async", "local"])
def test_each_refused_key_has_advice(strategy: str) -> None:
    keys = _list_refused(parse({"strategy": "sharded", "what": "all"} if strategy == "all" else {"strategy": strategy}))
    assert keys
    assert [key for key in keys if key not in ADVICE and key.partition(":")[0] not in ADVICE] == []


def test_averages_of_16_bit_weights_are_refused_only_if_each_process_has_a_part_of_their_masters() -> None:
    half = {"half_weights": True, "precision": "bf16", "model": REQUIRED["model"] | {"ema": {"half_life_steps": 4}}}
    with pytest.raises(ValueError, match=r"half_weights and model.ema, as it follows the fp32 masters"):
        parse({"strategy": "sharded"}, **half)
    parse({"strategy": "sharded"}, **half, optimizer={"name": "adamw", "lr": 0.1, "precision": "bf16"})
