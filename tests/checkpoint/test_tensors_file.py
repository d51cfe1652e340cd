"""TensorsFile writes what the safetensors library writes; shares divide tensors over ranks."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from headway.checkpoint.sharding import assign_owners, compute_layout_digest, copy_to_host
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import CheckpointError

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "slice": lambda t: t[:, 1:, ::2],
    "transposed": lambda t: t.transpose(0, 3),
    "expanded": lambda t: t[:1].expand(5, -1, -1, -1),
    "scalar": lambda t: t[0, 0, 0, 0],
    "empty": lambda t: t[:0],
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    data = (
        torch.arange(2 * 3 * 4 * 4 * dtype.itemsize, dtype=torch.int64)
        .mul(37)
        .remainder(2 if dtype == torch.bool else 120)
    )
    return data.to(torch.uint8).view(dtype).reshape(2, 3, 4, 4)


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    file, out = TensorsFile(tensors), io.BytesIO()
    sha256 = file.write(out)
    data = out.getvalue()
    assert len(data) == file.length
    assert hashlib.sha256(data).hexdigest() == sha256
    return data


def by_the_library(tensors: dict[str, torch.Tensor]) -> bytes:
    return save({name: t.detach().contiguous().clone() for name, t in tensors.items()})


@pytest.mark.parametrize("memory", LAYOUTS)
def test_it_is_what_the_library_writes(memory: str) -> None:
    tensors = {f"{dtype} {memory}": LAYOUTS[memory](values(dtype)) for dtype in DTYPES}
    assert written(tensors) == by_the_library(tensors)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.sampled_from(DTYPES), max_size=9))
def test_any_names_in_any_order(dtypes: dict[str, torch.dtype]) -> None:
    tensors = {name: values(dtype)[:1] for name, dtype in dtypes.items() if name != "__metadata__"}
    try:
        expected = by_the_library(tensors)
    except UnicodeEncodeError:  # half of a surrogate pair
        with pytest.raises(UnicodeEncodeError):
            written(tensors)
        return
    assert written(tensors) == expected


def test_a_large_tensor_goes_through_in_pieces() -> None:
    tensors = {"large": torch.arange(3_000_000), "next": torch.ones(3)}
    assert torch.equal(load(written(tensors))["large"], tensors["large"])


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_what_the_format_cannot_hold_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"odd one is of torch.*, which safetensors files cannot hold"):
        TensorsFile({"good": torch.ones(1), "odd one": tensor})


SIZES = st.dictionaries(st.text("abc/", min_size=1, max_size=6), st.integers(0, 2000), max_size=30)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 9), st.randoms(use_true_random=False))
def test_every_tensor_has_one_owner_and_the_bytes_are_even(sizes: dict[str, int], ranks: int, chance: object) -> None:
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    owner = assign_owners(tensors, ranks)
    assert owner.keys() == tensors.keys()
    assert set(owner.values()) <= set(range(ranks))
    other_order = list(tensors)
    chance.shuffle(other_order)  # type: ignore[attr-defined]
    assert assign_owners({name: tensors[name] for name in other_order}, ranks) == owner
    load = [sum(sizes[name] for name in sizes if owner[name] == rank) for rank in range(ranks)]
    best = max(sum(sizes.values()) / ranks, max(sizes.values(), default=0))  # nobody can do better than this
    assert max(load) <= best + max(sizes.values(), default=0) * (1 - 1 / ranks)


def test_random_states_are_rank_0s_and_change_nothing_else() -> None:
    """They may have other sizes on other ranks: Python keeps a spare number now and then."""
    tensors = {f"model/{n}": torch.empty(10 * n) for n in range(9)}
    with_random = {**tensors, "random/torch": torch.empty(5000), "random/python_spare": torch.empty(0)}
    owner = assign_owners(with_random, 3)
    assert {owner[name] for name in owner if name.startswith("random/")} == {0}
    assert {name: owner[name] for name in tensors} == assign_owners(tensors, 3)
    digest = compute_layout_digest(with_random, owner)
    assert digest == compute_layout_digest({**with_random, "random/python_spare": torch.empty(1)}, owner)
    for changed in ({"model/3": torch.empty(31)}, {"model/3": torch.empty(30, dtype=torch.int32)}):
        assert digest != compute_layout_digest({**with_random, **changed}, owner)
    assert digest != compute_layout_digest(with_random, assign_owners(with_random, 2))


def test_a_copy_stays_as_it_was() -> None:
    source = {name: make(torch.ones(2, 3, 4, 4)) for name, make in LAYOUTS.items()}
    copies, wait = copy_to_host(source)
    for tensor in source.values():
        if tensor.numel() and not tensor.stride().count(0):
            tensor.detach().zero_()
    wait()
    assert all((copy == 1).all() and not copy.requires_grad for copy in copies.values())


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_taken_before_what_follows_on_its_stream() -> None:
    source = torch.ones(1 << 26, device="cuda")
    copies, wait = copy_to_host(
        {"a": source, "b": torch.ones(2, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last)}
    )
    source.zero_()
    wait()
    assert copies["a"].is_pinned()
    assert all((copy == 1).all() for copy in copies.values())
