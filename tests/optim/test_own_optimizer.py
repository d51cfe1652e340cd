"""The user's own optimizer: it walks as one built by hand, continues exactly, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.checkpoint.checkpoints import Checkpoint, restore, state_of
from headway.core.errors import CheckpointError, RecipeError, UserCodeError
from headway.optim import MasterWeights, build_optimizer, read_optimizer, set_lr
from headway.optim.saved_state import VALUES

OWN = '''
import torch

class Counting(torch.optim.Optimizer):
    """Keeps a Python number, a list, a tensor in a dictionary and an option that changes; float64 beside float32."""
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.0, "total": 0})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["total"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["last"] = 0, [0.0, None]
                    state["more"] = {"mean": torch.zeros_like(p)}
                    state["sum"] = torch.zeros(p.shape, dtype=torch.float64)
                state["step"] += 1
                state["more"]["mean"].lerp_(p.grad, 1 - group["beta"])
                state["sum"].add_(p.grad)
                state["last"] = [float(p.grad.norm()), state["last"][0]]
                scale = 1 - group["beta"] ** state["step"]
                d = state["more"]["mean"] / scale + 1e-3 * state["sum"].float() / (1 + state["last"][0])
                p.add_(d + group["weight_decay"] * p, alpha=-group["lr"] / group["total"] ** 0.1)

def build(params, lr, **more):
    return Counting(params, lr, **more)

class Forgetful(Counting):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.calls = 0
    @torch.no_grad()
    def step(self):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / self.calls)

class Deaf(Counting):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)

class Still(Counting):
    def step(self):
        pass

class Replacing(Counting):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad

class Keeping(Counting):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.mine = [p for group in self.param_groups for p in group["params"]]
    @torch.no_grad()
    def step(self):
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

class Copying(Counting):
    def __init__(self, params, lr):
        groups = [{**group, "params": [p.detach().clone() for p in group["params"]]} for group in params]
        super().__init__(groups, lr)

class Odd(Counting):
    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["odd"] = {1, 2}

class Failing(Counting):
    def step(self):
        return {}["the user's own key"]

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])

class Modal(Plain):
    def train(self): pass
    def eval(self): pass

class Twice(Plain):
    def step(self, closure):
        closure()

def nothing(params, lr):
    return 7

number = 7
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(36, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        set_lr(optimizer, 0.01 / (1 + number))
        optimizer.zero_grad()
        model(torch.randn(8, 2, 5, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for (name, one), other in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other), name


def own(path: str, **options: Any) -> Any:
    return read_optimizer(**{"factory": path, "lr": 0.01, **options})


def test_it_gets_groups_decay_and_its_own_arguments(file: Path) -> None:
    groups = [{"match": "bias", "lr_scale": 3, "weight_decay": 0.5}, {"match": ".*"}]
    recipe = own("own.py:build", weight_decay=0.1, no_decay=True, groups=groups, args={"beta": 0.8})
    optimizer = build_optimizer(recipe.resolve_paths(file.parent), net())
    found = [(g["name"], g["weight_decay"], g["lr"], g["beta"], len(g["params"])) for g in optimizer.param_groups]
    assert found == [("bias", 0.5, 0.03, 0.8, 3), (".*", 0.1, 0.01, 0.8, 2), (".*", 0.0, 0.01, 0.8, 1)]


TORCH = ("SGD", "RMSprop", "Rprop", "ASGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Adafactor")


@pytest.mark.parametrize("name", [*TORCH, "own"])
@pytest.mark.thin(2)
def test_it_walks_as_by_hand_and_continues_exactly(file: Path, name: str) -> None:
    """Step, save, restore into another network and optimizer, step: the bits of an uninterrupted run."""
    path = f"{file}:Counting" if name == "own" else f"torch.optim:{name}"
    whole, model, resumed = net(), net(), net()
    factory = type(build_optimizer(own(path), net()))
    plain = factory([{"params": list(whole.parameters()), "weight_decay": 0.0}], lr=0.01)  # type: ignore[call-arg]
    for group in plain.param_groups:
        group["lr_scale"] = 1.0
    steps(whole, plain, range(8))
    optimizer, other = build_optimizer(own(path), model), build_optimizer(own(path), resumed)
    steps(model, optimizer, range(4))
    tensors = {key: value.clone() for key, value in state_of(model, optimizer).items()}
    restore(Checkpoint(Path("somewhere"), 4, {}, tensors), resumed, other)
    for parameter, mine in zip(model.parameters(), resumed.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert type(other.state[mine][key]) is type(value), key
    steps(model, optimizer, range(4, 8))
    steps(resumed, other, range(4, 8))
    assert_same(model, whole)
    assert_same(resumed, whole)


def test_it_steps_fp32_masters(file: Path) -> None:
    model, reference = net(), net()
    optimizer = build_optimizer(own(f"{file}:Counting"), model)
    masters = MasterWeights(model, optimizer, torch.bfloat16)
    model[0].weight.grad = torch.full_like(model[0].weight, 0.5)
    masters.take_gradients()
    optimizer.step()
    masters.write_back()
    other = build_optimizer(own(f"{file}:Counting"), reference)
    reference[0].weight.grad = torch.full_like(reference[0].weight, 0.5)
    other.step()
    assert torch.equal(dict(masters.named_parameters())["0.weight"], reference[0].weight)
    assert model[0].weight.dtype == torch.bfloat16


REFUSED = {
    "Forgetful": "does not continue exactly from its state, as a resumed run must. Keep all that changes",
    "Deaf": "takes the same steps whatever lr its parameter groups have, so no schedule would reach it",
    "Still": "moved no parameter in 6 steps",
    "Replacing": "puts new memory behind its parameters in a step",
    "Keeping": "steps other parameters than those in its param_groups",
    "Copying": "does not hold the parameters that it was given in its param_groups",
    "Odd": "its state cannot be saved and restored (the optimizer keeps a set as '0/odd'",
    "Modal": "has to be told when training and evaluation begin (train, eval)",
    "Twice": "needs a closure that computes the loss again, and a step here computes it once",
    "nothing": "gave a int, no torch.optim.Optimizer",
    "number": "is a int, no class or function",
    "Countin": "Did you mean 'Counting'?",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_be_relied_on_is_refused(file: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"^optimizer\.factory: ") as caught:
        build_optimizer(own(f"{file}:{name}"), net())
    assert REFUSED[name] in str(caught.value)


def test_other_mistakes(file: Path) -> None:
    with pytest.raises(RecipeError, match="needs a closure"):
        build_optimizer(own("torch.optim:LBFGS", no_decay=True), net())
    with pytest.raises(RecipeError, match=r"optimizer\.args\.bet: .* has no argument 'bet'\. Did you mean 'beta'\?"):
        build_optimizer(own(f"{file}:Counting", args={"bet": 0.5}), net())
    with pytest.raises(RecipeError, match=r"optimizer\.weight_decay: .*Plain' has no option weight_decay\. Remove it"):
        build_optimizer(own(f"{file}:Plain", weight_decay=0.1), net())
    build_optimizer(own(f"{file}:Plain"), net())
    with pytest.raises(UserCodeError, match="failed: KeyError") as caught:
        build_optimizer(own(f"{file}:Failing"), net())
    assert caught.value.__cause__ is not None
    for options, message in (
        ({"args": {"lr": 1}}, "write it as optimizer.lr, not in args"),
        ({"momentum": 0.9}, "'momentum' is no key beside factory. Write args: {momentum: 0.9}"),
        ({"name": "sgd"}, "factory"),
    ):
        with pytest.raises(RecipeError, match=message.replace("{", r"\{")):
            own("own.py:Counting", **options)
    with pytest.raises(RecipeError, match=r"not a name\. Write factory: 'own\.py:Counting'"):
        read_optimizer(name="own.py:Counting", lr=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "the values of its optimizer are damaged"),
        (b'{"states": {}, "options": [{"beta": {"code": 1}}], "contiguous": []}', "'code' is no kind of value"),
        (b'{"states": {}, "options": [{"beta": {"tensor": "x"}}], "contiguous": []}', "optimizer are damaged"),
        (b'{"states": {}, "options": [], "contiguous": []}', "it has 0 parameter groups, and the optimizer 1"),
    ],
)
def test_damaged_values_change_nothing(file: Path, text: bytes, message: str) -> None:
    model, optimizer = (made := net()), build_optimizer(own(f"{file}:Counting"), made)
    steps(model, optimizer, range(2))
    tensors = dict(state_of(model, optimizer)) | {VALUES: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    other, other_optimizer = (made := net()), build_optimizer(own(f"{file}:Counting"), made)
    with pytest.raises(CheckpointError, match=message):
        restore(Checkpoint(Path("somewhere"), 2, {}, tensors), other, other_optimizer)
    assert_same(other, net())
    with pytest.raises(CheckpointError, match="belongs to another optimizer than SGD"):
        restore(
            Checkpoint(Path("somewhere"), 2, {}, {k: v for k, v in tensors.items() if "optimizer/" not in k}),
            other,
            torch.optim.SGD(other.parameters(), lr=0.1),
        )
