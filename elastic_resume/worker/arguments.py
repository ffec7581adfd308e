"""Checks of the numbers and flags that samplers are given, and that checkpoints say of them."""

from __future__ import annotations

import operator

from elastic_resume.errors import ConfigError

LARGEST = 2**63 - 1  # seeds and epochs are mixed as 64-bit words


def integer(name: str, value: object, least: int, most: int = LARGEST) -> int:
    """Take whatever is an integer (numpy's too), but neither a bool nor a float."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        bounds = f"from {least} to {most}" if most < LARGEST else f"of at least {least}"
        plain = isinstance(value, (int, float, str, type(None)))
        shown = repr(value) if plain else f"a {type(value).__name__}"
        advice = "; pass len(dataset)" if name == "dataset_size" and hasattr(value, "__len__") else ""
        raise ConfigError(f"{name} must be an integer {bounds}, got {shown}{advice}.")
    return number


def flag(name: str, value: object) -> bool:
    """Take a bool and nothing that only looks like one."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    return value
