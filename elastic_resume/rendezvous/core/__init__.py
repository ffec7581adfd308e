"""Define the rendezvous protocol, by which the nodes of a job agree on the members of each view.

Nodes decide one *view* after another. A view is a generation number and its members in rank order. Each view
decides its successor, so there is one sequence, also across partitions, crashes and restarts. Each node runs
one `node.RendezvousNode`, a pure state machine: an event and the time in, effects out. `rendezvous/net` adds
sockets, a disk and a clock. `tests/support/rendezvous_sim` plays the state machine through random faults.

Parts. `sequence` decides one view after another by votes, on the data of `world`: no time, links or settings.
`dead_leader` is what is added to it unless `View.is_strict`. `next_view` and `backoff` are the policy: which
nodes to propose, or why to wait. The roles and what they use keep sessions, and search for a leader.

Roles. A node has one role at a time; each role is a module. A table in it leads from the class of a message
to its handler (`state.Role.dispatch`), and a role ends by setting `state.NodeState.next_role`::

                    no node of higher priority answers
           ┌───────────────────────────────────────────────┐
           │                                               ▼
     SEARCHER ── Welcome ──▶ FOLLOWER                    LEADER ── end decided ──▶ ended
      ▲    ▲                   │  │                        │
      │    └── leader lost, ───┘  └── JobEnd ──▶ ended     │
      │        or stepped down                             │
      └── another leader has priority, or disk is stuck ───┘

    workers:  stopped ── JoinRequest ──▶ joined ── voted, decided ──▶ running ──▶ finished
 (`messages.     ▲                                                      │
    Workers`)    └── EndView, leader lost, or lease expired ────────────┘

A searcher dials the members of the newest view by rank, then the candidates (the addresses that the user
lists) in their order. It leads if no node before it in this order answers. Two nodes may lead at once. That
costs time, not safety. Each leader announces itself to every address it knows. Of two leaders, the one with a
running view stays, then the one that knows the newer view, then the one with more voters
(`messages.LeaderAnnouncement.priority`).

Messages. A node follows a leader when it has been welcomed and has sent its first reply::

    searcher  → any node    Hello                   reply: Welcome | Redirect | Refused | JobEnd
    follower  → leader      Heartbeat WorkersStatus Vote ProposalAck FailureReport FailJob LeaveNotice
    leader    → follower    Heartbeat RequestVote VoteHeld Propose StartView Decided EndView Waiting
                            JobEnd Redirect Refused LeaveNotice
    leader    → any node    LeaderAnnouncement      reply: LeaderAnnouncement | Redirect | JobEnd

How a view is decided (`sequence`, and `dead_leader`): `docs/concepts/worlds.md` has the argument, the
exception, what it trusts, and what waits. In short, the successor of a view is one slot, an instance of
Paxos. Its voters are the disks of the view's members; before the first view, and after the end of the job,
the candidates. The leader asks for votes in a *ballot*, once for many slots. With a quorum of votes it
proposes a view, or the end of the job. What a quorum has accepted, on disk, is decided. The leader starts a
view when all its members have acknowledged the proposal. If one was lost meanwhile, nobody starts it, and the
next slot follows. A node that receives a newer decided view adopts it. Hello and Welcome name the newest.

A node that leaves hands its vote to its leader, unless a view without it is decided before: it records that
on disk, then sends the vote marked so. The leader holds it on disk from then on (`VoteHeld`).

Leases keep a partition tidy, and decide nothing but when a vote may be taken. Workers run only until their
lease expires: 95 % of a node timeout after the sending of the newest message that the other side
acknowledged. So workers on a side without a quorum end by themselves.

Nodes of one job run one script. A node whose `JoinSpec.script` is not the leader's is refused. Nodes whose
workers have finished are named in `StartView`, so that a later view takes no step beyond theirs.

A node whose new workers take long to start joins with `is_preparing`. Others that are enough form the next
view without it, if a member of the last view is among them. A running view ends for it only when it is ready.

Heartbeats carry facts of the nodes, and the leader's verdicts about them, which the core does not read: see
`rendezvous/facts.py`. A judgment may end the view, fail the job, or keep two nodes apart: a view leaves out
one of the two, which remains a follower.

Limits. A node that finished and cannot reach a quorum waits for the join timeout. After a machine is
suspended, its workers may run 50 ms before their supervisor checks the lease.
"""
