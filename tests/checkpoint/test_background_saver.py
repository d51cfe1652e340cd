"""Saver in one process: training goes on meanwhile, one save is in flight at most, errors come out."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests._support import read_newest

from headway.checkpoint import locations
from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoints, read
from headway.core.errors import CheckpointError, CommunicationError, FencedError, GenerationEndedError, HeadwayError


class Gate:
    """An Exchange of one rank that lets nothing through until it is opened."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def publish(self, key: str, value: bytes) -> None:
        self.reached.set()
        assert self.opened.wait(60)

    def collect(self, key: str, ranks: Sequence[int], check: Callable[[], None]) -> list[bytes]:
        check()
        return []

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        assert not ranks


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model/a": torch.full((40, 3), float(step)), "model/b": torch.tensor(step), "random/torch": torch.ones(9)}


def stored(folder: Path) -> list[str]:
    """Names in the folder, those aside too."""
    return sorted(path.name for path in folder.iterdir())


def test_the_copy_is_taken_at_once_and_training_goes_on(tmp_path: Path, gate: Gate) -> None:
    checkpoints, tensors = Checkpoints(tmp_path), state(7)
    with closing(BackgroundSaver(checkpoints)) as saver:
        saver.set_exchange(gate)
        saver.save(7, tensors, {"position": 5})
        assert gate.reached.wait(60)
        for tensor in tensors.values():
            tensor.zero_()
        assert checkpoints.paths() == []
        gate.opened.set()
        saver.wait()
        found = read_newest(checkpoints)
    assert found is not None
    assert (found.step, found.scalars) == (7, {"position": 5})
    assert all(torch.equal(found.tensors[name], value) for name, value in state(7).items())


def test_asynchronous_or_not_the_bytes_are_the_same(tmp_path: Path) -> None:
    for asynchronous in (True, False):
        with closing(BackgroundSaver(Checkpoints(tmp_path / str(asynchronous)), asynchronous=asynchronous)) as saver:
            saver.save(3, state(3), {})
            if not asynchronous:
                assert (tmp_path / "False/latest").read_text() == "step-00000003\n"
            saver.wait()
    Checkpoints(tmp_path / "plain").save(3, state(3), {})
    for name in ("tensors-0.safetensors", "manifest.json"):
        assert (
            len({(tmp_path / kind / "step-00000003" / name).read_bytes() for kind in ("True", "False", "plain")}) == 1
        )


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: Gate) -> None:
    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        saver.set_exchange(gate)
        saver.save(1, state(1), {})
        second = threading.Thread(target=saver.save, args=(2, state(2), {}))
        second.start()
        assert gate.reached.wait(60)
        second.join(0.2)
        assert second.is_alive()
        assert sum(thread.name == "headway-checkpoint" for thread in threading.enumerate()) == 1
        gate.opened.set()
        second.join()
        saver.wait()
    assert stored(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with closing(BackgroundSaver(Checkpoints(tmp_path, keep=3))) as saver:
        for step in range(1, 8):
            saver.save(step, state(step), {})
        saver.wait()
    assert stored(tmp_path) == ["latest", "step-00000005", "step-00000006", "step-00000007"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_went_wrong_comes_out_once(tmp_path: Path, asynchronous: bool) -> None:
    """At the next save or wait; what was there before stays, and the saves after it work again."""
    checkpoints = Checkpoints(tmp_path / "a folder")
    with closing(BackgroundSaver(checkpoints, asynchronous=asynchronous)) as saver:
        saver.save(1, state(1), {})
        saver.wait()
        (tmp_path / "a folder").rename(tmp_path / "kept")
        (tmp_path / "a folder").write_text("a file")
        expected = r"the checkpoint of step 2 could not be written .*Nothing before it is lost: mend it\.$"
        if asynchronous:
            saver.save(2, state(2), {})
            with pytest.raises(HeadwayError, match=expected):
                saver.save(3, state(3), {})
        else:
            with pytest.raises(HeadwayError, match=expected):
                saver.save(2, state(2), {})
        saver.wait()
        (tmp_path / "a folder").unlink()
        (tmp_path / "kept").rename(tmp_path / "a folder")
        saver.save(4, state(4), {})
        saver.wait()
    assert [path.name for path in checkpoints.paths()] == ["step-00000004", "step-00000001"]


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        with pytest.raises(CheckpointError, match=r"model/odd is of torch.complex128"):
            saver.save(1, {**state(1), "model/odd": torch.zeros(1, dtype=torch.complex128)}, {})
        saver.wait()
    assert stored(tmp_path) == []


def test_scalars_are_copied_too_and_have_to_be_json(tmp_path: Path, gate: Gate) -> None:
    scalars = {"seconds": {"forward": 1.5}}
    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        with pytest.raises(TypeError, match="not JSON serializable"):
            saver.save(1, state(1), {"odd": object()})
        saver.set_exchange(gate)
        saver.save(2, state(2), scalars)
        scalars["seconds"]["forward"] = 9.9
        gate.opened.set()
        saver.wait()
    assert read(tmp_path / "step-00000002").scalars == {"seconds": {"forward": 1.5}}


@pytest.mark.root
def test_a_full_disk_comes_out_at_the_next_call_and_the_one_before_stays(small_disk: Path) -> None:
    large = {"model/a": torch.ones(150_000)}  # 600 kB: one fits, and a second one beside it does not
    with closing(BackgroundSaver(Checkpoints(small_disk, keep=1), resume_command="headway train --resume r")) as saver:
        saver.save(1, large, {})
        saver.save(2, large, {})
        match = "the disk is full, the checkpoint of step 2 could not .*make room. Then go on: headway train --resume r"
        with pytest.raises(HeadwayError, match=match):
            saver.save(3, large, {})
        saver.close()
        assert stored(small_disk) == ["latest", "step-00000001"]
        subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
        saver.save(4, large, {})
        saver.wait()
    assert stored(small_disk) == ["latest", "step-00000004"]


def test_whoever_was_declared_lost_publishes_nothing(tmp_path: Path, gate: Gate) -> None:
    """`confirm` comes at the last moment: everything is written by then, and nothing can be opened."""
    seen: list[list[str]] = []

    def confirm() -> None:
        (aside,) = tmp_path.glob(".step-*")
        seen.append(stored(aside))
        raise FencedError("this process was declared lost")

    gate.opened.set()
    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        saver.set_exchange(gate, confirm)
        saver.save(1, state(1), {})
        with pytest.raises(FencedError, match="declared lost"):
            saver.wait()
    assert seen == [["manifest.json", "tensors-0.safetensors"]]
    assert stored(tmp_path) == []


def test_where_the_generation_is_over_the_save_ends_quietly(tmp_path: Path, gate: Gate) -> None:
    def confirm() -> None:
        raise GenerationEndedError("a member was lost")

    gate.opened.set()
    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        saver.set_exchange(gate, confirm)
        saver.save(1, state(1), {})
        saver.wait()
        assert stored(tmp_path) == []
        saver.set_exchange(gate)
        saver.save(2, state(2), {})
        saver.wait()
    assert stored(tmp_path) == ["latest", "step-00000002"]


def test_what_a_former_generation_has_not_finished_never_opens(tmp_path: Path, gate: Gate) -> None:
    """`meet` returns at once, with the save still in flight; the next save waits for it."""
    other = Gate()
    other.opened.set()
    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        saver.set_exchange(gate)
        saver.save(1, state(1), {})
        assert gate.reached.wait(60)
        saver.set_exchange(other)
        assert any(thread.name == "headway-checkpoint" for thread in threading.enumerate())
        gate.opened.set()
        saver.save(2, state(2), {})
        saver.wait()
    assert stored(tmp_path) == ["latest", "step-00000002"]


def test_what_others_save_meanwhile_stays(tmp_path: Path, gate: Gate) -> None:
    """Whoever sleeps in the middle of a save, and wakes when the others have gone on, does not prune their work."""

    def others_go_on() -> None:
        shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")

    gate.opened.set()
    with closing(BackgroundSaver(Checkpoints(tmp_path, keep=1))) as saver:
        saver.save(1, state(1), {})
        saver.wait()
        saver.set_exchange(gate, others_go_on)
        saver.save(2, state(2), {})
        saver.wait()
    assert stored(tmp_path) == ["latest", "step-00000002", "step-00000009"]


def test_what_others_saved_meanwhile_is_not_replaced(tmp_path: Path, gate: Gate) -> None:
    """The same step even: they have cleared this draft away."""

    def others_save() -> None:
        Checkpoints(tmp_path).save(2, state(2), {"by": "others"})

    gate.opened.set()
    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        saver.set_exchange(gate, others_save)
        saver.save(2, state(2), {"by": "the one that slept"})
        with pytest.raises(HeadwayError, match="the checkpoint of step 2 could not be written"):
            saver.wait()
    assert stored(tmp_path) == ["latest", "step-00000002"]
    assert read(tmp_path / "step-00000002").scalars == {"by": "others"}


def test_who_sleeps_between_two_renames_leaves_what_others_saved(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has moved the former checkpoint of the step aside when they save theirs, their draft begun before."""
    folder, theirs = tmp_path / "mine", tmp_path / "theirs"
    Checkpoints(folder).save(2, state(2), {"by": "nobody"})
    Checkpoints(theirs).save(2, state(2), {"by": "others"})
    rename = os.replace

    def slowly(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name.endswith(".replaced"):
            shutil.rmtree(target.with_suffix(""))
            rename(theirs / "step-00000002", folder / "step-00000002")

    gate.opened.set()
    monkeypatch.setattr(locations.os, "replace", slowly)
    with closing(BackgroundSaver(Checkpoints(folder))) as saver:
        saver.set_exchange(gate)
        saver.save(2, state(2), {"by": "the one that slept"})
        with pytest.raises(HeadwayError, match="the checkpoint of step 2 could not be written"):
            saver.wait()
    assert stored(folder) == ["latest", "step-00000002"]
    assert read(folder / "step-00000002").scalars == {"by": "others"}


def test_it_knows_whether_the_newest_save_has_come_about(tmp_path: Path, gate: Gate) -> None:
    """Also of one that ended quietly, so that the ranks can make up for it."""
    over: list[str] = []

    def confirm() -> None:
        if over:
            raise GenerationEndedError(over[0])

    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        assert (saver.is_pending, saver.is_writing) == (False, False)
        saver.set_exchange(gate, confirm)
        saver.save(1, state(1), {})
        assert (saver.is_pending, saver.is_writing) == (True, True)
        gate.opened.set()
        saver.wait()
        assert (saver.is_pending, saver.is_writing) == (False, False)
        over.append("a member was lost")
        saver.save(2, state(2), {})
        saver.wait()
        assert (saver.is_pending, saver.is_writing) == (False, True)
        over.clear()
        saver.save(3, state(3), {})
        saver.wait()
        assert (saver.is_pending, saver.is_writing) == (False, False)


def test_that_former_ranks_cannot_be_reached_is_no_news(tmp_path: Path, gate: Gate) -> None:
    def confirm() -> None:
        raise CommunicationError("the store is gone")

    with closing(BackgroundSaver(Checkpoints(tmp_path))) as saver:
        gate.opened.set()
        saver.set_exchange(gate, confirm)
        for again in (False, True):
            saver.save(1, state(1), {})
            while any(thread.name == "headway-checkpoint" for thread in threading.enumerate()):
                time.sleep(0.005)
            if again:
                saver.set_exchange(Gate())
                saver.wait()
            else:
                with pytest.raises(CommunicationError, match="the store is gone"):
                    saver.wait()
    assert stored(tmp_path) == []


def test_closing_lets_a_save_of_one_process_finish(tmp_path: Path, gate: Gate) -> None:
    saver = BackgroundSaver(Checkpoints(tmp_path))
    saver.set_exchange(gate)
    saver.save(1, state(1), {})
    assert gate.reached.wait(60)
    gate.opened.set()
    saver.close()
    saver.close()
    saver.wait()
    assert read(tmp_path / "step-00000001").step == 1
