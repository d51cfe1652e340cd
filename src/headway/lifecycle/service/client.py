"""Client of the data service, by the standard library alone: uploads that resume, and requests that run once."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import io
import json
import os
import ssl
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, final
from urllib.parse import quote, urlencode, urlsplit

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error, open_regular
from headway.core.untrusted_json import JsonError, parse_object

TAR_TYPE = "application/x-tar"
SEND_BYTES = 1 << 20
MAX_ANSWER_BYTES = 256 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0

Progress = Callable[[int, int], None]
"""Called with (bytes that the server has, bytes in all)."""


@final
class ServiceError(HeadwayError):
    """The service has refused a request.

    Attributes:
        status: of HTTP.
        problem: the answer (RFC 9457).
        headers: of the answer, names in lower case.
    """

    def __init__(self, status: int, problem: Mapping[str, Any], headers: Mapping[str, str], where: str) -> None:
        self.status, self.problem, self.headers = status, problem, headers
        what = str(problem.get("what") or problem.get("detail") or f"the service answered {status}")
        errors = problem.get("errors") or ()
        listed = "; ".join(f"{one.get('pointer')}: {one.get('detail')}" for one in errors[:5] if isinstance(one, dict))
        super().__init__(f"{what} ({listed})" if listed else what, where=where, fix=str(problem.get("fix") or ""))


@final
@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        headers: names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Returns the body. Raises HeadwayError if it is no JSON object."""
        try:
            return parse_object(self.body) if self.body else {}
        except JsonError as error:
            raise HeadwayError(f"the service has answered what is no JSON: {error}") from error


@final
class Client:
    """Talks to `headway serve-data`.

    A request whose answer is lost is sent again with the same Idempotency-Key, so that it runs once. An upload whose
    connection is cut, or whose server is killed, goes on where it was.

    Args:
        url: of the server, such as `http://127.0.0.1:8080`.
        token: what `headway data-token` has printed; None: the server has none.
        timeout_s: seconds without any byte after which a connection is given up.
        patience_s: seconds for which a server that cannot be reached is tried again.

    Raises:
        UsageError: the URL is none of HTTP.
    """

    def __init__(
        self, url: str, token: str | None = None, *, timeout_s: float = 60.0, patience_s: float = 60.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a server", fix="Write for example http://127.0.0.1:8080.")
        self._host, self._port, self._is_safe = parts.hostname, parts.port, parts.scheme == "https"
        self._base, self._url = parts.path.rstrip("/"), url
        self._token, self._timeout_s, self._patience_s = token, timeout_s, patience_s

    def list_datasets(self) -> list[dict[str, Any]]:
        """Returns the newest version of each data set."""
        found: list[dict[str, Any]] = self._ask("GET", "/datasets").json()["datasets"]
        return found

    def create(self, name: str, **facts: Any) -> dict[str, Any]:
        """Creates a data set; needs the scope admin.

        Args:
            facts: `classes`, `splits`, `mode`, `start`, `about`, `message`, as `Store.create`.
        """
        body = json.dumps(facts).encode()
        return self._ask("PUT", _name(name), body, {"Content-Type": "application/json"}).json()

    def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Returns facts and counts of a version; empty: the newest."""
        path = _name(name) + (f"/versions/{quote(version, safe='')}" if version else "")
        return self._ask("GET", path).json()

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
            page = self._ask("GET", f"{path}?{asked}" if asked else path).json()
            yield page
            if page["next"] is None:
                return
            after = {"after": str(page["next"])}

    def read_blob(self, sha256: str) -> bytes:
        """Returns the stored bytes of a sample. Raises HeadwayError if they are damaged."""
        data = self._ask("GET", f"/blobs/{quote(sha256, safe='')}").body
        if hashlib.sha256(data).hexdigest() != sha256:
            raise HeadwayError(
                "the bytes of the sample are damaged", where=sha256, fix="Run headway dataset verify there."
            )
        return data

    def change(
        self,
        name: str,
        changes: Sequence[Mapping[str, Any]],
        *,
        if_match: str | None = None,
        key: str | None = None,
        message: str = "",
    ) -> dict[str, Any]:
        """Adds, labels, moves and removes samples whose bytes the store has; one new version.

        Args:
            changes: `{"op": "label", "name": "cat/1.jpg", "label": "cat"}`, and so on; see docs/data-service.md.
            if_match: ID of the version that they are based on; needed by `label` and `move`.
            key: Idempotency-Key; None: a new one.
            message: what the change is about, for the list of versions.

        Raises:
            ServiceError: the service has refused them; status 412: there is another version by now.
        """
        headers = {"Content-Type": "application/json", "Idempotency-Key": f'"{key or uuid.uuid4()}"'}
        if if_match is not None:
            headers["If-Match"] = f'"{if_match}"'
        body = json.dumps(list(changes)).encode()
        headers["Content-Digest"] = _digest(hashlib.sha256(body).digest())
        return self._ask("POST", _add_message(_name(name), message), body, headers).json()

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
            tree = self._ask("GET", f"/jobs/{quote(job, safe='')}").json()
            if tree["state"] == "done":
                result: dict[str, Any] = tree["result"]
                return result
            if tree["state"] == "failed":
                problem = tree["problem"]
                raise ServiceError(int(problem.get("status", 500)), problem, {}, f"job {job}")
            if tree["state"] == "cancelled":
                raise HeadwayError("the job was cancelled", where=f"job {job}", fix="Send the request again.")
            time.sleep(poll_s)

    def _upload(
        self,
        name: str,
        file: BinaryIO,
        content_type: str,
        if_match: str | None,
        message: str,
        progress: Progress | None,
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
            "Repr-Digest": _digest(hasher.digest()),
            # An upload whose beginning was answered and not heard is found again by it.
            "Idempotency-Key": f'"{uuid.uuid4()}"',
        } | ({} if if_match is None else {"If-Match": f'"{if_match}"'})
        place = self._ask("POST", _add_message(_name(name), message), b"", headers).headers["location"]
        reply = self._send_rest(place, file, length, progress)
        if reply.status == 202:
            return self.wait(reply.json()["job"])
        return reply.json()

    def _send_rest(self, place: str, file: BinaryIO, length: int, progress: Progress | None) -> Reply:
        """Sends the bytes of an upload, from wherever the server is, until it has answered."""
        offset, pause_s, until_s = 0, FIRST_PAUSE_S, time.monotonic() + self._patience_s
        while True:
            headers = {
                "Content-Type": "application/partial-upload",
                "Upload-Offset": str(offset),
                "Upload-Complete": "?1",
                "Content-Length": str(length - offset),
            }
            try:
                return self._check(
                    self._send("PATCH", place, _read_from(file, offset, length, progress), headers), place
                )
            except ServiceError as error:
                # The request runs already, or an older connection is still there; anything else is the answer.
                if error.status not in (409, 429, 503):
                    raise
                if "retry-after" in error.headers:
                    # The server is there and at work, for example making the version.
                    until_s = time.monotonic() + self._patience_s
                last: Exception = error
            except (OSError, http.client.HTTPException) as error:
                last = error
            reached = self._find_offset(place)
            if isinstance(reached, Reply):
                return reached
            if reached > offset:
                # It moves, so its patience begins anew.
                pause_s, until_s = FIRST_PAUSE_S, time.monotonic() + self._patience_s
            offset = reached
            if time.monotonic() > until_s:
                raise self._explain(last)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _find_offset(self, place: str) -> int | Reply:
        """Asks how far an upload is; returns the answer to its request if it was completed."""
        reply = self._ask("HEAD", place)
        if reply.headers.get("upload-complete") != "?1":
            return int(reply.headers["upload-offset"])
        tree = self._ask("GET", place).json()
        if tree["answer"] is None:
            return Reply(202, {}, json.dumps({"job": tree["job"]}).encode())
        answer = tree["answer"]
        return self._check(Reply(answer["status"], answer["headers"], json.dumps(answer["body"]).encode()), place)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Sends a request until it is answered. Each is safe to send twice, by its method or by its key."""
        pause_s, until_s = FIRST_PAUSE_S, time.monotonic() + self._patience_s
        while True:
            last: Exception
            try:
                return self._check(self._send(method, path, body, headers or {}), path)
            except ServiceError as error:
                is_running = error.status == 409 and "retry-after" in error.headers
                if not is_running and error.status not in (429, 503):
                    raise
                if is_running:
                    # However long a commit takes.
                    until_s = time.monotonic() + self._patience_s
                last = error
            except (OSError, http.client.HTTPException) as error:
                last = error
            if time.monotonic() + pause_s > until_s:
                raise self._explain(last)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _send(self, method: str, path: str, body: bytes | Iterator[bytes] | None, headers: Mapping[str, str]) -> Reply:
        kind = http.client.HTTPSConnection if self._is_safe else http.client.HTTPConnection
        with contextlib.closing(kind(self._host, self._port, timeout=self._timeout_s)) as connection:
            sent = dict(headers)
            if self._token is not None:
                sent["Authorization"] = f"Bearer {self._token}"
            try:
                connection.request(method, self._base + path, body, sent)
            except (BrokenPipeError, ConnectionResetError):
                # The server may have refused the request before its body was complete: its answer waits here.
                if not isinstance(body, Iterator):
                    raise
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER_BYTES + 1)
            if len(data) > MAX_ANSWER_BYTES:
                raise HeadwayError(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes", where=self._url + path)
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, data)

    def _check(self, reply: Reply, path: str) -> Reply:
        if reply.status < 400:
            # A client that asks for no other digest gets this one. An answer to HEAD has it too, without a body.
            wanted = reply.headers.get("repr-digest")
            is_checked = wanted is not None and reply.status == 200 and bool(reply.body)
            if is_checked and wanted != _digest(hashlib.sha256(reply.body).digest()):
                raise http.client.HTTPException("the answer was damaged on its way")
            return reply
        problem: Mapping[str, Any] = {}
        with contextlib.suppress(JsonError):
            problem = parse_object(reply.body)
        raise ServiceError(reply.status, problem, reply.headers, self._url + path)

    def _explain(self, error: Exception) -> HeadwayError:
        if isinstance(error, HeadwayError):
            return error
        reason = describe_os_error(error) if not isinstance(error, ssl.SSLError) else str(error)
        fix = "Check the address, and whether headway serve-data runs there."
        return HeadwayError(
            f"the server cannot be reached ({reason or type(error).__name__})", where=self._url, fix=fix
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


def _digest(value: bytes) -> str:
    return f"sha-256=:{base64.b64encode(value).decode('ascii')}:"
