"""Run workers through an unmodified torchelastic, with our rendezvous in the place of its own.

Only torchelastic's public extension points are used: `prepare_launch` builds torchrun's `LaunchConfig` from
the flags, `run_workers` calls `launch_agent`, and torchelastic gets each view from `ElasticRendezvousHandler`
(a `RendezvousHandler`). The worker's command gets the launcher shim in front of it. This is the only module
that imports torch.distributed.elastic; decisions about failures are in `restart_controller`.

Only `next_rendezvous` and the exit barrier (`_GenerationStore.wait`) wait for other nodes. Both end when the
rendezvous says so: torchelastic never blocks on a store of another host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser

from elastic_resume import config, constants, setting_values
from elastic_resume.agent import options, run_help
from elastic_resume.agent.restart_controller import RestartController
from elastic_resume.agent.status_reporter import StatusReporter
from elastic_resume.agent.temporary_dir import make_temporary_dir
from elastic_resume.agent.workers import forkserver
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.agent.workers.supervisor import read_drain_signals
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.errors import (
    ConfigError,
    JobFailedError,
    MachineError,
    NodeExcludedError,
    RendezvousLostError,
)
from elastic_resume.mechanisms.mechanism import AgentPart
from elastic_resume.mechanisms.registry import TOPICS
from elastic_resume.policy.failure_classification import EXIT, SIGNAL, Failure, WorkerEnd
from elastic_resume.policy.reasons import Departure, DepartureReason, ErrorRaised, JobFinished, Signalled
from elastic_resume.policy.restart import GenerationReport
from elastic_resume.policy.wording import describe
from elastic_resume.rendezvous.client import JobCompleted, RendezvousClient
from elastic_resume.rendezvous.core.interface import EmitEvent, StartWorkers
from elastic_resume.rendezvous.core.messages import JoinSpec
from elastic_resume.rendezvous.endpoint import Endpoint, find_interface, open_listen_endpoint
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.protocol import derive_status_key
from elastic_resume.rendezvous.rendezvous_config import RendezvousConfig
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.schedulers.slurm import SharedDir
from elastic_resume.units import to_printable

logger = logging.getLogger(__name__)

RENDEZVOUS_BACKEND = "elastic_resume"
AGENT_BACKEND = "elastic_resume_agent"  # the former is the entry point's: see `torchrun_handler`
# torchelastic's own variable: with 1 it does not exchange ranks through the store.
ENV_WORKERS_IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
ENV_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchelastic's too, for --shutdown-timeout
# torch's own rendezvous backends that need no server; ours replaces them.
TORCH_RENDEZVOUS_BACKENDS = ("c10d", "static")
# Keys of --rdzv-conf that torch's own backends accept and ours ignores.
TORCH_RENDEZVOUS_KEYS = frozenset({
    "close_timeout", "heartbeat_timeout", "read_timeout", "timeout", "rank", "is_host",
    "keep_alive_interval", "keep_alive_max_attempt", "store_type", "use_libuv", "cas_backoff_max_seconds",
})  # fmt: skip
# torchelastic requires a number, and passes it to workers as TORCHELASTIC_MAX_RESTARTS.
UNLIMITED_RESTARTS = 1_000_000
# How often torchelastic polls its workers and asks whether the view has ended. A restart waits for it on the
# node that failed, then on the others. 0.015 s costs the agent 0.6 % of a core.
MONITOR_INTERVAL_S = 0.015
# What a worker does before its node joins is no part of a generation, so it cannot write events either.
GENERATION_VARIABLES = {name.decode() for name in forkserver.VARIABLES_OF_A_GENERATION} | {
    *("TORCHELASTIC_ERROR_FILE", constants.ENV_GENERATION, constants.ENV_LAST_STEP, constants.ENV_MTBF_S),
    *(constants.ENV_EVIDENCE, constants.ENV_EVENTS_PATH),
}
# Beginnings of lines that say again what we log: what a worker's end, a signal and the job's end cause.
DROPPED_LINES = {
    "torch.distributed.elastic.multiprocessing.api": (
        *("failed (exitcode", "Sending process"),
        "Closing process",  # with --run-path
    ),
    "torch.distributed.elastic.agent.server.api": ("Received ", "Error waiting on exit"),
}
LAUNCHER_SHIM_PATH = Path(__file__).parent / "workers" / "launcher_shim.py"


class ElasticRendezvousHandler(RendezvousHandler):
    """torchelastic's view of our rendezvous, in which every node may leave, the leader included."""

    def __init__(self, spec: LaunchSpec, session: RendezvousSession, controller: RestartController) -> None:
        self._spec, self._session, self._controller = spec, session, controller
        self._client = session.client
        self._store_server: TCPStore | None = None
        self._view: StartWorkers | None = None
        self._logged_start = False  # of the workers of this view

    def get_backend(self) -> str:
        """See base class."""
        return AGENT_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """See base class. Workers use the store that the agent of node rank 0 serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class. torchelastic has stopped its workers before it calls this.

        Raises:
            JobFailedError: the controller, or another node, ended the job.
            NodeExcludedError: this node is to leave the job.
            SystemExit: with 0: the job is done without this node.
            ConfigError, RendezvousLostError: see `RendezvousClient.join`.

        """
        view = self._join_view()
        while self._client.restart_requested:
            # The view has ended before its workers start. Another node may have left because of its failures.
            view = self._join_view()
        for part in self._controller.parts:
            part.begin_generation(view)
        # torchelastic passes its environment on to workers.
        os.environ[constants.ENV_GENERATION] = str(view.generation)
        os.environ[constants.ENV_LAST_STEP] = self._controller.limit_last_step(view)
        os.environ[constants.ENV_MTBF_S] = f"{self._controller.mtbf_s:.3f}"
        os.environ[ENV_WORKERS_IDENTICAL] = str(int(len(set(view.workers_per_node)) == 1))
        store: Any = _GenerationStore(_create_rank_store(view.workers_per_node), self._client)
        bootstrap = RendezvousStoreInfo(*_split_address(view.store_address))
        return RendezvousInfo(store, view.rank, len(view.members), bootstrap)

    def _join_view(self) -> StartWorkers:
        """Judge the last generation, join the next view, and judge again with all nodes' failures."""
        self._client.raise_if_over()
        last_view, view_end = self._view, self._client.view_end
        newest_step = 0
        if last_view is not None:
            summary = self._report_failure(last_view)
            newest_step = summary.newest_step
            self._controller.end_generation(view_end)
            self._client.sleep_unless_over(summary.restart_delay_s)
        # Each generation has a fresh store, so that workers of two generations never meet.
        self._store_server = None
        self._store_server = _start_store_server(self._session.host, self._spec.store_port)
        join_spec = JoinSpec(
            str(Endpoint(self._session.host, self._store_server.port)),
            self._spec.config.nproc_per_node,
            self._session.node_order,
            newest_step,
            script=self._spec.script,
            arguments=self._spec.arguments,
        )
        self._act_before_join()
        try:
            view = self._client.join(join_spec, self._act_before_join)
        except JobCompleted:
            raise SystemExit(0) from None
        if view.rank != 0:
            self._store_server = None  # only the store of rank 0 is used
        changed = last_view is None or not _has_same_members(last_view, view)
        self._controller.start_generation(view, membership_changed=changed)
        self._view, self._logged_start = view, False  # an excluded node reports nothing about this view
        return view

    def _act_before_join(self) -> None:
        for part in self._controller.parts:
            part.before_join()

    def _report_failure(self, view: StartWorkers) -> GenerationReport:
        """Report to the leader how a worker of this node failed, if one did, before any decision."""
        summary = self._controller.report_generation()
        if summary.failure is not None:
            for part in self._controller.parts:
                part.handle_failure(summary.failure)
            summary = self._controller.report_generation()
        if summary.failure is not None:
            self._client.report_failure(view.generation, summary.failure)
        return summary

    def num_nodes_waiting(self) -> int:
        """See base class. Reads a flag of this process, so no unreachable host can block it.

        torchelastic calls this while its workers run. Before the first call a signal may interrupt their
        start. Then they end with this process, without SIGTERM and without the grace.
        """
        if not self._logged_start:
            self._logged_start = True
            logger.debug("all workers of this node have started.")
        return int(self._client.restart_requested)

    def is_closed(self) -> bool:
        """See base class. Always false: the end of one agent closes nothing for the others."""
        return False

    def set_closed(self) -> None:
        """See base class. Does nothing."""

    def get_run_id(self) -> str:
        """See base class."""
        return self._client.run_id

    def shutdown(self) -> bool:
        """See base class. Tells the other nodes the reason if this node ends the job for all."""
        if self._view is not None:
            self._report_failure(self._view)
        if self._controller.job_failure is not None:
            self._client.fail_job(self._controller.job_failure)
        return True


class _GenerationStore:
    """The store that torchelastic gets for one generation; it never waits for an unreachable host.

    torchelastic uses it twice. If nodes have different numbers of workers, it computes ranks through the
    store: we know those numbers and store the result beforehand. When workers have succeeded, it calls
    ``wait`` for the other nodes, with a limit of 300 s: `RendezvousClient.finish_and_wait` replaces that.
    """

    def __init__(self, inner: Store, client: RendezvousClient) -> None:
        self._inner = inner
        self._client = client

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the job is over; torchelastic calls this as its exit barrier."""
        del keys, timeout
        self._client.finish_and_wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _has_same_members(last: StartWorkers, view: StartWorkers) -> bool:
    """Return whether no node was lost or has joined; one that prepares is not lost."""
    staying = {member for member in last.members if member.node not in view.preparing_nodes}
    return staying == set(view.members)


def _create_rank_store(workers_per_node: tuple[int, ...]) -> Store:
    """Create an in-process store with the keys that torchelastic's ``_assign_worker_ranks`` reads.

    A key that is missing is an error after one second.
    """
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    first, total = 0, sum(workers_per_node)
    for rank, count in enumerate(workers_per_node):
        role = {"role": "default", "rank": rank, "local_world_size": count}
        store.set(f"torchelastic/role_info/{rank}", json.dumps(role))
        store.set(f"torchelastic/assigned_ranks/{rank}", json.dumps([first, total, first, total]))
        first += count
    return store


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _start_store_server(host: str, port: int) -> TCPStore:
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        if port:  # another program has it, and most scripts read MASTER_PORT
            return _start_store_server(host, 0)
        raise MachineError(
            f"the workers' TCPStore cannot listen at {host}: {str(error).splitlines()[0][:200]}. Is "
            "--local-addr an address of this machine?"
        ) from error


@dataclass(frozen=True)
class RendezvousSession:
    """This node's membership: its client, its address for workers, its place in the scheduler's order."""

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
    known_generation: int,
    on_log: Callable[[EmitEvent], None],
    status_reporter: StatusReporter,
) -> Iterator[RendezvousSession]:
    """Listen for other nodes and hold this node's membership within the context.

    However the context ends, short of SIGKILL, the other nodes get a leave notice. The name of
    ``node_dir`` is the node's, and this process owns it. ``known_generation`` is the newest that is known of
    the job elsewhere. ``on_log`` takes each event of the rendezvous, in a thread of its own.

    Raises:
        ConfigError: an address is wrong, or another program uses its port.
        NodeFileError: the record of an earlier start cannot be read.

    """
    node = node_dir.path.name
    # A scheduler cannot end what runs on a node that it does not reach.
    launch_id = "" if rendezvous_config.settings.is_strict else scheduler_context.launch_id
    state_file = DurableStateFile(node_dir.path, launch_id=launch_id, node=node)
    listen_endpoint = open_listen_endpoint(
        rendezvous_config.endpoints,
        rendezvous_config.local_addr,
        single_node=rendezvous_config.settings.max_nodes == 1,
    )
    if not rendezvous_config.has_user_token and rendezvous_config.settings.max_nodes > 1:
        logger.warning(
            "no token is set: any host that reaches this node's port and knows the job's name can join. Set "
            "--rdzv-conf token_file=FILE or ELASTIC_RESUME_TOKEN to keep others out."
        )
    os.environ[constants.ENV_LOCAL_HOST] = listen_endpoint.host
    if rendezvous_config.settings.max_nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo would announce the address of this machine's name. NCCL chooses among the interfaces itself.
        interface = find_interface(listen_endpoint.host, rendezvous_config.endpoints)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    # Workers count the generations of other machines' earlier starts too, of a shared disk and the archive.
    # Events of agents and workers have the same numbers if one node's agent does so.
    is_first = scheduler_context.node_order == 0
    of_disk = node_dir.read_generation_of_run() if is_first else node_dir.read_generation()
    client = RendezvousClient(
        rendezvous_config,
        listen_endpoint,
        node=node,
        state_file=state_file,
        max_generation=max(of_disk, known_generation),
        lease=lease_page,
        on_log=on_log,
        topics=TOPICS,
        render_status=status_reporter.render_status,
    )
    client.start()
    status_reporter.start(client, derive_status_key(rendezvous_config.token))
    try:
        yield RendezvousSession(client, listen_endpoint.host, scheduler_context.node_order)
    except BaseException as error:
        client.leave(_find_departure(error))
        raise
    finally:
        status_reporter.close()
        client.close()


def _find_departure(error: BaseException) -> DepartureReason:
    """Say why this node leaves when ``error`` ends its membership."""
    if isinstance(error, StoppedError):
        return Signalled(error.signal.name, error.cause)
    if isinstance(error, NodeExcludedError):
        return Departure.EXCLUDED
    if isinstance(error, JobFailedError):
        return Departure.JOB_FAILED
    if isinstance(error, RendezvousLostError):
        return Departure.NO_RENDEZVOUS
    return ErrorRaised(type(error).__name__, str(error)[:200])


@dataclass(frozen=True)
class LaunchSpec:
    """What `run_workers` starts, and the settings of its rendezvous.

    ``worker_command`` is for the fork server; it is None if workers start cold. ``shared_dir`` is a directory
    that all nodes of a Slurm job see. ``script`` and ``arguments`` are what other nodes compare.
    ``store_port`` is the port of the workers' store on a job's only node; 0: any.
    """

    config: LaunchConfig
    entrypoint: Callable[..., Any] | str
    args: list[str]
    rendezvous_config: RendezvousConfig
    script: str
    arguments: str
    worker_command: list[str] | None = None
    shared_dir: SharedDir | None = None
    store_port: int = 0


class _LogsOfEachStart(LogsSpecs):
    """Give each start of workers a directory of its own: ``attempt_0``, ``attempt_1`` and so on.

    torchelastic counts failures of its own workers only. After another node's failure it would use the same
    directory again, and remove what the workers here have printed.
    """

    def __init__(self, logs_specs: LogsSpecs) -> None:
        super().__init__()
        self._logs_specs, self._starts = logs_specs, 0

    @property
    def root_log_dir(self) -> str:
        """See base class."""
        return self._logs_specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See base class. What it sets in ``envs`` are the workers' own variables."""
        counts = {local_rank: env.get(_RESTART_COUNT, "0") for local_rank, env in envs.items()}
        for env in envs.values():
            env[_RESTART_COUNT] = str(self._starts)
        self._starts += 1
        destinations = self._logs_specs.reify(envs)
        for local_rank, count in counts.items():
            envs[local_rank][_RESTART_COUNT] = count
        return destinations


class _LogsOfParts(LogsSpecs):
    """Send the workers' streams where a mechanism wants them; a stream that has files keeps these."""

    def __init__(self, logs_specs: LogsSpecs, parts: Collection[AgentPart]) -> None:
        super().__init__()
        self._logs_specs, self._parts = logs_specs, parts

    @property
    def root_log_dir(self) -> str:
        """See base class."""
        return self._logs_specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See base class."""
        logs = self._logs_specs.reify(envs)
        for part in self._parts:
            paths = {local_rank: part.find_streams(local_rank) for local_rank in envs}
            for index, files in enumerate((logs.stdouts, logs.stderrs)):
                if not any(files.values()):
                    files.update({local_rank: paths[local_rank][index] for local_rank in envs})
        return logs


def build_parser() -> run_help.RunParser:
    """Return the parser of ``elastic-resume run``: torchrun's flags, with PET_* defaults, and ours."""
    try:
        torchrun_parser = get_args_parser()
    except ValueError as error:
        raise ConfigError(f"a PET_* variable of the environment is wrong: {error}") from error
    shutdown_timeout = config.actions_by_flag(torchrun_parser).get("--shutdown-timeout")
    if shutdown_timeout is not None and ENV_SHUTDOWN_TIMEOUT in os.environ:
        # torchelastic reads it later, and for itself only: workers would not get this time.
        given = os.environ[ENV_SHUTDOWN_TIMEOUT]
        given_s = setting_values.parse_count(ENV_SHUTDOWN_TIMEOUT, given, minimum=0)
        shutdown_timeout.default = shutdown_timeout.default or given_s
    parser = run_help.RunParser(
        prog=run_help.PROG,
        usage=f"%(prog)s {run_help.USAGE}",
        description="Run a training script on this node, as torchrun does, and continue after failures.",
        parents=[torchrun_parser],
        add_help=False,  # torchrun's flags include -h
    )
    config.add_flags(parser)
    run_help.add_help_all(parser)
    return parser


def count_workers(args: argparse.Namespace) -> int:
    """Return how many workers ``--nproc-per-node`` means on this machine.

    Raises:
        ConfigError: it is no number, and no kind of device that is here.

    """
    try:
        return int(determine_local_world_size(args.nproc_per_node))
    except (RuntimeError, ValueError) as error:
        source = args.sources.get("nproc_per_node", "--nproc-per-node")
        raise ConfigError(
            f"{source} is {args.nproc_per_node[:100]!r}: write a number, or auto, cpu, gpu or xpu ({error})."
        ) from error


@contextlib.contextmanager
def prepare_launch(
    args: argparse.Namespace, given_flags: set[str], run_id: str, scheduler_context: SchedulerContext
) -> Iterator[LaunchSpec]:
    """Check ``args`` and build a `LaunchSpec` from them, valid within the context.

    Log the flags whose meaning differs from torchrun's.

    Raises:
        ConfigError: a value is wrong, or the script does not exist.

    """
    args = argparse.Namespace(**vars(args))
    options.check_script(args)
    args.rdzv_id = run_id
    args.rdzv_conf = args.rdzv_conf.strip("'\"")  # no shell has removed them from a YAML list of arguments
    given_flags = list_given_flags(args, given_flags, scheduler_context)
    filled = options.fill_from_scheduler(args, given_flags, scheduler_context)
    least, most = options.parse_nnodes(args.nnodes)
    os.environ[constants.ENV_FIXED_NODES] = str(int(least == most))
    _choose_rendezvous(args, given_flags, one_node=most == 1)
    os.environ.pop(constants.ENV_MAX_RESTARTS, None)
    if "max_restarts" in given_flags:
        os.environ[constants.ENV_MAX_RESTARTS] = str(args.max_restarts)
    args.max_restarts = UNLIMITED_RESTARTS  # the restart controller counts: not each restart is a failure
    if "monitor_interval" not in given_flags:
        args.monitor_interval = MONITOR_INTERVAL_S
    with contextlib.ExitStack() as stack:
        keeps_output = not (args.log_dir is None and args.redirects == args.tee == "0")
        if not keeps_output:
            # torchelastic needs a directory for error files, and would leave one in /tmp at every start.
            args.log_dir = stack.enter_context(make_temporary_dir())
        try:
            if count_workers(args) > 1 and "OMP_NUM_THREADS" not in os.environ:
                os.environ["OMP_NUM_THREADS"] = "1"  # torchrun does the same, and prints four lines
            config, entrypoint, entrypoint_args = config_from_args(args)
            if keeps_output and config.logs_specs is not None:
                config.logs_specs = _LogsOfEachStart(config.logs_specs)
        except (AssertionError, RuntimeError, ValueError, OSError) as error:
            raise ConfigError(str(error) or f"torchrun rejects these flags: {error!r}") from error
        options.check_launch_config(config)
        _check_event_log_handler(config)
        ignored = sorted(TORCH_RENDEZVOUS_KEYS & config.rdzv_configs.keys() - {"timeout"})
        if ignored:
            logger.warning("--rdzv-conf %s: has no effect here.", ", ".join(ignored))
        rendezvous_config = _read_rendezvous_config(config, args, filled.rendezvous_conf)
        _configure_drain(config, args)
        cold_start_reason = options.cold_start_reason(args, entrypoint)
        worker_command = None
        if isinstance(entrypoint, str) and not cold_start_reason and not args.no_warm:
            worker_command = [entrypoint, *entrypoint_args]
        if cold_start_reason:
            logger.debug("workers start cold: %s.", cold_start_reason)
        if isinstance(entrypoint, str):
            # "${local_rank}" is a macro of torchelastic.
            shim = ["-I", "-S", str(LAUNCHER_SHIM_PATH), "${local_rank}"]
            entrypoint_args = [*shim, entrypoint, *entrypoint_args]
            entrypoint = sys.executable
        yield LaunchSpec(
            config,
            entrypoint,
            entrypoint_args,
            rendezvous_config,
            options.identify_script(args.training_script),
            options.describe_script_arguments(args.training_script_args),
            worker_command,
            filled.shared_dir,
            args.master_port if most == 1 and "master_port" in given_flags and not args.standalone else 0,
        )


def list_given_flags(
    args: argparse.Namespace, given_flags: set[str], scheduler_context: SchedulerContext
) -> set[str]:
    """Return the flags that the command line or a user's ``PET_*`` variable gives a value."""
    # torchrun's parser has used PET_* variables as defaults. `scheduler_context` has Kubeflow's.
    from_variables = {
        name.removeprefix("PET_").lower()
        for name in os.environ.keys() - scheduler_context.replaced_variables
        if name.startswith("PET_")
    }
    # PET_STANDALONE=0 and an unset shell variable name no rendezvous; the scheduler still does.
    values = {name: getattr(args, name, None) for name in given_flags | from_variables}
    return {name for name, value in values.items() if value is not False and value != ""}


def _check_event_log_handler(config: LaunchConfig) -> None:
    try:
        get_logging_handler(config.event_log_handler)
    except KeyError as error:
        raise ConfigError(
            f"--event-log-handler is {config.event_log_handler!r}, which torch does not have."
        ) from error


def _configure_drain(config: LaunchConfig, args: argparse.Namespace) -> None:
    """Let torchelastic handle the drain signals too, and give supervisors time to end workers."""
    if hasattr(config, "signals_to_handle"):
        signals = [name.strip() for name in config.signals_to_handle.split(",") if name.strip()]
        signals = [name for name in signals if not _is_ignored(name)]
        config.signals_to_handle = ",".join(dict.fromkeys([*signals, *args.drain_signals]))
    grace_s = options.resolve_grace_s(args, os.environ)
    timeout_s = getattr(config, "shutdown_timeout", None)
    if grace_s is not None and timeout_s is not None:
        # torchelastic kills launcher shims after it; they end some seconds after their workers.
        config.shutdown_timeout = max(timeout_s, math.ceil(grace_s) + 15)


def _is_ignored(name: str) -> bool:
    """Return whether this process was started with the signal ignored, as by nohup or ``&`` in a script."""
    return (
        name in {"SIGHUP", "SIGINT", "SIGQUIT"} and signal.getsignal(signal.Signals[name]) is signal.SIG_IGN
    )


def run_workers(
    spec: LaunchSpec,
    controller: RestartController,
    session: RendezvousSession,
) -> None:
    """Run the job on this node until it is done.

    Raises:
        ConfigError: the other nodes reject this node's settings.
        JobFailedError: this node or another ended the job; the text says why.
        NodeExcludedError: this node is to leave the job.
        RendezvousLostError: no quorum can be reached any more.
        StoppedError: a signal stopped this agent.

    """
    config = spec.config
    signals = _stop_signals(config)
    previous = {number: signal.getsignal(number) for number in signals}

    def create_handler(_: RendezvousParameters) -> RendezvousHandler:
        # torchelastic handles these once the first workers start, but a rendezvous can last minutes.
        for number in signals:
            signal.signal(number, _raise_signal_exception)
        return ElasticRendezvousHandler(spec, session, controller)

    rendezvous_handler_registry.register(AGENT_BACKEND, create_handler)
    _filter_torchelastic_logs()
    if isinstance(spec.entrypoint, str) and config.logs_specs is not None:
        config.logs_specs = _LogsOfParts(config.logs_specs, controller.parts)
    try:
        launch_agent(config, spec.entrypoint, spec.args)
    except SystemExit as end:
        if end.code:
            raise
    except SignalException as error:
        # Leaving the rendezvous takes a moment; a second signal must not interrupt it.
        previous = dict.fromkeys(previous, signal.SIG_IGN)
        raise StoppedError(signal.Signals(error.sigval)) from error
    except ChildFailedError as error:
        job_failure = controller.fail_after_last_restart(_make_failure(session.client.node, error))
        session.client.fail_job(job_failure)
        raise JobFailedError(describe(job_failure), reason=job_failure) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    job_end = session.client.job_end
    if job_end is not None and not isinstance(job_end.reason, JobFinished):
        raise JobFailedError(describe(job_end.reason), reason=job_end.reason)


def find_early_start(spec: LaunchSpec) -> Callable[[int, int], subprocess.Popen[bytes]] | None:
    """Return what starts the launcher shim of a local rank before its node joins; None if nothing can.

    It takes the size of the worker's state too. The shim exits with `constants.EXIT_PARKED` when its worker
    is parked.
    """
    config = spec.config
    # Other nodes never train without a single node. torchelastic gives a worker its GPU or its processors.
    is_placed = getattr(config, "virtual_local_rank", False) or getattr(config, "numa_options", None)
    if spec.worker_command is None or config.max_nodes == 1 or is_placed:
        return None
    return partial(start_early, [str(spec.entrypoint), *spec.args], config.nproc_per_node)


def start_early(
    command: Sequence[str], local_world_size: int, local_rank: int, state_bytes: int
) -> subprocess.Popen[bytes]:
    """Start a launcher shim without a generation, as torchelastic does: ``command`` may have its macros."""
    environ = {k: v for k, v in os.environ.items() if k not in GENERATION_VARIABLES}
    environ |= {
        constants.ENV_EARLY_START: "1",
        constants.ENV_STATE_BYTES: str(state_bytes),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "TORCHELASTIC_RUN_ID": os.environ.get(constants.ENV_RUN_ID, ""),
    }
    words = [Template(word).safe_substitute(local_rank=local_rank) for word in command]
    return subprocess.Popen(words, env=environ, start_new_session=True)


def _make_failure(node: str, error: ChildFailedError) -> Failure:
    """Make the failure of a worker that left no evidence, such as one of ``--run-path``."""
    rank, process = error.get_first_failure()
    code = process.exitcode
    kind, end = (SIGNAL, WorkerEnd(None, process.signal_name())) if code < 0 else (EXIT, WorkerEnd(code))
    return Failure(kind, node, rank, end, message=to_printable(str(process.message).splitlines()[0]))


def _stop_signals(config: LaunchConfig) -> list[signal.Signals]:
    names = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    handled = [getattr(signal, name.strip()) for name in names if hasattr(signal, name.strip())]
    # An older torch has no signals_to_handle, so drain signals are added here.
    return list(dict.fromkeys([*handled, *read_drain_signals()]))


class StoppedError(Exception):
    """A signal stopped the agent; the job has not failed."""

    def __init__(self, signal_number: signal.Signals) -> None:
        super().__init__(signal_number.name)
        self.signal = signal_number
        self.cause = ""  # why this agent has sent itself the signal


def _read_rendezvous_config(
    config: LaunchConfig, args: argparse.Namespace, defaults: dict[str, str]
) -> RendezvousConfig:
    """Parse the rendezvous settings: ``--rdzv-conf``, the node timeout, and the scheduler's defaults."""
    conf = {key: value for key, value in config.rdzv_configs.items() if key not in TORCH_RENDEZVOUS_KEYS}
    return RendezvousConfig.parse(
        config.rdzv_endpoint,
        {**defaults, **conf},
        os.environ,
        run_id=config.run_id,
        nnodes=(config.min_nodes, config.max_nodes),
        local_addr=config.local_addr,
        node_timeout_s=args.node_timeout,
        source=args.sources.get("rdzv_conf", "PET_RDZV_CONF"),
    )


def _choose_rendezvous(args: argparse.Namespace, given_flags: set[str], *, one_node: bool) -> None:
    """Fill in the endpoint of our rendezvous; log a line if the flags name torch's own.

    A single node without an endpoint listens on the loopback address only.
    """
    backend = args.rdzv_backend if "rdzv_backend" in given_flags else RENDEZVOUS_BACKEND
    if backend not in {RENDEZVOUS_BACKEND, *TORCH_RENDEZVOUS_BACKENDS}:
        raise ConfigError(
            f"--rdzv-backend is {backend!r}, and nodes meet in elastic_resume's own rendezvous, which needs "
            "no server. Leave the flag out, and name some of the nodes with --rdzv-endpoint HOST,HOST,…."
        )
    args.rdzv_backend = AGENT_BACKEND
    if args.node_rank < 0:
        raise ConfigError(f"--node-rank is {args.node_rank}: write a whole number, 0 or more.")
    args.node_rank = 0  # the agent has it; torchrun would warn that it has no use for another
    by_master = bool(given_flags & {"master_addr", "master_port", "node_rank"})
    if args.standalone or (one_node and not args.rdzv_endpoint):
        if not one_node:
            raise ConfigError(f"--standalone means one node, and --nnodes is {args.nnodes}.")
        # An address, because the host's own name may not resolve, or resolve to another host.
        args.local_addr = args.local_addr or "127.0.0.1"
        args.rdzv_endpoint = str(Endpoint(args.local_addr, 0))
    elif not args.rdzv_endpoint and by_master:
        args.rdzv_endpoint = str(Endpoint(args.master_addr, args.master_port or 29500))  # torchrun's port
    elif not args.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes is {args.nnodes}, so nodes need an endpoint: give --rdzv-endpoint HOST,HOST,… with "
            "the same value on each node. Name some of the nodes, such as three; the job outlives each one."
        )
    if backend != RENDEZVOUS_BACKEND or by_master:
        flag = "--master-addr" if backend == RENDEZVOUS_BACKEND else f"--rdzv-backend {backend}"
        logger.debug("%s: nodes meet in elastic_resume's own rendezvous, at %s.", flag, args.rdzv_endpoint)


def _filter_torchelastic_logs() -> None:
    """Drop torchelastic's log lines about events that we log ourselves."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(DROPPED_LINES[record.name])

    for name in DROPPED_LINES:
        logging.getLogger(name).addFilter(is_wanted)


def _raise_signal_exception(number: int, _frame: object) -> None:
    raise SignalException(f"got signal {number}", sigval=signal.Signals(number))
