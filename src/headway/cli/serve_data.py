"""The verbs `serve-data`, which serves the data sets of a store over HTTP, and `data-token`, which says to whom."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.screen import Json, print_result
from headway.core.errors import UsageError
from headway.lifecycle.service.settings import MIB, ServiceSettings

USUAL = ServiceSettings()

StoreFolder = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the store.")]


# Typer reads the options from the signature.
def serve_data(
    store: StoreFolder,
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address. One that other machines reach needs a token.")
    ] = "127.0.0.1:8080",
    body_mb: Annotated[int, typer.Option(min=1, help="Longest body or upload in MiB.")] = USUAL.body_bytes // MIB,
    job_files: Annotated[
        int, typer.Option(min=1, help="Requests with more files are answered at once, and go on as jobs.")
    ] = USUAL.job_files,
    megapixels: Annotated[
        float, typer.Option(help="Largest image that is accepted, in million pixels.")
    ] = USUAL.image_pixels / 1e6,
    read_s: Annotated[
        float, typer.Option("--read-timeout", help="Seconds that a client may take for the headers, or 64 KiB.")
    ] = USUAL.read_s,
    drain: Annotated[float, typer.Option(help="Seconds to answer what runs, after SIGTERM.")] = USUAL.drain_s,
    runs: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Folder of runs: the label page shows their accuracy by version."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve the data sets of a store over HTTP.

    Its resources are listed at / of the server. Without a token, only programs of this machine are answered; make one
    with headway data-token. Stop it with Ctrl-C or SIGTERM: uploads go on after the next start.
    """
    from headway.http.listening import Address
    from headway.lifecycle.service.server import serve_data as serve_store

    settings = ServiceSettings(
        body_bytes=body_mb * MIB,
        job_files=job_files,
        image_pixels=round(megapixels * 1e6),
        read_s=read_s,
        drain_s=drain,
    )

    def announce(started: dict[str, Any]) -> None:
        print_result(started, as_json, f"Serving {started['store']} at {started['url']}. Stop it with Ctrl-C.")

    serve_store(store, address=Address.parse(bind), settings=settings, announce=announce, runs=runs or [])


def data_token(
    store: StoreFolder,
    add: Annotated[str | None, typer.Option(metavar="NAME", help="Make a token, and print it once.")] = None,
    scopes: Annotated[
        str, typer.Option(help="Its scopes, with commas: read, label, write, admin.")
    ] = "read,label,write",
    remove: Annotated[str | None, typer.Option(metavar="NAME", help="Remove a token. It is refused at once.")] = None,
    as_json: Json = False,
) -> None:
    """List, make and remove the tokens of a data service.

    Only the SHA-256 of each token is stored. A running server knows of changes at once.
    """
    from headway.data.store_address import find_store
    from headway.lifecycle.service.server import FOLDER, TOKENS_FILE
    from headway.lifecycle.service.tokens import Tokens

    if add is not None and remove is not None:
        raise UsageError("--add and --remove cannot be combined", fix="Run the verb twice.")
    tokens = Tokens(find_store(store) / FOLDER / TOKENS_FILE)
    if add is not None:
        token = tokens.add(add, [scope.strip() for scope in scopes.split(",") if scope.strip()])
        print_result({"name": add, "token": token}, as_json, token)
        return
    if remove is not None:
        tokens.remove(remove)
        print_result({"removed": remove}, as_json, f"Removed {remove}.")
        return
    rows = [{"name": one.name, "scopes": list(one.scopes), "created_s": one.created_s} for one in tokens.entries]
    lines = [
        f"{one.name}  {', '.join(one.scopes)}  made {time.strftime('%Y-%m-%d %H:%M', time.localtime(one.created_s))}"
        for one in tokens.entries
    ]
    print_result({"tokens": rows}, as_json, "\n".join(lines) or "There is no token. Make one with --add NAME.")
