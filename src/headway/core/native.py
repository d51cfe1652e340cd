"""Loads the native core (native/headway.h) with ctypes and checks its ABI number.

Each caller declares the functions that it uses. HEADWAY_NATIVE=0 in the environment switches the native core off.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parents[1] / "data/libheadway.so"
# Has to equal `hw_abi()` in native/: a library built from other sources would crash on changed arguments.
ABI = 9
FIX = (
    "install a C++ compiler, cmake and the headers of libjpeg-turbo (on Debian: g++ cmake libjpeg62-turbo-dev), and "
    "then headway again"
)

# ctypes result and argument types by function name.
Signatures = Mapping[str, tuple[Any, list[Any]]]


@cache
def _load() -> ctypes.CDLL | str:
    """Returns the library, or the reason that it cannot be used."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if library.hw_abi() != ABI:
            return f"cannot be used (its interface is {library.hw_abi()}, not {ABI})"
        return library
    except (OSError, AttributeError) as error:
        return f"cannot be used ({error})" if LIBRARY.exists() else "is not built"


def load_library(signatures: Signatures, *, loss: str) -> ctypes.CDLL | None:
    """Returns the library with these functions declared, or None (with a warning in the log) if it cannot be used.

    Args:
        loss: consequence of its absence, for the log.
    """
    if os.environ.get("HEADWAY_NATIVE") == "0":
        return None
    loaded = _load()
    if isinstance(loaded, str):
        logging.getLogger("headway.core").warning(f"The native core {loaded}: {loss}. To have it, {FIX}.")
        return None
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def find_gomp() -> int | None:
    """Returns the address of GOMP_parallel in torch's libraries; None: torch has another OpenMP.

    The core runs on torch's threads where torch calls it: threads of its own would compete for cores with torch's,
    which spin for milliseconds after every loop.
    """
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
