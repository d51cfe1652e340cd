"""Checkpoints that somebody has written on purpose: whole by their checksums, and refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tests._support import headway, packed_digits, refused, write_recipe
from torch import nn

from headway import optim
from headway.checkpoint.checkpoints import Checkpoint, Checkpoints, read, restore, state_of
from headway.checkpoint.manifest import MANIFEST
from headway.core.errors import CheckpointError

TENSORS = "tensors-0.safetensors"
Tree = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def forge(folder: Path, change: Callable[[Tree], object], tensors: Callable[[Tensors], object] | None = None) -> None:
    """Changes a checkpoint so that every checksum in it is right."""
    tree = json.loads((folder / MANIFEST).read_text())
    if tensors is not None:
        found = load((folder / TENSORS).read_bytes())
        tensors(found)
        data = save(found)
        (folder / TENSORS).write_bytes(data)
        tree["files"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(tree)
    tree.pop("sha256", None)
    tree["sha256"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(tree))


def within_30_s(work: Callable[[], object]) -> None:
    """Fails where it blocks."""
    done = threading.Thread(target=work, daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive()


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 2))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "lars": lambda model: optim.LARS(model.parameters(), 0.1),
    "novograd": lambda model: optim.NovoGrad(model.parameters(), 0.1),
    "lbsgd": lambda model: optim.LBSGD(model.parameters(), 0.1, steps_per_epoch=4, batch_scale=2),
}
"""What PyTorch's fused kernels and the native core step."""


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = OPTIMIZERS[name](model)
    model(torch.ones(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def states(tensors: Tensors) -> list[str]:
    """Names of the optimizer's states that have a parameter's shape."""
    return [key for key, value in tensors.items() if key.startswith("optimizer/") and value.ndim > 1]


FORGERIES: dict[str, Callable[[Tensors], object]] = {
    "shorter": lambda t: t.update({states(t)[0]: torch.zeros(3)}),
    "one number": lambda t: t.update({states(t)[0]: torch.zeros(())}),
    "longer": lambda t: t.update({states(t)[0]: torch.zeros(1 << 12)}),
    "same size, other shape": lambda t: t.update({states(t)[0]: t[states(t)[0]].reshape(-1)}),
    "half": lambda t: t.update({states(t)[0]: t[states(t)[0]].half()}),
    "double": lambda t: t.update({states(t)[0]: t[states(t)[0]].double()}),
    "bytes": lambda t: t.update({states(t)[0]: t[states(t)[0]].to(torch.uint8)}),
    "missing": lambda t: t.pop(states(t)[0]),
    "unknown": lambda t: t.update({"optimizer/0.weight/rubbish": torch.zeros(1)}),
    "of nobody": lambda t: t.update({"optimizer/9.weight/momentum_buffer": torch.zeros(1)}),
    "weights of another type": lambda t: t.update({"model/0.weight": t["model/0.weight"].double()}),
    "weights of another shape": lambda t: t.update({"model/0.weight": t["model/0.weight"].reshape(-1)}),
    "no generator": lambda t: t.pop("random/numpy"),
    "short generator": lambda t: t.update({"random/torch": torch.zeros(5, dtype=torch.uint8)}),
    "wild generator": lambda t: t.update({"random/torch": torch.full_like(t["random/torch"], 255)}),
    "a CUDA generator of floats": lambda t: t.update({"random/cuda": torch.zeros(16)}),
    "a CUDA generator of two rows": lambda t: t.update({"random/cuda": torch.zeros(2, 8, dtype=torch.uint8)}),
    "a CUDA generator of 5 bytes": lambda t: t.update({"random/cuda": torch.zeros(5, dtype=torch.uint8)}),
    "beyond the words": lambda t: t["random/numpy_scalars"].__setitem__(0, 1e6),
    "no place": lambda t: t["random/numpy_scalars"].__setitem__(0, float("nan")),
}


# A checkpoint with CUDA's state may be read without a GPU, where nothing can say how long it should be.
JUDGED_BY_CUDA = "a CUDA generator of 5 bytes"


@pytest.mark.parametrize(
    "forgery", [pytest.param(name, marks=[pytest.mark.gpu] * (name == JUDGED_BY_CUDA)) for name in FORGERIES]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.thin(25)
def test_a_state_of_another_shape_or_type_is_refused_and_nothing_is_changed(
    tmp_path: Path, name: str, forgery: str
) -> None:
    model, optimizer = trained(name)
    path = Path(str(Checkpoints(tmp_path).save(1, state_of(model, optimizer), {})))
    forge(path, lambda tree: None, FORGERIES[forgery])
    other, other_optimizer = trained(name)
    before = {key: value.clone() for key, value in state_of(other, other_optimizer).items()}
    with pytest.raises(CheckpointError, match=str(path)) as seen:
        restore(read(path), other, other_optimizer)
    named = ("random/", "rubbish", "'9.weight'", "'0.weight'", "is missing", "and should be")
    assert any(word in str(seen.value) for word in named)
    now = state_of(other, other_optimizer)
    assert now.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in now.items())


def test_a_state_that_an_optimizer_was_given_is_looked_at_before_the_native_core_sees_it() -> None:
    """Whoever loads it without `restore`."""
    for name in ("lars", "novograd", "lbsgd"):
        model, optimizer = trained(name)
        state = optimizer.state[model[0].weight]
        for key, value in [("exp_avg", torch.zeros(3)), ("momentum_buffer", torch.zeros(3).half())]:
            if key in state:
                state[key] = value
        model(torch.ones(2, 3, 4, 4)).square().sum().backward()
        with pytest.raises(Exception, match="Load the state of an optimizer of the same network"):
            optimizer.step()


MANIFESTS: dict[str, tuple[Callable[[Tree], object], str]] = {
    "no step": (lambda t: t.pop("step"), "lacks step"),
    "a step that is true": (lambda t: t.update(step=True), "has a truth value as step"),
    "a step below 0": (lambda t: t.update(step=-1), "has -1 as step"),
    "half a step": (lambda t: t.update(step=0.5), "has 0.5 as step"),
    "a huge step": (lambda t: t.update(step=10**30), "as step"),
    "no scalars": (lambda t: t.pop("scalars"), "lacks scalars"),
    "a list of scalars": (lambda t: t.update(scalars=[]), "has a list as scalars"),
    "no files": (lambda t: t.pop("files"), "lacks files"),
    "a file that is a text": (lambda t: t.update(files=["x"]), r"has a text as files\[0\]"),
    "a file without a name": (lambda t: t["files"][0].pop("name"), r"lacks files\[0\].name"),
    "a file of -1 bytes": (lambda t: t["files"][0].update(bytes=-1), r"has -1 as files\[0\].bytes"),
    "a file of true bytes": (lambda t: t["files"][0].update(bytes=True), r"as files\[0\].bytes"),
    "no digest": (lambda t: t["files"][0].update(sha256="zz"), r"as files\[0\].sha256"),
    "a file twice": (lambda t: t["files"].append(t["files"][0]), "names a file twice"),
    **{
        f"a file named {name!r}": (
            lambda t, name=name: t["files"][0].update(name=name),  # type: ignore[misc]
            r"as files\[0\].name, not a plain name",
        )
        for name in ("../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "\x1b[2J", "\ud800", "x" * 300, 7, MANIFEST)
    },
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_wrong_entry_of_a_manifest_is_named(tmp_path: Path, name: str) -> None:
    path = Path(str(Checkpoints(tmp_path).save(1, {"a": torch.zeros(1)}, {})))
    change, said = MANIFESTS[name]
    forge(path, change)
    with pytest.raises(CheckpointError, match=said) as seen:
        read(path)
    assert str(path) in str(seen.value)
    assert "\x1b" not in str(seen.value)


@pytest.mark.parametrize(
    "text", ['{"a":' * 100_000, "[" * 100_000, '{"format": 1, "format": 1}', '{"step": 1' + "0" * 5000]
)
def test_a_manifest_that_is_no_json_is_damaged(tmp_path: Path, text: str) -> None:
    path = Path(str(Checkpoints(tmp_path).save(1, {"a": torch.zeros(1)}, {})))
    (path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it "):
        read(path)


def test_pipes_devices_folders_and_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """Without waiting for somebody who writes to the pipe."""

    outside = tmp_path / "outside"
    good = Path(str(Checkpoints(tmp_path).save(1, {"a": torch.zeros(1)}, {})))
    shutil.copy(good / TENSORS, outside)
    ways: dict[str, Callable[[Path], object]] = {
        "a named pipe": pipe,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "Is a directory": Path.mkdir,
        "a link that leads out": lambda path: path.symlink_to(outside),
    }
    for said, make in ways.items():
        for name in (TENSORS, MANIFEST):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(good, copy)
            (copy / name).unlink()
            make(copy / name)
            seen: list[str] = []

            def look(copy: Path = copy, seen: list[str] = seen) -> None:
                try:
                    read(copy)
                except CheckpointError as error:
                    seen.append(str(error))

            within_30_s(look)
            assert len(seen) == 1, (said, name)
            assert any(word in seen[0] for word in (said, "leads out of its folder")), seen
            assert str(copy) in seen[0]


def test_a_sparse_file_beyond_memory_is_refused(tmp_path: Path) -> None:
    path = Path(str(Checkpoints(tmp_path).save(1, {"a": torch.zeros(1)}, {})))
    os.truncate(path / TENSORS, 1 << 43)
    forge(path, lambda tree: tree["files"][0].update(bytes=1 << 43))
    with pytest.raises(CheckpointError, match="is sparse: of its 8,796,093,022,208 bytes"):
        read(path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("place", ["{}", "file://{}"])
@pytest.mark.parametrize("make", [pipe, sparse])
def test_a_later_manifest_of_any_kind_does_not_hold_up_a_save(
    tmp_path: Path, make: Callable[[Path], None], place: str
) -> None:
    """Whoever may write into the folder could stop the training otherwise."""
    checkpoints = Checkpoints(place.format(tmp_path))
    checkpoints.save(1, {"a": torch.zeros(1)}, {})
    later = tmp_path / "step-99999999"
    later.mkdir()
    make(later / MANIFEST)
    saved: list[str] = []
    within_30_s(lambda: saved.append(str(checkpoints.save(2, {"a": torch.ones(1)}, {}))))
    assert [path.rpartition("/")[2] for path in saved] == ["step-00000002"]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


SCALARS: dict[str, tuple[Callable[[Tree], object], str]] = {
    "position": (lambda s: s.update(position=True), "scalars.position"),
    "another position": (lambda s: s.update(position=s["position"] + 1), "stands at sample"),
    "no position": (lambda s: s.pop("position"), "lacks scalars.position"),
    "data": (lambda s: s.update(data=3), "scalars.data"),
    "seconds": (lambda s: s.update(seconds={"wait": 1e300}), "scalars.seconds"),
    "endless seconds": (lambda s: s["seconds"].update(wait=float("inf")), "scalars.seconds"),
    "best": (lambda s: s.update(best={"accuracy": "x"}), "scalars.best"),
    "metrics": (lambda s: s.update(metrics=[]), "scalars.metrics"),
    "damaged": (lambda s: s.update(damaged=-1), "scalars.damaged"),
    "reached": (lambda s: s.update(reached_s="soon"), "scalars.reached_s"),
    "ended": (lambda s: s.update(ended={"reason": 3}), "scalars.ended"),
    "early stopping": (lambda s: s.update(early_stopping=7), "scalars.early_stopping"),
    "callbacks": (lambda s: s.update(callbacks=[1]), "scalars.callbacks"),
    "observer": (lambda s: s.update(observer=3), "scalars.observer"),
    "a method": (lambda s: s["observer"]["divergence"].update(_judge=1), "scalars.observer.divergence"),
    "a list": (lambda s: s["observer"]["divergence"].update(_recent=["x"]), "scalars.observer.divergence"),
    "channels": (lambda s: s["data"].update(channels=3), r"the data's channels differ \(3 then, 1 now\)"),
    "classes": (lambda s: s["data"].update(classes="0"), "the data's classes differ"),
    "fingerprint": (lambda s: s["data"].update(fingerprint="0"), "the data's fingerprint differs"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps with a checkpoint at step 3."""
    folder = tmp_path_factory.mktemp("hostile")
    packed_digits(folder)
    recipe = write_recipe(folder / "recipe.yaml", epochs=1, observe={"on_divergence": "warn"})
    headway("train", recipe, "--run", folder / "run", "checkpoint={every_steps: 3, keep: 9}")
    shutil.rmtree(folder / "run/checkpoints/step-00000006")
    return folder / "run"


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.thin(5)
def test_a_run_does_not_go_on_from_wrong_numbers(run: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    change, said = SCALARS[name]
    forge(copy / "checkpoints/step-00000003", lambda tree: change(tree["scalars"]))
    sentence = refused("train", "--resume", copy, status=1)
    assert re.search(said, sentence), sentence


def test_a_checkpoint_without_channels_and_classes_still_goes_on(run: Path, tmp_path: Path) -> None:
    """As older ones are."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    forge(
        copy / "checkpoints/step-00000003",
        lambda tree: [tree["scalars"]["data"].pop(key) for key in ("channels", "classes")],
    )
    assert "Resumed at step 3 of 6" in headway("train", "--resume", copy).err


def test_a_checkpoint_in_memory_is_looked_at_too() -> None:
    """As another rank gives it."""
    model, optimizer = trained("sgd")
    tensors = dict(state_of(model, optimizer))
    tensors["optimizer/0.weight/momentum_buffer"] = torch.zeros(1 << 12)
    with pytest.raises(CheckpointError, match=r"the optimizer's state of '0\.weight' does not fit"):
        restore(Checkpoint(Path("the state of another rank"), 1, {}, tensors), model, optimizer)


def test_scalars_that_no_manifest_would_give_back_are_not_saved(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    for scalars, said in (({"a": deep}, "levels deep"), ({1: 1, "1": 2}, "it has '1' twice")):
        with pytest.raises(CheckpointError, match=f"the scalars cannot be saved: .*{said}"):
            Checkpoints(tmp_path).save(1, {"a": torch.zeros(1)}, scalars)  # type: ignore[arg-type]
    assert Checkpoints(tmp_path).newest() is None
