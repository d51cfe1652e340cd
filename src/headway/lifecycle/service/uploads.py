"""Uploads: all uploads of a server, in a folder of its store; they are still there after a restart."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import final

from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.service.upload import SPARE_BYTES, Upload
from headway.lifecycle.service.upload_plan import UploadPlan

LOG = logging.getLogger("headway.lifecycle")

KEPT_UPLOADS = 10_000
"""Finished uploads that are remembered for their answers, beside their age."""


@final
class Uploads:
    """All uploads of a server.

    Args:
        folder: where they lie; it is made if it does not exist.
    """

    def __init__(self, folder: Path, settings: ServiceSettings) -> None:
        self._folder, self._settings = folder, settings
        self._uploads = dict[str, Upload]()
        # Those that were unfinished when somebody looked last: a new one is compared with them, and not with all.
        self._unfinished = dict[str, Upload]()
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for place in sorted(folder.iterdir()):
            try:
                upload = Upload.load(place)
                if upload.plan.id != place.name:
                    raise ValueError("its name is another one")
                if not upload.plan.is_resumable and not upload.is_complete:
                    raise ValueError("nobody can continue it")
            # ValueError: JsonError, and a number that is none. The server was killed while it made or removed it.
            except (OSError, ValueError) as error:
                LOG.info(f"Removed {place.name}, an upload that was not complete: {error}")
                shutil.rmtree(place, ignore_errors=True)
            else:
                self._uploads[upload.plan.id] = upload
                self._unfinished[upload.plan.id] = upload

    def __iter__(self) -> Iterator[Upload]:
        return iter(list(self._uploads.values()))

    def create(self, plan: UploadPlan) -> Upload:
        """Begins an upload; waits for the disk.

        A client that has not got the answer begins again with the same key, and gets the same upload.

        Raises:
            ProblemError: it is too large (413), the principal has too many unfinished ones (429), or the disk is full
                (507).
        """
        if plan.length is not None and plan.length > self._settings.body_bytes:
            limit = self._settings.body_bytes
            what = f"{plan.length:,} bytes are more than the {limit:,} that are accepted"
            raise refuse("too-large", what, "Send several requests.")
        with self._lock:
            if (begun := self._find_begun(plan)) is not None:
                return begun
            self._expect_room(plan)
            upload = Upload(self._folder / plan.id, plan)
            self._uploads[plan.id] = self._unfinished[plan.id] = upload
        try:
            upload.make_folder()
        except BaseException:
            self.remove(upload)
            raise
        return upload

    def _list_unfinished(self, principal: str) -> list[Upload]:
        for name, one in list(self._unfinished.items()):
            if one.answer is not None:
                del self._unfinished[name]
        return [one for one in self._unfinished.values() if one.plan.principal == principal]

    def _find_begun(self, plan: UploadPlan) -> Upload | None:
        """Returns an upload that the same first request has begun, and that has no byte yet."""
        if plan.key is None or not plan.is_resumable:
            return None
        for one in self._list_unfinished(plan.principal):
            same = replace(plan, id=one.plan.id, created_s=one.plan.created_s)
            if one.plan == same and not one.offset and not one.is_busy:
                return one
        return None

    def _expect_room(self, plan: UploadPlan) -> None:
        """Raises ProblemError if the principal has too many uploads (429), or they do not fit on the disk (507)."""
        unfinished = self._list_unfinished(plan.principal)
        if len(unfinished) >= self._settings.open_uploads:
            what = f"{len(unfinished)} uploads are unfinished, and more are not accepted"
            fix = "Finish or delete them, or try again later."
            raise refuse("too-many", what, fix, headers=[(b"retry-after", b"60")])
        # What the same principal has announced and not sent yet. Others' announcements do not count, since somebody
        # could keep everybody out by them; each write looks at the disk again.
        announced = sum((one.plan.length or one.offset) - one.offset for one in unfinished)
        disk = os.statvfs(self._folder)
        if (plan.length or 0) + announced + SPARE_BYTES > disk.f_bavail * disk.f_frsize:
            raise refuse("full", "the disk of the server has no room for this upload", "Make room there.")

    def find(self, name: str, principal: str | None) -> Upload:
        """Returns an upload; `principal` None: anybody's. Raises ProblemError (404)."""
        upload = self._uploads.get(name)
        if upload is None or (principal is not None and upload.plan.principal != principal):
            raise refuse("not-found", "there is no such upload, or it was removed", "Begin it again.")
        return upload

    def remove(self, upload: Upload) -> None:
        """Removes an upload and its bytes; waits for the disk."""
        self._uploads.pop(upload.plan.id, None)
        self._unfinished.pop(upload.plan.id, None)
        upload.remove()

    def take_old(self) -> list[Upload]:
        """Forgets uploads that are too old, or finished and too many; returns them, so that a thread removes them."""
        oldest_s = time.time() - self._settings.upload_age_s
        finished = sorted((one for one in self if one.answer is not None), key=lambda one: one.plan.created_s)
        too_many = {one.plan.id for one in finished[: max(0, len(finished) - KEPT_UPLOADS)]}
        old = [one for one in self if not one.is_busy and (one.plan.created_s < oldest_s or one.plan.id in too_many)]
        for upload in old:
            self._uploads.pop(upload.plan.id, None)
            self._unfinished.pop(upload.plan.id, None)
        return old

    @property
    def limit(self) -> str:
        """Value of Upload-Limit."""
        size, age_s = self._settings.body_bytes, int(self._settings.upload_age_s)
        return f"max-size={size}, max-append-size={size}, max-age={age_s}"
