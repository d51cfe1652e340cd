"""`headway ensemble`: makes an ensemble, or an average of weights, of runs or of the checkpoints of one run."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.core.files import expect_empty_folder
from headway.core.run_folder import RunFolder
from headway.core.text_format import pluralise
from headway.data.dataset import Dataset
from headway.setup.train_setup import TrainSetup
from headway.training.derived_run import extract_checkpoints, write_derived_run
from headway.training.ensemble import expect_several, hash_weights, join_members, write_ensemble
from headway.training.ensemble_study import EnsembleStudy, shorten_path, study_ensemble
from headway.training.evaluate import open_evaluation_set
from headway.training.runs import load_trained
from headway.training.soup import Soup, SoupKind, make_soup, read_state

LOG = logging.getLogger("headway.training")


@dataclass(frozen=True, kw_only=True)
class EnsembleResult:
    """The result of `make_ensemble`.

    Attributes:
        study: figures of the members, and of the ensemble.
        soup: the average of the weights; None if probabilities are averaged.
        folder: the folder written; None if none was asked for.
    """

    study: EnsembleStudy
    soup: Soup | None
    folder: Path | None

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the weights."""
        found = self.study.to_json()
        if self.soup is not None:
            found["soup"] = _describe_soup(self.soup, self.study)
        return found | {"folder": None if self.folder is None else str(self.folder)}

    def describe(self) -> str:
        """Returns the table, for the terminal."""
        lines = [self.study.describe()]
        if (soup := self.soup) is not None:
            about = _describe_soup(soup, self.study)
            has_nll = "nll" in self.study.metrics
            # The table has no loss beside its nll, and the two are equal only without label smoothing.
            names = {"loss": "loss of the training"} if has_nll else {}
            shown = "  ".join(f"{names.get(name, name)} {value:.4f}" for name, value in soup.metrics.items())
            lines.append(f"\nMean of the weights of {', '.join(about['members'])}: {shown}")
            if has_nll:
                lines.append("The loss of the training has the task's label smoothing, if any, and nll has none.")
            if soup.recomputed:
                lines.append("Its statistics of batch norm were computed anew.")
            if soup.kind == "greedy":
                refused, where = len(self.study.members) - len(soup.chosen), shorten_path(self.study.data)
                lines.append(f"greedy refused {refused} of {pluralise(len(self.study.members), 'member')}.")
                lines.append(f"{where} chose the members of this mean, so its figures there are biased upwards.")
                lines.append("Evaluate it on other data.")
        return "\n".join(lines)


def make_ensemble(
    folders: Sequence[Path],
    *,
    out: Path | None = None,
    data: str | None = None,
    snapshots: bool = False,
    soup: SoupKind | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EnsembleResult:
    """Evaluates runs as an ensemble, or averages their weights; writes the result into a folder if one is named.

    Args:
        folders: run folders, in the order in which members are added.
        out: folder of the ensemble, or run folder of the averaged weights. It must not exist.
        data: packed folder to evaluate on. Default: the evaluation set of the first run.
        snapshots: the members are the checkpoints of the one run in `folders`.
        soup: average weights in place of probabilities.
        progress: called with (images done, images).

    Raises:
        UsageError: fewer than two members, one of them twice, members that do not fit together, or `out` exists.
        HeadwayError: weights or data are damaged.
    """
    if out is not None:
        expect_empty_folder(out, "--out")
    if snapshots and len(folders) != 1:
        raise UsageError("--snapshots takes the checkpoints of one run", fix="Name one run, or leave --snapshots out.")
    if not snapshots:
        expect_several(folders)
    with _open_members(folders, snapshots) as (members, names):
        setup = join_members([load_trained(member) for member in members], names)
        with closing(setup.inputs), closing(open_evaluation_set(setup, data, folders[0])) as dataset:
            _warn_of_doubts(members, names)
            study = study_ensemble(setup, names, dataset, progress)
            mixed = None if soup is None else _mix(soup, setup, members, dataset)
        # Written after all else has succeeded.
        if out is not None and mixed is None:
            _write_ensemble(out, members, snapshots, setup)
        elif out is not None and mixed is not None:
            _write_soup(out, members, snapshots, mixed)
    result = EnsembleResult(study=study, soup=mixed, folder=out)
    if out is not None:
        RunFolder(out).write_json("study", result.to_json())
    return result


@contextmanager
def _open_members(folders: Sequence[Path], snapshots: bool) -> Iterator[tuple[list[RunFolder], list[str]]]:
    """Opens the members, and gives their names; checkpoints are written into a temporary folder for the block."""
    if not snapshots:
        yield [RunFolder.open(folder) for folder in folders], [str(folder) for folder in folders]
        return
    with tempfile.TemporaryDirectory(prefix="headway-ensemble-") as aside:
        members = extract_checkpoints(RunFolder.open(folders[0]), Path(aside))
        yield members, [member.folder.name for member in members]


def _warn_of_doubts(members: Sequence[RunFolder], names: Sequence[str]) -> None:
    """Warns of equal members, and of members that may have been trained on the evaluation set."""
    seen: dict[str, str] = {}
    for member, name in zip(members, names, strict=True):
        digest = hash_weights(member)
        if digest in seen:
            LOG.warning(f"{seen[digest]} and {name} have the same weights: the second one adds nothing.")
        seen.setdefault(digest, name)
    if len({member.read_provenance().get("fingerprint") for member in members}) > 1:
        what = "The runs were trained on different sets of images"
        LOG.warning(f"{what}. If one of these has images of the evaluation set, the figures are too good.")


def _mix(kind: SoupKind, setup: TrainSetup, members: Sequence[RunFolder], dataset: Dataset) -> Soup:
    first = setup.members[0]
    augment = [(one.recipe.augment.mean, one.recipe.augment.std) for one in setup.members]
    if any(one != augment[0] for one in augment):
        LOG.warning("The runs normalise with different mean and std: their average takes those of the first run.")
    return make_soup(kind, first, [read_state(member) for member in members], dataset)


def _describe_soup(soup: Soup, study: EnsembleStudy) -> dict[str, Any]:
    names = [study.members[place].name for place in soup.chosen]
    return {"kind": soup.kind, "members": names, "recomputed": soup.recomputed, "metrics": soup.metrics}


def _write_ensemble(out: Path, members: Sequence[RunFolder], snapshots: bool, setup: TrainSetup) -> None:
    run = RunFolder.create(out)
    if snapshots:
        # A copy: the temporary folder may be on another disk.
        copies = [shutil.copytree(member.folder, out / "members" / member.folder.name) for member in members]
        members = [RunFolder(Path(copy)) for copy in copies]
    write_ensemble(run, members, setup)


def _write_soup(out: Path, members: Sequence[RunFolder], snapshots: bool, soup: Soup) -> None:
    chosen = [members[place] for place in soup.chosen]
    if snapshots:
        # The members are in a temporary folder, and their parents are checkpoints.
        parents = [parent for member in chosen for parent in member.read_provenance(parents=list)["parents"]]
    else:
        parents = [{"run": str(one.folder.resolve()), "sha256": hash_weights(one)} for one in chosen]
    write_derived_run(out, members[0], soup.state, parents=parents)
