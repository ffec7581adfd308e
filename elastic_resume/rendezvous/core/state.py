"""What an agent knows and has, whichever role it plays: its knowledge, links, workers and lease.

Roles (`seeking`, `following`, `leading`) read and change it; it collects the effects. It promises that
`Persist` is asked for whenever knowledge changed, one at a time, and tells which change is durable.

One connection as the core sees it: which messages the other side has seen, and when they were sent.

Two clocks are never compared. A lease counts from when its holder sent the message that was acknowledged;
the one who waits for a lease to end counts from when it received. So the holder stops first, whatever the
delay, if the clocks run at the same rate up to `Settings.drift`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastic_resume.policy.divergence import rounder
from elastic_resume.policy.failure_classification import lost
from elastic_resume.rendezvous.core.events import (
    BeginWorld,
    Connect,
    Disconnect,
    Effect,
    Log,
    Memory,
    Persist,
    RestartWorkers,
    Send,
    Settings,
    StopWorkers,
)
from elastic_resume.rendezvous.core.failure_log import Ledger, received
from elastic_resume.rendezvous.core.messages import (
    Beat,
    Begin,
    Claim,
    Hello,
    JobEnd,
    Join,
    Message,
    Print,
    Redirect,
    Report,
    Stamp,
)
from elastic_resume.rendezvous.core.quorum import Incarnation, Knowledge, World
from elastic_resume.rendezvous.core.status import Outbox, deputy

NEVER = float("-inf")
UNSEEN_LIMIT = 64
"""So many messages are remembered until the other side has seen them; to forget one shortens a lease."""


@dataclass(slots=True)
class Link:
    """A connection, dialled (`address` set) or accepted."""

    conn: int
    address: str = ""
    who: Incarnation | None = None
    known: Knowledge | None = None
    """What we knew when we dialled: a refused call proves the end of nobody who came later."""
    dialled_at: float = NEVER
    host: str = ""
    """The IP address that answered, where we dialled."""
    heard_at: float = NEVER
    echoed_at: float = NEVER
    """When the newest of our messages that the other side has seen was sent."""
    lease_end: float = NEVER
    """Until when the other side, if it leads, counted on a quorum that follows it."""
    seq: int = 0
    heard: int = 0
    unseen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=UNSEEN_LIMIT))

    def stamp(self, now: float, generation: int, lease_s: float) -> Stamp:
        """Number the next message to be sent."""
        self.seq += 1
        self.unseen.append((self.seq, now))
        return Stamp(self.seq, self.heard, generation, lease_s)

    def succeed(self, broken: Link) -> None:
        """Inherit `echoed_at` and `lease_end` from the broken link to the same process."""
        self.echoed_at, self.lease_end = broken.echoed_at, broken.lease_end

    def note(self, stamp: Stamp, now: float) -> None:
        """Take in the stamp of a message that arrived."""
        self.heard = stamp.seq
        self.heard_at = now
        while self.unseen and self.unseen[0][0] <= stamp.echo:
            seq, sent_at = self.unseen.popleft()
            if seq == stamp.echo:
                self.echoed_at = sent_at
        if stamp.lease_s > 0:
            self.lease_end = max(self.lease_end, self.echoed_at + stamp.lease_s)


NAMED = 5
"""So many candidates are named in one line."""
LEFT_OUT = 1000
"""So many generations may have begun behind a cut, and ended with all who knew of them."""
ECHO = Beat()


class Body:
    """The part of an agent's state that outlives a role."""

    def __init__(
        self, settings: Settings, me: Incarnation, memory: Memory | None, now: float, seen: int = 0
    ) -> None:
        self.settings = settings
        self.me = me
        self.introduced = False
        """Others have been told of this life."""
        self.known = Knowledge(len(settings.candidates))
        self.seen = seen
        self.now = now
        self.links: dict[int, Link] = {}
        self.effects: list[Effect] = []
        self.join: Join | None = None
        self.join_since = now
        self.running: World | None = None
        self.last: World | None = None
        """The newest world whose workers ran here."""
        self.finished = 0
        self.unreached: dict[str, str] = {}
        """Why a candidate did not answer the last call, by its address."""
        self.failed = ""
        """Why this node wants the job to end for all."""
        self.ended: JobEnd | None = None
        self.ledger = Ledger()
        self.outbox = Outbox()
        self.report: Report | None = None
        """What this node has to tell of a worker of its own."""
        self._print: Print | None = None
        self.fence_at = NEVER
        # A life before this one may have granted leases that still run.
        self.grace_until = now + settings.node_timeout_s if memory else NEVER
        self.current_until = NEVER
        """Until when no world can have begun that we were not asked about: see `nobody_at`."""
        self.silent: set[Incarnation] = set()
        self.witnesses: dict[int, float] = {}
        self.changes = 0
        self.durable = 0
        self._persisting = 0
        self._persist_since = now
        self._conns = 0
        if memory:
            self._recall(memory)
        if settings.alone:
            self.known = replace(self.known, forced=self.known.generation)

    def _recall(self, memory: Memory) -> None:
        self.known = self.known.merge(memory.knowledge)
        self.seen = max(self.seen, memory.seen)
        if self.settings.rules.incarnations:
            self.known = self.known.with_gone([memory.me])
        self.changes += 1

    # What is known.

    def learn(self, knowledge: Knowledge, seen: int = 0) -> None:
        """Take over what another knows, whole; new ends of others may hide leases that still run."""
        before = self.known
        if self.settings.rules.gone_brings_knowledge:
            self.known = before.merge(knowledge)
        else:
            self.known = before.with_gone(knowledge.gone)
        if self.settings.rules.incarnations and self.known is not before:
            # A life that died before its first write left no trace on our disk, but perhaps in a proposal.
            lives = (m for w in self.known.worlds for m in w.lives_of(self.me.node))
            self.known = self.known.with_gone(one for one in lives if one != self.me)
        if self.known.gone - before.gone:
            self.grace(self.settings.node_timeout_s)
        if self.known == before:
            self.known = before  # the same object: others keep what they worked out from it
        seen = max(seen, knowledge.generation, self.seen)
        if self.known is not before or seen != self.seen:
            self.seen = seen
            self.changes += 1

    def believe(self, knowledge: Knowledge) -> None:
        """Replace what is known by something greater, derived from it."""
        if knowledge != self.known:
            if knowledge.gone - self.known.gone:
                self.grace(self.settings.node_timeout_s)
            self.known = knowledge
            self.seen = max(self.seen, knowledge.generation)
            self.changes += 1

    def forget(self) -> None:
        """Let go of all worlds: the job has ended in every one of them. Its generations still count."""
        self.known = Knowledge(self.known.candidates, settled=self.seen)
        self.changes += 1

    def hear_claim(self, claim: Claim) -> None:
        """Note which generations a leader knows of, so that their numbers are not given again."""
        newest = max(claim.active, claim.known)
        if newest > self.seen:
            self.seen = newest
            self.changes += 1

    def nobody_at(self, address: str, known: Knowledge) -> None:
        """Count the member at that address gone, if it can have known nothing that we do not.

        The call was refused: whoever listened there has ended, since an agent listens in one place for all
        its life. The answer may come late, so it counts only for those whom we knew when we dialled. Until
        `current_until` no world can have begun without us, so the dead one knew of none.
        """
        if self.now >= self.current_until:
            return
        then = {one for world in known.worlds for one in known.alive(world) if one.address == address}
        ended = then & self.rivals([self.me])
        if ended:
            self.believe(self.known.with_gone(ended))
            self.log("lost", f"{', '.join(map(str, ended))} died too: nobody listens at {address}")

    def force_quorum(self, generation: int, *, running: bool) -> None:
        """Waive the consent of the worlds up to ``generation``, which an operator asked for.

        The missing members may have begun a later world among themselves before they died. Its generation
        must not be given again, so the next `LEFT_OUT` generations are skipped.
        """
        if running or generation != self.known.generation:
            why = "a world runs" if running else f"the newest generation is {self.known.generation}"
            self.log("forced", f"force-quorum for generation {generation} is ignored: {why}")
        elif self.known.forced < generation:
            self.believe(replace(self.known, forced=generation))
            self.seen += LEFT_OUT
            self.log("forced", f"an operator declared the missing members of generation {generation} dead")

    def grace(self, seconds: float) -> None:
        """Worlds of others may go on for so long without our hearing of it."""
        self.grace_until = max(self.grace_until, self.now + seconds)

    def others_s(self) -> float:
        """How long worlds in which we had a part may yet run elsewhere."""
        until = max([self.grace_until, *self.witnesses.values()])
        return max(0.0, until - self.now)

    def rivals(self, present: Iterable[Incarnation]) -> set[Incarnation]:
        """Who may be in a world that runs without the present ones."""
        return {m for w in self.known.worlds for m in self.known.alive(w)} - set(present)

    def flush(self) -> None:
        """Ask for what is known to be made durable, unless that is under way."""
        if self.changes > self.durable and self._persisting <= self.durable:
            self._persisting, self._persist_since = self.changes, self.now
            self.effects.append(Persist(self.changes, Memory(self.me, self.known, self.seen)))

    @property
    def newest(self) -> int:
        """Generation of the newest world that is known to have begun."""
        return self.known.begun.generation if self.known.begun else 0

    @property
    def disk_is_late(self) -> bool:
        """Whether a write has taken so long that nobody should have to wait for the next one."""
        if self.settings.max_nodes == 1:
            return False
        late = self.now >= self._persist_since + self.settings.node_timeout_s
        return self._persisting > self.durable and late

    @property
    def disk_late_at(self) -> float:
        """When the write under way, if any, will have taken too long."""
        if self._persisting <= self.durable:
            return float("inf")
        return self._persist_since + self.settings.node_timeout_s

    # Links.

    def dial(self, address: str, host: str = "") -> Link:
        """Ask for a connection; with `host`, at the IP address where the same peer answered before."""
        self._conns += 1
        link = Link(self._conns, address, known=self.known, dialled_at=self.now)
        self.links[link.conn] = link
        self.effects.append(Connect(link.conn, address, host))
        return link

    def send(self, link: Link, message: Message, generation: int = 0, lease_s: float = 0.0) -> None:
        """Queue a message on an open link."""
        self.effects.append(Send(link.conn, link.stamp(self.now, generation, lease_s), message))

    def hang_up(self, link: Link) -> None:
        """Close a link of which nothing depends."""
        if self.links.pop(link.conn, None):
            self.effects.append(Disconnect(link.conn))

    def part(self, link: Link, address: str) -> None:
        """Redirect a member; until it disconnects it may treat a refused call as proof that we died.

        So until it disconnects, or a node timeout has passed, we neither acknowledge nor begin a world: it
        may count us dead without knowing of that world.
        """
        self.send(link, Redirect(address))
        self.let_go(link)

    def let_go(self, link: Link) -> None:
        """Have nothing more to do with a link, but leave its closing to the other side while that counts."""
        self.witnesses[link.conn] = link.heard_at + self.settings.node_timeout_s

    def expire_witnesses(self) -> None:
        """Forget those whose evidence has expired."""
        for conn in [conn for conn, until in self.witnesses.items() if until <= self.now]:
            del self.witnesses[conn]
            if conn in self.links:
                self.hang_up(self.links[conn])

    def is_fresh(self, link: Link) -> bool:
        """Return whether the peer still follows us.

        It does if less than `lease_s` has passed since we sent the newest message that it acknowledged.
        """
        return self.now < link.echoed_at + self.settings.lease_s

    def proves_end(self, link: Link, *, refused: bool) -> bool:
        """Whether the peer on that link is dead, and did nothing that we do not know before it died.

        Only a refused call proves a death: a connection that is reset or not answered may be the network's
        doing, and its peer may run on.
        """
        return refused and self.is_fresh(link)

    def current_for(self, link: Link) -> float:
        """Return the time until which no world can have started without this node.

        The leader on `link` had a quorum of followers until its lease ended (`Former.lease_until`). Followers
        of a dead leader wait one node timeout for the members that they know; they never wait for spares.
        Count from sending: the leader's message may have been queued here.
        """
        if any(world.rank(self.me) is None for world in self.known.worlds):
            return NEVER
        return min(link.lease_end, link.echoed_at + self.settings.lease_s)

    def hello(self) -> Hello:
        """Tell all that we are."""
        self.introduced = True
        running = self.running.generation if self.running else 0
        settings = self.settings
        return Hello(
            self.me,
            self.known,
            self.seen,
            self.join,
            running,
            self.finished,
            self.others_s(),
            settings.node_timeout_s,
            settings.min_nodes,
            settings.max_nodes,
        )

    # Workers.

    def begin(self, world: World, message: Begin, fence_at: float) -> None:
        """Start workers."""
        rank = world.rank(self.me)
        if rank is None:
            return
        self.running, self.join, self.finished, self.fence_at = world, None, 0, fence_at
        self.last = world
        self.report = None
        self.effects.append(
            BeginWorld(
                world.generation,
                rank,
                world.members,
                message.store,
                message.workers,
                message.step,
                received(message.failures),
            )
        )

    def heard(self, who: Incarnation, report: Report) -> None:
        """Note what a node tells of the newest world; of an older one nobody asks any more."""
        begun = self.known.begun
        if begun and report.generation == begun.generation and who in begun.members:
            self.ledger.note(report.generation, replace(report.failure, node=who.node))

    def digested(self, told: Print) -> None:
        """Keep what the next heartbeat is to tell of this node's state.

        A digest takes its time: one of an earlier world may be ready when the next one runs.
        """
        world, kept = self.running or self.last, self._print
        if world is None or told.generation != world.generation:
            return
        if kept is None or kept.generation != told.generation or rounder(told.step, kept.step) == told.step:
            self._print = told

    def take_print(self) -> Print | None:
        """Return what is to be told of this node's state, once."""
        told, self._print = self._print, None
        return told

    def echo(self, who: Incarnation, world: World | None, here: Collection[Incarnation]) -> Beat:
        """Answer a follower's heartbeat; the deputy is told what this leader has to tell."""
        told = self.outbox.take(who) if who == deputy(world, self.me, here) else None
        return Beat(None, told) if told else ECHO

    def lost(self, who: Incarnation, reason: str) -> None:
        """Note that a member of the newest world is lost, or was asked to leave by a signal."""
        begun = self.known.begun
        if begun and who in begun.members:
            self.ledger.note(begun.generation, lost(who.node, reason, told=reason.startswith("left (SIG")))

    def end_of_job(self, here: set[Incarnation], finished: Mapping[Incarnation, int]) -> JobEnd:
        """Say how the job ended. ``here`` hear of it; ``finished`` tells where workers succeeded last."""
        newest = self.known.begun
        # Not with somebody silent, nor while workers run: those who do not hear this may go on.
        settled = not self.rivals(here | {self.me}) and not self.failed
        generation, members = (newest.generation, newest.members) if newest else (0, ())
        missing = [str(one) for one in members if one != self.me and finished.get(one) != generation]
        told = self.ledger.of(generation)
        return JobEnd(generation, self.failed, settled, tuple(missing[:NAMED]), told)

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """End the running world on this node, if there is one."""
        if self.running is None:
            return
        kind = StopWorkers if at_once else RestartWorkers
        self.effects.append(kind(self.running.generation, reason))
        self.running = None
        self.fence_at = NEVER

    def not_here(self, present: Iterable[Incarnation]) -> str:
        """Name the candidates that are not among these, with what came of calling them."""
        here = {one.candidate for one in present}
        missing = [
            address + (f" ({self.unreached[address]})" if address in self.unreached else "")
            for place, address in enumerate(self.settings.candidates)
            if place not in here
        ]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        return ", ".join(missing[:NAMED]) + more

    def reborn(self) -> None:
        """Become somebody new: others count us gone."""
        old = self.me
        self.stop(f"{old.node} was counted gone while it lived")
        self.me = old.reborn()
        self.introduced = False
        self.believe(self.known.with_gone([old]))
        self.changes += 1

    def log(self, kind: str, text: str) -> None:
        """Add a fact to the event log."""
        self.effects.append(Log(kind, text))
