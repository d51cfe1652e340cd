"""Words that plans have in common."""

from __future__ import annotations


def pluralise(number: int, name: str) -> str:
    """`1 rack`, `2 racks`, `3 switches`."""
    return f"{number:,} {name}{'' if number == 1 else 'es' if name.endswith('ch') else 's'}"
