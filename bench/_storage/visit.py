"""A client's visit to the bench's folder: several clients share the objects, and the last one removes them."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from bench._storage.store import Store

KEEP = "keep"
"""An object of this name says that the objects stay."""


def name_client() -> str:
    """Names this client apart from all others, also those of other machines."""
    return f"{platform.node() or 'client'}-{uuid.uuid4().hex[:8]}"


@contextmanager
def visit(store: Store, client: str, *, keeps: bool) -> Iterator[None]:
    """Announces a client for the duration of the block; then removes what it wrote, and the objects with the last one.

    Prints what stays, and why.
    """
    if store.is_read_only:
        yield
        return
    if keeps:
        store.write(KEEP, b"")
    store.write(f"clients/{client}", b"")
    try:
        yield
    finally:
        store.remove(f"written/{client}")
        store.remove(f"clients/{client}")
        if store.measure(KEEP) is not None:
            print(f"{store.place} stays, as --keep asked: remove it when you no longer need it.")
        elif others := store.list_names("clients"):
            print(
                f"{store.place} stays, as other clients use it: {', '.join(others)}. The last one removes it. If none "
                "of them runs, they were killed: remove the folder."
            )
        else:
            store.remove("")
