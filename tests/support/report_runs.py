"""Made-up runs whose events tests of reports use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from elastic_resume.events import Event
from elastic_resume.report.checkpoints import CheckpointEntry

KILLED = "rank 1 on node n1 was killed by SIGKILL"
NAN_2 = "rank 2 on node n2 ended with exit code 1"
GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2481."
WAITS_FOR_QUORUM = "generation 1 may still run elsewhere: 2 of the 3 required votes count; waiting for n2, n3"


@dataclass
class Job:
    """Writes the events of a made-up job. Rank r runs on node nr; process ids derive from both."""

    events: list[Event] = field(default_factory=list)
    generation: int = 0
    nodes: tuple[str, ...] = ()

    def add(self, t: float, event: str, node: str, **fields: Any) -> None:
        """Add one event."""
        self.events.append({"t": t, "event": event, "node": node, "pid": 1, **fields})

    def agents(self, t: float, *nodes: str) -> None:
        """Start agents."""
        for node in nodes:
            self.add(t, "agent-start", node, run_id="job")

    def begin(self, t: float, step: int, *nodes: str, **resume: Any) -> None:
        """Start a generation on ``nodes`` that finishes its first step 0.5 s later."""
        self.restore(t - 2, t, step, *nodes, **resume)
        self.steps(t + 0.5, step + 1)

    def restore(self, formed_t: float, t: float, step: int, *nodes: str, **resume: Any) -> None:
        """Start a generation with its rendezvous at ``formed_t`` and its state at ``t``."""
        self.generation += 1
        self.nodes = nodes
        about = {"generation": self.generation, "step": step, "world_size": len(nodes)}
        for rank, node in enumerate(nodes):
            self.add(formed_t, "round", node, round=self.generation, generation=self.generation)
            self.add(t, "worker-start", node, **about, rank=rank, **self.pid(rank))
        fields = {
            "kind": "resumed",
            "nodes": list(nodes),
            "recomputed_steps": 0,
            "receiving_nodes": [],
            "rejected": [],
        }
        self.add(t, "resume", nodes[0], **{**fields, **about, "rank": 0, **resume})

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
    job.exit(111, 0, code=1)
    job.stop(111.2, 1)
    job.begin(115, 10, "n0", "n1", recomputed_steps=2)
    return job


def agent_killed() -> Job:
    """Kill an agent alone: its launcher shim then kills the worker."""
    job = Job().begun()
    job.exit(110.1, 2, signal="SIGKILL", stopped=True)
    job.fail(110.3, 0, "RuntimeError", GLOO)
    job.begin(115, 10, "n0", "n1")
    return job


def node_killed_and_wiped() -> Job:
    """Bring n2 back with an empty directory before the next world."""
    job = node_killed()
    job.events = [event for event in job.events if event["node"] != "n2" and event.get("generation") != 2]
    job.generation = 1
    job.agents(113, "n2")
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
    job.stop(110.1, 0)
    job.fail(110.15, 1, "RuntimeError", GLOO)
    job.stop(110.2, 1)
    job.begin(112, 10, "n0", "n1", "n2", receiving_nodes=["n2"], source_node="n0")
    return job


def job_killed() -> Job:
    """Kill everything at once; the job starts again an hour later."""
    job = Job().begun()
    job.agents(3700, "n0", "n1", "n2")
    job.begin(3710, 8, "n0", "n1", "n2", recomputed_steps=3)
    return job


def newcomers_left_again() -> Job:
    """End a world for new nodes that are gone before the next one."""
    job = Job().begun()
    job.stop(110.2, 0, 1, 2)
    job.add(110.1, "rendezvous", "n0", what="restart", message="generation 1 is over: newcomers are here")
    job.begin(112, 10, "n0", "n1", "n2")
    return job


def job_lost_its_power() -> Job:
    """Lose the newest steps on the ranks' disks; other nodes' logs have them."""
    job = Job().begun()
    job.agents(3700, "n0", "n1", "n2")
    job.begin(3710, 6, "n0", "n1", "n2", recomputed_steps=0)
    return job


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
    job.begin(130, 5, "n0", "n1", "n2", recomputed_steps=5)
    job.events = [
        event for event in job.events if event["event"] not in {"agent-start", "round", "worker-exit"}
    ]
    return job


def finished_and_begun_anew() -> Job:
    """Train again with ``--resume never`` after two generations; its first one dies before a snapshot."""
    job = worker_killed()
    job.finish(120, 20)
    job.agents(3690, "n0", "n1", "n2")
    job.begin(3700, 0, "n0", "n1", "n2", kind="cold")
    job.steps(3704, 4)
    job.exit(3704.2, 1, signal="SIGKILL")
    job.begin(3710, 0, "n0", "n1", "n2", kind="cold", recomputed_steps=4)
    job.steps(3720, 10)
    for event in job.events:
        if event["event"] == "worker-start" and event["generation"] > 2:
            event["min_generation"] = 2
    return job


def half_lost() -> Job:
    """Lose two of four nodes at once: the others wait, because the lost ones may still train."""
    job = Job()
    job.agents(90, "n0", "n1", "n2", "n3")
    job.begin(100, 0, "n0", "n1", "n2", "n3", kind="cold")
    job.steps(110, 10)
    job.stop(113, 0, 1)
    job.add(113, "rendezvous", "n0", what="restart", message="generation 1 is over: n2 is unreachable")
    for node in ("n0", "n1"):
        job.add(114, "rendezvous", node, what="waiting", message=WAITS_FOR_QUORUM, missing=["n2", "n3"])
    return job


def finished_and_run_again() -> Job:
    """Start a finished job once more."""
    job = Job().begun()
    job.finish(120, 12)
    job.agents(200, "n0", "n1", "n2")
    job.begin(210, 12, "n0", "n1", "n2")
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
    job.add(110.6, "rendezvous", "n0", what="restart", message="")
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
        for node in nodes:
            self.add(t, "agent-start", node, run_id="resnet-50", command="train.py --epochs 90")

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
        self.add(self.now + 0.25, "rendezvous", self.nodes[0], what="restart", message="over")
        others = [other for other in range(len(self.nodes)) if other != rank]
        self.fail(self.now + 0.22, others[0], "RuntimeError", GLOO)
        self.stop(self.now + 0.3, *others)
        self.now += 0.4

    def lose_node(self, node: str) -> None:
        """Kill a node with all its processes."""
        others = [rank for rank, name in enumerate(self.nodes) if name != node]
        left = self.nodes[others[0]]
        self.add(self.now + 0.4, "rendezvous", left, what="lost", message=f"{node} died")
        self.stop(self.now + 0.5, *others)
        self.now += 0.6

    def inject_fault(
        self, number: int, what: str, node: str, rank: int | None = None, message: str = ""
    ) -> None:
        """Record an injected fault."""
        about = {"number": number, "what": what, "where": node, "when": f"step {self.step}"}
        self.add(self.now + 0.1, "fault", node, **about, rank=rank, message=message)


ALL_NODES = ("n0", "n1", "n2", "n3")
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
    bad = {"node": "n3", "generation": 1, "step": 23, "reason": TORN_WRITE_REASON}
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
    job.inject_fault(3, "kill-node", "n3", message="with its disk")
    job.lose_node("n3")
    job.start_generation("n0", "n1", "n2")
    job.train(44)
    job.commit_checkpoint(job.step, seconds=4.2)
    job.add(job.now, "preemption-notice", "n1", source="aws", reason="spot", deadline=None)
    job.add(job.now, "drain", "n1", cause="a preemption notice", others_continue=True)
    job.stop(job.now + 0.5, 1)
    message = "aws takes this node away; step 133 is saved."
    job.add(job.now + 0.9, "agent-end", "n1", outcome="signalled", exit_code=75, message=message)
    job.add(job.now + 0.6, "rendezvous", "n0", what="restart", message="n1 leaves")
    job.stop(job.now + 0.6, 0, 2)
    job.now += 1.0
    job.start_generation("n0", "n2")
    job.train(15)


def _add_hang(job: EventfulRun) -> None:
    suspects = [{"rank": 1, "local_rank": 0, "worker_pid": 1, "reason": "holds the GIL in <module 'PIL'>"}]
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
    early = {"rank": 0, "worker_pid": 4242, "exit_code": 1, "signal": None, "stopped": False}
    job.add(job.now + 0.1, "worker-exit", "n0", **early)
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


def shift_clock(events: list[Event], node: str, offset_s: float) -> list[Event]:
    """Return the events on machines of their own; the wall clock of ``node`` is ahead."""
    return [
        {
            **event,
            "t": event["t"] + offset_s * (event["node"] == node),
            "b": event["t"] - 1.6e9,
            "boot": event["node"],
        }
        if event["event"] != "fault"
        else event
        for event in events
    ]


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


def make_long_run(generations: int, nodes: int = 3, seed: int = 0) -> EventfulRun:
    """Return a run with many kills."""
    random = Random(seed)
    every = tuple(f"n{index}" for index in range(nodes))
    job = EventfulRun(*every)
    job.start_generation(*every, kind="cold")
    for index in range(generations - 1):
        job.train(random.randrange(1, 4), random.choice((10.0, 60.0, 100.0)))
        if index % 7 == 3:
            job.fail(job.now + 0.1, 1, "ValueError", f"loss is nan in batch {random.randrange(999)}")
        if index % 5 == 2:
            job.inject_fault(index, "kill-worker", "n1", 1)
        job.kill_worker(random.randrange(nodes))
        job.start_generation(*every, recomputed_steps=int(index % 9 == 0))
    job.train(5)
    job.finish(job.now, job.step)
    return job
