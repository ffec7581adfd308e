"""Events, effects and messages of the core in a few words each, for the story of a schedule."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from elastic_resume.rendezvous.core.messages import Stamp
from elastic_resume.rendezvous.core.quorum import Incarnation, Knowledge, World


def tell(what: object) -> str:
    """Return one line."""
    if isinstance(what, Incarnation):
        return f"{what.node}{what.life}"
    if isinstance(what, World):
        return f"{what.generation}{_set(what.members)} of {tell(what.leader)}"
    if isinstance(what, Knowledge):
        return _knowledge(what)
    if isinstance(what, Stamp):
        lease = f" lease {what.lease_s:.2f} of {what.generation}" if what.generation else ""
        return f"{what.seq}/{what.echo}{lease}"
    if is_dataclass(what):
        values = [(one.name, getattr(what, one.name)) for one in fields(what)]
        told = [f"{name}={tell(value)}" for name, value in values if value or value == 0]
        return f"{type(what).__name__}({' '.join(told)})"
    if isinstance(what, (tuple, frozenset, set)):
        return _set(what)
    return f"{what:.3f}" if isinstance(what, float) else str(what)


def _knowledge(known: Knowledge) -> str:
    words = [f"begun {tell(known.begun)}" if known.begun else "none begun"]
    words += [f"proposed {tell(world)}" for world in known.proposals]
    words += [f"gone {_set(known.gone)}"] if known.gone else []
    words += [f"void {_set(f'{number}{tell(who)}' for number, who in known.void)}"] if known.void else []
    return f"<{', '.join(words)}>"


def _set(items: object) -> str:
    told = [tell(one) for one in items] if not isinstance(items, str) else [items]  # type: ignore[attr-defined]
    return "{" + " ".join(told) + "}"
