"""Checks of a request before it changes anything: scopes, the version it is based on, and who sets a label."""

from __future__ import annotations

from headway.lifecycle.service.bodies import Proposal
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.tokens import Principal

_LABEL_OPERATIONS = ("label",)
# What another client may have changed meanwhile in another way.
_BASED_OPERATIONS = ("label", "move")


def check_scopes(proposal: Proposal, principal: Principal) -> None:
    """Raises ProblemError (403) if the principal may not do all of this."""
    for row in proposal.rows:
        # With a split, a label moves its sample too.
        if row.op in _LABEL_OPERATIONS and not row.split:
            principal.expect("label", "write")
        else:
            principal.expect("write")


def check_head(proposal: Proposal, tags: tuple[str, ...] | None, head: str | None) -> None:
    """Checks If-Match.

    Args:
        tags: entity tags of the header; None: there is none.
        head: newest version; None: there is none yet.

    Raises:
        ProblemError: another version is the newest (412), or labels are changed without the header (428).
    """
    headers = [] if head is None else [(b"etag", f'"{head}"'.encode())]
    if tags is None:
        if any(row.op in _BASED_OPERATIONS for row in proposal.rows):
            what = "a change of labels needs If-Match with the version that it is based on"
            raise refuse("precondition-missing", what, "Send the ETag of the data set.", headers=headers)
        return
    if (head is None or head not in tags) and (tags != ("*",) or head is None):
        newest = "none" if head is None else head
        what = f"the newest version is {newest}, and If-Match names another one"
        raise refuse("head-moved", what, "Look at the newest version first.", headers=headers)


def choose_author(by: str, principal: Principal) -> str:
    """Returns who sets a label. Only `admin` may name somebody else alone; others are named beside them."""
    if not by or by == principal.name:
        return principal.name
    return by if "admin" in principal.scopes else f"{principal.name}/{by}"
