"""Describe how replicas differ, in events, logs and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_resume.errors import MIXED_HARDWARE_HINT
from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind
from elastic_resume.units import to_printable

MAX_NAMED = 4  # nodes of a group, and groups
MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class DivergenceVerdict:
    """How the digests of one step differ.

    Each group holds the nodes with one digest, the largest group first. Without a strict majority no node is
    ``diverged``. ``agreed_step`` is the newest step at which all were equal, 0 if there was none.
    """

    step: int
    agreed_step: int
    groups: tuple[tuple[str, ...], ...]
    diverged: tuple[str, ...] = ()


def describe_divergence(verdict: DivergenceVerdict) -> str:
    """Describe which nodes differ, and what to do."""
    agreed = verdict.agreed_step
    since = f"all were equal at step {agreed}" if agreed else "no step of this generation was seen equal"
    if verdict.diverged:
        verb = "is" if len(verdict.diverged) == 1 else "are"
        majority = _join_node_names(next(iter(verdict.groups), ()))
        who = f"{_join_node_names(verdict.diverged)} {verb} not as {majority}, the majority"
        then = (
            f"Look at what that machine computes (memory, device), or at what the script does only there "
            f"({since}). Start again without it."
        )
    else:
        who = " against ".join(_join_node_names(group) for group in verdict.groups[:MAX_NAMED])
        then = (
            f"No majority: it is unknown which node is wrong ({since}). Look for what nodes do not share: "
            "random numbers, samples, a broken device. To continue from an older checkpoint, move the newer "
            "ones elsewhere."
        )
    diff_hint = "`elastic-resume diff` of two nodes' checkpoints names the tensors."
    return f"replicas differ at step {verdict.step}: {who}. {then} {MIXED_HARDWARE_HINT} {diff_hint}"


def _join_node_names(names: Sequence[str]) -> str:
    shown = [to_printable(name, MAX_NAME_CHARS) for name in names[:MAX_NAMED]]
    shown += [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    listed = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    return ("node " if len(names) == 1 else "nodes ") + listed


def _describe_event(event: Event) -> str:
    nodes = [node for node in event.get("diverged_nodes") or () if isinstance(node, str)]
    which = f"of {', '.join(nodes)} differ from the majority" if nodes else "differ, and there is no majority"
    return f"replicas {which}; the job ends"


ALERT = AlertKind("replicas-differ", _describe_event, is_bad=True, is_worst=True, is_of_job=True)
