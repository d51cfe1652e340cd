"""Checkpoints by several real processes: written by all, opened by any number, never half."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests._support import collect_messages, read_newest
from tests.comm._ranks import Rank, run_ranks
from torch.distributed import HashStore, PrefixStore, TCPStore

from headway.checkpoint import background_saver as saver_module
from headway.checkpoint.agreement import StoreExchange
from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoints, read
from headway.checkpoint.manifest import MANIFEST
from headway.core.errors import CommunicationError, FencedError, GenerationEndedError, HeadwayError

SAVED, LOADED = (1, 2, 4), (1, 2, 3, 4)


def state(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """What a rank holds after a step: the same everywhere, but for the random states."""
    chance = torch.Generator().manual_seed(step)
    sizes = {"stem": (8, 3, 3, 3), "body": (40, 40), "head": (10, 40), "bias": (10,), "norm": (40,), "none": (0, 3)}
    tensors = {f"model/{name}.weight": torch.randn(size, generator=chance) for name, size in sizes.items()}
    tensors |= {f"optimizer/{name}/momentum": torch.randn(size, generator=chance) for name, size in sizes.items()}
    tensors["optimizer/head/step"] = torch.tensor(float(step))
    tensors["model/stem.weight"] = tensors["model/stem.weight"].to(memory_format=torch.channels_last)
    return tensors | {"random/torch": torch.full((50,), rank), "random/python_spare": torch.zeros(rank % 2)}


def same(tensors: Mapping[str, torch.Tensor], step: int) -> bool:
    expected = state(step)
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


def saver_of(rank: Rank, folder: Path, keep: int = 9, **more: Any) -> BackgroundSaver:
    """A Saver that has met all ranks."""
    saver = BackgroundSaver(Checkpoints(folder, keep))
    saver.set_exchange(StoreExchange(rank.store, rank.rank, rank.size), **more)
    return saver


def saves(rank: Rank, folder: Path, steps: tuple[int, ...]) -> list[str]:
    saver = saver_of(rank, folder)
    with collect_messages() as said:
        for step in steps:
            saver.save(step, state(step, rank.rank), {"position": 7 * step, "by": rank.rank})
        saver.wait()
    saver.close()
    return said


def loads(rank: Rank, folders: list[Path], step: int) -> dict[int, list[bool]]:
    """What 1, 2, 3 and 4 ranks find, all of them at once."""
    out = {}
    for size in LOADED:
        group = StoreExchange(rank.store, rank.rank, rank.size, name=f"loaded by {size}")
        group.publish("begin", b"")
        group.collect("begin", range(rank.size), lambda: None)
        if rank.rank < size:
            found = [read_newest(Checkpoints(folder)) for folder in folders]
            out[size] = [one is not None and same(one.tensors, step) and one.step == step for one in found]
    return out


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Steps 10 and 20, saved by 1, 2 and 4 ranks into folders with a space in their names."""
    folders = {}
    for size in SAVED:
        folders[size] = tmp_path_factory.mktemp("saved") / f"by {size}"
        assert run_ranks(size, saves, folders[size], (10, 20)) == [[]] * size
    return folders


def test_every_rank_writes_its_share(saved: dict[int, Path]) -> None:
    total = sum(tensor.nbytes for tensor in state(20).values())
    for size, folder in saved.items():
        assert stored(folder) == ["latest", "step-00000010", "step-00000020"]
        files = [f"tensors-{rank}.safetensors" for rank in range(size)]
        assert stored(folder / "step-00000020") == [MANIFEST, *files]
        found = json.loads((folder / "step-00000020" / MANIFEST).read_text())
        assert [file["name"] for file in found["files"]] == files
        assert found["scalars"] == {"position": 140, "by": 0}
        largest = max((folder / "step-00000020" / name).stat().st_size for name in files)
        assert largest < 1.25 * total / size + 1500  # the header, and rank 0's random states


def test_it_opens_on_any_number_of_ranks(saved: dict[int, Path]) -> None:
    good = [True] * len(SAVED)
    expected = [{size: good for size in LOADED if rank < size} for rank in range(max(LOADED))]
    assert run_ranks(max(LOADED), loads, list(saved.values()), 20) == expected


def cut(data: bytes, tenth: int) -> bytes:
    return data[: len(data) * tenth // 10]


def overwritten(data: bytes, tenth: int) -> bytes:
    begin, end = len(data) * tenth // 10, len(data) * (tenth + 1) // 10
    return data[:begin] + bytes(byte ^ 0xFF for byte in data[begin:end]) + data[end:]


@pytest.mark.parametrize("damage", [cut, overwritten])
@pytest.mark.parametrize("size", SAVED)
@pytest.mark.thin(2)
def test_torn_at_every_tenth_of_its_bytes_the_one_before_is_used(
    saved: dict[int, Path], size: int, damage: Callable[[bytes, int], bytes]
) -> None:
    folder, tried = saved[size], 0
    for path in sorted((folder / "step-00000020").iterdir()):
        whole = path.read_bytes()
        for tenth in range(10):
            path.write_bytes(damage(whole, tenth))
            warnings: list[str] = []
            found = Checkpoints(folder).newest(warnings)
            path.write_bytes(whole)
            assert found is not None
            assert found.step == 10
            assert same(found.tensors, 10)
            (warning,) = warnings
            assert warning.startswith(str(path.parent))
            assert warning.endswith("The one before it is used.")
            tried += 1
    assert tried == 10 * (size + 1)
    found = read_newest(Checkpoints(folder))
    assert found is not None
    assert found.step == 20


# A lost rank


def survives(rank: Rank, folder: Path, victim: int) -> None:
    """Step 10 by three; the victim is killed in step 20; the others meet again and save step 30."""

    def killed() -> None:
        if saving == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    saving = 10
    saver = saver_of(rank, folder, confirm=killed) if victim == 0 else saver_of(rank, folder)
    saver.save(10, state(10, rank.rank), {})
    saver.wait()
    saving = 20
    if rank.rank == victim != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    saver.save(20, state(20, rank.rank), {})
    half = ".step-00000020.*/manifest.json" if victim == 0 else ".step-00000020.*/tensors-1.safetensors"
    while not list(folder.glob(half)):
        time.sleep(0.01)
    rest = [number for number in range(rank.size) if number != victim]
    both = StoreExchange(PrefixStore("next", rank.store), rest.index(rank.rank), len(rest))
    both.publish("seen", b"")
    both.collect("seen", range(len(rest)), lambda: None)
    saver.set_exchange(both)
    saver.save(30, state(30, both.rank), {})
    saver.wait()
    saver.close()


@pytest.mark.parametrize("victim", [0, 2])
def test_what_a_lost_rank_left_unfinished_is_abandoned(tmp_path: Path, victim: int) -> None:
    """Rank 0 is killed right before the rename, rank 2 before it writes anything."""
    run_ranks(3, survives, tmp_path, victim, dying={victim})
    assert stored(tmp_path) == ["latest", "step-00000010", "step-00000030"]
    found = read_newest(Checkpoints(tmp_path))
    assert found is not None
    assert same(found.tensors, 30)
    assert stored(tmp_path / "step-00000030") == [MANIFEST, "tensors-0.safetensors", "tensors-1.safetensors"]


def closes(rank: Rank, folder: Path) -> None:
    saver_module.CLOSE_TIMEOUT_S = 0.3
    saver = saver_of(rank, folder)
    if rank.rank == 0:
        saver.save(10, state(10), {})
    saver.close()


def test_closing_waits_for_missing_ranks_a_while_only(tmp_path: Path) -> None:
    run_ranks(2, closes, tmp_path)
    assert stored(tmp_path) == []


# Folders that not all ranks see


def saves_here_and_there(rank: Rank, root: Path) -> list[list[str]]:
    """Each rank with a disk of its own; then rank 2 alone."""
    said = []
    for number, names in enumerate((("own 0", "own 1", "own 2"), ("shared", "shared", "other"))):
        part = replace(rank, store=PrefixStore(str(number), rank.store))
        said.append(saves(part, root / names[rank.rank], (10, 20, 30)))
    return said


def test_where_not_all_ranks_see_the_folder_rank_0_writes_alone_and_says_so_once(tmp_path: Path) -> None:
    said = run_ranks(3, saves_here_and_there, tmp_path)
    assert said[0] == [
        [f"{tmp_path / 'own 0'} cannot be seen by ranks 1, 2: rank 0 writes the checkpoints alone."],
        [f"{tmp_path / 'shared'} cannot be seen by rank 2: rank 0 writes the checkpoints alone."],
    ]
    assert said[1] == said[2] == [[], []]
    assert stored(tmp_path) == ["own 0", "shared"]
    for folder in (tmp_path / "own 0", tmp_path / "shared"):
        for step in (10, 20, 30):
            path = folder / f"step-{step:08d}"
            assert stored(path) == [MANIFEST, "tensors-0.safetensors"]
            assert same(read(path).tensors, step)


def moves_away(rank: Rank, root: Path) -> str:
    os.chdir(root)
    saver = saver_of(rank, Path("checkpoints"))
    saver.save(10, state(10), {})
    saver.wait()
    if rank.rank == 1:
        os.chdir("/")
    saver.save(20, state(20), {})
    with pytest.raises(HeadwayError) as caught:
        saver.wait()
    return str(caught.value)


def test_a_folder_that_a_rank_loses_sight_of_is_named(tmp_path: Path) -> None:
    sentences = run_ranks(2, moves_away, tmp_path)
    assert len(set(sentences)) == 1
    assert sentences[0].startswith("checkpoints: rank 1 can no longer see the folder of checkpoints. Mount it")
    assert stored(tmp_path / "checkpoints") == ["latest", "step-00000010"]


# Errors are everybody's


def fails(rank: Rank, root: Path) -> dict[str, tuple[str, str]]:
    return {what: _fails(rank, root / what / "checkpoints", what) for what in FAILURES}


def _fails(rank: Rank, folder: Path, what: str) -> tuple[str, str]:
    """Step 20 fails on one rank; all hear of it from the same call, and save step 30 together."""

    def confirm() -> None:
        if failing and what == "fenced":
            raise FencedError("rank 0 was declared lost")
        if failing and what == "lost":
            raise GenerationEndedError("a member was lost")

    failing, step, tensors = False, 20, state(20, rank.rank)
    saver = BackgroundSaver(Checkpoints(folder))
    saver.set_exchange(StoreExchange(PrefixStore(what, rank.store), rank.rank, rank.size), confirm)
    saver.save(10, state(10, rank.rank), {})
    saver.wait()
    failing, odd = True, rank.rank == 1
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if what == "write" and odd:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    if what == "other step" and odd:
        step = 21
    if what == "other tensors" and odd:
        tensors["model/more"] = torch.ones(3)
    if what == "folder" and rank.rank == 0:
        folder.rename(folder.with_name("kept"))
        folder.write_text("a file")
    saver.save(step, tensors, {})
    try:
        saver.wait()
        caught = ("", "")
    except Exception as error:
        caught = type(error).__name__, str(error)
    failing = False
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if what == "folder" and rank.rank == 0:
        folder.unlink()
        folder.with_name("kept").rename(folder)
    saver.save(30, state(30, rank.rank), {})
    saver.wait()
    saver.close()
    return caught


FAILURES = {
    "write": "the checkpoint of step 20 could not be written (File too large) (rank 1). Nothing before it is lost: ",
    "folder": "the checkpoint of step 20 could not be written (Not a directory). Nothing before it is lost: ",
    "other step": "it saves step 21, rank 0 step 20 (rank 1).",
    "other tensors": "its tensors have other names, dtypes or shapes than those of rank 0 (rank 1).",
    "fenced": "rank 0 was declared lost.",
    "lost": "",
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[str, str]]]]:
    root = tmp_path_factory.mktemp("failed")
    return root, run_ranks(3, fails, root)


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_of_one_is_the_same_for_all_and_the_next_save_works(
    failed: tuple[Path, list[dict[str, tuple[str, str]]]], what: str
) -> None:
    folder, caught = failed[0] / what / "checkpoints", [of_rank[what] for of_rank in failed[1]]
    expected = FAILURES[what]
    assert all(expected in sentence and bool(sentence) == bool(expected) for _, sentence in caught), caught
    assert len({sentence for _, sentence in caught}) == 1
    assert caught[0][0] == {"fenced": "FencedError", "lost": ""}.get(what, "HeadwayError")
    assert stored(folder) == ["latest", "step-00000010", "step-00000030"]
    assert all(read(path).step in (10, 30) for path in Checkpoints(folder).paths())


# The store


def talks(rank: Rank) -> list[list[bytes]]:
    exchange = StoreExchange(rank.store, rank.rank, rank.size)
    exchange.publish("1/a", bytes([rank.rank]) * (1 + 1000 * rank.rank))
    heard = [exchange.collect("1/a", range(rank.size), lambda: None)]
    exchange.publish("heard", b"")
    if rank.rank == 0:
        exchange.collect("heard", range(rank.size), lambda: None)
        exchange.forget("1/a", range(rank.size))
        give_up_at = time.monotonic() + 0.3
        with pytest.raises(TimeoutError):
            exchange.collect("1/a", [1], partial(_until, give_up_at))
    return heard


def _until(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


def test_messages_come_from_every_rank_and_waiting_can_be_given_up() -> None:
    expected = [bytes([rank]) * (1 + 1000 * rank) for rank in range(3)]
    assert run_ranks(3, talks) == [[expected]] * 3


def test_a_store_that_is_gone_is_named() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    exchange = StoreExchange(TCPStore("127.0.0.1", server.port, is_master=False), 1, 2)
    del server
    with pytest.raises(CommunicationError, match="the ranks' store cannot be reached"):
        exchange.collect("a", [0], lambda: None)


def test_an_answer_from_before_a_restart_is_refused(tmp_path: Path) -> None:
    store = HashStore()
    old = {"token": "another", "file": {"name": "tensors-1.safetensors", "length": 9, "sha256": ""}}
    StoreExchange(store, 1, 2).publish("1/share", json.dumps(old).encode())
    saver = BackgroundSaver(Checkpoints(tmp_path), asynchronous=False)
    saver.set_exchange(StoreExchange(store, 0, 2))
    with pytest.raises(HeadwayError, match=r"rank 1 answered for another save\. Give the ranks a new store or name"):
        saver.save(10, state(10), {})
    assert stored(tmp_path) == []
