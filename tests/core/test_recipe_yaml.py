from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway.core.recipe_yaml import dump_in_line, format_overrides, parse_override

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
