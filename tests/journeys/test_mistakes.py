"""What a newcomer does wrong is answered: what, where, and how to mend it. No word of a library below us is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.journeys.mistakes import MISTAKES, Mistake, build_workshop, find_answer

INTERNAL = re.compile(
    r"pydantic|numpy|ndarray|Input should|type=|Value error|Extra inputs|dtype|KeyError|TypeError|NoneType|object at 0x"
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    return build_workshop(folder)


def test_there_are_more_than_forty() -> None:
    assert len(MISTAKES) > 40
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(one, id=one.name, marks=[pytest.mark.check] if one.trains else []) for one in MISTAKES],
)
def test_a_mistake_is_answered(mistake: Mistake, workshop: Path, tmp_path: Path) -> None:
    answer = find_answer(mistake, workshop, tmp_path)
    for part in (mistake.what, mistake.where, mistake.fix):
        assert part in answer
    # The message of a shifted decoder names a float32 image on purpose; nothing names a library's class.
    assert not INTERNAL.search(answer)
    assert answer.count(mistake.what) == 1, "said once"
