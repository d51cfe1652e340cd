"""Kinds of problems (RFC 9457): each has a URL of this server, where a sentence explains it."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from headway.core.errors import HeadwayError
from headway.http.problems import Header, ProblemError

# https://www.iana.org/assignments/http-problem-types: those of the draft about resumable uploads.
_IANA = "https://iana.org/assignments/http-problem-types#"


@final
@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem.

    Attributes:
        status: HTTP status.
        title: short text, the same for each problem of the kind.
        text: what it means and what a client does, for the page of the kind.
        type: its URI, if it is not a page of this server.
    """

    status: int
    title: str
    text: str
    type: str = ""


KINDS: Mapping[str, Kind] = {
    "malformed": Kind(400, "The request is malformed", "A header, a parameter or the body cannot be read. Mend it."),
    "wrong-digest": Kind(400, "The bytes are not those of the digest", "Nothing was stored. Send the bytes again."),
    "key-missing": Kind(
        400,
        "The request needs an Idempotency-Key",
        'Send a header such as Idempotency-Key: "8e03978e-40d5-43dd-bc93-6894a57f9324", a new one for each '
        "change. Send the same one if you repeat a request whose answer was lost. Keys are kept for 24 hours.",
    ),
    "inconsistent-upload-length": Kind(
        400, "The lengths contradict each other", "", f"{_IANA}inconsistent-upload-length"
    ),
    "completed-upload": Kind(400, "The upload is complete", "", f"{_IANA}completed-upload"),
    "no-token": Kind(401, "The request needs a token", "Send Authorization: Bearer TOKEN."),
    "wrong-scope": Kind(403, "The token does not allow this", "Ask for a token with the scope that `detail` names."),
    "wrong-origin": Kind(
        403,
        "The request comes from another web site",
        "A server without tokens answers programs of this machine, and no page of another site.",
    ),
    "not-found": Kind(404, "There is nothing here", "Check the address. Data sets are listed at /datasets."),
    "wrong-method": Kind(405, "The resource does not have this method", "The header Allow lists those that it has."),
    "mismatching-upload-offset": Kind(409, "The upload is at another offset", "", f"{_IANA}mismatching-upload-offset"),
    "key-in-use": Kind(409, "The first request with this key still runs", "Send it again after Retry-After."),
    "superseded": Kind(409, "A newer request continues the upload", "This one was ended. Nothing is lost."),
    "exists": Kind(409, "It exists already", "Use it, or choose another name."),
    "conflict": Kind(409, "The state does not allow this", "`detail` says why."),
    "gone": Kind(
        410,
        "It is not there any more",
        "The version or the bytes of the sample were collected as garbage. The resource versions of the data set lists "
        "newer ones.",
    ),
    "head-moved": Kind(
        412,
        "The data set has another version by now",
        "The header ETag names it. Look at the difference, and send the request again with it in If-Match.",
    ),
    "tus-version": Kind(412, "This version of tus is not served", "Send Tus-Resumable: 1.0.0."),
    "too-large": Kind(413, "The body is too large", "Upload-Limit says what is accepted. Send several requests."),
    "wrong-type": Kind(415, "This media type is not accepted", "`detail` lists those that are."),
    "bad-range": Kind(416, "The range lies outside the file", "Content-Range names its length."),
    "hostile-archive": Kind(422, "The archive holds what may not be stored", "Leave it out. Nothing was stored."),
    "wrong-change": Kind(422, "A change cannot be made", "`errors` lists each. Nothing was changed."),
    "key-reused": Kind(422, "The key was used with another body", "Use a new key for another change."),
    "command-failed": Kind(422, "The command has failed", "The log of the job says why."),
    "precondition-missing": Kind(
        428,
        "The request needs If-Match",
        "A change of labels that others may have changed meanwhile needs the version that it is based on: send "
        "the ETag of the data set in If-Match.",
    ),
    "too-many": Kind(429, "Too many requests", "Send it again after Retry-After."),
    "checksum": Kind(460, "The checksum does not match", "The chunk was dropped. Send it again."),
    "internal": Kind(500, "The request failed on the server", "Look into the log of the server."),
    "busy": Kind(503, "The server is busy", "Send the request again after Retry-After."),
    "full": Kind(507, "The disk of the server is full", "Make room there, and send the request again."),
}


def refuse(
    kind: str,
    detail: str,
    fix: str = "",
    *,
    errors: Iterable[tuple[str, str]] = (),
    headers: Iterable[Header] = (),
    more: Mapping[str, Any] | None = None,
) -> ProblemError:
    """Returns the problem that answers a request.

    Args:
        kind: key of `KINDS`.
        detail: a sentence without its full stop.
        fix: what the client can do, in the imperative.
        errors: (JSON pointer, sentence) for each wrong part of the body.
        headers: headers of the answer beside type and length.
        more: further members of the JSON object.
    """
    known = KINDS[kind]
    # No full stop after one that the sentence has already.
    sentence = detail if detail.endswith((".", "!", "?")) else f"{detail}."
    members: dict[str, Any] = {
        "type": known.type or f"/problems/{kind}",
        "title": known.title,
        "detail": f"{sentence} {fix}".strip(),
    }
    listed = [{"pointer": pointer, "detail": text} for pointer, text in errors]
    if listed:
        members["errors"] = listed
    return ProblemError(known.status, detail, fix, headers=tuple(headers), more=members | dict(more or {}))


def explain_failure(error: Exception) -> ProblemError:
    """Returns the problem that answers a request which failed on the server: 507, 503 or 500."""
    cause: BaseException | None = error
    # Errors of the store name the one of the disk or the database as their cause.
    while cause is not None:
        code = cause.errno if isinstance(cause, OSError) else None
        # The lowest byte is the kind; the others say more about it.
        kind = getattr(cause, "sqlite_errorcode", 0) & 0xFF if isinstance(cause, sqlite3.Error) else 0
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or kind == sqlite3.SQLITE_FULL:
            return refuse("full", "the disk of the server is full", "Make room there. Nothing was changed.")
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            what = "another process has kept the database for too long"
            return refuse("busy", what, "Send the request again.", headers=[(b"retry-after", b"5")])
        cause = cause.__cause__
    detail = error.what if isinstance(error, HeadwayError) else "the request failed on the server"
    return refuse("internal", detail, "Look into the log of the server.")
