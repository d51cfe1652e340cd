"""The best trials of a sweep, for an ensemble of them."""

from __future__ import annotations

from pathlib import Path

from headway.core.errors import UsageError
from headway.core.text_format import pluralise
from headway.sweep.journal import read_journal
from headway.sweep.state import list_scores, rank_trials
from headway.sweep.sweep_folder import SweepFolder


def list_best(folder: Path, count: int) -> list[Path]:
    """Returns the run folders of the best trials that were trained to their end, the best first.

    Raises:
        UsageError: there is no such sweep, or it has fewer of them.
    """
    sweep, state = SweepFolder.open(folder), read_journal(folder)
    ended = [number for number in rank_trials(state) if list_scores(state, state.trials[number])[-1][0] == 1]
    if len(ended) < count:
        what = (
            f"{pluralise(len(ended), 'trial')} of {len(state.trials)} trained to the end, and --best asks for {count}"
        )
        raise UsageError(
            what, where=str(folder), fix="Ask for fewer, or sweep with --method random or a larger --budget."
        )
    return [sweep.find_trial(number) for number in ended[:count]]
