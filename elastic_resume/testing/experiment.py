"""One trial: a job on simulated nodes under a plan, from its start to its end.

The thread that calls `run` looks every few milliseconds: what is due (`course.py`), what the nodes have told,
and whether the job still gets on. Promise: when `run` has returned, or raised, the nodes are gone with all
that they stood on. What they have written stays below the job's directory.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import constants
from elastic_resume.errors import UsageError
from elastic_resume.events import Event, parse
from elastic_resume.report import summary
from elastic_resume.report.loader import Gathered, gather
from elastic_resume.report.summary import Story
from elastic_resume.testing.cluster import Cluster, Hosts
from elastic_resume.testing.fault_plan import Plan
from elastic_resume.testing.fault_runner import DONE, Course, Fate
from elastic_resume.units import amount, verb

RUN_ID = "chaos"
LOOK_S, NEWS_S = 0.02, 0.25
LONGEST_S = 86400.0  # of what is drawn where nobody says for how long
PATIENCE_S = 300.0
ENDING_S = 30.0  # for who was just being started again when the job ended on the others
MARK_S = 1.0  # a step of each rank in its events
ALL_STEPS = 2  # of one rank, in which every other has taken one: it cannot be ahead by more than one
MAX_NEWS_BYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """What is run, where, and for how long it is disturbed."""

    directory: Path
    nodes: int
    min_nodes: int
    workers_per_node: int
    hosts: Hosts
    flags: tuple[str, ...]
    script: tuple[str, ...]
    plan: Plan
    own: tuple[str, ...] = ()  # what each node has of its own, of `kinds.Kind.needs`
    disk_bytes: int | None = None
    for_s: float | None = None
    drain: bool = False
    patience_s: float = PATIENCE_S


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    ``why``: it ended wrong; empty: right. ``codes``: how the nodes' agents ended (None: they did not).
    ``drained``: since when the job was made to end, in seconds since the epoch.
    """

    why: str
    codes: tuple[int | None, ...]
    fates: tuple[Fate, ...]
    story: Story
    drained: float | None = None

    @property
    def not_reached(self) -> list[Fate]:
        """Faults that the plan names and that never came; those that are drawn go on beyond any job's end."""
        return [fate for fate in self.fates if fate.state != DONE and not fate.is_drawn]

    @property
    def is_undisturbed(self) -> bool:
        """Whether no fault came at all."""
        return not any(fate.state == DONE for fate in self.fates)


class Interrupted(Exception):  # noqa: N818  as KeyboardInterrupt, it is no error
    """Somebody wants an end, at once. ``outcome``: what is known so far."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("interrupted")
        self.outcome = outcome


def run(job: Job, say: Callable[[str], None]) -> Outcome:
    """Run the job to its end, and tell what happens as it happens.

    Raises:
        MachineError: these hosts cannot be had here.
        UsageError: they have no disk of a size of their own.
        Interrupted: by a KeyboardInterrupt.

    """
    with Cluster(
        job.directory,
        nodes=job.nodes,
        min_nodes=job.min_nodes,
        workers_per_node=job.workers_per_node,
        run_id=RUN_ID,
        candidates=job.nodes,
        hosts=job.hosts,
        disk_bytes=job.disk_bytes,
        flags=job.flags,
        env={constants.ENV_STEP_MARK_S: str(MARK_S)},
    ) as cluster:
        trial = _Trial(job, cluster, say)
        try:
            why = trial.follow()
        except KeyboardInterrupt:
            raise Interrupted(trial.outcome("it was interrupted")) from None
        finally:
            trial.close()
        return trial.outcome(why)


class _Trial:
    """A job as it goes."""

    def __init__(self, job: Job, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._job, self._cluster, self._say = job, cluster, say
        size = {"nodes": job.nodes, "workers_per_node": job.workers_per_node}
        until_s = LONGEST_S if job.for_s is None else job.for_s
        schedule = job.plan.schedule(**size, until_s=until_s, own=job.own)
        self._course = Course(cluster, schedule, cluster.arming, say, written=len(job.plan.faults))
        self._tails = [_Tail(node.directory / constants.EVENTS_FILE) for node in cluster.nodes]
        self._moved = time.monotonic()
        self._furthest = (0, 0)
        self._quiet: tuple[int, int] | None = None  # the furthest step when the last fault was over
        self._ended: float | None = None
        self._drained: float | None = None

    def follow(self) -> str:
        """Start the job, and return at its end: why that is wrong, or nothing."""
        script, *words = self._job.script
        nodes = self._job.nodes
        self._say(f"{amount(nodes, 'node')} {verb(nodes, 'starts', 'start')}")
        self._cluster.start(script, *words)
        next_news = 0.0
        while not self._course.is_over:
            self._course.look()
            now = time.monotonic()
            if now >= next_news:
                next_news = now + NEWS_S
                self._tell_news()
                why = self._stands_still(now)
                if why:
                    return why
                self._end_faults()
                self._end_late(now)
            time.sleep(LOOK_S)
        self._tell_news()
        return self._judge()

    def outcome(self, why: str) -> Outcome:
        """All that is known now."""
        try:
            found = gather([self._cluster.run_dir])
        except UsageError:  # no agent has got so far as to write one
            found = Gathered()
        told = summary.tell(found.events, items=found.items)
        if not why and told.report.last_step is None:
            why = "no rank finished a step: does the script call er.resume() and run.step()?"
        return Outcome(why, tuple(self._codes()), tuple(self._course.fates), told, self._drained)

    def close(self) -> None:
        """End what lasts."""
        self._course.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _tell_news(self) -> None:
        for tail in self._tails:
            for said in tail.news():
                self._say(said)

    def _stands_still(self, now: float) -> str:
        furthest = max(((line.generation, line.step) for _, line in self._cluster.lines()), default=(0, 0))
        if furthest != self._furthest:
            self._furthest, self._moved = furthest, now
        if now < self._moved + self._job.patience_s:
            return ""
        return (
            f"no rank finished a step for {self._job.patience_s:.0f} s (generation {furthest[0]}, step "
            f"{furthest[1]}).\n{self._cluster.tails()}"
        )

    def _end_faults(self) -> None:
        for_s = self._job.for_s
        if for_s is None or self._course.elapsed_s < for_s:
            return
        if self._course.pending:
            self._course.finish("faults were to come no longer")
        if not self._job.drain or self._drained is not None:
            return
        if not self._course.is_quiet:
            self._quiet = None
        elif self._quiet is None:
            self._quiet = self._furthest
        elif self._has_gone_on(*self._quiet):
            self._drained = time.time()
            self._course.dismiss()
            self._say("all faults have come: the job is drained")
            for index in range(self._job.nodes):
                self._cluster.kill_agent(index, signal.SIGTERM)

    def _has_gone_on(self, generation: int, step: int) -> bool:
        """Whether all ranks have finished a step since: what a fault has ended may never do so again."""
        least = (generation, step + ALL_STEPS)  # or any step of a later generation
        return any(
            line.step > line.first_step and (line.generation, line.step) >= least
            for _, line in self._cluster.lines()
        )

    def _end_late(self, now: float) -> None:
        """End nodes that were being started again when the job ended: nobody is left for them to join."""
        if not {constants.EXIT_DONE, constants.EXIT_AT_FAULT, constants.EXIT_USAGE} & {*self._codes()}:
            self._ended = None
            return
        self._ended = self._ended or now
        for index, node in enumerate(self._cluster.nodes):
            if now > self._ended + ENDING_S and node.alive:
                self._say(f"{node.name} is left of a job that has ended, and is stopped")
                self._cluster.kill_node(index)

    def _codes(self) -> list[int | None]:
        return [node.agent.poll() if node.agent else None for node in self._cluster.nodes]

    def _judge(self) -> str:
        """Why this end is wrong; nothing if it is right."""
        codes = self._codes()
        drained = self._drained is not None
        wrong = {constants.EXIT_AT_FAULT, constants.EXIT_USAGE} & {*codes}
        if (constants.EXIT_DONE in codes or drained) and not wrong:
            return ""
        ends = self._cluster.events("agent-end")
        said = [str(one["message"]) for one in ends if one.get("outcome") == "failed" and one.get("message")]
        why = said[0].rstrip(".") if said else "nobody said why"
        told = f"exit codes {', '.join(str(code) for code in codes)}"
        return f"the job did not get to its end: {why} ({told}).\n{self._cluster.tails()}"


class _Tail:
    """Reads what a node's event file has gained: what people are told of it, each line once.

    Not by its times, since clocks jump; nor by its place alone, since a disk may be wiped.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._told: set[bytes] = set()

    def news(self) -> Iterator[str]:
        """Give what there is to say of each line that was not there at the last call."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(MAX_NEWS_BYTES)
        except OSError:  # the disk is broken, or there is none: it comes back with another file, or with less
            self._offset = 0
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            event = parse(line)
            said = _news(event) if event is not None else ""
            if said and line not in self._told:
                self._told.add(line)
                yield said


def _news(event: Event) -> str:
    """What people are told of an event while the job runs; nothing of most."""
    kind, node = event.get("event"), event.get("node")
    if kind == "resume":
        lacking = event.get("lacking") or []
        sent = f", sent by {event.get('source_node')} to {', '.join(lacking)}" if lacking else ""
        lost = event.get("lost_steps")
        again = f"; {amount(lost, 'step')} {verb(lost, 'is', 'are')} run again" if lost else ""
        step = int(event.get("step", 0)) + 1
        size = int(event.get("world_size") or 0)
        ranks = f"{amount(size, 'rank')} {verb(size, 'trains', 'train')}"
        return f"generation {event.get('generation')}: {ranks} from step {step} on{sent}{again}"
    if kind == "hang":
        return f"{node}: a hang at step {event.get('step')}, suspected: {_ranks(event.get('suspects'))}"
    if kind == "commit-failed":
        return f"{node}: {event.get('error')}"
    if kind == "replicas-differ":
        return (
            f"replicas differ at step {event.get('step')}: wrong on {', '.join(event.get('wrong') or ['?'])}"
        )
    if kind == "quarantine":
        return f"{node}: {event.get('path')} is set aside: {event.get('reason')}"
    if kind == "agent-end":
        return f"{node} has ended: {event.get('outcome')} {event.get('message') or ''}".rstrip()
    return ""


def _ranks(suspects: Sequence[object] | None) -> str:
    found = [str(one.get("rank")) for one in suspects or () if isinstance(one, dict)]
    return f"rank {', '.join(found)}" if found else "nobody here"
