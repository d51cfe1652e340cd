"""The inference table as a record: `table.json` in an export folder, and its text for the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.core.json_record import VERSION, JsonRecord, read_record
from headway.core.text_format import align_table, format_bytes, pluralise

TABLE_FILE = "table.json"
CLASS_SHARES = ("top-1", "top-5")


class Cell(JsonRecord):
    """Speed of one row with a number of threads and a batch. CPU time is that of all threads of the row's process."""

    threads: int
    batch: int
    calls: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    images_s: float
    """Median of the rounds."""
    images_s_low: float
    images_s_high: float
    """95 % interval of the median; with fewer than six rounds, the slowest and the fastest."""
    cpu_ms_image: float
    """Median of the rounds."""


class Row(JsonRecord):
    """One way to run the network."""

    name: str
    precision: str
    file_bytes: int | None
    """Size of the files that it needs; None if it needs the run itself."""
    load_s: float
    """Seconds from the files to the first answer at batch 1, without the import of libraries; median of the rounds."""
    first_bytes: int
    """Peak resident memory of the row's process after batch 1, libraries included."""
    peak_bytes: int
    """The same after the largest batch."""
    peak_batch: int
    cells: tuple[Cell, ...]
    top1: float | None = None
    top5: float | None = None
    flips: int | None = None
    """Samples whose best class is another one than that of the first row."""
    largest_difference: float | None = None
    """Largest difference of an output from that of the first row."""
    skipped: tuple[str, ...] = ()
    """Batches that were not measured, each with the reason."""

    def find_cell(self, threads: int, batch: int) -> Cell | None:
        """Returns the speed with so many threads at a batch, if it was measured."""
        return next((cell for cell in self.cells if (cell.threads, cell.batch) == (threads, batch)), None)


class DeckVerdict(JsonRecord):
    """A figure of the decks about the network of a table, the same figure here, and what that says of it."""

    row: str
    deck: str
    here: str
    verdict: str


class InferenceTable(JsonRecord):
    """Speed, size and accuracy of an exported network in all the ways to run it that are here.

    The first row, eager PyTorch, is what the others are compared with.
    """

    version: int = VERSION
    machine: dict[str, str]
    image: tuple[int, int, int]
    """Height, width and channels."""
    rounds: int
    threads: tuple[int, ...]
    batches: tuple[int, ...]
    samples: int
    """Number of samples on which outputs were compared; 0: there is no evaluation set."""
    samples_of: int
    """Size of the evaluation set."""
    rows: tuple[Row, ...]
    missing: dict[str, str]
    """Rows that are not here, with the reason."""
    deck: tuple[DeckVerdict, ...] = ()
    """Verdicts about the decks' rows of this network; empty if the decks do not have it."""
    is_quick: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the table as a tree of JSON."""
        return self.model_dump(mode="json")

    def describe(self) -> str:
        """Returns the table as text."""
        lines = [self._describe_conditions(), ""]
        for threads in self.threads:
            lines += [f"{pluralise(threads, 'thread')}:", *align_table(self._build_speed_rows(threads)), ""]
        lines += [*align_table(self._build_size_rows()), ""]
        if self.samples:
            lines += [*align_table(self._build_accuracy_rows()), ""]
        if self.deck:
            lines.append("The deck's rows of this network, without → with oneDNN:")
            lines += [f"{one.row}: {one.deck}; here {one.here}: {one.verdict}" for one in self.deck]
            lines.append("")
        lines += [f"Not here: {name}: {reason}" for name, reason in self.missing.items()]
        lines += [f"Not measured: {row.name}: {what}" for row in self.rows for what in row.skipped]
        if self.is_quick:
            lines.append("A quick table shows that the rows run. These are no figures to quote.")
        return "\n".join(lines).rstrip()

    def _describe_conditions(self) -> str:
        versions = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        size = " x ".join(map(str, self.image))
        seen = f"{self.samples:,} of {self.samples_of:,} samples" if self.samples else "no evaluation set"
        rounds = f"{pluralise(self.rounds, 'round')}, rows interleaved, a process for each row"
        return f"{versions}\nImages {size}; {rounds}; accuracy on {seen}."

    def _build_speed_rows(self, threads: int) -> list[tuple[str, ...]]:
        # Wall time beside CPU time: what other programs take changes the first one only.
        heads = [f"images/s at {batch}" for batch in self.batches]
        rows: list[tuple[str, ...]] = [("", "p50 ms", "p95", "p99", "CPU ms", *heads, "CPU ms an image")]
        for row in self.rows:
            first = row.find_cell(threads, 1)
            latency = ["-"] * 4
            if first is not None:
                latency = [f"{first.p50_ms:.3g}", f"{first.p95_ms:.3g}", f"{first.p99_ms:.3g}"]
                latency.append(f"{first.cpu_ms_image:.3g}")
            cells = [row.find_cell(threads, batch) for batch in self.batches]
            speeds = ["-" if cell is None else f"{cell.images_s:,.0f}" for cell in cells]
            last = next((cell for cell in reversed(cells) if cell is not None), None)
            cost = "-" if last is None else f"{last.cpu_ms_image:.3g} at {last.batch}"
            rows.append((row.name, *latency, *speeds, cost))
        return rows

    def _build_size_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", "precision", "files", "load s", "memory at 1", "memory, peak")]
        for row in self.rows:
            size = "-" if row.file_bytes is None else format_bytes(row.file_bytes)
            peak = f"{format_bytes(row.peak_bytes)} at {row.peak_batch}"
            rows.append((row.name, row.precision, size, f"{row.load_s:.2f}", format_bytes(row.first_bytes), peak))
        return rows

    def _build_accuracy_rows(self) -> list[tuple[str, ...]]:
        # Columns that the first row has: none of them for numbers, no top-5 for five classes or fewer.
        base = _list_shares(self.rows[0])
        kept = [place for place, value in enumerate(base) if value is not None]
        names = [CLASS_SHARES[place] for place in kept]
        rows: list[tuple[str, ...]] = [("", *names, *(f"delta {name}" for name in names), "flips", "max difference")]
        for row in self.rows:
            values = _list_shares(row)
            shares = [_format_share(values[place], 0.0) for place in kept]
            deltas = [_format_share(values[place], base[place]) for place in kept]
            flips = "-" if row.flips is None else f"{row.flips:,}"
            largest = "-" if row.largest_difference is None else f"{row.largest_difference:.1e}"
            rows.append((row.name, *shares, *deltas, flips, largest))
        return rows


def _list_shares(row: Row) -> tuple[float | None, float | None]:
    return row.top1, row.top5


def _format_share(value: float | None, base: float | None) -> str:
    """Returns a share, or its difference from another one, to 8 decimals."""
    # Adding zero turns -0.0 into 0.0.
    return "-" if value is None or base is None else f"{value - base + 0.0:.8f}"


def read_table(folder: Path) -> InferenceTable:
    """Reads the inference table of an export folder.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    return read_record(folder / TABLE_FILE, InferenceTable, "Make it with headway export RUN --table.")
