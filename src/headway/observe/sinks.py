"""Sinks: where metrics go besides metrics.jsonl. Each needs its extra; none is imported unless a recipe names it."""

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

from headway.core.errors import RecipeError
from headway.core.files import write_atomically

LOG = logging.getLogger("headway.observe")

PROJECT = "headway"
"""MLflow's experiment and W&B's project, unless the user's environment names another."""
MAX_RECORDS = 32
"""That go to MLflow at once: it takes a thousand numbers, and a record has ten."""
MAX_CLOSE_S = 20.0
"""For what MLflow has not taken yet when a run ends."""


class MetricsSink(ABC):
    """Takes the records of metrics.jsonl."""

    @abstractmethod
    def record(self, record: dict[str, Any]) -> None:
        """One record: `kind`, `step`, and numbers."""

    @abstractmethod
    def close(self) -> None:
        """Writes what is still to be written."""


@final
class TensorBoardSink(MetricsSink):
    """Event files in RUN/tensorboard, one scalar a number: `train/loss`, `evaluate/accuracy`, ..."""

    def __init__(self, folder: Path, after_step: int | None) -> None:
        module = _import_package("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(
            str(folder / "tensorboard"), purge_step=None if after_step is None else after_step + 1
        )

    def record(self, record: dict[str, Any]) -> None:
        for name, value in _name_numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


@final
class MLflowSink(MetricsSink):
    """A run of MLflow where MLFLOW_TRACKING_URI says, in the experiment MLFLOW_EXPERIMENT_NAME, else `headway`.

    A thread of its own sends the records, so that a server that is slow or away holds nothing up; of records that it
    did not take there is a warning. RUN/mlflow.id says which run it is, so that a resumed one goes on with it.
    """

    def __init__(self, folder: Path, after_step: int | None) -> None:
        self._mlflow = _import_package("mlflow", "mlflow-skinny")
        self._known, self._name = folder / "mlflow.id", folder.resolve().name
        try:
            self._client = self._mlflow.MlflowClient()
        except Exception as error:  # of the user's settings; a server is not asked yet
            fix = "Set MLFLOW_TRACKING_URI to where it is to write, or take mlflow out of sinks."
            raise RecipeError(f"MLflow cannot be used: {error}", where="sinks", fix=fix) from error
        self._records: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headway-mlflow", daemon=True)
        self._thread.start()

    def record(self, record: dict[str, Any]) -> None:
        self._records.put((time.time_ns() // 10**6, record))

    def close(self) -> None:
        self._records.put(None)
        self._thread.join(MAX_CLOSE_S)
        if self._thread.is_alive():
            LOG.warning("MLflow has not taken all records in %g s: metrics.jsonl has them.", MAX_CLOSE_S)

    def _run(self) -> None:
        run, lost, more = "", 0, True
        while more:
            taken = [self._records.get()]
            with suppress(queue.Empty):
                while len(taken) < MAX_RECORDS:
                    taken.append(self._records.get_nowait())
            more = taken[-1] is not None
            batch = [one for one in taken if one is not None]
            if not batch:
                break
            try:
                run = run or self._start_run()
                self._client.log_batch(run, self._build_metrics(batch))
            except Exception as error:  # whatever a server, or the way to it, comes up with
                if not lost:
                    LOG.warning("MLflow does not take the records: %s. The run goes on.", error)
                lost += len(batch)
        if lost:
            LOG.warning("%d records did not reach MLflow: metrics.jsonl has them.", lost)
        with suppress(Exception):
            if run:
                self._client.set_terminated(run)

    def _build_metrics(self, batch: Sequence[tuple[int, dict[str, Any]]]) -> list[Any]:
        make = self._mlflow.entities.Metric
        return [
            make(name, float(value), time_ms, record["step"])
            for time_ms, record in batch
            for name, value in _name_numbers(record).items()
        ]

    def _start_run(self) -> str:
        """The id of the run, which is made anew unless this run folder has one."""
        if self._known.exists():
            run = self._known.read_text()
            self._client.update_run(run, status="RUNNING")
            return run
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        if found is None:
            with suppress(self._mlflow.exceptions.MlflowException):  # another run has just made it
                self._client.create_experiment(name)
            found = self._client.get_experiment_by_name(name)
        made: str = self._client.create_run(found.experiment_id, run_name=self._name).info.run_id
        write_atomically(self._known, made)
        return made


@final
class WandbSink(MetricsSink):
    """A run of Weights & Biases in the project WANDB_PROJECT, else `headway`; with WANDB_MODE=offline, files in
    RUN/wandb. RUN/wandb.id says which run it is, so that a resumed one goes on with it."""

    def __init__(self, folder: Path, after_step: int | None) -> None:
        wandb = _import_package("wandb", "wandb")
        known = folder / "wandb.id"
        if not known.exists():
            write_atomically(known, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=folder.resolve().name,
                id=known.read_text(),
                resume="allow",
                dir=str(folder),
                settings=wandb.Settings(console="off"),  # it would stand between the progress bar and the terminal
            )
        except wandb.Error as error:
            fix = "Log in: wandb login. Or set WANDB_MODE=offline, or take wandb out of sinks."
            raise RecipeError(f"Weights & Biases cannot be used: {error}", where="sinks", fix=fix) from error
        self._run.define_metric("*", step_metric="step")

    def record(self, record: dict[str, Any]) -> None:
        self._run.log({**_name_numbers(record), "step": record["step"]})

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Path, int | None], MetricsSink]] = {
    "tensorboard": TensorBoardSink,
    "mlflow": MLflowSink,
    "wandb": WandbSink,
}


def open_sinks(names: Sequence[str], folder: Path, after_step: int | None = None) -> list[MetricsSink]:
    """The sinks of a recipe that are written to; a resumed run writes over what came after `after_step`, where a sink
    has means for that. `prometheus` is none of them: it is asked, see `observe.prometheus`.

    Raises:
        RecipeError: a sink's package is not installed, or it is not set up.
    """
    return [SINKS[name](folder, after_step) for name in names if name in SINKS]


def _name_numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by what they are called elsewhere, `KIND/NAME`."""
    found = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {f"{record['kind']}/{name}": value for name, value in found.items() if name not in ("step", "position")}


def _import_package(module: str, package: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # their own imports warn of their dependencies
            return importlib.import_module(module)
    except ImportError as error:
        fix = f"Install it: pip install {package}. Or take it out of sinks."
        raise RecipeError(f"{package} is not installed ({error})", where="sinks", fix=fix) from None
