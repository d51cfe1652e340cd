"""ServedModel: an export that answers batches, its decoder included."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway.export.serve.inputs import SHAPE_HEADER, Payload
from headway.export.serve.jobs import Answer
from headway.export.serve.problems import refuse_images
from headway.http.problems import ProblemError

if TYPE_CHECKING:
    from headway.export.exported import Exported

Pixels = NDArray[np.uint8]

WARM_UP_CALLS = 3


@final
@dataclass(slots=True)
class BatchRecord:
    """Work and time of one batch.

    Attributes:
        images: images that were computed.
        decode_s, compute_s: seconds of the thread.
        good: payloads that were computed, in their order, with their files.
        pixels: theirs, uint8 [images, H, W, C].
        outputs: [images, outputs], after the activation.
    """

    images: int = 0
    decode_s: float = 0.0
    compute_s: float = 0.0
    good: list[Payload] = field(default_factory=list)
    pixels: Pixels | None = None
    outputs: NDArray[np.float32] | None = None


@final
class ServedModel:
    """An export that is loaded. Used by one thread at a time.

    Args:
        exported: the open export; closed by `close`.
        batch: most images that are computed at once.

    Attributes:
        seconds: what one image took after the warm-up.
        headers: headers of every answer: the sha256 of the export, and its version.
    """

    def __init__(self, exported: Exported, *, batch: int) -> None:
        from headway.export.rows import make_columns

        self.exported = exported
        self._make_columns = make_columns
        self._batch, self.seconds = batch, 0.0
        manifest = exported.manifest
        self.shape = (*manifest.size, manifest.channels)
        self.headers = (
            (b"x-model-sha256", self.sha256.encode()),
            (b"x-model-version", self.version.encode("ascii", "replace")),
        )

    @property
    def sha256(self) -> str:
        """Sha256 of the export's manifest, which holds those of all its files."""
        return self.exported.manifest.sha256

    @property
    def version(self) -> str:
        """Name of the run that was exported, and the beginning of the sha256."""
        # A header holds visible ASCII only.
        run = Path(str(self.exported.manifest.run.get("folder", "run"))).name
        printable = "".join(letter if letter.isascii() and letter.isprintable() else "_" for letter in run)
        return f"{printable or 'run'}-{self.sha256[:12]}"

    def warm_up(self) -> None:
        """Computes the largest batch and some single images: the first call of a runtime allocates and plans."""
        self.exported.run(np.zeros((self._batch, *self.shape), np.uint8))
        # Through the decoder, which starts its threads with the first image.
        height, width, _ = self.shape
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, "JPEG")
        payload = Payload(("warm-up",), (file.getvalue(),), ((width, height),))
        spent_s = list[float]()
        for _ in range(WARM_UP_CALLS):
            started_s = time.perf_counter()
            self.answer([payload])
            spent_s.append(time.perf_counter() - started_s)
        self.seconds = min(spent_s)

    def answer(self, payloads: Sequence[Payload]) -> tuple[list[Answer | ProblemError], BatchRecord]:
        """Decodes and computes the images of several requests together.

        Returns:
            one outcome for each request; a bad image spoils that of its own request only.
        """
        record = BatchRecord()
        started_s = time.perf_counter()
        problems = {place: problem for place, p in enumerate(payloads) if (problem := self._refuse(p)) is not None}
        decoded = self._decode(payloads, problems)
        parts = [
            decoded[place] if payload.pixels is None else payload.pixels
            for place, payload in enumerate(payloads)
            if place not in problems
        ]
        record.decode_s = time.perf_counter() - started_s
        answers = iter(self._compute(payloads, problems, parts, record))
        return [problems[k] if k in problems else next(answers) for k in range(len(payloads))], record

    def close(self) -> None:
        """Frees the export."""
        self.exported.close()

    def _refuse(self, payload: Payload) -> ProblemError | None:
        """Returns why pixels do not fit this export, or None. Checked here, as another export may have taken over."""
        if payload.pixels is None or payload.pixels.shape[1:] == self.shape:
            return None
        given, wanted = (",".join(map(str, shape)) for shape in (payload.pixels.shape[1:], self.shape))
        return ProblemError(
            422, f"the pixels are n,{given}, this model takes n,{wanted}", f"Send {SHAPE_HEADER}: n,{wanted}."
        )

    def _decode(self, payloads: Sequence[Payload], problems: dict[int, ProblemError]) -> dict[int, Pixels]:
        """Decodes the files of all requests in one call; returns the pixels by request, and adds to `problems`."""
        faults: dict[int, dict[int, str]] = {}
        owners = [(place, number) for place, payload in enumerate(payloads) for number in range(len(payload.files))]
        if not owners:
            return {}
        files = [data for payload in payloads for data in payload.files]
        pixels, status = self.exported.decode(files, [side for payload in payloads for side in payload.sides])
        for bad in np.flatnonzero(status).tolist():
            place, number = owners[bad]
            faults.setdefault(place, {})[number] = "is damaged"
        for place, numbers in faults.items():
            problems[place] = refuse_images(payloads[place].names, numbers)
        # The rows of a request lie together, in the order of its files; those of one with faults are not used.
        first: dict[int, int] = {}
        for row, (place, _) in enumerate(owners):
            first.setdefault(place, row)
        return {place: pixels[row : row + len(payloads[place])] for place, row in first.items()}

    def _compute(
        self, payloads: Sequence[Payload], problems: dict[int, ProblemError], parts: list[Pixels], record: BatchRecord
    ) -> list[Answer]:
        if not parts:
            return []
        started_s = time.perf_counter()
        pixels = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # One request may have more images than a batch.
        chunks = [self.exported.run(pixels[low : low + self._batch]) for low in range(0, len(pixels), self._batch)]
        outputs = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        record.compute_s = time.perf_counter() - started_s
        rows = iter(self._make_columns(self.exported.manifest, outputs))
        record.good = [payload for place, payload in enumerate(payloads) if place not in problems]
        record.images, record.pixels, record.outputs = len(pixels), pixels, outputs
        # A path first, as in the rows of `headway predict`.
        return [
            Answer([{"path": name, **next(rows)} for name in payload.names], self.headers) for payload in record.good
        ]


def load_model(folder: Path, *, target: str | None, threads: int | None, batch: int) -> ServedModel:
    """Opens an export, loads it, and computes some images; see `open_export` for what is refused."""
    from headway.export.exported import open_export

    model = ServedModel(open_export(folder, target, threads), batch=batch)
    try:
        model.warm_up()
    except BaseException:
        model.close()
        raise
    return model
