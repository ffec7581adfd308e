"""What one node could resume from, and how nodes tell each other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.checkpoint import node_dir, reader
from elastic_resume.checkpoint.catalog import Entry, quarantined, reason_of, scan_run
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import CheckpointError, ElasticResumeError, ForeignError, RecordError
from elastic_resume.policy.resume_plan import DISK, MEMORY, Copy, Inventory, Rejected
from elastic_resume.restore import rank_context
from elastic_resume.restore.rank_context import Place
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.progress_page import Board

_START_FIELD = 19  # of /proc/PID/stat, counted from behind the name: proc(5) calls it starttime
LISTED_COPIES = 64  # of one directory, newest first: older ones would be taken after 64 corrupt ones only


def take_stock(place: Place, board: Board, generation: int) -> Inventory:
    """List what this node could resume from, in memory and on disk; quarantine what is proven bad.

    That is a copy which lacks a file, is cut off or does not say what it must. One that could not be read
    now, is of a newer format or is not this job's stays where it is.

    Rank 0's node lists the directories of other nodes too, where it sees them (a shared file system): a job
    that is started again on other machines finds what it left behind. They are only read, and by one
    node only: a thousand nodes that each list a thousand directories would bring the file server down.
    """
    for entry in place.catalog.entries():
        if entry.is_damaged:
            place.quarantine(entry.path, str(entry.problem))
    homes = {place.node: place.catalog.entries()}
    if place.world.rank == 0:
        homes = scan_run(place.run_dir, place.settings.run_id) | homes
    copies = [
        _copy_of(home, entry.manifest)
        for home, entries in homes.items()
        for entry in entries[:LISTED_COPIES]
        if entry.manifest is not None and entry.problem is None
    ]
    rejected = [reason for home, entries in homes.items() for reason in _rejected(place, home, entries)]
    snapshots, refused = _snapshots(place)
    floor, began = 0, False
    if place.settings.resume == "never":
        floor, began = node_dir.floor_of(place.node_dir, supervisor(), generation)
    last_generation, last_step, last_world_size = _last_step(place, board, generation)
    starter, words = node_dir.last_start(place.node_dir)
    return Inventory(
        node=place.node,
        lead_rank=place.world.rank,
        copies=tuple(snapshots + copies),
        rejected=tuple(refused + rejected),
        # The world's generation is one more than the greatest that anybody knew; the agents may have counted
        # further than checkpoints tell, when worlds ended before their first step.
        generation=max(generation, rank_context.assigned_generation() - 1),
        floor=floor,
        began=began,
        committed=node_dir.newest(place.node_dir),
        last_step=last_step,
        last_generation=last_generation,
        last_world_size=last_world_size or None,
        restarted=starter == supervisor(),
        words=tuple(words),
    )


def to_json(inventory: Inventory) -> dict[str, Any]:
    """Give ``inventory`` as JSON can say it."""
    return dataclasses.asdict(inventory)


def from_json(told: Mapping[str, Any]) -> Inventory:
    """Read what `to_json` gave on another rank.

    Raises:
        ElasticResumeError: the other rank runs a version with other fields.

    """
    try:
        rejected = tuple(Rejected(**{**one, "order": tuple(one["order"])}) for one in told["rejected"])
        copies = tuple(Copy(**one) for one in told["copies"])
        words = tuple(told["words"])
        return Inventory(**{**told, "rejected": rejected, "copies": copies, "words": words})
    except (KeyError, TypeError) as error:
        raise ElasticResumeError(
            f"a node's inventory cannot be read ({error}): do all nodes run the same elastic_resume?"
        ) from error


def supervisor() -> str:
    """Name the process whose life is "this start of the job": the node's agent, torchrun, or this one.

    By its start in ticks since the boot, and by that boot: a time of day would be another one after the wall
    clock was set, and what this start has saved would be set aside as an earlier one's.
    """
    agent = os.environ.get(constants.ENV_AGENT_PID)
    pid = int(agent) if agent else os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD]
        return f"{pid} {started} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return str(pid)


def _last_step(place: Place, board: Board, generation: int) -> tuple[int, int, int]:
    try:
        return board.newest(generation)
    except RecordError as error:
        place.events.write("board-ignored", reason=str(error))
        board.clear()
        return 0, 0, 0


def _rejected(place: Place, home: str, entries: Sequence[Entry]) -> list[Rejected]:
    found = [
        Rejected(home, entry.path.name, str(entry.problem), entry.order, entry.problem.kind)
        for entry in entries
        if entry.problem is not None
    ]
    found.extend(
        Rejected(
            home,
            path.name,
            reason_of(path),
            reader.parse_name(path.name.split(".")[0]) or (0, 0),
            "aside",
        )
        for path in quarantined(place.run_dir / home)
    )
    return found


def _snapshots(place: Place) -> tuple[list[Copy], list[Rejected]]:
    """The newest snapshot in this node's memory; damaged ones are let go of, so that an older one counts."""
    rejected: list[Rejected] = []
    memory = place.memory
    while memory is not None and (state := slots.newest(memory.control.states())) is not None:
        try:
            held = memory.newest()
            if held is not None and held.manifest.run_id != place.settings.run_id:
                raise ForeignError(f"belongs to the run {held.manifest.run_id!r}.")
        except CheckpointError as error:
            order = slots.order_of(state.target)
            name = f"{reader.name_of(*order)} (in memory)"
            rejected.append(Rejected(place.node, name, str(error), order, error.kind))
            memory.discard(state.index)
            continue
        return [_copy_of(place.node, held.manifest, MEMORY)] if held is not None else [], rejected
    return [], rejected


def _copy_of(home: str, manifest: Manifest, tier: str = DISK) -> Copy:
    return Copy(
        home,
        manifest.generation,
        manifest.step,
        manifest.rank,
        tier,
        manifest.file_bytes,
        manifest.position.epoch,
    )
