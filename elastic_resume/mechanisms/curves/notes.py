"""Exchange, at each restore, what the nodes have of the values, and where rank 0's agent sends them from.

Each local leader adds a note to its node's inventory. With all notes `pass_over_unrecorded` leaves out a
state that is newer than the values that some node has: the step is computed again instead. A node writes
nothing into another's directory: a local leader gives its agent the address from which to copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_resume.mechanisms.curves import journal
from elastic_resume.mechanisms.curves.journal import Moment
from elastic_resume.policy.resume_plan import Inventory, ResumePlan, SavedState

ENDPOINT_FILE = "endpoint.json"
RECOMPUTED_FILE = "recomputed.json"
MAX_COPIES = 8
"""The nodes that copy, beside those that have copied before."""
MAX_PASSED_OVER = 2
"""States that are passed over for an older one whose values are known. Further back, recomputing costs more
than the values are worth."""
MAX_UNRECORDED_STEPS = 64
"""A death loses the values of fewer steps. Where more are missing, recording has failed (a full disk, a hung
agent), and the next older state with values may be a checkpoint of hours ago."""
SEND_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Note:
    """What one node has. ``endpoint`` is where its agent sends from: host, port, key; None: it does not."""

    endpoint: tuple[str, int, str] | None = None
    closed: tuple[tuple[int, int, int], ...] = ()
    """Generation, step and epoch of the newest moment of each newest generation whose values are there."""
    recomputed: tuple[int, int] = (0, 0)
    """The generation that has found it, and the last step that had been finished before it."""


# ---- in a local leader ---------------------------------------------------------------------------------


def make_note(node_dir: Path) -> Any:
    """Return this node's note as JSON data; None if it has nothing to tell."""
    closed = tuple((number, *moment) for number, moment in journal.read_closed(node_dir).items())
    endpoint = _read_json(node_dir / journal.DIRECTORY / ENDPOINT_FILE)
    if endpoint is not None:
        if (connection := connect_to_agent(node_dir)) is None:  # the agent of an earlier start
            endpoint = None
        else:
            connection.close()
    recomputed = _read_json(node_dir / journal.DIRECTORY / RECOMPUTED_FILE)
    if not (closed or endpoint or recomputed):
        return None
    return [endpoint, closed, recomputed or (0, 0)]


def parse_note(encoded: Any) -> Note:
    """Parse what `make_note` returned; a malformed note is an empty one."""
    with contextlib.suppress(ValueError, TypeError):
        endpoint, closed, recomputed = encoded
        place = (str(endpoint[0]), int(endpoint[1]), str(endpoint[2])) if endpoint else None
        numbers = tuple((int(g), int(s), int(e)) for g, s, e in closed)
        return Note(place, numbers, (int(recomputed[0]), int(recomputed[1])))
    return Note()


def find_recorder(notes: Sequence[tuple[str, Any]]) -> str | None:
    """Return the node of rank 0 if its agent records, else None. ``notes`` are in the order of ranks."""
    if not notes:
        return None
    node, encoded = notes[0]
    return node if parse_note(encoded).endpoint is not None else None


def has_recorder(notes: Sequence[tuple[str, Any]]) -> bool:
    """Return whether any node's agent records."""
    return any(parse_note(encoded).endpoint is not None for _, encoded in notes)


def name_copier(notes: Sequence[tuple[str, Any]], node_dir: Path, recorder: str) -> Any:
    """Return what the agent of ``node_dir`` has to know: where to copy from, or that it is the source."""
    own = next((at for at, (node, _) in enumerate(notes) if node == node_dir.name), len(notes))
    found = parse_note(dict(notes)[recorder])
    holds = own < len(notes) and bool(parse_note(notes[own][1]).closed)
    is_copier = own > 0 and (own <= MAX_COPIES or holds)
    return {"source": found.endpoint if is_copier else None}


def find_recomputed(notes: Sequence[tuple[str, Any]], plan: ResumePlan) -> int:
    """Return the last step that was finished before this generation, of the history that it goes on with."""
    if plan.goes_back or plan.kind == "cold":
        return plan.step
    earlier = max((parse_note(encoded).recomputed for _, encoded in notes), default=(0, 0))[1]
    return max(earlier, plan.step + plan.recomputed_steps)


def write_recomputed(node_dir: Path, last_step: int, plan: ResumePlan) -> None:
    """Remember the last step that was finished before, for a generation that ends before it gets there.

    Nothing is synced: it is on the way of each recovery, and a power cut loses a hint.
    """
    path = node_dir / journal.DIRECTORY / RECOMPUTED_FILE
    if last_step <= plan.step and not plan.goes_back and not path.exists():
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps([plan.generation, last_step]))
        temporary.replace(path)


# ---- the state to resume from --------------------------------------------------------------------------


def pass_over_unrecorded(inventories: Sequence[Inventory], notes: Sequence[Any]) -> list[Inventory]:
    """Leave out states whose step's values no node has, if one of the next older states has its values.

    A state of a generation that no node knows anything of was not recorded, and stays.
    """
    closed: dict[int, Moment] = {}
    for encoded in notes:
        for generation, step, epoch in parse_note(encoded).closed:
            closed[generation] = max(closed.get(generation, Moment(-1, -1)), Moment(step, epoch))

    def is_recorded(state: SavedState) -> bool:
        known = closed.get(state.generation)
        return known is None or Moment(state.step, state.epoch) <= known

    states = {state.moment: state for each in inventories for state in each.saved_states}
    newest = sorted(states, reverse=True)[: MAX_PASSED_OVER + 1]
    if newest and _count_unrecorded(states[newest[0]], closed) > MAX_UNRECORDED_STEPS:
        return list(inventories)
    recorded = next((moment for moment in newest if is_recorded(states[moment])), None)
    if recorded is None:
        return list(inventories)
    return [
        replace(each, saved_states=tuple(s for s in each.saved_states if s.moment <= recorded))
        for each in inventories
    ]


def _count_unrecorded(state: SavedState, closed: Mapping[int, Moment]) -> int:
    known = closed.get(state.generation)
    return 0 if known is None else state.step - known.step


# ---- between a worker and its agent --------------------------------------------------------------------


def agent_address(node_dir: Path) -> bytes:
    """Return the abstract unix address at which this node's agent takes notice of its worker."""
    digest = hashlib.sha256(str(node_dir.resolve()).encode()).hexdigest()[:32]
    return b"\0elastic-resume-curves-" + digest.encode()


def connect_to_agent(node_dir: Path) -> socket.socket | None:
    """Return a socket to this node's agent; None if it records nothing."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        connection.connect(agent_address(node_dir))
    except OSError:
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def wake(connection: socket.socket) -> None:
    """Tell the agent that there is a new line. One that has not yet read the last ones needs no further."""
    with contextlib.suppress(OSError):
        connection.send(b"{}")


def send_to_agent(node_dir: Path, message: Any) -> None:
    """Send a message to this node's agent, if it records."""
    if (connection := connect_to_agent(node_dir)) is not None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(SEND_TIMEOUT_S)
            connection.send(json.dumps(message).encode())


def _read_json(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return None
