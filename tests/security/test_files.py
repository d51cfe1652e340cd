"""Attacks by files and servers: packs, columns, labels and sizes that somebody has made up."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from tests._support import headway, packed_digits, refused, write_recipe

from headway.checkpoint.remote import CheckpointUrl
from headway.core.errors import DataError, HeadwayError
from headway.data import fill, opening
from headway.data.columns import COLUMN_TYPES, COLUMNS_FILE, load_columns
from headway.data.loader import Loader
from headway.data.order import Order
from headway.storage.remote_folder import RemoteFolder

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("packed"), mode="seekable")


@pytest.fixture
def folder(packed: Path, tmp_path: Path) -> Path:
    """A recipe beside packs of its own."""
    shutil.copytree(packed, tmp_path / "digits.packed")
    write_recipe(tmp_path / "recipe.yaml", epochs=1)
    return tmp_path


def forge(pack: Path, change: Callable[[Tree], object], columns: Callable[[Tree], object] | None = None) -> None:
    """Changes what a columns file says of its pack, and its columns; their fingerprint stays."""
    path = pack / COLUMNS_FILE
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    description = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["headway"])
    change(description)
    found = load(data)
    if columns is not None:
        columns(found)
    path.write_bytes(save(found, metadata={"headway": json.dumps(description)}))


def ruin(pack: Path) -> None:
    """Overwrites the bytes of every record."""
    columns, description, _ = load_columns(pack / COLUMNS_FILE)
    for number, shard in enumerate(description.shards):
        data = bytearray((pack / shard.name).read_bytes())
        for place in np.flatnonzero(columns["shard"] == number).tolist():
            start, length = int(columns["offset"][place]), int(columns["length"][place])
            data[start : start + length] = bytes(length)
        (pack / shard.name).write_bytes(data)


WRONG: dict[str, Callable[[Tree], object]] = {
    "channels": lambda d: d.update(channels=True),
    "no channels": lambda d: d.pop("channels"),
    "many channels": lambda d: d.update(channels=1 << 40),
    "classes": lambda d: d.update(classes=[1, 2]),
    "class_counts": lambda d: d.update(class_counts=[1]),
    "label_kind": lambda d: d.update(label_kind="rubbish"),
    "common_size": lambda d: d.update(common_size=[-1, 8]),
    "shards": lambda d: d.update(shards=[{"name": "a\0b", "size": 3}]),
    "a shard's size": lambda d: d["shards"][0].update(size=1 << 60),
    "fingerprint": lambda d: d.update(fingerprint="../../etc"),
    "pack_id": lambda d: d.update(pack_id=-1),
    "deep": lambda d: d.update(source=json.loads('{"a":' * 50 + "1" + "}" * 50)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_of_a_description_is_a_sentence(folder: Path, name: str) -> None:
    pack = folder / "digits.packed/train"
    forge(pack, WRONG[name])
    with pytest.raises(DataError, match="the columns file is damaged"):
        opening.open(pack)


@pytest.mark.parametrize("name", [*COLUMN_TYPES, "name", "label"])
def test_a_column_with_another_number_of_dimensions_is_a_sentence(folder: Path, name: str) -> None:
    """A `shard` of shape [9, 1] once ended in NumPy's own error while records were read."""
    pack = folder / "digits.packed/train"
    forge(pack, lambda _: None, lambda found: found.update({name: found[name].reshape(-1, 1, 1)}))
    with pytest.raises(DataError, match=f"wrong number of dimensions: {name}"):
        opening.open(pack)


HEADERS = {
    "deep": b'{"a":' * 100_000,
    "a list": b"[1]",
    "twice": b'{"__metadata__": {}, "__metadata__": {}}',
    "no metadata": b"{}",
    "a column of true": b'{"__metadata__": {"headway": "{}"}, "label": true}',
    "a column beyond the file": b'{"__metadata__": {}, "a": {"dtype": "I64", "shape": [9], "data_offsets": [0, 8]}}',
    "below the file": b'{"__metadata__": {}, "label": {"dtype": "I64", "shape": [-1], "data_offsets": [8, 0]}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_columns_that_is_none(folder: Path, name: str) -> None:
    path = folder / "digits.packed/train" / COLUMNS_FILE
    path.write_bytes(struct.pack("<Q", len(HEADERS[name])) + HEADERS[name])
    with pytest.raises(DataError, match="the columns file is damaged"):
        load_columns(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(DataError, match="its header has"):
        load_columns(path)


@pytest.mark.parametrize("label", [10, -1, 1 << 40])
@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_label_beyond_the_classes_is_refused_before_a_loss_sees_it(folder: Path, part: str, label: int) -> None:
    forge(folder / "digits.packed" / part, lambda d: None, lambda c: c["label"].__setitem__(3, label))
    said = refused("train", folder / "recipe.yaml", "--run", folder / "run", status=1)
    assert "sample 3 (" in said
    assert f"has the label {label}, and there are 10 classes" in said


def test_channels_and_classes_that_were_changed_are_not_taken_for_the_same(folder: Path) -> None:
    recipe, pack = folder / "recipe.yaml", folder / "digits.packed"
    headway("train", recipe, "--run", folder / "run", "checkpoint={every_steps: 3, keep: 9}")
    shutil.rmtree(folder / "run/checkpoints/step-00000006")
    kept = (pack / "train" / COLUMNS_FILE).read_bytes()
    names = list("abcdefghij")
    for change, said in (
        (lambda d: d.update(channels=3), "the data's channels differ (1 then, 3 now)"),
        (lambda d: d.update(classes=names), "the data's classes differ"),
    ):
        (pack / "train" / COLUMNS_FILE).write_bytes(kept)
        before = opening.open(pack / "train").fingerprint
        forge(pack / "train", change)
        forge(pack / "eval", lambda d: d.update(classes=names) if "classes" in said else None)  # noqa: B023
        assert opening.open(pack / "train").fingerprint == before
        assert said in refused("train", "--resume", folder / "run", status=1)


@pytest.mark.parametrize("on_bad", ["substitute", "mask", "stop"])
@pytest.mark.parametrize("mean", ["auto", "[120]"])
def test_training_where_every_record_is_damaged_ends_with_a_sentence(folder: Path, on_bad: str, mean: str) -> None:
    ruin(folder / "digits.packed/train")
    more = [f"data.on_bad={on_bad}", f"augment.mean={mean}", *(["augment.std=[60]"] if mean != "auto" else [])]
    said = refused("train", folder / "recipe.yaml", *more, "--run", folder / "run", status=1)
    assert "damaged" in said
    assert str(folder) in said


def test_evaluation_where_every_record_is_damaged_ends_with_a_sentence(folder: Path) -> None:
    ruin(folder / "digits.packed/eval")
    recipe = folder / "recipe.yaml"
    said = refused("train", recipe, "data.max_bad_share=1.0", "--run", folder / "run", status=1)
    assert "60 of 60 samples are damaged" in said


@pytest.mark.check
def test_the_search_for_a_good_sample_looks_at_each_damaged_one_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it ends, however large the set is."""
    pack = folder / "digits.packed/train"
    good, ruined = (pack.parent / name for name in ("good", "ruined"))
    shutil.copytree(pack, good)
    ruin(pack)
    shutil.move(pack, ruined)
    columns, description, _ = load_columns(good / COLUMNS_FILE)
    shard, start, length = (int(columns[name][7]) for name in ("shard", "offset", "length"))
    whole = (good / description.shards[shard].name).read_bytes()[start : start + length]
    with (ruined / description.shards[shard].name).open("r+b") as file:
        file.seek(start)
        file.write(whole)
    with_one = opening.open(ruined)
    served = 0
    for batch in Loader(with_one, batch=30, order=Order(len(with_one), 0), stop=60, threads=1):
        assert set(batch.served.tolist()) == {7}
        served += len(batch.served)
    assert served == 60
    monkeypatch.setattr(fill, "MAX_SUBSTITUTE_SEARCH", 5)
    with pytest.raises(DataError, match="5 samples in a row are damaged"):
        list(Loader(with_one, batch=30, order=Order(len(with_one), 0), stop=30, threads=1))


def test_a_pipe_among_the_files_of_a_set_blocks_nobody(tmp_path: Path) -> None:
    pack = packed_digits(tmp_path) / "train"
    description = opening.open(pack).description
    shard = pack / description.shards[0].name
    size = shard.stat().st_size
    shard.unlink()
    os.mkfifo(shard)
    for work in (lambda: opening.open(pack), lambda: opening.open(tmp_path / "pipe.tar")):
        if not (tmp_path / "pipe.tar").exists():
            os.mkfifo(tmp_path / "pipe.tar")
        seen: list[BaseException] = []

        def run(work: Callable[[], object] = work, seen: list[BaseException] = seen) -> None:
            try:
                work()
            except (HeadwayError, OSError) as error:
                seen.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert len(seen) == 1, size
        assert isinstance(seen[0], HeadwayError), repr(seen[0])


CLAIM = 10**15


@contextmanager
def liar(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def claims(total: object, length: int = 1, body: bytes = b"x") -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        start = handler.headers["Range"].removeprefix("bytes=").partition("-")[0]
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{start}/{total}")
        handler.send_header("Content-Length", str(length))
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return answer


def test_a_server_that_claims_a_petabyte_is_not_believed() -> None:
    with liar(claims(CLAIM, CLAIM)) as uri:
        tracemalloc.start()
        begun = time.monotonic()
        for ask in (lambda: opening.open(uri), lambda: RemoteFolder(uri).read("a", 0, CLAIM)):
            with pytest.raises(DataError, match=f"{CLAIM:,} bytes must be read, and"):
                ask()
        with pytest.raises(OSError, match="should have at most 100"):
            CheckpointUrl(f"{uri}/step-00000001").read("manifest.json", 100)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 64 << 20
        assert time.monotonic() - begun < 60


def test_a_size_of_many_digits_is_a_sentence() -> None:
    for total in ("9" * 5000, "9" * 19):
        with liar(claims(total)) as uri, pytest.raises(DataError, match=f"a size of {len(total)} digits"):
            RemoteFolder(uri).read_version("a")


def test_a_redirection_with_an_endless_body_is_not_read() -> None:
    sent = [0]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", handler.path)
        handler.send_header("Content-Length", str(CLAIM))
        handler.end_headers()
        handler.close_connection = True
        try:
            while sent[0] < 1 << 30:
                sent[0] += handler.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    with liar(answer) as uri, pytest.raises(DataError, match="redirects in a circle"):
        RemoteFolder(uri, timeout_s=30).read_version("a")
    assert sent[0] < 256 << 20
