"""Sinks of metrics besides metrics.jsonl. Each needs its extra, and is imported only if a recipe names it."""

from __future__ import annotations

import importlib
import logging
import os
import queue
import secrets
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import RecipeError
from headway.core.files import write_atomically
from headway.observe.panel_images import draw_panel, format_markdown, list_rows, read_images
from headway.page.panel import Panel

LOG = logging.getLogger("headway.observe")

# MLflow's experiment and W&B's project, unless the user's environment names another.
DEFAULT_PROJECT = "headway"
# Records per request to MLflow: it takes a thousand numbers, and a record has about ten.
MAX_RECORDS_PER_REQUEST = 32
# Seconds that the end of a run waits for MLflow.
MAX_CLOSE_S = 20.0


PANEL_KINDS = ("images", "matrix", "table")
"""Kinds of panels that sinks receive; curves they draw themselves."""


class MetricsSink(ABC):
    """Receives the records of metrics.jsonl, and panels."""

    @abstractmethod
    def record(self, record: dict[str, Any]) -> None:
        """Receives one record with `kind`, `step` and numbers."""

    @abstractmethod
    def show_panel(self, panel: Panel, step: int) -> None:
        """Receives a panel of one of PANEL_KINDS."""

    @abstractmethod
    def close(self) -> None:
        """Writes all pending records."""


@final
class TensorBoardSink(MetricsSink):
    """Writes event files to RUN/tensorboard, one scalar per number: `train/loss`, `evaluate/accuracy`, ..."""

    def __init__(self, folder: Path, after_step: int | None) -> None:
        module = _import_package("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(
            str(folder / "tensorboard"), purge_step=None if after_step is None else after_step + 1
        )

    def record(self, record: dict[str, Any]) -> None:
        for name, value in _name_numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def show_panel(self, panel: Panel, step: int) -> None:
        if (picture := draw_panel(panel)) is not None:
            self._writer.add_image(f"panels/{panel.name}", np.asarray(picture), step, dataformats="HWC")
        if panel.kind != "images":
            self._writer.add_text(f"panels/{panel.name}", format_markdown(panel), step)

    def close(self) -> None:
        self._writer.close()


@final
class MLflowSink(MetricsSink):
    """Writes to a run of MLflow at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME, else `headway`.

    A thread sends the records, so that a slow or missing server does not delay the run; lost records cause a warning.
    RUN/mlflow.id holds the id of MLflow's run, so that a resumed run continues it.
    """

    def __init__(self, folder: Path, after_step: int | None) -> None:
        self._mlflow = _import_package("mlflow", "mlflow-skinny")
        self._id_file = folder / "mlflow.id"
        self._name = folder.resolve().name
        try:
            self._client = self._mlflow.MlflowClient()
        # A wrong setting shows here; the server is not contacted yet.
        except Exception as error:
            fix = "Set MLFLOW_TRACKING_URI to the server or folder to write to, or remove mlflow from sinks."
            raise RecipeError(f"MLflow cannot be used: {error}", where="sinks", fix=fix) from error
        self._records: queue.SimpleQueue[tuple[int, dict[str, Any] | Panel] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headway-mlflow", daemon=True)
        self._thread.start()

    def record(self, record: dict[str, Any]) -> None:
        self._records.put((time.time_ns() // 10**6, record))

    def show_panel(self, panel: Panel, step: int) -> None:
        # An artifact has no step; a later panel of the same name replaces it.
        self._records.put((step, panel))

    def close(self) -> None:
        self._records.put(None)
        self._thread.join(MAX_CLOSE_S)
        if self._thread.is_alive():
            LOG.warning("MLflow did not take all records within %g s. metrics.jsonl has them.", MAX_CLOSE_S)

    def _run(self) -> None:
        run_id = ""
        num_lost = 0
        is_open = True
        while is_open:
            entries = [self._records.get()]
            with suppress(queue.Empty):
                # None ends the thread, and can only be the last entry.
                while len(entries) < MAX_RECORDS_PER_REQUEST:
                    entries.append(self._records.get_nowait())
            is_open = entries[-1] is not None
            filled = [entry for entry in entries if entry is not None]
            records = [(time_ms, value) for time_ms, value in filled if not isinstance(value, Panel)]
            if not filled:
                break
            try:
                run_id = run_id or self._start_run()
                if records:
                    self._client.log_batch(run_id, self._build_metrics(records))
                for _, value in filled:
                    if isinstance(value, Panel):
                        self._log_panel(run_id, value)
            # Servers, and the network on the way, can fail with any exception; training must go on.
            except Exception as error:
                if not num_lost:
                    LOG.warning("MLflow does not take the records: %s. The run continues.", error)
                num_lost += len(filled)
        if num_lost:
            LOG.warning("%d records did not reach MLflow. metrics.jsonl has them.", num_lost)
        with suppress(Exception):
            if run_id:
                self._client.set_terminated(run_id)

    def _log_panel(self, run_id: str, panel: Panel) -> None:
        if (picture := draw_panel(panel)) is not None:
            self._client.log_image(run_id, picture, f"panels/{panel.name}.png")
        if panel.kind != "images":
            self._client.log_text(run_id, format_markdown(panel), f"panels/{panel.name}.md")

    def _build_metrics(self, records: Sequence[tuple[int, dict[str, Any]]]) -> list[Any]:
        metric_class = self._mlflow.entities.Metric
        return [
            metric_class(name, float(value), time_ms, record["step"])
            for time_ms, record in records
            for name, value in _name_numbers(record).items()
        ]

    def _start_run(self) -> str:
        """Starts a run, or continues the run of this folder if there is one. Returns its id."""
        if self._id_file.exists():
            run_id = self._id_file.read_text()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            # Another run may create the experiment at the same moment.
            with suppress(self._mlflow.exceptions.MlflowException):
                self._client.create_experiment(name)
            experiment = self._client.get_experiment_by_name(name)
        new_run_id: str = self._client.create_run(experiment.experiment_id, run_name=self._name).info.run_id
        write_atomically(self._id_file, new_run_id)
        return new_run_id


@final
class WandbSink(MetricsSink):
    """Writes to a run of Weights & Biases in the project WANDB_PROJECT, else `headway`.

    With WANDB_MODE=offline it writes files to RUN/wandb. RUN/wandb.id holds the id of the run, so that a resumed run
    continues it.
    """

    def __init__(self, folder: Path, after_step: int | None) -> None:
        wandb = self._wandb = _import_package("wandb", "wandb")
        id_file = folder / "wandb.id"
        if not id_file.exists():
            write_atomically(id_file, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
                name=folder.resolve().name,
                id=id_file.read_text(),
                resume="allow",
                dir=str(folder),
                # wandb's capture of the console would break the progress bar.
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            fix = "Log in with wandb login, set WANDB_MODE=offline, or remove wandb from sinks."
            raise RecipeError(f"Weights & Biases cannot be used: {error}", where="sinks", fix=fix) from error
        # wandb would count the calls of `log` instead.
        self._run.define_metric("*", step_metric="step")

    def record(self, record: dict[str, Any]) -> None:
        self._run.log({**_name_numbers(record), "step": record["step"]})

    def show_panel(self, panel: Panel, step: int) -> None:
        name, shown = f"panels/{panel.name}", dict[str, Any]()
        if panel.kind == "images":
            shown[name] = [self._wandb.Image(image, caption=caption) for image, caption in read_images(panel)]
        elif (picture := draw_panel(panel)) is not None:
            shown[name] = self._wandb.Image(picture, caption=panel.note)
        if (table := list_rows(panel)) is not None:
            columns, rows = table
            shown[f"{name}-table"] = self._wandb.Table(columns=columns, data=rows)
        self._run.log({**shown, "step": step})

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Path, int | None], MetricsSink]] = {
    "tensorboard": TensorBoardSink,
    "mlflow": MLflowSink,
    "wandb": WandbSink,
}


def open_sinks(names: Sequence[str], folder: Path, after_step: int | None = None) -> list[MetricsSink]:
    """Returns the sinks of a recipe, except `prometheus`, which polls by itself (see `observe.prometheus`).

    Args:
        names: Names of sinks.
        folder: Run folder.
        after_step: Step that a resumed run continues from; later records are overwritten if the sink supports it.

    Raises:
        RecipeError: The package of a sink is not installed, or it is not configured.
    """
    return [SINKS[name](folder, after_step) for name in names if name in SINKS]


def _name_numbers(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by their names in other services, `KIND/NAME`."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {f"{record['kind']}/{name}": value for name, value in numbers.items() if name not in ("step", "position")}


def _import_package(module: str, package: str) -> Any:
    """Imports a module. Raises RecipeError if its package is not installed."""
    try:
        with warnings.catch_warnings():
            # These packages warn about their own dependencies at import.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        fix = f"Install it with pip install {package}, or remove it from sinks."
        raise RecipeError(f"{package} is not installed ({error})", where="sinks", fix=fix) from None
