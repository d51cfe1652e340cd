"""The two exceptions that Horovod scripts catch; RuntimeErrors there, hence here."""

from __future__ import annotations

from typing import final


@final
class HorovodInternalError(RuntimeError):
    """A collective failed, on all ranks: they disagree about it, a rank was lost, or one has shut down."""


@final
class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of workers is about to change; the state is good and need not be restored.

    Args:
        skip_sync: the workers that stay need not exchange their state: some were removed, and none came.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("workers were added or removed")
        self.skip_sync = skip_sync
