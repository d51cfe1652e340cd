"""Tests `headway doctor` on jobs in which a known stage was made slow: each is examined, trained, cured and trained
again.

The seed draws the cases: a job on CIFAR-10 or on photographs, with one or two injectors of random strength, or none. An
injector slows one stage down: a disk limited by a control group, files that are not in memory, a web server with a
limited rate, large photographs or Pillow as decoder, crops, one thread, a quota of processor time, tiny batches,
hundreds of tiny layers, a user's transform that takes long or reads values of tensors, a loss in Python, a slow rank, a
slow network between two ranks, frequent checkpoints and evaluations, a large network.

Each case is measured like this: `headway doctor` once; then, three times in turns, `headway train` on the case, on the
case with the doctor's first knob, and on the case without each of its injectors. Every run is a process of its own. The
true stage is that of the injector whose removal gains most. A case counts only if a removal gains 1.1 times the
images/s; if two gain the same within 5 %, either is right. A fixed piece of work before and after a case checks the
speed of the machine; if it differs by more than 3 %, the case is measured again, at most five times.

stage_named             share of the cases in which the verdict names a true stage; target 0.95
predict_median_error    |predicted - measured| / measured, images/s of the whole job, stalls included: the median
predict_p90_error       the same: the ninetieth percentile
gain_median_error       |predicted - measured| / measured for the gain of the first knob: keys of the recipe, or a pack,
                        which is made

Beside the table: the top of the summary of torch's profiler, and TraceML's findings, for the same job as a plain loop.

--regimes instead: a network with ResNet-50's compute for each byte of an image, and one with AlexNet's, both scaled
down by one factor; regimes_named is the share of the two that the doctor calls device limited and host limited.

--user-code instead: the user's own code is slow. It sleeps, or works in NumPy, in the transform, the forward pass, the
loss or the metrics; or it waits for a lock, collects garbage, reads a file, logs thousands of lines, or reads hundreds
of tensor values in each step. Each of 24 cases is examined once with --quick, followed by one run; both are repeated,
at most three times, if the speed of the machine changed. Each time takes about 60 s.

user_code_named         share of the cases in which the verdict names the stage, and the file and line; target 0.95
predict_median_error    as above; target 0.05

--against compares each case with the newest kept record of the same case, from any machine and version of the
code; records_agree is the share of the cases with the same true stage and the same verdict. --numbers 1,9,18 measures
only these cases of a seed.

Measured cases are kept in the results file, and a later call continues from there, as long as the doctor's code has not
changed. --minutes M starts no case that would not end in time. Slow disks, quotas and slow networks need root.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import monotonic, strftime
from typing import Any

from bench._accuracy import cifar
from bench._accuracy.results import FOLDER, Results, commit, sources, this_machine
from bench._arms import ROOT
from bench._common import Claim, parser, report
from bench._doctor import regimes
from bench._doctor.cases import Case, drawn, draws
from bench._doctor.data import NotHereError, Sets
from bench._doctor.injectors import INJECTORS
from bench._doctor.measure import JobError
from bench._doctor.table import Judged, Table
from bench._doctor.trial import How, tried
from bench._doctor.user_cases import user_draws
from bench._doctor.user_trial import tried_user, user_claims, user_rows
from bench._family import run_bench

SECONDS, QUICK_SECONDS = 10.0, 2.0
USER_SECONDS, USER_CASE_S = 5.0, 70.0
"""Of the run of a case of user code, and of the whole case."""
QUICK = ("transform",)
DRAWS = 4
"""Cases are drawn until so many times as many as are wanted: some cannot be had here, or do not count."""
DOCTOR = ROOT / "src/headway/doctor"
NOT_IN_A_CASE = ("page", "text", "script", "script_child", "tune", "tune_packs")
"""Modules of the doctor that no case runs: they show a profile, watch a script, or tune a recipe."""


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--seed", type=int, default=1, metavar="S", help="of the cases")
    asked.add_argument("--cases", type=int, default=24, metavar="N", help="so many that count")
    asked.add_argument("--times", type=int, default=3, metavar="N", help="how often each run of a case is made")
    asked.add_argument("--minutes", type=float, metavar="M", help="end within so long; 0 shows what is there")
    asked.add_argument("--results", type=Path, metavar="FILE", help="where cases are kept")
    asked.add_argument("--regimes", action="store_true", help="ResNet-50's and AlexNet's compute for a byte")
    asked.add_argument("--user-code", action="store_true", help="the user's own code is slow")
    asked.add_argument("--numbers", type=numbers, metavar="N,N", help="these cases of the seed alone")
    asked.add_argument("--against", action="store_true", help="hold the cases against what is kept of them")
    options = asked.parse_args()
    if options.results is None:
        options.results = FOLDER / ("doctor-user-code.jsonl" if options.user_code else "doctor.jsonl")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it takes hours
    with tempfile.TemporaryDirectory(prefix="headway-bench-doctor-") as folder:
        try:
            run(options, Path(folder))
        except (NotHereError, JobError) as error:
            sys.exit(str(error))


def run(options: argparse.Namespace, folder: Path) -> None:
    if options.regimes:
        claims, rows = regimes.run(Sets(), folder, options)
        report(claims, options, rows)
        return
    if options.quick:
        quick(options, folder)
        return
    results = Results(options.results)
    kept = results.all()  # before anything is added
    if options.user_code:
        found = gathered_user(options, results, folder)
        report(user_claims(found), options, user_rows(found))
        return
    end = float("inf") if options.minutes is None else monotonic() + 60 * options.minutes
    found = gathered(options, results, folder, How(SECONDS, options.times, ends=end))
    table = Table(found)
    for line in table.notes():
        print(line)
    claims = table.claims()
    if options.against:
        claims += against(found, kept)
    report(claims, options, table.rows())


def numbers(text: str) -> set[int]:
    return {int(one) for one in text.split(",")}


def against(found: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]]) -> list[Claim]:
    """Tells of each case what it was before, and says it."""
    agree = []
    for one in found:
        before = [
            other
            for other in kept
            if (other["seed"], other["number"], other["case"]) == (one["seed"], one["number"], one["case"])
            and (other["code"], other["machine"]) != (one["code"], one["machine"])
        ]
        if not before:
            print(f"Case {one['number']}: nothing is kept of it.")
            continue
        now, then = Judged(one), Judged(before[-1])
        agree.append(now.truth == then.truth and now.said.get("stage") in then.truth | {then.said.get("stage")})
        what = "agrees with" if agree[-1] else "does not agree with"
        print(
            f"Case {one['number']}, {one['case']}: said {now.said.get('stage')}, truth {sorted(now.truth)}; it {what} "
            f"the record of {before[-1]['at']} ({then.said.get('stage')}, {sorted(then.truth)}; "
            f"{before[-1]['machine'].partition(',')[0]})."
        )
    if not agree:
        return []
    return [Claim("records_agree", sum(agree) / len(agree), "", f"of {len(agree)} cases that were kept before")]


def gathered_user(options: argparse.Namespace, results: Results, folder: Path) -> list[dict[str, Any]]:
    """Records of the seed's first cases of user code, kept or measured now."""
    sets, found = Sets(), list[dict[str, Any]]()
    here = key(How(USER_SECONDS, 1))
    ends = float("inf") if options.minutes is None else monotonic() + 60 * options.minutes
    for case in itertools.islice(user_draws(options.seed), options.cases):
        if options.numbers is not None and case.number not in options.numbers:
            continue
        wanted = {"user_code": True, "seed": case.seed, "number": case.number, "settings": case.settings(), **here}
        if kept := results.where(**wanted):
            found.append(kept[-1])
            continue
        if monotonic() + USER_CASE_S > ends:
            continue
        record = tried_user(case, sets, folder / f"user-{case.number}", USER_SECONDS, ends - USER_CASE_S)
        record |= {**here, "commit": commit(), "at": strftime("%Y-%m-%d %H:%M")}
        results.add(record)
        found.append(record)
        said = record["said"]
        print(
            f"{strftime('%H:%M')} {case.number} {case.text}: {' at '.join(record['truth'])}, said "
            f"{said.get('stage', 'nothing')} at {said.get('place') or 'no line'}",
            file=sys.stderr,
        )
    return found


def gathered(options: argparse.Namespace, results: Results, folder: Path, how: How) -> list[dict[str, Any]]:
    """Records of the seed's first cases, kept or measured now, until so many of them count."""
    sets, found, reasons = Sets(), list[dict[str, Any]](), set[str]()
    here = key(how)
    for case in itertools.islice(draws(options.seed), DRAWS * max(options.cases, *(options.numbers or {0}), 0)):
        if options.numbers is not None and case.number not in options.numbers:
            continue
        if sum(bool(Judged(one).truth) for one in found) >= options.cases:
            break
        wanted = {"seed": case.seed, "number": case.number, "settings": case.settings(), **here}
        if kept := results.where(**wanted):
            found.append(kept[-1])
            continue
        if monotonic() + how.expected_s(len(case.injected) + 2) > how.ends:
            continue
        try:
            record = tried(case, sets, folder / str(case.number), how)
        except (NotHereError, JobError) as error:
            if str(error) not in reasons:
                print(f"case {case.number}, {case.text}: not here ({error})", file=sys.stderr)
            reasons.add(str(error))
            continue
        record |= {**here, "commit": commit(), "at": strftime("%Y-%m-%d %H:%M")}
        results.add(record)
        found.append(record)
        tell(record)
    return found


def key(how: How) -> dict[str, Any]:
    """What a kept record has to share to count, beside its case."""
    code = sources(DOCTOR, sorted(one for one in DOCTOR.rglob("*.py") if one.stem not in NOT_IN_A_CASE))
    return {"machine": this_machine(), "code": code, "run_s": how.seconds, "times": how.times}


def tell(record: dict[str, Any]) -> None:
    """One case, as it is done."""
    judged = Judged(record)
    truth = " or ".join(sorted(judged.truth)) or "none shows"
    error = "" if judged.error is None else f", {judged.error:.1%} off"
    said = judged.said.get("stage", "the doctor failed")
    print(f"{strftime('%H:%M')} {record['number']} {record['case']}: {truth}, said {said}{error}", file=sys.stderr)


def quick(options: argparse.Namespace, folder: Path) -> None:
    """One case on 1,200 images, run once, whose truth is taken for granted."""
    sets, how = Sets(cifar.part(folder, 120, 20), folder / "sets"), How(QUICK_SECONDS, 1, quick=True)
    records = []
    for number, name in enumerate(QUICK):
        (injector,) = [one for one in INJECTORS if one.name == name]
        case: Case = drawn(options.seed, number, Random(f"{name} of {options.seed}"), [injector], "cifar")
        record = tried(case, sets, folder / str(number), how) | {"commit": commit()}
        tell(record)
        records.append(record)
    table = Table(records)
    report(table.claims(), options, table.rows())


if __name__ == "__main__":
    run_bench(main)
