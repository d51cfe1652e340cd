"""What a recipe has observed: right, the same after a resume, and without a trace in the run itself."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._support import finished, headway, packed_digits, records, refused, write_recipe

from headway.checkpoint.checkpoints import Checkpoints
from headway.core import row_file
from headway.core.errors import TrainingError
from headway.core.recipe import read_recipe
from headway.core.row_file import RowTable
from headway.core.run_folder import RunFolder
from headway.observe.activations import PERCENTILES
from headway.page.panel import Panel
from headway.report import observation_panels
from headway.report.observation_panels import describe_noise_scale
from headway.setup.build import build_setup
from headway.setup.prepare import prepare_batch
from headway.setup.recipe import TrainRecipe
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

ALL = (
    "observe={layer_rates: true, layer_times: true, activations: ['1', '3'], noise_scale: true, noise_every_steps: 2,"
    " noise_window: 8}"
)
OFF = "observe={on_divergence: ignore, utilisation: false}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observe")
    packed_digits(folder)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:dropout"},
        optimizer={"name": "lars", "lr": 0.5, "trust": 0.02},
        epochs=4,
        log_every_steps=4,
        checkpoint={"every_steps": 6},
    )
    return folder


def trainer_of(folder: Path, run: RunFolder, *overrides: str) -> Trainer:
    return Trainer(build_setup(read_recipe(folder / "recipe.yaml", overrides, TrainRecipe)), run, SilentDisplay())


def table_of(run: Path, kind: str) -> RowTable:
    found = row_file.read_rows(run / f"{kind}.rows")
    assert found is not None
    return found


@pytest.mark.thin(1)
@pytest.mark.parametrize("more", [(), ("micro_batch=7",), ("optimizer={name: adamw, lr: 0.01, clip_norm: 0.5}",)])
def test_a_run_is_the_same_with_it_and_without(folder: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Bit for bit, with dropout and batch norm, whose generators and statistics an observing pass could disturb."""
    for name, overrides in (("on", ALL), ("off", OFF)):
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, overrides, *more)
    on, off = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("on", "off"))
    assert on == off
    assert not list((tmp_path / "off").glob("*.rows"))
    assert table_of(tmp_path / "on", "layers").steps.tolist() == [4, 8, 12, 16, 20, 24]


def test_a_resumed_run_has_observed_what_a_whole_one_has(folder: Path, tmp_path: Path) -> None:
    """From a checkpoint of step 12, after steps up to 16 were logged."""
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "whole", ALL)
    cut = tmp_path / "cut"
    made = read_recipe(folder / "recipe.yaml", (ALL,), TrainRecipe)
    headway("train", folder / "recipe.yaml", "--run", cut, ALL)
    for path in (cut / "checkpoints").glob("step-*"):
        if not path.name.endswith("18"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    assert made.recipe.observe.noise_window == 8
    headway("train", "--resume", cut)
    for kind in ("layers", "activations"):
        assert (cut / f"{kind}.rows").read_bytes() == (tmp_path / "whole" / f"{kind}.rows").read_bytes()
    keys = ("step", "loss", "noise_scale", "noise_scale_low", "noise_scale_high")
    mine, theirs = ([[r[key] for key in keys] for r in records(run, "train")] for run in (cut, tmp_path / "whole"))
    assert mine == theirs
    assert mine[-1][2] is not None


@pytest.mark.thin(1)
@pytest.mark.parametrize(("parts", "more"), [(2, ()), (3, ("micro_batch=10",)), (2, ("micro_batch=20",))])
def test_the_noise_scale_is_that_of_the_samples_own_gradients(
    folder: Path, tmp_path: Path, parts: int, more: tuple[str, ...]
) -> None:
    """Weights stand still. Batches are drawn without replacement, so two samples of one have the product of their
    gradients |G|^2 - tr(Sigma) / n in the mean: the estimate is of the population that the data are a sample of."""
    still = ("model.factory=net.py:linear", "optimizer={name: sgd, lr: 1e-12}", "epochs=40", "log_every_steps=240")
    noise = "observe={noise_scale: true, noise_every_steps: 1, noise_window: 240}"
    trainer = trainer_of(folder, RunFolder.create(tmp_path / "run"), *still, noise, *more)
    setup = trainer.setup
    grads = []
    stream = iter(setup.batches(0))
    for _ in range(6):  # an epoch
        batch = next(stream)
        images, labels = prepare_batch(setup, batch, 1)
        for one in range(len(images)):
            loss = setup.task.loss(setup.model(images[one : one + 1]), labels[one : one + 1]).sum()
            found = torch.autograd.grad(loss, list(setup.model.parameters()))
            grads.append(torch.cat([grad.flatten() for grad in found]).double())
    every = torch.stack(grads)
    assert len(every) == 180
    sigma = float(every.var(0).sum())
    truth = sigma / (float(every.mean(0).square().sum()) - sigma / 180)
    trainer.run()
    trainer.close()
    setup.inputs.close()
    (record,) = records(tmp_path / "run", "train")[-1:]
    assert record["noise_scale_low"] < truth < record["noise_scale_high"]
    assert record["noise_scale_high"] / record["noise_scale_low"] < 1.6
    assert parts == -(-30 // (setup.recipe.micro_batch or 15))  # type: ignore[operator]


@pytest.mark.parametrize("more", [(), ("micro_batch=10",)])
def test_the_noise_scale_is_of_what_is_trained_still(folder: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    frozen = "model.freeze_after=[{match: '^0', after_epochs: 1}]"
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", ALL, frozen, *more)
    assert records(tmp_path / "run", "train")[-1]["noise_scale_low"] >= 0


def test_rows_hold_the_layers_and_modules(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", ALL)
    layers, modules = table_of(tmp_path / "run", "layers"), table_of(tmp_path / "run", "activations")
    assert layers.names == ("0.weight", "3.weight", "6.weight")
    assert layers.columns == ("weight", "gradient", "step", "local_rate")
    assert (layers.values > 0).all()
    w, g, _, rate = layers.values.transpose(2, 0, 1)
    assert rate == pytest.approx(0.5 * 0.02 * w / g, rel=1e-4)  # LARS without weight decay
    assert modules.names == ("1 (before)", "1", "3")
    assert modules.columns == tuple(f"p{percent}" for percent in PERCENTILES)
    assert (np.diff(modules.values, axis=2) >= 0).all()
    assert modules.positions.tolist() == [120, 240, 360, 480, 600, 720]


def test_a_16_bit_network_is_seen_by_its_masters(folder: Path, tmp_path: Path) -> None:
    """Their steps are of fp32, and so less than a 16-bit weight could move; its noise scale is told, too."""
    half = (ALL, "precision=bf16", "half_weights=true", "micro_batch=10", "optimizer.lr=0.001")
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *half)
    table = table_of(tmp_path / "run", "layers")
    assert table.names == ("0.weight", "3.weight", "6.weight")
    w, g, step, rate = table.values.transpose(2, 0, 1)
    assert rate == pytest.approx(0.001 * 0.02 * w / g, rel=1e-4)
    assert ((step > 0) & (step < 2.0**-9 * w)).all()
    assert records(tmp_path / "run", "train")[-1]["noise_scale_low"] >= 0


@pytest.mark.check
def test_a_compiled_network_is_observed_by_a_pass_of_its_own(folder: Path, tmp_path: Path) -> None:
    """Hooks are seen by the network itself, not by its compiled form; without dropout both have the same outputs."""
    more = ("model.factory=net.py:wide", "optimizer={name: sgd, lr: 0.01}", "observe={activations: ['1', '3']}")
    for name in ("true", "false"):
        run = tmp_path / name
        said = finished("train", folder / "recipe.yaml", "--run", run, f"compile={name}", *more)
        assert said.status == 0, said.err
    compiled, eager = (table_of(tmp_path / name, "activations") for name in ("true", "false"))
    assert compiled.values == pytest.approx(eager.values, rel=1e-3, abs=1e-4)


@pytest.mark.check
def test_several_ranks_observe_as_one(folder: Path, tmp_path: Path) -> None:
    linear = ("model.factory=net.py:linear", "optimizer={name: lars, lr: 0.5, trust: 0.02}")
    watched = "observe={layer_rates: true, noise_scale: true, activations: ['1'], on_divergence: stop}"
    for name, launch in (("one", ()), ("two", ("--procs", "2"))):
        said = finished("train", folder / "recipe.yaml", *launch, "--run", tmp_path / name, *linear, watched)
        assert said.status == 0, said.err
    one, two = (table_of(tmp_path / name, "layers") for name in ("one", "two"))
    assert two.steps.tolist() == one.steps.tolist()
    assert two.values == pytest.approx(one.values, rel=1e-3)
    assert table_of(tmp_path / "two", "activations").names == ("1",)
    found = records(tmp_path / "two", "train")[-1]
    assert found["noise_scale_low"] < found["noise_scale"]


HOT = ("optimizer={name: sgd, lr: 0.3}", "batch=12", "log_every_steps=4", "evaluate.every_epochs=9")


def test_a_learning_rate_that_is_too_large_is_told(folder: Path, tmp_path: Path) -> None:
    """In the log, the records and the report; it goes on until its loss is not finite."""
    said = headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *HOT, status=1)
    (found,) = records(tmp_path / "run", "divergence")
    assert found["step"] <= 40
    assert found["what"].startswith("The run diverges: ")
    assert ".weight" in found["what"]
    assert found["what"] in said.err
    assert said.out == ""
    assert "is not finite at step" in said.err
    assert ".weight" in said.err or "layers were no longer finite" in said.err
    headway("report", tmp_path / "run")
    panel = Panel.from_json((tmp_path / "run/panels/divergence.json").read_text())
    assert panel.data["cards"][0]["note"] == found["what"]
    assert panel.section == "Training"


def test_the_loss_at_the_start_is_that_of_step_1(folder: Path, tmp_path: Path) -> None:
    """Whatever the logging steps are, and in a run that goes on from a checkpoint."""
    with closing(trainer_of(folder, RunFolder.create(tmp_path / "fine"), "log_every_steps=1")) as trainer:
        trainer.run(1)
    first = records(tmp_path / "fine", "train")[0]["loss"]
    run = RunFolder.create(tmp_path / "run")
    more = ("log_every_steps=6", "checkpoint.every_steps=6")
    with closing(trainer_of(folder, run, *more)) as trainer:
        trainer.run(6)
    with closing(trainer_of(folder, run, *more)) as trainer:
        saved = Checkpoints(run.folder / "checkpoints").newest()
        assert saved is not None
        trainer.resume(saved)
        trainer.run(12)
        kept = trainer.accumulator.observer.state()["divergence"]
    assert kept["_first_step"] == 1
    assert kept["_first"][0] == pytest.approx(first, rel=1e-6)


def test_it_stops_the_run_where_the_recipe_says_so(folder: Path, tmp_path: Path) -> None:
    """Before the next checkpoint takes the place of a good one."""
    run = tmp_path / "run"
    sentence = refused(
        "train", folder / "recipe.yaml", "--run", run, *HOT, "observe.on_divergence=stop", "checkpoint.every_steps=1",
        status=1,
    )  # fmt: skip
    assert "The run diverges: " in sentence
    assert "(learning rate 0.3); training has stopped" in sentence
    (found,) = records(run, "divergence")
    assert sentence.count(found["what"].split(".")[0]) == 1
    assert "a lower optimizer.lr, a longer warm-up or optimizer.clip_norm" in sentence  # precision is fp32
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert kept[-1] < f"step-{found['step']:08d}" or found["step"] == 1
    quiet = tmp_path / "quiet"
    headway("train", folder / "recipe.yaml", "--run", quiet, *HOT, OFF, status=1)
    assert records(quiet, "divergence") == []


def test_a_signal_does_not_hide_that_it_diverges(folder: Path, tmp_path: Path) -> None:
    """Two looks have to agree, and the second one is that of the last steps, before the checkpoint of the signal."""
    bias = "model={factory: net.py:linear, freeze: ['weight$']}"  # no weights, whose norm would tell at once
    more = (bias, "optimizer={name: sgd, lr: 100}", "batch=12", "log_every_steps=20")
    quiet = ("checkpoint.every_steps=90", "evaluate.every_epochs=9", "observe.on_divergence=stop")
    with closing(trainer_of(folder, RunFolder.create(tmp_path / "run"), *more, *quiet)) as trainer:
        trainer.run(39)
        trainer.stopping = True
        with pytest.raises(TrainingError, match="The run diverges: "):
            trainer.run()
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.check
def test_all_ranks_stop_at_one_step(folder: Path, tmp_path: Path) -> None:
    said = finished(
        "train", folder / "recipe.yaml", "--procs", "2", "--run", tmp_path / "run", *HOT, "observe.on_divergence=stop"
    )
    assert said.status == 1
    assert "The run diverges: " in said.err
    assert "training has stopped" in said.err
    assert len(records(tmp_path / "run", "divergence")) == 1


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ("observe={activations: ['(']}", "is not a regular expression"),
        ("observe={activations: ['conv9']}", "matches no module of the network. For example"),
        ("observe={noise_every_steps: 5}", "set noise_scale: true, or remove it"),
        ("observe={noise_scale: true, noise_window: 3}", "at least 8"),
        ("observe={layer_rate: true}", "layer_rates"),
        ("observe={layer_times: true} compile=true", "one after another, not with compile: remove one of them"),
        ("observe={layer_times: true} parallel=sharded", "does not work with observe.layer_times"),
        ("observe={on_divergence: halt}", "ignore"),
    ],
)
def test_what_cannot_be_observed_is_refused(folder: Path, tmp_path: Path, overrides: str, match: str) -> None:
    assert match in refused(
        "train", folder / "recipe.yaml", "--run", tmp_path / "run", *re.split(r" (?=\w+=)", overrides), status=2
    )


def test_three_samples_have_no_halves(folder: Path, tmp_path: Path) -> None:
    said = refused(
        "train", folder / "recipe.yaml", "--run", tmp_path / "run", "batch=3", "observe.noise_scale=true", status=2
    )
    assert "needs two halves of a batch, and batch is 3: set it to 4 or more" in said


def panels(run: Path) -> dict[str, Panel]:
    return {path.stem: Panel.from_json(path.read_text()) for path in (run / "panels").glob("*.json")}


@pytest.mark.check
def test_the_report_shows_it_also_beside_another_run(folder: Path, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    headway("train", folder / "recipe.yaml", "--run", small, ALL)
    headway("train", folder / "recipe.yaml", "--run", large, ALL, "batch=60", "log_every_steps=2")
    headway("report", small, "--beside", large)
    found = panels(small)
    ours = {name for name, one in found.items() if one.section == "Large batches"}
    single = {"noise-scale", "layer-rates", "layer-rates-lines", "layer-norms-lines", "layer-steps"}
    assert ours == single | {f"activations-0{n}" for n in range(3)} | {f"compared-{n}" for n in range(3)}
    grid, table = found["layer-rates"].data, table_of(small, "layers")
    assert grid["names"] == ["0", "3", "6"]
    assert grid["x"] == [n * 120 / 180 for n in range(1, 7)]
    assert np.array(grid["values"]) == pytest.approx(table.values[:, :, 3].T, rel=1e-3)
    assert [series["name"] for series in found["compared-0"].data["series"]] == ["batch 30 (small)", "batch 60 (large)"]
    titles = [found[f"activations-0{n}"].title for n in range(3)]
    assert titles == ["1: before batch norm", "1: after batch norm", "3: outputs"]
    band = found["noise-scale"].data["bands"][0]
    line = found["noise-scale"].data["series"][0]["y"]
    assert all(a <= y <= b for a, y, b in zip(band["low"], line, band["high"], strict=True) if y is not None)
    assert "critical batch" in found["noise-scale"].note
    times = table_of(small, "layer_times")
    assert found["layer-times"].data["names"] == list(times.names)
    parts = {row[0]: row for row in found["anatomy-table"].data["rows"]}
    assert len(parts) == 15
    # Each has a number of its own.
    assert not [row for row in parts.values() if "in the number above" in row[3]]
    assert "the last layer" in parts["output"][3]
    headway("report", small)
    assert not [name for name in panels(small) if name.startswith("compared")]
    plain = tmp_path / "plain"
    headway("train", folder / "recipe.yaml", "--run", plain, "epochs=1")
    headway("report", plain)
    assert not [name for name, one in panels(plain).items() if one.section == "Large batches"]
    said = refused("report", small, "--beside", plain, status=2)
    assert "did not record layer rates to compare" in said
    assert "layer_rates: true" in said


def test_an_optimizer_without_local_rates_shows_what_lars_would_see(folder: Path, tmp_path: Path) -> None:
    more = ("optimizer={name: sgd, lr: 0.01}", "observe.layer_rates=true")
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *more)
    headway("report", tmp_path / "run")
    found, table = panels(tmp_path / "run")["layer-rates"], table_of(tmp_path / "run", "layers")
    assert found.title == "|w| / |g| of each layer"
    assert "LARS would step each layer at" in found.note
    expected = table.values[:, :, 0] / table.values[:, :, 1]
    assert np.array(found.data["values"]) == pytest.approx(expected.T, rel=1e-3)


def test_the_noise_scale_is_put_into_a_sentence() -> None:
    record: dict[str, Any] = {
        "batch": 512,
        "noise_scale": 2100.0,
        "noise_scale_low": 1712.0,
        "noise_scale_high": 2580.0,
    }
    said = describe_noise_scale(record)
    assert "batch 512; critical batch about 2,100 [1,700, 2,600]" in said
    assert "take 20 % more samples and 40 % fewer steps" in said
    assert "[1,700, no upper end]" in describe_noise_scale(record | {"noise_scale_high": None})
    lost = describe_noise_scale(record | {"noise_scale": None, "noise_scale_high": None})
    assert "below its noise, so the critical batch is too large to measure, at least 1,700" in lost


@pytest.mark.parametrize("scale", [None, 2100.0])
@pytest.mark.parametrize(("low", "said"), [(0.0, "[0, no upper end]"), (None, "[0, no"), (512.0, "[510, no upper")])
def test_an_interval_that_may_be_anything_says_nothing_of_the_batch(
    scale: float | None, low: float | None, said: str
) -> None:
    """Neither that a larger one costs nothing, nor what twice the batch would cost."""
    found = describe_noise_scale({"batch": 512, "noise_scale": scale, "noise_scale_low": low, "noise_scale_high": None})
    assert "The critical batch is not known yet" in found
    assert said in found
    assert "costs hardly any" not in found
    assert "twice the batch" not in found


def test_an_interval_without_an_end_is_drawn_up_to_the_edge(folder: Path) -> None:
    ends: list[tuple[float | None, ...]] = [
        (None, 0, None),
        (90.0, 20.0, 700.0),
        (80.0, 30.0, 1e6),
        (100.0, 50.0, None),
    ]
    train = [
        {"epoch": epoch, "batch": 30, "noise_scale": scale, "noise_scale_low": low, "noise_scale_high": high}
        for epoch, (scale, low, high) in enumerate(ends)
    ]
    (found,) = observation_panels._build_noise_panel(train)
    (band,), (least, top) = found.data["bands"], found.data["y_range"]
    assert [high >= top for high in band["high"]] == [True, False, True, True]
    assert all(low >= least for low in band["low"])
    assert "If the band reaches the edge, the interval has no upper end, or one above 1,000." in found.note
    (closed,) = observation_panels._build_noise_panel(train[1:2])
    assert "edge" not in closed.note
