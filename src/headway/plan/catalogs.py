"""Reader for the catalog: machines, devices, links and published epochs, each entry with its source."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def read_catalog(name: str) -> dict[str, Any]:
    """Reads a file of `headway/plan/catalog` by its stem. The result is cached: do not change it."""
    text = files("headway.plan").joinpath("catalog", f"{name}.yaml").read_text(encoding="utf-8")
    # libyaml's loader, where PyYAML has it, is some ten times as fast as the one in Python.
    entries: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return entries
