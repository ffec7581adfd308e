"""Name the suspects of a hang, and kill stalled workers so that training restarts.

`detector` watches the workers of a node, `stack_dump` examines them, also by their `answers`, and
`judge` decides. A hang is a failure, so its events, and their sentences, are those of
`policy.failure_classification`. One more is::

    hang-detector-failed   error; a bug of ours, hang detection continues
"""

from __future__ import annotations

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind, Mechanism, lazily
from elastic_resume.option import Option
from elastic_resume.units import parse_duration


def _describe_error(event: Event) -> str:
    return f"internal error in the hang detector: {event.get('error') or 'no reason recorded'}"


HANGS = Mechanism(
    make_agent_part=lazily("hangs.detector", "HangDetector"),
    open_evidence=lazily("hangs.answers", "open_answers"),
    options=(
        Option(
            "hang-timeout",
            "TIME",
            "restart if a rank finishes no step for TIME; 0: off",
            parse_duration,
            has_flag=True,
            default_help="30s, or ten times the longest step if that is more",
        ),
    ),
    alerts=(AlertKind("hang-detector-failed", _describe_error, is_bad=True),),
)
