"""Swapper: opens the export of a running server anew, and lets it take over between two batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from headway.core.errors import HeadwayError
from headway.core.system_errors import explain_system_error
from headway.export.manifest import open_manifest
from headway.export.serve.batching import Batcher
from headway.export.serve.served_model import ServedModel

LOG = logging.getLogger("headway.export")


@final
class Swapper:
    """Swaps the export in a folder, which was replaced by a rename, for the one that is served.

    Args:
        load: opens and warms the export.
    """

    def __init__(self, folder: Path, batcher: Batcher, load: Callable[[], ServedModel]) -> None:
        self._folder, self._batcher, self._load = folder, batcher, load
        self._lock = asyncio.Lock()

    async def swap(self) -> dict[str, Any]:
        """Opens, checks and warms the export in the folder, then lets it take over.

        Returns:
            the `sha256` and `version` that are served now, and `unchanged`: True if it was the same export.

        Raises:
            HeadwayError: the export is refused; the one before goes on.
        """
        # One at a time: two that load at once would need three times the memory.
        async with self._lock:
            before = self._batcher.model
            # In another thread, since reading and warming take seconds. The one before answers meanwhile.
            model = await asyncio.to_thread(self._open, before.sha256)
            if model is not None:
                await self._batcher.swap(model)
                LOG.info(f"Serves {model.version} now, in place of {before.version}.")
            served = model or before
            return {"version": served.version, "sha256": served.sha256, "unchanged": model is None}

    def _open(self, served_sha256: str) -> ServedModel | None:
        """Returns the new model, or None if the folder still holds the one that is served."""
        try:
            return None if open_manifest(self._folder).sha256 == served_sha256 else self._load()
        except HeadwayError:
            raise
        # A runtime may raise anything on a file that it cannot load.
        except Exception as error:
            what = str(explain_system_error(error) or f"{type(error).__name__}: {error}")
            raise HeadwayError(what, where=str(self._folder), fix="Export the run again.") from error
