"""Suggestions for a path that is not there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RecipeError
from headway.core.path_suggestions import suggest_path
from headway.core.recipe import RecipePart, read_recipe

NAMES = st.text("abcdefgh", min_size=5, max_size=9)


@given(NAMES, st.sets(st.sampled_from(["", ".sh", ".py", ".txt"])), st.integers(0, 4))
def test_the_file_that_is_meant_wins_over_all_others_of_its_name(name: str, others: set[str], lost: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for suffix in others:
            (here / f"{name}{suffix}").mkdir() if not suffix else (here / f"{name}{suffix}").touch()
        asked = here / f"{name[:lost]}{name[lost + 1 :]}.yaml"
        with pytest.raises(RecipeError) as refused:
            read_recipe(asked, (), RecipePart, fix="Write one.")
        assert refused.value.fix == "Write one.", "files of other kinds are no recipes"
        meant = here / f"{name}.yaml"
        meant.touch()
        with pytest.raises(RecipeError) as refused:
            read_recipe(asked, (), RecipePart)
        assert refused.value.fix == f"Did you mean {str(meant)!r}?"
        assert suggest_path(asked, Path.is_file) == f"Did you mean {str(meant)!r}?"
