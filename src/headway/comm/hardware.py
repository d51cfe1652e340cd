"""Describes the hardware that joins devices and hosts, as the kernel, the NVIDIA driver and NCCL report it."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from headway.core.nvml import load_nvml

INFINIBAND_FOLDER = Path("/sys/class/infiniband")

# A Hopper or Blackwell GPU has this many.
MAX_NVLINKS = 18


def list_nics(interface: str, *, infiniband: bool, ports: Path = INFINIBAND_FOLDER) -> list[str]:
    """Describes the network interface in use, with its speed if the driver knows it; empty for a loopback.

    Args:
        interface: name of the interface, such as eth0.
        infiniband: if True, adds the InfiniBand ports: NCCL uses them, Gloo does not.
        ports: sysfs folder of the ports.
    """
    # psutil has the interface; the rates of InfiniBand ports are in sysfs.
    lines = []
    state = psutil.net_if_stats().get(interface)
    if state is not None and "loopback" not in state.flags:
        speed = f"{state.speed} Mbit/s" if state.speed else "unknown speed"
        lines.append(f"{interface} {speed}, MTU {state.mtu}")
    for rate in sorted(ports.glob("*/ports/*/rate")) if infiniband else ():
        try:
            layer, speed = (rate.with_name(name).read_text().strip() for name in ("link_layer", "rate"))
        # The port went away.
        except OSError:
            continue
        lines.append(f"{rate.parts[-4]} port {rate.parts[-2]} {layer} {speed}")
    return lines


def list_gpu_links() -> list[str]:
    """Describes NVLink and PCIe of each GPU of this host, a line each; empty without nvidia-ml-py or a driver."""
    if (nvml := load_nvml()) is None:
        return []
    try:
        return [_describe_gpu(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


@contextmanager
def capture_nccl_log() -> Iterator[Callable[[], str]]:
    """Makes NCCL log its choices at its first use inside the block; yields a function that reads the log.

    If the user has set NCCL_DEBUG already, it stays as it is, and the function returns "".
    """
    if "NCCL_DEBUG" in os.environ:
        yield str
        return
    with tempfile.NamedTemporaryFile(prefix="headway-nccl-", mode="r", errors="replace") as log:
        variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": log.name}
        os.environ.update(variables)
        try:
            yield lambda: Path(log.name).read_text(errors="replace")
        finally:
            for name in variables:
                del os.environ[name]


def summarise_nccl_log(log: str) -> str:
    """Returns a line with NCCL's version, network, transports and number of channels, from its log at level INFO."""
    # The log has no fixed format: a line that is not found is left out.
    version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    network = re.findall(r"Using network (\S+)", log)
    transports = Counter(re.findall(r" via (\S+)", log))
    channels = re.findall(r"(\d+) coll channels", log)
    parts = [f"NCCL {version}".strip()]
    if network:
        parts.append(f"network {network[-1]}")
    if transports:
        parts.append("transports " + ", ".join(name for name, _ in transports.most_common()))
    if channels:
        parts.append(f"{channels[-1]} channels")
    return ", ".join(parts)


def _describe_gpu(nvml: Any, number: int) -> str:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def query(function: str, *args: int) -> Any:
        try:
            return getattr(nvml, function)(handle, *args)
        # This GPU does not support the query.
        except nvml.NVMLError:
            return None

    num_links = sum(query("nvmlDeviceGetNvLinkState", link) == 1 for link in range(MAX_NVLINKS))
    version = query("nvmlDeviceGetNvLinkVersion", 0) if num_links else None
    parts = [f"GPU {number} {query('nvmlDeviceGetName') or 'unnamed'}"]
    parts.append(f"{num_links} NVLinks" + (f" of version {version}" if version else "") if num_links else "no NVLink")
    generation, width = query("nvmlDeviceGetCurrPcieLinkGeneration"), query("nvmlDeviceGetCurrPcieLinkWidth")
    if generation and width:
        parts.append(f"PCIe {generation} x{width}")
    return ", ".join(parts)
