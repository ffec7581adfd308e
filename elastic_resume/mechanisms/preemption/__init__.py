"""Drain this node when a cloud announces its preemption, and let the script know of any node's end.

`sources` and `watcher` poll for notices of a cloud. `announcer` tells the leader of one, or of a signal, and
`judge` agrees on a step boundary at which all ranks get the notice. `notice_page` has it for the workers, and
`boundaries` gives it to each. These are the events::

    preemption-notice   source, reason, deadline (seconds since the epoch, or null)
    preemption          generation, step, reason, node (that is to stop), seconds (that it has): the ranks of
                        this node have the notice from this step boundary on
"""

from __future__ import annotations

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind, Mechanism, lazily
from elastic_resume.mechanisms.preemption import judge
from elastic_resume.option import Option


def _describe_notice(event: Event) -> str:
    source, reason = (str(event.get(name) or "") for name in ("source", "reason"))
    text = f"{source or 'no reason recorded'} announced the preemption of this node"
    return f"{text}: {reason}" if reason else text


PREEMPTION = Mechanism(
    topic=judge.NOTICES,
    make_observer=lazily("preemption.boundaries", "observe"),
    make_agent_part=lazily("preemption.announcer", "Announcer"),
    alerts=(AlertKind("preemption-notice", _describe_notice),),
    options=(
        Option(
            "preemption-notice",
            "aws|gcp|azure|file:PATH",
            "drain this node when this source announces its preemption",
            lazily("preemption.sources", "parse_source"),
            "off",
        ),
    ),
)
