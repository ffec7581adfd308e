"""Name the suspects of a hang, and kill stalled workers so that training restarts.

`detector` watches the workers of a node, `stack_dump` examines them, and `policy.hangs` decides. A hang is a
failure, so its events, and their sentences, are those of `policy.failure_classification`. One more is::

    hang-detector-failed   error; a bug of ours, hang detection continues
"""

from __future__ import annotations

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind, Mechanism, lazily


def _describe_error(event: Event) -> str:
    return f"internal error in the hang detector: {event.get('error') or 'no reason recorded'}"


HANGS = Mechanism(
    make_agent_part=lazily("hangs.detector", "HangDetector"),
    alerts=(AlertKind("hang-detector-failed", _describe_error, is_bad=True),),
)
