"""Refusals of predictions: a full queue, a deadline that has passed, bad images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.http.problems import ProblemError


def refuse_full(waiting: int, retry_after_s: int) -> ProblemError:
    """Returns the answer to a request that finds the queue full: 503 with Retry-After."""
    return ProblemError(
        503,
        f"the server is busy: {waiting:,} images wait already",
        f"Send the request again after {retry_after_s} s, or start more servers.",
        headers=[(b"retry-after", str(retry_after_s).encode())],
    )


def refuse_hopeless(expected_s: float, deadline_ms: float) -> ProblemError:
    """Returns the answer to a request that would wait beyond its deadline: 503 with Retry-After."""
    what = f"the server is busy: an answer takes about {expected_s * 1000:.0f} ms, the deadline is {deadline_ms:g} ms"
    fix = "Send the request again after 1 s, allow more time, or start more servers."
    return ProblemError(503, what, fix, headers=[(b"retry-after", b"1")])


def refuse_images(names: Sequence[str], faults: Mapping[int, str]) -> ProblemError:
    """Returns the answer to a request with bad images, which names each of them: 422.

    Args:
        names: of all images.
        faults: what is wrong with some of them, by place, such as "is damaged".
    """
    images = [{"path": names[place], "what": f"it {faults[place]}"} for place in sorted(faults)]
    first = min(faults)
    what = f"{names[first]} {faults[first]}"
    if len(faults) > 1:
        what = f"{len(faults)} of {len(names)} images are bad; {what}"
    fix = "Send a sound JPEG, PNG or WebP file." if len(names) == 1 else "Leave the bad images out, or send them apart."
    return ProblemError(422, what, fix, more={"images": images})


def refuse_late(deadline_ms: float) -> ProblemError:
    """Returns the answer to a request whose deadline has passed: 504."""
    what = f"the deadline of {deadline_ms:g} ms passed before there was an answer"
    return ProblemError(504, what, "Allow more time in X-Deadline-Ms, or send fewer requests at once.")
