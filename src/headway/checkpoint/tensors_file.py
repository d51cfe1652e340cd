"""Writes safetensors files in one pass, hashing tensor by tensor.

The safetensors package builds all bytes in memory first and holds the GIL for half of that time (0.12 s of 0.23 s for
268 MB), which would stop a training loop. The files here are identical, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, final

import numpy as np
import torch

from headway.core.errors import CheckpointError

# Names of the dtypes in the format. A file has the last of them first, so that every tensor is aligned.
_DTYPES = (
    (torch.bool, "BOOL"),
    (torch.uint8, "U8"),
    (torch.int8, "I8"),
    (torch.float8_e5m2, "F8_E5M2"),
    (torch.float8_e4m3fn, "F8_E4M3"),
    (torch.int16, "I16"),
    (torch.uint16, "U16"),
    (torch.float16, "F16"),
    (torch.bfloat16, "BF16"),
    (torch.int32, "I32"),
    (torch.uint32, "U32"),
    (torch.float32, "F32"),
    (torch.complex64, "C64"),
    (torch.float64, "F64"),
    (torch.int64, "I64"),
    (torch.uint64, "U64"),
)
_DTYPE_NAMES = dict(_DTYPES)
_SORT_KEYS = {dtype: -index for index, (dtype, _) in enumerate(_DTYPES)}
# numpy has no bfloat16 and no float8: tensors are viewed as integers of the same width.
_INTEGER_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_BYTES = 4 << 20


def get_dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in the format. Raises CheckpointError if it has none."""
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError(f"safetensors files cannot hold {dtype}", fix="Convert it before it is saved.")
    return _DTYPE_NAMES[dtype]


def get_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a name in the format. Raises CheckpointError if there is none."""
    for dtype, known in _DTYPES:
        if known == name:
            return dtype
    raise CheckpointError(f"there is no type {name!r} of tensors")


@final
class TensorsFile:
    """A safetensors file to be written.

    Args:
        tensors: tensors by name, strided, on any device. They are read when the file is written.

    Attributes:
        length: length of the file in bytes.
        entries: name, dtype and shape of each tensor, in file order.

    Raises:
        CheckpointError: the format cannot hold a tensor's dtype, or its layout is not strided.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPE_NAMES or tensor.layout != torch.strided:
                what = f"{name} is of {tensor.dtype}, {tensor.layout}, which safetensors files cannot hold"
                raise CheckpointError(what, fix="Convert it before it is saved.")
        # Sorted, so that every rank computes the same layout, and equal states give equal files.
        names = sorted(tensors, key=lambda name: (_SORT_KEYS[tensors[name].dtype], name))
        self._tensors = [tensors[name] for name in names]
        self.entries = [(name, _DTYPE_NAMES[tensors[name].dtype], list(tensors[name].shape)) for name in names]
        header, end = {}, 0
        for (name, dtype, shape), tensor in zip(self.entries, self._tensors, strict=True):
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        # The data begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.length = len(self._header) + end

    def write(self, file: BinaryIO) -> str:
        """Writes the file and returns the sha256 of its bytes. The GIL is free for nearly all of the time."""
        digest = hashlib.sha256(self._header)
        file.write(self._header)
        for chunk in self._iterate_chunks():
            digest.update(chunk)
            file.write(chunk)
        return digest.hexdigest()

    def _iterate_chunks(self) -> Iterator[memoryview]:
        for tensor in self._tensors:
            # numpy makes the copy contiguous: torch would start threads beside those that train.
            integers: Any = tensor.detach().resolve_conj().cpu().view(_INTEGER_BY_WIDTH[tensor.element_size()])
            data = np.ascontiguousarray(integers.numpy()).reshape(-1).data.cast("B")
            for start in range(0, len(data), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES]
