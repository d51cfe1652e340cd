"""The recipes that come with Headway: every one is built, says where it comes from, and has the source's numbers."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from bench._accuracy.results import FOLDER, Results
from tests._support import headway, records

from headway.core.recipe import read_recipe
from headway.data.pack import pack
from headway.data.resolution import compute_progressive_size
from headway.report.dry_run_text import format_dry_run
from headway.setup.recipe import TrainRecipe
from headway.training.dry_run import DryRun, dry_run

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if not path.name.endswith(".space.yaml"))
SMALL = ("cifar", "finetune", "digits", "large-batch")
"""What the names of recipes for images of 8 or 32 pixels begin with."""
OF_IMAGENET = [path for path in RECIPES if not path.stem.startswith(SMALL)]
PLAIN = ("imagenet-resnet50-1632", "tencent-alexnet-bn-64k")
"""Those that are built by every test run: one of each network."""
IMAGENET: dict[str, Any] = {"samples": 1_281_167, "classes": 1000, "evaluation_samples": 50_000}

MLPERF = {
    "imagenet-resnet50-1632": (1632, 7.4, 2, 0.9, 5e-5, 204, 27_476, True, 37),
    "imagenet-resnet50-8192": (8192, 17, 5, 0.9, 2e-4, 64, 6_095, True, 44),
    "imagenet-resnet50-32768": (32_768, 21.2, 16, 0.94, 2.5e-5, 128, 2_267, False, 57),
    "imagenet-resnet50-65536": (65_536, 24.699, 31, 0.951807, 1e-4, 128, 1_133, True, 86),
}
"""Of MLPerf's reference points: batch, learning rate, epochs of warm-up, momentum, weight decay, samples of a batch
norm, steps of decay, whether they come after those of the warm-up, and the epochs after which the slowest run had
75.9 %."""


def built(path: Path) -> DryRun:
    if path.stem.startswith("digits"):
        sizes: dict[str, Any] = {"samples": 1_438, "classes": 10, "evaluation_samples": 359}
        return dry_run(path, ("data.size=8", "data.channels=1"), **sizes, compiles=False)
    if path.stem.startswith(SMALL):
        sizes = {"samples": 50_000, "classes": 10, "evaluation_samples": 10_000}
        # The weights of an earlier run, which is not here.
        more = ("data.size=32", "data.channels=3", *(["model.weights=null"] if path.stem == "finetune" else []))
        return dry_run(path, more, **sizes, compiles=False)
    return dry_run(path, **IMAGENET, compiles=False)


def read(name: str) -> TrainRecipe:
    return read_recipe(ROOT / "recipes" / f"{name}.yaml", (), TrainRecipe).recipe


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in PLAIN else pytest.mark.check, id=path.stem) for path in RECIPES],
)
@pytest.mark.thin(3)
def test_it_is_built(path: Path) -> None:
    found = built(path)
    work = found.workload
    assert work.name == path.stem
    # Sizes inside a mixture of experts depend on values.
    assert found.on_shapes_only == (path.stem != "cifar_moe")
    assert abs(work.run.epochs * work.run.samples - found.loaded.recipe.epochs * work.run.samples) <= work.step.batch
    assert sum(phase.steps for phase in work.run.phases) == work.run.steps
    assert work.run.evaluations >= 1
    sizes = {
        "alexnet": (60_967_112, 724e6),
        "resnet50": (25_557_032, 4.09e9),
        "cifar_net": (1_972_792, 118e6),
        "cifar_moe": (395_562, 10.2e6),
        "cifar_resnet": (75_290, 12.4e6),
        "vgg": (145_554, 2.7e6),
        "gru": (14_090, 209_536),
        "small_net": (16_794, 378_176),
    }
    parameters, multiply_adds = sizes[found.loaded.recipe.model.factory.partition(":")[2]]
    assert work.parameters == parameters
    if work.input.height >= 224:
        assert work.forward_multiply_adds == pytest.approx(multiply_adds, rel=0.01)
    assert work.name in format_dry_run(found)


@pytest.mark.parametrize("path", OF_IMAGENET, ids=lambda path: path.stem)
def test_its_head_says_where_it_comes_from_and_what_was_run(path: Path) -> None:
    head = path.read_text().partition("\nname:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "Source's result: " in head
    (row,) = (line for line in (ROOT / "docs/imagenet.md").read_text().splitlines() if f"| `{path.stem}` |" in line)
    more = ", and a few steps at batch 8 on 60 photographs" if "a few steps at batch 8" in row else " only"
    assert f"Run here: the dry run{more}. Nothing was trained on ImageNet." in head
    assert not re.search(r"\btrust\b", head) or read(path.stem).optimizer.name == "lars"
    assert f"recipes/{path.name} --dry-run --samples 1281167" in head


def test_the_fast_one_claims_what_was_run() -> None:
    """If it fails, write the means of the newest runs into its head and docs/accuracy.md."""
    head = (ROOT / "recipes/cifar10-fast.yaml").read_text().partition("\nname:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "headway train recipes/cifar10-fast.yaml" in head
    _, _, run_here = head.partition("# Run here: ")
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    results = Results(FOLDER / "time_to_accuracy.jsonl")
    for arm in ("headway", "port"):
        newest = results.where(arm=arm)[-1]
        same = results.where(**{key: newest.get(key) for key in ("arm", "machine", "settings", "code")})
        for metric in ("accuracy", "accuracy_tta"):
            stated = f"{100 * statistics.fmean(one[metric] for one in same):.2f} %"
            assert stated in run_here, (arm, metric)
            assert stated in page, (arm, metric)


@pytest.mark.parametrize("name", MLPERF)
def test_the_reference_points_of_mlperf(name: str) -> None:
    batch, lr, warmup, momentum, decay, span, steps, apart, slowest = MLPERF[name]
    recipe = read(name)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (recipe.batch, optimizer.lr, schedule.warmup_epochs, optimizer.momentum) == (batch, lr, warmup, momentum)
    assert (optimizer.name, optimizer.weight_decay, optimizer.trust, optimizer.eps) == ("lars", decay, 0.001, 0)
    assert (optimizer.lr_in_momentum, optimizer.no_decay, optimizer.clip) == (True, True, False)
    assert [group.weight_decay for group in optimizer.groups] == [decay, None], "the last layer's bias alone decays"
    assert recipe.model.batch_norm is not None
    assert recipe.model.batch_norm.ghost == span
    assert recipe.task.args == {"label_smoothing": 0.1}
    assert (schedule.name, schedule.power) == ("polynomial", 2)
    assert lr * schedule.end == pytest.approx(1e-4, rel=1e-3)
    epochs = recipe.epochs
    assert isinstance(epochs, float)
    per_epoch = IMAGENET["samples"] / batch
    assert steps == pytest.approx((epochs - warmup * apart) * per_epoch, abs=per_epoch / 10)
    assert slowest <= epochs < slowest + 4


@pytest.mark.parametrize(
    ("name", "batch", "lr", "optimizer", "warms_up"),
    [
        ("256", 256, 0.2, "sgd", False),
        ("8k", 8192, 6.4, "sgd", True),
        ("16k", 16384, 2.5, "lars", True),
        ("32k", 32768, 2.9, "lars", True),
    ],
)
def test_the_four_runs_of_the_figure(name: str, batch: int, lr: float, optimizer: str, warms_up: bool) -> None:
    recipe = read(f"lars-resnet50-{name}")
    assert (recipe.batch, recipe.optimizer.lr, recipe.optimizer.name) == (batch, lr, optimizer)
    assert (recipe.schedule.warmup_epochs > 0, recipe.epochs) == (warms_up, 100)
    assert not recipe.data.crop.is_random
    assert recipe.augment.flip_mode is None


def test_the_three_modules_of_the_large_batch_together() -> None:
    """Precision, optimizer, communication; and the batch norm after pool5."""
    for name, epochs in (("tencent-resnet50-64k", 90), ("tencent-alexnet-bn-64k", 95)):
        recipe = read(name)
        assert (recipe.batch, recipe.epochs, recipe.precision) == (65_536, epochs, "fp16")
        assert (recipe.optimizer.name, recipe.optimizer.no_decay) == ("lars", True)
        assert (recipe.comm.algorithm, recipe.comm.bucket_mb, recipe.comm.wire) == ("auto", "auto", "fp16")
        assert recipe.schedule.warmup_epochs > 0
    assert recipe.model.args == {"batch_norm": True, "pool5_norm": True}


def test_the_64k_recipe_has_the_numbers_of_the_reference_point() -> None:
    ours, theirs = read("tencent-resnet50-64k"), read("imagenet-resnet50-65536")
    assert ours.schedule == theirs.schedule
    kept = {"groups": ()}
    assert ours.optimizer.model_copy(update=kept) == theirs.optimizer.model_copy(update=kept)
    assert (ours.task, ours.data, ours.augment) == (theirs.task, theirs.data, theirs.augment)


def test_the_rmsprop_warm_up_is_that_of_the_paper() -> None:
    recipe = read("akiba-resnet50-32k")
    optimizer, schedule, norm = recipe.optimizer, recipe.schedule, recipe.model.batch_norm
    assert (recipe.batch, recipe.epochs, recipe.comm.wire) == (32_768, 90, "fp16")
    assert (optimizer.name, optimizer.momentum, optimizer.smoothing, optimizer.eps) == ("rmsprop_sgd", 0.9, 0.99, 1e-8)
    assert (optimizer.lr_rmsprop, optimizer.center_epochs, optimizer.period_epochs) == (3e-4, 10, 5)
    # Half of 0.1 * batch / 256 at first, and a thousandth of it in the end.
    rate = 0.1 * 32_768 / 256
    assert optimizer.lr == pytest.approx(0.5 * rate)
    assert schedule.milestones_epochs == (40, 70, 85)
    assert optimizer.lr * schedule.gamma**3 == pytest.approx(0.001 * rate, rel=1e-2)
    assert norm is not None
    assert norm.recompute_batches == 1


def test_the_sizes_are_those_of_ffcv() -> None:
    """rn50_40_epochs.yaml: start_ramp 29, end_ramp 34, sizes rounded to the nearest 32."""
    progressive = read("ffcv-resnet50").data.progressive
    assert progressive is not None
    sides = [compute_progressive_size(progressive, (192, 192), epoch)[0] for epoch in range(27, 36)]
    assert sides == [160, 160, 160, 160, 160, 192, 192, 192, 192]


@pytest.mark.check
def test_a_few_steps_on_photographs(data_root: Path, tmp_path: Path) -> None:
    """250 photographs of ImageNet in five made-up classes, a batch of 8: LARS, ghost batch norm, crops, smoothing."""
    images = sorted((data_root / "imagenet-250").glob("*.JPEG"))
    with (tmp_path / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label"))
        rows.writerows((path, f"class{place % 5}") for place, path in enumerate(images[:60]))
    pack(tmp_path / "list.csv", tmp_path / "packed", split=0.2, threads=2)
    overrides = (
        f"data.train={tmp_path / 'packed/train'}",
        f"data.eval={tmp_path / 'packed/eval'}",
        "data.size=96",
        "batch=8",
        "micro_batch=4",
        "model.batch_norm.ghost=2",
        "epochs=0.7",
        "schedule.warmup_epochs=0.3",
        "log_every_steps=1",
        "precision=fp32",
    )
    recipe, run = ROOT / "recipes/imagenet-resnet50-1632.yaml", tmp_path / "run"
    said = headway("train", recipe, *overrides, "--dry-run", "--json", "--out", tmp_path / "w.json").json()
    assert (said["accumulation"], said["micro_batch"]) == (2, 4)
    headway("train", recipe, *overrides, "--run", run)
    trained = records(run, "train")
    assert len(trained) == said["workload"]["run"]["steps"] == 4
    assert trained[0]["lr"] == 0
    assert max(one["lr"] for one in trained) > 1
    assert all(0 < one["loss"] < 100 for one in trained)
    assert len(records(run, "evaluate")) == 1
