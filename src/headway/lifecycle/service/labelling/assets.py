"""Files of the label page: HTML, style and scripts. They hold nothing of the store, and load nothing from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path

from fastapi import Request, Response

from headway.lifecycle.service.exchange import SAFE_HEADERS
from headway.lifecycle.service.problems import refuse
from headway.page.renderer import TEMPLATE_FOLDER

FOLDER = Path(__file__).parent / "static"
# The house's style, with its colours for light and dark screens, comes first.
_FILES = {
    "page.css": (TEMPLATE_FOLDER, "text/css; charset=utf-8"),
    "label.css": (FOLDER, "text/css; charset=utf-8"),
    **dict.fromkeys((path.name for path in sorted(FOLDER.glob("*.js"))), (FOLDER, "text/javascript; charset=utf-8")),
}
# Scripts, styles and pictures of this server alone, or pictures that a script has fetched: nothing that somebody has
# written into a name or a label can run, or be loaded from elsewhere.
PAGE_HEADERS = SAFE_HEADERS | {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


async def show_label_page(request: Request) -> Response:
    """Returns the label page, which is the same for all data sets."""
    return Response(_read(FOLDER, "label.html"), 200, PAGE_HEADERS, "text/html; charset=utf-8")


async def show_asset(request: Request, file: str) -> Response:
    """Returns a style or a script of the page."""
    if file not in _FILES:
        raise refuse("not-found", "there is no such file", "The page is at /label.")
    folder, media_type = _FILES[file]
    return Response(_read(folder, file), 200, SAFE_HEADERS | {"cache-control": "no-cache"}, media_type)


@cache
def _read(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


LABEL_PAGES: Mapping[str, Callable[..., Awaitable[Response]]] = {
    "/label": show_label_page,
    "/label/{dataset}": show_label_page,
    "/static/{file}": show_asset,
}
