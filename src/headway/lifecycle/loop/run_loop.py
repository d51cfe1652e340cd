"""`headway loop`: does the stages of all rounds in their order, each of which is journalled when it is done.

Whatever kills the loop, the next call continues with the first stage that is not in the journal. Each stage gives the
same result when it is begun again: runs continue at their checkpoints, folders that are not complete are written
anew, and what depends on time, the labels, is pinned by the version in which they were complete.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, final

import numpy as np

from headway.core.errors import HeadwayError, UsageError
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.core.sample_progress import SampleProgress
from headway.core.signals import handle_signals
from headway.core.text_format import pluralise
from headway.data.store_address import EVAL, TRAIN, UNLABELLED, StoreAddress
from headway.export.export_run import export_run
from headway.export.manifest import hash_file, is_export, open_manifest
from headway.export.targets import order_targets
from headway.export.targets.target import check_packages
from headway.lifecycle.loop.answers import compare, compute_gain, judge_runs, read_answers, write_answers
from headway.lifecycle.loop.labels import LabelCount, LoopPick, count_labels, read_picks, settle_picks, write_picks
from headway.lifecycle.loop.loop_folder import LoopFolder, Stage, StageName
from headway.lifecycle.loop.loop_page import write_page
from headway.lifecycle.loop.loop_recipe import CHANGEABLE, ExportRecipe, LoopRecipe, VerifyRecipe, read_loop
from headway.lifecycle.loop.members import LoopStoppedError, build_member, read_pinned_values, train_member
from headway.lifecycle.loop.offer import QueueMarks, offer_picks, read_marks
from headway.lifecycle.loop.summary import LoopSummary, find_accepted, is_verification_due, summarise_loop
from headway.lifecycle.loop.verification import Verification, find_program, identify_program, measure_export
from headway.lifecycle.mining.mine import NothingToMineError, mine
from headway.lifecycle.mining.review import PICKS, RESULT, review_rows
from headway.lifecycle.store.rows import Rows
from headway.lifecycle.store.store import Store
from headway.training.ensemble import hash_weights
from headway.training.runs import load_recipe

LOG = logging.getLogger("headway.lifecycle")
LOOPS = Path("loops")
_NEEDED = {TRAIN: "to train on", EVAL: "to compare networks on", UNLABELLED: "to choose from"}


def run_loop(path: Path, folder: Path | None = None, *, once: bool = False) -> LoopSummary:
    """Begins a loop, or continues it, until it is finished.

    Args:
        path: LOOP.yaml.
        folder: folder of the loop; None: loops/NAME.
        once: return when labels are missing, in place of waiting for them.

    Raises:
        RecipeError: LOOP.yaml or the recipe of the members is wrong.
        UsageError: the data set lacks a split, a package for the export is missing, the settings are not those that the
            loop began with, or another process runs it.
        LoopStoppedError: SIGTERM or Ctrl-C; the next call continues.
    """
    loaded = read_loop(path)
    loop = LoopFolder.open_or_create(folder or LOOPS / loaded.recipe.name)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _StopError

    try:
        with handle_signals(stop, signal.SIGTERM, signal.SIGINT), loop.lock():
            return _Loop(loaded, loop).run(once=once)
    except (_StopError, LoopStoppedError):
        fix = f"Continue with the same command: headway loop {shlex.quote(str(path))}"
        raise LoopStoppedError("the loop was stopped; what it has done is kept", fix=fix) from None


@final
class _StopError(BaseException):
    """A signal asks the loop to stop. Not an Exception, which code on the way might take for an error of its own."""


@final
class _Loop:
    """A loop that this process runs.

    Attributes:
        settings: LOOP.yaml, and `base` its folder.
        members: the recipe of the members.
        store: the store, and `name` the name of the data set in it.
    """

    def __init__(self, loaded: LoadedRecipe[LoopRecipe], folder: LoopFolder) -> None:
        self.settings, self.folder, self.base = loaded.recipe, folder, loaded.base
        self.recipe_path = loaded.base / Path(self.settings.recipe).expanduser()
        self.address = StoreAddress.parse(self.settings.data, base=loaded.base)
        self.store, self.name = Store(self.address.find_store()), self.address.name
        # The recipe may leave its data open, or be one for another set. Each round pins the versions.
        sets = [f"data.{split}={json.dumps(self._pin('', split))}" for split in (TRAIN, EVAL)]
        self.members = load_recipe(self.recipe_path, sets)

    def run(self, *, once: bool) -> LoopSummary:
        """Does all stages that are not done."""
        self._expect_packages()
        # A first training that was refused, for example because of its recipe, leaves no network to compare with.
        if len(self.folder.stages) == 1 and not self.folder.find_member(0, 1).exists():
            self.folder.stages = ()
        began = self._do(0, "begin", self._begin)
        self._expect_same(began)
        self._do(0, "train", partial(self._train, 0, str(began.facts["version"])))
        missing = 0
        for number in range(1, self.settings.rounds + 1):
            if not self._do(number, "mine", partial(self._mine, number)).facts["picks"]:
                LOG.info("No image is left to label.")
                break
            if missing := self._wait(number, once=once):
                break
            labelled = self._do(number, "label", partial(self._settle, number))
            self._do(number, "train", partial(self._train, number, str(labelled.facts["version"])))
            gate = self._do(number, "gate", partial(self._judge, number))
            if gate.facts["passed"] and self.settings.export is not None:
                self._do(number, "export", partial(self._export, number, self.settings.export))
                if self.settings.verify is not None and is_verification_due(self.folder, number):
                    self._verify(number, self.settings.verify, self.settings.export)
        # Once more, since settings may have changed.
        summary = summarise_loop(self.folder, self.settings, missing)
        write_page(summary)
        return summary

    def _do(self, number: int, name: StageName, work: Callable[[], dict[str, Any]]) -> Stage:
        """Does a stage and notes its result, or returns the one that is in the journal."""
        done = self.folder.find(number, name)
        return self._note(number, name, work) if done is None else done

    def _note(self, number: int, name: StageName, work: Callable[[], dict[str, Any]]) -> Stage:
        """Does a stage, and notes its result."""
        began, cpu = time.monotonic(), sum(os.times()[:4])
        facts = work()
        seconds = time.monotonic() - began
        if name == "label":
            # People have worked on it since the picks were there, also while no loop ran.
            seconds = max(seconds, time.time() - self._find(number, "mine").ended)
        stage = self.folder.note(number, name, facts, seconds=seconds, cpu_s=sum(os.times()[:4]) - cpu)
        write_page(summarise_loop(self.folder, self.settings))
        return stage

    def _find(self, number: int, name: StageName) -> Stage:
        """Returns a stage that must be done by now."""
        if (stage := self.folder.find(number, name)) is None:
            fix = "Begin the loop anew with another --out."
            what = f"the journal lacks the stage {name} of round {number}"
            raise HeadwayError(what, where=str(self.folder.journal_path), fix=fix)
        return stage

    def _begin(self) -> dict[str, Any]:
        """Pins the version and the settings."""
        _, head = self.store.history.find(self.name)
        rows = self.store.read_rows(f"{self.name}@{head.version}")
        counts = {split: int((rows.split == place).sum()) for place, split in enumerate(rows.schema.splits)}
        for split, what in _NEEDED.items():
            if not counts.get(split):
                option = {EVAL: " --split eval", UNLABELLED: " --unlabelled"}.get(split, "")
                store = shlex.quote(str(self.store.folder))
                fix = f"Add some: headway dataset add {self.name} IMAGES{option} --store {store}"
                message = f"the newest version has no images {what} (split {split})"
                raise UsageError(message, where=self.settings.data, fix=fix)
        LOG.info(f"Begins with {head.address}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}.")
        self._tag(0, head.version)
        return {
            "settings": self.settings.model_dump(mode="json"),
            "recipe_sha256": hash_file(self.recipe_path),
            "version": head.version,
            "number": head.number,
            "classes": list(rows.classes),
            "counts": counts,
        }

    def _expect_packages(self) -> None:
        """Raises UsageError if a package is missing that an export of a later round needs, or the program of verify."""
        # Before hours of training. A loop whose last network is judged has nothing left to export but that one.
        last = self.settings.rounds
        is_judged = self.folder.find(last, "gate") is not None
        if self.settings.verify is not None and (not is_judged or is_verification_due(self.folder, last)):
            find_program(self.settings.verify, self.base)
            identify_program(self.settings.verify, self.base)
        if self.settings.export is None or is_judged:
            return
        for target in order_targets(self.settings.export.to):
            try:
                check_packages(target, builds=True)
            except UsageError as error:
                fix = f"{error.fix} Or name other targets, or write export: null."
                raise UsageError(error.what, where="export.to", fix=fix) from None

    def _expect_same(self, began: Stage) -> None:
        """Raises UsageError if the loop was begun with settings that made other networks."""
        before, now = began.facts["settings"], self.settings.model_dump(mode="json")
        fix = "Set it back, or begin a new loop with another --out."
        for key in now:
            if key not in CHANGEABLE and before.get(key) != now[key]:
                raise UsageError(f"the loop was begun with another {key}", where=str(self.folder.folder), fix=fix)
        if began.facts["recipe_sha256"] != hash_file(self.recipe_path):
            what = "the recipe has changed since the loop began, so its networks would not compare"
            raise UsageError(what, where=str(self.recipe_path), fix=fix)

    def _pin(self, version: str, split: str) -> str:
        """Returns the address of a split of a version."""
        return str(replace(self.address, version=version, split=split))

    def _tag(self, number: int, version: str) -> None:
        """Keeps a version that the journal names from `headway dataset gc --keep`, by a tag."""
        # With the version in it: another loop may have the same name. Tags have at most 100 characters.
        tag = f"{self.settings.name[:64]}-round-{number}-{version[:12]}"
        self.store.tag(f"{self.name}@{version}", tag, replace=True)

    def _train(self, number: int, version: str) -> dict[str, Any]:
        """Trains the members of a round on a version, and judges them on the pinned evaluation split."""
        began = self._find(0, "begin").facts
        rows = self._read_rows(version)
        # The evaluation split of the first version in all rounds: networks compare, and nothing mined gets into it.
        values = {"data.train": self._pin(version, TRAIN), "data.eval": self._pin(began["version"], EVAL)}
        runs = [self.folder.find_member(number, member) for member in range(1, self.settings.members + 1)]
        for member, path in enumerate(runs, 1):
            if path != self.folder.find_member(0, 1):
                values |= read_pinned_values(RunFolder(self.folder.find_member(0, 1)))
            LOG.info(f"Round {number}: member {member} of {len(runs)}, in {path}.")
            train_member(build_member(self.members, member, f"{number}-{member}", values), path)
        right = judge_runs(runs)
        write_answers(self.folder.find_answers(number), right)
        return {
            "version": version,
            "runs": [str(path.relative_to(self.folder.folder)) for path in runs],
            "weights_sha256": [hash_weights(RunFolder(path)) for path in runs],
            "accuracy": [round(float(one), 6) for one in right.mean(axis=1)],
            "images": int((rows.split == rows.schema.find_split(TRAIN)).sum()),
            "eval_images": int(right.shape[1]),
        }

    def _read_rows(self, version: str) -> Rows:
        """Reads a version. Raises UsageError if its classes are not those of the networks."""
        rows = self.store.read_rows(f"{self.name}@{version}")
        classes = self._find(0, "begin").facts["classes"]
        if list(rows.classes) != classes:
            others = sorted(set(rows.classes) ^ set(classes))
            what = f"the classes are not those that the loop began with: {', '.join(map(repr, others[:5]))}"
            new = [number for number, label in enumerate(rows.classes) if label not in classes]
            named = [repr(rows.names[int(row)]) for row in np.flatnonzero(np.isin(rows.label, new))[:3]]
            samples = f" of {', '.join(named)}" if named else ""
            fix = f"Correct the labels{samples} with headway dataset label, or begin a new loop with another --out."
            raise UsageError(what, where=f"{self.settings.data}@{version[:12]}", fix=fix)
        return rows

    def _mine(self, number: int) -> dict[str, Any]:
        """Chooses the images of a round from the version that its networks were trained on."""
        version = str(self._find(number - 1, "train").facts["version"])
        pool = {one.name: one for one in self.store.list_samples(f"{self.name}@{version}/{UNLABELLED}")}
        if not pool:
            return {"picks": 0, "pool": 0}
        mined = self.folder.find_mined(number)
        # Its result is written last, so a folder without one was not completed.
        if not (mined / RESULT).is_file():
            shutil.rmtree(mined, ignore_errors=True)
            runs = [self.folder.find_member(number - 1, member) for member in range(1, self.settings.members + 1)]
            options = self.settings.mine.build_options(number)
            try:
                mine(self._pin(version, UNLABELLED), runs, mined, options)
            except NothingToMineError:
                return {"picks": 0, "pool": len(pool)}
        picks = write_picks(self.folder.find_picks(number), mined, pool)
        queue = offer_picks(self.store, self.name, version, mined, f"{self.settings.name}, round {number}")
        return {"picks": len(picks), "pool": len(pool), "queue": queue}

    def _wait(self, number: int, *, once: bool) -> int:
        """Waits for the labels of a round. Returns how many are missing, which is 0 but for `once`."""
        if self.folder.find(number, "label") is not None:
            return 0
        picks, told = read_picks(self.folder.find_picks(number)), -1
        seen: tuple[str, QueueMarks] | None = None
        while True:
            now = self.store.history.find(self.name)[1].version, self._read_marks(number)
            if now != seen:
                seen = now
                count = self._count(now[0], picks, now[1])
                if count.is_enough(self.settings.labels.share):
                    return 0
                if told < 0:
                    LOG.info(self._explain_labels(number, count))
                elif count.missing != told:
                    LOG.info(f"{pluralise(count.missing, 'label')} to go.")
                told = count.missing
            if once:
                return told
            time.sleep(self.settings.labels.poll_s)

    def _read_marks(self, number: int) -> QueueMarks:
        return read_marks(self.store, self.name, str(self._find(number, "mine").facts["queue"]))

    def _count(self, version: str, picks: Sequence[LoopPick], marks: QueueMarks) -> LabelCount:
        return count_labels(self.store.read_rows(f"{self.name}@{version}"), picks, marks.unsure)

    def _explain_labels(self, number: int, count: LabelCount) -> str:
        path, store = self.folder.find_mined(number) / PICKS, shlex.quote(str(self.store.folder))
        label = f"headway dataset label {self.name} --list {shlex.quote(str(path))} --store {store}"
        return (
            f"Round {number} waits for {count.missing:,} of {pluralise(count.picks, 'label')}. Set them in the label "
            f"page of headway serve-data {store}, or set the column label in {path}, and then: {label}"
        )

    def _settle(self, number: int) -> dict[str, Any]:
        """Pins the version with the labels of a round."""
        picks = read_picks(self.folder.find_picks(number))
        version = settle_picks(self.store, self.name, picks, f"loop {self.settings.name}, round {number}: into train")
        # Before the journal has this version: labels that are corrected afterwards make a newer one.
        self._read_rows(version.version)
        marks = self._read_marks(number)
        count = self._count(version.version, picks, marks)
        rows = [
            {"label": label or "", "proposed": pick.proposed, "arm": pick.arm}
            for pick, label in zip(picks, count.labels, strict=True)
        ]
        LOG.info(f"Round {number}: {pluralise(count.labelled, 'label')} in {version.address}.")
        self._tag(number, version.version)
        return {
            "version": version.version,
            "number": version.number,
            "labelled": count.labelled,
            "removed": count.removed,
            "unsure": count.unsure,
            "missing": count.missing,
            "people_s": round(marks.seconds, 1),
            "review": review_rows(rows, self._find(0, "begin").facts["classes"]).to_json(),
        }

    def _judge(self, number: int) -> dict[str, Any]:
        """Compares the first member of a round with the accepted network, on the pinned evaluation split."""
        accepted = find_accepted(self.folder, number)
        before, after = (read_answers(self.folder.find_answers(one)) for one in (accepted, number))
        options = self.settings.gate
        verdict = compare(before[0], after[0], drop=options.drop, bound=options.bound)
        later = "; the program of verify decides after the export" if verdict.passed and self.settings.verify else ""
        LOG.info(f"Round {number}: the new network is {verdict.describe()}{later}.")
        first = read_answers(self.folder.find_answers(0))
        return {
            **verdict.to_json(),
            "against": accepted,
            "gain": asdict(compute_gain(before, after)),
            "gain_in_all": asdict(compute_gain(first, after)),
        }

    def _export(self, number: int, options: ExportRecipe) -> dict[str, Any]:
        """Exports the first member of a round, which its own gate may refuse."""
        out = self.folder.find_export(number)
        # It gets its name when it is complete; what a killed process has left has another one.
        if not is_export(out):
            for rest in out.parent.glob(f".{out.name}.*"):
                shutil.rmtree(rest, ignore_errors=True)
            with SampleProgress("Judging the export", "images", LOG) as progress:
                export_run(self.folder.find_member(number, 1), out, options.to, options.gate, progress=progress)
        targets = {name: not entry.rejected for name, entry in open_manifest(out).targets.items()}
        return {
            "folder": str(out.relative_to(self.folder.folder)),
            "passed": all(targets.values()) and set(targets) >= set(options.to),
            "targets": targets,
        }

    def _verify(self, number: int, verify: VerifyRecipe, export: ExportRecipe) -> None:
        """Runs the user's program on the export of a round, and before on that of the accepted network if need be."""
        program = identify_program(verify, self.base)
        against = find_accepted(self.folder, number)
        known = self.folder.find(against, "verify")
        if known is None or known.facts["program"] != program:
            # Round 0 has no export of its own, and a program that was changed measures something else.
            exported = self._do(against, "export", partial(self._export, against, export))
            if find_accepted(self.folder, number) != against:
                # It had none, and the gate of the export has refused it.
                return self._verify(number, verify, export)
            # The gate may refuse that of round 0 too, which nothing precedes. Then there is nothing to compare with.
            measure = partial(self._measure, against, verify, program, None)
            known = self._note(against, "verify", measure) if exported.facts["passed"] else None
        accepted = None if known is None else (against, float(known.facts["value"]))
        self._do(number, "verify", partial(self._measure, number, verify, program, accepted))
        return None

    def _measure(
        self, number: int, verify: VerifyRecipe, program: str, accepted: tuple[int, float] | None
    ) -> dict[str, Any]:
        """Runs the program on the export of a round. Args: accepted: round and number of the accepted network."""
        LOG.info(f"Round {number}: {shlex.join(verify.command)} verifies the export.")
        value = measure_export(verify, self.base, self.folder.find_export(number), self.folder.find_verified(number))
        against, before = accepted or (None, None)
        found = Verification(
            program=program,
            metric=verify.metric,
            better=verify.better,
            value=value,
            against=against,
            before=before,
            allowed=verify.drop,
        )
        LOG.info(f"Round {number}: {found.describe()}.")
        return found.to_json()
