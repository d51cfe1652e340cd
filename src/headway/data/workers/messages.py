"""Messages from a worker process: any objects, whose large tensors and arrays lie in shared memory.

The file descriptors of that memory travel with the message, through the same socket. (torch.multiprocessing would make
the receiver fetch each one from a thread of the sender, with an authentication: 0.3 ms each, and none is left after the
sender was killed.)
"""

from __future__ import annotations

import io
import os
import pickle
import socket
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, final

import numpy as np
import torch

from headway.data.workers.user_failure import UserFailure

# Smaller tensors and arrays are copied into the message, which is faster than to map memory.
SHARED_BYTES = 32_768

# The kernel takes at most 253 descriptors at a time.
DESCRIPTORS_AT_A_TIME = 250


@final
@dataclass(frozen=True, slots=True)
class Message:
    """A received message. Load it, or drop it."""

    payload: bytes
    descriptors: list[int]

    def load(self) -> Any:
        """Returns the object that was sent. Each of its large tensors maps its memory."""
        try:
            return _Unpickler(self.payload, self.descriptors).load()
        finally:
            self.drop()

    def drop(self) -> None:
        """Frees the memory of a message that is not wanted."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def send_message(connection: Connection, result: Any) -> None:
    """Sends an object; a UserFailure instead of one that cannot be pickled.

    Raises:
        OSError: the receiver is gone.
    """
    pickler = _Pickler()
    try:
        pickler.dump(result)
    except Exception as error:
        pickler = _Pickler()
        pickler.dump(UserFailure.describe("sending a batch from its worker process", error))
    connection.send_bytes(pickler.get_payload())
    if pickler.shared:
        descriptors = [descriptor for descriptor, _ in pickler.shared]
        # A duplicate, because closing the socket object must leave the connection open.
        with closing(socket.socket(fileno=os.dup(connection.fileno()))) as pipe:
            for low in range(0, len(descriptors), DESCRIPTORS_AT_A_TIME):
                # Descriptors travel only beside at least one byte.
                socket.send_fds(pipe, [b"d"], descriptors[low : low + DESCRIPTORS_AT_A_TIME])


def receive_message(connection: Connection) -> Message:
    """Receives what `send_message` sent. Raises EOFError or OSError if the sender is gone."""
    payload = connection.recv_bytes()
    # The first four bytes say how many descriptors follow.
    message = Message(payload[4:], [])
    left = int.from_bytes(payload[:4], "little")
    if left:
        with closing(socket.socket(fileno=os.dup(connection.fileno()))) as pipe:
            while left:
                data, found, _, _ = socket.recv_fds(pipe, 1, min(left, DESCRIPTORS_AT_A_TIME))
                message.descriptors.extend(found)
                # The sender ended between the bytes and the descriptors.
                if not data or not found:
                    message.drop()
                    raise EOFError
                left -= len(found)
    return message


@final
class _Pickler(ForkingPickler):
    """Attributes:
    shared: (descriptor, storage that owns it) of each large tensor.
    """

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self.shared: list[tuple[int, torch.UntypedStorage]] = []
        super().__init__(self._buffer, pickle.HIGHEST_PROTOCOL)

    def get_payload(self) -> bytes:
        return len(self.shared).to_bytes(4, "little") + self._buffer.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            if obj.nbytes < SHARED_BYTES:
                data = obj.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if obj.numel() else b""
                return "small", data, obj.dtype, tuple(obj.shape)
            number, size = self._share(obj.untyped_storage())
            return "tensor", number, size, obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset()
        if type(obj) is np.ndarray and obj.nbytes >= SHARED_BYTES and not obj.dtype.hasobject:
            flat = torch.from_numpy(np.ascontiguousarray(obj).reshape(-1).view(np.uint8))
            return "array", *self._share(flat.untyped_storage()), obj.dtype, obj.shape
        return None

    def _share(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        # Copied into shared memory, unless it lies there already, as the tensors of `default_collate` do in a worker.
        descriptor, size = storage._share_fd_cpu_()
        self.shared.append((descriptor, storage))
        return len(self.shared) - 1, size


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: bytes, descriptors: list[int]) -> None:
        super().__init__(io.BytesIO(payload))
        self._descriptors = descriptors

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "small":
            # Torch warns of memory that cannot be written, such as bytes.
            data, dtype, shape = rest
            return (
                torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
            )
        number, size, dtype, shape, *more = rest
        # Torch's stubs lack it, as they lack most of its storages.
        storage = torch.UntypedStorage._new_shared_fd_cpu(self._descriptors[number], size)  # type: ignore[attr-defined]
        if kind == "tensor":
            strides, offset = more
            return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
        return flat.numpy()[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
