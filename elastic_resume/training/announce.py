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
from elastic_resume.restore.coordinator import Resumed
from elastic_resume.restore.rank_context import Place
from elastic_resume.units import amount, verb

START_ANEW = "To start from scratch: --resume never, or ELASTIC_RESUME_RESUME=never."
MOST_WORDS = 300  # characters of a script's arguments in a line


def as_event(resumed: Resumed, position: Position, world_size: int) -> dict[str, Any]:
    """Give the fields of the ``resume`` event."""
    plan = resumed.plan
    return {
        "generation": plan.generation,
        "step": position.step,
        "epoch": position.epoch,
        "world_size": world_size,
        "previous_world_size": plan.previous_world_size,
        "nodes": list(resumed.nodes),
        "kind": plan.kind,
        "source_node": plan.source_node,
        "source_tier": plan.source_tier,
        "source_generation": plan.source_generation,
        "lacking": list(plan.lacking),
        "rejected": [
            {"node": r.node, "generation": r.order[0], "step": r.order[1], "reason": r.reason}
            for r in plan.rejected
        ],
        "lost_steps": plan.lost_steps,
        "seconds": round(resumed.seconds, 3),
    }


def as_text(resumed: Resumed, position: Position, world_size: int) -> str:
    """Say in one line what happened; each rejected copy gets a line of its own."""
    plan = resumed.plan
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
    lost = "no step lost" if plan.lost_steps == 0 else again(plan.lost_steps)
    lines = [f"generation {plan.generation}: {what}; {lost}; {world}; {resumed.seconds:.2f} s"]
    lines += [f"rejected {r.node}/{r.name}: {r.reason}" for r in plan.rejected]
    return "\n  ".join(lines)


def again(steps: int) -> str:
    """Say how many steps are run again."""
    return f"{amount(steps, 'step')} {verb(steps, 'is', 'are')} run again"


class Earlier:
    """Logs once that this job resumes an earlier run.

    It waits until the script says how many epochs it wants: a run that is finished trains nothing, and looks
    like one that failed in silence.
    """

    def __init__(self, resumed: Resumed, place: Place, position: Position, words: Sequence[str]) -> None:
        """``words``: the script and its arguments of this start."""
        self._text = ""
        self._place, self._words, self._noted = place, words, not place.leads
        if place.world.rank == 0 and resumed.earlier is not None:
            where = f"at step {position.step} (epoch {position.epoch})"
            differs = difference(resumed.earlier, words, resumed.plan.previous_world_size, place.world.size)
            self._text = f"RESUMING AN EARLIER RUN from {place.run_dir} {where}. {differs}."

    def tell(self, nothing: str = "") -> None:
        """Say it, the first time. ``nothing``: why nothing is trained."""
        text, self._text = self._text, ""
        if text:
            left = f" NOTHING IS LEFT TO TRAIN: {nothing}." if nothing else ""
            console.say(f"{text}{left} {START_ANEW}")

    def note(self) -> None:
        """Note this start, the first time: in its later generations there is nothing to tell.

        Not before it is told, on rank 0 too: a crash before the first step would silence it for good.
        """
        if not self._noted:
            self._noted = True
            node_dir.note_start(self._place.node_dir, inventory.supervisor(), self._words)


def difference(before: Sequence[str], now: Sequence[str], size_before: int | None, size_now: int) -> str:
    """Say how two starts of a job differ: their commands (none: not known) and numbers of ranks."""
    found = []
    before, now = node_dir.masked(before), node_dir.masked(now)
    if not before:
        found.append("Arguments then: unknown")
    elif list(before) != list(now):
        same_script = before[0] == now[0]
        texts = [shlex.join(words[same_script:]) or "(none)" for words in (before, now)]
        what = "Arguments" if same_script else "Command"
        found.append(f"{what} then: {_cut(texts[0])}; now: {_cut(texts[1])}")
    if size_before not in {None, size_now}:
        found.append(f"Ranks then: {size_before}; now: {size_now}")
    return ". ".join(found) or "Same arguments and number of ranks"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}…"
