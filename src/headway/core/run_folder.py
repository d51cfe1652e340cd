"""The folder of one training run. No other file knows its layout.

recipe.yaml (resolved), provenance.json, metrics.jsonl, quarantine.jsonl, ids.bin (with `log_ids`), layers.rows and
activations.rows (if the recipe observes them), updates.bin (of asynchronous training), host.rows, gpu.rows, ranks.rows,
trace-RANK.json, panels/*.json, checkpoints/step-*/, weights.safetensors (the best), report.html, summary.json. With
several processes, each writes an ids-NAME.bin of its own.

The folder of an ensemble has ensemble.json, which names its members, in place of recipe.yaml and weights. Averaged
weights have a recipe and weights of their own, and `parents` in provenance.json.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from headway.core import row_file
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error, expect_empty_folder, open_regular, read_text, write_atomically
from headway.core.interface import choose_wording
from headway.core.path_suggestions import suggest_path
from headway.core.recipe_yaml import parse_recipe_tree
from headway.core.untrusted_json import JsonError, describe_kind, is_whole_number, parse_object

# One sample of ids.bin: position, requested id, served id, as little-endian int64.
IDS_BYTES = 24

# Limit of one line of a .jsonl file.
MOST_LINE_BYTES = 16 << 20

# Environment variable in which a launcher passes the command that resumes the run to its processes.
RESUME_COMMAND = "HEADWAY_GO_ON"

RUNS = Path("runs")
"""Folder of the runs that no --run names."""


def describe_resume(folder: Path) -> str:
    """Returns the command, or the Python function, that resumes the run in a folder."""
    command = f"headway train --resume {shlex.quote(str(folder))}"
    return choose_wording(command=command, python=f"headway.resume({str(folder)!r})")


def describe_naming() -> str:
    """Returns how to name the run folder. torchrun takes `--run` for its own, so the long form stands here."""
    return choose_wording(command="Name it: headway train RECIPE --run-folder FOLDER", python="Name it with run=")


def get_run_option() -> str:
    """Returns the option, or the argument, that names the run folder."""
    return choose_wording(command="--run", python="run=")


class RunFolder:
    """A run folder. Use `RunFolder.create` for a new one and `RunFolder.open` for an existing one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe_path = folder / "recipe.yaml"
        self.metrics_path = folder / "metrics.jsonl"
        self.quarantine_path = folder / "quarantine.jsonl"
        self.ids_path = folder / "ids.bin"
        self.updates_path = folder / "updates.bin"
        self.weights_path = folder / "weights.safetensors"
        self.ensemble_path = folder / "ensemble.json"
        self.report_path = folder / "report.html"
        self.panels = folder / "panels"
        self.checkpoints = folder / "checkpoints"

    @staticmethod
    def create(folder: Path) -> RunFolder:
        """Creates a run folder, or takes over one whose run was killed before it wrote its recipe.

        Raises:
            UsageError: the folder is a run already, holds other files, or cannot be created.
        """
        run = RunFolder(folder)
        RunFolder.expect_free(folder)
        with _explain_folder_errors(folder):
            for part in (folder, run.panels, run.checkpoints):
                part.mkdir(parents=True, exist_ok=True)
        return run

    @staticmethod
    def expect_free(folder: Path) -> None:
        """Checks a folder for a new run before any long work. Raises UsageError as `create` does."""
        run = RunFolder(folder)
        with _explain_folder_errors(folder):
            if run.recipe_path.exists():
                raise UsageError(
                    "this run folder exists",
                    where=str(folder),
                    fix=f"Resume it: {describe_resume(folder)}. Or name another one with {get_run_option()}",
                )
            # The recipe is written last, so a folder without one is not a run yet.
            expect_empty_folder(folder, get_run_option(), unfinished=("provenance.json", "recipe.yaml"))

    def describe_origin(self) -> str:
        """Returns what the folder holds if it was not trained, such as `ensemble of 3 networks`; otherwise nothing."""
        about = self.read_provenance()
        if members := about.get("members"):
            return f"ensemble of {len(members)} networks"
        if parents := about.get("parents"):
            return f"mean of the weights of {len(parents)} networks" if len(parents) > 1 else "weights of another run"
        return ""

    @property
    def resume_command(self) -> str:
        """The command that resumes this run, with as many processes as before."""
        return os.environ.get(RESUME_COMMAND) or describe_resume(self.folder)

    def rows_path(self, kind: str) -> Path:
        """Returns the path of the numbers per layer, rank or device; see `headway.core.row_file`."""
        return self.folder / f"{kind}.rows"

    def process_rows_path(self, kind: str, name: str) -> Path:
        """Returns the path of the numbers of one process; of the leading one it is that of `rows_path`."""
        return self.rows_path(f"{kind}-{name}" if name else kind)

    def list_process_rows(self, kind: str) -> dict[str, Path]:
        """Lists the paths of the numbers of all processes by their names; the leading one is named ""."""
        paths = [self.rows_path(kind), *sorted(self.folder.glob(f"{kind}-*.rows"), key=_split_number)]
        return {path.stem.removeprefix(kind).removeprefix("-"): path for path in paths if path.is_file()}

    def process_ids_path(self, name: str) -> Path:
        """Returns the path of one process's ids; a process that trains alone is named ""."""
        return self.folder / f"ids-{name}.bin" if name else self.ids_path

    @staticmethod
    def open(folder: Path) -> RunFolder:
        """Opens an existing run folder.

        Raises:
            UsageError: there is no such folder, or it is not a run folder.
        """
        run = RunFolder(folder)
        if run.ensemble_path.is_file():
            what = "this is an ensemble: it predicts and is evaluated, and nothing else"
            raise UsageError(
                what, where=str(folder), fix=f"Name one of its members, listed in {run.ensemble_path.name}."
            )
        if not run.recipe_path.is_file():
            # A folder is a run from the moment its recipe.yaml exists; see `create`.
            what, fix = "there is no such run folder", "Start a run with headway train RECIPE."
            if folder.exists():
                what = f"this is not a run folder ({'it has no recipe.yaml' if folder.is_dir() else 'it is a file'})"
            else:
                fix = suggest_path(folder, lambda path: RunFolder(path).recipe_path.is_file(), folders=[RUNS]) or fix
            raise UsageError(what, where=str(folder), fix=fix)
        return run

    @staticmethod
    def open_trained(folder: Path) -> RunFolder:
        """Opens a run, or an ensemble of runs, for predictions and evaluations. Raises UsageError as `open` does."""
        run = RunFolder(folder)
        return run if run.ensemble_path.is_file() else RunFolder.open(folder)

    @staticmethod
    def open_resumable(folder: Path) -> RunFolder:
        """Opens a run that can go on. Raises UsageError as `open` does; also for averaged weights."""
        run = RunFolder.open(folder)
        if (run.folder / "provenance.json").exists() and "parents" in run.read_provenance():
            what, start = "these weights are an average and were not trained here", f"model.weights={run.weights_path}"
            raise UsageError(what, where=str(folder), fix=f"Start a run from them: headway train RECIPE {start}.")
        return run

    @staticmethod
    def find_free_name(parent: Path, name: str) -> Path:
        """Returns parent/name, or the first of parent/name-2, -3, ... that does not exist."""
        folder, number = parent / name, 1
        while folder.exists():
            number += 1
            folder = parent / f"{name}-{number}"
        return folder

    @contextmanager
    def lock(self, held: str = "another process trains in this run folder") -> Iterator[None]:
        """Locks the folder against training by other processes for the duration of the block.

        Args:
            held: message if another process holds the lock.

        Raises:
            UsageError: another process holds the lock.
        """
        # The kernel releases the lock of a killed process, so no stale lock file can remain.
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "Wait for it, or stop it."
                raise UsageError(held, where=str(self.folder), fix=fix) from None
            # A file system without locks.
            except OSError:
                pass
            yield
        finally:
            os.close(handle)

    @contextmanager
    def explain_disk_errors(self) -> Iterator[None]:
        """Turns errors of writing into the run folder into messages for the duration of the block."""
        try:
            yield
        except OSError as error:
            what, where = "the disk is full", str(self.folder)
            # Errors of other files, for example of the data set, keep their own message.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                where = str(error.filename)
                if error.filename is None or self.folder.absolute() not in Path(where).absolute().parents:
                    raise
                what = f"this cannot be written ({error.strerror})"
            mend = "make room" if where == str(self.folder) else "mend it"
            fix = f"Nothing before it is lost: {mend}. Then go on: {self.resume_command}"
            raise HeadwayError(what, where=where, fix=fix) from error

    def write_json(self, name: str, data: Any) -> None:
        """Writes NAME.json atomically."""
        write_atomically(self.folder / f"{name}.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Reads an object from NAME.json.

        Raises:
            UsageError: there is no such file.
            HeadwayError: it is damaged.
        """
        path = self.folder / f"{name}.json"
        try:
            return parse_object(read_text(path))
        except FileNotFoundError:
            raise UsageError(f"the run has no {path.name}", where=str(self.folder)) from None
        except JsonError as error:
            raise HeadwayError(f"{path.name} is damaged: {error}", where=str(self.folder)) from None
        except (OSError, UnicodeDecodeError) as error:
            what = f"{path.name} cannot be read ({describe_os_error(error)})"
            raise HeadwayError(what, where=str(self.folder)) from None

    def note_resume(self, step: int, ranks: int) -> None:
        """Notes in provenance.json that the run goes on from a step, by this command or by a launcher's restart."""
        about = self.read_provenance()
        entry = {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "ranks": ranks}
        self.write_json("provenance", about | {"resumes": [*about.get("resumes", []), entry]})

    def read_provenance(self, **wanted: type) -> dict[str, Any]:
        """Reads provenance.json.

        Args:
            wanted: required entries and their types.

        Raises:
            HeadwayError: the file is missing or damaged, or lacks an entry.
        """
        provenance: dict[str, Any] = self.read_json("provenance")
        # A run folder may have been copied from another machine, or edited.
        for name, kind in wanted.items():
            if type(provenance.get(name)) is not kind:
                what = f"provenance.json has {describe_kind(provenance.get(name))} as {name}"
                raise HeadwayError(what, where=str(self.folder), fix="Copy the run folder again.")
        return provenance

    def read_recipe_text(self) -> str:
        """Returns the YAML of the resolved recipe. Raises HeadwayError if it cannot be read."""
        try:
            return read_text(self.recipe_path)
        except (OSError, UnicodeDecodeError) as error:
            what = f"recipe.yaml cannot be read ({describe_os_error(error)})"
            raise HeadwayError(what, where=str(self.folder)) from None

    def read_recipe_tree(self) -> dict[str, Any]:
        """Returns the tree of the resolved recipe. Raises HeadwayError if it cannot be read or parsed."""
        return parse_recipe_tree(self.read_recipe_text(), str(self.recipe_path))

    def read_summary(self) -> dict[str, Any]:
        """Returns summary.json; empty before the run has ended or stopped."""
        summary: dict[str, Any] = self.read_json("summary") if (self.folder / "summary.json").exists() else {}
        return summary

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yields the records of metrics.jsonl in order, without an incomplete last line that a kill has left."""
        yield from read_json_lines(self.metrics_path)

    def truncate_logs(self, position: int) -> None:
        """Removes the entries after `position` from all logs: a resumed run writes them again."""
        self.truncate_metrics(position)
        self.truncate_ids(position)

    def truncate_metrics(self, position: int) -> None:
        """Removes the entries after `position` from metrics, rows and quarantine."""
        for path in self.folder.glob("*.rows"):
            row_file.truncate_rows(path, position)
        # A metric's position counts the samples served before it; a quarantined sample's position is its own.
        for path, first_cut in ((self.metrics_path, position + 1), (self.quarantine_path, position)):
            kept = [record for record in read_json_lines(path) if record["position"] < first_cut]
            if path.exists():
                write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))

    def seal_ids(self, position: int, name: str) -> None:
        """Truncates the ids of a lost process in a new file: if it only slept, it may still write to the old one."""
        path = self.process_ids_path(name)
        if path.exists():
            write_atomically(path, path.read_bytes()[: _count_id_bytes(path, position)])

    def keep_ids(self, name: str, start: int, positions: Collection[int]) -> None:
        """Removes those samples of a lost process from position `start` on whose step was made by another one.

        Args:
            positions: the positions of the steps that the process did complete.
        """
        path = self.process_ids_path(name)
        if path.exists():
            content = path.read_bytes()
            rows = np.frombuffer(content[: len(content) // IDS_BYTES * IDS_BYTES], "<i8").reshape(-1, IDS_BYTES // 8)
            kept = (rows[:, 0] < start) | np.isin(rows[:, 0], list(positions))
            # A new file, as in `seal_ids`.
            write_atomically(path, rows[kept].tobytes())

    def seal_all_ids(self, position: int, besides: Collection[str]) -> None:
        """Seals the ids of all processes that wrote some from `position` on, except those that continue to train."""
        for path in self.folder.glob("ids-*.bin"):
            name = path.name.removeprefix("ids-").removesuffix(".bin")
            if name not in besides and _count_id_bytes(path, position) < path.stat().st_size:
                self.seal_ids(position, name)

    def truncate_ids(self, position: int, name: str | None = None) -> None:
        """Removes the samples from `position` on from one process's ids, or from all if `name` is None."""
        for path in self.folder.glob("ids*.bin") if name is None else [self.process_ids_path(name)]:
            if path.exists():
                os.truncate(path, _count_id_bytes(path, position))


@contextmanager
def _explain_folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # A full disk has a message of its own, in `system_errors`.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"this folder cannot be created or used ({describe_os_error(error)})"
        raise UsageError(what, where=str(folder), fix=f"Name another one with {get_run_option()}") from error


def _count_id_bytes(path: Path, position: int) -> int:
    """Returns the bytes of an ids file before the first sample from `position` on, in whole rows."""
    # Positions rise, so the cut is found by binary search.
    content = path.read_bytes()
    rows = np.frombuffer(content[: len(content) // IDS_BYTES * IDS_BYTES], "<i8").reshape(-1, IDS_BYTES // 8)
    return int(np.searchsorted(rows[:, 0], position)) * IDS_BYTES


def _split_number(path: Path) -> tuple[int, str]:
    """Returns a key that sorts names with numbers by these: 2 before 10."""
    digits = "".join(one for one in path.stem if one.isdigit())
    return int(digits or 0), path.stem


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a .jsonl file up to the first damaged one; nothing if there is no file."""
    if not path.exists():
        return
    # The limit per line bounds memory: a damaged file may have no line end for gigabytes.
    with open_regular(path) as file:
        while line := file.readline(MOST_LINE_BYTES):
            try:
                record = parse_object(line.decode("utf-8", "replace"))
            except JsonError:
                return
            if not is_whole_number(record.get("position")):
                return
            yield record


def collect_provenance(origins: Mapping[str, str], base: Path, **more: Any) -> dict[str, Any]:
    """Returns provenance.json: versions, host, command, git, and the origin of each value of the recipe."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "base": str(base),
        "versions": {"python": platform.python_version(), **_read_versions()},
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "processor": read_processor_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "git": _describe_git(base),
        "origins": dict(origins),
        **more,
    }


@cache
def _read_versions() -> dict[str, str]:
    """Returns the versions of the libraries that can change results or files. Takes 10 ms, hence the cache."""
    return {name: metadata.version(name) for name in ("headway", "torch", "numpy", "pillow", "safetensors")}


def read_processor_name() -> str:
    # ARM processors have no "model name" there.
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _describe_git(folder: Path) -> str:
    """Returns `git describe` for the recipe's folder; empty outside a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
