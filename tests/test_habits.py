"""The project's own habits, held by tests: what an import costs, how long a file gets, what is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import headway

ROOT = Path(__file__).resolve().parents[1]
COMMAND = Path(sys.executable).parent / "headway"
WRITTEN = ("src", "tests", "bench", "examples", "recipes", "docs")
# Machines' own paths, and the hosts of package registries; spelt so that this file passes too.
FORBIDDEN = re.compile(r"/(?:work|root)/|py[p]i\.org|python[h]osted")


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def _imported(*arguments: str) -> set[str]:
    """Every module that a fresh Python imports while it runs the arguments."""
    log = _python("-X", "importtime", *arguments).stderr
    return {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("arguments", [("-c", "import headway"), (str(COMMAND), "--help")])
def test_the_front_door_does_not_import_torch(arguments: tuple[str, ...]) -> None:
    modules = _imported(*arguments)
    assert "headway" in modules
    assert "torch" not in modules


def test_every_path_in_contributing_exists() -> None:
    cells = re.findall(r"`([^`]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    paths = [cell for cell in cells if re.fullmatch(r"[\w/.*]+/|[\w/.*-]+/[\w.*-]+\.\w+|tests/[\w/]+", cell)]
    assert len(paths) > 80
    rooms = (ROOT, ROOT / "src/headway")
    lost = [path for path in paths if "NAME" not in path and not any(list(room.glob(path)) for room in rooms)]
    assert lost == []


@pytest.mark.parametrize("room", ["core", "http", "page", "storage"])
def test_the_lower_floors_do_not_import_torch(room: str) -> None:
    files = sorted((ROOT / "src/headway" / room).glob("*.py"))
    names = [f"headway.{room}.{path.stem}" for path in files if path.stem != "__init__"]
    modules = _imported("-c", f"import {', '.join(names)}")
    assert modules >= set(names)
    assert "torch" not in modules


def _cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of files each of which imports, directly or through others, every other one."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            new = imports[waiting.pop()] - seen
            seen |= new
            waiting.extend(new)
        reached[module] = seen
    groups = {frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items()}
    return [set(group) for group in groups if group]


CYCLES_ALLOWED: list[set[str]] = []
"""Cycles that are known, each with its reason beside it; none of them has a file of headway.data."""


def test_no_files_import_each_other_in_a_circle() -> None:
    """At their top or inside a function; not for type checks alone."""
    # Comes with import-linter, and reads in a third of a second what takes `ast` five.
    import grimp

    graph = grimp.build_graph("headway", exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert imports["headway.data.opening"] >= {"headway.data.dataset", "headway.data.foreign"}
    assert len(imports) > 400
    assert not any(name.startswith("headway.data.") for cycle in CYCLES_ALLOWED for name in cycle)
    assert [sorted(cycle) for cycle in _cycles(imports) if cycle not in CYCLES_ALLOWED] == []


def test_a_circle_of_imports_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert _cycles(imports) == [{"a", "b", "c"}]


def test_every_public_name_resolves_and_says_what_it_is() -> None:
    assert headway.__all__
    for name in headway.__all__:
        assert getattr(headway, name).__doc__, f"headway.{name} has no docstring"
    assert set(headway.__all__) <= set(dir(headway))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = headway.no_such_name


def _files(*suffixes: str) -> list[Path]:
    found = [path for room in WRITTEN for path in sorted((ROOT / room).rglob("*")) if path.suffix in suffixes]
    assert found
    return found


def test_no_source_file_is_longer_than_500_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in _files(".py", ".js", ".css", ".html")}
    # Not ours: deploy/plotly-bundle.sh makes it.
    long = {path.name: lines for path, lines in lengths.items() if lines > 500 and path.name != "plotly.min.js"}
    assert long == {}


def test_nothing_names_a_machine_or_a_registry() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*.txt"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    for path in [*pages, *_files(".py", ".md", ".yaml", ".html")]:
        found = FORBIDDEN.search(path.read_text())
        assert found is None, f"{path.relative_to(ROOT)} has {found.group()!r}"


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_name(line) for line in lines if "==" in line and not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for group in (*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()):
        asked += group
    names = {_name(requirement) for requirement in asked}
    assert names <= pinned
    # What these need in turn, as far as it is installed here. torch's own packages for GPUs follow its pin.
    assert {
        name for name in _collect_requirements(names) if not name.startswith(("nvidia-", "cuda-", "triton"))
    } <= pinned


def _collect_requirements(names: set[str]) -> set[str]:
    """The installed packages that the named ones need, directly or not."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting += {_name(requirement.name)} - found
    return found


def _name(requirement: str) -> str:
    return re.split(r"[=<>;\[ ]", requirement)[0].lower().replace("_", "-")


# Each leaves one thing behind; what the police has to say of it stands beside.
LEAKS = {
    "thread": ("threading.Thread(target=time.sleep, args=(60,), daemon=True, name='stray').start()", "thread 'stray'"),
    "child": ("subprocess.Popen(['sleep', '60'])", "sleep 60"),
    "orphan": ("subprocess.run(['sh', '-c', 'sleep 61 &'])", "sleep 61"),
    "variable": ("os.environ['STRAY'] = '1'", "STRAY: was None, is '1'"),
    "removed_variable": ("del os.environ['PATH']", "PATH: was"),
    "folder": ("os.chdir('/')", "working directory"),
    "dtype": ("torch.set_default_dtype(torch.float64)", "default dtype: was torch.float32, is torch.float64"),
    "threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", "number of threads"),
    "deterministic": ("torch.use_deterministic_algorithms(True)", "deterministic algorithms"),
    "group": (
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
        "process group is still up",
    ),
}
CLEAN = {
    "nothing": "pass",
    "joined_thread": "threading.Thread(target=time.sleep, args=(0.2,)).start()",
    "child": "subprocess.run(['true'])",
    "monkeypatch": "monkeypatch.setenv('STRAY', '1'); monkeypatch.chdir('/')",
}


@pytest.mark.check
def test_the_police_names_what_a_test_leaves_behind(tmp_path: Path) -> None:
    police, waits = (ROOT / "tests/conftest.py").read_text(), "GRACE_S = 30.0"
    assert waits in police
    (tmp_path / "conftest.py").write_text(police.replace(waits, "GRACE_S = 2.0"))  # which three of them wait for
    leaky = [f"def test_leaks_{name}():\n    {body}\n" for name, (body, _) in LEAKS.items()]
    clean = [f"def test_clean_{name}(monkeypatch):\n    {body}\n" for name, body in CLEAN.items()]
    imports = "import os, subprocess, threading, time, torch, torch.distributed\n"
    (tmp_path / "test_leaks.py").write_text(imports + "\n".join([*leaky, *clean]))
    report = tmp_path / "report.xml"
    options = ("-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), f"--junitxml={report}")
    command = [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)
    assert run.returncode == 1, run.stdout + run.stderr
    cases = ElementTree.parse(report).iter("testcase")
    said = {case.get("name"): "".join(f"{part.get('message')}{part.text}" for part in case) for case in cases}
    assert said.keys() == {f"test_leaks_{name}" for name in LEAKS} | {f"test_clean_{name}" for name in CLEAN}
    for name, (_, message) in LEAKS.items():
        assert "this test left behind" in said[f"test_leaks_{name}"], name
        assert message in said[f"test_leaks_{name}"], name
    assert [name for name in CLEAN if said[f"test_clean_{name}"]] == []
