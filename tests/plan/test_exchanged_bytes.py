"""Bytes of gradients that a plan exchanges, beside those that two real ranks sum in a step."""

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
from headway.model.layer_profile import profile_layers
from headway.plan.step import list_gradients

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
