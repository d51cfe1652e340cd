"""The best trials of a sweep, for an ensemble of them."""

from __future__ import annotations

import shlex
from pathlib import Path

from headway.core.errors import UsageError
from headway.core.text_format import pluralise
from headway.sweep.journal import read_journal
from headway.sweep.state import list_scores, rank_trials
from headway.sweep.sweep_folder import RATES_SETTINGS, SweepFolder, describe_sweep_resume


def list_best(folder: Path, count: int) -> list[Path]:
    """Returns the run folders of the best trials that were trained to their end, the best first.

    Raises:
        UsageError: there is no such sweep, or it has fewer of them.
    """
    if (folder / RATES_SETTINGS).is_file():
        rows = sorted(path.parent for path in folder.glob("sweeps/*/sweep.yaml"))
        what = "this is the folder of headway sweep --lr, which has a sweep for each optimizer and batch"
        fix = f"Name one of them: headway ensemble --of {shlex.quote(str(rows[0]))} --best 3" if rows else ""
        raise UsageError(what, where=str(folder), fix=fix)
    sweep, state = SweepFolder.open(folder), read_journal(folder)
    ended = [number for number in rank_trials(state) if list_scores(state, state.trials[number])[-1][0] == 1]
    if len(ended) < count:
        what = (
            f"{pluralise(len(ended), 'trial')} of {len(state.trials)} trained to the end, and --best asks for {count}"
        )
        raise UsageError(what, where=str(folder), fix=_suggest_members(sweep, len(ended)))
    return [sweep.find_trial(number) for number in ended[:count]]


def _suggest_members(sweep: SweepFolder, ended: int) -> str:
    """Returns what to do with a sweep that has too few trials that were trained to their end."""
    name = shlex.quote(str(sweep.folder))
    if not (sweep.folder / "result.json").exists():
        return f"This sweep is not finished: {describe_sweep_resume(sweep.folder)}"
    if sum(run.is_dir() for run in sweep.retrained.glob("*")) > 1:
        return f"headway ensemble {name}/retrained/* takes the trainings of the winner with new seeds."
    return f"Ask for --best {ended}." if ended > 1 else "Sweep with --method random, or with --seeds 3."
