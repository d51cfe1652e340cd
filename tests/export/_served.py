"""Exports that need no training, servers as processes, and clients on real sockets."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import socket
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tests._support import command

from headway.export.manifest import Manifest, TargetEntry, hash_file, write_manifest

SIDE = 16
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
NAMES = tuple(COLOURS)
WAIT_S = 60.0
"""For what takes hundredths of a second; on a busy machine, longer."""


def write_export(
    folder: Path, *, names: tuple[str, ...] = NAMES, order: tuple[int, ...] = (0, 1, 2), side: int = SIDE, work: int = 0
) -> Path:
    """Writes an export whose network says which of red, green and blue an image has most of.

    Args:
        names: the classes.
        order: which channel each class looks at; another order is another network, with other answers.
        side: height and width of its pixels.
        work: multiplications of large matrices before each answer, so that it takes about so many milliseconds.
    """
    # Its import takes a third of a second.
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    folder.mkdir(parents=True)
    weights = np.zeros((3, 3), np.float32)
    weights[list(order), range(3)] = 20
    nodes = [
        helper.make_node("Cast", ["pixels"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["numbers", "axes"], ["sums"], keepdims=0),
        helper.make_node("Div", ["sums", "white"], ["means"]),
        helper.make_node("MatMul", ["means", "weights"], ["logits_0"]),
    ]
    constants = {"axes": np.array([1, 2]), "white": np.float32(255), "weights": weights}
    for step in range(work):
        # The product is zero, which no optimiser knows: the means come from the input.
        constants |= {"wide": np.zeros((3, 1000), np.float32), "square": np.zeros((1000, 1000), np.float32)}
        constants["narrow"] = np.zeros((1000, 3), np.float32)
        chain = [("means", "wide", "a"), ("a", "square", "b"), ("b", "square", "c"), ("c", "narrow", "d")]
        for left, right, out in chain:
            left = left if left == "means" else f"{left}{step}"
            nodes.append(helper.make_node("MatMul", [left, right], [f"{out}{step}"]))
        nodes.append(helper.make_node("Add", [f"logits_{step}", f"d{step}"], [f"logits_{step + 1}"]))
    nodes.append(helper.make_node("Softmax", [f"logits_{work}"], ["outputs"], axis=1))
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["batch", side, side, 3])],
        [helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    write_manifest(folder, build_manifest(folder, names, side))
    return folder


def build_manifest(folder: Path, names: tuple[str, ...], side: int, *, rejected: bool = False) -> Manifest:
    return Manifest(
        task="class",
        activation="softmax",
        names=names,
        outputs=3,
        threshold=None,
        size=(side, side),
        channels=3,
        crop_share=1.0,
        scaled=False,
        decoder="native",
        files={"model.onnx": hash_file(folder / "model.onnx")},
        targets={"onnx": TargetEntry(file="model.onnx", precision="fp32", rejected=rejected)},
        run={"folder": "runs/colours"},
        data={},
        versions={},
        processor={},
    )


def encode(colour: str = "red", form: str = "JPEG", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """An image file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(file, form, **options)
    return file.getvalue()


def build_chunk(name: bytes, data: bytes = b"") -> bytes:
    """A chunk of a PNG file."""
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


def disguise(png: bytes, width: int = 10, height: int = 10) -> list[bytes]:
    """A PNG file whose first chunk claims another size: a private chunk, and an IHDR that the true one overwrites."""
    start, header, rest = png[:8], png[16:29], png[8:]
    claim = width.to_bytes(4) + height.to_bytes(4)
    return [start + build_chunk(b"prVt", claim) + rest, start + build_chunk(b"IHDR", claim + header[8:]) + rest]


def fill(*colours: str, side: int = SIDE) -> NDArray[np.uint8]:
    """Pixels [n, side, side, 3] of images of one colour each."""
    return np.stack([np.broadcast_to(np.array(COLOURS[c], np.uint8), (side, side, 3)) for c in colours])


@final
@dataclass
class Reply:
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def labels(self) -> list[str]:
        assert self.status == 200, self.body
        return [row["label"] for row in self.json()["predictions"]]

    def problem(self, status: int) -> dict[str, Any]:
        """The refusal, which is a sentence with a fix."""
        assert self.status == status, self.body
        assert self.headers["content-type"] == "application/problem+json"
        tree: dict[str, Any] = self.json()
        assert tree["status"] == status
        assert tree["what"]
        assert tree["fix"].endswith("."), tree
        return tree


@final
@dataclass
class Served:
    """A server that is running."""

    process: subprocess.Popen[str]
    folder: Path
    started: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        found = re.fullmatch(r"http://(.+):(\d+)", self.started["url"])
        assert found is not None
        return found[1], int(found[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=WAIT_S)

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """One request on a connection of its own."""
        with contextlib.closing(self.connect()) as connection:
            return send(connection, method, path, body, {**self.headers, **(headers or {})})

    def predict(self, body: bytes, content_type: str = "image/jpeg", **headers: str) -> Reply:
        """`headers`: with underscores in place of hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", "/predict", body, {"Content-Type": content_type, **named})

    def read_metrics(self) -> dict[str, float]:
        page = self.ask("GET", "/metrics")
        assert page.status == 200
        return parse_metrics(page.body.decode())

    def stop(self) -> tuple[int, str]:
        """SIGTERM; returns exit status and what it said on standard error."""
        self.process.terminate()
        _, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, err


def send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    connection.request(method, path, body, dict(headers or {}))
    answer = connection.getresponse()
    return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


@contextlib.contextmanager
def serving(folder: Path, *options: str | Path, **headers: str) -> Iterator[Served]:
    """A server of an export on a free port, killed at the end of the block if it still runs."""
    arguments = command("serve", folder, "--bind", "127.0.0.1:0", "--threads", "1", "--json", *options)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        yield Served(process, folder, json.loads(line), headers)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def receive(client: socket.socket) -> bytes:
    """One whole answer, by its length; everything until the end if it has none."""
    data = b""
    while piece := client.recv(4096):
        data += piece
        head, mark, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if mark and length is not None and len(body) >= int(length[1]):
            assert len(body) == int(length[1])
            break
    return data


LINE = re.compile(r'(headway_serve_[a-z_]+)(\{[a-z]+="([^"]*)"\})? (\S+)')


def parse_metrics(page: str) -> dict[str, float]:
    """By the grammar of the text format: each family has one help and one type, and each series occurs once."""
    found: dict[str, float] = {}
    families = list[str]()
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# "):
            families += [line.split()[2]] if line.startswith("# TYPE") else []
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert match[1].startswith(families[-1])
        key = match[1] + (f":{match[3]}" if match[3] else "")
        assert key not in found
        found[key] = float(match[4])
    assert len(families) == len(set(families))
    return found


def build_form(*files: tuple[str, bytes], boundary: str = "frontier") -> tuple[bytes, str]:
    """A multipart body of (name, bytes), and its Content-Type."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
        f"Content-Type: image/jpeg\r\n\r\n".encode()
        + data
        + b"\r\n"
        for name, data in files
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f'multipart/form-data; boundary="{boundary}"'
