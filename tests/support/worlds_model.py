"""Explore the rule that decides the sequence of worlds, exhaustively: breadth first, every interleaving.

    python -m tests.support.worlds_model nodes=3 crashes=1 strict=True
    python -m tests.support.worlds_model nodes=2 newcomers=1 slots=2 crashes=2 leader_waits_for_heir=False

World 1 has the members a, b, c, ... in rank order and is at work; newcomers follow them in the alphabet. With
`first=True` nothing is decided yet, and the same nodes are the candidates of --rdzv-endpoint.

There is no network and no clock. Whatever was sent is kept, and anybody reads it in any order, once, often or
never. The window ("the leader is free of its heir") may be over at any moment.
`Config` lists the clauses of the rule; a clause that is taken out must break an invariant:

I1  A slot is never decided with two values. With lost disks: no two disks that exist know different values.
I2  There are never two whole worlds. A world is whole if each member is up in its incarnation of the world,
    knows that the world is decided, and has not joined a ballot for its successor.
I3  No world is whole while a later slot is decided (with lost disks: known to a disk that exists).

A slot depends only on the value of the slot before, and a node forgets a slot when it learns a later one. So
`late=True`, where nodes learn world 1 at any time and may be dead before, stands for every later slot.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, NamedTuple

Incarnation = tuple[int, int]  # node, life
Bits = int  # of nodes
DISK = 16  # A life is DISK * (number of the disk) + (number of starts of the node's name).


@dataclass(frozen=True)
class Config:
    """Sizes of an exploration, and the clauses of the rule."""

    nodes: int = 3  # members of world 1
    newcomers: int = 0
    leader: int = 0  # rank of world 1's leader
    slots: int = 1  # successors that are decided
    ballots: tuple[int, ...] = (2, 2)  # for each slot
    owners: tuple[str, ...] = ()  # for each ballot: "L" leader, "H" heir, "*" others; () is everybody
    crashes: int = 1
    lost: int = 0  # restarts with an empty disk
    end: bool = True  # the end of the job may be proposed
    first: bool = False  # start before world 1
    late: bool = False
    check_i1: bool = True
    strict: bool = False  # without the exception
    half_with_leader: bool = True  # exactly half is a quorum only with the leader's vote
    members_only: bool = True
    by_disk: bool = True  # an acceptor is a disk, not a name
    own_promise: bool = True  # who begins a ballot has promised it, and leads it until it promises another
    durable_promise: bool = True
    durable_accept: bool = True
    stop_on_join: bool = True
    repropose: str = "value"  # "value" (count by value), "always" (Paxos), "never"
    end_decided: bool = True
    take_alive: bool = True  # only the incarnation that is in the world takes votes
    take_elsewhere: bool = True  # L takes none once it joined others; H none once it joined any but L
    # Clauses of a vote that is handed over, which needs no exception.
    handover: bool = False
    durable_handing: bool = True  # who hands its vote over records it on disk before
    handed_once: bool = True  # its vote counts only where the receiver has promised and not got it
    handed_in_ballot: bool = (
        True  # the receiver takes it over only in its own ballot, which both have promised
    )
    handed_accepted: bool = True  # it takes over what the other has accepted
    handed_back: bool = True  # 7: a vote is its giver's again if the receiver's disk is lost
    late_votes: bool = False  # nodes may join a ballot after its proposal
    # Clauses of the exception, with their rules in docs/concepts/worlds.md.
    ties_only: bool = True  # 1: a taken vote counts only if exactly half of the members vote themselves
    half_repeats: bool = True  # 1: a proposal that half may have accepted is proposed again
    leader_window: bool = True  # 2, 5: an heir takes its leader's vote only until the leader votes for others
    only_heir_takes: bool = True  # 2
    durable_taking: bool = True  # 3
    accept_before_send: bool = True  # 4: a proposer accepts its proposal before it sends it
    leader_waits_for_heir: bool = True  # 4: in its own ballots
    leader_waits_elsewhere: bool = True  # 5: in the ballots of others, until its heir cannot take its vote
    restarted_leader: bool = True  # 6: its vote makes half a quorum only with its heir's
    replaced: bool = False  # 7: the votes of all members whose disks are not replaced suffice
    known_losses: bool = False  # 7: a disk is lost only while all others know what is decided


class World(NamedTuple):
    """A value of a slot; without members it is the end of the job or, in the last slot, any other value."""

    generation: int
    members: tuple[Incarnation, ...] = ()
    leader: Incarnation | None = None
    heir: Incarnation | None = None
    before: int = 0
    token: int = 0


class Node(NamedTuple):
    """A node's disk and process. All but the first three fields are about the successor of `world`."""

    life: int
    up: int
    world: int
    promised: int = 0
    accepted: int = 0  # ballot
    value: int = 0
    taken: int = 0  # it has taken the leader's vote
    elsewhere: int = 0  # it has joined a ballot that bars it from taking votes
    held: Bits = 0  # members that have handed it their votes
    handed: int = 0  # whom it has handed its vote: 1 + node


class Join(NamedTuple):
    """A promise, and what its node had accepted, taken, got and handed over."""

    node: int
    life: int
    accepted: int
    value: int
    taken: int
    held: Bits
    handed: int


class Ballot(NamedTuple):
    """All messages of one ballot."""

    world: int
    number: int
    owner: Incarnation | None  # None: anybody but the leader and the heir
    value: int = 0  # the proposal
    joins: tuple[Join, ...] = ()
    plain: Bits = 0  # acceptors
    alone: int = 0  # the leader has accepted, and makes half a quorum without its heir
    cast: int = 0  # the heir has accepted, and has taken the leader's vote
    hands: tuple[Join, ...] = ()  # votes handed to the owner
    back: Bits = 0  # nodes that have accepted: their votes count if the disks that hold them are lost


class State(NamedTuple):
    """Nodes, ballots in order, and the worlds whose leaders are free of their heirs."""

    nodes: tuple[Node, ...]
    ballots: tuple[Ballot, ...] = ()
    free: tuple[int, ...] = ()


Step = tuple[tuple[Any, ...], State]


class Model:
    """The states and steps of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.first_generation = 0 if config.first else 1
        self.last_generation = self.first_generation + config.slots
        self.total = config.nodes + config.newcomers
        self.everybody = (1 << self.total) - 1
        # Without lost disks I1 and I3 imply I2. Then the last slot's values need no members: only whether two
        # are equal matters. A free choice is any value so far or a fresh one, a superset of what joins allow.
        self.tokens = not config.lost
        # Whether every ballot has a certain owner.
        self.named = config.lost > 0 or config.handover or not (config.take_alive and config.only_heir_takes)
        self.worlds: list[World] = []
        self.ids: dict[World, int] = {}
        self.places: list[dict[int, int]] = []  # for each world: node -> life of the member
        self.surpluses: dict[tuple[int, Bits], int] = {}
        members = tuple((node, 0) for node in range(config.nodes))
        self.intern(World(0, members))
        self.start = 0 if config.first else self.world(1, members, members[config.leader], 0)
        self.first = State((Node(0, 1, 0 if config.late else self.start),) * self.total)

    def intern(self, world: World) -> int:
        """Return the number of a world, which is cheap to compare and to hash."""
        if world not in self.ids:
            self.ids[world] = len(self.worlds)
            self.worlds.append(world)
            self.places.append(dict(world.members))
        return self.ids[world]

    def world(
        self, generation: int, members: tuple[Incarnation, ...], leader: Incarnation, before: int
    ) -> int:
        """Return the number of a world, without its leader and heir where nobody uses them."""
        heir = next((member for member in members if member != leader), None)
        if generation == self.last_generation or heir is None:
            return self.intern(World(generation, members, before=before))
        if self.config.strict:
            return self.intern(World(generation, members, leader, before=before))
        return self.intern(World(generation, members, leader, heir, before))

    def is_acceptor(self, world: int, node: int, life: int) -> bool:
        """Return whether an incarnation runs on the disk of a member."""
        member = self.places[world].get(node)
        if member is None:
            return not self.config.members_only
        return member // DISK == life // DISK or not world or not self.config.by_disk

    def surplus(self, world: int, votes: Bits) -> int:
        """Return by how many votes these are more than half, doubled; 0 is exactly half."""
        if (world, votes) not in self.surpluses:
            voters = self.places[world] if self.config.members_only else range(self.total)
            surplus = 2 * sum(votes >> node & 1 for node in voters) - len(self.places[world])
            self.surpluses[world, votes] = surplus
        return self.surpluses[world, votes]

    def decides(self, world: int, votes: Bits, *, alone: bool, taken: bool) -> bool:
        """Return whether acceptors are a quorum.

        `alone`: the leader's vote is one of exactly half without its heir's. `taken`: the heir has it.
        """
        surplus, leader, heir = self.surplus(world, votes), self.worlds[world].leader, self.worlds[world].heir
        if not self.config.ties_only and leader and taken:
            surplus, alone = self.surplus(world, votes | 1 << leader[0]), True
        if surplus or not world:
            return surplus > 0
        if taken or not self.config.half_with_leader or leader is None:
            return True
        return bool(votes >> leader[0] & 1) and bool(heir is None or alone or votes >> heir[0] & 1)

    def personal(
        self, nodes: tuple[Node, ...], ballot: Ballot, joins: tuple[Join, ...], lost: Bits = 0
    ) -> dict[int, Join]:
        """Return the acceptors whose promises count, with the join that reports what each has accepted.

        `lost` are the nodes whose disks are known to be lost: a vote handed to one is its giver's again,
        if no other has it.
        """
        voters = {
            join.node: self.current(nodes, ballot, join)
            for join in joins
            if self.is_acceptor(ballot.world, join.node, join.life)
        }
        result: dict[int, Join] = {}
        for node, join in voters.items():
            if join.handed and self.config.handed_once:
                holder = voters.get(join.handed - 1)
                is_held = any(other.held >> node & 1 for other in voters.values())
                is_back = lost >> join.handed - 1 & 1 and not is_held
                if not is_back and (holder is None or holder.held >> node & 1):
                    continue
            for other in range(self.total):
                if (1 << node | join.held) >> other & 1 and (other not in result or other == node):
                    result[other] = join
        return result

    def current(self, nodes: tuple[Node, ...], ballot: Ballot, join: Join) -> Join:
        """Return a join with what its node has taken and got since, if that leads the ballot."""
        if ballot.owner != (join.node, join.life) or not self.leads(nodes, ballot):
            return join
        node = nodes[join.node]
        return Join(join.node, join.life, node.accepted, node.value, node.taken, node.held, node.handed)

    def leads(self, nodes: tuple[Node, ...], ballot: Ballot) -> bool:
        """Return whether the ballot's owner can still lead it."""
        if ballot.owner is None:
            return True
        node = nodes[ballot.owner[0]]
        return (
            node.life == ballot.owner[1]
            and bool(node.up)
            and node.world == ballot.world
            and (node.promised == ballot.number or not self.config.own_promise)
        )

    def chosen(self, state: State) -> list[Ballot]:
        """Return the ballots that have decided."""
        return [ballot for ballot in state.ballots if self.is_chosen(state.nodes, ballot)]

    def is_chosen(self, nodes: tuple[Node, ...], ballot: Ballot) -> bool:
        """Return whether a ballot has decided."""
        if not ballot.value or not (ballot.plain or ballot.back):
            return False
        alone, taken = bool(ballot.alone), bool(ballot.cast)
        if self.decides(ballot.world, ballot.plain, alone=alone, taken=taken):
            return True
        if not self.config.replaced:
            return False
        votes = ballot.plain | self.given_back(nodes, ballot)
        return self.all_replaced(ballot.world, votes, ballot.joins, taken=taken)

    def given_back(self, nodes: tuple[Node, ...], ballot: Ballot) -> Bits:
        """Return the acceptors whose votes were handed to disks that are lost, and whose votes they hold."""
        if not (lost := self.replaced_in(ballot.world, ballot.joins)):
            return 0
        joins = tuple(join for join in ballot.joins if ballot.back >> join.node & 1)
        return sum(1 << node for node in self.personal(nodes, ballot, joins, lost))

    def replaced_in(self, world: int, joins: tuple[Join, ...]) -> Bits:
        """Return the nodes that have joined with another disk than the member of their name."""
        if not self.config.replaced or not self.config.handed_back:
            return 0
        members = self.places[world]
        others = {
            join.node
            for join in joins
            if join.node in members and not self.is_acceptor(world, join.node, join.life)
        }
        return sum(1 << node for node in others)

    def all_replaced(self, world: int, votes: Bits, joins: tuple[Join, ...], *, taken: bool) -> bool:
        """Return whether all members without a vote have joined with another disk (rule 7)."""
        if not self.config.replaced:
            return False
        replaced = sum(
            1 << node
            for node in {join.node for join in joins if not self.is_acceptor(world, join.node, join.life)}
        )
        members = sum(1 << node for node in self.places[world])
        leader = self.worlds[world].leader
        counted = votes | replaced | (1 << leader[0] if taken and leader else 0)
        return bool(votes) and not members & ~counted and self.surplus(world, votes | replaced) >= 0

    def may_lose_disk(self, state: State, i: int, chosen: list[Ballot]) -> bool:
        """Return whether a disk may be lost by the premise of the exception."""
        newest = max((self.worlds[ballot.value].generation for ballot in chosen), default=0)
        others = (self.worlds[node.world] for j, node in enumerate(state.nodes) if j != i)
        return not self.config.known_losses or all(world.generation >= newest for world in others)

    @staticmethod
    def ended(nodes: tuple[Node, ...], member: Incarnation) -> bool:
        """Return whether a process has ended for certain."""
        return nodes[member[0]].life != member[1] or not nodes[member[0]].up

    def waits_for_heir(self, state: State, i: int, ballot: Ballot) -> bool:
        """Return whether node i is a leader that needs the end of its window (rules 4 and 5)."""
        leader, heir = self.worlds[ballot.world].leader, self.worlds[ballot.world].heir
        if heir is None or (i, state.nodes[i].life) != leader or self.ended(state.nodes, heir):
            return False
        if ballot.owner == leader:
            return self.config.leader_waits_for_heir
        return ballot.owner != heir and self.config.leader_waits_elsewhere

    @staticmethod
    def freed(state: State, world: int) -> tuple[int, ...]:
        """Return the worlds whose windows are over, with this one.

        The end of a window allows the leader more, and the heir less. So it is enough to let it end when the
        leader first needs it.
        """
        return tuple(sorted({*state.free, world}))

    def bars(self, i: int, node: Node, owner: Incarnation | None) -> int:
        """Return whether node i may not take votes after it joined a ballot of `owner`."""
        world = self.worlds[node.world]
        me = i, node.life
        if me not in (world.leader, world.heir) or node.elsewhere or not self.config.take_elsewhere:
            return node.elsewhere
        return int(owner != me and (owner != world.leader or me != world.heir))

    def steps(self, state: State) -> Iterator[Step]:
        """Yield every step that somebody can take, with its description."""
        table = {(ballot.world, ballot.number): ballot for ballot in state.ballots}
        chosen = self.chosen(state)
        crashes = sum(node.life % DISK + (not node.up) for node in state.nodes)
        lost = sum(node.life // DISK for node in state.nodes)
        for i, node in enumerate(state.nodes):
            if not node.up:
                yield self.step(state, i, self.restarted(node), "restarts")
                if lost < self.config.lost and self.may_lose_disk(state, i, chosen):
                    life = DISK * (node.life // DISK + 1) + node.life % DISK + 1
                    yield self.step(state, i, Node(life, 1, 0), "restarts with an empty disk")
                continue
            if crashes < self.config.crashes:
                yield self.step(state, i, node._replace(up=0, elsewhere=0), "crashes")
            yield from self.learn(state, i, chosen)
            world = self.worlds[node.world]
            if not world.members or not self.first_generation <= world.generation < self.last_generation:
                continue
            if (node.world, 0) in table:
                continue
            for number in range(1, self.config.ballots[world.generation - self.first_generation] + 1):
                ballot = table.get((node.world, number))
                if ballot and ballot.value:
                    yield from self.accept(state, i, ballot)
                    if self.config.late_votes:
                        yield from self.join(state, i, ballot)
                elif ballot:
                    yield from self.join(state, i, ballot)
                else:
                    for owner in self.owners(state, node.world, number):
                        yield from self.join(state, i, Ballot(node.world, number, owner))
            yield from self.take(state, i, table)
            if self.config.handover:
                yield from self.hand_over(state, i, table)
        for ballot in state.ballots:
            yield from self.receive(state, ballot)
            if not ballot.value and self.leads(state.nodes, ballot):
                for value, waits in sorted({choice[:2] for choice in self.proposals(state, ballot)}):
                    what: tuple[Any, ...] = (
                        "proposal in ballot",
                        ballot.number,
                        ballot.owner,
                        self.worlds[value],
                    )
                    what = (*what, "after its window") if waits else what
                    after = state._replace(free=self.freed(state, ballot.world)) if waits else state
                    if ballot.owner and self.config.accept_before_send:
                        i = ballot.owner[0]
                        node = after.nodes[i]._replace(accepted=ballot.number, value=value)
                        _, after = self.step(after, i, node)
                    yield what, after._replace(ballots=self.put(state, ballot._replace(value=value)))

    def step(self, state: State, i: int, node: Node, *what: Any) -> Step:
        """Return the state with another node i, and what happened to it."""
        nodes = (*state.nodes[:i], node, *state.nodes[i + 1 :])
        return ((i, state.nodes[i].life), *what), State(nodes, state.ballots, state.free)

    def put(self, state: State, ballot: Ballot) -> tuple[Ballot, ...]:
        """Return the ballots with another one in the place of its old self."""
        return tuple(sorted([other for other in state.ballots if other[:2] != ballot[:2]] + [ballot]))

    def restarted(self, node: Node) -> Node:
        """Return a node that starts again with its disk."""
        keep = self.config
        return Node(
            node.life + 1,
            1,
            node.world,
            node.promised if keep.durable_promise else 0,
            node.accepted if keep.durable_accept else 0,
            node.value if keep.durable_accept else 0,
            node.taken if keep.durable_taking else 0,
            0,
            node.held,
            node.handed if keep.durable_handing else 0,
        )

    def learn(self, state: State, i: int, chosen: list[Ballot]) -> Iterator[Step]:
        """Learn a decided world: from anybody who ever knew it, or with lost disks from processes that exist.

        What a process on a lost disk sent has to be discarded, and is not modelled.
        """
        node = state.nodes[i]
        values = {other.world for other in state.nodes if other.up or not self.config.lost}
        values |= {
            ballot.value
            for ballot in chosen
            if not self.config.lost or (ballot.owner == (i, node.life) and self.leads(state.nodes, ballot))
        }
        if self.config.late:
            values.add(self.start)
        if not self.config.end_decided and (i, node.life) in self.worlds[node.world].members:
            values.add(self.intern(World(self.worlds[node.world].generation + 1, before=node.world)))
        for value in sorted(values):
            generation = self.worlds[value].generation
            last = self.tokens and generation == self.last_generation and self.config.end_decided
            if generation > self.worlds[node.world].generation and not last:
                yield self.step(state, i, Node(node.life, 1, value), "learns", self.worlds[value])

    def owners(self, state: State, world: int, number: int) -> list[Incarnation | None]:
        """Return who may begin a ballot. Ballots are numbered in their order, so each has one owner.

        Without lost disks it matters only whether that is the leader, the heir or somebody else.
        """
        kinds = self.config.owners[number - 1] if self.config.owners else "LH*"
        leader, heir = self.worlds[world].leader, self.worlds[world].heir
        result: list[Incarnation | None] = []
        for i, node in enumerate(state.nodes):
            kind = "L" if (i, node.life) == leader else "H" if (i, node.life) == heir else "*"
            if (
                node.up
                and node.world == world
                and node.promised < number
                and kind in kinds
                and (kind != "*" or self.named)
            ):
                result.append((i, node.life))
        if not self.named and ("*" in kinds or leader is None):
            result.append(None)
        return result

    def join(self, state: State, i: int, ballot: Ballot) -> Iterator[Step]:
        """Join a ballot: promise it, end the workers, and report what was accepted and taken.

        The first who joins lets the owner begin: it promises the ballot, which may not count yet (rule 4).
        """
        node = state.nodes[i]
        own = ballot.owner == (i, node.life) and not any(join.node == i for join in ballot.joins)
        if (not self.is_acceptor(node.world, i, node.life) and not self.config.replaced) or not (
            node.promised < ballot.number or (own and node.promised == ballot.number)
        ):
            return
        waits = ballot.owner != (i, node.life) and self.waits_for_heir(state, i, ballot)
        join = Join(i, node.life, node.accepted, node.value, node.taken, node.held, node.handed)
        joined = node._replace(promised=ballot.number, elsewhere=self.bars(i, node, ballot.owner))
        what, after = self.step(
            state,
            i,
            joined,
            "joins ballot",
            ballot.number,
            ballot.owner,
            join,
            "after its window" if waits else "",
        )
        if ballot.owner and not ballot.joins and self.config.own_promise:
            owner = ballot.owner[0]
            _, after = self.step(after, owner, after.nodes[owner]._replace(promised=ballot.number))
        new = ballot._replace(joins=tuple(sorted((*ballot.joins, join))))
        free = self.freed(state, ballot.world) if waits else state.free
        yield what, State(after.nodes, self.put(state, new), free)

    def accept(self, state: State, i: int, ballot: Ballot) -> Iterator[Step]:
        """Accept a proposal, also for the members whose votes the node has got or taken."""
        node, world = state.nodes[i], self.worlds[ballot.world]
        again = node.accepted == ballot.number and not ballot.plain >> i & 1
        waits = self.waits_for_heir(state, i, ballot)
        again = again or (waits and not ballot.alone and node.accepted == ballot.number)
        if ballot.number < max(node.promised, 1) or ballot.number < node.accepted + (not again):
            return
        if not self.is_acceptor(node.world, i, node.life):
            return
        counts = True
        if node.handed and self.config.handed_once:
            holder = {
                join.node: self.current(state.nodes, ballot, join)
                for join in ballot.joins
                if self.is_acceptor(ballot.world, join.node, join.life)
            }.get(node.handed - 1)
            counts = holder is not None and not holder.held >> i & 1
        changed = node._replace(
            promised=ballot.number,
            accepted=ballot.number,
            value=ballot.value,
            elsewhere=self.bars(i, node, ballot.owner),
        )
        what, after = self.step(
            state, i, changed, "accepts in ballot", ballot.number, ballot.owner, self.worlds[ballot.value]
        )
        new = ballot._replace(back=ballot.back | 1 << i) if self.config.handover else ballot
        if counts:
            new = ballot._replace(
                plain=ballot.plain | 1 << i | node.held, cast=int(bool(ballot.cast or node.taken))
            )
        is_leader = i == (world.leader or (-1,))[0] and counts
        if is_leader and (not self.config.restarted_leader or node.life == world.leader[1]):  # type: ignore[index]
            alone = new._replace(alone=1)
            if not waits:
                yield what, State(after.nodes, self.put(state, alone), state.free)
                return
            free = self.freed(state, ballot.world)
            yield (*what, "after its window"), State(after.nodes, self.put(state, alone), free)
            if ballot.owner != world.leader:
                return
        yield what, State(after.nodes, self.put(state, new), state.free)

    def take(self, state: State, i: int, table: dict[tuple[int, int], Ballot]) -> Iterator[Step]:
        """Take the vote of the dead leader, and cast it at once where the heir's own vote is cast already.

        Casting adds to what is decided and changes nothing else, so it need not be delayed.
        """
        node = state.nodes[i]
        world = self.worlds[node.world]
        life = self.places[node.world].get(i)
        if (
            world.leader is None
            or world.heir is None
            or node.elsewhere
            or node.taken
            or node.handed
            or life is None
            or (life != node.life and self.config.take_alive)
            or i == world.leader[0]
            or (i != world.heir[0] and self.config.only_heir_takes)
            or not self.ended(state.nodes, world.leader)
            or (node.world in state.free and self.config.leader_window)
        ):
            return
        what, after = self.step(state, i, node._replace(taken=1), "takes the vote of", world.leader)
        ballot = table.get((node.world, node.accepted))
        if ballot and ballot.plain >> i & 1 and node.accepted == node.promised:
            after = after._replace(ballots=self.put(state, ballot._replace(cast=1)))
        yield what, after

    def hand_over(self, state: State, i: int, table: dict[tuple[int, int], Ballot]) -> Iterator[Step]:
        """Hand the vote to the owner of the promised ballot."""
        node = state.nodes[i]
        ballot = table.get((node.world, node.promised))
        join = Join(i, node.life, node.accepted, node.value, node.taken, node.held, 0)
        if (
            node.handed
            or ballot is None
            or ballot.owner is None
            or ballot.owner[0] == i
            or not self.is_acceptor(node.world, *ballot.owner)
            or not self.is_acceptor(node.world, i, node.life)
            or (self.places[node.world].get(i) != node.life and not self.config.strict)
            or not any((other.node, other.life) == (i, node.life) for other in ballot.joins)
        ):
            return
        handed = node._replace(handed=1 + ballot.owner[0])
        what, after = self.step(state, i, handed, "hands its vote to", ballot.owner)
        hands = tuple(sorted((*ballot.hands, join)))
        yield what, after._replace(ballots=self.put(state, ballot._replace(hands=hands)))

    def receive(self, state: State, ballot: Ballot) -> Iterator[Step]:
        """Take over a vote that was handed to the owner of a ballot."""
        for join in ballot.hands:
            if ballot.owner is None:
                continue
            i = ballot.owner[0]
            node = state.nodes[i]
            alive = node.life == ballot.owner[1] and node.up and node.world == ballot.world
            if not (self.leads(state.nodes, ballot) if self.config.handed_in_ballot else alive):
                continue
            if node.handed or node.held >> join.node & 1:
                continue
            held = node.held | 1 << join.node | join.held
            changed = node._replace(held=held, taken=node.taken | join.taken)
            changes = {(changed, False)}  # the second: only after the window of the leader
            if join.accepted > node.accepted and self.config.handed_accepted:
                free = () if ballot.value else self.proposals(state, ballot)
                changes = {(changed, waits) for _, waits, forced in free if not forced}
                changes.add((changed._replace(accepted=join.accepted, value=join.value), False))
            for change, waits in sorted(changes):
                before = state._replace(free=self.freed(state, ballot.world)) if waits else state
                what, after = self.step(before, i, change, "has got the vote of", (join.node, join.life))
                if ballot.plain >> i & 1 and node.accepted == ballot.number:
                    counted = ballot._replace(plain=ballot.plain | held, cast=ballot.cast | change.taken)
                    after = after._replace(ballots=self.put(state, counted))
                yield what, after

    def proposals(self, state: State, ballot: Ballot) -> set[tuple[int, bool, bool]]:
        """Return what the owner of a ballot may propose, for whichever joins it has read.

        The second tells whether the leader needs the end of its window for it, the third whether it has to be
        this, because it may be decided.
        """
        result: set[tuple[int, bool, bool]] = set()
        world = self.worlds[ballot.world]
        for joins in chain.from_iterable(combinations(ballot.joins, n + 1) for n in range(len(ballot.joins))):
            counted = self.personal(state.nodes, ballot, joins)
            votes = sum(1 << node for node in counted)
            taken = any(join.taken for join in counted.values())
            lives = {join.node: join.life for join in joins}
            alone = bool(world.leader) and (
                not self.config.restarted_leader
                or lives.get(world.leader[0], world.leader[1]) == world.leader[1]  # type: ignore[index]
            )
            waits = False
            quorum = self.all_replaced(ballot.world, votes, joins, taken=taken)
            if lost := 0 if quorum else self.replaced_in(ballot.world, joins):
                again = self.personal(state.nodes, ballot, joins, lost)
                if self.all_replaced(ballot.world, sum(1 << node for node in again), joins, taken=taken):
                    counted, quorum = again, True
            if not quorum and not self.decides(ballot.world, votes, alone=False, taken=taken):
                if not self.decides(ballot.world, votes, alone=alone, taken=taken):
                    continue
                waits = ballot.owner == world.leader and self.waits_for_heir(state, ballot.owner[0], ballot)  # type: ignore[index]
            accepted, value = max((join.accepted, join.value) for join in counted.values())
            forced = accepted > 0 and self.config.repropose != "never"
            if forced and self.config.repropose == "value":
                against = sum(1 << node for node, join in counted.items() if join.value != value)
                left = self.surplus(ballot.world, self.everybody & ~against)
                is_half = self.config.half_repeats and not self.config.strict
                forced = left > 0 or (
                    left == 0
                    and (
                        is_half
                        or self.decides(ballot.world, self.everybody & ~against, alone=True, taken=False)
                    )
                )
            values = [value] if forced else self.new_values(state, ballot, joins)
            result.update((value, waits, forced) for value in values)
        return result

    def new_values(self, state: State, ballot: Ballot, joins: tuple[Join, ...]) -> Iterator[int]:
        """Yield new values: all that have joined, voters first in rank order, or the end of the job."""
        generation = self.worlds[ballot.world].generation + 1
        if self.tokens and generation == self.last_generation:
            yield from {other.value for other in state.ballots if other.world == ballot.world and other.value}
            yield self.intern(World(generation, before=ballot.world, token=ballot.number))
            return
        if self.config.end:
            yield self.intern(World(generation, before=ballot.world))
        ranks = {member[0]: rank for rank, member in enumerate(self.worlds[ballot.world].members)}
        newest = dict(sorted((join.node, join.life) for join in joins))  # a name is one machine
        joined = sorted(
            newest.items(),
            key=lambda member: (
                not self.is_acceptor(ballot.world, *member),
                ranks.get(member[0], self.total),
                member,
            ),
        )
        # Newcomers join only with rule 7 in the model. Without it, any that are up may be in the new world.
        guests = (
            []
            if self.config.replaced
            else [(i, node.life) for i, node in enumerate(state.nodes) if node.up and i not in ranks]
        )
        for some in chain.from_iterable(combinations(guests, n) for n in range(len(guests) + 1)):
            members = (*joined, *some)
            leaders = {ballot.owner if ballot.owner in members else members[0]}
            if ballot.owner is None:
                world = self.worlds[ballot.world]
                leaders.update(set(members) - {world.leader, world.heir})
            for leader in sorted(leaders):
                yield self.world(generation, members, leader, ballot.world)

    def canonical(self, state: State) -> State:
        """Drop what nobody can use any more, so that fewer states differ.

        - Ballots of a slot that all nodes have left: nobody joins, accepts, proposes or learns there.
        - All but the value (ballot 0) of a slot that is decided and not the last. What happens there later
          can break I1 in that slot alone, and an exploration with one slot finds that. Not with lost disks.
        - Ballots without a proposal whose owner has ended: who joined cannot join that number again, so a
          second use of the number is a ballot of its own between the same neighbours.
        - What joins reported, once the proposal is made: only rule 7 and votes handed over need joins then,
          and who has whose vote.
        - Which votes have decided, and a proposal that nobody can accept.
        - Votes handed over that their receiver has, or cannot take over any more.
        - Windows, once the heir cannot take votes.
        """
        low = min(self.worlds[node.world].generation for node in state.nodes)
        done = (
            {}
            if not self.tokens
            else {
                ballot.world: ballot.value
                for ballot in self.chosen(state)
                if self.worlds[ballot.value].generation < self.last_generation
            }
        )
        nodes = tuple(
            [Node(node.life, node.up, node.world, 1) if node.world in done else node for node in state.nodes]
        )
        ballots = [Ballot(world, 0, None, value, plain=self.everybody) for world, value in done.items()]
        for ballot in state.ballots:
            if ballot.world in done or self.worlds[ballot.world].generation < low:
                continue
            if ballot.value:
                new = self.without_reports(nodes, ballot)
                if new.plain or new.back or self.is_open(nodes, new):
                    ballots.append(new)
            elif self.leads(nodes, ballot) or (ballot.hands and not self.config.handed_in_ballot):
                ballots.append(ballot._replace(hands=self.open_hands(nodes, ballot)))
        free = tuple(world for world in state.free if self.takes_in(nodes, self.worlds[world].heir, world))
        return State(nodes, tuple(sorted(ballots)) if done else tuple(ballots), free)

    def takes_in(self, nodes: tuple[Node, ...], member: Incarnation | None, world: int) -> bool:
        """Return whether a member may still take votes."""
        node = nodes[member[0]] if member else nodes[0]
        if not member or not self.config.take_alive or not self.config.only_heir_takes:
            return True
        late = self.worlds[node.world].generation < self.worlds[world].generation
        return (
            node.life == member[1]
            and bool(node.up)
            and (late or (node.world == world and not node.elsewhere))
        )

    def is_open(self, nodes: tuple[Node, ...], ballot: Ballot) -> bool:
        """Return whether anybody may still lead, join or accept in a ballot that has no votes."""
        generation = self.worlds[ballot.world].generation
        return (
            self.tokens
            or not self.config.durable_promise
            or self.leads(nodes, ballot)
            or any(
                node.promised <= ballot.number
                for node in nodes
                if self.worlds[node.world].generation <= generation
            )
        )

    def without_reports(self, nodes: tuple[Node, ...], ballot: Ballot) -> Ballot:
        """Return a ballot that has its proposal, without what no vote in it needs.

        A ballot whose votes cannot become a quorum any more keeps its proposal, which its owner may report.
        """
        leads = self.leads(nodes, ballot)
        if self.config.durable_promise and self.config.handed_in_ballot and not (ballot.owner and leads):
            votes = self.possible_votes(nodes, ballot)
            if not self.decides(ballot.world, votes, alone=True, taken=True) and not self.all_replaced(
                ballot.world, votes, ballot.joins, taken=True
            ):
                return Ballot(ballot.world, ballot.number, ballot.owner, ballot.value)
        if not self.config.replaced and not self.config.handover:
            return ballot._replace(joins=())
        if self.is_chosen(nodes, ballot):
            joins = tuple([Join(join.node, join.life, 0, 0, 0, 0, 0) for join in ballot.joins])
            ballot = ballot._replace(plain=self.everybody, back=0, alone=1, cast=1)
        else:
            joins = tuple([join._replace(accepted=0, value=0, taken=0) for join in ballot.joins])
        return ballot._replace(joins=joins, hands=self.open_hands(nodes, ballot))

    def open_hands(self, nodes: tuple[Node, ...], ballot: Ballot) -> tuple[Join, ...]:
        """Return the votes that the owner of a ballot may still take over."""
        if not ballot.hands or ballot.owner is None or not self.config.handed_in_ballot:
            return ballot.hands
        owner = nodes[ballot.owner[0]]
        if owner.handed or not self.leads(nodes, ballot):
            return ()
        return tuple([join for join in ballot.hands if not owner.held >> join.node & 1])

    def possible_votes(self, nodes: tuple[Node, ...], ballot: Ballot) -> Bits:
        """Return the members whose votes a ballot has, or may get, now that its owner does not lead it."""
        generation = self.worlds[ballot.world].generation
        votes = ballot.plain | ballot.back
        for i, node in enumerate(nodes):
            may_accept = (
                node.promised <= ballot.number or self.worlds[node.world].generation != generation
            ) and self.is_acceptor(ballot.world, i, node.life)
            if may_accept or ballot.back >> i & 1:
                votes |= 1 << i | node.held
        if self.config.handover:  # a vote on its way to one of these
            for _ in nodes:
                given = [i for i, node in enumerate(nodes) if node.handed and votes >> node.handed - 1 & 1]
                votes |= sum({1 << i for i in given})
                for i in given:
                    votes |= nodes[i].held
        return votes

    def violation(self, state: State) -> str:
        """Return the invariant that a state breaks, or ''."""
        chosen = {ballot.value for ballot in self.chosen(state)}
        known = {node.world for node in state.nodes}
        slots: dict[int, set[int]] = {}
        decided = known if self.config.lost else known | chosen
        for value in decided:
            if self.worlds[value].generation > self.first_generation:
                slots.setdefault(self.worlds[value].before, set()).add(value)
        if self.config.check_i1 and any(len(values) > 1 for values in slots.values()):
            return "I1: a slot is decided with two values"
        at_work = {
            (i, node.life, node.world)
            for i, node in enumerate(state.nodes)
            if node.up and not (node.promised and self.config.stop_on_join)
        }
        whole = {
            world
            for world in known
            if world
            and self.worlds[world].members
            and all((*member, world) in at_work for member in self.worlds[world].members)
        }
        if len(whole) > 1:
            return "I2: two worlds are whole"
        newest = max(self.worlds[value].generation for value in decided)
        if any(self.worlds[world].generation < newest for world in whole):
            return "I3: a world is whole and a later slot is decided"
        return ""


class Result(NamedTuple):
    """What an exploration found."""

    violation: str  # '' if all invariants hold
    complete: bool
    states: int
    trace: list[str]


def explore(config: Config, max_s: float = 1e9) -> Result:
    """Visit all states in breadth-first order, until an invariant breaks."""
    model = Model(config)
    first = model.first
    parents = {hash(first): 0}  # of hashes: two of 10^7 states share one with a probability of 10^-5
    frontier, deadline = [first], time.monotonic() + max_s
    while frontier:
        reached = []
        for state in frontier:
            for _, after in model.steps(state):
                new = model.canonical(after)
                key = hash(new)
                if key in parents:
                    continue
                parents[key] = hash(state)
                if violation := model.violation(after):
                    return Result(violation, True, len(parents), describe(model, first, parents, key))
                reached.append(new)
            if time.monotonic() > deadline:
                return Result("", False, len(parents), [])
        frontier = reached
    return Result("", True, len(parents), [])


def describe(model: Model, state: State, parents: dict[int, int], key: int) -> list[str]:
    """Return the steps that lead to a state."""
    path = []
    while parents[key]:
        path.append(key)
        key = parents[key]
    lines = []
    for key in reversed(path):
        what, state = next(
            (what, new) for what, after in model.steps(state) if hash(new := model.canonical(after)) == key
        )
        lines.append(" ".join(filter(None, map(show, what))))
    return lines


def show(word: Any) -> str:
    """Return a readable form of a part of a step."""
    if isinstance(word, World):
        members = " ".join(map(show, word.members)) or (
            f"value {word.token}" if word.token else "end of the job"
        )
        return f"world {word.generation} {{{members}}}"
    if isinstance(word, Join):
        accepted = f"accepted in ballot {word.accepted}" if word.accepted else "nothing accepted"
        return f"({accepted}, has taken {word.taken:b})" if word.taken else f"({accepted})"
    if isinstance(word, tuple):
        return f"{'abcdef'[word[0]]}{'~' * (word[1] // DISK)}{word[1] % DISK or ''}"
    return "of anybody" if word is None else str(word)


def main(arguments: list[str]) -> None:
    """Explore one configuration and print the verdict."""
    pairs = (argument.split("=", 1) for argument in arguments)
    options: dict[str, Any] = {}
    for key, value in pairs:
        options[key] = ast.literal_eval(value) if value[:1] in set("0123456789(TF") else value
    max_s = options.pop("max_s", 1e9)
    start = time.process_time()
    result = explore(Config(**options), max_s)
    verdict = result.violation or ("holds" if result.complete else "NOT FINISHED")
    print(
        f"{verdict}: {result.states} states, {len(result.trace)} steps, {time.process_time() - start:.0f} s"
    )
    for line in result.trace:
        print("   ", line)


if __name__ == "__main__":
    main(sys.argv[1:])
