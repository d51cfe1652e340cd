"""Measures one job: its training images/s, and the doctor's profile of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any, final

import psutil
import torch
import yaml

from bench._arms import ROOT
from bench._doctor.around import Place
from bench._doctor.data import evict, load
from bench._doctor.jobs import BIG, Job
from headway.core.errors import UsageError
from headway.core.profile import Knob, Profile
from headway.doctor.pack_estimate import PackCommand

STARTS_S, ENDS_S, DOCTOR_S = 180.0, 60.0, 900.0
"""How long a run may take until its first logging step, and from the signal to its end; and the doctor."""
WARM_S = 1.0
"""After the first logging step, which do not count: caches and allocators warm up."""
PERIODS_S = 60.0
"""Most that a run goes on until it has evaluated or saved twice."""
POLL_S = 0.1
OVERRIDE = re.compile(r"[a-z_]\w*(\.\w+)*=.*", re.DOTALL)


class JobError(Exception):
    """A run or the doctor has failed; its last words."""


def trained(job: Job, place: Place, folder: Path, seconds: float, overrides: Sequence[str] = ()) -> tuple[float, float]:
    """(images/s, share of the time in which the loop waited) of `headway train`, in processes of its own.

    The run ends by SIGTERM, so many seconds after its first logging step; of cold files, at the latest once each was
    read.

    Args:
        folder: that is not there yet.
        overrides: of the recipe.

    Raises:
        JobError: it failed, or came to too few logging steps.
    """
    run = folder / "run"
    command = _ready(job, place, folder, "train", [*overrides, "--run", str(run)])
    with _running(command, job, folder) as (process, said):
        deadline, begun = monotonic() + STARTS_S, False
        while process.poll() is None and (monotonic() < deadline or _wants_more(run, deadline, begun)):
            if not begun and records_of(run):
                deadline, begun = monotonic() + WARM_S + seconds, True
            elif begun and job.cold and records_of(run)[-1]["epoch"] > 1:
                break
            sleep(POLL_S)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
    try:
        waited = json.loads((run / "summary.json").read_text(encoding="utf-8"))["wait_share"]
        return rate_of(run, first_epoch=job.cold), waited
    except (OSError, ValueError) as error:
        raise JobError(f"the run told nothing ({error}): {said()}") from error


def _wants_more(run: Path, deadline: float, begun: bool) -> bool:
    """Whether a run that has had its time has not come to two periods of its stalls yet; that is waited for."""
    if not begun or monotonic() > deadline + PERIODS_S:
        return False
    try:
        rate_of(run)
    except ValueError:
        return True
    return False


def records_of(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Whole records of a run so far: of logging steps, or `evaluate`."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def rate_of(run: Path, *, first_epoch: bool = False) -> float:
    """Images/s of a run's wall time between two logging steps. Where it evaluates or saves again and again, both steps
    are such as that, so that whole periods lie between them; evaluations count before checkpoints.

    Args:
        first_epoch: what lies behind it does not count.

    Raises:
        ValueError: there are too few of them.
    """
    records = records_of(run)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    every = recipe["checkpoint"]["every_steps"] or BIG
    if evaluated := {one["step"] for one in records_of(run, "evaluate")}:
        records = [one for one in records if one["step"] in evaluated]
    elif every < BIG:
        records = [one for one in records if one["step"] % every == 0]
    if first_epoch:
        records = [one for one in records if one["epoch"] <= 1]
    if len(records) < 2:
        raise ValueError(f"it came to {len(records)} logging steps that count, and a rate needs two")
    warm = [one for one in records if one["seconds"] >= records[0]["seconds"] + WARM_S]
    records = warm if len(warm) >= 3 else records
    first, last = records[0], records[-1]
    return float((last["position"] - first["position"]) / (last["seconds"] - first["seconds"]))


def examined(job: Job, place: Place, folder: Path, *, quick: bool) -> Profile:
    """What `headway doctor` says of a job.

    Raises:
        JobError: it failed.
    """
    out = folder / "profile.json"
    options = ["--out", str(out), *["--quick"] * quick, *["--cold"] * job.cold]
    with _running(_ready(job, place, folder, "doctor", options), job, folder) as (process, said):
        try:
            status = process.wait(DOCTOR_S)
        except subprocess.TimeoutExpired:
            raise JobError(f"the doctor took longer than {DOCTOR_S:g} s") from None
        if status:
            raise JobError(f"the doctor ended with status {status}: {said()}")
    try:
        return Profile.read(out)
    except UsageError as error:
        raise JobError(str(error)) from error


def first_knob(profile: Profile) -> Knob | None:
    """The best knob that is an override or a command: a change of the user's own code cannot be tried."""
    return next((one for one in profile.knobs if one.override), None)


@final
@dataclass(frozen=True)
class Cure:
    """The doctor's first knob. Attributes: overrides: of the recipe. pack: SRC and --mode of a pack to train on."""

    overrides: tuple[str, ...] = ()
    pack: tuple[str, str] | None = None

    @staticmethod
    def of(profile: Profile) -> Cure | None:
        """Takes the first knob that something sets. None: there is no knob, or it is none of these."""
        first = first_knob(profile)
        text = "" if first is None else first.override
        if (packing := PackCommand.parse(text)) is not None:
            return Cure(pack=(packing.source, str(packing.mode)))
        words = shlex.split(text)
        return Cure(tuple(words)) if words and all(OVERRIDE.fullmatch(word) for word in words) else None

    def packed(self, folder: Path) -> Path | None:
        """Makes the pack, if it is one; nothing holds that back. Raises JobError: it could not be made."""
        if self.pack is None:
            return None
        source, mode = self.pack
        command = [sys.executable, "-m", "headway", "pack", source, str(folder), "--mode", mode]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise JobError(f"the pack ended with status {done.returncode}: {done.stderr[-500:]}")
        return folder


def calibrated(calls: int = 248) -> float:
    """Seconds of a fixed piece of work on all cores: the median of its calls. It takes about five seconds (on an idle
    virtual machine medians over 0.7 s differ by 2.5 % from each other, over 5 s by 1.5 %), once the kernel has written
    what checkpoints have left in memory."""
    os.sync()
    one, other = torch.rand(2, 1536, 1536, generator=torch.Generator().manual_seed(1)).unbind()
    taken = []
    for _ in range(calls):
        begun = perf_counter()
        torch.mm(one, other)
        taken.append(perf_counter() - begun)
    return median(taken)


def _ready(job: Job, place: Place, folder: Path, verb: str, options: Sequence[str]) -> list[str]:
    """The command of a verb on a job's recipe, whose files lie in memory, or do not, as the job wants it."""
    folder.mkdir(parents=True)
    recipe = folder / "recipe.yaml"
    job.write(recipe, place.train, place.held_out)
    bring(job, place)
    many = ["--procs", str(job.procs)] if job.procs > 1 else []
    return place.command("-m", "headway", verb, recipe, *options, *many)


def bring(job: Job, place: Place) -> None:
    """Brings a job's files into memory, or out of it. A web server takes them from where they lie, which is faster than
    its network."""
    if job.limits.remote_bits_s is None:
        (evict if job.cold else load)(place.files)


@contextmanager
def _running(
    command: Sequence[str], job: Job, folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A command with a job's variables, and what it says; killed with all that it has started, where it still runs."""
    log = folder / "said.txt"

    def said() -> str:
        return " ".join(log.read_text(encoding="utf-8", errors="replace").split()[-60:])

    environ = {**os.environ, **job.environ}
    with log.open("wb") as file, subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file) as process:
        try:
            yield process, said
        finally:
            if process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    family = psutil.Process(process.pid).children(recursive=True)
                    for one in family:
                        with suppress(psutil.NoSuchProcess):
                            one.send_signal(signal.SIGKILL)
                process.kill()
