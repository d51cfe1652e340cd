"""Resources that run verbs of headway as jobs: `/runs` trains recipes of the store, `/exports` exports runs."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response

from headway.core.untrusted_json import JsonError, parse_object
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.exchange import State, answer_json, answer_stored, find_state
from headway.lifecycle.service.jobs import Job
from headway.lifecycle.service.keys import read_key
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.processes import Command
from headway.lifecycle.service.write_resources import read_small_body


async def list_runs(request: Request) -> Response:
    """Lists the recipes in the folder `recipes` of the store, and the runs in its folder `runs`."""
    state = find_state(request)
    state.authorise(request, "read")
    recipes = await asyncio.to_thread(state.processes.list_recipes)
    runs = await asyncio.to_thread(state.processes.list_runs)
    return answer_json(request, {"recipes": recipes, "runs": runs})


async def post_run(request: Request) -> Response:
    """Trains a recipe, or goes on with a loop, that lies in the folder `recipes` of the store, as a job."""
    state = find_state(request)
    return await _begin(request, state, "runs", state.processes.plan_run)


async def post_export(request: Request) -> Response:
    """Exports a run as a job: the targets that `headway export` knows, with its comparison."""
    state = find_state(request)
    return await _begin(request, state, "exports", state.processes.plan_export)


async def _begin(request: Request, state: State, target: str, plan: Callable[[Any, str], Command]) -> Response:
    principal = state.authorise(request, "admin")
    key = read_key(request.headers)
    body = await read_small_body(request)
    try:
        tree = parse_object(body)
    except JsonError as error:
        raise refuse("malformed", f"the body cannot be read: {error}", "Send a JSON object.") from error
    where = (principal.name, target, key)
    begun = await state.on_disk(state.keys.begin, *where, hashlib.sha256(body).hexdigest())
    if begun.answer is not None:
        return answer_stored(request, begun.answer)
    try:
        job_id = secrets.token_hex(8)
        command = await state.on_disk(plan, tree, job_id[:8])
        state.jobs.expect_room(is_process=True)
        job = Job(job_id, principal.name, command.folder.name, 1, command.kind)
        answer = Answer(202, {"job": job.id, "folder": command.folder.name}, {"location": f"/jobs/{job.id}"})
        await state.on_disk(state.keys.finish, *where, answer)
        state.jobs.submit(job, lambda job: state.processes.run(command, job), is_process=True)
    except Exception:
        await state.on_disk(state.keys.forget, *where)
        raise
    return answer_stored(request, answer)
