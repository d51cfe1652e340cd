"""The last rank with a run's state is lost while its successors join: they continue from the files on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._support import collect_messages, packed_digits, records, write_recipe
from tests.comm._ranks import Rank, run_ranks

from headway.checkpoint.checkpoints import Checkpoint, Checkpoints
from headway.comm.coordinator import Coordinator, CoordinatorEvent, GenerationFormed
from headway.comm.coordinator_client import CoordinatorClient
from headway.core.errors import CheckpointError, CommunicationError, HeadwayError
from headway.core.key_value_store import StoreServer
from headway.core.launcher_environment import LOOPBACK, LaunchedProcess
from headway.core.recipe import read_recipe
from headway.core.run_folder import IDS_BYTES, RunFolder
from headway.launch.handover import hand_over
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training import run_steps
from headway.training.progress import LogLines
from headway.training.trainer import Trainer

BATCH, STEPS = 12, 15
OPTIONS = ("checkpoint.every_steps=4", "checkpoint.keep=3", "log_ids=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handover")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", batch=BATCH, epochs=1, evaluate={"every_epochs": 1})
    return folder


class LauncherSlot:
    """A slot of a launcher, and the processes that fill it, one after the other."""

    def __init__(self, recipe: Path, run: Path, stack: ExitStack) -> None:
        self.events: list[CoordinatorEvent] = []
        self._recipe, self._run, self._stack = recipe, run, stack
        store = stack.enter_context(closing(StoreServer(b"x", LOOPBACK)))
        tell = self.events.append
        self.coordinator = Coordinator([(0, 0)], secret=b"x", timeout_s=30, store_port=store.port, on_event=tell)
        stack.enter_context(closing(self.coordinator))

    def start(self, attempt: int, *options: str) -> tuple[CoordinatorClient, Trainer]:
        """Starts a training process; all but the first join the run."""
        joins = attempt > 0
        loaded = read_recipe(self._recipe, (*OPTIONS, *options), TrainRecipe)
        member = CoordinatorClient(LOOPBACK, self.coordinator.port, secret="x", worker=f"0.0.{attempt}", joining=joins)
        self._stack.callback(member.close)
        ranks = Ranks(loaded.recipe.comm, LaunchedProcess(0, 1, 0, 1, None, None, "headway"), member)
        setup = build_setup(loaded, ranks=ranks)
        self._stack.callback(setup.inputs.close)
        run = RunFolder(self._run) if joins else RunFolder.create(self._run)
        if not joins:
            run_steps.record_recipe(run, setup, ranks)
        trainer = self._stack.enter_context(closing(Trainer(setup, run, LogLines(), ranks)))
        self._stack.callback(ranks._close_generation)
        return member, trainer


@contextmanager
def lose_while_joining(
    folder: Path, run: Path, steps: int, *options: str, harm: Callable[[], object] = lambda: None
) -> Iterator[Trainer]:
    """Loses the only process of a run after some steps, when it has met its successor and not sent its state yet.

    Args:
        options: options of the successor.
        harm: called before the successor continues, to damage the run folder.
    """
    with ExitStack() as stack:
        slot = LauncherSlot(folder / "recipe.yaml", run, stack)
        first, trainer = slot.start(0)
        trainer.recovery.meet()
        trainer.run(steps)
        second, successor = slot.start(1, *options)
        second.announce_arrival()
        # Both are in generation 1; the one that trained dies before it can say how far it is.
        at_the_boundary = threading.Thread(target=first.wait_for_generation)
        at_the_boundary.start()
        joining = threading.Thread(target=second.wait_for_generation)
        joining.start()
        for thread in (at_the_boundary, joining):
            thread.join(60)
            assert not thread.is_alive()
        trainer.close()
        first.close()
        formed = [
            [worker.id for worker in event.workers] for event in slot.events if isinstance(event, GenerationFormed)
        ]
        assert formed[1] == ["0.0.0", "0.0.1"]
        harm()
        yield successor


def read_positions(run: Path) -> list[int]:
    found = [np.fromfile(path, "<i8").reshape(-1, IDS_BYTES // 8)[:, 0] for path in run.glob("ids*.bin")]
    return sorted(np.concatenate(found).tolist())


def list_checkpoints(run: Path) -> list[str]:
    return [path.name for path in Checkpoints(run / "checkpoints").paths()]


def test_newcomers_alone_go_on_from_the_newest_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with collect_messages() as said, lose_while_joining(folder, run, 10) as trainer:
        assert list_checkpoints(run) == ["step-00000008", "step-00000004"]
        trainer.recovery.meet()
        assert trainer.step == 8
        assert [record["step"] for record in records(run, "train")] == list(range(1, 9))
        assert list_checkpoints(run) == ["step-00000008", "step-00000004"]
        trainer.run()
        assert trainer.finished
    (sentence,) = [text for text in said if "checkpoint" in text]
    assert sentence == (
        "No rank has the state of the run any more: it continues from the checkpoint of step 8 "
        f"({run / 'checkpoints/step-00000008'}), and repeats the steps after it."
    )
    assert [record["step"] for record in records(run, "train")] == list(range(1, STEPS + 1))
    assert read_positions(run) == list(range(STEPS * BATCH))
    whole = tmp_path / "whole"
    with ExitStack() as stack:
        slot = LauncherSlot(folder / "recipe.yaml", whole, stack)
        _, alone = slot.start(0)
        alone.recovery.meet()
        alone.run()
    ours, theirs = (Checkpoints(path / "checkpoints").newest() for path in (run, whole))
    assert ours is not None
    assert theirs is not None
    assert ours.step == theirs.step == STEPS
    assert all(torch.equal(ours.tensors[name], value) for name, value in theirs.tensors.items() if "model" in name)


def test_a_damaged_checkpoint_is_passed_over(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    newest = run / "checkpoints/step-00000008/tensors-0.safetensors"
    with (
        collect_messages() as said,
        lose_while_joining(folder, run, 10, harm=lambda: newest.write_bytes(b"torn")) as trainer,
    ):
        trainer.recovery.meet()
        assert trainer.step == 4
        trainer.run(1)
        assert [record["step"] for record in records(run, "train")] == [1, 2, 3, 4, 5]
        trainer.run()
    assert any("torn" in text and "The one before it is used." in text for text in said)
    assert any("the checkpoint of step 4 " in text for text in said)
    assert read_positions(run) == list(range(STEPS * BATCH))
    assert list_checkpoints(run)[0] == "step-00000015"


def refuse_to_continue(
    folder: Path, run: Path, steps: int, *options: str, harm: Callable[[], object] = lambda: None
) -> str:
    """Returns the error with which the successor ends the run."""
    with lose_while_joining(folder, run, steps, *options, harm=harm) as trainer:
        logged = (run / "metrics.jsonl").read_bytes()
        with pytest.raises(HeadwayError) as caught:
            trainer.recovery.meet()
        assert (run / "metrics.jsonl").read_bytes() == logged
    assert not isinstance(caught.value, CommunicationError)  # which would be the loss of this process alone
    return str(caught.value)


def test_without_a_checkpoint_the_run_ends_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    said = refuse_to_continue(folder, tmp_path / "run", 3)
    assert said == (
        f"{tmp_path / 'run'}: no process is left that holds the state of the run, and there was no checkpoint yet: "
        "3 steps are lost. A smaller checkpoint.every_steps would have kept more. "
        f"Begin anew: headway train --resume {tmp_path / 'run'}."
    )


def test_checkpoints_that_are_all_damaged_end_the_run(folder: Path, tmp_path: Path) -> None:
    newest = tmp_path / "run/checkpoints/step-00000004/manifest.json"
    said = refuse_to_continue(folder, tmp_path / "run", 5, harm=lambda: newest.write_text("{}"))
    assert "every checkpoint is damaged" in said


def test_a_run_folder_out_of_sight_ends_the_run(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (
        lose_while_joining(folder, run, 5, harm=lambda: run.rename(tmp_path / "elsewhere")) as trainer,
        pytest.raises(HeadwayError, match="no checkpoint of it can be seen from here"),
    ):
        trainer.recovery.meet()
    assert list_checkpoints(tmp_path / "elsewhere") == ["step-00000004"]


def test_a_recipe_that_was_changed_meanwhile_ends_the_run(folder: Path, tmp_path: Path) -> None:
    said = refuse_to_continue(folder, tmp_path / "run", 5, "optimizer.lr=0.5")
    assert "optimizer.lr is 0.5 in the recipe, and the run began with 0.02" in said


def test_a_run_of_which_nothing_was_recorded_begins_anew(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with collect_messages() as said, lose_while_joining(folder, run, 0) as trainer:
        trainer.recovery.meet()
        trainer.run()
        assert trainer.finished
    sentence = "No rank has the state of the run any more, and no step was recorded yet: the run begins anew."
    assert said.count(sentence) == 1
    assert read_positions(run) == list(range(STEPS * BATCH))
    assert [record["step"] for record in records(run, "train")] == list(range(1, STEPS + 1))


class FakeFiles:
    """The files that a rank sees. `step` is that of the newest checkpoint: 0 if it is damaged, -1 if there is none."""

    def __init__(self, step: int, recorded: int = 0) -> None:
        self.step, self.recorded = step, recorded

    def is_ahead(self, step: int) -> bool:
        return self.step > step

    def summarise(self) -> dict[str, Any]:
        return {"step": self.step, "seen": True, "recorded": self.recorded, "error": None}

    def read_checkpoint(self) -> tuple[Checkpoint, list[str]]:
        if self.step == 0:
            raise CheckpointError("it is damaged", where="there", fix="Mend it.")
        return Checkpoint(Path("there"), self.step, {}, {}), ["so it is"]

    def explain_missing_state(self, recorded: int) -> HeadwayError:
        return HeadwayError(f"{recorded} steps are lost")


class FakeCarrier:
    """A carrier whose state is its step."""

    def __init__(self, progress: int, step: int, past: FakeFiles) -> None:
        self.far, self.step, self.saved_files, self.is_saving = progress, step, past, lambda: True
        self.precision: Any = None

    def get_shared_settings(self) -> dict[str, Any]:
        return {}

    def get_progress(self) -> int:
        return self.far

    def state_dict(self) -> Any:
        return {"step": self.step, "progress": self.far}, {}

    def load_state_dict(self, scalars: Any, tensors: Any) -> None:
        self.step, self.far = scalars["step"], scalars["progress"]

    def restart_from(self, checkpoint: Checkpoint | None, progress: int) -> None:
        self.step, self.far = 0 if checkpoint is None else checkpoint.step, progress


Case = tuple[list[tuple[int, int, int, int]], bool]
"""(progress, step, step of the newest checkpoint, steps recorded) of each rank, and True if rank 0 led before."""
CASES: dict[str, tuple[Case, Any]] = {
    "the lowest that is ahead": (([(5, 5, 4, 5), (-1, 0, 4, 5), (6, 6, 4, 5)], True), 6),
    "who took it over is a holder": (([(-1, 0, 4, 9), (9, 8, 4, 9), (-1, 0, 4, 9)], False), 8),
    "nobody: the newest that any rank sees": (([(-1, 0, -1, 0), (-1, 0, 4, 9), (-1, 0, 8, 9)], False), 8),
    "nobody, and a damaged one": (([(-1, 0, 0, 9), (-1, 0, 0, 9), (-1, 0, 0, 9)], False), "it is damaged"),
    "nobody, and none": (([(-1, 0, -1, 0), (-1, 0, -1, 3), (-1, 0, -1, 0)], False), "3 steps are lost"),
    "nobody, and nothing was recorded": (([(-1, 0, -1, 0)] * 3, False), 0),
    "a checkpoint that only the lost one had come to": (([(7, 7, 8, 8), (7, 7, 8, 8), (-1, 0, 8, 8)], False), 8),
    "who led knows what it has saved": (([(7, 7, 8, 8), (7, 7, 8, 8), (-1, 0, 8, 8)], True), 7),
}


def hand_over_cases(rank: Rank) -> list[Any]:
    out: list[Any] = []
    for (ranks, led), _ in CASES.values():
        progress, step, saved, recorded = ranks[rank.rank]
        walker = FakeCarrier(progress, step, FakeFiles(saved, recorded))
        try:
            with collect_messages() as said:
                met = hand_over(rank.world, f"n{rank.rank}", walker, was_lead=led)
        except HeadwayError as error:
            out.append((str(error), None, said))
        else:
            assert met.names == ("n0", "n1", "n2")
            out.append((walker.step, walker.far, said))
    return out


def test_every_rank_continues_from_the_same_state() -> None:
    every = run_ranks(3, hand_over_cases)
    for number, (name, (_, wanted)) in enumerate(CASES.items()):
        ranks = [found[number] for found in every]
        assert ranks[0] == ranks[1] == ranks[2], name
        found, progress, said = ranks[0]
        assert found == wanted or (isinstance(wanted, str) and wanted in found), name
        assert progress is None or progress >= 0, name
        assert ("so it is" in said) == ("continues from the checkpoint of step 8" in "".join(said)), name
