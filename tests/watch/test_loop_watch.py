"""`headway.watch.watch` on real loops: it sees what they do, changes nothing of them, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.watch._loops import MS, STAGES, Hands, Net, Stepping, by_hand, epoch, parts, stages
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import headway.watch
from headway.core.errors import UsageError
from headway.doctor.loop_observation import LoopObservation
from headway.observe.step_marks import WARM_UP_STEPS


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return by_hand(monkeypatch)


def test_every_moment_is_in_its_stage(hands: Hands) -> None:
    loader, model, optimizer = parts(hands, first=100, end=20)
    with headway.watch.watch(loader, model, optimizer) as seen:
        epoch(seen, model, optimizer, hands)
        hands.take(7000)  # an evaluation
        epoch(seen, model, optimizer, hands)
    found = seen.verdict()
    assert stages(found) == STAGES | {"first batch": (100 + 20) / 40}
    assert seen.steps == 80
    assert found.steps == 80 - WARM_UP_STEPS - 1, "the first batch of the second epoch is no step like the others"
    assert found.epochs == 2
    assert found.batch == 8
    assert found.first_batch_s == pytest.approx(0.12)
    assert found.between_epochs_s == pytest.approx(7)
    assert found.samples_s == pytest.approx(8 / 24.5e-3)
    assert found.kind == "host/IO limited"
    assert found.p99_s == pytest.approx(21.5e-3)
    assert LoopObservation.model_validate(found.to_json()) == found


class Slow(Dataset[Tensor]):
    """40 batches of 8, of which each sample takes 10 ms."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> Tensor:
        self.hands.take(10)
        return torch.full((4,), float(index))


@pytest.mark.parametrize(
    ("quota", "ranks", "workers"), [("max", "", 7), ("300000", "", 2), ("max", "4", 1), ("400000", "2", 1)]
)
def test_no_more_workers_than_the_cores_of_a_rank(
    quota: str, ranks: str, workers: int, hands: Hands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's quota and the ranks of a host leave fewer cores than the machine's eight; the loop keeps one."""
    (tmp_path / "cpu.max").write_text(f"{quota} 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("headway.core.cpu_count.find_cgroups", lambda *_: [tmp_path])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    model = Net(hands)
    optimizer = Stepping(model.parameters(), lr=0.01)
    optimizer.hands = hands
    with headway.watch.watch(DataLoader(Slow(hands), batch_size=8), model, optimizer) as seen:
        for images in seen.loader:
            model(images).sum().backward()
            optimizer.step()
    changes = [one.change for one in seen.verdict().advice]
    assert f"DataLoader(..., num_workers={workers}, persistent_workers=True)" in changes


def test_without_with_and_with_an_iterator_in_the_users_hands(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    seen = headway.watch.watch(loader, model, optimizer)
    stream = iter(seen.loader)
    hands.take(500)  # between iter and next: nobody waits for a batch
    for _ in range(40):
        images, _labels = next(stream)
        model(images).sum().backward()
        optimizer.step()
    with pytest.raises(StopIteration):
        next(stream)
    assert stages(seen.verdict()) == {"wait": 10, "forward": 3, "backward": 5, "optimizer": 1}
    seen.close()
    seen.close()


def test_an_evaluation_in_the_loop_is_its_own_code(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    with headway.watch.watch(loader, model, optimizer) as seen:
        for images, _ in seen.loader:
            model(images).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(images)
    assert stages(seen.verdict()) == {"wait": 10, "forward": 3, "backward": 5, "optimizer": 1, "other": 3}


def test_a_loop_over_the_training_set_without_training_does_not_count(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    with headway.watch.watch(loader, model, optimizer) as seen:
        epoch(seen, model, optimizer, hands)
        before = seen.verdict()
        for images, _ in seen.loader:
            with torch.no_grad():
                model(images)
    assert seen.verdict() == before


def test_several_batches_to_an_update_and_several_networks(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    head = Net(hands)
    other = Stepping(head.parameters(), lr=0.1)
    other.hands = hands
    with headway.watch.watch(loader, [model, head], [optimizer, other]) as seen:
        for step, (images, _) in enumerate(seen.loader):
            out = model(images)
            (out.sum() + head(images).sum()).backward()
            if step % 4 == 3:
                optimizer.step()
                other.step()
    # Of 35 steps that count, numbers 5 to 39, nine have updates.
    assert stages(seen.verdict()) == {"wait": 10, "forward": 6, "backward": 10, "optimizer": 2 * 9 / 35}


def test_an_optimizer_that_calls_the_network(hands: Hands) -> None:
    """What a closure does belongs to forward and backward, also inside of the optimizer's step."""
    loader, model, optimizer = parts(hands)

    with headway.watch.watch(loader, model, optimizer) as seen:
        for images, _ in seen.loader:

            def closure(images: Tensor = images) -> Tensor:
                loss: Tensor = model(images).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
    assert stages(seen.verdict()) == {"wait": 10, "forward": 3, "backward": 5, "optimizer": 1}


def test_a_backward_that_is_not_torchs_is_between_forward_and_the_optimizer(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    with headway.watch.watch(loader, model, optimizer) as seen:
        for images, _ in seen.loader:
            grads = torch.autograd.grad(model(images).sum(), list(model.parameters()))
            for weight, grad in zip(model.parameters(), grads, strict=True):
                weight.grad = grad
            optimizer.step()
    assert stages(seen.verdict()) == {"wait": 10, "forward": 3, "backward": 5, "optimizer": 1}


def trained(watched: bool) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(120, 4), torch.randint(2, (120,)))
    loader: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=True)
    model, losses = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)), []
    optimizer = torch.optim.AdamW(model.parameters())
    with headway.watch.watch(loader, model, optimizer) if watched else contextlib.nullcontext() as seen:
        for _ in range(2):
            for images, labels in loader if seen is None else seen.loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    if seen is not None:
        found = seen.verdict()
        assert found.reads == 1.0
        assert found.read_at[0].startswith("item at test_loop_watch.py:")
        assert len(found.read_at) == 1, "what torch reads in a step of its own is not the user's"
        assert "Python read 1 value a step, mostly item at" in found.to_text()
    return model.state_dict(), losses


def test_a_watched_run_is_the_same_run() -> None:
    (weights, losses), (same, others) = trained(False), trained(True)
    assert losses == others
    for name, weight in weights.items():
        assert torch.equal(weight, same[name]), name


def test_the_loader_is_the_loader(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    with headway.watch.watch(loader, model, optimizer) as seen:
        assert len(seen.loader) == 40
        assert seen.loader.what == "batches"
        with pytest.raises(AttributeError, match="nothing_such"):
            _ = seen.loader.nothing_such
        assert [float(images[0, 0]) for images, _ in seen.loader] == list(range(40))

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.zeros(4)] * 30)

    stream: DataLoader[Tensor] = DataLoader(Stream(), batch_size=1)
    with headway.watch.watch(stream, model, optimizer) as other:
        with pytest.raises(TypeError):
            len(other.loader)
        for images in other.loader:
            model(images).sum().backward()
            optimizer.step()
        assert other.loader.batch_size == 1
        assert other.verdict().steps == 30 - WARM_UP_STEPS


def test_batches_from_another_thread_tell_nothing(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    with headway.watch.watch(loader, model, optimizer) as seen:
        stream, ready, taken = iter(seen.loader), threading.Semaphore(0), threading.Semaphore(1)
        batches: list[Any] = []

        def fetch() -> None:
            for batch in stream:
                taken.acquire()
                batches.append(batch)
                ready.release()

        thread = threading.Thread(target=fetch)
        thread.start()
        for _ in range(40):
            ready.acquire()
            model(batches.pop()[0]).sum().backward()
            optimizer.step()
            taken.release()
        thread.join()
    found = seen.verdict()
    assert found.kind is None
    assert "another thread" in found.sentence


def test_reads_of_a_device_are_told_apart(hands: Hands) -> None:
    """A read that waited for a device counts wherever the loop's thread makes it; the others only in its own code."""
    loader, model, optimizer = parts(hands)
    with headway.watch.watch(loader, model, optimizer) as seen:
        for images, _ in seen.loader:
            seen._marks.record_read("item", True, 2 * MS)
            threads = [threading.Thread(target=seen._marks.record_read, args=("item", True, MS))]
            for thread in threads:
                thread.start()
                thread.join()
            if images.mean() > 3:  # a read of the host
                hands.take(4)
            model(images).sum().backward()
            optimizer.step()
    found = seen._marks.rows[-1]
    assert found[7:10] == (1, 1, 2 * MS)
    assert any("__bool__ at test_loop_watch.py" in place for place in seen.verdict().read_at)


def test_bad_input_is_refused(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    wrong: Any
    for wrong, where in ((None, "model"), (model.forward, "model"), ([], "model"), ([model, 3], "model")):
        with pytest.raises(UsageError, match=rf"^{where}: .*torch\.nn\.Module"):
            headway.watch.watch(loader, wrong, optimizer)
    for wrong in (None, model, []):
        with pytest.raises(UsageError, match=r"^optimizer: .*torch\.optim\.Optimizer"):
            headway.watch.watch(loader, model, wrong)
    wrong = 5
    with pytest.raises(UsageError, match=r"^loader: an object of type int is not iterable"):
        headway.watch.watch(wrong, model, optimizer)
    for wrong in (0, 2.5):
        with pytest.raises(UsageError, match=r"^every: .* is not a number of steps for 'logging'"):
            headway.watch.watch(loader, model, optimizer, every={"logging": wrong})
    with (
        headway.watch.watch(loader, model, optimizer) as seen,
        pytest.raises(UsageError, match=r"^across_ranks: torch\.distributed is not initialised"),
    ):
        seen.verdict(across_ranks=True)
