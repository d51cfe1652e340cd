"""Packs the kit for a machine without a network into one archive, and unpacks it there. Imports the standard library
only.

kit.tar.xz holds `site/` (packages, unpacked wheels), `core/` (the native core and libjpeg-turbo), `imagenet-250/`, and
CIFAR-10 in columns: 60,000 small JPEGs share one header, which is kept once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import struct
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ARCHIVE, ABOUT = "kit.tar.xz", "kit.json"
FOLDER = "gpu-kit"
SITE, CORE, PHOTOGRAPHS, CIFAR = "site", "core", "imagenet-250", "cifar10"
USED = "HEADWAY_GPU_KIT"
"""In the environment of a process that has been started with the kit."""
MOST_BYTES = 48_000_000
END_OF_HEADER = b"\xff\xda"
"""Start of scan: behind its segment the pixels begin."""


def find(root: Path) -> Path | None:
    """The kit's folder, where there is one that this process has not been started with."""
    folder = root / FOLDER
    return folder if (folder / ARCHIVE).is_file() and USED not in os.environ else None


def use(folder: Path, root: Path) -> None:
    """Unpacks the kit and starts this process once more with it.

    Packages and the native core are taken from it where they are missing, data where no variable names other ones.
    """
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    target = unpack(folder / ARCHIVE, root / "build/gpu-kit" / about["digest"])
    paths = [str(root / "src")]
    if _is_missing():
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if here != about["python"]:
            sys.exit(f"{folder} is for Python {about['python']}, and this is {here}. Make one: make gpu-kit.")
        paths.append(str(target / SITE))
    place_core(target / CORE, root / "src")
    environ = {
        "HEADWAY_TEST_DATA": str(target),
        "HEADWAY_CIFAR10": str(target / CIFAR),
        "HEADWAY_CACHE": str(target),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        USED: about["digest"],
    }
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def _is_missing() -> bool:
    """Whether this Python lacks Headway or one of the packages that the kit has."""
    try:
        importlib.metadata.version("headway")
    except importlib.metadata.PackageNotFoundError:
        return True
    return importlib.util.find_spec("pydantic") is None


def place_core(core: Path, src: Path) -> None:
    """Copies the native core to where the package looks for it, unless one was built there."""
    if (src / "headway/data/libheadway.so").exists():
        return
    for path in core.rglob("*.so*"):
        place = src / path.relative_to(core)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def unpack(archive: Path, target: Path) -> Path:
    """Unpacks an archive into a folder that is there only as a whole."""
    if target.exists():
        return target
    aside = target.with_suffix(f".{os.getpid()}")
    aside.mkdir(parents=True)
    # Python 3.11.2 has no filters; 3.12 warns where none is named. The archive is one that we made.
    filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(aside, **filters)
    if (columns := aside / f"{CIFAR}.columns").exists():
        unpack_images(columns, aside / CIFAR)
        columns.unlink()
    aside.replace(target)
    return target


def pack_images(folder: Path, path: Path) -> None:
    """Writes JPEG files of a folder as columns: names, headers that differ, for each image its header and length, and
    what follows the headers."""
    names, headers, rows, bodies = list[str](), dict[bytes, int](), bytearray(), bytearray()
    for file in sorted(folder.rglob("*.jpg")):
        data = file.read_bytes()
        scan = data.index(END_OF_HEADER) + 2
        end = scan + int.from_bytes(data[scan : scan + 2], "big")
        number = headers.setdefault(data[:end], len(headers))
        names.append(file.relative_to(folder).as_posix())
        rows += struct.pack("<HI", number, len(data) - end)
        bodies += data[end:]
    about = json.dumps({"names": names, "headers": [one.hex() for one in headers]}).encode()
    path.write_bytes(struct.pack("<I", len(about)) + about + rows + bodies)


def unpack_images(path: Path, folder: Path) -> None:
    """Writes the files back."""
    for name, data in _images(path.read_bytes()):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def _images(data: bytes) -> Iterator[tuple[str, bytes]]:
    (size,) = struct.unpack_from("<I", data)
    about = json.loads(data[4 : 4 + size])
    headers = [bytes.fromhex(one) for one in about["headers"]]
    row, body = 4 + size, 4 + size + 6 * len(about["names"])
    for name in about["names"]:
        number, length = struct.unpack_from("<HI", data, row)
        yield name, headers[number] + data[body : body + length]
        row, body = row + 6, body + length
