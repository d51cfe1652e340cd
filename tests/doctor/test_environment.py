"""What the environment has to say of itself, read from small trees of the kernel's files, with eight CPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data._packs import folder

from headway.data import native, opening
from headway.data.dataset import Dataset
from headway.data.pack import pack
from headway.doctor.environment import examine_environment
from headway.setup.recipe import TrainRecipe

CPUS = 8
CPU = torch.device("cpu")
Examine = Callable[..., dict[str, str]]

AVX2 = "fpu sse2 avx avx2 fma bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
WELL = {
    "proc/cpuinfo": f"processor\t: 0\nflags\t\t: {AVX2}\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": (
        "21 1 254:0 / / rw - ext4 /dev/root rw\n22 21 0:22 / /dev/shm rw - tmpfs tmpfs rw,size=24684084k\n"
    ),
    "sys/devices/system/cpu/online": "0-7\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
}
"""A machine on which nothing is to be mended."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eight CPUs, as many threads of torch, one rank."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(CPUS)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(CPUS)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def examined(tmp_path: Path) -> Examine:
    """Examines a tree of files: what was found -> its cure."""

    def of(
        files: dict[str, str] | None = None,
        data: Dataset | None = None,
        *,
        environ: dict[str, str] | None = None,
        interface: str | None = None,
        without: tuple[str, ...] = (),
        **recipe: Any,
    ) -> dict[str, str]:
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        for name, text in {**WELL, **(files or {})}.items():
            if name not in without:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
        tree = TrainRecipe.model_validate(given_of(data, **recipe))
        found = examine_environment(tree, CPU, data, interface, root=root, environ=environ or {})
        assert all(one.what.endswith(".") and one.cure[-1:] in ("", ".") for one in found)
        assert len({one.what for one in found}) == len(found)
        return {one.what: one.cure for one in found}

    return of


def given_of(data: Dataset | None, **changes: Any) -> dict[str, Any]:
    """A recipe as a file would have it. Changes: `data_options` are of its data."""
    options = changes.pop("data_options", {})
    given: dict[str, Any] = {
        "data": "synthetic" if data is None else {"train": str(data.folder), **options},
        "model": {"factory": "net.py:linear"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": 8,
        "epochs": 1,
        "precision": "fp32",
    }
    return given | changes


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Dataset]:
    """60 small JPEGs in shards."""
    folder(tmp_path / "images", {"cat": 30, "dog": 30})
    pack(tmp_path / "images", tmp_path / "pack")
    with closing(opening.open(tmp_path / "pack")) as opened:
        yield opened


def only(found: dict[str, str], part: str) -> tuple[str, str]:
    """What was found that has this in it, and its cure."""
    matches = [(what, cure) for what, cure in found.items() if part in what]
    assert len(matches) == 1, (part, found)
    return matches[0]


def faults(found: dict[str, str]) -> list[str]:
    """What has a cure, but for a GPU of this machine that the test's recipe does not use."""
    return [what for what, cure in found.items() if cure and "A GPU is there" not in what]


def test_where_all_is_well_nothing_has_a_cure(examined: Examine, data: Dataset) -> None:
    found = examined(data=data)
    assert faults(found) == []
    assert torch.cuda.is_available() or "There is no GPU: the CPU trains." in found
    assert "This process may run on all 8 CPUs of the machine." in found
    assert "torch uses 8 threads of 8 cores." in found
    assert "The CPU governor is performance." in found
    assert "/dev/shm is large enough." in found
    only(found, "The data are on ext4 (")


def test_what_cannot_be_read_is_told_as_unknown_and_not_guessed(examined: Examine, data: Dataset) -> None:
    found = examined(data=data, without=tuple(WELL))
    what, cure = only(found, "Not known here: ")
    for part in ("instructions", "how many CPUs", "governor", "NUMA", "/dev/shm", "file system of the data", "SIMD"):
        assert part in what
    assert cure == ""
    assert not any("GPU" in what or "network" in what or "quota" in what for what in faults(found))
    assert not any("Not known" in what for what in examined(data=None))


def test_a_real_machine_is_examined(data: Dataset) -> None:
    found = examine_environment(TrainRecipe.model_validate(given_of(data)), CPU, data)
    assert len(found) > 5
    assert all(one.what.endswith(".") for one in found)


@pytest.mark.skipif(torch.version.cuda is not None, reason="of a torch without CUDA")
def test_a_gpu_that_torch_is_not_built_for_is_told(examined: Examine) -> None:
    driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build\n"
    for files in ({"proc/driver/nvidia/version": driver}, {"dev/nvidia0": ""}):
        what, cure = only(examined(files, without=()), "NVIDIA GPU")
        assert "is built without CUDA" in what
        assert "CUDA build of torch" in cure


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="of a torch for CPUs")
def test_an_amd_gpu_is_told(examined: Examine) -> None:
    assert "ROCm" in only(examined({"dev/kfd": ""}), "AMD GPU")[1]


def test_variables_that_take_instructions_away_are_told(examined: Examine) -> None:
    what, cure = only(
        examined(environ={"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}), "keeps torch from"
    )
    assert "ATEN_CPU_CAPABILITY=default, ONEDNN_MAX_CPU_ISA=SSE41" in what
    assert cure == "Unset ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA."


@pytest.mark.parametrize(
    ("flags", "precision", "emulated", "units"),
    [
        (AVX512, "bf16", True, "has no"),
        (f"{AVX512} avx512_bf16", "bf16", False, "has"),
        (f"{AVX512} amx_bf16", "fp32", False, "has"),
        (AVX2, "auto", False, "has no"),
    ],
)
def test_units_for_bf16_are_told(
    flags: str, precision: str, emulated: bool, units: str, examined: Examine, tmp_path: Path
) -> None:
    have = torch.backends.cpu.get_cpu_capability()
    if have != "AVX512" and flags != AVX2:
        pytest.skip("torch computes with less here")
    found = examined({"proc/cpuinfo": f"flags : {flags}\n"}, precision=precision)
    assert any("it is emulated" in what for what in faults(found)) == emulated
    assert emulated or only(found, "torch computes with ")[0].endswith(f"the CPU {units} bf16 units.")


PROGRAM = """
import json, os, sys, torch
from pathlib import Path
from headway.data import opening
from headway.doctor.environment import examine_environment
from headway.setup.recipe import TrainRecipe
recipe = TrainRecipe.model_validate(json.loads(sys.argv[2]))
environ = {} if sys.argv[3] == "hidden" else os.environ
data, root = opening.open(sys.argv[1]), Path(sys.argv[4])
found = examine_environment(recipe, torch.device("cpu"), data, root=root, environ=environ)
print(json.dumps({one.what: one.cure for one in found}))
"""


def in_process(data: Dataset, root: Path, shown: str, **environ: str) -> dict[str, str]:
    """What an examination in a process of its own, with these variables, finds."""
    command = [sys.executable, "-c", PROGRAM, str(data.folder), json.dumps(given_of(data)), shown, str(root)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environ})
    return dict(json.loads(told.stdout))


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="of x86 with AVX2")
def test_a_torch_that_computes_with_less_than_the_processor_has_is_told(data: Dataset, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags : {AVX2}\n")
    found = in_process(data, tmp_path, "hidden", ATEN_CPU_CAPABILITY="default")
    assert (
        only(found, "The CPU has AVX2, but this build of torch computes with ")[1] == "Install torch's official wheel."
    )


def test_without_the_native_core_pillow_decodes(data: Dataset, tmp_path: Path) -> None:
    found = in_process(data, tmp_path, "shown", HEADWAY_NATIVE="0")
    what, cure = only(found, "The native core is switched off")
    assert "Pillow decodes" in what
    assert cure == "Unset HEADWAY_NATIVE."


def test_fewer_cpus_than_the_machine_has_are_told(examined: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"sys/devices/system/cpu/online": "0-15,32-47\n"}
    what, cure = only(examined(files), "of the machine's")
    assert what == "This process may run on 8 of the machine's 32 CPUs."
    assert "taskset" in cure
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert only(examined(files), "of the machine's")[1] == ""


@pytest.mark.parametrize(
    ("files", "quota", "fault"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "400000 100000", "proc/self/cgroup": "0::/a/b\n"}, "4", False),
        ({"sys/fs/cgroup/a/cpu.max": "150000 100000", "proc/self/cgroup": "0::/a/b\n"}, "1.5", True),
        ({"sys/fs/cgroup/a/cpu.max": "1250000 100000", "proc/self/cgroup": "0::/a/b\n"}, "12.5", False),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, "0.5", True),
        (
            {
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n1:name=systemd:/\n",
            },
            "2.5",
            True,
        ),
    ],
)
def test_a_quota_that_is_no_whole_number_of_cores_is_a_fault(
    files: dict[str, str], quota: str, fault: bool, examined: Examine
) -> None:
    found = examined(files)
    cure = only(found, f"The control group's quota is {quota} cores")[1]
    assert ("--cpus=" in cure) == fault


def test_without_a_quota_none_is_told(examined: Examine) -> None:
    for files in ({}, {"sys/fs/cgroup/cpu.max": "max 100000"}, {"proc/self/cgroup": "2:cpu:/\n"}):
        assert not any("quota" in what for what in examined(files))


@pytest.mark.parametrize(("stopped", "fault"), [(0, False), (40, False), (370, True)])
def test_a_quota_that_stops_the_process_is_a_fault(stopped: int, fault: bool, examined: Examine) -> None:
    stat = f"usage_usec 5\nnr_periods 1000\nnr_throttled {stopped}\nthrottled_usec 9\n"
    files = {"sys/fs/cgroup/cpu.max": "200000 100000", "sys/fs/cgroup/cpu.stat": stat}
    torch.set_num_threads(2)
    found = faults(examined(files))
    assert found == (["The quota has throttled this control group in 37% of its periods so far."] if fault else [])


def test_threads_of_torch_are_held_against_the_cores(examined: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    what, cure = only(examined(environ={"OMP_NUM_THREADS": "1"}), "torch uses")
    assert what == "torch uses 1 thread (OMP_NUM_THREADS=1) of 8 usable cores."
    assert "OMP_NUM_THREADS=8" in cure
    siblings = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(CPUS)
    }
    torch.set_num_threads(4)  # one a core, which is what torch takes where two threads share one
    assert only(examined(siblings), "torch uses 4")[1] == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    what, cure = only(examined(), "torch uses 4")
    assert what.endswith("but this rank has 2 cores.")
    assert cure == "Set OMP_NUM_THREADS=2."


@pytest.mark.parametrize(
    ("governor", "driver", "preference", "fault"),
    [
        ("powersave", "acpi-cpufreq", "", True),
        ("powersave", "intel_pstate", "balance_performance", False),
        ("powersave", "amd-pstate-epp", "power", True),
        ("schedutil", "intel_cpufreq", "", False),
    ],
)
def test_a_processor_that_saves_power_is_told(
    governor: str, driver: str, preference: str, fault: bool, examined: Examine
) -> None:
    base = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {f"{base}/scaling_governor": governor, f"{base}/scaling_driver": driver}
    files |= {f"{base}/energy_performance_preference": preference} if preference else {}
    found = examined(files)
    cures = [found[what] for what in faults(found)]
    assert cures == (["As root: cpupower frequency-set -g performance."] if fault else [])


def test_several_numa_nodes_are_told(examined: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    two = {f"sys/devices/system/node/node{n}/cpulist": f"{4 * n}-{4 * n + 3}\n" for n in (0, 1)}
    what, cure = only(examined(two), "NUMA")
    assert "2 NUMA nodes" in what
    assert "numactl" in cure
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert only(examined(two), "NUMA")[1] == ""
    other = {"sys/devices/system/node/node0/cpulist": "0-7", "sys/devices/system/node/node1/cpulist": "8-15"}
    assert only(examined(other), "NUMA")[0] == "This process uses CPUs of one NUMA node."


def limited(limit_bytes: int) -> dict[str, str]:
    base = "sys/fs/cgroup"
    return {f"{base}/memory.max": f"{limit_bytes}", f"{base}/memory.current": "0", f"{base}/memory.stat": "anon 0\n"}


def test_a_set_that_memory_does_not_hold_is_told(examined: Examine, data: Dataset) -> None:
    bytes_ = int(data.length.sum())
    what, cure = only(examined(limited(bytes_ // 2), data, data_options={"cache": "none"}), "of memory are free")
    assert "limit of the control group" in what
    assert "later epochs also read from storage" in what
    assert "headway pack" in cure
    what, cure = only(examined(limited(100 * bytes_), data, data_options={"cache": "none"}), "of memory are free")
    assert cure == ""
    assert what.endswith("The set is read in place.")
    what, cure = only(examined(limited(bytes_ // 2), data, data_options={"cache": "memory"}), "of memory are free")
    assert cure == ""
    assert "The set is kept in memory: the decoded set of " in only(examined({}, data), "of memory are free")[0]


@pytest.mark.parametrize(
    ("options", "small"),
    [
        ("rw,size=65536k", True),
        ("rw,size=64m", True),
        ("rw,size=8g,inode64", False),
        ("rw", False),
        ("rw,size=50%", False),
    ],
)
def test_a_small_shared_memory_is_told(options: str, small: bool, examined: Examine) -> None:
    mounts = f"21 1 254:0 / / rw - overlay overlay rw\n22 21 0:22 / /dev/shm rw - tmpfs shm {options}\n"
    found = examined({"proc/self/mountinfo": mounts})
    assert only(found, "/dev/shm")[0].startswith("/dev/shm has 64 MB or less") == small
    assert only(found, "/dev/shm")[1] == ""  # there is one rank, and the loader needs none
    only(found, "This is a container")


@pytest.mark.parametrize("name", [".dockerenv", "run/.containerenv", "proc/1/cgroup"])
def test_containers_are_known(name: str, examined: Examine) -> None:
    assert not any("container" in what for what in examined())
    only(examined({name: "0::/kubepods/pod1\n"}), "This is a container")


@pytest.mark.parametrize(
    ("threads", "cores", "what"),
    [
        (9, 8, "data.threads is 9, but this rank has 8 cores."),
        (8, 8, "Decoding uses 8 threads on 8 cores, which leaves no core to the training loop."),
        (2, 1, "data.threads is 2, but this rank has 1 core."),
    ],
)
def test_more_decoding_threads_than_cores_are_told(
    threads: int, cores: int, what: str, examined: Examine, data: Dataset
) -> None:
    torch.set_num_threads(cores)
    quota = {"sys/fs/cgroup/cpu.max": f"{cores}00000 100000", "sys/fs/cgroup/cpu.stat": "nr_periods 0\n"}
    found = examined(quota, data, data_options={"threads": threads})
    assert faults(found) == [what]
    assert "data.threads" in found[what]


def test_decoding_and_loop_are_told_their_cores(examined: Examine, data: Dataset) -> None:
    assert only(examined(data=data), "7 threads of 8 cores (the other is left to training)")[1] == ""
    torch.set_num_threads(1)
    one = {"sys/fs/cgroup/cpu.max": "100000 100000", "sys/fs/cgroup/cpu.stat": "nr_periods 0\n"}
    assert "Decoding and the training loop take turns on one core." in examined(one, data, data_options={"threads": 1})


@pytest.mark.skipif(not native.is_available(), reason="the native core is not built")
def test_what_holds_the_decoder_back_is_told(examined: Examine, data: Dataset, tmp_path: Path) -> None:
    assert only(examined(data=data), "The native core decodes (")[1] == ""
    found = examined(data=data, environ={"JSIMD_FORCENONE": "1", "JSIMD_FORCEAVX2": "1", "HEADWAY_ISA": "portable"})
    told = {
        "JSIMD_FORCENONE=1 keeps the decoder from faster instructions.": "Unset JSIMD_FORCENONE.",
        "HEADWAY_ISA=portable keeps the decoder from faster instructions.": "Unset HEADWAY_ISA.",
    }
    assert {what: cure for what, cure in found.items() if "keeps the decoder" in what} == told
    found = examined(data=data, data_options={"decoder": "pillow"})
    assert only(found, "The recipe decodes with Pillow")[1] == "Leave data.decoder out."


def test_a_libjpeg_without_simd_is_told(examined: Examine, data: Dataset, tmp_path: Path) -> None:
    slow, fast = tmp_path / "libjpeg.so.8", tmp_path / "libjpeg-0123.so.62"
    slow.write_bytes(bytes(5000))
    fast.write_bytes(bytes(5000) + b"JSIMD_FORCENONE\0")
    line = "7f0-7f9 r-xp 00000000 fe:00 12 {}\n"
    maps = "".join(line.format(path) for path in (slow, fast, slow, "/usr/lib/libother.so"))
    found = examined({"proc/self/maps": maps}, data)
    assert only(found, "has no SIMD code")[0].startswith(f"{slow} has no SIMD code")
    assert not any("Not known" in what for what in found)
    found = examined({"proc/self/maps": line.format(tmp_path / "libjpeg.so.gone")}, data)
    assert "libjpeg.so.gone has SIMD code" in only(found, "Not known here: ")[0]


def test_pixels_are_not_decoded(examined: Examine, tmp_path: Path) -> None:
    (tmp_path / "pixels").mkdir()
    np.save(tmp_path / "pixels/images.npy", np.zeros((6, 8, 8), np.uint8))
    np.save(tmp_path / "pixels/labels.npy", np.arange(6) % 2)
    with closing(opening.open(tmp_path / "pixels")) as data:
        found = examined(data=data, environ={"JSIMD_FORCENONE": "1"})
    assert "The records are pixels: no decoding is needed." in found
    assert faults(found) == []


@pytest.mark.parametrize(
    ("kind", "cache", "cure"),
    [
        ("nfs4", "none", "the cache tier keeps those locally"),
        ("nfs4", "memory", ""),
        ("overlay", "none", "Mount the folder into the container"),
        ("xfs", "none", ""),
    ],
)
def test_the_file_system_of_the_data_is_told(
    kind: str, cache: str, cure: str, examined: Examine, data: Dataset
) -> None:
    mounts = WELL["proc/self/mountinfo"] + f"23 21 0:23 / {data.folder} rw - {kind} server:/x rw\n"
    what, told = only(examined({"proc/self/mountinfo": mounts}, data, data_options={"cache": cache}), "The data are ")
    assert kind in what
    assert "in 1 file, records of " in what
    assert (cure in told) if cure else not told


def test_many_loose_files_are_told(examined: Examine, data: Dataset, tmp_path: Path, monkeypatch: Any) -> None:
    with closing(opening.open(tmp_path / "images")) as loose:
        assert not any("loose files" in what for what in examined(data=loose))
        monkeypatch.setattr("headway.doctor.environment_input.MANY_FILES", 60)
        what, cure = only(examined(data=loose), "loose files")
    assert "60 loose files" in what
    assert cure.startswith(f"Run headway pack {tmp_path / 'images'} ")
    assert not any("loose files" in what for what in examined(data=data))


NET_FILES = {
    "sys/class/net/eth0/speed": "1000\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/ib0/operstate": "up\n",
    "sys/class/net/ib0/speed": "100000\n",
    "sys/class/net/ib1/operstate": "down\n",
    "sys/class/net/ib1/speed": "400000\n",
    "sys/class/net/virt0/speed": "-1\n",
    "sys/class/net/virt0/operstate": "up\n",
    "sys/class/net/lo/operstate": "unknown\n",
}


@pytest.mark.parametrize(
    ("interface", "without", "what", "cure"),
    [
        ("lo", (), "Ranks communicate over loopback", ""),
        ("ib0", (), "Ranks communicate over ib0 (100000 Mbit/s).", ""),
        ("eth0", (), "Ranks communicate over eth0 (1000 Mbit/s); ib0 has 100000.", "Set comm.interface=ib0."),
        ("eth0", ("sys/class/net/ib0/operstate",), "Ranks communicate over eth0 (1000 Mbit/s).", "comm.wire=fp16"),
        ("ib1", (), "The network interface ib1 is down.", "Bring it up"),
        ("eth9", (), "There is no network interface eth9.", "one of: eth0, ib0, ib1, lo, virt0."),
        ("virt0", (), "the speed of virt0", ""),
    ],
)
def test_the_network_of_several_ranks_is_told(
    interface: str, without: tuple[str, ...], what: str, cure: str, examined: Examine
) -> None:
    told = only(examined(NET_FILES, interface=interface, without=without), what)[1]
    assert (cure in told) if cure else not told
    assert not any(what in found for found in examined(NET_FILES))


def test_the_recipe_may_name_the_interface(examined: Examine) -> None:
    assert only(examined(NET_FILES, comm={"interface": "ib0"}), "Ranks communicate over ib0")[1] == ""
