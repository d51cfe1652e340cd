"""A watch and torch itself: what is put in its place is taken out again, copies and compiled networks work on."""

from __future__ import annotations

import contextlib
import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests._waits import waits_refused
from tests.watch._loops import STAGES, Hands, Net, Slow, by_hand, epoch, parts, stages
from torch import Tensor, nn

import headway.watch
from headway.doctor.loop_observation import LoopObservation
from headway.observe import tensor_taps
from headway.watch.loop_watch import LoopWatch


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return by_hand(monkeypatch)


def of_torch() -> dict[str, Any]:
    """What a watch puts its own in the place of."""
    methods = {
        name: vars(torch.Tensor).get(name, "inherited")
        for name in (*tensor_taps.VALUE_METHODS, *tensor_taps.COPY_METHODS)
    }
    return methods | {"backward": torch.autograd.backward}


def hooks(model: nn.Module, optimizer: Any) -> int:
    return sum(
        len(one)
        for one in (
            model._forward_hooks,
            model._forward_pre_hooks,
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        )
    )


def breaks(seen: LoopWatch[Any]) -> None:
    for _ in seen.loader:
        assert of_torch()["item"] != "inherited"
        break


def fails(seen: LoopWatch[Any]) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in seen.loader:
            raise ZeroDivisionError


def ends(seen: LoopWatch[Any]) -> None:
    list(seen.loader)


def closes(seen: LoopWatch[Any]) -> None:
    for _ in seen.loader:
        seen.close()
        assert of_torch()["item"] == "inherited"


@pytest.mark.parametrize("way", [breaks, fails, ends, closes])
def test_torch_is_as_before_after_each_loop_and_the_network_after_the_watch(
    way: Callable[[LoopWatch[Any]], None],
) -> None:
    before = of_torch()
    assert before["item"] == "inherited"
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with headway.watch.watch([torch.zeros(1, 4)] * 3, model, optimizer) as seen:
        assert of_torch() == before
        for _ in range(2):
            way(seen)
            assert of_torch() == before
    assert hooks(model, optimizer) == 0


def test_a_loader_that_fails_fails(hands: Hands) -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.zeros(1, 4)
        raise KeyError("no such image")

    class Broken:
        def __iter__(self) -> Iterator[Tensor]:
            return broken()

    class Unmade:
        def __iter__(self) -> Iterator[Tensor]:
            raise KeyError("no data at all")

    before = of_torch()
    for loader, said in ((Broken(), "no such image"), (Unmade(), "no data at all")):
        _, model, optimizer = parts(hands)
        with headway.watch.watch(loader, model, optimizer) as seen, pytest.raises(KeyError, match=said):
            list(seen.loader)
        assert of_torch() == before


def test_two_watches_that_end_in_any_order() -> None:
    before = of_torch()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (headway.watch.watch([torch.zeros(1, 4)] * 30, model, optimizer) for _ in range(2))
    for order in ((first, second), (second, first)):
        streams = [iter(one.loader) for one in order]
        for _ in range(30):
            assert [next(stream) is not None for stream in streams] == [True, True]
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        for stream in streams:
            assert of_torch() != before
            assert next(stream, None) is None
        assert of_torch() == before
    for one in (first, second):
        assert one.verdict().steps > 20
        one.close()
    assert hooks(model, optimizer) == 0


def test_a_second_loop_takes_the_place_of_the_first(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    before = of_torch()
    with headway.watch.watch(loader, model, optimizer) as seen:
        old = iter(seen.loader)
        next(old)
        epoch(seen, model, optimizer, hands)
        assert len(list(old)) == 39
    assert stages(seen.verdict()) == STAGES
    assert of_torch() == before


def test_a_copy_of_the_network_is_not_watched(hands: Hands) -> None:
    loader, model, optimizer = parts(hands)
    Slow.hands = hands
    with headway.watch.watch(loader, model, optimizer) as seen:
        averaged: Net | None = None
        for images, _ in seen.loader:
            if averaged is None:
                averaged = copy.deepcopy(model)
                averaged.hands = None
            averaged(images)
            saved = io.BytesIO()
            torch.save(averaged, saved)
            model(images).sum().backward()
            optimizer.step()
    assert stages(seen.verdict())["forward"] == 3
    assert b"step_marks" not in saved.getvalue(), "it takes nothing of the watch along"
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=False)(images), averaged(images))


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_network_is_seen_and_compiled_once(way: str, hands: Hands) -> None:
    loader, _, _ = parts(hands)
    model, compiled = Net(), []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)

        def run(*args: Any) -> Any:
            hands.take(3)
            return graph.forward(*args)

        return run

    called: nn.Module = torch.compile(model, backend=backend) if way == "wrapped" else model
    if way == "in place":
        model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with headway.watch.watch(loader, called, optimizer) as seen:
        for _ in range(2):
            for images, _labels in seen.loader:
                loss = called(images).sum()
                loss.backward()
                optimizer.step()
                loss.item()
    found = seen.verdict()
    assert stages(found)["forward"] == 3
    assert found.reads == 1
    assert len(compiled) == 1
    hands.take(1)
    called(images)
    assert len(compiled) == 1, "nor anew when the hooks are gone"
    torch._dynamo.reset()


def test_a_step_that_is_compiled_whole_stays_whole() -> None:
    """Hooks and taps in it are traced, and have to be nothing there."""
    loader = [(torch.ones(8, 4), None)] * 40
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def forward(images: Tensor) -> Tensor:
        loss: Tensor = model(images).sum()
        return loss

    with headway.watch.watch(loader, model, optimizer) as seen:
        for images, _ in seen.loader:
            forward(images).backward()
            optimizer.step()
    assert "forward was not seen: the time is in the stage other" in seen.verdict().unknown
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_device_that_works_on_its_own() -> None:
    """Nothing of the watch itself waits for the device, and what the loop waits for is counted."""
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [torch.randn(64, 512).pin_memory() for _ in range(60)]
    for read in (False, True):
        with (
            headway.watch.watch(batches, model, optimizer) as seen,
            contextlib.nullcontext() if read else waits_refused(),
        ):
            for batch in seen.loader:
                loss = model(batch.to("cuda", non_blocking=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if read:
                    loss.item()
        found = seen.verdict()
        assert found.device == "cuda"
        assert found.syncs == (1.0 if read else 0.0)
        assert found.starved is not None
        assert not read or found.starved == 1.0, "after a sync the device has nothing left to do"


RANK = """
import json
import sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import headway.watch
from headway.observe import step_marks

class Hands:
    now = 10**9
    def __call__(self):
        return self.now

hands = step_marks.perf_counter_ns = Hands()
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Batches:
    def __iter__(self):
        for _ in range(620):
            hands.now += 1_000_000 * (9 if rank else 4)
            yield torch.ones(2, 4)

with headway.watch.watch(Batches(), model, optimizer) as seen:
    for step, images in enumerate(seen.loader):
        model.require_backward_grad_sync = step % 2 == 0
        loss = model(images).sum()
        loss.register_hook(lambda _: setattr(hands, "now", hands.now + (0 if step % 2 else 10_000_000)))
        loss.backward()
        optimizer.step()
    alone = seen.verdict()
    found = seen.verdict(across_ranks=True)
    assert not alone.ranks
print(json.dumps(found.to_json()))
torch.distributed.destroy_process_group()
"""


@pytest.mark.check
def test_ranks_are_compared_when_the_user_asks(tmp_path: Path) -> None:
    """Two processes: rank 1 waits 9 ms for a batch and rank 0 waits 4 ms; every other step exchanges, in 10 ms."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script)]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    for text in said:
        found = LoopObservation.model_validate_json(text.splitlines()[-1])
        assert [one.rank for one in found.ranks] == [0, 1]
        assert [round(1e3 * one.own_s, 3) for one in found.ranks] == [4, 9]
        (slow,) = (one.sentence for one in found.patterns if one.kind == "slow rank")
        assert slow.startswith("rank 1 is behind the others")
        assert "check its host" in slow
        assert any("backward contains the exchange of gradients" in one and "it takes" in one for one in found.unknown)
