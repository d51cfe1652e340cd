"""`headway train RECIPE --dry-run`: what it says is what the run then does, and nothing is trained."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests._support import headway, packed_digits, records, refused, write_recipe

from headway.core.workload import Workload
from headway.data import opening
from headway.data.tiers import choice
from headway.plan.cluster import load_clusters
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.job import build_job
from headway.report.dry_run_text import format_count, format_dry_run
from headway.setup import micro_batch
from headway.setup.build import build_setup
from headway.training.dry_run import DryRun, dry_run
from headway.training.runs import load_recipe

CURIOUS = """
from torch import nn

class Curious(nn.Module):
    "Asks for a value, which a network without values cannot tell."
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, images):
        if images.sum().item() > 1e9:
            return self.layer(images.flatten(1)) * 2
        return self.layer(images.flatten(1))

class Fails(Curious):
    def forward(self, images):
        if self.training:
            raise RuntimeError("no training today")
        return self.layer(images.flatten(1))

def dark(images, labels, keys):
    raise ValueError("it is dark")

def look(images, labels, keys):
    print("transform", len(images))
    return images, labels

def init(model, images):
    print("init", len(images))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    packed_digits(folder)
    (folder / "curious.py").write_text(CURIOUS)
    write_recipe(folder / "recipe.yaml", model={"factory": "net.py:dropout"}, optimizer={"name": "nag"})
    return folder


def dried(recipe: Path, *overrides: str, compiles: bool = False, **options: Any) -> DryRun:
    return dry_run(recipe, overrides, compiles=compiles, **options)


def test_it_writes_the_workload_and_trains_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = headway("train", folder / "recipe.yaml", "--dry-run", "name=digits")
    assert [path.name for path in tmp_path.iterdir()] == ["digits.workload.json"]
    assert said.out.endswith("Wrote digits.workload.json.\n")
    assert said.out.startswith("digits: dry run, nothing was trained\n")
    found = Workload.read(tmp_path / "digits.workload.json")
    as_json = headway(
        "train", folder / "recipe.yaml", "--dry-run", "name=digits", "--json", "--out", "other.json"
    ).json()
    assert Workload.model_validate(as_json["workload"]) == found == Workload.read(tmp_path / "other.json")
    assert as_json["written"] == "other.json"


def test_it_says_what_the_run_then_does(folder: Path, tmp_path: Path) -> None:
    options = ("epochs=3", "evaluate.every_epochs=0.7", "checkpoint.every_epochs=1.3", "checkpoint.keep=9")
    options += ("schedule={name: cosine, warmup_epochs: 1}", "batch_growth={milestones_epochs: [1], factor: 2}")
    found = dried(folder / "recipe.yaml", *options)
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *options)
    trained, work = records(tmp_path / "run", "train"), found.workload
    assert work.run.steps == len(trained)
    assert work.run.epochs == trained[-1]["epoch"]
    assert [phase.batch for phase in work.run.phases for _ in range(phase.steps)] == [one["batch"] for one in trained]
    assert work.run.evaluations == len(records(tmp_path / "run", "evaluate"))
    saved = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert work.run.checkpoints == len(saved)
    for epoch, lr in found.rates[:-1]:
        assert lr == next(one["lr"] for one in trained if one["epoch"] - one["batch"] / 180 >= epoch - 1e-9)
    assert found.rates[-1] == (trained[-1]["epoch"], trained[-1]["lr"])
    assert work.run.checkpoint_bytes == sum(tensor_bytes(path) for path in saved[-1].glob("*.safetensors"))
    assert (work.parameters, work.run.samples, work.run.evaluation_samples) == (4252, 180, 60)


def tensor_bytes(path: Path) -> int:
    with safe_open(path, "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - it is no mapping
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_the_input_is_that_of_the_columns(folder: Path) -> None:
    data = opening.open(folder / "digits.packed/train")
    found = dried(folder / "recipe.yaml", "augment={flip: true, cutout: 2}").workload.input
    assert found.encoded_bytes == pytest.approx(data.length.mean())
    assert (found.source_pixels, found.decoded_bytes, found.channels) == (64, 64, 1)
    assert (found.on_host, found.on_device) == (("flip",), ("cutout", "normalise"))
    augment = "augment={flip: both, rotation: 9, policy: auto, where: device}"
    found = dried(folder / "recipe.yaml", augment, "data.crop=random").workload.input
    assert (found.on_host, found.on_device) == (("random crop",), ("flip", "rotation", "policy", "normalise"))


@settings(max_examples=8, deadline=None)
@given(batch=st.integers(4, 200), ranks=st.integers(1, 4), micro=st.integers(1, 200))
def test_a_batch_is_shared_and_divided_as_training_does_it(folder: Path, batch: int, ranks: int, micro: int) -> None:
    micro = min(micro, batch)
    found = dried(folder / "recipe.yaml", f"batch={batch}", f"micro_batch={micro}", procs=ranks)
    share = math.ceil(batch / ranks)
    parts = torch.empty(share).tensor_split(-(-share // micro)) if micro < share else [torch.empty(share)]
    assert (found.rank_batch, found.accumulation, found.micro_batch) == (share, len(parts), max(map(len, parts)))
    assert found.ranks == ranks
    planned = build_job(
        found.workload, estimate_from_data_sheet(found.workload, load_clusters()["dgx-1"].device_spec), 1.0
    )
    assert planned.per_device is not None
    assert (planned.accumulate, math.ceil(planned.per_device - 1e-9)) == (found.accumulation, found.micro_batch)


def test_memory_by_hand(folder: Path) -> None:
    options = ("model.factory=net.py:linear", "model.ema={half_life_steps: 5}", "micro_batch=10")
    found = dried(folder / "recipe.yaml", *options, procs=2)
    weights = 4 * (64 * 10 + 10)
    assert {part.name: part.bytes for part in found.memory} == {
        "weights": weights,
        "gradients": weights,
        "buckets": weights,
        "optimizer state": weights,
        "averaged weights": weights,
        "layer watch": 2 * 4 * 64 * 10,
        "activation gradients": 2 * 8 * 10 * 4,
        "batch": 15 * 64 * 4,
        "input ring": 3 * 15 * 64,
        "copy for a checkpoint": math.ceil(found.workload.run.checkpoint_bytes / 2),
    }
    assert {part.where for part in found.memory} == {"host"}
    assert found.micro_batch == 8, "15 samples in two parts"
    assert found.sent_bytes == weights, "a ring of two: 2 (n - 1) / n of it"


def test_memory_of_asynchronous_servers(folder: Path) -> None:
    """Each process takes whole batches, even a single sample, and each server has the mail of all of them."""
    weights, options = 4 * (64 * 10 + 10), ("model.factory=net.py:linear", "batch=1")

    def find(parallel: str) -> dict[str, int]:
        found = dried(folder / "recipe.yaml", *options, f"parallel={{strategy: async{parallel}}}", procs=4)
        assert (found.rank_batch, found.sent_bytes) == (1, weights * 3 / 4 / (2 if "servers" in parallel else 1))
        return {part.name: part.bytes for part in found.memory}

    memory = find("")
    assert "buckets" not in memory
    assert memory["batch"] == 64 * 4
    assert memory["state of a server"] == (3 * 4 + 3) * weights
    assert find(", servers: 2")["state of a server"] == 2 * weights + (3 * 4 + 1) * weights // 2
    assert find(", compensate: none")["state of a server"] == (2 * 4 + 2) * weights


def test_layers_that_nobody_looks_at_are_not_copied(folder: Path) -> None:
    unwatched = "observe.on_divergence=ignore"
    for options, copied in (((unwatched,), False), ((unwatched, "observe.layer_rates=true"), True)):
        assert ("layer watch" in {part.name for part in dried(folder / "recipe.yaml", *options).memory}) == copied


def test_a_16_bit_wire_halves_gradients_that_are_fp32_alone(folder: Path) -> None:
    """The network has a batch norm, whose gradients are fp32 also beside 16-bit weights."""
    half, wire = ("precision=bf16", "half_weights=true"), ("comm.wire=bf16",)

    def sent(*options: str) -> float:
        return dried(folder / "recipe.yaml", *options, hosts="a:1,b:1").sent_bytes

    norm = 2 * 6 * 4
    whole, narrow = sent(), sent(*half)
    assert sent(*wire) == whole / 2
    assert narrow == (whole + norm) / 2
    assert sent(*half, *wire) == pytest.approx(narrow - norm / 2)


def test_the_optimizers_matrix_products_are_in_the_layers_that_have_the_weights(folder: Path) -> None:
    def count(name: str) -> Workload:
        overrides = (f"optimizer={{name: {name}, lr: 0.01}}", 'model={factory: "headway.model:small_net"}')
        return dried(folder / "recipe.yaml", *overrides).workload

    muon, nag = count("muon"), count("nag")
    filters = {one.name: one.update_multiply_adds for one in muon.layers if one.kind == "Conv2d"}
    assert all(filters.values())
    # Linear layers and norms have no products.
    assert sum(filters.values()) == sum(one.update_multiply_adds for one in muon.layers)
    assert (muon.step.update.product_precision, nag.step.update.product_precision) == ("bf16", "fp32")
    assert not any(one.update_multiply_adds for one in nag.layers)


def test_a_dry_run_measures_no_precision(folder: Path) -> None:
    assert dried(folder / "recipe.yaml", "precision=auto").workload.step.precision == "fp32"


def test_micro_batch_auto_is_estimated_from_what_a_run_measures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run also counts the images that go in, which lie in the batch anyway."""
    options = ("micro_batch=auto", "batch=60")
    for free in (10**5, 10**6, 10**9):
        monkeypatch.setattr(micro_batch, "read_free_memory_bytes", lambda free=free: free)
        found = dried(folder / "recipe.yaml", *options)
        setup = build_setup(load_recipe(folder / "recipe.yaml", options))
        setup.inputs.close()
        assert isinstance(setup.recipe.micro_batch, int)
        assert setup.recipe.micro_batch <= found.micro_batch <= 1.2 * setup.recipe.micro_batch
    assert "micro_batch: auto is estimated" in format_dry_run(found)


@pytest.mark.check
def test_progressive_phases_have_their_own_multiply_adds(folder: Path, tmp_path: Path) -> None:
    options = ("model={factory: headway.model:small_net}", "data.progressive={start: 8, until_epoch: 1.5, step: 2}")
    found = dried(folder / "recipe.yaml", *options, "data.size=12", "epochs=3").workload
    sizes = [(phase.steps, phase.height) for phase in found.run.phases]
    assert sizes == [(6, 8), (6, 10), (6, 12)]
    overrides = (*options, "data.size=12", "epochs=3")
    said = headway("train", folder / "recipe.yaml", *overrides, "--dry-run", "--out", tmp_path / "w.json").err
    assert said.count("Training images are 8x8 from epoch 0, 10x10 from epoch 1, 12x12 from epoch 2.") == 1
    counted = [phase.forward_multiply_adds for phase in found.run.phases]
    assert sorted(counted) == counted
    assert counted[-1] == found.forward_multiply_adds


def test_data_that_are_not_there_can_be_stated(folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "far.yaml", data={"train": "nowhere/train", "eval": "nowhere/eval"})
    sentence = refused("train", recipe, "--dry-run", status=2)
    assert "nowhere/train: there is no such file or folder" in sentence
    assert sentence.endswith("--dry-run --samples 1281167 --classes 1000.")
    (tmp_path / "recipes").mkdir()
    above = write_recipe(tmp_path / "recipes/far.yaml", data={"train": "../nowhere/train", "eval": "../nowhere/eval"})
    assert refused("train", above, "--dry-run", status=2).endswith("--classes 1000.")
    half = refused("train", recipe, f"data.train={folder / 'digits.packed/train'}", "--dry-run", status=2)
    assert "nowhere/eval: there is no such" in half
    assert half.endswith("--classes 1000.")
    assert "Set it, for example to 224" in refused("train", recipe, "--dry-run", "--samples", "500", status=2)
    found = dried(recipe, "data.size=8", "data.channels=1", samples=500, classes=7, evaluation_samples=50)
    run = found.workload.run
    assert (run.samples, run.evaluation_samples, run.steps) == (500, 50, 33)
    assert found.workload.layers[-1].output_shape == (7,)
    assert found.workload.input.encoded_bytes is None
    assert "--eval-samples" in format_dry_run(dried(recipe, "data.size=8", "data.channels=1", samples=500))
    synthetic = dried(recipe, "data={train: synthetic, synthetic: {samples: 500, size: [8, 8], channels: 1}}")
    assert (synthetic.workload.run.samples, synthetic.workload.run.evaluations) == (500, 0)


def test_a_stated_set_is_built_as_the_real_one(folder: Path) -> None:
    real = dried(folder / "recipe.yaml", "data.size=8", "data.channels=1").workload
    stated = dried(
        folder / "recipe.yaml", "data.size=8", "data.channels=1", samples=180, classes=10, evaluation_samples=60
    ).workload
    unknown = {"encoded_bytes": None, "source_pixels": None}
    assert stated == real.model_copy(update={"input": real.input.model_copy(update=unknown)})


def test_no_cache_is_filled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for one, a run says so, and a dry run does not look."""
    monkeypatch.setattr(choice, "read_free_memory_bytes", lambda: 1)
    run = ("train", folder / "recipe.yaml", "data.cache=memory", "--run", tmp_path / "run")
    assert "has 1 bytes free" in refused(*run, status=2)
    assert dried(folder / "recipe.yaml", "data.cache=memory").loaded.recipe.data.cache == "memory"


def test_few_images_are_looked_at(folder: Path, tmp_path: Path) -> None:
    """A transform sees them, so that one that fails is found too."""
    options = ("batch=100", "transform=curious.py:look", "model.init=curious.py:init")
    said = headway("train", folder / "recipe.yaml", *options, "--dry-run", "--out", tmp_path / "w.json")
    assert "init 8\n" in said.out
    assert "transform 8\n" in said.out
    dark = ("train", folder / "recipe.yaml", "transform=curious.py:dark", "--dry-run", "--out", tmp_path / "no.json")
    assert "failed: ValueError: it is dark" in headway(*dark, status=1).err
    assert not (tmp_path / "no.json").exists()


def test_a_network_that_asks_for_values_is_measured_with_them(folder: Path) -> None:
    found = dried(folder / "recipe.yaml", "model.factory=curious.py:Curious")
    assert not found.on_shapes_only
    assert "needs their values" in format_dry_run(found)
    plain = dried(folder / "recipe.yaml", "model.factory=net.py:linear")
    assert plain.on_shapes_only
    assert found.workload.forward_multiply_adds == plain.workload.forward_multiply_adds == 640
    sentence = headway("train", folder / "recipe.yaml", "model.factory=curious.py:Fails", "--dry-run", status=1).err
    assert "no training today" in sentence


@pytest.mark.check
def test_it_says_what_torch_compile_makes_of_the_network(folder: Path) -> None:
    whole = dried(folder / "recipe.yaml", compiles=True)
    assert "\ncompile      false: torch.compile would take the network whole, as one graph\n" in format_dry_run(whole)
    assert whole.to_json()["compilable"] == {"whole": True, "graphs": 1, "breaks": ()}
    asked = ("model.factory=curious.py:Curious", "compile=true")
    broken = dried(folder / "recipe.yaml", *asked, compiles=True)
    assert re.search(
        r"^compile +true: torch.compile takes the network in \d graphs; it stops at$", format_dry_run(broken), re.M
    )
    assert "curious.py:11 'if images.sum().item() > 1e9:' in Curious (the network): " in format_dry_run(broken)
    (one,) = broken.to_json()["compilable"]["breaks"]
    assert one["modules"] == ("",)


def test_torch_compile_is_not_asked_where_it_cannot_be_used(folder: Path) -> None:
    found = dried(folder / "recipe.yaml", "activation_checkpointing=['^0$']", compiles=True)
    assert found.to_json()["compilable"] is None
    assert "\ncompile      false\n" in format_dry_run(found)


@pytest.mark.check
def test_fp16_can_be_looked_at_without_a_gpu(folder: Path) -> None:
    found = dried(folder / "recipe.yaml", "precision=fp16", "device=cuda", "micro_batch=10")
    half, whole = found.workload, dried(folder / "recipe.yaml", "micro_batch=10").workload
    assert half.step.precision == "fp16"
    assert 0 < sum(layer.saved_bytes for layer in half.layers) < sum(layer.saved_bytes for layer in whole.layers)
    assert half.forward_multiply_adds == whole.forward_multiply_adds
    if not torch.cuda.is_available():
        assert {part.where for part in found.memory} == {"device", "host"}
        assert "needs a GPU, and there is none here" in format_dry_run(found)


def test_16_bit_weights_have_masters(folder: Path, tmp_path: Path) -> None:
    options = ("model.factory=net.py:linear", "precision=bf16", "half_weights=true", "epochs=1")
    found = dried(folder / "recipe.yaml", *options)
    memory, numbers = {part.name: part.bytes for part in found.memory}, 64 * 10 + 10
    assert (memory["weights"], memory["gradients"]) == (2 * numbers, 2 * numbers)
    assert memory["masters"] == memory["gradients of masters"] == memory["optimizer state"] == 4 * numbers
    assert "650 parameters (650 trained)" in format_dry_run(found)
    headway("train", folder / "recipe.yaml", *options, "--run", tmp_path / "run")
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert found.workload.run.checkpoint_bytes == sum(tensor_bytes(path) for path in saved.glob("*.safetensors"))


def test_what_is_computed_again_belongs_to_the_backward_pass(folder: Path) -> None:
    plain = dried(folder / "recipe.yaml", "model={factory: headway.model:small_net}")
    again = dried(folder / "recipe.yaml", "model={factory: headway.model:small_net}", "activation_checkpointing=true")
    one, other = plain.workload, again.workload
    assert one.forward_multiply_adds == other.forward_multiply_adds
    assert one.backward_multiply_adds < other.backward_multiply_adds
    assert other.count_saved_bytes(100) < one.count_saved_bytes(100)
    assert [layer.activation_bytes for layer in one.layers] == [layer.activation_bytes for layer in other.layers]
    assert "computed again" in format_dry_run(again)


def test_large_batches_cost_nothing(folder: Path) -> None:
    found = dried(folder / "recipe.yaml", "batch=65536", "micro_batch=256", "epochs=3000", procs=8)
    assert (found.rank_batch, found.accumulation, found.workload.run.steps) == (8192, 32, 8)


def test_of_very_many_epochs_some_rates_are_kept(folder: Path) -> None:
    found = dried(folder / "recipe.yaml", "epochs=300000")
    assert len(found.rates) <= 20_001
    assert found.rates[0][0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dry-run", "--repeat", "2"), "cannot be combined with --dry-run"),
        (("--samples", "5"), "only work with --dry-run"),
        (("--dry-run", "--classes", "5"), "go with --samples"),
        (("--dry-run", "--procs", "31"), "a batch of 30 cannot be shared by 31 processes"),
        (
            ("--dry-run", "--procs", "2", "parallel={strategy: spatial, ranks: 3}"),
            "3 processes share each image, and there are 2",
        ),
        (("--dry-run", "--hosts", "a"), "not of the form HOST:NUMBER"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("train", folder / "recipe.yaml", *arguments, status=2)


def test_the_command_of_the_run_is_tried_as_it_is(folder: Path, tmp_path: Path) -> None:
    """--run may stay: the folder is checked, and not made."""
    options = ("--run", tmp_path / "run", "--dry-run", "--out", tmp_path / "workload.json")
    headway("train", folder / "recipe.yaml", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["workload.json"]
    said = refused("train", folder / "recipe.yaml", "--dry-run", "--run", tmp_path, status=2)
    assert said == f"{tmp_path}: this folder is not empty. Name another one with --run."


def test_the_page_in_words(folder: Path) -> None:
    found = dried(folder / "recipe.yaml", "epochs=30", hosts="a:2,b:2")
    text = format_dry_run(found)
    for said in (
        "steps        180 in 30 epochs of 180 samples",
        "batch        30: 8 in a micro-batch x 1 accumulated x 4 ranks on 2 hosts at most",
        "each host sends ",
        "  at the last step, epoch 30: 0.02",
        "evaluations  30 of 60 samples",
        "memory per rank, estimated",
        "Conv2d",
    ):
        assert said in text, text
    assert len(re.findall(r"^ +\d+ ( +0\.02){10}$", text, re.MULTILINE)) == 3
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize(("number", "said"), [(640, "640"), (4.089e9, "4.089 billion"), (7.962e14, "796.2 x 10^12")])
def test_numbers_in_words(number: float, said: str) -> None:
    assert format_count(number) == said


def test_the_recipe_of_a_run_is_taken_from_where_its_data_are(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "epochs=1")
    again = dried(tmp_path / "run/recipe.yaml").workload
    assert again.run.steps == 6
    assert yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["epochs"] == 1
