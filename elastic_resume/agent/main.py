"""Run one node's agent: lock its directory, supervise its workers, return the exit code.

`run_agent` claims the node's directory, builds the parts of the agent and hands control to torchelastic.
`restart_controller` decides about restarts, `shutdown` handles the agent's own end. The event log has every
generation, and the agent's end with its exit code, before either takes effect.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from elastic_resume import config, console, constants, linux, machine
from elastic_resume.agent import options, shutdown, torchelastic
from elastic_resume.agent.failure_evidence import FailureEvents, MemoryMonitor
from elastic_resume.agent.restart_controller import RestartController
from elastic_resume.agent.shutdown import ShutdownController
from elastic_resume.agent.snapshots import serve_snapshots
from elastic_resume.agent.status_reporter import EventTail, StatusReporter, StatusSampler
from elastic_resume.agent.workers import worker_request
from elastic_resume.agent.workers.forkserver_manager import (
    ForkServerManager,
    PreforkedServer,
    find_start_hook,
)
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.checkpoint.node_dir import NodeDir, mask_secrets, record_settings
from elastic_resume.config import Settings, export_worker_options
from elastic_resume.errors import ConfigError, ElasticResumeError, MachineError, NodeExcludedError
from elastic_resume.events import Event, EventLog
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, EventSummary, StatusMember
from elastic_resume.mechanisms.registry import make_agent_parts
from elastic_resume.policy import restart
from elastic_resume.policy.reasons import ErrorRaised, JobFinished, Signalled, to_json
from elastic_resume.policy.wording import describe, describe_memory
from elastic_resume.rendezvous.net.protocol import derive_status_key, derive_worker_key
from elastic_resume.report import metrics
from elastic_resume.report.agent_status import fetch_status
from elastic_resume.schedulers import slurm
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)


class _Outcome(NamedTuple):
    """How the job ended on this node: done, failed, signalled or left."""

    kind: str
    exit_code: int
    message: str
    reason: object


def run_agent(
    settings: Settings,
    args: argparse.Namespace,
    given_flags: set[str],
    scheduler_context: SchedulerContext,
    preforked: PreforkedServer | None,
) -> int:
    """Run the job's part on this node and return the command's exit code.

    ``args`` are the values of `config.parse_flags`, and ``given_flags`` the names of the flags that
    the user gave. ``preforked`` is the workers' first fork server.

    Raises:
        ElasticResumeError: nothing was started.

    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr may be closed
        faulthandler.enable()  # a crash in native code must say where, since the node is lost without a word
    metrics.check_installed(args.metrics)
    os.environ[constants.ENV_QUIET] = "1" if args.quiet else "0"  # workers read it too
    if "node_rank" in given_flags:
        scheduler_context = replace(scheduler_context, node_order=args.node_rank)
    log_handler = console.StderrHandler(f"elastic_resume[{settings.node_name}] ")
    with (
        console.log_handler(console.PACKAGE_LOGGER, log_handler, console.read_level(os.environ)),
        torchelastic.prepare_launch(args, given_flags, settings.run_id, scheduler_context) as spec,
        NodeDir.claim(
            settings.ckpt_dir, settings.run_id, settings.node_name, command=config.mask_command(sys.argv)
        ) as node_dir,
        contextlib.closing(LeasePage()) as lease_page,
        contextlib.closing(MemoryMonitor()) as memory_monitor,
        contextlib.closing(FailureEvents()) as evidence,
        os.fdopen(linux.create_anonymous_file("elastic_resume-parked")) as parked_file,
    ):
        if settings.resume == "never":  # for each start of an agent, not of its workers
            node_dir.move_earlier_run_aside()
        events_path = node_dir.path / constants.EVENTS_FILE
        _set_environment(settings, args, events_path, lease_page, evidence)
        os.environ[constants.ENV_WORKER_KEY] = derive_worker_key(spec.rendezvous_config.token).hex()
        os.environ[constants.ENV_PARKED] = linux.name_descriptor(parked_file.fileno())
        event_tail = EventTail(events_path)
        with contextlib.closing(
            EventLog(
                events_path,
                on_line=event_tail.add_own_line,
                memory_path=evidence.path,
                node=settings.node_name,
            )
        ) as event_log:
            limits = replace(_read_limits(args, given_flags), min_nodes=spec.config.min_nodes)
            controller = RestartController(
                event_log, lease_page, evidence, memory_monitor, node=settings.node_name, limits=limits
            )
            memory_monitor.start()
            agent = _Agent(
                settings=settings,
                args=args,
                spec=spec,
                preforked=preforked,
                node_dir=node_dir,
                scheduler_context=scheduler_context,
                lease_page=lease_page,
                memory_monitor=memory_monitor,
                event_log=event_log,
                event_tail=event_tail,
                controller=controller,
                shutdown_controller=ShutdownController(scheduler_context, event_log),
            )
            return agent.run()


def _commit_newest(committer: CheckpointCommitter) -> None:
    with contextlib.suppress(MachineError):  # the committer has logged the error, and tries again at the end
        committer.commit()


@dataclass(frozen=True, kw_only=True)
class _Agent:
    """The parts of one agent, and how they run the job together."""

    settings: Settings
    args: argparse.Namespace
    spec: torchelastic.LaunchSpec
    preforked: PreforkedServer | None
    node_dir: NodeDir
    scheduler_context: SchedulerContext
    lease_page: LeasePage
    memory_monitor: MemoryMonitor
    event_log: EventLog
    event_tail: EventTail
    controller: RestartController
    shutdown_controller: ShutdownController

    def run(self) -> int:
        """Run the job and return the exit code."""
        self._log_start()
        emit = self.event_log.emit
        with self.shutdown_controller.handle_signals():
            with (
                serve_snapshots(self.node_dir.path, self.settings, emit) as committer,
                self._start_fork_server() as fork_server,
                shutdown.watch_stop_signals(
                    self.controller.revoke_grace,
                    self._begin_stop,
                ),
                contextlib.ExitStack() as closing,
            ):
                self.controller.on_workers_dead = committer.commit_newest
                self.shutdown_controller.last_commit_s = lambda: committer.last_commit_s
                outcome = self._run_job(committer, fork_server, closing)
                self.controller.log.end_wait()
                # Before the parts are closed, which may read checkpoints: the newest snapshot's too.
                _commit_newest(committer)
                exit_code = self._report_end(outcome, committer)
                self._pass_events_on()  # a mechanism may take long, and a person waits for the reason
            self.shutdown_controller.ignore_signals()
            self._finish_parts()
        if outcome.kind == "done" and self.spec.shared_dir is not None:
            self.spec.shared_dir.remove()
        return exit_code

    def _begin_stop(self, signal_number: int) -> None:
        """Note a signal that this process got, in the thread that reads them."""
        self.shutdown_controller.on_signal(signal_number)
        self.controller.begin_stop(self.shutdown_controller.find_cause(signal_number))

    def _log_start(self) -> None:
        launch = self.spec.config
        record_settings(self.node_dir.path, self.args.settings_text)
        self.event_log.emit(
            "agent-start",
            run_id=launch.run_id,
            command=shlex.join([self.args.training_script, *mask_secrets(self.args.training_script_args)]),
            min_nodes=launch.min_nodes,
            max_nodes=launch.max_nodes,
            local_world_size=launch.nproc_per_node,
            settings=self.args.given_settings,
        )
        count = format_count(launch.nproc_per_node, "worker")
        logger.info("job %s: %s on this node, checkpoints in %s", launch.run_id, count, self.node_dir.path)
        shared_memory_problem = machine.check_shared_memory()
        if shared_memory_problem:
            logger.warning("%s.", shared_memory_problem)
        process_limit = machine.ProcessLimit.find_own()
        if process_limit and (shortage := process_limit.describe_shortage(launch.nproc_per_node)):
            logger.warning("%s.", shortage)
        for message in config.find_misspelled_variables(os.environ):
            logger.warning("%s", message)

    @contextlib.contextmanager
    def _start_fork_server(self) -> Iterator[ForkServerManager | None]:
        """Run a fork server within the context; yield None where workers must start cold."""
        hook = None if self.spec.worker_command is None else find_start_hook()
        if hook is not None:
            logger.info(
                "workers start as new processes, which takes seconds: %s reads RANK at Python's start.", hook
            )
        if self.spec.worker_command is None or hook is not None:
            if self.preforked is not None:
                self.preforked.close()
            yield None
            return
        fork_server = ForkServerManager(
            self.spec.worker_command,
            self.args.preload or [],
            self.event_log.emit,
            self.preforked,
            import_first=self.spec.config.max_nodes > 1,
        )
        fork_server.start()
        try:
            yield fork_server
        finally:
            fork_server.close()

    def _create_status_reporter(
        self, committer: CheckpointCommitter, parts: Mapping[AgentPart, StatusMember | None]
    ) -> StatusReporter:
        sampler = StatusSampler(
            self.node_dir.path,
            self.spec.config.nproc_per_node,
            read_slot_states=committer.slot_pool.control_block.read_slots,
            describe_problem=lambda: (
                committer.last_error or describe_memory(self.memory_monitor.read_pressure())
            ),
        )
        return StatusReporter(self.node_dir.path, sampler, parts, self.event_tail)

    def _run_job(
        self,
        committer: CheckpointCommitter,
        fork_server: ForkServerManager | None,
        closing: contextlib.ExitStack,
    ) -> _Outcome:
        """Join the rendezvous, run workers until the job ends, and map errors to an outcome.

        ``closing`` closes the mechanisms' parts, after this node has left: the others wait for that.
        """
        spec = self.spec
        context = AgentContext(
            self.node_dir.path,
            spec.config.nproc_per_node,
            spec.rendezvous_config.settings.node_timeout_s,
            self.event_log.emit,
            self.controller.read_evidence,
            self.shutdown_controller.request_drain,
            vars(self.args),
            committer,
            torchelastic.find_early_start(spec),
            lambda local_rank: worker_request.is_parked(str(local_rank)),
            summarize_event=_summarize_event,
        )
        self.controller.parts = parts = make_agent_parts(context)
        try:
            with torchelastic.open_rendezvous(
                spec.rendezvous_config,
                self.node_dir,
                self.lease_page,
                self.scheduler_context,
                known_generation=max((part.find_generation() for part in parts), default=0),
                on_log=self.controller.on_rendezvous_event,
                status_reporter=self._create_status_reporter(committer, parts),
            ) as session:
                client = session.client
                for part in parts:
                    closing.callback(_close, part)
                    part.start(client)
                if fork_server is not None:
                    client.begin_preparation()
                    fork_server.call_when_ready(client.finish_preparation)
                self._serve_metrics(client.address)
                try:
                    torchelastic.run_workers(spec, self.controller, session)
                except torchelastic.StoppedError as stop:
                    self.shutdown_controller.begin_shutdown(stop.signal)
                    stop.cause = self.shutdown_controller.drain_cause()
                    raise
                finally:
                    end = client.job_end
                    self.controller.record_end(end)
                reason = end.reason if end else JobFinished()
                return _Outcome("done", constants.EXIT_SUCCESS, f"{describe(reason)}.", reason)
        except torchelastic.StoppedError as stop:
            self.shutdown_controller.begin_shutdown(stop.signal)
            exit_code = constants.EXIT_SIGNAL_BASE + stop.signal
            text = self.shutdown_controller.describe()
            return _Outcome("signalled", exit_code, text, Signalled(stop.signal.name, stop.cause))
        except NodeExcludedError as error:
            if directory := os.environ.get(constants.ENV_EXCLUDED_DIR):
                slurm.record_excluded_node(directory, os.environ.get("SLURMD_NODENAME", ""))
            return _Outcome("left", constants.EXIT_REQUEUE, str(error), error.reason)
        except ConfigError as error:  # only the rendezvous can check some flags
            return _Outcome("failed", constants.EXIT_USAGE, str(error), _find_reason(error))
        except ElasticResumeError as error:
            ends_for_good = error.is_deterministic and not restart.is_worth_requeue(error.reason)
            exit_code = constants.EXIT_JOB_ERROR if ends_for_good else constants.EXIT_REQUEUE
            return _Outcome("failed", exit_code, str(error), _find_reason(error))

    def _serve_metrics(self, agent_address: str) -> None:
        if self.args.metrics is None:
            return
        rendezvous_config = self.spec.rendezvous_config
        key = derive_status_key(rendezvous_config.token)
        status = partial(fetch_status, agent_address, rendezvous_config.run_id, key)
        threading.Thread(  # a thread, because resolving the name of this host may take long
            target=metrics.serve_metrics, args=(self.args.metrics, status), daemon=True
        ).start()

    def _describe_saved(self, committer: CheckpointCommitter) -> str:
        """Describe what this node's disk holds of the training, after the last commit."""
        try:
            step = committer.newest_checkpoint_step()
        except ElasticResumeError as error:
            return f"what was saved could not be read: {str(error).rstrip('.')}"
        if step is not None:
            newer_text = ", but no newer step" if committer.last_error else ""
            return f"step {step} is saved in {self.node_dir.path}{newer_text}"
        has_trained = self.controller.has_finished_a_step()
        reason = "no snapshot was completed" if has_trained else "no step was finished"
        return f"nothing was saved, because {committer.last_error.rstrip('.') or reason}"

    def _report_end(self, outcome: _Outcome, committer: CheckpointCommitter) -> int:
        """Log how the agent ends, and return the exit code."""
        if outcome.kind in {"failed", "left"}:
            self.controller.log_failure_summary(self.args.log_dir or "")
        exit_code = self.shutdown_controller.decide_exit_code(
            outcome.kind,
            outcome.exit_code,
            node_rank=self.controller.node_rank,
            is_spare=self.controller.is_spare,
        )
        self.event_log.emit(
            "agent-end",
            outcome=outcome.kind,
            exit_code=exit_code,
            reason=to_json(outcome.reason),
            message=outcome.message,
            speaks_for_job=self.controller.speaks_for_job(outcome.kind),
        )
        if outcome.message:
            prefix = f"{outcome.kind}: " if outcome.kind in {"done", "failed"} else ""
            level = logging.ERROR if outcome.kind in {"failed", "left"} else logging.INFO
            text = outcome.message
            if outcome.kind == "signalled":
                text = f"{text.rstrip('.')}; {self._describe_saved(committer)}."
            logger.log(level, "%s%s", prefix, text)
        return exit_code

    def _pass_events_on(self) -> None:
        """Pass the last events on to the mechanisms, which the status thread does no more."""
        events = self.event_tail.read()
        for part in self.controller.parts:
            with _log_defects():
                for event in events:
                    part.observe(event)

    def _finish_parts(self) -> None:
        """Let the mechanisms act after the agent's last event."""
        self._pass_events_on()
        for part in self.controller.parts:
            with _log_defects():
                part.finish()


def _close(part: AgentPart) -> None:
    with _log_defects():
        part.close()


@contextlib.contextmanager
def _log_defects() -> Iterator[None]:
    """Log an error of a mechanism, which must not change how the job has ended."""
    try:
        yield
    except Exception:
        logger.exception("a part of the agent failed at its end; a defect of elastic_resume")


def _summarize_event(event: Event) -> EventSummary | None:
    from elastic_resume.report import alerts  # noqa: PLC0415  few jobs need it

    return alerts.summarize_event(event)


def _find_reason(error: ElasticResumeError) -> object:
    return error.reason or ErrorRaised(type(error).__name__, str(error))


def _read_limits(args: argparse.Namespace, given_flags: set[str]) -> restart.RestartLimits:
    """Read the settings that limit restarts.

    ``--max-restarts`` keeps torchrun's meaning: it counts restarts, whether or not training advances.
    """
    limits = restart.RestartLimits()
    if "max_restarts" in given_flags or "PET_MAX_RESTARTS" in os.environ:
        limits = replace(
            limits,
            max_no_progress=restart.UNLIMITED,
            max_same_failures=restart.UNLIMITED,
            max_restarts=args.max_restarts,
        )
    if args.max_no_progress is not None:
        limits = replace(limits, max_no_progress=args.max_no_progress)
    if args.exclude_after is not None:
        limits = replace(limits, exclude_after=args.exclude_after)
    return limits


def _set_environment(
    settings: Settings,
    args: argparse.Namespace,
    events_path: Path,
    lease_page: LeasePage,
    evidence: FailureEvents,
) -> None:
    """Set the variables that workers and supervisors inherit."""
    os.environ.update(settings.to_env() | export_worker_options(args))
    os.environ.pop(constants.ENV_FORK_SERVER, None)  # set where this agent runs inside another one's worker
    os.environ.pop(constants.ENV_CONFIG, None)  # already read; a job that a worker starts is another one
    os.environ.pop(constants.ENV_TOKEN, None)  # already read; the training script must not see it
    os.environ[constants.ENV_AGENT_PID] = str(os.getpid())
    os.environ[constants.ENV_EVENTS_PATH] = str(events_path)
    os.environ[constants.ENV_EVIDENCE] = evidence.path
    os.environ[constants.ENV_LEASE_PAGE] = lease_page.path
    os.environ[constants.ENV_DRAIN_SIGNALS] = ",".join(args.drain_signals)
    # Each generation sets these. A new name would move the C environment, which a thread of torch may read.
    for name in (
        constants.ENV_MTBF_S,
        constants.ENV_GENERATION,
        constants.ENV_LAST_STEP,
        torchelastic.ENV_WORKERS_IDENTICAL,
    ):
        os.environ[name] = ""
    grace_s = options.resolve_grace_s(args, os.environ)
    if grace_s is not None:
        os.environ[constants.ENV_GRACE] = f"{grace_s:g}"
