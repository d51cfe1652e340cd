"""ProblemError: an answer to a request that cannot be served, as RFC 9457 (problem+json) describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, final

MEDIA_TYPE = b"application/problem+json"

Header = tuple[bytes, bytes]
"""Name in lower case, and value."""


@final
class ProblemError(Exception):
    """Why a request is refused. The server sends it as problem+json.

    Args:
        status: HTTP status.
        what: a sentence without its full stop.
        fix: what the client can do, in the imperative.
        headers: headers of the answer beside type and length.
        more: further members of the JSON object.
    """

    def __init__(
        self,
        status: int,
        what: str,
        fix: str = "",
        *,
        headers: Sequence[Header] = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(what)
        self.status, self.what, self.fix = status, what, fix
        self.headers, self.more = tuple(headers), dict(more or {})

    def to_json(self) -> bytes:
        """Returns the body of the answer."""
        return json.dumps(self.to_tree()).encode()

    def to_tree(self) -> dict[str, Any]:
        """Returns the body of the answer as JSON values."""
        # A status that HTTP itself does not know, such as 460 of tus, comes with a title in `more`.
        title = self.more.get("title") or HTTPStatus(self.status).phrase
        tree = {"type": "about:blank", "title": title, "status": self.status}
        return tree | {"what": self.what, "fix": self.fix} | self.more
