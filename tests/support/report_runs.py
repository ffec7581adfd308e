"""Made-up runs whose events tests of reports use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from elastic_resume.events import Event
from elastic_resume.policy import wording
from elastic_resume.policy.failure_classification import (
    Failure,
    classify_with_times,
    make_node_failure,
    separate_root_causes,
)
from elastic_resume.policy.reasons import (
    Loss,
    NodeLost,
    Signalled,
    ViewEnd,
    ViewEndOf,
    ViewEndReason,
    VotesMissing,
    WorkersStopped,
    to_json,
)
from elastic_resume.policy.stalls import Activity, Stall
from elastic_resume.report.checkpoints import CheckpointEntry

KILLED = "rank 1 on node n1 was killed by SIGKILL"
NAN_2 = "rank 2 on node n2 ended with exit code 1"
GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2481."
WAITS_FOR_QUORUM = VotesMissing(1, 2, 3, ("n2", "n3"), 2)


@dataclass
class Job:
    """Writes the events of a made-up job. Rank r runs on node nr; process ids derive from both."""

    events: list[Event] = field(default_factory=list)
    generation: int = 0
    nodes: tuple[str, ...] = ()
    lost: list[Failure] = field(default_factory=list)
    """Nodes that the leader lost in this generation."""
    restarted: set[str] = field(default_factory=set)
    started_t: float = 0.0

    def add(self, t: float, event: str, node: str, **fields: Any) -> None:
        """Add one event."""
        self.events.append({"t": t, "event": event, "node": node, "pid": 1, **fields})

    def agents(self, t: float, *nodes: str) -> None:
        """Start agents."""
        for node in nodes:
            self.add(t, "agent-start", node, run_id="job")
        self.restarted.update(nodes)

    def begin(self, t: float, step: int, *nodes: str, **resume: Any) -> None:
        """Start a generation on ``nodes`` that finishes its first step 0.5 s later."""
        self.restore(t - 2, t, step, *nodes, **resume)
        self.steps(t + 0.5, step + 1)

    def restore(self, formed_t: float, t: float, step: int, *nodes: str, **resume: Any) -> None:
        """Start a generation with its rendezvous at ``formed_t`` and its state at ``t``."""
        self.write_verdicts(formed_t, nodes)
        self.generation += 1
        self.nodes, self.lost, self.restarted = nodes, [], set()
        self.started_t = formed_t
        about = {"generation": self.generation, "step": step, "world_size": len(nodes)}
        for rank, node in enumerate(nodes):
            place = {"node_rank": rank, "num_nodes": len(nodes)}
            self.add(formed_t, "generation-start", node, generation=self.generation, **place)
            self.add(t, "worker-start", node, **about, rank=rank, **self.pid(rank))
        fields = {
            "kind": "resumed",
            "nodes": list(nodes),
            "recomputed_steps": 0,
            "receiving_nodes": [],
            "rejected": [],
        }
        self.add(t, "resume", nodes[0], **{**fields, **about, "rank": 0, **resume})

    def write_verdicts(self, t: float, next_nodes: Sequence[str] = ()) -> None:
        """Judge the generation as its agents do; without ``next_nodes`` they give up."""
        members = set(self.nodes)
        judges = [node for node in next_nodes or self.nodes if node in members and node not in self.restarted]
        own = [
            event
            for event in self.events[-2000:]  # the long runs have a hundred thousand
            if event["event"] in {"failure", "worker-exit", "hang"} and event["t"] >= self.started_t
        ]
        reported = [
            [failure for _, failure in classify_with_times([e for e in own if e["node"] == node], node)][:1]
            for node in self.nodes
            if node not in {failure.node for failure in self.lost}
        ]
        verdict = separate_root_causes([*self.lost, *(failure for found in reported for failure in found)])
        fields = {
            "generation": self.generation,
            "next_generation": self.generation + 1 if next_nodes else None,
            "reason": None,
            "joined": [name for name in next_nodes if name not in members],
            "lost": [failure.node for failure in self.lost],
            "root_causes": [to_json(failure) for failure in verdict.root_causes],
            "secondary_failures": [to_json(failure) for failure in verdict.secondary_failures],
            "decision": {"kind": "continue" if next_nodes else "give-up"},
        }
        for node in judges if self.generation else ():
            self.add(t, "verdict", node, **fields)

    def lose(self, t: float, node: str) -> None:
        """Let the leader notice that a node died."""
        reason = NodeLost(node, Loss.DIED)
        self.lost.append(make_node_failure(reason))
        self.end_view(t, next(name for name in self.nodes if name != node), reason)

    def end_view(self, t: float, leader: str, reason: ViewEndReason) -> None:
        """Let the leader end the view."""
        about = {"what": "view-ended", "generation": self.generation, "reason": to_json(reason)}
        message = wording.describe_event("view-ended", reason, node=leader, generation=self.generation)
        self.add(t, "rendezvous", leader, **about, message=message)

    def pid(self, rank: int) -> dict[str, int]:
        """Return a rank's process id in this generation."""
        return {"pid": 100 * self.generation + rank}

    def steps(self, t: float, step: int) -> None:
        """Let every rank record a step."""
        for rank, node in enumerate(self.nodes):
            self.add(t, "step", node, generation=self.generation, rank=rank, step=step, **self.pid(rank))

    def exit(
        self, t: float, rank: int, *, signal: str | None = None, code: int | None = None, **more: Any
    ) -> None:
        """Let a worker exit."""
        worker = self.pid(rank)["pid"]
        how = {"signal": signal, "exit_code": code, "stopped": False, **more}
        self.add(t, "worker-exit", self.nodes[rank], rank=rank, worker_pid=worker, **how)

    def stop(self, t: float, *ranks: int) -> None:
        """Let workers exit because their agent stopped them."""
        for rank in ranks:
            self.exit(t, rank, signal="SIGTERM", stopped=True)

    def fail(self, t: float, rank: int, kind: str, message: str) -> None:
        """Let an exception end a worker."""
        about = {"generation": self.generation, "step": 11, "rank": rank, "type": kind, "message": message}
        self.add(t, "failure", self.nodes[rank], **about, **self.pid(rank))

    def finish(self, t: float, step: int) -> None:
        """Finish the job on all nodes."""
        for rank, node in enumerate(self.nodes):
            self.add(t, "run-end", node, generation=self.generation, rank=rank, step=step, **self.pid(rank))
            self.exit(t + 1, rank, code=0)
            self.add(t + 2, "agent-end", node, outcome="done", exit_code=0, message="")

    def begun(self) -> Job:
        """Bring three nodes to step 10 of their first generation, at second 110."""
        self.agents(90, "n0", "n1", "n2")
        self.begin(100, 0, "n0", "n1", "n2", kind="cold")
        self.steps(110, 10)
        return self


def worker_killed() -> Job:
    """Kill a worker: the peers' connections break, and n2 is stopped."""
    job = Job().begun()
    job.exit(110.2, 1, signal="SIGKILL")
    job.fail(110.3, 0, "RuntimeError", GLOO)
    job.exit(111, 0, code=1)
    job.stop(111.2, 2)
    job.begin(115, 10, "n0", "n1", "n2", recomputed_steps=1)
    return job


def node_killed() -> Job:
    """Kill agent, launcher shim and worker of n2 at once: its log just ends."""
    job = Job().begun()
    job.fail(110.3, 0, "RuntimeError", GLOO)
    job.lose(110.6, "n2")
    job.exit(111, 0, code=1)
    job.stop(111.2, 1)
    job.begin(115, 10, "n0", "n1", recomputed_steps=2)
    return job


def node_killed_and_wiped() -> Job:
    """Bring n2 back with an empty directory before the next world."""
    job = node_killed()
    job.events = [event for event in job.events if event["node"] != "n2" and event["t"] < 113]
    job.generation, job.nodes = 1, ("n0", "n1", "n2")
    job.lost = [make_node_failure(NodeLost("n2", Loss.DIED))]
    job.agents(112, "n2")
    job.begin(115, 10, "n0", "n1", "n2", recomputed_steps=2, receiving_nodes=["n2"], source_node="n0")
    return job


def exception() -> Job:
    """Raise on rank 2; by the clocks, which differ, a peer's connection broke earlier."""
    job = Job().begun()
    job.fail(109.9, 0, "DistBackendError", "NCCL error: remote process exited")
    job.fail(110.1, 2, "ValueError", "loss is nan")
    job.exit(110.9, 2, code=1)
    job.exit(110.9, 0, code=1)
    job.stop(111, 1)
    job.begin(115, 10, "n0", "n1", "n2", recomputed_steps=1)
    return job


def node_returns() -> Job:
    """Add n2 to two nodes; while they are stopped one by one, a connection breaks."""
    job = Job()
    job.agents(90, "n0", "n1")
    job.begin(100, 0, "n0", "n1", kind="cold")
    job.steps(110, 10)
    job.agents(109, "n2")
    job.end_view(110, "n0", ViewEnd.NEWCOMERS)
    job.stop(110.1, 0)
    job.fail(110.15, 1, "RuntimeError", GLOO)
    job.stop(110.2, 1)
    job.begin(112, 10, "n0", "n1", "n2", receiving_nodes=["n2"], source_node="n0")
    return job


def job_killed(step: int = 8, recomputed_steps: int = 3) -> Job:
    """Kill everything at once; the job starts again an hour later."""
    job = Job().begun()
    job.agents(3700, "n0", "n1", "n2")
    job.begin(3710, step, "n0", "n1", "n2", recomputed_steps=recomputed_steps)
    return job


def lease_expired() -> Job:
    """Let the lease of n1 expire while its agent is paused: its peers' connections break."""
    job = Job().begun()
    job.exit(110.2, 1, signal="SIGKILL", stopped=True, lease_expired=True)
    job.fail(110.3, 0, "RuntimeError", GLOO)
    job.exit(110.4, 0, code=1)
    job.stop(110.5, 2)
    job.begin(112, 10, "n0", "n1", "n2")
    own = next(event for event in job.events if event["event"] == "verdict" and event["node"] == "n1")
    own["reason"] = to_json(ViewEndOf(ViewEnd.LEASE_EXPIRED, ("n0",)))
    return job


def newcomers_left_again() -> Job:
    """End a world for new nodes that are gone before the next one."""
    job = Job().begun()
    job.stop(110.2, 0, 1, 2)
    job.end_view(110.1, "n0", ViewEnd.NEWCOMERS)
    job.begin(112, 10, "n0", "n1", "n2")
    return job


def job_lost_its_power() -> Job:
    """Lose the newest steps on the ranks' disks; other nodes' logs have them."""
    return job_killed(step=6, recomputed_steps=0)


def job_stopped() -> Job:
    """Send SIGTERM to every agent and start the job again."""
    job = Job().begun()
    job.stop(110.2, 0, 1, 2)
    for node in job.nodes:
        job.add(111, "agent-end", node, outcome="signalled", exit_code=143, message="stopped by SIGTERM.")
    job.agents(3700, "n0", "n1", "n2")
    job.begin(3710, 10, "n0", "n1", "n2")
    return job


def node_told_to_leave() -> Job:
    """Preempt one node."""
    job = Job().begun()
    job.stop(110.2, 1)
    job.add(110.4, "agent-end", "n1", outcome="signalled", exit_code=143, message="stopped by SIGTERM.")
    left = NodeLost("n1", Loss.LEFT, Signalled("SIGTERM"))
    job.end_view(110.4, "n0", left)
    job.lost.append(make_node_failure(left))
    job.fail(110.5, 0, "RuntimeError", GLOO)
    job.begin(115, 10, "n0", "n2")
    return job


def rank0_node_wiped() -> Job:
    """Lose the node that wrote the resume event of the second generation."""
    job = worker_killed()
    job.events = [event for event in job.events if event["node"] != "n0"]
    return job


def without_agents() -> Job:
    """Run under plain torchrun, where no event says how a worker ended."""
    job = Job().begun()
    job.fail(110.5, 2, "ValueError", "x")
    job.begin(130, 5, "n0", "n1", "n2", recomputed_steps=5)
    job.events = [
        event
        for event in job.events
        if event["event"] not in {"agent-start", "generation-start", "worker-exit", "verdict"}
    ]
    return job


def half_lost() -> Job:
    """Lose two of four nodes at once: the others wait, because the lost ones may still train."""
    job = Job()
    job.agents(90, "n0", "n1", "n2", "n3")
    job.begin(100, 0, "n0", "n1", "n2", "n3", kind="cold")
    job.steps(110, 10)
    job.stop(113, 0, 1)
    job.end_view(113, "n0", NodeLost("n2", Loss.UNREACHABLE))
    for node in ("n0", "n1"):
        job.add(114, "rendezvous", node, what="waiting", reason=to_json(WAITS_FOR_QUORUM), message="w")
    return job


def finished_and_run_again() -> Job:
    """Start a finished job once more."""
    job = Job().begun()
    job.finish(120, 12)
    job.agents(200, "n0", "n1", "n2")
    job.begin(210, 12, "n0", "n1", "n2")
    return job


def failed() -> Job:
    """Return a job whose agents give up."""
    job = exception()
    job.fail(116, 2, "ValueError", "loss is nan")
    job.exit(116.1, 2, code=1)
    job.write_verdicts(116.9)
    for node in job.nodes:
        message = "node n2 gave up: the same exception at the same step three times."
        job.add(117, "agent-end", node, outcome="failed", exit_code=1, message=message)
    return job


def unfinished() -> Job:
    """Return a job that ends with a worker's death."""
    job = Job().begun()
    job.exit(110.2, 1, signal="SIGKILL")
    return job


def failed_starts() -> Job:
    """Fail twice before training, on a module that is missing on n1."""
    job = Job()
    job.agents(90, "n0", "n1")
    for t in (95, 100):
        job.restore(t, t, 0, "n0", "n1")
        job.events = [item for item in job.events if item["event"] not in {"worker-start", "resume"}]
        job.fail(t + 1, 0, "DistNetworkError", "connection refused")
        job.fail(t + 2, 1, "ModuleNotFoundError", "No module named 'torchh'")
        for item in job.events[-2:]:
            item["generation"] = item["step"] = None
        job.exit(t + 2.1, 0, code=1)
        job.exit(t + 2.2, 1, code=1)
    job.write_verdicts(102.9)
    message = "node n1 gave up: 2 starts in a row failed without progress, before the first step."
    job.add(103, "agent-end", "n1", outcome="failed", exit_code=1, message=message)
    return job


def run_steps(*steps: Any) -> Job:
    """Run three nodes: ready after 8 s, rendezvous at 98, state at 100, a step each second from 101 on."""
    job = Job()
    job.agents(90, "n0", "n1", "n2")
    for node in ("n0", "n1", "n2"):
        job.add(95, "fork-server-ready", node, seconds=5.0)
    begin_at(job, 98, 100, 0, kind="cold", seconds=0.5)
    record_steps(job, 101, *steps)
    return job


def begin_at(job: Job, formed_t: float, restored_t: float, step: int, **resume: Any) -> None:
    """Start a generation of three nodes."""
    job.restore(formed_t, restored_t, step, "n0", "n1", "n2", **resume)


def record_steps(job: Job, t: float, *steps: int) -> None:
    """Let all ranks record one step after another, a second each."""
    for index, step in enumerate(steps):
        job.steps(t + index, step)


def killed() -> Job:
    """Kill rank 1 half a second after step 10; steps 9 and 10 are recomputed from 115 on."""
    job = run_steps(*range(1, 11))
    job.exit(110.5, 1, signal="SIGKILL")
    job.end_view(110.6, "n0", WorkersStopped("n1"))
    job.stop(110.8, 0, 2)
    begin_at(job, 111, 114, 8, seconds=1.0, recomputed_steps=2)
    record_steps(job, 115, *range(9, 21))
    job.finish(127, 20)
    return job


HOSTILE_TEXT = "</td></script><script>document.title='taken'</script>\x00\"'<img src=x onerror=alert(2)>"


class EventfulRun(Job):
    """A job with 0.4 s between rendezvous and training, and a checkpoint at every tenth step."""

    def __init__(self, *nodes: str, t: float = 1_700_000_000.0) -> None:
        super().__init__()
        self.now, self.step = t, 0
        self.agents(t, *nodes)
        for index, node in enumerate(nodes):
            self.add(t + 4 + index / 10, "fork-server-ready", node, seconds=4.0, skipped_modules={})
        self.now += 6

    def agents(self, t: float, *nodes: str) -> None:
        """Start agents."""
        super().agents(t, *nodes)
        for event in self.events[-len(nodes) :]:
            event |= {"run_id": "resnet-50", "command": "train.py --epochs 90"}

    def start_generation(self, *nodes: str, recomputed_steps: int = 0, **resume: Any) -> None:
        """Start a generation that recomputes some steps."""
        self.step -= recomputed_steps
        source = {
            "source_node": nodes[0],
            "source_tier": "memory",
            "source_generation": self.generation,
            "seconds": 0.15,
        }
        self.now += 0.4
        fields = {**source, "recomputed_steps": recomputed_steps, **resume}
        self.restore(self.now - 0.4, self.now, self.step, *nodes, **fields)

    def train(self, steps: int, step_s: float = 0.5, save_every: int = 10) -> None:
        """Finish some steps; commit every tenth and prune an old checkpoint."""
        for _ in range(steps):
            self.step += 1
            self.now += step_s
            self.steps(self.now, self.step)
            if self.step % save_every == 0:
                self.commit_checkpoint(self.step)

    def commit_checkpoint(self, step: int, seconds: float = 0.04) -> None:
        """Commit on all nodes."""
        for node in self.nodes:
            about = {"generation": self.generation, "step": step, "bytes": 604_000_000, "seconds": seconds}
            self.add(self.now + 0.1, "commit", node, **about, path=f"/d/g{self.generation:06}-s{step:010}")
            old = f"/d/g{self.generation:06}-s{step - 30:010}"
            if step > 30:
                self.add(self.now + 0.15, "prune", node, path=old)

    def kill_worker(self, rank: int, signal: str = "SIGKILL", code: int | None = None) -> None:
        """Kill a worker; its peers' connections break, and they are stopped."""
        self.exit(self.now + 0.2, rank, signal=signal or None, code=code)
        self.end_view(self.now + 0.25, self.nodes[0], WorkersStopped(self.nodes[rank]))
        others = [other for other in range(len(self.nodes)) if other != rank]
        self.fail(self.now + 0.22, others[0], "RuntimeError", GLOO)
        self.stop(self.now + 0.3, *others)
        self.now += 0.4

    def lose_node(self, node: str) -> None:
        """Kill a node with all its processes."""
        others = [rank for rank, name in enumerate(self.nodes) if name != node]
        self.lose(self.now + 0.4, node)
        self.stop(self.now + 0.5, *others)
        self.now += 0.6

    def inject_fault(
        self, number: int, what: str, node: str, rank: int | None = None, message: str = ""
    ) -> None:
        """Record an injected fault."""
        about = {"number": number, "what": what, "where": node, "when": f"step {self.step}"}
        self.add(self.now + 0.1, "fault", node, **about, rank=rank, message=message or f"{what} {node}")


ALL_NODES = ("n0", "n1", "n2", "n3")
TORN_WRITE = {"kind": "corrupt", "detail": "block 7 of 38 is not what was written"}
TORN_WRITE_REASON = "state.safetensors: block 7 of 38 is not what was written"


def make_eventful_run() -> EventfulRun:
    """Return a run of four nodes with every kind of event that a report describes."""
    job = EventfulRun(*ALL_NODES)
    job.start_generation(*ALL_NODES, kind="cold")
    job.train(23)
    _add_worker_and_disk_faults(job)
    _add_node_failures(job)
    _add_hang(job)
    _add_other_events(job)
    job.finish(job.now + 0.3, job.step)
    return job


def _add_worker_and_disk_faults(job: EventfulRun) -> None:
    job.inject_fault(1, "kill-worker", "n1", 1)
    job.kill_worker(1)
    bad = {"node": "n3", "generation": 1, "step": 23, "reason": TORN_WRITE}
    job.start_generation(*ALL_NODES, receiving_nodes=["n3"], rejected=[bad])
    job.add(job.now, "quarantine", "n3", path="/d/quarantine/g000001-s0000000020", reason=TORN_WRITE_REASON)
    job.train(18)
    job.inject_fault(2, "disk-full", "n2")
    for minute in range(4):
        about = {"generation": 2, "step": 50 + minute, "error": "[Errno 28] No space left on device"}
        job.add(job.now + minute * 2, "commit-failed", "n2", **about)
    job.train(21)
    job.fail(job.now + 0.1, 2, "ValueError", f"loss is nan {HOSTILE_TEXT}")
    job.exit(job.now + 0.15, 2, code=1)
    job.kill_worker(0, signal="", code=1)
    job.start_generation(*ALL_NODES, recomputed_steps=3)
    job.train(30, 0.4)


def _add_node_failures(job: EventfulRun) -> None:
    job.inject_fault(3, "kill-node", "n3", message="kill-node n3 (with its disk)")
    job.lose_node("n3")
    job.start_generation("n0", "n1", "n2")
    job.train(44)
    job.commit_checkpoint(job.step, seconds=4.2)
    job.add(job.now, "preemption-notice", "n1", source="aws", reason="spot", deadline=None)
    job.add(job.now, "drain", "n1", cause="a preemption notice", others_continue=True)
    job.stop(job.now + 0.5, 1)
    message = "aws takes this node away; step 133 is saved."
    job.add(job.now + 0.9, "agent-end", "n1", outcome="signalled", exit_code=75, message=message)
    left = NodeLost("n1", Loss.LEFT, Signalled("SIGTERM"))
    job.end_view(job.now + 0.6, "n0", left)
    job.lost.append(make_node_failure(left))
    job.stop(job.now + 0.6, 0, 2)
    job.now += 1.0
    job.start_generation("n0", "n2")
    job.train(15)


def _add_hang(job: EventfulRun) -> None:
    stall = to_json(Stall(Activity.HOLDS_GIL, at="<module 'PIL'>"))
    suspects = [{"rank": 1, "local_rank": 0, "worker_pid": 1, "reason": stall}]
    about = {"generation": job.generation, "step": job.step, "suspects": suspects, "victims": [0]}
    job.add(
        job.now + 31,
        "hang",
        "n2",
        **about,
        seconds=30.5,
        waits_for_other_node=False,
        report="hangs/g5-s148.txt",
    )
    job.now += 31
    job.kill_worker(1)
    job.agents(job.now - 9, "n1", "n3")
    for node in ("n1", "n3"):
        job.add(job.now - 5, "fork-server-ready", node, seconds=4.0, skipped_modules={})
    job.now += 2
    job.start_generation("n0", "n2", "n1", "n3", receiving_nodes=["n1", "n3"])


def _add_other_events(job: EventfulRun) -> None:
    job.add(
        job.now,
        "rendezvous",
        "n3",
        what="unauthenticated",
        message="10.0.0.9:4 said nothing that we understand",
    )
    job.train(40)
    differ = {
        "generation": job.generation,
        "step": job.step,
        "agreed_step": job.step - 8,
        "diverged_nodes": ["n2"],
    }
    job.add(job.now, "replicas-differ", "n0", **differ)
    job.add(job.now, "hang-detector-failed", "n0", error="KeyError('x')")
    job.train(30)


HANG_REPORT = f"A hang in generation 5 after step 148.\n\nSUSPECT rank 1 {HOSTILE_TEXT}\n  train.py:7\n"
STACKS = {"n2/g5-s148.txt": HANG_REPORT}


def remaining_checkpoints(job: Job) -> list[CheckpointEntry]:
    """Return what lies on the disks at the end: what was committed and not pruned."""
    pruned = {(event["node"], event["path"]) for event in job.events if event["event"] == "prune"}
    found = []
    for event in job.events:
        if event["event"] == "commit" and (event["node"], event["path"]) not in pruned:
            where = {"generation": event["generation"], "step": event["step"], "bytes": event["bytes"]}
            found.append(CheckpointEntry(Path(event["path"]), "r", event["node"], "valid", **where))
    return found


def make_long_run(generations: int = 20) -> EventfulRun:
    """Return a run with many kills."""
    random, every = Random(0), ALL_NODES[:3]
    job = EventfulRun(*every)
    job.start_generation(*every, kind="cold")
    for index in range(generations - 1):
        job.train(random.randrange(1, 4), random.choice((10.0, 60.0, 100.0)))
        if index % 7 == 3:
            job.fail(job.now + 0.1, 1, "ValueError", f"loss is nan in batch {random.randrange(999)}")
        if index % 5 == 2:
            job.inject_fault(index, "kill-worker", "n1", 1)
        job.kill_worker(random.randrange(3))
        job.start_generation(*every, recomputed_steps=int(index % 9 == 0))
    job.train(5)
    job.finish(job.now, job.step)
    return job
