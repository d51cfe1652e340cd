"""`headway export`: writes a trained run, or an ensemble, as a folder that other programs run, and judges it."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import expect_empty_folder, read_text, sync_folder
from headway.core.run_folder import RunFolder
from headway.core.text_format import format_bytes
from headway.doctor.environment_host import HostFiles
from headway.export.gate_run import Gate, find_kind
from headway.export.manifest import (
    MANIFEST,
    REJECTED,
    Manifest,
    TargetEntry,
    hash_file,
    parse_manifest,
    write_manifest,
)
from headway.export.pipeline import Pipeline, build_pipeline
from headway.export.rows import check_task
from headway.export.table import TableOptions, measure_run_table
from headway.export.table_record import TABLE_FILE, InferenceTable
from headway.export.targets import order_targets
from headway.export.targets.onnx import RESIZE, load_resize
from headway.export.targets.target import BuildContext, Target, check_packages
from headway.export.verdict import Verdict
from headway.export.versions import find_versions
from headway.setup.prediction_columns import THRESHOLD, name_numbers
from headway.setup.task import Task
from headway.setup.train_setup import TrainSetup
from headway.training.ensemble import hash_weights, list_members
from headway.training.evaluate import open_evaluation_set
from headway.training.runs import load_trained

LOG = logging.getLogger("headway.export")
PREDICT, PREDICT_SOURCE = "predict.py", Path(__file__).with_name("predict_template.py")
"""The program in each export, and its text here. It is not imported: it needs ONNX Runtime."""
DEFAULT_NAME = "export"
"""Name of an export in its run folder."""
LIBRARIES = ("headway", "torch", "numpy", "pillow")
FLAGS = frozenset(
    {"avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}
    | {"asimd", "asimddp", "i8mm", "bf16", "sve"}
)
"""Flags of a processor that decide which kernels an inference runtime takes."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The result of `export_run`.

    Attributes:
        folder: the folder written.
        manifest: content of its pipeline.json.
        verdicts: what the gate found in each of its checks, by target; empty if nothing was judged.
        table: the inference table; None if none was asked for, or it could not be measured.
        table_error: why it could not be measured.
    """

    folder: Path
    manifest: Manifest
    verdicts: Mapping[str, Sequence[Verdict]]
    table: InferenceTable | None = None
    table_error: str | None = None

    @property
    def passed(self) -> bool:
        """True if the gate has refused no target."""
        return all(verdict.passed for found in self.verdicts.values() for verdict in found)

    def to_json(self) -> dict[str, Any]:
        """Returns the folder, the manifest and the table, or the reason why there is none."""
        tree = {"folder": str(self.folder), "passed": self.passed, "manifest": self.manifest.to_json()}
        if self.table_error is not None:
            return tree | {"table_error": self.table_error}
        return tree if self.table is None else tree | {"table": self.table.to_json()}

    def describe(self) -> str:
        """Returns one line for each target, for the terminal."""
        lines = [f"Exported to {self.folder}:"]
        for name, entry in self.manifest.targets.items():
            size = format_bytes((self.folder / entry.file).stat().st_size)
            lines.append(f"{name}: {entry.file} ({size})")
            if back := entry.about.get("in_fp32"):
                lines.append(f"  {len(back)} of {entry.about['layers']} layers went back to float32")
            checks = [verdict.describe() for verdict in self.verdicts.get(name, ())]
            if entry.gate is not None and entry.gate["not_from_files"] is not None:
                checks.append(f"not judged from files: {entry.gate['not_from_files']}")
            lines += [f"  {line}" for check in checks or ["not judged"] for line in check.splitlines()]
        if self.table is not None:
            lines += ["", self.table.describe()]
        if self.table_error is not None:
            lines += ["", f"The export is written, but not its inference table: {self.table_error}"]
        return "\n".join(lines)


def export_run(
    run: Path,
    out: Path | None = None,
    to: Sequence[str] = ("onnx",),
    gate: float | None = 0.5,
    data: str | None = None,
    *,
    table: bool = False,
    quick: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportResult:
    """Exports a run or an ensemble with its best weights, and judges each target over the whole evaluation set.

    A target that the gate refuses stays in the folder, its file under the name `REJECTED-...`.

    Args:
        run: the run folder, or the folder of an ensemble.
        out: folder to create. Default: `export` in the run folder, or `export-2` and so on.
        to: names of targets; see `headway.export.targets.TARGETS`.
        gate: the largest drop in points that passes. fp32 may change no answer, whatever this is. None: nothing is
            judged, and pipeline.json says so.
        data: packed folder to judge on. Default: the evaluation set of the run.
        table: also measure the inference table.
        quick: measure it in about a minute, for figures that are not to be quoted.
        progress: called with (images done, images) of each pass of the gate.

    Raises:
        UsageError: no such run or target, a package is missing, nothing to judge on, or `out` exists.
        HeadwayError: weights are damaged, or the network cannot be exported; the message names the part.
    """
    if quick and not table:
        raise UsageError("there is no table to measure quickly", where="--quick", fix="Add --table, or leave it out.")
    folder = RunFolder.open_trained(run)
    targets = order_targets(to)
    for target in targets:
        check_packages(target, builds=True)
    out = out or RunFolder.find_free_name(folder.folder, DEFAULT_NAME)
    expect_empty_folder(out, "--out")
    # The folder is replaced at the end, and programs would stay in the one that is gone.
    if out.resolve() == Path.cwd():
        raise UsageError("this is the current folder", where=str(out), fix="Name one to create with --out.")
    if gate is not None and not 0 <= gate <= 100:
        fix = "Set the percentage points that the metric may drop, such as 0.5."
        raise UsageError(f"{gate:g} is not from 0 to 100", where="--gate", fix=fix)
    # Float32 whatever it was trained in: the targets decide on their precision, and the gate judges that.
    setup = load_trained(folder, wide=True)
    with ExitStack() as stack:
        stack.enter_context(closing(setup.inputs))
        check_task(setup.task)
        held_out = None
        if gate is not None:
            held_out = stack.enter_context(closing(open_evaluation_set(setup, data, run)))
        pipeline = build_pipeline(setup)
        aside = stack.enter_context(_write_aside(out))
        judge = None
        if gate is not None and held_out is not None:
            judge = Gate(setup, held_out, allowed=gate, show=progress)
        context = BuildContext(setup=setup, evaluation=held_out, gate=judge)
        entries, verdicts = _build_targets(targets, pipeline, aside, context)
        shutil.copyfile(PREDICT_SOURCE, aside / PREDICT)
        manifest = _describe_export(folder, setup, aside, entries, targets, judge)
        write_manifest(aside, manifest)
        _expect_classes(aside, setup)
    result = ExportResult(folder=out, manifest=manifest, verdicts=verdicts)
    # The export is whole by now: whatever happens to the table, it stays.
    return _add_table(run, result, TableOptions(is_quick=quick), data) if table else result


def _add_table(run: Path, export: ExportResult, options: TableOptions, data: str | None) -> ExportResult:
    """Measures the inference table of an export, and writes its manifest again, which then has the table's sha256."""
    try:
        table = measure_run_table(run, export.folder, options, data=data, tell=LOG.info)
        files = {**export.manifest.files, TABLE_FILE: hash_file(export.folder / TABLE_FILE)}
        write_manifest(export.folder, manifest := replace(export.manifest, files=files))
    except (HeadwayError, OSError) as error:
        return replace(export, table_error=str(error))
    return replace(export, manifest=manifest, table=table)


def _build_targets(
    targets: Sequence[Target], pipeline: Pipeline, folder: Path, context: BuildContext
) -> tuple[dict[str, TargetEntry], dict[str, list[Verdict]]]:
    """Builds and judges each target in turn; returns their entries and verdicts by name."""
    entries, verdicts = dict[str, TargetEntry](), dict[str, list[Verdict]]()
    for target in targets:
        # Its file has another name by now, and what is made of it would be refused too.
        if target.after is not None and entries[target.after].rejected:
            LOG.warning(f"{target.name} is not built: the gate has refused {target.after}, of which it is made.")
            continue
        LOG.info(f"Building {target.name}.")
        about = target.build(pipeline, folder, context)
        entry = TargetEntry(file=target.file, precision=target.precision, about=dict(about))
        if context.gate is not None:
            if RESIZE in target.files:
                context.gate.set_resize(load_resize(folder))
            with target.load(folder) as session:
                found = verdicts[target.name] = context.gate.check_all(session, target.precision)
            passed = all(verdict.passed for verdict in found)
            gate = {
                "passed": passed,
                "checks": [verdict.to_json() for verdict in found],
                "not_from_files": _explain_missing_check(found, context.gate),
            }
            entry = replace(entry, gate=gate, rejected=not passed)
            # A file that another target made stays: that target has passed.
            if entry.rejected and target.file in target.files:
                (folder / target.file).rename(folder / f"{REJECTED}{target.file}")
                entry = replace(entry, file=f"{REJECTED}{target.file}")
        entries[target.name] = entry
    return entries, verdicts


def _explain_missing_check(found: Sequence[Verdict], gate: Gate) -> str | None:
    """Returns why a target was not judged from files; None: it was."""
    if len(found) > 1:
        return None
    return gate.not_from_files or "it is refused already"


def _describe_export(
    run: RunFolder,
    setup: TrainSetup,
    folder: Path,
    entries: Mapping[str, TargetEntry],
    targets: Sequence[Target],
    gate: Gate | None,
) -> Manifest:
    """Returns the manifest of the files in a folder."""
    task, target, recipe = setup.task, setup.target, setup.recipe
    is_built_in = recipe.task.factory == "auto" or recipe.task.factory.startswith(f"{Task.__module__}:")
    members = list_members(run) if run.ensemble_path.exists() else [run]
    fingerprints = [str(member.read_provenance().get("fingerprint", "")) for member in members]
    about: dict[str, Any] = {"training": sorted(set(fingerprints)), "max_bad_share": recipe.data.max_bad_share}
    if gate is not None:
        about |= gate.describe_data()
    used = [one for one in targets if one.name in entries]
    packages = sorted({package for one in used for package in (*one.packages, *one.build_packages)})
    return Manifest(
        task=target.kind if is_built_in else "own",
        activation=task.activation or "identity",
        names=_name_outputs(setup),
        outputs=task.outputs,
        threshold=THRESHOLD if is_built_in and target.kind == "multi" else None,
        size=setup.size,
        channels=setup.channels,
        crop_share=recipe.data.crop.share,
        scaled=recipe.data.scaled,
        decoder=recipe.data.decoder,
        files={path.name: hash_file(path) for path in sorted(folder.iterdir())},
        targets=dict(entries),
        run={
            "folder": str(run.folder.resolve()),
            "task": recipe.task.factory,
            "members": [{"folder": str(one.folder.resolve()), "sha256": hash_weights(one)} for one in members],
        },
        data=about,
        versions={"python": platform.python_version(), **find_versions(LIBRARIES, packages)},
        processor=_describe_processor(),
    )


def _name_outputs(setup: TrainSetup) -> tuple[str, ...]:
    """Returns the name of each output, as the manifest has it."""
    target, outputs = setup.target, setup.task.outputs
    names = name_numbers(target.classes, target.numbers) if target.kind == "value" else target.classes
    # A task of the user's own may have other outputs than the labels have names.
    return tuple(names) if len(names) == outputs else tuple(map(str, range(outputs)))


def _expect_classes(folder: Path, setup: TrainSetup) -> None:
    """Raises HeadwayError if the pipeline.json that was written does not name the classes of the run, in their order.

    The gate compares outputs by their numbers, so that it would not see other names.
    """
    ours = setup.target.classes
    # Numbers may have no names, and outputs of the user's own are numbered.
    if find_kind(setup.task, setup.target.kind, len(ours)) not in ("class", "multi"):
        return
    theirs = parse_manifest(read_text(folder / MANIFEST)).names
    if theirs == ours:
        return
    what = f"it names {len(theirs):,} classes, and the run has {len(ours):,}"
    if len(theirs) == len(ours):
        place = next(number for number in range(len(ours)) if ours[number] != theirs[number])
        what = f"it calls output {place} {theirs[place]!r}, and the run {ours[place]!r}"
    raise HeadwayError(what, where=MANIFEST, fix="This is a fault of headway export; nothing was written.")


def _describe_processor() -> dict[str, Any]:
    host = HostFiles(Path("/"), os.environ)
    return {"machine": platform.machine(), "flags": sorted(host.flags & FLAGS)}


@contextmanager
def _write_aside(out: Path) -> Iterator[Path]:
    """Gives a new folder beside `out` for the block, which is then renamed to `out`, or removed after an error."""
    # A link to a folder stays a link.
    out = out.resolve()
    # In the same folder: a rename is atomic only within a file system.
    aside = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    aside.mkdir(parents=True)
    try:
        yield aside
        sync_folder(aside)
        # A folder replaces an empty one.
        os.replace(aside, out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
