from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
from tests.conftest import absent
from tests.sweep._spaces import OPTIMIZERS, build_space

from headway.core.errors import UsageError
from headway.sweep.space import RANDOM_TRIALS

SPACE = {
    "optimizer.lr": {"log": [0.0001, 1]},
    "model.args.width": {"log_integer": [8, 64]},
    "optimizer.betas": {"choice": [[0.9, 0.99], [0.9, 0.999], [0.8, 0.9]]},
}
Past = list[tuple[dict[str, Any], float | None]]


@pytest.fixture
def optuna() -> Any:
    if find_spec("optuna") is None:
        absent("optuna is not installed")
    import optuna

    return optuna


def rate(values: Mapping[str, Any]) -> float:
    """Best at a rate of 0.01, and with the second betas."""
    return -abs(math.log10(values["optimizer.lr"]) + 2) - (values["optimizer.betas"] != [0.9, 0.999])


def search(count: int, seed: int, sign: int = 1) -> Past:
    space, past = build_space(SPACE, "tpe"), Past()
    for trial in range(count):
        values = space.suggest(seed, trial, past, higher_is_better=sign > 0)
        past.append((values, sign * rate(values)))
    return past


def test_the_first_trials_are_random(optuna: Any) -> None:
    past = search(RANDOM_TRIALS + 1, seed=3)
    random = [build_space(SPACE).draw(3, trial) for trial in range(RANDOM_TRIALS + 1)]
    assert [values for values, _ in past[:-1]] == random[:-1]
    assert past[-1][0] != random[-1]


@pytest.mark.parametrize("sign", [1, -1])
def test_later_trials_lie_near_the_best(optuna: Any, sign: int) -> None:
    scores = [sign * score for _, score in search(40, seed=0, sign=sign) if score is not None]
    assert sum(scores[-20:]) / 20 > sum(scores[:10]) / 10 + 0.5


def test_a_suggestion_is_a_function_of_the_past(optuna: Any) -> None:
    past = search(20, seed=1)
    names = reversed(list(SPACE))
    shuffled = build_space({name: SPACE[name] for name in names}, "tpe")
    found = [json.dumps(build_space(SPACE, "tpe").suggest(1, 20, past)) for _ in range(2)]
    # Another order of the file, and of the values, as a journal may give them.
    found.append(json.dumps(shuffled.suggest(1, 20, [(dict(reversed(one.items())), score) for one, score in past])))
    assert len(set(found)) == 1
    assert json.dumps(build_space(SPACE, "tpe").suggest(1, 21, past)) not in found
    assert json.dumps(build_space(SPACE, "tpe").suggest(2, 20, past)) not in found


def test_suggestions_have_the_form_of_draws(optuna: Any) -> None:
    space, past = build_space(OPTIMIZERS, "tpe"), Past()
    for trial in range(25):
        values = space.suggest(0, trial, past)
        past.append((values, float(trial % 7)))
        assert list(values) == [key for key in space.keys if space.recipe.is_active(key, values)]
        assert values["optimizer.lr"] == space.recipe.parameters["optimizer.lr"].round(values["optimizer.lr"])
        assert isinstance(values["model.args.width"], int)
    assert any("optimizer.trust" in values for values, _ in past)


@pytest.mark.parametrize("failed", [None, math.nan])
@pytest.mark.parametrize("sign", [1, -1])
def test_trials_that_failed_are_the_worst(optuna: Any, failed: float | None, sign: int) -> None:
    space = build_space(SPACE, "tpe")

    def suggest(score: float | None) -> list[dict[str, Any]]:
        draws = [space.draw(0, trial) for trial in range(16)]
        past = [(one, score if one["optimizer.lr"] > 0.1 else sign * rate(one)) for one in draws]
        return [space.suggest(0, trial, past, higher_is_better=sign > 0) for trial in range(16, 20)]

    assert suggest(failed) == suggest(-1e9 * sign) != suggest(1e9 * sign)


def test_optuna_says_nothing(optuna: Any) -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log, before = logging.getLogger("optuna"), optuna.logging.get_verbosity()
    log.addHandler(handler)
    try:
        search(RANDOM_TRIALS + 1, seed=0)
    finally:
        log.removeHandler(handler)
    assert said == []
    assert optuna.logging.get_verbosity() == before == logging.INFO


def test_without_optuna_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError) as refused:
        build_space(SPACE, "tpe").suggest(0, 0)
    assert str(refused.value) == (
        "method: tpe needs the package optuna, which is not installed. Install it: pip install 'headway[optuna]'. "
        "Or set method to sobol or random."
    )
    # Other methods do without it.
    assert build_space(SPACE, "sobol").suggest(0, 0) == build_space(SPACE, "sobol").draw(0, 0)
