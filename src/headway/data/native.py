"""The native core (native/headway.h) as decoding sees it: the only file of this room that knows ctypes.

Where the library cannot be used (headway.core.native), `available()` is False, everything else here raises UsageError,
and the log says once what that costs.
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
from headway.data.records import Records

MAX_PIXELS = 178_956_970
"""Of an image: twice Pillow's MAX_IMAGE_PIXELS, above which Pillow refuses one too."""
MAX_SCANS = 100
"""Of a progressive JPEG; encoders write about 10, and each costs a pass over the whole image."""

Bytes = NDArray[np.uint8]


@final
class Stats(ctypes.Structure):
    """Sums over a batch. Times are thread time in ns: of two threads, up to twice the wall time."""

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
class Info:
    """What the header of a JPEG says.

    Attributes:
        components: 1, 3 or 4.
        restart: MCUs in a restart interval; 0: no restart markers.
        mcu_width, mcu_height: in pixels.
        orientation: of EXIF, 1 to 8; 1 where there is none.
    """

    width: int
    height: int
    components: int
    progressive: bool
    restart: int
    mcu_width: int
    mcu_height: int
    orientation: int


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hw_features": (c_char_p, []),
    "hw_crc32c": (c_uint32, [c_void_p, c_uint64]),
    "hw_pool_create": (c_void_p, [c_int32, c_void_p, c_int32]),
    "hw_pool_destroy": (None, [c_void_p]),
    "hw_decode_batch": (
        c_int64,
        [c_void_p, c_int64, POINTER(_Items), POINTER(_Spec), c_void_p, c_int64, c_void_p, POINTER(Stats)],
    ),
    "hw_gather": (
        c_int64,
        [c_void_p, c_int64, *[c_void_p] * 4, *[c_uint32] * 4, *[c_void_p] * 3, c_int64, c_void_p],
    ),
    "hw_guard": (c_int64, [c_uint64, c_uint64]),
    "hw_unguard": (None, [c_int64]),
    "hw_watch": (None, []),
    "hw_lost": (c_int32, [c_int64]),
    "hw_probe": (c_int32, [c_void_p, c_uint64, POINTER(_Info)]),
    "hw_seekable": (c_int64, [c_void_p, c_uint64, c_void_p, c_uint64, c_char_p]),
    "hw_splice": (c_int64, [c_void_p, c_uint64, c_int32 * 4, c_int32 * 4, c_void_p, c_uint64, c_char_p]),
}


_LOSS = "Pillow decodes images, which takes about six times as long, and JPEGs cannot be packed as seekable"


@cache
def _library() -> ctypes.CDLL | None:
    """Loads it at first use."""
    return native.load_library(_SIGNATURES, loss=_LOSS)


def available() -> bool:
    """Whether the native core can be used here. The first call says so in the log where it cannot."""
    return _library() is not None


def _core() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise UsageError("The native core is not there", fix=f"Leave HEADWAY_NATIVE unset, and {native.FIX}.")
    return library


def features() -> str:
    """The instruction set in use and the version of libjpeg-turbo, such as `avx2, libjpeg-turbo 2.1.5`."""
    return str(_core().hw_features().decode())


def guard(address: int, length: int) -> int:
    """Guards a file that is mapped for reading; see `headway.data.mapping`. Returns a ticket, -1 where it cannot be."""
    return int(_core().hw_guard(address, length))


def unguard(ticket: int) -> None:
    """Ends a guard, before the file is unmapped."""
    _core().hw_unguard(ticket)


def watch() -> None:
    """Takes SIGBUS back from a handler that was installed since a file was guarded, such as faulthandler's."""
    _core().hw_watch()


def lost(ticket: int = -1) -> int:
    """Whether a guarded file has lost bytes that were read; without a ticket, how many files have."""
    library = _library()
    return 0 if library is None else int(library.hw_lost(ticket))


def _bytes(data: bytes | memoryview | Bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def crc32c(data: bytes | memoryview | Bytes) -> int:
    """The Castagnoli checksum of some bytes."""
    array = _bytes(data)
    return int(_core().hw_crc32c(array.ctypes.data, array.size))


def probe(data: bytes | memoryview | Bytes) -> Info:
    """What the header of a JPEG says. Raises DataError where the bytes are none, or its header is damaged."""
    array, info = _bytes(data), _Info()
    if _core().hw_probe(array.ctypes.data, array.size, info):
        raise DataError("No JPEG, or one with a damaged header")
    values = {name: getattr(info, name) for name in Info.__slots__}
    return Info(**values | {"progressive": bool(info.progressive)})


def seekable(data: bytes | memoryview | Bytes) -> bytes:
    """A JPEG with the same pixels that can be cut: baseline, with optimised Huffman tables and restart markers.

    Raises DataError with the reason where that cannot be.
    """
    array = _bytes(data)
    return _written(array.size + array.size // 8 + 4096, _core().hw_seekable, array.ctypes.data, array.size)


def splice(data: bytes | memoryview | Bytes, region: Sequence[int]) -> tuple[bytes, tuple[int, int, int, int]]:
    """Cuts out of a JPEG with restart markers a smaller one that holds the pixels of a region.

    Args:
        region: x0, y0, x1, y1 in pixels, half open.

    Returns:
        The small JPEG, and the region of the large one that it shows.

    Raises DataError with the reason where that cannot be.
    """
    array, held = _bytes(data), (c_int32 * 4)()
    call = (_core().hw_splice, array.ctypes.data, array.size, (c_int32 * 4)(*region), held)
    small = _written(array.size + 4096, *call)
    return small, (held[0], held[1], held[2], held[3])


def _written(capacity: int, function: Any, *arguments: Any) -> bytes:
    """What a function of the core writes into memory of ours."""
    reason = ctypes.create_string_buffer(200)
    while True:
        out = np.empty(capacity, np.uint8)
        size = function(*arguments, out.ctypes.data, capacity, reason)
        if size > 0:
            return out[:size].tobytes()
        if size == 0:
            raise DataError(reason.value.decode(errors="replace"))
        capacity = -size


def _pointer(array: NDArray[Any] | None, dtype: type, *shape: int) -> int | None:
    """The address of an array that is as the core expects it."""
    if array is None:
        return None
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} {array.shape} instead of contiguous {np.dtype(dtype)} {shape}")
    return array.ctypes.data


def _output(out: Bytes) -> tuple[int, int]:
    """The address of uint8 [n, H, W, C], and the bytes from one image to the next."""
    if out.dtype != np.uint8 or out.ndim != 4 or not out.flags.writeable:
        raise ValueError(f"{out.dtype} of {out.ndim} dimensions instead of writeable uint8 [n, H, W, C]")
    if len(out) and not out[0].flags.c_contiguous:
        raise ValueError("the images of the output are not contiguous")
    return out.ctypes.data, out.strides[0] if len(out) > 1 else int(np.prod(out.shape[1:]))


def _done(result: int) -> None:
    if result < 0:
        raise ValueError("an argument is beyond what the native core can do, or it cannot have its threads")


@final
class Pool:
    """Threads of the core. Calls from several threads wait for each other; a forked child has threads of its own.

    Args:
        threads: how many work, the caller among them.
        cpus: started thread i runs on the i-th of them only; None: wherever there is room.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        self._handle: int | None = None
        self._core = _core()
        numbers = np.array(cpus or (), np.int32)
        self._handle = self._core.hw_pool_create(threads, numbers.ctypes.data, len(numbers))
        if not self._handle:
            raise UsageError(f"{threads} decoding threads cannot be had", fix="Ask for fewer.")

    def decode(
        self,
        records: Records,
        boxes: NDArray[np.float32],
        out: Bytes,
        *,
        flips: NDArray[np.bool_] | None = None,
        kinds: Bytes | None = None,
        shapes: NDArray[np.uint32] | None = None,
        crc: NDArray[np.uint32] | None = None,
        check: NDArray[np.bool_] | None = None,
        scaled: bool = False,
        stats: Stats | None = None,
    ) -> Bytes:
        """Decodes k images; the arguments of headway.data.decode. Returns their statuses (HW_OK...), uint8 [k]."""
        k = len(records)
        items = _Items(
            address=_pointer(records.address, np.uint64, k),
            length=_pointer(records.length, np.uint64, k),
            crc=_pointer(crc, np.uint32, k),
            check=_pointer(check, np.bool_, k),
            kind=_pointer(kinds, np.uint8, k),
            shape=_pointer(shapes, np.uint32, k, 3),
            box=_pointer(boxes, np.float32, k, 4),
            flip=_pointer(flips, np.bool_, k),
        )
        height, width, channels = out.shape[1:]
        spec = _Spec(ctypes.sizeof(_Spec), height, width, channels, scaled, MAX_PIXELS, MAX_SCANS)
        status = np.empty(k, np.uint8)
        address, stride = _output(out[:k])
        if len(out) < k:
            raise ValueError(f"room for {len(out)} images, but {k} records")
        where = _pointer(status, np.uint8, k)
        _done(self._core.hw_decode_batch(self._handle, k, items, spec, address, stride, where, stats))
        return status

    def gather(
        self,
        records: Records,
        out: Bytes,
        *,
        planar: bool = False,
        shift: NDArray[np.int16] | None = None,
        flips: NDArray[np.bool_] | None = None,
        crc: NDArray[np.uint32] | None = None,
        check: NDArray[np.bool_] | None = None,
    ) -> Bytes:
        """Copies k raw images of the output's size, mirrored where flips says so and then moved: pixel (r, c) becomes
        what lies at (r + down, c + right), the border filled by reflection.

        Args:
            planar: the records are [C, H, W], not [H, W, C].
            shift: down and right; int16 [k, 2].

        Returns their statuses, uint8 [k].
        """
        k = len(records)
        status = np.empty(k, np.uint8)
        address, stride = _output(out[:k])
        height, width, channels = out.shape[1:]
        if len(out) < k:
            raise ValueError(f"room for {len(out)} images, but {k} records")
        _done(
            self._core.hw_gather(
                self._handle,
                k,
                _pointer(records.address, np.uint64, k),
                _pointer(records.length, np.uint64, k),
                _pointer(crc, np.uint32, k),
                _pointer(check, np.bool_, k),
                2 if planar else 1,
                height,
                width,
                channels,
                _pointer(shift, np.int16, k, 2),
                _pointer(flips, np.bool_, k),
                address,
                stride,
                _pointer(status, np.uint8, k),
            )
        )
        return status

    def close(self) -> None:
        """Ends the threads; not while a call is under way."""
        handle, self._handle = self._handle, None
        if handle:
            self._core.hw_pool_destroy(handle)

    def __del__(self) -> None:
        self.close()
