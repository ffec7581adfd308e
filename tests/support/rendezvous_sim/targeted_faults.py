"""Faults that follow each view change: partitions that shift between its steps, crashes and late messages.

Each attack says what it guards: a rule of `docs/concepts/worlds.md`, or what the core concludes from resets,
late messages and suspended machines. Without the guarded rule an attack forms two views. Attacks name nodes
by rank in the newest view, so they work whatever view has formed.
"""

from __future__ import annotations

import random

from tests.support.rendezvous_sim.schedule import (
    LATE_READERS,
    LEADER,
    OTHER_LEADER,
    RESETS,
    VIEW_CHANGES,
    Fault,
    Trigger,
)

DURING_VIEW_CHANGE_S = (0.0, 0.0, 0.005, 0.01, 0.02, 0.05)
"""Within the steps of a view change, each of which takes some 20 ms."""
SOON_S = (0.02, 0.2, 0.5, 1.0)
AFTER_TIMEOUT_S = (3.5, 4.5, 6.0, 8.0)
"""Longer than a node timeout: a node that was cut off follows another leader by then."""
LONG_S = 60.0


def draw_faults(rng: random.Random, family: str, count: int) -> list[Fault]:
    """Draw one or two attacks of a family against a job of `count` nodes."""
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2))):
        start = Trigger(rng.choice(SOON_S), "view", 1, after_previous=bool(faults))
        attack = rng.choice(ATTACKS_BY_FAMILY[family])
        faults += attack(rng, start, count)
        if rng.random() < 0.4:
            faults.append(heal(rng))
    return faults


def then(delay_s: float, event: str = "", count: int = 1) -> Trigger:
    """Trigger after the fault before, or after an event counted from there."""
    return Trigger(delay_s, event, count if event else 0, after_previous=True)


def ranks(*numbers: int) -> tuple[str, ...]:
    """Name nodes by rank."""
    return tuple(f"#{number}" for number in sorted(numbers))


def repartition(trigger: Trigger, *numbers: int) -> Fault:
    """Cut these ranks off from all others, in place of earlier cuts."""
    return Fault(trigger, "repartition", ranks(*numbers), LONG_S)


def heal(rng: random.Random) -> Fault:
    """Remove all cuts."""
    return Fault(then(rng.choice((*SOON_S, *AFTER_TIMEOUT_S))), "repartition", (), 0.0)


def draw_majority(rng: random.Random, count: int) -> list[int]:
    """Draw the smallest majority of `count` ranks, its lowest first; mostly with rank 0."""
    low = 0 if rng.random() < 0.7 else 1
    return [low, *sorted(rng.sample(range(low + 1, count), min(count // 2, count - low - 1)))]


def defecting_followers(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Some members of the next view join the nodes that were left out, as it is installed.

    Guards that what may be decided is proposed again: those that left may have accepted it.
    """
    ours = draw_majority(rng, count)
    stay = ours[: (len(ours) + 1) // 2]
    if rng.random() < 0.3:
        stay = rng.sample(ours, rng.randint(1, len(ours)))
    when = then(rng.choice(DURING_VIEW_CHANGE_S), "StartView", rng.choice((1, 1, 2)))
    faults = [repartition(start, *ours), repartition(when, *stay)]
    if rng.random() < 0.3:
        kind = rng.choice(("kill", "pause"))
        faults.append(Fault(then(0.0), kind, ranks(stay[-1]), rng.choice(SOON_S)))
    return faults


def member_changes_side(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """A member of the next view, when it runs, joins the nodes that were left out and do not know it.

    Guards that a vote stops: the member has not voted on a later view when it changes sides.
    """
    ours = draw_majority(rng, count)
    faults = [repartition(start, *ours)]
    if rng.random() < 0.5:
        faults.append(Fault(then(rng.choice(SOON_S), "view"), "kill", ranks(0), LONG_S))
    # From here on ranks are those of the view of the majority.
    faults.append(repartition(then(rng.choice(AFTER_TIMEOUT_S), "view"), *range((len(ours) + 1) // 2)))
    return faults


def restarted_member_changes_side(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """A node dies and restarts on the other side of a partition from the nodes that saw it die.

    Guards the exception: these may have taken its vote. The leader sees the link break at once, and that a
    call is refused; the cut comes between.
    """
    victim = rng.randrange(1, count) if rng.random() < 0.9 else 0
    others = [rank for rank in range(1, count) if rank != victim]
    many = (count - 1) // 2 if rng.random() < 0.8 else rng.randint(1, count // 2)
    witnesses = rng.sample(others, min(len(others), max(0, many - 1)))
    killed = Fault(start, "kill", ranks(victim), rng.choice((0.3, 0.6, 1.0, 5.0)))
    when = then(rng.choice((0.02, 0.03, 0.05, 0.05, 0.1, 0.15, 0.3)))
    return [killed, Fault(when, "repartition", (LEADER, *ranks(*witnesses)), LONG_S)]


def machines_change_sides(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Machines restart one after the other within a node timeout, each on the other side of a cut.

    Guards the exception: a member that has restarted votes only if nobody may have taken its vote.
    """
    side = set(draw_majority(rng, count))
    faults = [repartition(start, *side)]
    when = then(rng.choice((*SOON_S, *AFTER_TIMEOUT_S)))
    for mover in rng.sample(range(count), rng.randint(1, max(1, count // 2))):
        kind = rng.choice(("kill", "power"))
        faults.append(Fault(when, kind, ranks(mover), rng.choice((0.05, 0.3, 0.3, 1.0))))
        side ^= {mover}
        faults.append(repartition(then(rng.choice((0.02, 0.05, 0.2))), *side))
        when = then(rng.choice((0.05, 0.2, 0.5)))
    return faults


def interrupted_proposal(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """A partition, a pause or a crash between the proposal and the installation of a view.

    Guards that a slot is decided once, although a proposal has reached some voters only.
    """
    ours = draw_majority(rng, count)
    first = repartition(start, *ours)
    step, number = rng.choice((("Propose", 1), ("Propose", 2), ("ProposalAck", 1), ("StartView", 1)))
    when = then(rng.choice(DURING_VIEW_CHANGE_S), step, number)
    kind = rng.choice(
        ("repartition", "repartition", "pause", "kill", "crash-before-send", "written", "power")
    )
    if kind == "repartition":
        return [first, repartition(when, *ours[: rng.randint(1, len(ours))])]
    victim = rng.choice(ours)
    hit = Fault(when, kind, ranks(victim), rng.choice((0.05, 0.5, 4.0, 8.0)))
    rest = [rank for rank in range(count) if rank != victim]
    apart = repartition(
        then(rng.choice((*DURING_VIEW_CHANGE_S, *SOON_S))), *rng.sample(rest, rng.randint(1, len(rest)))
    )
    return [first, hit, apart]


def staggered_merge(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Three parts merge one after the other, in another order than they fell apart."""
    order = list(range(count))
    rng.shuffle(order)
    low, high = sorted(rng.sample(range(1, count), 2))
    faults = [Fault(start, "repartition", (*ranks(*order[:low]), "|", *ranks(*order[low:high])), LONG_S)]
    for _ in range(rng.choice((1, 2))):
        settled, torn = (
            then(rng.choice(AFTER_TIMEOUT_S)),
            then(rng.choice(DURING_VIEW_CHANGE_S), "StartView"),
        )
        when = rng.choice((settled, torn, then(0.2, "view")))
        faults.append(repartition(when, *rng.sample(range(count), rng.randint(1, count - 1))))
    return faults


def partition_at_job_end(rng: random.Random, count: int) -> list[Fault]:
    """Workers finish, and a cut separates nodes that know the end from the others; some restart.

    Guards the end of a job: a node that forgets its views must know that no node continues them. The leader
    waits for an unreachable node, and may not reach the others when it ends the job.
    """
    start = Trigger(rng.choice(SOON_S), "view", 1)
    if rng.random() < 0.5:
        finished = rng.sample(range(count), rng.choice((count, count, count - 1, rng.randint(1, count))))
        faults = [Fault(start, "finish", ranks(*finished))]
    else:
        faults = [Fault(start, "partition", ranks(count - 1), 4.0)]
        faults.append(Fault(then(rng.choice((0.01, 0.1, 0.3))), "finish", ranks(*range(count - 1))))
    others = rng.sample(range(count), rng.randint(1, count - 1))
    apart = rng.choice(((LEADER,), (LEADER,), ranks(*others), ranks(*range(1, count))))
    when = then(rng.choice((*DURING_VIEW_CHANGE_S, 0.2, 0.3, 0.4, 0.6)))
    faults.append(Fault(when, rng.choice(("one-way", "repartition", "repartition")), apart, LONG_S))
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choice(("kill", "kill", "written", "pause", "power"))
        victims = rng.choice((ranks(0), ranks(0), ranks(*rng.sample(range(count), 2))))
        faults.append(Fault(then(rng.choice((0.1, *AFTER_TIMEOUT_S))), kind, victims, rng.choice(SOON_S)))
    return [*faults, heal(rng)] if rng.random() < 0.3 else faults


def reset_and_cut(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Reset a connection at one end or both, while one of the two is cut off or before it is reopened.

    Guards the rule that only a refused call proves a death.
    """
    victim = rng.randrange(1, count)
    pair = [LEADER, f"#{victim}"]
    rng.shuffle(pair)
    faults = []
    if rng.random() < 0.4:
        faults.append(Fault(start, "slowish", tuple(pair[:1]), 12.0))
        start = then(rng.choice(DURING_VIEW_CHANGE_S))
    kind = rng.choice(("reset", "half-reset", "half-reset"))
    apart = [
        victim,
        *rng.sample([rank for rank in range(1, count) if rank != victim], rng.randint(0, (count - 2) // 2)),
    ]
    soon = rng.choice((*DURING_VIEW_CHANGE_S, 0.1, 0.2))
    if rng.random() < 0.5:
        faults += [Fault(start, kind, tuple(pair)), repartition(then(soon), *apart)]
    else:
        faults += [repartition(start, *apart), Fault(then(soon), kind, tuple(pair))]
    if rng.random() < 0.3:
        faults.append(
            Fault(then(rng.choice(SOON_S)), "kill", ranks(rng.randrange(count)), rng.choice(AFTER_TIMEOUT_S))
        )
    return faults


def resets(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Reset several connections to the leader one after the other, on a slow network or a fast one."""
    faults = []
    if rng.random() < 0.7:
        faults.append(Fault(start, "slowish", ranks(*rng.sample(range(count), rng.randint(1, count))), 12.0))
        start = then(rng.choice(SOON_S))
    for _ in range(rng.randint(1, 4)):
        pair = [LEADER, f"#{rng.randrange(1, count)}"]
        rng.shuffle(pair)
        faults.append(Fault(start, rng.choice(("reset", "half-reset")), tuple(pair)))
        start = then(rng.choice((*DURING_VIEW_CHANGE_S, *SOON_S)))
    return faults


def late_reader(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Pause a node until the leader has left and the others have continued and died; it reads old messages.

    Guards times that count from the sending of an acknowledged message, not from the reading of its answer.
    """
    victim = rng.choice((f"#{rng.randrange(1, count)}", "!0"))
    kind = rng.choice(("pause", "pause", "pause", "suspend"))
    faults = [Fault(start, kind, (victim,), rng.choice((rng.uniform(0.5, 4.0), rng.uniform(6.0, 14.0))))]
    going = rng.choice(("leave", "leave", "kill"))
    faults.append(Fault(then(rng.choice((*DURING_VIEW_CHANGE_S, 0.2))), going, (LEADER,), LONG_S))
    # From here on ranks are those of the view of the others.
    dead = list(range(count - 2))
    if rng.random() < 0.3:
        dead = rng.sample(dead, rng.randint(1, len(dead))) if dead else dead
    faults.append(
        Fault(then(rng.choice((0.02, *SOON_S, *AFTER_TIMEOUT_S[:2])), "view"), "kill", ranks(*dead), LONG_S)
    )
    return faults


def suspended_nodes(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Suspend one or two machines for longer than a lease; they wake up when the others have continued."""
    asleep = rng.sample(range(count), rng.choice((1, 1, 2)) if count > 3 else 1)
    faults = [Fault(start, "suspend", ranks(*asleep), rng.uniform(3.0, 14.0))]
    if rng.random() < 0.5:
        faults.append(repartition(then(rng.choice((*DURING_VIEW_CHANGE_S, *SOON_S, 3.0))), *asleep))
    return faults


def leader_without_quorum(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """Partition a majority, kill it after it forms a view, kill the other leader, then heal.

    Guards against trusting a leader without a quorum.
    """
    ours = draw_majority(rng, count)
    rest = [rank for rank in range(count) if rank not in ours]
    faults = [repartition(start, *ours)]
    dead = range(len(ours))  # in the view of the majority
    faults.append(Fault(then(rng.choice(AFTER_TIMEOUT_S), "view"), "kill", ranks(*dead), LONG_S))
    faults.append(Fault(then(rng.choice(DURING_VIEW_CHANGE_S)), "repartition", (), 0.0))
    if rest:
        faults.insert(2, Fault(then(rng.choice((0.0, 0.5, 2.0))), "kill", (OTHER_LEADER,), LONG_S))
    return faults


def forgetful_first_view(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """A node with a slow disk dies after the first view is proposed, and the leader is cut off.

    Guards the disk: what a node has accepted must be on it before others count it. Only before the first view
    do restarted nodes vote without others, so the faults do not wait for a view.
    """
    del start
    names = [f"{chr(ord('a') + place)}" for place in range(count)]
    victims = tuple(rng.sample(names, rng.randint(1, max(1, count // 2))))
    step = rng.choice(("Propose", "ProposalAck", "StartView"))
    return [
        Fault(Trigger(rng.choice((0.5, 2.0))), "disk", victims, 8.0),
        Fault(Trigger(rng.choice(DURING_VIEW_CHANGE_S), step, 1), "repartition", (LEADER,), LONG_S),
        Fault(then(rng.choice(DURING_VIEW_CHANGE_S)), "kill", victims, 0.3),
    ]


def leader_dies_without_heir(rng: random.Random, start: Trigger, count: int) -> list[Fault]:
    """The heir's connection is reset while a view is decided, and the leader dies at once.

    Guards the pair: the leader's own vote counts only together with its heir's, which may take it.
    """
    worker = Fault(start, "worker", ranks(rng.randrange(count)))
    step, number = rng.choice((("Propose", 1), ("ProposalAck", 1), ("ProposalAck", 1)))
    reset = Fault(then(0.0, step, number), "reset", ranks(0, 1), 1.0)
    cut = repartition(then(rng.choice((0.0, 0.005, 0.01))), 0, 1)
    kill = Fault(then(rng.choice((0.0, 0.005, 0.01, 0.02))), "kill", ranks(0), rng.choice((5.0, LONG_S)))
    return [worker, reset, kill, cut] if rng.random() < 0.5 else [worker, reset, cut, kill]


VIEW_CHANGE_ATTACKS = (
    machines_change_sides,
    machines_change_sides,
    defecting_followers,
    defecting_followers,
    restarted_member_changes_side,
    restarted_member_changes_side,
    restarted_member_changes_side,
    interrupted_proposal,
    member_changes_side,
    member_changes_side,
    staggered_merge,
    leader_without_quorum,
    forgetful_first_view,
    forgetful_first_view,
    leader_dies_without_heir,
    leader_dies_without_heir,
    leader_dies_without_heir,
)
ATTACKS_BY_FAMILY = {
    VIEW_CHANGES: VIEW_CHANGE_ATTACKS,
    RESETS: (
        reset_and_cut,
        reset_and_cut,
        reset_and_cut,
        resets,
        interrupted_proposal,
        restarted_member_changes_side,
    ),
    LATE_READERS: (
        late_reader,
        late_reader,
        late_reader,
        suspended_nodes,
        suspended_nodes,
        leader_without_quorum,
        member_changes_side,
    ),
}
"""The attacks of each family; repeated entries are drawn more often."""
