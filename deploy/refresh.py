"""Refreshes the software stack: `make refresh`.

Writes the newest versions that fit together into constraints.txt, the newest base image into deploy/Dockerfile and
deploy/headway.def, and a line into CHANGELOG.md. pip resolves, with your own configuration (index, certificates); torch
keeps its version unless you name another one. It installs nothing.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

# What the Makefile installs beside the package: pip itself, and build tools where the system has none.
TOOLS = ("cmake", "ninja", "pip", "setuptools")
# Extras that the Makefile installs. Those that are not here are pinned without what they ask for.
INSTALLED_EXTRAS = ("demo", "tensorboard")
# That of Debian 12, in the container recipes: the versions have to fit it, whichever Python runs this.
PYTHON = "3.11.2"
# The default build of torch for Linux names the versions of its own CUDA packages.
OF_TORCH = re.compile(r"(cuda-|nvidia-|triton$)")
BASE = re.compile(r"BASE=(?P<name>\S+):(?P<suite>[a-z]+)-(?P<date>\d{8})-slim@(?P<digest>sha256:[0-9a-f]{64})")
CHANGE = "- The software stack of "
WAIT_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", metavar="VERSION", help="version of torch; default: that of constraints.txt")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    options = parser.parse_args()
    root: Path = options.root
    said = refresh_constraints(root, options.torch)
    said += refresh_base(root / "deploy/Dockerfile", root / "deploy/headway.def")
    if said:
        write_change(root / "CHANGELOG.md", said)


def refresh_constraints(root: Path, torch: str | None) -> list[str]:
    """Writes the newest versions into constraints.txt. Returns what the changelog says about it."""
    path = root / "constraints.txt"
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    old = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    torch = torch or old["torch"]
    installed, alone = list_requirements(tomllib.loads((root / "pyproject.toml").read_text()))
    new = resolve(installed, torch)
    named = {normalise(read_name(one)) for one in installed}
    new = {name: new[name] for name in new if normalise(name) in named or not OF_TORCH.match(normalise(name))}
    known = {normalise(name) for name in new}
    if rest := [one for one in alone if normalise(read_name(one)) not in known]:
        new |= resolve(rest, torch, "--no-deps")
    path.write_text("\n".join([*comments, *sorted((f"{a}=={b}" for a, b in new.items()), key=str.lower)]) + "\n")
    before = {normalise(name): version for name, version in old.items()}
    after = {normalise(name): version for name, version in new.items()}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}")
    if before == after:
        print("constraints.txt: all versions are the newest that fit together")
        return []
    changed = sum(before.get(name) != version for name, version in after.items())
    return [f"{changed} new pins of {len(after)}, with torch {torch}"]


def list_requirements(project: Mapping[str, dict]) -> tuple[list[str], list[str]]:
    """Lists the requirements that the Makefile installs, and those of the other extras."""
    extras = project["project"].get("optional-dependencies", {})
    installed = [*TOOLS, *project["build-system"]["requires"], *project["project"]["dependencies"]]
    for group in project.get("dependency-groups", {}).values():
        installed += group
    for name in INSTALLED_EXTRAS:
        installed += extras.get(name, ())
    return installed, [one for name in extras if name not in INSTALLED_EXTRAS for one in extras[name]]


def resolve(requirements: Sequence[str], torch: str, *options: str) -> dict[str, str]:
    """Returns the newest versions by name that fit together. Ends the program with pip's words if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        pin, report = Path(folder, "torch.txt"), Path(folder, "report.json")
        pin.write_text(f"torch=={torch}\n")
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), "--constraint", str(pin)]
        # pip resolves for another Python only if nothing has to be built.
        command += ["--python-version", PYTHON, "--only-binary", ":all:", *options, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            # The end of pip's output names the requirements that do not fit.
            words = [*done.stdout.strip().splitlines()[-20:], done.stderr.strip()]
            what = f"pip has found no versions that fit together with torch {torch}. Nothing was changed."
            sys.exit("\n".join([*words, what]))
        found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    # A pin of 2.13.0 holds for the build 2.13.0+cpu too.
    return {one["name"]: one["version"].partition("+")[0] for one in found}


def refresh_base(dockerfile: Path, definition: Path) -> list[str]:
    """Writes tag and digest of the newest base image into both recipes, if a registry says them."""
    text = dockerfile.read_text()
    base = BASE.search(text)
    if base is None:
        sys.exit(f"{dockerfile}: there is no line ARG BASE=NAME:SUITE-DATE-slim@sha256:DIGEST.")
    name, suite = base["name"], base["suite"]
    try:
        tag, digest = find_newest_image(name, re.compile(rf"{suite}-\d{{8}}-slim"))
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        print(f"base image: it stays {name}:{suite}-{base['date']}-slim, since no registry answers: {error}")
        return []
    if digest == base["digest"]:
        print(f"base image: {name}:{tag} is the newest")
        return []
    if tag < (own := f"{suite}-{base['date']}-slim"):
        # A mirror may lag behind.
        print(f"base image: it stays {name}:{own}, since the registry has none that is newer than {tag}")
        return []
    print(f"base image: {suite}-{base['date']}-slim -> {tag}")
    dockerfile.write_text(text.replace(base[0], f"BASE={name}:{tag}@{digest}"))
    definition.write_text(definition.read_text().replace(base["digest"], digest))
    return [f"the base image is {name}:{tag}"]


def find_newest_image(name: str, tags: re.Pattern[str]) -> tuple[str, str]:
    """Returns the newest tag of an image, and its digest, by skopeo or crane.

    Raises:
        ValueError: neither is installed, or no tag fits.
        OSError, SubprocessError: it fails, or takes too long.
    """
    # The digest of an image for several processors is that of its list, whose bytes `--raw` gives.
    if tool := shutil.which("skopeo"):
        listed = json.loads(ask(tool, "list-tags", f"docker://{name}"))["Tags"]
    elif tool := shutil.which("crane"):
        listed = ask(tool, "ls", name).decode().split()
    else:
        raise ValueError("neither skopeo nor crane is installed")
    fitting = [tag for tag in listed if tags.fullmatch(tag)]
    if not fitting:
        raise ValueError(f"no tag fits {tags.pattern}")
    tag = max(fitting)
    if tool.endswith("skopeo"):
        return tag, f"sha256:{hashlib.sha256(ask(tool, 'inspect', '--raw', f'docker://{name}:{tag}')).hexdigest()}"
    return tag, ask(tool, "digest", f"{name}:{tag}").decode().strip()


def ask(*command: str) -> bytes:
    """Returns what a program prints. Raises OSError with its last words if it fails, or SubprocessError."""
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"{Path(command[0]).name} says {words[-1][:300] if words else 'nothing'!r}")
    return done.stdout


def write_change(path: Path, said: Sequence[str]) -> None:
    """Writes the line about the stack into the unreleased changes; that of an earlier refresh makes room."""
    text = path.read_text()
    start = text.index("## Unreleased")
    end = text.find("\n## ", start)
    head, body, tail = text[:start], text[start : end if end > 0 else None], text[end:] if end > 0 else ""
    line = f"{CHANGE}{datetime.date.today():%Y-%m-%d}: {'; '.join(said)}."
    body = re.sub(rf"^{CHANGE}.*\n", "", body, flags=re.MULTILINE)
    if "### Changed\n\n" not in body:
        body = f"{body.rstrip()}\n\n### Changed\n\n"
    path.write_text(head + body.replace("### Changed\n\n", f"### Changed\n\n{line}\n", 1) + tail)


def read_name(requirement: str) -> str:
    """Returns the name of a requirement such as `torch>=2.11`."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def normalise(name: str) -> str:
    """Returns a name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
