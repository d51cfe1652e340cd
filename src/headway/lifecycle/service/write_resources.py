"""Resources that change data sets: a new one, and `POST /datasets/{id}`."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from headway.core.untrusted_json import JsonError, expect_entries, is_number, is_text, parse_object
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.bodies import JSON_TYPE, MAX_TEXT, read_media_type
from headway.lifecycle.service.digests import read_digest
from headway.lifecycle.service.exchange import State, answer_json, answer_stored, find_state, read_chunks
from headway.lifecycle.service.keys import name_request, read_key
from headway.lifecycle.service.memory_body import MEMORY_BYTES, MemoryBody
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.structured_fields import (
    format_boolean,
    parse_boolean,
    parse_integer,
    parse_tags,
)
from headway.lifecycle.service.tokens import Principal
from headway.lifecycle.service.upload import ClientLeftError
from headway.lifecycle.service.upload_plan import UploadPlan
from headway.lifecycle.service.upload_resources import begin_upload, create_upload, is_tus, plan_upload

SMALL_BODY_BYTES = 1 << 20

DatasetName = Annotated[
    str, Path(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of a data set.", examples=["cars"])
]
JobName = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="Name of a job, from Location.")]


async def put_dataset(request: Request, dataset: DatasetName) -> Response:
    """Creates a data set. The body may name its splits, its classes, how images are stored, and facts about it.

    With an Idempotency-Key, the same request is answered again as at first.
    """
    state = find_state(request)
    principal = state.authorise(request, "admin")
    facts, name = await _read_facts(request), ""
    if "idempotency-key" in request.headers:
        name = name_request(principal.name, dataset, read_key(request.headers), json.dumps(facts, sort_keys=True))
    version = await asyncio.to_thread(state.datasets.create, dataset, facts, principal.name, name)
    headers = {"location": f"/datasets/{dataset}", "etag": f'"{version.version}"'}
    return answer_json(request, version.to_json(), 201, headers)


async def post_changes(
    request: Request,
    dataset: DatasetName,
    message: Annotated[
        str, Query(max_length=MAX_TEXT, description="What the change is about, for the list of versions.")
    ] = "",
) -> Response:
    """Adds, labels, moves and removes samples: one request makes one new version, or none if nothing changes.

    The body is a form with files, a tar file (WebDataset), or a list of changes as JSON. With `Upload-Complete: ?0`, or
    with tus, it is the beginning of an upload.
    """
    state, headers = find_state(request), request.headers
    principal = state.authorise(request, "write", "label")
    by_tus = is_tus(request)
    is_whole = parse_boolean("Upload-Complete", headers.get("upload-complete"))
    if not message.isprintable():
        raise refuse("malformed", "the message has a character that cannot be printed", "Leave it out.")
    if by_tus or is_whole is False:
        return await begin_upload(request, state, principal, dataset, message)
    read_media_type(headers.get("content-type", ""))
    read_key(headers)
    return await _post_whole(request, state, principal, dataset, message, is_whole)


async def _post_whole(
    request: Request, state: State, principal: Principal, dataset: str, message: str, is_whole: bool | None
) -> Response:
    """Answers a request whose body comes as a whole: a short list in memory, others in a file as an upload."""
    headers = request.headers
    length = parse_integer("Content-Length", headers.get("content-length"))
    content_type = headers.get("content-type", "")
    plan = plan_upload(request, principal, dataset, content_type, length, message=message, is_resumable=False)
    more = {} if is_whole is None else {"upload-complete": format_boolean(True)}
    is_list = read_media_type(content_type) == JSON_TYPE
    if is_list and length is not None and length <= min(MEMORY_BYTES, state.settings.body_bytes):
        return answer_stored(request, await _run_list(request, state, principal, plan), more)
    upload = await create_upload(state, plan)
    try:
        expected = read_digest("Content-Digest", headers.get("content-digest"))
        most = state.settings.body_bytes if length is None else length
        await upload.append(read_chunks(request), 0, most=most, expected=expected, pool=state.disk)
        # Nothing of it is written down: a body that comes as a whole is of no use after a restart.
        upload.set_length(upload.offset)
        answer = await state.requests.run(upload, principal, parse_tags("If-Match", headers.get("if-match")))
    finally:
        # A job goes on with it.
        if upload.job is None:
            await state.on_disk(state.uploads.remove, upload)
    return answer_stored(request, answer, more)


async def _run_list(request: Request, state: State, principal: Principal, plan: UploadPlan) -> Answer:
    """Returns the answer to a short list of changes."""
    headers = request.headers
    expected = read_digest("Content-Digest", headers.get("content-digest"))
    data = await read_small_body(request, MEMORY_BYTES)
    if expected is not None:
        expected.check_bytes(data)
    body = MemoryBody(plan, data)
    return await state.requests.run(body, principal, parse_tags("If-Match", headers.get("if-match")))


async def list_jobs(request: Request) -> Response:
    """Lists the jobs that run or have ended lately."""
    state = find_state(request)
    principal = state.authorise(request, "read", "write")
    is_admin = "admin" in principal.scopes
    shown = [job.to_json() for job in state.jobs if is_admin or job.principal == principal.name]
    return answer_json(request, {"jobs": shown})


async def get_job(request: Request, job: JobName) -> Response:
    """Shows the state, the progress and the result of a job."""
    state = find_state(request)
    principal = state.authorise(request, "read", "write")
    found = state.jobs.find(job, None if "admin" in principal.scopes else principal.name)
    return answer_json(request, found.to_json(), headers={"cache-control": "no-store"})


async def delete_job(request: Request, job: JobName) -> Response:
    """Cancels a job: it ends before its next image, and changes nothing."""
    state = find_state(request)
    principal = state.authorise(request, "write")
    found = state.jobs.find(job, None if "admin" in principal.scopes else principal.name)
    if not found.is_ended:
        found.cancel()
    return answer_json(request, found.to_json(), 202, {"location": f"/jobs/{job}"})


async def read_small_body(request: Request, most: int = SMALL_BODY_BYTES) -> bytes:
    """Returns a body of JSON, which may be empty, to who is authorised. Raises ProblemError (400, 413, 415, 429)."""
    state, data = find_state(request), bytearray()
    try:
        async for chunk in read_chunks(request):
            state.hold(request, len(chunk))
            data += chunk
            if len(data) > most:
                raise refuse("too-large", f"the body has more than {most:,} bytes", "Send less.")
    except ClientLeftError:
        raise refuse("malformed", "the body is not complete", "Send it again.") from None
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if data and media_type != JSON_TYPE:
        raise refuse("wrong-type", f"a body of type {media_type[:80]!r} is not accepted", f"Send {JSON_TYPE}.")
    return bytes(data)


async def _read_facts(request: Request) -> dict[str, Any]:
    """Returns the keyword arguments of `Store.create` in the body. Raises ProblemError (400, 413, 415, 422)."""
    data = await read_small_body(request)
    if not data:
        return {}
    try:
        tree = parse_object(data)
        for name in tree.keys() - _FACTS.keys():
            raise JsonError(f"it has {name[:100]!r}, which is none of {', '.join(sorted(_FACTS))}")
        expect_entries(tree, {name: check for name, check in _FACTS.items() if name in tree})
    except JsonError as error:
        raise refuse("malformed", f"the facts cannot be read: {error}", "Mend them.") from error
    return tree


def _is_short_text(value: Any) -> bool:
    return is_text(value) and len(value) <= MAX_TEXT


_FACTS = {
    "mode": (_is_short_text, "a text"),
    "message": (_is_short_text, "a text"),
    "start": (_is_short_text, "the address of a version"),
    "splits": (
        lambda value: isinstance(value, dict) and all(is_number(share, 0, 1) for share in value.values()),
        "an object of shares",
    ),
    "classes": (lambda value: isinstance(value, list) and all(map(_is_short_text, value)), "a list of texts"),
    "about": (lambda value: isinstance(value, dict) and all(map(_is_short_text, value.values())), "an object of texts"),
}
