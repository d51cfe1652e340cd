"""The file of a search space, SPACE.yaml: which keys of a recipe a sweep varies, over which values, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from headway.core.errors import suggest_nearest
from headway.core.recipe import RecipePart
from headway.core.recipe_errors import find_unknown_key
from headway.core.recipe_types import find_tag_key, find_tagged_members, get_value_type
from headway.core.recipe_yaml import dump_in_line
from headway.setup.recipe import TrainRecipe
from headway.sweep.parameter import ParameterRecipe, is_same

_FIXED: tuple[tuple[str, str], ...] = (
    ("name", "it names the run folder, and every trial has its own inside the sweep's"),
    ("checkpoint data.cache_folder", "it says where or when a run is stored, and no trial scores higher by it"),
    ("observe sinks log_every_steps log_ids", "it is about the records of a run, and no trial scores higher by it"),
    ("data.eval evaluate task.primary", "it changes the measure, and the scores of trials could not be compared"),
    (
        "device compile channels_last winograd augment.where data.threads data.pin data.prefetch_batches data.cache "
        "data.cache_gb data.decoder data.transform_workers data.worker_kind comm.algorithm comm.bucket_mb comm.rails "
        "comm.interface comm.timeout_s comm.stall_s comm.on_rank_failure",
        "it changes the speed of a trial, and not its score. headway tune finds the fastest value",
    ),
)
"""Keys of a recipe, with all below them, that are the same in all trials; and the reason."""

_EMPTY, _EXAMPLE = "there is nothing to vary", "optimizer.lr: {log: [0.001, 1.0]}"


def _check_key(key: str) -> str:
    """Checks that a recipe has a key, and that trials may differ in it."""
    if (unknown := find_unknown_key(key.split("."), TrainRecipe)) is not None:
        raise ValueError(unknown)
    for names, reason in _FIXED:
        if any(key == name or key.startswith(f"{name}.") for name in names.split()):
            raise ValueError(f"{key} cannot be a parameter: {reason}. Remove it, or set it in the recipe")
    return key


class SpaceRecipe(RecipePart):
    """The search space of a sweep: the parameters, and the method that chooses their values for each trial."""

    method: Literal["random", "grid", "sobol", "tpe"] = "random"
    """Choice of the trials' values. `random`: independent draws (Bergstra and Bengio 2012). `grid`: every combination
    once; ranges need `points`. `sobol`: draws that fill the space more evenly than random ones (Owen's scrambling).
    `tpe`: ten random draws, then near the best trials so far (Bergstra et al. 2011); needs the package optuna."""
    objective: str | None = None
    """Metric of the evaluations by which trials are compared, or `loss`. Unset: the primary metric of the task."""
    parameters: dict[Annotated[str, AfterValidator(_check_key)], ParameterRecipe] = Field(min_length=1)
    """Values by dotted key of the recipe, also of free arguments, for example optimizer.lr: {log: [0.001, 1.0]} and
    model.args.width: {choice: [8, 16]}."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_empty_file(cls, tree: Any) -> Any:
        if tree == {}:
            raise ValueError(f"{_EMPTY}. Write for example parameters: {{{_EXAMPLE}}}")
        return tree

    @field_validator("parameters", mode="before")
    @classmethod
    def _refuse_nested_keys(cls, parameters: Any) -> Any:
        # None: `parameters:` with nothing below it.
        if not isinstance(parameters, dict | None):
            return parameters
        if not parameters:
            raise ValueError(f"{_EMPTY}. Write for example {_EXAMPLE}")
        for key, value in parameters.items():
            inner = next(iter(value), None) if isinstance(value, dict) else None
            if inner is not None and isinstance(value[inner], dict) and inner not in ParameterRecipe.model_fields:
                raise ValueError(f"a key is written as a whole: {key}.{inner}: {{log: [LOW, HIGH]}}")
        return parameters

    @model_validator(mode="after")
    def _check_parameters(self) -> SpaceRecipe:
        for key, parameter in self.parameters.items():
            for name, value in parameter.when.items():
                self._check_condition(f"parameters.{key}.when", name, value)
        self._check_cycles()
        for key in self.parameters:
            self._check_members(key)
        if self.method == "grid":
            for key, parameter in self.parameters.items():
                if not parameter.list_grid():
                    ends = dump_in_line(list(parameter.bounds))
                    fix = f"Write {key}: {{{parameter.kind}: {ends}, points: 4}}, or choose another method"
                    raise ValueError(f"parameters.{key}: a grid needs to know how many values of the range. {fix}")
        return self

    def _check_condition(self, where: str, name: str, value: Any) -> None:
        """Raises ValueError if a condition can never hold."""
        if (other := self.parameters.get(name)) is None:
            hint = suggest_nearest(name, self.parameters)
            raise ValueError(f"{where}: {name!r} is no parameter of this space. {hint} Or set {name} in the recipe")
        if other.kind in ("linear", "log"):
            fix = "Make it a choice, or remove the condition"
            raise ValueError(
                f"{where}: {name} is a range of numbers, and will hardly ever be {dump_in_line(value)}. {fix}"
            )
        allowed = list_allowed(other, value)
        if not allowed:
            raise ValueError(f"{where}: the list for {name} is empty. Name values, or remove the condition")
        for one in allowed:
            if not other.includes(one):
                kinds = (
                    f"one of {dump_in_line(list(other.choice))}"
                    if other.choice is not None
                    else "in {:g}..{:g}".format(*other.bounds)
                )
                raise ValueError(f"{where}: {name} is never {dump_in_line(one)}. It is {kinds}: name such a value")

    def _check_cycles(self) -> None:
        try:
            self.sort_keys()
        except CycleError as error:
            # Each has the next one in its `when`; the first occurs again at the end.
            chain = " needs ".join(reversed(error.args[1]))
            raise ValueError(f"parameters: these conditions go round in a circle: {chain}. Remove one") from None

    def _check_members(self, key: str) -> None:
        """Raises ValueError if a key belongs to some optimizers only, and is varied together with others."""
        part, _, inner = key.partition(".")
        members = find_tagged_members(get_value_type(TrainRecipe, part))
        if not inner or not members:
            return
        tag = f"{part}.{find_tag_key(members)}"
        if key == tag or (choice := self.parameters.get(tag)) is None or choice.choice is None:
            return
        condition = self.parameters[key].when.get(tag)
        names = choice.choice if condition is None else list_allowed(choice, condition)
        owners = [name for name in names if name in members and inner.split(".")[0] in members[name].model_fields]
        others = [name for name in names if name in members and name not in owners]
        if others:
            fix = f"Write when: {{{tag}: {dump_in_line(owners)}}}" if owners else "Remove it"
            raise ValueError(f"parameters.{key}: no key of {' and '.join(others)}. {fix}")

    def sort_keys(self) -> list[str]:
        """Returns the keys with each behind those that its conditions name, otherwise sorted by name.

        The order of the file does not count. Raises CycleError if conditions depend on each other.
        """
        sorter = TopologicalSorter({key: list(parameter.when) for key, parameter in self.parameters.items()})
        sorter.prepare()
        keys: list[str] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            keys += ready
            sorter.done(*ready)
        return keys

    def is_active(self, key: str, values: Mapping[str, Any]) -> bool:
        """Returns True if all conditions of a parameter hold for the values of a trial so far."""
        return all(
            name in values and any(is_same(values[name], one) for one in list_allowed(self.parameters[name], allowed))
            for name, allowed in self.parameters[key].when.items()
        )


def list_allowed(parameter: ParameterRecipe, condition: Any) -> Sequence[Any]:
    """Returns the values of a parameter for which a condition on it holds."""
    # A list is one value if the parameter has values that are lists, such as betas.
    is_list = isinstance(condition, list) and not parameter.includes(condition)
    return condition if is_list else [condition]
