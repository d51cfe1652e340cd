"""DeviceTier: the whole set decoded in the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from headway.data.dataset import Dataset
from headway.data.decode import Decoder
from headway.data.order import Order
from headway.data.records import Records
from headway.data.tiers.memory import FillProgress, decode_all
from headway.data.tiers.next_use import HostSlots
from headway.data.tiers.tier import Ids, Spans, Tier

# Importing torch takes seconds.
if TYPE_CHECKING:
    import torch


@final
class DeviceTier(Tier):
    """Decoded images as one tensor, uint8 [n, height, width, channels], from which batches are gathered.

    Args:
        source: provides the records, and is read once; its images must share one size.
        decoder: decodes them on the host.

    Attributes:
        pixels: the images; uint8 [n, height, width, channels] on the device.
    """

    def __init__(
        self,
        dataset: Dataset,
        source: Tier,
        decoder: Decoder,
        device: torch.device | str,
        *,
        why: str,
        progress: FillProgress | None = None,
    ) -> None:
        import torch

        super().__init__(dataset, "device", why)
        num_samples = len(dataset)
        size = dataset.description.common_size
        assert size is not None, "choose_tier checks this"
        self._device = torch.device(device)
        shape = (num_samples, size[1], size[0], dataset.description.channels)
        self.pixels = torch.empty(shape, dtype=torch.uint8, device=self._device)
        # Chunk by chunk: the host never holds the whole set.
        for first, images in decode_all(dataset, source, decoder, self, progress):
            self.pixels[first : first + len(images)].copy_(torch.from_numpy(images))

    def gather(self, ids: Sequence[int] | Ids) -> torch.Tensor:
        """Returns images of the samples, uint8 [k, height, width, channels] on the device; no host-device sync."""
        import torch

        index = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
        if self._device.type == "cuda":
            # From pageable memory, the copy would block the host.
            index = index.pin_memory().to(self._device, non_blocking=True)
        return self.pixels.index_select(0, index)

    def read(self, ids: Sequence[int] | Ids) -> Records:
        """Returns the pixels of the samples on the host, with a host-device sync. Batches use `gather`."""
        return Records.from_rows(self.gather(ids).cpu().numpy())

    def expect(self, spans: Spans, order: Order | None = None, slots: HostSlots | None = None) -> None:
        """Does nothing: every image is on the device."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the tier."""
