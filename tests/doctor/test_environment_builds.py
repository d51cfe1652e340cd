"""Which builds for inference a processor would use: small trees of the kernel's files, made-up installations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.core.profile import EnvironmentFinding
from headway.doctor.environment import examine_environment
from headway.doctor.environment_builds import check_builds, find_version, list_providers
from headway.doctor.environment_host import HostFiles
from headway.setup.recipe import TrainRecipe

X86 = "fpu sse2 avx2 fma"


def check(
    folder: Path,
    flags: str = X86,
    installed: dict[str, str] | None = None,
    providers: tuple[str, ...] = ("CPU",),
    *,
    gpu: bool = False,
    environ: dict[str, str] | None = None,
) -> list[str]:
    """What is told of a processor with these flags, with these packages."""
    (folder / "proc").mkdir(exist_ok=True)
    (folder / "proc/cpuinfo").write_text(f"flags\t\t: {flags}\n" if flags else "")
    host = HostFiles(folder, environ or {})
    have = installed or {}
    found = list(check_builds(host, has_nvidia_gpu=gpu, find=have.get, providers=lambda: providers))
    # A network trains without them: nothing of it is a fault.
    assert all(isinstance(one, EnvironmentFinding) and not one.cure and one.what.endswith(".") for one in found)
    return [one.what for one in found]


def only(lines: list[str], part: str) -> str:
    (line,) = [line for line in lines if part in line]
    return line


@pytest.mark.parametrize(
    ("flags", "units", "int8"),
    [
        (X86, "AVX2", False),
        (f"{X86} avx512f", "AVX-512, AVX2", False),
        (f"{X86} avx512f avx512_vnni", "AVX-512, AVX2, VNNI", True),
        (f"{X86} avx_vnni", "AVX2, VNNI", True),
        (f"{X86} avx512f avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "AMX, AVX-512, AVX2, VNNI, bf16", True),
        ("fp asimd asimddp sve", "SVE, NEON, int8 dot products", True),
        ("sse2", None, False),
    ],
)
def test_the_units_of_the_processor_are_named(tmp_path: Path, flags: str, units: str | None, int8: bool) -> None:
    line = only(check(tmp_path, flags), "The processor has")
    assert (f"has {units}:" in line) if units else "no vector units" in line
    assert ("uses its int8 units" in line) == int8
    assert ("gains little" in line) != int8


def test_a_processor_that_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    assert not [line for line in check(tmp_path, "") if "The processor has" in line]


def test_what_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    found = check(tmp_path, environ={"PATH": ""})
    assert "pip install 'headway[export]'" in only(found, "ONNX Runtime")
    assert "pip install 'headway[openvino]'" in only(found, "OpenVINO")
    assert only(found, "TensorRT") == "Inference: TensorRT needs an NVIDIA GPU."
    assert "g++" in only(found, "no C++ compiler")


def test_what_is_installed_has_its_version(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/g++").write_text("#!/bin/sh\n")
    (tmp_path / "bin/g++").chmod(0o755)
    have = {"onnxruntime": "1.20.0", "openvino": "2025.1"}
    found = check(tmp_path, installed=have, environ={"PATH": str(tmp_path / "bin")})
    assert only(found, "ONNX Runtime") == "Inference: ONNX Runtime 1.20.0 (onnxruntime), providers: CPU."
    assert only(found, "OpenVINO") == "Inference: OpenVINO 2025.1, which computes in f32."
    assert only(found, "build with") == "torch.compile and --to aoti would build with g++."
    assert "none that can be loaded" in only(check(tmp_path, installed=have, providers=()), "ONNX Runtime")


@pytest.mark.parametrize("flag", ["amx_bf16", "avx512_bf16"])
def test_openvino_says_that_it_would_choose_bf16(tmp_path: Path, flag: str) -> None:
    line = only(check(tmp_path, f"{X86} {flag}", {"openvino": "2025.1"}), "OpenVINO")
    assert line == "Inference: OpenVINO 2025.1, which computes in bf16 by itself here; exports ask for f32."


def test_two_runtimes_in_one_place_are_told(tmp_path: Path) -> None:
    line = only(check(tmp_path, installed={"onnxruntime": "1.20", "onnxruntime-gpu": "1.20"}), "overwrite")
    assert line.startswith("onnxruntime and onnxruntime-gpu are installed together")


@pytest.mark.parametrize(
    ("installed", "providers", "told"),
    [
        ({}, (), "(pip install onnxruntime-gpu tensorrt)"),
        ({"onnxruntime": "1.20"}, ("CPU",), "(pip uninstall onnxruntime; pip install onnxruntime-gpu tensorrt)"),
        ({"onnxruntime-gpu": "1.20"}, ("CUDA", "CPU"), "TensorRT is not installed (pip install tensorrt)"),
        ({"onnxruntime-gpu": "1.20", "tensorrt": "10"}, ("TensorRT", "CPU"), "TensorRT 10, which ONNX Runtime loads"),
        (
            {"onnxruntime-gpu": "1.20", "tensorrt": "10"},
            ("CUDA", "CPU"),
            "TensorRT 10, which ONNX Runtime does not load",
        ),
    ],
)
def test_a_gpu_has_builds_of_its_own(
    tmp_path: Path, installed: dict[str, str], providers: tuple[str, ...], told: str
) -> None:
    assert any(told in line for line in check(tmp_path, installed=installed, providers=providers, gpu=True))


def test_this_machine_is_told_of() -> None:
    recipe = TrainRecipe.model_validate(
        {
            "data": "synthetic",
            "model": {"factory": "net.py:linear"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "batch": 8,
            "epochs": 1,
            "precision": "fp32",
        }
    )
    told = [one.what for one in examine_environment(recipe, torch.device("cpu"), None)]
    assert find_version("no-such-package-of-ours") is None
    if (version := find_version("onnxruntime")) is not None:
        assert "CPU" in list_providers()
        assert f"ONNX Runtime {version} (onnxruntime), providers: " in only(told, "Inference: ONNX Runtime")
    assert only(told, "TensorRT")
