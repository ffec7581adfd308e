"""Whether a script that is killed ends as it does undisturbed: both runs on simulated nodes, side by side.

A run's end is the newest checkpoint of rank 0's node: position, tensors bit for bit, and all else that is
tracked. Where the script prints what happened at each step (which samples, which loss), so is that.
Promise: all nodes are gone and all files removed when `assert_same_run` is over, in whatever way.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elastic_resume import contract
from elastic_resume.errors import ConfigError
from elastic_resume.events import Event
from elastic_resume.faults.lab import Cluster
from elastic_resume.store import board
from elastic_resume.store.manifest import Manifest

if TYPE_CHECKING:
    from elastic_resume.worker.difference import Difference

TARGETS = ("worker", "agent", "node")
LOOK_S = 0.001  # a step of a small model takes a few milliseconds
IDLE_S, EVENTS_S = 0.05, 0.5
OURS, SEED = "elastic_resume.", "elastic_resume.seed"
SEEDS = "the seed that random numbers come from: give er.resume() a seed, or torch.manual_seed one"
FOLLOWS = " (follows rank 0, and may be another rank's after its node is gone)"
SHOWN = 8  # differences in an error
TAIL = 4000  # characters of each node's output in an error
_KILL = re.compile(rf"({'|'.join(TARGETS)}) (\d+) at step (\d+)")
_PRINTED = re.compile(r"\[n\d+:\d+ \S+\] (.*)")  # what --log-prefix makes of a worker's line


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, once: to ``what`` number ``where``, as soon as any rank has finished ``step``.

    A worker's number is its rank; nodes, and agents, are n0, n1, … A killed node or agent is started again at
    once, with its disk. As text: "worker 1 at step 20".
    """

    what: str
    where: int
    step: int

    def __post_init__(self) -> None:
        if self.what not in TARGETS or type(self.where) is not int or type(self.step) is not int:
            raise ConfigError(f"{self!r}: what is worker, agent or node; where and step are numbers.")
        if self.where < 0 or self.step < 1:
            raise ConfigError(f"{self!r}: where begins with 0, and steps with 1.")

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read "worker 1 at step 20"."""
        match = _KILL.fullmatch(text)
        if match is None:
            raise ConfigError(f"cannot read the kill {text!r}: write 'worker 1 at step 20', agent or node.")
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.what} {self.where} at step {self.step}"


@dataclass(frozen=True)
class End:
    """What became of one run: its newest checkpoint, and in order each line that is to be compared, once."""

    path: Path
    manifest: Manifest
    lines: tuple[str, ...]
    resumes: tuple[Event, ...]


@dataclass(frozen=True)
class Job:
    """What is run twice."""

    script: Path
    words: tuple[str, ...]
    nodes: int
    workers_per_node: int
    flags: tuple[str, ...]
    env: Mapping[str, str]
    lines: str | None
    timeout_s: float

    def run(self, directory: Path, kills: Sequence[Kill]) -> End:
        """Run it to its end, with these kills.

        Raises:
            AssertionError: it failed, or ended in a way that says nothing.

        """
        flags = ["--snapshot-every", "1", *self.flags, "--log-prefix"]
        with Cluster(
            directory,
            nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            run_id="same-run",
            flags=flags,
            env=self.env,
        ) as cluster:
            cluster.start(self.script, *self.words)
            _Course(self, cluster, kills).follow()
            return self._end_of(cluster)

    def _end_of(self, cluster: Cluster) -> End:
        resumes = tuple(cluster.events("resume"))
        if not resumes:
            raise fault(cluster, f"{self.script.name} never called er.resume(): there is nothing to compare")
        found = [
            (entry.path, entry.manifest)
            for index in range(self.nodes)
            for entry in cluster.checkpoints(index)[:1]
            if entry.manifest is not None
        ]
        # Ranks may have moved; BatchNorm's buffers are those of rank 0, wherever it runs.
        newest = max(found, key=lambda one: (one[1].order, one[1].rank == 0), default=None)
        if newest is None:
            raise fault(
                cluster,
                f"{self.script.name} ended without a checkpoint: its last step is saved where the loop is "
                "`for epoch in run.epochs(EPOCHS)`, or by run.close()",
            )
        return End(*newest, self._printed(cluster), resumes)

    def _printed(self, cluster: Cluster) -> tuple[str, ...]:
        if self.lines is None:
            return ()
        wanted = re.compile(self.lines)
        text = "\n".join(cluster.output(index) for index in range(self.nodes))
        printed = (match[1] for match in map(_PRINTED.fullmatch, text.splitlines()) if match)
        printed = (line for line in printed if not line.startswith("elastic_resume"))
        return tuple(dict.fromkeys(line for line in printed if wanted.search(line)))


class _Course:
    """One run as it goes: who is killed when, and whether it still makes sense."""

    def __init__(self, job: Job, cluster: Cluster, kills: Sequence[Kill]) -> None:
        self._job, self._cluster = job, cluster
        self._name = job.script.name
        self._kills = kills
        self._pending = sorted(kills, key=lambda kill: kill.step)
        self._struck = 0  # generation that the last kill hit
        self._deadline = time.monotonic() + job.timeout_s
        self._next_look = 0.0

    def follow(self) -> None:
        """Kill what is to be killed; return when all nodes have ended well."""
        while any(node.alive for node in self._cluster.nodes):
            if self._pending:
                self._strike_if_due()
            if time.monotonic() > self._next_look:
                self._next_look = time.monotonic() + EVENTS_S
                self._look()
            time.sleep(LOOK_S if self._pending else IDLE_S)
        codes = self._cluster.wait_exit(only=range(self._job.nodes))
        if any(codes):
            raise self._fault(f"ended with exit codes {codes}")
        if self._pending:
            raise self._fault(f"was over before the kill of {self._pending[0]} came: kill earlier")
        if self._kills:
            self._require_resumes()

    def _strike_if_due(self) -> None:
        lines = list(self._lines())
        kill = self._pending[0]
        if not any(line.step >= kill.step for _, line in lines):
            return
        self._struck = max(line.generation for _, line in lines)
        if kill.what == "worker":
            found = [
                (line.generation, index, line.worker.pid)
                for index, line in lines
                if line.worker.rank == kill.where
            ]
            if not found or not self._kill_process(*max(found)[1:]):
                return  # it is just dying of the kill before: the next one of that rank is meant
        elif kill.what == "agent":
            self._cluster.kill_agent(kill.where)
            self._cluster.wait_exit(only=[kill.where])
            self._cluster.start_node(kill.where)
        else:
            self._cluster.kill_node(kill.where)
            self._cluster.start_node(kill.where)
        self._pending.pop(0)

    def _lines(self) -> Iterator[tuple[int, board.Line]]:
        for index, node in enumerate(self._cluster.nodes):
            for line in board.read_lines(node.directory / contract.BOARD_FILE, self._job.workers_per_node):
                yield index, line

    def _kill_process(self, index: int, pid: int) -> bool:
        for process in self._cluster.processes(index):
            if process.pid == pid:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    return False
                return True
        return False

    def _look(self) -> None:
        """End at once what waits for nothing: an error of the script itself would be tried again."""
        if time.monotonic() > self._deadline:
            raise self._fault(f"did not end within {self._job.timeout_s:.0f} s")
        if not self._kills:
            self._require_no_failure()

    def _require_no_failure(self) -> None:
        ended = [event for event in self._cluster.events("worker-exit") if not event.get("stopped")]
        failed = [event for event in ended if event.get("exit_code") or event.get("signal")]
        if failed:
            how = failed[0].get("signal") or f"exit code {failed[0].get('exit_code')}"
            told = next(iter(self._cluster.events("failure")), {})
            why = str(told.get("traceback") or told.get("message") or "")
            raise self._fault(f"failed undisturbed: rank {failed[0].get('rank')} ended with {how}\n{why}")

    def _require_resumes(self) -> None:
        later = [event for event in self._cluster.events("resume") if event["generation"] > 1]
        if not later or later[-1]["generation"] <= self._struck:
            raise self._fault(f"was over before it noticed the kill of {self._kills[-1]}: kill earlier")
        if any(event["kind"] != "checkpoint" for event in later):
            raise self._fault(
                "began anew after a kill: there was no copy to go on from, so nothing is proven"
            )

    def _fault(self, what: str) -> AssertionError:
        killed = f" (killed: {', '.join(map(str, self._kills))})" if self._kills else ""
        return fault(self._cluster, f"{self._name} {what}{killed}")


def fault(cluster: Cluster, what: str) -> AssertionError:
    """Make the error that says ``what``, and what the nodes printed."""
    tails = "\n".join(
        f"--- {node.name}\n{cluster.output(index)[-TAIL:]}" for index, node in enumerate(cluster.nodes)
    )
    return AssertionError(f"{what}.\n{tails}")


def assert_same_run(
    script: Path | str,
    *words: str,
    kills: Sequence[Kill | str],
    nodes: int = 3,
    workers_per_node: int = 1,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    lines: str | None = None,
    ignore: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> None:
    """Run a script undisturbed, and again with kills; fail unless both end with the same state, bit for bit.

    Args:
        script: what ``elastic-resume run`` starts; it runs to its end twice.
        *words: its arguments.
        kills: whom to kill at which step: `Kill`, or text like "worker 1 at step 20", "node 2 at step 35".
            None at all: two undisturbed runs, which must be equal too.
        nodes: simulated nodes, n0 to n{nodes-1}.
        workers_per_node: ranks on each.
        flags: more flags of ``elastic-resume run``; each step has a snapshot unless they say otherwise.
        env: added to the environment.
        lines: regular expression. Each line that the script prints and in which it is found must be one that
            the undisturbed run printed; so print the step's number with the loss, say, or the samples read:
            ``print(f"step {run.position.step + 1}: {loss.item()}")``. A step that is run again prints again
            what it printed, and each kill may cost each rank a line.
        ignore: names of what need not be equal, with * and ?: ``"*running_*"``; ``"timer"`` is all of that.
        timeout_s: limit for each of the two runs.

    Raises:
        AssertionError: naming the first difference; or the script failed, with what it printed.
        ConfigError: a kill that cannot come.

    """
    plan = [Kill.parse(kill) if isinstance(kill, str) else kill for kill in kills]
    size = nodes * workers_per_node
    for kill in plan:
        if kill.where >= (size if kill.what == "worker" else nodes):
            raise ConfigError(f"the kill of {kill} hits nobody: {nodes} nodes, {size} workers.")
    job = Job(Path(script), words, nodes, workers_per_node, tuple(flags), dict(env or {}), lines, timeout_s)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same-run-")))
        undisturbed = job.run(directory / "undisturbed", [])
        steps = undisturbed.manifest.step
        late = [kill for kill in plan if kill.step >= steps]
        if late:
            raise ConfigError(f"the kill of {late[0]} cannot come: {job.script.name} ends with step {steps}.")
        disturbed = job.run(directory / "disturbed", plan)
        found = lines_unlike(undisturbed.lines, disturbed.lines, may_miss=len(plan) * size)
        found += unlike(undisturbed, disturbed, ignore)
    if found:
        raise AssertionError(_tell(job, plan, disturbed, found))


def lines_unlike(undisturbed: Sequence[str], disturbed: Sequence[str], *, may_miss: int) -> list[str]:
    """Name the first line that only one of the runs printed. What a death cut off is no difference."""
    expected, printed = set(undisturbed), set(disturbed)
    torn = {line for line in printed - expected if any(one.startswith(line) for one in expected)}
    others = [line for line in disturbed if line not in expected and line not in torn]
    missing = [line for line in undisturbed if line not in printed]
    if others:
        return [f"it printed {others[0]!r}, which it does not print undisturbed ({len(others)} such lines)"]
    if len(missing) > may_miss:
        return [f"it did not print {missing[0]!r} ({len(missing)} such lines; {may_miss} may be missing)"]
    return []


def unlike(undisturbed: End, disturbed: End, ignore: Sequence[str]) -> list[str]:
    """Say in what the state of two ends differs; the seed first, since all else follows from it."""
    from elastic_resume.worker import difference  # noqa: PLC0415  imports torch, seconds

    found = difference.compare(undisturbed.path, disturbed.path).differences
    follows = {*undisturbed.manifest.follows_rank0, *disturbed.manifest.follows_rank0}
    told = [SEEDS] if any(one.name.startswith(SEED) for one in found) else []
    for one in found:
        if one.name.startswith(OURS) or any(_is_meant(one.name, pattern) for pattern in ignore):
            continue
        if one.name == "position/step_in_epoch" and "data" not in disturbed.manifest.state:
            continue  # a resume that knows no data counts the steps of an epoch from its own start
        told.append(_in_words(one) + (FOLLOWS if one.name in follows else ""))
    return told


def _is_meant(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}/")


def _in_words(one: Difference) -> str:
    if one.kind.startswith("only"):
        return f"{one.name}: is there only {'undisturbed' if one.kind == 'only in A' else 'after the kills'}"
    if one.kind == "values":
        return f"{one.name} {one.a}: {one.elements} of {one.of} numbers differ, by {one.max_abs:.3g} at most"
    return f"{one.name}: {one.b}, undisturbed {one.a}"


def _tell(job: Job, kills: Sequence[Kill], end: End, found: Sequence[str]) -> str:
    killed = ", ".join(map(str, kills)) or "nothing was killed"
    went = "".join(
        f"\n  generation {event['generation']} went on after step {event['step']}"
        for event in end.resumes[1:]
    )
    more = f"\n  … and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    listed = "".join(f"\n  {one}" for one in found[:SHOWN])
    head = f"{job.script.name} does not end as it ends undisturbed ({killed}):"
    return f"{head}{listed}{more}{went}\n{_advice(kills)}"


def _advice(kills: Sequence[Kill]) -> str:
    if not kills:
        return (
            "Two undisturbed runs differ, so a resumed one cannot be equal: seed what is random, and let no "
            "clock, thread or process number decide what is computed."
        )
    return (
        "What er.resume() was not given is not restored; random numbers that are not torch's, numpy's or "
        "random's are not drawn again. With kills=[] two undisturbed runs are compared."
    )
