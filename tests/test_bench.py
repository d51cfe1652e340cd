"""What the benches stand on: arms that take turns, the limit that decodes what the loader decodes, arms that do the
same."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from bench import _limit, _synthetic, device
from bench._arms import Comparison
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

COUNTER = """
import time
from bench._peers.serve import argument, serve
asked = argument()
def batches():
    while True:
        time.sleep(asked["seconds"])
        yield asked["images"]
serve(batches(), version="1", kernel="none", drain=2, facts=lambda: {"seen": time.process_time()})
"""


def counter(images: int, seconds: float = 0.005) -> list[str]:
    return [sys.executable, "-c", COUNTER, json.dumps({"images": images, "seconds": seconds})]


def test_arms_take_turns_and_a_ratio_is_taken_within_a_round(tmp_path: Path) -> None:
    with Comparison(tmp_path) as arms:
        arms.add("one", counter(1))
        arms.add("two", counter(1000))
        arms.run(3, 0.05)
        one, two = ([turn.images_s for turn in arm.turns] for arm in arms.arms.values())
        ratios = sorted(b / a for a, b in zip(one, two, strict=True))
        assert arms.ratio("two", "one") == pytest.approx((ratios[1], ratios[0], ratios[2]))
        assert arms.fastest(["one", "two", "three"]) == "two"
        assert arms.arms["one"].facts["seen"] > 0
        assert [row[0] for row in arms.rows()] == ["arm", "one", "two"]


def statuses() -> list[str]:
    """Of the arms among our child processes."""
    children = psutil.Process().children()
    return [
        child.status() for child in children if child.status() != psutil.STATUS_ZOMBIE and COUNTER in child.cmdline()
    ]


def test_who_is_not_asked_is_stopped(tmp_path: Path) -> None:
    with Comparison(tmp_path) as arms:
        for name in ("one", "two"):
            arms.add(name, counter(1))
        arms.run(1, 0.05)
        assert statuses() == [psutil.STATUS_STOPPED] * 2
    assert statuses() == []


def test_who_cannot_start_is_left_out_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Comparison(tmp_path, only=["no program", "no module", "one"]) as arms:
        arms.add("not wanted", counter(1))
        arms.add("no program", [tmp_path / "nothing"])
        arms.add("no module", [sys.executable, "-c", "import no_such_module"])
        arms.add("one", counter(1))
        arms.run(1, 0.02)
        assert list(arms.arms) == ["one"]
        assert arms.ratio("one", "no module") is None
        assert arms.fastest(["no program", "no module"]) is None
    said = capsys.readouterr().out
    assert "no program: not here" in said
    assert "No module named 'no_such_module'" in said
    assert "not wanted" not in said


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_the_region_of_a_box_is_every_pixel_that_the_resized_image_depends_on(
    width: int, height: int, side: int, cuts: list[float]
) -> None:
    left, top = int(cuts[0] * (width - 1)), int(cuts[1] * (height - 1))
    box_w, box_h = 1 + int(cuts[2] * (width - left - 1)), 1 + int(cuts[3] * (height - top - 1))
    x0, y0, x1, y1 = _limit.source_region([left, top, box_w, box_h], width, height, side)
    random = np.random.default_rng(width * 41 + height)
    pixels = random.integers(0, 256, (height, width), np.uint8)
    other = pixels ^ 0xFF
    other[y0:y1, x0:x1] = pixels[y0:y1, x0:x1]

    def resized(array: np.ndarray) -> bytes:
        box = (left, top, left + box_w, top + box_h)
        return Image.fromarray(array).resize((side, side), Image.Resampling.BILINEAR, box=box).tobytes()

    assert resized(pixels) == resized(other)


@pytest.fixture(scope="module")
def limit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _limit.build(tmp_path_factory.mktemp("limit"))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_limit_decodes_regions_at_every_edge(limit: Path, tmp_path: Path, mode: str) -> None:
    image = Image.effect_mandelbrot((50, 37), (-2, -1.5, 1, 1.5), 50).convert(mode)
    image.save(tmp_path / "image.jpg")
    data = (tmp_path / "image.jpg").read_bytes()
    regions = [(0, 0, 50, 37), (0, 0, 1, 1), (49, 36, 50, 37), (17, 9, 33, 37), (0, 36, 50, 37)]
    records = [struct.pack("<Iiiii", len(data), *region) + data for region in regions]
    (tmp_path / "records").write_bytes(struct.pack("<I", len(records)) + b"".join(records))
    command = [limit, tmp_path / "records", "2"]
    done = subprocess.run(command, input="go 0.05\n", capture_output=True, text=True, check=True, timeout=60)
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert "libjpeg-turbo" in ready["version"]
    assert answer["images"] >= len(regions)
    assert not done.stderr  # where libjpeg's warnings go


def test_the_plain_loop_on_a_device_does_the_steps_of_the_trainer(tmp_path: Path) -> None:
    """The same network goes the same way, as far as sums of bf16 in another order let it."""
    cpu = torch.device("cpu")
    setups = []
    for name in ("plain", "bf16"):
        (tmp_path / name).mkdir()
        setups.append(device.setup_of(device.TINY, (), tmp_path / name, cpu))
    begun = [value.detach().clone() for value in setups[0].model.parameters()]
    trainer = _synthetic.trainer(setups[1], tmp_path, device.SilentDisplay())
    before = torch.backends.cudnn.benchmark
    device.plain_arm(setups[0], 3)()
    device.headway_arm(trainer, 3)()
    torch.backends.cudnn.benchmark = before
    trainer.close()
    for setup in setups:
        setup.inputs.close()
    moved = [torch.cat([(a - b).flatten() for a, b in zip(s.model.parameters(), begun, strict=True)]) for s in setups]
    assert moved[0].norm() > 0
    assert (moved[0] - moved[1]).norm() < 0.05 * moved[0].norm()


@given(st.integers(10**9, 10**12))
def test_the_batch_on_a_device_fits_into_its_memory(memory_bytes: int) -> None:
    batch = device.fitting_batch(memory_bytes)
    assert batch.bit_count() == 1
    assert batch <= 256
    assert batch == 8 or batch * 270e6 <= memory_bytes
    assert device.fitting_batch(80 * 10**9) == 256
