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
from elastic_resume.agent.hang_detector import patience_of, watched
from elastic_resume.agent.memory_pressure import Gauge
from elastic_resume.agent.restart_controller import Witness
from elastic_resume.agent.round_events import RoundEvents
from elastic_resume.agent.shutdown import Ending
from elastic_resume.agent.snapshots import Kept, kept
from elastic_resume.agent.status import Finger, Tail, Teller
from elastic_resume.agent.torchelastic import taken
from elastic_resume.agent.workers.forkserver_manager import Warmth
from elastic_resume.agent.workers.lease_page import Fence
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError, ElasticResumeError, NodeUnfitError
from elastic_resume.policy import restart
from elastic_resume.policy.hangs import Patience
from elastic_resume.rendezvous.net.protocol import look_key
from elastic_resume.report import metrics
from elastic_resume.report.status import ask_agent
from elastic_resume.schedulers import resources
from elastic_resume.schedulers.environment import Node
from elastic_resume.schedulers.preemption import Source, sources


@dataclass(frozen=True)
class _Asked:
    """What a user asked for of the parts below, by flag or environment; checked."""

    limits: restart.Limits
    patience: Patience | None
    requeue: str
    notice_sources: list[Source]
    metrics_at: tuple[str, int] | None


def run_agent(settings: Settings, args: argparse.Namespace, given: set[str], here: Node) -> int:
    """Run the job's part on this node and give the exit code of the command.

    Args:
        settings: ours.
        args: torchrun's, of `config.parse_layers`.
        given: the names of those that the user gave.
        here: what the scheduler tells of this node.

    Raises:
        ElasticResumeError: nothing was started.

    """
    asked = _asked(args, given)
    if "node_rank" in given:
        here = replace(here, order=args.node_rank)
    with (
        torchelastic.prepared(args, given, settings.run_id, here) as launch,
        NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name) as node_dir,
        contextlib.closing(Fence()) as fence,
        contextlib.closing(Gauge()) as gauge,
        contextlib.closing(RoundEvents()) as round_events,
    ):
        events_path = node_dir.path / constants.EVENTS_FILE
        _set_environment(settings, args, events_path, fence, round_events)
        tail = Tail(events_path)
        log = events.EventLog(events_path, hear=tail.hear, memory=round_events.path, node=settings.node_name)
        config = launch.config
        limits = replace(asked.limits, min_nodes=config.min_nodes)
        witness = Witness(
            settings.node_name, log, events_path, fence, round_events, limits=limits, gauge=gauge
        )
        gauge.start()
        _begin(launch, args, log, witness, node_dir)
        say, tell = witness.say, witness.note
        watch = watched(node_dir.path, config.nproc_per_node, asked.patience, say=say, tell=tell)
        ending = Ending(here, mode=asked.requeue, say=say, tell=tell)
        with ending.heeded():
            with (
                kept(node_dir.path, settings, say=say, tell=tell) as snapshots,
                _warmth(launch, args, witness) as warmth,
                watch as pause,
                shutdown.heeded(witness.round_over, pause, ending.heard),
                shutdown.watched(asked.notice_sources, say=say, tell=tell, drain=ending.drain_alone),
            ):
                witness.between = snapshots.keeper.between
                ending.commit_s = lambda: snapshots.keeper.rack.control.get("commit_us") / 1e6
                terms = replace(launch.terms, on_divergence=settings.on_divergence)
                outcome, code, message = _run(
                    replace(launch, terms=terms),
                    witness,
                    node_dir,
                    fence,
                    snapshots,
                    here=here,
                    teller=_teller(launch, node_dir, snapshots, gauge=gauge, tail=tail, witness=witness),
                    ending=ending,
                    warmth=warmth,
                    asked=asked,
                )
            if outcome in {"failed", "left"}:
                witness.explain_end(args.log_dir or "")
            code = _end(outcome, code, message, witness=witness, ending=ending, log=log, here=here)
        if outcome == "done" and launch.shared is not None:
            launch.shared.finish()
        log.close()
        return code


def _asked(args: argparse.Namespace, given: set[str]) -> _Asked:
    """Read it.

    Raises:
        ConfigError: a value is wrong.

    """
    requeue = args.requeue or os.environ.get(constants.ENV_REQUEUE) or "auto"
    notice = args.preemption_notice or os.environ.get(constants.ENV_PREEMPTION_NOTICE)
    return _Asked(
        limits=_limits(args, given),
        patience=patience_of(args.hang_timeout),
        requeue=config.choice("requeue", requeue, config.REQUEUE_MODES),
        notice_sources=sources(notice),
        metrics_at=metrics.listening(args.metrics, os.environ),
    )


def _begin(
    launch: torchelastic.Launch,
    args: argparse.Namespace,
    log: events.EventLog,
    witness: Witness,
    node_dir: NodeDir,
) -> None:
    config = launch.config
    log.write(
        "agent-start",
        run_id=config.run_id,
        command=shlex.join([args.training_script, *args.training_script_args]),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_world_size=config.nproc_per_node,
    )
    witness.say(f"job {config.run_id}, checkpoints in {node_dir.path}")
    if launch.notice:
        witness.say(launch.notice)
    little = resources.why_little_shared_memory()
    if little:
        witness.say(f"{little}.")


@contextlib.contextmanager
def _warmth(
    launch: torchelastic.Launch, args: argparse.Namespace, witness: Witness
) -> Iterator[Warmth | None]:
    """Have a zygote where there can be one."""
    if launch.command is None:
        if launch.why_cold:
            witness.say(f"workers start cold: {launch.why_cold}.")
        yield None
        return
    preload = [name.strip() for name in (args.preload or "").split(",") if name.strip()]
    warmth = Warmth(launch.command, preload, say=witness.say, tell=witness.note)
    warmth.start()
    try:
        yield warmth
    finally:
        warmth.close()


def _run(
    launch: torchelastic.Launch,
    witness: Witness,
    node_dir: NodeDir,
    fence: Fence,
    snapshots: Kept,
    *,
    here: Node,
    teller: Teller,
    ending: Ending,
    warmth: Warmth | None,
    asked: _Asked,
) -> tuple[str, int, str]:
    """Give outcome, exit code and message for people."""
    end = ""
    try:
        if warmth is not None:
            # A node that joins stops the workers of the others, who would wait for what it still imports.
            with torchelastic.stoppable(launch):
                warmth.wait(launch.terms.join_timeout_s)
        with taken(
            launch.terms, node_dir, fence, here, say=witness.say, tell=witness.told, teller=teller
        ) as place:
            if asked.metrics_at is not None:
                key = look_key(launch.terms.token)
                status = partial(ask_agent, place.member.address, launch.terms.run_id, key)
                threading.Thread(  # looks up the name of this host, which may take long
                    target=metrics.serve, args=(asked.metrics_at, status, witness.say), daemon=True
                ).start()
            snapshots.compare(place.member, say=witness.say, tell=witness.note)
            try:
                torchelastic.launch(launch, witness, place)
            finally:
                witness.heard(place.member.failures)
            end = f"{place.member.end}."
    except torchelastic.StoppedError as stop:
        ending.begun(stop.signal)
        return "signalled", constants.EXIT_SIGNALLED + stop.signal, ending.words()
    except NodeUnfitError as error:
        return "left", constants.EXIT_REQUEUE, str(error)
    except ConfigError as error:  # the rendezvous refuses a flag that only it can judge
        return "failed", constants.EXIT_USAGE, str(error)
    except ElasticResumeError as error:
        return "failed", constants.EXIT_AT_FAULT if error.at_fault else constants.EXIT_REQUEUE, str(error)
    return "done", constants.EXIT_DONE, end


def _end(
    outcome: str,
    code: int,
    message: str,
    *,
    witness: Witness,
    ending: Ending,
    log: events.EventLog,
    here: Node,
) -> int:
    """Tell how it ended, have the job run again where it should, and give the exit code."""
    idle = witness.idle_lives(here.restarts)
    decision, code = ending.decide(outcome, code, rank=witness.rank, idle=idle, stands_by=witness.stands_by)
    log.write("agent-end", outcome=outcome, exit_code=code, message=message)
    if message:
        witness.say(f"{outcome}: {message}")
    return ending.act(decision, code)


def _teller(
    launch: torchelastic.Launch,
    node_dir: NodeDir,
    snapshots: Kept,
    *,
    gauge: Gauge,
    tail: Tail,
    witness: Witness,
) -> Teller:
    keeper = snapshots.keeper
    finger = Finger(
        node_dir.path,
        launch.config.nproc_per_node,
        states=keeper.rack.control.states,
        trouble=lambda: keeper.problem or gauge.strain().pressed,
    )
    return Teller(node_dir.path, launch.config.run_id, finger, tail, say=witness.say)


def _limits(args: argparse.Namespace, given: set[str]) -> restart.Limits:
    """Read what ends the job. ``--max-restarts`` keeps torchrun's meaning: so many, whatever advances.

    Raises:
        ConfigError: a value is wrong.

    """
    counted = "max_restarts" in given or "PET_MAX_RESTARTS" in os.environ
    default = restart.Limits()
    if counted:
        default = replace(default, max_no_progress=restart.UNLIMITED, poisoned=restart.UNLIMITED)
    no_progress = validation.check_count("--max-no-progress", args.max_no_progress, least=1)
    exclude_after = validation.check_count("--exclude-after", args.exclude_after, least=0)
    return replace(
        default,
        max_no_progress=default.max_no_progress if no_progress is None else no_progress,
        exclude_after=default.exclude_after if exclude_after is None else exclude_after,
    )


def _set_environment(
    settings: Settings, args: argparse.Namespace, events_path: Path, fence: Fence, round_events: RoundEvents
) -> None:
    os.environ.update(settings.to_env())
    os.environ.pop(constants.ENV_ZYGOTE, None)  # of an agent in whose worker this one runs
    os.environ.pop(constants.ENV_TOKEN, None)  # read by now, and no business of the training script
    os.environ[constants.ENV_AGENT_PID] = str(os.getpid())
    os.environ[constants.ENV_EVENTS_PATH] = str(events_path)
    os.environ[constants.ENV_ROUND_EVENTS] = round_events.path
    os.environ[constants.ENV_FENCE] = fence.path
    drain_signals = args.drain_signals or os.environ.get(constants.ENV_DRAIN_SIGNALS)
    os.environ[constants.ENV_DRAIN_SIGNALS] = ",".join(validation.drain_signals(drain_signals))
    grace_s = validation.grace_s(args, os.environ)
    if grace_s is not None:
        os.environ[constants.ENV_GRACE_S] = f"{grace_s:g}"
    elif getattr(args, "shutdown_timeout", None) is not None:
        os.environ.setdefault(constants.ENV_GRACE_S, str(args.shutdown_timeout))
