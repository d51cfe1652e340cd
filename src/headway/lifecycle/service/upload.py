"""Upload: the bytes of one request body in a file, appended by one request or by many.

The resumable uploads of the IETF draft and of tus are two faces of this one state: an offset, maybe a length, and an
answer once the bytes have been used. Bytes that came before a connection was cut are kept. The length of the file is
the offset, so nothing has to be repaired after the server was killed.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from headway.core.files import sync_folder, write_atomically
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.digests import Expected
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.upload_plan import JobNote, UploadPlan

WRITE_BYTES = 1 << 20
"""Bytes that are collected before a thread writes and hashes them: fewer cost more switches of threads."""
SYNC_BYTES = 64 << 20
"""Bytes after which the file is synced, so that the last sync does not take seconds."""
SPARE_BYTES = 256 << 20
"""Bytes of the disk that uploads leave free: the store needs room for the version that is made of them."""
PLAN, DATA, ANSWER, UNCHECKED, JOB = "plan.json", "data", "answer.json", "unchecked", "job"


@final
class ClientLeftError(Exception):
    """The client closed the connection before its request was complete."""


@final
class Upload:
    """One upload.

    The event loop's thread calls what is short; another thread calls what waits for the disk: `make_folder`,
    `set_length`, `set_job`, `compute_sha256`, `finish` and `remove`.

    Args:
        folder: its own one.

    Attributes:
        offset: bytes that are stored.
        answer: answer to the request, once the bytes have been used; the bytes are then removed.
        is_finishing: True while the bytes are used.
        job: the job that uses the bytes; None: there is none.
    """

    def __init__(self, folder: Path, plan: UploadPlan, answer: Answer | None = None) -> None:
        self.folder, self.plan, self.answer = folder, plan, answer
        self.is_finishing = False
        self.job: JobNote | None = None
        self.offset = 0
        # SHA-256 of the first `_hashed` bytes. After a restart it has to read the file once.
        self._hash, self._hashed = hashlib.sha256(), 0
        self._unsynced = 0
        # The request that appends, and whether it may be ended: not while it writes its last bytes.
        self._task: asyncio.Task[Any] | None = None
        self._may_end = False
        self._freed = asyncio.Event()

    def make_folder(self) -> None:
        """Makes the folder of a new upload."""
        self.folder.mkdir()
        self.path.touch()
        # The body of a request that comes as a whole is of no use after a restart, so nothing waits for the disk.
        if self.plan.is_resumable:
            self._write_plan()

    @staticmethod
    def load(folder: Path) -> Upload:
        """Reads the folder of an upload after a restart. Raises OSError or JsonError if it is not complete."""
        plan = UploadPlan.from_json((folder / PLAN).read_bytes())
        answer = Answer.from_json((folder / ANSWER).read_bytes()) if (folder / ANSWER).exists() else None
        upload = Upload(folder, plan, answer)
        if (folder / JOB).exists():
            upload.job = JobNote.from_json((folder / JOB).read_bytes())
        if answer is not None:
            upload.offset = plan.length or 0
            (folder / DATA).unlink(missing_ok=True)
            return upload
        # What a killed server has written and not synced is synced here, before any client hears of it.
        with (folder / DATA).open("r+b") as file:
            if (folder / UNCHECKED).exists():
                file.truncate(int((folder / UNCHECKED).read_text()))
            os.fsync(file.fileno())
            # Else the next start would cut off what comes from now on.
            if (folder / UNCHECKED).exists():
                (folder / UNCHECKED).unlink()
                sync_folder(folder)
            upload.offset = os.fstat(file.fileno()).st_size
        return upload

    @property
    def path(self) -> Path:
        """The file of the bytes."""
        return self.folder / DATA

    @property
    def is_whole(self) -> bool:
        """True if all bytes are there, used or not."""
        return self.plan.length is not None and self.offset == self.plan.length

    @property
    def is_complete(self) -> bool:
        """True if all bytes are there and the request that they are was answered, or runs as a job."""
        return self.answer is not None or self.job is not None

    @property
    def is_busy(self) -> bool:
        """True while a request appends to it or its bytes are used."""
        return self._task is not None or self.is_finishing

    def set_length(self, length: int) -> None:
        """Sets the length of the whole upload. Raises ProblemError (400) if it is known, and another one."""
        if self.plan.length == length and length >= self.offset:
            return
        if self.plan.length is not None or length < self.offset:
            known = f"{self.plan.length:,}" if self.plan.length is not None else f"at least {self.offset:,}"
            what = f"the upload has a length of {known}, and the request says {length:,}"
            raise refuse("inconsistent-upload-length", what, "Send the length of the whole upload.")
        self.plan = replace(self.plan, length=length)
        if self.plan.is_resumable:
            self._write_plan()

    def set_job(self, job: JobNote) -> None:
        """Notes the job that uses the bytes, so that it goes on after a restart."""
        if not self.plan.is_resumable:
            with self.path.open("r+b") as file:
                os.fsync(file.fileno())
        self._write_plan()
        write_atomically(self.folder / JOB, job.to_json())
        sync_folder(self.folder)
        self.job = job

    def expect_offset(self, offset: int) -> None:
        """Raises ProblemError (409), which names the right offset, unless the upload is at this one."""
        if offset != self.offset:
            raise refuse(
                "mismatching-upload-offset",
                f"the upload is at offset {self.offset:,}, and the request begins at {offset:,}",
                f"Continue at {self.offset}.",
                headers=[(b"upload-offset", str(self.offset).encode())],
                more={"expected-offset": self.offset, "provided-offset": offset},
            )

    async def end_append(self) -> None:
        """Ends the request that appends, if there is one: its client has given it up, since it asks again."""
        while self._task is not None:
            if self._may_end:
                self._may_end = False
                self._task.cancel()
            self._freed.clear()
            await self._freed.wait()

    async def append(
        self, chunks: AsyncIterator[bytes], offset: int, *, most: int, expected: Expected | None, pool: Executor
    ) -> None:
        """Stores the bytes of one request, and syncs them to disk.

        Args:
            chunks: the body; raises ClientLeftError when the connection is cut.
            offset: where the client believes that they belong.
            most: largest size of the upload.
            expected: digest of these bytes. Without one, the bytes of a cut connection are kept.
            pool: its threads write and hash.

        Raises:
            ProblemError: another offset or a newer request (409), too many bytes (400, 413), a wrong digest (400, 460),
                or a full disk (507).
            ClientLeftError: the connection was cut.
        """
        await self.end_append()
        self.expect_offset(offset)
        self._task, self._may_end = asyncio.current_task(), True
        before, kept = self.offset, (self._hash.copy(), self._hashed)
        loop, is_good, descriptor = asyncio.get_running_loop(), False, -1
        try:
            if expected is not None:
                await asyncio.shield(loop.run_in_executor(pool, self._mark_unchecked, before))
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            await self._receive(chunks, descriptor, most=most, expected=expected, pool=pool)
            is_good = True
        except ClientLeftError:
            is_good = expected is None
            raise
        except asyncio.CancelledError:
            is_good = expected is None
            task = asyncio.current_task()
            if self._may_end or task is None:
                # The server stops.
                raise
            task.uncancel()
            raise refuse("superseded", "a newer request continues this upload", "Ask it for the offset.") from None
        except OSError as error:
            is_good = expected is None
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise refuse("full", "no space is left for the upload", "What came is kept.") from error
            raise
        finally:
            self._may_end = False
            try:
                if not is_good:
                    self.offset, (self._hash, self._hashed) = before, kept
                undo = None if is_good else before
                work = loop.run_in_executor(pool, self._close, descriptor, undo, expected is not None)
                await asyncio.shield(work)
            finally:
                # In any case: other requests to this upload wait for it.
                self._task = None
                self._freed.set()

    def _mark_unchecked(self, before: int) -> None:
        """Notes that the bytes from here on are not checked: a server that is killed drops them at its next start."""
        write_atomically(self.folder / UNCHECKED, str(before))
        sync_folder(self.folder)

    def _close(self, descriptor: int, undo: int | None, is_marked: bool) -> None:
        """Ends an append. Args: undo: offset that the file is cut to; None: all bytes are kept."""
        if descriptor >= 0:
            try:
                if undo is not None:
                    os.ftruncate(descriptor, undo)
            finally:
                os.close(descriptor)
        if is_marked:
            (self.folder / UNCHECKED).unlink(missing_ok=True)
            # After a power failure it must not be there again: the bytes are acknowledged.
            sync_folder(self.folder)

    async def _receive(
        self,
        chunks: AsyncIterator[bytes],
        descriptor: int,
        *,
        most: int,
        expected: Expected | None,
        pool: Executor,
    ) -> None:
        loop, hasher = asyncio.get_running_loop(), None if expected is None else expected.start()
        pieces, size, total = list[bytes](), 0, self.offset
        job: asyncio.Future[None] | None = None
        try:
            async for chunk in chunks:
                total += len(chunk)
                if total > most:
                    raise self._refuse_long(most)
                pieces.append(chunk)
                size += len(chunk)
                if size >= WRITE_BYTES:
                    # One batch is written while the next one comes: memory stays at two.
                    # Shielded, since a cancelled wait would leave the thread writing unseen.
                    if job is not None:
                        await asyncio.shield(job)
                    job = loop.run_in_executor(pool, self._write, descriptor, pieces, hasher)
                    pieces, size = [], 0
        finally:
            ended = not self._may_end
            self._may_end = False
            # Awaited in any case: the thread must not write after the file is closed.
            if job is not None:
                await asyncio.shield(job)
            last = loop.run_in_executor(pool, self._write, descriptor, pieces, hasher, True)
            await asyncio.shield(last)
            self._may_end = not ended
        if expected is not None and hasher is not None:
            expected.check(hasher.digest())

    def _write(self, descriptor: int, pieces: list[bytes], hasher: Any, is_last: bool = False) -> None:
        """Writes and hashes; runs in a thread, one at a time for each upload."""
        self._catch_up(descriptor)
        if pieces:
            # Each time: other uploads, and other programs, fill the disk too.
            disk = os.fstatvfs(descriptor)
            if disk.f_bavail * disk.f_frsize < SPARE_BYTES + sum(map(len, pieces)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        for piece in pieces:
            view = memoryview(piece)
            while view:
                written = os.pwrite(descriptor, view, self.offset)
                self._hash.update(view[:written])
                if hasher is not None:
                    hasher.update(view[:written])
                self.offset += written
                self._hashed = self.offset
                self._unsynced += written
                view = view[written:]
        # Also a body that nobody can continue: it may become one of a job, which must not wait for gigabytes then.
        if self._unsynced >= SYNC_BYTES or (is_last and self.plan.is_resumable):
            os.fsync(descriptor)
            self._unsynced = 0

    def _catch_up(self, descriptor: int) -> None:
        """Hashes what was stored before the server was started."""
        while self._hashed < self.offset:
            data = os.pread(descriptor, min(WRITE_BYTES, self.offset - self._hashed), self._hashed)
            if not data:
                raise OSError(errno.EIO, "the file of an upload was cut", str(self.path))
            self._hash.update(data)
            self._hashed += len(data)

    def compute_sha256(self) -> str:
        """Returns the SHA-256 of all bytes in hexadecimal, and checks the digest of the plan; called in a thread.

        Raises:
            ProblemError: the client has announced another digest (400).
        """
        with self.path.open("rb") as file:
            self._catch_up(file.fileno())
            expected = self.plan.expected
            if expected is not None and expected.algorithm == "sha256":
                expected.check(self._hash.digest())
            elif expected is not None:
                expected.check(hashlib.file_digest(file, expected.algorithm).digest())
        return self._hash.hexdigest()

    def finish(self, answer: Answer) -> None:
        """Stores the answer, and removes the bytes."""
        self.answer = answer
        if self.plan.is_resumable or self.job is not None:
            write_atomically(self.folder / ANSWER, answer.to_json())
            sync_folder(self.folder)
        self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes everything."""
        # First the file that makes it an upload: what is left by a kill is removed at the next start.
        with suppress(FileNotFoundError):
            (self.folder / PLAN).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_plan(self) -> None:
        write_atomically(self.folder / PLAN, self.plan.to_json())
        sync_folder(self.folder)
        sync_folder(self.folder.parent)

    def _refuse_long(self, most: int) -> Exception:
        if self.plan.length is not None:
            what = f"the request holds more than the {self.plan.length:,} bytes of the upload"
            return refuse("inconsistent-upload-length", what, "Send the length of the whole upload.")
        return refuse("too-large", f"the upload has more than {most:,} bytes", "Send several requests.")
