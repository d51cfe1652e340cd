"""The user's own optimizer by import path, and the trial that tells whether a run can rely on it.

The trial steps small stand-ins of the parameters, which takes milliseconds. It finds what would otherwise be silent: a
learning rate that is ignored, weights that are replaced, and a state that a checkpoint does not hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.core.errors import CheckpointError, RecipeError, UsageError
from headway.core.user_code import check_arguments, import_user_object, make_absolute, name_user_errors
from headway.optim.groups import Group
from headway.optim.recipe_base import OptimizerRecipe

# Importing torch takes seconds, and a recipe is validated without it.
if TYPE_CHECKING:
    import torch

FACTORY, ARGS = "optimizer.factory", "optimizer.args"
GIVEN_KEYS = ("params", "name", "lr", "lr_scale", "weight_decay")
"""Keys of the parameter groups that a recipe gives to an optimizer."""
TRIAL_STEPS = 6
"""Steps of a trial; after half of them the state is saved and restored."""
TRIAL_SIDE = 16
"""Longest side of a stand-in: as long as most blocks of optimizers with blocks, and short enough for milliseconds."""


class OwnOptimizerRecipe(OptimizerRecipe):
    """Your own optimizer: any torch.optim.Optimizer whose step needs no closure."""

    name: Literal["own"] = "own"
    factory: str
    """Import path of a torch.optim.Optimizer class, or of a function that returns one: `package.module:Name`, or
    `file.py:Name` beside the recipe. It is called as factory(groups, lr=lr, **args). `name` is then not needed."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory, for example {betas: [0.9, 0.99]}."""

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name in ("lr", "weight_decay"):
            if name in args:
                raise ValueError(f"{name} is set for each parameter group: write it as optimizer.{name}, not in args")
        return args

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        # `momentum` beside `factory` is an option of the user's optimizer in the wrong place.
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"{name!r} is no key beside factory. Write args: {{{name}: {value[name]}}}")
        return value

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.precision == "bf16":
            raise ValueError("your own optimizer decides how it keeps its state. Remove precision")
        return self

    def resolve_paths(self, base: Path) -> Self:
        return self.model_copy(update={"factory": make_absolute(self.factory, base)})

    def make(self, groups: list[Group], lr: float, steps_per_epoch: float | None) -> torch.optim.Optimizer:
        factory = self._import_factory(groups, lr)
        try_optimizer(lambda stand_ins: self._call(factory, stand_ins, lr), groups, self.factory)
        return self._call(factory, groups, lr)

    def measure_state_share(self, optimizer: torch.optim.Optimizer) -> float | None:
        from headway.optim.saved_state import VALUES, collect_state

        groups = [{key: group[key] for key in GIVEN_KEYS} for group in optimizer.param_groups]
        lr = max(group["lr"] for group in groups)
        with _fork_generators(groups):
            stand_ins = _build_stand_ins(groups, [])
            stepped = self._call(self._import_factory(stand_ins, lr), stand_ins, lr)
            _step(stepped, stand_ins, self.factory, range(1))
            state = collect_state(stepped, _name_weights(stand_ins)).items()
        state_bytes = sum(value.numel() * value.element_size() for name, value in state if name != VALUES)
        return state_bytes / sum(weight.numel() * weight.element_size() for weight in _list_weights(stand_ins))

    def _import_factory(self, groups: list[Group], lr: float) -> Callable[..., Any]:
        factory = import_user_object(self.factory, base=Path(), what=FACTORY)
        if not callable(factory):
            raise RecipeError(f"{self.factory!r} is a {type(factory).__name__}, no class or function", where=FACTORY)
        # Before it is built: LBFGS refuses parameter groups first, with a sentence about them.
        if isinstance(factory, type):
            _refuse_closure(factory, self.factory)
        check_arguments(factory, self.factory, groups, lr=lr, arguments=self.args, where=ARGS)
        return factory  # type: ignore[no-any-return]

    def _call(self, factory: Callable[..., Any], groups: list[Group], lr: float) -> torch.optim.Optimizer:
        from torch.optim import Optimizer

        # Copies, because an optimizer writes its options into the groups that it is given.
        with name_user_errors(self.factory, FACTORY):
            optimizer = factory([dict(group) for group in groups], lr=lr, **self.args)
        if not isinstance(optimizer, Optimizer):
            what = f"{self.factory!r} gave a {type(optimizer).__name__}, no torch.optim.Optimizer"
            raise RecipeError(what, where=FACTORY, fix="Name its class, or a function that returns it.")
        _refuse_closure(type(optimizer), self.factory)
        if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
            what = f"{self.factory!r} has to be told when training and evaluation begin (train, eval), and is not here"
            raise RecipeError(what, where=FACTORY, fix="Take another one; model.ema averages weights for evaluations.")
        if any(group["weight_decay"] for group in groups) and "weight_decay" not in optimizer.defaults:
            what = f"{self.factory!r} has no option weight_decay"
            raise RecipeError(what, where="optimizer.weight_decay", fix="Remove it, also from optimizer.groups.")
        return optimizer

    @property
    def is_layer_wise(self) -> bool:
        # Nothing is known of it, so a large batch causes no warning.
        return True

    @property
    def displayed_momentum(self) -> float | None:
        betas = self.args.get("betas")
        found = betas[0] if isinstance(betas, list | tuple) and betas else self.args.get("momentum")
        return found if isinstance(found, int | float) else None


def _refuse_closure(kind: type, path: str) -> None:
    """Raises RecipeError if the step of an optimizer's class needs a closure."""
    from torch.optim import LBFGS

    parameters = list(inspect.signature(kind.step).parameters.values())[1:] if hasattr(kind, "step") else []
    needs_closure = any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        for one in parameters
    )
    if needs_closure or issubclass(kind, LBFGS):
        what = f"the step of {path!r} needs a closure that computes the loss again, and a step here computes it once"
        raise RecipeError(what, where=FACTORY, fix="Take an optimizer whose step() needs no argument.")


def try_optimizer(build: Callable[[list[Group]], torch.optim.Optimizer], groups: list[Group], path: str) -> None:
    """Steps an optimizer on small stand-ins of the parameters, and continues it from its saved state.

    Args:
        build: builds the optimizer for parameter groups.
        groups: the groups of the network's parameters, which stay as they are.
        path: import path of the optimizer, for errors.

    Raises:
        RecipeError: it does not step its parameters in place, ignores the learning rate of its groups, or does not
            continue exactly from its state.
        UserCodeError: it failed; the cause carries its traceback.
    """
    import torch

    from headway.optim.saved_state import collect_state, read_values, restore_state

    half = TRIAL_STEPS // 2
    with _fork_generators(groups):
        first = _build_stand_ins(groups, [])
        before = [weight.detach().clone() for weight in _list_weights(first)]
        places = [weight.data_ptr() for weight in _list_weights(first)]
        optimizer = build(first)
        _expect_same_parameters(optimizer, first, path)
        _step(optimizer, first, path, range(half))
        middle = [weight.detach().clone() for weight in _list_weights(first)]
        second = _build_stand_ins(groups, middle)
        continued = build(second)
        try:
            tensors = {name: value.clone() for name, value in collect_state(optimizer, _name_weights(first)).items()}
            restore_state(continued, _name_weights(second), tensors, read_values(continued, tensors, path))
        except (UsageError, CheckpointError, TypeError, ValueError, KeyError) as error:
            fix = "Keep only tensors, numbers, texts, lists and dictionaries in its state and groups."
            raise RecipeError(f"its state cannot be saved and restored ({error})", where=FACTORY, fix=fix) from error
        _step(optimizer, first, path, range(half, TRIAL_STEPS))
        _step(continued, second, path, range(half, TRIAL_STEPS))
        # Other parameters in the same groups, as fp32 masters take the place of 16-bit weights.
        slower = build(_build_stand_ins(groups, []))
        third = _build_stand_ins(groups, [])
        _exchange_parameters(slower, third)
        _step(slower, third, path, range(TRIAL_STEPS), factor=0.5)
    if [weight.data_ptr() for weight in _list_weights(first)] != places:
        what = f"{path!r} puts new memory behind its parameters in a step"
        raise RecipeError(what, where=FACTORY, fix="Let it change them in place, for example by parameter.add_(...).")
    if all(map(torch.equal, _list_weights(first), before)):
        what = f"{path!r} moved no parameter in {TRIAL_STEPS} steps"
        raise RecipeError(what, where=FACTORY, fix="Let its step() change each parameter in place by its .grad.")
    if all(map(torch.equal, _list_weights(third), before)):
        what = f"{path!r} steps other parameters than those in its param_groups"
        raise RecipeError(what, where=FACTORY, fix='Let its step() go through group["params"].')
    if all(map(torch.equal, _list_weights(first), _list_weights(third))):
        what = f"{path!r} takes the same steps whatever lr its parameter groups have, so no schedule would reach it"
        raise RecipeError(what, where=FACTORY, fix='Let it read group["lr"] in each step.')
    if not all(map(torch.equal, _list_weights(first), _list_weights(second))):
        what = f"{path!r} does not continue exactly from its state, as a resumed run must"
        fix = "Keep all that changes from step to step in self.state[parameter] or in a parameter group."
        raise RecipeError(what, where=FACTORY, fix=fix)


@contextmanager
def _fork_generators(groups: list[Group]) -> Iterator[None]:
    """Leaves torch's generators as they were, also that of the parameters' GPU."""
    import torch

    devices = {weight.device for group in groups for weight in group["params"] if weight.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield


def _list_weights(groups: list[Group]) -> list[torch.Tensor]:
    return [weight for group in groups for weight in group["params"]]


def _name_weights(groups: list[Group]) -> list[tuple[str, torch.Tensor]]:
    return [(str(index), weight) for index, weight in enumerate(_list_weights(groups))]


def _build_stand_ins(groups: list[Group], values: list[torch.Tensor]) -> list[Group]:
    """Returns the groups with one small parameter for each number of dimensions.

    Args:
        values: values of the stand-ins; empty: numbers between -1 and 1, zeros among them, which any step moves.
    """
    import torch

    remaining, out = iter(values), []
    for group in groups:
        weights = {}
        for weight in group["params"]:
            # Optimizers choose by the number of dimensions, as Muon does, so one of each kind is enough.
            if weight.ndim in weights:
                continue
            if values:
                value = next(remaining).clone()
            else:
                shape = [min(side, TRIAL_SIDE) for side in weight.shape]
                value = _draw_pattern(shape, weight, 0)
            weights[weight.ndim] = torch.nn.Parameter(value)
        out.append({**group, "params": list(weights.values())})
    return out


def _draw_pattern(shape: list[int], like: torch.Tensor, step: int) -> torch.Tensor:
    """Returns numbers in [-1, 1] that depend on place and step."""
    import torch

    count = int(torch.Size(shape).numel())
    numbers = torch.arange(count, device=like.device)
    # Primes, so that the numbers of two steps or two rows differ.
    return (((numbers * 7 + step * 5 + 3) % 23 - 11) / 11).to(like.dtype).reshape(shape)


def _expect_same_parameters(optimizer: torch.optim.Optimizer, groups: list[Group], path: str) -> None:
    held = {id(weight) for weight in _list_weights(optimizer.param_groups)}
    if held != {id(weight) for weight in _list_weights(groups)}:
        what = f"{path!r} does not hold the parameters that it was given in its param_groups"
        raise RecipeError(what, where=FACTORY, fix="Pass the groups on to torch.optim.Optimizer.__init__ unchanged.")


def _exchange_parameters(optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
    for held, given in zip(optimizer.param_groups, groups, strict=True):
        for old, new in zip(held["params"], given["params"], strict=True):
            # The state is keyed by the parameter, so it moves along.
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
        held["params"] = list(given["params"])


def _step(
    optimizer: torch.optim.Optimizer, groups: list[Group], path: str, steps: range, *, factor: float = 1.0
) -> None:
    """Makes some steps with gradients that depend on the number of the step.

    Args:
        factor: factor on the learning rate.
    """
    import torch

    for step in steps:
        for group, given in zip(optimizer.param_groups, groups, strict=False):
            # A learning rate that falls, as a schedule sets it.
            group["lr"] = given["lr"] * factor * (1 - step / (2 * TRIAL_STEPS))
        for weight in _list_weights(groups):
            weight.grad = _draw_pattern(list(weight.shape), weight, step + 1)
        # An optimizer may draw random numbers: the compared ones must draw the same.
        torch.manual_seed(step)
        with name_user_errors(path, FACTORY):
            optimizer.step()
