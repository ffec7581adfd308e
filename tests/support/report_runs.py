"""Made-up runs in which much happens, for looking at their reports."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from elastic_resume.events import Event
from elastic_resume.report.checkpoints import Item
from tests.unit.report.test_incidents import GLOO, Job

HOSTILE = "</td></script><script>document.title='taken'</script>\x00\"'<img src=x onerror=alert(2)>"


class Story(Job):
    """A job whose generations are formed 0.4 s before they train, and that saves every tenth step."""

    def __init__(self, *nodes: str, t: float = 1_700_000_000.0) -> None:
        super().__init__()
        self.t, self.step = t, 0
        self.agents(t, *nodes)
        for index, node in enumerate(nodes):
            self.add(t + 4 + index / 10, "zygote-ready", node, seconds=4.0, left_out={})
        self.t += 6

    def agents(self, t: float, *nodes: str) -> None:
        """Agents start."""
        for node in nodes:
            self.add(t, "agent-start", node, run_id="resnet-50", command="train.py --epochs 90")

    def form(self, *nodes: str, lost: int = 0, **resume: Any) -> None:
        """A generation begins; ``lost`` steps are run again."""
        self.generation += 1
        self.nodes = nodes
        self.step -= lost
        about = {"generation": self.generation, "step": self.step, "world_size": len(nodes)}
        told = {"kind": "checkpoint", "nodes": list(nodes), "lost_steps": lost, "lacking": [], "rejected": []}
        source = {
            "source_node": nodes[0],
            "source_tier": "memory",
            "source_generation": self.generation - 1,
            "seconds": 0.15,
        }
        for rank, node in enumerate(nodes):
            self.add(self.t, "round", node, round=self.generation, generation=self.generation)
            self.add(self.t + 0.4, "worker-start", node, **about, rank=rank, **self.pid(rank))
        self.add(self.t + 0.4, "resume", nodes[0], **{**told, **source, **about, "rank": 0, **resume})
        self.t += 0.4

    def train(self, steps: int, step_s: float = 0.5, saves: int = 10) -> None:
        """Some steps are made; every tenth is saved, and an old copy is pruned."""
        for _ in range(steps):
            self.step += 1
            self.t += step_s
            self.steps(self.t, self.step)
            if self.step % saves == 0:
                self.save(self.step)

    def save(self, step: int, seconds: float = 0.04) -> None:
        """All nodes commit."""
        for node in self.nodes:
            about = {"generation": self.generation, "step": step, "bytes": 604_000_000, "seconds": seconds}
            self.add(self.t + 0.1, "commit", node, **about, path=f"/d/g{self.generation:06}-s{step:010}")
            old = f"/d/g{self.generation:06}-s{step - 30:010}"
            if step > 30:
                self.add(self.t + 0.15, "prune", node, path=old)

    def kill(self, rank: int, signal: str = "SIGKILL", code: int | None = None) -> None:
        """A worker ends; its peers see their connections break and are stopped."""
        self.exit(self.t + 0.2, rank, signal=signal or None, code=code)
        self.add(self.t + 0.25, "rendezvous", self.nodes[0], what="restart", message="over")
        others = [other for other in range(len(self.nodes)) if other != rank]
        self.fail(self.t + 0.22, others[0], "RuntimeError", GLOO)
        self.stop(self.t + 0.3, *others)
        self.t += 0.4

    def lose(self, node: str) -> None:
        """A node dies with all that it runs; its agent says nothing more."""
        others = [rank for rank, name in enumerate(self.nodes) if name != node]
        left = self.nodes[others[0]]
        self.add(self.t + 0.4, "rendezvous", left, what="lost", message=f"{node} died")
        self.stop(self.t + 0.5, *others)
        self.t += 0.6

    def fault(self, number: int, what: str, node: str, rank: int | None = None, message: str = "") -> None:
        """Somebody breaks something."""
        about = {"number": number, "what": what, "where": node, "when": f"step {self.step}"}
        self.add(self.t + 0.1, "fault", node, **about, rank=rank, message=message)


EVERY = ("n0", "n1", "n2", "n3")
TORN = "state.safetensors: block 7 of 38 is not what was written"


def eventful() -> Story:
    """Four nodes, to whom everything happens that a report knows a word for."""
    job = Story(*EVERY)
    job.form(*EVERY, kind="cold")
    job.train(23)
    _workers_and_disks(job)
    _nodes(job)
    _a_hang(job)
    _what_others_say(job)
    job.finish(job.t + 0.3, job.step)
    return job


def _workers_and_disks(job: Story) -> None:
    job.fault(1, "kill-worker", "n1", 1)
    job.kill(1)
    bad = {"node": "n3", "generation": 1, "step": 23, "reason": TORN}
    job.form(*EVERY, lacking=["n3"], rejected=[bad])
    job.add(job.t, "quarantine", "n3", path="/d/quarantine/g000001-s0000000020", reason=TORN)
    job.train(18)
    job.fault(2, "disk-full", "n2")
    for minute in range(4):
        about = {"generation": 2, "step": 50 + minute, "error": "[Errno 28] No space left on device"}
        job.add(job.t + minute * 2, "commit-failed", "n2", **about)
    job.train(21)
    job.fail(job.t + 0.1, 2, "ValueError", f"loss is nan {HOSTILE}")
    job.exit(job.t + 0.15, 2, code=1)
    job.kill(0, signal="", code=1)
    job.form(*EVERY, lost=3)
    job.train(30, 0.4)


def _nodes(job: Story) -> None:
    job.fault(3, "kill-node", "n3", message="with its disk")
    job.lose("n3")
    job.form("n0", "n1", "n2")
    job.train(44)
    job.save(job.step, seconds=4.2)
    job.add(job.t, "preemption-notice", "n1", source="aws", reason="spot", deadline=None)
    job.add(job.t, "drain", "n1", cause="a preemption notice", alone=True)
    job.stop(job.t + 0.5, 1)
    told = "aws takes this node away; step 133 is saved."
    job.add(job.t + 0.9, "agent-end", "n1", outcome="signalled", exit_code=75, message=told)
    job.add(job.t + 0.6, "rendezvous", "n0", what="restart", message="n1 leaves")
    job.stop(job.t + 0.6, 0, 2)
    job.t += 1.0
    job.form("n0", "n2")
    job.train(15)


def _a_hang(job: Story) -> None:
    suspects = [{"rank": 1, "local_rank": 0, "worker_pid": 1, "reason": "holds the GIL in <module 'PIL'>"}]
    about = {"generation": job.generation, "step": job.step, "suspects": suspects, "victims": [0]}
    job.add(job.t + 31, "hang", "n2", **about, seconds=30.5, elsewhere=False, report="hangs/g5-s148.txt")
    job.t += 31
    job.kill(1)
    job.agents(job.t - 9, "n1", "n3")
    for node in ("n1", "n3"):
        job.add(job.t - 5, "zygote-ready", node, seconds=4.0, left_out={})
    early = {"rank": 0, "worker_pid": 4242, "exit_code": 1, "signal": None, "stopped": False}
    job.add(job.t + 0.1, "worker-exit", "n0", **early)
    job.t += 2
    job.form("n0", "n2", "n1", "n3", lacking=["n1", "n3"])


def _what_others_say(job: Story) -> None:
    job.add(job.t, "rendezvous", "n3", what="stranger", message="10.0.0.9:4 said nothing that we understand")
    job.train(40)
    differ = {"generation": job.generation, "step": job.step, "agreed_step": job.step - 8, "wrong": ["n2"]}
    job.add(job.t, "replicas-differ", "n0", **differ, goes_on=True)
    job.add(job.t, "watch-failed", "n0", error="KeyError('x')")
    job.train(30)


def off(events: list[Event], node: str, by: float) -> list[Event]:
    """The same on machines of their own, where one node's wall clock is ``by`` seconds ahead."""
    return [
        {**one, "t": one["t"] + by * (one["node"] == node), "b": one["t"] - 1.6e9, "boot": one["node"]}
        if one["event"] != "fault"
        else one
        for one in events
    ]


HANG = f"A hang in generation 5 after step 148.\n\nSUSPECT rank 1 {HOSTILE}\n  train.py:7\n"
STACKS = {"n2/g5-s148.txt": HANG}


def items(job: Job) -> list[Item]:
    """What lies on the disks at the end: what was committed and not pruned."""
    pruned = {(one["node"], one["path"]) for one in job.events if one["event"] == "prune"}
    found = []
    for one in job.events:
        if one["event"] == "commit" and (one["node"], one["path"]) not in pruned:
            where = {"generation": one["generation"], "step": one["step"], "bytes": one["bytes"]}
            found.append(Item(Path(one["path"]), "r", one["node"], "valid", **where))
    return found


def long(generations: int, nodes: int = 3, seed: int = 0) -> Story:
    """A month of kills."""
    random = Random(seed)
    every = tuple(f"n{index}" for index in range(nodes))
    job = Story(*every)
    job.form(*every, kind="cold")
    for index in range(generations - 1):
        job.train(random.randrange(1, 4), random.choice((10.0, 60.0, 100.0)))
        if index % 7 == 3:
            job.fail(job.t + 0.1, 1, "ValueError", f"loss is nan in batch {random.randrange(999)}")
        if index % 5 == 2:
            job.fault(index, "kill-worker", "n1", 1)
        job.kill(random.randrange(nodes))
        job.form(*every, lost=int(index % 9 == 0))
    job.train(5)
    job.finish(job.t, job.step)
    return job
