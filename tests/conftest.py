"""The real data, what a marker needs, and a police: a test that leaves something behind fails by name."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI") == "true"
GRACE_S = 15.0
"""For what ends by itself, late on a busy machine; a leak alone takes as long."""
PEERS_PYTHON = Path(os.environ.get("HEADWAY_PEERS_PYTHON") or ROOT / ".venv-peers/bin/python")

# How long an example takes on a busy machine tells nothing of the code; hypothesis fails it after 200 ms elsewhere than
# in CI.
settings.register_profile("headway", deadline=None)
settings.load_profile("headway")

# torch.compile would otherwise keep worker threads for the life of the process; children of the tests inherit it.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# PR_SET_CHILD_SUBREAPER: what a killed child leaves running becomes our child, so that the police sees it.
ctypes.CDLL(None).prctl(36, 1)


def absent(reason: str, *, may_be: bool = False) -> NoReturn:
    """Skips with the reason; in CI, where everything that can be installed is, fails with it."""
    if IN_CI and not may_be:
        pytest.fail(f"{reason} (in CI it has to be there)", pytrace=False)
    pytest.skip(reason)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (_cuda, "no CUDA device here"),
    "root": (lambda: os.geteuid() == 0, "needs to run as root"),
    "browser": (lambda: shutil.which("chromium") is not None, "no chromium on the PATH"),
    "peers": (PEERS_PYTHON.exists, f"no peers at {PEERS_PYTHON}: `make peers` installs them"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (present, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not present():
            absent(reason, may_be=marker == "gpu")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the real data: cifar10/{train,test}/CLASS/NNNN.jpg and imagenet-250/NAME.JPEG."""
    source = Path(os.environ.get("HEADWAY_TEST_DATA") or ROOT.parent / "shared/data")
    if (source / "cifar10").is_dir():
        return source
    if not (source / "unpack").is_file():
        absent(f"no real data in {source}: set HEADWAY_TEST_DATA to the folder that has it")
    dest = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data")
    subprocess.run([source / "unpack", dest], check=True)  # returns at once where it was done before
    return dest


# What third parties set for the life of the process, on import or at first use; pytest itself sets the first.
FOREIGN_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_")
FOREIGN_THREADS = ("pytest_timeout", "tqdm_monitor")
FOREIGN_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

Setting = tuple[Any, Callable[[Any], Any]]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)}


def _children() -> set[psutil.Process]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            foreign = any(name in " ".join(child.cmdline()) for name in FOREIGN_PROCESSES)
        except psutil.Error:  # it ended, or ended and awaits its parent
            continue
        if not foreign:
            found.add(child)
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(FOREIGN_THREADS)}


def _torch_settings() -> dict[str, Setting]:
    """The settings of torch that hold for the whole process, each with what puts it back; empty where not imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    cudnn = torch.backends.cudnn
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return {
        "default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "default device": (torch.get_default_device(), torch.set_default_device),
        "number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "grad mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "float32 matmul precision": (torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision),
        "deterministic algorithms (on, warn only)": (
            deterministic,
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "cudnn.benchmark": (cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value)),
        "cudnn.deterministic": (cudnn.deterministic, lambda value: setattr(cudnn, "deterministic", value)),
    }


def _process_group_is_up() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _changes(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"environment variable {name}: was {before.get(name)!r}, is {after.get(name)!r}"


@pytest.fixture(autouse=True)
def police() -> Iterator[None]:
    """Fails a test that leaves a thread, a child, a process group or a changed setting; mends it for the next one."""
    threads, children, environment, folder = _threads(), _children(), _environment(), os.getcwd()
    settings, group_was_up = _torch_settings(), _process_group_is_up()
    yield
    leaks = list(_changes(environment, _environment()))
    if leaks:
        for name in _environment().keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    if os.getcwd() != folder:
        leaks.append(f"working directory: was {folder}, is {os.getcwd()}")
        os.chdir(folder)
    if _process_group_is_up() and not group_was_up:
        leaks.append("a torch.distributed process group is still up")
        sys.modules["torch.distributed"].destroy_process_group()
    now = _torch_settings()
    for name, (value, put_back) in settings.items():
        if now[name][0] != value:
            leaks.append(f"torch's {name}: was {value}, is {now[name][0]}")
            put_back(value)
    deadline = time.monotonic() + GRACE_S
    for thread in _threads() - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            leaks.append(f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''} is still alive")
    _, left = psutil.wait_procs(_children() - children, timeout=max(0.0, deadline - time.monotonic()))
    for child in left:
        try:
            leaks.append(f"child process {child.pid} is still alive: {' '.join(child.cmdline())}")
            child.kill()
        except psutil.NoSuchProcess:
            continue
    if leaks:
        pytest.fail("this test left behind:\n" + "\n".join(f"  - {leak}" for leak in leaks), pytrace=False)
