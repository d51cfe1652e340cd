"""Checks the environment: faults of this machine and this process that slow a recipe down, whatever its code does.

Everything is read from the kernel's files, from torch and from the native core. Nothing is measured or guessed: facts
that cannot be read are reported as unknown.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from headway.core.cgroups import read_quota_cores
from headway.core.cpu_count import list_usable_cpus
from headway.core.interfaces import normalise_interfaces
from headway.core.mounts import find_mount
from headway.core.nvml import load_nvml
from headway.core.profile import EnvironmentFinding
from headway.core.text_format import pluralise
from headway.data.dataset import Dataset
from headway.doctor.environment_builds import check_builds
from headway.doctor.environment_host import Findings, HostFiles, parse_cpu_list, report_fault, report_fine
from headway.doctor.environment_input import check_decoder, check_loader, check_memory, check_network, check_storage
from headway.setup.recipe import TrainRecipe

# Docker's default for a container.
SMALL_SHM_BYTES = 64 << 20
# Share of throttled periods above which a fault is reported; less is usually a compiler or other side process.
MAX_THROTTLED_SHARE = 0.05
# Instruction sets as torch names them on x86.
TORCH_CPU_LEVELS = ("DEFAULT", "AVX2", "AVX512")
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}
BF16 = {"amx_bf16", "avx512_bf16", "bf16"}
# Environment variables that keep torch from using newer instructions.
INSTRUCTION_LIMIT_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def examine_environment(
    recipe: TrainRecipe,
    device: torch.device,
    dataset: Dataset | None,
    interface: str | Sequence[str] | None = None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> tuple[EnvironmentFinding, ...]:
    """Examines the machine and this process, and returns their faults, each with its cure, and the facts that are fine.

    Args:
        recipe: the recipe whose run the faults would slow down.
        device: the device that trains.
        dataset: the training set; None if the images are synthetic.
        interface: the network interfaces between hosts. Default: the recipe's, if it names some.
        root: folder that contains the kernel's files (proc, sys, dev).
        environ: environment variables of this process.
    """
    host = HostFiles(root, environ)
    findings = [
        *_check_device(host, device),
        *_check_arithmetic(host, recipe, device),
        *check_builds(host, has_nvidia_gpu=_has_nvidia_gpu(host)),
        *_check_cores(host),
        *_check_quota(host),
        *_check_threads(host, device),
        *_check_governor(host),
        *_check_numa_nodes(host),
        *check_memory(host, recipe, device, dataset),
        *_check_shared_memory(host, device),
        *_check_container(host),
    ]
    if dataset is not None:
        findings += [
            *check_loader(host, recipe),
            *check_decoder(host, recipe, dataset),
            *check_storage(host, recipe, dataset),
        ]
    names = normalise_interfaces(interface or recipe.comm.interface)
    findings += [finding for name in names for finding in check_network(host, name, names)]
    if host.unknown:
        findings.append(report_fine(f"Not known here: {', '.join(host.unknown)}."))
    return tuple(findings)


def _check_device(host: HostFiles, device: torch.device) -> Findings:
    driver, has_nvidia_gpu = _find_driver(host), _has_nvidia_gpu(host)
    built, usable = torch.version.cuda, torch.cuda.is_available()
    hidden = host.environ.get("CUDA_VISIBLE_DEVICES")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = driver or _read_driver_version()
        if driver is None:
            host.unknown.append("the driver's version")
        yield report_fine(f"{name}, driver {driver or 'of unknown version'}, torch for CUDA {built}.")
    elif has_nvidia_gpu and built is None:
        cure = "Install a CUDA build of torch (see the selector on pytorch.org)."
        yield report_fault(f"There is an NVIDIA GPU, but torch {torch.__version__} is built without CUDA.", cure)
    elif has_nvidia_gpu and not usable and hidden is not None and hidden.strip() in ("", "-1"):
        yield report_fault(
            f"There is a GPU, but CUDA_VISIBLE_DEVICES={hidden!r} hides it.", "Unset CUDA_VISIBLE_DEVICES."
        )
    elif has_nvidia_gpu and not usable:
        what = f"There is a GPU, but torch (for CUDA {built}) cannot use it with driver {driver or 'none'}."
        yield report_fault(
            what, "Install a newer driver, or a torch for an older CUDA; nvidia-smi says which CUDA it takes."
        )
    elif usable:
        yield report_fault("There is a GPU, but the recipe trains on the CPU.", "Set device=cuda, or leave device out.")
    elif (host.root / "dev/kfd").exists() and torch.version.hip is None:
        cure = "Install a ROCm build of torch (see the selector on pytorch.org)."
        yield report_fault(f"There is an AMD GPU, but torch {torch.__version__} is built without ROCm.", cure)
    else:
        yield report_fine("There is no GPU: the CPU trains.")


def _find_driver(host: HostFiles) -> str | None:
    """Returns the version of the NVIDIA driver that the kernel has loaded."""
    loaded = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", host.read_text("proc/driver/nvidia/version"))
    return loaded[1] if loaded else None


def _has_nvidia_gpu(host: HostFiles) -> bool:
    # The device files also exist in containers that hide /proc/driver.
    return _find_driver(host) is not None or any(host.root.glob("dev/nvidia[0-9]*"))


def _read_driver_version() -> str | None:
    """Returns the NVIDIA driver's version from NVML, if nvidia-ml-py is installed."""
    if (nvml := load_nvml()) is None:
        return None
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _check_arithmetic(host: HostFiles, recipe: TrainRecipe, device: torch.device) -> Findings:
    if device.type != "cpu":
        return
    if not host.flags:
        host.unknown.append("the processor's instructions")
    torch_level = torch.backends.cpu.get_cpu_capability()
    cpu_level = "AVX512" if host.flags >= AVX512 else "AVX2" if host.flags >= {"avx2", "fma"} else "DEFAULT"
    is_torch_below_cpu = torch_level in TORCH_CPU_LEVELS[: TORCH_CPU_LEVELS.index(cpu_level)]
    limits = [name for name in INSTRUCTION_LIMIT_VARIABLES if name in host.environ]
    # MKL exists on x86 only: `sse2` tells an x86 CPU.
    library_available = {"oneDNN": torch.backends.mkldnn.is_available(), "MKL": torch.backends.mkl.is_available()}
    missing = [name for name, available in library_available.items() if not available and "sse2" in host.flags]
    if limits:
        settings = ", ".join(f"{name}={host.environ[name]}" for name in limits)
        yield report_fault(
            f"{settings} keeps torch from instructions of this processor.", f"Unset {' and '.join(limits)}."
        )
    elif is_torch_below_cpu:
        what = f"The CPU has {cpu_level}, but this build of torch computes with {torch_level}."
        yield report_fault(what, "Install torch's official wheel.")
    if missing:
        what = f"This build of torch has no {' and no '.join(missing)}: convolutions and matrix products are slow."
        yield report_fault(what, "Install torch's official wheel.")
    units = "has" if host.flags & BF16 else "has no"
    if recipe.precision == "bf16" and host.flags and not host.flags & BF16:
        cure = "Set precision=fp32, or auto."
        yield report_fault("The CPU has no bf16 units, but the recipe computes in bf16: it is emulated.", cure)
    elif not limits and not is_torch_below_cpu and not missing and host.flags:
        libraries = " and ".join(name for name, available in library_available.items() if available)
        yield report_fine(f"torch computes with {torch_level}, by {libraries}; the CPU {units} bf16 units.")


def _check_cores(host: HostFiles) -> Findings:
    allowed, online = list_usable_cpus(), parse_cpu_list(host.read_text("sys/devices/system/cpu/online"))
    if not online:
        host.unknown.append("how many CPUs the machine has")
    elif len(allowed) >= len(online):
        yield report_fine(f"This process may run on all {len(online)} CPUs of the machine.")
    else:
        what = f"This process may run on {len(allowed)} of the machine's {len(online)} CPUs."
        cure = "If this is not intended, start it without taskset, or give the container more (--cpuset-cpus)."
        # With several ranks, each is often bound to its own CPUs on purpose.
        yield report_fine(what) if host.ranks > 1 else report_fault(what, cure)


def _check_quota(host: HostFiles) -> Findings:
    over = [(read_quota_cores(group), group) for group in host.find_groups("cpu")]
    quotas = [(quota, group) for quota, group in over if quota is not None]
    if not quotas:
        return
    quota, group = min(quotas, key=lambda one: one[0])
    if quota >= len(list_usable_cpus()) or quota == int(quota):
        yield report_fine(f"The control group's quota is {quota:g} cores.")
    else:
        # torch and the loader start whole threads: part of a core is either lost or throttles them.
        what = f"The control group's quota is {quota:g} cores, but torch and the loader use {host.cores} threads."
        yield report_fault(what, f"Give it a whole number, such as --cpus={math.ceil(quota)}.")
    stat = dict(line.split() for line in host.read_text(group / "cpu.stat").splitlines() if line.count(" ") == 1)
    periods, stopped = int(stat.get("nr_periods", 0)), int(stat.get("nr_throttled", 0))
    if not stat:
        host.unknown.append("how often the quota throttled the process")
    elif periods and stopped / periods > MAX_THROTTLED_SHARE:
        what = f"The quota has throttled this control group in {stopped / periods:.0%} of its periods so far."
        cure = f"Use fewer threads (OMP_NUM_THREADS and data.threads, {host.cores} together), or raise the quota."
        yield report_fault(what, cure)


def _check_threads(host: HostFiles, device: torch.device) -> Findings:
    if device.type != "cpu":
        return
    threads, share = torch.get_num_threads(), host.share
    settings = [
        f"{name}={host.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in host.environ
    ]
    by = f" ({', '.join(settings)})" if settings else ""
    if threads > share:
        what = f"torch uses {pluralise(threads, 'thread')}{by}, but this rank has {pluralise(share, 'core')}."
        yield report_fault(what, f"Set OMP_NUM_THREADS={share}.")
    # Hyper-threads do not count: torch itself starts one thread per physical core.
    elif threads < max(1, min(share, _count_physical_cores(host) // host.ranks)):
        what = f"torch uses {pluralise(threads, 'thread')}{by} of {pluralise(share, 'usable core')}."
        yield report_fault(
            what, f"Set OMP_NUM_THREADS={share}, or unset it." if settings else f"Set OMP_NUM_THREADS={share}."
        )
    else:
        yield report_fine(f"torch uses {pluralise(threads, 'thread')} of {pluralise(share, 'core')}.")


def _count_physical_cores(host: HostFiles) -> int:
    """Counts the physical cores that this process may use."""
    cpus = list_usable_cpus()
    siblings = {host.read_text(f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list") for number in cpus}
    return len(cpus) if "" in siblings else len(siblings)


def _check_governor(host: HostFiles) -> Findings:
    folder = f"sys/devices/system/cpu/cpu{list_usable_cpus()[0]}/cpufreq"
    governor, driver = host.read_text(f"{folder}/scaling_governor"), host.read_text(f"{folder}/scaling_driver")
    preference = host.read_text(f"{folder}/energy_performance_preference")
    if not governor:
        host.unknown.append("the CPU governor")
    # With these drivers `powersave` is the default governor and still raises the clock; the preference decides.
    elif governor == "powersave" and driver in ("intel_pstate", "amd-pstate-epp"):
        if preference in ("power", "balance_power"):
            what = f"The CPU is set to save power (energy_performance_preference is {preference})."
            yield report_fault(what, "As root: cpupower frequency-set -g performance.")
        else:
            yield report_fine(f"The CPU governor is {governor} of {driver}, which raises the clock under load.")
    elif governor == "powersave":
        what = "The CPU governor is powersave: the clock stays at its lowest."
        yield report_fault(what, "As root: cpupower frequency-set -g performance.")
    else:
        yield report_fine(f"The CPU governor is {governor}.")


def _check_numa_nodes(host: HostFiles) -> Findings:
    mine = set(list_usable_cpus())
    nodes = [path.parent.name for path in sorted(host.root.glob("sys/devices/system/node/node[0-9]*/cpulist"))]
    spanned = [
        name for name in nodes if mine & parse_cpu_list(host.read_text(f"sys/devices/system/node/{name}/cpulist"))
    ]
    if not spanned:
        host.unknown.append("NUMA nodes")
    elif len(spanned) == 1:
        yield report_fine("This process uses CPUs of one NUMA node.")
    else:
        what = f"This process uses CPUs of {len(spanned)} NUMA nodes: memory of another node is slower."
        cure = "Start one rank per node with numactl --cpunodebind=N --membind=N."
        yield report_fine(what) if host.ranks >= len(spanned) else report_fault(what, cure)


def _check_shared_memory(host: HostFiles, device: torch.device) -> Findings:
    mount = find_mount(Path("/dev/shm"), host.root / "proc/self/mountinfo")
    size = re.search(r"(?:^|,)size=(\d+)([kmg]?)(?:,|$)", mount.options) if mount is not None else None
    if mount is None or mount.point != "/dev/shm":
        host.unknown.append("/dev/shm")
    elif size and int(size[1]) * 1024 ** " kmg".index(size[2] or " ") <= SMALL_SHM_BYTES:
        # Only NCCL between ranks of one host needs it; Headway's own loader does not use shared memory.
        what = "/dev/shm has 64 MB or less, as in containers. DataLoader workers and NCCL need more; Headway does not."
        cure = "Start the container with --shm-size=8g, or --ipc=host."
        uses_nccl = device.type == "cuda" and host.ranks > 1
        yield report_fault(what, cure) if uses_nccl else report_fine(what)
    else:
        yield report_fine("/dev/shm is large enough.")


def _check_container(host: HostFiles) -> Findings:
    root = find_mount(Path("/"), host.root / "proc/self/mountinfo")
    signs = (host.root / ".dockerenv", host.root / "run/.containerenv")
    named = re.search(r"docker|kubepods|containerd|libpod|lxc", host.read_text("proc/1/cgroup"))
    if any(sign.exists() for sign in signs) or named or (root is not None and root.kind == "overlay"):
        yield report_fine("This is a container: the limits of its control group apply.")
