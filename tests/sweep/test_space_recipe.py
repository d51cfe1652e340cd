from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import RecipeError
from headway.sweep.space import read_space

EXAMPLE = """
method: random
objective: accuracy
parameters:
  optimizer.lr: {log: [0.001, 1.0]}
  optimizer.momentum: {linear: [0.8, 0.99], when: {optimizer.name: [sgd, nag]}}
  model.args.width: {log_integer: [8, 64]}
  augment.translate: {integer: [0, 4]}
  optimizer.name: {choice: [sgd, nag, adamw]}
  optimizer.betas: {choice: [[0.9, 0.99], [0.9, 0.999]], when: {optimizer.name: adamw}}
  schedule: {choice: [constant, {name: cosine, warmup_epochs: 1}]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "space.yaml"


def test_a_space_survives_the_way_to_yaml_and_back(file: Path) -> None:
    file.write_text(EXAMPLE)
    first = read_space(file)
    file.write_text(first.to_yaml())
    assert read_space(file).recipe == first.recipe
    assert "null" not in first.to_yaml()


def test_method_and_objective_can_be_overridden(file: Path) -> None:
    file.write_text(EXAMPLE)
    recipe = read_space(file, ("method=sobol", "objective=loss")).recipe
    assert (recipe.method, recipe.objective) == ("sobol", "loss")


ONE = "parameters:\n  "
LR = "optimizer.lr: {log: [0.1, 1]}"
NAMES = "\n  optimizer.name: {choice: [sgd, lamb, adamw]}"

REFUSED = {
    # No parameter
    "": "FILE: there is nothing to vary. Write for example parameters: {optimizer.lr: {log: [0.001, 1.0]}}.",
    "parameters: {}": "FILE:1: parameters: there is nothing to vary. Write for example optimizer.lr: {log: [0.001, "
    "1.0]}.",
    f"method: bayes\n{ONE}{LR}": "FILE:1: method must be 'random', 'grid', 'sobol' or 'tpe', not 'bayes'.",
    # Keys
    f"{ONE}optimizer.lrr: {{log: [0.1, 1]}}": "FILE:2: parameters.optimizer.lrr: there is no key 'optimizer.lrr'. Did "
    "you mean 'optimizer.lr'?",
    f"{ONE}optimizer.trsut: {{log: [0.1, 1]}}": "FILE:2: parameters.optimizer.trsut: there is no key "
    "'optimizer.trsut'. Did you mean 'optimizer.trust'?",
    f"{ONE}learning_rate: {{log: [0.1, 1]}}": "FILE:2: parameters.learning_rate: there is no key 'learning_rate'. Did "
    "you mean 'optimizer.lr'?",
    f"{ONE}optimizer: {{lr: {{log: [0.1, 1]}}}}": "FILE:1: parameters: a key is written as a whole: optimizer.lr: "
    "{log: [LOW, HIGH]}.",
    f"{ONE}name: {{choice: [a, b]}}": "FILE:2: parameters.name: cannot be a parameter: it names the run folder, and "
    "every trial has its own inside the sweep's. Remove it, or set it in the recipe.",
    f"{ONE}checkpoint.folder: {{choice: [a, b]}}": "FILE:2: parameters.checkpoint.folder: cannot be a parameter: it "
    "says where or when a run is stored, and no trial scores higher by it. Remove it, or set it in the recipe.",
    f"{ONE}data.eval: {{choice: [a, b]}}": "FILE:2: parameters.data.eval: cannot be a parameter: it changes the "
    "measure, and the scores of trials could not be compared. Remove it, or set it in the recipe.",
    f"{ONE}data.threads: {{integer: [1, 4]}}": "FILE:2: parameters.data.threads: cannot be a parameter: it changes the "
    "speed of a trial, and not its score. headway tune finds the fastest value. Remove it, or set it in the recipe.",
    # Forms
    f"{ONE}optimizer.lr: [0.1, 1]": "FILE:2: parameters.optimizer.lr: write {choice: [0.1, 1]} for these values, or "
    "{log: [LOW, HIGH]} for a range.",
    f"{ONE}optimizer.lr: 0.1": "FILE:2: parameters.optimizer.lr: a fixed value belongs into the recipe. Write {choice: "
    "[0.1, ...]} for several values.",
    f"{ONE}optimizer.lr: {{}}": "FILE:2: parameters.optimizer.lr: it has no values. Write for example {log: [0.001, "
    "1.0]} or {choice: [true, false]}.",
    f"{ONE}optimizer.lr: {{log: [0.1, 1], linear: [0, 1]}}": "FILE:2: parameters.optimizer.lr: linear and log exclude "
    "each other: keep one. Write for example {log: [0.001, 1.0]} or {choice: [true, false]}.",
    f"{ONE}optimizer.lr: {{uniform: [0.1, 1]}}": "FILE:2: there is no key 'parameters.optimizer.lr.uniform'. Known "
    "here: choice, integer, linear, log, log_integer, points, when.",
    # Ranges
    f"{ONE}optimizer.lr: {{log: [1, 0.1]}}": "FILE:2: parameters.optimizer.lr: log is [lowest, highest], and [1.0, "
    "0.1] is empty. Write the lowest first.",
    f"{ONE}batch: {{integer: [8, 8]}}": "FILE:2: parameters.batch: integer is [lowest, highest], and [8, 8] is empty. "
    "Set the value in the recipe, or widen the range.",
    f"{ONE}optimizer.lr: {{log: [0, 1]}}": "FILE:2: parameters.optimizer.lr: log is a range of numbers above 0, and "
    "this one is [0.0, 1.0]. Begin above 0, or write linear: [0.0, 1.0].",
    f"{ONE}augment.translate: {{log_integer: [0, 4]}}": "FILE:2: parameters.augment.translate: log_integer is a range "
    "of numbers above 0, and this one is [0, 4]. Begin above 0, or write integer: [0, 4].",
    f"{ONE}optimizer.lr: {{log: [0.1]}}": "FILE:2: parameters.optimizer.lr.log must be a list of 2, not [0.1].",
    f"{ONE}optimizer.lr: {{log: [0.1, .inf]}}": "FILE:2: parameters.optimizer.lr.log.1 must be a finite number, not "
    ".inf.",
    f"{ONE}optimizer.lr: {{linear: [-1e308, 1e308]}}": "FILE:2: parameters.optimizer.lr: linear is a range of more "
    "than 1.8e308, which no number holds. Narrow it.",
    f"{ONE}batch: {{integer: [8.5, 16]}}": "FILE:2: parameters.batch.integer.0 must be a whole number, not 8.5.",
    # Choices and grids
    f"{ONE}batch: {{choice: []}}": "FILE:2: parameters.batch.choice must be a list of 1 or more, not [].",
    f"{ONE}batch: {{choice: [8, 16, 8]}}": "FILE:2: parameters.batch: choice has 8 twice. Remove one.",
    f"{ONE}batch: {{choice: [8, 16], points: 3}}": "FILE:2: parameters.batch: points are for ranges, and a grid takes "
    "each value of a choice: remove points.",
    f"method: grid\n{ONE}{LR}": "FILE:3: parameters.optimizer.lr: a grid needs to know how many values of the range. "
    "Write optimizer.lr: {log: [0.1, 1.0], points: 4}, or choose another method.",
    # Conditions
    f"{ONE}batch: {{choice: [8, 16], when: {{optimizer.nam: sgd}}}}{NAMES}": "FILE:2: parameters.batch.when: "
    "'optimizer.nam' is no parameter of this space. Did you mean 'optimizer.name'? Or set optimizer.nam in the recipe.",
    f"{ONE}batch: {{choice: [8, 16], when: {{optimizer.name: [sgd, nag]}}}}{NAMES}": "FILE:2: parameters.batch.when: "
    "optimizer.name is never nag. It is one of [sgd, lamb, adamw]: name such a value.",
    f"{ONE}batch: {{choice: [8, 16], when: {{optimizer.name: []}}}}{NAMES}": "FILE:2: parameters.batch.when: the list "
    "for optimizer.name is empty. Name values, or remove the condition.",
    f"{ONE}batch: {{choice: [8, 16], when: {{optimizer.lr: 1}}}}\n  {LR}": "FILE:2: parameters.batch.when: optimizer."
    "lr is a range of numbers, and will hardly ever be 1. Make it a choice, or remove the condition.",
    f"{ONE}batch: {{choice: [8, 16], when: {{augment.translate: 5}}}}\n  augment.translate: {{integer: [0, 4]}}": "FILE"
    ":2: parameters.batch.when: augment.translate is never 5. It is in 0..4: name such a value.",
    f"{ONE}batch: {{choice: [1], when: {{seed: 1}}}}\n  seed: {{choice: [1], when: {{epochs: 1}}}}\n  epochs: {{choice:"
    " [1], when: {batch: 1}}": "FILE:1: parameters: these conditions go round in a circle: batch needs seed needs "
    "epochs needs batch. Remove one.",
    f"{ONE}batch: {{choice: [1], when: {{batch: 1}}}}": "FILE:1: parameters: these conditions go round in a circle: "
    "batch needs batch. Remove one.",
    # Keys of other optimizers
    f"{ONE}optimizer.momentum: {{linear: [0.8, 0.9]}}{NAMES}": "FILE:2: parameters.optimizer.momentum: no key of lamb "
    "and adamw. Write when: {optimizer.name: [sgd]}.",
    f"{ONE}optimizer.momentum: {{linear: [0.8, 0.9], when: {{optimizer.name: [sgd, lamb]}}}}{NAMES}": "FILE:2: "
    "parameters.optimizer.momentum: no key of lamb. Write when: {optimizer.name: [sgd]}.",
    f"{ONE}optimizer.ns_steps: {{integer: [3, 5]}}{NAMES}": "FILE:2: parameters.optimizer.ns_steps: no key of sgd and "
    "lamb and adamw. Remove it.",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_space_is_refused_with_place_and_fix(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(RecipeError) as refused:
        read_space(file)
    assert str(refused.value).replace("space.yaml", "FILE") == REFUSED[text]


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(RecipeError, match=r"the space cannot be read .* Write one with, for example, parameters: "):
        read_space(file)


@pytest.mark.parametrize("name", ["trust", "betas", "ns_steps", "momentum", "args.any", "lookahead.alpha"])
def test_keys_of_every_optimizer_are_known(name: str, file: Path) -> None:
    file.write_text(f"parameters: {{optimizer.{name}: {{choice: [1, 2]}}}}")
    assert list(read_space(file).recipe.parameters) == [f"optimizer.{name}"]
