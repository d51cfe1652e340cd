"""Server: from an export's folder to a process that answers until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError, UsageError
from headway.core.text_format import pluralise
from headway.export.manifest import is_export, open_manifest
from headway.export.serve.app import App
from headway.export.serve.batching import Batcher
from headway.export.serve.metrics import ServeMetrics
from headway.export.serve.served_model import ServedModel, load_model
from headway.export.serve.settings import ServeSettings
from headway.export.serve.shadow import Shadow, find_mismatch
from headway.export.serve.swap import Swapper
from headway.export.serve.token import Token, read_token
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

LOG = logging.getLogger("headway.export")

PACKAGES = ("uvicorn", "httptools", "uvloop")


def serve(
    folder: Path,
    *,
    address: Address,
    settings: ServeSettings,
    token_file: Path | None = None,
    target: str | None = None,
    shadow: Path | None = None,
    shadow_target: str | None = None,
    announce: Callable[[dict[str, Any]], None],
) -> None:
    """Serves an export until SIGTERM or SIGINT, after which it answers what it has accepted.

    Args:
        token_file: file of the token; needed if other machines reach the address.
        target: target of the export; see `open_export`.
        shadow: a second export that answers too, and is compared. It may be the same folder, with another target.
        shadow_target: target of the second export.
        announce: called once requests are accepted, with `url`, `version`, `sha256`.

    Raises:
        UsageError: a package is missing; the address is taken, or needs a token; the folder is no export; the second
            export has another task or other names.
        DataError: the export is damaged, or the gate refused it.
        HeadwayError: requests were left unanswered.
    """
    # First, since a folder that is no export needs no packages.
    if not is_export(folder):
        open_manifest(folder)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        what = f"headway serve needs {', '.join(missing)}, not installed here"
        raise UsageError(what, fix="Install it: pip install 'headway[serve]'.")
    if shadow_target is not None and shadow is None:
        raise UsageError("there is no shadow", where="--shadow-target", fix="Add --shadow EXPORT2.")
    token = _choose_token(address, token_file)
    # First of all, since a wrong address is known at once, and loading takes seconds.
    with bind(address) as listener:
        settings = replace(settings, connections=raise_file_limit(settings.connections))

        def load(path: Path, target: str | None) -> ServedModel:
            return load_model(path, target=target, threads=settings.threads, batch=settings.batch)

        model = load(folder, target)
        second = None if shadow is None else load(shadow, shadow_target)
        if second is not None and (mismatch := find_mismatch(model, second)):
            fix = "Choose an export of a run with the same task and classes."
            raise UsageError(mismatch, where=f"--shadow {shadow}", fix=fix)
        # What is loaded stays, and need not be looked through at each collection.
        gc.collect()
        gc.freeze()
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            unanswered = runner.run(
                _run(listener, address, settings, token, model, second, lambda: load(folder, target), folder, announce)
            )
    if unanswered:
        what = f"{pluralise(unanswered, 'request')} {'was' if unanswered == 1 else 'were'} not answered before the stop"
        raise HeadwayError(what, fix="Allow more time with --drain, and send one signal only.")


async def _run(
    listener: socket.socket,
    address: Address,
    settings: ServeSettings,
    token: Token | None,
    model: ServedModel,
    second: ServedModel | None,
    load: Callable[[], ServedModel],
    folder: Path,
    announce: Callable[[dict[str, Any]], None],
) -> int:
    """Serves until a signal; returns the number of requests that were left unanswered."""
    loop, metrics = asyncio.get_running_loop(), ServeMetrics()

    def report(result: str, images: int, difference: float) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(metrics.add_shadow, result, images, difference)

    shadow = None if second is None else Shadow(second, report)
    batcher = Batcher(
        model,
        batch=settings.batch,
        capacity=settings.queue,
        pixels=settings.decoded_pixels,
        metrics=metrics,
        shadow=shadow,
    )
    swapper = Swapper(folder, batcher, load)
    app = App(batcher, settings, metrics, swap=swapper.swap, token=token)
    connections = Connections(settings, metrics.dropped, make_protocol_factory(app, settings))
    metrics.add_gauge("queue_images", "Images that wait.", lambda: batcher.waiting)
    metrics.add_gauge("connections", "Open connections.", lambda: len(connections))
    metrics.add_gauge("body_bytes", "Bytes of request bodies in memory.", lambda: app.held_bytes)
    stop, hurry = watch_signals()
    server = await loop.create_server(connections.build, sock=listener, backlog=BACKLOG)
    port = listener.getsockname()[1]
    url = f"http://{address.url_host}:{port}"
    announce({"url": url, "version": model.version, "sha256": model.sha256})
    sweeper = asyncio.create_task(sweep(connections))
    await stop.wait()
    LOG.info("Stopping: no new connection is accepted, and what was sent is answered.")
    app.is_draining = True
    await stop_accepting(server, listener, connections.build)
    unanswered = await drain(connections, settings, hurry)
    sweeper.cancel()
    if not hurry.is_set() and not unanswered:
        await batcher.close()
        if shadow is not None:
            await asyncio.to_thread(shadow.close)
    return unanswered


def _choose_token(address: Address, token_file: Path | None) -> Token | None:
    """Reads the token. Raises UsageError if other machines reach the address, and there is none."""
    if token_file is not None:
        return read_token(token_file)
    if not is_loopback(address.host):
        what = f"other machines reach {address.host}, and everybody there could use the server"
        fix = "Add --token-file FILE, made by (umask 077; openssl rand -hex 32 > FILE), or bind to 127.0.0.1."
        raise UsageError(what, where="--bind", fix=fix)
    return None
