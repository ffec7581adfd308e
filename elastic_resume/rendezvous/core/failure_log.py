"""What the leader has heard of failures in the newest world: the first few, in order of arrival.

Of one node one failure is kept, and failures that are alike are counted as one: when a thousand workers meet
the same error, everybody hears of it once. Decides nothing: `policy.failures.judge` does.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_resume.policy.failure_classification import Failure, truncate_failure

MAX_FAILURES = 8
"""Failures that are not alike. What happened first is among them."""


def bound_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Give what a leader has told, no more and no longer than it may be."""
    return tuple(truncate_failure(failure) for failure in failures[:MAX_FAILURES])


class FailureLog:
    """The failures of one generation; those of an earlier one are forgotten when a later one has some."""

    def __init__(self) -> None:
        self.generation = 0
        self._reported_nodes: set[str] = set()
        self._failures: list[Failure] = []

    def record(self, generation: int, failure: Failure) -> None:
        """Keep a failure of that generation, unless its node has told one."""
        if generation < self.generation:
            return
        if generation > self.generation:
            self.generation, self._reported_nodes, self._failures = generation, set(), []
        if failure.node in self._reported_nodes:
            return
        self._reported_nodes.add(failure.node)
        for place, kept in enumerate(self._failures):
            # A node that was lost is named, and never counted as "one more".
            if kept.rank is not None and kept.signature == failure.signature:
                self._failures[place] = replace(kept, nodes=kept.nodes + 1)
                return
        if len(self._failures) == MAX_FAILURES:
            # Echoes may come before what they echo, and from every node.
            echo = next((one for one in reversed(self._failures) if one.is_secondary), None)
            if echo is None or failure.is_secondary:
                return
            self._failures.remove(echo)
        self._failures.append(replace(truncate_failure(failure), nodes=1))

    def get_failures(self, generation: int) -> tuple[Failure, ...]:
        """Return what is known of that generation's end."""
        return tuple(self._failures) if generation == self.generation else ()
