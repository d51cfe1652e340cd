"""The two exceptions that Horovod scripts catch. They are RuntimeErrors, as in Horovod."""

from __future__ import annotations

from typing import final


@final
class HorovodInternalError(RuntimeError):
    """A collective failed on all ranks: they disagree about it, a rank was lost, or one has shut down."""


# The class has Horovod's name.
@final
class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818
    """The set of workers is about to change; the state is good and need not be restored.

    Args:
        skip_sync: the remaining workers need not synchronise their state: some were removed, and none came.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("workers were added or removed")
        self.skip_sync = skip_sync
