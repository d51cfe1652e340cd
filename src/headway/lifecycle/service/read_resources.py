"""Resources that only look: data sets, versions, differences, samples, and their bytes."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from PIL import Image

from headway.core.errors import DataError
from headway.data.image_check import BadImageError, measure_image
from headway.lifecycle.service import croissant
from headway.lifecycle.service.blobs import Blob
from headway.lifecycle.service.bodies import JSON_TYPE
from headway.lifecycle.service.datasets import PAGE_SAMPLES
from headway.lifecycle.service.digests import choose_answer_digest, format_digest
from headway.lifecycle.service.exchange import SAFE_HEADERS, State, answer_json, find_state
from headway.lifecycle.service.pixels import PixelBudget
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.structured_fields import format_bytes, matches_tag, prefers
from headway.lifecycle.service.write_resources import DatasetName
from headway.lifecycle.store.objects import read_stored_image

CHUNK_BYTES = 1 << 20
THUMB_SIDES = (64, 128, 256, 512)
# The bytes of a version never change, and a private cache may keep them: a token stands before them.
IMMUTABLE = {"cache-control": "private, max-age=31536000, immutable"}
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
# By their first bytes, whatever a name says. SVG and HTML are never among them: they run scripts.
_IMAGE_TYPES = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG\r\n\x1a\n", "image/png"), (b"RIFF", "image/webp"))

VersionName = Annotated[
    str,
    Path(
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="ID of a version, its first digits, its number (v3), or a tag.",
        examples=["v1"],
    ),
]
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of the bytes of a sample.")]


async def list_datasets(request: Request) -> Response:
    """Lists the data sets with their newest versions."""
    state = find_state(request)
    state.authorise(request, "read")
    heads = await asyncio.to_thread(state.datasets.list_heads)
    return answer_json(request, {"datasets": [heads[name].to_json() for name in sorted(heads)]})


async def get_dataset(request: Request, dataset: DatasetName) -> Response:
    """Describes the newest version: counts by class and split; with `Accept: application/ld+json`, as Croissant."""
    return await _describe(request, dataset, "")


async def list_versions(
    request: Request,
    dataset: DatasetName,
    after: Annotated[int | None, Query(ge=0, description="`next` of the page before.")] = None,
    count: Annotated[int, Query(ge=1, le=PAGE_SAMPLES, description="Versions in the answer.")] = PAGE_SAMPLES,
) -> Response:
    """Lists versions, the newest first, in pages."""
    state = find_state(request)
    state.authorise(request, "read")
    return answer_json(request, await asyncio.to_thread(state.datasets.list_versions, dataset, after, count))


async def get_version(request: Request, dataset: DatasetName, version: VersionName) -> Response:
    """Describes a version: counts by class and split; with `Accept: application/ld+json`, as Croissant."""
    return await _describe(request, dataset, version)


async def get_difference(
    request: Request,
    dataset: DatasetName,
    first: VersionName,
    second: VersionName,
    after: Annotated[str, Query(pattern="^([0-9a-f]{64})?$", description="`next` of the page before.")] = "",
    count: Annotated[int, Query(ge=1, le=PAGE_SAMPLES, description="Samples in the answer.")] = PAGE_SAMPLES,
) -> Response:
    """Shows what differs between two versions: samples added, removed, relabelled, moved and renamed, in pages."""
    state = find_state(request)
    state.authorise(request, "read")
    page = await asyncio.to_thread(lambda: state.datasets.compare(dataset, first, second, after=after, count=count))
    return answer_json(request, page)


async def list_samples(
    request: Request,
    dataset: DatasetName,
    version: Annotated[str, Query(pattern="^[A-Za-z0-9._-]{0,100}$", description="Default: the newest.")] = "",
    label: Annotated[
        str | None, Query(alias="class", max_length=1024, description="Only this class; empty: those without one.")
    ] = None,
    split: Annotated[str | None, Query(max_length=100, description="Only this split.")] = None,
    after: Annotated[str, Query(pattern="^([0-9a-f]{64})?$", description="`next` of the page before.")] = "",
    count: Annotated[int, Query(ge=1, le=PAGE_SAMPLES, description="Samples in the answer.")] = PAGE_SAMPLES,
    order: Annotated[str, Query(pattern="^(id|score)$", description="By ID, or as a queue has them.")] = "id",
    queue: Annotated[
        str, Query(pattern="^([0-9a-f]{32})?$", description="With order=score: a queue. Default: the newest.")
    ] = "",
) -> Response:
    """Lists samples of a version, sorted by ID or by the score of a queue, in pages."""
    state = find_state(request)
    state.authorise(request, "read")
    if order == "score":
        by_score = state.labelling.list_by_score
        page = await asyncio.to_thread(by_score, dataset, version, queue, label, split, after, count)
        return answer_json(request, page)
    page = await asyncio.to_thread(
        lambda: state.datasets.list_samples(dataset, version, label=label, split=split, after=after, count=count)
    )
    return answer_json(request, page)


async def get_blob(request: Request, sha256: Digest) -> Response:
    """Returns the stored bytes of a sample, or a range of them."""
    state = find_state(request)
    state.authorise(request, "read")
    blob = await asyncio.to_thread(state.datasets.find_blob, sha256)
    head = await asyncio.to_thread(_read, blob, 0, 16)
    media_type = next((name for magic, name in _IMAGE_TYPES if head.startswith(magic)), "application/octet-stream")
    headers = SAFE_HEADERS | IMMUTABLE | {"etag": f'"{sha256}"', "accept-ranges": "bytes"}
    algorithm = choose_answer_digest(request.headers)
    if algorithm == "sha-256":
        # The ID is the digest of the whole, also beside a range of it.
        headers["repr-digest"] = format_bytes("sha-256", bytes.fromhex(sha256))
    elif algorithm is not None:
        whole = await asyncio.to_thread(_read, blob, 0, blob.length)
        headers["repr-digest"] = format_digest(algorithm, whole)
    if media_type == "application/octet-stream":
        headers["content-disposition"] = "attachment"
    if matches_tag(request.headers.get("if-none-match"), sha256):
        return Response(None, 304, headers)
    start, end, status = 0, blob.length, 200
    if (asked := request.headers.get("range")) is not None and (place := _parse_range(asked, blob.length)) is not None:
        (start, end), status = place, 206
        headers["content-range"] = f"bytes {start}-{end - 1}/{blob.length}"
    headers["content-length"] = str(end - start)
    if end - start <= CHUNK_BYTES:
        return Response(await asyncio.to_thread(_read, blob, start, end), status, headers, media_type)
    return StreamingResponse(_stream(blob, start, end), status, headers, media_type)


async def get_thumb(
    request: Request,
    sha256: Digest,
    s: Annotated[int, Query(description="Longest side in pixels: 64, 128, 256 or 512.")] = 128,
) -> Response:
    """Returns a small JPEG of a sample."""
    state = find_state(request)
    state.authorise(request, "read")
    if s not in THUMB_SIDES:
        known = ", ".join(map(str, THUMB_SIDES))
        raise refuse("malformed", f"s is {s}", f"Use one of {known}.")
    blob = await asyncio.to_thread(state.datasets.find_blob, sha256)
    # Decoded in a thread: other requests go on meanwhile.
    loop = asyncio.get_running_loop()
    data = await loop.run_in_executor(state.pool, _shrink, blob, s, state.settings.image_pixels, state.thumb_pixels)
    return Response(data, 200, SAFE_HEADERS | IMMUTABLE, "image/jpeg")


async def get_table(request: Request, dataset: DatasetName, version: VersionName) -> Response:
    """Returns the table of samples that the Croissant description of a version names, as CSV."""
    state = find_state(request)
    state.authorise(request, "read")
    return await _describe_for_others(request, state, dataset, version, croissant.TABLE, "text/csv")


async def _describe_for_others(
    request: Request, state: State, dataset: str, version: str, file: str, media_type: str
) -> Response:
    data = await asyncio.to_thread(state.datasets.describe_for_others, dataset, version, file)
    headers = SAFE_HEADERS | {"vary": "accept"}
    if (algorithm := choose_answer_digest(request.headers)) is not None:
        headers["repr-digest"] = format_digest(algorithm, data)
    return Response(data, 200, headers, media_type)


async def _describe(request: Request, dataset: str, version: str) -> Response:
    state = find_state(request)
    state.authorise(request, "read")
    if prefers(request.headers.get("accept"), croissant.MEDIA_TYPE, JSON_TYPE):
        return await _describe_for_others(request, state, dataset, version, croissant.DESCRIPTION, croissant.MEDIA_TYPE)
    tree = await asyncio.to_thread(state.datasets.describe, dataset, version)
    tag = f'"{tree["version"]}"'
    if matches_tag(request.headers.get("if-none-match"), tree["version"]):
        return Response(None, 304, SAFE_HEADERS | {"etag": tag})
    return answer_json(request, tree, headers={"etag": tag, "vary": "accept"})


def _parse_range(text: str, length: int) -> tuple[int, int] | None:
    """Returns [start, end) of one range; None: another unit or several, and the whole is sent (RFC 9110, 14.2).

    Raises ProblemError (416) if nothing of it is there.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if found[1]:
        start, end = int(found[1]), min(int(found[2]) + 1 if found[2] else length, length)
    else:
        start, end = max(0, length - int(found[2])), length
    if start >= length or end <= start:
        headers = [(b"content-range", f"bytes */{length}".encode())]
        raise refuse("bad-range", f"the sample has {length:,} bytes", "Ask for some of them.", headers=headers)
    return start, end


def _read(blob: Blob, start: int, end: int) -> bytes:
    try:
        if blob.is_split:
            return read_stored_image(blob.objects, blob.shard, blob.offset, blob.length, is_split=True)[start:end]
        return blob.objects.read(blob.shard, blob.offset + start, min(end, blob.length) - start)
    except DataError:
        if blob.objects.measure(blob.shard) is not None:
            raise
        raise refuse("gone", "the shard of the sample is missing", "headway dataset verify says more.") from None


async def _stream(blob: Blob, start: int, end: int) -> AsyncIterator[bytes]:
    for place in range(start, end, CHUNK_BYTES):
        yield await asyncio.to_thread(_read, blob, place, min(end, place + CHUNK_BYTES))


def _shrink(blob: Blob, side: int, most_pixels: int, budget: PixelBudget) -> bytes:
    data = _read(blob, 0, blob.length)
    try:
        width, height = measure_image(data, most_pixels)
        with budget.hold(width * height), Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
            # Lets the JPEG decoder leave out what a small picture does not need.
            image.draft("RGB", (side, side))
            image.thumbnail((side, side))
            file = io.BytesIO()
            image.convert("RGB").save(file, "JPEG", quality=80)
    # Pillow raises anything from OSError to struct.error on bytes that are no image.
    except (BadImageError, OSError, ValueError, SyntaxError) as error:
        raise refuse("not-found", "the sample has no picture that can be shown", "GET /blobs has its bytes.") from error
    return file.getvalue()
