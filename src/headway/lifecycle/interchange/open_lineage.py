"""OpenLineage 2-0-2: a lineage as run events, one JSON object a line.

Source: spec/OpenLineage.json of openlineage.io. Each run has a START event and, once it is at its end, one of COMPLETE
or ABORT. Weights and data sets are data sets of OpenLineage; their versions are the SHA-256 and the fingerprint.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway import __version__
from headway.core.errors import HeadwayError
from headway.core.run_folder import RunFolder
from headway.data.store_address import StoreAddress, is_store_address
from headway.export.manifest import MANIFEST, hash_file, open_manifest
from headway.lifecycle.interchange.data_origin import DataOrigin
from headway.lifecycle.interchange.lineage import Lineage, Origin

SCHEMA = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
PRODUCER = f"urn:headway:{__version__}"
NAMESPACE = "headway"
# Versions of the facets, of the same edition of the specification.
_FACETS = {
    "DatasetVersionDatasetFacet": "1-0-1",
    "InputStatisticsInputDatasetFacet": "1-0-0",
    "JobTypeJobFacet": "2-0-4",
    "OutputStatisticsOutputDatasetFacet": "1-0-2",
    "OwnershipDatasetFacet": "1-0-1",
    "ProcessingEngineRunFacet": "1-1-1",
    "SourceCodeLocationJobFacet": "1-1-0",
}
_JOBS = {"run": "TRAINING", "weights": "AVERAGE", "ensemble": "ENSEMBLE", "export": "EXPORT"}
_IDS = uuid.uuid5(uuid.NAMESPACE_URL, "headway:run")


def list_events(lineage: Lineage, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Returns the events of all runs, averages, ensembles and exports of a lineage, in the order of their times.

    Args:
        namespace: namespace of the jobs.
    """
    events = [event for origin in lineage.origins for event in _build_events(origin, lineage, namespace)]
    # START comes before COMPLETE where both have one time.
    return sorted(events, key=lambda event: (datetime.fromisoformat(event["eventTime"]), event["eventType"] != "START"))


def render_events(lineage: Lineage, namespace: str = NAMESPACE) -> str:
    """Returns the events as lines of JSON."""
    return "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in list_events(lineage, namespace))


def _build_events(origin: Origin, lineage: Lineage, namespace: str) -> Iterator[dict[str, Any]]:
    if origin.kind not in _JOBS:
        return
    ended = _find_end(origin)
    started = _parse_time(origin.started) or ended or datetime.fromtimestamp(Path(origin.path).stat().st_mtime, UTC)
    event = {
        "producer": PRODUCER,
        "schemaURL": SCHEMA,
        "run": {"runId": identify_run(origin), "facets": _build_run_facets(origin)},
        "job": {"namespace": namespace, "name": origin.name, "facets": _build_job_facets(origin)},
        "inputs": [*map(_build_data, origin.data), *_list_parents(origin, lineage)],
    }
    yield {"eventTime": started.isoformat(), "eventType": "START", **event, "outputs": []}
    if ended is not None:
        kind = "ABORT" if origin.state == "stopped" else "COMPLETE"
        yield {"eventTime": ended.isoformat(), "eventType": kind, **event, "outputs": list(_list_outputs(origin))}


def identify_run(origin: Origin) -> str:
    """Returns the UUID of an origin: the same for the same run, also after it was resumed, copied or moved."""
    # Nothing of its path. An export has neither start nor command, and the file that says what it is never changes; nor
    # does the recipe of a run, which tells apart the trials of a sweep that begin in one second.
    names = {"export": MANIFEST, "ensemble": RunFolder(Path(origin.path)).ensemble_path.name}
    try:
        digest = hash_file(Path(origin.path) / names.get(origin.kind, "recipe.yaml"))
    except OSError:
        digest = ""
    return str(uuid.uuid5(_IDS, json.dumps([origin.kind, origin.started, list(origin.command), digest])))


def _parse_time(text: str) -> datetime | None:
    try:
        time = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None
    return time


def _find_end(origin: Origin) -> datetime | None:
    """Returns the time of the file that is written last; None for a run that is not at its end."""
    folder = RunFolder(Path(origin.path))
    last = {
        "run": folder.folder / "summary.json",
        "weights": folder.recipe_path,
        "ensemble": folder.ensemble_path,
        "export": folder.folder / MANIFEST,
    }[origin.kind]
    try:
        return datetime.fromtimestamp(last.stat().st_mtime, UTC)
    except OSError:
        return None


def _build_facet(kind: str, **facts: Any) -> dict[str, Any]:
    url = f"https://openlineage.io/spec/facets/{_FACETS[kind]}/{kind}.json#/$defs/{kind}"
    return {"_producer": PRODUCER, "_schemaURL": url, **facts}


def _build_run_facets(origin: Origin) -> dict[str, Any]:
    version = origin.versions.get("headway", __version__)
    return {"processing_engine": _build_facet("ProcessingEngineRunFacet", name="headway", version=version)}


def _build_job_facets(origin: Origin) -> dict[str, Any]:
    about = {"processingType": "BATCH", "integration": "HEADWAY", "jobType": _JOBS[origin.kind]}
    facets = {"jobType": _build_facet("JobTypeJobFacet", **about)}
    # The facet needs an address, and git describes a folder of this machine.
    if origin.git and Path(origin.base).is_absolute():
        where = {"type": "git", "url": Path(origin.base).as_uri(), "version": origin.git}
        facets["sourceCodeLocation"] = _build_facet("SourceCodeLocationJobFacet", **where)
    return facets


def _name_dataset(address: str) -> dict[str, str]:
    """Returns namespace and name of a path or an address, by OpenLineage's rules of naming."""
    scheme, separator, rest = address.partition("://")
    # The version is a facet, so that all versions of one data set have one name.
    if is_store_address(address):
        try:
            place = StoreAddress.parse(address)
        except HeadwayError:
            return {"namespace": "store:", "name": address}
        name = f"{place.name}/{place.split}" if place.split else place.name
        return {"namespace": f"store:{place.folder}", "name": name}
    if not separator:
        return {"namespace": "file", "name": address}
    host, _, path = rest.partition("/")
    return {"namespace": f"{scheme}://{host}", "name": path or "/"}


def _build_data(data: DataOrigin) -> dict[str, Any]:
    facets = {}
    if version := data.version or data.fingerprint:
        facets["version"] = _build_facet("DatasetVersionDatasetFacet", datasetVersion=version)
    if data.labels:
        owners = [{"name": credit.by, "type": "LABELLER"} for credit in data.labels]
        facets["ownership"] = _build_facet("OwnershipDatasetFacet", owners=owners)
    dataset: dict[str, Any] = {**_name_dataset(data.address), "facets": facets}
    if data.samples is not None:
        statistics = _build_facet("InputStatisticsInputDatasetFacet", rowCount=data.samples)
        dataset["inputFacets"] = {"inputStatistics": statistics}
    return dataset


def _build_file(path: Path, sha256: str) -> dict[str, Any]:
    version = {"version": _build_facet("DatasetVersionDatasetFacet", datasetVersion=sha256)} if sha256 else {}
    return {"namespace": "file", "name": str(path), "facets": version}


def _list_parents(origin: Origin, lineage: Lineage) -> Iterator[dict[str, Any]]:
    for parent in origin.parents:
        found = lineage.by_path.get(parent.path)
        is_run = found is not None and found.kind in ("run", "weights")
        path = Path(parent.path)
        yield _build_file(path / "weights.safetensors" if is_run else path, found.sha256 if found else "")


def _list_outputs(origin: Origin) -> Iterator[dict[str, Any]]:
    folder = Path(origin.path)
    files = {"weights.safetensors": origin.sha256}
    if origin.kind == "ensemble":
        files = {"ensemble.json": origin.sha256}
    elif origin.kind == "export":
        try:
            files = {MANIFEST: origin.sha256, **open_manifest(folder).files}
        # It was read before, and may have been removed meanwhile.
        except HeadwayError:
            files = {MANIFEST: origin.sha256}
    for name, sha256 in files.items():
        path = folder / name
        if not path.is_file():
            continue
        statistics = _build_facet("OutputStatisticsOutputDatasetFacet", size=path.stat().st_size, fileCount=1)
        yield {**_build_file(path, sha256), "outputFacets": {"outputStatistics": statistics}}
