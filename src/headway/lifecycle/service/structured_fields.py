"""Structured fields of HTTP (RFC 9651), as far as the service reads them, and entity tags (RFC 9110)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping

from headway.lifecycle.service.problems import refuse

# At most 15 digits, as the standard says.
_INTEGER = re.compile(r"[0-9]{1,15}")
_STRING = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_BYTES = re.compile(r"([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/=]*):")
_WEIGHT = re.compile(r"([a-z*][a-z0-9_.*-]*)=([0-9]{1,2})")
_QUALITY = re.compile(r"q=([01](?:\.[0-9]{0,3})?)")
_TAG = re.compile(r'(W/)?"([!#-~]*)"')


def parse_integer(name: str, text: str | None) -> int | None:
    """Returns a number that is not negative; None if the header is missing. Raises ProblemError (400)."""
    if text is None:
        return None
    if _INTEGER.fullmatch(text.strip()) is None:
        raise _refuse(name, text, "a whole number, for example 1048576")
    return int(text)


def parse_boolean(name: str, text: str | None) -> bool | None:
    """Returns a truth value (`?1` or `?0`); None if the header is missing. Raises ProblemError (400)."""
    if text is None:
        return None
    if text.strip() not in ("?0", "?1"):
        raise _refuse(name, text, "?1 or ?0")
    return text.strip() == "?1"


def parse_string(name: str, text: str | None) -> str | None:
    """Returns a string, which has quotes; None if the header is missing. Raises ProblemError (400)."""
    if text is None:
        return None
    found = _STRING.fullmatch(text.strip())
    if found is None or not found[1]:
        raise _refuse(name, text, 'a string in quotes, for example "8e03978e"')
    return re.sub(r"\\(.)", r"\1", found[1])


def parse_bytes(name: str, text: str | None) -> Mapping[str, bytes]:
    """Returns a dictionary of byte sequences, `sha-256=:...:`; empty if it is missing. Raises ProblemError (400)."""
    values = dict[str, bytes]()
    for member in (text or "").split(",") if text is not None else ():
        found = _BYTES.fullmatch(member.strip())
        if found is None:
            raise _refuse(name, text or "", "for example sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:")
        try:
            values[found[1]] = base64.b64decode(found[2], validate=True)
        except binascii.Error:
            raise _refuse(name, text or "", "bytes in base64 between colons") from None
    return values


def parse_weights(name: str, text: str | None) -> Mapping[str, int]:
    """Returns a dictionary of weights from 0 to 10, `sha-256=10`; empty if it is missing. Raises ProblemError (400)."""
    weights = dict[str, int]()
    for member in (text or "").split(",") if text is not None else ():
        found = _WEIGHT.fullmatch(member.strip())
        if found is None or int(found[2]) > 10:
            raise _refuse(name, text or "", "for example sha-256=10")
        weights[found[1]] = int(found[2])
    return weights


def parse_tags(name: str, text: str | None) -> tuple[str, ...] | None:
    """Returns the strong entity tags of If-Match without quotes; None if the header is missing, ("*",) for any.

    Weak tags are left out, since they match nothing here (RFC 9110, 13.1.1). Raises ProblemError (400).
    """
    if text is None:
        return None
    if text.strip() == "*":
        return ("*",)
    found = [_TAG.fullmatch(member.strip()) for member in text.split(",")]
    if not all(found):
        raise _refuse(name, text, 'a version in quotes, for example "3f6c"')
    return tuple(one[2] for one in found if one is not None and one[1] is None)


def matches_tag(text: str | None, tag: str) -> bool:
    """Returns True if If-None-Match names an entity tag (RFC 9110, 13.1.2): weak tags count, and `*` is any."""
    if text is None:
        return False
    if text.strip() == "*":
        return True
    return any(
        found is not None and found[2] == tag for found in map(_TAG.fullmatch, re.split(r"\s*,\s*", text.strip()))
    )


def prefers(text: str | None, media_type: str, usual: str) -> bool:
    """Returns True if Accept prefers a media type over the usual one (RFC 9110, 12.5.1)."""
    given = dict[str, float]()
    for member in (text or "*/*").split(","):
        name, *parameters = (part.strip().lower() for part in member.split(";"))
        quality = next(filter(None, map(_QUALITY.fullmatch, parameters)), None)
        given[name] = 1.0 if quality is None else float(quality[1])

    def weigh(name: str) -> float:
        # The narrowest range counts.
        ranges = (name, f"{name.partition('/')[0]}/*", "*/*")
        return next((given[one] for one in ranges if one in given), 0.0)

    return weigh(media_type) > weigh(usual)


def format_bytes(algorithm: str, value: bytes) -> str:
    """Returns a member of a dictionary of byte sequences."""
    return f"{algorithm}=:{base64.b64encode(value).decode('ascii')}:"


def format_boolean(value: bool) -> str:
    """Returns `?1` or `?0`."""
    return "?1" if value else "?0"


def _refuse(name: str, text: str, wanted: str) -> Exception:
    return refuse("malformed", f"{name}: {text[:80]} is not valid", f"Send {wanted}.")
