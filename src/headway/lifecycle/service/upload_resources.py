"""Resumable uploads over HTTP: the IETF draft and tus 1.0.0, two faces of `Upload`.

draft-ietf-httpbis-resumable-upload, and https://tus.io/protocols/resumable-upload with the extensions creation,
creation-with-upload, checksum and termination. An upload begins at the resource that its bytes are for,
`POST /datasets/{id}`, and its last request answers as that would have.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated

from fastapi import Path, Request, Response

from headway.lifecycle.service.bodies import TAR_TYPE, read_media_type
from headway.lifecycle.service.digests import TUS_ALGORITHMS, Expected, read_checksum, read_digest
from headway.lifecycle.service.exchange import (
    State,
    answer_empty,
    answer_json,
    answer_stored,
    find_state,
    read_chunks,
)
from headway.lifecycle.service.keys import read_key
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.structured_fields import (
    format_boolean,
    parse_boolean,
    parse_integer,
    parse_tags,
)
from headway.lifecycle.service.tokens import Principal
from headway.lifecycle.service.upload import Upload
from headway.lifecycle.service.upload_plan import UploadPlan

TUS_VERSION = "1.0.0"
PARTIAL_TYPE, TUS_TYPE = "application/partial-upload", "application/offset+octet-stream"
NO_STORE = {"cache-control": "no-store"}

UploadName = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="Name of an upload, from Location.")]


def is_tus(request: Request) -> bool:
    """Returns True if the client speaks tus. Raises ProblemError (412) if it is another version."""
    version = request.headers.get("tus-resumable")
    if version is not None and version != TUS_VERSION:
        what = f"tus {version[:20]} is not served"
        headers = [(b"tus-version", TUS_VERSION.encode())]
        raise refuse("tus-version", what, f"Send Tus-Resumable: {TUS_VERSION}.", headers=headers)
    return version is not None


async def begin_upload(request: Request, state: State, principal: Principal, dataset: str, message: str) -> Response:
    """Begins an upload by `Upload-Complete: ?0`, or by tus; it may bring the first bytes along."""
    headers = request.headers
    length = parse_integer("Upload-Length", headers.get("upload-length"))
    by_tus = is_tus(request)
    if by_tus:
        if length is None:
            raise refuse("malformed", "Upload-Length is missing", "Send the length of the whole upload.")
        content_type = _read_tus_type(headers.get("upload-metadata"))
        expected, has_bytes = read_checksum(headers.get("upload-checksum")), headers.get("content-type") == TUS_TYPE
    else:
        content_type = headers.get("content-type", "")
        expected, has_bytes = read_digest("Content-Digest", headers.get("content-digest")), True
    read_media_type(content_type)
    plan = plan_upload(request, principal, dataset, content_type, length, message=message)
    upload = await create_upload(state, plan)
    try:
        if has_bytes:
            await _append(request, state, upload, 0, expected)
        if by_tus and upload.is_whole:
            await state.requests.run(upload, principal, None)
    except BaseException:
        # The client does not know its name, so nobody can continue it.
        if not upload.is_complete:
            await state.on_disk(state.uploads.remove, upload)
        raise
    facts = {"location": f"/uploads/{upload.plan.id}", "upload-offset": str(upload.offset)}
    if not by_tus:
        facts |= {"upload-complete": format_boolean(False), "upload-limit": state.uploads.limit}
    return answer_empty(201, NO_STORE | facts)


def plan_upload(
    request: Request,
    principal: Principal,
    dataset: str,
    content_type: str,
    length: int | None,
    *,
    message: str,
    is_resumable: bool = True,
) -> UploadPlan:
    """Returns what the headers of the first request of an upload say. Raises ProblemError (400)."""
    headers = request.headers
    digest = read_digest("Repr-Digest", headers.get("repr-digest"))
    return UploadPlan(
        principal=principal.name,
        target=dataset,
        content_type=content_type,
        length=length,
        if_match=parse_tags("If-Match", headers.get("if-match")),
        key=None if headers.get("idempotency-key") is None else read_key(headers),
        digest_algorithm=None if digest is None else digest.algorithm,
        digest=None if digest is None else digest.value.hex(),
        is_resumable=is_resumable,
        message=message,
    )


async def create_upload(state: State, plan: UploadPlan) -> Upload:
    """Begins an upload. Raises ProblemError (404, 413, 429, 507)."""

    def create() -> Upload:
        state.datasets.find_head(plan.target)
        return state.uploads.create(plan)

    return await state.on_disk(create)


async def patch_upload(request: Request, upload: UploadName) -> Response:
    """Appends bytes to an upload; the last request answers as `POST` on the data set would have."""
    state = find_state(request)
    principal = state.authorise(request, "write", "label")
    found, headers, by_tus = _find(state, upload, principal), request.headers, is_tus(request)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    wanted = TUS_TYPE if by_tus else PARTIAL_TYPE
    if media_type != wanted:
        what = f"a part of an upload is of type {wanted}"
        raise refuse(
            "wrong-type", what, "Send it so.", headers=[(b"accept-patch", f"{PARTIAL_TYPE}, {TUS_TYPE}".encode())]
        )
    offset = parse_integer("Upload-Offset", headers.get("upload-offset"))
    if offset is None:
        raise refuse("malformed", "Upload-Offset is missing", "Send the offset at which the bytes belong.")
    if found.is_complete:
        raise refuse(
            "completed-upload",
            "the upload is complete, and was used",
            f"GET /uploads/{upload} has its answer.",
            headers=[(b"upload-complete", b"?1"), (b"upload-offset", str(found.offset).encode())],
        )
    await found.end_append()
    found.expect_offset(offset)
    if by_tus:
        is_last = False
        expected = read_checksum(headers.get("upload-checksum"))
    else:
        is_last = await _read_is_last(request, state, found, offset)
        expected = read_digest("Content-Digest", headers.get("content-digest"))
    await _append(request, state, found, offset, expected)
    if is_last:
        await state.on_disk(found.set_length, found.offset)
    tags = parse_tags("If-Match", headers.get("if-match"))
    facts = NO_STORE | {"upload-offset": str(found.offset)}
    if by_tus:
        if found.is_whole:
            answer = await state.requests.run(found, principal, tags)
            facts |= answer.headers
        return answer_empty(204, facts)
    if not is_last:
        return answer_empty(204, facts | {"upload-complete": format_boolean(False)})
    answer = await state.requests.run(found, principal, tags)
    return answer_stored(request, answer, facts | {"upload-complete": format_boolean(True)})


async def head_upload(request: Request, upload: UploadName) -> Response:
    """Says how far an upload is. A request that still appends to it is ended."""
    state = find_state(request)
    found = _find(state, upload, state.authorise(request, "write", "label"))
    by_tus = is_tus(request)
    await found.end_append()
    facts = NO_STORE | {"upload-offset": str(found.offset)}
    if found.plan.length is not None:
        facts["upload-length"] = str(found.plan.length)
    if by_tus:
        return answer_empty(200, facts)
    facts |= {"upload-complete": format_boolean(found.is_complete), "upload-limit": state.uploads.limit}
    return answer_empty(204, facts)


async def get_upload(request: Request, upload: UploadName) -> Response:
    """Shows an upload, and the answer of a complete one, for a client that did not get it."""
    state = find_state(request)
    found = _find(state, upload, state.authorise(request, "write", "label"))
    answer = found.answer
    tree = {
        "upload": found.plan.id,
        "dataset": found.plan.target,
        "offset": found.offset,
        "length": found.plan.length,
        "is_complete": found.is_complete,
        "job": None if found.job is None else found.job.id,
        "answer": None if answer is None else {"status": answer.status, "body": answer.body, "headers": answer.headers},
    }
    return answer_json(request, tree, headers=NO_STORE)


async def delete_upload(request: Request, upload: UploadName) -> Response:
    """Removes an upload and its bytes; a version that was made of them stays."""
    state = find_state(request)
    found = _find(state, upload, state.authorise(request, "write", "label"))
    is_tus(request)
    await found.end_append()
    if found.is_finishing:
        raise refuse("conflict", "the upload is complete, and its request runs", "Wait for it, or cancel its job.")
    await state.on_disk(state.uploads.remove, found)
    return answer_empty(204, {})


async def describe_uploads(request: Request) -> Response:
    """Says what uploads are accepted, by both protocols."""
    state = find_state(request)
    facts = {
        "upload-limit": state.uploads.limit,
        "accept-patch": f"{PARTIAL_TYPE}, {TUS_TYPE}",
        "tus-resumable": TUS_VERSION,
        "tus-version": TUS_VERSION,
        "tus-extension": "creation,creation-with-upload,checksum,termination",
        "tus-max-size": str(state.settings.body_bytes),
        "tus-checksum-algorithm": ",".join(reversed(TUS_ALGORITHMS)),
    }
    return answer_empty(204, facts)


def _find(state: State, name: str, principal: Principal) -> Upload:
    return state.uploads.find(name, None if "admin" in principal.scopes else principal.name)


async def _read_is_last(request: Request, state: State, upload: Upload, offset: int) -> bool:
    """Reads Upload-Complete, and what the request says about the length of the whole upload."""
    headers = request.headers
    is_last = parse_boolean("Upload-Complete", headers.get("upload-complete"))
    if is_last is None:
        raise refuse("malformed", "Upload-Complete is missing", "Send ?1 with the last bytes, and ?0 before.")
    length = parse_integer("Upload-Length", headers.get("upload-length"))
    if length is not None:
        await state.on_disk(upload.set_length, length)
    size = parse_integer("Content-Length", headers.get("content-length"))
    # The length is known before the bytes come, so that a wrong one is refused without them.
    if is_last and size is not None:
        await state.on_disk(upload.set_length, offset + size)
    return is_last


async def _append(request: Request, state: State, upload: Upload, offset: int, expected: Expected | None) -> None:
    most = upload.plan.length
    size = parse_integer("Content-Length", request.headers.get("content-length"))
    limit = state.settings.body_bytes
    if size is not None and most is None and offset + size > limit:
        what = f"{offset + size:,} bytes are more than the {limit:,} that are accepted"
        raise refuse("too-large", what, "Send several requests.")
    await upload.append(
        read_chunks(request), offset, most=limit if most is None else most, expected=expected, pool=state.disk
    )


def _read_tus_type(text: str | None) -> str:
    """Returns the media type in Upload-Metadata. Raises ProblemError (400)."""
    values: Mapping[str, str] = {}
    try:
        pairs = [pair.strip().partition(" ") for pair in (text or "").split(",") if pair.strip()]
        values = {key: base64.b64decode(value, validate=True).decode() for key, _, value in pairs}
    except (binascii.Error, ValueError):
        raise refuse("malformed", "Upload-Metadata is not valid", "Send keys with values in base64.") from None
    if "filetype" not in values and values.get("filename", "").lower().endswith(".tar"):
        return TAR_TYPE
    return values.get("filetype", "")
