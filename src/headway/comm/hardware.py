"""What joins this host's devices and this host to others, as the kernel, the driver and NCCL say it."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch

INFINIBAND = Path("/sys/class/infiniband")

NVLINKS = 18
"""Most links of a GPU (Hopper, Blackwell)."""


def nics(interface: str, *, infiniband: bool, ports: Path = INFINIBAND) -> list[str]:
    """The network interface in use, with its speed where the driver knows it; nothing of a loopback.

    Args:
        infiniband: whether its ports are told too: NCCL uses them, Gloo does not.
    """
    found = []
    state = psutil.net_if_stats().get(interface)
    if state is not None and "loopback" not in state.flags:
        speed = f"{state.speed} Mbit/s" if state.speed else "unknown speed"
        found.append(f"{interface} {speed}, MTU {state.mtu}")
    for rate in sorted(ports.glob("*/ports/*/rate")) if infiniband else ():
        try:
            layer, speed = (rate.with_name(name).read_text().strip() for name in ("link_layer", "rate"))
        except OSError:  # the port went away
            continue
        found.append(f"{rate.parts[-4]} port {rate.parts[-2]} {layer} {speed}")
    return found


def gpu_links() -> list[str]:
    """NVLink and PCIe of each GPU of this host; empty without nvidia-ml-py, and where the driver does not answer."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_gpu(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


@contextmanager
def nccl_log() -> Iterator[Callable[[], str]]:
    """Has NCCL write down what it chooses, where this begins before its first use; what it gives reads that.

    Where the user has NCCL say things already, these stay where they are, and nothing is read.
    """
    if "NCCL_DEBUG" in os.environ:
        yield str
        return
    with tempfile.NamedTemporaryFile(prefix="headway-nccl-", mode="r", errors="replace") as log:
        ours = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": log.name}
        os.environ.update(ours)
        try:
            yield lambda: Path(log.name).read_text(errors="replace")
        finally:
            for name in ours:
                del os.environ[name]


def nccl_chose(said: str) -> str:
    """NCCL's version, its network, its transports and its number of channels, from its log at level INFO."""
    version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    network = re.findall(r"Using network (\S+)", said)
    transports = Counter(re.findall(r" via (\S+)", said))
    channels = re.findall(r"(\d+) coll channels", said)
    parts = [f"NCCL {version}".strip()]
    if network:
        parts.append(f"network {network[-1]}")
    if transports:
        parts.append("transports " + ", ".join(name for name, _ in transports.most_common()))
    if channels:
        parts.append(f"{channels[-1]} channels")
    return ", ".join(parts)


def _gpu(nvml: Any, number: int) -> str:
    """One line for a GPU: its name, the NVLinks that are up, and its PCIe link."""
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(name: str, *which: int) -> Any:
        try:
            return getattr(nvml, name)(handle, *which)
        except nvml.NVMLError:  # a GPU without such a thing
            return None

    up = sum(ask("nvmlDeviceGetNvLinkState", link) == 1 for link in range(NVLINKS))
    version = ask("nvmlDeviceGetNvLinkVersion", 0) if up else None
    parts = [f"GPU {number} {ask('nvmlDeviceGetName') or 'unnamed'}"]
    parts.append(f"{up} NVLinks" + (f" of version {version}" if version else "") if up else "no NVLink")
    generation, width = ask("nvmlDeviceGetCurrPcieLinkGeneration"), ask("nvmlDeviceGetCurrPcieLinkWidth")
    if generation and width:
        parts.append(f"PCIe {generation} x{width}")
    return ", ".join(parts)
