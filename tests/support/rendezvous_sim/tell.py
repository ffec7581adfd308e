"""Events, effects and messages of the core in a few words each, for the story of a schedule."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from elastic_resume.rendezvous.core.messages import Header
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View


def describe(item: object) -> str:
    """Return one line."""
    if isinstance(item, Incarnation):
        return f"{item.node}{item.incarnation_id}"
    if isinstance(item, View):
        return f"{item.generation}{_describe_set(item.members)} of {describe(item.leader)}"
    if isinstance(item, QuorumState):
        return _describe_quorum_state(item)
    if isinstance(item, Header):
        lease = f" lease {item.lease_s:.2f} of {item.generation}" if item.generation else ""
        return f"{item.seq}/{item.ack}{lease}"
    if is_dataclass(item):
        values = [(one.name, getattr(item, one.name)) for one in fields(item)]
        told = [f"{name}={describe(value)}" for name, value in values if value or value == 0]
        return f"{type(item).__name__}({' '.join(told)})"
    if isinstance(item, (tuple, frozenset, set)):
        return _describe_set(item)
    return f"{item:.3f}" if isinstance(item, float) else str(item)


def _describe_quorum_state(state: QuorumState) -> str:
    words = [f"begun {describe(state.installed)}" if state.installed else "none begun"]
    words += [f"proposed {describe(world)}" for world in state.proposals]
    words += [f"gone {_describe_set(state.dead)}"] if state.dead else []
    words += (
        [f"void {_describe_set(f'{number}{describe(who)}' for number, who in state.aborted)}"]
        if state.aborted
        else []
    )
    return f"<{', '.join(words)}>"


def _describe_set(items: object) -> str:
    told = [describe(one) for one in items] if not isinstance(items, str) else [items]  # type: ignore[attr-defined]
    return "{" + " ".join(told) + "}"
