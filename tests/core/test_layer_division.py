"""The exchange of divided layers by given rates: bytes, seconds, and which layers it pays to divide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.collectives import Link, Network
from headway.core.layer_division import (
    DenseLayer,
    Scheme,
    choose_division,
    count_divided_bytes,
    predict_divided_s,
    predict_exposed_s,
)

# AlexNet's, and the bytes of all its gradients.
ALEXNET = [
    DenseLayer("fc6", 9216, 4096, 4 * (9216 + 1) * 4096),
    DenseLayer("fc7", 4096, 4096, 4 * (4096 + 1) * 4096),
    DenseLayer("fc8", 4096, 1000, 4 * (4096 + 1) * 1000),
]
ALL_BYTES = 4 * 60_965_224


def hosts(count: int, bytes_s: float, *, per_host: int = 1, latency_s: float = 1e-4) -> Network:
    return Network(count, per_host, Link(1e-5, 10e9), Link(latency_s, bytes_s), 10e9)


def test_bytes_are_counted_piece_by_piece() -> None:
    """Each of 4 ranks sends inputs of its 3 samples to 3 others, its 5 outputs of 9 other samples, and as much back."""
    layer = DenseLayer("fc", 7, 20, 0)
    inputs, outputs = 3 * 3 * 7 * 4, 9 * 5 * 4
    assert count_divided_bytes(layer, 12, 4, scheme="all") == 2 * inputs + 2 * outputs
    assert count_divided_bytes(layer, 12, 4, scheme="turns") == 3 * inputs + 2 * outputs
    assert count_divided_bytes(layer, 12, 4, value_bytes=2, scheme="all") == inputs + outputs
    assert count_divided_bytes(layer, 12, 1, scheme="all") == 0


@pytest.mark.parametrize(("scheme", "exchanges"), [("all", 4), ("turns", 20)])
def test_all_pieces_to_other_hosts_share_the_link_of_a_host(scheme: Scheme, exchanges: int) -> None:
    layer, network = ALEXNET[0], hosts(2, 25e6, per_host=2)
    to_each = count_divided_bytes(layer, 32, 4, scheme=scheme) / 3
    # Two ranks of a host send to two of the other.
    assert predict_divided_s(layer, 32, network, scheme=scheme) == pytest.approx(exchanges * 1e-4 + 4 * to_each / 25e6)


def test_alexnet_behind_a_slow_link_divides_its_three_layers() -> None:
    found = choose_division(ALEXNET, ALL_BYTES, 32, hosts(2, 25e6), 0.8)
    assert found.layers == ("fc6", "fc7", "fc8")
    # 244 MB at 25 MB/s, of which the backward pass hides 0.8 s.
    assert found.data_s == pytest.approx(ALL_BYTES / 25e6 - 0.8, rel=0.01)
    assert found.divided_s < 0.03 * found.data_s
    assert found.pays


def test_where_the_backward_pass_hides_the_gradients_nothing_pays() -> None:
    found = choose_division(ALEXNET, ALL_BYTES, 32, hosts(2, 10e9), 0.8)
    assert found.layers
    assert found.data_s < 0.1 * found.exchange_s
    assert not found.pays


def test_with_more_samples_fewer_layers_pay() -> None:
    """A layer's inputs and outputs are as many bytes as its gradients: fc8's from some 870 samples on."""
    batches = (32, 1024, 100_000)
    found = [choose_division(ALEXNET, ALL_BYTES, batch, hosts(2, 25e6), 0.0) for batch in batches]
    assert [one.layers for one in found[:2]] == [("fc6", "fc7", "fc8"), ("fc6", "fc7")]
    assert [one.pays for one in found] == [True, True, False]


def test_without_a_layer_there_is_nothing_to_choose() -> None:
    found = choose_division([], ALL_BYTES, 32, hosts(2, 25e6), 0.0)
    assert (found.layers, found.pays) == ((), False)


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 10_000)), min_size=1, max_size=4),
    st.integers(2, 1000),
    st.floats(1e6, 1e10),
    st.floats(0, 1),
    st.sampled_from(["all", "turns"]),
)
def test_the_seconds_are_those_of_the_chosen_layers(
    shapes: list[tuple[int, int]], batch: int, bytes_s: float, backward_s: float, scheme: Scheme
) -> None:
    layers = [DenseLayer(str(at), rows, columns, 4 * rows * columns) for at, (rows, columns) in enumerate(shapes)]
    total, network = sum(one.gradient_bytes for one in layers) + 1_000_000, hosts(3, bytes_s)
    found = choose_division(layers, total, batch, network, backward_s, scheme=scheme)

    def predict(divided: list[DenseLayer]) -> float:
        left = total - sum(one.gradient_bytes for one in divided)
        own_s = sum(predict_divided_s(one, batch, network, scheme=scheme) for one in divided)
        return own_s + predict_exposed_s(left, network, backward_s)

    assert found.data_s == predict([])
    assert found.divided_s == pytest.approx(predict([one for one in layers if one.name in found.layers]))
    assert found.divided_s <= predict(layers) * (1 + 1e-12)
