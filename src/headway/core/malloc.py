"""Freed memory stays with the process, where a network is trained on a CPU.

glibc gives blocks of 32 MB and more, often of 128 kB and more, back to the system as soon as they are freed. A training
step on a CPU frees its activations and asks for as many again: the system has to fill every page with zeros anew. Of a
step of 8,192 images through a small network that is a quarter of the time (`bench.heap`).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Of malloc.h."""
TOP_PAD = 64 << 20
"""Bytes: the heap grows by so much more than is asked for, so that it grows seldom."""
MOST = 2**31 - 1
"""The largest number that mallopt takes."""


@cache
def keep_freed_memory() -> bool:
    """Lets the C library keep what is freed, from now on and in the whole process.

    No block is mapped by itself, and the end of the heap is given back only beyond 2 GB that are free there. At its
    peak the process needs as much memory as before, and some more where blocks of other sizes leave gaps; in between
    it gives less back. HEADWAY_HEAP=system in the environment leaves all as it is, and so does a C library that has no
    mallopt (musl, say).

    Returns:
        whether it is so now.
    """
    if os.environ.get("HEADWAY_HEAP") == "system":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.restype, mallopt.argtypes = ctypes.c_int, [ctypes.c_int, ctypes.c_int]
    asked = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST), (M_TOP_PAD, TOP_PAD))
    return all(mallopt(name, value) == 1 for name, value in asked)
