"""Layouts of ranks on hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

Order = Literal["block", "round_robin"]


@final
@dataclass(frozen=True)
class Layout:
    """Hosts with equally many ranks each, numbered host by host (block) or in turn (round_robin)."""

    hosts: int
    per_host: int
    order: Order = "block"

    @property
    def name(self) -> str:
        """Such as 2x2_block."""
        return f"{self.hosts}x{self.per_host}_{self.order.replace('_', '')}"

    @property
    def size(self) -> int:
        return self.hosts * self.per_host

    def host(self, rank: int) -> int:
        return rank // self.per_host if self.order == "block" else rank % self.hosts

    def local_rank(self, rank: int) -> int:
        return rank % self.per_host if self.order == "block" else rank // self.hosts
