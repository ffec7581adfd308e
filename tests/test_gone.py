"""Whom Slurm and Kubernetes prove dead, and whom they do not; and a job that goes on by their word."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.agent import word
from elastic_resume.cluster import gone, pods
from elastic_resume.cluster.asking import AskError
from elastic_resume.cluster.gone import Slurm
from elastic_resume.cluster.slurm_job import MAX_TEXT, Answer
from elastic_resume.cluster.verdict import Verdict
from elastic_resume.errors import ConfigError
from elastic_resume.faults.hosts import Namespaces
from elastic_resume.rendezvous.quorum import Incarnation, Question
from elastic_resume.rendezvous.steps import SchedulerSays
from elastic_resume.testing import Cluster
from tests.hearts import Hearts

pytestmark = pytest.mark.slow

BOOTED = 1795267961  # 2026-11-21T13:32:41 UTC
# As Slurm 22.05 prints it.
NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=1.64 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=(null) NodeAddr={name} NodeHostName={name} "
    "Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=1000 AllocMem=0 FreeMem=13764 "
    "Sockets=4 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=main,high  BootTime={booted} SlurmdStartTime=2026-11-21T23:36:50 "
    "LastBusyTime=2026-11-21T23:36:50 CfgTRES=cpu=4,mem=1000M,billing=4 AllocTRES= "
    "Reason=State=IDLE BootTime=2030-01-01T00:00:00 [root@2026-11-21T23:36:49]"
)
LOST = "DOWN+NOT_RESPONDING"


def node_line(name: str, state: str, booted_s: float = BOOTED) -> str:
    """A line of ``scontrol show node -o``."""
    booted = datetime.fromtimestamp(booted_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return NODE.format(name=name, state=state, booted=booted)


def at(*names: str) -> set[str]:
    """The homes of agents on these nodes."""
    return {f"slurm/{name}/{BOOTED}" for name in names}


@dataclass
class Controller:
    """Answers the two commands, on a clock of its own."""

    jobs: str = "RUNNING|n1"
    nodes: dict[str, tuple[str, float]] = field(default_factory=dict)
    code: int | None = 0
    now: float = 100.0
    asked: list[list[str]] = field(default_factory=list)

    def run(self, words: Sequence[str], timeout_s: float) -> Answer:
        """Answer."""
        assert timeout_s <= 10
        self.asked.append(list(words))
        if words[0] == "squeue":
            return Answer(self.code, self.jobs)
        wanted = words[-1].split(",")
        lines = [node_line(name, *self.nodes[name]) for name in wanted if name in self.nodes]
        return Answer(0, "\n".join(lines))

    def slurm(self, *, down: bool = False) -> Slurm:
        """The oracle of a job that was given three nodes."""
        return Slurm("7", ["n1", "n2", "n3"], down_is_dead=down, run=self.run, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("state", "booted_s", "jobs", "dead"),
    [
        # What becomes of a node that is cut off: Slurm takes it out of the job, its processes train on.
        (LOST, 0, "RUNNING|n1", False),
        ("DOWN*", 0, "RUNNING|n1", False),
        ("DOWN", 0, "RUNNING|n1", False),
        (LOST, 1200, "RUNNING|n1", True),
        ("DOWN", 1200, "RUNNING|n1", True),
        ("IDLE", 1200, "RUNNING|n1", True),
        ("IDLE", 500, "RUNNING|n1", False),  # the same boot, by a clock that was set since
        ("IDLE", -1200, "RUNNING|n1", False),
        ("IDLE+CLOUD+POWERED_DOWN", 0, "RUNNING|n1", True),
        ("IDLE+CLOUD+POWERING_DOWN", 0, "RUNNING|n1", False),
        ("IDLE+CLOUD+POWER_DOWN", 0, "RUNNING|n1", False),
        # It runs the job, or another of its elements, by Slurm's own word.
        ("ALLOCATED", 1200, "RUNNING|n[1-3]", False),
        ("ALLOCATED", 1200, "RUNNING|n1\nRUNNING|n2", False),
        ("IDLE+CLOUD+POWERED_DOWN", 0, "RUNNING|n1\nCOMPLETING|n[2-3]", False),
        ("IDLE+CLOUD+POWERED_DOWN", 0, "RUNNING|n1\nSOMETHING|n2", False),
        ("IDLE", 1200, "RUNNING|n1\nPENDING|\nNODE_FAIL|n2", True),
        # Nothing is understood, or it is another job.
        ("IDLE", 1200, "RUNNING|n4", False),
        ("IDLE", 1200, "RUNNING|n[1", False),
        ("IDLE", 1200, "slurm_load_jobs error: Invalid job id specified", False),
        ("IDLE", 1200, "", False),
        ("IDLE", 1200, "RUNNING|n1".ljust(MAX_TEXT), False),
    ],
)
def test_what_slurm_says_of_lost_nodes(state: str, booted_s: float, jobs: str, dead: bool) -> None:
    """A node that was booted again or switched off holds nobody; one that is only DOWN may."""
    two = dict.fromkeys(("n2", "n3"), (state, BOOTED + booted_s))
    controller = Controller(jobs=jobs, nodes=two)
    verdict = controller.slurm().ask(at("n2", "n3"), at("n1"))
    assert verdict.alone == dead
    assert verdict.dead >= at("n2", "n3") if dead else not verdict.dead & at("n2")
    assert bool(verdict.why) != dead


def test_down_counts_where_the_administrator_says_so() -> None:
    """By name only: a node that is switched on again is not DOWN."""
    controller = Controller(nodes={"n2": (LOST, BOOTED), "n3": (LOST, BOOTED)})
    assert controller.slurm(down=True).ask(at("n2", "n3"), at("n1")) == Verdict(
        frozenset(at("n2", "n3")), True
    )
    controller.nodes["n3"] = ("IDLE+NOT_RESPONDING", BOOTED)
    verdict = controller.slurm(down=True).ask(at("n2", "n3"), at("n1"))
    assert (set(verdict.dead), verdict.alone) == (at("n2"), False)
    assert "n3 is IDLE+NOT_RESPONDING" in verdict.why


def test_everybody_whom_slurm_knows_of_has_to_be_dead() -> None:
    """An element that came while we were cut off, one that ended elsewhere, an allocation's first nodes."""
    rebooted = BOOTED + 1200.0
    for jobs, also in (
        ("RUNNING|n1\nRUNNING|n9", "n9 is the job's"),
        ("RUNNING|n1\nNODE_FAIL|n9", "n9 is unknown"),
        ("RUNNING|n1", "n3 is DOWN"),
    ):
        controller = Controller(jobs=jobs, nodes={"n2": ("IDLE", rebooted), "n3": (LOST, BOOTED)})
        if "n9" in jobs:
            controller.nodes["n3"] = ("IDLE+CLOUD+POWERED_DOWN", BOOTED)
        verdict = controller.slurm().ask(at("n2"), at("n1"))
        assert (set(verdict.dead), verdict.alone) == (at("n2"), False)
        assert also in verdict.why
    both = Controller(nodes={"n2": ("IDLE", rebooted), "n3": ("IDLE", rebooted)}).slurm()
    assert not both.ask({*at("n2"), f"slurm/n1/{BOOTED - 9000}"}, at("n1")).alone


def test_a_node_in_service_without_the_job_is_proof_after_a_while() -> None:
    """What is found there when it is back is ended first; and nobody looked away meanwhile."""
    controller = Controller(nodes={"n2": ("IDLE", BOOTED), "n3": ("ALLOCATED+CLOUD", BOOTED)})
    slurm = controller.slurm()

    def alone_after(seconds: float) -> bool:
        controller.now += seconds
        return slurm.ask(at("n2", "n3"), at("n1")).alone

    assert [alone_after(10) for _ in range(7)] == [False] * 6 + [True]
    controller.nodes["n2"] = ("IDLE+COMPLETING", BOOTED)
    assert not alone_after(10)
    controller.nodes["n2"] = ("IDLE", BOOTED)
    assert [alone_after(20) for _ in range(4)] == [False] * 3 + [True]
    assert not alone_after(31)


def test_many_nodes_are_asked_about_in_parts_and_too_many_not_at_all() -> None:
    """An answer has its limit."""
    names = [f"n{number}" for number in range(2, 132)]
    controller = Controller(nodes=dict.fromkeys(("n3", *names), ("IDLE", BOOTED + 1200.0)))
    assert controller.slurm().ask(at(*names), at("n1")).alone
    assert [len(words[-1].split(",")) for words in controller.asked[1:]] == [50, 50, 30]
    controller.jobs = "RUNNING|n1\nFAILED|m[1-1000]"
    assert "too many" in controller.slurm().ask(at("n2"), at("n1")).why
    controller.code = 1
    assert controller.slurm().ask(at("n2"), at("n1")) == Verdict(why="squeue does not answer")
    assert not controller.slurm().ask({"slurm/n2/x"}, at("n1")).alone


def test_an_agents_home(tmp_path: Path) -> None:
    """A boot of a node, a pod: never the next one."""
    (tmp_path / "stat").write_text(f"cpu  1 2\nbtime {BOOTED}\nprocesses 3\n")
    assert gone.home({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, tmp_path) == f"slurm/n1/{BOOTED}"
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "POD_NAMESPACE": "ml",
        "POD_NAME": "job-0-x",
        "POD_UID": "a-1",
    }
    assert gone.home(pod) == "pod/ml/job-0-x/a-1"
    assert gone.home({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, tmp_path / "none") == ""
    assert gone.home({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "a/b"}, tmp_path) == ""
    assert gone.home({**pod, "POD_UID": ""}) == gone.home({}) == ""
    assert gone.boot_time() > 1e9
    life = Incarnation("a", f"0123@{gone.home(pod)}")
    assert life.home == life.reborn().reborn().home == "pod/ml/job-0-x/a-1"
    assert Incarnation("a", "0123").home == Incarnation("a", "0123+1").home == ""


def test_who_is_asked() -> None:
    """Slurm by the number that covers the job; nobody where it is off or nothing is known."""
    slurm = {"SLURM_JOB_ID": "9", "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-2]"}
    element = {**slurm, "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}
    made = [gone.oracle(slurm, "auto"), gone.oracle(element, "down")]
    assert [one._job for one in made if isinstance(one, Slurm)] == ["9", "8_1"]
    for environ, mode in ((slurm, "off"), ({}, "auto"), ({**slurm, "SLURM_JOB_NODELIST": "n["}, "auto")):
        assert gone.oracle(environ, mode) is None
    assert gone.oracle({"KUBERNETES_SERVICE_HOST": "a", "POD_NAME": "b"}, "auto") is None
    assert [gone.mode_of(text) for text in (None, "auto", "down", "off")] == ["auto", "auto", "down", "off"]
    with pytest.raises(ConfigError, match="--scheduler-word"):
        gone.mode_of("on")


# ---- Kubernetes ----------------------------------------------------------------------------------------


def pod(name: str, uid: str, phase: str = "Running", **more: Any) -> dict[str, Any]:
    """A pod of the job, as the API server tells of it."""
    labels = {"batch.kubernetes.io/job-name": "job", "job-name": "job"}
    state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 1}}
    status = {"phase": phase, "containerStatuses": [{"state": state}] if phase != "Pending" else []}
    meta = {"name": name, "uid": uid, "namespace": "ml", "labels": labels, **more}
    return {"metadata": meta, "status": status}


@dataclass
class Api:
    """An API server over TLS, with the files that a pod finds of it."""

    account: Path
    port: int = 0
    pods: list[dict[str, Any]] = field(default_factory=list)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)
    page: int = 2
    says: tuple[int, bytes] | None = None
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, token: str) -> tuple[int, Any]:
        """Answer one question."""
        self.asked.append(path)
        if token.split() != ["Bearer", "secret-2"]:
            return 401, {}
        parts = urlsplit(path)
        names = {one["metadata"]["name"]: one for one in (*self.elsewhere, *self.pods)}
        name = parts.path.partition("/pods/")[2]
        if not parts.path.startswith("/api/v1/namespaces/ml/pods"):
            return 404, {"reason": "NotFound"}
        if name:
            missing = {"kind": "Status", "reason": "NotFound", "details": {"name": name, "kind": "pods"}}
            return (200, names[name]) if name in names else (404, missing)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        assert query["labelSelector"] == "batch.kubernetes.io/job-name=job"
        assert int(query["limit"]) == pods.PAGE
        start = int(query.get("continue", "a+b/0").rpartition("/")[2])
        end = start + self.page
        following = f"a+b/{end}" if end < len(self.pods) else ""
        return 200, {"metadata": {"continue": following}, "items": self.pods[start:end]}

    @property
    def environ(self) -> dict[str, str]:
        """Of the pod that asks."""
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self.port),
            "POD_NAMESPACE": "ml",
            "POD_NAME": "job-0-a",
            "POD_UID": "u0",
            "https_proxy": "http://127.0.0.1:9",
        }

    def ask(self, *missing: str) -> Verdict:
        """Ask about pods, as NAME/UID, for the first."""
        oracle = pods.oracle(self.environ, self.account)
        assert oracle is not None
        return oracle.ask({f"pod/ml/{one}" for one in missing}, {"pod/ml/job-0-a/u0"})


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate for 127.0.0.1, made here, and its key."""
    directory = tmp_path_factory.mktemp("account")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=api"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.crt"]
    subprocess.run(["openssl", *words.split(), *more], cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture
def api(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A server of this process, which may have to wait for a processor."""
    monkeypatch.setattr(pods, "TIMEOUT_S", 60.0)
    told = Api(certificate)
    (certificate / "token").write_text("secret-2\n")

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, said = told.answer(self.path, self.headers.get("Authorization", ""))
            status, body = told.says or (status, json.dumps(said).encode())
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate / "ca.crt", certificate / "key.pem")
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    told.port = server.server_port
    yield told
    server.shutdown()
    server.server_close()


OWN = pod("job-0-a", "u0")


@pytest.mark.parametrize(
    ("listed", "alone"),
    [
        ([], True),  # deleted, both
        ([pod("job-1-b", "u1", "Failed"), pod("job-2-c", "u2", "Succeeded")], True),
        ([pod("job-1-z", "u9", "Pending")], True),  # its successor waits for a node
        ([pod("job-1-b", "u7", "Failed")], True),
        ([pod("job-1-b", "u1")], False),
        ([pod("job-1-b", "u1", deletionTimestamp="2026-11-21T23:36:49Z")], False),  # its node is not reached
        ([pod("job-1-z", "u9")], False),  # somebody of the job whom we do not know
        ([pod("job-1-b", "u1", "Pending")], False),  # not what was missing
        ([pod("job-1-b", "u1", "Unknown")], False),
        # The control plane wrote the phase of a pod whose node it had lost.
        ([{**pod("job-1-b", "u1"), "status": {**pod("job-1-b", "u1")["status"], "phase": "Failed"}}], False),
    ],
)
def test_what_the_api_server_says_of_lost_pods(api: Api, listed: list[dict[str, Any]], alone: bool) -> None:
    """Deleted, or ended with all of its containers; not what is being deleted, nor a successor that runs."""
    api.pods = [OWN, *listed]
    verdict = api.ask("job-1-b/u1", "job-2-c/u2")
    assert verdict.alone == alone, verdict
    assert "pod/ml/job-2-c/u2" in verdict.dead
    assert ("pod/ml/job-1-b/u1" in verdict.dead) == (alone or listed[0]["metadata"]["uid"] == "u9")
    assert bool(verdict.why) != alone


def test_lists_have_pages_and_names_are_asked_for(api: Api) -> None:
    """A pod that has lost its label is found by its name; another of its name is not the one that was."""
    api.pods = [OWN, *[pod(f"job-{n}-x", f"v{n}", "Failed") for n in range(5)]]
    api.elsewhere = [pod("job-1-b", "u1"), pod("job-2-c", "u3")]
    verdict = api.ask("job-1-b/u1", "job-2-c/u2", "job-4-x/v4")
    assert verdict.dead == {"pod/ml/job-2-c/u2", "pod/ml/job-4-x/v4"}
    assert (verdict.alone, verdict.why) == (False, "job-1-b may be alive")
    assert sum("labelSelector" in path for path in api.asked) == 3


@pytest.mark.parametrize(
    "says",
    [
        *((403, b"{}"), (500, b"{}"), (404, b"{}"), (200, b"[]"), (200, b"<html>"), (200, b"{}")),
        (200, json.dumps({"items": [{}], "metadata": {}, "kind": "PodList"}).encode()),
        (200, json.dumps(pod("job-0-a", "u0")).encode()),
        (302, b""),
    ],
)
def test_what_is_no_answer_proves_nothing(api: Api, says: tuple[int, bytes]) -> None:
    """Whatever it is, nobody is dead, and somebody is told why."""
    api.pods, api.says = [OWN], says
    verdict = api.ask("job-1-b/u1")
    assert (verdict.dead, verdict.alone) == (frozenset(), False)
    assert verdict.why.startswith("the API server")


WORDS = st.sampled_from(
    [
        *("metadata", "status", "labels", "name", "uid", "phase", "job-name", "containerStatuses"),
        *("state", "running", "Failed", "Running"),
    ]
)
JSON = st.recursive(
    st.none() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=15,
)


CONTAINERS = st.lists(
    st.fixed_dictionaries({"state": st.dictionaries(WORDS, JSON, max_size=2)}) | JSON, max_size=3
)


def ending_of(told: Any) -> str:
    """What a pod's own words make of it."""
    try:
        pod = pods.read_pod(told)
    except AskError:
        return "no answer"
    assert (pod.name, pod.uid) == (told["metadata"]["name"], told["metadata"]["uid"])
    return "has ended" if pod.has_ended else "waits" if pod.waits else "lives"


@given(JSON | CONTAINERS, st.sampled_from(["Failed", "Succeeded", "Running", "Pending", "Unknown"]))
def test_a_pod_has_ended_where_its_phase_says_so_and_nothing_runs(containers: Any, phase: str) -> None:
    """Of whatever types what is said of its containers is."""
    listed = containers if isinstance(containers, list) else []
    states = [one.get("state") for one in listed if isinstance(one, dict)]
    runs = any(isinstance(state, dict) and "running" in state for state in states)
    ends = {"Failed": "has ended", "Succeeded": "has ended", "Pending": "waits"}
    told = {
        "metadata": {"name": "a", "uid": "u"},
        "status": {"phase": phase, "containerStatuses": containers},
    }
    assert ending_of(told) == ("lives" if runs else ends.get(phase, "lives"))


@given(JSON, JSON)
def test_json_without_name_uid_and_phase_is_no_pod(told: Any, status: Any) -> None:
    """A dictionary of them is one, whatever else stands there."""
    phase = status.get("phase") if isinstance(status, dict) else None
    said = ending_of({"metadata": {"name": "a", "uid": "u", "labels": told}, "status": status})
    assert (said == "no answer") == (not isinstance(phase, str))
    meta, state = (told.get(key) if isinstance(told, dict) else None for key in ("metadata", "status"))
    whole = (
        isinstance(meta, dict)
        and isinstance(state, dict)
        and isinstance(state.get("phase"), str)
        and all(isinstance(meta.get(key), str) and meta[key] for key in ("name", "uid"))
    )
    assert (ending_of(told) == "no answer") == (not whole)


@given(
    JSON | st.dictionaries(st.sampled_from(pods.LABELS), JSON | st.sampled_from(["job-1", "a b", "x" * 64]))
)
def test_a_pods_job_is_found_by_a_label_of_it_or_not_at_all(labels: Any) -> None:
    """The label must be one that a selector can hold."""
    known = labels if isinstance(labels, dict) else {}
    fit = [name for name in pods.LABELS if re.fullmatch(r"[A-Za-z0-9._-]{1,63}", str(known.get(name, "")))]
    fit = [name for name in fit if isinstance(known[name], str)]
    try:
        found = pods.selector_of({"metadata": {"labels": labels}})
    except AskError:
        found = ""
    assert found == (f"{fit[0]}={known[fit[0]]}" if fit else "")


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["NodeName=", "State=", "n1", " ", "*", "+"])).map("".join)
)
def test_any_text_is_nodes_or_none(text: str) -> None:
    """What Slurm prints is looked at, not trusted."""
    for name, machine in gone.machines(text).items():
        assert name
        assert machine.states


def test_who_is_not_ours_proves_nothing(api: Api, tmp_path: Path) -> None:
    """Not listed itself, of another namespace, by an old token, under a certificate of somebody else."""
    oracle = pods.oracle(api.environ, api.account)
    assert oracle is not None
    api.pods, api.elsewhere = [pod("job-1-z", "u5", "Failed")], [OWN]
    assert "does not list" in api.ask("job-1-b/u1").why
    api.pods = [OWN]
    assert not oracle.ask({"pod/other/job-1-b/u1"}, {"pod/ml/job-0-a/u0"}).alone
    assert not oracle.ask({"pod/ml/job-1-b/u1"}, {"slurm/n1/5"}).alone
    assert oracle.ask({"pod/ml/job-1-b/u1"}, {"pod/ml/job-0-a/u0"}).alone
    (api.account / "token").write_text("secret-1")
    assert "401" in oracle.ask({"pod/ml/job-1-b/u1"}, {"pod/ml/job-0-a/u0"}).why
    (api.account / "token").write_text("two\nlines")
    assert not oracle.ask({"pod/ml/job-1-b/u1"}, {"pod/ml/job-0-a/u0"}).alone
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=a -keyout k -out ca.crt"
    )
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "token").write_text("secret-2")
    other = pods.oracle(api.environ, tmp_path)
    assert other is not None
    assert "CERTIFICATE_VERIFY_FAILED" in other.ask({"pod/ml/job-1-b/u1"}, {"pod/ml/job-0-a/u0"}).why
    (tmp_path / "ca.crt").write_text("none")
    assert pods.oracle(api.environ, tmp_path) is None
    assert pods.oracle(api.environ, tmp_path / "no-account") is None


# ---- who asks ------------------------------------------------------------------------------------------

HERE = Incarnation("a", "1@slurm/n1/5")
LOST_ONE = Incarnation("b", "2@slurm/n2/5")
NAMELESS = Incarnation("c", "3")


@dataclass
class Waiting:
    """An agent that waits, and what it is told."""

    question: Question | None
    verdicts: list[Verdict | Callable[[], Verdict]]
    says: list[SchedulerSays] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def scheduler_says(self, word: SchedulerSays) -> None:
        """Keep it."""
        self.says.append(word)

    def ask(self, missing: Any, here: Any) -> Verdict:
        """Give the next verdict."""
        assert (set(missing), set(here)) == ({LOST_ONE.home}, {HERE.home})
        verdict = self.verdicts.pop(0)
        if not self.verdicts:
            self.done.set()
        return verdict() if callable(verdict) else verdict

    def live(self) -> None:
        """Be asked for, until all verdicts are spent."""
        with word.asked(self, self, say=self.lines.append, tell=self.tell):
            assert self.done.wait(60)

    def tell(self, kind: str, **fields: Any) -> None:
        """Keep an event."""
        self.events.append({"event": kind, **fields})


def test_who_waits_asks_again_and_says_once_why_there_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved of some is passed on too; an answer that came late is not."""
    for name, value in (("LOOK_S", 0.01), ("EVERY_S", 0.01), ("CLOSE_S", 60.0)):
        monkeypatch.setattr(word, name, value)
    now = 100.0  # no answer is late because this process had to wait
    monkeypatch.setattr(word, "time", SimpleNamespace(monotonic=lambda: now))
    proof = Verdict(frozenset({LOST_ONE.home}), True)
    doubt = Verdict(why="n2 is DOWN")

    def late() -> Verdict:
        nonlocal now
        now += word.FRESH_S + 0.1
        return proof

    question = Question(frozenset({LOST_ONE}), frozenset({HERE}))
    waiting = Waiting(question, [doubt, doubt, late, proof])
    waiting.live()
    assert waiting.says == [SchedulerSays(question, frozenset({LOST_ONE}), True)]
    assert [event["event"] for event in waiting.events] == ["scheduler-word"]
    said = " ".join(waiting.lines)
    assert len(waiting.lines) == 2
    assert "n2 is DOWN" in said
    assert "took longer" in said
    nameless = Waiting(Question(frozenset({NAMELESS}), frozenset({HERE})), [])
    with word.asked(nameless, nameless, say=lambda _: nameless.done.set(), tell=nameless.tell):
        assert nameless.done.wait(60)
    assert not nameless.says


COMMAND = """#!/bin/sh
cat "$FAKE_SLURM/$(basename "$0")"
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_the_last_of_three_goes_on_when_slurm_says_that_the_others_were_booted_again(tmp_path: Path) -> None:
    """They fall silent; it waits, though Slurm calls them DOWN; the proof comes. Then one of them is back."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("squeue", "scontrol"):
        (programs / name).write_text(COMMAND)
        (programs / name).chmod(0o755)
    now_s = gone.boot_time()
    (tmp_path / "squeue").write_text("RUNNING|n0\n")
    (tmp_path / "scontrol").write_text("\n".join(node_line(name, LOST, now_s) for name in ("n1", "n2")))
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-2]", "FAKE_SLURM": str(tmp_path)}
    env["PATH"] = f"{programs}:{os.environ['PATH']}"
    flags = ["--node-timeout", "1", "--no-warm", "--settle", "60"]
    hosts = Namespaces(3)
    cluster = Cluster(tmp_path, nodes=3, min_nodes=1, flags=flags, env=env, hosts=hosts)
    with hosts, cluster:
        hearts = Hearts(cluster)
        hearts.start(only=[])
        for index in range(3):
            cluster.start_node(index, env={"SLURMD_NODENAME": f"n{index}"})
        now = hearts.wait([0, 1, 2])
        for index in (1, 2):
            cluster.cut(index)
        cluster.kill_nodes([1, 2])
        hearts.wait_says(0, f"n1 is {LOST}; n2 is {LOST}")
        # One that had to wait for a processor may have been lost for a moment, and cost another generation.
        assert not [life for life in hearts.lives() if life.generation > now and life.world_size == 1]
        now = max(now, hearts.newest())
        (tmp_path / "scontrol").write_text(
            "\n".join(node_line(name, "DOWN", now_s + 1200) for name in ("n1", "n2"))
        )
        now = hearts.wait([0], now)
        assert now > 1000
        assert {event["alone"] for event in cluster.events_of(0, "scheduler-word")} == {True}
        cluster.restore(1)
        cluster.start_node(1, env={"SLURMD_NODENAME": "n1"})
        hearts.wait([0, 1], now)
        hearts.stop()
        assert set(cluster.wait_exit(only=[0, 1])) == {0}
        hearts.check_one_world_at_a_time()
