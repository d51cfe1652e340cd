"""No error of pydantic reaches the user in pydantic's words, whatever the key and the value."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from headway.core.profile import Profile
from headway.core.recipe_errors import explain_errors
from headway.core.recipe_types import walk_keys
from headway.core.value_errors import SENTENCE_ERRORS, VALUE_ERRORS, describe_error
from headway.core.workload import Workload
from headway.plan.cluster import Cluster
from headway.setup.recipe import TrainRecipe
from headway.setup.recipe_synonyms import KEY_SYNONYMS, VALUE_SYNONYMS

KEY_ERRORS = {"missing", "extra_forbidden", "union_tag_invalid", "union_tag_not_found"}
"""Types of errors for which `explain_errors` has a sentence of its own."""

WITHOUT_ERRORS = {
    "any", "default", "definition-ref", "definitions", "function-wrap", "json-or-python", "model-field", "no-info",
    "nullable", "union", "with-info", "to-string", "format", "serialization", "tuple-variable", "simple",
}  # fmt: skip
"""Nodes of a schema that raise nothing but the errors of the nodes inside."""

ERRORS: Mapping[str, set[str]] = {
    "bool": {"bool_type", "bool_parsing"},
    "int": {"int_type", "int_parsing", "int_parsing_size", "int_from_float"},
    "float": {"float_type", "float_parsing", "finite_number"},
    "str": {"string_type", "string_unicode"},
    "dict": {"dict_type"},
    "list": {"list_type"},
    "tuple": {"tuple_type", "too_long", "missing"},
    "literal": {"literal_error"},
    "model": {"model_type"},
    "model-fields": {"model_type", "missing", "extra_forbidden"},
    "tagged-union": {"union_tag_invalid", "union_tag_not_found", "model_attributes_type"},
    "function-after": {"value_error", "assertion_error"},
    "function-before": {"value_error", "assertion_error"},
    "function-plain": {"value_error", "assertion_error"},
}
"""Types of errors that a node of a schema may raise, in validation of Python values."""

BOUNDS = {
    "gt": "greater_than", "ge": "greater_than_equal", "lt": "less_than", "le": "less_than_equal",
    "multiple_of": "multiple_of", "pattern": "string_pattern_mismatch",
}  # fmt: skip

WRONG: list[Any] = [
    None, "", "many", -1, 0, 1.5, math.inf, math.nan, True, [], {}, [1, 2, 3], {"zzz": 1}, 10**400, "\udc80",
    datetime.date(2024, 1, 2),
]  # fmt: skip

PYDANTIC = re.compile(
    r"Input should|Extra inputs|Field required|Value error|valid (integer|number|string|boolean|list|dict|tuple)|"
    r"type=|validation error|pydantic|permitted|discriminator|instance of|dictionary|after validation",
)


def nodes(schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if id(schema) in seen:
            return
        seen.add(id(schema))
        if isinstance(schema.get("type"), str):
            yield schema
        for name, value in schema.items():
            # Validators' functions and serialisers are no schemas.
            if name not in ("serialization", "metadata", "expected", "default"):
                yield from nodes(value, seen)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from nodes(value, seen)


@pytest.mark.parametrize("model", [TrainRecipe, Cluster, Workload, Profile])
def test_every_type_of_error_that_our_records_can_raise_has_words_of_ours(model: type[BaseModel]) -> None:
    found = set[str]()
    for node in nodes(model.__pydantic_core_schema__, set()):
        kind = node["type"]
        assert kind in ERRORS or kind in WITHOUT_ERRORS, f"teach this test the errors of {kind!r}"
        found |= ERRORS.get(kind, set()) | {error for bound, error in BOUNDS.items() if bound in node}
        for bound, error in (("min_length", "short"), ("max_length", "long")):
            found |= {f"{'string_' * (kind == 'str')}too_{error}"} if bound in node else set()
    assert found <= VALUE_ERRORS | SENTENCE_ERRORS | KEY_ERRORS
    assert {"missing", "extra_forbidden", "int_parsing", "literal_error", "greater_than_equal"} <= found


def good() -> dict[str, Any]:
    return {
        "data": {"train": "a", "eval": "b"},
        "model": {"factory": "net:make"},
        "optimizer": {"name": "lars", "lr": 1},
        "schedule": {"name": "cosine"},
        "batch": 8,
        "epochs": 2,
    }


def refusals(keys: str, value: Any) -> Iterator[str]:
    """The sentences for a recipe with a wrong value, where it is wrong."""
    tree = good()
    place: Any = tree
    *above, last = keys.split(".")
    for key in above:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            return
    place[last] = value
    try:
        TrainRecipe.model_validate(tree)
    except ValidationError as error:
        yield explain_errors(error, tree, TrainRecipe, Path("r.yaml"), {})
        yield from (describe_error(entry) for entry in error.errors(include_url=False))


KEYS = [key for key in dict.fromkeys(walk_keys(TrainRecipe)) if ".0." not in key]


@pytest.mark.thin(1)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(type(value).__name__))
def test_no_words_of_pydantic_reach_the_user(value: Any) -> None:
    sentences = [(key, sentence) for key in KEYS for sentence in refusals(key, value)]
    assert len(sentences) > 100 if value is not True else sentences
    for key, sentence in sentences:
        assert not PYDANTIC.search(sentence), (key, sentence)
        assert len(sentence) < 2500, key


def test_the_name_of_a_key_elsewhere_leads_to_a_key_of_ours() -> None:
    known = set(walk_keys(TrainRecipe))
    names = {key.rpartition(".")[2] for key in known}
    # Their meaning elsewhere differs from ours: timm's smoothing is label smoothing, Lightning's strategy a backend,
    # and decay that of weights, where ours is of a mean square.
    other = {"classes", "decay", "shift", "smoothing", "metric", "nesterov", "strategy", "warmup"}
    assert names & KEY_SYNONYMS.keys() <= other | {
        key.rpartition(".")[2] for one in KEY_SYNONYMS.values() for key in one.keys
    }
    for name, synonym in KEY_SYNONYMS.items():
        assert name == name.lower()
        assert name not in TrainRecipe.model_fields or name in synonym.keys, f"{name} is a key of ours"
        exists = [key for key in synonym.keys if key in known or key.partition(".args.")[0] + ".args" in known]
        assert exists or (not synonym.keys and synonym.note), name
        assert not synonym.note or synonym.note.endswith("."), name
    for key, names in VALUE_SYNONYMS.items():
        assert key in known
        for name, value in names.items():
            assert re.sub(r"[\s_-]", "", name).casefold() == name
            assert value.endswith(".") or not any(f"{key} must" in one for one in refusals(key, value)), (key, name)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("size", 96, "there is no key 'size'. Did you mean 'data.size'?"),
        ("learning_rate", 1, "Did you mean 'optimizer.lr'?"),
        ("optimizer.learningRate", 1, "there is no key 'optimizer.learningRate'. Did you mean 'optimizer.lr'?"),
        ("weight_decay", 1, "Did you mean 'optimizer.weight_decay'?"),
        ("accumulate", 4, "Did you mean 'micro_batch'? batch holds all samples of a step, micro_batch those"),
        ("grad_accum", 4, "Did you mean 'micro_batch'?"),
        ("data.batch_size", 4, "there is no key 'data.batch_size'. Did you mean 'batch'?"),
        ("workers", 4, "Did you mean 'data.threads'?"),
        ("num-epochs", 4, "Did you mean 'epochs'?"),
        ("cosine_restarts", 4, "schedule: {name: cosine} falls once over the whole run, without restarts."),
        ("scheduler", "cosine", "Did you mean 'schedule'?"),
        ("arch", "resnet50", "Did you mean 'model.factory'?"),
        ("pretrained", True, "Did you mean 'model.weights'? For a factory that loads weights by itself, write"),
        ("augment.mixup_alpha", 0.2, "Did you mean 'augment.mixup.alpha'?"),
        ("optimizer.label_smoothing", 0.1, "Did you mean 'task.args.label_smoothing'?"),
        ("drop_last", True, "there is no key 'drop_last'. Every step is full"),
        ("gpus", 8, "headway train RECIPE --procs N"),
        ("output_dir", "x", "headway train RECIPE --run FOLDER"),
        ("optimizer.warmup_epochs", 5, "Remove it, or change optimizer.name, or write 'schedule.warmup_epochs'."),
        (
            "parallel",
            {"strategy": "data", "ranks": 2},
            "data has no keys of its own. Remove it, or change parallel.strat",
        ),
        (
            "parallel",
            {"strategy": "local", "steps": 16},
            "no key 'parallel.steps'. Did you mean 'parallel.every_steps'?",
        ),
        ("parallel", {"strategy": "local", "H": 16}, "Did you mean 'parallel.every_steps'?"),
        ("parallel", {"strategy": "spatial", "gpus": 2}, "is parallel.ranks, of spatial and experts."),
        ("parallel", {"type": "hybrid"}, "there is no key 'parallel.type'. Did you mean 'parallel.strategy'?"),
        ("optimizer", {"type": "sgd", "lr": 1}, "there is no key 'optimizer.type'. Did you mean 'optimizer.name'?"),
        ("parallel", "DiLoCo", "not 'DiLoCo'. Did you mean 'local'?"),
        ("optimizer.name", "AdamW", "not 'AdamW'. Did you mean 'adamw'?"),
        ("optimizer.name", "SGD", "not 'SGD'. Did you mean 'sgd'?"),
        ("precision", 16, "not 16. Did you mean 'fp16'?"),
        ("precision", "bf16-mixed", "Did you mean 'bf16'?"),
        ("schedule.name", "ReduceLROnPlateau", "None waits for a plateau"),
        ("optimizer", "sgd", "optimizer must be a mapping of keys to values, not 'sgd'. Write optimizer: {name: sgd}."),
        ("model", "net:make", "Write model: {factory: net:make}."),
        ("optimizer", "mine.py:Lion", "Write optimizer: {factory: mine.py:Lion}."),
        ("early_stopping", True, "early_stopping must be a mapping of keys to values, not true. Its keys: metric, pat"),
        ("patience", 5, "Did you mean 'early_stopping.patience_epochs'?"),
        ("sinks", "wandb", "sinks must be a list, not 'wandb'. Write sinks: [wandb]."),
        ("data.size", [8], "data.size must be a whole number or a list of 2, not [8]."),
        ("data.channels", 4, "data.channels must be 1 or 3, not 4."),
        ("compile", "fast", "compile must be true, false, 'graphs' or 'max-autotune', not 'fast'."),
        ("batch", None, "batch must be a whole number, and it has no value."),
        ("batch", "64px", "batch must be a whole number, not '64px'."),
        ("optimizer.lr", "0,1", "optimizer.lr must be a number, not '0,1'. Write 0.1, with a point."),
        ("name", "x" * 200 + "/", "cannot name a folder"),
    ],
)
def test_what_newcomers_write_is_answered_with_what_is_meant(key: str, value: Any, said: str) -> None:
    assert said in next(refusals(key, value))
