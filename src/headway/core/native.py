"""The library of the native core (native/headway.h): finding it, loading it, and the check that it fits.

What its functions are is said where they are used. Where it is not built, `library()` is None; HEADWAY_NATIVE=0 in the
environment switches it off.
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
ABI = 5
FIX = (
    "install a C++ compiler, cmake and the headers of libjpeg-turbo (on Debian: g++ cmake libjpeg62-turbo-dev), and "
    "then headway again"
)

Signatures = Mapping[str, tuple[Any, list[Any]]]
"""Of each function its result and its arguments, as ctypes has them."""


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why it cannot be used."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if library.hw_abi() != ABI:
            return f"cannot be used (its interface is {library.hw_abi()}, not {ABI})"
        return library
    except (OSError, AttributeError) as error:
        return f"cannot be used ({error})" if LIBRARY.exists() else "is not built"


def load_library(signatures: Signatures, *, loss: str) -> ctypes.CDLL | None:
    """The library with these functions declared; None where it cannot be used, and then the log says so.

    Args:
        loss: what is lost without it, for the log.
    """
    if os.environ.get("HEADWAY_NATIVE") == "0":
        return None
    found = _load()
    if isinstance(found, str):
        logging.getLogger("headway").warning(f"The native core {found}: {loss}. To have it, {FIX}.")
        return None
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found
