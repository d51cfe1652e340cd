"""Users' own DistributedDataParallel models: our sums instead of DDP's change nothing but the route."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests._support import free_port, packed_digits
from tests.comm._ranks import ROOT, Rank, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headway.comm import ddp
from headway.comm.communicator import ALGORITHMS, Communicator
from headway.comm.ddp import build_communicator, build_hook, build_powersgd_hook
from headway.core.errors import UsageError
from headway.core.world import World

PLACES = [
    (0, 0, 1, 1),
    pytest.param((0, 0), marks=pytest.mark.check),
    pytest.param((0, 1), marks=pytest.mark.check),
    pytest.param((0, 1, 0, 1), marks=pytest.mark.check),
]
"""Numbers of the hosts that the ranks are on."""
EACH_ITS_BUCKET = 1e-5
"""MB: no two parameters together."""


def on_loopback(rank: int) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": "lo"}


def started(rank: Rank) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore("user", rank.store), rank=rank.rank, world_size=rank.size)


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 3)
    ).to(dtype)


def batches(rank: int, steps: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(3, 2, 6, 6, generator=make, dtype=torch.float64)
        yield x.to(dtype), torch.randint(3, (3,), generator=make)


def trained(
    rank: Rank,
    hook: tuple[Any, Any] | None,
    *,
    dtype: torch.dtype = torch.float64,
    steps: int = 4,
    accumulate: int = 1,
    **options: Any,
) -> list[Tensor]:
    """The weights after some steps of DDP."""
    model = DistributedDataParallel(net(dtype), bucket_cap_mb=options.pop("bucket_cap_mb", 0.005), **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches(rank.rank, steps, dtype)):
        with ExitStack() as stack:
            if (step + 1) % accumulate:
                stack.enter_context(model.no_sync())
            nn.functional.cross_entropy(model(x), y).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def every_algorithm(rank: Rank) -> dict[str, float]:
    started(rank)
    communicator = Communicator(rank.world)
    plain, found = {n: trained(rank, None, accumulate=n) for n in (1, 2)}, {}
    for algorithm in ALGORITHMS:
        hook = build_hook(communicator, algorithm=algorithm)
        found[algorithm] = distance(trained(rank, hook, static_graph=True), plain[1])
        assert communicator.log[-1].algorithm == algorithm
        hook = build_hook(communicator, algorithm=algorithm, wire="fp16")
        accumulated = trained(rank, hook, accumulate=2, gradient_as_bucket_view=True)
        found[f"{algorithm} fp16"] = distance(accumulated, plain[2])
    communicator.close()
    return found


@pytest.mark.parametrize("hosts", PLACES, ids=str)
def test_every_algorithm_gives_what_ddp_gives(hosts: tuple[int, ...]) -> None:
    """In float64, which crosses as it is whatever the wire; also with accumulation."""
    for found in run_ranks(len(hosts), every_algorithm, hosts=hosts, environ=on_loopback):
        assert {name: value for name, value in found.items() if value > 1e-12} == {}


def chosen(rank: Rank) -> tuple[list[str], list[str], float]:
    started(rank)
    communicator = Communicator(rank.world)
    plain = trained(rank, None)
    asked: list[int] = []

    def large_by_tree(nbytes: int) -> str:
        asked.append(nbytes)
        return "tree" if nbytes > 10_000 else "leader"

    ours = trained(rank, build_hook(communicator, chooser=large_by_tree))
    by = ["tree" if nbytes > 10_000 else "leader" for nbytes in asked]
    went = [entry.algorithm for entry in communicator.log][-len(asked) :]
    communicator.close()
    return by, went, distance(ours, plain)


def test_each_bucket_by_the_choosers_algorithm() -> None:
    for by, went, difference in run_ranks(2, chosen, hosts=(0, 1), environ=on_loopback):
        assert went == by
        assert set(went) == {"tree", "leader"}
        assert difference < 1e-12


def measured(rank: Rank) -> tuple[float, list[str]]:
    started(rank)
    communicator = Communicator(rank.world)
    plain, hook = trained(rank, None), build_hook(communicator)
    choices = [hook[0].choose_algorithm(1 << bits) for bits in range(8, 26)]
    difference = distance(trained(rank, hook), plain)
    communicator.close()
    return difference, choices


@pytest.mark.check
def test_links_are_measured_where_nothing_is_said() -> None:
    """All ranks make the same choices."""
    found = run_ranks(4, measured, hosts=(0, 0, 1, 1), environ=on_loopback)
    assert max(difference for difference, _ in found) < 1e-12
    assert all(choices == found[0][1] for _, choices in found)


def sixteen_bits(rank: Rank) -> dict[str, list[float]]:
    started(rank)
    communicator = Communicator(rank.world)
    found = {}
    for wire in ("fp16", "bf16"):
        gradients = []
        for hook in (None, build_hook(communicator, algorithm="two_dimensional", wire=wire)):
            model = DistributedDataParallel(net(torch.float32), bucket_cap_mb=EACH_ITS_BUCKET)
            if hook is not None:
                model.register_comm_hook(*hook)
            for x, y in batches(rank.rank, 2, torch.float32):  # the second one with DDP's final buckets
                model.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            gradients.append([(p.dim(), p.grad) for p in model.parameters()])
        for (dim, theirs), (_, ours) in zip(*gradients, strict=True):
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            found.setdefault(f"{wire} {'vectors' if dim == 1 else 'matrices'}", []).append(error)
    communicator.close()
    return found


def test_sixteen_bits_between_hosts_but_not_for_biases_and_norms() -> None:
    for found in run_ranks(2, sixteen_bits, hosts=(0, 1), environ=on_loopback):
        for wire, epsilon in (("fp16", 2**-11), ("bf16", 2**-8)):
            assert max(found[f"{wire} vectors"]) < 1e-5  # a bias before a norm has a gradient of rounding alone
            assert all(0 < error < 2 * epsilon for error in found[f"{wire} matrices"])


def uneven(rank: Rank) -> tuple[float, float]:
    started(rank)
    communicator = Communicator(rank.world)
    found = []
    for hook in (None, build_hook(communicator, algorithm="two_dimensional")):
        model = DistributedDataParallel(net(torch.float64), bucket_cap_mb=0.005)
        if hook is not None:
            model.register_comm_hook(*hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for x, y in batches(rank.rank, 2 + 2 * rank.rank, torch.float64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])
    communicator.close()
    moved = distance(found[1], list(net(torch.float64).parameters()))
    return distance(*found), moved


def test_uneven_inputs_under_join() -> None:
    for difference, moved in run_ranks(3, uneven, environ=on_loopback):
        assert difference < 1e-12
        assert moved > 0.01


class Partly(nn.Module):
    """`a` is used where the flag is set, `b` never."""

    def __init__(self, uses_a: bool) -> None:
        super().__init__()
        self.uses_a = uses_a
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) if self.uses_a else x)


def unused(rank: Rank) -> list[Tensor | None]:
    started(rank)
    communicator = Communicator(rank.world)
    model = Partly(rank.rank == 1).double()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=EACH_ITS_BUCKET)
    wrapped.register_comm_hook(*build_hook(communicator, algorithm="ring"))
    wrapped(torch.ones(1, 2).double()).sum().backward()
    communicator.close()
    return [model.a.bias.grad, model.b.bias.grad, model.c.bias.grad]


def test_parameters_that_some_or_all_ranks_do_not_use() -> None:
    for a, b, c in run_ranks(2, unused, environ=on_loopback):
        assert a.tolist() == [1, 1]  # 2 on one rank, 0 on the other
        assert b is None
        assert c.tolist() == [1, 1]


def beside(rank: Rank) -> list[Any]:
    """build_communicator: all ranks, then two groups at once, one of them in another order than the ranks'."""
    started(rank)
    out: list[Any] = []
    members = [[3, 1], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = groups[rank.rank % 2 == 0]
    for group in (None, mine):
        communicator = build_communicator(group)
        tensor = torch.tensor([float(10**rank.rank)])
        communicator.all_reduce(tensor).wait()
        out.append((tensor.item(), communicator.world.rank, dist.get_rank(group), len(communicator.world.hosts)))
        communicator.close()
        communicator.world.close()
    try:
        build_communicator(groups[rank.rank % 2])
    except UsageError as error:
        out.append(str(error))
    dist.destroy_process_group()
    return out


def test_a_communicator_beside_a_process_group() -> None:
    found = run_ranks(4, beside, environ=on_loopback)
    for number, (whole, part, refusal) in enumerate(found):
        assert whole == (1111, number, number, 1)
        assert part[0] == (1010 if number % 2 else 101)
        assert part[1] == part[2] == number // 2
        assert "this rank is not in the process group" in refusal


def with_secrets(rank: Rank, given: list[str]) -> Any:
    """The secret of the communicator's world, and the texts that went through the user's group."""
    started(rank)
    told: list[str] = []
    gather = ddp.gather_json
    ddp.gather_json = lambda value, group: told.append(json.dumps(value)) or gather(value, group)  # type: ignore[func-returns-value]
    os.environ["HEADWAY_SECRET"] = given[rank.rank]
    try:
        communicator = build_communicator()
    except UsageError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    secret = communicator.world.secret.decode()
    communicator.world.control.barrier()
    communicator.close()
    communicator.world.close()
    return secret, any(secret in text for text in told)


def test_the_given_secret_is_taken_and_never_sent() -> None:
    given = "a secret of thirty-two characters"
    assert run_ranks(2, with_secrets, [given] * 2, environ=on_loopback) == [(given, False)] * 2
    (made, was_sent), (same, _) = run_ranks(2, with_secrets, [""] * 2, environ=on_loopback)
    assert made == same != ""
    assert was_sent


def test_a_secret_on_some_ranks_alone_is_refused_on_all() -> None:
    for said in run_ranks(2, with_secrets, ["", "a secret of thirty-two characters"], environ=on_loopback):
        assert "HEADWAY_SECRET is set on some ranks and not on others" in said


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(UsageError, match=r"no process group.*init_process_group"):
        build_communicator()


def failing(rank: Rank) -> str:
    started(rank)
    communicator = Communicator(rank.world)
    model = DistributedDataParallel(net(torch.float32))
    model.register_comm_hook(*build_hook(communicator, algorithm="ring"))
    communicator.world.abort("rank 7 was lost")
    (x, y), *_ = batches(rank.rank, 1, torch.float32)
    try:
        nn.functional.cross_entropy(model(x), y).backward()
    except RuntimeError as error:
        communicator.close()
        return str(error)
    return "no error"


def test_a_failed_sum_raises_in_the_backward_pass_with_its_words() -> None:
    for said in run_ranks(2, failing, environ=on_loopback):
        assert "GenerationEndedError: rank 7 was lost" in said


def low_rank(rank: Rank) -> tuple[float, float, list[float]]:
    started(rank)
    plain = trained(rank, None, steps=3, dtype=torch.float32)
    warm = trained(rank, build_powersgd_hook(warmup_steps=4), steps=3, dtype=torch.float32)
    model = DistributedDataParallel(net(torch.float32))
    state, hook = build_powersgd_hook(rank=2, warmup_steps=2)
    assert state.matrix_approximation_rank == 2
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    (x, y), *_ = batches(rank.rank, 1, torch.float32)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    saved, *_ = state.compression_stats()
    ours = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    other = ours.clone()
    dist.broadcast(other, 0)
    return distance(plain, warm), float((ours - other).abs().max()), [losses[0], losses[-1], saved]


def test_powersgd_of_torch() -> None:
    for warm, apart, (first, last, saved) in run_ranks(2, low_rank, environ=on_loopback):
        assert warm < 1e-6
        assert apart == 0
        assert last < first / 2
        assert saved > 1.5


@pytest.mark.parametrize(
    ("options", "match"),
    [({"rank": 0}, "factors of rank 0"), ({"warmup_steps": 1}, "1 warm-up steps before PowerSGD")],
)
def test_powersgd_refuses(options: dict[str, int], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        build_powersgd_hook(**options)


def test_a_hook_refuses() -> None:
    world = World.create_single(torch.device("cpu"))
    communicator = Communicator(world)
    for options, match in (
        ({"algorithm": "spiral"}, r"unknown algorithm 'spiral'\. Take ring, tree, leader, two_dimensional or auto"),
        ({"algorithm": "ring", "chooser": len}, "both a chooser and 'ring' for all buckets"),
        ({"algorithm": "ring", "wire": "fp8"}, r"unknown wire 'fp8'\. Take fp32, fp16, bf16\."),
    ):
        with pytest.raises(UsageError, match=match):
            build_hook(communicator, **options)  # type: ignore[arg-type]
    assert build_hook(communicator)[0].choose_algorithm(1 << 20) == "ring"  # nothing to measure
    communicator.close()
    world.close()


@pytest.mark.check
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_blocks_of_the_page_run_on_several_ranks(ranks: int, tmp_path: Path) -> None:
    packed_digits(tmp_path, per_class=100, split=0.2)
    page = (ROOT / "docs/library/communication.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    said = [ran(block, ranks, tmp_path) for block in blocks]
    total = ranks * (ranks + 1) // 2
    assert said[0] == [f"rank {rank} of {ranks}: {total}\n" for rank in range(ranks)]
    assert f"over {ranks} ranks" in said[1][0]
    assert said[1][1:] == [""] * (ranks - 1)
    assert re.fullmatch(r"\d+ steps on every rank\n", said[2][0])
    assert said[2][1:] == [""] * (ranks - 1)
    assert len(set(said[3])) == 1
    assert re.fullmatch(r"\d+\.\d{6} on every rank\n", said[3][0])
    assert said[4] == ["True ['Conv2d', 'SyncBatchNorm', 'ReLU']\n"] * ranks
    assert re.fullmatch(r"noise scale \d+ samples, 95 % interval \d+ to (\d+|inf)\n", said[5][0])
    assert said[5][1:] == [""] * (ranks - 1)


def ran(code: str, ranks: int, folder: Path) -> list[str]:
    """What each rank wrote."""
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        launcher = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-W", "error", "-c", code]
        environ = {**os.environ, **launcher, **on_loopback(rank)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=folder, env=environ, **pipes))
    try:
        said = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [(process.returncode, err) for process, (_, err) in zip(processes, said, strict=True)] == [(0, "")] * ranks
    return [out for out, _ in said]
