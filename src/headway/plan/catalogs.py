"""The files of the catalog, as they are: machines, devices, links, epochs, each with its source."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def read_catalog(name: str) -> dict[str, Any]:
    """Of a file of `headway/plan/catalog`; not to be changed."""
    text = files("headway.plan").joinpath("catalog", f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found
