"""Owners of parameters: each rank steps its own, and all have the weights of data parallel training, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor, nn

from headway.comm.comm_recipe import Wire
from headway.comm.communicator import Communicator
from headway.comm.reducer import BucketPlan, Reducer
from headway.core.errors import UsageError
from headway.model import resnet50
from headway.observe.layer_statistics import LayerStatistics
from headway.optim import MasterWeights, build_optimizer, convert_to_bf16
from headway.optim.footprint import count_multiply_adds
from headway.optim.layer_rates import measure_layer_rates
from headway.optim.optimizer_recipe import read_optimizer
from headway.parallel.owners import Owners, find_largest_shares
from headway.setup.precision import Precision, PrecisionName

RANKS, SAMPLES, OVERFLOW_STEP, BUCKET_BYTES = 3, 7, 3, 6000
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
MUON: dict[str, Any] = {"name": "muon", "lr": 0.02, "lr_rest": 0.1}


@dataclass(frozen=True)
class Case:
    """What the ranks train, and how."""

    optimizer: dict[str, Any]
    clip_norm: float | None = None
    precision: PrecisionName = "fp32"
    half_weights: bool = False
    wire: Wire = "fp32"
    has_one_tensor: bool = False
    steps: int = 6


CASES = {
    "sgd": Case(SGD, steps=8),
    "adamw": Case({"name": "adamw", "lr": 0.01}, steps=8),
    "lars": Case({"name": "lars", "lr": 1.0, "momentum": 0.9}, steps=8),
    "lamb": Case({"name": "lamb", "lr": 0.01}, steps=8),
    "muon": Case(MUON, steps=8),
    "soap": Case({"name": "soap", "lr": 0.01, "precondition_every": 2}, steps=8),
    "novograd": Case({"name": "novograd", "lr": 0.01}),
    "ftml": Case({"name": "ftml", "lr": 0.01}),
    "lbsgd": Case({"name": "lbsgd", "lr": 0.1}),
    "clipped": Case(SGD, clip_norm=0.5),
    "loss scale": Case(SGD, precision="fp16"),
    "loss scale, clipped": Case({"name": "adamw", "lr": 0.01}, precision="fp16", clip_norm=0.5),
    "muon, loss scale, clipped": Case(MUON, precision="fp16", clip_norm=0.5),
    "16-bit weights": Case({"name": "adamw", "lr": 0.01}, precision="bf16", half_weights=True),
    "all in 16 bits": Case({"name": "lamb", "lr": 0.01, "precision": "bf16"}, precision="bf16", half_weights=True),
    "one tensor": Case(SGD, precision="fp16", has_one_tensor=True),
    "16-bit wire": Case(SGD, wire="fp16"),
}


class Found(NamedTuple):
    """What a rank found."""

    difference: float
    state_bytes: tuple[int, int]
    masters: tuple[int, int]
    layers: tuple[Any, Any]
    kept_gradients: int


def network(case: Case) -> nn.Module:
    torch.manual_seed(3)
    if case.has_one_tensor:
        return nn.Sequential(nn.Flatten(), nn.Linear(300, 5, bias=False))
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3),
        nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 5),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def build_owners(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> Owners:
    named = list(net.named_parameters())
    return Owners(named, rank, ranks, count_multiply_adds(optimizer, named))


class Run:
    """A network that the ranks train together."""

    def __init__(self, communicator: Communicator, case: Case, *, is_sharded: bool) -> None:
        world = communicator.world
        self.world, self.case, self.net = world, case, network(case)
        self.optimizer = build_optimizer(read_optimizer(**case.optimizer), self.net, 5.0)
        named, self.owners, self.masters = list(self.net.named_parameters()), None, None
        if is_sharded:
            self.owners = build_owners(self.net, self.optimizer, world.rank, world.size)
            self.owners.drop_state(self.optimizer)
            self.owners.connect(communicator, BUCKET_BYTES)
        keeps_masters = case.half_weights and case.optimizer.get("precision") != "bf16"
        if case.half_weights and not keeps_masters:
            convert_to_bf16(self.net)
        if keeps_masters:
            more = {} if self.owners is None else {"is_elsewhere": self.owners.is_elsewhere}
            self.masters = MasterWeights(self.net, self.optimizer, torch.bfloat16, **more)
        # The tree adds in pairs of ranks, as the owners do.
        plan = BucketPlan(lambda nbytes: "tree", bucket_bytes=BUCKET_BYTES, wire=case.wire)
        build = None if self.owners is None else self.owners.build_bucket
        self.reducer = Reducer(named, communicator, plan=plan, measures_noise=True, build_bucket=build)
        self.precision = Precision(case.precision, world.device, masters=self.masters, is_narrow=case.half_weights)
        self.stepped = [one for group in self.optimizer.param_groups for one in group["params"]]
        rates = partial(measure_layer_rates, self.optimizer)
        self.layers = LayerStatistics(
            (self.masters or self.net).named_parameters(), self.optimizer, rates, owners=self.owners
        )
        self.noise: list[float] = []
        self.kept_gradients = 0

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(SAMPLES, 3, 10, 10, generator=generator).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 5, (SAMPLES,), generator=generator)
        low, high = (SAMPLES * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        self.reducer.prepare_for_backward((high - low) / SAMPLES)
        # A gradient of one parameter overflows: its owner alone sees that.
        first = next(self.net.parameters())
        overflow = first.register_hook(lambda grad: grad * (torch.inf if number == OVERFLOW_STEP else 1))
        outputs = self.net(images[low:high]).float()
        losses = nn.functional.cross_entropy(outputs, labels[low:high], reduction="none")
        self.precision.backward(losses, torch.full_like(losses, 1 / SAMPLES))
        overflow.remove()
        reduction = self.reducer.finish()
        self.noise += [float(reduction.local_sq), float(reduction.reduced_sq)]
        self.kept_gradients = sum(one.grad is not None for one in self.net.parameters())
        if number == self.case.steps - 1:
            self.layers.arm()
        self.precision.step(self.optimizer, self.case.clip_norm, self.stepped, owners=self.owners)
        self.optimizer.zero_grad(set_to_none=True)
        self.net.zero_grad(set_to_none=True)


def compare(rank: Rank, names: tuple[str, ...] = tuple(CASES)) -> dict[str, tuple[Any, ...]]:
    """Trains each case with all state on each rank, and with owners."""
    communicator = Communicator(rank.world)
    found = {}
    for name in names:
        case = CASES[name]
        whole, sharded = (Run(communicator, case, is_sharded=is_sharded) for is_sharded in (False, True))
        for number in range(case.steps):
            if case.precision != "fp16" and number == OVERFLOW_STEP:
                continue
            whole.step(number)
            sharded.step(number)
        assert sharded.noise == pytest.approx(whole.noise, rel=1e-2 if case.half_weights else 1e-3, nan_ok=True)
        pairs = zip(whole.net.parameters(), sharded.net.parameters(), strict=True)
        found[name] = (
            max(float((one - other).detach().abs().max()) for one, other in pairs),
            (count_state(whole.optimizer), count_state(sharded.optimizer)),
            tuple(sum(one not in set(run.net.parameters()) for one in run.stepped) for run in (whole, sharded)),
            (whole.layers.read(), sharded.layers.read()),
            sharded.kept_gradients,
        )
        assert sharded.precision.state_dict() == whole.precision.state_dict()
        for run in (whole, sharded):
            run.reducer.close()
    communicator.close()
    return found


def count_state(optimizer: torch.optim.Optimizer) -> int:
    values = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(value.numel() * value.element_size() for value in values)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, Found]]:
    """What each rank found in the cases that are asked for here; all of them take ten seconds."""
    items = (item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function))
    asked = {item.callspec.params.get("name") for item in items if "results" in item.fixturenames}
    names = tuple(name for name in CASES if name in asked)
    return [{name: Found(*one) for name, one in found.items()} for found in run_ranks(RANKS, compare, names)]


# One case for each way that state, gradients and masters can lie on the ranks.
QUICK = ("sgd", "lamb", "loss scale, clipped", "16-bit weights", "one tensor")


def mark_long(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.check] * (name not in QUICK)) for name in names]


@pytest.mark.parametrize("name", mark_long(CASES))
def test_owners_train_as_data_parallel_ranks_do_bit_for_bit(results: list[dict[str, Found]], name: str) -> None:
    ranks = [result[name] for result in results]
    # A gradient that lies on the wire in 16 bits is rounded once, and not once in each step of the tree.
    tolerance = 0.02 if CASES[name].wire == "fp16" else 0.0
    assert max(one.difference for one in ranks) <= tolerance
    assert all(one.difference == ranks[0].difference for one in ranks)


@pytest.mark.check
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_owners_trains_as_data_parallel_ranks_do_bit_for_bit(ranks: int) -> None:
    for result in run_ranks(ranks, compare, ("muon", "soap", "muon, loss scale, clipped")):
        assert all(Found(*found).difference == 0 for found in result.values())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_each_owner_makes_the_step_of_one_process(name: str, ranks: int) -> None:
    """From the same gradients, and so bit for bit."""
    generator = torch.Generator().manual_seed(4)
    recorded = [
        [torch.randn(one.shape, generator=generator) for one in network(CASES[name]).parameters()] for _ in range(5)
    ]

    def train(owned: Callable[[str], bool]) -> dict[str, Tensor]:
        net = network(CASES[name])
        optimizer = build_optimizer(read_optimizer(**CASES[name].optimizer), net, 5.0)
        for gradients in recorded:
            for (key, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(gradient) if owned(key) else None
            optimizer.step()
        return {key: value for key, value in net.named_parameters() if owned(key)}

    whole, found = train(lambda key: True), dict[str, Tensor]()
    for rank in range(ranks):
        net = network(CASES[name])
        optimizer = build_optimizer(read_optimizer(**CASES[name].optimizer), net, 5.0)
        by_name = build_owners(net, optimizer, rank, ranks).by_name
        found |= train(lambda key, rank=rank, by_name=by_name: by_name[key] == rank)  # type: ignore[misc]
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], value) for key, value in whole.items())


@pytest.mark.parametrize("name", mark_long(CASES))
def test_each_state_gradient_and_master_is_on_one_rank(results: list[dict[str, Found]], name: str) -> None:
    ranks = [result[name] for result in results]
    assert sum(one.state_bytes[1] for one in ranks) == ranks[0].state_bytes[0]
    assert sum(one.masters[1] for one in ranks) == ranks[0].masters[0]
    assert (ranks[0].masters[0] > 0) == (name == "16-bit weights")
    assert sum(one.kept_gradients for one in ranks) == len(list(network(CASES[name]).parameters()))


@pytest.mark.parametrize("name", mark_long(name for name, case in CASES.items() if case.wire == "fp32"))
def test_every_rank_knows_the_rates_of_all_layers(results: list[dict[str, Found]], name: str) -> None:
    for found in results:
        (whole, whole_gradient), (sharded, gradient) = found[name].layers
        # Weights of others are the rounded ones here.
        rel = 1e-2 if CASES[name].half_weights else 1e-6
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(whole), rtol=rel, atol=0, equal_nan=True)
        assert gradient == pytest.approx(whole_gradient, rel=1e-6)


def test_shares_are_as_even_as_whole_tensors_allow() -> None:
    tensors = {str(size): torch.empty(size) for size in (60, 20, 11, 9)}
    assert find_largest_shares(tensors, 4, {}) == (0.6, 0)
    assert find_largest_shares(tensors, 1, {"9": 5}) == (1, 1)
    alike = {str(number): torch.empty(7) for number in range(6)}
    assert find_largest_shares(alike, 3, {})[0] == pytest.approx(1 / 3)
    # Half of the products are of two tensors, which then have two owners.
    assert find_largest_shares(alike, 2, {"0": 1.0, "1": 1.0}) == (0.5, 0.5)


@pytest.mark.parametrize(("ranks", "largest"), [(2, 0.53), (4, 0.3)])
def test_muons_products_of_resnet50_are_divided_as_evenly_as_its_bytes(ranks: int, largest: float) -> None:
    """One of its filters, of 2,048 x 1,024, has a quarter of all products."""
    with torch.device("meta"):
        net = resnet50(num_classes=1000)
    optimizer = build_optimizer(read_optimizer(**MUON), net)
    owners = build_owners(net, optimizer, 0, ranks)
    shares = find_largest_shares(
        dict(net.named_parameters()), ranks, count_multiply_adds(optimizer, net.named_parameters())
    )
    assert 1 / ranks <= min(shares)
    assert max(shares) <= largest
    said = f"{shares[0]:.1%} of all at most. Its step makes {shares[1]:.1%} of the matrix products at most."
    assert owners.describe().endswith(said)


def test_a_parameter_with_two_names_has_one_owner() -> None:
    one, other = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))
    owners = Owners([("a", one), ("b", other), ("c", one)], 0, 2)
    assert owners.by_name["a"] == owners.by_name["c"] != owners.by_name["b"]


def test_a_view_with_gaps_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="a view with gaps in memory") as error:
        Owners([("layer.weight", nn.Parameter(torch.empty(4, 4)[:, :2]))], 0, 2)
    assert error.value.where == "layer.weight"


def meet_in_another_world(rank: Rank) -> str:
    owners = Owners([("weight", nn.Parameter(torch.empty(4)))], rank.rank, 3)
    communicator = Communicator(rank.world)
    with pytest.raises(UsageError) as error:
        owners.connect(communicator, 600)
    communicator.close()
    return str(error.value)


def test_another_number_of_ranks_is_refused() -> None:
    first, second = run_ranks(2, meet_in_another_world)
    assert "rank 0 of 3 has its parameters, and is now 0 of 2" in first
    assert "Start the run again with --resume." in second
