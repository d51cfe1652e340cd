"""Origins of a recipe's leaves: each is its own, else that of what was given below or above it."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from headway.core.recipe import RecipePart, find_leaf_origins, flatten

PARTS = st.sampled_from("abc")
TREES = st.recursive(
    st.sampled_from([1, [2], {}]), lambda inner: st.dictionaries(PARTS, inner, min_size=1, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict) and bool(tree))
KEYS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


class Tree:
    """Stands in for a recipe."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree

    def model_dump(self, mode: str) -> dict[str, Any]:
        return self._tree


def find_slowly(leaf: str, origins: dict[str, str]) -> str:
    """The rule, word by word."""
    own = [key for key in origins if key == leaf or key.startswith(f"{leaf}.")]
    if any(origins[key] == "given" for key in own):
        return "given"
    if own:
        return origins[min(own, key=len)]
    above = [key for key in origins if leaf.startswith(f"{key}.")]
    whole = [key for key in above if origins[key] == "given" or not any(o.startswith(f"{key}.") for o in origins)]
    return origins[max(whole, key=len)] if whole else "default"


@given(TREES, st.dictionaries(KEYS, st.sampled_from(["given", "file:1", "file:2"]), max_size=6))
def test_origins_of_leaves_follow_the_rule(tree: dict[str, Any], origins: dict[str, str]) -> None:
    found = find_leaf_origins(cast("RecipePart", Tree(tree)), origins, "given")
    assert found == {leaf: find_slowly(leaf, origins) for leaf, _ in flatten(tree)}
