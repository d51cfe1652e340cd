"""Time that a rank waits for values of other ranks inside a step, by what it waits for.

`CollectiveWork.wait` measures it on the groups of strategies that exchange more than gradients, and the `Clock` takes
it out of the stages in which it was spent. On CUDA a wait returns at once, as the stream waits in place of the host:
there is no such number there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final, get_args

Exchange = Literal[
    "halos",
    "samples of a place",
    "statistics",
    "divided layers",
    "channels of towers",
    "tokens of experts",
    "sharded weights",
]
"""Kinds of values that a rank waits for: rows of neighbours; images and maps that the ranks of a place hand to each
other; sums of norms and of the load of experts; inputs and outputs of divided layers; channels; tokens; weights and
their gradients, where each rank has rows of all."""
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


@final
class ExchangeWaits:
    """Nanoseconds of waiting since they were last taken."""

    def __init__(self) -> None:
        self._ns: dict[Exchange, int] = {}

    def add(self, exchange: Exchange, ns: int) -> None:
        """Adds a wait."""
        self._ns[exchange] = self._ns.get(exchange, 0) + ns

    def take(self) -> dict[Exchange, int]:
        """Returns all waits, and begins anew."""
        taken, self._ns = self._ns, {}
        return taken


def select_exchanges(seconds: Mapping[str, float]) -> dict[str, float]:
    """Selects the exchanges from the stages of a clock."""
    return {exchange: seconds[exchange] for exchange in EXCHANGES if seconds.get(exchange)}


def describe_exchanges(seconds: Mapping[str, float], total: float) -> dict[str, Any]:
    """Returns entries of a record: the shares of `total` seconds spent in exchanges, together and by name.

    Empty if there were none.
    """
    shares = {exchange: spent / total for exchange, spent in select_exchanges(seconds).items()}
    return {"exchange_share": sum(shares.values()), "exchange": shares} if shares else {}
