"""Own Dataset of dicts, with a transform of one's own: the same Loader, epochs and resume, by worker processes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests._support import digits

import headway


class Photographs(torch.utils.data.Dataset[dict[str, Any]]):
    """As a user of PyTorch writes it: random choices from torch, a dict as the sample."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).rglob("*.*"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = torch.from_numpy(np.array(Image.open(self.files[index])))
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(1)
        return {"image": pixels, "label": int(self.files[index].parent.name), "name": self.files[index].name}


def read(batch: Any) -> tuple[bytes, tuple[int, ...], tuple[str, ...]]:
    return batch["image"].numpy().tobytes(), tuple(batch["label"].tolist()), tuple(batch["name"])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.check)])
def test_own_dataset_of_dicts(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "photos")
    loader = headway.Loader(Photographs("photos"), batch=32, seed=1, workers=workers)
    epochs = [[read(batch) for batch in loader] for _ in range(2)]
    assert len(epochs[0]) == 8
    assert sorted({name for _, _, names in epochs[0] for name in names})
    assert epochs[0] != epochs[1]

    # Another program, other workers: the state of the middle of an epoch gives the rest of it.
    again = headway.Loader(Photographs("photos"), batch=32, seed=1, workers=1)
    taken = [read(batch) for batch in islice(again, 3)]
    other = headway.Loader(Photographs("photos"), batch=32, seed=1, workers=0)
    other.load_state_dict(again.state_dict())
    assert taken + [read(batch) for batch in other] == epochs[0]
