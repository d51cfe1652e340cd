"""Calls into the native core (native/headway.h): the only file of this room that uses ctypes.

If the library cannot be loaded (see headway.core.native), `is_available()` is False, the log states the cost once, and
every other function here raises UsageError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from headway.core import native
from headway.core.errors import DataError, UsageError
from headway.data.decode_request import DecodeRequest, GatherRequest

MAX_PIXELS = 178_956_970
"""Largest image that is decoded: twice Pillow's MAX_IMAGE_PIXELS, above which Pillow refuses an image too."""
MAX_SCANS = 100
"""Most scans of a progressive JPEG. Encoders write about 10, and each costs a pass over the whole image."""

Bytes = NDArray[np.uint8]


# The next four structures mirror those of headway.h, field by field.
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
        width, height: size in pixels.
        components: 1, 3 or 4.
        progressive: True for a progressive JPEG, False for a baseline one.
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
    "hw_seekable": (c_int64, [c_void_p, c_uint64, POINTER(c_uint8), c_void_p, c_uint64, c_char_p]),
    "hw_splice": (c_int64, [c_void_p, c_uint64, c_int32 * 4, c_int32 * 4, c_void_p, c_uint64, c_char_p]),
}


_FALLBACK_COST = "Pillow decodes images, which takes about six times as long, and JPEGs cannot be packed as seekable"


# Loaded at first use, once a process: `import headway` must stay fast, and the log says once if it fails.
@cache
def _load_library() -> ctypes.CDLL | None:
    return native.load_library(_SIGNATURES, loss=_FALLBACK_COST)


def is_available() -> bool:
    """Returns True if the native core can be used here. If it cannot, the first call says so in the log."""
    return _load_library() is not None


def _require_library() -> ctypes.CDLL:
    library = _load_library()
    if library is None:
        raise UsageError("the native core is not available", fix=f"Leave HEADWAY_NATIVE unset, and {native.FIX}.")
    return library


def describe_features() -> str:
    """Returns the instruction set in use and the version of libjpeg-turbo, such as `avx2, libjpeg-turbo 2.1.5`."""
    return str(_require_library().hw_features().decode())


def guard_file(address: int, length: int) -> int:
    """Guards a mapped file against SIGBUS; see `headway.data.mapping`. Returns a ticket, or -1 if the table is full."""
    return int(_require_library().hw_guard(address, length))


def unguard_file(ticket: int) -> None:
    """Ends a guard. Call it before the file is unmapped."""
    _require_library().hw_unguard(ticket)


def retake_sigbus() -> None:
    """Installs the SIGBUS handler again, in place of one installed after a file was guarded, such as faulthandler's."""
    _require_library().hw_watch()


def count_lost_files(ticket: int = -1) -> int:
    """Returns the number of guarded files of which missing bytes were read; with a ticket, only that file counts."""
    library = _load_library()
    return 0 if library is None else int(library.hw_lost(ticket))


def _to_array(data: bytes | memoryview | Bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def read_jpeg_header(data: bytes | memoryview | Bytes) -> JpegInfo:
    """Reads the header of a JPEG. Raises DataError if the bytes are not a JPEG or the header is damaged."""
    # The core returns 0 if it has read the header.
    array = _to_array(data)
    info = _Info()
    if _require_library().hw_probe(array.ctypes.data, array.size, info):
        raise DataError("these bytes are not a JPEG, or its header is damaged")
    # The structure has the same field names; only the flag is a number there.
    values = {name: getattr(info, name) for name in JpegInfo.__slots__}
    return JpegInfo(**values | {"progressive": bool(info.progressive)})


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Returns (width, height) from the header of a JPEG, or None if the core cannot read it; see `read_jpeg_header`."""
    info = _Info()
    if _require_library().hw_probe(data, len(data), info):
        return None
    return info.width, info.height


@final
class SeekableJpeg(NamedTuple):
    """A JPEG made seekable."""

    data: bytes
    is_sound: bool
    """True for a baseline file in perfect order: all decoders decode it, without a warning."""


def make_seekable(data: bytes | memoryview | Bytes) -> SeekableJpeg:
    """Rewrites a JPEG so that parts of it can be decoded: baseline, optimised Huffman tables, restart markers.

    The pixels do not change.

    Raises:
        DataError: the file cannot be rewritten; the message gives the reason.
    """
    array = _to_array(data)
    is_sound = c_uint8()
    # Markers and other Huffman tables may make the file larger; the core asks for more room if an eighth is too little.
    rewritten = _call_with_buffer(
        array.size + array.size // 8 + 4096, _require_library().hw_seekable, array.ctypes.data, array.size, is_sound
    )
    return SeekableJpeg(rewritten, bool(is_sound.value))


def splice(data: bytes | memoryview | Bytes, region: Sequence[int]) -> tuple[bytes, tuple[int, int, int, int]]:
    """Cuts a region out of a JPEG with restart markers, without decoding it.

    Args:
        region: x0, y0, x1, y1 in pixels, half open.

    Returns:
        a smaller JPEG, and the region of the large one that it shows, which contains `region`.

    Raises:
        DataError: the region cannot be cut out; the message gives the reason.
    """
    array = _to_array(data)
    shown_region = (c_int32 * 4)()
    arguments = (_require_library().hw_splice, array.ctypes.data, array.size, (c_int32 * 4)(*region), shown_region)
    smaller_jpeg = _call_with_buffer(array.size + 4096, *arguments)
    return smaller_jpeg, (shown_region[0], shown_region[1], shown_region[2], shown_region[3])


def _call_with_buffer(capacity: int, function: Any, *arguments: Any) -> bytes:
    """Calls a function of the core that writes bytes into a buffer; returns the bytes. Raises DataError if it fails."""
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


def _get_checked_pointer(array: NDArray[Any] | None, dtype: type, *shape: int) -> int | None:
    """Returns the address of an array, or None for None.

    Raises ValueError if its dtype, shape or memory layout is not as the core expects.
    """
    # ctypes would pass any address: a wrong type or stride would be read as garbage, not refused.
    if array is None:
        return None
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} {array.shape} instead of contiguous {np.dtype(dtype)} {shape}")
    return array.ctypes.data


def _pack_flips(request: DecodeRequest | GatherRequest, num_images: int) -> Bytes | None:
    """Returns how each image is mirrored, as the core reads it: 1 left to right, 2 top to bottom; None: no image is.

    Raises ValueError if a mask is not bool [num_images].
    """
    flips, vertical_flips = request.flips, request.vertical_flips
    for mask in (flips, vertical_flips):
        _get_checked_pointer(mask, np.bool_, num_images)
    # The usual flip, left to right, needs no new array: True is the byte 1.
    if vertical_flips is None:
        return None if flips is None else flips.view(np.uint8)
    vertical_bits: Bytes = np.left_shift(vertical_flips.view(np.uint8), 1)
    return vertical_bits if flips is None else vertical_bits | flips.view(np.uint8)


def _get_output_pointer(out: Bytes) -> tuple[int, int]:
    """Returns the address of uint8 [n, H, W, C], and the bytes from one image to the next.

    Raises ValueError for another type or number of dimensions, or for images that are not contiguous.
    """
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
    num_records, num_outputs = len(request.records), len(request.out)
    if num_outputs < num_records:
        raise ValueError(f"room for {num_outputs} images, but {num_records} records")
    return num_records


@final
class NativePool:
    """Thread pool of the core. Calls from several Python threads queue; a forked child starts its own threads.

    Args:
        threads: number of threads that decode, the caller included.
        cpus: CPU numbers; started thread i is bound to the i-th. None: threads are not bound.

    Raises:
        UsageError: the native core is not available, or cannot start its threads.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        # Set first: __del__ reads it even if the lines below raise.
        self._handle: int | None = None
        self._core = _require_library()
        # The core copies the CPU numbers, so the array need not outlive this call.
        cpu_numbers = np.array(cpus or (), np.int32)
        self._handle = self._core.hw_pool_create(threads, cpu_numbers.ctypes.data, len(cpu_numbers))
        if not self._handle:
            raise UsageError(f"{threads} decoding threads cannot be had", fix="Ask for fewer.")

    def decode(self, request: DecodeRequest, stats: NativeStats | None = None) -> Bytes:
        """Decodes a batch into `request.out`.

        Args:
            stats: the costs of the batch are added to it; None: the core reads no clock.

        Returns:
            the status of each record (HW_OK...), uint8 [k].
        """
        num_images = _count_images(request)
        out = request.out
        flip_bits = _pack_flips(request, num_images)
        items = _Items(
            address=_get_checked_pointer(request.records.address, np.uint64, num_images),
            length=_get_checked_pointer(request.records.length, np.uint64, num_images),
            crc=_get_checked_pointer(request.crc, np.uint32, num_images),
            check=_get_checked_pointer(request.check, np.bool_, num_images),
            kind=_get_checked_pointer(request.kinds, np.uint8, num_images),
            shape=_get_checked_pointer(request.shapes, np.uint32, num_images, 3),
            box=_get_checked_pointer(request.boxes, np.float32, num_images, 4),
            flip=_get_checked_pointer(flip_bits, np.uint8, num_images),
        )
        address, stride = _get_output_pointer(out[:num_images])
        height, width, channels = out.shape[1:]
        # The first field is the struct's size: the core refuses a layout of another version.
        spec = _Spec(ctypes.sizeof(_Spec), height, width, channels, request.scaled, MAX_PIXELS, MAX_SCANS)
        status = np.empty(num_images, np.uint8)
        _check_result(
            self._core.hw_decode_batch(
                self._handle, num_images, items, spec, address, stride, status.ctypes.data, stats
            )
        )
        return status

    def gather(self, request: GatherRequest) -> Bytes:
        """Copies raw images into `request.out`; returns the status of each record, uint8 [k].

        Pixel (r, c) is the mirrored image's pixel (r + down, c + right), reflected at the border.
        """
        num_images = _count_images(request)
        status = np.empty(num_images, np.uint8)
        out = request.out
        # Drawn as int64; the core reads int16.
        shifts = None if request.shifts is None else np.ascontiguousarray(request.shifts, np.int16)
        flip_bits = _pack_flips(request, num_images)
        address, stride = _get_output_pointer(out[:num_images])
        height, width, channels = out.shape[1:]
        _check_result(
            self._core.hw_gather(
                self._handle,
                num_images,
                _get_checked_pointer(request.records.address, np.uint64, num_images),
                _get_checked_pointer(request.records.length, np.uint64, num_images),
                _get_checked_pointer(request.crc, np.uint32, num_images),
                _get_checked_pointer(request.check, np.bool_, num_images),
                # HW_RAW_PLANAR or HW_RAW.
                2 if request.planar else 1,
                height,
                width,
                channels,
                _get_checked_pointer(shifts, np.int16, num_images, 2),
                _get_checked_pointer(flip_bits, np.uint8, num_images),
                address,
                stride,
                status.ctypes.data,
            )
        )
        return status

    def close(self) -> None:
        """Ends the threads. Never call it while another call runs."""
        # Reset first, so that another `close` does nothing.
        handle, self._handle = self._handle, None
        if handle:
            self._core.hw_pool_destroy(handle)

    def __del__(self) -> None:
        self.close()
