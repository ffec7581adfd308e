"""The `RendezvousHandler` that torchelastic sees.

`OwnRendezvous` turns a `Member`'s worlds into what torchelastic wants, and asks an `Observer` whether there
is to be another round. Only `next_rendezvous` and the exit barrier wait for other nodes, and they end when
the core says so. Does not know flags.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from elastic_resume.errors import MachineError
from elastic_resume.policy.failures import Failure
from elastic_resume.policy.restart import Account
from elastic_resume.rendezvous.member import JobOver, Member
from elastic_resume.rendezvous.messages import Join
from elastic_resume.rendezvous.steps import BeginWorld

BACKEND = "elastic_resume"
ENV_IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"  # torchelastic's: 1 spares it the exchange of ranks


class Observer(Protocol):
    """What the supervisor wants to know and may decide."""

    def account(self) -> Account:
        """Tell what became of the round on this node; its workers are dead."""

    def before_round(self, *, failed: bool, why: str = "") -> None:
        """A round is asked for. Raise GaveUpError to refuse it.

        ``failed``: because own workers failed; ``why``: what the others did. Whether a node was lost that
        took our workers along is told by `round_formed`, and judged there.
        """

    def round_formed(
        self,
        *,
        node_rank: int,
        num_nodes: int,
        generation: int,
        changed: bool = False,
        nodes: Sequence[str] = (),
        step: int = 0,
        told: Sequence[Failure] = (),
    ) -> None:
        """A rendezvous ended; workers start now. Raise GaveUpError or NodeUnfitError to refuse that.

        ``changed``: not the same processes as last time. ``nodes`` are the members, ``step`` tells how far
        any of them has come, ``told`` how the last world ended, as far as the leader heard.
        """

    def last_words(self, *, workers_failed: bool = False) -> str:
        """Why this node ends the job for all; empty when it ends because its workers are done.

        ``workers_failed``: say what their failure was, if nothing has been decided.
        """


class OwnRendezvous(RendezvousHandler):
    """Our own rendezvous: any node may leave, the one that leads included."""

    def __init__(
        self, member: Member, observer: Observer, backend: str, *, host: str, workers: int, order: int
    ) -> None:
        """``host`` is where others reach this node, ``order`` its place in the scheduler's order.

        ``workers`` is how many this node starts.
        """
        self._member = member
        self._observer = observer
        self._backend = backend
        self._host = host
        self._workers = workers
        self._order = order
        self._server: TCPStore | None = None
        self._world: BeginWorld | None = None

    def get_backend(self) -> str:
        """See base class."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """See base class. Workers meet at the store that the agent of node rank 0 serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class. torchelastic has stopped its workers before it calls.

        Raises:
            GaveUpError: the observer, or another node, ends the job.
            SystemExit: with 0: the job is done, and this node was not needed.
            ConfigError, RendezvousLostError: see `Member.join`.

        """
        self._member.check()
        last, why = self._world, self._member.why_restart
        step = 0
        if last is not None:
            account = self._report(last)
            step = account.step
            self._observer.before_round(failed=not why, why=why)
            self._member.pause(account.pause_s)
        # A fresh store for each generation: workers of different ones never meet. Only rank 0's is used.
        self._server = None
        self._server = _serve(self._host)
        join = Join(_at(self._host, self._server.port), self._workers, self._order, step)
        try:
            world = self._member.join(join)
        except JobOver:
            raise SystemExit(0) from None
        if world.rank != 0:
            self._server = None
        self._world = world
        changed = last is None or set(last.members) != set(world.members)
        self._observer.round_formed(
            node_rank=world.rank,
            num_nodes=len(world.members),
            generation=world.generation,
            changed=changed,
            nodes=[member.node for member in world.members],
            step=world.step,
            told=world.failures,
        )
        where = RendezvousStoreInfo(*_host_and_port(world.store))
        os.environ[ENV_IDENTICAL] = str(int(len(set(world.workers)) == 1))
        store: Any = _RoundStore(_known_ranks(world.workers), self._member)
        return RendezvousInfo(store, world.rank, len(world.members), where)

    def _report(self, world: BeginWorld) -> Account:
        """Tell the leader how a worker of this node failed, if one did, before anything follows from it."""
        account = self._observer.account()
        if account.failure is not None:
            self._member.report(world.generation, account.failure)
        return account

    def num_nodes_waiting(self) -> int:
        """See base class. A flag of this process: to ask costs nothing, and no silent host can block it."""
        return int(self._member.restart_wanted)

    def is_closed(self) -> bool:
        """See base class. The end of one agent closes nothing for the others."""
        return False

    def set_closed(self) -> None:
        """See base class. Does nothing."""

    def get_run_id(self) -> str:
        """See base class."""
        return self._member.run_id

    def shutdown(self) -> bool:
        """See base class. Tells the other nodes why, when this one ends the job for all."""
        if self._world is not None:
            self._report(self._world)
        words = self._observer.last_words()
        if words:
            self._member.fail(words)
        return True


class _RoundStore:
    """What torchelastic takes for the store of a round; it waits for nobody.

    torchelastic has two uses for it. With different numbers of workers on the nodes it works out ranks: we
    know those numbers and put the result where it looks, so that no silent host can block it. When workers
    have succeeded it waits for the others with ``wait``, for 300 s: `Member.finish` knows better.
    """

    def __init__(self, inner: Store, member: Member) -> None:
        self._inner = inner
        self._member = member

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for the end of the job, which is what the exit barrier is for."""
        del keys, timeout
        self._member.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _known_ranks(workers: tuple[int, ...]) -> Store:
    """A store of this process that already holds what nodes would tell each other about ranks.

    The names are those of torchelastic's ``_assign_worker_ranks``; one that it does not find there is an
    error after a second.
    """
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    first, total = 0, sum(workers)
    for rank, count in enumerate(workers):
        role = {"role": "default", "rank": rank, "local_world_size": count}
        store.set(f"torchelastic/role_info/{rank}", json.dumps(role))
        store.set(f"torchelastic/assigned_ranks/{rank}", json.dumps([first, total, first, total]))
        first += count
    return store


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _serve(host: str) -> TCPStore:
    try:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise MachineError(
            f"no store can be served at {host}: {str(error).splitlines()[0][:200]} "
            "(is --local-addr an address of this machine?)"
        ) from error


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
