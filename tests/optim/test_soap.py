"""SOAP: equal to its reference, turned with its gradients, AdamW without bases, and exact when it goes on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optim import _reference as reference
from tests.optim._cases import distance, rates
from torch import Tensor, nn

from headway import optim
from headway.checkpoint.checkpoints import Checkpoint, restore, state_of
from headway.core.errors import UsageError
from headway.optim.soap import compute_basis, improve_basis

SHAPES = ((8, 8), (6, 2, 3, 1), (5, 40), (40, 5), (30, 50), (7,))
"""Square, a square filter, a long side on either side, two long ones, a bias. Where G G^T has no full rank its
eigenvectors are not unique, so no two ways to compute them agree."""
OPTIONS: dict[str, Any] = {
    "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "precondition_every": 3, "max_dim": 20, "normalise": False,
}  # fmt: skip


def parameters(kind: torch.dtype = torch.float64, seed: int = 0, shapes: Any = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    weights = [one.to(memory_format=torch.channels_last) if one.ndim == 4 else one for one in weights]
    return [nn.Parameter(weight.to(kind)) for weight in weights]


def gradients(steps: int, seed: int = 1, shapes: Any = SHAPES) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    way = draw()
    return [[one + noise for one, noise in zip(way, draw(), strict=True)] for _ in range(steps)]


def walk(
    optimizer: torch.optim.Optimizer, params: list[Tensor], recorded: list[list[Tensor]], lr: float = 0.05
) -> None:
    for grads, rate in zip(recorded, rates(lr, len(recorded)), strict=True):
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(grad)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_a_walk_is_that_of_the_reference(kind: torch.dtype, tolerance: float, normalise: bool) -> None:
    """20 steps with a learning rate that moves, weights and state; a basis changes six times."""
    options = OPTIONS | {"normalise": normalise}
    params, recorded = parameters(kind), gradients(20)
    optimizer = optim.SOAP(params, 0.05, **options)
    peers = [reference.SOAP(begin.detach().double().numpy(), **options) for begin in params]
    walk(optimizer, params, recorded)
    for grads, rate in zip(recorded, rates(0.05), strict=True):
        for peer, grad in zip(peers, grads, strict=True):
            peer.step(grad.to(kind).double().numpy(), rate)
    for parameter, peer in zip(params, peers, strict=True):
        assert distance(parameter, peer.w) <= tolerance, parameter.shape
        state = optimizer.state[parameter]
        assert state.pop("step") == 20
        assert state.keys() == peer.state.keys()
        for key, value in state.items():
            assert value.dtype == kind
            # The sign of an eigenvector is arbitrary.
            expected = abs(peer.state[key]) if key.endswith("basis") else peer.state[key]
            # Eigenvectors are less exact than the steps, which do not depend on those of alike eigenvalues.
            assert distance(value.abs() if key.endswith("basis") else value, expected) <= 100 * tolerance, key


def test_without_bases_it_is_adamw() -> None:
    params, peers = parameters(), parameters()
    options: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
    walk(optim.SOAP(params, 0.05, max_dim=0, **options), params, gradients(12))
    walk(torch.optim.AdamW(peers, 0.05, **options), peers, gradients(12))
    for parameter, peer in zip(params, peers, strict=True):
        assert distance(parameter, peer.detach().numpy()) <= 1e-12


def test_its_steps_turn_with_the_gradients() -> None:
    """Gradients U G V^T give the step U S V^T, as no choice of coordinates is better than another one to SOAP."""
    shapes = ((8, 8), (5, 40), (40, 5))
    turns = [[torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q for size in shape] for shape in shapes]
    # A long side has no basis, so Adam's coordinates there are those of the weights.
    turns[1][1], turns[2][0] = torch.eye(40, dtype=torch.float64), torch.eye(40, dtype=torch.float64)
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    others = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    recorded = gradients(12, shapes=shapes)
    turned = [[u @ one @ v.mT for one, (u, v) in zip(grads, turns, strict=True)] for grads in recorded]
    options = OPTIONS | {"weight_decay": 0.0}
    walk(optim.SOAP(params, 0.05, **options), params, recorded)
    walk(optim.SOAP(others, 0.05, **options), others, turned)
    for one, other, (u, v) in zip(params, others, turns, strict=True):
        assert distance(other, (u @ one.detach() @ v.mT).numpy()) <= 1e-8


def test_a_basis_comes_near_the_eigenvectors_and_stays_orthogonal() -> None:
    vectors = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64)).Q
    covariance = (vectors * 2.0 ** -torch.arange(9, dtype=torch.float64)) @ vectors.mT
    basis = torch.eye(9, dtype=torch.float64)
    for _ in range(60):
        basis, order = improve_basis(covariance, basis)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(9, dtype=torch.float64))
    assert order.tolist() == list(range(9)), "the largest comes first"
    torch.testing.assert_close((vectors.mT @ basis).abs(), torch.eye(9, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_a_batch_of_parameters_on_a_gpu_steps_as_each_alone() -> None:
    shapes = (*SHAPES, *SHAPES[:2])
    params = parameters(shapes=shapes)
    others = [nn.Parameter(parameter.detach().cuda()) for parameter in params]
    recorded = gradients(8, shapes=shapes)
    walk(optim.SOAP(params, 0.05, **OPTIONS), params, recorded)
    walk(optim.SOAP(others, 0.05, **OPTIONS), others, recorded)
    for left, right in zip(params, others, strict=True):
        assert distance(right.cpu(), left.detach().numpy()) <= 1e-8


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_it_goes_on_exactly_where_it_was(count: int, kind: torch.dtype, tmp_path: Path) -> None:
    """Through torch's state_dict and through our checkpoints, before and after a change of the bases: bit for bit."""
    model = nn.ParameterList(parameters(kind))
    params = list(model)
    optimizer = optim.SOAP(params, 0.05, **OPTIONS)
    walk(optimizer, params, gradients(count))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    tensors = {key: value.clone() for key, value in state_of(model, optimizer).items()}
    file.seek(0)
    weights = [parameter.detach().clone() for parameter in params]
    walk(optimizer, params, gradients(7, seed=2))

    loaded = [nn.Parameter(weight) for weight in weights]
    other = optim.SOAP(loaded, 0.05, **OPTIONS)
    other.load_state_dict(torch.load(file, weights_only=True))
    walk(other, loaded, gradients(7, seed=2))
    restored = nn.ParameterList(parameters(kind, seed=5))
    third = optim.SOAP(list(restored), 0.05, **OPTIONS)
    restore(Checkpoint(Path("memory"), count, {}, tensors), restored, third)
    walk(third, list(restored), gradients(7, seed=2))
    for left, middle, right in zip(params, loaded, restored, strict=True):
        assert torch.equal(left, middle)
        assert torch.equal(left, right)


def test_parameters_that_begin_later_count_their_own_steps() -> None:
    params = parameters()
    optimizer = optim.SOAP(params, 0.05, **OPTIONS)
    before = [parameter.detach().clone() for parameter in params]
    for number, grads in enumerate(gradients(3)):
        for place, (parameter, grad) in enumerate(zip(params, grads, strict=True)):
            parameter.grad = grad if number == 2 or place else None
        optimizer.step()
    assert [int(optimizer.state[one]["step"]) for one in params] == [1, 3, 3, 3, 3, 3]
    assert [torch.equal(one, begin) for one, begin in zip(params, before, strict=True)] == [True, *[False] * 5]


def test_the_count_of_a_parameter_without_dimensions_lies_on_the_host() -> None:
    """Each step reads it. The device "meta" stands for a GPU: what lies there cannot be read at all."""
    parameter = nn.Parameter(torch.zeros((), device="meta"))
    parameter.grad = torch.zeros((), device="meta")
    optimizer = optim.SOAP([parameter], 0.05)
    for _ in range(2):
        optimizer.step()
    assert int(optimizer.state[parameter]["step"]) == 2


def test_where_lapack_does_not_converge_in_float32_it_does_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    covariance = covariance @ covariance.mT
    expected, decompose = compute_basis(covariance), torch.linalg.eigh

    def fail_in_float32(matrix: Tensor) -> Any:
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fail_in_float32)
    found = compute_basis(covariance)
    assert found.dtype == torch.float32
    # An eigenvector has no sign of its own.
    torch.testing.assert_close((found * expected).sum(-2).abs(), torch.ones(2, 6))


def test_zeros_and_gradients_that_are_not_finite_raise_nothing() -> None:
    for value in (0.0, torch.inf, torch.nan):
        params = parameters(torch.float32)
        walk(optim.SOAP(params, 0.05, **OPTIONS), params, [[torch.full(shape, value) for shape in SHAPES]] * 5)
        assert value != 0 or all(parameter.isfinite().all() for parameter in params)


def test_a_grad_scaler_skips_steps_that_overflow() -> None:
    params, peers = parameters(torch.float32), parameters(torch.float32)
    optimizer, peer = optim.SOAP(params, 0.05, **OPTIONS), optim.SOAP(peers, 0.05, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for number, grads in enumerate(gradients(8)):
        # The first one too, in which the bases would begin.
        if number in (0, 3):
            for parameter in params:
                parameter.grad = torch.full_like(parameter, torch.inf)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        scale = scaler.scale(torch.ones(())).item()
        for parameter, other, grad in zip(params, peers, grads, strict=True):
            other.grad = grad.float()
            parameter.grad = other.grad * scale
        scaler.step(optimizer)
        scaler.update()
        peer.step()
    # Scales are powers of two.
    assert all(torch.equal(left, right) for left, right in zip(params, peers, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precondition_every": 0}, "SOAP has precondition_every=0. Give it a whole number of at least 1"),
        ({"precondition_every": 2.0}, "SOAP has precondition_every=2.0. Give it a whole number of at least 1"),
        ({"max_dim": -1}, "SOAP has max_dim=-1. Give it a whole number of at least 0"),
        ({"max_dim": True}, "SOAP has max_dim=True"),
        ({"betas": (0.9, 1.0)}, "SOAP has betas[1]=1.0"),
        ({"eps": -1.0}, "SOAP has eps=-1.0"),
        ({"weight_decay": float("nan")}, "SOAP has weight_decay=nan"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        optim.SOAP(parameters(), 0.1, **options)
    assert message in str(caught.value)


def test_a_state_of_another_limit_is_refused() -> None:
    """The limit decides which bases there are."""
    params = parameters()
    optimizer = optim.SOAP(params, 0.05, **OPTIONS)
    walk(optimizer, params, gradients(2))
    model = nn.ParameterList(parameters())
    other = optim.SOAP(list(model), 0.05, **(OPTIONS | {"max_dim": 3}))
    tensors = state_of(nn.ParameterList(params), optimizer)
    with pytest.raises(Exception, match=r"is not a state of SOAP"):
        restore(Checkpoint(Path("memory"), 2, {}, tensors), model, other)
