"""Compile a model once per job: a node without compiled code gets that of its peers before its first step.

`artifact_file` keeps what torch.compile has made beside the checkpoints of the node, and `sharing` sends it,
loads it and saves it. Its event is::

    compile-cache   rank; generation, step, source_rank (null: the node's own file), bytes, artifacts (their
                    number), seconds; it was loaded

This is the one exception to "nothing received is unpickled": torch's artifacts are pickles and code. So it is
off unless a user turns it on.
"""

from __future__ import annotations

import os

from elastic_resume.mechanisms.mechanism import Mechanism, StepObserver, WorkerContext, lazily
from elastic_resume.option import Option, parse_switch

_OPTION = Option(
    "share-compile-cache",
    None,
    "nodes send what torch.compile made to new nodes",
    parse_switch,
    "false",
    has_flag=True,
    details="kept beside their checkpoints too. It is code, the one thing received that is run: "
    "set a secret, and trust who can write there. Use the same on all nodes",
    is_for_workers=True,
)


def _observe(context: WorkerContext) -> StepObserver | None:
    """Exchange artifacts if rank 0 wants that; a node without the flag of its own runs no code of them."""
    if not context.settings.get(_OPTION.field):
        return None
    own = os.environ.get(
        _OPTION.variable
    )  # every agent sets it; else rank 0's file of settings is this one's
    takes_part = own is None or parse_switch(_OPTION.variable, own or "false")
    observer: StepObserver = lazily("compile_cache.sharing", "observe")(context, takes_part)
    return observer


COMPILE_CACHE = Mechanism(make_observer=_observe, options=(_OPTION,))
