"""Where metrics go besides metrics.jsonl: against MLflow's own files and W&B's, where they are installed.

In processes of their own: both packages keep threads and processes for the life of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests._support import Said, finished, packed_digits, records, write_recipe

from headway.core.errors import RecipeError
from headway.observe.sinks import open_sinks

MLFLOW = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
WANDB = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
BESIDES = ("kind", "step", "position")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sinks")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    return folder


def trained(folder: Path, run: Path, sink: str, *overrides: str, **environment: str) -> Said:
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    quiet |= {f"WANDB_{name}_DIR": str(run.parent) for name in ("CACHE", "CONFIG", "DATA")}
    env = {**os.environ, **quiet, **environment}
    words = ["--resume", run] if run.exists() else [folder / "recipe.yaml", "--run", run, f"sinks=[{sink}]", *overrides]
    return finished("train", *words, env=env)


def expected(run: Path, kind: str, name: str) -> list[tuple[int, Any]]:
    return [(record["step"], pytest.approx(record[name])) for record in records(run, kind)]


@pytest.mark.parametrize(
    ("sink", "module", "package"),
    [("tensorboard", "tensorboard", "tensorboard"), ("mlflow", "mlflow", "mlflow-skinny"), ("wandb", "wandb", "wandb")],
)
def test_a_package_that_is_missing_is_named(
    sink: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(RecipeError, match=f"{package} is not installed .*pip install {package}, or remove it"):
        open_sinks([sink], tmp_path)


def test_prometheus_is_asked_and_not_written_to(tmp_path: Path) -> None:
    assert open_sinks(["prometheus"], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


READ_MLFLOW = """
import json, sys, mlflow
client = mlflow.MlflowClient()
found = {}
for run in client.search_runs([one.experiment_id for one in client.search_experiments()]):
    history = {}
    for key in run.data.metrics:
        history[key] = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]
    name = client.get_experiment(run.info.experiment_id).name
    found[run.info.run_id] = [name, run.info.run_name, run.info.status, history]
print(json.dumps(found))
"""


def mlflow_runs(store: dict[str, str]) -> Any:
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", **store}
    done = subprocess.run([sys.executable, "-c", READ_MLFLOW], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@MLFLOW
def test_mlflow_gets_the_records_and_goes_on_with_a_resumed_run(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = {"MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    said = trained(folder, run, "mlflow", **store)
    assert said.status == 0, said.err
    ((known, (experiment, name, status, history)),) = mlflow_runs(store).items()
    assert known == (run / "mlflow.id").read_text()
    assert (experiment, name, status) == ("headway", "run", "FINISHED")
    assert [tuple(one) for one in history["train/loss"]] == expected(run, "train", "loss")
    assert [tuple(one) for one in history["evaluate/accuracy"]] == expected(run, "evaluate", "accuracy")
    numbers = {name for name, value in records(run, "train")[0].items() if isinstance(value, int | float)}
    assert {key.removeprefix("train/") for key in history if key.startswith("train/")} == numbers - {*BESIDES}

    for path in (run / "checkpoints/step-00000012").iterdir():
        path.unlink()
    (run / "checkpoints/step-00000012").rmdir()
    said = trained(folder, run, "mlflow", **store)
    assert said.status == 0, said.err
    ((again, (_, _, status, history)),) = mlflow_runs(store).items()
    assert (again, status) == (known, "FINISHED")
    assert {step for step, _ in history["train/loss"]} == {record["step"] for record in records(run, "train")}


@MLFLOW
def test_a_server_of_mlflow_that_is_away_does_not_stop_a_run(folder: Path, tmp_path: Path) -> None:
    away = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    said = trained(folder, tmp_path / "run", "mlflow", **away)
    assert said.status == 0, said.err
    assert "MLflow does not take the records" in said.err
    assert f"{len(records(tmp_path / 'run'))} records did not reach MLflow: metrics.jsonl has them." in said.err


@MLFLOW
def test_a_wrong_address_of_mlflow_is_refused(folder: Path, tmp_path: Path) -> None:
    said = trained(folder, tmp_path / "run", "mlflow", MLFLOW_TRACKING_URI="nonsense://x")
    assert said.status == 2
    assert "MLflow cannot be used" in said.err
    assert "Traceback" not in said.err


FAKE_MLFLOW = '''
"""The part of MLflow's client that Headway calls, which writes plain files; for machines without MLflow."""
import json, os
from pathlib import Path
from types import SimpleNamespace as Object

class Metric(Object):
    def __init__(self, key, value, timestamp, step):
        super().__init__(key=key, value=value, timestamp=timestamp, step=step)

entities, exceptions = Object(Metric=Metric), Object(MlflowException=ValueError)

class MlflowClient:
    def __init__(self):
        self.folder = Path(os.environ["MLFLOW_TRACKING_URI"])
    def get_experiment_by_name(self, name):
        return Object(experiment_id="1")
    def create_run(self, experiment_id, run_name):
        return Object(info=Object(run_id="known"))
    def log_batch(self, run_id, metrics):
        with (self.folder / "metrics").open("a") as file:
            file.writelines(json.dumps([one.key, one.step, one.value]) + "\\n" for one in metrics)
    def log_image(self, run_id, image, artifact_file):
        (self.folder / artifact_file).parent.mkdir(exist_ok=True)
        image.save(self.folder / artifact_file)
    def log_text(self, run_id, text, artifact_file):
        (self.folder / artifact_file).parent.mkdir(exist_ok=True)
        (self.folder / artifact_file).write_text(text)
    def set_terminated(self, run_id):
        (self.folder / "ended").touch()
'''


@pytest.mark.check
def test_mlflow_gets_the_panels(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "mlflow.py").write_text(FAKE_MLFLOW)
    (tmp_path / "store").mkdir()
    fake = {"PYTHONPATH": str(tmp_path / "fake"), "MLFLOW_TRACKING_URI": str(tmp_path / "store")}
    said = trained(folder, tmp_path / "run", "mlflow", **fake)
    assert said.status == 0, said.err
    assert "did not reach" not in said.err
    store = tmp_path / "store"
    names = {path.name for path in (store / "panels").iterdir()}
    assert names == {"first-batch.png", "worst.png", "confusion.png", "confusion.md"}
    assert "| true | predicted | count |" in (store / "panels" / "confusion.md").read_text()
    assert (store / "ended").exists()


@pytest.mark.check
def test_tensorboard_gets_the_panels(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = trained(folder, run, "tensorboard")
    assert said.status == 0, said.err
    read = subprocess.run([sys.executable, "-c", READ_TENSORBOARD, run / "tensorboard"], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)
    assert found["images"] == {"panels/first-batch": [1], "panels/worst": [12], "panels/confusion": [12]}
    assert "images of" in found["texts"]["panels/confusion/text_summary"]
    width, height = found["sizes"]["panels/first-batch"]
    assert (width, height) == (8 * 128, 2 * 142)


READ_TENSORBOARD = """
import io, json, sys
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"images": 0, "tensors": 0})
events.Reload()
tags = events.Tags()
images = {tag: [one.step for one in events.Images(tag)] for tag in tags["images"]}
sizes = {
    tag: Image.open(io.BytesIO(events.Images(tag)[0].encoded_image_string)).size for tag in tags["images"]
}
texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
print(json.dumps({"images": images, "texts": texts, "sizes": sizes}))
"""


READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def records(data):
    # LevelDB's log format behind a head of seven bytes: checksum, length, and whether a record ends here
    place, held, block = 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        held, place = held + data[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):
            yield held
            held = b""

found = []
for data in records(open(sys.argv[1], "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    if record.WhichOneof("record_type") == "history":
        items = record.history.item
        found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
print(json.dumps(found))
"""


@WANDB
def test_wandb_gets_the_records_and_goes_on_with_a_resumed_run(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = trained(folder, run, "wandb")
    assert said.status == 0, said.err
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    known = (run / "wandb.id").read_text()
    assert file.name == f"run-{known}.wandb"
    done = subprocess.run([sys.executable, "-c", READ_WANDB, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind, name in (("train", "loss"), ("evaluate", "accuracy")):
        told = [(row["step"], row[f"{kind}/{name}"]) for row in found if f"{kind}/{name}" in row]
        assert told == expected(run, kind, name)
    (media,) = (run / "wandb").glob("offline-run-*/files/media")
    kept = {str(path.relative_to(media).parent) for path in media.rglob("*.*")}
    assert kept == {"images/panels", "table/panels"}
    assert len(list(media.rglob("worst_*.png"))) == 24
    assert len(list(media.rglob("first-batch_*.png"))) == 16

    (run / "summary.json").unlink()
    for path in (run / "checkpoints/step-00000012").iterdir():
        path.unlink()
    (run / "checkpoints/step-00000012").rmdir()
    said = trained(folder, run, "wandb")
    assert said.status == 0, said.err
    assert {path.name for path in (run / "wandb").glob("offline-run-*/run-*.wandb")} == {f"run-{known}.wandb"}


@WANDB
def test_wandb_without_a_login_is_refused(folder: Path, tmp_path: Path) -> None:
    said = trained(folder, tmp_path / "run", "wandb", WANDB_MODE="online", WANDB_API_KEY="", HOME=str(tmp_path))
    assert said.status == 2
    assert "Weights & Biases cannot be used" in said.err
    assert "WANDB_MODE=offline" in said.err
