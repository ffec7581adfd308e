"""``elastic-resume status``: asking all agents of a job, the document and the screen."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.commands import job_status
from elastic_resume.commands.job_status import (
    MAX_MEMBER_LINES,
    MAX_NODES,
    JobEndpoint,
    build_document,
    format_screen,
)
from elastic_resume.errors import RendezvousLostError, UsageError
from elastic_resume.rendezvous.core.world import Incarnation, View
from elastic_resume.rendezvous.net import protocol, status_server
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.report import agent_status
from elastic_resume.report.agent_status import (
    AgentStatus,
    KnownIncidents,
    NodeStatus,
    encode_reply,
)
from elastic_resume.report.generations import Incident
from tests.support.rendezvous_nodes import RUN, TOKEN, listener_address, read_line

A, B = (Incarnation(name, name, 1, f"{name}:1", None) for name in "ab")
KNOWN = KnownIncidents(
    tuple(
        Incident(generation, "signal", "rank 1 on node b was killed by SIGKILL", 100.0, steps, 0.4)
        for generation, steps in ((1, 3), (2, 0))
    ),
    (("signal", 2),),
    3,
    (0, 2, *[0] * 8),
    0.8,
)


def make_members(count: int) -> tuple[Incarnation, ...]:
    """Return the members of a view."""
    return tuple(Incarnation(f"n{i}", f"disk-{i}", 1, f"n{i}:1") for i in range(count))


def make_status(rendezvous: RendezvousStatus, **node: Any) -> AgentStatus:
    """Return the answer of an agent in generation 3."""
    node = {"generation": 3, "step": 100, "steps_per_s": 2.5, "snapshot_step": 99, **node}
    return AgentStatus(rendezvous, NodeStatus(**node), 0.2, KNOWN)


def make_leader_status(count: int = 2, **node: Any) -> AgentStatus:
    """Return the answer of a leader of as many members and a spare."""
    members, spare = make_members(count), make_members(10)[9:]
    view = RendezvousStatus(members[0], True, members[0], View(3, members, members[0]), 3, spare)
    return make_status(view, **{"world_size": count, **node})


def make_document(
    count: int = 2, *, view: RendezvousStatus | None = None, trouble: int | None = None
) -> dict[str, Any]:
    """Build the document of a leader and as many members, all of which answer."""
    asked = make_status(view) if view else make_leader_status(count)
    nodes = job_status._list_nodes(asked.rendezvous)
    answers = {
        node.address: make_status(
            RendezvousStatus(node),
            step=100 + (i == 1),
            world_size=count,
            problem="disk full" if i == trouble else "",
        )
        for i, node in enumerate(nodes)
    }
    document = build_document("job", asked, nodes, dict(answers))
    return dict(json.loads(json.dumps(document)))


# ---- the screen ----------------------------------------------------------------------------------------


def test_screen_shows_view_steps_and_incidents() -> None:
    """The screen has nodes, steps, snapshots, and incidents with cause and cost."""
    text = "\n".join(format_screen(make_document()))
    for words in (
        "job job: generation 3, 2 nodes, 2 ranks, led by n0",
        "step 101, 2.5 steps/s",
        "spares: n9",
        "2 failures (workers killed by a signal), 3 steps recomputed",
        "rank 1 on node b was killed by SIGKILL",
        "99, ",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("incidents", "expected"),
    [
        ({}, "no failures since this start"),
        ({"preempted": 1}, "no failures, 1 drain, 3 steps recomputed"),
        ({"oom": 1, "preempted": 2}, "1 failure (out of memory), 2 drains, 3 steps recomputed"),
        ({"oom": 1, "hang": 2}, "3 failures (hangs: 2, out of memory: 1), 3 steps recomputed"),
    ],
)
def test_screen_counts_drains_apart_from_failures(incidents: dict[str, int], expected: str) -> None:
    """Somebody asked them to leave."""
    document = make_document()
    document["totals"]["incidents"] = incidents
    assert expected in format_screen(document)


def test_screen_without_world_does_not_deny_failures() -> None:
    """One has just ended it."""
    document = make_document()
    document["totals"]["incidents"] = {}
    document["world"] = None
    assert not any("no failures" in line for line in format_screen(document))


def test_screen_shows_which_spares_are_not_ready() -> None:
    """Their workers start; the others go on meanwhile."""
    view = RendezvousStatus(A, True, A, View(3, (A,), A), 3, (B,), preparing=("b",))
    document = make_document(view=view)
    assert (document["spares"], document["preparing"]) == (["b"], ["b"])
    assert "spares: b (its workers start)" in "\n".join(format_screen(document))


def test_screen_without_world_names_what_is_missing() -> None:
    """It names the missing nodes too."""
    view = RendezvousStatus(A, True, A, None, 3, (), ("c",), "2 of 3 nodes are here")
    text = "\n".join(format_screen(make_document(view=view)))
    assert "no world, led by a" in text
    assert "waiting: 2 of 3 nodes are here" in text
    assert "missing: c" in text
    alone = RendezvousStatus(B, generation=3, waiting_reason="it calls a:1")
    assert "no leader" in "\n".join(format_screen(make_document(view=alone)))
    assert "over for all" in "\n".join(
        format_screen(make_document(view=RendezvousStatus(B, end_reason="over for all")))
    )


def test_screen_shows_a_node_that_has_no_sample_yet() -> None:
    """Its agent has just started; zeros would be wrong."""
    asked = replace(make_leader_status(1), node_status=None)
    document = build_document("job", asked, make_members(1), {"n0:1": asked})
    assert document["nodes"][0]["step"] is None
    assert re.search(r"\n +0  n0 +-  +-  -  +-  +-", "\n".join(format_screen(document)))


def test_screen_of_many_nodes_shows_those_with_problems() -> None:
    """The screen stays one screen."""
    lines = format_screen(make_document(1000, trouble=777))
    assert len(lines) < MAX_NODES + 20
    assert any("n777" in line and "disk full" in line for line in lines)
    assert f"and {1000 - MAX_NODES} more" in lines


def test_screen_of_many_nodes_has_few_lines_of_mechanisms() -> None:
    """With --archive each node has one."""
    document = make_document(100)
    for node in document["nodes"]:
        node["compute_check"] = {"step": 5, "is_equal": True, "wrong": 0}
    lines = format_screen(document)
    assert sum("compute check at step 5" in line for line in lines) == MAX_MEMBER_LINES
    assert f"and {100 - MAX_MEMBER_LINES} more of these: --json has all" in lines


# ---- finding agents ------------------------------------------------------------------------------------


def write_endpoint_file(node_dir: Path, run_id: str) -> Path:
    """Write an agent endpoint file as an agent does."""
    node_dir.mkdir(parents=True)
    path = node_dir / constants.AGENT_ENDPOINT_FILE
    path.write_text(
        json.dumps(
            {"run_id": run_id, "address": "127.0.0.1:1", "endpoints": ["127.0.0.1:2"], "key": "00" * 32}
        )
    )
    return path


def find(path: Path | None, **more: Any) -> JobEndpoint:
    """Call `find_job` without flags."""
    return job_status.find_job(path, **{"endpoint": None, "run_id": None, "token_file": None, **more})


def test_find_job_accepts_any_directory_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several jobs the named one is found."""
    for name in [key for key in os.environ if key.startswith(("ELASTIC_", "SLURM", "PET_"))]:
        monkeypatch.delenv(name)
    path = write_endpoint_file(tmp_path / "one" / "n0", "one")
    for place in (tmp_path, tmp_path / "one", tmp_path / "one" / "n0"):
        job = find(place)
        assert (job.run_id, job.addresses) == ("one", ["127.0.0.1:1", "127.0.0.1:2"])
    monkeypatch.setenv(constants.ENV_CKPT_DIR, str(tmp_path))
    assert find(None).run_id == "one"
    write_endpoint_file(tmp_path / "two" / "n0", "two")
    with pytest.raises(UsageError, match=r"2 jobs run here \(one, two\): choose one with --rdzv-id"):
        find(tmp_path)
    assert find(tmp_path, run_id="two").run_id == "two"
    for damage in ("", "[]", "{}", "[" * 9999, '{"run_id": 1, "address": 2, "endpoints": [], "key": ""}'):
        path.write_text(damage)
        assert find(tmp_path).run_id == "two"
    with pytest.raises(UsageError, match=r"--rdzv-endpoint and --rdzv-id"):
        find(tmp_path / "one")
    with pytest.raises(UsageError, match="add --rdzv-id"):
        find(None, endpoint="127.0.0.1:1")
    with pytest.raises(RendezvousLostError, match=r"127\.0\.0\.1:1: .*refused"):
        find(None, endpoint="127.0.0.1:1", run_id="x").query_job()


@pytest.mark.parametrize(
    ("environ", "own", "others"),
    [
        (
            {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"},
            "slurm-9_1-train",
            ["slurm-9_10-train", "slurm-9_2-train", "slurm-9-train", "slurm-90-train"],
        ),
        ({"SLURM_JOB_ID": "9"}, "slurm-9-train", ["slurm-90-train", "slurm-9_1-train"]),
        ({"SLURM_JOB_ID": "9"}, "slurm-9", ["slurm-90"]),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "ELASTIC_RESUME_JOB": "train"},
            "train",
            ["train-2", "trainer"],
        ),
    ],
)
def test_find_job_does_not_match_longer_job_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], own: str, others: list[str]
) -> None:
    """Element 1 of an array is not element 10."""
    for name in [key for key in os.environ if key.startswith(("ELASTIC_", "SLURM", "PET_", "KUBERNETES_"))]:
        monkeypatch.delenv(name)
    for name, value in {constants.ENV_CKPT_DIR: str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    for run_id in others:
        write_endpoint_file(tmp_path / run_id / "n0", run_id)
    write_endpoint_file(tmp_path / own / "n0", own)
    assert find(None).run_id == own


# ---- asking --------------------------------------------------------------------------------------------


class FakeAgent:
    """A status server that replies with any line to clients that hold the key; None: with nothing."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.reply: bytes | None = None
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = listener_address(self.listener)
        self.clients: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()
        stack.callback(self.stop)

    def stop(self) -> None:
        """Let the kernel refuse calls from now on."""
        with contextlib.suppress(OSError):  # stopped before
            self.listener.shutdown(socket.SHUT_RDWR)
        for client in self.clients:
            client.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.clients.append(client)
                if self.reply is not None:
                    self._answer(client, self.reply)
                    client.close()

    def _answer(self, client: socket.socket, reply: bytes) -> None:
        side = protocol.accept(TOKEN, RUN, secrets.token_hex(32))
        next(side)
        try:
            while True:
                client.sendall(side.send(read_line(client)))
        except StopIteration as stop:
            with contextlib.suppress(ConnectionError):  # a client that refuses the reply
                client.sendall(stop.value.final_line + stop.value.signer.sign(reply + b"\n"))


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Close what a test opens; a busy machine may take long to answer."""
    with contextlib.ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_status, "QUERY_TIMEOUT_S", 30.0)
        yield opened


def build_job(stack: contextlib.ExitStack, count: int) -> tuple[list[FakeAgent], tuple[Incarnation, ...]]:
    """Start as many agents of one view; each replies for itself, and the first leads."""
    agents = [FakeAgent(stack) for _ in range(count)]
    members = tuple(Incarnation(f"n{i}", f"disk-{i}", 1, agent.address) for i, agent in enumerate(agents))
    for member, agent in zip(members, agents, strict=True):
        view = RendezvousStatus(member, member is members[0], members[0], View(3, members, members[0]), 3)
        agent.reply = encode_reply(make_status(view, world_size=count))
    return agents, members


def query(agent: FakeAgent) -> dict[str, Any]:
    """Ask a job by one of its agents."""
    return JobEndpoint(RUN, protocol.derive_status_key(TOKEN), [agent.address]).query_job()


def errors(document: dict[str, Any]) -> dict[str, str]:
    """Return the errors of a document by node."""
    return {node["node"]: node["error"] for node in document["nodes"]}


@pytest.mark.slow
def test_query_shows_the_whole_job_whoever_is_asked(stack: contextlib.ExitStack) -> None:
    """A member that refuses calls is shown with the reason, and so is a leader that does."""
    agents, _ = build_job(stack, 3)
    assert errors(query(agents[1])) == {"n0": "", "n1": "", "n2": ""}
    agents[2].stop()
    document = query(agents[0])
    assert errors(document) == {"n0": "", "n1": "", "n2": "Connection refused"}
    assert (document["step"], document["world"]["ranks"]) == (100, 3)
    text = "\n".join(format_screen(document))
    assert "1 node did not answer" in text
    assert "no answer: Connection refused" in text
    agents[0].stop()
    document = query(agents[1])
    assert [bool(error) for error in errors(document).values()] == [True, False, True]
    assert "(as n1 knows it: the leader did not answer)" in format_screen(document)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"x" * 5000, "a line of more than 4000 bytes"),
        (b"not JSON", "its answer is not JSON"),
        (b"[" * 3000, "its answer is not JSON"),
        (b"[]", "its answer is not a status"),
        (b'{"error": "an internal error"}', "an internal error"),
        (b'{"version": 3}', "its status has version '3'; this command reads version 4"),
        (b'{"version": 4, "status": [1, null, 0.0, []]}', "not a list"),
        (
            encode_reply(make_status(RendezvousStatus(A))).replace(b"100", b"-10"),
            "not a whole number in range",
        ),
    ],
    ids=itertools.count(),
)
def test_query_refuses_what_is_no_status_of_a_member(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, reply: bytes, error: str
) -> None:
    """The agent holds the key, but its answer is checked. The other nodes are shown all the same."""
    monkeypatch.setattr(status_server, "MAX_REPLY_BYTES", 4000)
    agents, _ = build_job(stack, 3)
    agents[1].reply = reply
    document = query(agents[0])
    assert [bool(text) for text in errors(document).values()] == [False, True, False]
    assert error in errors(document)["n1"]
    with pytest.raises(RendezvousLostError, match=re.escape(error)):
        query(agents[1])


@pytest.mark.slow
def test_query_ends_although_a_member_is_silent(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit holds for all nodes together."""
    monkeypatch.setattr(job_status, "ALL_NODES_TIMEOUT_S", 0.2)
    agents, _ = build_job(stack, 2)
    agents[1].reply = None
    assert errors(query(agents[0])) == {"n0": "", "n1": "not within 0.2 s"}


def test_query_asks_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand members is asked once."""
    leader = make_leader_status(1000)
    asked: list[str] = []
    peaks: list[int] = []
    full = threading.Barrier(job_status.MAX_PARALLEL_QUERIES)

    def fetch(address: str, *_: object) -> AgentStatus:
        asked.append(address)
        if len(asked) == 1:
            return leader
        if len(asked) <= 1 + job_status.MAX_PARALLEL_QUERIES:
            full.wait(30)  # as many as may run at once wait for each other, and no other has begun
            peaks.append(len(asked) - 1)
            full.wait(30)
        return make_status(RendezvousStatus(Incarnation(address.partition(":")[0], "d", 1, address)))

    monkeypatch.setattr(job_status, "fetch_status", fetch)
    document = JobEndpoint("job", b"", ["n0:1"]).query_job()
    assert set(peaks) == {job_status.MAX_PARALLEL_QUERIES}
    assert sorted(asked) == sorted(member.address for member in make_members(1000))
    assert not any(errors(document).values())


def test_document_names_another_node_at_a_members_address() -> None:
    """It may be a node that started after the leader's answer; its steps are not the member's."""
    asked, nodes = make_leader_status(2), make_members(2)
    answers: dict[str, AgentStatus | str] = {"n0:1": asked, "n1:1": make_status(RendezvousStatus(A))}
    assert errors(build_document("job", asked, nodes, answers))["n1"] == "node a has its address"


def test_document_has_the_incidents_of_the_node_that_knows_most() -> None:
    """A leader with a new disk knows none."""
    asked = make_leader_status(2)
    fresh = AgentStatus(asked.rendezvous, asked.node_status, 0.0, KnownIncidents())
    nodes = make_members(2)
    answers: dict[str, AgentStatus | str] = {"n0:1": fresh, "n1:1": make_status(RendezvousStatus(nodes[1]))}
    assert build_document("job", fresh, nodes, answers)["totals"]["incidents"] == {"signal": 2}
    assert build_document("job", fresh, nodes, {"n0:1": fresh})["totals"]["incidents"] == {}
