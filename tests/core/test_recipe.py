from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from headway.core.errors import RecipeError
from headway.core.recipe import LoadedRecipe, RecipePart, read_recipe
from headway.optim.optimizer_recipe import LARSRecipe
from headway.setup.recipe import TrainRecipe


class Group(RecipePart):
    match: str
    scale: float = 1.0


class Engine(RecipePart):
    name: Literal["steam", "diesel"] = "diesel"
    lr: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.99)
    groups: tuple[Group, ...] = ()


class Wagon(RecipePart):
    train: str
    seats: int | None = None
    size: int | tuple[int, int] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"train": value} if isinstance(value, str) else value


class Tree(RecipePart):
    name: str = "run"
    engine: Engine = Engine()
    wagon: Wagon | None = None
    batch: int = Field(default=1, ge=1)
    micro: int | Literal["auto"] = 1
    args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _fits(self) -> Tree:
        if isinstance(self.micro, int) and self.micro > self.batch:
            raise ValueError(f"micro {self.micro} is larger than batch {self.batch}: set it to at most that")
        return self


in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tmp_path / "r.yaml"


def loaded(recipe: Path, text: str, *overrides: str) -> LoadedRecipe[Tree]:
    recipe.write_text(text, encoding="utf-8")
    return read_recipe(recipe, overrides, Tree)


def refusal(recipe: Path, text: str, *overrides: str) -> str:
    """The sentence with which a recipe is refused; FILE stands for its path, r.yaml for its name."""
    with pytest.raises(RecipeError) as refused:
        loaded(recipe, text, *overrides)
    return str(refused.value).replace(str(recipe), "FILE")


# Values


def test_an_empty_recipe_is_all_defaults(recipe: Path) -> None:
    for text in ("", "# nothing\n"):
        found = loaded(recipe, text)
        assert found.recipe == Tree()
        assert set(found.origins.values()) == {"default"}
        assert found.base == recipe.parent


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1E5", 1e5), ("-2.5e+2", -250.0), (".5e1", 5.0), ("+1.e-1", 0.1), (".inf", math.inf)],
)
def test_numbers_may_be_written_in_any_way(recipe: Path, text: str, value: float) -> None:
    assert loaded(recipe, f"engine: {{lr: {text}}}").recipe.engine.lr == value
    assert loaded(recipe, "", f"engine.lr={text}").recipe.engine.lr == value
    assert loaded(recipe, f"args: {{x: {text}}}").recipe.args == {"x": value}


def test_what_only_looks_like_a_number_stays_a_text(recipe: Path) -> None:
    texts = ["1e", "e5", "1e5x", "1.2.3", "v1e5", "'1e5'"]
    assert loaded(recipe, f"args: {{x: [{', '.join(texts)}]}}").recipe.args["x"] == [*texts[:-1], "1e5"]


def test_merge_keys_bring_values_that_the_mapping_may_override(recipe: Path) -> None:
    text = "args:\n  base: &base {lr: 1, deep: [1, 2]}\n  other:\n    <<: *base\n    lr: 3\n  again: *base\n"
    args = loaded(recipe, text).recipe.args
    assert args["other"] == {"lr": 3, "deep": [1, 2]}
    assert args["again"] == args["base"] == {"lr": 1, "deep": [1, 2]}
    nested = "args:\n  a: &a {x: 1}\n  b: &b\n    <<: *a\n    x: 2\n  c: {<<: *b, x: 3}\n  d: *b\n"
    assert loaded(recipe, nested).recipe.args == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}, "d": {"x": 2}}


# What is wrong, and where


def test_an_unknown_key_is_refused_with_the_nearest_one_and_its_line(recipe: Path) -> None:
    assert refusal(recipe, "batch: 2\nengin: {}\n") == "r.yaml:2: there is no key 'engin'. Did you mean 'engine'?"
    text = "engine:\n  lr: 1\n  beta: [1]\n"
    assert refusal(recipe, text) == "r.yaml:3: there is no key 'engine.beta'. Did you mean 'engine.betas'?"
    text = "engine:\n  zzz: 1\n"
    assert refusal(recipe, text) == ("r.yaml:2: there is no key 'engine.zzz'. Known here: betas, groups, lr, name.")
    text = "wagon:\n  train: a\n  seat: 4\n"  # in a part that may be left out
    assert refusal(recipe, text) == "r.yaml:3: there is no key 'wagon.seat'. Did you mean 'wagon.seats'?"
    text = "engine:\n  groups:\n  - match: a\n  - match: b\n    skale: 3\n"  # in a list of parts
    assert (
        refusal(recipe, text)
        == "r.yaml:5: there is no key 'engine.groups.1.skale'. Did you mean 'engine.groups.1.scale'?"
    )


def test_a_wrong_value_is_refused_by_value_key_and_line(recipe: Path) -> None:
    said = refusal(recipe, "engine:\n  name: steam\n  lr: fast\n")
    assert said == ("r.yaml:3: engine.lr must be a number, not 'fast'.")
    assert refusal(recipe, "batch: 0\n") == "r.yaml:1: batch must be at least 1, not 0."
    assert refusal(recipe, "engine:\n  name: stem\n").startswith("r.yaml:2: engine.name must be 'steam' or ")
    assert refusal(recipe, "engine:\n  betas:\n  - 1\n  - x\n").startswith("r.yaml:4: engine.betas.1 must ")
    assert refusal(recipe, "engine: 3\n").startswith("r.yaml:1: engine must be a mapping of keys")
    for line in refusal(recipe, "name: a\nwagon:\n  train: b\n  size: [x, 2]\n").splitlines():  # one a kind of value
        assert line.startswith(("r.yaml:4: wagon.size must", "r.yaml:4: wagon.size.0 must"))
    assert refusal(recipe, "batch: 2\nmicro: all\n") == ("r.yaml:2: micro must be a whole number or 'auto', not 'all'.")
    assert refusal(recipe, "batch: 1.5\n") == "r.yaml:1: batch must be a whole number, not 1.5."
    said = refusal(recipe, "engine:\n  name: stem\n")
    assert said.endswith("not 'stem'. Did you mean 'steam'?")


def test_a_missing_key_is_named(recipe: Path) -> None:
    assert refusal(recipe, "name: a\nwagon:\n  seats: 2\n") == "r.yaml:2: the key 'wagon.train' is missing."


def test_an_impossible_combination_says_what_to_do(recipe: Path) -> None:
    said = refusal(recipe, "batch: 2\nmicro: 3\n")
    assert said == "r.yaml: micro 3 is larger than batch 2: set it to at most that."


def test_all_mistakes_are_told_at_once(recipe: Path) -> None:
    said = refusal(recipe, "batch: x\nengine:\n  l: 1\nnam: 3\n", "micro=z")
    starts = ("r.yaml:1: batch", "r.yaml:3: there", "r.yaml:4: there", "command line: micro")
    found = sorted(said.splitlines())
    assert len(found) == len(starts)
    for line, start in zip(found, sorted(starts), strict=True):
        assert line.startswith(start)


def test_a_key_that_stands_twice_is_refused(recipe: Path) -> None:
    assert refusal(recipe, "batch: 1\nname: a\nbatch: 2\n") == "FILE:3: the key 'batch' occurs twice."
    assert refusal(recipe, "engine:\n  lr: 1\n  'lr': 2\n") == "FILE:3: the key 'lr' occurs twice."
    assert refusal(recipe, "args:\n- {x: 1}\n- x: 1\n  y: 2\n  x: 3\n") == "FILE:5: the key 'x' occurs twice."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1, 2\nb: 3\n", "FILE:2: this is not YAML ("),
        ("name: 'open\n", "FILE:2: this is not YAML ("),
        ("a: b: c\n", "FILE:1: this is not YAML (mapping values are not allowed here)."),
        ("batch: 1\n\tname: a\n", "FILE:2: this is not YAML ("),
        ("name: \x07\n", "FILE: this is not YAML (special characters are not allowed)."),
        ("args: !!python/object:os.system x\n", "FILE:1: this is not YAML (could not determine a constructor for "),
        ("batch: 1\nname: 2024-13-01\n", "FILE:2: '2024-13-01' is not a value (month must be in 1..12)."),
        ("args: &x [*x]\n", "FILE: this YAML holds itself, or is nested too deeply."),
        ("args: *nowhere\n", "FILE:1: this is not YAML (found undefined alias 'nowhere')."),
        ("- batch: 1\n", "FILE: a recipe is a mapping of keys to values."),
        ("batch\n", "FILE: a recipe is a mapping of keys to values."),
        ("batch: 1\n---\nbatch: 2\n", "FILE:2: this is not YAML (but found another document)."),
    ],
)
def test_what_is_no_recipe_is_refused_with_its_line(recipe: Path, text: str, said: str) -> None:
    assert refusal(recipe, text).startswith(said)


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: the recipe cannot be read \(.*No such file"):
        read_recipe(tmp_path / "nowhere.yaml", [], Tree)
    with pytest.raises(RecipeError, match=r"the recipe cannot be read \(Is a directory\)\. headway init IMAGES writes"):
        read_recipe(tmp_path, [], Tree)
    (tmp_path / "photos.yaml").touch()
    (tmp_path / "photos").mkdir()
    for name in ("foto.yaml", "PHOTOS.yml", "photos"):
        with pytest.raises(RecipeError) as caught:
            read_recipe(tmp_path / name, [], Tree)
        assert caught.value.fix == f"Did you mean '{tmp_path}/photos.yaml'?"
    # Of a name, the suffix says nothing.
    with pytest.raises(RecipeError, match=r"headway init IMAGES writes a recipe\.$"):
        read_recipe(tmp_path / "mine.yaml", [], Tree)
    (tmp_path / "latin.yaml").write_bytes("name: caf\u00e9".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"the recipe cannot be read \('utf-8' codec"):
        read_recipe(tmp_path / "latin.yaml", [], Tree)


# Overrides


def test_overrides_reach_into_parts_lists_and_mappings(recipe: Path) -> None:
    text = "engine:\n  betas: [1, 2]\n  groups:\n  - match: a\n  - match: b\nargs: {x: {y: 1}}\n"
    overrides = ["engine.lr=1e-3", "engine.betas.1=5", "engine.groups.0.scale=2", "args.x.z=[1, {a: b}]", "name=a=b"]
    found = loaded(recipe, text, *overrides).recipe
    assert (found.engine.lr, found.engine.betas, found.name) == (0.001, (1.0, 5.0), "a=b")
    assert found.engine.groups == (Group(match="a", scale=2), Group(match="b"))
    assert found.args == {"x": {"y": 1, "z": [1, {"a": "b"}]}}


def test_overrides_make_what_is_not_there(recipe: Path) -> None:
    found = loaded(recipe, "wagon: null\n", "wagon.train=x", "args.deep.er=1", "engine={name: steam}", "batch=3").recipe
    assert (found.wagon, found.args, found.batch) == (Wagon(train="x"), {"deep": {"er": 1}}, 3)
    assert found.engine == Engine(name="steam")


def test_the_last_override_wins_and_an_empty_one_is_null(recipe: Path) -> None:
    assert loaded(recipe, "batch: 2\n", "batch=3", "batch=4").recipe.batch == 4
    assert loaded(recipe, "wagon: a\n", "wagon=").recipe.wagon is None
    assert loaded(recipe, "wagon: {train: a, seats: 3}\n", "wagon=b").recipe.wagon == Wagon(train="b")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("batch", "'batch' is not an override. Write key=value, for example optimizer.lr=0.1."),
        ("wagon: 3", "'wagon: 3' is not an override. Write key=value, for example 'wagon=3'."),
        ("=3", "'=3' is not an override. Write key=value, for example optimizer.lr=0.1."),
        ("batch=[1", "batch: the value '[1' is not YAML."),
        ("batch=2024-13-01", "batch: the value '2024-13-01' is not YAML."),
        ("engine.betas.2=1", "engine.betas.2: a list of 2 entries has no entry '2'. Count from 0."),
        ("engine.betas.x=1", "engine.betas.x: a list of 2 entries has no entry 'x'. Count from 0."),
        ("engine.betas.-1=1", "engine.betas.-1: a list of 2 entries has no entry '-1'. Count from 0."),
        ("engine.betas.\u00b2=1", "engine.betas.\u00b2: a list of 2 entries has no entry '\u00b2'. Count from 0."),
        (
            "engine.betas.0.x=1",
            "engine.betas.0.x: engine.betas.0 is a single value and has no 'x'. Set engine.betas.0 as a whole.",
        ),
        ("wagon.seats=3", "wagon.seats: wagon is a single value and has no 'seats'. Set wagon as a whole."),
        ("batc=3", "command line: there is no key 'batc'. Did you mean 'batch'?"),
        ("engine.l=3", "command line: there is no key 'engine.l'. Did you mean 'engine.lr'?"),
        ("batch=0", "command line: batch must be at least 1, not 0."),
    ],
)
def test_a_wrong_override_is_refused(recipe: Path, override: str, said: str) -> None:
    assert refusal(recipe, "engine:\n  betas: [1, 2]\nwagon: short\n", override) == said


# Origins


def test_every_leaf_says_where_it_came_from(recipe: Path) -> None:
    text = "# a comment\nbatch: 4\nengine:\n  name: steam\n  betas:\n  - 1\n  - 2\nwagon: short\nargs:\n  x: {y: 1}\n"
    found = loaded(recipe, text, "engine.lr=3", "micro=2", "args.x.z=1")
    assert dict(found.origins) == {
        "name": "default",
        "engine.name": "r.yaml:4",
        "engine.lr": "command line",
        "engine.betas": "r.yaml:5",
        "engine.groups": "default",
        "wagon.train": "r.yaml:8",
        "wagon.seats": "r.yaml:8",
        "wagon.size": "r.yaml:8",
        "batch": "r.yaml:2",
        "micro": "command line",
        "args.x.y": "r.yaml:10",
        "args.x.z": "command line",
    }


def test_a_part_given_as_a_whole_on_the_command_line_comes_from_there(recipe: Path) -> None:
    found = loaded(recipe, "engine:\n  lr: 2\n  name: steam\n", "engine={lr: 3}")
    assert found.recipe.engine == Engine(lr=3)
    assert {found.origins[f"engine.{key}"] for key in ("lr", "name", "betas", "groups")} == {"command line"}
    assert found.origins["batch"] == "default"


@pytest.mark.parametrize("place", range(12))
def test_a_list_with_an_entry_from_the_command_line_comes_from_there(recipe: Path, place: int) -> None:
    text = f"engine:\n  betas: {list(range(12))}\n"
    assert loaded(recipe, text).origins["engine.betas"] == "r.yaml:2"
    assert loaded(recipe, text, f"engine.betas.{place}=7").origins["engine.betas"] == "command line"


def test_auto_values_are_resolved_and_keep_their_reason(recipe: Path) -> None:
    found = loaded(recipe, "batch: 8\nmicro: auto\nwagon: short\n")
    resolved = found.resolve("micro", 4, "the largest that fits").resolve("wagon.size", (2, 3), "their own size")
    assert (resolved.recipe.micro, resolved.recipe.wagon) == (4, Wagon(train="short", size=(2, 3)))
    assert resolved.origins["micro"] == "auto: the largest that fits"
    assert resolved.origins["wagon.size"] == "auto: their own size"
    assert resolved.origins["batch"] == found.origins["batch"] == "r.yaml:1"
    assert resolved.base == found.base
    assert (found.recipe.micro, found.origins["micro"]) == ("auto", "r.yaml:2")  # the first stays as it was
    with pytest.raises(RecipeError, match="micro 9 is larger"):
        found.resolve("micro", 9, "nonsense")


# Round trips

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["1e5", "-1.5E-3", "yes", "null", "~", "0x1f", "2024-01-01", "1_000", "a: b", "- a", "#x", "'", '"', "<<", "="]
)
floats = st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | floats | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
trees = st.builds(
    Tree,
    name=texts,
    engine=st.builds(
        Engine,
        name=st.sampled_from(["steam", "diesel"]),
        lr=floats,
        betas=st.lists(floats, max_size=3).map(tuple),
        groups=st.lists(st.builds(Group, match=texts, scale=floats), max_size=2).map(tuple),
    ),
    wagon=st.none() | st.builds(Wagon, train=texts, size=st.none() | st.integers() | st.tuples(st.just(1), st.just(2))),
    batch=st.integers(9, 2**40),
    micro=st.integers(1, 9) | st.just("auto"),
    args=st.dictionaries(texts, values, max_size=3),
)


@in_one_folder
@given(tree=trees)
def test_a_resolved_recipe_is_read_as_it_was_written(recipe: Path, tree: Tree) -> None:
    text = LoadedRecipe(tree, {}, recipe.parent).to_yaml()
    again = loaded(recipe, text)
    assert again.recipe == tree
    assert "default" not in [origin for key, origin in again.origins.items() if not key.startswith("args")]
    assert again.to_yaml() == text


def test_infinity_and_what_is_no_number_survive_too(recipe: Path) -> None:
    first = loaded(recipe, "engine: {lr: .inf}\nargs: {x: -.inf, y: [.nan], z: -0.0}\n")
    again = loaded(recipe, first.to_yaml()).recipe
    assert again.engine.lr == math.inf
    assert str(again.args) == "{'x': -inf, 'y': [nan], 'z': -0.0}"


def test_parts_are_immutable_and_refuse_unknown_keys() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Tree().batch = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Tree(bach=3)  # type: ignore[call-arg]


# The real tree

TRAIN = """
data: {train: packed/train, eval: packed/eval}
model: {factory: 'headway.model:cifar_net'}
optimizer: {name: nag, lr: 1e-3, groups: [{match: bias, lr_scale: 64}, {match: '.*', weight_decay: 0}]}
schedule: {name: triangular}
batch: 1024
epochs: 10
stop_at: {accuracy: 0.88}
"""


def test_a_training_recipe_survives_the_round_trip(recipe: Path) -> None:
    recipe.write_text(TRAIN)
    first = read_recipe(recipe, ["precision=bf16", "task.args={label_smoothing: 0.1}"], TrainRecipe)
    assert first.recipe.optimizer.lr == 0.001
    assert first.origins["optimizer.lr"] == "r.yaml:4"
    assert first.origins["precision"] == "command line"
    assert first.origins["schedule.peak"] == "default"
    resolved = first.resolve("augment.mean", (1.0, 2.0, 3.0), "measured").resolve("data.size", (32, 32), "their own")
    recipe.write_text(resolved.to_yaml())
    again = read_recipe(recipe, [], TrainRecipe)
    assert again.recipe == resolved.recipe
    assert yaml.safe_load(resolved.to_yaml())["data"]["size"] == [32, 32]


def test_an_override_of_the_name_brings_the_keys_of_that_optimizer(recipe: Path) -> None:
    recipe.write_text(TRAIN)
    found = read_recipe(recipe, ["optimizer.name=lars", "optimizer.trust=0.02"], TrainRecipe)
    optimizer = found.recipe.optimizer
    assert isinstance(optimizer, LARSRecipe)
    assert (optimizer.trust, optimizer.lr, optimizer.lr_in_momentum) == (0.02, 0.001, True)
    assert found.origins["optimizer.trust"] == "command line"
    assert found.origins["optimizer.clip"] == "default"
    assert "momentum" not in read_recipe(recipe, ["optimizer.name=adamw"], TrainRecipe).recipe.optimizer.model_dump()
    assert read_recipe(recipe, ["schedule=cosine"], TrainRecipe).recipe.schedule.name == "cosine"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimiser.lr=1"], "there is no key 'optimiser'. Did you mean 'optimizer'?"),
        (
            ["optimizer.groups.0.lrscale=1"],
            "no key 'optimizer.groups.0.lrscale'. Did you mean 'optimizer.groups.0.lr_scale'?",
        ),
        (["optimizer.wd=1"], "there is no key 'optimizer.wd'. Did you mean 'optimizer.weight_decay'?"),
        (["optimizer.zzz=1"], "there is no key 'optimizer.zzz'. Known here: "),
        (["data.batch=128"], "command line: there is no key 'data.batch'. Did you mean 'batch'?"),
        (["data=folder", "data.batch=128"], "command line: there is no key 'data.batch'. Did you mean 'batch'?"),
        (["lr=0.1"], "command line: there is no key 'lr'. Did you mean 'optimizer.lr'?"),
        (["bach=64"], "command line: there is no key 'bach'. Did you mean 'batch'?"),
        (["model.milestone_epochs=[3]"], "Did you mean 'schedule.milestones_epochs'"),
        (
            ["optimizer.ns_steps=3"],
            "command line: 'optimizer.ns_steps' belongs to muon; nag has momentum, lr, weight_decay, no_decay, groups, "
            "layer_decay, precision, clip_norm, lookahead, gradient_noise. Remove it, or change optimizer.name.",
        ),
        (
            ["optimizer={name: sgd, lr: 1, betas: [0.9, 0.99]}"],
            "'optimizer.betas' belongs to adam, adamw, lamb, novograd, ftml, soap; sgd has momentum, lr,",
        ),
        (["schedule.end=0.1", "schedule.gamma=2"], "'schedule.gamma' belongs to step, multi_step, exponential; triang"),
        (["optimizer={name: lrs, lr: 1}"], "optimizer.name must be 'sgd', 'nag', 'adam', 'adamw', 'lars', "),
        (["optimizer={name: lrs, lr: 1}"], "'soap' or 'own', not 'lrs'. Did you mean 'lars'?"),
        (["optimizer={lr: 1}"], "command line: the key 'optimizer.name' is missing."),
        (["optimizer={nam: sgd, lr: 1}"], "there is no key 'optimizer.nam'. Did you mean 'optimizer.name'?"),
        (["optimizer={name: lars}"], "command line: the key 'optimizer.lr' is missing."),
        (["optimizer=3"], "optimizer must be a mapping of keys to values, not 3."),
        (["optimizer.name=lars", "optimizer.trst=0.1"], "no key 'optimizer.trst'. Did you mean 'optimizer.trust'?"),
        (["schedule=cosine", "schedule.end=0.1"], "schedule.end: schedule is a single value and has no 'end'. Set"),
        (["schedule=step"], "the key 'schedule.every_epochs' is missing."),
        (["schedule={name: multi_step, milestones_epochs: []}"], "must be a list of 1 or more, not"),
        (["data.thread=1"], "there is no key 'data.thread'. Did you mean 'data.threads'?"),
        (["data.size=0"], "data.size: a side of an image has 1 pixel or more."),
        (["augment.std=[0, 1, 1]"], "augment.std.0 must be more than 0, not 0."),
        (["data=synthetic", "stop_at=", "data.synthetic.size=[0, 3]"], "data is a single value and has no 'synthetic'"),
        (["data={train: synthetic, synthetic: {size: [0, 3]}}", "stop_at="], "data.synthetic.size.0 must be "),
        (["data={train: synthetic, window: 3}", "stop_at="], "synthetic data does not use 'window'"),
        (["data.synthetic.samples=3"], "data.synthetic counts only with train: synthetic"),
        (["data.eval="], "stop_at needs an evaluation set: set data.eval, or remove stop_at."),
        (["stop_at={}"], "stop_at names no metric"),
        (["micro_batch=2000"], "micro_batch 2000 is larger than batch 1024: set it to at most that."),
        (["precision=fp16", "device=cpu"], "fp16 on a CPU is emulated and slow: set precision to bf16 or fp32."),
        (["precision=fp8"], "precision must be 'auto', 'fp32', 'bf16' or 'fp16', not 'fp8'."),
        (["name=../x"], "name: '../x' cannot name a folder."),
        (["seed=-1"], "seed must be at least 0, not -1."),
        (
            ["optimizer.lookahead={}", "model.ema={half_life_steps: 9}"],
            "lookahead and model.ema both say which weights",
        ),
        (["optimizer.lookahead={alpha: 0}"], "optimizer.lookahead.alpha must be more than 0, not 0."),
        (["batch=many"], "batch must be a whole number, not 'many'."),
    ],
)
def test_a_wrong_training_recipe_is_refused(recipe: Path, overrides: list[str], said: str) -> None:
    recipe.write_text(TRAIN)
    with pytest.raises(RecipeError) as refused:
        read_recipe(recipe, overrides, TrainRecipe)
    assert said in str(refused.value)
    assert refused.value.exit_status == 2
