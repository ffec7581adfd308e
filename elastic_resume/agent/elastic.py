"""The one module that touches torch.distributed.elastic, through its public extension points only.

It turns parsed flags into what `launch_agent` takes, puts the stub in front of the worker's command, and
stands between torchelastic and a stock rendezvous: `Rendezvous` tells an `Observer` when a round begins
and lets it refuse one. That class is the seam at which a rendezvous of our own replaces the stock one.

Does not decide anything about failures, and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.distributed.run import config_from_args, get_args_parser

from elastic_resume.agent import preflight
from elastic_resume.errors import ConfigError, GaveUpError, RendezvousLostError

BACKEND = "elastic_resume"
# c10d's own values (30 s of last call, 15 s until a dead node is dropped) are for a cluster that
# starts once; --rdzv-conf sets others. With two attempts instead of three a node that comes back is dropped
# again while it waits, and two agents never formed their second round (torch 2.13).
C10D_CONF = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
# torchelastic wants a number. TORCHELASTIC_MAX_RESTARTS shows it to workers.
UNLIMITED_RESTARTS = 1_000_000
ENDED_KEY = "elastic_resume/ended"  # set in a round's store by the node that ends the job, to its reason
HEARD_KEY = "elastic_resume/heard"  # counts the nodes that have read it
LINGER_S = 2.0  # how long a node that ends the job, and may host the store, waits for the others to read why
LEAVE_S = 0.5
STUB = Path(__file__).with_name("stub.py")


class Observer(Protocol):
    """What the supervisor wants to know and may decide."""

    def before_round(self, *, failed: bool) -> None:
        """A round is asked for; ``failed``: because own workers failed. Raise GaveUpError to refuse it."""

    def round_formed(self, *, node_rank: int, num_nodes: int) -> None:
        """A rendezvous ended; workers start now."""

    def last_words(self) -> str:
        """Why this node ends the job for all; empty when it ends because its workers are done."""


@dataclass(frozen=True)
class Launch:
    """What `launch` starts."""

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    args: list[str]


def torchrun_parser() -> argparse.ArgumentParser:
    """Give torchrun's own flags; their defaults come from PET_* variables."""
    try:
        return get_args_parser()
    except ValueError as error:
        raise ConfigError(f"a PET_* variable of the environment is wrong: {error}") from error


@contextlib.contextmanager
def prepared(args: argparse.Namespace, given: set[str], run_id: str) -> Iterator[Launch]:
    """Check ``args`` and make a `Launch` of them, valid within the context.

    Raises:
        ConfigError: a value is wrong, or there is no such script.

    """
    args = argparse.Namespace(**vars(args))
    preflight.check_script(args)
    one_node = preflight.check_nodes(args.nnodes) == (1, 1)
    args.rdzv_id = run_id
    # The parser of torchrun has taken PET_* variables for its defaults.
    given = given | {name.removeprefix("PET_").lower() for name in os.environ if name.startswith("PET_")}
    _choose_rendezvous(args, given, one_node=one_node)
    if "max_restarts" not in given:
        args.max_restarts = UNLIMITED_RESTARTS
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
        _wrap_rendezvous(config)
        if isinstance(entrypoint, str):
            # "${local_rank}" is torchelastic's macro: it puts the number in.
            words = ["-I", "-S", str(STUB), "${local_rank}", entrypoint, *words]
            entrypoint = sys.executable
        yield Launch(config, entrypoint, words)


def launch(launch: Launch, observer: Observer) -> None:
    """Run the job on this node until it is done.

    Raises:
        ConfigError: the rendezvous refuses its settings.
        GaveUpError: this node or another ended the job; the text says why.
        RendezvousLostError: no world can be formed any more.
        StoppedError: a signal stopped this agent.

    """
    names = getattr(launch.config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    signals = [getattr(signal, name.strip()) for name in names if hasattr(signal, name.strip())]
    before = {number: signal.getsignal(number) for number in signals}
    launch.config.rdzv_configs.update(observer=observer, signals=signals)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous_handler_registry.register(BACKEND, _create)
    _quieten()
    try:
        launch_agent(launch.config, launch.entrypoint, launch.args)
    except SignalException as error:
        raise StoppedError(signal.Signals(error.sigval)) from error
    except ChildFailedError as error:
        raise GaveUpError(observer.last_words() or _first_line(error)) from error
    except RendezvousClosedError as error:
        raise GaveUpError("another node has ended the job, or it is over.") from error
    except (RendezvousConnectionError, RendezvousTimeoutError) as error:
        raise RendezvousLostError(
            f"no rendezvous at {launch.config.rdzv_endpoint or 'the given endpoint'} "
            f"({_cause(error)}): the node that hosts it is gone or too few nodes came. Start the job again."
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StoppedError(Exception):
    """A signal stopped the agent. Not an error of the job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class Rendezvous(RendezvousHandler):
    """A stock rendezvous with an observer, and an end that all nodes of the round hear of.

    The stock one closes without a word: the others notice when their collectives fail, and not why.
    """

    def __init__(self, inner: RendezvousHandler, observer: Observer) -> None:
        self._inner = inner
        self._observer = observer
        self._round: RendezvousInfo | None = None
        self._membership_changed = False

    def get_backend(self) -> str:
        """See base class."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class. Raises GaveUpError when the observer or another node ends the job."""
        self._raise_if_ended()
        if self._round is not None:
            # torchelastic asks for another round for two reasons only.
            self._observer.before_round(failed=not self._membership_changed)
        self._membership_changed = False
        try:
            self._round = self._inner.next_rendezvous()
        except RendezvousClosedError:
            self._raise_if_ended()
            raise
        self._observer.round_formed(node_rank=self._round.rank, num_nodes=self._round.world_size)
        return self._round

    def num_nodes_waiting(self) -> int:
        """See base class. Also non-zero when another node has ended the job, so that workers are stopped."""
        waiting = self._inner.num_nodes_waiting()
        if waiting == 0 and self._ended():
            waiting = 1
        self._membership_changed = waiting > 0
        return waiting

    def is_closed(self) -> bool:
        """See base class."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See base class."""
        close: Callable[[], Any] = self._inner.set_closed  # torch leaves it without types
        close()

    def get_run_id(self) -> str:
        """See base class."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """See base class. Tells the other nodes why, when this one ends the job for all."""
        words = self._observer.last_words()
        if words and self._round is not None and self._round.world_size > 1:
            with contextlib.suppress(RuntimeError):  # the store's host is gone: nobody is left to be told
                self._tell(self._round, words)
        closed = self._inner.shutdown()
        if not words and self._round is not None and self._round.world_size > 1:
            # All nodes come here within milliseconds of the exit barrier. The one with the store must not
            # be the first to go, or the others see it break; which one that is, torch does not tell.
            time.sleep(LEAVE_S)
        return closed

    def _tell(self, this_round: RendezvousInfo, words: str) -> None:
        store = this_round.store
        if not store.check([ENDED_KEY]):
            store.set(ENDED_KEY, words)
        deadline = time.monotonic() + LINGER_S
        while store.add(HEARD_KEY, 0) < this_round.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)

    def _ended(self) -> bool:
        return self._round is not None and _holds(self._round.store, ENDED_KEY)

    def _raise_if_ended(self) -> None:
        if self._round is None or not self._ended():
            return
        store = self._round.store
        words = store.get(ENDED_KEY).decode()
        store.add(HEARD_KEY, 1)
        self._round = None
        raise GaveUpError(words)


def _holds(store: Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:
        return False  # unreachable: the stock rendezvous will say so itself


def _create(params: RendezvousParameters) -> RendezvousHandler:
    config = dict(params.config)
    observer, signals = config.pop("observer"), config.pop("signals")
    inner = RendezvousParameters(
        backend=config.pop("inner_backend"),
        endpoint=params.endpoint,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        **config,
    )
    try:
        handler = rendezvous_handler_registry.create_handler(inner)
    except ValueError as error:  # a name or a value of --rdzv-backend, -endpoint or -conf
        raise ConfigError(f"the rendezvous refuses its settings: {error}") from error
    # torchelastic takes these when the first workers start, but a rendezvous can last minutes. Not earlier:
    # while the store's host is looked for (60 s) no Python runs, and the default action is the prompt end.
    for number in signals:
        signal.signal(number, _raise_stopped)
    return Rendezvous(handler, observer)


def _wrap_rendezvous(config: LaunchConfig) -> None:
    conf = config.rdzv_configs
    if config.rdzv_backend == BACKEND:
        config.rdzv_configs = {**C10D_CONF, **conf, "inner_backend": "c10d"}
    else:
        config.rdzv_configs = {**conf, "inner_backend": config.rdzv_backend}
    config.rdzv_backend = BACKEND


def _choose_rendezvous(args: argparse.Namespace, given: set[str], *, one_node: bool) -> None:
    """Stand alone with one node and nothing said about a rendezvous; else ours unless another is named.

    ``static`` is torchrun's default; it is meant only where it, or one of its own flags, is given.
    """
    open_to_us = not given & {"rdzv_backend", "master_addr", "master_port", "node_rank"}
    if args.standalone or (open_to_us and one_node and not args.rdzv_endpoint):
        if not one_node:
            raise ConfigError(f"--standalone means one node, and --nnodes is {args.nnodes}.")
        args.rdzv_backend, args.rdzv_endpoint = BACKEND, "localhost:0"
        args.local_addr = args.local_addr or "127.0.0.1"  # the host's full name may not resolve, or not to us
    elif open_to_us:
        args.rdzv_backend = BACKEND
        if not args.rdzv_endpoint:
            raise ConfigError(
                f"--nnodes is {args.nnodes}, so the nodes need a place to meet: --rdzv-endpoint HOST:PORT, "
                "the same on each, where HOST is one of them."
            )
    if args.master_port is None:
        args.master_port = 29500  # torchrun's own


def _check_torch_names(config: LaunchConfig) -> None:
    """Check what only torch can judge: where the nodes meet, and where its own events go."""
    try:
        if config.rdzv_backend in {BACKEND, "c10d", "static"}:
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


__all__ = [
    "BACKEND",
    "Launch",
    "Observer",
    "Rendezvous",
    "StoppedError",
    "launch",
    "prepared",
    "torchrun_parser",
]
