from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RecipeError
from headway.core.recipe_yaml import (
    RecipeDumper,
    dump_in_line,
    dump_tree,
    format_overrides,
    parse_override,
    parse_recipe,
    parse_recipe_tree,
)

PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | PRINTABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PRINTABLE, inner, max_size=3),
    max_leaves=5,
)


@given(VALUES)
def test_a_formatted_override_reads_as_its_value(value: Any) -> None:
    (text,) = format_overrides({"model.args.x": value})
    key, _, written = text.partition("=")
    assert key == "model.args.x"
    assert "\n" not in written
    assert parse_override(written, key) == value


@given(VALUES)
def test_a_value_is_written_alone_as_inside_a_list(value: Any) -> None:
    """A number alone is not written by YAML's serializer."""
    assert dump_in_line([value]) == f"[{dump_in_line(value)}]"


def test_overrides_are_formatted_as_on_the_command_line() -> None:
    values = {"optimizer.lr": 0.1, "compile": True, "data.eval": Path("a/b"), "name": "1e-3", "stop_at": None}
    assert format_overrides(values) == [
        *("optimizer.lr=0.1", "compile=true", "data.eval=a/b", "name='1e-3'", "stop_at=null")
    ]
    assert format_overrides({"augment.policy": {"name": "rand", "n": 1}}) == ["augment.policy={name: rand, n: 1}"]


@given(st.dictionaries(PRINTABLE, VALUES, max_size=4), st.booleans())
def test_a_tree_is_the_same_with_and_without_lines(tree: dict[str, Any], flow: bool) -> None:
    text = yaml.dump(tree, Dumper=RecipeDumper, default_flow_style=flow, allow_unicode=True)
    assert parse_recipe_tree(text, "recipe.yaml") == parse_recipe(text, "recipe.yaml")[0] == tree
    assert parse_recipe(dump_tree(tree), "recipe.yaml")[0] == tree


def test_a_tree_is_dumped_as_a_user_would_write_it() -> None:
    assert dump_tree({"b": "1e-3", "a": ["é", "😀"]}) == "b: '1e-3'\na:\n- é\n- 😀\n"
    assert dump_tree({"half": "\ud83d"}) == 'half: "\\uD83D"\n'


@pytest.mark.parametrize(
    "text",
    [
        "", "# only a comment", "a: 1e-3\nb: 1_000\nc: 0x1f\nd: .inf\ne: 2026-11-28\nf: ~\ng: yes\n",
        "a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: *a\n", "1: a\n~: b\ntrue: c\n", "a: !!set {b, c}\n",
        "a: !!omap [b: 1]\n", "a: !!binary aGk=\n", "a: !thing {b: 1}\n", "a:\n- b:\n  - c\n",
        "a: " + "[" * 40 + "]" * 40,
        "a: |\n  x\n  y\n", "- 1", "a: 1\na: 2", "a: [1", "a: *b", "a: &a [*a]", "\tb: 1", "a: 2024-13-01", "a: \x01",
        "a: " + "[" * 700, "a: " + "[" * 600 + "]" * 600, "- " * 1200, "? " * 1200, "[a]: 1", "a: !!int x",
        "--- 1\n--- 2", "!!str [a]: 1", "a: !!seq {b: 1}", "a: !!map [b]", "a: !!str {b: 1}", "a: !!str 1\n!!str b: 2",
        "? [a, b]\n: 1", "<<: {a: 1}\nb: 2", "a: '&'\nb: *x", "a: " + "x" * 30_000, "!!seq {a: 1}", "!thing {a: 1}",
    ],
)  # fmt: skip
def test_a_tree_is_read_or_refused_as_with_lines(text: str) -> None:
    """Also what would end the process in libyaml: it recurses in C."""

    def read(parse: Callable[[], Any]) -> Any:
        try:
            return parse()
        except RecipeError as error:
            return str(error)

    found = read(lambda: parse_recipe_tree(text, "recipe.yaml"))
    assert found == read(lambda: parse_recipe(text, "recipe.yaml")[0])
