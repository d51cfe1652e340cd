"""Builds of the fuzz driver (native/fuzz), each with its sanitizers, kept below build/ from run to run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
JPEG_SOURCE = BUILD / "libjpeg-source"


def of(target: str) -> tuple[Path, str]:
    """The driver of a target, compiled anew where its sources have changed; and the target's name there.

    Processes that ask at the same time take turns: a driver that another one links cannot be run.
    """
    with _turn():
        return _build(target)


def _build(target: str) -> tuple[Path, str]:
    if target == "fork":
        return _driver("fuzz-plain", "-D", "HEADWAY_SANITIZERS=OFF"), target
    if target == "share":
        return _driver("fuzz-thread", "-D", "HEADWAY_SANITIZERS=thread"), target
    if target == "libjpeg":
        jpeg = _libjpeg()
        found = (f"JPEG_LIBRARY={jpeg}/libjpeg.a", f"JPEG_INCLUDE_DIR={jpeg}/include")
        return _driver("fuzz-libjpeg", *(part for one in found for part in ("-D", one))), "decode"
    return _driver("fuzz"), target


def _driver(name: str, *options: str) -> Path:
    build = BUILD / name
    always = ["-D", "HEADWAY_FUZZ=ON", "-D", "HEADWAY_STRICT=ON", "-D", "CMAKE_BUILD_TYPE=RelWithDebInfo"]
    _run("cmake", "-S", ROOT / "native", "-B", build, *always, *options)
    _run("cmake", "--build", build, "--target", "headway_fuzz", "-j", "2")
    return build / "fuzz/headway_fuzz"


def _libjpeg() -> Path:
    """libjpeg-turbo with sanitizers: of LIBJPEG_SOURCE, or the source of Debian's package."""
    source, build = _libjpeg_source(), BUILD / "libjpeg"
    if not (build / "libjpeg.a").exists():
        flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=shift"
        options = [
            "-D",
            "WITH_SIMD=OFF",
            "-D",
            "ENABLE_SHARED=OFF",
            "-D",
            "WITH_TURBOJPEG=OFF",
            "-D",
            "CMAKE_BUILD_TYPE=RelWithDebInfo",
        ]
        _run(
            "cmake",
            "-S",
            source,
            "-B",
            build,
            *options,
            "-D",
            f"CMAKE_C_FLAGS={flags}",
            "-D",
            f"CMAKE_EXE_LINKER_FLAGS={flags}",
        )
        _run("cmake", "--build", build, "--target", "jpeg-static", "-j", "2")
    include = build / "include"
    include.mkdir(exist_ok=True)
    for header in (
        source / "jpeglib.h",
        source / "jmorecfg.h",
        source / "jerror.h",
        source / "jpegint.h",
        build / "jconfig.h",
    ):
        shutil.copy(header, include)
    return build


def _libjpeg_source() -> Path:
    if given := os.environ.get("LIBJPEG_SOURCE"):
        return Path(given)
    if not JPEG_SOURCE.exists():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            lists = (
                Path("/etc/apt/sources.list.d/debian.sources").read_text().replace("Types: deb\n", "Types: deb-src\n")
            )
            (folder / "deb-src.sources").write_text(lists)
            (folder / "lists/partial").mkdir(parents=True)
            options = [
                f"Dir::Etc::sourcelist={folder}/deb-src.sources",
                "Dir::Etc::sourceparts=-",
                f"Dir::State::lists={folder}/lists",
            ]
            apt = ["apt-get", *(part for option in options for part in ("-o", option))]
            _run(*apt, "update")
            _run(*apt, "source", "libjpeg-turbo", cwd=folder)
            (unpacked,) = (path for path in folder.glob("libjpeg-turbo-*") if path.is_dir())
            JPEG_SOURCE.parent.mkdir(exist_ok=True)
            shutil.move(unpacked, JPEG_SOURCE)
    return JPEG_SOURCE


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "fuzz.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
