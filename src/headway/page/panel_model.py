"""Base of the models of panels' data."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PanelModel(BaseModel):
    """Data of a panel, or a part of them. A subclass is one kind, and none is overridden."""

    # Strict: a number in quotes, or a key of another kind, is an error of the producer and must not be drawn.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
