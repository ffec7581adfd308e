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
from elastic_resume.agent.options import fill_from_scheduler
from elastic_resume.agent.status import StatusReporter
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.agent.workers.supervisor import read_drain_signals
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.errors import ConfigError, JobFailedError, MachineError
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.restart import RoundSummary
from elastic_resume.rendezvous.client import JobCompleted, RendezvousClient
from elastic_resume.rendezvous.config import CONF_FLAGS, RendezvousConfig
from elastic_resume.rendezvous.core.events import EmitEvent, StartWorkers
from elastic_resume.rendezvous.core.messages import JoinSpec
from elastic_resume.rendezvous.endpoint import Endpoint, open_listen_endpoint
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.protocol import derive_status_key
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.schedulers.shared_dir import SharedDir

RENDEZVOUS_BACKEND = "elastic_resume"
ENV_WORKERS_IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"  # torchelastic's: 1 spares it the exchange of ranks


class RoundHooks(Protocol):
    """What the supervisor wants to know and may decide."""

    def summarize_round(self) -> RoundSummary:
        """Tell what became of the round on this node; its workers are dead."""

    def before_round(self, *, failed: bool, reason: str = "") -> None:
        """A round is asked for. Raise GaveUpError to refuse it.

        ``failed``: because own workers failed; ``why``: what the others did. Whether a node was lost that
        took our workers along is told by `round_formed`, and judged there.
        """

    def after_rendezvous(
        self,
        *,
        node_rank: int,
        num_nodes: int,
        generation: int,
        membership_changed: bool = False,
        nodes: Sequence[str] = (),
        step: int = 0,
        failures: Sequence[Failure] = (),
    ) -> None:
        """A rendezvous ended; workers start now. Raise GaveUpError or NodeUnfitError to refuse that.

        ``changed``: not the same processes as last time. ``nodes`` are the members, ``step`` tells how far
        any of them has come, ``told`` how the last world ended, as far as the leader heard.
        """

    def end_reason(self, *, workers_failed: bool = False) -> str:
        """Why this node ends the job for all; empty when it ends because its workers are done.

        ``workers_failed``: say what their failure was, if nothing has been decided.
        """


class ElasticRendezvousHandler(RendezvousHandler):
    """Our own rendezvous: any node may leave, the one that leads included."""

    def __init__(
        self,
        client: RendezvousClient,
        hooks: RoundHooks,
        backend: str,
        *,
        host: str,
        local_world_size: int,
        node_order: int,
    ) -> None:
        """``host`` is where others reach this node, ``order`` its place in the scheduler's order.

        ``workers`` is how many this node starts.
        """
        self._client = client
        self._hooks = hooks
        self._backend = backend
        self._host = host
        self._local_world_size = local_world_size
        self._node_order = node_order
        self._store_server: TCPStore | None = None
        self._world: StartWorkers | None = None

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
        self._client.raise_if_over()
        last, why = self._world, self._client.restart_reason
        step = 0
        if last is not None:
            account = self._report_failure(last)
            step = account.newest_step
            self._hooks.before_round(failed=not why, reason=why)
            self._client.sleep_unless_over(account.restart_delay_s)
        # A fresh store for each generation: workers of different ones never meet. Only rank 0's is used.
        self._store_server = None
        self._store_server = _start_store_server(self._host)
        join = JoinSpec(
            _format_address(self._host, self._store_server.port),
            self._local_world_size,
            self._node_order,
            step,
        )
        try:
            world = self._client.join(join)
        except JobCompleted:
            raise SystemExit(0) from None
        if world.rank != 0:
            self._store_server = None
        self._world = world
        changed = last is None or set(last.members) != set(world.members)
        self._hooks.after_rendezvous(
            node_rank=world.rank,
            num_nodes=len(world.members),
            generation=world.generation,
            membership_changed=changed,
            nodes=[member.node for member in world.members],
            step=world.newest_step,
            failures=world.failures,
        )
        where = RendezvousStoreInfo(*_split_address(world.store_address))
        os.environ[ENV_WORKERS_IDENTICAL] = str(int(len(set(world.workers_per_node)) == 1))
        store: Any = _RoundStore(_create_rank_store(world.workers_per_node), self._client)
        return RendezvousInfo(store, world.rank, len(world.members), where)

    def _report_failure(self, world: StartWorkers) -> RoundSummary:
        """Tell the leader how a worker of this node failed, if one did, before anything follows from it."""
        account = self._hooks.summarize_round()
        if account.failure is not None:
            self._client.report_failure(world.generation, account.failure)
        return account

    def num_nodes_waiting(self) -> int:
        """See base class. A flag of this process: to ask costs nothing, and no silent host can block it."""
        return int(self._client.restart_requested)

    def is_closed(self) -> bool:
        """See base class. The end of one agent closes nothing for the others."""
        return False

    def set_closed(self) -> None:
        """See base class. Does nothing."""

    def get_run_id(self) -> str:
        """See base class."""
        return self._client.run_id

    def shutdown(self) -> bool:
        """See base class. Tells the other nodes why, when this one ends the job for all."""
        if self._world is not None:
            self._report_failure(self._world)
        words = self._hooks.end_reason()
        if words:
            self._client.fail_job(words)
        return True


class _RoundStore:
    """What torchelastic takes for the store of a round; it waits for nobody.

    torchelastic has two uses for it. With different numbers of workers on the nodes it works out ranks: we
    know those numbers and put the result where it looks, so that no silent host can block it. When workers
    have succeeded it waits for the others with ``wait``, for 300 s: `Member.finish` knows better.
    """

    def __init__(self, inner: Store, client: RendezvousClient) -> None:
        self._inner = inner
        self._client = client

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for the end of the job, which is what the exit barrier is for."""
        del keys, timeout
        self._client.finish_and_wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _create_rank_store(workers: tuple[int, ...]) -> Store:
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


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _start_store_server(host: str) -> TCPStore:
    try:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise MachineError(
            f"no store can be served at {host}: {str(error).splitlines()[0][:200]} "
            "(is --local-addr an address of this machine?)"
        ) from error


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class RendezvousSession:
    """A node's place: ``host`` is where workers reach it, ``order`` its place in the scheduler's order."""

    client: RendezvousClient
    host: str
    node_order: int


@contextlib.contextmanager
def open_rendezvous(
    rendezvous_config: RendezvousConfig,
    node_dir: NodeDir,
    lease_page: LeasePage,
    scheduler_context: SchedulerContext,
    *,
    log: Callable[[str], None],
    on_log: Callable[[EmitEvent], None],
    status_reporter: StatusReporter | None = None,
) -> Iterator[RendezvousSession]:
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
    record = DurableStateFile(node_dir.path, launch_id=scheduler_context.launch_id, node=node_dir.path.name)
    seat = open_listen_endpoint(
        rendezvous_config.endpoints,
        rendezvous_config.local_addr,
        single_node=rendezvous_config.max_nodes == 1,
        log=log,
    )
    if seat.warning:
        log(seat.warning)
    if not rendezvous_config.has_user_token and rendezvous_config.max_nodes > 1:
        log(
            "no token is set: whoever reaches this node's port and knows the job's name may join "
            "(--rdzv-token-file or ELASTIC_RESUME_TOKEN would keep others out)."
        )
    name = node_dir.path.name
    member = RendezvousClient(
        rendezvous_config,
        seat,
        node=name,
        state_file=record,
        max_generation=node_dir.read_generation(),
        lease=lease_page,
        on_log=on_log,
        on_peer_status=status_reporter.on_peer_status if status_reporter else lambda _: None,
        render_status=status_reporter.render_status if status_reporter else None,
    )
    member.start()
    if status_reporter:
        status_reporter.start(member, derive_status_key(rendezvous_config.token))
    try:
        yield RendezvousSession(member, seat.host, scheduler_context.node_index)
    except BaseException as end:
        member.leave((str(end) or type(end).__name__)[:200])
        raise
    finally:
        if status_reporter:
            status_reporter.close()
        member.close()


TORCH_RENDEZVOUS_BACKENDS = ("c10d", "static")
"""torch's own rendezvous that need no server: ours stands in for them."""
TORCH_RENDEZVOUS_KEYS = {
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
LAUNCHER_SHIM_PATH = Path(__file__).parent / "workers" / "launcher_shim.py"


@dataclass(frozen=True)
class LaunchSpec:
    """What `launch` starts, and the terms of its rendezvous.

    ``command`` is the workers' own, which a zygote can run; None where it cannot, and ``why_cold`` says why
    (nothing, where the user asked for it). ``shared`` is a directory that all nodes see, where there is one.
    ``notice`` says which flags of torch's rendezvous mean ours.
    """

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    args: list[str]
    rendezvous_config: RendezvousConfig
    worker_command: list[str] | None = None
    cold_start_reason: str = ""
    shared_dir: SharedDir | None = None
    notice: str = ""


def build_parser() -> config.Parser:
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
def prepare_launch(
    args: argparse.Namespace, given_flags: set[str], run_id: str, scheduler_context: SchedulerContext
) -> Iterator[LaunchSpec]:
    """Check ``args`` and make a `Launch` of them, valid within the context.

    Raises:
        ConfigError: a value is wrong, or there is no such script.

    """
    args = argparse.Namespace(**vars(args))
    validation.check_script(args)
    args.rdzv_id = run_id
    # The parser of torchrun has taken PET_* variables for its defaults.
    given_flags = given_flags | {
        name.removeprefix("PET_").lower() for name in os.environ if name.startswith("PET_")
    }
    scheduled = fill_from_scheduler(args, given_flags, scheduler_context)
    given_flags = set(scheduled.given_flags)
    one_node = validation.parse_nnodes(args.nnodes) == (1, 1)
    notice = _choose_rendezvous(args, given_flags, one_node=one_node)
    if "max_restarts" not in given_flags:
        args.max_restarts = UNLIMITED_RESTARTS
    if "monitor_interval" not in given_flags:
        args.monitor_interval = MONITOR_INTERVAL_S
    with contextlib.ExitStack() as stack:
        if args.log_dir is None and args.redirects == args.tee == "0":
            # torchelastic needs a place for error files and would leave a new one in /tmp at every start.
            args.log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic_resume_"))
        try:
            config, entrypoint, words = config_from_args(args)
        except (AssertionError, RuntimeError, ValueError, OSError) as error:
            raise ConfigError(str(error) or f"torchrun refuses these flags: {error!r}") from error
        validation.check_launch_config(config)
        _check_event_log_handler(config)
        ignored = sorted(TORCH_RENDEZVOUS_KEYS & config.rdzv_configs.keys() - {"timeout"})
        if ignored:
            notice = f"{notice} --rdzv-conf {', '.join(ignored)}: without effect there.".lstrip()
        terms = _read_rendezvous_config(config, args, given_flags)
        _configure_drain(config, args)
        why_cold = validation.cold_start_reason(args, entrypoint)
        command = None
        if isinstance(entrypoint, str):
            command = None if why_cold or args.no_warm else [entrypoint, *words]
            # "${local_rank}" is torchelastic's macro: it puts the number in.
            words = ["-I", "-S", str(LAUNCHER_SHIM_PATH), "${local_rank}", entrypoint, *words]
            entrypoint = sys.executable
        yield LaunchSpec(config, entrypoint, words, terms, command, why_cold, scheduled.shared_dir, notice)


def _configure_drain(config: LaunchConfig, args: argparse.Namespace) -> None:
    """Let what schedulers send ahead of the end drain too, and leave the guards time for it."""
    if hasattr(config, "signals_to_handle"):
        before = [name.strip() for name in config.signals_to_handle.split(",") if name.strip()]
        config.signals_to_handle = ",".join(dict.fromkeys([*before, *_parse_drain_signals(args)]))
    grace_s = validation.resolve_grace_s(args, os.environ)
    timeout_s = getattr(config, "shutdown_timeout", None)
    if grace_s is not None and timeout_s is not None:
        # torchelastic kills stubs after it. They need some seconds more than their workers.
        config.shutdown_timeout = max(timeout_s, math.ceil(grace_s) + 15)


def _parse_drain_signals(args: argparse.Namespace) -> list[str]:
    return validation.parse_drain_signals(args.drain_signals or os.environ.get(constants.ENV_DRAIN_SIGNALS))


def run_workers(spec: LaunchSpec, hooks: RoundHooks, session: RendezvousSession) -> None:
    """Run the job on this node until it is done.

    Raises:
        ConfigError: the other nodes refuse this node's settings.
        GaveUpError: this node or another ended the job; the text says why.
        RendezvousLostError: no world can be formed any more.
        StoppedError: a signal stopped this agent.

    """
    config = spec.config
    signals = _stop_signals(config)
    before = {number: signal.getsignal(number) for number in signals}
    config.rdzv_configs["make"] = lambda: _create_handler(config, hooks, session, signals)
    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _create_from_parameters)
    _filter_torchelastic_logs()
    try:
        launch_agent(config, spec.entrypoint, spec.args)
    except SystemExit as end:
        if end.code:
            raise
    except SignalException as error:
        # The goodbyes to come take a moment; who asks twice is not served faster.
        before = dict.fromkeys(before, signal.SIG_IGN)
        raise StoppedError(signal.Signals(error.sigval)) from error
    except ChildFailedError as error:
        words = hooks.end_reason(workers_failed=True) or _describe_first_failure(error)
        session.client.fail_job(words)
        raise JobFailedError(words) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if session.client.job_failure:
        raise JobFailedError(session.client.job_failure)


@contextlib.contextmanager
def raise_on_stop_signal(spec: LaunchSpec) -> Iterator[None]:
    """Let the signals that stop an agent end what is done ahead of `launch`, as a StoppedError."""
    before = {number: signal.signal(number, _raise_signal_exception) for number in _stop_signals(spec.config)}
    try:
        yield
    except SignalException as error:
        raise StoppedError(signal.Signals(error.sigval)) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_signals(config: LaunchConfig) -> list[signal.Signals]:
    names = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    found = [getattr(signal, name.strip()) for name in names if hasattr(signal, name.strip())]
    return list(
        dict.fromkeys([*found, *read_drain_signals()])
    )  # an older torch knows no others, and leaves them alone


def _create_handler(
    config: LaunchConfig, hooks: RoundHooks, session: RendezvousSession, signals: list[signal.Signals]
) -> RendezvousHandler:
    """Make the handler of this start."""
    # torchelastic takes these when the first workers start, but a rendezvous can last minutes.
    for number in signals:
        signal.signal(number, _raise_signal_exception)
    workers = config.nproc_per_node
    return ElasticRendezvousHandler(
        session.client,
        hooks,
        RENDEZVOUS_BACKEND,
        host=session.host,
        local_world_size=workers,
        node_order=session.node_order,
    )


def _create_from_parameters(params: RendezvousParameters) -> RendezvousHandler:
    make: Callable[[], RendezvousHandler] = params.config.pop("make")
    return make()


class StoppedError(Exception):
    """A signal stopped the agent. Not an error of the job."""

    def __init__(self, signal_number: signal.Signals) -> None:
        super().__init__(signal_number.name)
        self.signal = signal_number


def _read_rendezvous_config(
    config: LaunchConfig, args: argparse.Namespace, given_flags: set[str]
) -> RendezvousConfig:
    flags = {
        key: getattr(args, _flag_to_dest(flag))
        for key, flag in CONF_FLAGS.items()
        if _flag_to_dest(flag) in given_flags
    }
    conf = {key: value for key, value in config.rdzv_configs.items() if key not in TORCH_RENDEZVOUS_KEYS}
    return RendezvousConfig.parse(
        config.rdzv_endpoint,
        {**conf, **flags},
        os.environ,
        run_id=config.run_id,
        nnodes=(config.min_nodes, config.max_nodes),
        local_addr=config.local_addr,
    )


def _flag_to_dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _choose_rendezvous(args: argparse.Namespace, given_flags: set[str], *, one_node: bool) -> str:
    """Fill in where the nodes meet in our rendezvous; return what to log of flags that mean torch's own.

    One node for which no place to meet is named stands alone.
    """
    named = args.rdzv_backend if "rdzv_backend" in given_flags else RENDEZVOUS_BACKEND
    if named not in {RENDEZVOUS_BACKEND, *TORCH_RENDEZVOUS_BACKENDS}:
        raise ConfigError(
            f"--rdzv-backend is {named!r}, and nodes meet in elastic_resume's own rendezvous, which needs no "
            "server. Leave the flag out, and let --rdzv-endpoint HOST,HOST,… name some of the nodes."
        )
    args.rdzv_backend = RENDEZVOUS_BACKEND
    if args.node_rank < 0:
        raise ConfigError(f"--node-rank is {args.node_rank}: write a whole number, 0 or more.")
    by_master = bool(given_flags & {"master_addr", "master_port", "node_rank"})
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
    if named == RENDEZVOUS_BACKEND and not by_master:
        return ""
    what = "--master-addr" if by_master and named == RENDEZVOUS_BACKEND else f"--rdzv-backend {named}"
    return f"{what}: nodes meet in elastic_resume's own rendezvous, at {args.rdzv_endpoint}."


def _check_event_log_handler(config: LaunchConfig) -> None:
    try:
        get_logging_handler(config.event_log_handler)
    except KeyError as error:
        raise ConfigError(
            f"--event-log-handler is {config.event_log_handler!r}, which torch has not."
        ) from error


def _filter_torchelastic_logs() -> None:
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


def _raise_signal_exception(number: int, _frame: object) -> None:
    raise SignalException(f"got signal {number}", sigval=signal.Signals(number))


def _describe_first_failure(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    return f"rank {rank} ended with exit code {failure.exitcode}: {str(failure.message).splitlines()[0]}"
