"""From parsed flags to torchelastic's `launch_agent`, through its public extension points only.

It makes torchrun's `LaunchConfig`, puts the stub in front of the worker's command, and hands our rendezvous
to torchelastic as a handler of its registry (`handler`). With that module it is all that touches
torch.distributed.elastic.

Does not decide anything about failures, and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.distributed.run import config_from_args, get_args_parser

from elastic_resume import config, contract
from elastic_resume.agent import preflight
from elastic_resume.agent.ahead import ahead
from elastic_resume.agent.handler import BACKEND, Observer, OwnRendezvous
from elastic_resume.agent.place import Place
from elastic_resume.agent.scheduled import fill
from elastic_resume.cluster.node import Node
from elastic_resume.cluster.shared import SharedDir
from elastic_resume.errors import ConfigError, GaveUpError
from elastic_resume.rendezvous.address import Endpoint
from elastic_resume.rendezvous.terms import KEYS, Terms

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
STUB = Path(__file__).with_name("stub.py")


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
    preflight.check_script(args)
    args.rdzv_id = run_id
    # The parser of torchrun has taken PET_* variables for its defaults.
    given = given | {name.removeprefix("PET_").lower() for name in os.environ if name.startswith("PET_")}
    scheduled = fill(args, given, here)
    given = set(scheduled.given)
    one_node = preflight.check_nodes(args.nnodes) == (1, 1)
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
        preflight.check_launch(config)
        _check_event_log_handler(config)
        ignored = sorted(STOCK_CONF & config.rdzv_configs.keys() - {"timeout"})
        if ignored:
            notice = f"{notice} --rdzv-conf {', '.join(ignored)}: without effect there.".lstrip()
        terms = _terms(config, args, given)
        _prepare_drain(config, args)
        why_cold = preflight.why_cold(args, entrypoint)
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
    grace_s = preflight.grace_s(args, os.environ)
    timeout_s = getattr(config, "shutdown_timeout", None)
    if grace_s is not None and timeout_s is not None:
        # torchelastic kills stubs after it. They need some seconds more than their workers.
        config.shutdown_timeout = max(timeout_s, math.ceil(grace_s) + 15)


def _drain_signals(args: argparse.Namespace) -> list[str]:
    return preflight.drain_signals(args.drain_signals or os.environ.get(contract.ENV_DRAIN_SIGNALS))


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
