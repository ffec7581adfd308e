"""From parsed flags to torchelastic's `launch_agent`, through its public extension points only.

It makes torchrun's `LaunchConfig`, puts the stub in front of the worker's command, and hands our rendezvous
to torchelastic as a handler of its registry (`handler`). With that module it is all that touches
torch.distributed.elastic.

Does not decide anything about failures, and writes nothing.

The `RendezvousHandler` that torchelastic sees.

`OwnRendezvous` turns a `Member`'s worlds into what torchelastic wants, and asks an `Observer` whether there
is to be another round. Only `next_rendezvous` and the exit barrier wait for other nodes, and they end when
the core says so. Does not know flags.

This node's place in our own rendezvous: the port it listens on, its record on disk, its member.

Promise: whatever ends the agent short of SIGKILL, the others are told goodbye. Does not know torchelastic.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.distributed.run import config_from_args, get_args_parser

from elastic_resume import config, constants
from elastic_resume.agent import validation
from elastic_resume.agent.options import fill
from elastic_resume.agent.status import Teller
from elastic_resume.agent.workers.lease_page import Fence
from elastic_resume.agent.workers.supervisor import ahead
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.errors import ConfigError, GaveUpError, MachineError
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.restart import Account
from elastic_resume.rendezvous.client import JobOver, Member
from elastic_resume.rendezvous.config import KEYS, Terms
from elastic_resume.rendezvous.core.events import BeginWorld, Log
from elastic_resume.rendezvous.core.messages import Join
from elastic_resume.rendezvous.endpoint import Endpoint, take_seat
from elastic_resume.rendezvous.net.durable_state import Record
from elastic_resume.rendezvous.net.protocol import look_key
from elastic_resume.schedulers.environment import Node
from elastic_resume.schedulers.shared_dir import SharedDir

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


@dataclass(frozen=True)
class Place:
    """A node's place: ``host`` is where workers reach it, ``order`` its place in the scheduler's order."""

    member: Member
    host: str
    order: int


@contextlib.contextmanager
def taken(
    terms: Terms,
    node_dir: NodeDir,
    fence: Fence,
    here: Node,
    *,
    say: Callable[[str], None],
    tell: Callable[[Log], None],
    teller: Teller | None = None,
) -> Iterator[Place]:
    """Take the place; say goodbye at the end, whatever ends it.

    Args:
        terms: of this job.
        node_dir: claimed by this process; its name is the node's.
        fence: of this node's workers; the rendezvous moves it from now on.
        here: what the scheduler tells of this node.
        say: gets one line for people.
        tell: gets what the rendezvous does, in a thread of its own.
        teller: tells people of this node, and those who look of the job, as long as the place is held.

    Raises:
        ConfigError: an address is wrong, or its port is held by another program.
        RecordError: the record of an earlier life cannot be read.

    """
    record = Record(node_dir.path, launch=here.launch, node=node_dir.path.name)
    seat = take_seat(
        terms.endpoints,
        terms.local_addr,
        run_id=terms.run_id,
        token=terms.token,
        say=say,
    )
    if seat.notice:
        say(seat.notice)
    if not terms.secret and terms.max_nodes > 1:
        say(
            "no token is set: whoever reaches this node's port and knows the job's name may join "
            "(--rdzv-token-file or ELASTIC_RESUME_TOKEN would keep others out)."
        )
    name = node_dir.path.name
    member = Member(
        terms,
        seat,
        node=name,
        record=record,
        seen=node_dir.generation(),
        fence=fence,
        tell=tell,
        hear=teller.hear if teller else lambda _: None,
        show=teller.show if teller else None,
    )
    member.start()
    if teller:
        teller.start(member, look_key(terms.token))
    try:
        yield Place(member, seat.host, here.order)
    except BaseException as end:
        member.leave((str(end) or type(end).__name__)[:200])
        raise
    finally:
        if teller:
            teller.close()
        member.close()


STOCK_BACKENDS = ("c10d", "static")
"""torch's own rendezvous that need no server: ours stands in for them."""
STOCK_CONF = {
    *(
        "last_call_timeout",
        "close_timeout",
        "heartbeat_timeout",
        "read_timeout",
        "timeout",
        "rank",
        "is_host",
    ),
    *("keep_alive_interval", "keep_alive_max_attempt", "store_type", "use_libuv"),
}
"""Keys of --rdzv-conf that torch's own rendezvous take, and ours has no use for."""
# torchelastic wants a number. TORCHELASTIC_MAX_RESTARTS shows it to workers.
UNLIMITED_RESTARTS = 1_000_000
# torchelastic looks at its workers, and asks whether there is to be another round, once in so many seconds.
# torchrun's 0.1 would be a tenth of a restart; 0.03 costs the agent 0.3 % of a core.
MONITOR_INTERVAL_S = 0.03
STUB = Path(__file__).parent / "workers" / "launcher_shim.py"


@dataclass(frozen=True)
class Launch:
    """What `launch` starts, and the terms of its rendezvous.

    ``command`` is the workers' own, which a zygote can run; None where it cannot, and ``why_cold`` says why
    (nothing, where the user asked for it). ``shared`` is a directory that all nodes see, where there is one.
    ``notice`` says which flags of torch's rendezvous mean ours.
    """

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    args: list[str]
    terms: Terms
    command: list[str] | None = None
    why_cold: str = ""
    shared: SharedDir | None = None
    notice: str = ""


def parser() -> config.Parser:
    """Give the flags of ``elastic-resume run``: torchrun's, with PET_* variables for defaults, and ours."""
    try:
        stock = get_args_parser()
    except ValueError as error:
        raise ConfigError(f"a PET_* variable of the environment is wrong: {error}") from error
    found = config.Parser(
        prog="elastic-resume run",
        description="Run a training script on this node, as torchrun does, and survive what dies around it.",
        parents=[stock],
        add_help=False,  # torchrun's own -h comes with its flags
    )
    config.add_flags(found)
    return found


@contextlib.contextmanager
def prepared(args: argparse.Namespace, given: set[str], run_id: str, here: Node) -> Iterator[Launch]:
    """Check ``args`` and make a `Launch` of them, valid within the context.

    Raises:
        ConfigError: a value is wrong, or there is no such script.

    """
    args = argparse.Namespace(**vars(args))
    validation.check_script(args)
    args.rdzv_id = run_id
    # The parser of torchrun has taken PET_* variables for its defaults.
    given = given | {name.removeprefix("PET_").lower() for name in os.environ if name.startswith("PET_")}
    scheduled = fill(args, given, here)
    given = set(scheduled.given)
    one_node = validation.check_nodes(args.nnodes) == (1, 1)
    notice = _choose_rendezvous(args, given, one_node=one_node)
    if "max_restarts" not in given:
        args.max_restarts = UNLIMITED_RESTARTS
    if "monitor_interval" not in given:
        args.monitor_interval = MONITOR_INTERVAL_S
    with contextlib.ExitStack() as stack:
        if args.log_dir is None and args.redirects == args.tee == "0":
            # torchelastic needs a place for error files and would leave a new one in /tmp at every start.
            args.log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic_resume_"))
        try:
            config, entrypoint, words = config_from_args(args)
        except (AssertionError, RuntimeError, ValueError, OSError) as error:
            raise ConfigError(str(error) or f"torchrun refuses these flags: {error!r}") from error
        validation.check_launch(config)
        _check_event_log_handler(config)
        ignored = sorted(STOCK_CONF & config.rdzv_configs.keys() - {"timeout"})
        if ignored:
            notice = f"{notice} --rdzv-conf {', '.join(ignored)}: without effect there.".lstrip()
        terms = _terms(config, args, given)
        _prepare_drain(config, args)
        why_cold = validation.why_cold(args, entrypoint)
        command = None
        if isinstance(entrypoint, str):
            command = None if why_cold or args.no_warm else [entrypoint, *words]
            # "${local_rank}" is torchelastic's macro: it puts the number in.
            words = ["-I", "-S", str(STUB), "${local_rank}", entrypoint, *words]
            entrypoint = sys.executable
        yield Launch(config, entrypoint, words, terms, command, why_cold, scheduled.shared, notice)


def _prepare_drain(config: LaunchConfig, args: argparse.Namespace) -> None:
    """Let what schedulers send ahead of the end drain too, and leave the guards time for it."""
    if hasattr(config, "signals_to_handle"):
        before = [name.strip() for name in config.signals_to_handle.split(",") if name.strip()]
        config.signals_to_handle = ",".join(dict.fromkeys([*before, *_drain_signals(args)]))
    grace_s = validation.grace_s(args, os.environ)
    timeout_s = getattr(config, "shutdown_timeout", None)
    if grace_s is not None and timeout_s is not None:
        # torchelastic kills stubs after it. They need some seconds more than their workers.
        config.shutdown_timeout = max(timeout_s, math.ceil(grace_s) + 15)


def _drain_signals(args: argparse.Namespace) -> list[str]:
    return validation.drain_signals(args.drain_signals or os.environ.get(constants.ENV_DRAIN_SIGNALS))


def launch(launch: Launch, observer: Observer, place: Place) -> None:
    """Run the job on this node until it is done.

    Raises:
        ConfigError: the other nodes refuse this node's settings.
        GaveUpError: this node or another ended the job; the text says why.
        RendezvousLostError: no world can be formed any more.
        StoppedError: a signal stopped this agent.

    """
    config = launch.config
    signals = _signals(config)
    before = {number: signal.getsignal(number) for number in signals}
    config.rdzv_configs["make"] = lambda: _handler(config, observer, place, signals)
    rendezvous_handler_registry.register(BACKEND, _create)
    _quieten()
    try:
        launch_agent(config, launch.entrypoint, launch.args)
    except SystemExit as end:
        if end.code:
            raise
    except SignalException as error:
        # The goodbyes to come take a moment; who asks twice is not served faster.
        before = dict.fromkeys(before, signal.SIG_IGN)
        raise StoppedError(signal.Signals(error.sigval)) from error
    except ChildFailedError as error:
        words = observer.last_words(workers_failed=True) or _first_line(error)
        place.member.fail(words)
        raise GaveUpError(words) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if place.member.failure:
        raise GaveUpError(place.member.failure)


@contextlib.contextmanager
def stoppable(launch: Launch) -> Iterator[None]:
    """Let the signals that stop an agent end what is done ahead of `launch`, as a StoppedError."""
    before = {number: signal.signal(number, _raise_stopped) for number in _signals(launch.config)}
    try:
        yield
    except SignalException as error:
        raise StoppedError(signal.Signals(error.sigval)) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signals(config: LaunchConfig) -> list[signal.Signals]:
    names = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    found = [getattr(signal, name.strip()) for name in names if hasattr(signal, name.strip())]
    return list(dict.fromkeys([*found, *ahead()]))  # an older torch knows no others, and leaves them alone


def _handler(
    config: LaunchConfig, observer: Observer, place: Place, signals: list[signal.Signals]
) -> RendezvousHandler:
    """Make the handler of this start."""
    # torchelastic takes these when the first workers start, but a rendezvous can last minutes.
    for number in signals:
        signal.signal(number, _raise_stopped)
    workers = config.nproc_per_node
    return OwnRendezvous(place.member, observer, BACKEND, host=place.host, workers=workers, order=place.order)


def _create(params: RendezvousParameters) -> RendezvousHandler:
    make: Callable[[], RendezvousHandler] = params.config.pop("make")
    return make()


class StoppedError(Exception):
    """A signal stopped the agent. Not an error of the job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def _terms(config: LaunchConfig, args: argparse.Namespace, given: set[str]) -> Terms:
    flags = {key: getattr(args, _dest(flag)) for key, flag in KEYS.items() if _dest(flag) in given}
    conf = {key: value for key, value in config.rdzv_configs.items() if key not in STOCK_CONF}
    return Terms.read(
        config.rdzv_endpoint,
        {**conf, **flags},
        os.environ,
        run_id=config.run_id,
        nodes=(config.min_nodes, config.max_nodes),
        local_addr=config.local_addr,
    )


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _choose_rendezvous(args: argparse.Namespace, given: set[str], *, one_node: bool) -> str:
    """Fill in where the nodes meet in our rendezvous; return what to log of flags that mean torch's own.

    One node for which no place to meet is named stands alone.
    """
    named = args.rdzv_backend if "rdzv_backend" in given else BACKEND
    if named not in {BACKEND, *STOCK_BACKENDS}:
        raise ConfigError(
            f"--rdzv-backend is {named!r}, and nodes meet in elastic_resume's own rendezvous, which needs no "
            "server. Leave the flag out, and let --rdzv-endpoint HOST,HOST,… name some of the nodes."
        )
    args.rdzv_backend = BACKEND
    if args.node_rank < 0:
        raise ConfigError(f"--node-rank is {args.node_rank}: write a whole number, 0 or more.")
    by_master = bool(given & {"master_addr", "master_port", "node_rank"})
    if args.standalone or (one_node and not args.rdzv_endpoint):
        if not one_node:
            raise ConfigError(f"--standalone means one node, and --nnodes is {args.nnodes}.")
        # A number, because the host's own names may not resolve, or not to us.
        args.local_addr = args.local_addr or "127.0.0.1"
        args.rdzv_endpoint = str(Endpoint(args.local_addr, 0))
    elif not args.rdzv_endpoint and by_master:
        args.rdzv_endpoint = str(Endpoint(args.master_addr, args.master_port or 29500))  # torchrun's own
    elif not args.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes is {args.nnodes}, so the nodes need a place to meet: --rdzv-endpoint HOST,HOST,…, "
            "the same on each, naming some of them (three, say: the job outlives each of them)."
        )
    if named == BACKEND and not by_master:
        return ""
    what = "--master-addr" if by_master and named == BACKEND else f"--rdzv-backend {named}"
    return f"{what}: nodes meet in elastic_resume's own rendezvous, at {args.rdzv_endpoint}."


def _check_event_log_handler(config: LaunchConfig) -> None:
    try:
        get_logging_handler(config.event_log_handler)
    except KeyError as error:
        raise ConfigError(
            f"--event-log-handler is {config.event_log_handler!r}, which torch has not."
        ) from error


def _quieten() -> None:
    """Leave out torchelastic's lines about what we say in plain words ourselves."""
    spoken = (
        "Sending process",
        "Closing process",
        "failed (exitcode",
        "Received ",
        "Error waiting on exit",
        "The node '",  # … has failed to send a heartbeat, or to shut down a rendezvous whose host is gone
    )

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(spoken)

    for name in ("multiprocessing.api", "agent.server.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(is_news)


def _raise_stopped(number: int, _frame: object) -> None:
    raise SignalException(f"got signal {number}", sigval=signal.Signals(number))


def _first_line(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    return f"rank {rank} ended with exit code {failure.exitcode}: {str(failure.message).splitlines()[0]}"
