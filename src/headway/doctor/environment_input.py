"""Checks memory, loader, decoder, storage and network: the part of the environment that feeds a run."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import features

from headway.core import native as core
from headway.core.cpu_count import choose_thread_count
from headway.core.free_memory import read_free_memory_bytes
from headway.core.text_format import format_bytes, pluralise
from headway.data import native
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.decode import resolve_backend
from headway.data.shards import LooseFiles
from headway.data.tiers.choice import CachePlanner
from headway.data.tiers.remote_dataset import RemoteShards
from headway.doctor.environment_host import Findings, HostFiles, report_fault, report_fine
from headway.doctor.storage import StorageLocation, describe_location
from headway.setup.input_wording import TIER_PHRASES, describe_decoding
from headway.setup.recipe import TrainRecipe
from headway.storage.addresses import get_cache_folder

# Number of loose files from which a pack pays off: opening one takes about as long as decoding a small image.
MANY_FILES = 10_000
# Below this, sending the gradients of a large network takes longer than computing them.
SLOW_MBIT_S = 10_000


def check_memory(host: HostFiles, recipe: TrainRecipe, device: torch.device, dataset: Dataset | None) -> Findings:
    free = read_free_memory_bytes(groups=host.control_groups, membership=host.membership)
    # The two numbers are read at different moments, so only a large difference means a limit of the control group.
    limited = free < 0.9 * psutil.virtual_memory().available
    what = f"{format_bytes(free)} of memory are free{' (limit of the control group)' if limited else ''}"
    if dataset is None:
        yield report_fine(f"{what}.")
        return
    records = int(dataset.length.sum(dtype=np.int64))
    kept, why = recipe.data.cache, ""
    if kept == "auto":
        folder = Path(recipe.data.cache_folder or get_cache_folder())
        place = CachePlanner(dataset, str(device), folder, int(recipe.data.cache_gb * 1e9)).choose_automatically()
        # The choice that a run would make here, with its reason.
        kept, why = place.name, f": {place.reason}"
    what += f"; the records need {format_bytes(records)}"
    if records > free and kept in ("none", "disk") and not isinstance(dataset.source, RemoteShards):
        cure = "Pack smaller images (headway pack --mode resize=N,quality=90), or use more memory or a higher limit."
        yield report_fault(f"{what}: later epochs also read from storage.", cure)
    else:
        yield report_fine(f"{what}. The set {TIER_PHRASES[kept]}{why}.")


def check_loader(host: HostFiles, recipe: TrainRecipe) -> Findings:
    threads, share = recipe.data.threads or choose_thread_count(), host.share
    if threads > share:
        what = f"data.threads is {threads}, but this rank has {pluralise(share, 'core')}."
        yield report_fault(what, f"Leave data.threads out, or set it to at most {share}.")
    # With one core there is no choice, which the next case says.
    elif threads == share > 1:
        what = f"Decoding uses {threads} threads on {share} cores, which leaves no core to the training loop."
        yield report_fault(what, f"Leave data.threads out, or set it to {share - 1}.")
    elif share == 1:
        yield report_fine("Decoding and the training loop take turns on one core.")
    else:
        yield report_fine(describe_decoding(resolve_backend(recipe.data.decoder), threads, share))


def check_decoder(host: HostFiles, recipe: TrainRecipe, dataset: Dataset) -> Findings:
    if (dataset.flags & FLAG_RAW).all():
        yield report_fine("The records are pixels: no decoding is needed.")
        return
    if not native.is_available():
        off = host.environ.get("HEADWAY_NATIVE") == "0"
        what = "The native core is switched off" if off else "The native core cannot be used"
        cure = "Unset HEADWAY_NATIVE." if off else f"{core.FIX[0].upper()}{core.FIX[1:]}."
        yield report_fault(f"{what}: Pillow decodes, which takes about six times as long.", cure)
        if not features.check_feature("libjpeg_turbo"):
            yield report_fault("Pillow is built on a libjpeg that is not libjpeg-turbo.", "Install Pillow's wheel.")
    elif recipe.data.decoder == "pillow":
        yield report_fault("The recipe decodes with Pillow, though the native core works.", "Leave data.decoder out.")
    else:
        yield report_fine(f"The native core decodes ({native.describe_features()}).")
    slowed = [
        f"{name}={value}"
        for name, value in sorted(host.environ.items())
        if (name.startswith("JSIMD_FORCE") and value == "1" and name != "JSIMD_FORCEAVX2")
        # Portable code is no loss on a processor without AVX2.
        or (name == "HEADWAY_ISA" and value == "portable" and "avx2" in host.flags)
    ]
    for setting in slowed:
        yield report_fault(
            f"{setting} keeps the decoder from faster instructions.", f"Unset {setting.partition('=')[0]}."
        )
    yield from _check_libjpeg(host)


def _check_libjpeg(host: HostFiles) -> Findings:
    """Checks that the loaded libjpeg has SIMD code: only such code contains the names of the JSIMD variables."""
    paths = set(re.findall(r"\s(/\S*/libjpeg[^/\s]*)$", host.read_text("proc/self/maps"), re.MULTILINE))
    if not paths:
        host.unknown.append("whether libjpeg-turbo has SIMD code")
    for path in sorted(paths):
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                simd = data.find(b"JSIMD_FORCE") >= 0
        except (OSError, ValueError):
            # The file was replaced after it was loaded.
            host.unknown.append(f"whether {path} has SIMD code")
            continue
        if not simd:
            cure = "Install a libjpeg-turbo built with SIMD."
            yield report_fault(f"{path} has no SIMD code: decoding takes two to four times as long.", cure)


def check_storage(host: HostFiles, recipe: TrainRecipe, dataset: Dataset) -> Findings:
    place = describe_location(dataset, host.root / "proc/self/mountinfo")
    mount, holds = place.mount, _describe_records(place)
    # Loose files cost an `open` each; shards are opened once.
    loose = isinstance(dataset.source, LooseFiles)
    if isinstance(dataset.source, RemoteShards):
        yield report_fine(f"The data are at {place.at} ({holds}); data.cache decides whether they are kept locally.")
        return
    if mount is None:
        host.unknown.append("the file system of the data")
    elif mount.is_network:
        cure = "Copy them to a local disk, or serve them over http or s3: the cache tier keeps those locally."
        # With these caches the files are read once, before the first step.
        once = recipe.data.cache in ("memory", "device")
        yield report_fault(f"The data are on a network file system, {mount.kind} ({holds}).", "" if once else cure)
    elif mount.kind == "overlay":
        cure = "Mount the folder into the container (-v), so that reads bypass its layers."
        yield report_fault(f"The data are in a container's own layers, on overlay ({holds}).", cure)
    else:
        yield report_fine(f"The data are on {mount.kind} ({holds}).")
    if loose and place.files >= MANY_FILES:
        cure = f"Run headway pack {dataset.folder} {dataset.folder.name}.packed, and set data.train to the pack."
        yield report_fault(f"The data are {place.files:,} loose files, each opened by its name.", cure)
    if place.resident is None:
        host.unknown.append("how much of the data is in memory")


def _describe_records(place: StorageLocation) -> str:
    share = "" if place.resident is None else f", {place.resident:.0%} of it in memory"
    files = f" in {pluralise(place.files, 'file')}" if place.files else ""
    return f"{format_bytes(place.bytes)}{files}, records of {format_bytes(place.record_bytes)}{share}"


def check_network(host: HostFiles, interface: str, interfaces: Sequence[str]) -> Findings:
    """Checks one of the network interfaces that the ranks use."""
    folder = "sys/class/net"
    speed = host.read_number(f"{folder}/{interface}/speed")
    if interface == "lo":
        yield report_fine("Ranks communicate over loopback: all are on this host.")
    elif not (host.root / folder / interface).exists():
        names = ", ".join(sorted(path.name for path in host.root.glob(f"{folder}/*"))) or "none"
        cure = f"Set comm.interface to one of: {names}."
        yield report_fault(f"There is no network interface {interface}.", cure)
    elif host.read_text(f"{folder}/{interface}/operstate") == "down":
        yield report_fault(
            f"The network interface {interface} is down.", "Bring it up, or set comm.interface to another."
        )
    # Virtual interfaces report -1 or nothing.
    elif not speed > 0:
        host.unknown.append(f"the speed of {interface}")
    else:
        others = [
            (host.read_number(path / "speed"), path.name)
            for path in host.root.glob(f"{folder}/*")
            if host.read_text(path / "operstate") == "up" and path.name not in interfaces
        ]
        faster = max((one for one in others if one[0] > speed), default=None)
        what = f"Ranks communicate over {interface} ({speed:g} Mbit/s)"
        if faster is not None:
            yield report_fault(f"{what}; {faster[1]} has {faster[0]:g}.", f"Set comm.interface={faster[1]}.")
        elif speed < SLOW_MBIT_S:
            yield report_fault(f"{what}.", "Send fewer bytes (comm.wire=fp16), or use a faster network.")
        else:
            yield report_fine(f"{what}.")
