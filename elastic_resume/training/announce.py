"""Report the start of a generation: the ``resume`` event, the log line, and the earlier-run notice."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data.batch_size import WorldChange
from elastic_resume.policy.resume_plan import ARCHIVE, DISK, ResumePlan
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.state import state_dict
from elastic_resume.state.built_settings import BuiltSettings
from elastic_resume.training.worker_exit import is_own_module
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)

START_FRESH_HINT = "To start from scratch: --resume never, or ELASTIC_RESUME_RESUME=never."
MAX_COMMAND_CHARS = 300  # limit of a script's arguments in one line
MAX_SETTINGS = 8  # limit of changed settings in one line


def resume_event_fields(result: ResumeResult, position: Position, world_size: int) -> dict[str, Any]:
    """Return the fields of the ``resume`` event."""
    plan = result.plan
    return {
        "generation": plan.generation,
        "step": position.step,
        "epoch": position.epoch,
        "world_size": world_size,
        "previous_world_size": plan.previous_world_size,
        "nodes": list(result.nodes),
        "kind": plan.kind,
        "source_node": plan.source_node,
        "source_tier": plan.source_tier,
        "source_generation": plan.source_generation,
        "proves_step": plan.target.step if plan.target is not None else None,
        "receiving_nodes": list(plan.receiving_nodes),
        "rejected": [
            {
                "node": r.node,
                "generation": r.version[0],
                "step": r.version[1],
                "reason": {"kind": r.kind, "detail": r.reason},
            }
            for r in plan.rejected
        ],
        "recomputed_steps": plan.recomputed_steps,
        "resume_from": plan.request if plan.goes_back else None,
        "given_up_steps": plan.given_up_steps,
        "seconds": round(result.duration_s, 3),
    }


def start_worker(context: RankContext, plan: ResumePlan, step: int, tracked: Mapping[str, Any]) -> None:
    """Emit the event of a rank's start at ``step``."""
    target_step = plan.target.step if plan.target is not None else step
    context.events.emit(
        "worker-start",
        generation=plan.generation,
        step=step,
        kept_step=max(target_step, step + plan.given_up_steps),
        local_rank=context.local_rank,
        world_size=context.collectives.size,
        gpu=state_dict.find_gpu_uuid(tracked),
    )


def log_start(
    result: ResumeResult, context: RankContext, position: Position, *, world_change: WorldChange | None
) -> None:
    """Log where training starts or continues, in one line, and a warning for each rejected state."""
    world_size = context.collectives.size
    for state in result.plan.rejected:
        logger.warning(
            f"rejected {state.node}/{state.name}: {state.reason.rstrip('.')}. See `elastic-resume ls`."
        )
    parts = [format_start(result, position, world_size)]
    if world_change is not None:
        parts.append(world_change.describe())
    logger.info("; ".join(filter(None, parts)))
    _warn_of_other_rendezvous()
    _log_new_process(result)
    # After the line: whoever has seen the event finds it.
    context.events.emit("resume", **resume_event_fields(result, position, world_size))


def _warn_of_other_rendezvous() -> None:
    """Warn if the variable asks torchrun for us and a flag of it does not: then it is PyTorch's."""
    is_asked_for = os.environ.get("PET_RDZV_BACKEND") == "elastic_resume"
    if is_asked_for and "TORCHELASTIC_RUN_ID" in os.environ and constants.ENV_AGENT_PID not in os.environ:
        logger.warning(
            "WARNING: PET_RDZV_BACKEND is elastic_resume, but this is PyTorch's torchrun: --standalone and "
            "--rdzv-backend beat the variable. Leave them out, and a failure costs a second."
        )


def _log_new_process(result: ResumeResult) -> None:
    """Log at a job's start that variables were set too late for forked workers."""
    started_at, _, variables = os.environ.get(constants.ENV_NEW_PROCESS, "").partition(" ")
    if variables and result.plan.kind == "cold":
        logger.info(
            f"the script or a library of it sets {variables}, which torch reads at its import. So each "
            "worker begins again and imports torch anew, also after a failure: "
            f"{time.monotonic() - float(started_at):.1f} s until er.resume() here. Export {variables} where "
            "the command runs, and workers are forked in milliseconds."
        )


def format_start(result: ResumeResult, position: Position, world_size: int) -> str:
    """Describe in one line where a generation starts."""
    plan = result.plan
    state = "no checkpoint found, starting fresh"
    if plan.previous_world_size is not None:
        state = "no snapshot or checkpoint of the generation before, starting over"
    if plan.kind == "resumed":
        kinds = {DISK: "checkpoint", ARCHIVE: "archived checkpoint"}
        tier = kinds.get(plan.source_tier, "snapshot in memory")
        sent = f", sent to {', '.join(plan.receiving_nodes)}" if plan.receiving_nodes else ""
        state = (
            f"resumed at {_format_place(position)} from {plan.owner_node}'s {tier} "
            f"of generation {plan.source_generation}{sent}"
        )
    lost = "" if plan.kind == "cold" else "; no step lost"
    if plan.source_tier == ARCHIVE and not plan.knows_progress:
        lost = f"; the nodes that trained are gone: steps after {plan.step}, if there were any, are lost"
    if plan.recomputed_steps:
        lost = f"; {format_count(plan.recomputed_steps, 'step')} to recompute"
    if plan.target is not None:
        again = format_count(plan.target.step - plan.step, "finished step")
        again = "the end of an epoch" if plan.target.step == plan.step else again
        lost += f"; {again} will be computed again to prove the resume (--prove)"
    if plan.unproved:
        lost += f"; {plan.unproved}, so a later resume will be proved (--prove)"
    if plan.goes_back:
        lost = (
            f"; went back, as --resume-from {plan.request} requests (done once: the same command goes on "
            f"from here): {format_count(plan.given_up_steps, 'newer step')} given up; what nodes hold of "
            "them moves to quarantine, what is archived stays and does not count"
        )
    elif plan.request and result.earlier_command is not None:
        lost += (
            f"; --resume-from {plan.request} was done before, so it goes on from the newest state (to go "
            f"back once more, name a checkpoint, such as g{plan.source_generation}-s{plan.step})"
        )
    old_world_size = plan.previous_world_size
    world = f"{format_count(world_size, 'rank')} on {format_count(len(result.nodes), 'node')}"
    if old_world_size not in {None, world_size}:
        world += f" (before: {format_count(old_world_size or 0, 'rank')})"
    restored = "" if plan.kind == "cold" else f"; restored in {result.duration_s:.2f} s"
    return f"generation {plan.generation}: {state}{lost}; {world}{restored}"


def _format_place(position: Position) -> str:
    """Name the step, and the epoch after the first: a loop over steps has none."""
    is_first = position.epoch == 0 and position.step_in_epoch == position.step
    return f"step {position.step}" + ("" if is_first else f" (epoch {position.epoch})")


def log_enumerate_hint(context: RankContext, position: Position) -> None:
    """Log once for a job, after a resume within an epoch, that an index over the loader began at 0 there."""
    marker = context.node_dir / constants.ENUMERATE_HINT_FILE
    if not position.step_in_epoch or context.collectives.rank or marker.exists():
        return
    with contextlib.suppress(OSError):
        marker.touch()
    if not _has_enumerate():  # after it: the files of a large project are read once for a job
        return
    logger.info(
        f"epoch {position.epoch} goes on after its step {position.step_in_epoch}: enumerate(loader) starts "
        "at 0 again there. If the loop uses the index, write run.enumerate(loader), in a loop over epochs = "
        "er.epochs(...) epochs.enumerate(loader). This is logged once."
    )


def _has_enumerate() -> bool:
    """Return whether a file of the script's own has the word; True without a file, as in a notebook."""
    if not getattr(sys.modules["__main__"], "__file__", None):
        return True
    for name in filter(is_own_module, list(sys.modules)):
        with contextlib.suppress(OSError):
            file = getattr(sys.modules[name], "__file__", None)
            if file and "enumerate(" in Path(file).read_text(errors="replace"):
                return True
    return False


def warn_of_unfinished_loop(place: str) -> None:
    """Warn that the script has left its loop, ``place``, and the process ends."""
    logger.warning(
        f"WARNING: the loop was left {place}, and the same command will go on at the newest checkpoint. If "
        "the training is over, write run.stop() before the break, in a loop over epochs = er.epochs(...) "
        "epochs.run.stop()."
    )


class EarlierRunNotice:
    """Logs once that this job resumes an earlier run, and how their commands differ.

    It waits for the script's number of epochs: a finished run trains nothing, and without this notice it
    would look like a silent failure.
    """

    def __init__(
        self, result: ResumeResult, context: RankContext, position: Position, command: Sequence[str]
    ) -> None:
        """``command`` is the script and the arguments of this start."""
        self._text, self._is_requested = "", False
        self._context = context
        self._command = command
        self._start_recorded = not context.is_local_leader
        if context.collectives.rank == 0 and result.earlier_command is not None:
            difference = describe_difference(
                result.earlier_command, command, result.plan.previous_world_size, context.collectives.size
            )
            where = f"at {_format_place(position)}"
            place = _find_place(result, context)
            difference = f" {difference}." if difference else ""
            self._text = f"RESUMING AN EARLIER RUN from {place} {where}.{difference}"
            self._is_requested = result.plan.goes_back  # so that only the end of a training is news

    def begin_loop(self, finished_reason: str, *, is_stopped: bool) -> None:
        """Log the notice when the loop begins, and that the training was stopped if it was."""
        reason = "run.stop() has ended the training" if is_stopped else finished_reason
        if is_stopped and not self._text and not self._context.collectives.rank:
            logger.info(f"nothing is left to train: {reason}.")
        self.log_once(reason)

    def log_once(self, finished_reason: str = "") -> None:
        """Log the notice at the first call. ``finished_reason`` says why nothing is left to train."""
        text, self._text = self._text, ""
        if text and (finished_reason or not self._is_requested):
            finished = f" NOTHING IS LEFT TO TRAIN: {finished_reason}." if finished_reason else ""
            logger.info(f"{text}{finished} {START_FRESH_HINT}")

    def log_and_record(self, finished_reason: str = "") -> None:
        """Log the notice and record this start's command, so that its later generations log no notice.

        A crash in between leaves the notice to the next start.
        """
        self.log_once(finished_reason)
        if not self._start_recorded:
            self._start_recorded = True
            node_dir.record_script_arguments(
                self._context.node_dir, rank_context.launcher_id(), self._command
            )


def _find_place(result: ResumeResult, context: RankContext) -> str:
    """Return the directory or archive of the run that is resumed."""
    if result.plan.source_tier != ARCHIVE:
        return str(context.run_dir)
    return f"{(context.settings.archive or '').rstrip('/')}/{context.settings.run_id}"


def describe_difference(
    old_command: Sequence[str], new_command: Sequence[str], old_world_size: int | None, new_world_size: int
) -> str:
    """Describe how two starts of a job differ in command (empty: unknown) and number of ranks, if known."""
    differences = []
    old_command, new_command = node_dir.mask_secrets(old_command), node_dir.mask_secrets(new_command)
    if old_command and list(old_command) != list(new_command):
        same_script = old_command[0] == new_command[0]
        old, new = (shlex.join(words[same_script:]) or "(none)" for words in (old_command, new_command))
        subject = "Arguments" if same_script else "Command"
        differences.append(f"{subject} then: {_truncate(old)}; now: {_truncate(new)}")
    if old_world_size not in {None, new_world_size}:
        differences.append(f"Ranks then: {old_world_size}; now: {new_world_size}")
    return ". ".join(differences) or ("Same arguments and number of ranks" if old_command else "")


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_COMMAND_CHARS else f"{text[:MAX_COMMAND_CHARS]}…"


def log_unused_settings(settings: BuiltSettings, rank: int, ranks: int) -> None:
    """Log, once after a restore, which hyperparameters and schedules the script has built in vain."""
    first_ranks = settings.note_ranks(ranks)
    if (unused := settings.take_unused()) and rank == 0:
        # Said at each loss of a node, it must not send anybody to change a schedule.
        now = f" The job had {first_ranks} ranks then and has {ranks} now: len(loader) explains a schedule."
        more = f" and {len(unused) - MAX_SETTINGS} more" if len(unused) > MAX_SETTINGS else ""
        logger.info(
            "the script builds other settings than at the first start, and the checkpoint's are used: not "
            f"{', '.join(unused[:MAX_SETTINGS])}{more}. To change one, set it in a hook of run.on_resume."
            f"{now if ranks != first_ranks else ''}"
        )
