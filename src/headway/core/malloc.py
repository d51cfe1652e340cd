"""glibc malloc settings that keep freed memory in the process, for training on a CPU.

By default glibc returns blocks of 32 MB and more, often of 128 kB and more, to the kernel as soon as they are freed. A
training step on a CPU frees its activations and allocates as many again, so the kernel zeroes every page anew: a
quarter of the time of a step of 8,192 images through a small network (`bench.heap`).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
# Bytes that the heap grows by beyond each request, so that it grows seldom.
TOP_PAD = 64 << 20
# The largest value that mallopt accepts.
MOST = 2**31 - 1


@cache
def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory, for the whole process and from now on.

    No block gets a mapping of its own, and the top of the heap is returned only beyond 2 GB of free space. Peak memory
    stays as before, plus some fragmentation. HEADWAY_HEAP=system in the environment disables it; a C library without
    mallopt, such as musl, is left as it is.

    Returns:
        True if the settings are in force.
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
