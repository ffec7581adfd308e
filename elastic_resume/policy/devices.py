"""Decide which GPU a rank uses."""

from __future__ import annotations

from collections.abc import Collection


def choose_gpu(local_rank: int, visible: int, *, current: int, model_gpus: Collection[int]) -> int | None:
    """Return the index of this rank's GPU among the ``visible`` ones; None without any.

    ``model_gpus`` are those with parameters of the script's models. ``current`` is the process's current GPU,
    which is 0 unless the script has set another one.
    """
    if visible == 0:
        return None
    if len(model_gpus) == 1:
        return next(iter(model_gpus))
    # A launcher may show each rank only its own GPU, which is number 0 there.
    return current or local_rank % visible
