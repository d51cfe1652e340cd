"""Loader: batches in the Order, ahead of need: decoded from a data set of Headway, or loaded by worker processes."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, final, overload

import torch
import torch.utils.data

from headway.core.errors import UsageError
from headway.data import opening
from headway.data.batch import Batch
from headway.data.batch_source import BatchSource
from headway.data.collated_batch import CollatedBatch
from headway.data.dataset import Dataset
from headway.data.decode_source import DecodeSource
from headway.data.epoch_cursor import EpochCursor
from headway.data.host_transform import HostTransform
from headway.data.loader_spec import LoaderSpec, check_options
from headway.data.loader_stats import LoaderStats
from headway.data.tiers import Tier
from headway.data.workers.sample_source import Samples, SampleSource, explain_no_samples
from headway.data.workers.stream_cursor import StreamCursor

# `Loader` alone, as an annotation, is a Loader of decoded images. The default of a type variable is Python 3.13's.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    AnyBatch = TypeVar("AnyBatch", default=Batch)
else:
    from typing import TypeVar

    AnyBatch = TypeVar("AnyBatch")


@final
class Loader(Generic[AnyBatch]):
    """Iterates over batches of a data set; each iteration serves the next epoch.

    `Loader("photos.packed", batch=64, seed=1)`, with the options of `LoaderSpec` as keywords; or `Loader(dataset,
    spec)`, with keywords for values that differ from the spec's. `state_dict` and `load_state_dict` save and restore
    its position, also inside an epoch, as torchdata's StatefulDataLoader does.

    Args:
        dataset: an open data set, or its path or URL as for `headway.open`, whose batches are `Batch`es. Or a data set
            of your own: any object with `__len__` and `__getitem__`, or with `__iter__`, such as PyTorch's data sets.
            Worker processes load its samples, and batches are `CollatedBatch`es.

    Memory: `prefetch_batches` x batch x H x W x C bytes for the ring, the bytes that the tier keeps, and one byte a
    sample for `verify`. For a data set of your own, the batches that are ready, at least two a worker.

    Attributes:
        spec: the options.
        device: device of the batches, with its number.

    Raises:
        UsageError: the options do not fit the data set or this machine, or `dataset` is none.
    """

    @overload
    def __init__(
        self: Loader[Batch], dataset: Dataset | str | os.PathLike[str], spec: LoaderSpec | None = None, **options: Any
    ) -> None: ...

    @overload
    def __init__(
        self: Loader[CollatedBatch],
        dataset: Samples | Iterable[Any] | torch.utils.data.Dataset[Any],
        spec: LoaderSpec | None = None,
        **options: Any,
    ) -> None: ...

    def __init__(self, dataset: Any, spec: LoaderSpec | None = None, **options: Any) -> None:
        dataset = _open_dataset(dataset)
        check_options(spec, options)
        spec = LoaderSpec(**options) if spec is None else replace(spec, **options)
        self.dataset, self.device = dataset, _find_device(spec)
        is_headway = isinstance(dataset, Dataset)
        source: Any = (DecodeSource if is_headway else SampleSource)(dataset, spec, self.device)
        self._source: BatchSource[AnyBatch] = source
        self.spec = source.spec
        self._cursor: EpochCursor | StreamCursor = source.cursor
        self._stream: Generator[AnyBatch, None, None] | None = None

    def __repr__(self) -> str:
        try:
            steps = f"{len(self)} steps"
        # Endless, or an iterable data set of unknown length.
        except TypeError:
            steps = "without end, steps" if self.spec.stop is not None else "without a known end, steps"
        # The user's own data set may be a list of samples.
        name = repr(self.dataset) if isinstance(self.dataset, Dataset) else type(self.dataset).__name__
        return f"Loader of {name}: {steps} of {self.spec.plan}, {self._source.describe()}"

    def __len__(self) -> int:
        """Number of steps of the current epoch. Epochs may differ by one, since every step is full; the first has most.

        Raises TypeError if the loader has no end, or serves an iterable data set without a length.
        """
        return self._cursor.count_steps()

    def __iter__(self) -> Iterator[AnyBatch]:
        start, stop = self._cursor.begin()
        self._stream = stream = self._source.serve(start, stop)
        try:
            for batch in stream:
                # An older iterator that is still open must not move the newest one's position.
                if self._stream is stream:
                    self._cursor.advance()
                yield batch
            if self._stream is stream:
                self._cursor.finish()
        finally:
            # An abandoned iterator comes here too, so its threads end with it.
            stream.close()

    @property
    def epoch(self) -> int:
        """Epoch that is served, or that the next iteration serves; counted from 0."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration serve this epoch from its beginning."""
        # An iterator that is still open counts no more steps.
        self._stream = None
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the position behind the last batch that was served: plain numbers."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position, and serve the rest of its epoch.

        Raises:
            CheckpointError: the state is damaged, or of another data set or seed.
        """
        self._stream = None
        self._cursor.load_state_dict(state)

    def read_step(self, position: int) -> AnyBatch:
        """Reads the batch of the step that begins at a position. The position of iterations stays."""
        stream = self._source.serve(position, position + 1)
        try:
            return next(stream)
        finally:
            stream.close()

    def stats(self) -> LoaderStats:
        """Returns the measurements of all iterations so far."""
        return self._source.make_stats()

    def close(self) -> None:
        """Ends the worker processes, which otherwise live as long as the loader. A new iteration starts them again."""
        self._source.close()

    # The rest is about images that Headway decodes.

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images at the end of training."""
        return self._decoding.transform.size

    @property
    def transform(self) -> HostTransform:
        """Crop, resize, flip and shift on the host."""
        return self._decoding.transform

    @property
    def backend(self) -> str:
        """The decoder in use, "native" or "pillow"."""
        return self._decoding.backend

    @property
    def tier(self) -> Tier:
        """Storage of the samples' bytes; chosen, and filled, at first use."""
        return self._decoding.tier

    def uses_stored_pixels(self) -> bool:
        """Returns True if every image has the size and the channels of the batch already."""
        return self._decoding.uses_stored_pixels()

    @property
    def _decoding(self) -> DecodeSource:
        if isinstance(self._source, DecodeSource):
            return self._source
        raise UsageError("this Loader serves a data set of your own, and decodes no images", fix="Ask your data set.")


def _open_dataset(dataset: Any) -> Any:
    """Returns the data set itself, or opens the one at a path. Raises UsageError if it is not a data set."""
    # First, because a text has a length and entries, as a data set has.
    if isinstance(dataset, str | os.PathLike):
        return opening.open(dataset)
    if not isinstance(dataset, Dataset) and (why := explain_no_samples(dataset)):
        fix = "Give the path of a pack or of images, what headway.open(path) returns, or a data set of your own."
        raise UsageError(f"a Loader serves a data set, and {why}", fix=fix)
    return dataset


def _find_device(spec: LoaderSpec) -> torch.device:
    device = torch.device(spec.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("PyTorch sees no GPU here", fix='Leave device out, or give "cpu".')
    # With a number, because `cuda` alone would mean another device after a call of `set_device`.
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
