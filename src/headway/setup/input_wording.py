"""Sentences about the input of a run: the tier of its data, and its decoder."""

from __future__ import annotations

from headway.core.text_format import pluralise
from headway.data.tiers import Tier

# Predicate of a sentence about the data, by the name of its tier.
TIER_PHRASES = {
    "none": "is read in place",
    "memory": "is kept in memory",
    "device": "is kept on the device",
    "disk": "is fetched into the local cache",
}


def get_tier_reason(tier: Tier) -> str:
    """Returns the reason for which a tier was chosen, without the name of the tier."""
    return tier.why.removeprefix(f"{tier.name}, ")


def describe_decoding(backend: str, threads: int, cores: int | None) -> str:
    """Describes in a sentence which decoder runs on how many of the usable cores (None: unknown)."""
    name = "the native core" if backend == "native" else "Pillow"
    text = f"Decoding by {name}, {pluralise(threads, 'thread')}"
    if cores is None:
        return f"{text}."
    idle_cores = cores - threads
    remaining = f" (the other{'s are' if idle_cores > 1 else ' is'} left to training)" if idle_cores > 0 else ""
    return f"{text} of {pluralise(cores, 'core')}{remaining}."
