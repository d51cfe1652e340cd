"""Makes the kit: `python -m bench._gpu.gather WHEEL FOLDER`, or `make gpu-kit`. Needs a network and the real data."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from bench._gpu.kit import ABOUT, ARCHIVE, CIFAR, CORE, MOST_BYTES, PHOTOGRAPHS, SITE, pack_images
from bench._gpu.pieces import ROOT

PYTHON = "3.12"
PACKAGES = ("annotated-types", "crc32c", "pydantic", "pydantic_core", "typing-inspection", "typing_extensions")
"""pydantic_core needs a newer typing_extensions than torch does. The others are what images with PyTorch for GPUs often
lack; they have NumPy, Pillow, psutil, PyYAML, rich, safetensors and typer. Plotly, which only the report needs, would
take 10 MB."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> None:
    wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
    source = Path(os.environ.get("HEADWAY_TEST_DATA") or ROOT.parent / "shared/data")
    with tempfile.TemporaryDirectory(prefix="headway-gpu-kit-") as name:
        work = Path(name)
        if not (source / PHOTOGRAPHS).is_dir() and (source / "unpack").is_file():
            subprocess.run([source / "unpack", work / "data"], check=True)
            source = work / "data"
        content = work / "content"
        unpack_wheels(download(work / "wheels"), content / SITE)
        unpack_core(wheel, content)
        take_data(source, content)
        size = write(content, folder)
    if size > MOST_BYTES:
        sys.exit(f"{folder} has {size / 1e6:.1f} MB, and {MOST_BYTES / 1e6:.0f} may travel. Take less into it.")


def download(folder: Path) -> list[Path]:
    """Wheels of the missing packages, at the pinned versions."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *(f"{name}=={pins[name]}" for name in PACKAGES)], check=True)
    return sorted(folder.glob("*.whl"))


def unpack_wheels(wheels: list[Path], site: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)


def unpack_core(wheel: Path, content: Path) -> None:
    """Takes the shared libraries of our wheel, which auditwheel has brought libjpeg-turbo into, and its metadata, which
    names the version. The code itself is that of the tree."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if ".so" in Path(name).name]
        if len(names) < 2:
            sys.exit(f"{wheel} has no native core with its libjpeg. Make it by `make wheel`.")
        packed.extractall(content / CORE, names)
        packed.extractall(content / SITE, [name for name in packed.namelist() if name.endswith("/METADATA")])


def take_data(source: Path, content: Path) -> None:
    photographs = sorted((source / PHOTOGRAPHS).glob("*.JPEG"))
    if not photographs or not (source / CIFAR).is_dir():
        sys.exit(f"{source} has no {PHOTOGRAPHS} or no {CIFAR}. Set HEADWAY_TEST_DATA to the folder of the real data.")
    (content / PHOTOGRAPHS).mkdir(parents=True)
    for path in photographs:
        (content / PHOTOGRAPHS / path.name).write_bytes(path.read_bytes())
    pack_images(source / CIFAR, content / f"{CIFAR}.columns")


def write(content: Path, folder: Path) -> int:
    """Packs the content, and prints what it takes. Returns the bytes of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / ARCHIVE
    # Pictures hardly shrink, whatever the preset; packages do.
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        for path in sorted(content.iterdir()):
            packed.add(path, path.name)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    (folder / ABOUT).write_text(json.dumps({"python": PYTHON, "digest": digest}) + "\n", encoding="utf-8")
    for path in sorted(content.iterdir()):
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        print(f"{path.name:<18} {len(files):>6} files {sum(one.stat().st_size for one in files) / 1e6:>7.1f} MB")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB packed, of {MOST_BYTES / 1e6:.0f} MB that may travel")
    return size


if __name__ == "__main__":
    main()
