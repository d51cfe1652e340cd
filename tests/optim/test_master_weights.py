"""MasterWeights: fp32 copies of 16-bit weights that any optimizer steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests._waits import counted
from torch import nn

from headway.checkpoint.checkpoints import Checkpoints, restore, state_of
from headway.core.errors import UsageError
from headway.model import cifar_net
from headway.model.ema import Ema
from headway.optim import MasterWeights, build_optimizer, read_optimizer
from headway.optim import master_weights as masters_module
from headway.setup.precision import Precision, PrecisionName

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05},
    "nag": {"lr": 0.05, "weight_decay": 0.01, "no_decay": True},
    "adam": {"lr": 0.01},
    "adamw": {"lr": 0.01, "groups": [{"match": "head", "lr_scale": 2.0}, {"match": ".*", "weight_decay": 0.1}]},
    "lars": {"lr": 1.0, "weight_decay": 0.01},
    "lamb": {"lr": 0.01, "weight_decay": 0.01},
    "novograd": {"lr": 0.01},
    "signum": {"lr": 0.001},
    "ftml": {"lr": 0.01},
    "lbsgd": {"lr": 0.05, "batch_scale": 2},
    "rmsprop_sgd": {"lr": 0.05},
    "muon": {"lr": 0.02, "lr_rest": 0.05},
    "soap": {"lr": 0.01, "precondition_every": 2},
}


def net() -> nn.Module:
    """A convolution, every kind of norm, a matrix, something frozen, and a buffer."""
    torch.manual_seed(0)
    made = nn.Sequential()
    made.add_module("conv", nn.Conv2d(1, 8, 3, padding=1, bias=False))
    made.add_module("batch", nn.BatchNorm2d(8))
    made.add_module("frozen", nn.Conv2d(8, 8, 1).requires_grad_(False))
    made.add_module("group", nn.GroupNorm(2, 8))
    made.add_module("flat", nn.Flatten())
    made.add_module("layer", nn.LayerNorm(8 * 16))
    made.add_module("head", nn.Linear(8 * 16, 4))
    made.register_buffer("table", torch.full((3,), 1 / 3))
    return made.to(memory_format=torch.channels_last)


def made(
    name: str, kind: torch.dtype | None, precision: PrecisionName = "fp32"
) -> tuple[nn.Module, torch.optim.Optimizer, MasterWeights | None, Precision]:
    model = net()
    optimizer = build_optimizer(read_optimizer(name=name, **OPTIMIZERS[name]), model, 3)
    masters = None if kind is None else MasterWeights(model, optimizer, kind)
    return model, optimizer, masters, Precision(precision, CPU, masters=masters)


def images(seed: int) -> torch.Tensor:
    return torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision, x: torch.Tensor, **more: Any
) -> None:
    with precision.autocast():
        outputs = model(x)
    precision.backward(outputs.float().square().sum(1), torch.full((len(x),), 1 / len(x)))
    clip = more.get("clip_norm")
    precision.step(optimizer, clip, [p for group in optimizer.param_groups for p in group["params"]])
    optimizer.zero_grad(set_to_none=True)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_of_the_same_width_change_nothing(
    name: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With float32 for the 16 bits, which a user is refused: state of network and optimizer, bit for bit."""
    monkeypatch.setattr(masters_module, "HALF_DTYPES", (torch.float32,))
    found = []
    for kind in (None, torch.float32):
        model, optimizer, masters, precision = made(name, kind)
        for number in range(4):
            step(model, optimizer, precision, images(number), clip_norm=clip)
        found.append(state_of(model, optimizer, masters))
        if masters is not None:
            same(model.state_dict(), masters.state_dict())
    same(found[1], found[0])


def test_what_is_narrowed_and_what_stays() -> None:
    kind = torch.bfloat16
    model, optimizer, masters, precision = made("sgd", kind)
    assert masters is not None
    step(model, optimizer, precision, images(0))
    narrow = {name for name, value in model.state_dict().items() if value.dtype == kind}
    assert narrow == {"conv.weight", "frozen.weight", "frozen.bias", "head.weight", "head.bias", "table"}
    assert all(value.dtype != kind for name, value in masters.state_dict().items() if name != "table")
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda one, inputs, output, name=name: seen.__setitem__(name, (inputs[0].dtype, output.dtype))
        )
    model(images(1)).sum().backward()
    wide = {"group", "layer"}  # their kernels take one type on a GPU, so their inputs are widened
    assert seen == {name: (torch.float32 if name in wide else kind, kind) for name in seen}
    grads = {name: value.grad.dtype for name, value in model.named_parameters() if value.grad is not None}
    assert grads == {name: kind if name in narrow else torch.float32 for name in grads}
    assert len(grads) == 9
    assert model.get_parameter("conv.weight").stride() == net().get_parameter("conv.weight").stride()


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_a_step_is_the_float64_one_on_the_masters_with_the_same_gradients(name: str) -> None:
    model, optimizer, masters, precision = made(name, torch.bfloat16)
    assert masters is not None
    step(model, optimizer, precision, images(0))
    wide = net().double()
    wide.load_state_dict(masters.state_dict())
    reference = build_optimizer(read_optimizer(name=name, **OPTIMIZERS[name]), wide, 3)
    of = dict(wide.named_parameters())
    for (key, master), (_, mine) in zip(masters.named_parameters(), wide.named_parameters(), strict=True):
        for state, value in optimizer.state.get(master, {}).items():
            reference.state[mine][state] = value.double().clone() if value.shape == mine.shape else value.clone()
        assert key in of
    model(images(1)).float().square().sum().backward()
    for key, value in model.named_parameters():
        of[key].grad = None if value.grad is None else value.grad.double()
    precision.step(optimizer, None, [])
    reference.step()
    for key, value in masters.named_parameters():
        torch.testing.assert_close(value.double(), of[key], rtol=1e-6, atol=1e-8, msg=key)
        half = model.get_parameter(key)
        assert torch.equal(half, value.to(half.dtype)), key


def test_updates_that_16_bits_round_away_add_up() -> None:
    """A weight of 1 has steps of 2^-8 below it in bfloat16; each update is 2^-12."""
    found = []
    for with_masters in (True, False):
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-12)
        masters = MasterWeights(model, optimizer, torch.bfloat16) if with_masters else None
        if masters is None:
            model.bfloat16()
        precision = Precision("bf16", CPU, masters=masters)
        for _ in range(64):
            precision.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum(1), torch.ones(1))
            precision.step(optimizer, None, [])
            model.zero_grad()
            optimizer.zero_grad()
        found.append(model.weight.float().mean().item())
    assert found == [1 - 64 * 2**-12, 1]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb", "novograd", "muon"])
def test_a_skipped_step_changes_neither_masters_nor_weights_and_nothing_waits(name: str, clip: float | None) -> None:
    model, optimizer, masters, precision = made(name, torch.float16, "fp16")
    assert masters is not None
    precision.load_state_dict({**precision.state_dict(), "scale": 128.0})
    step(model, optimizer, precision, images(0), clip_norm=clip)
    model.eval()  # running statistics of an infinite batch are no affair of the step
    before = copy.deepcopy((masters.state_dict(), model.state_dict(), optimizer.state_dict()["state"]))
    scale = precision.state_dict()["scale"]
    bad = images(1)
    bad[0] = torch.inf
    with counted() as waits:
        step(model, optimizer, precision, bad, clip_norm=clip)
    assert waits == {}
    same(masters.state_dict(), before[0])
    same(model.state_dict(), before[1])
    for number, state in optimizer.state_dict()["state"].items():
        same(state, before[2][number])
    assert precision.state_dict()["scale"] == scale / 2
    step(model, optimizer, precision, images(2), clip_norm=clip)
    assert not torch.equal(masters.state_dict()["head.weight"], before[0]["head.weight"])
    assert all(value.isfinite().all() for value in masters.state_dict().values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_ends_alike_and_its_checkpoint_has_the_masters(name: str, tmp_path: Path) -> None:
    whole = made(name, torch.bfloat16)
    for number in range(5):
        if number == 3:
            Checkpoints(tmp_path).save(3, state_of(*whole[:3]), {})
        step(whole[0], whole[1], whole[3], images(number))
    saved = Checkpoints(tmp_path).newest()
    assert saved is not None
    assert saved.tensors["model/conv.weight"].dtype == torch.float32
    assert saved.tensors["model/frozen.weight"].dtype == torch.float32
    again = made(name, torch.bfloat16)
    restore(saved, *again[:3])
    for number in (3, 4):
        step(again[0], again[1], again[3], images(number))
    same(state_of(*again[:3]), state_of(*whole[:3]))
    same(again[0].state_dict(), whole[0].state_dict())


def test_averages_are_those_of_the_masters() -> None:
    model, optimizer, masters, precision = made("sgd", torch.bfloat16)
    assert masters is not None
    ema = Ema(masters, half_life_steps=2)
    mean: torch.Tensor | None = None
    for number in range(1, 4):
        step(model, optimizer, precision, images(number))
        ema.update(number)
        share = (1 - 0.5**0.5) / (1 - 0.5 ** (number / 2))
        now = masters.state_dict()["head.weight"].double()
        mean = now if mean is None else mean + share * (now - mean)
    with ema.swap_weights():
        found = masters.state_dict()["head.weight"].double()
    assert mean is not None
    torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-8)


def test_what_would_train_nothing_or_is_not_16_bit_wide_is_refused() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"no parameter of this network.*from the parameters of the network"):
        MasterWeights(other, optimizer, torch.bfloat16)
    for kind in (torch.float32, torch.int16):
        with pytest.raises(UsageError, match=rf"{kind} is not a 16-bit type. Give MasterWeights torch.bfloat16 or"):
            MasterWeights(model, optimizer, kind)
    assert model.weight.dtype == other.weight.dtype == torch.float32
    MasterWeights(model, optimizer, torch.float16)
    with pytest.raises(UsageError, match="and its MasterWeights once"):
        MasterWeights(model, optimizer, torch.float16)


def test_weights_that_two_modules_share_have_one_master() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    held = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(model, optimizer, torch.bfloat16)
    assert model[1].weight is model[0].weight is held
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    first, second = masters.state_dict().values()
    assert first.data_ptr() == second.data_ptr()


def test_our_network_trains_with_16_bit_weights() -> None:
    """Whitening stays exact on its master, and the loss falls."""
    torch.manual_seed(0)
    model = cifar_net(4, widths=(8, 8, 8))
    x, labels = torch.randn(16, 3, 24, 24), torch.arange(16) % 4
    model.initialise(x)
    whitening = model.whiten.weight.detach().clone()
    optimizer = build_optimizer(read_optimizer(name="lamb", lr=0.02), model)
    masters = MasterWeights(model, optimizer, torch.bfloat16)
    precision, losses = Precision("bf16", CPU, masters=masters), []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(x).float(), labels, reduction="none")
        losses.append(loss.mean().item())
        precision.backward(loss, torch.full((16,), 1 / 16))
        precision.step(optimizer, None, [])
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(masters.state_dict()["whiten.weight"], whitening)
