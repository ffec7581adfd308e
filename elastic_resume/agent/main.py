"""One agent's life: own the node's directory, run the job, say in plain words what happened.

Promise: the directory is claimed before anything starts and given up at the end, or by the kernel when the
agent is killed. Every round, and the end with its exit code, is in the event log before it is acted on.
Does not know how worlds form or workers start (`elastic`), nor when to give up (`policy.restart`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastic_resume import config, constants, events
from elastic_resume.agent import shutdown, torchelastic, validation
from elastic_resume.agent.hang_detector import detect_hangs, parse_hang_timeout
from elastic_resume.agent.memory_pressure import MemoryMonitor
from elastic_resume.agent.restart_controller import RestartController
from elastic_resume.agent.round_events import RoundEvents
from elastic_resume.agent.shutdown import ShutdownController
from elastic_resume.agent.snapshots import SnapshotService, serve_snapshots
from elastic_resume.agent.status import EventTail, StatusReporter, StatusSampler
from elastic_resume.agent.torchelastic import open_rendezvous
from elastic_resume.agent.workers.forkserver_manager import ForkServerManager
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError, ElasticResumeError, NodeExcludedError
from elastic_resume.policy import restart
from elastic_resume.policy.hangs import HangThreshold
from elastic_resume.rendezvous.net.protocol import derive_status_key
from elastic_resume.report import metrics
from elastic_resume.report.status import fetch_status
from elastic_resume.schedulers import resources
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.schedulers.preemption import NoticeSource, parse_sources


@dataclass(frozen=True)
class _ParsedFlags:
    """What a user asked for of the parts below, by flag or environment; checked."""

    limits: restart.RestartLimits
    hang_threshold: HangThreshold | None
    requeue_mode: str
    notice_sources: list[NoticeSource]
    metrics_address: tuple[str, int] | None


def run_agent(
    settings: Settings, args: argparse.Namespace, given_flags: set[str], scheduler_context: SchedulerContext
) -> int:
    """Run the job's part on this node and give the exit code of the command.

    Args:
        settings: ours.
        args: torchrun's, of `config.parse_layers`.
        given: the names of those that the user gave.
        here: what the scheduler tells of this node.

    Raises:
        ElasticResumeError: nothing was started.

    """
    asked = _parse_flags(args, given_flags)
    if "node_rank" in given_flags:
        scheduler_context = replace(scheduler_context, node_index=args.node_rank)
    with (
        torchelastic.prepare_launch(args, given_flags, settings.run_id, scheduler_context) as launch,
        NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name) as node_dir,
        contextlib.closing(LeasePage()) as fence,
        contextlib.closing(MemoryMonitor()) as gauge,
        contextlib.closing(RoundEvents()) as round_events,
    ):
        events_path = node_dir.path / constants.EVENTS_FILE
        _set_environment(settings, args, events_path, fence, round_events)
        tail = EventTail(events_path)
        log = events.EventLog(
            events_path, on_line=tail.add_own_line, memory_path=round_events.path, node=settings.node_name
        )
        config = launch.config
        limits = replace(asked.limits, min_nodes=config.min_nodes)
        witness = RestartController(
            settings.node_name, log, events_path, fence, round_events, limits=limits, memory_monitor=gauge
        )
        gauge.start()
        _log_start(launch, args, log, witness, node_dir)
        say, tell = witness.log, witness.emit
        watch = detect_hangs(node_dir.path, config.nproc_per_node, asked.hang_threshold, log=say, emit=tell)
        ending = ShutdownController(scheduler_context, requeue_mode=asked.requeue_mode, log=say, emit=tell)
        with ending.handle_signals():
            with (
                serve_snapshots(node_dir.path, settings, log=say, emit=tell) as snapshots,
                _start_fork_server(launch, args, witness) as warmth,
                watch as pause,
                shutdown.watch_stop_signals(witness.end_round, pause, ending.on_signal),
                shutdown.watch_preemption_notices(
                    asked.notice_sources, log=say, emit=tell, drain=ending.drain_node
                ),
            ):
                witness.on_workers_dead = snapshots.committer.commit_newest
                ending.last_commit_s = lambda: (
                    snapshots.committer.slot_pool.control_block.get("commit_us") / 1e6
                )
                terms = replace(launch.rendezvous_config, on_divergence=settings.on_divergence)
                outcome, code, message = _run_job(
                    replace(launch, rendezvous_config=terms),
                    witness,
                    node_dir,
                    fence,
                    snapshots,
                    scheduler_context=scheduler_context,
                    status_reporter=_create_status_reporter(
                        launch, node_dir, snapshots, memory_monitor=gauge, event_tail=tail, controller=witness
                    ),
                    shutdown_controller=ending,
                    fork_server=warmth,
                    flags=asked,
                )
            if outcome in {"failed", "left"}:
                witness.log_failure_summary(args.log_dir or "")
            code = _finish(
                outcome,
                code,
                message,
                controller=witness,
                shutdown_controller=ending,
                event_log=log,
                scheduler_context=scheduler_context,
            )
        if outcome == "done" and launch.shared_dir is not None:
            launch.shared_dir.remove()
        log.close()
        return code


def _parse_flags(args: argparse.Namespace, given_flags: set[str]) -> _ParsedFlags:
    """Read it.

    Raises:
        ConfigError: a value is wrong.

    """
    requeue = args.requeue or os.environ.get(constants.ENV_REQUEUE) or "auto"
    notice = args.preemption_notice or os.environ.get(constants.ENV_PREEMPTION_NOTICE)
    return _ParsedFlags(
        limits=_parse_limits(args, given_flags),
        hang_threshold=parse_hang_timeout(args.hang_timeout),
        requeue_mode=config.parse_choice("requeue", requeue, config.REQUEUE_MODES),
        notice_sources=parse_sources(notice),
        metrics_address=metrics.parse_listen_address(args.metrics, os.environ),
    )


def _log_start(
    spec: torchelastic.LaunchSpec,
    args: argparse.Namespace,
    event_log: events.EventLog,
    controller: RestartController,
    node_dir: NodeDir,
) -> None:
    config = spec.config
    event_log.emit(
        "agent-start",
        run_id=config.run_id,
        command=shlex.join([args.training_script, *args.training_script_args]),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_world_size=config.nproc_per_node,
    )
    controller.log(f"job {config.run_id}, checkpoints in {node_dir.path}")
    if spec.notice:
        controller.log(spec.notice)
    little = resources.check_shared_memory()
    if little:
        controller.log(f"{little}.")


@contextlib.contextmanager
def _start_fork_server(
    spec: torchelastic.LaunchSpec, args: argparse.Namespace, controller: RestartController
) -> Iterator[ForkServerManager | None]:
    """Have a zygote where there can be one."""
    if spec.worker_command is None:
        if spec.cold_start_reason:
            controller.log(f"workers start cold: {spec.cold_start_reason}.")
        yield None
        return
    preload = [name.strip() for name in (args.preload or "").split(",") if name.strip()]
    warmth = ForkServerManager(spec.worker_command, preload, log=controller.log, emit=controller.emit)
    warmth.start()
    try:
        yield warmth
    finally:
        warmth.close()


def _run_job(
    spec: torchelastic.LaunchSpec,
    controller: RestartController,
    node_dir: NodeDir,
    lease_page: LeasePage,
    snapshots: SnapshotService,
    *,
    scheduler_context: SchedulerContext,
    status_reporter: StatusReporter,
    shutdown_controller: ShutdownController,
    fork_server: ForkServerManager | None,
    flags: _ParsedFlags,
) -> tuple[str, int, str]:
    """Give outcome, exit code and message for people."""
    end = ""
    try:
        if fork_server is not None:
            # A node that joins stops the workers of the others, who would wait for what it still imports.
            with torchelastic.raise_on_stop_signal(spec):
                fork_server.wait_until_ready(spec.rendezvous_config.join_timeout_s)
        with open_rendezvous(
            spec.rendezvous_config,
            node_dir,
            lease_page,
            scheduler_context,
            log=controller.log,
            on_log=controller.on_rendezvous_event,
            status_reporter=status_reporter,
        ) as place:
            if flags.metrics_address is not None:
                key = derive_status_key(spec.rendezvous_config.token)
                status = partial(fetch_status, place.client.address, spec.rendezvous_config.run_id, key)
                threading.Thread(  # looks up the name of this host, which may take long
                    target=metrics.serve_metrics,
                    args=(flags.metrics_address, status, controller.log),
                    daemon=True,
                ).start()
            snapshots.start_replica_comparison(place.client, log=controller.log, emit=controller.emit)
            try:
                torchelastic.run_workers(spec, controller, place)
            finally:
                controller.record_failures(place.client.worker_failures)
            end = f"{place.client.end_reason}."
    except torchelastic.StoppedError as stop:
        shutdown_controller.begin_shutdown(stop.signal)
        return "signalled", constants.EXIT_SIGNAL_BASE + stop.signal, shutdown_controller.describe()
    except NodeExcludedError as error:
        return "left", constants.EXIT_REQUEUE, str(error)
    except ConfigError as error:  # the rendezvous refuses a flag that only it can judge
        return "failed", constants.EXIT_USAGE, str(error)
    except ElasticResumeError as error:
        return (
            "failed",
            constants.EXIT_JOB_ERROR if error.is_deterministic else constants.EXIT_REQUEUE,
            str(error),
        )
    return "done", constants.EXIT_SUCCESS, end


def _finish(
    outcome: str,
    exit_code: int,
    message: str,
    *,
    controller: RestartController,
    shutdown_controller: ShutdownController,
    event_log: events.EventLog,
    scheduler_context: SchedulerContext,
) -> int:
    """Tell how it ended, have the job run again where it should, and give the exit code."""
    idle = controller.starts_without_progress(scheduler_context.restarts)
    decision, exit_code = shutdown_controller.decide(
        outcome,
        exit_code,
        node_rank=controller.node_rank,
        starts_without_progress=idle,
        is_spare=controller.is_spare,
    )
    event_log.emit("agent-end", outcome=outcome, exit_code=exit_code, message=message)
    if message:
        controller.log(f"{outcome}: {message}")
    return shutdown_controller.requeue_if_decided(decision, exit_code)


def _create_status_reporter(
    spec: torchelastic.LaunchSpec,
    node_dir: NodeDir,
    snapshots: SnapshotService,
    *,
    memory_monitor: MemoryMonitor,
    event_tail: EventTail,
    controller: RestartController,
) -> StatusReporter:
    keeper = snapshots.committer
    finger = StatusSampler(
        node_dir.path,
        spec.config.nproc_per_node,
        read_slot_states=keeper.slot_pool.control_block.read_slots,
        describe_problem=lambda: keeper.last_error or memory_monitor.read_pressure().description,
    )
    return StatusReporter(node_dir.path, spec.config.run_id, finger, event_tail, log=controller.log)


def _parse_limits(args: argparse.Namespace, given_flags: set[str]) -> restart.RestartLimits:
    """Read what ends the job. ``--max-restarts`` keeps torchrun's meaning: so many, whatever advances.

    Raises:
        ConfigError: a value is wrong.

    """
    counted = "max_restarts" in given_flags or "PET_MAX_RESTARTS" in os.environ
    default = restart.RestartLimits()
    if counted:
        default = replace(default, max_no_progress=restart.UNLIMITED, max_same_failures=restart.UNLIMITED)
    no_progress = validation.parse_count("--max-no-progress", args.max_no_progress, minimum=1)
    exclude_after = validation.parse_count("--exclude-after", args.exclude_after, minimum=0)
    return replace(
        default,
        max_no_progress=default.max_no_progress if no_progress is None else no_progress,
        exclude_after=default.exclude_after if exclude_after is None else exclude_after,
    )


def _set_environment(
    settings: Settings,
    args: argparse.Namespace,
    events_path: Path,
    lease_page: LeasePage,
    round_events: RoundEvents,
) -> None:
    os.environ.update(settings.to_env())
    os.environ.pop(constants.ENV_FORK_SERVER, None)  # of an agent in whose worker this one runs
    os.environ.pop(constants.ENV_TOKEN, None)  # read by now, and no business of the training script
    os.environ[constants.ENV_AGENT_PID] = str(os.getpid())
    os.environ[constants.ENV_EVENTS_PATH] = str(events_path)
    os.environ[constants.ENV_ROUND_EVENTS] = round_events.path
    os.environ[constants.ENV_LEASE_PAGE] = lease_page.path
    drain_signals = args.drain_signals or os.environ.get(constants.ENV_DRAIN_SIGNALS)
    os.environ[constants.ENV_DRAIN_SIGNALS] = ",".join(validation.parse_drain_signals(drain_signals))
    grace_s = validation.resolve_grace_s(args, os.environ)
    if grace_s is not None:
        os.environ[constants.ENV_GRACE_S] = f"{grace_s:g}"
    elif getattr(args, "shutdown_timeout", None) is not None:
        os.environ.setdefault(constants.ENV_GRACE_S, str(args.shutdown_timeout))
