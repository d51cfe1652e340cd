"""Measures a case: the doctor's verdict, the speed as it is, with the first knob, and without each injector."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, final

import headway
from bench._doctor import peers
from bench._doctor.around import around
from bench._doctor.cases import Case
from bench._doctor.data import Sets
from bench._doctor.jobs import Job
from bench._doctor.measure import Cure, JobError, calibrated, examined, first_knob, trained
from headway.core.profile import Profile

PLACES = re.compile(r"/\S*/(\S+)")
"""Whole paths: of one machine, and no other's."""
SHORT_S = 5.0
"""A first epoch that is over sooner says nothing of the disk: most of it is what was read ahead."""
MOVED = 0.03
"""How much the fixed piece of work may take longer or shorter after a case than before it."""
ATTEMPTS = 5
# Products of the fixed piece of work in a quick run.
QUICK_CALLS = 10
CASE, KNOB = "case", "knob"


@final
@dataclass(frozen=True)
class How:
    """Attributes:
    seconds: of a run. times: how often each is made.
    quick: the doctor is asked for a short answer; nothing is left out of a job and no peer is asked.
    ends: when the bench has to be over, by `time.monotonic`.
    """

    seconds: float
    times: int
    quick: bool = False
    ends: float = float("inf")

    def expected_s(self, arms: int) -> float:
        """How long a case takes about: each run starts for some seconds, the doctor takes a minute, peers another."""
        return arms * self.times * (self.seconds + 10) + (30 if self.quick else 120)


def tried(case: Case, sets: Sets, folder: Path, how: How) -> dict[str, Any]:
    """A record of a case. It is measured again, at most five times, where the machine was not as fast after it as
    before.

    Raises:
        NotHereError: what surrounds it cannot be had here.
        JobError: it could not be trained.
    """
    arms = {CASE: case.job()}
    if not how.quick:
        arms |= {f"without {name}": job for name, job in case.without().items()}
    for job in arms.values():
        with around(job, sets):  # whatever is lacking is known before anything is measured
            pass
    best = steady(
        lambda attempt: _measured(arms, sets, folder / f"attempt-{attempt}", how),
        most=1 if how.quick else ATTEMPTS,
        ends=how.ends - how.expected_s(len(arms) + 1),
        calibrate=partial(calibrated, QUICK_CALLS) if how.quick else calibrated,
    )
    if not how.quick:
        with around(arms[CASE], sets) as place:
            best["peers"] = peers.asked(arms[CASE], place, folder / "peers")
    return {**case.to_json(), **best}


def steady(
    measure: Callable[[int], dict[str, Any]],
    *,
    most: int,
    within: float = MOVED,
    ends: float = float("inf"),
    calibrate: Callable[[], float] = calibrated,
) -> dict[str, Any]:
    """Measures again, at most so many times, until the machine is as fast after it as it was before.

    Args:
        measure: gives a record of the attempt whose number it takes. within: by which share a fixed piece of work may
            take longer or shorter after it. ends: no further one begins later than this, by
            `time.monotonic`. calibrate: seconds of a fixed piece of work.

    Returns:
        the record between whose ends the machine changed least, with the number of attempts.
    """
    best: dict[str, Any] = {}
    for attempt in range(1, most + 1):
        before = calibrate()
        found = measure(attempt)
        found["calibration"] = [before, calibrate()]
        if not best or moved(found) < moved(best):
            best = found
        best["attempts"] = attempt
        if moved(best) <= within or monotonic() > ends:
            break
    return best


def moved(record: dict[str, Any]) -> float:
    """By how much the fixed piece of work took longer or shorter after a case than before it."""
    before, after = record["calibration"]
    return abs(float(after) / float(before) - 1)


def _measured(arms: dict[str, Job], sets: Sets, folder: Path, how: How) -> dict[str, Any]:
    said, cure = _said(arms[CASE], sets, folder / "doctor", quick=how.quick)
    first_only = arms[CASE].cold or arms[CASE].limits.remote_bits_s is not None
    if first_only and cure is not None and (why := untried(cure, said, samples_of(arms[CASE], sets))):
        said["untried"], cure = why, None
    overrides: dict[str, Sequence[str]] = dict.fromkeys(arms, ())
    jobs, packed = dict(arms), None
    if cure is not None:
        try:
            packed = cure.packed(folder / "packed")
            jobs[KNOB], overrides[KNOB] = arms[CASE], cure.overrides
        except JobError as error:
            said["refused"] = str(error)
    names, images_s = list(jobs), {name: list[float]() for name in jobs}
    for number in range(how.times):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name not in images_s:
                continue
            place_of = folder / f"{name}-{number}".replace(" ", "-")
            try:
                with around(jobs[name], sets) as place:
                    if name == KNOB and packed is not None:
                        place = replace(place, files=packed, train=str(packed))
                    rate, _ = trained(jobs[name], place, place_of, how.seconds, overrides[name])
                images_s[name].append(rate)
            except JobError as error:
                if name != KNOB:
                    raise
                said["refused"] = str(error)  # of what the doctor itself proposes
                del images_s[KNOB]
            with suppress(OSError):
                shutil.rmtree(place_of)  # checkpoints take room
    with suppress(OSError):
        shutil.rmtree(folder / "packed")
    return {"said": said, "images_s": images_s}


def untried(cure: Cure, said: Mapping[str, Any], samples: int) -> str:
    """Why a knob cannot be tried where only the first epoch counts; empty: it can."""
    if any(word.startswith("data.cache=") for word in cure.overrides):
        return "a cache has to be filled first, which takes longer than the run"
    seconds = samples / (said["predicted"] * said["gain"])
    if cure.pack is not None and seconds < SHORT_S:
        return f"its first epoch would be over in {seconds:.1f} s, much of it read before the first logging step"
    return ""


def samples_of(job: Job, sets: Sets) -> int:
    """Of its training set."""
    with closing(headway.open(sets.train(job.data))) as dataset:
        return len(dataset)


def _said(job: Job, sets: Sets, folder: Path, *, quick: bool) -> tuple[dict[str, Any], Cure | None]:
    """(what the doctor says, its first knob); a doctor that fails has said nothing right."""
    try:
        with around(job, sets) as place:
            profile = examined(job, place, folder, quick=quick)
    except JobError as error:
        return {"failed": str(error)}, None
    return told(profile), Cure.of(profile)


def told(profile: Profile) -> dict[str, Any]:
    """What is kept of a profile."""
    first = first_knob(profile)
    return {
        "stage": profile.verdict.stage,
        "kind": profile.verdict.kind,
        "next": profile.verdict.next_stage,
        "most": profile.verdict.most,
        "predicted": profile.predicted,
        "measured": profile.measured,
        "confirmed": profile.verdict.confirmed,
        "seconds": {one.stage: one.seconds for one in profile.ceilings},
        "took_s": profile.seconds,
        "override": PLACES.sub(r"\1", first.override) if first else "",
        "gain": first.gain if first else None,
    }
