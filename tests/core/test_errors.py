from __future__ import annotations

import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import errors
from headway.core.errors import HeadwayError, RecipeError, UsageError, suggest_nearest
from headway.core.torch_c10d import summarise_error


def test_an_error_says_what_where_and_how_to_mend_it() -> None:
    error = UsageError("this run folder exists", where="runs/a", fix="Name another one with --run")
    assert str(error) == "runs/a: this run folder exists. Name another one with --run."
    assert (error.what, error.where, error.fix) == (
        "this run folder exists",
        "runs/a",
        "Name another one with --run",
    )
    assert str(HeadwayError("it failed")) == "it failed."
    assert str(HeadwayError("did it fail?", fix="Look again!")) == "did it fail? Look again!"
    assert str(HeadwayError("a list:\n  one\n", where="here")) == "here: a list:\n  one\n"


def test_wrong_usage_leaves_with_2_and_everything_else_with_1() -> None:
    family = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HeadwayError)]
    assert len(family) == 11
    for kind in family:
        assert kind("x").exit_status == (2 if kind in (UsageError, RecipeError) else 1), kind
        assert kind.__doc__


@pytest.mark.parametrize(("word", "found"), [("optimiser", "optimizer"), ("lr_", "lr"), ("epoch", "epochs")])
def test_the_nearest_word_is_proposed(word: str, found: str) -> None:
    assert suggest_nearest(word, ["optimizer", "epochs", "lr", "batch"]) == f"Did you mean {found!r}?"


def test_where_no_word_is_near_all_are_listed() -> None:
    assert suggest_nearest("zzz", ["lr", "batch"]) == "Known here: batch, lr."
    assert suggest_nearest("zzz", []) == ""


@given(word=st.text(max_size=8), known=st.sets(st.text("abcdef_", min_size=1, max_size=8), min_size=1))
def test_a_hint_names_known_words_only(word: str, known: set[str]) -> None:
    hint = suggest_nearest(word, known)
    if hint.startswith("Did"):
        assert hint[len("Did you mean '") : -len("'?")] in known
    else:
        assert hint == f"Known here: {', '.join(sorted(known))}."
    if word in known:
        assert hint == f"Did you mean {word!r}?"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("[../third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:4242", "Connection closed by peer"),
        (
            "[gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4242. This is typically caused by a remote worker"
            " crashing. Check the logs of the remote worker before reporting an error. GLHF! ",
            "Connection closed by peer [127.0.0.1]:4242",
        ),
        ("[enforce fail at tcp.cc:9] [rank 1] timed out.\nframe #0: 0x7f", "timed out"),
        ("the store of the ranks is gone ([Errno 9] Bad file descriptor)", "gone ([Errno 9] Bad file descriptor)"),
        ("", "RuntimeError"),
    ],
)
def test_of_an_error_of_torch_its_first_line_is_told_without_the_place_in_its_sources(said: str, line: str) -> None:
    assert line in summarise_error(RuntimeError(said))
    assert not summarise_error(RuntimeError(said)).startswith("[")
    assert not re.search(r"typically|logs|GLHF", summarise_error(RuntimeError(said)))
