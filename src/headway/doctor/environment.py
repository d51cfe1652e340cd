"""The environment: what of this machine and this process holds a recipe back, whatever its code does.

Everything is read from the kernel's files, from torch, and from the native core; nothing is measured, and nothing is
guessed: what cannot be read is told as not known.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np
import psutil
import torch
from PIL import features

from headway.core import native as core
from headway.core.cgroups import find_cgroups, read_quota_cores
from headway.core.cpu_count import choose_thread_count, count_usable_cores, list_usable_cpus, read_local_ranks
from headway.core.free_memory import read_free_memory_bytes
from headway.core.profile import EnvironmentFinding
from headway.data import native
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.decode import resolve_backend
from headway.data.shards import LooseFiles
from headway.data.tiers.choice import CachePlanner
from headway.data.tiers.remote_dataset import RemoteShards
from headway.doctor.page_cache import mount_of
from headway.doctor.storage import Place, place_of
from headway.report.dry_run_text import format_size
from headway.setup.inputs import TIER_PHRASES, describe_decoding
from headway.setup.recipe import TrainRecipe
from headway.storage.addresses import get_cache_folder

Found = Iterator[EnvironmentFinding]

MANY_FILES = 10_000
"""Loose files from which on a pack is worth while: opening one takes about as long as decoding a small image."""
SMALL_SHM_BYTES = 64 << 20
"""What a container has unless it is told otherwise."""
THROTTLED = 0.05
"""Share of a quota's periods; in fewer it stops what runs beside, such as a compiler."""
SLOW_MBIT_S = 10_000
"""Below it, gradients of a large network take longer than computing them."""
LEVELS = ("DEFAULT", "AVX2", "AVX512")
"""Of instructions, as torch names them on x86."""
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}
BF16 = {"amx_bf16", "avx512_bf16", "bf16"}
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep torch from instructions."""


def examine(
    recipe: TrainRecipe,
    device: torch.device,
    dataset: Dataset | None,
    interface: str | None = None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> tuple[EnvironmentFinding, ...]:
    """What is to be known of the place where a recipe is to run: faults with their cure, and what is well.

    Args:
        device: of this process.
        dataset: the training set; None: synthetic images.
        interface: the network interface between hosts; None: that of the recipe, or there is one process.
        root: of the kernel's files (proc, sys, dev).
        environ: the environment of this process.
    """
    host = _Host(root, environ)
    found = [
        *_device(host, device),
        *_arithmetic(host, recipe, device),
        *_cores(host),
        *_quota(host),
        *_threads(host, device),
        *_governor(host),
        *_nodes(host),
        *_memory(host, recipe, device, dataset),
        *_shared_memory(host, device),
        *_container(host),
    ]
    if dataset is not None:
        found += [*_loader(host, recipe), *_decoder(host, recipe, dataset), *_storage(host, recipe, dataset)]
    found += _network(host, interface or recipe.comm.interface)
    if host.unknown:
        found.append(_well(f"Not known here: {', '.join(host.unknown)}."))
    return tuple(found)


@final
class _Host:
    """What the kernel's files say; what they do not is noted in `unknown`."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root, self.environ, self.unknown = root, environ, list[str]()
        self.membership, self.control_groups = root / "proc/self/cgroup", root / "sys/fs/cgroup"
        self.cores = count_usable_cores(groups=self.control_groups, membership=self.membership)
        self.ranks = read_local_ranks() or 1
        self.share = max(1, self.cores // self.ranks)
        """Cores of this rank."""
        words = re.search(r"^(?:flags|Features)\s*:(.*)$", self.text("proc/cpuinfo"), re.MULTILINE)
        self.flags = frozenset(words[1].split()) if words else frozenset[str]()

    def text(self, path: str | Path) -> str:
        """Of a file, without the blanks around it; empty where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str | Path) -> float:
        """NaN where there is none."""
        try:
            return float(self.text(path))
        except ValueError:
            return math.nan

    def groups(self, controller: str) -> Iterator[Path]:
        return find_cgroups(controller, self.control_groups, self.membership)


def _well(what: str) -> EnvironmentFinding:
    return EnvironmentFinding(what=what, cure="")


def _fault(what: str, cure: str) -> EnvironmentFinding:
    return EnvironmentFinding(what=what, cure=cure)


def _device(host: _Host, device: torch.device) -> Found:
    loaded = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", host.text("proc/driver/nvidia/version"))
    driver = loaded[1] if loaded else None
    there = driver is not None or any(host.root.glob("dev/nvidia[0-9]*"))
    built, usable = torch.version.cuda, torch.cuda.is_available()
    hidden = host.environ.get("CUDA_VISIBLE_DEVICES")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = driver or _driver()
        if driver is None:
            host.unknown.append("the driver's version")
        yield _well(f"{name}, driver {driver or 'of unknown version'}, torch for CUDA {built}.")
    elif there and built is None:
        cure = "Install a build of torch with CUDA, as pytorch.org's selector names it."
        yield _fault(f"There is an NVIDIA GPU, and torch {torch.__version__} is built without CUDA.", cure)
    elif there and not usable and hidden is not None and hidden.strip() in ("", "-1"):
        yield _fault(f"There is a GPU, and CUDA_VISIBLE_DEVICES={hidden!r} hides it.", "Unset CUDA_VISIBLE_DEVICES.")
    elif there and not usable:
        what = f"There is a GPU, and torch (for CUDA {built}) cannot use it with driver {driver or 'none'}."
        yield _fault(what, "Install a newer driver, or a torch for an older CUDA; nvidia-smi says which CUDA it takes.")
    elif usable:
        what = "A GPU is there, and the recipe trains on the processor."
        yield _fault(what, "Set device=cuda, or leave device out.")
    elif (host.root / "dev/kfd").exists() and torch.version.hip is None:
        cure = "Install a build of torch with ROCm, as pytorch.org's selector names it."
        yield _fault(f"There is an AMD GPU, and torch {torch.__version__} is built without ROCm.", cure)
    else:
        yield _well("There is no GPU: the processor trains.")


def _driver() -> str | None:
    """The NVIDIA driver's version by NVML, where nvidia-ml-py is installed."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed; or no driver answers, with an error of its own
        return None
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _arithmetic(host: _Host, recipe: TrainRecipe, device: torch.device) -> Found:
    if device.type != "cpu":
        return
    if not host.flags:
        host.unknown.append("the processor's instructions")
    have = torch.backends.cpu.get_cpu_capability()
    able = "AVX512" if host.flags >= AVX512 else "AVX2" if host.flags >= {"avx2", "fma"} else "DEFAULT"
    less = have in LEVELS and LEVELS.index(have) < LEVELS.index(able)
    limits = [name for name in LIMITS if name in host.environ]
    # MKL is of x86 alone.
    there = {"oneDNN": torch.backends.mkldnn.is_available(), "MKL": torch.backends.mkl.is_available()}
    missing = [name for name, found in there.items() if not found and "sse2" in host.flags]
    if limits:
        told = ", ".join(f"{name}={host.environ[name]}" for name in limits)
        yield _fault(f"{told} keeps torch from instructions of this processor.", f"Unset {' and '.join(limits)}.")
    elif less:
        what = f"The processor has {able}, and this build of torch computes with {have}."
        yield _fault(what, "Install torch's wheel.")
    if missing:
        what = f"This build of torch has no {' and no '.join(missing)}: convolutions and matrix products are slow."
        yield _fault(what, "Install torch's wheel.")
    units = "has" if host.flags & BF16 else "has no"
    if recipe.precision == "bf16" and host.flags and not host.flags & BF16:
        cure = "Set precision=fp32, or auto."
        yield _fault("The processor has no units for bf16, and the recipe computes in it: it is emulated.", cure)
    elif not limits and not less and not missing and host.flags:
        libraries = " and ".join(name for name, found in there.items() if found)
        yield _well(f"torch computes with {have}, by {libraries}; the processor {units} units for bf16.")


def _cores(host: _Host) -> Found:
    allowed, online = list_usable_cpus(), _cpus(host.text("sys/devices/system/cpu/online"))
    if not online:
        host.unknown.append("how many CPUs the machine has")
    elif len(allowed) >= len(online):
        yield _well(f"This process may run on all {len(online)} CPUs of the machine.")
    else:
        what = f"This process may run on {len(allowed)} of the machine's {len(online)} CPUs."
        cure = "If that is not meant, start it without taskset, or give the container more (--cpuset-cpus)."
        yield _fault(what, "" if host.ranks > 1 else cure)  # ranks are often bound to CPUs of their own


def _quota(host: _Host) -> Found:
    over = [(read_quota_cores(group), group) for group in host.groups("cpu")]
    found = [(quota, group) for quota, group in over if quota is not None]
    if not found:
        return
    quota, group = min(found, key=lambda one: one[0])
    if quota >= len(list_usable_cpus()) or quota == int(quota):
        yield _well(f"The control group's quota is {quota:g} cores.")
    else:
        what = f"The control group's quota is {quota:g} cores, of which torch and the loader count {host.cores}."
        yield _fault(what, f"Give it a whole number, such as --cpus={math.ceil(quota)}.")
    stat = dict(line.split() for line in host.text(group / "cpu.stat").splitlines() if line.count(" ") == 1)
    periods, stopped = int(stat.get("nr_periods", 0)), int(stat.get("nr_throttled", 0))
    if not stat:
        host.unknown.append("how often the quota stopped the process")
    elif periods and stopped / periods > THROTTLED:
        what = f"The quota has stopped this control group in {stopped / periods:.0%} of its periods so far."
        cure = f"Let fewer threads work (OMP_NUM_THREADS and data.threads, {host.cores} together), or raise the quota."
        yield _fault(what, cure)


def _threads(host: _Host, device: torch.device) -> Found:
    if device.type != "cpu":
        return
    threads, share = torch.get_num_threads(), host.share
    told = [f"{name}={host.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in host.environ]
    by = f" ({', '.join(told)})" if told else ""
    if threads > share:
        what = f"torch computes on {_count(threads, 'thread')}{by}, and this rank has {_count(share, 'core')}."
        yield _fault(what, f"Set OMP_NUM_THREADS={share}.")
    elif threads < max(1, min(share, _physical(host) // host.ranks)):
        what = f"torch computes on {_count(threads, 'thread')}{by} of {_count(share, 'usable core')}."
        yield _fault(what, f"Set OMP_NUM_THREADS={share}, or unset it." if told else f"Set OMP_NUM_THREADS={share}.")
    else:
        yield _well(f"torch computes on {_count(threads, 'thread')} of {_count(share, 'core')}.")


def _physical(host: _Host) -> int:
    """Cores that this process may use, two threads of one counted once."""
    cpus = list_usable_cpus()
    siblings = {host.text(f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list") for number in cpus}
    return len(cpus) if "" in siblings else len(siblings)


def _governor(host: _Host) -> Found:
    folder = f"sys/devices/system/cpu/cpu{list_usable_cpus()[0]}/cpufreq"
    governor, driver = host.text(f"{folder}/scaling_governor"), host.text(f"{folder}/scaling_driver")
    preference = host.text(f"{folder}/energy_performance_preference")
    if not governor:
        host.unknown.append("the CPU governor")
    # With these drivers `powersave` is the usual governor, and the preference says how it is meant.
    elif governor == "powersave" and driver in ("intel_pstate", "amd-pstate-epp"):
        if preference in ("power", "balance_power"):
            what = f"The processor is told to save power (energy_performance_preference is {preference})."
            yield _fault(what, "As root: cpupower frequency-set -g performance.")
        else:
            yield _well(f"The CPU governor is {governor} of {driver}, which raises the clock under load.")
    elif governor == "powersave":
        what = "The CPU governor is powersave: the clock stays at its lowest."
        yield _fault(what, "As root: cpupower frequency-set -g performance.")
    else:
        yield _well(f"The CPU governor is {governor}.")


def _nodes(host: _Host) -> Found:
    mine = set(list_usable_cpus())
    nodes = [path.parent.name for path in sorted(host.root.glob("sys/devices/system/node/node[0-9]*/cpulist"))]
    spanned = [name for name in nodes if mine & _cpus(host.text(f"sys/devices/system/node/{name}/cpulist"))]
    if not spanned:
        host.unknown.append("NUMA nodes")
    elif len(spanned) == 1:
        yield _well("Its CPUs are of one NUMA node.")
    else:
        what = f"Its CPUs are of {len(spanned)} NUMA nodes: memory of another node is slower."
        cure = "Start one rank on each node, by numactl --cpunodebind=N --membind=N."
        yield _fault(what, "" if host.ranks >= len(spanned) else cure)


def _memory(host: _Host, recipe: TrainRecipe, device: torch.device, dataset: Dataset | None) -> Found:
    free = read_free_memory_bytes(groups=host.control_groups, membership=host.membership)
    # What a page cache holds moves meanwhile; a limit of a group leaves less by far.
    limited = free < 0.9 * psutil.virtual_memory().available
    what = f"{format_size(free)} of memory are free{', by the limit of its control group' if limited else ''}"
    if dataset is None:
        yield _well(f"{what}.")
        return
    records = int(dataset.length.sum(dtype=np.int64))
    kept, why = recipe.data.cache, ""
    if kept == "auto":
        folder = Path(recipe.data.cache_folder or get_cache_folder())
        place = CachePlanner(dataset, str(device), folder, int(recipe.data.cache_gb * 1e9)).choose_automatically()
        kept, why = place.name, f": {place.reason}"
    what += f", and the records have {format_size(records)}"
    if records > free and kept in ("none", "disk") and not isinstance(dataset.source, RemoteShards):
        cure = "Pack smaller images (headway pack --mode resize=N,quality=90), or take a machine or a limit with more."
        yield _fault(f"{what}: later epochs read from the storage too.", cure)
    else:
        yield _well(f"{what}. The set {TIER_PHRASES[kept]}{why}.")


def _shared_memory(host: _Host, device: torch.device) -> Found:
    mount = mount_of(Path("/dev/shm"), host.root / "proc/self/mountinfo")
    told = re.search(r"(?:^|,)size=(\d+)([kmg]?)(?:,|$)", mount.options) if mount is not None else None
    if mount is None or mount.point != "/dev/shm":
        host.unknown.append("/dev/shm")
    elif told and int(told[1]) * 1024 ** " kmg".index(told[2] or " ") <= SMALL_SHM_BYTES:
        what = "/dev/shm has 64 MB or less, as containers do; workers of a DataLoader and NCCL need more, Headway not."
        nccl = device.type == "cuda" and host.ranks > 1
        yield _fault(what, "Start the container with --shm-size=8g, or --ipc=host." if nccl else "")
    else:
        yield _well("/dev/shm is large enough.")


def _container(host: _Host) -> Found:
    root = mount_of(Path("/"), host.root / "proc/self/mountinfo")
    signs = (host.root / ".dockerenv", host.root / "run/.containerenv")
    named = re.search(r"docker|kubepods|containerd|libpod|lxc", host.text("proc/1/cgroup"))
    if any(sign.exists() for sign in signs) or named or (root is not None and root.kind == "overlay"):
        yield _well("This is a container: its limits are those of its control group.")


def _loader(host: _Host, recipe: TrainRecipe) -> Found:
    threads, share = recipe.data.threads or choose_thread_count(), host.share
    if threads > share:
        what = f"data.threads is {threads}, and this rank has {_count(share, 'core')}."
        yield _fault(what, f"Leave data.threads out, or set it to at most {share}.")
    elif threads == share > 1:
        what = f"Decoding has {threads} threads on {share} cores, and leaves none to the training loop."
        yield _fault(what, f"Leave data.threads out, or set it to {share - 1}.")
    elif share == 1:
        yield _well("Decoding and the training loop take turns on one core.")
    else:
        yield _well(describe_decoding(resolve_backend(recipe.data.decoder), threads, share))


def _decoder(host: _Host, recipe: TrainRecipe, dataset: Dataset) -> Found:
    if (dataset.flags & FLAG_RAW).all():
        yield _well("The records are pixels: nothing is decoded.")
        return
    if not native.is_available():
        off = host.environ.get("HEADWAY_NATIVE") == "0"
        what = "The native core is switched off" if off else "The native core cannot be used"
        cure = "Unset HEADWAY_NATIVE." if off else f"{core.FIX[0].upper()}{core.FIX[1:]}."
        yield _fault(f"{what}: Pillow decodes, which takes about six times as long.", cure)
        if not features.check_feature("libjpeg_turbo"):
            yield _fault("Pillow is built on a libjpeg that is not libjpeg-turbo.", "Install Pillow's wheel.")
    elif recipe.data.decoder == "pillow":
        yield _fault("The recipe has Pillow decode, and the native core is there.", "Leave data.decoder out.")
    else:
        yield _well(f"The native core decodes ({native.describe_features()}).")
    slowed = [
        f"{name}={value}"
        for name, value in sorted(host.environ.items())
        if (name.startswith("JSIMD_FORCE") and value == "1" and name != "JSIMD_FORCEAVX2")
        or (name == "HEADWAY_ISA" and value == "portable" and "avx2" in host.flags)
    ]
    for setting in slowed:
        yield _fault(f"{setting} keeps decoding from faster instructions.", f"Unset {setting.partition('=')[0]}.")
    yield from _libjpeg(host)


def _libjpeg(host: _Host) -> Found:
    """Whether the libjpeg that is loaded has SIMD code: only such code reads the JSIMD variables."""
    paths = set(re.findall(r"\s(/\S*/libjpeg[^/\s]*)$", host.text("proc/self/maps"), re.MULTILINE))
    if not paths:
        host.unknown.append("whether libjpeg-turbo has SIMD code")
    for path in sorted(paths):
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                simd = data.find(b"JSIMD_FORCE") >= 0
        except (OSError, ValueError):  # it was replaced since it was loaded
            host.unknown.append(f"whether {path} has SIMD code")
            continue
        if not simd:
            cure = "Install a libjpeg-turbo that is built with it."
            yield _fault(f"{path} has no SIMD code: decoding takes two to four times as long.", cure)


def _storage(host: _Host, recipe: TrainRecipe, dataset: Dataset) -> Found:
    place = place_of(dataset, host.root / "proc/self/mountinfo")
    mount, holds = place.mount, _holds(place)
    loose = isinstance(dataset.source, LooseFiles)
    if isinstance(dataset.source, RemoteShards):
        yield _well(f"The data lie at {place.at} ({holds}), and are kept in the cache folder as data.cache says.")
        return
    if mount is None:
        host.unknown.append("the file system of the data")
    elif mount.network:
        cure = "Copy them to a local disk, or put them at an http or s3 address: the cache tier keeps those locally."
        once = recipe.data.cache in ("memory", "device")  # they are read before the first step, and not again
        yield _fault(f"The data lie on a network file system, {mount.kind} ({holds}).", "" if once else cure)
    elif mount.kind == "overlay":
        cure = "Mount the folder into the container (-v), so that reads do not go through its layers."
        yield _fault(f"The data lie in a container's own layers, on overlay ({holds}).", cure)
    else:
        yield _well(f"The data lie on {mount.kind} ({holds}).")
    if loose and place.files >= MANY_FILES:
        cure = f"headway pack {dataset.folder} {dataset.folder.name}.packed, and name that in data.train."
        yield _fault(f"The data are {place.files:,} loose files, each opened by its name.", cure)
    if place.resident is None:
        host.unknown.append("what of the data lies in memory")


def _holds(place: Place) -> str:
    share = "" if place.resident is None else f", {place.resident:.0%} of it in memory"
    files = f" in {_count(place.files, 'file')}" if place.files else ""
    return f"{format_size(place.bytes)}{files}, records of {format_size(place.record_bytes)}{share}"


def _network(host: _Host, interface: str | None) -> Found:
    if interface is None:
        return
    folder = "sys/class/net"
    speed = host.number(f"{folder}/{interface}/speed")
    if interface == "lo":
        yield _well("Ranks meet over the loopback: they are on this host.")
    elif not (host.root / folder / interface).exists():
        names = ", ".join(sorted(path.name for path in host.root.glob(f"{folder}/*"))) or "none"
        cure = f"Set comm.interface to one that is there: {names}."
        yield _fault(f"There is no network interface {interface}.", cure)
    elif host.text(f"{folder}/{interface}/operstate") == "down":
        yield _fault(f"The network interface {interface} is down.", "Bring it up, or set comm.interface to another.")
    elif not speed > 0:
        host.unknown.append(f"the speed of {interface}")
    else:
        others = [
            (host.number(path / "speed"), path.name)
            for path in host.root.glob(f"{folder}/*")
            if host.text(path / "operstate") == "up"
        ]
        faster = max((one for one in others if one[0] > speed), default=None)
        what = f"Ranks meet over {interface}, of {speed:g} Mbit/s"
        if faster is not None:
            yield _fault(f"{what}; {faster[1]} has {faster[0]:g}.", f"Set comm.interface={faster[1]}.")
        elif speed < SLOW_MBIT_S:
            yield _fault(f"{what}.", "Send fewer bytes: comm.wire=fp16; or join the hosts by a faster network.")
        else:
            yield _well(f"{what}.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s'[: number != 1]}"


def _cpus(text: str) -> set[int]:
    """Of a list such as `0-3,8`."""
    bounds = [(int(one[1]), int(one[2] or one[1])) for one in re.finditer(r"(\d+)(?:-(\d+))?", text)]
    return {number for low, high in bounds for number in range(low, high + 1)}
