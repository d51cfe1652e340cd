from __future__ import annotations

import argparse
import copy
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from headway.core.errors import UsageError
from headway.model import pretrained


def net(classes: int = 4, width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, width, 1), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width, classes))


def saved(path: Path, model: nn.Module, drop: tuple[str, ...] = (), **add: torch.Tensor) -> Path:
    tensors = {name: value for name, value in model.state_dict().items() if name not in drop}
    save_file(tensors | add, path)
    return path


def test_all_tensors_and_buffers_are_copied(tmp_path: Path) -> None:
    source, target = net(), net()
    source(torch.randn(5, 2, 1, 1))  # moves the running statistics
    assert pretrained.load_weights(target, saved(tmp_path / "w.safetensors", source)) == []
    for name, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[name]), name


def test_half_precision_files_serve_a_full_precision_network(tmp_path: Path) -> None:
    source, target = net().bfloat16(), net()
    pretrained.load_weights(target, saved(tmp_path / "w.safetensors", source))
    assert target[0].weight.dtype == torch.float32
    assert torch.equal(target[0].weight, source[0].weight.float())


def test_a_head_of_another_size_begins_anew(tmp_path: Path) -> None:
    source, target = net(classes=10), net(classes=4)
    fresh = target[3].weight.clone()
    assert pretrained.load_weights(target, saved(tmp_path / "w.safetensors", source)) == ["3.weight", "3.bias"]
    assert torch.equal(target[3].weight, fresh)
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_head_begins_anew_as_a_whole(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", net(), **{"3.bias": torch.zeros(9)})
    assert pretrained.load_weights(net(), path) == ["3.weight", "3.bias"]


def test_an_old_file_without_batch_counts(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", net(), drop=("1.num_batches_tracked",))
    assert pretrained.load_weights(net(), path) == []


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        (("0.weight", "3.bias"), {}, "the weights do not fit the network: missing in the file: 0.weight, 3.bias. Only"),
        ((), {"extra": torch.zeros(1)}, "unknown to the network: extra."),
        ((), {f"e{i}": torch.zeros(1) for i in range(7)}, "unknown to the network: e0, e1, e2, e3, e4 and 2 more."),
        ((), {"0.bias": torch.zeros(9)}, "of another shape: 0.bias (9 in the file, 3 in the network)."),
        ((), {"0.weight": torch.zeros(3, 1, 1, 1)}, "0.weight (3x1x1x1 in the file, 3x2x1x1 in the network)"),
        ((), {"0.bias": torch.zeros(3).long()}, "of another kind: 0.bias (torch.int64 in the file, torch.float32 in"),
        ((), {"1.num_batches_tracked": torch.tensor(0.5)}, "of another kind: 1.num_batches_tracked (torch.float32 in"),
        (("0.bias",), {"extra": torch.zeros(())}, "missing in the file: 0.bias; unknown to the network: extra"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    drop: tuple[str, ...], add: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "w.safetensors", net(), drop, **add)
    target = net()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        pretrained.load_weights(target, path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_only_the_last_layer_may_differ(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"of another shape: 0\.weight"):
        pretrained.load_weights(net(width=5), saved(tmp_path / "w.safetensors", net(width=3)))


class Rogue:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("content", [Rogue(), {"model": net().state_dict(), "args": Rogue()}], ids=["alone", "beside"])
def test_a_file_that_would_run_code_is_refused(zipped: bool, content: object, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UsageError) as caught:
        pretrained.load_weights(net(), path)
    assert "holds Python objects besides tensors (exec), and loading them could run any code" in str(caught.value)
    assert "If you trust the file, save its tensors once yourself" in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("ending", ["pth", "pt", "bin", "safetensors"])
def test_a_file_of_torch_save_by_its_content(
    zipped: bool, ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = net(), net()
    path = tmp_path / f"w.{ending}"
    torch.save(source.state_dict(), path, _use_new_zipfile_serialization=zipped)
    with caplog.at_level(logging.INFO, logger="headway"):
        assert pretrained.load_weights(target, path) == []
    assert same(source, target)
    assert caplog.messages == []


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            lambda new, old: {"state_dict": new, "epoch": 3, "best": torch.ones(1)},
            "the weights in 'state_dict' are used",
        ),
        (lambda new, old: {"model": new, "args": argparse.Namespace(lr=1.0)}, "the weights in 'model' are used"),
        (lambda new, old: {"net": {"state_dict": new}}, "the weights in 'net.state_dict' are used"),
        (lambda new, old: {"model_state_dict": new | {"_extra_state": None}}, "'model_state_dict' are used"),
        (
            lambda new, old: {"state_dict": old, "state_dict_ema": new},
            "the averaged weights in 'state_dict_ema' are used, which are usually better than 'state_dict'",
        ),
        (lambda new, old: {"ema": {"module": new}, "model": old}, "averaged weights in 'ema.module' are used, which"),
        (
            lambda new, old: {"model_ema": averaged(new), "model": old},
            "averaged weights in 'model_ema' are used, which",
        ),
        # timm writes None where it kept no average.
        (lambda new, old: {"state_dict_ema": None, "state_dict": new}, "w.pth: the weights in 'state_dict' are used."),
    ],
)
def test_weights_among_other_things(
    tree: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = net(), net()
    torch.save(tree(source.state_dict(), net().state_dict()), tmp_path / "w.pth")
    with caplog.at_level(logging.INFO, logger="headway"):
        assert pretrained.load_weights(target, tmp_path / "w.pth") == []
    assert same(source, target)
    assert len(caplog.messages) == 1
    assert said in caplog.messages[0]


def averaged(state: dict[str, Any]) -> dict[str, Any]:
    """As torchvision's references save it."""
    model = net()
    model.load_state_dict(state)
    return AveragedModel(model).state_dict()


class Lit(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Compiled(nn.Module):
    """Has the names of torch.compile's OptimizedModule, whose import takes 2 s."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def compile_a_part(model: nn.Module) -> nn.Module:
    model[0] = Compiled(model[0])  # type: ignore[operator, index]
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "parallel": nn.DataParallel,
    "compiled": Compiled,
    "both": lambda model: nn.DataParallel(Compiled(model)),
    "averaged": AveragedModel,
    "lightning": Lit,
    "parallel in lightning": lambda model: Lit(nn.DataParallel(model)),
    "a part compiled": compile_a_part,
}


@pytest.mark.check
def test_the_names_of_torch_compile() -> None:
    assert list(torch.compile(net()).state_dict()) == list(Compiled(net()).state_dict())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_prefixes_of_wrappers_are_stripped(wrapper: str, tmp_path: Path) -> None:
    source, target = net(), net()
    expected = copy.deepcopy(source)
    state = WRAPPERS[wrapper](source).state_dict()
    assert state.keys() != expected.state_dict().keys()
    torch.save(state, tmp_path / "w.pth")
    assert pretrained.load_weights(target, tmp_path / "w.pth") == []
    assert same(expected, target)
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "w.safetensors")
    target = net()
    pretrained.load_weights(target, tmp_path / "w.safetensors")
    assert same(expected, target)


def test_a_network_whose_own_names_look_like_a_prefix(tmp_path: Path) -> None:
    source, target = Lit(net()), Lit(net())
    pretrained.load_weights(target, saved(tmp_path / "w.safetensors", source))
    assert same(source, target)


def test_names_that_have_nothing_in_common_are_shown_of_both(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a.weight": torch.ones(1), "b.weight": torch.ones(1)}}, tmp_path / "w.pth")
    with pytest.raises(UsageError) as caught:
        pretrained.load_weights(net(), tmp_path / "w.pth")
    message = str(caught.value)
    assert "the file has 'a.weight', 'b.weight'; the network has '0.weight', '0.bias', '1.weight'." in message
    assert message.endswith("Set model.factory to the network from which the file was saved.")


def test_a_backbone_without_a_head(tmp_path: Path) -> None:
    source, target = net(), net()
    path = saved(tmp_path / "w.safetensors", source, drop=("3.weight", "3.bias"))
    assert pretrained.load_weights(target, path) == ["3.weight", "3.bias"]
    assert torch.equal(source[0].weight, target[0].weight)


def test_heads_that_timm_names(tmp_path: Path) -> None:
    """A distilled transformer has two, and neither need be the last module."""
    source, target = (
        nn.ModuleDict({"head": nn.Linear(2, n), "fc": nn.Linear(2, n), "norm": nn.Linear(2, 2)}) for n in (5, 3)
    )
    target.pretrained_cfg = {"classifier": ("head", "fc")}  # type: ignore[assignment]
    path = saved(tmp_path / "w.safetensors", source)  # type: ignore[arg-type]
    assert pretrained.load_weights(target, path) == ["head.weight", "head.bias", "fc.weight", "fc.bias"]
    assert torch.equal(target["norm"].weight, source["norm"].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(("theirs", "ours"), [(3, 1), (1, 3)])
def test_weights_for_images_of_other_channels(theirs: int, ours: int, tmp_path: Path) -> None:
    source, target = (nn.Sequential(nn.Conv2d(n, 4, 1), nn.Flatten(), nn.Linear(4, 2)) for n in (theirs, ours))
    with pytest.raises(UsageError, match=rf"channels?: set data\.channels={theirs}\.$"):
        pretrained.load_weights(target, saved(tmp_path / "w.safetensors", source))


def test_tensors_that_cannot_be_copied_are_named(tmp_path: Path) -> None:
    state = net().state_dict()
    torch.save(
        state | {"3.weight": state["3.weight"].to_sparse(), "0.bias": torch.ones(3, device="meta")}, tmp_path / "w.pth"
    )
    with pytest.raises(
        UsageError, match=r"of another kind: 0\.bias \(torch.float32 without data .* sparse_coo in the file"
    ):
        pretrained.load_weights(net(), tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"optimizer": {"lr": 1}, "epoch": 3},
            "no weights that Headway knows: its keys are 'optimizer', 'epoch'. Save",
        ),
        ({}, "its keys are none"),
        ([torch.ones(1)], "the file holds a list, no tensors by their names"),
        ({3: torch.ones(1)}, "its keys are '3'"),
    ],
)
def test_a_file_of_torch_save_without_weights(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UsageError) as caught:
        pretrained.load_weights(net(), tmp_path / "w.pth")
    assert message in str(caught.value)
    assert "torch.save(model.state_dict(), 'weights.pth')" in str(caught.value)


def test_archives_that_torch_save_did_not_write(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(net().state_dict(), path)
    whole = path.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"a damaged file of torch\.save"):
            pretrained.load_weights(net(), path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", bytes(1 << 20))
    with pytest.raises(UsageError, match=r"a compressed zip archive, which torch\.save does not write"):
        pretrained.load_weights(net(), path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_program_is_no_file_of_weights(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"this is a TorchScript program.*torch\.jit\.load\(FILE\)\.state_dict\(\)"):
        pretrained.load_weights(net(), tmp_path / "w.pt")


def test_the_folder_of_a_run_names_its_weights(tmp_path: Path) -> None:
    saved(tmp_path / "weights.safetensors", net())
    with pytest.raises(UsageError, match=r"It is the folder of a run: name .*/weights\.safetensors\.$"):
        pretrained.load_weights(net(), tmp_path)


@pytest.mark.parametrize("content", [b"", b"no weights", b"\xff" * 64])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"no safetensors file and none of torch\.save, or a damaged one"):
        pretrained.load_weights(net(), path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", net())
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match=r"no safetensors file and none of torch\.save, or a damaged one"):
        pretrained.load_weights(net(), path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(UsageError, match="the weights cannot be read"):
            pretrained.load_weights(net(), path)


def test_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match="the weights cannot be read: it is a named pipe"):
        pretrained.load_weights(net(), path)
