"""Checks which builds for inference this processor would use, and which of them are installed.

A missing one is a fact and no fault: a run trains without it.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Callable, Sequence

from headway.core.text_format import pluralise
from headway.doctor.environment_host import Findings, HostFiles, report_fine

VNNI = frozenset({"avx512_vnni", "avx_vnni"})
"""Flags of x86 processors that add products of int8 in 32 bits. Without them, U8 x S8 saturates in 16 bits."""

# Names of the units as people know them, and the kernel's flags that tell them, best first: x86, then ARM.
UNITS: tuple[tuple[str, frozenset[str]], ...] = (
    ("AMX", frozenset({"amx_tile"})),
    ("AVX-512", frozenset({"avx512f"})),
    ("AVX2", frozenset({"avx2"})),
    ("SVE", frozenset({"sve"})),
    ("NEON", frozenset({"asimd"})),
    ("VNNI", VNNI),
    ("int8 dot products", frozenset({"asimddp", "i8mm"})),
    ("bf16", frozenset({"amx_bf16", "avx512_bf16", "bf16"})),
)
INT8 = VNNI | {"amx_int8", "asimddp", "i8mm"}
# OpenVINO itself computes in bf16 where it finds these, unless f32 is asked for.
OPENVINO_BF16 = {"amx_bf16", "avx512_bf16"}
# The distributions that contain the module onnxruntime, and the ending of a provider's name.
RUNTIMES, PROVIDER = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"), "ExecutionProvider"
COMPILERS = ("g++", "clang++", "c++")


def find_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def list_providers() -> list[str]:
    """Returns the execution providers of the installed ONNX Runtime, such as `CPU` or `TensorRT`."""
    try:
        import onnxruntime
    # A broken installation raises anything from ImportError to OSError.
    except Exception:
        return []
    # Azure's sends the images to a server: it is no engine of this machine.
    names = (name.removesuffix(PROVIDER) for name in onnxruntime.get_available_providers())
    return [re.sub("^Tensorrt$", "TensorRT", name) for name in names if name != "Azure"]


def find_compiler(path: str | None = None) -> str | None:
    """Returns the name of the C++ compiler that torch would find, or None. Args: path: folders instead of PATH."""
    return next((name for name in COMPILERS if shutil.which(name, path=path)), None)


def check_builds(
    host: HostFiles,
    *,
    has_nvidia_gpu: bool,
    find: Callable[[str], str | None] = find_version,
    providers: Callable[[], Sequence[str]] = list_providers,
) -> Findings:
    """Reports the units of the processor, and the engines for exported networks: installed ones, and how to get others.

    Args:
        has_nvidia_gpu: whether the machine has an NVIDIA GPU, for which there are other builds.
        find: returns the version of an installed distribution, or None.
        providers: returns the execution providers of ONNX Runtime.
    """
    if host.flags:
        units = [name for name, flags in UNITS if host.flags & flags]
        has = f"The processor has {', '.join(units)}" if units else "The processor has no vector units that are known"
        gain = "int8 inference uses its int8 units"
        if not host.flags & INT8:
            gain = "int8 inference gains little, as it has no int8 units (VNNI)"
        yield report_fine(f"{has}: {gain}.")
    runtimes = [(name, version) for name in RUNTIMES if (version := find(name)) is not None]
    if len(runtimes) > 1:
        # They overwrite each other's files: which one is imported is the order of installation.
        names = " and ".join(name for name, _ in runtimes)
        what = f"{names} are installed together and overwrite each other's files"
        yield report_fine(f"{what}: uninstall {pluralise(len(runtimes), 'package')} and install one.")
    elif runtimes:
        (name, version), here = runtimes[0], list(providers())
        engines = ", ".join(here) or "none that can be loaded"
        yield report_fine(f"Inference: ONNX Runtime {version} ({name}), providers: {engines}.")
    else:
        yield report_fine("Inference: ONNX Runtime is not installed (pip install 'headway[export]').")
    version = find("openvino")
    if version is None:
        yield report_fine("Inference: OpenVINO is not installed (pip install 'headway[openvino]').")
    else:
        chooses = "bf16 by itself here; exports ask for f32" if host.flags & OPENVINO_BF16 else "f32"
        yield report_fine(f"Inference: OpenVINO {version}, which computes in {chooses}.")
    yield from _check_gpu_engine(has_nvidia_gpu, {name for name, _ in runtimes}, find, providers)
    compiler = find_compiler(host.environ.get("PATH"))
    if compiler is None:
        yield report_fine("There is no C++ compiler: torch.compile and --to aoti need one (on Debian: g++).")
    else:
        yield report_fine(f"torch.compile and --to aoti would build with {compiler}.")


def _check_gpu_engine(
    has_nvidia_gpu: bool,
    runtimes: set[str],
    find: Callable[[str], str | None],
    providers: Callable[[], Sequence[str]],
) -> Findings:
    """Reports TensorRT, which ONNX Runtime's GPU build drives."""
    if not has_nvidia_gpu:
        yield report_fine("Inference: TensorRT needs an NVIDIA GPU.")
    elif "onnxruntime-gpu" not in runtimes:
        others = f"pip uninstall {' '.join(sorted(runtimes))}; " if runtimes else ""
        what = "Inference: this GPU needs another build of ONNX Runtime for CUDA and TensorRT"
        yield report_fine(f"{what} ({others}pip install onnxruntime-gpu tensorrt).")
    elif (version := find("tensorrt")) is None:
        yield report_fine("Inference: TensorRT is not installed (pip install tensorrt).")
    else:
        loads = "loads" if "TensorRT" in providers() else "does not load"
        yield report_fine(f"Inference: TensorRT {version}, which ONNX Runtime {loads}.")
