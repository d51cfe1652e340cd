"""The loop around training: versions of data sets, mining of what to label next, annotations and experiments."""

from headway.core.lazy_exports import build_lazy_exports as _build

__getattr__, __dir__ = _build(__name__, __file__)
