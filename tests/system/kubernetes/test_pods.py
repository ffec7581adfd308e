"""The Job of deploy/kubernetes on simulated machines, and the rules of its controller."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_resume import constants
from elastic_resume.testing import virtual_network
from tests.support import manifests
from tests.support.job_controller import JobController
from tests.support.manifests import render_manifest
from tests.support.paths import ROOT
from tests.support.pods import SimulatedPods, expand_variables

PAGE = ROOT / "docs" / "guides" / "kubernetes.md"
TOKEN = {"train-token": {"token": "a secret that all pods share, and nobody else"}}
STEP = "STEP "


def spec() -> dict[str, Any]:
    """The spec of the Job that ships."""
    return manifests.job_spec(manifests.load_documents())


# ---- the controller's rules ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "disrupted", "verdict"),
    [
        (constants.EXIT_JOB_ERROR, False, "job failed"),
        (constants.EXIT_USAGE, False, "job failed"),
        (constants.EXIT_REQUEUE, False, "replace"),
        (143, False, "replace"),
        (137, False, "replace"),  # out of memory, or killed after the grace
        (constants.EXIT_JOB_ERROR, True, "replace"),  # an evicted pod may end with anything
        (137, True, "replace"),
        (constants.EXIT_SUCCESS, False, "job done"),
    ],
)
def test_each_exit_code_does_what_the_docs_say(code: int, disrupted: bool, verdict: str) -> None:
    """The policies of the manifest, by the model of the controller."""
    assert JobController(spec()).handle_pod_end(1, {"agent": code}, disrupted=disrupted) == verdict


def test_the_table_of_exit_codes_says_what_the_policies_do() -> None:
    """Each row of docs/guides/kubernetes.md."""
    rows = re.findall(r"^\| (\d+)[^|]*\|[^|]*\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    assert {int(code) for code, _ in rows} >= {0, 1, 2, constants.EXIT_REQUEUE, 137, 143}
    for code, told in rows:
        job = JobController(spec())
        verdict = job.handle_pod_end(1, {"agent": int(code)})
        words = {"job done": "the Job is done", "job failed": "FailJob", "replace": "a new pod|as 137"}
        assert re.search(words[verdict], told), f"{code}: {told}, and it is {verdict}"
        assert job.failures_by_index.total() == ("counts" in told or "as 137" in told)


@pytest.mark.parametrize(("code", "free"), [(143, True), (constants.EXIT_REQUEUE, True), (137, False)])
def test_only_ends_that_are_nobodys_fault_are_free(code: int, free: bool) -> None:
    """Others count: 20 for each index, and as many indexes may fail as training can do without."""
    job = JobController(spec())
    verdicts = [job.handle_pod_end(1, {"agent": code}) for _ in range(21)]
    assert verdicts[:20] == ["replace"] * 20
    assert verdicts[20] == ("replace" if free else "index failed")
    assert job.outcome == ""
    if not free:
        assert [job.handle_pod_end(2, {"agent": code}) for _ in range(21)][-1] == "job failed"


def test_without_a_success_policy_all_have_to_end_well() -> None:
    """As before Kubernetes 1.31, where 75 counts, so that a late node's waiting has an end."""
    old = spec()
    manifests.adapt_to_kubernetes_1_29(old)
    job = JobController(old)
    assert [job.handle_pod_end(index, {"agent": 0}) for index in (0, 1)] == ["index done", "index done"]
    verdicts = [job.handle_pod_end(2, {"agent": constants.EXIT_REQUEUE}) for _ in range(21)]
    assert verdicts[-1] == "job failed"


def test_a_job_that_is_over_stays_so() -> None:
    """Whatever its other pods end with."""
    job = JobController(spec())
    assert job.handle_pod_end(0, {"agent": 0}) == "job done"
    assert job.handle_pod_end(1, {"agent": constants.EXIT_JOB_ERROR}) == "job done"


def test_variables_are_filled_in_as_kubernetes_does() -> None:
    """An unknown one stays as it is, and $$ is how to write a dollar."""
    assert expand_variables("$(A)-$(B)-$$(A)-$A-${A}", {"A": "1"}) == "1-$(B)-$(A)-$A-${A}"


# ---- kubelet's part, with containers that take no time ---------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _machines() -> None:
    why = virtual_network.unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)


def in_place_of_the_agent(text: str, does: str) -> str:
    """The manifest, with a shell's line as its container."""
    documents = list(yaml.safe_load_all(text))
    documents[1]["spec"]["template"]["spec"]["containers"][0].update(
        command=["sh", "-c", does.replace("$", "$$")], args=[]
    )
    return yaml.safe_dump_all(documents)


@pytest.mark.cluster
def test_a_container_sees_what_its_manifest_says(tmp_path: Path) -> None:
    """Variables, names, disks and their sizes, DNS when it comes; of a new pod all but the name is new."""
    look = (
        "trap 'exit 143' TERM; "  # process 1 drops what it does not take
        "echo $$ $(hostname) $ELASTIC_RESUME_JOB $JOB_COMPLETION_INDEX $POD_IP $ELASTIC_RESUME_TOKEN; "
        "df --block-size=1M --output=size /dev/shm /checkpoints | tail -n 2; ls /checkpoints | wc -l; "
        "touch /checkpoints/mine; until getent hosts train-1.train.ml.svc; do sleep 0.01; done; "
        "getent hosts train-0; while :; do sleep 0.01; done"
    )
    text = in_place_of_the_agent(render_manifest("1:2"), look)
    with SimulatedPods(text, tmp_path, secrets=TOKEN, namespace="ml") as pods:
        pods.dns_paused = True
        pods.start()
        first = pods.newest_pod(0)
        pods.wait(lambda: len(pods.read_log(first).splitlines()) == 4, "what it sees")
        lines = pods.read_log(first).splitlines()
        assert lines[0] == f"1 train-0 train 0 {first.address} {TOKEN['train-token']['token']}"
        assert [int(line) for line in lines[1:4]] == [128, 30, 0]
        pods.update_dns()
        pods.wait(lambda: len(pods.read_log(first).splitlines()) == 6, "DNS")
        assert pods.read_log(first).splitlines()[4].split()[0] == pods.newest_pod(1).address
        assert pods.read_log(first).splitlines()[5].split()[0] == first.address
        assert pods.wait_for_exit(pods.evict(0)) == 143
        second = pods.wait(
            lambda: pods.newest_pod(0) if pods.newest_pod(0) is not first else None, "a new pod"
        )
        pods.wait(lambda: len(pods.read_log(second).splitlines()) == 6, "the same of the new pod")
        assert pods.read_log(second).splitlines()[3] == "0"
        assert second.address != first.address
        assert second.name != first.name
        assert pods.job.failures_by_index.total() == 0


@pytest.mark.cluster
def test_doctor_in_a_pod_of_a_jobset_knows_its_peers(tmp_path: Path) -> None:
    """Its Job is called SET-node-0, its Service SET; names lead to both pods, one of them this one."""
    jobset = yaml.safe_load(render_manifest("1:2", files=manifests.JOBSET))
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    look = "until getent hosts train-node-0-1.train.default.svc; do sleep 0.01; done"
    look += "; test $JOB_COMPLETION_INDEX = 0 && elastic-resume doctor; echo code $?; sleep 600"
    container.update(command=["sh", "-c", look], args=[])
    with SimulatedPods(yaml.safe_dump(jobset), tmp_path, secrets=TOKEN) as pods:
        pods.start()
        pods.wait(lambda: "code " in pods.read_log(pods.newest_pod(0)), "what doctor says")
        table = pods.read_log(pods.newest_pod(0)).partition(
            "Nothing found that would make a start fail.\n\n"
        )[2]
        lines = dict(line.split(maxsplit=1) for line in table.splitlines() if line)
        assert lines["code"] == "0"
        assert lines["nodes"].split("  ")[0] == "1 to 2"
        assert lines["train-node-0-0.train.default.svc"].startswith(
            f"{pods.newest_pod(0).address} (this node)"
        )
        assert lines["train-node-0-1.train.default.svc"].startswith(pods.newest_pod(1).address)
        assert lines["grace"].startswith("120 s from SIGTERM to SIGKILL, of which workers get 60")
        assert "volume of 31" in lines["checkpoints"]
        assert TOKEN["train-token"]["token"] not in pods.read_log(pods.newest_pod(0))


@pytest.mark.cluster
def test_real_exit_codes_meet_the_policies(tmp_path: Path) -> None:
    """A container that ends by itself, one that hears no SIGTERM, one that takes too much memory."""
    control = tmp_path / "control"
    control.mkdir()
    (control / "hog").write_text("x = bytearray(b'x' * (300 << 20))")
    does = (
        "wait() { until test -e /control/$1; do sleep 0.01; done; }; case $JOB_COMPLETION_INDEX in "
        "0) wait never;; "
        "1) mkdir /control/took && python3 /control/hog; wait never;; "
        "2) wait fault; exit 1;; esac"
    )
    text = in_place_of_the_agent(render_manifest(memory="128Mi", shm="64Mi", disk="10Mi", grace_s=1), does)
    with SimulatedPods(text, tmp_path / "logs", secrets=TOKEN, bind={"/control": control}) as pods:
        pods.start()
        deaf, greedy = pods.newest_pod(0), pods.newest_pod(1)
        assert (pods.wait_for_exit(greedy), greedy.reason) == (137, "OOMKilled")
        pods.wait(lambda: pods.newest_pod(1) is not greedy, "its replacement")
        assert pods.job.failures_by_index == {1: 1}
        (control / "fault").touch()
        assert pods.wait_for_exit(pods.newest_pod(2)) == 1
        assert pods.job.outcome == "job failed"
        assert pods.wait_for_exit(deaf) == 137  # all others are told to end; it heard nothing


@pytest.mark.cluster
def test_by_default_kubernetes_would_have_two_pods_of_one_index(tmp_path: Path) -> None:
    """Without podReplacementPolicy: Failed the new one starts while the old one still ends."""
    does = "trap '' TERM; while :; do sleep 0.01; done"
    text = in_place_of_the_agent(render_manifest("1:1", memory="128Mi", shm="64Mi"), does)
    with SimulatedPods(text, tmp_path, secrets=TOKEN) as pods:
        pods.start()
        old = pods.delete(0)
        pods.wait(lambda: old.process.poll() is None or None, "a look")
        assert pods.newest_pod(0) is old
    with SimulatedPods(text.replace("podReplacementPolicy: Failed", ""), tmp_path, secrets=TOKEN) as pods:
        pods.start()
        old = pods.delete(0)
        pods.wait(lambda: pods.newest_pod(0) is not old, "another one")
        assert old.exit_code is None
