"""A run of four processes under 200 faults: every few seconds a random one is killed or stopped from outside at a
random moment. The launcher replaces it while the others continue.

Of these faults 30 % are SIGKILL, 20 % SIGSTOP, 20 % SIGSTOP and SIGCONT once the others have continued, 15 % SIGKILL to
two at once, 15 % SIGKILL while a checkpoint is written; a quarter hits rank 0. A tenth of all faults is of the pattern
last-holder, in a run of two processes: one is killed, and while another one joins in its place, the remaining one is
killed too, which alone has the state. Silence is noticed after 2 s. A small user network writes a checksum of its
weights in every step of every process. The same run without faults is the reference for the loss.

faults                faults after which the run continued
lost_positions        positions of the run that were not trained exactly once
lost_steps            steps whose weights no process continued from: all processes that had them were lost at once
lost_records          steps that are missing in metrics.jsonl
diverged_weights      checksums of a surviving process that differ from those of the other processes
repeated_steps_max    largest number of steps repeated after a fault
final_loss_ratio      mean loss of the last tenth of the steps over that of the run without faults
ended_at_or_after_checkpoint
                      of --pattern last-holder: tries after which no process trained from before the newest checkpoint
unfinished            runs of that pattern that did not reach their end
recovery_s_median, recovery_s_worst
                      seconds from the detection of a fault to the end of the second step after it: the first may have
                      been under way. Death is noticed at once, silence 7/8 of the time-out after the signal at the
                      earliest
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from bench._arms import ROOT
from bench._common import Claim, median, parser, report
from bench._family import run_bench
from bench._soak import last_holder as holders
from bench._soak.faults import Fault, Faults, SoakError
from bench._soak.last_holder import without_dns
from bench._soak.network import FOLDER
from bench._soak.traces import Steps, losses, lost_positions, read_given, read_weights, weights
from headway.core.run_folder import RunFolder
from headway.data.pack import pack

PROCS, BATCH = 4, 64
TIMEOUT_S = 2.0
STEPS_A_FAULT = 150
"""Some seconds, in which a lost process is replaced."""
ONE_OF = 10
"""Of so many faults one is of the pattern last-holder, in a run of its own."""
STEPS_A_TRY, EVERY_STEPS, PATIENT_S = 150, 10, 10.0
"""Of --pattern last-holder, whose steps are slowed down while it strikes: more than a try needs."""

RECIPE = """
data: {{train: {packed}/train, eval: {packed}/eval, threads: 1}}
model: {{factory: 'bench._soak.network:Watched'}}
task: {{args: {{label_smoothing: 0.1}}}}
optimizer: {{name: sgd, lr: 0.02, momentum: 0.9}}
schedule: {{name: cosine}}
batch: {batch}
epochs: {epochs}
precision: fp32
comm: {{timeout_s: {timeout_s}}}
evaluate: {{every_epochs: 10}}
checkpoint: {{every_steps: {every_steps}}}
log_every_steps: 1
log_ids: true
"""


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--faults", type=int, default=200, metavar="N", help="so many; 200 take an hour on two cores")
    asked.add_argument("--pattern", choices=["last-holder"], help="this one alone, all faults")
    asked.add_argument("--no-dns", action="store_true", help="with --pattern: no question for a name is answered")
    options = asked.parse_args()
    if options.no_dns and not options.pattern:
        asked.error("--no-dns goes with --pattern last-holder")
    faults = 3 if options.quick else options.faults
    with tempfile.TemporaryDirectory(prefix="headway-soak-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, ROOT / "examples/digits_folder.py", folder / "digits"], check=True)
        samples = pack(folder / "digits", folder / "packed", split=0.2).counts[0]

        def written(name: str, steps: int, **options: float) -> Path:
            recipe = folder / name
            values = {"packed": folder / "packed", "batch": BATCH, "epochs": steps * BATCH / samples, **options}
            recipe.write_text(RECIPE.format(**values))
            return recipe

        tries = faults if options.pattern else max(1, faults // ONE_OF)
        steps = tries * STEPS_A_TRY
        recipe = written("holders.yaml", steps, timeout_s=PATIENT_S, every_steps=EVERY_STEPS)
        found, table = last_holder(recipe, folder, tries, steps, no_dns=options.no_dns), list[tuple[str, ...]]()
        if faults > tries:
            steps = (faults - tries) * STEPS_A_FAULT
            recipe = written("recipe.yaml", steps, timeout_s=TIMEOUT_S, every_steps=100)
            unharmed, _ = run(recipe, folder / "unharmed", 0, steps)
            harmed, done = run(recipe, folder / "harmed", faults - tries, steps)
            found, table = together(claims(harmed, unharmed, done, steps), found), rows(done)
        report(found, options, table)


def together(some: list[Claim], others: list[Claim]) -> list[Claim]:
    """Counts of two runs added, and what only one of them has."""
    found = {claim.name: claim for claim in some}
    for other in others:
        if (one := found.get(other.name)) is None:
            found[other.name] = other
        else:
            found[other.name] = replace(one, value=one.value + other.value, how=f"{one.how}; and {other.how}")
    return list(found.values())


def run(recipe: Path, folder: Path, faults: int, steps: int) -> tuple[RunFolder, list[Fault]]:
    """Trains, and does harm meanwhile.

    Raises:
        SoakError: the run did not come to its end.
    """
    traces, log = Path(f"{folder}.traces"), Path(f"{folder}.log")
    traces.mkdir()
    command = [sys.executable, "-m", "headway", "train", recipe, "--run", folder, "--procs", str(PROCS)]
    environ = {**os.environ, FOLDER: str(traces), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as said, subprocess.Popen(command, env=environ, cwd=ROOT, stdout=said, stderr=said) as launcher:
        harm = Faults(launcher, folder, TIMEOUT_S, seed=9)
        try:
            harm.harm(faults, steps)
            if status := launcher.wait():
                raise SoakError(f"the run has ended with status {status}")
        except SoakError as error:
            raise SoakError(f"{error}\n{log.read_text(errors='replace')[-4000:]}") from None
        finally:
            launcher.terminate()
    return RunFolder.open(folder), harm.done


def last_holder(recipe: Path, folder: Path, tries: int, steps: int, *, no_dns: bool) -> list[Claim]:
    """The pattern of `_soak.last_holder`, and what became of the run.

    Raises:
        SoakError: the run ended without a sentence, or stood still.
    """
    with without_dns(folder) if no_dns else nullcontext(lambda command: command) as wrap:
        one = holders.Run(recipe, folder / "run", wrap)
        try:
            done = holders.strikes(one, tries, seed=tries)
        finally:
            one.close()
    run, traces = RunFolder.open(one.folder), read_weights(one.traces)
    victims = {victim for strike in done for victim in strike.victims}
    steps_made = Steps(traces, victims, read_given(one.traces))
    well = 0
    for strike in done:
        after = [steps_made.place(trace[0]) for process, trace in traces.items() if process not in strike.before]
        well += bool(after) and min(after) >= strike.checkpoint
    how = Counter(strike.outcome for strike in done)
    logged, where = losses(run.folder), "without DNS" if no_dns else "with DNS"
    return [
        Claim("faults", len(done), "", f"{where}: " + ", ".join(f"{count} {name}" for name, count in how.items())),
        Claim("ended_at_or_after_checkpoint", well, "", f"of {len(done)}, by the checksums of who came after"),
        Claim("lost_positions", lost_positions(run.folder, steps * BATCH), "", f"of {steps * BATCH}"),
        Claim("lost_steps", steps - len(steps_made.number), "", f"of {steps}, by the checksums"),
        Claim("lost_records", steps - len(logged), "", f"of {steps} in metrics.jsonl"),
        Claim("unfinished", int(not run.read_summary()["finished"]), "", "runs that did not come to their end"),
    ]


def claims(harmed: RunFolder, unharmed: RunFolder, done: list[Fault], steps: int) -> list[Claim]:
    if not harmed.read_summary()["finished"]:
        raise SoakError("the run was not finished")
    traces = read_weights(Path(f"{harmed.folder}.traces"))
    found = weights(traces, {str(victim) for fault in done for victim in fault.victims})
    ours, theirs = losses(harmed.folder), losses(unharmed.folder)
    last = sorted(ours.keys() & theirs.keys())[-(steps // 10) :]
    ratio = sum(ours[step] for step in last) / sum(theirs[step] for step in last)
    middle, low, high = median([fault.recovery_s for fault in done])
    lead = sum(fault.lead for fault in done)
    return [
        Claim(
            "faults", len(done), "", f"{PROCS} processes, {steps} steps; {lead} to rank 0, {found.others} lost besides"
        ),
        Claim("lost_positions", lost_positions(harmed.folder, steps * BATCH), "", f"of {steps * BATCH}"),
        Claim("lost_steps", steps - found.steps, "", f"of {steps}, by the checksums"),
        Claim("lost_records", steps - len(ours), "", f"of {steps} in metrics.jsonl"),
        Claim("diverged_weights", found.strays, "", f"of {sum(map(len, traces.values()))} checksums"),
        Claim("repeated_steps_max", found.repeated_most, "", f"{found.repeated} steps were begun again in all"),
        Claim("final_loss_ratio", ratio, "", f"{len(last)} steps, over the unharmed run"),
        Claim("recovery_s_median", middle, "s", f"[{low:.3f}, {high:.3f}] of {len(done)} faults"),
        Claim("recovery_s_worst", max(fault.recovery_s for fault in done), "s", f"of {len(done)} faults"),
    ]


def rows(done: list[Fault]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("fault", "times", "of rank 0", "recovery s (95 %)", "worst")]
    for kind in sorted({fault.kind for fault in done}):
        some = [fault for fault in done if fault.kind == kind]
        middle, low, high = median([fault.recovery_s for fault in some])
        lead, worst = sum(fault.lead for fault in some), max(fault.recovery_s for fault in some)
        table.append((kind, str(len(some)), str(lead), f"{middle:.3f} [{low:.3f}, {high:.3f}]", f"{worst:.3f}"))
    return table


if __name__ == "__main__":
    run_bench(main)
