"""`headway report`: one page from whatever a run has."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests._support import digits, headway, packed_digits, records, running, write_recipe

from headway.data import opening
from headway.page.panel import Panel

HOSTILE = (
    "<script>alert(1)</script>",
    "\"quoted\" 'name'",
    "\u732b & \U0001f408",
    "</script><img src=x onerror=alert(1)>",
)


class Tags(HTMLParser):
    """The tags of a page, and the text of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def page_of(run: Path) -> Tags:
    said = headway("report", run)
    assert said.out == f"Report: {run / 'report.html'}\n"
    page = Tags((run / "report.html").read_text(encoding="utf-8"))
    outside = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href") and value and not value.startswith(("data:", "#"))
    ]
    assert outside == []
    return page


def panels(run: Path) -> dict[str, Panel]:
    found = {}
    for path in (run / "panels").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        json.loads(text, parse_constant=pytest.fail)
        found[path.stem] = Panel.from_json(text)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", epochs=4)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    headway("train", folder / "recipe.yaml", "--run", folder / "run", "stop_at={accuracy: 0.5}")
    return folder / "run"


def test_a_finished_run(finished: Path) -> None:
    run = finished
    page, found = page_of(run), panels(run)
    assert found.keys() == {
        "result", "curve-accuracy", "curve-loss", "curve-lr", "curve-images_s", "curve-wait", "stages", "stage-table",
        "input", "anatomy", "anatomy-table", "first-batch", "worst", "confusion", "classes", "recipe", "machine",
    }  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    cards = {card["label"]: card["value"] for card in found["result"].data["cards"]}
    assert cards["accuracy"] == f"{summary['accuracy']:.2%}"
    assert cards["parameters"] == "650"
    assert cards["time to accuracy 0.5"].endswith("s")
    curve = {series["name"]: series for series in found["curve-loss"].data["series"]}
    assert curve["training"]["y"] == [record["loss"] for record in records(run, "train")]
    assert curve["evaluation"]["y"] == [record["loss"] for record in records(run, "evaluate")]
    matrix = np.array(found["confusion"].data["values"])
    assert matrix.sum() == 60
    assert np.trace(matrix) == pytest.approx(summary["accuracy"] * 60)
    assert (matrix.sum(axis=1) == 6).all()  # six of each class were held out
    right, taken = np.diag(matrix), matrix.sum(axis=0)
    classes = {row[0]: row[1:] for row in found["classes"].data["rows"]}
    assert classes.keys() == {str(number) for number in range(10)}
    for number in range(10):
        precision = f"{right[number] / max(taken[number], 1):.1%}"
        f1 = f"{2 * right[number] / (6 + taken[number]):.1%}"
        assert classes[str(number)] == ["6", precision, f"{right[number] / 6:.1%}", f1]
    shown = [float(row[-1].rstrip("%")) for row in found["classes"].data["rows"]]
    assert shown == sorted(shown), "the worst come first"
    worst = [float(re.search(r"loss ([\d.e-]+)", image["note"])[1]) for image in found["worst"].data["images"]]  # type: ignore[index]
    assert worst == sorted(worst, reverse=True)
    assert len(worst) == 24
    rows = {row[0]: row[1:] for row in found["recipe"].data["rows"]}
    assert rows["batch"][0] == "30"
    assert rows["stop_at.accuracy"] == ["0.5", "command line"]
    total = sum(sum(stack["values"]) for stack in found["stages"].data["stacks"])
    assert total == pytest.approx(summary["seconds"], abs=0.01)
    assert "leaves out start of the process" in page.text
    assert "finished" in page.text


def test_confusion_and_worst_are_those_of_the_predictions(folder: Path) -> None:
    """Against `headway predict` on the held-out files."""
    run = folder / "confusion"
    headway("train", folder / "recipe.yaml", "--run", run, "epochs=2")
    headway("evaluate", run)
    held_out = opening.open(folder / "digits.packed/eval")
    paths = [folder / "digits" / held_out.name(n) for n in range(len(held_out))]
    rows = [json.loads(line) for line in headway("predict", run, *paths, "--json").out.splitlines()]
    expected = np.zeros((10, 10), int)
    for path, row in zip(paths, rows, strict=True):
        expected[int(path.parent.name), int(row["label"])] += 1
    found = panels(run)
    assert np.array_equal(found["confusion"].data["values"], expected)
    captions = {image["note"].split(", ", 1)[1]: image["caption"] for image in found["worst"].data["images"]}
    for path, row in zip(paths, rows, strict=True):
        name, truth = f"{path.parent.name}/{path.name}", path.parent.name
        if name in captions:
            wrong = row["label"] != truth
            assert captions[name] == (f"{truth}, taken for {row['label']}" if wrong else f"{truth}, right")


def test_an_unfinished_run(folder: Path) -> None:
    """Killed in the middle: no summary, no evaluation panels."""
    run = folder / "killed"
    with running("train", folder / "recipe.yaml", "--run", run, "epochs=3000") as process:
        while process.poll() is None and (not (run / "metrics.jsonl").exists() or len(records_so_far(run)) < 20):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (run / "summary.json").exists()
    page, found = page_of(run), panels(run)
    assert {"result", "curve-loss", "recipe", "machine"} <= found.keys()
    assert "not finished" in page.text
    assert "The run has not ended yet." in page.text


def records_so_far(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def test_a_run_that_has_only_begun(folder: Path) -> None:
    run = folder / "begun"
    headway("train", folder / "recipe.yaml", "--run", run, "epochs=0.1", "log_every_steps=50")
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()
    for path in (run / "panels").iterdir():
        path.unlink()
    page_of(run)
    assert panels(run).keys() == {"result", "recipe", "machine"}


def test_synthetic_data_without_evaluation(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "data: {train: synthetic, synthetic: {samples: 64, size: [8, 8]}}\n"
        "model: {factory: 'headway.model:small_net', args: {width: 4}}\n"
        "optimizer: {name: sgd, lr: 0.1}\nbatch: 16\nepochs: 1\nprecision: fp32\n"
    )
    headway("train", recipe, "--run", tmp_path / "run")
    page_of(tmp_path / "run")
    assert "confusion" not in panels(tmp_path / "run")


def test_numbers_that_json_does_not_have(folder: Path, tmp_path: Path) -> None:
    """A user's metric may be no number for some batches: its curve has gaps, and the best weights are not lost."""
    (folder / "nan.py").write_text(
        "import torch\n"
        "from headway.setup.task import Classification\n"
        "class Task(Classification):\n"
        "    primary = 'odd'\n"
        "    calls = 0\n"
        "    def metrics(self, outputs, labels):\n"
        "        self.calls += 1\n"
        "        return {'odd': torch.full((len(outputs),), float('nan') if self.calls % 2 else 0.5)}\n"
    )
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "task.factory=nan.py:Task", "evaluate.batch=60")
    assert {record["odd"] for record in records(run)} == {None, 0.5}
    page_of(run)
    found = panels(run)
    assert None in [y for series in found["curve-odd"].data["series"] for y in series["y"]]
    assert json.loads((run / "summary.json").read_text())["best"]["odd"] == 0.5


def test_records_of_an_earlier_version_do_not_tell_the_batch(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    old = [{key: value for key, value in one.items() if key != "batch"} for one in records(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    page_of(run)
    assert {"curve-lr", "curve-images_s"} <= panels(run).keys()


def test_hostile_names_come_out_as_text(tmp_path: Path) -> None:
    digits(tmp_path / "src", per_class=8)
    rows = ["path,label"]
    for label, name in enumerate(HOSTILE):
        quoted = name.replace('"', '""')
        rows += [f'src/{label}/{number:03d}.png,"{quoted}"' for number in range(8)]
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    headway("pack", tmp_path / "list.csv", tmp_path / "digits.packed", "--split", "0.5")
    recipe = write_recipe(tmp_path / "recipe.yaml", name="<marquee>", batch=8)
    run = tmp_path / "<marquee>run<"
    headway("train", recipe, "--run", run)
    page, found = page_of(run), panels(run)
    assert sorted(found["confusion"].data["names"]) == sorted(HOSTILE)
    tags = [tag for tag, _ in page.tags]
    assert "marquee" not in tags
    assert not any("alert(1)" in str(value) for tag, attrs in page.tags if tag == "script" for value in attrs.values())
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert not any(script.strip().startswith("alert(1)") for script in page.scripts)
    html = (run / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in html
    assert "<img src=x" not in html
    said = headway("predict", run, *(tmp_path / "src" / "0").iterdir(), "--json")
    assert {json.loads(line)["label"] for line in said.out.splitlines()} <= set(HOSTILE)


def test_large_images_become_thumbnails(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "src" / name).mkdir(parents=True)
        for number in range(4):
            pixels = chance.integers(0, 256, (300, 400, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "src" / name / f"{number}.jpg")
    headway("pack", tmp_path / "src", tmp_path / "digits.packed", "--split", "0.5")
    model = {"factory": "headway.model:small_net", "args": {"width": 4}}
    recipe = write_recipe(tmp_path / "recipe.yaml", model=model, data={"size": 16}, batch=4, epochs=1)
    headway("train", recipe, "--run", tmp_path / "run")
    page_of(tmp_path / "run")
    sources = [image["src"] for image in panels(tmp_path / "run")["worst"].data["images"]]
    assert len(sources) == 4
    for source in sources:
        assert source.startswith("data:image/jpeg;base64,")
        assert len(source) < 20_000


def test_report_says_where_it_is_as_json(folder: Path) -> None:
    run = folder / "as-json"
    headway("train", folder / "recipe.yaml", "--run", run, "epochs=0.1")
    assert headway("report", run, "--json").json() == {"report": str(run / "report.html")}


def test_the_last_and_the_best_evaluation_are_shown(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    summary, last = json.loads((run / "summary.json").read_text()), records(run, "evaluate")[-1]
    for best in ({**last, "epoch": 0.5, "accuracy": 0.99}, last):
        (run / "summary.json").write_text(json.dumps({**summary, "best": best}))
        page_of(run)
        cards = {card["label"]: card for card in panels(run)["result"].data["cards"]}
        assert cards["accuracy"]["value"] == f"{last['accuracy']:.2%}"
        if best is last:
            assert "accuracy, best" not in cards
            assert cards["accuracy"]["note"].endswith(", which is the best; its weights are saved")
        else:
            assert cards["accuracy, best"]["value"] == "99.00%"
            assert cards["accuracy, best"]["note"] == "epoch 0.5; its weights are saved"
        assert "loss, best" not in cards
