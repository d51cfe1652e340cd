"""The real data, what a marker needs, and a police: a test that leaves something behind fails by name."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from tests import _cost, _fork

ROOT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI") == "true"
GRACE_S = 30.0
"""For what ends by itself, late on a busy machine; a leak alone takes as long."""
PEERS_PYTHON = Path(os.environ.get("HEADWAY_PEERS_PYTHON") or ROOT / ".venv-peers/bin/python")

# How long an example takes on a busy machine tells nothing of the code; hypothesis fails it after 200 ms elsewhere than
# in CI. The examples are the same in every run, few in `make test` and many in `make check`, so that a change is judged
# by itself; `--hypothesis-profile=explore` tries others each time.
QUICK_EXAMPLES = 10
settings.register_profile("headway", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("quick", settings.get_profile("headway"), max_examples=QUICK_EXAMPLES)
settings.register_profile("explore", deadline=None)
settings.load_profile("headway")

# torch.compile would otherwise keep worker threads for the life of the process; children of the tests inherit it.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# Next to nothing of what pytest collects and imports is garbage; to look for it takes two seconds.
gc.disable()

# What a killed child leaves running becomes our child, so that the police sees it.
ctypes.CDLL(None).prctl(_fork.PR_SET_CHILD_SUBREAPER, 1)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_cost, "cost")
    # Not in the process that starts the workers of pytest-xdist: these are new interpreters.
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        _fork.install()


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


def _thin_out(cases: list[pytest.Function], most: int) -> None:
    """Marks cases `check` but for so many that each value of each argument still occurs, or for so many at most."""
    values = [set(case.callspec.indices.items()) for case in cases]
    missing, kept = set().union(*values), set[int]()
    while missing and len(kept) < most:
        best = max(range(len(cases)), key=lambda number: len(values[number] & missing))
        kept.add(best)
        missing -= values[best]
    for number, case in enumerate(cases):
        if number not in kept:
            case.add_marker(pytest.mark.check)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """In a fresh clone one process compiles the tests for all: 15 seconds of each process that reads what it wrote."""
    last = ROOT / "tests/watch/__pycache__"
    if sys.dont_write_bytecode or not last.parent.is_dir() or any(last.glob("*-pytest-*.pyc")):
        return (yield)
    last.mkdir(exist_ok=True)
    with open(last / "collection.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin: defaultdict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thin"):
            thin[item.path, item.originalname].append(item)
    for cases in thin.values():
        marker = cases[0].get_closest_marker("thin")
        _thin_out(cases, *(marker.args if marker and marker.args else (len(cases),)))
    if config.getoption("--hypothesis-profile") != "quick":
        return
    # In a twentieth of its draws Hypothesis takes a constant of our code, and parses 980 files for them: for so few
    # examples not worth 2 to 8 seconds of each process.
    providers._get_local_constants = lambda: providers._local_constants  # type: ignore[attr-defined]
    for item in items:
        # A test that states its own number of examples means the long run.
        test = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > QUICK_EXAMPLES:
            test._hypothesis_internal_use_settings = settings(own, max_examples=QUICK_EXAMPLES)


def pytest_collection_finish() -> None:
    # The 40 loggers of torch do not propagate, and pytest would give each of them two handlers, three times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    # What was collected stays: without it, each full collection to come takes half a second less.
    gc.enable()
    gc.collect()
    gc.freeze()


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
FOREIGN_VARIABLES = (b"PYTEST_CURRENT_TEST", b"TORCHINDUCTOR_", b"_TORCHINDUCTOR_", b"TRITON_", b"KMP_")
FOREIGN_THREADS = ("pytest_timeout", "tqdm_monitor")
FOREIGN_PROCESSES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")

Setting = tuple[Any, Callable[[Any], Any]]


def _environment() -> dict[bytes, bytes]:
    # The bytes below os.environ, which decodes each anew: for all tests together that takes four seconds.
    return {name: value for name, value in vars(os.environ)["_data"].items() if not name.startswith(FOREIGN_VARIABLES)}


def _children(of: int | str = "self") -> set[int]:
    """Process ids of all that this process has started, and what these have, but not what belongs to the house."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{of}/task"):
            with open(f"/proc/{of}/task/{task}/children") as file:
                found.update(map(int, file.read().split()))
    found.discard(_fork.server_pid() or 0)
    for child in tuple(found):
        found |= _children(child)
    return found


def _command_of(child: int) -> bytes:
    """Its arguments; nothing of one that has ended.

    One that is just being started has no arguments for a moment, though Popen has returned: then its name counts.
    """
    with contextlib.suppress(OSError), open(f"/proc/{child}/stat", "rb") as stat:
        name, _, rest = stat.read().partition(b"(")[2].rpartition(b")")
        with open(f"/proc/{child}/cmdline", "rb") as file:
            arguments = file.read().rstrip(b"\0").replace(b"\0", b" ")
        return b"" if rest.split()[0] in (b"Z", b"X") else arguments or name
    return b""


def _left(before: set[int], deadline: float) -> dict[int, bytes]:
    """Children that are still there at the deadline, with their arguments; those that have ended are taken leave of."""
    while True:
        running = {}
        for child in _children() - before:
            with contextlib.suppress(OSError):  # a grandchild, which another has to wait for
                os.waitpid(child, os.WNOHANG)
            command = _command_of(child)
            if command and not any(name in command for name in FOREIGN_PROCESSES):
                running[child] = command
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.01)


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


def _changes(before: dict[bytes, bytes], after: dict[bytes, bytes]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            was, now = (os.fsdecode(found[name]) if name in found else None for found in (before, after))
            yield f"environment variable {os.fsdecode(name)}: was {was!r}, is {now!r}"


@pytest.fixture(autouse=True)
def police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a child, a process group or a changed setting; mends it for the next one."""
    threads, children, environment, folder = _threads(), _children(), _environment(), os.getcwd()
    settings, group_was_up = _torch_settings(), _process_group_is_up()
    with _fork.fresh() if request.node.get_closest_marker("fresh") else contextlib.nullcontext():
        yield
    leaks = list(_changes(environment, _environment()))
    if leaks:
        for name in _environment().keys() - environment.keys():
            del os.environb[name]
        os.environb.update(environment)
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
    # A dummy is a thread of C++, here of CUDA graphs, that once ran Python: it cannot be joined.
    for thread in (one for one in _threads() - threads if not isinstance(one, threading._DummyThread)):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            leaks.append(f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''} is still alive")
    for child, command in _left(children, deadline).items():
        leaks.append(f"child process {child} is still alive: {os.fsdecode(command)}")
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if leaks:
        pytest.fail("this test left behind:\n" + "\n".join(f"  - {leak}" for leak in leaks), pytrace=False)
