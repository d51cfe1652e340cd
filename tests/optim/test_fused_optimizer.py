"""What holds of every optimizer: equal to its reference, on both ways, and exact when it goes on."""

from __future__ import annotations

import copy
import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests._waits import waits_refused
from tests.optim import _reference as reference
from tests.optim._cases import (
    CASES,
    OF_STATE,
    distance,
    give,
    gradients,
    parameters,
    rates,
    set_rate,
    walk,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway import optim
from headway.checkpoint.checkpoints import Checkpoint, restore, state_of
from headway.core.errors import UsageError
from headway.optim import native

WAYS = [pytest.param(True, id="native"), pytest.param(False, id="torch")]
NAMES = sorted(CASES)
FEW = ["lars, inside", "larc, outside", "lamb", "novograd", "signum", "ftml", "rmsprop_sgd", "lbsgd, sqrt", "muon"]
"""One of each: for what does not depend on the mode."""


def made(name: str, params: list[Tensor], *, fused: bool = True, **more: Any) -> Any:
    kind, _, lr, options = CASES[name]
    return kind(params, lr, **options, fused=fused, **more)


def walked(name: str, kind: torch.dtype, *, fused: bool, channels_last: bool = False) -> tuple[list[Tensor], Any]:
    params = parameters(kind, channels_last=channels_last)
    optimizer = made(name, params, fused=fused)
    walk(optimizer, params, CASES[name][2])
    return params, optimizer


@cache
def walked_reference(name: str) -> list[reference.Reference]:
    _, kind, lr, options = CASES[name]
    peers = [kind(begin.detach().double().numpy(), **options) for begin in parameters()]
    for grads, rate in zip(gradients(), rates(lr), strict=True):
        for peer, grad in zip(peers, grads, strict=True):
            peer.step(grad.float().double().numpy(), rate)
    return peers


@pytest.mark.thin(12)
@pytest.mark.parametrize("fused", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_walk_is_that_of_the_reference(name: str, fused: bool) -> None:
    """20 steps over one recorded sequence of gradients, with a learning rate that moves; weights and state."""
    if fused and not native.is_available():
        pytest.skip("the native core is not built")
    params, optimizer = walked(name, torch.float32, fused=fused, channels_last=True)
    # The terms of Muon's polynomials nearly cancel for the largest singular value, and a filter of one column has no
    # other one; wide filters square theirs.
    tolerance = 1e-5 if "muon" in name else 1e-6
    for parameter, peer in zip(params, walked_reference(name), strict=True):
        assert distance(parameter, peer.w) <= tolerance, parameter.shape
        state = optimizer.state[parameter]
        for key in OF_STATE:
            if key in state:
                assert state[key].dtype == torch.float32
                assert distance(state[key], peer.state[key]) <= 1e-6, (key, parameter.shape)
        if "step" in state:
            assert state["step"] == 20


@pytest.mark.thin(9)
@pytest.mark.parametrize("name", NAMES)
def test_fused_is_unfused(name: str) -> None:
    """In float64, to the rounding of sums."""
    (fused, one), (plain, other) = (walked(name, torch.float64, fused=fused) for fused in (True, False))
    for left, right in zip(fused, plain, strict=True):
        assert distance(left, right.detach().numpy()) <= 1e-12
        assert one.state[left].keys() == other.state[right].keys()
        for key, value in one.state[left].items():
            assert distance(value, other.state[right][key].numpy()) <= 1e-12


TORCH: list[tuple[Any, dict[str, Any], Any]] = [
    (optim.LARS, {"momentum": 0.9, "weight_decay": 0.01, "trust": None, "lr_in_momentum": False},
     lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01)),
    (optim.LARS, {"momentum": 0.9, "trust": None, "lr_in_momentum": False, "nesterov": True},
     lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    (optim.LARS, {"momentum": 0.0, "weight_decay": 0.01, "trust": None},
     lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
    (optim.LAMB, {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1, "layerwise": False},
     lambda p: torch.optim.AdamW(p, 0.1, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1)),
    (optim.RMSpropSGD, {"rmsprop": 0.1, "steps_per_epoch": 1, "center_epochs": 0, "period_epochs": 1e-9},
     lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (optim.Muon, {"filters": False, "momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    (optim.FTML, {"betas": (0.0, 0.99), "eps": 1e-6}, lambda p: torch.optim.Adam(p, 0.1, betas=(0.0, 0.99), eps=1e-6)),
]  # fmt: skip


@pytest.mark.parametrize("fused", WAYS)
@pytest.mark.parametrize(("kind", "options", "peer"), TORCH)
@pytest.mark.thin(5)
def test_with_its_own_part_off_it_is_an_optimizer_of_torch(
    kind: Any, options: dict[str, Any], peer: Any, fused: bool
) -> None:
    params, others = parameters(torch.float64), parameters(torch.float64)
    optimizer, other = kind(params, 0.1, **options, fused=fused), peer(others)
    for one, its in ((optimizer, params), (other, others)):
        if kind is optim.RMSpropSGD:  # its very first step is half RMSprop's: epoch 0 is the centre. One of zeros
            for parameter in its:
                parameter.grad = torch.zeros_like(parameter)
            one.step()
        walk(one, its, 0.1)
    for left, right in zip(params, others, strict=True):
        assert distance(left, right.detach().numpy()) <= 1e-12


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_the_places_of_the_learning_rate_differ_while_it_moves(place: str) -> None:
    """At one rate both are the same; in a warm-up the buffer remembers small steps, or makes them large."""
    walks = {}
    for moving in (False, True):
        for at in ("inside", "outside"):
            params = parameters(torch.float64)
            optimizer = optim.LARS(params, 1.0, trust=0.02, lr_in_momentum=at == "inside")
            for grads, rate in zip(gradients(6), rates(1.0, 6), strict=True):
                give(params, grads)
                set_rate(optimizer, rate if moving else 1.0)
                optimizer.step()
            walks[moving, at] = params
    for one, other in zip(walks[False, "inside"], walks[False, "outside"], strict=True):
        assert distance(one, other.detach().numpy()) <= 1e-12
    assert distance(walks[True, "inside"][1], walks[True, "outside"][1].detach().numpy()) > 1e-3


def scaled(optimizer: Any, params: list[Tensor], name: str, skip: tuple[int, ...] = (), factor: float = 1024.0) -> None:
    """A walk under a loss scale; steps in `skip` come twice, first with infinite gradients and found_inf."""
    optimizer.grad_scale = torch.tensor(factor)
    for number, (grads, rate) in enumerate(zip(gradients(8), rates(CASES[name][2], 8), strict=True)):
        set_rate(optimizer, rate)
        if number in skip:
            give(params, [torch.full_like(grad, torch.inf) for grad in grads])
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
        give(params, grads, factor)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()


@pytest.mark.thin
@pytest.mark.parametrize("fused", WAYS)
@pytest.mark.parametrize("name", FEW)
def test_loss_scale_and_found_inf_stay_tensors_and_a_skipped_step_changes_nothing(name: str, fused: bool) -> None:
    params, peers = parameters(), parameters()
    optimizer, peer = made(name, params, fused=fused), made(name, peers, fused=fused)
    scaled(optimizer, params, name, skip=(0, 3, 4))
    for grads, rate in zip(gradients(8), rates(CASES[name][2], 8), strict=True):
        give(peers, grads)
        set_rate(peer, rate)
        peer.step()
    for left, right in zip(params, peers, strict=True):
        assert distance(left, right.detach().numpy()) <= 2e-6
        for key, value in optimizer.state[left].items():
            assert distance(value, peer.state[right][key].numpy()) <= 2e-6, key
            assert value.isfinite().all()


class NoReads(TorchDispatchMode):
    """Refuses what waits for a device: a tensor's value as a Python number, or in an `if`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.nonzero.default,
        ), func
        return func(*args, **(kwargs or {}))


@pytest.mark.thin(15)
@pytest.mark.parametrize("fused", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_no_step_reads_a_value(name: str, fused: bool) -> None:
    params = parameters()
    optimizer = made(name, params, fused=fused)
    rate = torch.tensor(CASES[name][2])
    found = torch.tensor(0.0)
    for step, grads in enumerate(gradients(4)):
        give(params, grads)
        if step > 1:
            set_rate(optimizer, rate)  # type: ignore[arg-type]
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), found
        with NoReads():
            optimizer.step()
    with pytest.raises(AssertionError), NoReads():
        float(rate)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_no_step_waits_for_the_device(name: str) -> None:
    params = [torch.nn.Parameter(one.detach().cuda()) for one in parameters()]
    optimizer = made(name, params)
    for step, grads in enumerate(gradients(4)):
        give(params, [grad.cuda() for grad in grads])
        if step == 2:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0, device="cuda"), torch.zeros((), device="cuda")
        with waits_refused():
            optimizer.step()
    peers = parameters()
    peer = made(name, peers, fused=False)
    for step, grads in enumerate(gradients(4)):
        give(peers, grads, 0.5 if step > 1 else 1.0)
        peer.step()
    for left, right in zip(params, peers, strict=True):
        assert distance(left.cpu(), right.detach().numpy()) <= (0.05 if "muon" in name else 1e-5)  # bf16 there


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_captured_in_a_graph(name: str) -> None:
    """Replayed with gradients and a rate that changed in place."""
    params, peers = ([torch.nn.Parameter(one.detach().cuda()) for one in parameters()] for _ in range(2))
    rate = torch.tensor(CASES[name][2], device="cuda")
    optimizer, peer = made(name, params), made(name, peers)
    recorded = [[grad.float().cuda() for grad in grads] for grads in gradients(5)]
    for one, its in ((optimizer, params), (peer, peers)):
        give(its, recorded[0])
        one.step()
    set_rate(optimizer, rate)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    saved = [parameter.detach().clone() for parameter in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    with torch.cuda.graph(graph):
        optimizer.step()
    for parameter, value in zip(params, saved, strict=True):
        parameter.data.copy_(value)
    # A state dict counts parameters group by group, and Muon makes groups of its own.
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(in_groups):
        for key, value in state.get(index, {}).items():
            optimizer.state[parameter][key].copy_(value)
    for step, grads in enumerate(recorded[1:], 1):
        lr = CASES[name][2] / step
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad.copy_(grad)
        rate.fill_(lr)
        graph.replay()
        give(peers, grads)
        set_rate(peer, lr)
        peer.step()
    for left, right in zip(params, peers, strict=True):
        assert distance(left.cpu(), right.detach().cpu().numpy()) <= 1e-5


@pytest.mark.thin
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_it_goes_on_exactly_where_it_was(name: str, kind: torch.dtype) -> None:
    """state_dict through a file into a fresh optimizer, in the middle of a run: bit for bit."""
    params = parameters(kind, channels_last=True)
    optimizer = made(name, params)
    walk(optimizer, params, CASES[name][2], steps=5)
    weights = [parameter.detach().clone() for parameter in params]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    walk(optimizer, params, CASES[name][2], steps=5, seed=2)

    file.seek(0)
    others = [torch.nn.Parameter(weight.clone()) for weight in weights]
    other = made(name, others)
    other.load_state_dict(torch.load(file, weights_only=True))
    for left, right in zip(params, others, strict=True):
        for key, value in other.state[right].items():
            assert value.dtype == optimizer.state[left][key].dtype != torch.bfloat16
            assert value.shape != right.shape or value.stride() == right.stride()
    walk(other, others, CASES[name][2], steps=5, seed=2)
    for left, right in zip(params, others, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", FEW)
def test_our_checkpoints_hold_all_of_its_state(name: str) -> None:
    """As a run goes on after a crash: bit for bit."""

    def network(seed: int) -> tuple[torch.nn.Module, list[Tensor], Any]:
        model = torch.nn.ParameterList(parameters(channels_last=True, seed=seed))
        params = list(model)
        return model, params, made(name, params)

    model, params, optimizer = network(0)
    walk(optimizer, params, CASES[name][2], steps=5)
    tensors = {key: value.clone() for key, value in state_of(model, optimizer).items()}
    walk(optimizer, params, CASES[name][2], steps=5, seed=2)
    other_model, others, other = network(1)
    restore(Checkpoint(Path("memory"), 5, {}, tensors), other_model, other)
    walk(other, others, CASES[name][2], steps=5, seed=2)
    assert all(torch.equal(left, right) for left, right in zip(params, others, strict=True))


@pytest.mark.thin
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FEW)
def test_state_of_half_weights_is_float32(name: str, kind: torch.dtype) -> None:
    """One step from the same weights: what the step of float32 gives, rounded once."""
    params = parameters(kind)
    wide = [torch.nn.Parameter(parameter.detach().float()) for parameter in params]
    optimizer, other = made(name, params), made(name, wide, fused=False)
    (grads,) = gradients(1)
    give(params, grads)
    for parameter, half in zip(wide, params, strict=True):
        parameter.grad = half.grad.float()  # type: ignore[union-attr]
    optimizer.step()
    other.step()
    for left, right in zip(params, wide, strict=True):
        torch.testing.assert_close(left, right.to(kind), rtol=0, atol=0)
        for key, value in optimizer.state[left].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, other.state[right][key])


@pytest.mark.thin
@pytest.mark.parametrize("fused", WAYS)
@pytest.mark.parametrize("name", FEW)
def test_parameters_without_a_gradient_stay_as_they_are(name: str, fused: bool) -> None:
    params = parameters()
    optimizer = made(name, params, fused=fused)
    before = params[1].detach().clone()
    for grads in gradients(4):
        give(params, grads)
        params[1].grad = None
        optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state or not optimizer.state[params[1]]
    assert not torch.equal(params[0], parameters()[0])


@pytest.mark.thin
@pytest.mark.parametrize("fused", WAYS)
@pytest.mark.parametrize("name", FEW)
def test_zero_gradients_and_zero_weights_are_no_trouble(name: str, fused: bool) -> None:
    params = parameters()
    optimizer = made(name, params, fused=fused)
    params[0].data.zero_()
    for grads in gradients(3):
        give(params, grads)
        params[1].grad = torch.zeros_like(params[1])
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in params)


@pytest.mark.parametrize("name", FEW)
def test_threads_and_memory_order_do_not_change_a_walk(name: str) -> None:
    """Gradients of another memory format than the weights' take the other way, for that tensor alone."""
    walks = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            walks.append(parameters(channels_last=True))
            walk(made(name, walks[-1]), walks[-1], CASES[name][2], steps=6)
    finally:
        torch.set_num_threads(before)
    if name != "muon":  # its matrix products are the libraries'
        assert all(torch.equal(left, right) for left, right in zip(*walks, strict=True))

    strided = parameters(channels_last=True)
    optimizer = made(name, strided)
    for grads, rate in zip(gradients(6), rates(CASES[name][2], 6), strict=True):
        give(strided, grads)
        strided[1].grad = strided[1].grad.contiguous()  # type: ignore[union-attr]
        set_rate(optimizer, rate)
        optimizer.step()
    for left, right in zip(walks[0], strided, strict=True):
        assert distance(left, right.detach().numpy()) <= 2e-6


def test_nothing_of_a_step_is_kept_for_the_next_but_the_state() -> None:
    """Weights that were exchanged, and an optimizer that was copied, step from where they are."""
    params = parameters()
    optimizer = optim.LAMB(params, 0.1)
    walk(optimizer, params, 0.1, steps=3)
    for parameter in params:
        parameter.data = parameter.data.clone() + 1
    others, other = copy.deepcopy((params, optimizer))
    walk(optimizer, params, 0.1, steps=2)
    walk(other, others, 0.1, steps=2)
    assert all(torch.equal(left, right) for left, right in zip(params, others, strict=True))


def test_groups_have_their_own_options_and_a_closure_is_called() -> None:
    params = parameters()
    optimizer = optim.LARS([{"params": params[:2], "lr": 0.5, "trust": None}, {"params": params[2:]}], 0.1)
    assert [(group["lr"], group["trust"]) for group in optimizer.param_groups] == [(0.5, None), (0.1, 0.001)]
    (grads,) = gradients(1)

    def closure() -> float:
        assert torch.is_grad_enabled()
        give(params, grads)
        return 7.0

    assert optimizer.step(closure) == 7.0
    torch.testing.assert_close(params[0], parameters()[0] - 0.5 * grads[0].float())


def test_a_grad_scaler_hands_over_its_tensors() -> None:
    params = parameters()
    optimizer = optim.LARS(params, 0.1, trust=None, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    (grads,) = gradients(1)
    scaler.scale(torch.zeros(()))
    give(params, grads, 8.0)
    with NoReads():
        scaler.step(optimizer)
    torch.testing.assert_close(params[0], parameters()[0] - 0.1 * grads[0].float())
    give(params, grads)
    params[3].grad[0] = torch.nan  # type: ignore[index]
    before = [parameter.detach().clone() for parameter in params]
    scaler.update()
    scaler.step(optimizer)
    assert all(torch.equal(left, right) for left, right in zip(params, before, strict=True))


LIMITS = [
    (optim.LARS, {"lr": -1.0}, "LARS has lr=-1.0. Give it a finite number of at least 0"),
    (optim.LARS, {"lr": 1.0, "momentum": 1.0}, "LARS has momentum=1.0. Give it a finite number in [0, 1)"),
    (optim.LARS, {"lr": 1.0, "trust": float("nan")}, "LARS has trust=nan"),
    (optim.LARS, {"lr": 1.0, "lr_in_momentum": "outside"}, "LARS has lr_in_momentum='outside'. Set it to True or"),
    (optim.LARS, {"lr": 1.0, "trust": True}, "LARS has trust=True. Give it the trust coefficient"),
    (optim.LAMB, {"lr": 1.0, "betas": (0.9, 1.0)}, "LAMB has betas[1]=1.0"),
    (optim.LAMB, {"lr": 1.0, "betas": 0.9}, "LAMB has betas=0.9. Give it two numbers in [0, 1)"),
    (optim.LAMB, {"lr": 1.0, "betas": (0.9, 0.99, 0.999)}, "LAMB has betas=(0.9, 0.99, 0.999). Give it two numbers"),
    (optim.NovoGrad, {"lr": 1.0, "betas": ("a", 0.9)}, "NovoGrad has betas[0]='a'. Give it a finite number in [0, 1)"),
    (optim.LARS, {"lr": "0.1"}, "LARS has lr='0.1'. Give it a finite number"),
    (optim.LBSGD, {"lr": 1.0}, "LBSGD counts in epochs, and does not know the length of one. Give it steps_per_epoch"),
    (optim.RMSpropSGD, {"lr": 1.0, "rmsprop": 0.1}, "RMSpropSGD counts in epochs"),
    (optim.RMSpropSGD, {"lr": 1.0, "steps_per_epoch": 9}, "Give it rmsprop, for example 3e-4 / lr"),
    (optim.NovoGrad, {"lr": 1.0, "eps": -1e-8}, "NovoGrad has eps=-1e-08"),
    (optim.Signum, {"lr": 1.0, "decoupled_decay": -1.0}, "Signum has decoupled_decay=-1.0"),
    (optim.FTML, {"lr": float("inf")}, "FTML has lr=inf"),
    (optim.RMSpropSGD, {"lr": 1.0, "rmsprop": 0.1, "steps_per_epoch": 0}, "RMSpropSGD has steps_per_epoch=0"),
    (optim.LBSGD, {"lr": 1.0, "steps_per_epoch": 1, "batch_scale": 1.5}, "LBSGD has batch_scale=1.5"),
    (optim.LBSGD, {"lr": 1.0, "steps_per_epoch": 1, "warmup": "cubic"}, "Set it to one of linear, power2, sqrt, lars"),
    (optim.Muon, {"lr": 1.0, "ns_steps": 0}, "Muon has ns_steps=0. Give it a whole number of at least 1"),
    (optim.Muon, {"lr": 1.0, "ns_steps": 2.5}, "Muon has ns_steps=2.5. Give it a whole number of at least 1"),
    (optim.Muon, {"lr": 1.0, "ns_precision": "fp8"}, "Muon has ns_precision='fp8'. Set it to one of auto, bf16, fp32"),
    (optim.Muon, {"lr": 1.0, "filters": True}, "Muon has a parameter of shape (20000,) among its filters"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "message"), LIMITS)
def test_options_that_cannot_be_meant(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        kind(parameters(), **options)
    assert message in str(caught.value)


def test_what_is_not_real_and_dense_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LARS takes dense real parameters, and one is torch.complex64"):
        optim.LARS([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], 0.1)
    optimizer = optim.LAMB(parameters(), 0.1)
    with pytest.raises(UsageError, match="one is sparse"):
        optimizer.add_param_group({"params": [torch.zeros(2).to_sparse()]})
    assert len(optimizer.param_groups) == 1
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"LAMB takes no sparse gradients. Set sparse=False in that layer"):
        optim.LAMB(embedding.parameters(), 0.1).step()
