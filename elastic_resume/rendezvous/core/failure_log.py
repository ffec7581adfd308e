"""What the leader has heard of failures in the newest world: the first few, in order of arrival.

Of one node one failure is kept, and failures that are alike are counted as one: when a thousand workers meet
the same error, everybody hears of it once. Decides nothing: `policy.failures.judge` does.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_resume.policy.failure_classification import Failure, bounded

MAX_KEPT = 8
"""Failures that are not alike. What happened first is among them."""


def received(told: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Give what a leader has told, no more and no longer than it may be."""
    return tuple(bounded(failure) for failure in told[:MAX_KEPT])


class Ledger:
    """The failures of one generation; those of an earlier one are forgotten when a later one has some."""

    def __init__(self) -> None:
        self.generation = 0
        self._nodes: set[str] = set()
        self._kept: list[Failure] = []

    def note(self, generation: int, failure: Failure) -> None:
        """Keep a failure of that generation, unless its node has told one."""
        if generation < self.generation:
            return
        if generation > self.generation:
            self.generation, self._nodes, self._kept = generation, set(), []
        if failure.node in self._nodes:
            return
        self._nodes.add(failure.node)
        for place, kept in enumerate(self._kept):
            # A node that was lost is named, and never counted as "one more".
            if kept.rank is not None and kept.signature == failure.signature:
                self._kept[place] = replace(kept, nodes=kept.nodes + 1)
                return
        if len(self._kept) == MAX_KEPT:
            # Echoes may come before what they echo, and from every node.
            echo = next((one for one in reversed(self._kept) if one.is_echo), None)
            if echo is None or failure.is_echo:
                return
            self._kept.remove(echo)
        self._kept.append(replace(bounded(failure), nodes=1))

    def of(self, generation: int) -> tuple[Failure, ...]:
        """Return what is known of that generation's end."""
        return tuple(self._kept) if generation == self.generation else ()
