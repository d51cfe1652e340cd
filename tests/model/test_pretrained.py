from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

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
def test_a_pickle_is_never_opened(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(Rogue(), path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UsageError, match=r"Headway unpickles nothing.*safetensors\.torch\.save_file\(torch\.load"):
        pretrained.load_weights(net(), path)


@pytest.mark.parametrize("content", [b"", b"no weights", b"\xff" * 64])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no safetensors file, or a damaged one"):
        pretrained.load_weights(net(), path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", net())
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match="no safetensors file, or a damaged one"):
        pretrained.load_weights(net(), path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(UsageError, match="the weights cannot be read"):
            pretrained.load_weights(net(), path)


def test_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match="the weights cannot be read: it is a named pipe"):
        pretrained.load_weights(net(), path)
