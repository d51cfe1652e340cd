"""A notebook: train from Python, read the results, predict, extend nothing by hand. Documented calls only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests._support import packed_digits
from torch import nn

import headway


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_digits(tmp_path)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    recipe = {
        "data": {"train": Path("digits.packed/train"), "eval": "digits.packed/eval"},
        "model": {"factory": "headway.model:small_net"},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "batch": 30,
        "epochs": 3,
        "log_every_steps": 2,
    }
    run = headway.train(recipe, {"precision": "fp32"}, model=model, run="runs/first")
    assert run.finished
    assert repr(run).startswith("Run('runs/first': finished at step 18 of 18, ")
    assert run._repr_html_().count("<tr>") >= 3

    # Results as arrays.
    assert run.metrics["epoch"].tolist() == [1, 2, 3]
    assert run.metrics["accuracy"][-1] > 0.6
    assert len(run.training["loss"]) == 9
    assert np.isfinite(run.training["loss"]).all()
    assert run.recipe["optimizer"]["momentum"] == 0.9
    assert run.evaluate()["accuracy"] == pytest.approx(run.metrics["accuracy"].max())

    # The network, and predictions of files, pictures, arrays and tensors.
    network = run.load_model()
    assert network is model
    assert not network.training
    file = next(Path("digits/7").glob("*"))
    pixels = np.array(Image.open(file))
    (by_file,) = run.predict(file)
    for image in (Image.open(file), pixels, torch.from_numpy(pixels)):
        (row,) = run.predict(image)
        assert (row["label"], row["probability"]) == (by_file["label"], by_file["probability"])
    assert [row["path"] for row in run.predict([file, pixels])] == [str(file), "image 1"]
    with torch.no_grad():
        outputs = network(run.normalise(torch.from_numpy(pixels.copy()).reshape(1, 8, 8, 1)))
    assert run.classes[int(outputs.argmax())] == by_file["label"]
    assert run.report().stat().st_size > 100_000

    # Another program opens the run: it has to give the network again.
    again = headway.Run(
        "runs/first", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    )
    assert again.predict(file) == [by_file]
    with pytest.raises(headway.core.errors.RecipeError, match="given by a Python program"):
        headway.Run("runs/first").load_model()
    assert headway.resume(run, model=model).finished
