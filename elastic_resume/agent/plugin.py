"""The ``torchrun.handlers`` entry point: our rendezvous under ``torchrun --rdzv-backend=elastic_resume``.

Every torchrun of an environment in which this package is installed loads this module, so it imports nothing
heavy. Terms come from ``--rdzv-endpoint`` and ``--rdzv-conf node_timeout=3,…``, names and places from
``ELASTIC_RESUME_*``. What only `elastic-resume run` has: stubs that fence and sweep workers, and a policy for
restarts (torchrun's ``--max-restarts`` counts here).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from elastic_resume import contract
from elastic_resume.policy.restart import Account


def get_handler() -> Callable[[Any], Any]:
    """Give torchrun what makes a handler."""
    return create


def create(params: Any) -> Any:
    """Make a handler from torch's ``RendezvousParameters``."""
    from elastic_resume import events  # noqa: PLC0415 - see the module's docstring
    from elastic_resume.agent.fence import Fence  # noqa: PLC0415
    from elastic_resume.agent.handler import OwnRendezvous, workers_of_torchrun  # noqa: PLC0415
    from elastic_resume.agent.place import taken  # noqa: PLC0415
    from elastic_resume.cluster import node  # noqa: PLC0415
    from elastic_resume.config import Settings  # noqa: PLC0415
    from elastic_resume.rendezvous.terms import Terms  # noqa: PLC0415
    from elastic_resume.store.node_dir import NodeDir  # noqa: PLC0415

    conf = {key: value for key, value in params.config.items() if key != "timeout"}
    settings = Settings.for_worker(os.environ, sys.argv[0], run_id=params.run_id)
    terms = Terms.read(
        params.endpoint,
        conf,
        os.environ,
        run_id=settings.run_id,
        nodes=(params.min_nodes, params.max_nodes),
        local_addr=params.local_addr,
    )
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    node_dir = stack.enter_context(NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name))
    os.environ.update(settings.to_env())
    os.environ[contract.ENV_AGENT_PID] = str(os.getpid())
    log = events.EventLog(node_dir.path / contract.EVENTS_FILE, node=settings.node_name)
    observer = _Observer(settings.node_name, log)
    fence = stack.enter_context(contextlib.closing(Fence()))  # there are no guards: nobody looks at it
    place = stack.enter_context(
        taken(terms, node_dir, fence, node.read(os.environ), say=observer.say, tell=observer.told)
    )
    return OwnRendezvous(
        place.member,
        observer,
        params.backend,
        host=place.host,
        workers=workers_of_torchrun(sys.argv[1:]),
        order=place.order,
    )


class _Observer:
    """Says what happens, and leaves every decision to torchrun."""

    def __init__(self, node: str, log: Any) -> None:
        self._node = node
        self._log = log

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a pipe that is gone must not end the job
            print(f"elastic_resume[{self._node}] {text}", file=sys.stderr, flush=True)

    def told(self, news: Any) -> None:
        self._log.write("rendezvous", what=news.kind, message=news.text)

    def account(self) -> Account:
        return Account()

    def before_round(self, *, failed: bool, why: str = "", may_be_victim: bool = False) -> None:
        del failed, may_be_victim
        if why:
            self.say(f"{why}: forming a new world.")

    def round_formed(
        self, *, node_rank: int, num_nodes: int, generation: int | None = None, **more: Any
    ) -> None:
        del more
        os.environ[contract.ENV_GENERATION] = str(generation)
        self.say(f"generation {generation}: node {node_rank} of {num_nodes}.")

    def round_over(self) -> None:
        pass

    def last_words(self, *, workers_failed: bool = False) -> str:
        del workers_failed
        return ""
