"""Drain this node when a cloud announces its preemption.

`sources` polls for notices, and `watcher` acts on one. Its event is::

    preemption-notice   source, reason, deadline (seconds since the epoch, or null)
"""

from __future__ import annotations

from elastic_resume.events import Event
from elastic_resume.mechanisms.mechanism import AlertKind, Mechanism, lazily
from elastic_resume.option import Option


def _describe_notice(event: Event) -> str:
    source, reason = (str(event.get(name) or "") for name in ("source", "reason"))
    text = f"{source or 'no reason recorded'} announced the preemption of this node"
    return f"{text}: {reason}" if reason else text


PREEMPTION = Mechanism(
    make_agent_part=lazily("preemption.watcher", "NoticeWatcher"),
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
