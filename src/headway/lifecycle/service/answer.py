"""Answer: status, headers and body, kept so that a repeated request gets the first answer again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from headway.core.untrusted_json import expect_entries, is_object, is_text, is_whole_number, parse_object

_CHECKS = {
    "status": (lambda value: is_whole_number(value, 100, 599), "a status"),
    "headers": (lambda value: is_object(value) and all(map(is_text, value.values())), "an object of texts"),
    "body": (is_object, "an object"),
}


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request that has changed something.

    Attributes:
        status: of HTTP.
        body: JSON object.
        headers: beside type, length and digest.
    """

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns it as text."""
        return json.dumps({"status": self.status, "headers": dict(self.headers), "body": dict(self.body)})

    @staticmethod
    def from_json(text: str | bytes) -> Answer:
        """Reads what `to_json` has written. Raises JsonError."""
        tree = parse_object(text)
        expect_entries(tree, _CHECKS)
        return Answer(tree["status"], tree["body"], tree["headers"])
