"""`headway export RUN --table`: measures an exported network in all the ways to run it that are here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import HeadwayError, UsageError
from headway.core.run_folder import RunFolder, read_processor_name
from headway.doctor.environment_builds import find_compiler
from headway.export.deck import compare_with_deck
from headway.export.table_data import TableImages, write_images, write_noise
from headway.export.table_engines import EAGER, ENGINES, Engine, PipelineSource
from headway.export.table_process import SLOW_CALL_FACTOR, Job
from headway.export.table_record import TABLE_FILE, InferenceTable
from headway.export.table_rows import build_row, compare_rows, count_comparable
from headway.export.versions import find_versions
from headway.training.evaluate import open_evaluation_set
from headway.training.runs import load_trained

START_S = 120.0
"""Time that a process may take besides its measuring: imports, loading, first calls."""

COMPILE_S = 1200.0
"""The same for torch.compile, which may take minutes on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How an inference table is measured.

    Attributes:
        seconds: time of measuring, without starts, compiling and comparing outputs.
        rounds: number of rounds; in each of them every row runs once.
        batches: batches, ascending, the first one 1.
        threads: numbers of threads; by default 1 and all cores.
        compare_s: time of comparing outputs; if the evaluation set would take longer, a part of it is compared.
        engines: names of the rows to measure; by default all. The first row, eager, is always measured.
        is_quick: shows that the rows run: 20 seconds, one round, batches 1 and 8, nothing compiled.
    """

    seconds: float = 180.0
    rounds: int = 3
    batches: tuple[int, ...] = (1, 8, 32, 128)
    threads: tuple[int, ...] = ()
    compare_s: float = 120.0
    engines: tuple[str, ...] = ()
    is_quick: bool = False

    def resolve(self) -> TableOptions:
        """Returns the options with the numbers of threads, and as `is_quick` says."""
        threads = self.threads or tuple(sorted({1, count_usable_cores()}))
        if not self.is_quick:
            return replace(self, threads=threads)
        return replace(self, seconds=20.0, rounds=1, batches=(1, 8), threads=threads, compare_s=20.0)


def measure_run_table(
    run: Path,
    folder: Path,
    options: TableOptions | None = None,
    *,
    data: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> InferenceTable:
    """Measures the table of an exported run, and writes it to `table.json` in the export folder.

    Args:
        run: the run folder.
        folder: the export folder.
        options: see there.
        data: packed folder to compare outputs on; by default the evaluation set of the run.
        tell: called with a line about each step.

    Raises:
        HeadwayError: the run cannot be loaded, or eager PyTorch cannot run it.
    """
    with tempfile.TemporaryDirectory(prefix=".table-", dir=folder) as name:
        setup = load_trained(RunFolder.open_trained(run), wide=True)
        with closing(setup.inputs):
            try:
                dataset = open_evaluation_set(setup, data, run)
            except UsageError:
                if data is not None:
                    raise
                images = write_noise(Path(name), (*setup.size, setup.channels), 128)
            else:
                with closing(dataset):
                    images = write_images(setup, dataset, Path(name))
        source = PipelineSource("headway.export.table_engines:load_run_pipeline", {"run": str(run.absolute())})
        table = measure_table(folder, source, images, options, scratch=Path(name), tell=tell)
    # An ensemble is no network of the decks.
    if not setup.members:
        table = table.model_copy(update={"deck": compare_with_deck(setup.recipe.model.factory, table)})
    table.write(folder / TABLE_FILE)
    return table


def measure_table(
    folder: Path,
    source: PipelineSource,
    images: TableImages,
    options: TableOptions | None = None,
    *,
    scratch: Path,
    tell: Callable[[str], None] = lambda _: None,
) -> InferenceTable:
    """Measures a table. Rows take turns, each in a process of its own in each round; one process runs at a time.

    Args:
        folder: the export folder.
        source: of the pipeline that the rows in PyTorch run.
        images: images to measure and compare with.
        options: see there.
        scratch: folder for temporary files.
        tell: called with a line about each step.

    Raises:
        HeadwayError: eager PyTorch cannot run the pipeline.
    """
    asked = (options or TableOptions()).resolve()
    engines, missing = choose_engines(folder, asked)
    cells = len(engines) * len(asked.threads) * (len(asked.batches) + 1) * asked.rounds
    workers = _Workers(folder, source, images, asked, scratch, cell_s=asked.seconds / cells)
    answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for number in range(asked.rounds):
        # Each round begins with another row.
        first = number % len(engines)
        for engine in engines[first:] + engines[:first]:
            if engine.name in missing:
                continue
            tell(f"Round {number + 1} of {asked.rounds}: {engine.name}")
            answer = workers.time(engine)
            if "error" in answer:
                _refuse_eager(engine, answer["error"])
                missing[engine.name] = answer["error"]
            else:
                answers[engine.name].append(answer)
    rows = [build_row(engine, folder, answers[engine.name]) for engine in engines if engine.name not in missing]
    samples = 0
    if images.available:
        samples = count_comparable(images.count, rows, asked.compare_s)
        outputs = workers.compare([engine for engine in engines if engine.name not in missing], samples, tell)
        for name in [name for name, found in outputs.items() if isinstance(found, str)]:
            missing[name] = str(outputs.pop(name))
        labels = None if images.labels is None else images.labels[:samples]
        rows = compare_rows([row for row in rows if row.name in outputs], outputs, labels, images.classes)
    return InferenceTable(
        machine=describe_machine(),
        image=images.shape,
        rounds=asked.rounds,
        threads=asked.threads,
        batches=asked.batches,
        samples=samples,
        samples_of=images.available,
        rows=tuple(rows),
        missing=missing,
        is_quick=asked.is_quick,
    )


def choose_engines(folder: Path, options: TableOptions) -> tuple[list[Engine], dict[str, str]]:
    """Returns the rows that can be measured, and the reasons for the others."""
    engines, missing = list[Engine](), dict[str, str]()
    for engine in ENGINES:
        if options.engines and engine.name not in (EAGER, *options.engines):
            continue
        if engine.file and not (folder / engine.file).is_file():
            missing[engine.name] = f"the export has no {engine.file} that passed the gate"
        elif engine.compiled and find_compiler() is None:
            missing[engine.name] = "there is no C++ compiler (on Debian: apt install g++)"
        elif engine.compiled and options.is_quick:
            missing[engine.name] = "it compiles for minutes, which a quick table leaves out"
        else:
            engines.append(engine)
    return engines, missing


@dataclass(frozen=True)
class _Workers:
    """Starts the processes of a table."""

    folder: Path
    source: PipelineSource
    images: TableImages
    options: TableOptions
    scratch: Path
    cell_s: float

    def time(self, engine: Engine) -> dict[str, Any]:
        """Times a row once; returns the answer of its process, or `error`."""
        job = self._build_job(engine, self.images.pixels)
        cells = len(job.threads) * (len(job.batches) + 1)
        return self._run(engine, job, cells * 2 * SLOW_CALL_FACTOR * max(self.cell_s, 0.5))

    def compare(
        self, engines: Sequence[Engine], samples: int, tell: Callable[[str], None]
    ) -> dict[str, NDArray[np.float32] | str]:
        """Computes the outputs of all rows for the first images, with the most threads; an error is text."""
        found: dict[str, NDArray[np.float32] | str] = {}
        pixels = self.images.pixels
        if samples < self.images.count:
            pixels = self.scratch / "compared.npy"
            np.save(pixels, np.load(self.images.pixels, mmap_mode="r")[:samples])
        for engine in engines:
            tell(f"Outputs of {samples:,} images: {engine.name}")
            out = self.scratch / "outputs.npy"
            job = replace(self._build_job(engine, pixels), threads=self.options.threads[-1:], batches=())
            answer = self._run(engine, replace(job, outputs=str(out)), 10 * self.options.compare_s)
            if "error" in answer:
                _refuse_eager(engine, answer["error"])
                found[engine.name] = answer["error"]
            else:
                found[engine.name] = np.load(out)
        return found

    def _build_job(self, engine: Engine, pixels: Path) -> Job:
        return Job(
            engine=engine.name,
            folder=str(self.folder.absolute()),
            source=self.source.to_json(),
            pixels=str(pixels.absolute()),
            threads=self.options.threads,
            batches=self.options.batches,
            cell_s=self.cell_s,
        )

    def _run(self, engine: Engine, job: Job, measuring_s: float) -> dict[str, Any]:
        limit_s = measuring_s + (COMPILE_S if engine.compiled else START_S)
        # The rounds of a row share the compiler's cache, which goes with the temporary files.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "compiled"), "TMPDIR": str(self.scratch)}
        # All rows compute on the CPU; a GPU's libraries would count as their memory.
        own["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "headway.export.table_process", job.to_json()]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, env={**os.environ, **own}, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"it was not done after {limit_s:.0f} s"}
        if done.returncode or not done.stdout.endswith("\n"):
            said = done.stderr.strip().splitlines()
            return {"error": f"its process ended with status {done.returncode}: {said[-1] if said else 'no message'}"}
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


def _refuse_eager(engine: Engine, error: str) -> None:
    """Raises HeadwayError if it is the row with which all others are compared that cannot run."""
    if engine.name == EAGER:
        raise HeadwayError(f"eager PyTorch cannot run this network ({error})", where="--table")


def describe_machine() -> dict[str, str]:
    """Returns processor and versions."""
    machine = {"processor": read_processor_name(), "cores": str(count_usable_cores())}
    return machine | find_versions(("torch",), ("onnxruntime", "openvino"))
