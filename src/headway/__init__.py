"""Headway makes the training of deep networks take less time.

The public names, loaded when they are first used: `import headway` imports neither torch nor numpy.
"""

from __future__ import annotations

from headway.core.lazy_exports import build_lazy_exports

__version__ = "0.1.0"

__getattr__, _list_names = build_lazy_exports(__name__, __file__)
__all__ = [*_list_names(), "__version__"]


def __dir__() -> list[str]:
    return __all__
