"""The rendezvous protocol: how the nodes of a job agree on who trains together.

Nodes agree on one *view* after another. A view is a generation number and its members in rank order. At most
one view has running workers at any time, also across partitions, crashes and restarts. Each node runs one
`node.RendezvousNode`, a pure state machine: an event and the time in, effects out. `rendezvous/net` adds
sockets, a disk and a clock. `tests/support/rendezvous_sim` plays the state machine through random faults.

Roles. A node has one role at a time; each role is a module::

                    no node of higher priority answers
           ┌───────────────────────────────────────────────┐
           │                                               ▼
    CANDIDATE ── Welcome ──▶ FOLLOWER                    LEADER ── JobEnd sent ──▶ ended
      ▲    ▲                   │  │                        │
      │    └── leader lost, ───┘  └── JobEnd ──▶ ended     │
      │        or stepped down                             │
      └── another leader has priority, or disk is stuck ───┘

    workers:  stopped ── JoinRequest ──▶ joined ── proposed, acknowledged, installed ──▶ running
                 ▲                                                                         │
                 └── EndView, leader lost, or lease expired (StopWorkers) ─────────────────┘

The members of the newest view have priority by rank, then the candidates (the addresses that the user lists)
in their order. A node leads when every node before it has failed to answer. Two nodes may lead at once. That
costs time, not safety: without a quorum neither installs a view. Each leader announces itself to every
address it knows, and the leader of lower priority steps down (`messages.LeaderAnnouncement.priority`).

Messages. A node follows a leader when it has been welcomed and has sent its first reply::

    candidate → any node    Hello                   reply: Welcome | Redirect | Refused | JobEnd
    follower  → leader      Heartbeat JoinRequest ProposalAck NodeFinished FailureReport FailJob
                            ForceQuorumRequest ImportsFinished LeaveNotice
    leader    → follower    Heartbeat ProposeView InstallView EndView WaitReason ReplicasDiverged
                            JobEnd Redirect Refused LeaveNotice
    leader    → any node    LeaderAnnouncement      reply: LeaderAnnouncement | Redirect | LeaveNotice

A newcomer that still imports joins with `is_importing`. A running view ends for it only after its
`ImportsFinished`. Survivors that are enough form the next view without it.

A `Header` on every message acknowledges the newest message received. So each side knows when it sent the
newest message that the other side has seen. A `QuorumState` in a message is all that its sender knows.

A view change has two durable steps (`view_change`):

1. The leader ends the running view. Every node stops its workers and joins. The leader waits until all
   followers have joined, they have a quorum, and no lease of an absent node can still run. Then it proposes a
   view. Every follower, spares too, writes the proposal to disk before it acknowledges.
2. When all have acknowledged and the leader's own write is durable, the leader installs the view and workers
   start. If a follower is lost before, the leader aborts the proposal. No other node may declare it aborted.

Leases. Workers run only until a lease expires. A follower's lease counts from when it *sent* the newest
message that the leader acknowledged. The leases that the leader grants end no later than the time until which
a quorum is certain to follow it. A node that waits for another node's lease to expire waits one node timeout,
measured from the last message that it *received* from that node. So workers stop before their successors
start, whatever the delay, if clock rates differ by less than `Settings.clock_drift`. Clock readings of two
nodes are never compared.

Deaths. A broken connection proves nothing, so both sides dial again. A refused connection proves that the
process has ended. It counts as a death only if this node knows everything that the peer may have acknowledged
(`state.NodeState.proves_death`, `mark_dead_at`). A `LeaveNotice`, and a new process on the same node, prove a
death too. A node that does not answer is unreachable; it is excluded after the node timeout.

Quorum rules (`quorum`), after Yeger Lotem, Keidar and Dolev, "Dynamic voting for consistent primary
components", PODC 1997. The members of a view vote on the next view. So a job can lose its nodes one at a time
and continue on the last one:

1. A member is one process (an `Incarnation`), not a node. Reason: a restarted node may have forgotten a view
   that its former process acknowledged, so it has no vote in its place.
2. Every member stores a proposal before it acknowledges. Reason: a member that crashes must remember the view
   that it may belong to.
3. The first view needs more than half of the candidates. A later view needs a majority of the live members of
   the newest installed view. It also needs a majority of the live members of every later proposal that any
   present node knows, because a proposal may have been installed elsewhere. Live means not known dead. A
   majority is more than half, or exactly half with the lowest rank among them. If no live member is left, the
   first view's rule applies. Reason: two majorities share a live member.
4. A death is never passed on alone: a `QuorumState`, all that its sender knows, is sent, merged and stored
   whole. Reason: fewer votes suffice after a death, so the voters must know the views that the dead
   node voted for.

An operator may waive rule 3 with `force-quorum` for the views up to one generation.

Known limits:

- A firewall that refuses connections on both sides of a partition makes live nodes look dead.
- Nodes that lose their disks and are partitioned at the same time can form two views.
- After `force-quorum`, nodes that were declared dead but run behind a partition form a second view.
- After a partition into several parts heals, two views may form within two seconds, one after the other.
- If a job ends in one part of a partition, nodes of another part without a quorum wait for the join timeout.
- A node whose disk takes seconds for every write is proposed again after each recovery; each costs a restart.
- After a machine is suspended, workers may run 50 ms before their supervisor checks the lease.
"""
