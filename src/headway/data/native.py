"""Calls into the native core (native/headway.h): the only file of this room that uses ctypes.

If the library cannot be loaded (see headway.core.native), `is_available()` is False, the log states the cost once, and
every other function here raises UsageError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core import native
from headway.core.errors import DataError, UsageError
from headway.data.decode_request import DecodeRequest, GatherRequest

# Largest image that is decoded: twice Pillow's MAX_IMAGE_PIXELS, above which Pillow refuses an image too.
MAX_PIXELS = 178_956_970
# Most scans of a progressive JPEG. Encoders write about 10, and each costs a pass over the whole image.
MAX_SCANS = 100

Bytes = NDArray[np.uint8]


# The four structures mirror those of headway.h, field by field.
@final
class NativeStats(ctypes.Structure):
    """Sums over a batch. Times are thread time in ns: with two threads, up to twice the wall time."""

    _fields_ = [
        ("ns_check", c_uint64),
        ("ns_decode", c_uint64),
        ("ns_resample", c_uint64),
        ("bytes", c_uint64),
        ("bytes_used", c_uint64),
        ("pixels", c_uint64),
        ("direct", c_uint64),
    ]


@final
class _Spec(ctypes.Structure):
    _fields_ = [
        (name, c_uint32) for name in ("size", "height", "width", "channels", "scaled", "max_pixels", "max_scans")
    ]


@final
class _Items(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("address", "length", "crc", "check", "kind", "shape", "box", "flip")]


@final
class _Info(ctypes.Structure):
    _fields_ = [
        (name, c_uint32)
        for name in (
            "width", "height", "components", "progressive", "restart", "mcu_width", "mcu_height", "orientation"
        )
    ]  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class JpegInfo:
    """Facts from the header of a JPEG.

    Attributes:
        components: 1, 3 or 4.
        restart: MCUs in a restart interval; 0: no restart markers.
        mcu_width, mcu_height: size of an MCU in pixels.
        orientation: EXIF orientation, 1 to 8; 1 if the file has none.
    """

    width: int
    height: int
    components: int
    progressive: bool
    restart: int
    mcu_width: int
    mcu_height: int
    orientation: int


# The result type and argument types of every exported function, as headway.h declares them. A wrong entry here
# corrupts memory instead of raising, so both files change together.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hw_features": (c_char_p, []),
    "hw_pool_create": (c_void_p, [c_int32, c_void_p, c_int32]),
    "hw_pool_destroy": (None, [c_void_p]),
    "hw_decode_batch": (
        c_int64,
        [c_void_p, c_int64, POINTER(_Items), POINTER(_Spec), c_void_p, c_int64, c_void_p, POINTER(NativeStats)],
    ),
    "hw_gather": (c_int64, [c_void_p, c_int64, *[c_void_p] * 4, *[c_uint32] * 4, *[c_void_p] * 3, c_int64, c_void_p]),
    "hw_guard": (c_int64, [c_uint64, c_uint64]),
    "hw_unguard": (None, [c_int64]),
    "hw_watch": (None, []),
    "hw_lost": (c_int32, [c_int64]),
    "hw_probe": (c_int32, [c_void_p, c_uint64, POINTER(_Info)]),
    "hw_seekable": (c_int64, [c_void_p, c_uint64, c_void_p, c_uint64, c_char_p]),
    "hw_splice": (c_int64, [c_void_p, c_uint64, c_int32 * 4, c_int32 * 4, c_void_p, c_uint64, c_char_p]),
}


_LOSS = "Pillow decodes images, which takes about six times as long, and JPEGs cannot be packed as seekable"


# Loaded at first use, once a process: `import headway` must stay fast, and the log says once if it fails.
@cache
def _load_library() -> ctypes.CDLL | None:
    return native.load_library(_SIGNATURES, loss=_LOSS)


def is_available() -> bool:
    """Returns True if the native core can be used here. If it cannot, the first call says so in the log."""
    return _load_library() is not None


def _require_library() -> ctypes.CDLL:
    library = _load_library()
    if library is None:
        raise UsageError("the native core is not available", fix=f"Leave HEADWAY_NATIVE unset, and {native.FIX}.")
    return library


def describe_features() -> str:
    """Names the instruction set in use and the version of libjpeg-turbo: `avx2, libjpeg-turbo 2.1.5`."""
    return str(_require_library().hw_features().decode())


def guard_file(address: int, length: int) -> int:
    """Guards a file that is mapped for reading; see `headway.data.mapping`. Returns a ticket, or -1 if it cannot."""
    return int(_require_library().hw_guard(address, length))


def unguard_file(ticket: int) -> None:
    """Ends a guard. Call it before the file is unmapped."""
    _require_library().hw_unguard(ticket)


def retake_sigbus() -> None:
    """Takes SIGBUS back from a handler installed after a file was guarded, such as faulthandler's."""
    _require_library().hw_watch()


def count_lost_files(ticket: int = -1) -> int:
    """Counts the guarded files that have lost bytes which were read; with a ticket, only that file (0 or 1)."""
    library = _load_library()
    return 0 if library is None else int(library.hw_lost(ticket))


def _to_array(data: bytes | memoryview | Bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def read_jpeg_header(data: bytes | memoryview | Bytes) -> JpegInfo:
    """Reads the header of a JPEG. Raises DataError if the bytes are not a JPEG or the header is damaged."""
    # The core returns 0 if it has read the header.
    array, info = _to_array(data), _Info()
    if _require_library().hw_probe(array.ctypes.data, array.size, info):
        raise DataError("these bytes are not a JPEG, or its header is damaged")
    # The structure has the same field names; only the flag is a number there.
    values = {name: getattr(info, name) for name in JpegInfo.__slots__}
    return JpegInfo(**values | {"progressive": bool(info.progressive)})


def make_seekable(data: bytes | memoryview | Bytes) -> bytes:
    """Rewrites a JPEG without changing its pixels so that it can be cut: baseline, optimised Huffman tables, restart
    markers.

    Raises:
        DataError: the file cannot be rewritten; the message gives the reason.
    """
    array = _to_array(data)
    # Markers and other Huffman tables may make the file larger; the core asks for more room if an eighth is too little.
    return _call_with_buffer(
        array.size + array.size // 8 + 4096, _require_library().hw_seekable, array.ctypes.data, array.size
    )


def splice(data: bytes | memoryview | Bytes, region: Sequence[int]) -> tuple[bytes, tuple[int, int, int, int]]:
    """Cuts a smaller JPEG that holds the pixels of a region out of one with restart markers.

    Args:
        region: x0, y0, x1, y1 in pixels, half open.

    Returns:
        the smaller JPEG, and the region of the large one that it shows.

    Raises:
        DataError: it cannot be cut; the message gives the reason.
    """
    array, held = _to_array(data), (c_int32 * 4)()
    call = (_require_library().hw_splice, array.ctypes.data, array.size, (c_int32 * 4)(*region), held)
    small = _call_with_buffer(array.size + 4096, *call)
    return small, (held[0], held[1], held[2], held[3])


def _call_with_buffer(capacity: int, function: Any, *arguments: Any) -> bytes:
    """Calls a function of the core that writes bytes into a buffer, and returns the bytes."""
    reason = ctypes.create_string_buffer(200)
    while True:
        out = np.empty(capacity, np.uint8)
        # > 0: bytes written; 0: refused, with a reason; < 0: the buffer is too small, and this is the needed size.
        size = function(*arguments, out.ctypes.data, capacity, reason)
        if size > 0:
            return out[:size].tobytes()
        if size == 0:
            raise DataError(reason.value.decode(errors="replace"))
        capacity = -size


def _get_pointer(array: NDArray[Any] | None, dtype: type, *shape: int) -> int | None:
    """Returns the address of an array, after a check that its type, shape and layout are as the core expects."""
    # ctypes would pass any address: a wrong type or stride would be read as garbage, not refused.
    if array is None:
        return None
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} {array.shape} instead of contiguous {np.dtype(dtype)} {shape}")
    return array.ctypes.data


def _get_output_pointer(out: Bytes) -> tuple[int, int]:
    """Returns the address of uint8 [n, H, W, C], and the bytes from one image to the next."""
    if out.dtype != np.uint8 or out.ndim != 4 or not out.flags.writeable:
        raise ValueError(f"{out.dtype} of {out.ndim} dimensions instead of writeable uint8 [n, H, W, C]")
    # Gaps between images are allowed (a slice of a ring), gaps inside one are not.
    if len(out) and not out[0].flags.c_contiguous:
        raise ValueError("the images of the output are not contiguous")
    return out.ctypes.data, out.strides[0] if len(out) > 1 else int(np.prod(out.shape[1:]))


def _check_result(result: int) -> None:
    if result < 0:
        raise ValueError("an argument is beyond the native core's limits, or it cannot start its threads")


def _count_images(request: DecodeRequest | GatherRequest) -> int:
    k, room = len(request.records), len(request.out)
    if room < k:
        raise ValueError(f"room for {room} images, but {k} records")
    return k


@final
class NativePool:
    """Threads of the core. Calls from several Python threads queue; a forked child gets threads of its own.

    Args:
        threads: number of threads that work, the caller included.
        cpus: CPU numbers; started thread i is bound to the i-th. None: threads are not bound.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        # Set first: __del__ reads it even if the lines below raise.
        self._handle: int | None = None
        self._core = _require_library()
        # The core copies the CPU numbers, so the array need not outlive this call.
        numbers = np.array(cpus or (), np.int32)
        self._handle = self._core.hw_pool_create(threads, numbers.ctypes.data, len(numbers))
        if not self._handle:
            raise UsageError(f"{threads} decoding threads cannot be had", fix="Ask for fewer.")

    def decode(self, request: DecodeRequest, stats: NativeStats | None = None) -> Bytes:
        """Decodes a batch. Returns its statuses (HW_OK...), uint8 [k].

        Args:
            stats: receives the costs of the batch; None: the core reads no clock.
        """
        k, out = _count_images(request), request.out
        items = _Items(
            address=_get_pointer(request.records.address, np.uint64, k),
            length=_get_pointer(request.records.length, np.uint64, k),
            crc=_get_pointer(request.crc, np.uint32, k),
            check=_get_pointer(request.check, np.bool_, k),
            kind=_get_pointer(request.kinds, np.uint8, k),
            shape=_get_pointer(request.shapes, np.uint32, k, 3),
            box=_get_pointer(request.boxes, np.float32, k, 4),
            flip=_get_pointer(request.flips, np.bool_, k),
        )
        address, stride = _get_output_pointer(out[:k])
        height, width, channels = out.shape[1:]
        # The first field is the struct's size: the core refuses a layout of another version.
        spec = _Spec(ctypes.sizeof(_Spec), height, width, channels, request.scaled, MAX_PIXELS, MAX_SCANS)
        status = np.empty(k, np.uint8)
        _check_result(
            self._core.hw_decode_batch(self._handle, k, items, spec, address, stride, status.ctypes.data, stats)
        )
        return status

    def gather(self, request: GatherRequest) -> Bytes:
        """Copies raw images: pixel (r, c) becomes the mirrored image's pixel (r + down, c + right), reflected at the
        border. Returns the statuses, uint8 [k].
        """
        k = _count_images(request)
        status, out = np.empty(k, np.uint8), request.out
        # Drawn as int64; the core reads int16.
        shifts = None if request.shifts is None else np.ascontiguousarray(request.shifts, np.int16)
        address, stride = _get_output_pointer(out[:k])
        height, width, channels = out.shape[1:]
        _check_result(
            self._core.hw_gather(
                self._handle,
                k,
                _get_pointer(request.records.address, np.uint64, k),
                _get_pointer(request.records.length, np.uint64, k),
                _get_pointer(request.crc, np.uint32, k),
                _get_pointer(request.check, np.bool_, k),
                # HW_RAW_PLANAR or HW_RAW.
                2 if request.planar else 1,
                height,
                width,
                channels,
                _get_pointer(shifts, np.int16, k, 2),
                _get_pointer(request.flips, np.bool_, k),
                address,
                stride,
                status.ctypes.data,
            )
        )
        return status

    def close(self) -> None:
        """Ends the threads. Never call it while another call runs."""
        # Forgotten first, so that a second close does nothing.
        handle, self._handle = self._handle, None
        if handle:
            self._core.hw_pool_destroy(handle)

    def __del__(self) -> None:
        self.close()
