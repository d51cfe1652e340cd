"""The header Retry-After of HTTP: how long a server asks its clients to wait."""

from __future__ import annotations

import time
from datetime import UTC
from email.utils import parsedate_to_datetime


def parse_retry_after(text: str, most_s: float, now: float | None = None) -> float:
    """Returns the seconds that a Retry-After header asks for (RFC 9110, 10.2.3); 0 if it asks for none.

    Args:
        text: a number of seconds, or a date of HTTP; anything else counts as 0.
        most_s: upper limit of the result.
        now: seconds since 1970; None: the clock of this machine.
    """
    text = text.strip()
    if text.isascii() and text.isdecimal():
        # A number of hundreds of digits is infinite as a float, and limited too.
        return min(float(text), most_s)
    try:
        date = parsedate_to_datetime(text)
        # Dates of HTTP are in UTC. `timestamp` would take one without a zone as local.
        seconds = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(max(0.0, seconds - (time.time() if now is None else now)), most_s)
