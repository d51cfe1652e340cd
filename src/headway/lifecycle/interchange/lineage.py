"""Lineage: where weights come from. A graph of runs, averages, ensembles and exports, followed back to the data.

Everything is read from the folders: `provenance.json` of runs, `ensemble.json`, and `pipeline.json` of exports. The
SHA-256 that a child has recorded of its parent's weights is compared with the weights that are there now.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error
from headway.core.run_folder import RUNS, RunFolder
from headway.core.untrusted_json import is_object, is_sha256, is_whole_number
from headway.export.manifest import MANIFEST, hash_file, is_export, open_manifest
from headway.lifecycle.interchange.data_origin import Credits, DataOrigin, join_path, trace_data

OriginKind = Literal["run", "weights", "ensemble", "export", "file", "missing"]
"""`run`: a training run; `weights`: a run folder whose weights come from other runs; `file`: weights alone."""
MOST_ORIGINS = 1000


@final
@dataclass(frozen=True, kw_only=True)
class Parent:
    """A step back in a lineage.

    Attributes:
        path: of the parent.
        how: what the child took from it, such as `member` or `checkpoint of step 40`.
        warning: what does not fit, such as weights that have changed since; empty: everything does.
    """

    path: str
    how: str
    warning: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class Origin:
    """One node of a lineage.

    Attributes:
        path: absolute path of the folder or file.
        kind: see `OriginKind`.
        name: name of the recipe, or of the folder.
        sha256: of its weights, or of the export's manifest; empty: it has none yet.
        started: time at which it began, as its provenance has it.
        state: `finished`, `stopped` or `not finished` for a run; for what is missing, what is damaged there.
        command: command line.
        git: `git describe` of the recipe's folder; empty outside a repository.
        base: folder that the paths of its recipe are relative to.
        versions: versions of the libraries.
        data: the data sets that it was trained and evaluated on.
        parents: what it comes from.
    """

    path: str
    kind: OriginKind
    name: str
    sha256: str = ""
    started: str = ""
    state: str = ""
    command: tuple[str, ...] = ()
    git: str = ""
    base: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    data: tuple[DataOrigin, ...] = ()
    parents: tuple[Parent, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Lineage:
    """All origins of some weights: first the weights themselves, then what they come from, nearest first."""

    origins: tuple[Origin, ...]

    @cached_property
    def by_path(self) -> Mapping[str, Origin]:
        """The origins by their paths."""
        return {origin.path: origin for origin in self.origins}

    def to_json(self) -> dict[str, Any]:
        """Returns the graph: parents are named by their paths."""
        return {"origins": [asdict(origin) for origin in self.origins]}


def trace_lineage(target: Path, runs: Path = RUNS) -> Lineage:
    """Follows weights back to their runs, data sets and labels.

    Args:
        target: a run folder, an ensemble, an export, or a file of weights. A file outside of a run is looked for by
            its SHA-256.
        runs: folder of runs that is searched for such a file, and for parents that were moved.

    Raises:
        UsageError: it is none of these, or no run has these weights.
        HeadwayError: a record in the folder itself is damaged. Damaged parents are reported as such.
    """
    library = _Library(runs)
    start = _find_folder(target, library)
    origins: dict[str, Origin] = {}
    waiting = deque([start])
    # Breadth first, each folder once: a graph of averages of averages has more paths than folders.
    while waiting and len(origins) < MOST_ORIGINS:
        path = waiting.popleft()
        if str(path) in origins:
            continue
        try:
            origin = _read_origin(path, library)
        except (HeadwayError, OSError) as error:
            if not origins:
                raise
            what = error.what if isinstance(error, HeadwayError) else describe_os_error(error)
            origin = Origin(path=str(path), kind="missing", name=path.name, state=what)
        origins[str(path)] = origin
        waiting.extend(Path(parent.path) for parent in origin.parents)
    return Lineage(origins=tuple(origins.values()))


@final
class _Library:
    """The weights of all runs in a folder, found by their SHA-256. They are hashed when the first is asked for.

    Attributes:
        credits: who set the labels of the versions that were met.
    """

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self.credits: Credits = {}

    def find(self, sha256: str) -> Path | None:
        """Returns the folder of a run with these weights; None if there is none."""
        return self._folders.get(sha256)

    @cached_property
    def _folders(self) -> Mapping[str, Path]:
        found: dict[str, Path] = {}
        for path in sorted(self._runs.rglob("weights.safetensors")) if self._runs.is_dir() else ():
            if RunFolder(path.parent).recipe_path.is_file() and (digest := _hash(path)):
                found.setdefault(digest, path.parent.resolve())
        return found


def _hash(path: Path) -> str:
    """Returns the SHA-256 of a file; empty if it is not there or cannot be read."""
    try:
        return hash_file(path)
    except OSError:
        return ""


def _find_folder(target: Path, library: _Library) -> Path:
    """Returns the folder that a target belongs to. Raises UsageError if there is none."""
    path = Path(os.path.realpath(target))
    fix = "Name a run folder, an ensemble, an export, or the weights.safetensors of a run."
    if path.is_dir():
        if not _is_traceable(path):
            # Its message says what is missing, or names a folder of nearly this name.
            RunFolder.open(target)
        return path
    if not path.is_file():
        raise UsageError("there is no such file or folder", where=str(target), fix=fix)
    run = RunFolder(path.parent)
    if (run.recipe_path.is_file() and path.name == run.weights_path.name) or is_export(path.parent):
        return path.parent
    if found := library.find(_hash(path)):
        return found
    what = "no run here has these weights"
    raise UsageError(what, where=str(target), fix="Name the folder of the runs with --runs, or the run itself.")


def _is_traceable(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.ensemble_path.is_file() or run.recipe_path.is_file() or is_export(folder)


def _read_origin(path: Path, library: _Library) -> Origin:
    run = RunFolder(path)
    if run.ensemble_path.is_file():
        return _read_ensemble(run, library)
    if run.recipe_path.is_file():
        return _read_run(run, library)
    if is_export(path):
        return _read_export(path, library)
    if path.is_file():
        return Origin(path=str(path), kind="file", name=path.name, sha256=_hash(path))
    return Origin(path=str(path), kind="missing", name=path.name)


def _read_run(run: RunFolder, library: _Library) -> Origin:
    about, recipe = run.read_provenance(), run.read_recipe_tree()
    base = join_path(run.folder, _get_text(about, "base")) or run.folder
    derived = "parents" in about
    parents = [*_list_parents(about, run.folder, library)]
    # Averaged weights have the recipe of their first parent, and did not start from its weights.
    parents += [] if derived else _list_starting_weights(recipe, base)
    state = ""
    if not derived:
        summary = run.read_summary()
        state = "finished" if summary.get("finished") else "stopped" if summary else "not finished"
    return replace(
        _start_origin(run, about),
        kind="weights" if derived else "run",
        name=_get_text(recipe, "name") or run.folder.name,
        sha256=_hash(run.weights_path),
        state=state,
        data=tuple(trace_data(recipe.get("data"), base, about, library.credits)),
        parents=tuple(parents),
    )


def _read_ensemble(run: RunFolder, library: _Library) -> Origin:
    about = run.read_provenance()
    entries = run.read_json(run.ensemble_path.stem).get("members")
    parents = [*_follow_entries(entries, "run", "member", run.folder, library)]
    return replace(_start_origin(run, about), kind="ensemble", sha256=_hash(run.ensemble_path), parents=tuple(parents))


def _read_export(folder: Path, library: _Library) -> Origin:
    manifest = open_manifest(folder)
    parents = [*_follow_entries(manifest.run.get("members"), "folder", "exported", folder, library)]
    return Origin(
        path=str(folder),
        kind="export",
        name=folder.name,
        sha256=_hash(folder / MANIFEST),
        versions=manifest.versions,
        parents=tuple(parents),
    )


def _start_origin(run: RunFolder, about: Mapping[str, Any]) -> Origin:
    """Returns the facts that every provenance.json has. It may come from elsewhere, so wrong types count as absent."""
    command, versions = about.get("command"), about.get("versions")
    return Origin(
        path=str(run.folder),
        kind="run",
        name=run.folder.name,
        started=_get_text(about, "started"),
        command=tuple(map(str, command)) if isinstance(command, list) else (),
        git=_get_text(about, "git"),
        base=str(join_path(run.folder, _get_text(about, "base")) or run.folder),
        versions={name: str(one) for name, one in versions.items()} if isinstance(versions, dict) else {},
    )


def _list_parents(about: Mapping[str, Any], folder: Path, library: _Library) -> Iterator[Parent]:
    """Yields the runs that provenance.json names: parents of averaged weights, and the run of a fork."""
    for entry in _list_objects(about.get("parents")):
        step = entry.get("step")
        how = f"checkpoint of step {step:,}" if is_whole_number(step) else "averaged"
        yield from _follow_entries([entry], "run", how, folder, library)
    forked = about.get("forked")
    if isinstance(forked, dict):
        how = f"forked at step {forked['step']:,}" if is_whole_number(forked.get("step")) else "forked"
        yield from _follow_entries([forked], "run", how, folder, library)


def _list_starting_weights(recipe: Mapping[str, Any], base: Path) -> Iterator[Parent]:
    """Yields the file of `model.weights`, as the run that it belongs to if there is one."""
    model = recipe.get("model")
    weights = _get_text(model, "weights") if isinstance(model, dict) else ""
    found = join_path(base, weights) if weights else None
    if found is None:
        return
    path = Path(os.path.realpath(found))
    run = RunFolder(path.parent)
    is_run = path.name == run.weights_path.name and run.recipe_path.is_file()
    yield Parent(path=str(run.folder if is_run else path), how="starting weights (model.weights)")


def _follow_entries(entries: Any, key: str, how: str, base: Path, library: _Library) -> Iterator[Parent]:
    """Yields the runs that entries name, each with the SHA-256 that its weights had when the child was made."""
    for entry in _list_objects(entries):
        if path := join_path(base, _get_text(entry, key)) if _get_text(entry, key) else None:
            yield _follow(Path(os.path.realpath(path)), how, entry.get("sha256"), library)


def _follow(path: Path, how: str, sha256: Any, library: _Library) -> Parent:
    if not is_sha256(sha256):
        return Parent(path=str(path), how=how)
    found = _hash(RunFolder(path).weights_path)
    if found == sha256:
        return Parent(path=str(path), how=how)
    moved = library.find(sha256)
    if moved is not None:
        return Parent(path=str(moved), how=how, warning=f"it was {path} then")
    warning = f"its weights have changed since: they were {sha256[:12]}..." if found else "it is not there any more"
    return Parent(path=str(path), how=how, warning=warning)


def _list_objects(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if is_object(entry)] if isinstance(value, list) else []


def _get_text(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) else ""


def describe_lineage(lineage: Lineage) -> str:
    """Returns the lineage as indented lines, each folder once in full."""
    lines: list[str] = []
    shown: set[str] = set()

    # A list of what to print next, since a long chain of runs would exceed Python's depth of calls.
    waiting: list[tuple[int, Parent | None, str]] = [(0, None, lineage.origins[0].path)]
    while waiting:
        level, parent, path = waiting.pop()
        origin = lineage.by_path.get(path)
        head = "" if parent is None else f"{parent.how}: "
        pad = "  " * level
        if origin is None or path in shown:
            lines.append(f"{pad}{head}{path} ({'see above' if path in shown else 'not followed further'})")
            continue
        shown.add(path)
        lines.append(f"{pad}{head}{_describe_origin(origin)}")
        if parent is not None and parent.warning:
            lines.append(f"{pad}  Note: {parent.warning}.")
        lines += [f"{pad}  {line}" for line in _list_facts(origin)]
        waiting += [(level + 1, one, one.path) for one in reversed(origin.parents)]
    return "\n".join(lines)


def _describe_origin(origin: Origin) -> str:
    words = {"weights": "weights of other runs", "missing": origin.state or "not there"}
    return f"{origin.path} ({words.get(origin.kind, origin.kind)})"


def _list_facts(origin: Origin) -> Iterator[str]:
    if origin.sha256 and origin.kind not in ("ensemble", "export"):
        yield f"weights   sha256 {origin.sha256}"
    if origin.started:
        code = f", git {origin.git}" if origin.git else ""
        version = f", headway {origin.versions['headway']}" if "headway" in origin.versions else ""
        state = f", {origin.state}" if origin.state else ""
        yield f"made      {origin.started}{state}{code}{version}"
    if origin.command:
        yield f"command   {' '.join(origin.command)}"
    versions: set[str] = set()
    for data in origin.data:
        yield f"{data.role:<10}{data.describe()}"
        # Both splits of a version have its labels.
        if data.labels and data.version not in versions:
            versions.add(data.version)
            yield f"labels    {', '.join(credit.describe() for credit in data.labels)}"
