"""A state in bfloat16 and weights without float32 copies: rounding keeps the mean, and the bits repeat."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._waits import waits_refused
from tests.optim._cases import CASES, distance, give, gradients, parameters, walk
from torch import Tensor, nn

from headway import optim
from headway.checkpoint.checkpoints import Checkpoint, restore, state_of
from headway.core.errors import UsageError
from headway.optim import native, stochastic_rounding
from headway.optim.stochastic_rounding import StochasticRounding

KINDS = [torch.float32, torch.bfloat16]
FEW = ["lars, inside", "lars, trust off", "lamb", "novograd", "ftml", "rmsprop_sgd", "lbsgd, sqrt", "muon"]


def made(name: str, params: list[Tensor], **more: Any) -> Any:
    kind, _, lr, options = CASES[name]
    optimizer = kind(params, lr, **options, **more)
    optimizer.use_bf16(seed=7)
    return optimizer


def walked(name: str, kind: torch.dtype, *, steps: int = 5, **more: Any) -> tuple[list[Tensor], Any]:
    params = parameters(kind, channels_last=True)
    optimizer = made(name, params, **more)
    walk(optimizer, params, CASES[name][2], steps=steps)
    return params, optimizer


def rounded(values: Tensor, *, seed: int = 1, number: int = 0, step: int = 1, array: int = 0) -> Tensor:
    found = values.clone()
    StochasticRounding(seed).round_([found], [number], torch.tensor([float(step)]), array)
    return found


def test_it_is_the_published_hash_of_unsigned_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """In numpy's uint32, also of what is special; and chunks change nothing."""
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 3.4e38, 1.0]
    values = torch.cat([torch.tensor(special), torch.randn(3000, generator=torch.Generator().manual_seed(2))])
    key = StochasticRounding(5).compute_key(3)

    def mix(x: Any, second: Any = np.uint32(0)) -> Any:  # noqa: B008
        x = ((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)) ^ second
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    base = mix(np.array([(key & 0xFFFFFFFF) ^ (4 * 9 + 2)], np.uint32))
    second = mix(np.array([key >> 32], np.uint32) ^ base)
    random = mix(base + np.arange(len(values), dtype=np.uint32), second) & np.uint32(0xFFFF)
    wanted = ((values.numpy().view(np.uint32) + random) & np.uint32(0xFFFF0000)).view(np.float32)
    wanted[0] = np.nan
    found = rounded(values, seed=5, number=3, step=9, array=2)
    assert np.array_equal(found.numpy(), wanted, equal_nan=True)
    assert torch.equal(found.bfloat16().float().nan_to_num(), found.nan_to_num())
    monkeypatch.setattr(stochastic_rounding, "CHUNK_NUMEL", 1000)
    assert np.array_equal(rounded(values, seed=5, number=3, step=9, array=2).numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("value", [1.001, -1.0039, 0.3, 3e-39, 1 + 2**-12])
def test_the_mean_is_the_value(value: float) -> None:
    """Over the elements of a tensor, over steps, parameters and seeds: within four standard errors."""
    n = 6000
    low, high = sorted(set(rounded(torch.full((n,), value)).tolist()))
    exact = torch.tensor(value).double().item()
    assert low < exact < high
    assert torch.tensor([low, high]).bfloat16().tolist() == [low, high]
    share = (exact - low) / (high - low)
    draws = {
        "elements": rounded(torch.full((n,), value)),
        "steps": torch.cat([rounded(torch.full((60,), value), step=step) for step in range(1, 101)]),
        "parameters": torch.cat([rounded(torch.full((60,), value), number=number) for number in range(100)]),
        "seeds": torch.cat([rounded(torch.full((60,), value), seed=seed) for seed in range(100)]),
    }
    for name, found in draws.items():
        error = (share * (1 - share) / len(found)) ** 0.5
        assert abs((found == high).double().mean().item() - share) <= 4 * error, name


def test_random_bits_of_steps_arrays_parameters_and_seeds_are_unrelated() -> None:
    n = 20_000
    half = torch.full((n,), 1 + 2**-8)
    draws = [
        rounded(half, **more)
        for more in ({}, {"step": 2}, {"step": 3}, {"array": 1}, {"array": 2}, {"number": 1}, {"seed": 2})
    ]
    draws.append(draws[0].roll(1))
    signs = torch.stack([(found > 1).double() * 2 - 1 for found in draws])
    correlations = (signs @ signs.T / n - torch.eye(len(signs))).abs()
    assert correlations.max() <= 4.5 / n**0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.thin(16)
def test_the_native_core_rounds_as_torch_does(name: str, kind: torch.dtype) -> None:
    """Both compute in float32, where sums differ in their last digits: a flip in a thousand values is theirs."""
    if not native.is_available():
        pytest.skip("the native core is not built")
    (fused, one), (plain, other) = (walked(name, kind, fused=fused, steps=4) for fused in (True, False))
    for left, right in zip(fused, plain, strict=True):
        states = [(one.state[left][key], value) for key, value in other.state[right].items()]
        assert {found.dtype for found, _ in states if found.shape == left.shape} <= {torch.bfloat16}
        for found, wanted in [(left.detach(), right.detach()), *states]:
            assert found.dtype == wanted.dtype
            assert distance(found.float(), wanted.float().numpy()) <= 1e-3
            if found.dtype == torch.bfloat16:
                assert (found != wanted).sum() <= 2 + 0.002 * found.numel()


@pytest.mark.parametrize("name", FEW[:6])
def test_threads_do_not_change_a_bit(name: str) -> None:
    walks, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            walks.append(walked(name, torch.bfloat16)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(left, right) for left, right in zip(*walks, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", FEW)
@pytest.mark.thin(9)
def test_it_goes_on_bit_for_bit_by_checkpoint_and_by_state_dict(name: str, fused: bool) -> None:
    params, optimizer = walked(name, torch.bfloat16, fused=fused)
    model = nn.ParameterList(params)
    tensors = {key: value.clone() for key, value in state_of(model, optimizer).items()}
    state_dict = optimizer.state_dict()
    state_dict["state"] = {
        index: {key: value.clone() for key, value in state.items()} for index, state in state_dict["state"].items()
    }
    walk(optimizer, params, CASES[name][2], steps=4, seed=2)
    for by_checkpoint in (True, False):
        others = parameters(torch.bfloat16, channels_last=True, seed=3)
        other, fresh = made(name, others, fused=fused), nn.ParameterList(others)
        if by_checkpoint:
            restore(Checkpoint(Path("memory"), 5, {}, tensors), fresh, other)
        else:
            fresh.load_state_dict({key[6:]: value for key, value in tensors.items() if key.startswith("model/")})
            other.load_state_dict(state_dict)
        walk(other, others, CASES[name][2], steps=4, seed=2)
        assert all(torch.equal(left, right) for left, right in zip(params, others, strict=True))


def test_a_copy_rounds_as_the_original() -> None:
    params, optimizer = walked("lamb", torch.bfloat16, steps=2)
    others, other = copy.deepcopy((params, optimizer))
    walk(optimizer, params, 0.02, steps=2)
    walk(other, others, 0.02, steps=2)
    assert all(torch.equal(left, right) for left, right in zip(params, others, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.thin(12)
def test_a_skipped_step_changes_nothing(name: str, kind: torch.dtype, fused: bool) -> None:
    params, optimizer = walked(name, kind, fused=fused, steps=2)
    before = [one.detach().clone() for one in params]
    states = [{key: value.clone() for key, value in optimizer.state[one].items()} for one in params]
    give(params, [torch.full_like(grad, torch.inf) for grad in next(gradients(1))])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    optimizer.step()
    for parameter, weight, state in zip(params, before, states, strict=True):
        assert torch.equal(parameter, weight)
        assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())


@pytest.mark.gpu
def test_a_gpu_has_the_same_random_bits() -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    found = values.cuda()
    StochasticRounding(1).round_([found], [0], torch.tensor([4.0], device="cuda"), 1)
    assert torch.equal(found.cpu(), rounded(values, step=4, array=1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEW)
def test_no_step_waits_for_the_device(name: str) -> None:
    params: list[Tensor] = [nn.Parameter(one.detach().cuda()) for one in parameters(torch.bfloat16)]
    optimizer = made(name, params)
    for grads in gradients(3):
        give(params, [grad.cuda() for grad in grads])
        with waits_refused():
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in params)


def test_every_array_of_a_matrix_optimizer_but_its_matrices_is_rounded() -> None:
    params = parameters()
    optimizer = optim.SOAP(params, 0.01, precondition_every=2)
    optimizer.use_bf16()
    walk(optimizer, params, 0.01, steps=4)
    kinds = {key: value.dtype for key, value in optimizer.state[params[0]].items()}
    assert {key for key, kind in kinds.items() if kind == torch.bfloat16} == {"exp_avg", "exp_avg_sq"}
    assert set(kinds.values()) == {torch.bfloat16, torch.float32}


def spirals(seed: int) -> tuple[Tensor, Tensor]:
    """Two classes whose points lie on arms of a spiral."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(200) % 2
    radius = torch.rand(200, generator=generator)
    angle = 5 * radius + labels * torch.pi
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return points + 0.02 * torch.randn(200, 2, generator=generator), labels


def test_at_a_low_rate_it_trains_as_float32_does_and_rounding_to_nearest_stalls() -> None:
    """Adam's update is about the rate, 1e-4, and weights are above 0.25, where half a last digit is 1e-3."""
    images, labels = spirals(1)

    def train(convert: Callable[[nn.Module, Any], object], lr: float) -> tuple[float, float]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25 * parameter.sign())
        optimizer = optim.LAMB(model.parameters(), lr, layerwise=False, betas=(0.9, 0.99))
        convert(model, optimizer)
        before = [one.detach().clone() for one in model.parameters()]
        for _ in range(400):
            losses = nn.functional.cross_entropy(model(images.to(model[0].weight.dtype)).float(), labels)
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
        moved = torch.cat([(a != b).flatten() for a, b in zip(before, model.parameters(), strict=True)])
        return losses.item(), moved.double().mean().item()

    def keep_16_bits(model: nn.Module, optimizer: Any) -> None:
        optim.convert_to_bf16(model)
        optimizer.use_bf16(seed=1)

    wide = train(lambda model, optimizer: None, 1e-4)
    stochastic = train(keep_16_bits, 1e-4)
    nearest = train(lambda model, optimizer: optim.convert_to_bf16(model), 1e-4)
    assert stochastic[0] == pytest.approx(wide[0], rel=0.1)
    assert stochastic[1] > 0.9
    assert nearest[1] < 0.05
    assert nearest[0] > 2 * wide[0]


def test_what_makes_no_sense_is_refused() -> None:
    params = parameters()
    optimizer = optim.LARS(params, 0.1)
    walk(optimizer, params, 0.1, steps=1)
    with pytest.raises(UsageError, match=r"LARS has a state in float32 already. Call use_bf16 before the first step"):
        optimizer.use_bf16()
    for kind in (torch.float16, torch.float64):
        with pytest.raises(UsageError, match=rf"float32 or bfloat16, and one is {kind}. Convert the network"):
            optim.LAMB(parameters(kind), 0.1).use_bf16()
    narrow = parameters()
    optimizer = optim.LAMB(narrow, 0.1)
    optimizer.use_bf16()
    for parameter in narrow:
        parameter.data = parameter.data.half()
    with pytest.raises(UsageError, match=r"one is torch.float16"):
        walk(optimizer, narrow, 0.1, steps=1)
    wide, narrow = parameters(), parameters()
    first, second = optim.LARS(wide, 0.1), made("lars, inside", narrow)
    walk(second, narrow, 0.1, steps=1)
    first.load_state_dict(second.state_dict())
    with pytest.raises(UsageError, match="of the same network, with use_bf16 as it had it"):
        walk(first, wide, 0.1, steps=1)
