"""Choose which checkpoint the job archives next, and which node uploads which parts of it.

Every node reports the checkpoints that it could upload, and how far it is. The leader follows one upload::

    due ──► requested ──► chosen ──► begun ──► complete ──► archived ──► due after the interval
              │             ▲  │        │          │
              │ nobody held │  └────────┴──────────┴──► dropped: no progress, no node holds it, or its
              └─ the step ──┘                            number is taken; due again at once

- *due*: the leader asks for the newest step. Nodes answer only then, since it changes all the time.
- *requested*: all nodes commit ``request_step``, since each one commits at other steps by itself. A request
  is dropped, and due again, if all nodes have gone back behind where it was made.
- *chosen*: the owner, the first node that holds it, fixes the number in the archive's log.
- *begun*: all nodes with the same content put their shares of the parts.
- *complete*: every part is there. The owner puts the entry, which is the commit.

A checkpoint whose milestones are not archived is chosen at once, whatever the interval, the oldest first.

An owner that is lost or fails is replaced, also after it has begun: the attempt is the same, and its entry
can exist once only. A share of a node that is lost or fails goes to the others. A node that has put its share
takes half of the longest one. A part that two nodes put has the same bytes.

Invariant: there is one upload at a time. The next leader goes on with it, since the verdict has all of it.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_resume.mechanisms.mechanism import decode_body, encode_body
from elastic_resume.milestone import Version
from elastic_resume.rendezvous.facts import Fact, FactBody, Judge, Judgment, Scope

REQUEST_LEAD_S = 2.5
"""A report is a second old, and a verdict takes two heartbeats."""
MIN_LEAD_STEPS = 2
HOLD_WAIT_S = 30.0
"""The longest wait for the first node of the view, whose values count in a resume, once another one holds the
step; and for any node that holds what is uploaded, when none does."""
REQUEST_WAIT_S = 60.0
"""Wait so long, and twice a commit, for the requested step once it has passed; then take the newest one."""
STALL_S = 900.0
MAX_FAILURES = 3
"""In a row; then the others take a node's share."""
LAST_UPLOAD_MARGIN = 1.5
MAX_UPLOADERS = 32
MAX_PARTS = 1 << 16
MAX_HELD = 8
AGE_GRAINS = 20
MIN_AGE_GRAIN_S = 1.0
"""The verdict has the time since the last upload in so many steps of the interval."""

_NONCE = re.compile(r"[0-9a-f]{16}")
Ranges = tuple[tuple[int, int], ...]
"""Parts, each range without its end."""


class Phase(enum.Enum):
    """The states above, and two more. They follow from the verdict, which nodes of other versions read."""

    WAITING = enum.auto()
    """For the end of the interval."""
    DUE = enum.auto()
    REQUESTED = enum.auto()
    CHOSEN = enum.auto()
    BEGUN = enum.auto()
    COMPLETE = enum.auto()
    REFUSED = enum.auto()
    """For good: another job archives under the same run id."""


@dataclass(frozen=True, slots=True)
class HeldCheckpoint:
    """A checkpoint that a node can upload; nodes with an equal digest have the same bytes."""

    generation: int
    step: int
    digest: str
    parts: int
    is_named: bool = False
    """It has milestones that are not archived."""

    @property
    def version(self) -> Version:
        """(generation, step), which orders them."""
        return (self.generation, self.step)


@dataclass(frozen=True, slots=True)
class ArchivedVersion:
    """The newest checkpoint that this job has archived."""

    generation: int
    step: int

    @property
    def version(self) -> Version:
        """(generation, step), which orders them."""
        return (self.generation, self.step)


@dataclass(frozen=True, slots=True)
class Begun:
    """What an owner has begun: for which `Upload.turn`, its number in the log, and its id."""

    turn: int
    number: int
    attempt: str


@dataclass(frozen=True, slots=True)
class LogStart:
    """The number that the log's next entry had when the job ``writer`` began to archive."""

    writer: str
    number: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The fact of a node."""

    nonce: str = ""
    """16 random hexadecimal digits; those of one node become `ArchiveVerdict.writer`."""
    every_s: float = 0.0
    every_steps: int = 0
    """The interval; 0: it is `every_s`."""
    query: int = 0
    """`ArchiveVerdict.query` of the newest verdict that this node has."""
    step: int = 0
    """The newest that its workers have finished, 0 while none runs, if `ArchiveVerdict.asks_step`.

    While a step is requested: that one once it is passed, `ArchiveVerdict.requested_at` before, and less than
    that if the job went back."""
    step_s: float = 0.0
    """0 before it is measured, and where the leader does not ask."""
    commit_s: float = 0.0
    """What the last commit took."""
    bytes_per_s: float = 0.0
    """How fast this node has put parts; 0 if it has put none."""
    held: tuple[HeldCheckpoint, ...] = ()
    begun: Begun | None = None
    log_start: LogStart | None = None
    attempt: str = ""
    put: Ranges = ()
    """Its parts of `attempt` that are in the archive."""
    archived: ArchivedVersion | None = None
    failures: int = 0
    """In a row, in this upload."""
    checked_turn: int = 0
    """The newest turn after which this node has asked the archive for `HeldCheckpoint.is_named`."""
    done_turn: int = 0
    """The turn of an upload that this node has completed."""
    outdated_turn: int = 0
    """The turn of an upload whose number is taken, so it cannot be committed."""
    refusal: str = ""
    """Why this job may archive no more: another one writes there."""


@dataclass(frozen=True, slots=True)
class Share:
    """The parts that a node puts."""

    node: str
    parts: Ranges


@dataclass(frozen=True, slots=True)
class Upload:
    """The upload under way. ``attempt`` is empty until the owner has begun."""

    turn: int
    generation: int
    step: int
    digest: str
    parts: int
    owner: str
    """The node that begins it and puts the entry."""
    number: int = 0
    attempt: str = ""
    put: Ranges = ()
    shares: tuple[Share, ...] = ()
    is_named: bool = False
    """It is archived for its milestones."""

    @property
    def version(self) -> Version:
        """(generation, step) of the checkpoint."""
        return (self.generation, self.step)

    @property
    def phase(self) -> Phase:
        """Chosen, begun, or complete: every part is in the archive."""
        if not self.attempt:
            return Phase.CHOSEN
        return Phase.COMPLETE if self.put == ((0, self.parts),) * bool(self.parts) else Phase.BEGUN

    def share_of(self, node: str) -> Ranges:
        """Return the parts that a node puts."""
        return next((share.parts for share in self.shares if share.node == node), ())


@dataclass(frozen=True, slots=True)
class ArchiveVerdict:
    """What the leader tells all nodes."""

    query: int = 0
    """How often the leader has asked for the newest step."""
    asks_step: bool = False
    request_step: int = 0
    """The step that all nodes commit; 0: none."""
    requested_at: int = 0
    """The newest step of all nodes at the request."""
    upload: Upload | None = None
    archived: ArchivedVersion | None = None
    age_s: float = 0.0
    """Seconds since `archived`, roughly."""
    turn: int = 0
    writer: str = ""
    """The first half of the nonce of each attempt of this job: see `entries.is_outdated`."""
    first_number: int = 0
    """Entries from this number on were put since this job began to archive; 0: it has not."""
    refusal: str = ""
    bytes_per_s: float = 0.0
    """Of the slowest node that has put parts."""

    @property
    def phase(self) -> Phase:
        """The state of the job's archiving."""
        if self.refusal:
            return Phase.REFUSED
        if self.upload:
            return self.upload.phase
        if self.request_step:
            return Phase.REQUESTED
        return Phase.DUE if self.asks_step else Phase.WAITING


class ArchiveJudge(Judge):
    """Follows the uploads of one job."""

    def __init__(self, scope: Scope) -> None:
        self._leader = scope.leader
        self._last_body = scope.last_body
        self._verdict = _decode_last(scope.last_body)
        self._reports: dict[str, NodeReport] = {}
        self._members: tuple[str, ...] = ()
        self._archived_at: float | None = None
        """When the newest checkpoint was archived; unknown before the first judgment."""
        self._is_dropped = False
        self._progress_at = self._held_at = self._passed_at = self._named_at = math.inf

    def start_view(self, generation: int, members: tuple[str, ...]) -> None:
        """Keep the members of the newest view; an upload goes on whatever happens to views."""
        del generation
        self._members = members or self._members

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Take the report of a node."""
        report = decode_body(NodeReport, fact.body)
        parts = [held.parts for held in report.held]
        if report.nonce and not _NONCE.fullmatch(report.nonce):
            raise ValueError("an impossible nonce")
        if len(report.held) > MAX_HELD or not all(0 < count <= MAX_PARTS for count in parts):
            raise ValueError("an impossible number of checkpoints or parts")
        self._reports[node] = report
        upload = self._verdict.upload
        if upload and upload.attempt and report.attempt == upload.attempt:
            put = to_ranges({*iter_parts(upload.put), *iter_parts(report.put, upload.parts)})
            if put != upload.put:
                self._progress_at = now
                self._verdict = replace(self._verdict, upload=replace(upload, put=put))
        known = self._verdict.archived
        if report.archived and (known is None or report.archived.version > known.version):
            self._archived_at, self._is_dropped = now, False
            self._verdict = replace(self._verdict, archived=report.archived)
        if report.refusal and not self._verdict.refusal:
            self._verdict = replace(self._verdict, refusal=report.refusal)

    def remove(self, node: str) -> None:
        """Forget a node that is lost."""
        self._reports.pop(node, None)

    def judge(self, now: float) -> Judgment:
        """Return the verdict."""
        if not self._reports:
            return Judgment(self._last_body)
        if self._archived_at is None:
            self._archived_at, self._progress_at, self._held_at = now - self._verdict.age_s, now, now
        writer = self._verdict.writer or self._interval.nonce
        speeds = [report.bytes_per_s for report in self._reports.values() if report.bytes_per_s]
        self._verdict = replace(
            self._verdict,
            writer=writer,
            first_number=self._verdict.first_number or self._find_first_number(writer),
            bytes_per_s=min(speeds, default=self._verdict.bytes_per_s),
        )
        phase = self._verdict.phase
        if phase is Phase.REFUSED:
            self._verdict = replace(self._verdict, upload=None, request_step=0, asks_step=False)
        elif self._verdict.upload:
            self._follow(self._verdict.upload, now)
        elif self._start_named(now):
            pass
        elif phase is Phase.REQUESTED:
            self._choose(now)
        elif self._is_due(now):
            self._request()
        return Judgment(encode_body(replace(self._verdict, age_s=self._round_age(now))))

    def _find_first_number(self, writer: str) -> int:
        starts = [report.log_start for report in self._reports.values()]
        return min((start.number for start in starts if start and start.writer == writer), default=0)

    # ---- due, requested -------------------------------------------------------------------------------

    @property
    def _interval(self) -> NodeReport:
        """The report whose interval counts: the leader's, since nodes may be started with others."""
        return self._reports.get(self._leader) or next(iter(self._reports.values()))

    def _is_due(self, now: float) -> bool:
        """Return whether to archive; the first checkpoint at once, so that what is wrong shows at once."""
        is_first = self._verdict.archived is None or self._is_dropped
        interval = self._interval
        return is_first or interval.every_steps > 0 or self._age_s(now) >= interval.every_s

    def _age_s(self, now: float) -> float:
        return now - (now if self._archived_at is None else self._archived_at)

    def _request(self) -> None:
        """Ask for the newest step; request one that no node has passed when it receives the verdict."""
        if self._verdict.phase is Phase.WAITING:
            self._verdict = replace(self._verdict, query=self._verdict.query + 1, asks_step=True)
            return
        answers = [answer for answer in self._list_answers() if answer.step and answer.step_s > 0]
        newest = max(answers, key=lambda answer: answer.step, default=None)
        if newest is None:
            return  # no step has been measured
        step = newest.step + max(MIN_LEAD_STEPS, math.ceil(REQUEST_LEAD_S / newest.step_s))
        every = self._interval.every_steps
        multiple = -(-step // every) * every if every else step
        # After a start a multiple may be too near before the speed is known: that one is late, not left out.
        is_late = step - newest.step < every and multiple - every > newest.step
        step = step if is_late and self._verdict.archived is None else multiple
        self._held_at = self._passed_at = math.inf
        self._verdict = replace(self._verdict, request_step=step, requested_at=newest.step, asks_step=False)

    def _list_answers(self) -> list[NodeReport]:
        """Return the reports of nodes that know the newest question: steps in others may be old."""
        return [report for report in self._reports.values() if report.query == self._verdict.query]

    def _choose(self, now: float) -> None:
        """Choose the requested checkpoint once the first node holds it, or another one after a time."""
        wanted = self._verdict.request_step
        newest_step = max((answer.step for answer in self._list_answers()), default=0)
        if 0 < newest_step < self._verdict.requested_at:  # the job went back, maybe far: due again at once
            self._verdict = replace(self._verdict, request_step=0)
            return
        found = [held for _, held in self._list_held() if held.step == wanted]
        if found:
            self._held_at = min(self._held_at, now)
            first = self._rank(self._reports)[0]
            is_ready = any(held in found for held in self._reports[first].held)
            if is_ready or now - self._held_at >= HOLD_WAIT_S:
                self._start(max(found, key=lambda held: held.version), now)
            return
        if newest_step >= wanted:
            self._passed_at = min(self._passed_at, now)
        commit_s = max(report.commit_s for report in self._reports.values())
        if now - self._passed_at >= REQUEST_WAIT_S + 2 * commit_s:
            newest = max((held for _, held in self._list_held()), key=lambda h: h.version, default=None)
            self._verdict = replace(self._verdict, request_step=0)
            if newest:
                self._start(newest, now)

    def _start_named(self, now: float) -> bool:
        """Choose the oldest milestone once the first node has it too, or after a time."""
        named = self._list_held(is_named=True)
        if not named:
            self._named_at = math.inf
            return False
        oldest = min((held for _, held in named), key=lambda held: held.version)
        self._named_at = min(self._named_at, now)
        first = self._rank(self._reports)[0]
        is_ready = any(node == first and held.version == oldest.version for node, held in named)
        if is_ready or now - self._named_at >= HOLD_WAIT_S:
            self._start(oldest, now)
            self._named_at = math.inf
            return True
        return False

    def _list_held(self, *, is_named: bool = False) -> list[tuple[str, HeldCheckpoint]]:
        """Return the checkpoints that are newer than the newest archived one, by the nodes' ranks.

        With ``is_named`` return those whose milestones are not archived, as nodes know that by now.
        """
        archived = self._verdict.archived.version if self._verdict.archived else (0, 0)
        ranked = self._rank(self._reports)
        return [
            (node, held)
            for node in ranked
            for held in self._reports[node].held
            if (self._is_named(node, held) if is_named else held.version > archived)
        ]

    def _is_named(self, node: str, held: HeldCheckpoint) -> bool:
        return held.is_named and self._reports[node].checked_turn >= self._verdict.turn

    def _rank(self, nodes: Collection[str]) -> list[str]:
        """Sort nodes by rank, members first."""
        rank = {member: index for index, member in enumerate(self._members)}
        return sorted(nodes, key=lambda node: (rank.get(node, len(rank)), node))

    # ---- an upload ------------------------------------------------------------------------------------

    def _start(self, chosen: HeldCheckpoint, now: float) -> None:
        """Choose among nodes whose contents differ: the first one's values count, as in a resume."""
        is_named = chosen.is_named
        held = self._list_held(is_named=is_named)
        node, chosen = next((n, h) for n, h in held if h.version == chosen.version)
        turn = self._verdict.turn + 1
        upload = Upload(turn, *chosen.version, chosen.digest, chosen.parts, node, is_named=is_named)
        self._progress_at = self._held_at = now
        step = self._verdict.request_step if is_named else 0
        step = step if step > chosen.step else 0  # what is archived now is as new
        self._verdict = replace(self._verdict, upload=upload, request_step=step, turn=turn, asks_step=False)

    def _follow(self, upload: Upload, now: float) -> None:
        """Replace an owner, note what it has begun, share the parts, and see the end."""
        archived = self._verdict.archived
        holders = [node for node in self._rank(self._reports) if self._holds(node, upload)]
        is_over = any(report.done_turn == upload.turn for report in self._reports.values())
        if archived is not None and not upload.is_named:
            is_over = is_over or archived.version >= upload.version
        if holders:
            self._held_at = now
        is_stalled = now - self._progress_at >= STALL_S or now - self._held_at >= HOLD_WAIT_S
        has_lost = any(report.outdated_turn == upload.turn for report in self._reports.values())
        if is_over or is_stalled or has_lost:
            self._is_dropped = not is_over  # due again, with a newer checkpoint
            self._held_at = self._passed_at = math.inf
            self._verdict = replace(self._verdict, upload=None)
            return
        if not holders:
            return  # a new leader may not have all reports yet
        healthy = [node for node in holders if self._reports[node].failures < MAX_FAILURES] or holders
        owner = upload.owner if upload.owner in healthy else healthy[0]
        begun = self._reports[owner].begun
        if upload.phase is Phase.CHOSEN and begun and begun.turn == upload.turn:
            upload = replace(upload, number=begun.number, attempt=begun.attempt)
            self._progress_at = now
        shares = upload.shares
        if upload.phase is not Phase.CHOSEN:
            shares = share_parts(upload, healthy[:MAX_UPLOADERS])
        self._verdict = replace(self._verdict, upload=replace(upload, owner=owner, shares=shares))

    def _holds(self, node: str, upload: Upload) -> bool:
        held = self._reports[node].held
        return any((each.version, each.digest) == (upload.version, upload.digest) for each in held)

    def _round_age(self, now: float) -> float:
        """Return how long ago the newest checkpoint was archived; it changes seldom, since it is sent."""
        grain = max(MIN_AGE_GRAIN_S, self._interval.every_s / AGE_GRAINS)
        return self._age_s(now) // grain * grain


def share_parts(upload: Upload, nodes: Sequence[str]) -> tuple[Share, ...]:
    """Share the missing parts over ``nodes``, which put theirs in ascending order.

    Parts of a node that is not among them go to all. A node without work takes the second half of the longest
    share, which its owner has not begun.
    """
    missing = set(range(upload.parts)) - set(iter_parts(upload.put))
    left = {node: sorted(missing.intersection(iter_parts(upload.share_of(node)))) for node in nodes}
    orphans = sorted(missing.difference(*left.values()))
    for index, node in enumerate(nodes):
        begin, end = (len(orphans) * place // len(nodes) for place in (index, index + 1))
        left[node] = sorted([*left[node], *orphans[begin:end]])
    for node in nodes:
        longest = max(nodes, key=lambda other: len(left[other]))
        if not left[node] and (half := len(left[longest]) // 2):
            left[longest], left[node] = left[longest][:-half], left[longest][-half:]
    return tuple(Share(node, to_ranges(parts)) for node, parts in left.items() if parts)


@dataclass(frozen=True, slots=True)
class EndFacts:
    """What a node knows when its agent ends.

    ``rank`` is the node's in its last view. ``is_rejected``: the job has ended because its state is wrong.
    ``left_s``: until this node must end; None without a signal. ``bytes_per_s``: 0 before it is measured.
    """

    newest: Version | None
    archived: Version | None = None
    rank: int = 0
    is_rejected: bool = False
    left_s: float | None = None
    file_bytes: int = 0
    bytes_per_s: float = 0.0


def decide_last_upload(end: EndFacts) -> tuple[bool, str]:
    """Decide whether this node archives its last checkpoint, alone; the text says why not.

    The first node of the last view does, after a signal if there is time. It may not know whether the others
    stop too. If they train on, its entry is one more.
    """
    if end.newest is None or end.is_rejected or end.rank != 0:
        return False, ""
    if end.archived is not None and end.archived >= end.newest:
        return False, ""
    if end.left_s is None:
        return True, ""
    if not end.bytes_per_s:
        return False, "The speed of the archive was not measured, and this node must end."
    needed_s = LAST_UPLOAD_MARGIN * end.file_bytes / end.bytes_per_s
    if needed_s > end.left_s:
        left_s = max(0.0, end.left_s)
        return False, f"Its upload would take {needed_s:.0f} s, and --grace leaves {left_s:.0f} s."
    return True, ""


def to_ranges(parts: Iterable[int]) -> Ranges:
    """Return sorted ranges of these parts."""
    ranges: list[tuple[int, int]] = []
    for part in sorted(parts):
        if ranges and ranges[-1][1] == part:
            ranges[-1] = (ranges[-1][0], part + 1)
        else:
            ranges.append((part, part + 1))
    return tuple(ranges)


def iter_parts(ranges: Ranges, count: int = MAX_PARTS) -> Iterator[int]:
    """Yield the parts of ranges, those below ``count``."""
    for first, stop in ranges:
        yield from range(max(first, 0), min(stop, count))


def _decode_last(body: FactBody) -> ArchiveVerdict:
    """Return the verdict of the last leader; an empty one if there is none, or of another version."""
    try:
        return decode_body(ArchiveVerdict, body) if body else ArchiveVerdict()
    except ValueError:
        return ArchiveVerdict()
