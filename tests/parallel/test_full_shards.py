"""Rows of weights, gradients and optimizer state on all ranks: the weights of data parallel training, in 1/N of the
memory at rest."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from tests.parallel._memory import expect_two_to_fit, limit_more_memory, read_status
from torch import Tensor, nn

from headway.checkpoint.pieces import Piece
from headway.comm.communicator import Communicator
from headway.comm.reducer import BucketPlan, Reducer
from headway.core.errors import CommunicationError, UsageError
from headway.core.row_shards import find_row_share, get_rows
from headway.model.batch_norm import list_running_statistics
from headway.optim import build_optimizer
from headway.optim.optimizer_recipe import read_optimizer
from headway.parallel.full_shards import FullShards
from headway.setup.precision import Precision

SAMPLES = 7
M_MMAP_THRESHOLD = -3  # of malloc.h


@dataclass(frozen=True)
class Case:
    """What the ranks train, and how."""

    optimizer: dict[str, Any]
    clip_norm: float | None = None
    blocks: tuple[str, ...] = ("0", "3")
    micro_batches: int = 1
    freezes: bool = False


CASES = {
    "sgd": Case({"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    "adamw, one block": Case({"name": "adamw", "lr": 0.01}, blocks=()),
    "clipped, in parts": Case({"name": "adam", "lr": 0.01}, clip_norm=0.1, micro_batches=2),
    "lamb, frozen": Case({"name": "lamb", "lr": 0.01}, freezes=True),
}
NUMBERS = {"sgd": 1, "adam": 2, "lamb": 2}
"""Arrays of the size of a weight that an optimizer keeps."""


class Found(NamedTuple):
    """What a rank found.

    Attributes:
        difference: the largest of a weight, or of a running statistic, to data parallel training.
        shares: bytes of weights, gradients and state at rest, over those of whole ones.
        whole: the whole weights, as this rank lists them.
        expected: the same of data parallel training.
        pieces: what this rank saves of the last layer's weight and its state.
    """

    difference: float
    shares: tuple[float, float, float]
    whole: dict[str, Tensor]
    expected: dict[str, Tensor]
    pieces: list[tuple[tuple[int, ...], int, int]]


def network() -> nn.Module:
    """Rows of 5, 2 and 7: no number of ranks divides them, and two rows leave a third rank without any."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()), nn.Conv2d(5, 2, 3), nn.Flatten(),
        nn.Sequential(nn.Linear(8, 7), nn.ReLU()), nn.Linear(7, 5),
    ).double()  # fmt: skip


class Run:
    """A network that the ranks train together."""

    def __init__(self, communicator: Communicator, case: Case, *, is_sharded: bool) -> None:
        self.communicator = communicator
        self.world, self.case, self.net = communicator.world, case, network()
        if case.freezes:
            next(self.net.parameters()).requires_grad_(False)
        self.optimizer = build_optimizer(read_optimizer(**case.optimizer), self.net, 5.0)
        self.shards: FullShards | None = None
        self.split = None
        if is_sharded:
            whole = dict(self.net.named_parameters())
            self.shards = FullShards(self.net, case.blocks, self.world.rank, self.world.size)
            self.shards.take_parameters(self.optimizer, whole)
            self.shards.connect(self.world)
            self.optimizer.split = self.split = self.shards.split  # type: ignore[attr-defined]
        summed = [] if is_sharded else list(self.net.named_parameters())
        buffers = list_running_statistics(self.net)
        self.reducer = Reducer(summed, communicator, plan=BucketPlan(lambda nbytes: "tree"), buffers=buffers)
        self.precision = Precision("fp32", self.world.device)
        self.stepped = [one for group in self.optimizer.param_groups for one in group["params"]]

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 5, (SAMPLES,), generator=generator)
        low, high = (SAMPLES * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        parts = [one.tensor_split(self.case.micro_batches) for one in (images[low:high], labels[low:high])]
        for index, (part, its_labels) in enumerate(zip(*parts, strict=True), 1):
            losses = nn.functional.cross_entropy(self.net(part), its_labels, reduction="none")
            if index == self.case.micro_batches:
                if self.shards is not None:
                    self.shards.prepare_for_backward()
                self.reducer.prepare_for_backward()
            losses.backward(torch.full_like(losses, 1 / SAMPLES))
        if self.shards is not None:
            self.shards.take_gradients(self.communicator)
        reduction = self.reducer.finish()
        if self.shards is not None:
            self.shards.complete_step(reduction)
        self.gradient_bytes = count_bytes([one.grad for one in self.stepped if one.grad is not None])
        self.precision.step(self.optimizer, self.case.clip_norm, self.stepped, split=self.split)
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Evaluates other weights than the newest ones, as averages are."""
        torch._foreach_mul_(self.stepped, 2.0)
        self.net.eval()
        outputs: Tensor = self.net(torch.ones(1, 3, 6, 6, dtype=torch.float64))
        self.net.train()
        torch._foreach_mul_(self.stepped, 0.5)
        return outputs

    def count_state_bytes(self) -> int:
        state = self.optimizer.state.values()
        return count_bytes([one for values in state for one in values.values() if one.dim()])


def count_bytes(tensors: list[Tensor]) -> int:
    storages = [one.untyped_storage() for one in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def compare(rank: Rank) -> dict[str, tuple[Any, ...]]:
    communicator = Communicator(rank.world)
    found = {}
    for name, case in CASES.items():
        whole, sharded = (Run(communicator, case, is_sharded=is_sharded) for is_sharded in (False, True))
        for number in range(5):
            whole.step(number)
            sharded.step(number)
            # An evaluation between two steps must not leave weights that the next step misses.
            assert torch.allclose(whole.compute(), sharded.compute(), rtol=0, atol=1e-12)
        shards = sharded.shards
        assert shards is not None
        rows = dict(shards.named_parameters())
        differences = [
            (rows[name] - value[slice(*part.rows)]).detach().abs().max()
            for name, value in whole.net.named_parameters()
            if (part := shards.parts.by_name[name]).rows.length
        ]
        pairs = zip(whole.net.buffers(), sharded.net.buffers(), strict=True)
        differences += [(one - other).abs().max() for one, other in pairs]
        shares = (
            count_bytes([one.detach() for one in rows.values()]) / count_bytes(list(whole.net.parameters())),
            sharded.gradient_bytes / count_bytes([one.detach() for one in whole.stepped]),
            sharded.count_state_bytes() / whole.count_state_bytes(),
        )
        state = sharded.optimizer.state[rows["4.weight"]]
        saved = {"model/4.weight": rows["4.weight"], **{f"optimizer/4.weight/{key}": one for key, one in state.items()}}
        pieces = [one for one in shards.parts.wrap(saved).values() if isinstance(one, Piece)]
        found[name] = tuple(
            Found(
                float(max(differences).detach()),
                shares,
                shards.list_whole(),
                {name: value.detach() for name, value in whole.net.named_parameters()},
                [(one.shape, one.start, len(one.tensor)) for one in pieces],
            )
        )
        sharded.reducer.close()
        whole.reducer.close()
    communicator.close()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.check)])
def test_the_weights_are_those_of_data_parallel_training_in_a_share_of_the_memory(ranks: int) -> None:
    every = run_ranks(ranks, compare)
    parameters = dict(network().named_parameters())
    # Each rank has room for as many rows as the first one.
    share = find_row_share([one.shape for one in parameters.values()], ranks)
    assert share < 1 / ranks + 0.12
    for name, case in CASES.items():
        for rank, found in enumerate(Found(*one[name]) for one in every):
            assert found.difference < 1e-12, name
            weights, gradients, state = found.shares
            assert weights == pytest.approx(share)
            # Gradients lie in buffers with the room of the weights; state has no room that is not used.
            assert gradients <= share + 0.05
            assert state <= share + 0.05
            start, stop = get_rows(5, rank, ranks)
            assert found.pieces == [((5, 7), start, stop - start)] * (1 + NUMBERS.get(case.optimizer["name"], 2))
            assert found.whole.keys() == (parameters.keys() if rank == 0 else set())
            for key, value in found.whole.items():
                assert torch.allclose(value, found.expected[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda one: nn.ModuleDict({"a": one, "b": one}), "b.weight: this parameter is also a.weight"),
        (lambda one: nn.ParameterDict({"scale": nn.Parameter(torch.ones(()))}), "scale: this parameter is a single"),
    ],
)
def test_what_has_no_rows_of_its_own_is_refused(build: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        FullShards(build(nn.Linear(2, 2)), (), 0, 2)
    assert said in str(error.value)


class Fork(nn.Module):
    """Two layers of one size, of which each rank uses another."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers, self.rank = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), rank

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[self.rank](x))  # type: ignore[no-any-return]


def part_ways(rank: Rank) -> str:
    communicator, net = Communicator(rank.world), Fork(rank.rank)
    shards = FullShards(net, (), rank.rank, 2)
    shards.connect(rank.world)
    reducer = Reducer([], communicator)
    # Texts of other lengths are no reason.
    rank.world.control.gather_bytes(b"a" * (1 + rank.rank))
    shards.prepare_for_backward()
    net(torch.ones(3, 4)).sum().backward()
    shards.take_gradients(communicator)
    with pytest.raises(CommunicationError) as error:
        reducer.finish()
    communicator.close()
    return str(error.value)


def test_ranks_that_use_other_layers_are_told() -> None:
    """FSDP2 adds the gradients of the one rank's layer to those of the other's."""
    for said in run_ranks(2, part_ways):
        assert "ranks issued different operations, and sums mixed them up" in said
        assert "rank 0: gradients of all weights but layers.1.weight, layers.1.bias;" in said


def connect_others(rank: Rank) -> str:
    shards = FullShards(network(), (), 1 - rank.rank, 2)
    with pytest.raises(UsageError) as unmet:
        shards.group  # noqa: B018
    with pytest.raises(UsageError) as error:
        shards.connect(rank.world)
    return f"{unmet.value} {error.value}"


def test_another_place_is_refused() -> None:
    for said in run_ranks(2, connect_others):
        assert "before the ranks have met" in said
        assert "Start the run again with --resume." in said


def train_under_limit(rank: Rank, budget_bytes: int | None) -> int:
    """Two steps of Adam on a network of 100 MB, with so many bytes more than the process has; None: any number.

    Returns the bytes that they took; -1 if there were too few.
    """
    torch.set_num_threads(1)
    # Gathered weights that malloc keeps when they are dropped say nothing of what a step needs.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    communicator = Communicator(rank.world)
    held = 0
    # The first, small network loads what every step needs.
    for width in (16, 1024):
        if width > 16 and budget_bytes is not None:
            limit_more_memory(budget_bytes)
        held = read_status("VmSize")
        try:
            net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(24)))
            optimizer = build_optimizer(read_optimizer(name="adam", lr=0.01), net, 5.0)
            shards = None
            if rank.size > 1:
                whole = dict(net.named_parameters())
                shards = FullShards(net, [str(number) for number in range(24)], rank.rank, rank.size)
                shards.take_parameters(optimizer, whole)
                shards.connect(rank.world)
                del whole
            for _ in range(2):
                if shards is not None:
                    shards.prepare_for_backward()
                net(torch.ones(4, width)).sum().backward()
                if shards is not None:
                    shards.take_gradients(communicator)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            return -1
    return read_status("VmPeak") - held


@pytest.mark.check
def test_weights_too_many_for_one_process_train_on_two() -> None:
    """Two take 0.72 of it: half of the weights, gradients and state, and the blocks at work."""
    expect_two_to_fit(train_under_limit, 0.8)
