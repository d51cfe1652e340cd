"""Costs before the first batch: opening a data set of 10 million samples, importing, asking for help.

open_ms        headway.open of 10,000,000 samples (synthetic columns of 350 MB, one sparse shard), page cache warm
open_rss_mb    growth of resident memory by that
import_s       a fresh process that runs `import headway`, less one that does nothing
help_s         a fresh process that runs `headway --help`, whole
Each is measured in processes of its own, which import everything before the clock starts (open_ms).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from bench._common import Claim, arguments, median, report
from bench._family import run_bench
from headway.data.columns import COLUMN_TYPES, COLUMNS_FILE, NUMPY_TYPES, DatasetDescription, Shard
from headway.data.formats import recordio

SAMPLES = 10_000_000

OPEN = """
import sys, time, psutil
import headway.data.opening as opening
process = psutil.Process()
before = process.memory_info().rss
started = time.perf_counter()
data = opening.open(sys.argv[1])
seconds = time.perf_counter() - started
assert len(data) == int(sys.argv[2])
print(seconds * 1e3, (process.memory_info().rss - before) / 1e6)
"""


def write_columns(folder: Path, samples: int) -> None:
    """A folder that opens as a data set of so many samples: zeros for columns, one record in a sparse shard."""
    writer = recordio.RecordioWriter(folder / "shard-00000.rec", folder / "shard-00000.idx", 7)
    writer.append(b"\xff\xd8\xff\xd9", 0.0, 0)
    writer.close()
    size = (folder / "shard-00000.rec").stat().st_size
    about = DatasetDescription(
        pack_id=7,
        fingerprint="0" * 64,
        format="recordio",
        mode="keep",
        label_kind="class",
        classes=tuple(map(str, range(1000))),
        class_counts=(samples // 1000,) * 1000,
        channels=3,
        common_size=None,
        shards=(Shard(name="shard-00000.rec", size=size),),
        source="synthetic",
    )
    header: dict[str, object] = {"__metadata__": about.to_metadata()}
    end = 0
    types = {**COLUMN_TYPES, "label": "I64", "name_offset": "U64"}
    for name, kind in sorted(types.items(), key=lambda item: -np.dtype(NUMPY_TYPES[item[1]]).itemsize):
        count = samples + (name == "name_offset")
        begin, end = end, end + count * np.dtype(NUMPY_TYPES[kind]).itemsize
        header[name] = {"dtype": kind, "shape": [count], "data_offsets": [begin, end]}
    header["name"] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / COLUMNS_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        block = bytes(1 << 20)
        for low in range(0, end, len(block)):
            file.write(block[: min(len(block), end - low)])


def seconds(*command: str) -> float:
    started = perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - started


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = 5 if options.quick else 15
    samples = SAMPLES // 10 if options.quick else SAMPLES
    opened, grown, imported, helped = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        write_columns(Path(name), samples)
        for _ in range(rounds):
            command = [sys.executable, "-c", OPEN, name, str(samples)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            ms, mb = map(float, done.stdout.split())
            opened.append(ms)
            grown.append(mb)
            imported.append(seconds("-c", "import headway") - seconds("-c", ""))
            helped.append(seconds("-m", "headway", "--help"))
    how = f"median of {rounds} processes"
    claims = [
        Claim("open_ms", median(opened)[0], "ms", f"{how}; {samples:,} samples"),
        Claim("open_rss_mb", median(grown)[0], "MB", f"{how}; {samples:,} samples"),
        Claim("import_s", median(imported)[0], "s", how),
        Claim("help_s", median(helped)[0], "s", how),
    ]
    rows = [("claim", "median", "95 % interval")]
    for claim, values in zip(claims, (opened, grown, imported, helped), strict=True):
        middle, low, high = median(values)
        rows.append((claim.name, f"{middle:.4g} {claim.unit}", f"[{low:.4g}, {high:.4g}]"))
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
