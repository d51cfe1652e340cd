"""The meter of bench.observe: it is around all by which a Trainer watches itself, and changes nothing of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import observe


def test_every_part_is_called_and_is_a_part_of_the_step(tmp_path: Path) -> None:
    with observe.trainer_of("observe_share", tmp_path, "batch=4") as trainer:
        meter = observe.metered(trainer)
        trainer.run(50)
        assert trainer.step == 50
        # wait (or first batch), augment, forward, loss, backward, optimizer, and log after each step; at the one that
        # logs also where its losses are read, and where it is done
        assert meter.calls["clock"] == 50 * 7 + 2
        assert meter.calls["observer"] == 50 * 2 + 2
        assert meter.calls["layers"] == 2
        assert sum(meter.ns.values()) > 0


@pytest.mark.check
def test_a_block_is_a_logging_interval(tmp_path: Path) -> None:
    with observe.trainer_of("observe_share", tmp_path, "batch=4") as trainer:
        blocks = observe.measured(trainer, 2)
        assert trainer.step == 3 * 50
    assert len(blocks) == 2
    for block in blocks:
        assert block.keys() == {*observe.PARTS, "step"}
        assert 0 < sum(block[part] for part in observe.PARTS) < block["step"]
        assert block["board"] == 0  # of a single process


@pytest.mark.check
def test_two_ranks_have_a_board() -> None:
    for block in observe.together(1):
        assert block["board"] > 0
