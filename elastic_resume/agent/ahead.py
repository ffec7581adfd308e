"""Which signals tell an agent ahead of time that the end will come, besides SIGTERM.

A scheduler sends them to every process of a job, and by default they kill. So workers start with them
ignored, as nohup does with SIGHUP, and what workers start inherits that: the agent drains its node in order.
Standard library only, see `stub.py`.
"""

import os
import signal

ENV_DRAIN_SIGNALS = "ELASTIC_RESUME_DRAIN_SIGNALS"


def ahead() -> "list[signal.Signals]":
    """Give those that the agent has put into our environment; none where there is no agent."""
    known = signal.Signals.__members__
    names = os.environ.get(ENV_DRAIN_SIGNALS, "").split(",")
    return [known[name] for name in names if name in known and name != "SIGTERM"]
