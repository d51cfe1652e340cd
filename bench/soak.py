"""A run of four processes that somebody harms 200 times: every few seconds one of them, drawn by chance, is killed or
stopped at a moment drawn by chance, from outside. The launcher replaces it; the others go on meanwhile.

Half of the faults are SIGKILL, a quarter SIGSTOP, a quarter SIGSTOP and SIGCONT once the others have gone on; a quarter
hits rank 0. Silence is noticed after 2 s. The network is a small one of the user's, which writes down a checksum of its
weights in every step of every process. The same run unharmed is the measure for its loss.

faults                faults that the run went on after
lost_positions        positions of the run that were not trained on exactly once
lost_steps            steps to whose weights no process came from those before: all that had these were lost at once
lost_records          steps that metrics.jsonl does not have
diverged_weights      checksums of a process that was not lost which the other processes do not have
repeated_steps_max    steps begun again after a fault, at most
final_loss_ratio      mean loss of the last tenth of the steps over that of the unharmed run
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
from pathlib import Path

from bench._arms import ROOT
from bench._common import Claim, median, parser, report
from bench._family import run_bench
from bench._soak.faults import Fault, Faults, SoakError
from bench._soak.network import FOLDER
from bench._soak.traces import losses, lost_positions, read_weights, weights
from headway.core.run import Run
from headway.data.pack import pack

PROCS, BATCH = 4, 64
TIMEOUT_S = 2.0
STEPS_A_FAULT = 150
"""Some seconds, in which a lost process is replaced."""

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
checkpoint: {{every_steps: 100}}
log_every_steps: 1
log_ids: true
"""


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--faults", type=int, default=200, metavar="N", help="so many; 200 take an hour on two cores")
    options = asked.parse_args()
    faults = 5 if options.quick else options.faults
    with tempfile.TemporaryDirectory(prefix="headway-soak-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, ROOT / "examples/digits_folder.py", folder / "digits"], check=True)
        samples = pack(folder / "digits", folder / "packed", split=0.2).counts[0]
        recipe, steps = folder / "recipe.yaml", faults * STEPS_A_FAULT
        epochs = steps * BATCH / samples
        recipe.write_text(RECIPE.format(packed=folder / "packed", batch=BATCH, epochs=epochs, timeout_s=TIMEOUT_S))
        unharmed, _ = run(recipe, folder / "unharmed", 0, steps)
        harmed, done = run(recipe, folder / "harmed", faults, steps)
        report(claims(harmed, unharmed, done, steps), options, rows(done))


def run(recipe: Path, folder: Path, faults: int, steps: int) -> tuple[Run, list[Fault]]:
    """Trains, and does harm meanwhile.

    Raises:
        SoakError: the run did not come to its end.
    """
    traces, log = Path(f"{folder}.traces"), Path(f"{folder}.log")
    traces.mkdir()
    command = [sys.executable, "-m", "headway", "train", recipe, "--run", folder, "--procs", str(PROCS)]
    environ = {**os.environ, FOLDER: str(traces), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as said, subprocess.Popen(command, env=environ, cwd=ROOT, stdout=said, stderr=said) as launcher:
        harm = Faults(launcher, folder, TIMEOUT_S, seed=9)  # its first five have every kind, and rank 0
        try:
            harm.harm(faults, steps)
            if status := launcher.wait():
                raise SoakError(f"the run has ended with status {status}")
        except SoakError as error:
            raise SoakError(f"{error}\n{log.read_text(errors='replace')[-4000:]}") from None
        finally:
            launcher.terminate()
    return Run.open(folder), harm.done


def claims(harmed: Run, unharmed: Run, done: list[Fault], steps: int) -> list[Claim]:
    if not harmed.summary()["finished"]:
        raise SoakError("the run was not finished")
    traces = read_weights(Path(f"{harmed.folder}.traces"))
    found = weights(traces, {str(fault.victim) for fault in done})
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
