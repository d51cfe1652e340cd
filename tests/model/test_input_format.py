"""InputFormat: kept in the metadata of a file of weights, read from timm's configuration, and never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from headway.model.input_format import InputFormat, format_metadata, read_input_format, read_timm_config

NUMBERS = st.floats(0.5, 255)
TENSORS = {"a": torch.ones(1)}
GOOD: dict[str, Any] = {"mean": [1.0, 2.0, 3.0], "std": [4.0, 5.0, 6.0], "size": [7, 8], "share": 0.5}


@given(
    st.sampled_from([1, 3]).flatmap(
        lambda n: st.builds(
            InputFormat,
            origin=st.just("w"),
            mean=st.tuples(*[NUMBERS] * n),
            std=st.tuples(*[NUMBERS] * n),
            size=st.none() | st.tuples(st.integers(1, 512), st.integers(1, 512)),
            share=st.none() | st.floats(0.1, 1),
        )
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, found: InputFormat) -> None:
    path = tmp_path_factory.mktemp("w") / "w.safetensors"
    save_file(TENSORS, path, format_metadata(found))
    assert read_input_format(path, "w") == found


def written(folder: Path, entry: Any) -> Path:
    save_file(TENSORS, folder / "w.safetensors", {"headway": entry if isinstance(entry, str) else json.dumps(entry)})
    return folder / "w.safetensors"


@pytest.mark.parametrize(
    "entry",
    [
        "no JSON",
        [1],
        GOOD | {"mean": [1.0, 2.0]},
        GOOD | {"mean": "abc", "std": "abc"},
        GOOD | {"std": [0.0, 1.0, 1.0]},
        GOOD | {"std": [True, True, True]},
        GOOD | {"mean": [1e9, 0.0, 0.0]},
        GOOD | {"mean": [1.0] * 4, "std": [1.0] * 4},
        {"mean": [1.0]},
    ],
)
def test_metadata_that_cannot_be_used_count_as_none(entry: Any, tmp_path: Path) -> None:
    assert read_input_format(written(tmp_path, GOOD), "w") is not None
    assert read_input_format(written(tmp_path, entry), "w") is None


def test_a_size_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    for more in ({"size": [0, 8]}, {"size": 8}, {"size": [7.5, 8]}, {"share": 2}, {"share": "all"}):
        found = read_input_format(written(tmp_path, GOOD | more), "w")
        assert found is not None
        assert (found.size is None) is ("size" in more)
        assert (found.share is None) is ("share" in more)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\xff" * 64, (9).to_bytes(8, "little") + b"[1, 2, 3]"])
def test_other_files_have_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    assert read_input_format(tmp_path / "w.pth", "w") is None
    assert read_input_format(tmp_path / "absent.pth", "w") is None
    assert read_input_format(tmp_path, "w") is None


def test_a_file_of_the_hub_with_its_configuration(tmp_path: Path) -> None:
    """As timm's repositories lie on the Hugging Face Hub."""
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    config = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "input_size": [3, 224, 192], "crop_pct": 0.9}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit", "pretrained_cfg": config}))
    found = read_input_format(tmp_path / "pytorch_model.bin", "w")
    assert found == InputFormat(
        origin=str(tmp_path / "config.json"), mean=(127.5,) * 3, std=(63.75,) * 3, size=(224, 192), share=0.9
    )
    for text in ("{}", '{"pretrained_cfg": 3}', "[", '{"pretrained_cfg": {"mean": 0.5, "std": 0.5}}'):
        (tmp_path / "config.json").write_text(text)
        assert read_input_format(tmp_path / "pytorch_model.bin", "w") is None


def test_levels_are_those_of_bytes() -> None:
    found = read_timm_config({"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, "timm")
    assert found is not None
    assert (found.mean, found.std) == ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
    assert (found.size, found.share, found.channels) == (None, None, 3)


def test_one_key_of_metadata(tmp_path: Path) -> None:
    """With several, safetensors would write them in another order each time, and runs would differ in their bytes."""
    save_file(TENSORS, tmp_path / "w", format_metadata(InputFormat(origin="", mean=(1.0,), std=(1.0,))))
    with safe_open(tmp_path / "w", "pt") as file:
        assert list(file.metadata()) == ["headway"]
