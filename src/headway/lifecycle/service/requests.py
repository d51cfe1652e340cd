"""Requests: makes a version of a body that is complete. Each request runs once, however often it is sent.

A request with few files is answered when it is done, one with many as a job. Both leave their answer at the upload
that holds the body, and at the Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast, final

from headway.core.cpu_count import count_usable_cores
from headway.data.image_check import BadImageError, measure_image
from headway.http.problems import ProblemError
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.bodies import FileBytes, LeftOut, Proposal, parse_body, parse_list
from headway.lifecycle.service.checks import check_head, check_scopes, choose_author
from headway.lifecycle.service.datasets import Datasets
from headway.lifecycle.service.jobs import CancelledJobError, Job, Jobs, build_failure
from headway.lifecycle.service.keys import Keys, KeyState, name_request
from headway.lifecycle.service.memory_body import MemoryBody
from headway.lifecycle.service.pixels import PixelBudget
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.service.tokens import Principal
from headway.lifecycle.service.upload import SPARE_BYTES, Upload
from headway.lifecycle.service.upload_plan import JobNote
from headway.lifecycle.service.uploads import Uploads
from headway.lifecycle.store.records import Change, Operation

LOG = logging.getLogger("headway.lifecycle")

T = TypeVar("T")
Body = Upload | MemoryBody
"""The body of a request that is complete. Only an upload may hold files."""

IMAGES_AT_ONCE = 2
"""Images of the largest size whose pixels may be decoded at once, over all requests; and as many over all jobs."""


@final
class Requests:
    """Runs complete requests.

    Args:
        work_folder: for files of requests that run; emptied at the start.
        pool: its threads hash and parse bodies.
        disk: its threads write the state of uploads and keys.
        commits: its threads make versions.
    """

    def __init__(
        self,
        datasets: Datasets,
        uploads: Uploads,
        keys: Keys,
        jobs: Jobs,
        settings: ServiceSettings,
        *,
        work_folder: Path,
        pool: ThreadPoolExecutor,
        disk: ThreadPoolExecutor,
        commits: ThreadPoolExecutor,
    ) -> None:
        self._datasets, self._uploads, self._keys, self._jobs = datasets, uploads, keys, jobs
        self._settings, self._work_folder = settings, work_folder
        self._pool, self._disk, self._commits = pool, disk, commits
        # A job packs for minutes, and requests with few images must not wait for it.
        self._pixels, self._job_pixels = (PixelBudget(IMAGES_AT_ONCE * settings.image_pixels) for _ in range(2))
        # A killed server leaves files of the request that it ran.
        shutil.rmtree(work_folder, ignore_errors=True)
        work_folder.mkdir(parents=True)

    async def run(self, upload: Body, principal: Principal, if_match: tuple[str, ...] | None) -> Answer:
        """Returns the answer to the request whose body the upload holds, and removes its bytes once they are used.

        Args:
            if_match: of the newest request; None: that of the first.

        Raises:
            ProblemError: the request is refused. The upload stays, so that it can be asked again.
        """
        if isinstance(upload, MemoryBody):
            # One thread does all of its short work: a change of threads would cost more than the parsing.
            return await _run_in(self._commits, self._run_list, upload, principal, if_match)
        if upload.is_finishing:
            what = "the upload is complete, and its request runs"
            raise refuse("key-in-use", what, "Try again later.", headers=[(b"retry-after", b"1")])
        upload.is_finishing = True
        is_job = False
        try:
            # In two threads, one after the other: what hashes and parses does not wait for what commits.
            prepared = await _run_in(self._pool, self._prepare, upload, principal, if_match)
            if prepared.answer is None and prepared.proposal.files > self._settings.job_files:
                answer, is_job = await self._begin_job(upload, prepared, principal), True
            else:
                answer = await _run_in(self._commits, self._complete, upload, prepared, principal)
            return answer
        finally:
            # A job says itself when it has ended, which may have been already.
            if not is_job:
                upload.is_finishing = False

    def _run_list(self, body: MemoryBody, principal: Principal, if_match: tuple[str, ...] | None) -> Answer:
        return self._complete(body, self._prepare(body, principal, if_match), principal)

    def _prepare(self, upload: Body, principal: Principal, if_match: tuple[str, ...] | None) -> _Prepared:
        """Hashes and parses the body of a request, and checks what can be checked before its files are read."""
        plan = upload.plan
        try:
            fingerprint = upload.compute_sha256()
        except ProblemError:
            # Other bytes than the client has announced: nothing of them is kept.
            if isinstance(upload, Upload):
                self._uploads.remove(upload)
            raise
        head = self._datasets.find_head(plan.target)
        key = self._build_key(upload, principal, fingerprint)
        begun = key.begin()
        if begun.answer is not None:
            return _Prepared(key, fingerprint, answer=begun.answer)
        try:
            if isinstance(upload, MemoryBody):
                proposal = parse_list(upload.data, self._settings)
            else:
                proposal = parse_body(upload.path, plan.content_type, self._settings)
            check_scopes(proposal, principal)
            # A server that was killed, or had no power, may have made the version already.
            if (answer := self._find_answer(plan.target, key)) is not None:
                return _Prepared(key, fingerprint, answer=answer)
            tags = plan.if_match if if_match is None else if_match
            check_head(proposal, tags, head)
        except Exception:
            key.forget()
            raise
        return _Prepared(key, fingerprint, proposal, expected=head if tags and tags != ("*",) else None)

    def _complete(self, upload: Body, prepared: _Prepared, principal: Principal) -> Answer:
        """Makes the version of a request, unless it is there, and keeps the answer."""
        key, answer = prepared.key, prepared.answer
        if answer is None:
            try:
                answer = self._commit(upload, prepared.proposal, principal, key.request, prepared.expected, None)
            except Exception:
                key.forget()
                raise
        # The version is there, so a full disk must not make a failure of it.
        with suppress(sqlite3.OperationalError):
            key.finish(answer)
        if isinstance(upload, Upload):
            upload.finish(answer)
        return answer

    def resume_jobs(self, find_principal: Callable[[str], Principal | None]) -> None:
        """Starts jobs again that a killed server has begun, and knows those again that have ended.

        Args:
            find_principal: returns who began it, None if the token was removed meanwhile.
        """
        for upload in self._uploads:
            if upload.job is None:
                continue
            plan, note = upload.plan, upload.job
            job = Job(note.id, plan.principal, plan.target, 0)
            principal = find_principal(plan.principal)
            if upload.answer is not None:
                job.end(upload.answer)
                self._jobs.add(job)
            elif upload.is_whole and principal is not None:
                upload.is_finishing = True
                LOG.info(f"Job {note.id} goes on.")
                job.say("It goes on after a restart of the server.")
                key = self._build_key(upload, principal, note.fingerprint)
                # The same request, sent again, is answered with this job.
                with suppress(ProblemError):
                    key.begin()
                    key.finish(_build_job_answer(job, job.total))
                self._jobs.submit(job, self._build_work(upload, None, principal, key, note))

    def _find_answer(self, target: str, key: _Key) -> Answer | None:
        return self._datasets.find_request(target, key.request, self._settings.key_age_s)

    def _build_key(self, upload: Body, principal: Principal, fingerprint: str) -> _Key:
        plan = upload.plan
        # An upload that is completed twice is one request too, so its name is the key of one that has none.
        return _Key(self._keys, principal.name, plan.target, plan.key or f"upload {plan.id}", fingerprint)

    async def _begin_job(self, upload: Upload, prepared: _Prepared, principal: Principal) -> Answer:
        key, proposal = prepared.key, prepared.proposal
        try:
            self._jobs.expect_room()
            note = JobNote(id=secrets.token_hex(8), fingerprint=prepared.fingerprint, expected=prepared.expected)
            job = Job(note.id, principal.name, upload.plan.target, proposal.files)
            answer = _build_job_answer(job, proposal.files)
            # Both before the answer: a server that is killed goes on with it.
            await _run_in(self._disk, upload.set_job, note)
            await _run_in(self._disk, key.finish, answer)
            self._jobs.submit(job, self._build_work(upload, proposal, principal, key, note))
        except Exception:
            await _run_in(self._disk, key.forget)
            if upload.job is not None:
                await _run_in(self._disk, self._uploads.remove, upload)
            raise
        return answer

    def _build_work(
        self, upload: Upload, proposal: Proposal | None, principal: Principal, key: _Key, note: JobNote
    ) -> Callable[[Job], Answer]:
        """Returns what a job does. Args: proposal: None: a killed server has begun it."""

        def work(job: Job) -> Answer:
            try:
                job.expect_wanted()
                asked, answer = proposal, None
                if asked is None:
                    asked = parse_body(upload.path, upload.plan.content_type, self._settings)
                    job.total = asked.files
                    # The token may have lost a scope meanwhile.
                    check_scopes(asked, principal)
                    # A server that was killed may have made the version already.
                    answer = self._find_answer(upload.plan.target, key)
                answer = answer or self._commit(upload, asked, principal, key.request, note.expected, job)
                upload.finish(answer)
                return answer
            except Exception as error:
                # What a stopping server cancels goes on at its next start.
                if not self._jobs.is_closing:
                    key.forget()
                    if isinstance(error, CancelledJobError):
                        self._uploads.remove(upload)
                    else:
                        # A full disk may refuse this too; the job then runs again at the next start.
                        with suppress(OSError):
                            upload.finish(build_failure(error))
                raise
            finally:
                upload.is_finishing = False

        return work

    def _commit(
        self,
        upload: Body,
        proposal: Proposal,
        principal: Principal,
        request: str,
        expected: str | None,
        job: Job | None,
    ) -> Answer:
        """Writes the files of a request aside, and makes a version; runs in a thread."""
        folder = self._work_folder / upload.plan.id
        if isinstance(upload, Upload) and proposal.files:
            self._expect_room(upload.offset)
            folder.mkdir()
        rejected = LeftOut(list(proposal.rejected.listed), proposal.rejected.count)
        changes, pixels = list[Change](), list[int]()
        try:
            with nullcontext(b"") if isinstance(upload, MemoryBody) else FileBytes(upload.path) as body:
                for place, row in enumerate(proposal.rows):
                    if job is not None:
                        job.expect_wanted()
                    file = None
                    if row.has_file:
                        if row.end - row.start > self._settings.image_bytes:
                            rejected.add(row.name, f"has more than {self._settings.image_bytes:,} bytes")
                            continue
                        data = body[row.start : row.end]
                        try:
                            # Before anything decodes it: a small file can describe a huge image.
                            width, height = measure_image(data, self._settings.image_pixels)
                        except BadImageError as error:
                            rejected.add(row.name, str(error))
                            continue
                        pixels.append(width * height)
                        # Numbered: a name may be longer than those of files.
                        file = folder / str(place)
                        file.write_bytes(data)
                    changes.append(
                        Change(
                            operation=cast(Operation, row.op),
                            name=row.name,
                            sample=row.sha256,
                            label=row.label,
                            split=row.split,
                            file=file,
                            by=choose_author(row.by, principal),
                            annotations=row.annotations,
                        )
                    )
            if job is not None:
                job.say(f"{len(pixels):,} images are read, and are packed now.")
            # As many images are decoded at once as there are cores. To count those, a dozen files are read.
            budget = self._pixels if job is None else self._job_pixels
            with budget.hold(sum(heapq.nlargest(count_usable_cores(), pixels)) if pixels else 0):
                return self._datasets.commit(
                    upload.plan.target,
                    changes,
                    by=principal.name,
                    message=upload.plan.message,
                    request=request,
                    expected=expected,
                    rejected=rejected,
                    progress=None if job is None else lambda done, total: job.advance(done),
                )
        finally:
            if proposal.files:
                shutil.rmtree(folder, ignore_errors=True)

    def _expect_room(self, size: int) -> None:
        """Raises ProblemError (507) unless the disk has room for the files of a body twice: aside, and in a shard."""
        disk = os.statvfs(self._work_folder)
        if 2 * size + SPARE_BYTES > disk.f_bavail * disk.f_frsize:
            raise refuse("full", "the disk of the server has no room for the images", "Make room there.")


@final
class _Key:
    """The key of one request. Args: fingerprint: SHA-256 of its body."""

    def __init__(self, keys: Keys, principal: str, target: str, key: str, fingerprint: str) -> None:
        self._keys, self._where, self._fingerprint = keys, (principal, target, key), fingerprint

    @property
    def request(self) -> str:
        """Name of the request."""
        return name_request(*self._where, self._fingerprint)

    def begin(self) -> KeyState:
        """See Keys."""
        return self._keys.begin(*self._where, self._fingerprint)

    def finish(self, answer: Answer) -> None:
        """See Keys."""
        self._keys.finish(*self._where, answer)

    def forget(self) -> None:
        """See Keys."""
        self._keys.forget(*self._where)


@final
@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that may run.

    Attributes:
        fingerprint: SHA-256 of its body.
        proposal: what it asks for.
        expected: ID that the newest version must have; None: any.
        answer: the first answer to it; None: it has to run.
    """

    key: _Key
    fingerprint: str
    proposal: Proposal = field(default_factory=Proposal)
    expected: str | None = None
    answer: Answer | None = None


def _build_job_answer(job: Job, files: int) -> Answer:
    return Answer(202, {"job": job.id, "dataset": job.target, "files": files}, {"location": f"/jobs/{job.id}"})


async def _run_in(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of a function that one of the pool's threads runs."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
