"""The jobs of deploy/kubernetes with real agents, each in namespaces of its own with its pod's environment.

What a cluster does to pods costs no step. Kubelet's part is here in a few lines: variables, host name,
volumes in memory, names in DNS, SIGTERM. Images, users, limits and the controllers are not simulated.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from elastic_resume import constants, events
from elastic_resume.events import Event
from elastic_resume.testing import virtual_network
from elastic_resume.units import parse_kubernetes_quantity
from tests.support import manifests, notices
from tests.support.agent_fork_server import ShimAgentServer
from tests.support.machines import MB, Machines
from tests.support.paths import ROOT, SCRIPTS
from tests.support.processes import wait_for

T = TypeVar("T")
ASKED_STEP = 25
"""In so many steps of 0.1 s all agents learn that the script asks for notices; each looks once a second."""
LIMIT_S = 120.0  # of one wait: the first agent waits until its fork server has imported torch


class Pods(contextlib.AbstractContextManager["Pods"]):
    """The pods of a Job, with a small training as their script."""

    def __init__(
        self,
        directory: Path,
        documents: list[dict[str, Any]],
        *,
        has_claim: bool = False,
        words: Sequence[str] = (),
    ) -> None:
        """``documents`` end with the Job, or its JobSet.

        With a claim all pods see one directory; otherwise each has a volume of its own, which is the harder
        case. ``words`` are those of the container, in place of the small training.
        """
        self.documents, self.name = documents, manifests.job_name(documents)
        self.job = manifests.job_spec(documents)
        container = manifests.container(self.job)
        tini, dashes, *command = container["command"]
        assert (tini, dashes) == ("tini", "--")  # process 1 of a machine does what it does
        train = [str(SCRIPTS / "train.py"), "--step-log", str(directory / "steps")]
        train += ["--notices", str(directory / "notices")]
        self._command = [*command, *(words or [*train, "--epochs", "10000", "--step-delay", "0.1"])]
        sizes = {
            one["name"]: one.get("emptyDir", {"sizeLimit": "4Gi"})["sizeLimit"]
            for one in self.job["template"]["spec"]["volumes"]
        }
        disks = {
            mount["mountPath"]: parse_kubernetes_quantity("sizeLimit", sizes[mount["name"]])
            for mount in container["volumeMounts"]
        }
        claim = directory / "claim"
        claim.mkdir()
        if has_claim:
            del disks["/checkpoints"]
        # One more machine than pods, for a Job that grows: each is named after its pod.
        self.hosts = [f"{self.name}-{index}" for index in range(self.job["completions"] + 1)]
        self.indices = range(self.job["completions"])
        self._machines = Machines(
            self.hosts,
            disks={**disks, "/tmp": 256 * MB},  # noqa: S108  the pod's own
            bind={str(directory): directory, **({"/checkpoints": claim} if has_claim else {})},
        )
        self._claim = claim if has_claim else None
        self._directory = directory
        self.env = {  # of the image, and what makes a test short
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "ELASTIC_RESUME_SNAPSHOT_EVERY": "1",
            constants.ENV_STEP_MARK_S: "0",
        }
        self._agents = ShimAgentServer(directory, self.env)
        self.env["PATH"] = f"{self._agents.bin_dir}:{self.env['PATH']}"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        self._agents.close()
        self._machines.close()

    def start(self, index: int, *, knows_peers: bool = True) -> None:
        """Start the agent of a pod that is down or whose container has ended."""
        if not self._machines.is_up(index):
            self._machines.boot(index, new_address=True)
        self.update_dns(*(self.indices if knows_peers else [index]))
        env = manifests.pod_environment(self.documents, index, self._machines.address(index))
        with open(self._log(index), "ab") as log:
            self.processes[index] = self._machines.run(
                index, self._command, env={**self.env, **env}, cwd=ROOT, stdout=log, stderr=log
            )

    def grow(self) -> None:
        """Start one more pod, as after a patch of completions and parallelism; its template stays."""
        self.indices = range(len(self.hosts))
        self.start(self.indices[-1])

    def update_dns(self, *known: int) -> None:
        """Let every pod resolve these pods; Kubernetes writes a pod's own short name to its /etc/hosts."""
        subdomain = self.job["template"]["spec"]["subdomain"]
        for index, host in enumerate(self.hosts):
            names = {
                f"{self.hosts[one]}.{subdomain}{rest}": self._machines.address(one)
                for one in known
                for rest in ("", f".{manifests.NAMESPACE}.svc")
            }
            self._machines.set_known_names(index, {**names, host: self._machines.address(index)})

    def delete(self, *indices: int) -> None:
        """Delete pods as an eviction does; check that the Job replaces them for nothing."""
        for index in indices:
            self.processes[index].send_signal(signal.SIGTERM)
        for index in indices:
            code = self.processes[index].wait(self.job["template"]["spec"]["terminationGracePeriodSeconds"])
            code = code if code >= 0 else constants.EXIT_SIGNAL_BASE - code
            assert code == constants.EXIT_SIGNAL_BASE + signal.SIGTERM, self.read_log(index)
            assert manifests.failure_action(self.job, code) == "Ignore"

    def remove(self, index: int) -> None:
        """Remove a pod, and its volumes with it; peers see no connection end."""
        self._machines.poweroff(index)

    def node_dir(self, index: int) -> Path:
        """Return the node's directory in the volume of a pod."""
        volume = self._claim or self._machines.path(index, "/checkpoints")
        return volume / self.name / self.hosts[index]

    def events(self, index: int, kind: str) -> list[Event]:
        """Return a pod's events of a kind, as far as its volume remembers."""
        if self._claim is None and not self._machines.is_up(index):
            return []
        found = events.read(self.node_dir(index) / constants.EVENTS_FILE)
        return [event for event in found if event["event"] == kind]

    def newest_step(self, index: int) -> int:
        """Return the newest step that a pod's worker has finished."""
        return max((int(event["step"]) for event in self.events(index, "step")), default=0)

    def read_log(self, index: int) -> str:
        """Return what the agents of an index have printed; nothing before the first."""
        log = self._log(index)
        return log.read_text(errors="replace") if log.exists() else ""

    def check_notice(self, generation: int, index: int, last: int) -> None:
        """Check that all ranks had a deleted pod's notice at the same step; ``last`` is its last step."""
        directory = self._directory / "notices"
        step, notice = notices.check_same(
            directory, generation, ranks=3, nodes=[self.hosts[index]], reason="SIGTERM"
        )
        assert step <= last <= step + 1
        given = self.job["template"]["spec"]["terminationGracePeriodSeconds"]
        assert 0 < notice["seconds"] <= given / 2

    def wait_world(self, size: int, after: int = 0) -> int:
        """Wait until a world of this size has trained beyond a step; check that it repeated none."""

        def find() -> Event | None:  # rank 0 reports for all
            resumes = [event for index in self.indices for event in self.events(index, "resume")]
            resume = max(resumes, key=lambda event: event["generation"], default=None)
            if resume is None or (resume["world_size"], resume["step"] >= after) != (size, True):
                return None
            return resume if max(map(self.newest_step, self.indices)) > resume["step"] + 2 else None

        resume = self.wait(find, f"a world of {size} after step {after}")
        assert resume["recomputed_steps"] == 0
        return max(map(self.newest_step, self.indices))

    def wait(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait for a condition; the error has the newest output of every pod."""
        try:
            found: T = wait_for(condition, what, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(
                "\n".join([str(error), *(self.read_log(i)[-2500:] for i in self.indices)])
            ) from None
        return found

    def _log(self, index: int) -> Path:
        return self._directory / f"{self.hosts[index]}.log"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_job_loses_no_step_by_late_dns_deleted_pods_and_a_lost_node(tmp_path: Path) -> None:
    """A replaced pod gets the state from its peers. One that the Job has grown by replaces a lost node."""
    why = virtual_network.unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)
    with Pods(tmp_path, manifests.load_documents()) as pods:
        for index in pods.indices:
            pods.start(index, knows_peers=False)
        pods.wait(lambda: all("checkpoints in" in pods.read_log(i) for i in pods.indices), "three agents")
        assert not any(map(pods.newest_step, pods.indices))
        pods.update_dns(*pods.indices)
        pods.wait_world(3)
        pods.wait(lambda: pods.newest_step(1) >= ASKED_STEP, "all agents to know that the script asks")

        pods.delete(1)
        step = pods.newest_step(1)
        pods.check_notice(1, 1, step)
        assert list(pods.node_dir(1).glob(f"g*-s{step:010}/manifest.json")), "the last step is not on disk"
        pods.remove(1)
        pods.start(1)
        step = pods.wait_world(3, step)
        assert pods.newest_step(1) > 0

        pods.grow()
        pods.wait(lambda: "stands by" in pods.read_log(3), "a spare pod")
        pods.remove(2)
        pods.wait_world(3, step)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.soak
def test_one_file_starts_the_readmes_job(tmp_path: Path) -> None:
    """The container's only words are --config and the file."""
    why = virtual_network.unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    job["script-args"] = ["--epochs", 1]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with Pods(tmp_path, manifests.load_documents(), words=["--config", str(tmp_path / "job.yaml")]) as pods:
        for index in pods.indices:
            pods.start(index)
        pods.wait(lambda: all(p.poll() is not None for p in pods.processes.values()), "the end of three pods")
        assert [process.returncode for process in pods.processes.values()] == [0, 0, 0], pods.read_log(0)
        assert "3 ranks on 3 nodes" in "".join(map(pods.read_log, pods.indices))
        assert "job.yaml:" in (pods.node_dir(0) / constants.SETTINGS_FILE).read_text()


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_trainjob_loses_no_step_by_deleted_pods_and_a_lost_node(tmp_path: Path) -> None:
    """Its first pod is late, and deleted, and in the end all of them are: the claim has the state."""
    why = virtual_network.unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)
    documents = [manifests.render_trainjob(*manifests.load_documents(manifests.TRAINJOB))]
    with Pods(tmp_path, documents, has_claim=True) as pods:
        pods.env["PET_RDZV_CONF"] = "last_call_timeout=1s"  # the first world has two pods
        pods.start(1)
        pods.start(2)
        step = pods.wait_world(2)
        pods.start(0)
        pods.wait_world(3, step)

        pods.delete(0)
        pods.remove(0)
        step = pods.wait_world(2)
        pods.start(0)
        step = pods.wait_world(3, step)

        pods.remove(2)
        pods.wait_world(2, step)

        pods.delete(0, 1)
        step = max(map(pods.newest_step, pods.indices))
        pods.remove(0)
        pods.remove(1)
        for index in pods.indices:
            pods.start(index)
        pods.wait_world(3, step)
