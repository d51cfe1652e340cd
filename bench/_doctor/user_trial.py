"""Measures a case with slow user code: the doctor's verdict beside a run. Builds the table of such cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench._common import Claim
from bench._doctor.around import around
from bench._doctor.data import Sets
from bench._doctor.measure import JobError, examined, trained
from bench._doctor.trial import moved, steady, told
from bench._doctor.user_cases import UserCase

USER_ATTEMPTS, USER_MOVED = 3, 0.05
"""A case takes a minute, and there are 24. Within 3 %, as for the other cases, no attempt of two cases of seed 78 was;
an error of 5 % is what is wanted."""
HEADING = ("case", "injected", "truth", "said", "right", "predicted", "measured", "error", "doctor took")


def tried_user(case: UserCase, sets: Sets, folder: Path, seconds: float, ends: float) -> dict[str, Any]:
    """A record of a case: the doctor with --quick, and a run; again where the machine was not as fast after it.

    Args:
        seconds: of the run. ends: no further attempt begins later than this, by `time.monotonic`.

    Raises:
        NotHereError: the data cannot be had here. JobError: it could not be trained.
    """
    found = steady(
        lambda attempt: _measured(case, sets, folder / f"{attempt}", seconds),
        most=USER_ATTEMPTS,
        within=USER_MOVED,
        ends=ends,
    )
    return {**case.to_json(), **found}


def _measured(case: UserCase, sets: Sets, folder: Path, seconds: float) -> dict[str, Any]:
    job = case.job()
    with around(job, sets) as place:
        try:
            profile = examined(job, place, folder / "doctor", quick=True)
        except JobError as error:
            said: dict[str, Any] = {"failed": str(error)}
        else:
            code = profile.verdict.code
            said = told(profile) | {
                "place": "" if code is None else f"{Path(code.file).name}:{code.line}",
                "within": "" if code is None else code.within,
                "sentence": profile.verdict.sentence,
            }
        rate, _ = trained(job, place, folder / "run", seconds)
    return {"said": said, "images_s": rate}


def right(record: dict[str, Any]) -> bool:
    """Whether both the stage and the line were named."""
    said = record["said"]
    return [said.get("stage"), said.get("place")] == record["truth"]


def error_of(record: dict[str, Any]) -> float | None:
    """|predicted - measured| / measured; None: the doctor failed."""
    predicted = record["said"].get("predicted")
    return None if predicted is None else abs(predicted / record["images_s"] - 1)


def user_rows(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [HEADING]
    for one in sorted(records, key=lambda one: int(one["number"])):
        said, error = one["said"], error_of(one)
        rows.append(
            (
                str(one["number"]),
                one["case"],
                " at ".join(one["truth"]),
                f"{said['stage']} at {said['place'] or 'no line'}" if "stage" in said else "the doctor failed",
                "yes" if right(one) else "NO",
                "" if error is None else f"{said['predicted']:,.0f}",
                f"{one['images_s']:,.0f}",
                "" if error is None else f"{error:.1%}",
                f"{said['took_s']:.0f} s" if "took_s" in said else "",
            )
        )
    return rows


def user_claims(records: Sequence[dict[str, Any]]) -> list[Claim]:
    if not records:
        return []
    seeds = ", ".join(sorted({str(one["seed"]) for one in records}))
    how = f"of {len(records)} cases of seed {seeds}; the stage, and file and line of the code"
    claims = [Claim("user_code_named", sum(map(right, records)) / len(records), "", how)]
    errors = [error for one in records if (error := error_of(one)) is not None]
    if errors:
        unsteady = sum(moved(one) > USER_MOVED for one in records)
        how = f"of {len(errors)} cases; |predicted - measured| / measured, images/s of the whole job; "
        how += f"the machine changed by more than {USER_MOVED:.0%} during {unsteady} of them"
        claims.append(Claim("predict_median_error", median(errors), "", how))
    return claims
