"""Whether torch.compile takes a network as one graph, and what looking leaves behind: nothing."""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headway.model import (
    CompileReport,
    GraphBreak,
    add_blur_pool,
    alexnet,
    cifar_net,
    cifar_resnet,
    convert_to_ghost,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    small_net,
    try_compiling,
)
from headway.optim import MasterWeights

USER = """
import random
import torch
from torch import nn

class Talks(nn.Module):
    def forward(self, x):
        x = x * 2
        print("x is", x.shape[1])
        return x.relu()

def bright(x):
    if x.sum() > 0:
        return x
    return -x

class Decides(nn.Module):
    def forward(self, x):
        return bright(x)

class Asks(nn.Module):
    def forward(self, x):
        return x * x.mean().item()

class Draws(nn.Module):
    def forward(self, x):
        return x * random.getrandbits(3)

class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.max() > 100:
                x = x / 2
        return x

class Apart(nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x + 1

class Net(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.parts = nn.Sequential(*parts)
        self.head = nn.Linear(4, 10)

    def forward(self, images):
        return self.head(self.parts(self.stem(images)).mean((2, 3)))
"""


def line(text: str) -> int:
    return next(number for number, found in enumerate(USER.splitlines(), 1) if text in found)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A user's module, from a file of its own."""
    path = tmp_path_factory.mktemp("user") / "user_net.py"
    path.write_text(USER)
    spec = importlib.util.spec_from_file_location("user_net", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["user_net"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["user_net"]


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_network_that_is_one_graph_is_whole(user: Any, images: torch.Tensor) -> None:
    assert try_compiling(user.Net(nn.ReLU()), images) == CompileReport(1, ())


@pytest.fixture(scope="module")
def broken(user: Any) -> CompileReport:
    """Of a network with everything that breaks."""
    return try_compiling(user.Net(*(getattr(user, part)() for part in PARTS)), torch.rand(2, 1, 8, 8))


PARTS = {
    "Talks": ('print("x is", x.shape[1])', "`print`"),
    "Decides": ("if x.sum() > 0:", "data-dependent branching"),
    "Asks": ("return x * x.mean().item()", "Tensor.item()"),
    "Draws": ("return x * random.getrandbits(3)", "getrandbits"),
    "Waits": ("if x.max() > 100:", "graph breaks in loops are not supported"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_break_has_its_line_its_module_and_the_reason(broken: CompileReport, part: str) -> None:
    at, reason = PARTS[part]
    (one,) = (one for one in broken.breaks if one.kind == part)
    assert one.modules == (f"parts.{list(PARTS).index(part)}",)
    assert one.where.endswith(f"user_net.py:{line(at)}")
    assert one.code == at
    assert reason in one.reason
    assert "\n" not in one.describe()
    assert "Hint" not in one.reason
    assert not broken.is_whole


def test_a_function_that_torch_is_told_to_leave_is_a_break(user: Any, images: torch.Tensor) -> None:
    found = try_compiling(user.Net(user.Apart()), images)
    assert not found.is_whole
    assert "torch.compiler.disable" in found.breaks[0].reason
    assert " at 0x" not in found.breaks[0].reason


def test_modules_of_one_class_share_its_line(user: Any, images: torch.Tensor) -> None:
    found = try_compiling(user.Net(*(user.Talks() for _ in range(5))), images)
    assert [one.modules for one in found.breaks] == [tuple(f"parts.{place}" for place in range(5))]
    (text,) = (one.describe() for one in found.breaks)
    assert "'print(\"x is\", x.shape[1])' in Talks (parts.0, parts.1, parts.2 and 2 more): Dynamo does not" in text


def test_what_torch_does_not_say_is_left_out() -> None:
    assert GraphBreak((), "", "", "", "it does not").describe() == "it does not"
    assert (
        GraphBreak(("",), "Net", "net.py:3", "print()", "no").describe()
        == "net.py:3 'print()' in Net (the network): no"
    )


def test_what_fails_when_it_is_compiled_is_no_whole_network(images: torch.Tensor) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    found = try_compiling(Fails(), images)
    assert not found.is_whole
    assert any("not today" in one.reason for one in found.breaks)


OURS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "small_net, ghost batches": (lambda: convert_to_ghost(small_net(10, 3), 1), (3, 8)),
    "cifar_net": (lambda: cifar_net(10), (3, 32)),
    "cifar_resnet, blur pool": (lambda: add_blur_pool(cifar_resnet(10, depth=8))[0], (3, 32)),
}
LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "alexnet": (lambda: alexnet(10), (3, 227)),
    "alexnet, two towers": (lambda: alexnet(10, two_towers=True), (3, 227)),
    **{make.__name__: (partial(make, 10), (3, 64)) for make in (resnet18, resnet34, resnet50, resnet101)},
}


@pytest.mark.parametrize("name", [*OURS, *(pytest.param(one, marks=pytest.mark.check) for one in LARGE)])
@pytest.mark.thin(1)
def test_our_networks_are_whole(name: str) -> None:
    make, (channels, side) = (OURS | LARGE)[name]
    found = try_compiling(make(), torch.rand(2, channels, side, side))
    assert found.is_whole, found


def test_16_bit_networks_are_whole(user: Any, images: torch.Tensor) -> None:
    narrow = user.Net(nn.ReLU())
    MasterWeights(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), torch.bfloat16)
    assert try_compiling(narrow, images).is_whole
    assert try_compiling(user.Net(nn.ReLU()), images, partial(torch.autocast, "cpu", torch.bfloat16)).is_whole


@pytest.mark.check
def test_the_network_and_the_generators_are_as_before(user: Any, images: torch.Tensor) -> None:
    model = user.Net(user.Talks(), user.Draws())
    (model(images).sum()).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [value.grad for value in model.parameters()]
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    assert not try_compiling(model, images).is_whole
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is grad for value, grad in zip(model.parameters(), grads, strict=True))
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    assert model.training


def spied(seen: list[bool]) -> Callable[..., Any]:
    """A compiler that leaves graphs as they are, and notes whether their sizes are free."""

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        sizes = [one for value in inputs for one in (value.shape if isinstance(value, torch.Tensor) else (value,))]
        seen.append(any(isinstance(one, torch.SymInt) for one in sizes))
        return graph.forward

    return compiler


OWN_WARNING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Of torch's own, where it goes on behind a break."""


@pytest.mark.check
@OWN_WARNING
def test_a_batch_of_another_size_is_no_second_size(user: Any, images: torch.Tensor) -> None:
    """Torch would compile with sizes that are free where it has seen two."""
    torch._dynamo.reset()
    model, seen = user.Net(nn.ReLU(), user.Talks()), list[bool]()
    try_compiling(model, images)
    torch.compile(model, backend=spied(seen))(torch.rand(7, 1, 8, 8))
    assert seen
    assert not any(seen)


@pytest.mark.check
@OWN_WARNING
def test_what_was_compiled_before_stays_so(user: Any, images: torch.Tensor) -> None:
    torch._dynamo.reset()
    model, seen = user.Net(nn.ReLU(), user.Talks()), list[bool]()
    compiled = torch.compile(model, backend=spied(seen))
    compiled(images)
    count = len(seen)
    for _ in range(2):
        try_compiling(model, images)
    compiled(images)
    assert len(seen) == count


@pytest.mark.check
def test_a_whole_network_is_looked_at_any_number_of_times(user: Any, images: torch.Tensor) -> None:
    """Torch gives a function up that it has compiled anew eight times."""
    torch._dynamo.reset()
    model = user.Net(nn.ReLU())
    torch.compile(model, backend="eager")(images)
    for _ in range(9):
        assert try_compiling(model, images).is_whole


@pytest.mark.check
def test_torch_knows_nothing_of_it(
    user: Any, images: torch.Tensor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch._dynamo import convert_frame, utils

    torch._dynamo.reset()
    levels = {name: logging.getLogger(name).level for name in ("torch._dynamo", "torch._dynamo.convert_frame")}
    counted = {name: dict(found) for name, found in utils.counters.items()}
    assert not try_compiling(user.Net(user.Asks(), user.Draws(), user.Waits()), images).is_whole
    assert not utils.graph_break_reasons
    assert not [one for one in convert_frame.input_codes.seen if one() is not None]
    assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(user.Net.forward.__code__)
    assert {name: dict(found) for name, found in utils.counters.items()} == counted
    assert {name: logging.getLogger(name).level for name in levels} == levels
    assert not logging.getLogger("torch._dynamo.convert_frame").filters
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert capfd.readouterr().err == ""
    with pytest.warns(UserWarning, match="getrandbits"):  # torch says it once, and that is left to who compiles it
        torch.compile(user.Net(user.Draws()), backend="eager")(images)
