"""The verb `serve`, which answers predictions of an export over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.screen import Json, Target, print_result
from headway.export.serve.settings import MIB, ServeSettings

USUAL = ServeSettings()


# Typer reads the options from the signature.
def serve(
    export: Annotated[Path, typer.Argument(help="Folder that headway export has written.")],
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address. One that other machines reach needs --token-file.")
    ] = "127.0.0.1:8080",
    token_file: Annotated[
        Path | None, typer.Option(help="File of mode 0600 with the token that clients have to send.")
    ] = None,
    target: Target = None,
    batch: Annotated[int, typer.Option(min=1, help="Most images that are computed at once.")] = USUAL.batch,
    queue: Annotated[
        int, typer.Option(min=1, help="Most images that wait. Requests beyond are answered 503.")
    ] = USUAL.queue,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the network. Default: the number of usable cores.")
    ] = None,
    deadline_ms: Annotated[
        float | None, typer.Option(help="Deadline of requests without X-Deadline-Ms. Default: none.")
    ] = None,
    body_mb: Annotated[int, typer.Option(min=1, help="Longest body of a request in MiB.")] = USUAL.body_bytes // MIB,
    megapixels: Annotated[
        float, typer.Option(help="Largest image that is decoded, in million pixels.")
    ] = USUAL.image_pixels / 1e6,
    read_s: Annotated[
        float, typer.Option("--read-timeout", help="Seconds that a client may take to send a request.")
    ] = USUAL.read_s,
    drain: Annotated[float, typer.Option(help="Seconds to answer what waits, after SIGTERM.")] = USUAL.drain_s,
    shadow: Annotated[
        Path | None,
        typer.Option(metavar="EXPORT2", help="A second export, which answers too and is compared with the first."),
    ] = None,
    shadow_target: Annotated[str | None, typer.Option(help="Target of the second export. Default: onnx.")] = None,
    as_json: Json = False,
) -> None:
    """Answer predictions of an export over HTTP.

    It batches what waits. Stop it with Ctrl-C or SIGTERM: what was accepted is answered.
    """
    from headway.export.serve.server import serve as serve_export
    from headway.http.listening import Address

    settings = ServeSettings(
        batch=batch,
        queue=queue,
        threads=threads,
        deadline_ms=deadline_ms,
        body_bytes=body_mb * MIB,
        held_bytes=max(USUAL.held_bytes, 2 * body_mb * MIB),
        image_pixels=round(megapixels * 1e6),
        read_s=read_s,
        drain_s=drain,
    )

    def announce(started: dict[str, Any]) -> None:
        print_result(started, as_json, f"Serving {started['version']} at {started['url']}. Stop it with Ctrl-C.")

    serve_export(
        export,
        address=Address.parse(bind),
        settings=settings,
        token_file=token_file,
        target=target,
        shadow=shadow,
        shadow_target=shadow_target,
        announce=announce,
    )
