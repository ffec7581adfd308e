"""From parsed flags to torchelastic's `launch_agent`, through its public extension points only.

It makes torchrun's `LaunchConfig`, puts the stub in front of the worker's command, chooses the rendezvous
and hands it to torchelastic as a handler of its registry (`handler` has the two kinds). With that module
it is all that touches torch.distributed.elastic.

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
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.distributed.run import config_from_args, get_args_parser

from elastic_resume import config, contract
from elastic_resume.agent import preflight
from elastic_resume.agent.ahead import ahead
from elastic_resume.agent.handler import BACKEND, Observer, OwnRendezvous, StockRendezvous
from elastic_resume.agent.place import Place
from elastic_resume.agent.scheduled import fill
from elastic_resume.cluster.node import Node
from elastic_resume.cluster.shared import SharedDir
from elastic_resume.errors import ConfigError, GaveUpError, RendezvousLostError
from elastic_resume.rendezvous.address import Endpoint
from elastic_resume.rendezvous.terms import KEYS, Terms

# Under this name torchelastic finds what a start of ours brings along; plain torchrun knows us by BACKEND.
REGISTERED = "elastic-resume-run"
# c10d's own values (30 s of last call, 15 s until a dead node is dropped) are for a cluster that
# starts once; --rdzv-conf sets others. With two attempts instead of three a node that comes back is dropped
# again while it waits, and two agents never formed their second round (torch 2.13).
C10D_CONF = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
# torchelastic wants a number. TORCHELASTIC_MAX_RESTARTS shows it to workers.
UNLIMITED_RESTARTS = 1_000_000
# torchelastic looks at its workers, and asks whether there is to be another round, once in so many seconds.
# torchrun's 0.1 would be a tenth of a restart; 0.03 costs the agent 0.3 % of a core.
MONITOR_INTERVAL_S = 0.03
STUB = Path(__file__).with_name("stub.py")


@dataclass(frozen=True)
class Launch:
    """What `launch` starts. ``terms`` are those of our own rendezvous; None where a stock one was chosen.

    ``command`` is the workers' own, which a zygote can run; None where it cannot, and ``why_cold`` says why
    (nothing, where the user asked for it). ``shared`` is a directory that all nodes see, where there is one.
    """

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    args: list[str]
    terms: Terms | None
    command: list[str] | None = None
    why_cold: str = ""
    shared: SharedDir | None = None


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
    _choose_rendezvous(args, given, one_node=one_node)
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
        _check_torch_names(config)
        terms = _terms(config, args, given)
        _prepare_drain(config, args)
        why_cold = preflight.why_cold(args, entrypoint)
        command = None
        if isinstance(entrypoint, str):
            command = None if why_cold or args.no_warm else [entrypoint, *words]
            # "${local_rank}" is torchelastic's macro: it puts the number in.
            words = ["-I", "-S", str(STUB), "${local_rank}", entrypoint, *words]
            entrypoint = sys.executable
        yield Launch(config, entrypoint, words, terms, command, why_cold, scheduled.shared)


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


def launch(launch: Launch, observer: Observer, place: Place | None) -> None:
    """Run the job on this node until it is done. ``place`` is needed where ``launch.terms`` are.

    Raises:
        ConfigError: the rendezvous refuses its settings.
        GaveUpError: this node or another ended the job; the text says why.
        RendezvousLostError: no world can be formed any more.
        StoppedError: a signal stopped this agent.

    """
    config = launch.config
    signals = _signals(config)
    before = {number: signal.getsignal(number) for number in signals}
    config.rdzv_configs.update(
        backend_name=config.rdzv_backend,
        make=lambda params: _handler(params, config, observer, place, signals),
    )
    config.rdzv_backend = REGISTERED
    rendezvous_handler_registry.register(REGISTERED, _create)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
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
        if place is not None:
            place.member.fail(words)
        raise GaveUpError(words) from error
    except RendezvousClosedError as error:
        raise GaveUpError("another node has ended the job, or it is over.") from error
    except (RendezvousConnectionError, RendezvousTimeoutError) as error:
        raise RendezvousLostError(
            f"no rendezvous at {config.rdzv_endpoint or 'the given endpoint'} "
            f"({_cause(error)}): the node that hosts it is gone or too few nodes came. Start the job again."
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if place is not None and place.member.failure:
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
    params: RendezvousParameters,
    config: LaunchConfig,
    observer: Observer,
    place: Place | None,
    signals: list[signal.Signals],
) -> RendezvousHandler:
    """Make the handler of this start."""
    handler: RendezvousHandler
    if place is None:
        handler = StockRendezvous(_stock(params), observer, REGISTERED)
    else:
        workers = config.nproc_per_node
        handler = OwnRendezvous(
            place.member, observer, REGISTERED, host=place.host, workers=workers, order=place.order
        )
    # torchelastic takes these when the first workers start, but a rendezvous can last minutes. Not earlier:
    # while a stock store's host is looked for (60 s) no Python runs, and the default is the prompt end.
    for number in signals:
        signal.signal(number, _raise_stopped)
    return handler


def _create(params: RendezvousParameters) -> RendezvousHandler:
    make: Callable[[RendezvousParameters], RendezvousHandler] = params.config.pop("make")
    return make(params)


class StoppedError(Exception):
    """A signal stopped the agent. Not an error of the job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def _stock(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler of torch's own, by its name."""
    conf = dict(params.config)
    backend = conf.pop("backend_name")
    if backend == "c10d":
        conf = {**C10D_CONF, **conf}
    inner = RendezvousParameters(
        backend=backend,
        endpoint=params.endpoint,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        **conf,
    )
    try:
        return rendezvous_handler_registry.create_handler(inner)
    except ValueError as error:  # a name or a value of --rdzv-backend, -endpoint or -conf
        raise ConfigError(f"the rendezvous refuses its settings: {error}") from error


def _terms(config: LaunchConfig, args: argparse.Namespace, given: set[str]) -> Terms | None:
    """Read the terms of our own rendezvous; None where a stock one was chosen."""
    flags = {key: getattr(args, _dest(flag)) for key, flag in KEYS.items() if _dest(flag) in given}
    if config.rdzv_backend != BACKEND:
        if flags:
            names = ", ".join(KEYS[key] for key in flags)
            raise ConfigError(
                f"{names}: for our own rendezvous only, and --rdzv-backend is {config.rdzv_backend}."
            )
        preflight.check_stock_conf(config.rdzv_configs)
        return None
    # LaunchConfig puts torchrun's own default for "timeout" among what the user said.
    conf = {key: value for key, value in config.rdzv_configs.items() if key != "timeout"}
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


def _choose_rendezvous(args: argparse.Namespace, given: set[str], *, one_node: bool) -> None:
    """Stand alone with one node and nothing said about a rendezvous; else ours unless another is named.

    ``static`` is torchrun's default; it is meant only where it, or one of its own flags, is given.
    """
    open_to_us = not given & {"rdzv_backend", "master_addr", "master_port", "node_rank"}
    if args.standalone or (open_to_us and one_node and not args.rdzv_endpoint):
        if not one_node:
            raise ConfigError(f"--standalone means one node, and --nnodes is {args.nnodes}.")
        # A number, because the host's own names may not resolve, or not to us.
        args.local_addr = args.local_addr or "127.0.0.1"
        args.rdzv_backend, args.rdzv_endpoint = BACKEND, str(Endpoint(args.local_addr, 0))
    elif open_to_us:
        args.rdzv_backend = BACKEND
        if not args.rdzv_endpoint:
            raise ConfigError(
                f"--nnodes is {args.nnodes}, so the nodes need a place to meet: --rdzv-endpoint HOST,HOST,…, "
                "the same on each, naming some of them (three, say: the job outlives each of them)."
            )
    if args.master_port is None:
        args.master_port = 29500  # torchrun's own


def _check_torch_names(config: LaunchConfig) -> None:
    """Check what only torch can judge: where the nodes meet, and where its own events go."""
    try:
        if config.rdzv_backend in {"c10d", "static"}:
            _, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
            if port < 0 and config.rdzv_backend == "static":
                raise ConfigError(f"--rdzv-endpoint is {config.rdzv_endpoint!r}: static needs HOST:PORT.")
        get_logging_handler(config.event_log_handler)
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint: {error}") from error
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


def _cause(error: BaseException) -> str:
    text = str(error.__cause__ or error) or type(error).__name__
    return text.splitlines()[0][:200]


def _first_line(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    return f"rank {rank} ended with exit code {failure.exitcode}: {str(failure.message).splitlines()[0]}"
