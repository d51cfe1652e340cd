"""The recipe of a run: refused where it is wrong, every `auto` resolved, every origin kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests._support import headway, packed_digits, records, refused, write_recipe

from headway.core.recipe import read_recipe
from headway.data.order import Order
from headway.setup import micro_batch
from headway.setup.recipe import TrainRecipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    return folder


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def recorded(run: Path) -> tuple[dict[str, Any], dict[str, str]]:
    values = dict(leaves(yaml.safe_load((run / "recipe.yaml").read_text())))
    return values, json.loads((run / "provenance.json").read_text())["origins"]


def test_every_auto_is_resolved_and_every_origin_kept(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ("precision=auto", "micro_batch=auto", "device=auto", "optimizer.lr=1e-2", "augment={flip: true}")
    headway("train", folder / "recipe.yaml", "--run", run, *overrides)
    values, origins = recorded(run)
    assert origins.keys() == values.keys()
    # How ranks meet is chosen anew whenever they do.
    assert not [key for key, value in values.items() if value == "auto" and not key.startswith("comm.")]
    expected = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "data.size": [8, 8],
        "data.channels": 1,
        "task.factory": "headway.setup.task:Classification",
        "micro_batch": 30,
        "optimizer.lr": 0.01,
        "augment.flip": True,
        "seed": 0,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["precision"] in ("fp32", "bf16", "fp16")
    assert len(values["augment.mean"]) == len(values["augment.std"]) == 1
    lines = {line.partition(":")[0]: number for number, line in enumerate(recipe_lines(folder), start=1)}
    for key, origin in {
        "device": "auto: PyTorch sees ",
        "data.size": "auto: all training images have this size",
        "data.channels": "auto: every training image is gray",
        "augment.mean": "auto: over 180 training images",
        "task.factory": "auto: labels are classes",
        "micro_batch": "auto: ",
        "optimizer.lr": "command line",
        "augment.flip": "command line",
        "batch": f"recipe.yaml:{lines['batch']}",
        "seed": "default",
        "checkpoint.keep": "default",
    }.items():
        assert origins[key].startswith(origin), (key, origins[key])


def recipe_lines(folder: Path) -> list[str]:
    return (folder / "recipe.yaml").read_text().splitlines()


def test_the_measured_mean_and_std_are_those_of_the_images(folder: Path, tmp_path: Path) -> None:
    from headway.data import opening
    from headway.data.loader import Loader

    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "epochs=0.1")
    values, _ = recorded(tmp_path / "run")
    pixels = np.concatenate(
        [b.images.numpy().copy() for b in Loader(opening.open(folder / "digits.packed/train"), batch=60)]
    )
    assert values["augment.mean"] == [round(float(pixels.mean(dtype=np.float64)), 4)]
    assert values["augment.std"] == [round(float(pixels.std(dtype=np.float64)), 4)]


REFUSED = {
    "a typo": ("optimiser={name: sgd, lr: 0.1}", "there is no key 'optimiser'. Did you mean 'optimizer'?"),
    "a typo deep down": ("data.trian=x", "there is no key 'data.trian'. Did you mean 'data.train'?"),
    "a typo in a group": ("optimizer.groups=[{match: '.*', lr_scal: 2}]", "mean 'optimizer.groups.0.lr_scale'?"),
    "a wrong type": ("batch=many", "batch must be a whole number, not 'many'"),
    "a wrong choice": ("precision=fp8", "precision must be "),
    "no batch": ("batch=0", "batch must be at least 1"),
    "no epochs": ("epochs=0", "epochs must be more than 0"),
    "endless": ("epochs=.inf", "epochs must be a finite number"),
    "never evaluated": ("evaluate.every_epochs=.inf", "evaluate.every_epochs must be a finite number"),
    "never saved": ("checkpoint.every_epochs=.nan", "checkpoint.every_epochs must be a finite number"),
    "saved in memory": ("checkpoint.folder=memory://x", "checkpoint.folder: memory://x is memory of the process"),
    "saved in chained memory": ("checkpoint.folder=simplecache::Memory://x", "which ends with it"),
    "a goal that is not a number": ("stop_at={accuracy: .nan}", "stop_at.accuracy must be a finite number"),
    "a negative rate": ("optimizer.lr=-1", "optimizer.lr must be more than 0, not -1"),
    "micro above batch": ("micro_batch=31", "micro_batch 31 is larger than batch 30: set it to at most that"),
    "stop without eval": ("data={train: digits.packed/train} stop_at={accuracy: 1}", "stop_at needs an evaluation set"),
    "stop at nothing": ("stop_at={}", "stop_at names no metric"),
    "unused momentum": ("optimizer={name: adamw, lr: 1, momentum: 0.9}", "'optimizer.momentum' belongs to sgd, nag, "),
    "nag without momentum": ("optimizer={name: nag, lr: 1, momentum: 0}", "'nag' needs a momentum above 0"),
    "synthetic with size": ("data={train: synthetic, size: 8}", "synthetic data does not use 'size'"),
    **{
        f"synthetic with {key}": (f"data={{train: synthetic, {key}: {value}}}", f"synthetic data does not use '{key}'")
        for key, value in {
            "eval": "x", "crop": "random", "progressive": "{start: 4, until_epoch: 1}", "scaled": "true",
            "decoder": "pillow", "cache": "none", "cache_folder": "x", "cache_gb": "2", "channels": "1", "threads": "1",
            "pin": "true", "prefetch_batches": "2", "window": "4", "on_bad": "stop", "max_bad_share": "0.1",
            "verify": "never", "partition": "independent",
        }.items()
    },
    "a cache's folder without one": (
        "data={train: digits.packed/train, cache: none, cache_folder: x}",
        "data.cache_folder: cache: none does not use it. Remove it, or set data.cache to disk or auto.",
    ),
    "a cache's size in memory": (
        "data={train: digits.packed/train, cache: memory, cache_gb: 2}", "data.cache_gb: cache: memory does not use it."
    ),
    "smaller decodes of whole images": (
        "data={train: digits.packed/train, cache: memory, scaled: true}", "remove scaled, or set cache to"
    ),
    "Pillow pinned": ("data={train: digits.packed/train, decoder: pillow, pin: true}", "threads cannot be pinned"),
    "progressive from the end": (
        "data.progressive={start: 8, until_epoch: 1}", "data.progressive.start: progressive resolution from 8 to images"
    ),
    "synthetic part alone": ("data.synthetic={}", "data.synthetic counts only with train: synthetic"),
    "a large translate": ("augment.translate=8", "translate 8 is no less than the image's side of 8. Set it"),
    "means of three": ("augment.mean=[1, 2, 3]", "3 numbers for images of 1 channel."),
    "a long warm-up": ("schedule={name: cosine, warmup_epochs: 5}", "warmup_epochs 5 is longer than the run of 2"),
    "a late milestone": (
        "schedule={name: multi_step, milestones_epochs: [1, 2]}",
        "schedule.milestones_epochs has 2, and the run ends at epoch 2: remove it",
    ),
    "no micro-batch": ("micro_batch=0", "micro_batch must be at least 1"),
    "no such device": ("device=tpu", "there is no device 'tpu'"),
    "no such task": ("task.factory=headway.setup.task:Clasification", "Did you mean 'Classification'?"),
    "a task of other labels": (
        "task.factory=headway.setup.task:Regression",
        "Regression wants numbers for a label, the data has a class.",
    ),
    "a task's argument": (
        "task.args={label_smoothin: 0.1}", "argument 'label_smoothin'. Did you mean 'label_smoothing'?"
    ),
    "another optimizer": ("optimizer={name: lrs, lr: 1}", "not 'lrs'. Did you mean 'lars'?"),
    "a group of one": ("model.batch_norm={ghost: 1}", "ghost must be at least 2"),
    "frozen too late": (
        "model.freeze_after=[{match: x, after_epochs: 1}, {match: y, after_epochs: 2}]",
        "model.freeze_after.1.after_epochs has 2, and the run ends at epoch 2",
    ),
    "two falls the wrong way": (
        "schedule={name: multi_step, milestones_epochs: [1, 0.5]}", "schedule.milestones_epochs: [1.0, 0.5] do not rise"
    ),
    "a task's share": ("task.args={label_smoothing: 1.5}", "1.5 is not in [0, 1)"),
    "a sink": ("sinks=[tensorbord]", "sinks.0 must be 'tensorboard'"),
    "an unmatched parameter": ("optimizer.groups=[{match: bias}]", "no group matches '1.weight'."),
    "no override": ("batch", "'batch' is not an override. Write key=value"),
    "a model's argument": ("model.args={width: 3}", "has no argument 'width'"),
    "a model of other outputs": (
        "model.args={num_classes: 7}", "it gives a tensor of the shape [2, 7], and the data need [2, 10]"
    ),
    "frozen away": ("model.freeze=['.*']", "every parameter is frozen"),
    "frozen away later": (
        "model.freeze_after=[{match: '.', after_epochs: 1}]", "every parameter would be frozen before the run ends"
    ),
    "nothing to freeze later": (
        "model.freeze_after=[{match: whiten, after_epochs: 1}]",
        "model.freeze_after.0: 'whiten' matches no trained parameter. There are for example: 1.weight, 1.bias.",
    ),
    "frozen after the end": (
        "model.freeze_after=[{match: bias, after_epochs: 2}]",
        "model.freeze_after.0.after_epochs has 2, and the run ends at epoch 2",
    ),
    "no pattern": ("model.freeze_after=[{match: '(', after_epochs: 1}]", "'(' is not a regular expression"),
    "a large shift": ("evaluate.shift=8", "a shift of 8 is no less than the image's side of 8. Set it to at most 7."),
    "a choice among no views": ("evaluate.views_below=0.8", "views_below chooses images for flip and shift"),
    "no view is chosen": ("evaluate={flip: true, views_below: 0}", "evaluate.views_below must be"),
    "more than every view": ("evaluate={flip: true, views_below: 1.5}", "evaluate.views_below must be"),
    "a macro-batch that is never full": (
        "optimizer={name: lbsgd, lr: 0.1, batch_scale: 13, warmup_epochs: 1}",
        "optimizer.batch_scale: weights move once in 13 steps, and the run has 12, so nothing would be trained. Set it",
    ),
    "a rare look ahead": (
        "optimizer.lookahead={every_steps: 13}", "it looks ahead every 13 steps, and the run has 12. Set every_steps"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_recipe_is_refused_before_a_run_folder_is_made(folder: Path, tmp_path: Path, case: str) -> None:
    override, expected = REFUSED[case]
    overrides = override.split(" stop_at") if " stop_at" in override else [override]
    more = [f"stop_at{part}" if number else part for number, part in enumerate(overrides)]
    sentence = refused("train", folder / "recipe.yaml", *more, "--run", tmp_path / "run", status=2)
    assert expected in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_smallest_images_are_looked_at_before_a_run_folder_is_made(
    folder: Path, tmp_path: Path, where: str
) -> None:
    arguments = ("train", folder / "recipe.yaml", "--run", tmp_path / "run")
    small = "data.progressive={start: 4, until_epoch: 1, step: 2}"
    sentence = refused(*arguments, small, f"augment={{translate: 4, where: {where}}}", status=2)
    assert "translate 4 is no less than the image's side of 4 at the beginning of training. Set it to at most 3" in (
        sentence
    )
    said = headway(*arguments, small, status=1).err  # a linear network of 64 pixels
    assert "headway: data.progressive.start: the network failed on images of 1x4x4" in said
    assert "Take a network for images of any size, set it to more, or remove data.progressive." in said
    (folder / "sides.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.factor = nn.Linear(1, 1)\n"
        "    def forward(self, images):\n"
        "        return self.factor(images[:, 0, :1, :1]).flatten(1).expand(-1, images.shape[2] + 2)\n"
    )
    sentence = refused(*arguments, small, "model.factory=sides.py:Net", status=2)
    assert (
        "data.progressive.start: the network takes no images of 1x4x4: it gives a tensor of the shape [2, 6]"
        in sentence
    )
    assert not (tmp_path / "run").exists()
    network = (
        "model={factory: headway.model:small_net, args: {width: 4}}",
        f"augment={{translate: 3, where: {where}}}",
    )
    headway(*arguments, small, *network)


def test_the_name_of_a_strategy_is_enough(folder: Path) -> None:
    for name in ("data", "spatial", "hybrid", "towers", "experts", "sharded", "async", "local"):
        named, whole = (
            read_recipe(folder / "recipe.yaml", [f"parallel={value}"], TrainRecipe).recipe.parallel
            for value in (name, f"{{strategy: {name}}}")
        )
        assert named == whole
        assert named.strategy == name
    for wrong in ("parallel=hibrid", "parallel={strategy: hibrid}"):
        said = refused("train", folder / "recipe.yaml", wrong, "--dry-run", status=2)
        assert "parallel.strategy" in said
        assert "hybrid" in said
    for several in ("parallel=ensemble", "parallel={strategy: sweep}"):
        said = refused("train", folder / "recipe.yaml", several, "--dry-run", status=2)
        assert "is no strategy of one run, but several runs: headway " in said


def test_files_that_are_no_recipes(folder: Path, tmp_path: Path) -> None:
    assert "the recipe cannot be read" in refused("train", tmp_path / "none.yaml", status=2)
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    assert "a recipe is a mapping of keys to values" in refused("train", tmp_path / "list.yaml", status=2)
    (tmp_path / "torn.yaml").write_text("batch: [1,\n")
    assert "torn.yaml:2: this is not YAML" in refused("train", tmp_path / "torn.yaml", status=2)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "the recipe cannot be read" in refused("train", tmp_path / "bytes.yaml", status=2)
    (tmp_path / "empty.yaml").write_text("")
    sentence = refused("train", tmp_path / "empty.yaml", status=2)
    assert [
        key for key in ("data", "model", "optimizer", "batch", "epochs") if f"the key '{key}' is missing" in sentence
    ]
    assert "train needs a recipe" in refused("train", status=2)


def test_a_line_of_the_file_is_named(folder: Path) -> None:
    recipe = write_recipe(folder / "typo.yaml", epocs=3)
    number = next(n for n, line in enumerate(recipe.read_text().splitlines(), start=1) if line.startswith("epocs"))
    sentence = refused("train", recipe, status=2)
    assert f"typo.yaml:{number}: there is no key 'epocs'. Did you mean 'epochs'?" in sentence


def test_a_batch_larger_than_the_data_is_said_once_and_works(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = headway("train", folder / "recipe.yaml", "--run", run, "batch=400", "epochs=7", "log_ids=true")
    assert said.err.count("The batch of 400 is larger than the data set of 180: each step spans epochs.") == 1
    assert [record["step"] for record in records(run, "train")] == [1, 2, 3]  # 7 * 180 / 400 = 3.15
    served = np.frombuffer((run / "ids.bin").read_bytes(), "<i8").reshape(-1, 3)
    assert np.array_equal(served[:, 0], np.arange(1200))
    assert np.array_equal(served[:, 1], Order(180, 0)(np.arange(1200))[1])
    again = headway("train", "--resume", run)
    assert again.err.count("is larger than the data set") == 1


def test_an_epoch_is_the_nearest_number_of_full_steps(folder: Path, tmp_path: Path) -> None:
    for epochs, batch, steps in ((1, 7, 26), (0.5, 7, 13), (0.001, 30, 1), (2, 180, 2)):
        run = tmp_path / f"{epochs}-{batch}"
        headway("train", folder / "recipe.yaml", "--run", run, f"epochs={epochs}", f"batch={batch}")
        assert records(run, "train")[-1]["step"] == steps
        assert records(run, "train")[-1]["position"] == steps * batch


def test_evaluations_and_checkpoints_come_when_the_recipe_says(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("batch=20", "epochs=3", "evaluate={every_epochs: 0.5, batch: 7}", "checkpoint={every_epochs: 1.5, keep: 5}")
    headway("train", folder / "recipe.yaml", "--run", run, *more)
    # 9 steps an epoch: half epochs end inside steps 5, 14, 23
    assert [record["step"] for record in records(run, "evaluate")] == [5, 9, 14, 18, 23, 27]
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert names == ["step-00000014", "step-00000027"]


def test_micro_batch_auto_is_the_largest_that_fits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a network whose bytes kept for backward are known."""
    (folder / "known.py").write_text(
        "import torch\n"
        "def net(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.Sigmoid(),\n"
        "        torch.nn.Sigmoid(), torch.nn.Linear(256, num_classes))\n"
    )
    a_sample = 4 * (64 + 256 + 256)  # float32: the input, and the outputs of both sigmoids
    for fits, expected in ((30, 30), (29, 15), (14, 10), (7, 6), (1, 1), (0, 1)):
        monkeypatch.setattr(
            micro_batch,
            "read_free_memory_bytes",
            lambda fits=fits: int(fits * a_sample / micro_batch.USED_MEMORY_SHARE) + 1,
        )
        run = tmp_path / f"fits-{fits}"
        overrides = ("micro_batch=auto", "model.factory=known.py:net", "epochs=0.1")
        headway("train", folder / "recipe.yaml", "--run", run, *overrides)
        values, origins = recorded(run)
        assert values["micro_batch"] == expected
        assert "kept for backward" in origins["micro_batch"]


def test_micro_batch_auto_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    for name, value in (("auto", "auto"), ("whole", "30")):
        overrides = ("model.factory=net.py:dropout", f"micro_batch={value}")
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, *overrides)
    one, other = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("auto", "whole"))
    assert one == other


def test_micro_batch_auto_with_batch_norm_over_single_numbers(folder: Path, tmp_path: Path) -> None:
    """Batch norm refuses one sample alone where an image has shrunk to one pixel."""
    (folder / "norm.py").write_text(
        "from torch import nn\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, num_classes))\n"
    )
    for micro in ("auto", "29"):  # parts of 15: a tail of one sample could not be trained
        more = (f"micro_batch={micro}", "model.factory=norm.py:net")
        headway("train", folder / "recipe.yaml", "--run", tmp_path / micro, *more)


def test_synthetic_data(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "synthetic.yaml"
    recipe.write_text(
        "data: synthetic\nmodel: {factory: 'headway.model:small_net', args: {width: 4}}\n"
        "optimizer: {name: sgd, lr: 0.1}\nbatch: 25\nepochs: 1\nprecision: fp32\n"
    )
    run = tmp_path / "run"
    headway(
        "train",
        recipe,
        "--run",
        run,
        "data={train: synthetic, synthetic: {samples: 100, classes: 3, size: [9, 12], channels: 1}}",
    )
    values, origins = recorded(run)
    assert values["augment.mean"] == [127.5]
    assert origins["augment.std"] == "auto: of uniformly random bytes"
    assert json.loads((run / "summary.json").read_text())["step"] == 4
    assert "this run has no evaluation set" in refused("evaluate", run, status=2)


def test_window(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "data.window=16", "log_ids=true")
    served = np.frombuffer((run / "ids.bin").read_bytes(), "<i8").reshape(-1, 3)
    assert np.array_equal(served[:, 1], Order(180, 0, 16)(np.arange(360))[1])
    assert not np.array_equal(served[:, 1], Order(180, 0)(np.arange(360))[1])


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    from PIL import Image

    from headway.data.pack import pack

    chance = np.random.default_rng(0)
    for number, side in enumerate((20, 24, 31, 40)):
        for label in ("a", "b"):
            (tmp_path / "src" / label).mkdir(parents=True, exist_ok=True)
            pixels = chance.integers(0, 256, (side, side + 3, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "src" / label / f"{number}.jpg")
    pack(tmp_path / "src", tmp_path / "digits.packed/train", threads=1)
    model = {"factory": "headway.model:small_net", "args": {"width": 4}}
    recipe = write_recipe(tmp_path / "recipe.yaml", data={"eval": None}, model=model, batch=4)
    assert "the images have different sizes. Set data.size, for example 224" in refused("train", recipe, status=2)
    headway("train", recipe, "data.size=[16, 24]", "--run", tmp_path / "run")
    values, _ = recorded(tmp_path / "run")
    assert (values["data.size"], values["data.channels"]) == ([16, 24], 3)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_resolved_recipe_loads_as_it_is(folder: Path, tmp_path: Path, seed: int) -> None:
    """Random values through YAML and back."""
    chance = random.Random(seed)
    overrides = [
        f"seed={chance.randrange(2**63)}",
        f"optimizer.lr={10 ** chance.uniform(-30, 3)!r}",
        "optimizer.groups=[{match: 'weight$', lr_scale: 3}, {match: '.*', weight_decay: 1e-30}]",
        "name='1e-3'",
        "evaluate.every_epochs=1e300",
    ]
    headway("train", folder / "recipe.yaml", *overrides, "--run", tmp_path / "run")
    first = read_recipe(tmp_path / "run/recipe.yaml", (), TrainRecipe)
    assert first.to_yaml() == (tmp_path / "run/recipe.yaml").read_text()
    assert first.recipe.name == "1e-3"
