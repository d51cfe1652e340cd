"""Every Python block of the library's pages runs as it stands, in a folder that holds `digits.packed`.

The blocks of a lab run one after the other, those of a shell too; one that begins with `# NAME.py` is saved as that.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests._support import packed_digits
from tests.conftest import absent

from headway.data.pack import pack

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs/library").glob("*.md")),
    *(ROOT / "docs" / f"{name}.md" for name in ("interchange", "landscape", "lifecycle")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PEERS = ROOT / ".venv-peers"
LABS = sorted((ROOT / "docs/labs").glob("*.md"))
LAB_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"# (\w+\.py)\n")
OF_PEERS = ("accelerate", "lightning", "timm", "transformers")
ALONE = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
SLOW = (
    *("cifar10", "error-surfaces", "fashion-mnist", "losses", "recurrent"),
    *("augment", "checkpoint", "communication", "networks", "optimizers"),
)
"""Labs and pages that train networks or compile them: 3 s and more."""


def cases(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=page.stem, marks=[pytest.mark.check] * (page.stem in SLOW)) for page in pages]


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("docs"), per_class=100, split=0.2)


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    (tmp_path / "digits.packed").symlink_to(packed)
    (tmp_path / "digits").symlink_to(packed.with_name("digits"))
    return tmp_path


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ran(code: str, folder: Path) -> str:
    with start(code, folder) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert err == ""
    return out


def test_there_are_pages() -> None:
    """Dataset and Loader; checkpoint and resume; augmentation by Keys."""
    code = "\n".join(block for page in PAGES for block in blocks(page))
    for name in ("headway.Loader(", "headway.Checkpoints(", "headway.restore(", ".keys()"):
        assert name in code


@pytest.mark.parametrize("page", cases(PAGES))
@pytest.mark.thin(1)
def test_the_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    found = blocks(page)
    assert found, f"{page.name} shows no code"
    for block in found:
        assert ran(block, folder).strip(), "a page shows what comes out"


def link_images(source: Path, dest: Path) -> None:
    """Links a part of CIFAR-10, 15,000 and 1,000 images: the run of the exercise sees each twice."""
    for part, per_class in (("train", 1_500), ("test", 100)):
        for one in sorted((source / part).iterdir()):
            (dest / part / one.name).mkdir(parents=True)
            for file in sorted(one.iterdir())[:per_class]:
                (dest / part / one.name / file.name).symlink_to(file)


@pytest.mark.parametrize("lab", cases(LABS))
@pytest.mark.thin(1)
@pytest.mark.timeout(1200)
def test_the_blocks_of_a_lab_run_one_after_the_other(lab: Path, folder: Path, request: pytest.FixtureRequest) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    if lab.stem == "cifar10":
        link_images(request.getfixturevalue("data_root") / "cifar10", folder / "cifar10")
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": places, "OMP_NUM_THREADS": "1"}
    text = lab.read_text(encoding="utf-8")
    for language, block in LAB_BLOCK.findall(text):
        if (name := SAVED.match(block)) is not None:
            (folder / name[1]).write_text(block)
        elif language == "python":
            assert ran(block, folder).strip(), "a lab shows what comes out"
        else:
            command = ["bash", "-euo", "pipefail", "-c", block]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
            assert done.stdout.strip()
    for part in ("**The question.**", "## Exercises"):
        assert part in text


@pytest.mark.parametrize(
    "guide",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.peers] * (page.stem in OF_PEERS)) for page in GUIDES],
)
@pytest.mark.thin(1)
def test_the_scripts_of_a_guide_run(guide: Path, folder: Path) -> None:
    """Those for another library run beside it, where `make peers` could install it."""
    package = guide.stem if guide.stem in OF_PEERS else ""
    found = sorted(PEERS.glob("lib/python3*/site-packages"))
    if package and not any((place / package).is_dir() for place in found):
        absent(f"{package} is not in {PEERS.name}: make peers", may_be=package == "timm")  # it needs torchvision
    # Appended, so that what both environments have is taken from this one.
    peers = f"import sys; sys.path += {[str(place) for place in found]!r}\n" if package else ""
    for block in blocks(guide):
        command = [sys.executable, "-c", peers + block]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ALONE, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), "a script shows what comes out"


RIGHT = re.compile(r"(\d+) of (\d+) images are right")
RIGHT_PAGES = [ROOT / "docs/guides/own-loop.md", ROOT / "docs/library/input.md"]


def test_pages_with_the_same_loop_show_the_same_result() -> None:
    shown = {match.groups() for page in RIGHT_PAGES for match in RIGHT.finditer(page.read_text(encoding="utf-8"))}
    assert len(shown) == 1, shown


@pytest.mark.check
@pytest.mark.parametrize("page", RIGHT_PAGES, ids=lambda page: page.stem)
def test_a_loop_gives_the_result_that_its_page_shows(page: Path, tmp_path: Path) -> None:
    """On the digits that the page makes, all 1,797. Another processor may round otherwise, in an image or two."""
    subprocess.run([sys.executable, ROOT / "examples/digits_folder.py", "digits"], cwd=tmp_path, check=True)
    pack(tmp_path / "digits", tmp_path / "digits.packed", split=0.2)
    (shown,) = RIGHT.findall(page.read_text(encoding="utf-8"))
    (block,) = [block for block in blocks(page) if "images are right" in block]
    ((right, count),) = RIGHT.findall(ran(block, tmp_path))
    assert (count, abs(int(right) - int(shown[0])) <= 3) == (shown[1], True), (right, shown)


def test_every_lab_and_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []


@pytest.mark.check
def test_the_checkpoint_page_goes_on_where_it_was_killed(folder: Path, packed: Path, tmp_path: Path) -> None:
    """As the page says: the same loss to the last digit."""
    (code,) = blocks(ROOT / "docs/library/checkpoint.md")
    whole = ran(code, folder)
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "digits.packed").symlink_to(packed)
    with start(code, killed) as process:
        while process.poll() is None and not (killed / "checkpoints/latest").exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it had ended before it was killed"
    assert ran(code, killed) == whole
