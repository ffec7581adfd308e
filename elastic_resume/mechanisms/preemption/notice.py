"""Define what a script gets of a notice: `Run.preemption`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preemption:
    """A notice that a node of the job is to stop. All ranks have the same one.

    ``node`` is its name, ``reason`` what announced it: a signal or a cloud. ``seconds`` were left to it when
    the step boundary was agreed at which all ranks got the notice.
    """

    reason: str
    node: str
    seconds: float
