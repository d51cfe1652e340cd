"""Resources of the label page: queues, grids, labels, and the overview above them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Path, Request, Response

from headway.core.untrusted_json import JsonError, parse_object
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.exchange import State, answer_empty, answer_json, answer_stored, find_state
from headway.lifecycle.service.jobs import Job
from headway.lifecycle.service.keys import read_key
from headway.lifecycle.service.labelling.mining_job import MINED, is_mining, plan_mining, run_mining
from headway.lifecycle.service.labelling.overview import build_overview
from headway.lifecycle.service.labelling.parsing import parse_labels, parse_queue, parse_wish, refuse_body
from headway.lifecycle.service.tokens import Principal
from headway.lifecycle.service.write_resources import DatasetName, read_small_body

GridName = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="Name of a grid, which the client draws.", examples=["0" * 32])
]


async def list_queues(request: Request, dataset: DatasetName) -> Response:
    """Lists the queues of a data set, the newest first: samples that are worth a look, in an order."""
    state = find_state(request)
    state.authorise(request, "read")
    queues = await asyncio.to_thread(state.labelling.list_queues, dataset)
    return answer_json(request, {"queues": queues})


async def post_queue(request: Request, dataset: DatasetName) -> Response:
    """Makes a queue of the result of `headway mine`: the body is its mine.json or label-errors.json.

    The same content again is the same queue. With `{"runs": [...]}`, names of runs in the store, a job mines the
    samples that have no label; that needs an Idempotency-Key.
    """
    state = find_state(request)
    principal = state.authorise(request, "write")
    data = await read_small_body(request, state.settings.json_bytes)
    try:
        tree = await asyncio.to_thread(parse_object, data)
        if is_mining(tree):
            principal.expect("admin")
            return answer_stored(request, await _begin_mining(request, state, principal, dataset, tree, data))
        proposed = await asyncio.to_thread(parse_queue, tree)
    except JsonError as error:
        raise refuse_body(error) from None
    answer = await asyncio.to_thread(state.labelling.add_queue, dataset, proposed, principal)
    return answer_stored(request, answer)


async def _begin_mining(
    request: Request, state: State, principal: Principal, dataset: str, tree: dict[str, Any], data: bytes
) -> Answer:
    where = (principal.name, f"{dataset}/mine", read_key(request.headers))
    begun = await state.on_disk(state.keys.begin, *where, hashlib.sha256(data).hexdigest())
    if begun.answer is not None:
        return begun.answer
    labelling, processes = state.labelling, state.processes
    try:
        name = secrets.token_hex(8)
        folder = labelling.folder / MINED / name
        command = await asyncio.to_thread(plan_mining, labelling, processes, dataset, tree, folder)
        state.jobs.expect_room(is_process=True)
        job = Job(name, principal.name, dataset, 1, command.kind)
        answer = Answer(202, {"job": job.id, "dataset": dataset}, {"location": f"/jobs/{job.id}"})
        await state.on_disk(state.keys.finish, *where, answer)

        def work(job: Job) -> Answer:
            return run_mining(labelling, processes, dataset, command, principal, job)

        state.jobs.submit(job, work, is_process=True)
    except Exception:
        await state.on_disk(state.keys.forget, *where)
        raise
    return answer


async def list_slices(request: Request, dataset: DatasetName) -> Response:
    """Lists the folders of the names as slices, such as `night/*`, with the number of their samples."""
    state = find_state(request)
    state.authorise(request, "read")
    return answer_json(request, await asyncio.to_thread(state.labelling.list_slices, dataset))


async def put_grid(request: Request, dataset: DatasetName, grid: GridName) -> Response:
    """Leases a grid of samples to one person for ten minutes; the same grid again is renewed, and has the same samples.

    The body says of which queue, and which filters hold.
    """
    state = find_state(request)
    principal = state.authorise(request, "label", "write")
    try:
        wish, by = parse_wish(parse_object(await read_small_body(request)))
    except JsonError as error:
        raise refuse_body(error) from None
    tree = await asyncio.to_thread(state.labelling.lease_grid, dataset, grid, wish, by, principal)
    return answer_json(request, tree, headers={"cache-control": "no-store"})


async def delete_grid(request: Request, dataset: DatasetName, grid: GridName) -> Response:
    """Gives the samples of a grid back, so that others can get them."""
    state = find_state(request)
    state.authorise(request, "label", "write")
    await asyncio.to_thread(state.labelling.end_grid, dataset, grid)
    return answer_empty(204, {})


async def post_labels(request: Request, dataset: DatasetName) -> Response:
    """Sets the labels of a grid: one request makes one new version, and runs once, however often it is sent."""
    state = find_state(request)
    principal = state.authorise(request, "label", "write")
    key = read_key(request.headers)
    data = await read_small_body(request)
    try:
        given = parse_labels(parse_object(data))
    except JsonError as error:
        raise refuse_body(error) from None
    where = (principal.name, f"{dataset}/labels", key)
    fingerprint = hashlib.sha256(data).hexdigest()
    begun = await state.on_disk(state.keys.begin, *where, fingerprint)
    if begun.answer is not None:
        return answer_stored(request, begun.answer)

    def run() -> Answer:
        # Goes on to its end if the client leaves: it sends the key again, and gets the answer.
        try:
            name = hashlib.sha256(json.dumps([*where, fingerprint]).encode()).hexdigest()[:32]
            answer = state.labelling.set_labels(dataset, given, principal, name)
        except Exception:
            state.keys.forget(*where)
            raise
        # The labels are there, so a full disk must not make a failure of it.
        with suppress(sqlite3.OperationalError):
            state.keys.finish(*where, answer)
        return answer

    # Not in a thread of asyncio's own, of which there are few, and which all reads need.
    return answer_stored(request, await asyncio.get_running_loop().run_in_executor(state.commits, run))


async def get_loop(request: Request, dataset: DatasetName) -> Response:
    """Shows the loop of a data set: versions, runs that pinned them, queues, and what labels cost."""
    state = find_state(request)
    state.authorise(request, "read")
    tree = await asyncio.to_thread(build_overview, state.labelling, dataset)
    return answer_json(request, tree, headers={"cache-control": "no-store"})


LABEL_RESOURCES: tuple[tuple[str, str, Callable[..., Awaitable[Response]], tuple[int, ...]], ...] = (
    ("GET", "/datasets/{dataset}/queues", list_queues, (200,)),
    ("POST", "/datasets/{dataset}/mine", post_queue, (200, 201, 202)),
    ("GET", "/datasets/{dataset}/slices", list_slices, (200,)),
    ("PUT", "/datasets/{dataset}/grids/{grid}", put_grid, (200,)),
    ("DELETE", "/datasets/{dataset}/grids/{grid}", delete_grid, (204,)),
    ("POST", "/datasets/{dataset}/labels", post_labels, (200, 201)),
    ("GET", "/datasets/{dataset}/loop", get_loop, (200,)),
)
"""Method, path, function, and answers that are no problem, of each resource."""
