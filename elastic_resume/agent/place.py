"""This node's place in our own rendezvous: the port it listens on, its record on disk, its member.

Promise: whatever ends the agent short of SIGKILL, the others are told goodbye. Does not know torchelastic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elastic_resume.agent.fence import Fence
from elastic_resume.agent.telling import Teller
from elastic_resume.cluster.node import Node
from elastic_resume.rendezvous.address import take_seat
from elastic_resume.rendezvous.member import Member
from elastic_resume.rendezvous.record import Record
from elastic_resume.rendezvous.steps import Log
from elastic_resume.rendezvous.terms import Terms
from elastic_resume.rendezvous.wire import look_key
from elastic_resume.store.node_dir import NodeDir


@dataclass(frozen=True)
class Place:
    """A node's place: ``host`` is where workers reach it, ``order`` its place in the scheduler's order."""

    member: Member
    host: str
    order: int


@contextlib.contextmanager
def taken(
    terms: Terms,
    node_dir: NodeDir,
    fence: Fence,
    here: Node,
    *,
    say: Callable[[str], None],
    tell: Callable[[Log], None],
    teller: Teller | None = None,
) -> Iterator[Place]:
    """Take the place; say goodbye at the end, whatever ends it.

    Args:
        terms: of this job.
        node_dir: claimed by this process; its name is the node's.
        fence: of this node's workers; the rendezvous moves it from now on.
        here: what the scheduler tells of this node.
        say: gets one line for people.
        tell: gets what the rendezvous does, in a thread of its own.
        teller: tells people of this node, and those who look of the job, as long as the place is held.

    Raises:
        ConfigError: an address is wrong, or its port is held by another program.
        RecordError: the record of an earlier life cannot be read.

    """
    record = Record(node_dir.path, launch=here.launch, node=node_dir.path.name)
    seat = take_seat(
        terms.endpoints,
        terms.local_addr,
        run_id=terms.run_id,
        token=terms.token,
        say=say,
    )
    if seat.notice:
        say(seat.notice)
    if not terms.secret and terms.max_nodes > 1:
        say(
            "no token is set: whoever reaches this node's port and knows the job's name may join "
            "(--rdzv-token-file or ELASTIC_RESUME_TOKEN would keep others out)."
        )
    name = node_dir.path.name
    member = Member(
        terms,
        seat,
        node=name,
        record=record,
        seen=node_dir.generation(),
        fence=fence,
        tell=tell,
        hear=teller.hear if teller else lambda _: None,
        show=teller.show if teller else None,
    )
    member.start()
    if teller:
        teller.start(member, look_key(terms.token))
    try:
        yield Place(member, seat.host, here.order)
    except BaseException as end:
        member.leave((str(end) or type(end).__name__)[:200])
        raise
    finally:
        if teller:
            teller.close()
        member.close()
