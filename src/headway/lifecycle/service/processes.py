"""Jobs that are verbs of headway: training of a recipe, a loop, and an export, each as a process of its own.

Clients choose among recipes that the owner of the store has laid into `STORE/recipes`. A recipe can name code, so none
comes over HTTP, and none of its values.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.core.files import is_plain_name
from headway.core.process_group import signal_group, wait_for_end
from headway.core.untrusted_json import JsonError, parse_object
from headway.data.store_address import STORE_VARIABLE
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.jobs import Job
from headway.lifecycle.service.problems import refuse

RECIPES, RUNS = "recipes", "runs"
RECIPE_EXTENSIONS = (".yaml", ".yml")
TARGETS = ("onnx", "openvino", "openvino-bf16", "aoti", "int8", "tensorrt")
END_S = 30.0
"""Seconds that a process has after SIGTERM, for example to write a checkpoint."""
_LINE = 500


@final
@dataclass(frozen=True, slots=True)
class Command:
    """A verb that a client has asked for.

    Attributes:
        kind: `run`, `loop` or `export`.
        arguments: of `headway`.
        folder: that it makes.
    """

    kind: str
    arguments: tuple[str, ...]
    folder: Path


@final
class Processes:
    """The recipes and runs of a store. Args: store: its folder; place: for the output of processes."""

    def __init__(self, store: Path, place: Path) -> None:
        self._store, self._place = store, place
        place.mkdir(parents=True, exist_ok=True)

    def list_recipes(self) -> list[str]:
        """Returns the names of the recipes that may be run."""
        return _list_names(self._store / RECIPES, is_folder=False)

    def list_runs(self) -> list[str]:
        """Returns the names of the folders of runs, the newest last."""
        return _list_names(self._store / RUNS, is_folder=True)

    def plan_run(self, tree: Any, name: str) -> Command:
        """Returns the command for the body of `POST /runs`.

        Args:
            name: of the folder to make, which nobody else has.

        Raises:
            ProblemError: the body is malformed (400), or there is no such recipe (422).
        """
        kind = next((key for key in ("recipe", "loop") if isinstance(tree, dict) and list(tree) == [key]), None)
        if kind is None:
            what = "the body does not ask for a run"
            raise refuse("malformed", what, 'Send {"recipe": "cars.yaml"} or {"loop": "loop.yaml"}.')
        recipe = tree[kind]
        if recipe not in self.list_recipes():
            what = f"there is no recipe {str(recipe)[:100]!r} in the folder {RECIPES} of the store"
            raise refuse("wrong-change", what, "GET /runs lists them.")
        path, stem = str(self._store / RECIPES / recipe), Path(recipe).stem
        if kind == "loop":
            # Always the same folder: the next request continues the loop.
            folder = self._store / RUNS / stem
            return Command("loop", ("loop", path, "--out", str(folder), "--once", "--json"), folder)
        folder = self._store / RUNS / f"{stem}-{name}"
        return Command("run", ("train", path, "--run", str(folder), "--json"), folder)

    def plan_export(self, tree: Any, name: str) -> Command:
        """Returns the command for the body of `POST /exports`. Args and errors as `plan_run`."""
        if not isinstance(tree, dict) or tree.keys() - {"run", "to"} or "run" not in tree:
            raise refuse(
                "malformed", "the body does not ask for an export", 'Send {"run": "cars-1f2e", "to": ["onnx"]}.'
            )
        targets = tree.get("to", ["onnx"])
        if not isinstance(targets, list) or not targets or any(one not in TARGETS for one in targets):
            raise refuse("wrong-change", "`to` is not a list of targets", f"Use some of {', '.join(TARGETS)}.")
        if tree["run"] not in self.list_runs():
            raise refuse("wrong-change", f"there is no run {str(tree['run'])[:100]!r}", "GET /runs lists them.")
        run = self._store / RUNS / tree["run"]
        folder = run / f"export-{name}"
        arguments = ("export", str(run), "--to", ",".join(targets), "--out", str(folder), "--json")
        return Command("export", arguments, folder)

    def run(self, command: Command, job: Job) -> Answer:
        """Runs a command to its end; called in a thread.

        Raises:
            CancelledJobError: the job was cancelled.
            ProblemError: the command has failed.
        """
        job.expect_wanted()
        command.folder.parent.mkdir(parents=True, exist_ok=True)
        output = self._place / f"{job.id}.out"
        # Recipes name data sets of this store without its folder.
        environment = {**os.environ, STORE_VARIABLE: str(self._store)}
        arguments = [sys.executable, "-m", "headway.lifecycle.service.child", *command.arguments]
        try:
            with (
                output.open("wb") as file,
                subprocess.Popen(
                    arguments,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=environment,
                    start_new_session=True,
                ) as process,
            ):
                job.set_canceller(lambda: end_process(process))
                assert process.stderr is not None
                # It ends once all that the process has started has closed it too.
                for line in process.stderr:
                    job.say(line.rstrip()[:_LINE])
                status = process.wait()
                # From now on its number may be that of another process.
                job.set_canceller(lambda: None)
            job.expect_wanted()
            if status != 0:
                what = f"headway {command.arguments[0]} has ended with status {status}"
                raise refuse("command-failed", what, "The log of the job says why.")
            return Answer(200, {"folder": str(command.folder.relative_to(self._store)), "result": _read_result(output)})
        finally:
            output.unlink(missing_ok=True)


def _list_names(folder: Path, *, is_folder: bool) -> list[str]:
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if is_plain_name(path.name)
        and not path.name.startswith(".")
        and not path.is_symlink()
        and (path.is_dir() if is_folder else path.is_file() and path.suffix in RECIPE_EXTENSIONS)
    ]
    return [path.name for path in sorted(found, key=lambda path: (path.stat().st_mtime if is_folder else 0, path.name))]


def end_process(process: subprocess.Popen[str]) -> None:
    """Asks the leader of a group of processes to end, and then kills all that it has started; does not wait for it."""

    def kill() -> None:
        # Another thread waits for it too, and then there is no such child.
        with suppress(ChildProcessError):
            wait_for_end(process.pid, END_S)
            signal_group(process.pid, signal.SIGKILL)

    process.terminate()
    threading.Thread(target=kill, daemon=True).start()


def _read_result(path: Path) -> dict[str, Any]:
    """Returns what a verb has printed with --json; empty if it has printed no object."""
    lines = path.read_bytes().splitlines()
    try:
        return parse_object(lines[-1]) if lines else {}
    except JsonError:
        return {}
