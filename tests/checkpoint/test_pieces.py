"""Tensors in pieces: written by any division over any number of ranks, read whole and by any other division."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from headway.checkpoint.agreement import StoreExchange
from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoint, Checkpoints, read
from headway.checkpoint.manifest import MANIFEST
from headway.checkpoint.pieces import Piece
from headway.checkpoint.stored_tensors import StoredTensors
from headway.core.errors import CheckpointError, HeadwayError

State = dict[str, torch.Tensor | Piece]


def save(folders: Sequence[Path], states: Sequence[State]) -> list[str]:
    """Saves step 1 by a rank for each state, each in a thread. Returns the error of each rank, or an empty text."""
    store, errors = HashStore(), [""] * len(states)

    def run(rank: int) -> None:
        saver = BackgroundSaver(Checkpoints(folders[rank]), asynchronous=False)
        saver.set_exchange(StoreExchange(store, rank, len(states)))
        try:
            saver.save(1, states[rank], {"position": 7})
        except HeadwayError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def divide(tensor: torch.Tensor, axis: int, cuts: Sequence[int]) -> list[Piece]:
    """Pieces between the cuts; ranks between equal cuts hold nothing."""
    shape, ends = tuple(tensor.shape), [0, *sorted(cuts), tensor.shape[axis]]
    return [Piece(tensor.narrow(axis, a, b - a), shape, axis, a) for a, b in pairwise(ends)]


def load(folder: Path) -> Checkpoint:
    found = Checkpoints(folder).newest()
    assert found is not None
    assert isinstance(found.tensors, StoredTensors)
    return found


@given(data=st.data(), ranks=st.integers(1, 4))
def test_any_division_comes_back_whole_and_in_ranges(data: st.DataObject, ranks: int) -> None:
    shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3)
    kinds = st.sampled_from((torch.float32, torch.bfloat16, torch.int64))
    states: list[State] = [{"model/common": torch.arange(6.0)} for _ in range(ranks)]
    whole: dict[str, torch.Tensor] = {"model/common": torch.arange(6.0)}
    for number in range(data.draw(st.integers(1, 3))):
        name = f"model/{number}"
        shape = data.draw(shapes)
        whole[name] = torch.randn(shape).to(data.draw(kinds))
        axis = data.draw(st.integers(0, len(shape) - 1))
        cuts = data.draw(st.lists(st.integers(0, shape[axis]), min_size=ranks - 1, max_size=ranks - 1))
        for state, piece in zip(states, divide(whole[name], axis, cuts), strict=True):
            state[name] = piece
    # Tensors that one rank alone has, as an expert and its optimizer state.
    for rank, state in enumerate(states):
        whole[f"expert.{rank}"] = torch.full((2, rank), float(rank))
        state[f"expert.{rank}"] = Piece(whole[f"expert.{rank}"], (2, rank))
    with TemporaryDirectory() as name:
        assert save([Path(name)] * ranks, states) == [""] * ranks
        found = load(Path(name))
        tensors = found.tensors
        assert isinstance(tensors, StoredTensors)
        assert (found.step, found.scalars) == (1, {"position": 7})
        assert set(tensors) == whole.keys()
        assert len(tensors) == len(whole)
        for key, expected in whole.items():
            assert tensors[key].dtype == expected.dtype
            assert torch.equal(tensors[key], expected)
            axis = data.draw(st.integers(0, expected.ndim - 1))
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, expected.shape[axis])] * 2)))
            assert torch.equal(tensors.read_range(key, axis, start, stop), expected.narrow(axis, start, stop - start))


def state(*pieces: tuple[int, int], rows: int = 4) -> list[State]:
    """A tensor of 4 x 2 whose rank r holds rows [pieces[r])."""
    whole = torch.arange(8.0).reshape(4, 2)
    return [{"w": Piece(whole[a:b], (rows, 2), 0, a)} for a, b in pieces]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (state((0, 2), (3, 4)), "the pieces of 'w' do not make a whole: entries 2 to 3 are missing"),
        (state((0, 3), (2, 4)), "the pieces of 'w' do not make a whole: entries 2 to 3 are twice there"),
        (state((0, 2), (2, 3)), "entries 3 to 4 are missing"),
        (state((0, 4), (0, 4)), "entries 0 to 4 are twice there"),
        ([state((0, 2))[0], {"w": Piece(torch.zeros(2, 2).half(), (4, 2), 0, 2)}], "of different shape, type or"),
        ([state((0, 2))[0], {"w": Piece(torch.zeros(4, 1), (4, 2), 1, 1)}], "of different shape, type or division"),
        ([state((0, 2))[0], {}], "entries 2 to 4 are missing"),
        ([state((0, 2))[0], {"w": torch.zeros(2, 2)}], "its tensors have other names, dtypes or shapes than those of"),
    ],
)
def test_pieces_that_are_no_whole_are_refused_on_every_rank(tmp_path: Path, states: list[State], said: str) -> None:
    errors = save([tmp_path] * 2, states)
    assert all(said in error for error in errors), errors
    assert list(tmp_path.glob("step-*")) == []


def test_a_piece_outside_of_its_tensor_is_refused() -> None:
    for shape, axis, start in (((4, 2), 0, 3), ((4, 3), 0, 0), ((4,), 0, 0), ((4, 2), 2, 0), ((4, 2), 0, -1)):
        with pytest.raises(ValueError, match="does not lie in"):
            Piece(torch.zeros(2, 2), shape, axis, start)


def test_ranks_without_a_common_folder_are_refused(tmp_path: Path) -> None:
    """Rank 0 cannot write the pieces of others, who answer that they do not see its folder."""
    errors = save([tmp_path / "a", tmp_path / "b"], state((0, 2), (2, 4)))
    assert all("cannot be seen by rank 1, and each rank has to write its piece" in error for error in errors), errors
    assert all("Set checkpoint.folder to a folder that all hosts share" in error for error in errors)
    assert list((tmp_path / "a").glob("step-*")) == []


def test_ranks_that_never_had_a_common_folder_are_refused_later_too(tmp_path: Path) -> None:
    """The first save has no pieces, and finds out that rank 0 writes alone."""
    store, errors = HashStore(), ["", ""]

    def run(rank: int) -> None:
        saver = BackgroundSaver(Checkpoints(tmp_path / str(rank)), asynchronous=False)
        saver.set_exchange(StoreExchange(store, rank, 2))
        saver.save(1, {"w": torch.zeros(3)}, {})
        # Rank 0 itself has none.
        piece: State = {"w": Piece(torch.zeros(2, 2), (2, 2))} if rank else {}
        try:
            saver.save(2, piece, {})
        except HeadwayError as error:
            errors[rank] = str(error)
        saver.save(3, {"w": torch.ones(3)}, {})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("each rank has to write its piece of a tensor" in error for error in errors), errors
    assert [path.name for path in Checkpoints(tmp_path / "0").paths()] == ["step-00000003", "step-00000001"]


def test_a_range_outside_of_a_tensor_is_refused(tmp_path: Path) -> None:
    assert save([tmp_path] * 2, [one | {"common": torch.zeros(3)} for one in state((0, 2), (2, 4))]) == ["", ""]
    tensors = load(tmp_path).tensors
    assert isinstance(tensors, StoredTensors)
    for name, axis, start, stop in (
        ("w", 0, 0, 5),
        ("w", 0, 3, 2),
        ("w", 2, 0, 1),
        ("w", 0, -1, 2),
        ("common", 0, 0, 4),
    ):
        with pytest.raises(ValueError, match="has no entries"):
            tensors.read_range(name, axis, start, stop)
    with pytest.raises(KeyError):
        tensors.read_range("another", 0, 0, 1)


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest so that its checksum is right."""
    tree = json.loads((folder / MANIFEST).read_text())
    change(tree)
    tree.pop("sha256", None)
    tree["sha256"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(tree))


def edit(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda tree: tree["tensors"]["w"].update(changes)


FIRST, SECOND = ["tensors-0.safetensors", 0, 2], ["tensors-1.safetensors", 2, 4]
FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a list of tensors": (lambda tree: tree.update(tensors=[]), "has a list as tensors"),
    "no tensors": (lambda tree: tree.pop("tensors"), "lacks tensors"),
    "a tensor that is a text": (lambda tree: tree["tensors"].update(w="x"), r"no object as tensors\['w'\]"),
    "no shape": (lambda tree: tree["tensors"]["w"].pop("shape"), r"lacks tensors\['w'\]\.shape"),
    "a shape below 0": (edit(shape=[-4, 2]), r"tensors\['w'\]\.shape, not a list of sizes"),
    "a shape beyond all memory": (edit(shape=[1 << 40, 1 << 40]), r"as tensors\['w'\]\.shape"),
    "no dimension": (edit(axis=2), "a tensor of 2 dimensions has no dimension 2"),
    "a true dimension": (edit(axis=True), r"as tensors\['w'\]\.axis"),
    "no pieces": (edit(pieces=[]), r"as tensors\['w'\]\.pieces"),
    "a gap": (edit(pieces=[FIRST]), "entries 2 to 4 are missing"),
    "an overlap": (edit(pieces=[FIRST, ["tensors-1.safetensors", 1, 4]]), "entries 1 to 2 are twice there"),
    "two in one file": (edit(pieces=[FIRST, ["tensors-0.safetensors", 2, 4]]), "a file holds two of them"),
    "a file that is not there": (edit(pieces=[FIRST, ["x.safetensors", 2, 4]]), "lacks the file x.safetensors of 'w'"),
    "a path": (edit(pieces=[FIRST, ["../x", 2, 4]]), r"as tensors\['w'\]\.pieces"),
    "exchanged": (
        edit(pieces=[["tensors-1.safetensors", 0, 1], ["tensors-0.safetensors", 1, 4]]),
        "holds another piece",
    ),
    "another type": (edit(dtype="F16"), "holds another piece of 'w' than the manifest says"),
    "another shape": (edit(shape=[4, 3]), "holds another piece of 'w'"),
    "a name that no file has": (
        lambda tree: tree["tensors"].update(v=tree["tensors"].pop("w")),
        "tensors-1.safetensors holds 'w', which another file holds too",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_wrong_entry_for_pieces_is_named(tmp_path: Path, name: str) -> None:
    assert save([tmp_path] * 2, state((0, 2), (2, 4))) == ["", ""]
    (path,) = tmp_path.glob("step-*")
    assert torch.equal(read(path).tensors["w"], torch.arange(8.0).reshape(4, 2))
    change, said = FORGED[name]
    forge(path, change)
    with pytest.raises(CheckpointError, match=said) as seen:
        read(path)
    assert str(path) in str(seen.value)


def test_a_torn_piece_is_found_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    assert save([tmp_path] * 2, state((0, 2), (2, 4))) == ["", ""]
    (path,) = tmp_path.glob("step-*")
    Checkpoints(tmp_path).save(0, {"w": torch.zeros(1)}, {})
    file = path / "tensors-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    said: list[str] = []
    found = Checkpoints(tmp_path).newest(said)
    assert found is not None
    assert found.step == 0
    assert re.search(r"tensors-1\.safetensors is torn", said[0])


def test_format_1_still_opens(tmp_path: Path) -> None:
    """It had whole tensors, and no entry for pieces."""
    path = Path(str(Checkpoints(tmp_path).save(1, {"w": torch.arange(3.0)}, {"position": 3})))
    forge(path, lambda tree: (tree.update(format=1), tree.pop("tensors")))
    assert torch.equal(read(path).tensors["w"], torch.arange(3.0))


def test_no_more_is_in_memory_than_is_in_use(tmp_path: Path) -> None:
    """Pages of the files themselves do not count: the system drops them when it needs memory."""
    parts = 16
    whole = torch.randn(parts * 64, 1 << 14)
    tensors = {f"w{number}": whole[64 * number : 64 * (number + 1)] for number in range(parts)}
    Checkpoints(tmp_path).save(1, tensors, {})

    def count_own_bytes() -> int:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        found = re.search(r"RssAnon:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) << 10

    before, most = count_own_bytes(), 0
    found = load(tmp_path).tensors
    for name, expected in tensors.items():
        assert torch.equal(found[name], expected)
        most = max(most, count_own_bytes() - before)
    # 64 MB in all, and one tensor has 4.
    assert most < whole.nbytes / 4
