"""`headway doctor --script`: real scripts, in processes of their own, that know nothing of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headway.core.errors import HeadwayError, UsageError, UserCodeError
from headway.watch import script_watch
from headway.watch.script_watch import watch_script

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import beside

print("arguments", *sys.argv[1:], __name__, beside.WHERE)
data = TensorDataset(torch.randn(400, 4), torch.randint(2, (400,)))
train, test = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=50)
body, head, lossy = nn.Linear(4, 8), nn.Linear(8, 2), nn.CrossEntropyLoss()
one, other = torch.optim.SGD(body.parameters(), lr=0.1), torch.optim.AdamW(head.parameters())
try:
    for epoch in range(EPOCHS):
        for images, labels in test:  # evaluated before it is trained
            with torch.no_grad():
                head(body(images))
        for step, (images, labels) in enumerate(train):
            loss = lossy(head(body(images).relu()), labels)
            for optimizer in one, other:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in one, other:
                optimizer.step()
            loss.item()
except Exception:
    print("caught")
finally:
    print("saved at", epoch, step, flush=True)
print("ended by itself")
"""


def written(folder: Path, body: str, **values: object) -> Path:
    (folder / "beside.py").write_text("WHERE = 'beside'\n")
    path = folder / "train.py"
    for name, value in values.items():
        body = body.replace(name, repr(value))
    path.write_text(body)
    return path


def test_a_script_is_watched_for_so_many_steps_and_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = watch_script(written(tmp_path, TRAIN, EPOCHS=1000), ["--lr", "0.1"], steps=60)
    assert found.steps == 60 - 1, "all but the first one of the second epoch"
    assert found.epochs == 2
    assert found.batch == 8
    assert found.kind is not None
    assert {one.stage for one in found.stages} >= {"wait", "forward", "loss", "backward", "optimizer", "other"}
    assert found.reads == 1.0
    assert re.fullmatch(r"item at train\.py:\d+", found.read_at[0])
    assert sum(one.share for one in found.stages) == pytest.approx(1)
    said = capfd.readouterr()
    assert "arguments --lr 0.1 __main__ beside\n" in said.out
    assert "saved at 1 16\n" in said.out, "one in which it was found, five of warm-up, 60, and one whose end was seen"
    assert "caught" not in said.out
    assert "ended by itself" not in said.out
    assert said.err == ""


def test_a_loader_that_is_made_anew_in_each_epoch_is_the_same_loop(tmp_path: Path) -> None:
    anew = "        train = DataLoader(data, batch_size=8, shuffle=True)\n        for step,"
    found = watch_script(written(tmp_path, TRAIN.replace("        for step,", anew), EPOCHS=1000), steps=120)
    assert found.epochs == 3, "of 50 steps each; those of evaluation, of the same data in another order, are not seen"
    assert (found.batch, found.steps) == (8, 120 - 2)


def test_a_short_script_ends_by_itself_and_tells_what_it_can(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = watch_script(written(tmp_path, TRAIN.replace("randn(400", "randn(80").replace("(400,)", "(80,)"), EPOCHS=1))
    assert found.kind is None
    assert "are needed" in found.sentence
    assert "ended by itself" in capfd.readouterr().out
    found = watch_script(written(tmp_path, TRAIN, EPOCHS=2), seconds=600, to_stderr=True)
    assert found.kind is not None
    said = capfd.readouterr()
    assert said.out == ""
    assert "ended by itself" in said.err


def test_its_time_is_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch_script(written(tmp_path, TRAIN, EPOCHS=10**9), seconds=0.1)
    assert "saved at" in capfd.readouterr().out


def test_a_script_that_fails_shows_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "def deep():\n    raise ZeroDivisionError('of the user')\n\ndeep()\n"
    with pytest.raises(UserCodeError, match=r"train\.py: ZeroDivisionError: of the user"):
        watch_script(written(tmp_path, body))
    said = capfd.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.count("train.py") == 2, "its own frames alone"
    assert "runpy" not in said
    with pytest.raises(UserCodeError, match=r"train\.py: SyntaxError"):
        watch_script(written(tmp_path, "def ("))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(3)", "it left with status 3"),
        pytest.param("raise SystemExit('no data')", "it left with status 1", marks=pytest.mark.check),
        ("import os; os.kill(os.getpid(), 9)", "it ended by signal SIGKILL before it was watched"),
        pytest.param("import os; os._exit(4)", "it ended with status 4 before it", marks=pytest.mark.check),
    ],
)
def test_a_script_that_leaves(body: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=said):
        watch_script(written(tmp_path, body))


ALONE = """
import torch
weights = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
for _ in range(20):
    weights(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_a_script_without_such_a_loop(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"its optimizer stepped 20 times, never .*headway\.watch\.watch"):
        watch_script(written(tmp_path, ALONE))
    with pytest.raises(HeadwayError, match="no torch optimizer stepped"):
        watch_script(written(tmp_path, "print('hello')"))


STUBBORN = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(100, 1))
while True:
    try:
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
    except BaseException:
        pass
"""


def test_a_script_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_watch, "GRACE_S", 0.5)
    assert watch_script(written(tmp_path, STUBBORN), steps=30).steps >= 29


SPAWNED = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, place):
        return torch.full((4,), float(place))

if __name__ == "__main__":
    model = torch.compile(torch.nn.Linear(4, 2), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    for images in loader:
        model(images).sum().backward()
        optimizer.step()
    print("ended by itself")
"""


@pytest.mark.check
def test_workers_that_are_started_anew_find_what_the_script_defines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = watch_script(written(tmp_path, SPAWNED), seconds=600)
    said = capfd.readouterr()
    assert "ended by itself" in said.out
    assert said.err == "", "nor a warning of the hooks that look for the network"
    assert found.steps == 100 - 1 - 5, "all but the first, in which the loop was found, and the warm-up"
    assert "forward" in [one.stage for one in found.stages], "a compiled network is found, too"


def test_bad_input_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "pass")
    for wrong, said in (
        (tmp_path, "this is a folder"),
        (tmp_path / "none.py", "there is no file"),
        (Path(os.devnull), "there is no file"),
    ):
        with pytest.raises(UsageError, match=said):
            watch_script(wrong)
    (tmp_path / "train.sh").write_text("true")
    with pytest.raises(UsageError, match="this is not a Python file"):
        watch_script(tmp_path / "train.sh")
    with pytest.raises(UsageError, match="--steps: 0 steps cannot be watched"):
        watch_script(path, steps=0)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=r"--seconds: .* cannot be watched"):
            watch_script(path, seconds=seconds)


LOADER = """
import numpy as np
import torch
import headway
from pathlib import Path
from PIL import Image
from torch import nn

for place in range(40):
    path = Path(__file__).parent / "photos" / "ab"[place % 2] / f"{place}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), place, np.uint8)).save(path)
photos = Path(__file__).parent / "photos"
network = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
loader = headway.Loader(photos, batch=4, seed=1)
for epoch in range(1000):
    for images, labels in headway.Loader(photos, batch=10):  # evaluated before it is trained
        with torch.no_grad():
            network(images / 255.0)
    ANEW
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images / 255.0), labels).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "anew", ["pass", pytest.param("loader = headway.Loader(photos, batch=4, seed=1)", marks=pytest.mark.check)]
)
def test_a_loop_over_our_own_loader_is_watched(anew: str, tmp_path: Path) -> None:
    found = watch_script(written(tmp_path, LOADER.replace("ANEW", anew)), steps=40)
    assert (found.batch, found.epochs) == (4, 5)
    assert found.kind is not None
    assert found.loader.startswith("headway.Loader, ")
