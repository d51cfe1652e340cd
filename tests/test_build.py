"""The package as it is installed: the wheel that `make wheel` makes, and what is left where nothing can be compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.conftest import absent

from headway.core.native import LIBRARY
from headway.data import native

pytestmark = pytest.mark.check
ROOT = Path(__file__).resolve().parents[1]
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
RUN = """
import io, sys
import numpy as np
from PIL import Image
from headway.data.decode import build_decoder
from headway.data.decode_request import DecodeRequest
from headway.data.records import Records

buffer = io.BytesIO()
Image.new("RGB", (40, 30), (200, 100, 50)).save(buffer, "JPEG", progressive=True)
decoder, out = build_decoder(2), np.zeros((3, 8, 8, 3), np.uint8)
build_decoder(1).close()
records, boxes = Records.from_buffers([buffer.getvalue()] * 3), np.array([[0, 0, 40, 30]] * 3, np.float32)
assert not decoder.decode(DecodeRequest(records, boxes, out)).any()
assert np.abs(out.astype(int) - (200, 100, 50)).max() <= 2
decoder.close()
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libjpeg" in line and "pillow.libs" not in line}
print(decoder.backend, sys.version_info[1], *libraries)
"""


def python(version: str) -> str:
    """One that runs: on the PATH, where pyenv leaves shims that may lead nowhere, or of pyenv itself."""
    if sys.version_info[:2] == (3, int(version[2:])):
        return sys.executable
    names = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for name in filter(None, names):
        if not subprocess.run([name, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode:
            return str(name)
    return ""


def environment(folder: Path, version: str, *packages: Path) -> Path:
    """The Python of a fresh virtual environment with some packages, and what decoding asks for."""
    subprocess.run([python(version), "-m", "venv", folder], check=True)
    found = folder / "bin/python"
    subprocess.run([found, *PIP, "install", "-c", ROOT / "constraints.txt", "crc32c", "numpy", "pillow"], check=True)
    subprocess.run([found, *PIP, "install", "--no-deps", *packages], check=True)
    return found


def run(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Decodes, where no compiler is and no other headway."""
    bare = {"PATH": "/nonexistent", "HOME": str(folder)}
    return subprocess.run([python, "-c", RUN], capture_output=True, text=True, check=True, cwd=folder, env=bare)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["make", "wheel", f"DIST={folder}"], check=True, cwd=ROOT)
    (found,) = folder.iterdir()
    return found


def test_a_wheel_is_for_every_python_and_brings_its_libjpeg(wheel: Path) -> None:
    assert re.fullmatch(r"headway-[\d.]+-py3-none-manylinux_\d+_\d+_x86_64.*\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "headway/data/libheadway.so" in names
    assert any(re.fullmatch(r"headway\.libs/libjpeg-\w+\.so[\d.]*", name) for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert "headway/data/native.py" in names
    assert not [name for name in names if name.startswith(("tests", "native", "bench"))]


@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_a_wheel_decodes_in_a_fresh_environment(version: str, wheel: Path, tmp_path: Path) -> None:
    if not python(version):
        absent(f"no Python {version} here", may_be=True)
    done = run(environment(tmp_path / "venv", version, wheel), tmp_path)
    backend, minor, library = done.stdout.split()
    assert (backend, minor) == ("native", version[2:])
    assert "headway.libs/libjpeg-" in library
    assert not done.stderr


@pytest.mark.parametrize("lacking", ["compiler", "working compiler", "headers"])
def test_where_nothing_can_be_compiled_the_reference_runs(lacking: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("native", "src"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, *PIP, "wheel", "--no-deps", "--build-constraint", ROOT / "constraints.txt"]
    command += ["--wheel-dir", tmp_path / "dist", source]
    variables = dict(os.environ)
    if lacking == "headers":
        command += ["-C", "cmake.define.CMAKE_DISABLE_FIND_PACKAGE_JPEG=ON"]
    else:
        variables["CXX"] = "/nonexistent" if lacking == "compiler" else "/bin/false"
    subprocess.run(command, check=True, env=variables)
    (found,) = (tmp_path / "dist").iterdir()
    names = zipfile.ZipFile(found).namelist()
    assert "headway/data/native.py" in names
    assert not [name for name in names if ".so" in name]
    if lacking != "compiler":
        return  # the same wheel: what it does is tested once
    done = run(environment(tmp_path / "venv", "{}.{}".format(*sys.version_info), found), tmp_path)
    assert done.stdout.split()[0] == "pillow"
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("The native core is not built: Pillow decodes images")


NEWER = re.compile(r"\t(v[a-z]\w+|andn|bextr|blsr?|bzhi|[sr][ahol]rx|shlx|mulx|pdep|pext|lzcnt|popcnt)\b")


def test_instructions_of_newer_processors_stay_where_they_are_asked_for() -> None:
    """An inline function that was compiled with them, and kept by the linker for all, would end older processors."""
    if not native.is_available():
        absent("the native core is not built")
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(LIBRARY)]
    function, wrong, seen = "", set(), set()
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.endswith(">:"):
            function = line.partition("<")[2][:-2]
        elif NEWER.search(line):
            isa = [name for name in ("4avx2", "6avx512") if name in function]
            seen.update(isa)
            wrong.update([] if isa else [function])
    assert seen == {"4avx2", "6avx512"}
    assert wrong == set()
