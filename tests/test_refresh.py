"""`make refresh` on a small project, with an index of wheels that the test makes and serves itself."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "deploy/refresh.py"
PROJECT = """
[build-system]
requires = ["builder>=1"]
[project]
dependencies = ["torch>=2", "Plain_Name>=1"]
optional-dependencies = { demo = ["shown"], cloud = ["remote"] }
[dependency-groups]
test = ["tester"]
"""
# The newest plain-name asks for a newer torch; old-friend is not asked for any more.
WHEELS = {
    "builder": {"1.0": ()},
    "torch": {"2.1.0+cpu": ("nvidia-math", "sums"), "2.2.0": ("sums",)},
    "nvidia-math": {"12.0": ()},
    "sums": {"1.9": (), "1.10": ()},
    "Plain_Name": {"1.0": ("torch",), "1.5": ("torch<2.2",), "2.0": ("torch>=2.2",)},
    "shown": {"0.3": ()},
    "remote": {"4.0": ("never-there",)},
    "tester": {"8.0": ("sums<1.10",), "9.0": ("sums",)},
    **{name: {"1.0": ()} for name in ("cmake", "ninja", "pip", "setuptools")},
}
OLD_DIGEST = "sha256:" + "0" * 64
MANIFEST = b'{"manifests": []}'


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: object) -> None:
        pass


def make_wheel(folder: Path, name: str, version: str, requires: Sequence[str]) -> None:
    """A wheel without files, in a folder that the server lists as an index does."""
    place = folder / name.lower().replace("_", "-")
    place.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    with zipfile.ZipFile(place / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]))
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("index")
    for name, versions in WHEELS.items():
        for version, requires in versions.items():
            make_wheel(folder, name, version, requires)
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text("# Kept.\nold-friend==1.0\nPlain_Name==1.0\ntorch==2.1.0\nsums==1.9\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0\n\n- All.\n"
    )
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/Dockerfile").write_text(
        f"ARG BASE=debian:bookworm-20260101-slim@{OLD_DIGEST}\nFROM ${{BASE}}\n"
    )
    (tmp_path / "deploy/headway.def").write_text(f"From: debian@{OLD_DIGEST}\n")
    (tmp_path / "bin").mkdir()
    return tmp_path


def write_program(path: Path, code: str) -> None:
    path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    path.chmod(0o755)


def refresh(project: Path, index: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as a user whose pip knows this index alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "COVERAGE"))}
    own = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "PATH": str(project / "bin"), "PIP_NO_CACHE_DIR": "1"}
    command = [sys.executable, str(SCRIPT), "--root", str(project), *options]
    return subprocess.run(command, env=kept | own, capture_output=True, text=True, check=False)


def test_the_newest_versions_that_fit_are_pinned(project: Path, index: str) -> None:
    """With torch as it was, and the base image that a registry names by skopeo."""
    tags = {"Tags": ["bookworm-20260201-slim", "bookworm-20251231-slim", "trixie-20260301-slim", "bookworm-slim"]}
    answers = {"list-tags": json.dumps(tags), "inspect": MANIFEST.decode()}
    write_program(project / "bin/skopeo", f"sys.stdout.write({answers!r}[sys.argv[1]])")
    done = refresh(project, index)
    assert done.returncode == 0, done.stderr
    assert (project / "constraints.txt").read_text().splitlines() == [
        *("# Kept.", "builder==1.0", "cmake==1.0", "ninja==1.0", "pip==1.0", "Plain_Name==1.5", "remote==4.0"),
        *("setuptools==1.0", "shown==0.3", "sums==1.10", "tester==9.0", "torch==2.1.0"),
    ]
    for line in ("plain-name: 1.0 -> 1.5", "old-friend: 1.0 -> none", "remote: none -> 4.0"):
        assert line in done.stdout
    digest = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
    base = f"ARG BASE=debian:bookworm-20260201-slim@{digest}"
    assert (project / "deploy/Dockerfile").read_text().splitlines() == [base, "FROM ${BASE}"]
    assert (project / "deploy/headway.def").read_text() == f"From: debian@{digest}\n"
    changes = (project / "CHANGELOG.md").read_text()
    before, _, after = changes.partition("### Changed\n\n- The software stack of ")
    assert before.startswith("# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n")
    line, _, rest = after.partition("\n")
    assert line.endswith(": 10 new pins of 11, with torch 2.1.0; the base image is debian:bookworm-20260201-slim.")
    assert rest.strip() == "## 0.1.0\n\n- All."


@pytest.mark.check
def test_another_torch_and_no_registry(project: Path, index: str) -> None:
    """It says that the image stays, and goes on; a torch that does not exist changes nothing."""
    write_program(project / "bin/crane", "sys.exit('no route to the registry')")
    recipes = [(project / "deploy" / name).read_text() for name in ("Dockerfile", "headway.def")]
    kept = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    done = refresh(project, index, "--torch", "3.0.0")
    assert done.returncode == 1
    assert "The user requested (constraint) torch==3.0.0" in done.stderr
    assert "fit together with torch 3.0.0. Nothing was changed." in done.stderr
    assert {path: path.read_bytes() for path in kept} == kept
    done = refresh(project, index, "--torch", "2.2.0")
    assert done.returncode == 0, done.stderr
    assert {"torch==2.2.0", "Plain_Name==2.0"} <= {*(project / "constraints.txt").read_text().splitlines()}
    said = "it stays debian:bookworm-20260101-slim, since no registry answers: crane says 'no route to the registry'"
    assert said in done.stdout
    assert [(project / "deploy" / name).read_text() for name in ("Dockerfile", "headway.def")] == recipes
    assert "base image" not in (project / "CHANGELOG.md").read_text()
    # Nothing is left to do, and nothing is written.
    unchanged = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    done = refresh(project, index, "--torch", "2.2.0")
    assert done.returncode == 0, done.stderr
    assert "the newest that fit together" in done.stdout
    assert {path: path.read_bytes() for path in unchanged} == unchanged
