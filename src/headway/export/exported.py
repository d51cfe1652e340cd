"""An export that is open: it decodes as an evaluation does, runs a target, predicts and is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.files import read_text
from headway.data.decode import Decoder, build_decoder
from headway.data.image_files import ImageSource, OnBadImage, decode_records, raise_error, read_pixels
from headway.export.decoding import build_transform, choose_backend
from headway.export.manifest import MANIFEST, Manifest, open_manifest, parse_manifest
from headway.export.rows import check_ranking, make_columns
from headway.export.targets import get_target
from headway.export.targets.target import Session, check_packages
from headway.training.prediction_rows import predict_files


@final
class Exported:
    """An export, opened by `open_export`. Close it after use.

    Args:
        session: runs one target of the export.
        threads: decoding threads; None: see `build_decoder`.

    Attributes:
        folder: its folder.
        manifest: its checked manifest.
        transform: centre crop and resize, as in the evaluation of the run.
    """

    def __init__(self, folder: Path, manifest: Manifest, session: Session, threads: int | None = None) -> None:
        self.folder, self.manifest, self._session, self._threads = folder, manifest, session, threads
        self.transform = build_transform(manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the labels or numbers."""
        return self.manifest.names

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Computes probabilities, or numbers, [b, outputs] from pixels [b, H, W, C]."""
        return self._session.run(pixels)

    def read(
        self, images: Sequence[ImageSource], on_bad: OnBadImage = raise_error
    ) -> tuple[list[int], NDArray[np.uint8]]:
        """Decodes images as the run's evaluation does; returns the places of the good ones, and their pixels.

        Args:
            on_bad: called with the error of an image that cannot be read, which is then left out.

        Raises:
            DataError: an image cannot be read.
        """
        return read_pixels(self.transform, self._decoder, images, on_bad)

    def decode(
        self, records: Sequence[bytes], sides: Sequence[tuple[int, int]]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Decodes image files of known (width, height); see `decode_records`."""
        return decode_records(self.transform, self._decoder, records, sides)

    @cached_property
    def _decoder(self) -> Decoder:
        return self._build_decoder()

    def _build_decoder(self) -> Decoder:
        return build_decoder(self._threads, choose_backend(self.manifest))

    def check_top(self, top: int | None) -> None:
        """Raises UsageError if so many best classes cannot be named."""
        check_ranking(self.manifest, top)

    def predict(
        self,
        images: Sequence[ImageSource],
        batch: int = 64,
        *,
        top: int | None = None,
        on_bad: OnBadImage = raise_error,
    ) -> Iterator[dict[str, Any]]:
        """Yields one row per image; see `Predictor.predict`."""

        def compute(pixels: NDArray[np.uint8]) -> list[dict[str, Any]]:
            return make_columns(self.manifest, self.run(pixels), top)

        with closing(self._build_decoder()) as decoder:
            yield from predict_files(
                images, compute, transform=self.transform, decoder=decoder, batch=batch, on_bad=on_bad
            )

    def evaluate(self, data: str | None = None) -> dict[str, float]:
        """Returns the means of the metrics over a packed folder, and `samples`; see `compute_metrics` for their names.

        Args:
            data: the folder; None: the evaluation set of the run that was exported.

        Raises:
            UsageError: there is nothing to evaluate on, or the task is the user's own. DataError: the labels are others
                than those of the training data, or too many samples are damaged.
        """
        # Imported here, because its Loader imports torch, which takes seconds.
        from headway.export.evaluate_export import evaluate_export

        return evaluate_export(self.folder, self.manifest, self.run, data)

    def close(self) -> None:
        """Ends the session and the decoding threads."""
        self._session.close()
        # Made by the first image.
        if "_decoder" in self.__dict__:
            self._decoder.close()


def open_export(folder: Path, target: str | None = None, threads: int | None = None) -> Exported:
    """Opens an export, and loads one of its targets.

    Args:
        target: name of the target; None: `onnx`, or the first one that the gate has not refused.
        threads: threads of the network and of the decoder, each; None: as many as this process may use.

    Raises:
        UsageError: there is no such export or target, or its packages are not installed.
        DataError: the gate refused the target, a file is not the one that was written, or the export was replaced
            meanwhile.
    """
    manifest = open_manifest(folder, target)
    if target is None:
        usable = manifest.usable
        target = "onnx" if "onnx" in usable or not usable else usable[0]
    # Again, as every target may have been refused.
    manifest.get_target(target, str(folder))
    found = get_target(target)
    check_packages(found)
    session = found.load(folder, threads)
    try:
        _expect_unchanged(folder, manifest)
    except BaseException:
        session.close()
        raise
    return Exported(folder, manifest, session, threads)


def _expect_unchanged(folder: Path, manifest: Manifest) -> None:
    """Raises DataError if another export has taken the place of the one that was checked, and may have been loaded."""
    try:
        sha256 = parse_manifest(read_text(folder / MANIFEST)).sha256
    except (OSError, ValueError):
        sha256 = ""
    if sha256 != manifest.sha256:
        raise DataError("the export was replaced while it was loaded", where=str(folder), fix="Try again.")
