"""The rules of asynchronous training: leases, delay compensation, statistics, the log, replay and the simulator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from bench._parallel.delay import PreviousWeight
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.core.errors import DataError
from headway.optim import build_optimizer, set_lr
from headway.optim.optimizer_recipe import read_optimizer
from headway.parallel.buffers import SharedBuffers, list_momenta
from headway.parallel.compensate import DelayCompensation, compensate_adaptive, compensate_constant
from headway.parallel.flat_tensors import FlatTensors, decode_state, encode_state
from headway.parallel.host import ServerHost, State
from headway.parallel.ledger import Ledger, Update
from headway.parallel.replay import replay
from headway.parallel.server import LeadServer, ShardServer
from headway.parallel.shards import WeightShard, divide_tensors
from headway.parallel.simulator import simulate
from headway.parallel.update_log import ROW_BYTES, UpdateLog, find_gaps, read_updates

RULES = ("none", "constant", "adaptive")


class Problem:
    """A small network with batch norm, its server, and the gradients of numbered batches."""

    def __init__(self, rule: str, momentum: float = 0.9) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        recipe = read_optimizer(name="sgd", lr=0.1, momentum=momentum, weight_decay=1e-3)
        self.optimizer = build_optimizer(recipe, self.model)
        weights = dict(self.model.named_parameters())
        compensation = DelayCompensation(rule, tuple(weights), list(weights.values()), strength=0.5, decay=0.9)  # type: ignore[arg-type]
        self.shard = WeightShard(weights, self.step, compensation)
        self.buffers = SharedBuffers(dict(self.model.named_buffers()), list_momenta(self.model))

    def step(self, lr: float) -> None:
        set_lr(self.optimizer, lr)
        self.optimizer.step()

    def compute(self, number: int) -> tuple[list[Tensor | None], list[Tensor]]:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 5, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        before = [buffer.clone() for buffer in self.model.buffers()]
        loss = nn.functional.cross_entropy(self.model(x), y)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        changed = [buffer.clone() for buffer in self.model.buffers()]
        torch._foreach_copy_(list(self.model.buffers()), before)
        return list(gradients), changed

    def read(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def lr_at(update: int) -> float:
    return 0.1 / (1 + update / 20)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("rule", RULES)
def test_one_worker_is_sgd_bit_for_bit(rule: str) -> None:
    problem, plain = Problem(rule), Problem("none")
    simulate(1, 30, problem.shard, problem.buffers, problem.compute, lr_at, lambda worker, step: 1.0)
    for number in range(30):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 5, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        nn.functional.cross_entropy(plain.model(x), y).backward()
        plain.step(lr_at(number))
        plain.optimizer.zero_grad()
    assert same(problem.read(), plain.read())


def test_one_previous_weight_for_all_workers_is_not_sgd() -> None:
    """The rule of MXNet corrects without any delay."""
    problem, plain = Problem("none"), Problem("none")
    problem.shard.compensation = PreviousWeight(problem.shard.weights, 0.5)
    for one in (problem, plain):
        simulate(1, 30, one.shard, one.buffers, one.compute, lr_at, lambda worker, step: 1.0)
    assert not same(problem.read(), plain.read())


def test_a_gradient_without_delay_is_not_touched() -> None:
    """Not even the sign of a zero, or an infinity."""
    weight = torch.tensor([1.0, 2.0, 3.0])
    gradient = torch.tensor([-0.0, float("inf"), 1.5])
    for rule in RULES:
        compensation = DelayCompensation(rule, ["w"], [weight], strength=2.0, decay=0.5)  # type: ignore[arg-type]
        compensation.note_read(0, [weight])
        gradients: list[Tensor | None] = [gradient.clone()]
        compensation.correct(0, gradients, [weight], is_stale=False)
        assert gradients[0] is not None
        assert gradients[0].numpy().tobytes() == gradient.numpy().tobytes()


@pytest.mark.parametrize("rule", ["constant", "adaptive"])
def test_compensation_of_two_updates_of_delay_by_hand(rule: str) -> None:
    """One weight, gradient g = w: worker 0 reads w = 1; workers 1 and 2 step first."""
    weight = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    compensation = DelayCompensation(rule, ["w"], [weight], strength=2.0, decay=0.5)  # type: ignore[arg-type]

    def step(lr: float) -> None:
        with torch.no_grad():
            assert weight.grad is not None
            weight.sub_(lr * weight.grad)

    shard = WeightShard({"w": weight}, step, compensation)
    for worker in range(3):
        shard.note_read(worker)
    value, mean_square = 1.0, 0.0
    for worker, is_stale in ((1, False), (2, True), (0, True)):
        gradient = 1.0
        mean_square = 0.5 * mean_square + 0.5 * gradient**2
        strength = 2.0 if rule == "constant" else 2.0 / (mean_square + 1e-7) ** 0.5
        corrected = gradient + strength * gradient**2 * (value - 1.0)
        ratio = shard.apply(worker, [torch.tensor([gradient], dtype=torch.float64)], 0.1, is_stale=is_stale)
        assert ratio == pytest.approx(abs(corrected - gradient), abs=1e-12)
        value -= 0.1 * corrected
        assert weight.item() == pytest.approx(value, abs=1e-12)


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.floats(0, 5))
def test_compensation_is_first_order(values: list[float], strength: float) -> None:
    gradient, weight, backup = (torch.tensor([value], dtype=torch.float64) for value in values)
    constant = compensate_constant(gradient, weight, backup, strength)
    assert constant.item() == pytest.approx(values[0] + strength * values[0] ** 2 * (values[1] - values[2]))
    # With a mean square of 1 - 1e-7 the adaptive rule is the constant one.
    adaptive = compensate_adaptive(gradient, weight, backup, torch.ones(1).double() - 1e-7, strength)
    torch.testing.assert_close(adaptive, constant)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_mean_staleness_is_workers_less_one(workers: int) -> None:
    """Whatever their speeds: each update falls into one span of every other worker."""
    problem, random = Problem("none"), np.random.default_rng(0)
    speeds = random.uniform(1, 5, workers)
    none: list[Tensor | None] = [None] * len(problem.shard.weights)

    def compute(step: int) -> tuple[list[Tensor | None], list[Tensor]]:
        return list(none), problem.buffers.tensors

    updates, _ = simulate(
        workers,
        2000,
        problem.shard,
        problem.buffers,
        compute,
        lr_at,
        lambda worker, step: speeds[worker] * random.uniform(0.5, 1.5),
    )
    assert sorted(update.step for update in updates) == list(range(2000))
    assert np.mean([update.staleness for update in updates]) == pytest.approx(workers - 1, abs=0.05)


def test_the_fastest_is_at_most_so_many_updates_ahead() -> None:
    problem = Problem("none")
    none: list[Tensor | None] = [None] * len(problem.shard.weights)
    counts = [0, 0]

    def compute(step: int) -> tuple[list[Tensor | None], list[Tensor]]:
        return list(none), problem.buffers.tensors

    def run(ahead: int | None) -> tuple[list[int], float]:
        updates, seconds = simulate(
            2, 120, problem.shard, problem.buffers, compute, lr_at, lambda worker, step: (1.0, 5.0)[worker], ahead=ahead
        )
        counts[:] = [0, 0]
        most = [0]
        for update in updates:
            counts[update.worker] += 1
            most.append(counts[0] - counts[1])
        return most, seconds

    assert max(run(0)[0]) <= 1
    assert max(run(3)[0]) <= 4
    # Lockstep takes the time of the slow worker; without a limit the fast one makes five of six updates.
    assert run(0)[1] > 2.5 * run(None)[1]


class TestLedger:
    def test_a_lost_workers_step_is_leased_to_another(self) -> None:
        ledger = Ledger(10, 14, (0, 1), None)
        first, second = ledger.take(0), ledger.take(1)
        assert first is not None
        assert second is not None
        ledger.drop(1)
        steps = []
        while ledger.workers == (0,) and not ledger.is_drained:
            steps.append(ledger.complete(0).step)
            ledger.take(0)
        assert sorted(steps) == [10, 11, 12, 13]
        assert ledger.version == 14

    @given(
        st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from(["take", "take", "complete", "drop", "stop"])), max_size=60
        )
    )
    def test_any_history_applies_steps_without_a_gap(self, history: list[tuple[int, str]]) -> None:
        """Worker 3 is never lost, and ends what the others left."""
        ledger, applied = Ledger(5, 25, (0, 1, 2, 3), None), []
        leased: set[int] = set()
        for worker, act in history:
            if worker not in ledger.workers:
                continue
            if act == "take" and worker not in leased:
                leased |= {worker} if ledger.take(worker) else set()
            elif act == "complete" and worker in leased:
                leased.discard(worker)
                applied.append(ledger.complete(worker))
            elif act == "drop" and worker != 3:
                leased.discard(worker)
                ledger.drop(worker)
            elif act == "stop":
                ledger.stop_leasing()
        for worker in (0, 1, 2):
            ledger.drop(worker)
        while 3 in leased or ledger.take(3):
            leased.discard(3)
            applied.append(ledger.complete(3))
        assert ledger.is_drained
        assert sorted(update.step for update in applied) == list(range(5, ledger.version))
        assert [update.applied for update in applied] == list(range(6, ledger.version + 1))


@pytest.mark.parametrize("rule", RULES)
def test_replay_repeats_a_run_of_three_workers_bit_for_bit(rule: str, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    problem, again = Problem(rule), Problem(rule)
    updates, _ = simulate(
        3, 60, problem.shard, problem.buffers, problem.compute, lr_at, lambda worker, step: random.uniform(1, 4)
    )
    log = UpdateLog(tmp_path / "updates.bin", 0)
    for update in updates:
        log.write(update)
    log.close()
    assert max(update.staleness for update in updates) > 2
    replay(read_updates(tmp_path / "updates.bin"), again.shard, again.buffers, again.compute, lr_at)
    assert same(problem.read(), again.read())
    # With another version read there, the weights are others.
    changed = [*updates]
    place = next(place for place, update in enumerate(updates) if update.staleness > 1)
    changed[place] = updates[place]._replace(read=updates[place].read + 1)
    assert not find_gaps(changed)
    other = Problem(rule)
    replay(changed, other.shard, other.buffers, other.compute, lr_at)
    assert not same(problem.read(), other.read())


class TestLog:
    UPDATES = (Update(0, 0, 0, 1), Update(1, 1, 0, 2), Update(0, 2, 1, 3), Update(1, 3, 2, 4))

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        log = UpdateLog(tmp_path / "updates.bin", 0)
        for update in self.UPDATES:
            log.write(update)
        log.close()
        return tmp_path / "updates.bin"

    def test_a_row_has_under_24_bytes(self, path: Path) -> None:
        assert path.stat().st_size == ROW_BYTES * len(self.UPDATES)
        assert ROW_BYTES < 24
        assert tuple(read_updates(path)) == self.UPDATES

    def test_a_changed_row_is_found(self, path: Path) -> None:
        content = path.read_bytes()
        for place in range(len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(DataError, match="the log of updates is damaged"):
                read_updates(path)

    def test_moved_and_removed_rows_are_found(self, path: Path) -> None:
        rows = [path.read_bytes()[at : at + ROW_BYTES] for at in range(0, path.stat().st_size, ROW_BYTES)]
        for changed in ((rows[1], rows[0], *rows[2:]), (rows[0], *rows[2:])):
            path.write_bytes(b"".join(changed))
            with pytest.raises(DataError, match="is not what was written"):
                read_updates(path)

    def test_rows_behind_a_checkpoint_are_cut(self, path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"torn")
        log = UpdateLog(path, 2)
        log.write(Update(0, 2, 2, 3))
        log.close()
        assert read_updates(path) == [*self.UPDATES[:2], Update(0, 2, 2, 3)]
        with pytest.raises(DataError, match="it has 3 updates, and the run has made 9"):
            UpdateLog(path, 9)

    def test_a_run_goes_back_without_reading_or_writing_the_rows_again(self, path: Path) -> None:
        log = UpdateLog(path, 4)
        # What is kept is neither checked again nor replaced.
        with path.open("r+b") as file:
            file.write(b"\xff")
        log.rewind(3)
        log.write(self.UPDATES[3])
        log.rewind(4)
        with pytest.raises(DataError, match="it has 4 updates, and the run has made 5"):
            log.rewind(5)
        log.close()
        content = path.read_bytes()
        assert content[:1] == b"\xff"
        path.write_bytes(b"\0" + content[1:])
        assert tuple(read_updates(path)) == self.UPDATES

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (Update(0, 2, 1, 4), "update 3 says that it was applied as 4"),
            (Update(0, 2, 3, 3), "update 3 has read version 3, which came later"),
            (Update(0, 2, 0, 3), "update 3 has read version 0, before its worker's last update was applied"),
            (Update(0, 1, 1, 3), "update 3 computes step 1 again"),
        ],
    )
    def test_what_cannot_have_happened_is_named(self, changed: Update, message: str) -> None:
        assert find_gaps([*self.UPDATES[:2], changed, self.UPDATES[3]]) == message
        assert find_gaps(self.UPDATES) == find_gaps([]) == ""


def test_stale_statistics_are_the_moving_mean_of_all_batches() -> None:
    """Two workers read at the same time: the server's mean has both batches, as one process's would."""
    torch.manual_seed(0)
    norm, reference = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    buffers = SharedBuffers(dict(norm.named_buffers()), list_momenta(norm))
    batches = [torch.randn(8, 4) + number for number in range(2)]
    pushed = []
    for worker, batch in enumerate(batches):
        buffers.note_read(worker)
        local = nn.BatchNorm1d(4)
        local.load_state_dict(norm.state_dict())
        local(batch)
        pushed.append(list(local.buffers()))
        reference(batch)
    buffers.add(0, pushed[0], is_stale=False)
    buffers.add(1, pushed[1], is_stale=True)
    for own, wanted in zip(norm.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(own, wanted)


def test_tensors_travel_with_their_strides() -> None:
    tensors: list[Tensor | None] = [torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.tensor(3)]
    flat = FlatTensors([*(tensor for tensor in tensors if tensor is not None), torch.empty(7)])
    flat.pack([*tensors, None])
    got = FlatTensors([*(tensor for tensor in tensors if tensor is not None), torch.empty(7)])
    got.data.copy_(flat.data)
    first, second, absent = got.unpack()
    assert first is not None
    assert second is not None
    assert absent is None
    assert torch.equal(first, tensors[0])  # type: ignore[arg-type]
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert second.item() == 3
    scalars, named = decode_state(encode_state({"step": 3}, {"a": first, "b": first}))
    assert scalars == {"step": 3}
    assert torch.equal(named["b"], first)


def test_all_workers_are_told_one_state() -> None:
    """What changes meanwhile, such as newcomers, would make some of them do what others do not."""
    shard = Problem("none").shard
    lead = LeadServer(ShardServer(shard, (0,)), Ledger(0, 0, (0,), None), lr_at, lambda *update: None)
    calls: list[int] = []

    def collect() -> State:
        calls.append(len(calls))
        return {"calls": len(calls)}, {}

    host = ServerHost(ShardServer(shard, (0,)), lead, None, collect, {})
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda _: host.collect_state(), range(8)))
    assert all(state is states[0] for state in states)
    assert calls == [0]


def test_tensors_are_spread_over_servers() -> None:
    sizes = {"a": 100, "b": 40, "c": 30, "d": 30}
    assert divide_tensors(sizes, 2) == [["a"], ["b", "c", "d"]]
    assert sorted(name for share in divide_tensors(sizes, 3) for name in share) == list("abcd")
