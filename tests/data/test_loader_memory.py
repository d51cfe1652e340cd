"""What a Loader keeps: memory does not grow with the epochs, and its peak is the ring, the columns and the threads'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headway.data.pack import pack

EPOCHS = 20
GROWTH_MB, PEAK_MB = 50, 60

PROGRAM = """
import sys
import torch
import headway

def anonymous_mb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

data = headway.open(sys.argv[1])
torch.zeros(10).sum()
before = anonymous_mb()
after_two = 0.0
order = headway.Order(len(data), seed=1)
for epoch in range({epochs}):
    # A loader an epoch, as evaluations make them: what one leaves behind adds up.
    first = epoch * len(data)
    loader = headway.Loader(
        data, batch=32, order=order, start=first, stop=first + len(data), size=224, crop="random", flip=True,
        threads=2, cache="none"
    )
    for images, labels in loader:
        images.sum().item()
    if epoch == 1:
        after_two = anonymous_mb()
ring = 3 * 32 * 224 * 224 * 3 / 2**20
print(anonymous_mb() - after_two, anonymous_mb() - before - ring)
"""


@pytest.mark.check
@pytest.mark.fresh
def test_memory_does_not_grow_with_the_epochs(data_root: Path, tmp_path: Path) -> None:
    """Anonymous memory: pages of the mapped shards are the kernel's cache and go when others need the room."""
    listing = tmp_path / "images.csv"
    files = sorted((data_root / "imagenet-250").glob("*.JPEG"))
    listing.write_text("path,label\n" + "".join(f"{path},{place % 2}\n" for place, path in enumerate(files)))
    pack(listing, tmp_path / "packed")
    command = [sys.executable, "-c", PROGRAM.replace("{epochs}", str(EPOCHS)), str(tmp_path / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    growth, beside_the_ring = map(float, done.stdout.split())
    assert growth < GROWTH_MB
    assert beside_the_ring < PEAK_MB
