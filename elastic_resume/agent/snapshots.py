"""The keeper of an agent: this node's snapshots outlive its workers, and go to disk when those are gone.

Promise: whatever ends the agent short of SIGKILL, the newest snapshot is on disk before it goes, if the disk
takes it. A generation that ends has its newest snapshot committed while the next one forms.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.config import Settings
from elastic_resume.errors import ElasticResumeError, MachineError
from elastic_resume.policy.divergence import describe
from elastic_resume.rendezvous.client import Member
from elastic_resume.rendezvous.core.messages import Diverged
from elastic_resume.snapshot.committer import Keeper
from elastic_resume.snapshot.digests import Digester
from elastic_resume.snapshot.ipc import Desk
from elastic_resume.snapshot.slot_pool import Rack
from elastic_resume.snapshot.slots import order_of


@dataclass(frozen=True)
class Kept:
    """What keeps this node's snapshots, and what digests them for a comparison with other nodes'."""

    keeper: Keeper
    digester: Digester

    def compare(self, member: Member, *, say: Callable[[str], None], tell: Callable[..., Any]) -> None:
        """Compare this node's state with that of the others in ``member``'s rendezvous from now on.

        When this node is found wrong and the job goes on, its own later copies of that generation are
        distrusted before it enters another world (`Member.join` waits).
        """
        keeper, digester = self.keeper, self.digester
        # A world's generation -> its workers'. That is greater where they began with a copy of another job.
        workers: dict[int, int] = {}

        def compare(mark: int, world: int) -> None:
            workers[world] = order_of(mark)[0]
            digester.name(mark)

        def note(generation: int, step: int, digest: str) -> None:
            worlds = {generation: world for world, generation in list(workers.items())}
            member.tell_print(worlds[generation], step, digest)

        def differ(told: Diverged) -> None:
            verdict = told.verdict
            tell(
                "replicas-differ",
                generation=told.generation,
                step=verdict.step,
                agreed_step=verdict.agreed_step,
                nodes=[list(camp) for camp in verdict.camps],
                wrong=list(verdict.wrong),
                goes_on=told.goes_on,
            )
            if not told.goes_on:
                return  # the end of the job says it
            say(describe(verdict, goes_on=True))
            if member.node in verdict.wrong:
                try:
                    keeper.distrust(workers.get(told.generation, told.generation), verdict.agreed_step)
                except ElasticResumeError as error:
                    # The next start compares what it has resumed from, and would find it.
                    say(f"copies that are wrong could not be set aside: {error}")

        member.compare(differ)
        digester.tell = note
        keeper.compare = compare


@contextlib.contextmanager
def kept(
    node_dir: Path, settings: Settings, *, say: Callable[[str], None], tell: Callable[..., Any]
) -> Iterator[Kept]:
    """Keep this node's snapshots within the context; workers find the keeper in their environment.

    Args:
        node_dir: claimed by this process.
        settings: of the job.
        say: gets lines for people.
        tell: gets events, by kind and fields.

    """
    rack = Rack(settings.snapshot_memory, say=say)
    keeper = Keeper(node_dir, settings.run_id, rack, say=say, tell=tell)
    digester = Digester(rack)
    desk = Desk(keeper)
    os.environ[constants.ENV_KEEPER] = desk.name
    os.environ[constants.ENV_SLOTS] = rack.path
    keeper.start()
    digester.start()
    desk.open()
    try:
        yield Kept(keeper, digester)
    finally:
        os.environ.pop(constants.ENV_KEEPER, None)
        os.environ.pop(constants.ENV_SLOTS, None)
        with contextlib.suppress(MachineError):  # which has been said
            keeper.commit()
        if keeper.problem:
            say(f"the newest step in memory is lost with this agent: {keeper.problem}")
        desk.close()
        digester.close()
        keeper.close()
