"""Values put into a recipe's own text: it reads as it should, and the rest of it stays."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway.core.errors import RecipeError
from headway.core.recipe import read_recipe
from headway.core.recipe_editor import edit_recipe as text_with
from headway.core.recipe_yaml import RecipeDumper, parse_recipe, set_value
from headway.setup.recipe import TrainRecipe

START = "model: {factory: 'headway.model:small_net'}\n"
RECIPE = (
    """\
# What it is.
name: photos   # of the run

data:
  train: photos.packed/train  # 1,000 images
  eval: photos.packed/eval

  # Four: as many as cores.
  threads: 4
optimizer: {name: nag, lr: 1e-3}  # found by hand
batch: 64
# The last word.
"""
    + START
)


def changed(folder: Path, text: str, values: dict[str, Any]) -> str:
    (folder / "r.yaml").write_text(text, encoding="utf-8")
    written = [
        f"{key}={yaml.dump(value, Dumper=RecipeDumper, default_flow_style=True)}" for key, value in values.items()
    ]
    return text_with(folder / "r.yaml", written, {}, TrainRecipe)


def test_nothing_changes_where_nothing_is_set(tmp_path: Path) -> None:
    assert changed(tmp_path, RECIPE, {}) == RECIPE
    assert changed(tmp_path, RECIPE, {"data.threads": 4, "optimizer.lr": 0.001}) == RECIPE


@pytest.mark.parametrize(
    ("values", "old", "new"),
    [
        ({"batch": 128}, "batch: 64\n", "batch: 128\n"),
        ({"data.threads": 2}, "threads: 4\n", "threads: 2\n"),
        ({"data.train": "a b, c"}, "train: photos.packed/train  #", "train: 'a b, c'  #"),
        ({"optimizer.lr": 0.5}, "lr: 1e-3}  # found", "lr: 0.5}  # found"),
        ({"optimizer.momentum": 0.9}, "lr: 1e-3}  # found", "lr: 1e-3, momentum: 0.9}  # found"),
        (
            {"data.cache": "memory", "data.prefetch_batches": 4},
            "  threads: 4\n",
            "  threads: 4\n  cache: memory\n  prefetch_batches: 4\n",
        ),
        ({"compile": True}, START, f"{START}compile: true\n"),
        ({"augment.flip": True}, START, f"{START}augment: {{flip: true}}\n"),
        ({"augment.translate": 2, "seed": 3}, START, f"{START}augment: {{translate: 2}}\nseed: 3\n"),
    ],
)
def test_only_what_is_set_changes(tmp_path: Path, values: dict[str, Any], old: str, new: str) -> None:
    assert RECIPE.count(old) == 1
    assert changed(tmp_path, RECIPE, values) == RECIPE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        (f"data: photos\n{START.strip()}", {"batch": 3}, f"data: photos\n{START}batch: 3"),
        (f"data: {{}}\n{START}", {"data.train": "x"}, f"data: {{train: x}}\n{START}"),
        (f"data: photos\naugment:\n{START}", {"augment.flip": True}, f"data: photos\naugment: {{flip: true}}\n{START}"),
        ("model:\n  # why\n  args:\n    a: 1\n  factory: m:n\n", {"model.args.b": [1]},
         "model:\n  # why\n  args:\n    a: 1\n    b: [1]\n  factory: m:n\n"),
        ("model:\n  args:\n    a: |\n      x\n", {"model.args.b": 2}, "model:\n  args:\n    a: |\n      x\n    b: 2\n"),
        ("# c\nmodel:\n  args:\n    a: [1, {b: 2}, 3]  # why\n", {"model.args.a.1.b": 4},
         "# c\nmodel:\n  args:\n    a: [1, {b: 4}, 3]  # why\n"),
        ("model:\n  args:\n    a:\n    # one\n    - 1  # first\n    - 2\n# end\n", {"model.args.a.1": 4},
         "model:\n  args:\n    a:\n    # one\n    - 1  # first\n    - 4\n# end\n"),
        ("model:\n  args:\n    a:\n    - 1\n    - 2  # c\n# end\nbatch: 2\n", {"model.args.a": 4},
         "model:\n  args:\n    a: 4  # c\n# end\nbatch: 2\n"),
        ("model:\n  args:\n    a:  # so:\n    - 1\n", {"model.args.a": 4}, "model:\n  args:\n    a:  # so:\n     4\n"),
        ("model: {args: {a: 1,},  # c\n}\n", {"model.args.b": 3}, "model: {args: {a: 1, b: 3,},  # c\n}\n"),
        ("# c\nbatch: &b 64\nmicro_batch: *b  # m\n", {"micro_batch": 2}, "# c\nbatch: &b 64\nmicro_batch: 2  # m\n"),
        ("model:  # c\n  args: {a: &a {x: 1}, b: {<<: *a, y: 2}}\n", {"model.args.b.x": 3},
         "model:  # c\n  args: {a: &a {x: 1}, b: {<<: *a, y: 2, x: 3}}\n"),
        ("model:\n  args:\n    a: 1", {"model.args.b": 2, "batch": 3}, "model:\n  args:\n    a: 1\n    b: 2\nbatch: 3"),
        ("\ufeff# c\nbatch: 1\n", {"batch": 2}, "# c\nbatch: 2\n"),
        ("model: {args: {a: 1,\n  b: 2}}  # c\n", {"model.args.b": 3}, "model: {args: {a: 1,\n  b: 3}}  # c\n"),
        ("seed: 1\r\nbatch: 2  # b\r\n", {"seed": 5}, "seed: 5\nbatch: 2  # b\n"),
    ],
)  # fmt: skip
def test_ways_of_writing(tmp_path: Path, text: str, values: dict[str, Any], expected: str) -> None:
    assert changed(tmp_path, text, values) == expected


def test_a_short_form_is_written_out_in_its_place(tmp_path: Path) -> None:
    text = f"data: photos  # all\n{START}optimizer: {{name: sgd, lr: 1}}\nbatch: 2\nepochs: 3\n"
    (tmp_path / "r.yaml").write_text(text)
    made = text_with(tmp_path / "r.yaml", (), {"data.threads": 2}, TrainRecipe)
    assert made == text.replace("data: photos ", "data: {train: photos, threads: 2} ")
    (tmp_path / "r.yaml").write_text(text.replace("photos", "synthetic"))
    made = text_with(tmp_path / "r.yaml", (), {"data.synthetic": {"samples": 9}}, TrainRecipe)
    assert made == text.replace("data: photos ", "data: {train: synthetic, synthetic: {samples: 9}} ")


def test_an_anchor_is_not_changed_for_both(tmp_path: Path) -> None:
    """A value that an anchor shares is written out in both places."""
    text = "# c\nmodel:\n  args: {a: &x {n: 1}, b: *x}\n"
    made = changed(tmp_path, text, {"model.args.b.n": 2})
    assert parse_recipe(made, "")[0] == {"model": {"args": {"a": {"n": 1}, "b": {"n": 2}}}}


def test_a_real_recipe_keeps_its_comments(tmp_path: Path) -> None:
    for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"):
        if path.name.endswith(".space.yaml"):
            continue
        before = path.read_text(encoding="utf-8")
        precision = "bf16" if "half_weights:" in before else "fp32"
        made = text_with(path, (), {"data.cache": "memory", "compile": True, "precision": precision}, TrainRecipe)
        kept = [line for line in made.splitlines() if line in before.splitlines()]
        assert len(kept) >= len(before.splitlines()) - 1, path.name  # all but precision's
        (tmp_path / "made.yaml").write_text(made, encoding="utf-8")
        found, was = read_recipe(tmp_path / "made.yaml", (), TrainRecipe), read_recipe(path, (), TrainRecipe)
        assert (found.recipe.compile, found.recipe.data.cache, found.recipe.precision) == (True, "memory", precision)
        assert found.recipe.optimizer == was.recipe.optimizer


words = st.sampled_from(
    ["a", "b", "c", "true", "1", "x y", "#d", "e: f", "-", "{", "g, h", "null", "1e3", "'", "é", "<<"]
)
scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_infinity=True) | words
inner = st.recursive(
    scalars, lambda one: st.lists(one, max_size=3) | st.dictionaries(words, one, max_size=3), max_leaves=8
)
styles = st.sampled_from([True, False, None])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(args={"a": {"b": 1}}, more=[("a.c", 2)], style=False)
@given(
    args=st.dictionaries(words, inner, max_size=4),
    more=st.lists(st.tuples(st.sampled_from(["a", "b", "a.b", "b.c", "a.b.c", "e"]), inner), max_size=3),
    style=styles,
)
def test_it_reads_as_the_tree_with_the_values(
    tmp_path: Path, args: dict[str, Any], more: list[tuple[str, Any]], style: bool | None
) -> None:
    text = yaml.dump(
        {"seed": 1, "model": {"args": args}, "batch": 2}, Dumper=RecipeDumper, default_flow_style=style, sort_keys=False
    )
    tree, _ = parse_recipe(text, "")
    values = {}
    for key, value in more:
        try:
            set_value(tree, ["model", "args", *key.split(".")], deepcopy(value), key)
        except RecipeError:
            return  # a key inside of a single value
        values[f"model.args.{key}"] = value
    if len(values) < len(more):
        return
    made = changed(tmp_path, text, values)
    assert yaml.dump(parse_recipe(made, "")[0]) == yaml.dump(tree)
