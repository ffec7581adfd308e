"""Which signals tell an agent ahead of time that the end will come, besides SIGTERM.

A scheduler sends them to every process of a job, and by default they kill. So workers start with them
ignored, as nohup does with SIGHUP, and what workers start inherits that: the agent drains its node in order.
Standard library only, see `stub.py`.
"""

import os
import signal

TYPE_CHECKING = False  # typing would cost a third of the stub's start
if TYPE_CHECKING:
    from collections.abc import Collection

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
ENV_DRAIN_SIGNALS = "ELASTIC_RESUME_DRAIN_SIGNALS"


def ahead() -> "list[signal.Signals]":
    """Give those that the agent has put into our environment; none where there is no agent."""
    known = signal.Signals.__members__
    names = os.environ.get(ENV_DRAIN_SIGNALS, "").split(",")
    return [known[name] for name in names if name in known and name != "SIGTERM"]


_early: "list[int]" = []


def heed_early() -> None:
    """Note such signals from now on. An agent imports for seconds before it knows which are meant for it."""
    for number in NOTICES:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _note)


def _note(number: int, frame: object) -> None:
    del frame
    _early.append(number)


def given_back(taken: "Collection[int]") -> "int | None":
    """Give the signals that are not ``taken`` their default action again; tell what came before that, if any.

    One that came and was not taken has its default action now, as it would have had.
    """
    for number in NOTICES:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_DFL)
    came = [number for number in _early if number in taken]
    for other in set(_early).difference(taken):
        signal.raise_signal(other)
    return came[0] if came else None
