"""Pages of the service: its resources, its kinds of problems, and its health. They load nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request, Response

from headway.lifecycle.service.exchange import SAFE_HEADERS, answer_json
from headway.lifecycle.service.problems import KINDS, refuse
from headway.page.panel import Panel, table, text
from headway.page.renderer import render

# As the page itself says: its own script and style, and no address at all.
PAGE_HEADERS = SAFE_HEADERS | {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_SECTIONS = ("datasets", "blobs", "thumbs", "uploads", "runs", "exports", "jobs")


async def show_api(request: Request) -> Response:
    """Returns a page with all resources."""
    return Response(_render_api(request.app), 200, PAGE_HEADERS, "text/html; charset=utf-8")


async def show_openapi(request: Request) -> Response:
    """Returns the description of the resources (OpenAPI 3.1)."""
    return answer_json(request, describe_api(request.app))


async def show_problem(request: Request, kind: str) -> Response:
    """Returns a page about a kind of problem."""
    known = KINDS.get(kind)
    if known is None or known.type:
        raise refuse("not-found", "there is no such kind of problem", "The list of resources is at /.")
    panel = text("meaning", f"Status {known.status}", known.text, section="Problem")
    page = render([panel], title=known.title, subtitle=kind)
    return Response(page, 200, PAGE_HEADERS, "text/html; charset=utf-8")


async def show_health(request: Request) -> Response:
    """Says that the server runs."""
    return answer_json(request, {"status": "ok"})


@lru_cache(maxsize=2)
def describe_api(api: FastAPI) -> Mapping[str, Any]:
    """Returns OpenAPI's description of the resources, with the tokens, and without what FastAPI assumes of errors."""
    tree = api.openapi()
    schemas = tree.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in tree["paths"].values():
        for operation in operations.values():
            # FastAPI adds its own answer to wrong parameters; here it is a problem with status 400.
            if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                del operation["responses"]["422"]
            operation["security"] = [{"token": []}]
    tree.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return tree


@lru_cache(maxsize=2)
def _render_api(api: FastAPI) -> str:
    tree = describe_api(api)
    rows = [[str(kind.status), name, kind.title, kind.text] for name, kind in KINDS.items() if not kind.type]
    problems = table(
        "problems", "Kinds of problems", ("status", "kind", "title", "what to do"), rows, section="problems"
    )
    return render(
        [*_build_panels(tree), problems],
        title=tree["info"]["title"],
        subtitle=f"{tree['info']['description']} The same for programs: /openapi.json",
        sections=_SECTIONS,
        footer=f"Headway {tree['info']['version']}",
    )


def _build_panels(tree: Mapping[str, Any]) -> Iterator[Panel]:
    """Yields a panel for each method of each resource."""
    order = 0
    for path, operations in tree["paths"].items():
        for method, operation in operations.items():
            order += 1
            rows = [
                [one["name"], one["in"], one.get("description", ""), "yes" if one.get("required") else "no"]
                for one in operation.get("parameters", ())
            ]
            rows += [
                [status, "answer", answer["description"], ""]
                for status, answer in sorted(operation["responses"].items())
            ]
            title = f"{method.upper()} {path}"
            yield table(
                f"{method}-{path.strip('/').replace('/', '-')}",
                title,
                ("name", "where", "meaning", "needed"),
                rows,
                note=" ".join(operation.get("description", "").split()),
                section=path.split("/")[1],
                order=order,
            )
