"""What a pod knows from its environment, and which names and sizes Kubernetes takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.cluster import kubernetes
from elastic_resume.errors import ConfigError

POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HOSTNAME": "train-1",
    "JOB_COMPLETION_INDEX": "1",
    "ELASTIC_RESUME_JOB": "train",
    "ELASTIC_RESUME_NODES": "2:5",
    "ELASTIC_RESUME_SERVICE": "train",
    "ELASTIC_RESUME_WORKERS": "8",
    "ELASTIC_RESUME_TERMINATION_GRACE_S": "120",
    "POD_NAMESPACE": "ml",
    "POD_IP": "10.1.2.3",
    "POD_NAME": "train-1-x7k2p",
    "POD_UID": "6f1c",
}


def read(tmp_path: Path, hosts: str = "", **changes: str | None) -> kubernetes.Pod | None:
    """Read `POD` with changes; None takes a variable away."""
    path = tmp_path / "hosts"
    path.write_text(hosts)
    environ = {**POD, **{name: value for name, value in changes.items() if value is not None}}
    for name in [name for name, value in changes.items() if value is None]:
        del environ[name]
    return kubernetes.read(environ, path)


def test_a_pod_knows_its_peers_and_where_they_are(tmp_path: Path) -> None:
    """The first three are candidates; a node is named by its index, not by its pod's random name."""
    pod = read(tmp_path)
    assert pod is not None
    assert (pod.name, pod.index, pod.least, pod.nodes) == ("train-1", 1, 2, 5)
    assert pod.peers == ("train-0", "train-1", "train-2", "train-3", "train-4")
    assert pod.candidates == tuple(f"train-{index}.train.ml.svc.cluster.local:29400" for index in range(3))
    assert (pod.address, pod.workers, pod.grace_s) == ("10.1.2.3", 8, 120.0)
    assert (pod.pod, pod.uid) == ("train-1-x7k2p", "6f1c")


def test_kubelets_own_line_tells_service_namespace_and_domain(tmp_path: Path) -> None:
    """A cluster's domain need not be cluster.local; nothing but the index and the host name is needed."""
    lines = "127.0.0.1 localhost\n10.1.2.3\ttrain-1.meet.prod.svc.corp.example\ttrain-1\n"
    pod = read(tmp_path, lines, ELASTIC_RESUME_JOB=None, ELASTIC_RESUME_SERVICE=None, POD_NAMESPACE=None)
    assert pod is not None
    assert pod.candidates[0] == "train-0.meet.prod.svc.corp.example:29400"


def test_in_a_jobset_the_jobs_name_is_not_the_services(tmp_path: Path) -> None:
    """JobSet calls the Job SET-ROLE-0, and the Service SET."""
    pod = read(tmp_path, ELASTIC_RESUME_JOB="train-node-0", HOSTNAME="train-node-0-1")
    assert pod is not None
    assert pod.candidates[2] == "train-node-0-2.train.ml.svc.cluster.local:29400"


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"])
def test_elsewhere_there_is_no_pod(tmp_path: Path, missing: str) -> None:
    """Outside of Kubernetes, and in a pod that is none of an Indexed Job."""
    assert read(tmp_path, "", **{missing: None}) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("JOB_COMPLETION_INDEX", "one"),
        ("JOB_COMPLETION_INDEX", "5"),
        ("ELASTIC_RESUME_NODES", "3:2"),
        ("ELASTIC_RESUME_NODES", "0"),
        ("ELASTIC_RESUME_NODES", "999999"),
        ("ELASTIC_RESUME_JOB", "Train"),
        ("ELASTIC_RESUME_WORKERS", "0"),
        ("ELASTIC_RESUME_TERMINATION_GRACE_S", "2m"),
        ("ELASTIC_RESUME_TERMINATION_GRACE_S", "nan"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, variable: str, value: str) -> None:
    """And what it holds is shown."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "", **{variable: value})
    assert variable in str(error.value)
    assert value in str(error.value)


def test_without_a_number_of_nodes_there_are_no_peers(tmp_path: Path) -> None:
    """Then flags have to say it."""
    pod = read(tmp_path, ELASTIC_RESUME_NODES=None)
    assert pod is not None
    assert (pod.nodes, pod.candidates) == (None, ())


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("ER_1", 3), ("1st", 3), ("-a", 3), ("a-", 3), ("", 3), ("a.b", 3), ("x" * 64, 1), ("x" * 61, 11)],
)
def test_names_that_kubernetes_refuses_are_refused(name: str, nodes: int) -> None:
    """The Job's, the Service's, or the host name of its last pod."""
    with pytest.raises(ConfigError):
        kubernetes.check_name(name, nodes)


def test_the_longest_name_leaves_room_for_the_last_index() -> None:
    """61 characters with ten pods, 60 with eleven."""
    kubernetes.check_name("x" * 61, 10)
    kubernetes.check_name("x" * 60, 11)


@pytest.mark.parametrize(
    ("text", "found"),
    [("4Gi", 4 << 30), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9), ("7", 7), ("1e9", 10**9)],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, found: int) -> None:
    """Binary and decimal units, fractions, exponents."""
    assert kubernetes.size_bytes(text, "--memory") == found


@pytest.mark.parametrize("text", ["lots", "4GB", "4gi", "-1Gi", "512m", "0", "Gi", "9Ei", "1e99", "٤Gi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """512m is a quantity to Kubernetes: half a byte."""
    with pytest.raises(ConfigError, match="--memory"):
        kubernetes.size_bytes(text, "--memory")


@given(st.text(max_size=70), st.integers(1, 10_000))
def test_a_name_that_passes_is_a_label_with_every_index(name: str, nodes: int) -> None:
    """Whatever is passed, what comes out is a label or a ConfigError."""
    try:
        kubernetes.check_name(name, nodes)
    except ConfigError:
        return
    assert kubernetes.is_label(name)
    assert kubernetes.is_label(f"{name}-{nodes - 1}")
