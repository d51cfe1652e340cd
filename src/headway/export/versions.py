"""Versions of the packages that an export was made with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from headway.doctor.environment_builds import find_version


def find_versions(distributions: Iterable[str], modules: Iterable[str]) -> dict[str, str]:
    """Returns the versions of distributions and of those that modules belong to, by the name of the distribution.

    The module onnxruntime belongs to the distribution onnxruntime, onnxruntime-gpu or onnxruntime-openvino. What is not
    installed is left out.
    """
    homes = metadata.packages_distributions()
    names = [*distributions, *(name for module in modules for name in homes.get(module, ()))]
    return {name: version for name in names if (version := find_version(name)) is not None}
