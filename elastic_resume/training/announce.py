"""How a generation's start is told: as an event, and as the line that a person reads."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from elastic_resume import console
from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.policy.resume_plan import DISK
from elastic_resume.restore import inventory
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.units import choose_verb, format_count

START_FRESH_HINT = "To start from scratch: --resume never, or ELASTIC_RESUME_RESUME=never."
MAX_COMMAND_CHARS = 300  # characters of a script's arguments in a line


def resume_event_fields(result: ResumeResult, position: Position, world_size: int) -> dict[str, Any]:
    """Give the fields of the ``resume`` event."""
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
        "lacking": list(plan.lacking),
        "rejected": [
            {"node": r.node, "generation": r.version[0], "step": r.version[1], "reason": r.reason}
            for r in plan.rejected
        ],
        "recomputed_steps": plan.recomputed_steps,
        "seconds": round(result.duration_s, 3),
    }


def format_resume_lines(result: ResumeResult, position: Position, world_size: int) -> str:
    """Say in one line what happened; each rejected copy gets a line of its own."""
    plan = result.plan
    was = plan.previous_world_size
    world = f"world {was} -> {world_size}" if was not in {None, world_size} else f"world {world_size}"
    what = "no checkpoint found, starting fresh"
    if plan.kind == "checkpoint":
        sent = f", sent to {', '.join(plan.lacking)}" if plan.lacking else ""
        where = "checkpoint" if plan.source_tier == DISK else "snapshot in memory"
        what = (
            f"resumed at step {position.step} (epoch {position.epoch}) from {plan.source_node}'s {where} "
            f"of generation {plan.source_generation}{sent}"
        )
    lost = "no step lost" if plan.recomputed_steps == 0 else format_recomputed_steps(plan.recomputed_steps)
    lines = [f"generation {plan.generation}: {what}; {lost}; {world}; {result.duration_s:.2f} s"]
    lines += [f"rejected {r.node}/{r.name}: {r.reason}" for r in plan.rejected]
    return "\n  ".join(lines)


def format_recomputed_steps(steps: int) -> str:
    """Say how many steps are run again."""
    return f"{format_count(steps, 'step')} {choose_verb(steps, 'is', 'are')} run again"


class EarlierRunNotice:
    """Logs once that this job resumes an earlier run.

    It waits until the script says how many epochs it wants: a run that is finished trains nothing, and looks
    like one that failed in silence.
    """

    def __init__(
        self, result: ResumeResult, context: RankContext, position: Position, command: Sequence[str]
    ) -> None:
        """``words``: the script and its arguments of this start."""
        self._text = ""
        self._context, self._command, self._start_recorded = context, command, not context.is_local_leader
        if context.collectives.rank == 0 and result.earlier_command is not None:
            where = f"at step {position.step} (epoch {position.epoch})"
            differs = describe_difference(
                result.earlier_command, command, result.plan.previous_world_size, context.collectives.size
            )
            self._text = f"RESUMING AN EARLIER RUN from {context.run_dir} {where}. {differs}."

    def log_once(self, finished_reason: str = "") -> None:
        """Say it, the first time. ``nothing``: why nothing is trained."""
        text, self._text = self._text, ""
        if text:
            left = f" NOTHING IS LEFT TO TRAIN: {finished_reason}." if finished_reason else ""
            console.say(f"{text}{left} {START_FRESH_HINT}")

    def record_start(self) -> None:
        """Note this start, the first time: in its later generations there is nothing to tell.

        Not before it is told, on rank 0 too: a crash before the first step would silence it for good.
        """
        if not self._start_recorded:
            self._start_recorded = True
            node_dir.record_script_arguments(self._context.node_dir, inventory.launcher_id(), self._command)


def describe_difference(
    old_command: Sequence[str], new_command: Sequence[str], old_world_size: int | None, new_world_size: int
) -> str:
    """Say how two starts of a job differ: their commands (none: not known) and numbers of ranks."""
    found = []
    old_command, new_command = node_dir.mask_secrets(old_command), node_dir.mask_secrets(new_command)
    if not old_command:
        found.append("Arguments then: unknown")
    elif list(old_command) != list(new_command):
        same_script = old_command[0] == new_command[0]
        texts = [shlex.join(words[same_script:]) or "(none)" for words in (old_command, new_command)]
        what = "Arguments" if same_script else "Command"
        found.append(f"{what} then: {_truncate(texts[0])}; now: {_truncate(texts[1])}")
    if old_world_size not in {None, new_world_size}:
        found.append(f"Ranks then: {old_world_size}; now: {new_world_size}")
    return ". ".join(found) or "Same arguments and number of ranks"


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_COMMAND_CHARS else f"{text[:MAX_COMMAND_CHARS]}…"
