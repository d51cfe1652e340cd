"""What is evaluated and saved in the place of the newest weights: their average, statistics anew, mirrored images."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests._support import digits, finished, headway, packed_digits, records, refused, write_recipe

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.errors import RecipeError
from headway.core.launcher_environment import LaunchedProcess
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.data.decode import build_decoder
from headway.data.image_files import list_image_files, read_pixels
from headway.launch.ranks import Ranks
from headway.setup import micro_batch
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.setup.train_setup import TrainSetup
from headway.training.evaluate import average_views, build_views, compute_outputs, evaluate
from headway.training.predict import build_evaluation_transform
from headway.training.progress import SilentDisplay
from headway.training.runs import load_trained
from headway.training.trainer import Trainer

EMA = "model.ema={half_life_steps: 4, every_steps: 3}"
ANEW = "model.batch_norm={ghost: 8, recompute_batches: 4}"
AHEAD = "optimizer.lookahead={every_steps: 4, alpha: 0.4, power: 2}"
FROZEN = "model.freeze_after=[{match: '^0', after_epochs: 1.5}]"
EVERYTHING = (EMA, ANEW, "evaluate.flip=true", "augment={flip: true, translate: 1}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages")
    packed_digits(folder)
    options = {"every_steps": 5, "keep": 1}
    write_recipe(folder / "recipe.yaml", model={"factory": "net.py:dropout"}, epochs=3, checkpoint=options)
    return folder


def trainer_of(folder: Path, run: Path, *overrides: str) -> Trainer:
    setup = build_setup(read_recipe(folder / "recipe.yaml", overrides, TrainRecipe))
    return Trainer(setup, RunFolder.create(run), SilentDisplay())


def state(setup: TrainSetup) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in setup.model.state_dict().items()}


def newest(run: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(run / "checkpoints").newest()
    assert found is not None
    return found.tensors


def test_the_average_is_evaluated_and_saved_and_training_does_not_see_it(folder: Path, tmp_path: Path) -> None:
    with closing(trainer_of(folder, tmp_path / "run", EMA)) as trainer:
        seen = []
        for step in range(1, 19):
            trainer.run(1)
            if step % 3 == 0:
                seen.append(state(trainer.setup))
        weights = [0.5 ** (3 * age / 4) for age in reversed(range(len(seen)))]
        mean = {
            name: sum(weight * one[name].double() for weight, one in zip(weights, seen, strict=True)) / sum(weights)
            for name in seen[0]
        }
        with trainer.use_averages():
            shown = state(trainer.setup)
            assert trainer.setup.eval is not None
            found = evaluate(trainer.setup, trainer.setup.eval)
        assert trainer.evaluation is not None
        assert trainer.evaluation.metrics == found.metrics
        for name, value in shown.items():
            if value.is_floating_point():
                torch.testing.assert_close(value, torch.as_tensor(mean[name]).to(value), rtol=1e-5, atol=1e-6)
                assert not torch.equal(value, seen[-1][name])
        assert trainer.best is not None
        best = load_file(tmp_path / "run/weights.safetensors")
        if trainer.best["step"] == 18:
            assert all(torch.equal(best[name], value) for name, value in shown.items())
        averaged = state(trainer.setup)
    with closing(trainer_of(folder, tmp_path / "plain")) as plain:
        plain.run()
        assert all(torch.equal(averaged[name], value) for name, value in state(plain.setup).items())


def test_best_weights_are_those_that_were_best(folder: Path, tmp_path: Path) -> None:
    """`headway evaluate` finds again what the best evaluation of the run had found."""
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, *EVERYTHING)
    best = json.loads((run / "summary.json").read_text())["best"]
    said = headway("evaluate", run, "--json").json()
    assert (said["accuracy"], said["loss"]) == (best["accuracy"], pytest.approx(best["loss"], rel=1e-6))
    assert [record["step"] for record in records(run, "evaluate")] == [6, 12, 18]


@pytest.mark.check
@pytest.mark.thin(1)
@pytest.mark.parametrize(
    ("switches", "kept"),
    [
        (EVERYTHING, {"ema", "statistics"}),
        ((AHEAD, FROZEN, "evaluate.shift=1"), {"lookahead"}),
        ((AHEAD, FROZEN, "half_weights=true", "precision=bf16"), {"lookahead"}),
    ],
    ids=["averages", "lookahead", "masters"],
)
def test_resumed_is_uninterrupted(folder: Path, tmp_path: Path, switches: tuple[str, ...], kept: set[str]) -> None:
    whole = tmp_path / "whole"
    with closing(trainer_of(folder, whole, *switches)) as trainer:
        trainer.run()
    for steps in (2, 8, 13):
        run = tmp_path / str(steps)
        with closing(trainer_of(folder, run, *switches)) as trainer:
            trainer.run(steps)
            trainer.stopping = True
            trainer.run()
            with trainer.use_averages():
                shown = state(trainer.setup)
        checkpoint = Checkpoints(run / "checkpoints").newest()
        assert checkpoint is not None
        assert checkpoint.step == steps
        setup = build_setup(read_recipe(folder / "recipe.yaml", switches, TrainRecipe), fresh=False)
        with closing(Trainer(setup, RunFolder(run), SilentDisplay())) as trainer:
            trainer.resume(checkpoint)
            with trainer.use_averages():
                assert all(torch.equal(shown[name], value) for name, value in state(setup).items())
            trainer.run()
        mine, theirs = newest(run), newest(whole)
        assert mine.keys() == theirs.keys()
        assert {name.partition("/")[0] for name in mine} >= kept
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name
        assert (run / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
        pairs = zip(records(run, "evaluate"), records(whole, "evaluate"), strict=True)
        assert all(one["loss"] == other["loss"] for one, other in pairs)


@pytest.mark.parametrize("averages", [(), (EMA,), (AHEAD,)], ids=["newest", "ema", "lookahead"])
@pytest.mark.thin(1)
def test_statistics_are_those_of_the_newest_batches(folder: Path, tmp_path: Path, averages: tuple[str, ...]) -> None:
    """By hand: the last 4 batches as they were trained on, through the weights that are evaluated, in ghost batches."""
    more = ("augment={translate: 1}", "micro_batch=15", "stop_at={loss: 0}", "evaluate.every_epochs=3")
    with closing(trainer_of(folder, tmp_path / "run", ANEW, *more, *averages)) as trainer:
        trainer.run()
        setup, now = trainer.setup, state(trainer.setup)
        with trainer.use_averages():
            shown = state(setup)
        assert trainer.best is not None
        assert trainer.best["step"] == 18
        conv, means, variances = setup.model.get_submodule("0"), [], []
        stream = iter(setup.batches(14 * 30))
        for _ in range(4):
            batch = next(stream)
            images = setup.augment(batch.images, batch.labels, batch.keys())[0]
            for part in images.tensor_split(2):
                with trainer.use_averages():
                    hidden = conv(part).detach()
                groups = hidden.tensor_split(2)
                means.append(sum(len(one) * one.mean((0, 2, 3)) for one in groups) / 15)
                variances.append(sum(len(one) * one.var((0, 2, 3)) for one in groups) / 15)
        stream.close()  # type: ignore[attr-defined]
        by_hand = {"1.running_mean": torch.stack(means).mean(0), "1.running_var": torch.stack(variances).mean(0)}  # type: ignore[arg-type]
    saved = load_file(tmp_path / "run/weights.safetensors")
    for name, value in now.items():
        assert torch.equal(saved[name], shown[name])
        if name in by_hand:
            torch.testing.assert_close(shown[name], by_hand[name], rtol=1e-5, atol=1e-6)
            assert not torch.allclose(shown[name], value, rtol=1e-3)
        elif not averages:
            assert torch.equal(shown[name], value)
    with closing(trainer_of(folder, tmp_path / "plain", "model.batch_norm={ghost: 8}", *more, *averages)) as plain:
        plain.run()
        assert all(torch.equal(now[name], value) for name, value in state(plain.setup).items())


def test_a_mirrored_image_counts_as_much(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "evaluate.flip=true", "epochs=1")
    setup = load_trained(RunFolder(run))
    setup.model.eval()
    samples = digits(tmp_path / "digits", per_class=3)
    said = [json.loads(line) for line in headway("predict", run, samples, "--json").out.splitlines()]
    with closing(build_decoder(1, "pillow")) as decoder, torch.no_grad():
        _, found = read_pixels(build_evaluation_transform(setup), decoder, list_image_files([samples]))
        images = setup.augment.normalise(torch.from_numpy(found))
        both = torch.stack([setup.model(images), setup.model(images.flip(3))])
    expected = both.mean(0).softmax(1).max(1).values
    np.testing.assert_allclose([row["probability"] for row in said], expected.numpy(), atol=1e-5)
    assert (both[0].softmax(1).max(1).values - expected).abs().max() > 1e-3


def test_what_a_network_costs_is_said_and_kept(folder: Path, tmp_path: Path) -> None:
    said = headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "epochs=1")
    # 3x3 convolutions of 6 filters over 8 x 8 pixels with 1 and 6 channels, and a linear layer
    done = 64 * 9 * 6 * (1 + 6) + 6 * 64 * 10
    line = f"Network: 4,252 parameters, {done:,} multiply-adds an image of 1x8x8."
    assert line in said.out + said.err
    for name in ("provenance", "summary"):
        found = json.loads((tmp_path / f"run/{name}.json").read_text())
        assert (found["parameters"], found["multiply_adds"]) == (4252, done)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing blurs": (("model.blur_pool=true",), "model.blur_pool: the network has no max pool and no convolution"),
    "no blocks": (("model.zero_init=true",), "model.zero_init: the network has no residual block"),
    "zero over weights": (
        ("model.zero_init=true", "model.weights=w.safetensors"),
        "zero_init would undo what the weights have learnt",
    ),
    "no batch norm": (
        ("model.factory=net.py:linear", "model.batch_norm.ghost=4"),
        "model.batch_norm: the network has no batch norm. Remove it",
    ),
    "momentum of nothing": (
        ("model.batch_norm={momentum: 0.9, recompute_batches: 2}",),
        "momentum is for moving averages, which recompute_batches replaces",
    ),
    "empty": (("model.batch_norm={}",), "model.batch_norm: it changes nothing: set ghost, momentum"),
    "one group": (("model.batch_norm.ghost=30",), "model.batch_norm.ghost 30 is no smaller than the batch of 30"),
    "a ghost that batch norm never sees": (
        ("model.batch_norm.ghost=11", "micro_batch=10"),
        "model.batch_norm.ghost 11 is more than micro_batch 10, which is all that batch norm sees at once: set it to",
    ),
    "an average that never begins": (
        ("model.ema={half_life_steps: 4, every_steps: 19}",),
        "model.ema: the average is updated every 19 steps, and the run has 18. Set every_steps to less, or train for",
    ),
    "ghost and sync": (
        ("model.batch_norm.ghost=4", "comm.batch_norm=sync"),
        "over fewer samples, comm.batch_norm: sync over more: remove one of them",
    ),
    "no evaluation": (
        ("model.batch_norm.recompute_batches=2", "data.eval=null"),
        "there is no evaluation set: set data.eval, or remove it",
    ),
    "no half-life": (("model.ema={every_steps: 2}",), "the key 'model.ema.half_life_steps' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(folder: Path, tmp_path: Path, case: str) -> None:
    overrides, sentence = REFUSED[case]
    assert sentence in refused("train", folder / "recipe.yaml", "--run", tmp_path / "run", *overrides, status=2)


@pytest.mark.check
def test_all_switches_together_on_a_residual_network(folder: Path, tmp_path: Path) -> None:
    more = ["model.factory=headway.model:cifar_resnet", "model.args={depth: 8}", "model.zero_init=true"]
    more += ["model.blur_pool=true", EMA, "model.batch_norm={ghost: 7, momentum: 0.8}", "evaluate.flip=true"]
    more += ["task.args={label_smoothing: 0.1}", "data.size=16", "optimizer.lr=0.1", "epochs=1"]
    more += ["data.progressive={start: 8, until_epoch: 0.5, step: 4}", "precision=bf16"]
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *more)
    assert headway("evaluate", tmp_path / "run", "--json").json()["samples"] == 60


def test_a_ghost_group_may_be_a_whole_micro_batch(folder: Path) -> None:
    overrides = ("model.batch_norm.ghost=10", "micro_batch=10")
    assert read_recipe(folder / "recipe.yaml", overrides, TrainRecipe).recipe.micro_batch == 10


def test_a_ghost_group_that_does_not_fit_into_memory_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "read_free_memory_bytes", lambda: 1)
    overrides = ("model.batch_norm.ghost=10", "micro_batch=auto")
    said = refused("train", folder / "recipe.yaml", "--run", tmp_path / "run", *overrides, status=2)
    assert (
        "model.batch_norm.ghost: groups of 10 samples are asked for, and 1 at once are all that fit into memory. "
        "Set it to at most 1." in said
    )


@pytest.mark.parametrize(("ghost", "ranks", "expected"), [(10, 3, ()), (11, 3, ("Batch norm sees at most 10",))])
def test_ranks_whose_shares_are_smaller_than_a_ghost_group_are_told(
    folder: Path, ghost: int, ranks: int, expected: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = read_recipe(folder / "recipe.yaml", (f"model.batch_norm.ghost={ghost}",), TrainRecipe)
    seat = LaunchedProcess(0, ranks, 0, ranks, "127.0.0.1", 1, "torchrun")  # they do not meet
    build_setup(loaded, ranks=Ranks(loaded.recipe.comm, seat, None)).inputs.close()
    found = [text for text in caplog.messages if "ghost" in text]
    assert len(found) == len(expected)
    for text, beginning in zip(found, expected, strict=True):
        assert text.startswith(beginning)
        assert text.endswith("ghost 11 divides nothing. Set it to less, or remove it.")


@pytest.mark.check
def test_ranks_are_ghost_batches(folder: Path, tmp_path: Path) -> None:
    """Two processes, each with statistics of its own half, train, average, recompute and evaluate as one process does
    in ghost batches of that half's size."""
    more = ("model.factory=net.py:plain", EMA, "batch=40", "optimizer={name: nag, lr: 0.05}")
    plain = """
def plain(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, num_classes)
    )
"""
    file = folder / "net.py"
    if "def plain" not in file.read_text():
        file.write_text(file.read_text() + plain)
    runs = {"one": ("ghost: 20, ",), "two": ("",)}
    for name, (ghost,) in runs.items():
        norm = f"model.batch_norm={{{ghost}recompute_batches: 3}}"
        procs = ("--procs", "2") if name == "two" else ()
        said = finished("train", folder / "recipe.yaml", *procs, "--run", tmp_path / name, *more, norm)
        assert said.status == 0, said.err
        assert (said.out + said.err).count("Network: ") == 1
    one, two = (newest(tmp_path / name) for name in runs)
    kept = [name for name in one if name.startswith(("model/", "ema/", "statistics/"))]
    assert {name for name in two if name.startswith(("model/", "ema/", "statistics/"))} == set(kept)
    for name in kept:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4, msg=name)
    for first, second in zip(*(records(tmp_path / name, "evaluate") for name in runs), strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-3)


def test_lookahead_trains_from_its_slow_weights_and_shows_them(folder: Path, tmp_path: Path) -> None:
    """18 steps: the first four against a run without it, and the last two do not count."""
    with closing(trainer_of(folder, tmp_path / "plain")) as plain:
        begun = state(plain.setup)
        plain.run(4)
        fast = state(plain.setup)
    with closing(trainer_of(folder, tmp_path / "run", AHEAD)) as trainer:
        assert all(torch.equal(begun[name], value) for name, value in state(trainer.setup).items())
        trainer.run(4)
        share = 1 - 0.6 * (4 / 18) ** 2
        for name, value in state(trainer.setup).items():
            if value.is_floating_point():
                torch.testing.assert_close(value, begun[name] + share * (fast[name] - begun[name]))
        for step in range(5, 19):
            trainer.run(1)
            same = torch.equal(shown(trainer)["0.weight"], state(trainer.setup)["0.weight"])
            assert same == (step % 4 == 0), step
        best = load_file(tmp_path / "run/weights.safetensors")
        assert trainer.best is not None
        if trainer.best["step"] == 18:
            assert all(torch.equal(best[name], value) for name, value in shown(trainer).items())


def test_masters_are_rounded_once_more_only_where_it_looked_ahead(folder: Path, tmp_path: Path) -> None:
    with closing(trainer_of(folder, tmp_path / "run", AHEAD, "half_weights=true", "precision=bf16")) as trainer:
        weight, written = trainer.setup.model.get_parameter("0.weight"), []
        for _ in range(4):
            before = weight._version
            trainer.run(1)
            written.append(weight._version - before)
    assert written[0] == written[1] == written[2] == written[3] - 1


def shown(trainer: Trainer) -> dict[str, torch.Tensor]:
    with trainer.use_averages():
        return state(trainer.setup)


def test_what_is_frozen_late_is_trained_until_then(folder: Path, tmp_path: Path) -> None:
    """Six steps an epoch; the layer that lies above it is trained to the end."""
    with closing(trainer_of(folder, tmp_path / "run", FROZEN)) as trainer:
        weight = trainer.setup.model.get_parameter("0.weight")
        seen = []
        for _ in range(18):
            trainer.run(1)
            seen.append((weight.clone(), trainer.setup.model.get_parameter("3.weight").clone()))
        assert not weight.requires_grad
        assert trainer.setup.model.get_parameter("1.weight").requires_grad
        for step in range(1, 18):
            assert torch.equal(seen[step][0], seen[step - 1][0]) == (step >= 9), step
            assert not torch.equal(seen[step][1], seen[step - 1][1])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shift", [1, 3])
def test_views_are_windows_of_the_padded_image(layout: torch.memory_format, shift: int) -> None:
    images = torch.randn(2, 3, 6, 7).contiguous(memory_format=layout)
    padded = torch.nn.functional.pad(images, (shift,) * 4, "reflect")
    found = list(build_views(images, flip=True, shift=shift))
    up, down = padded[:, :, 2 * shift :, 2 * shift :], padded[:, :, : -2 * shift, : -2 * shift]
    expected = [one for view in (images, up, down) for one in (view, view.flip(3))]
    assert [weight for weight, _ in found] == [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    for (_, view), one in zip(found, expected, strict=True):
        assert torch.equal(view, one)
        assert view.is_contiguous(memory_format=layout)
    whole = list(build_views((images * 10).byte(), flip=False, shift=shift))
    assert [(weight, view.dtype) for weight, view in whole] == [(share, torch.uint8) for share in (0.5, 0.25, 0.25)]
    assert [weight for weight, _ in build_views(images, flip=False, shift=0)] == [1]
    assert [weight for weight, _ in build_views(images, flip=True, shift=0)] == [0.5, 0.5]


def test_the_outputs_are_the_weighted_mean_of_the_views(folder: Path, tmp_path: Path) -> None:
    with closing(trainer_of(folder, tmp_path / "run", "evaluate={flip: true, shift: 1}")) as trainer:
        setup = trainer.setup
        setup.model.eval()
        images = torch.randn(5, 1, 8, 8)
        with torch.no_grad():
            mean = sum(weight * setup.model(view) for weight, view in build_views(images, flip=True, shift=1))
            torch.testing.assert_close(compute_outputs(setup, images), mean)
            # A new network gives each of ten classes about a tenth: no image is sure, or all of them are.
            for below, expected in ((0.9, mean), (0.01, setup.model(images))):
                recipe = setup.loaded.resolve("evaluate.views_below", below, "a test")
                torch.testing.assert_close(compute_outputs(replace(setup, loaded=recipe), images), expected)


def test_views_of_unsure_images_need_probabilities_of_classes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from headway.setup.task import Classification\n\n\nclass Own(Classification):\n    activation = None\n"
    )
    own = f"task.factory={tmp_path / 'own.py'}:Own"
    with pytest.raises(RecipeError, match="views_below compares probabilities of classes, which this task does not"):
        trainer_of(folder, tmp_path / "run", "evaluate={flip: true, views_below: 0.8}", own)


@pytest.mark.parametrize("selects", [True, False])
def test_only_unsure_images_are_seen_in_other_views(selects: bool) -> None:
    torch.manual_seed(0)
    network, passes = torch.nn.Linear(36, 3), []
    images = torch.randn(40, 1, 6, 6).contiguous(memory_format=torch.channels_last)

    def run(view: torch.Tensor) -> torch.Tensor:
        passes.append(len(view))
        return network(view.flatten(1)) * 3

    with torch.no_grad():
        plain, mean = run(images), average_views(run, images, flip=True, shift=1)
        sure = plain.softmax(1).amax(1)
        threshold = sure.median().item()
        for below, unsure in ((threshold, sure < threshold), (1.0, sure < 1), (0.01, sure < 0)):
            passes.clear()
            found = average_views(run, images, flip=True, shift=1, below=below, selects=selects)
            torch.testing.assert_close(found, torch.where(unsure[:, None], mean, plain))
            count = int(unsure.sum()) if selects else 40
            assert passes == [40, *([count] * 5 if count else [])]
