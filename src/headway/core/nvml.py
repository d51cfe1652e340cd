"""NVML, the NVIDIA driver's library for its GPUs, by the package nvidia-ml-py."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def load_nvml() -> Any | None:
    """Returns the module pynvml after nvmlInit: call nvmlShutdown after use. None: no package, or no driver answers."""
    try:
        with warnings.catch_warnings():
            # An older package of the same name warns that it is deprecated.
            warnings.simplefilter("ignore")
            nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
