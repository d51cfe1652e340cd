from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headway.core.errors import RecipeError, UsageError
from headway.optim import (
    FTML,
    LAMB,
    LARS,
    LBSGD,
    SOAP,
    GroupRecipe,
    Muon,
    NovoGrad,
    RMSpropSGD,
    Signum,
    build_optimizer,
    eager_optimizer,
    read_optimizer,
    set_lr,
    split_decay,
)
from headway.optim.fused_optimizer import FusedOptimizer
from headway.optim.groups import assign_parameters


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(36, 3)).double()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        images = torch.randn(8, 2, 5, 5, generator=generator, dtype=torch.float64)
        model(images.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def same(left: nn.Module, right: nn.Module) -> None:
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


PLAIN: list[tuple[dict[str, Any], Any]] = [
    ({"name": "sgd", "lr": 0.1}, lambda groups: torch.optim.SGD(groups, momentum=0.9)),
    ({"name": "sgd", "lr": 0.1, "momentum": 0}, lambda groups: torch.optim.SGD(groups)),
    ({"name": "nag", "lr": 0.1, "momentum": 0.8}, lambda groups: torch.optim.SGD(groups, momentum=0.8, nesterov=True)),
    ({"name": "adamw", "lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6},
     lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.99), eps=1e-6)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "plain"), PLAIN)
def test_the_fused_optimizer_walks_as_the_plain_one(options: dict[str, Any], plain: Any) -> None:
    groups = [{"match": "bias", "lr_scale": 3, "weight_decay": 0}, {"match": ".*"}]
    recipe = read_optimizer(**options, weight_decay=0.01, groups=groups)
    model, reference = net(), net()
    optimizer = build_optimizer(recipe, model)
    assert all(group["fused"] for group in optimizer.param_groups)
    biases, others = [], []
    for name, parameter in reference.named_parameters():
        (biases if "bias" in name else others).append(parameter)
    other = plain([
        {"params": biases, "lr": recipe.lr * 3, "weight_decay": 0},
        {"params": others, "lr": recipe.lr, "weight_decay": 0.01},
    ])  # fmt: skip
    steps(model, optimizer, 10)
    steps(reference, other, 10)
    same(model, reference)


def test_one_group_of_all_trained_parameters() -> None:
    model = net()
    model[0].requires_grad_(False)
    (group,) = build_optimizer(read_optimizer(name="sgd", lr=0.5, weight_decay=0.1), model).param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in [*model[1].parameters(), *model[4].parameters()]]
    assert (group["name"], group["lr"], group["lr_scale"], group["weight_decay"]) == ("all", 0.5, 1.0, 0.1)
    with pytest.raises(RecipeError, match="no parameter to train"):
        build_optimizer(read_optimizer(name="sgd", lr=0.5), model.requires_grad_(False))


def test_groups_carry_their_own_scale_and_decay() -> None:
    groups = (GroupRecipe(match="^1", lr_scale=64, weight_decay=0), GroupRecipe(match="weight|bias"))
    optimizer = build_optimizer(read_optimizer(name="nag", lr=2, weight_decay=0.1, groups=groups), net())
    assert [group["name"] for group in optimizer.param_groups] == ["^1", "weight|bias"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == [128, 2]
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [16, 0.25]


names = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
patterns = st.lists(st.sampled_from(["a", "b", "^a", r"\.", "a.*b", "ab|ba", "b$", ".*", "c"]), min_size=1, max_size=4)


@given(names, patterns)
def test_every_parameter_is_in_the_first_group_that_matches(names: list[str], patterns: list[str]) -> None:
    groups = tuple(GroupRecipe(match=pattern) for pattern in patterns)
    first = [next((i for i, pattern in enumerate(patterns) if re.search(pattern, name)), None) for name in names]
    if None in first or set(first) != set(range(len(patterns))):
        with pytest.raises(RecipeError):
            assign_parameters(groups, names)
        return
    result = assign_parameters(groups, names)
    assert tuple(group for group, _ in result) == groups
    for index, (_, taken) in enumerate(result):
        assert taken == [name for name, group in zip(names, first, strict=True) if group == index]


@pytest.mark.parametrize(
    ("matches", "message"),
    [
        (["^0", "^1"], "optimizer.groups: no group matches '4.weight' and 1 more. Add a last group with match: '.*'"),
        (["weight"], "no group matches '0.bias' and 2 more"),
        (["wieght", ".*"], "optimizer.groups.0: 'wieght' matches no trained parameter. Trained parameters are for"),
        ([".*", "bias"], "optimizer.groups.1: earlier groups took every parameter that 'bias' matches. Move it up"),
    ],
)
def test_groups_that_cannot_be_meant(matches: list[str], message: str) -> None:
    groups = tuple(GroupRecipe(match=match) for match in matches)
    with pytest.raises(RecipeError) as caught:
        build_optimizer(read_optimizer(name="sgd", lr=1, groups=groups), net())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamw", "momentum": 0.9}, "belongs to"),
        (
            {"name": "sgd", "betas": (0.9, 0.99)},
            "belongs to",
        ),
        ({"name": "nag", "eps": 1e-6}, "belongs to"),
        ({"name": "nag", "momentum": 0}, "'nag' needs a momentum above 0. Set momentum: 0.9, or name: sgd"),
        (
            {"name": "lars", "nesterov": True, "momentum": 0},
            "'lars' with nesterov needs a momentum above 0. Set momentum: 0.9, or nesterov: false",
        ),
        ({"name": "muon", "momentum": 0}, "'muon' with nesterov needs a momentum above 0. Set momentum: 0.95, or nest"),
        ({"name": "sgd", "groups": [{"match": "("}]}, "'(' is not a regular expression"),
        ({"name": "sgd", "groups": [{"match": "a", "lr": 1}]}, "Did you mean 'optimizer.groups.0.lr_scale'?"),
        ({"name": "adagrad"}, "'sgd', 'nag', 'adam', 'adamw', 'lars'"),
        ({"name": "lars", "betas": (0.9, 0.99)}, "belongs to"),
        ({"name": "lars", "trust": 0}, "more than 0"),
        ({"name": "lars", "lr_in_momentum": "within"}, "must be true or false, not 'within'"),
        ({"name": "lamb", "clip": True}, "belongs to"),
        ({"name": "adamw", "eps": 0}, "more than 0"),
        ({"name": "lbsgd", "batch_scale": 0}, "at least 1"),
        ({"name": "lbsgd", "warmup": "cubic"}, "'linear', 'power2', 'sqrt' or 'lars'"),
        ({"name": "rmsprop_sgd", "period_epochs": 0}, "more than 0"),
        ({"name": "muon", "lr_rest": 0}, "more than 0"),
        ({"name": "muon", "ns_precision": "fp8"}, "'auto', 'bf16' or 'fp32'"),
        ({"name": "soap", "precondition_every": 0}, "at least 1"),
        ({"name": "soap", "max_dim": -1}, "at least 0"),
        ({"name": "soap", "betas": [0.9, 1.0]}, "less than 1"),
        ({"name": "sgd", "gradient_noise": -1}, "more than 0"),
        ({"name": "sgd", "lr": 0}, "more than 0"),
        ({"name": "sgd", "lr": float("inf")}, "finite"),
        ({"name": "sgd", "momentum": 1}, "less than 1"),
        ({"name": "sgd", "weight_decay": -1}, "at least 0"),
        ({"name": "sgd", "clip_norm": 0}, "more than 0"),
        ({"name": "sgd", "precision": "fp16"}, "'fp32' or 'bf16'"),
        ({"name": "adam", "precision": "bf16"}, "'adam' has no state in bf16. Set name: adamw, or precision: fp32"),
        ({"factory": "a:B", "precision": "bf16"}, "your own optimizer decides how it keeps its state. Remove precis"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_optimizer(**({"lr": 1} | options))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["sgd", "nag", "adamw"])
def test_a_resolved_recipe_shows_what_counts_and_reads_back(name: str) -> None:
    recipe = read_optimizer(name=name, lr=1, groups=[{"match": "a"}])
    shown = recipe.model_dump(mode="json")
    assert ("momentum" in shown, "betas" in shown) == (name != "adamw", name == "adamw")
    assert shown["weight_decay"] == 0
    assert read_optimizer(**shown) == recipe


@pytest.mark.parametrize("name", ["sgd", "nag", "adamw"])
def test_state_goes_on_where_it_was(name: str) -> None:
    recipe = read_optimizer(name=name, lr=0.05, groups=[{"match": "^0"}, {"match": ".*"}])
    model = net()
    optimizer = build_optimizer(recipe, model)
    set_lr(optimizer, 0.01)
    steps(model, optimizer, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert [group["name"] for group in state["param_groups"]] == ["^0", ".*"]
    steps(model, optimizer, 3, seed=2)

    resumed = net(seed=5)
    resumed.load_state_dict(weights)
    other = build_optimizer(recipe, resumed)
    other.load_state_dict(state)
    assert [(group["lr"], group["lr_scale"]) for group in other.param_groups] == [(0.01, 1.0)] * 2
    steps(resumed, other, 3, seed=2)
    for left, right in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["sgd", "nag", "adamw"])
def test_loss_scaling_stays_in_tensors(name: str, device: str) -> None:
    """`grad_scale` divides the gradients and `found_inf` skips the step, both inside the fused step."""
    recipe = read_optimizer(name=name, lr=0.1)
    model, reference = net().float().to(device), net().float().to(device)
    optimizer, plain = build_optimizer(recipe, model), build_optimizer(recipe, reference)
    assert optimizer._step_supports_amp_scaling
    optimizer.grad_scale = torch.tensor(1024.0, device=device)
    # A skipped first step is the usual case, as the first loss scale is too large; another skip comes later.
    for skipped in (True, False, False, True, False):
        for scaled, unscaled in zip(model.parameters(), reference.parameters(), strict=True):
            unscaled.grad = torch.randn_like(unscaled)
            scaled.grad = torch.full_like(scaled, torch.inf) if skipped else unscaled.grad * 1024
        optimizer.found_inf = torch.tensor(float(skipped), device=device)
        optimizer.step()
        if not skipped:
            plain.step()
        for left, right in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", ["sgd", "nag"])
def test_buffers_of_zeros_change_no_bit(name: str) -> None:
    model, reference = net(), net()
    optimizer = build_optimizer(read_optimizer(name=name, lr=0.1), model)
    peer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=name == "nag", fused=True)
    for _ in range(3):
        steps(model, optimizer, 1)
        steps(reference, peer, 1)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


LARGE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # name: (class, options of the recipe, what a group of the optimizer then holds)
    "adam": (eager_optimizer.Adam, {"betas": (0.8, 0.9)}, {"betas": (0.8, 0.9), "eps": 1e-8}),
    "lars": (LARS, {"trust": 0.02, "clip": True, "lr_in_momentum": False, "nesterov": True},
             {"trust": 0.02, "clip": True, "lr_in_momentum": False, "nesterov": True, "eps": 0.0, "momentum": 0.9}),
    "lamb": (LAMB, {}, {"eps": 1e-6, "betas": (0.9, 0.999)}),
    "novograd": (NovoGrad, {"averaging": True}, {"betas": (0.95, 0.98), "averaging": True}),
    "signum": (Signum, {"decoupled_decay": 0.3}, {"decoupled_decay": 0.3, "momentum": 0.9}),
    "ftml": (FTML, {}, {"betas": (0.6, 0.999)}),
    "lbsgd": (LBSGD, {"batch_scale": 4, "warmup": "sqrt", "warmup_epochs": 2},
              {"batch_scale": 4, "warmup": "sqrt", "warmup_epochs": 2.0, "steps_per_epoch": 12.5}),
    "rmsprop_sgd": (RMSpropSGD, {"center_epochs": 3, "lr_rmsprop": 0.125},
                    {"center_epochs": 3.0, "period_epochs": 5.0, "rmsprop": 0.25, "steps_per_epoch": 12.5}),
    "muon": (Muon, {"ns_steps": 3, "normalise": True, "ns_precision": "fp32"},
             {"ns_steps": 3, "normalise": True, "momentum": 0.95, "nesterov": True, "ns_precision": "fp32"}),
    "soap": (SOAP, {"precondition_every": 2, "max_dim": 64, "normalise": True},
             {"precondition_every": 2, "max_dim": 64, "normalise": True, "betas": (0.95, 0.95), "eps": 1e-8}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LARGE))
def test_a_recipe_names_every_optimizer_and_sets_its_options(name: str) -> None:
    kind, options, held = LARGE[name]
    recipe = read_optimizer(**({"name": name, "lr": 0.5, "weight_decay": 0.01} | options))
    assert read_optimizer(**recipe.model_dump(mode="json")) == recipe
    model = net()
    optimizer = build_optimizer(recipe, model, 12.5)
    assert type(optimizer) is kind
    first = optimizer.param_groups[0]
    assert {key: first[key] for key in held} == held
    assert first["name"] == "all"
    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_lr(optimizer, 0.2)
    steps(model, optimizer, 5)
    for parameter, begin in zip(model.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert parameter.ndim == 1 or not torch.equal(parameter, begin)


@pytest.mark.parametrize(
    ("name", "options"),
    [("sgd", {"momentum": 0.8}), ("sgd", {"momentum": 0}), ("nag", {}), ("adamw", {"betas": (0.8, 0.99)})],
)
def test_the_optimizers_of_torch_make_the_same_steps_with_a_state_in_bf16(name: str, options: dict[str, Any]) -> None:
    """Up to its rounding: a step without a state, and one whose state began at 0, differ by that alone."""
    wide, narrow = net().float(), net().float()
    for model, precision in ((wide, "fp32"), (narrow, "bf16")):
        recipe = read_optimizer(name=name, lr=0.01, weight_decay=0.1, precision=precision, **options)
        steps(model, build_optimizer(recipe, model), 1)
    for left, right in zip(wide.parameters(), narrow.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
    optimizer = build_optimizer(read_optimizer(name=name, lr=0.01, precision="bf16", **options), narrow, seed=3)
    assert isinstance(optimizer, FusedOptimizer)
    assert optimizer.rounding is not None
    assert optimizer.rounding.seed == 3


@pytest.mark.parametrize("name", ["lbsgd", "rmsprop_sgd"])
def test_what_counts_in_epochs_needs_their_length(name: str) -> None:
    with pytest.raises(UsageError, match=r"does not know the length of one\. Give it steps_per_epoch"):
        build_optimizer(read_optimizer(name=name, lr=0.1), net())


@pytest.mark.parametrize("name", sorted(LARGE))
def test_a_recipe_has_the_defaults_of_its_class(name: str) -> None:
    recipe = read_optimizer(name=name, lr=0.1)
    defaults = {one.name: one.default for one in inspect.signature(LARGE[name][0]).parameters.values()}
    own = {key: value for key, value in recipe.build_options(0.1).items() if key != "rmsprop"}
    assert own == {key: defaults[key] for key in own}


def test_layer_wise_optimizers_spare_bias_and_norm_from_decay() -> None:
    recipe = read_optimizer(name="lars", lr=0.4, weight_decay=0.01)
    assert recipe.no_decay
    groups = build_optimizer(recipe, net()).param_groups
    assert [group["weight_decay"] for group in groups] == [0.01, 0]
    assert [sorted({parameter.ndim for parameter in group["params"]}) for group in groups] == [[2, 4], [1]]
    everywhere = read_optimizer(name="lars", lr=0.4, weight_decay=0.01, no_decay=False)
    assert [group["weight_decay"] for group in build_optimizer(everywhere, net()).param_groups] == [0.01]

    plain = read_optimizer(name="sgd", lr=0.4, weight_decay=0.01)
    assert [group["weight_decay"] for group in build_optimizer(plain, net()).param_groups] == [0.01]
    asked = read_optimizer(name="sgd", lr=0.4, weight_decay=0.01, no_decay=True)
    assert [group["weight_decay"] for group in build_optimizer(asked, net()).param_groups] == [0.01, 0]


def test_a_groups_own_decay_counts_for_all_of_it() -> None:
    groups = [{"match": "^1", "weight_decay": 0.5}, {"match": ".*", "lr_scale": 3}]
    recipe = read_optimizer(name="lamb", lr=0.4, weight_decay=0.01, groups=groups)
    built = [
        (g["name"], g["weight_decay"], g["lr"], len(g["params"])) for g in build_optimizer(recipe, net()).param_groups
    ]
    assert built == [("^1", 0.5, 0.4, 2), (".*", 0.01, pytest.approx(1.2), 2), (".*", 0, pytest.approx(1.2), 2)]


def test_muon_takes_the_filters_and_sgd_the_rest() -> None:
    options = {"name": "muon", "lr": 0.02, "lr_rest": 0.5, "momentum_rest": 0.8, "weight_decay": 0.1, "no_decay": True}
    optimizer = build_optimizer(read_optimizer(**options), net())
    set_lr(optimizer, 0.01)
    found = [(g["filters"], g["lr"], g["momentum"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(True, 0.01, 0.95, 0.1), (False, 0.25, 0.8, 0.1), (False, 0.25, 0.8, 0.0)]


@pytest.mark.parametrize("freezes", [False, True])
def test_muon_is_refused_where_it_would_step_no_filter(freezes: bool) -> None:
    model = net() if freezes else torch.nn.Linear(3, 2)
    if freezes:
        model[0].requires_grad_(False)
    with pytest.raises(RecipeError, match="the network has none to train") as caught:
        build_optimizer(read_optimizer(name="muon", lr=0.02), model)
    assert caught.value.where == "optimizer.name"


def test_split_decay_takes_names_too_and_nothing_else() -> None:
    names = [[name for name, _ in group["params"]] for group in split_decay(net().named_parameters(), 0.1)]
    assert names == [["0.weight", "4.weight"], ["0.bias", "1.weight", "1.bias", "4.bias"]]
    for make in (LARS, Muon, torch.optim.SGD):
        plain = make(split_decay(net().parameters(), 0.1), lr=0.1)
        named = make(split_decay(net().named_parameters(), 0.1), lr=0.1)
        shapes = [[[p.shape for p in g["params"]] for g in one.param_groups] for one in (plain, named)]
        assert shapes[0] == shapes[1]
        assert [g["weight_decay"] for g in plain.param_groups] == [g["weight_decay"] for g in named.param_groups]
    for wrong, kind in (
        (net(), "Conv2d"),
        (net()[4], "Linear"),
        (net().state_dict(), "str"),
        (torch.zeros(2, 2), "Tensor"),
        ([3], "int"),
    ):
        with pytest.raises(UsageError, match=rf"was given a {kind}\. Give it model\.parameters\(\)"):
            split_decay(wrong, 0.1)  # type: ignore[arg-type]
    for decay in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="split_decay has weight_decay="):
            split_decay(net().parameters(), decay)
