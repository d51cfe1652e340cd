"""Bytes that a plan exchanges, beside those that real ranks exchange in a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from tests.plan._workload import workload
from torch import nn

from headway.comm.communicator import Communicator
from headway.comm.reducer import BucketPlan, Reducer
from headway.model import alexnet, small_net
from headway.model.layer_profile import profile_layers
from headway.parallel.maps import to_parts
from headway.parallel.place import Place
from headway.parallel.strips import run_in_strips
from headway.plan.step import list_gradients
from headway.plan.strips import count_split_bytes, describe_split
from headway.plan.tower_layers import find_towers

# The last bucket carries a digest and a few numbers beside the gradients, in 4 bytes each.
MOST_BESIDE = 4 * 200
IMAGES = (3, 3, 8, 8)


def build_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 10))


def autocast(precision: Literal["fp32", "bf16"]) -> Any:
    return nullcontext() if precision == "fp32" else torch.autocast("cpu", torch.bfloat16)


def sum_gradients(rank: Rank, precision: Literal["fp32", "bf16"]) -> int:
    """Returns the bytes that a rank gives to its all-reduces in the second step."""
    network, communicator = build_network(), Communicator(rank.world)
    reducer = Reducer(network.named_parameters(), communicator, plan=BucketPlan(bucket_bytes=4096))
    for _ in range(2):
        communicator.log.clear()
        reducer.prepare_for_backward()
        with autocast(precision):
            loss = network(torch.ones(IMAGES)).float().sum()
        loss.backward()
        reducer.finish(loss.detach())
    sent = sum(entry.bytes for entry in communicator.log)
    reducer.close()
    communicator.close()
    return sent


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_exchanges_what_two_ranks_exchange(precision: Literal["fp32", "bf16"]) -> None:
    layers = profile_layers(build_network(), torch.ones(IMAGES), lambda: autocast(precision))
    planned = sum(one.nbytes for one in list_gradients(workload().model_copy(update={"layers": layers})))
    # The weights stay fp32 under autocast, and so do their gradients: 4 bytes in either precision.
    assert planned == 4 * sum(value.numel() for value in build_network().parameters())
    for sent in run_ranks(2, sum_gradients, precision):
        assert planned <= sent <= planned + MOST_BESIDE


def build_windows() -> nn.Module:
    """Windows of every kind: strides, dilation, an even kernel, a pooling that rounds up, a transposed convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 4, (5, 3), stride=2, padding=(2, 1)),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Conv2d(4, 4, 4, padding=1),
        nn.AvgPool2d(2, stride=1, ceil_mode=True),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


SIDE = 26
NETWORKS = {"windows": build_windows, "small_net": lambda: small_net(3)}


def build_split(name: str) -> nn.Module:
    network = NETWORKS[name]()
    # Gives the lazy layer its weights.
    network(torch.zeros(2, 3, SIDE, SIDE))
    return network


def send_parts(rank: Rank, name: str, images: int, grid: tuple[int, int]) -> float:
    """Trains a step of so many images that the ranks share; returns the bytes that this rank has sent."""
    torch.manual_seed(0)
    network, place, sent = build_split(name), Place.create(rank.world, grid), list[float]()

    # Which argument is sent, and how often each byte of it leaves the rank.
    arguments = {
        "all_to_all": (1, 1.0),
        "all_gather": (1, rank.size - 1.0),
        "all_reduce": (0, 2 * (rank.size - 1) / rank.size),
    }

    def listen(group: Any, method: str, at: int, times: float) -> None:
        call = getattr(group, method)

        def count(*given: Any) -> Any:
            sent.append(times * given[at].numel() * given[at].element_size())
            return call(*given)

        setattr(group, method, count)

    for group in {id(one): one for one in (place.ranks, *place.lines)}.values():
        for method, (at, times) in arguments.items():
            listen(group, method, at, times)
    samples = place.divide_samples(images)
    own = torch.randn(samples[rank.rank].length, 3, SIDE, SIDE)
    run_in_strips(network, to_parts(own, samples, place)).sum().backward()
    return sum(sent)


@pytest.mark.parametrize(("name", "grid"), [("windows", (3, 1)), ("windows", (2, 2)), ("small_net", (2, 1))])
def test_a_plan_of_shared_images_exchanges_what_ranks_exchange(name: str, grid: tuple[int, int]) -> None:
    """Images, rows and columns, statistics, and the ends of the maps, forward and backward, to the byte."""
    layers = profile_layers(build_split(name), torch.zeros(3, 3, SIDE, SIDE), nullcontext)
    planned = workload().model_copy(update={"layers": layers})
    image = planned.input.model_copy(update={"height": SIDE, "width": SIDE})
    split = describe_split(planned.model_copy(update={"input": image}))
    ranks = grid[0] * grid[1]
    sent = run_ranks(ranks, send_parts, name, 2 * ranks, grid)
    assert count_split_bytes(split, 2 * ranks, grid) == pytest.approx(max(sent))


def test_a_plan_exchanges_what_two_towers_of_alexnet_exchange() -> None:
    """`bench.parallel` counts these bytes on the wire: 128 x 13 x 13 channels, their gradients, and 128 x 6 x 6."""
    with torch.device("meta"):
        network, images = alexnet(1000, two_towers=True), torch.ones(2, 3, 227, 227)
    towers = find_towers(workload().model_copy(update={"layers": profile_layers(network, images, nullcontext)}))
    assert towers is not None
    assert 4 * sum(towers.list_exchanged_values()) == 4 * (2 * 128 * 13 * 13 + 128 * 6 * 6)
    assert {name.split(".")[1] for name in towers.elsewhere} == {"1"}


def test_a_network_without_towers_has_none() -> None:
    assert find_towers(workload()) is None
