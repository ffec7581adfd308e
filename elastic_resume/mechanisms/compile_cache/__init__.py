"""Compile a model once per job: a node without compiled code gets that of its peers before its first step.

`artifact_file` keeps what torch.compile has made beside the checkpoints of the node, and `sharing` sends it,
loads it and saves it. Its event is::

    compile-cache   rank; generation, step, source_rank (null: the node's own file), bytes, artifacts (their
                    number), seconds; it was loaded

This is the one exception to "nothing received is unpickled": torch's artifacts are pickles and code. So it is
off unless a user turns it on.
"""

from __future__ import annotations

from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.option import Option, parse_switch

COMPILE_CACHE = Mechanism(
    make_observer=lazily("compile_cache.sharing", "observe"),
    worker_switch="share_compile_cache",
    options=(
        Option(
            "share-compile-cache",
            None,
            "nodes send what torch.compile made to new nodes",
            parse_switch,
            "false",
            has_flag=True,
            details="and keep it beside their checkpoints. It is code, the one thing received that is run: "
            "set a secret, and trust who can write there. Use the same on all nodes",
        ),
    ),
)
