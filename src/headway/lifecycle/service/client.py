"""Client of the data service, by the standard library alone: uploads that resume, and requests that run once."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, final
from urllib.parse import quote, urlencode

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error, open_regular
from headway.lifecycle.service.form import write_form
from headway.lifecycle.service.transport import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Reply,
    ServiceError,
    Transport,
    format_digest,
)

JSON_TYPE, TAR_TYPE = "application/json", "application/x-tar"
SEND_BYTES = 1 << 20
ANY_VERSION = "*"
"""In place of an ID in `if_match`: the change holds whatever the newest version is."""

Progress = Callable[[int, int], None]
"""Called with (bytes that the server has, bytes in all)."""


@final
class Client:
    """Talks to `headway serve-data`.

    A request whose answer is lost is sent again with the same Idempotency-Key, so that it runs once. An upload whose
    connection is cut, or whose server is killed, goes on where it was.

    Args:
        url: of the server, such as `http://127.0.0.1:8080`.
        token: what `headway data-token` has printed; None: $HEADWAY_TOKEN, or none if that is not set.
        timeout_s: seconds without any byte after which a connection is given up.
        patience_s: seconds for which a server that cannot be reached is tried again.

    Raises:
        UsageError: the URL is none of HTTP, or the token cannot be sent.
    """

    def __init__(
        self, url: str, token: str | None = None, *, timeout_s: float = 60.0, patience_s: float = 60.0
    ) -> None:
        self._transport = Transport(url, token, timeout_s, patience_s)

    def list_datasets(self) -> list[dict[str, Any]]:
        """Returns the newest version of each data set."""
        found: list[dict[str, Any]] = self._transport.ask("GET", "/datasets").json()["datasets"]
        return found

    def create(self, name: str, **facts: Any) -> dict[str, Any]:
        """Creates a data set; needs the scope admin. If the answer is lost, the same request is sent again.

        Args:
            facts: `classes`, `splits`, `mode`, `start`, `about`, `message`, as `Store.create`.
        """
        headers = {"Content-Type": JSON_TYPE} | _quote_key(None)
        return self._transport.ask("PUT", _name(name), json.dumps(facts).encode(), headers).json()

    def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Returns facts and counts of a version; empty: the newest."""
        path = _name(name) + (f"/versions/{quote(version, safe='')}" if version else "")
        return self._transport.ask("GET", path).json()

    def list_versions(self, name: str) -> list[dict[str, Any]]:
        """Returns all versions, the newest first."""
        return [one for page in self._list_pages(f"{_name(name)}/versions", {}) for one in page["versions"]]

    def diff(self, name: str, first: str, second: str) -> dict[str, Any]:
        """Returns what differs between two versions."""
        path = f"{_name(name)}/versions/{quote(first, safe='')}...{quote(second, safe='')}"
        found: dict[str, Any] = {"added": [], "removed": [], "changed": []}
        for page in self._list_pages(path, {}):
            found["counts"] = page["counts"]
            for kind in ("added", "removed", "changed"):
                found[kind] += page[kind]
        return found

    def list_samples(
        self, name: str, version: str = "", *, label: str | None = None, split: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields the samples of a version.

        Args:
            label: only of this class; empty: only those without one; None: all.
            split: only of this split; None: all.
        """
        # Pages of one version, also if a new one comes meanwhile.
        query = {"version": version or self.describe(name)["version"]}
        query |= {} if label is None else {"class": label}
        query |= {} if split is None else {"split": split}
        for page in self._list_pages(f"{_name(name)}/samples", query):
            yield from page["samples"]

    def _list_pages(self, path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yields the pages of a list."""
        after: dict[str, str] = {}
        while True:
            asked = urlencode({**query, **after})
            page = self._transport.ask("GET", f"{path}?{asked}" if asked else path).json()
            yield page
            if page["next"] is None:
                return
            after = {"after": str(page["next"])}

    def read_blob(self, sha256: str) -> bytes:
        """Returns the stored bytes of a sample. Raises HeadwayError if they are damaged."""
        data = self._transport.ask("GET", f"/blobs/{quote(sha256, safe='')}").body
        if hashlib.sha256(data).hexdigest() != sha256:
            raise HeadwayError(
                "the bytes of the sample are damaged", where=sha256, fix="Run headway dataset verify there."
            )
        return data

    def change(
        self,
        name: str,
        changes: Sequence[Mapping[str, Any]],
        files: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        if_match: str | None = None,
        key: str | None = None,
        message: str = "",
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Adds, labels, moves and removes samples; one new version.

        Args:
            changes: `{"op": "label", "name": "cat/1.jpg", "label": "cat"}`, and so on; see docs/data-service.md.
            files: path by name of each sample to add whose bytes the store does not have. A file without a change
                `add` of its name is added too, without a label.
            if_match: ID of the version that they are based on, or `*` for any; needed by `label` and `move`.
            key: Idempotency-Key; None: a new one.
            message: what the change is about, for the list of versions.
            progress: called with the bytes that were sent; with files.

        Raises:
            UsageError: a file cannot be read.
            ServiceError: the service has refused them; status 412: there is another version by now.
        """
        if files:
            with tempfile.TemporaryFile() as file:
                form_type = write_form(file, changes, files)
                return self._upload(name, file, form_type, if_match, message, progress, key)
        body = json.dumps(list(changes)).encode()
        digest = {"Content-Digest": format_digest(hashlib.sha256(body).digest())}
        return self._post(_add_message(_name(name), message), body, key, _match(if_match) | digest)

    def add(
        self,
        name: str,
        files: Mapping[str, str | os.PathLike[str]],
        labels: Mapping[str, str] | None = None,
        *,
        if_match: str | None = None,
        message: str = "",
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Adds images as one new version.

        Args:
            files: path by name of the sample, such as `cat/1.jpg`.
            labels: class by name of the sample; None: not labelled.
            if_match: ID that the newest version must have; None: any.
            message: what the change is about, for the list of versions.
            progress: called with the bytes that were sent.

        Raises:
            UsageError: a file cannot be read.
            ServiceError: the service has refused them.
        """
        with tempfile.TemporaryFile() as file:
            # The bytes of what links lead to: the service takes no links.
            with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
                for sample, path in files.items():
                    try:
                        tar.add(path, sample, recursive=False)
                    except OSError as error:
                        raise UsageError(
                            describe_os_error(error), where=os.fspath(path), fix="Leave it out."
                        ) from error
                    label = (labels or {}).get(sample)
                    if label is not None:
                        # By the whole name: WebDataset's key, up to the first dot, is the same for 1.1.jpg and 1.2.jpg.
                        member = tarfile.TarInfo(f"{sample}.cls")
                        member.size = len(label.encode())
                        tar.addfile(member, io.BytesIO(label.encode()))
            return self._upload(name, file, TAR_TYPE, if_match, message, progress)

    def upload(
        self,
        name: str,
        path: str | os.PathLike[str],
        content_type: str = TAR_TYPE,
        *,
        if_match: str | None = None,
        message: str = "",
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Uploads a body for `POST /datasets/{name}` from a file, such as a tar file; returns the answer.

        `if_match`, `message` and `progress` are those of `add`.

        Raises:
            UsageError: the file cannot be read.
            ServiceError: the service has refused it.
        """
        try:
            file = open_regular(path)
        except OSError as error:
            raise UsageError(describe_os_error(error), where=os.fspath(path), fix="Name another file.") from error
        with file:
            return self._upload(name, file, content_type, if_match, message, progress)

    def wait(self, job: str, *, poll_s: float = 0.5) -> dict[str, Any]:
        """Waits until a job has ended, and returns its result.

        Raises:
            ServiceError: the job has failed.
            HeadwayError: it was cancelled.
        """
        while True:
            tree = self._transport.ask("GET", f"/jobs/{quote(job, safe='')}").json()
            if tree["state"] == "done":
                result: dict[str, Any] = tree["result"]
                return result
            if tree["state"] == "failed":
                problem = tree["problem"]
                raise ServiceError(int(problem.get("status", 500)), problem, {}, f"job {job}")
            if tree["state"] == "cancelled":
                raise HeadwayError("the job was cancelled", where=f"job {job}", fix="Send the request again.")
            time.sleep(poll_s)

    def list_queues(self, name: str) -> list[dict[str, Any]]:
        """Returns the label queues of a data set, the newest first.

        `queue` is the ID of each, `size` its samples, and `marked` those that people have looked at.
        """
        found: list[dict[str, Any]] = self._transport.ask("GET", f"{_name(name)}/queues").json()["queues"]
        return found

    def list_queue_samples(self, name: str, queue: str) -> Iterator[dict[str, Any]]:
        """Yields the samples of a queue in its order, with the class that is `proposed` and the `label` by now.

        Args:
            queue: ID, as `list_queues` has it.
        """
        query = {"order": "score", "queue": queue, "version": self.describe(name)["version"]}
        for page in self._list_pages(f"{_name(name)}/samples", query):
            yield from page["samples"]

    def add_queue(self, name: str, picks: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a queue of the `mine.json` or `label-errors.json` of `headway mine`, or of picks of your own.

        The same content again is the same queue.

        Args:
            picks: content of the file, or `{"name": ..., "picks": [...]}`; see docs/labelling.md.
        """
        return self._ask_json("POST", f"{_name(name)}/mine", picks)

    def start_mining(self, name: str, runs: Sequence[str], *, key: str | None = None, **options: Any) -> str:
        """Lets the server choose samples without a label; returns the ID of the job, whose result is a queue.

        Needs the scope admin. `wait` returns the queue.

        Args:
            runs: names of runs in the store.
            key: Idempotency-Key; None: a new one.
            options: `strategy`, `count` and `seed` of `headway mine`.

        Raises:
            ServiceError: there is no such run, or an option is wrong.
        """
        body = json.dumps({"runs": list(runs), **options}).encode()
        return str(self._post(f"{_name(name)}/mine", body, key)["job"])

    def lease(self, name: str, queue: str, *, by: str = "", count: int = 24, grid: str = "") -> dict[str, Any]:
        """Leases samples that nobody has labelled or leased, for ten minutes, as the label page does.

        Args:
            queue: ID; empty: all samples of the newest version.
            by: who labels them; empty: the token's name.
            count: most samples.
            grid: name of a lease to renew: 32 hexadecimal digits; empty: a new one.

        Returns:
            `grid`, `samples`, `classes`, and `left`: how many others wait.
        """
        wish = {"queue": queue, "by": by, "count": count}
        return self._ask_json("PUT", f"{_name(name)}/grids/{quote(grid or uuid.uuid4().hex, safe='')}", wish)

    def end_lease(self, name: str, grid: str) -> None:
        """Gives leased samples back, so that others get them."""
        self._transport.ask("DELETE", f"{_name(name)}/grids/{quote(grid, safe='')}")

    def answer(
        self,
        name: str,
        queue: str,
        labels: Mapping[str, str | None],
        *,
        by: str = "",
        seconds: float = 0.0,
        grid: str = "",
        key: str | None = None,
    ) -> dict[str, Any]:
        """Labels samples of a queue, as the label page does; one new version.

        The label of the first person stands: another one counts for the agreement alone.

        Args:
            queue: ID; empty: none, the samples are any of the newest version.
            labels: class by ID of the sample, at most 1,000; None: not sure.
            by: who labels them; empty: the token's name.
            seconds: time that each label took.
            grid: name of the lease, which ends; empty: none.
            key: Idempotency-Key; None: a new one.

        Raises:
            ServiceError: a label does not fit the data set, and nothing was changed.
        """
        rows = [{"sha256": sample, "label": label, "seconds": seconds} for sample, label in labels.items()]
        body = json.dumps({"grid": grid, "queue": queue, "by": by, "labels": rows}).encode()
        return self._post(f"{_name(name)}/labels", body, key)

    def _ask_json(self, method: str, path: str, tree: Any) -> dict[str, Any]:
        return self._transport.ask(method, path, json.dumps(tree).encode(), {"Content-Type": JSON_TYPE}).json()

    def _post(
        self, path: str, body: bytes, key: str | None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Sends a change of JSON, which runs once however often it is sent."""
        sent = {"Content-Type": JSON_TYPE} | _quote_key(key) | dict(headers or {})
        return self._transport.ask("POST", path, body, sent).json()

    def _upload(
        self,
        name: str,
        file: BinaryIO,
        content_type: str,
        if_match: str | None,
        message: str,
        progress: Progress | None,
        key: str | None = None,
    ) -> dict[str, Any]:
        file.seek(0)
        hasher, length = hashlib.sha256(), 0
        while data := file.read(SEND_BYTES):
            hasher.update(data)
            length += len(data)
        headers = {
            "Content-Type": content_type,
            "Upload-Complete": "?0",
            "Upload-Length": str(length),
            "Repr-Digest": format_digest(hasher.digest()),
            # An upload whose beginning was answered and not heard is found again by it.
            **_quote_key(key),
            **_match(if_match),
        }
        begun = self._transport.ask("POST", _add_message(_name(name), message), b"", headers)
        place = begun.headers.get("location", "")
        # Only there: the bytes and the token are for this server.
        if begun.status != 201 or not place.startswith("/uploads/"):
            what = f"the server has not begun an upload: it answers {begun.status}, with the address {place!r:.300}"
            raise HeadwayError(what, where=self._transport.url, fix="Check that headway serve-data runs there.")
        reply = self._send_rest(place, file, length, progress)
        if reply.status == 202:
            return self.wait(reply.json()["job"])
        return reply.json()

    def _send_rest(self, place: str, file: BinaryIO, length: int, progress: Progress | None) -> Reply:
        """Sends the bytes of an upload, from wherever the server is, until it has answered."""
        offset, pause_s, until_s = 0, FIRST_PAUSE_S, time.monotonic() + self._transport.patience_s
        while True:
            headers = {
                "Content-Type": "application/partial-upload",
                "Upload-Offset": str(offset),
                "Upload-Complete": "?1",
                "Content-Length": str(length - offset),
            }
            asked_s = 0.0
            try:
                return self._transport.check(
                    self._transport.send("PATCH", place, _read_from(file, offset, length, progress), headers), place
                )
            except ServiceError as error:
                # The request runs already, or an older connection is still there; anything else is the answer.
                if error.status not in (409, 429, 503):
                    raise
                asked_s = error.retry_after_s
                if "retry-after" in error.headers:
                    # The server is there and at work, for example making the version.
                    until_s = time.monotonic() + self._transport.patience_s
                last: Exception = error
            except (OSError, http.client.HTTPException) as error:
                last = error
            reached = self._find_offset(place)
            if isinstance(reached, Reply):
                return reached
            if reached > offset:
                # It moves, so its patience begins anew.
                pause_s, until_s = FIRST_PAUSE_S, time.monotonic() + self._transport.patience_s
            offset = reached
            if time.monotonic() > until_s:
                raise self._transport.explain(last)
            time.sleep(max(pause_s, asked_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _find_offset(self, place: str) -> int | Reply:
        """Asks how far an upload is; returns the answer to its request if it was completed."""
        reply = self._transport.ask("HEAD", place)
        if reply.headers.get("upload-complete") != "?1":
            return int(reply.headers["upload-offset"])
        tree = self._transport.ask("GET", place).json()
        if tree["answer"] is None:
            return Reply(202, {}, json.dumps({"job": tree["job"]}).encode())
        answer = tree["answer"]
        return self._transport.check(
            Reply(answer["status"], answer["headers"], json.dumps(answer["body"]).encode()), place
        )


def _read_from(file: BinaryIO, offset: int, length: int, progress: Progress | None) -> Iterator[bytes]:
    file.seek(offset)
    while offset < length:
        data = file.read(min(SEND_BYTES, length - offset))
        if not data:
            raise UsageError("the file has become shorter while it was sent", fix="Send it again.")
        yield data
        offset += len(data)
        if progress is not None:
            progress(offset, length)


def _name(dataset: str) -> str:
    return f"/datasets/{quote(dataset, safe='')}"


def _add_message(path: str, message: str) -> str:
    return f"{path}?{urlencode({'message': message})}" if message else path


def _quote_key(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": f'"{key or uuid.uuid4()}"'}


def _match(version: str | None) -> dict[str, str]:
    if version is None:
        return {}
    return {"If-Match": version if version == ANY_VERSION else f'"{version}"'}
