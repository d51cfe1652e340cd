"""A thread that reads: what it hands on, and how it ends."""

from __future__ import annotations

import threading
import time
from typing import final

import pytest

from headway.observe import load_sampler
from headway.observe.load_sampler import LoadRow, LoadSampler, LoadSource


@final
class Counted(LoadSource):
    """Gives so many rows a reading, each with its running number."""

    def __init__(self, rows: int = 1, fails_after: int | None = None) -> None:
        self.rows, self.fails_after, self.given, self.closed = rows, fails_after, 0, False
        self.threads: set[str] = set()

    @property
    def kind(self) -> str:
        return f"by{self.rows}"

    @property
    def columns(self) -> tuple[str, ...]:
        return "seconds", "number"

    def read(self, now_s: float) -> list[LoadRow]:
        self.threads.add(threading.current_thread().name)
        self.given += self.rows
        return [(now_s, float(number)) for number in range(self.given - self.rows, self.given)]

    def close(self) -> None:
        self.closed = True


def sampled(*sources: Counted, since_s: float = 0.0, until: int = 5) -> tuple[LoadSampler, list[tuple[str, LoadRow]]]:
    """Sampled until so many readings have been written."""
    written: list[tuple[str, LoadRow]] = []
    with LoadSampler(sources, lambda source, row: written.append((source.kind, row)), since_s) as sampler:
        while sources[0].given < until * sources[0].rows:
            time.sleep(0.001)
    return sampler, written


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_sampler, "INTERVAL_S", 0.002)


def test_every_row_is_written_once_and_in_order() -> None:
    one, three = Counted(1), Counted(3)
    sampler, written = sampled(one, three, since_s=100.0)
    for source in (one, three):
        rows = [row for kind, row in written if kind == source.kind]
        assert [row[1] for row in rows] == list(range(source.given))
        seconds = [row[0] for row in rows]
        assert seconds == sorted(seconds)
        assert seconds[0] >= 100
        assert source.threads == {"headway-sampler"}
        assert source.closed
        assert sampler.latest[f"{source.kind}_number"] == rows[-1][1]
        assert sampler.latest[f"{source.kind}_seconds"] == rows[-1][0]


def test_a_long_run_is_read_less_often() -> None:
    """A thousand hours in, one reading is of a quarter of an hour: none comes before the last."""
    source = Counted()
    with LoadSampler([source], lambda *_: None, since_s=3.6e6):
        time.sleep(0.05)
        assert source.given == 0
    assert source.given == 1


def test_the_shortest_run_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_sampler, "INTERVAL_S", 60.0)
    source = Counted()
    with LoadSampler([source], lambda *_: None):
        pass
    assert source.given == 1
    assert source.closed


def test_a_full_disk_ends_the_sampling_and_not_the_run() -> None:
    source = Counted()

    def full(source: LoadSource, row: LoadRow) -> None:
        raise OSError(28, "No space left on device")

    with LoadSampler([source], full) as sampler:
        while source.given == 0:
            time.sleep(0.001)
        time.sleep(0.02)
    assert source.given == 1
    assert sampler.latest == {}
    assert source.closed


def test_it_ends_with_a_block_that_fails() -> None:
    source = Counted()
    with pytest.raises(KeyboardInterrupt), LoadSampler([source], lambda *_: None):
        raise KeyboardInterrupt
    assert source.closed
    assert "headway-sampler" not in [thread.name for thread in threading.enumerate()]
