"""Server: from the folder of a store to a process that answers until it is told to stop."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import shlex
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import UsageError
from headway.core.text_format import pluralise
from headway.data.store_address import DATABASE
from headway.http.connection import Connections
from headway.http.listening import (
    BACKLOG,
    Address,
    bind,
    drain,
    is_loopback,
    make_protocol_factory,
    raise_file_limit,
    stop_accepting,
    sweep,
    watch_signals,
)
from headway.lifecycle.service.audit import AuditLog
from headway.lifecycle.service.datasets import Datasets
from headway.lifecycle.service.jobs import Jobs
from headway.lifecycle.service.keys import Keys
from headway.lifecycle.service.labelling.labelling import Labelling
from headway.lifecycle.service.labelling.mining_job import MINED
from headway.lifecycle.service.processes import RUNS, Processes
from headway.lifecycle.service.requests import Requests
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.service.tokens import LOCAL, Principal, Tokens
from headway.lifecycle.service.uploads import Uploads
from headway.lifecycle.store.store import Store

if TYPE_CHECKING:
    from headway.lifecycle.service.app import Service
    from headway.lifecycle.service.exchange import State

LOG = logging.getLogger("headway.lifecycle")

PACKAGES = ("fastapi", "httptools", "uvicorn", "uvloop")
FOLDER = "service"
"""Folder in the store with all that is the service's own."""
TOKENS_FILE = "tokens.json"
# Threads that compute, that write bodies and wait for the disk, and that make versions. Each kind has its own, so that
# slow work of one does not hold up the others.
# Those that make versions mostly wait: whoever comes first commits for all.
POOL_THREADS, DISK_THREADS, COMMIT_THREADS = 4, 8, 16
SWEEP_S = 600.0


def serve_data(
    folder: Path,
    *,
    address: Address,
    settings: ServiceSettings,
    announce: Callable[[dict[str, Any]], None],
    runs: Sequence[Path] = (),
) -> None:
    """Serves the data sets of a store until SIGTERM or SIGINT.

    Args:
        folder: of the store; it is made if it does not exist.
        announce: called once requests are accepted, with `url`, `store`, `datasets`, `tokens`.
        runs: folders of runs, beside that of the store, whose accuracy the label page shows by version.

    Raises:
        UsageError: a package is missing; the address is taken, or other machines reach it and there is no token; the
            folder is no store; or another server serves it.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        what = f"headway serve-data needs {', '.join(missing)}, not installed here"
        raise UsageError(what, fix="Install it: pip install 'headway[data-service]'.")
    # A slip in the name of a folder would else look like a store whose data sets are gone.
    if not (folder.expanduser() / DATABASE).is_file():
        LOG.info(f"There is no store in {folder}: an empty one is made there.")
    for one in runs:
        if not one.is_dir():
            LOG.warning(f"--runs: there is no folder {one} yet; the label page shows its runs once they are there.")
    store = Store.make(folder)
    tokens = Tokens(store.folder / FOLDER / TOKENS_FILE)
    is_open = is_loopback(address.host)
    if not is_open and not tokens.entries:
        what = f"other machines reach {address.host}, and everybody there could change the data sets"
        make = f"headway data-token {shlex.quote(str(folder))} --add NAME --scopes write"
        fix = f"Make a token: {make}. Or bind to 127.0.0.1."
        raise UsageError(what, where="--bind", fix=fix)
    import uvloop

    with bind(address) as listener, lock_store(store.folder / FOLDER):
        settings = replace(settings, connections=raise_file_limit(settings.connections))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            unanswered = runner.run(_run(listener, address, settings, store, tokens, is_open, announce, runs))
    if unanswered:
        LOG.warning(f"{pluralise(unanswered, 'request')} ended by the stop. Uploads go on where they were.")


async def _run(
    listener: socket.socket,
    address: Address,
    settings: ServiceSettings,
    store: Store,
    tokens: Tokens,
    is_open: bool,
    announce: Callable[[dict[str, Any]], None],
    runs: Sequence[Path],
) -> int:
    """Serves until a signal; returns the number of requests that were left unanswered."""
    from headway.lifecycle.service.app import Service
    from headway.lifecycle.service.exchange import State

    place = store.folder / FOLDER
    datasets = Datasets(store, place)
    keys, audit = Keys(place / "keys.db", settings.key_age_s), AuditLog(place / "audit.jsonl")
    uploads, jobs = Uploads(place / "uploads", settings), Jobs(settings)
    labelling = Labelling(place, datasets, [store.folder / RUNS, *runs])
    # A killed server leaves the images of what it mined.
    shutil.rmtree(place / MINED, ignore_errors=True)
    pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="headway-data")
    disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="headway-disk")
    commits = ThreadPoolExecutor(COMMIT_THREADS, thread_name_prefix="headway-commit")
    try:
        requests = Requests(
            datasets,
            uploads,
            keys,
            jobs,
            settings,
            work_folder=place / "work",
            pool=pool,
            disk=disk,
            commits=commits,
        )
        state = State(
            settings=settings,
            datasets=datasets,
            tokens=tokens,
            uploads=uploads,
            jobs=jobs,
            requests=requests,
            keys=keys,
            labelling=labelling,
            processes=Processes(store.folder, place / "processes"),
            audit=audit,
            pool=pool,
            disk=disk,
            commits=commits,
            is_open=is_open,
        )
        requests.resume_jobs(lambda name: _find_principal(tokens, name, is_open))
        return await _serve(listener, address, Service(state), state, announce)
    finally:
        await _end_tasks()
        await asyncio.to_thread(jobs.close)
        for threads in (commits, pool, disk):
            await asyncio.to_thread(threads.shutdown)
        keys.close()
        labelling.close()
        audit.close()


async def _serve(
    listener: socket.socket,
    address: Address,
    service: Service,
    state: State,
    announce: Callable[[dict[str, Any]], None],
) -> int:
    settings = state.settings
    dropped = Counter[str]()
    connections = Connections(settings, dropped, make_protocol_factory(service, settings))
    stop, hurry = watch_signals()
    server = await asyncio.get_running_loop().create_server(connections.build, sock=listener, backlog=BACKLOG)
    url = f"http://{address.url_host}:{listener.getsockname()[1]}"
    heads = state.datasets.list_heads()
    announce(
        {
            "url": url,
            "store": str(state.datasets.folder),
            "datasets": sorted(heads),
            "tokens": len(state.tokens.entries),
        }
    )
    sweepers = [asyncio.create_task(sweep(connections)), asyncio.create_task(_sweep_old(state))]
    await stop.wait()
    LOG.info("Stopping: no new connection is accepted. Uploads go on after the next start.")
    service.is_draining = True
    await stop_accepting(server, listener, connections.build)
    unanswered = await drain(connections, settings, hurry)
    for sweeper in sweepers:
        sweeper.cancel()
    if dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
        LOG.info(f"Connections that were closed early, by reason: {reasons}.")
    return unanswered


@contextmanager
def lock_store(folder: Path) -> Iterator[None]:
    """Keeps a second server of the same store out for the block; the lock dies with the process.

    Raises:
        UsageError: there is another server.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = "another server serves this store"
            raise UsageError(what, where=str(folder.parent), fix="Stop it first, or serve another store.") from error
        yield


async def _end_tasks() -> None:
    """Ends requests that are still unanswered, while there are threads that put away what they have received."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _sweep_old(state: State) -> None:
    """Removes old uploads and keys, until it is cancelled."""
    while True:
        for work in (*(upload.remove for upload in state.uploads.take_old()), state.keys.sweep):
            try:
                await state.on_disk(work)
            # For example a full disk, on which the next ones may make room.
            except Exception:
                LOG.exception("Something old could not be removed.")
        await asyncio.sleep(SWEEP_S)


def _find_principal(tokens: Tokens, name: str, is_open: bool) -> Principal | None:
    if name == LOCAL.name:
        return LOCAL if is_open and not tokens.were_made else None
    found = next((one for one in tokens.entries if one.name == name), None)
    return None if found is None else Principal(found.name, found.scopes)
