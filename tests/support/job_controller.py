"""A pure model of the rules by which Kubernetes' Job controller judges the ends of an Indexed Job's pods.

It follows the API reference of batch/v1 and the KEPs 3329 (podFailurePolicy), 3850 (backoffLimitPerIndex) and
3998 (successPolicy). It was not compared with the controller's code or with an API server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["replace", "index done", "index failed", "job done", "job failed"]


@dataclass
class JobController:
    """One Indexed Job: its ``spec``, and the outcomes of its indexes so far."""

    spec: Mapping[str, Any]
    failures_by_index: Counter[int] = field(default_factory=Counter)
    done_indexes: set[int] = field(default_factory=set)
    failed_indexes: set[int] = field(default_factory=set)
    outcome: Literal["", "job done", "job failed"] = ""

    @property
    def completions(self) -> int:
        """Return the number of indexes."""
        return int(self.spec.get("completions", 1))

    def handle_pod_end(
        self, index: int, exit_codes: Mapping[str, int], *, disrupted: bool = False
    ) -> Verdict:
        """Judge a pod's end.

        Args:
            index: index of the pod.
            exit_codes: exit codes by container; 128 + n if signal n killed it.
            disrupted: whether the pod has the condition DisruptionTarget.

        """
        if self.outcome:
            return self.outcome
        if all(code == 0 for code in exit_codes.values()):
            self.done_indexes.add(index)
        elif (verdict := self._handle_failure(index, exit_codes, disrupted=disrupted)) != "index failed":
            return verdict
        else:
            self.failed_indexes.add(index)
        self.outcome = self._job_outcome()
        return self.outcome or ("index done" if index in self.done_indexes else "index failed")

    def _handle_failure(self, index: int, codes: Mapping[str, int], *, disrupted: bool) -> Verdict:
        action = self._policy_action(codes, disrupted=disrupted)
        if action == "FailJob":
            self.outcome = "job failed"
            return "job failed"
        if action == "FailIndex":
            return "index failed"
        if action == "Ignore":
            return "replace"
        self.failures_by_index[index] += 1
        if "backoffLimitPerIndex" in self.spec:
            return (
                "index failed"
                if self.failures_by_index[index] > self.spec["backoffLimitPerIndex"]
                else "replace"
            )
        if self.failures_by_index.total() > self.spec.get("backoffLimit", 6):
            self.outcome = "job failed"
            return "job failed"
        return "replace"

    def _policy_action(self, codes: Mapping[str, int], *, disrupted: bool) -> str:
        """Return the action of the first rule that matches; Count if none matches."""
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", []):
            if _rule_matches(rule, codes, disrupted=disrupted):
                return str(rule["action"])
        return "Count"

    def _job_outcome(self) -> Literal["", "job done", "job failed"]:
        for rule in self.spec.get("successPolicy", {}).get("rules", []):
            if len(self.done_indexes) >= rule.get("succeededCount", self.completions):
                return "job done"
        if len(self.failed_indexes) > self.spec.get("maxFailedIndexes", self.completions):
            return "job failed"
        if len(self.done_indexes | self.failed_indexes) < self.completions:
            return ""
        return "job failed" if self.failed_indexes else "job done"


def _rule_matches(rule: Mapping[str, Any], codes: Mapping[str, int], *, disrupted: bool) -> bool:
    if "onPodConditions" in rule:
        return disrupted and any(
            (one["type"], str(one.get("status", "True"))) == ("DisruptionTarget", "True")
            for one in rule["onPodConditions"]
        )
    condition = rule["onExitCodes"]
    found = [
        code for name, code in codes.items() if code != 0 and condition.get("containerName", name) == name
    ]
    if condition["operator"] == "In":
        return any(code in condition["values"] for code in found)
    return any(code not in condition["values"] for code in found)
