"""Write a count with its noun, for every message."""

from __future__ import annotations


def amount(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def verb(count: int, one: str, many: str) -> str:
    """Return ``one`` or ``many``: the form of a verb behind `amount`."""
    return one if count == 1 else many
