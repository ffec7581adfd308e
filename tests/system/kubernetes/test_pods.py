"""The Job of deploy/kubernetes with real agents, each in namespaces of its own with its pod's environment.

What a cluster does to pods costs no step. Kubelet's part is here in a few lines: variables, host name,
volumes in memory, names in DNS, SIGTERM. Images, users, limits and the controllers are not simulated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from elastic_resume import constants, events
from elastic_resume.events import Event
from elastic_resume.testing import virtual_network
from elastic_resume.units import parse_kubernetes_quantity
from tests.support import manifests
from tests.support.closing import ClosedAtExit
from tests.support.machines import MB, Machines
from tests.support.paths import ROOT, SCRIPTS
from tests.support.processes import wait_for

T = TypeVar("T")
LIMIT_S = 120.0  # of one wait: an agent imports torch, and so does its fork server
INDICES = range(3)


class Pods(ClosedAtExit):
    """The pods of the Job that ships, with a small training as their script."""

    def __init__(self, directory: Path) -> None:
        self.documents = manifests.load_documents()
        self.job = manifests.job_spec(self.documents)
        container = manifests.container(self.job)
        tini, dashes, *command = container["command"]
        assert (tini, dashes) == ("tini", "--")  # process 1 of a machine does what it does
        self._command = [*command, str(SCRIPTS / "train.py"), "--step-log", str(directory / "steps")]
        self._command += ["--epochs", "10000", "--step-delay", "0.1"]
        # In the place of the claim each pod has a volume of its own, which is the harder case.
        sizes = {
            one["name"]: one.get("emptyDir", {"sizeLimit": "4Gi"})["sizeLimit"]
            for one in self.job["template"]["spec"]["volumes"]
        }
        disks = {
            mount["mountPath"]: parse_kubernetes_quantity("sizeLimit", sizes[mount["name"]])
            for mount in container["volumeMounts"]
        }
        self.hosts = [f"{manifests.NAME}-{index}" for index in INDICES]
        self._machines = Machines(
            self.hosts,
            disks={**disks, "/tmp": 256 * MB},  # noqa: S108  the pod's own
            bind={str(directory): directory},
        )
        self._directory = directory
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        """End everything."""
        self._machines.close()

    def start(self, index: int, *, knows_peers: bool = True) -> None:
        """Start the agent of a pod that is down or whose container has ended."""
        if not self._machines.is_up(index):
            self._machines.boot(index, new_address=True)
        self.update_dns(*(INDICES if knows_peers else [index]))
        env = manifests.pod_environment(self.documents, index, self._machines.address(index))
        image = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        test = {constants.ENV_SNAPSHOT_EVERY: "1", "ELASTIC_RESUME_STEP_MARK_S": "0", "OMP_NUM_THREADS": "1"}
        with open(self._log(index), "ab") as log:
            self.processes[index] = self._machines.run(
                index, self._command, env={**image, **env, **test}, cwd=ROOT, stdout=log, stderr=log
            )

    def update_dns(self, *known: int) -> None:
        """Let every pod resolve these pods; Kubernetes writes a pod's own short name to its /etc/hosts."""
        domain = f"{self.job['template']['spec']['subdomain']}.{manifests.NAMESPACE}.svc"
        for index, host in enumerate(self.hosts):
            names = {f"{self.hosts[one]}.{domain}": self._machines.address(one) for one in known}
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
        volume = self._machines.path(index, "/checkpoints")
        return volume / manifests.NAME / self.hosts[index]

    def events(self, index: int, kind: str) -> list[Event]:
        """Return a pod's events of a kind, as far as its volume remembers."""
        found = events.read(self.node_dir(index) / constants.EVENTS_FILE)
        return [event for event in found if event["event"] == kind]

    def newest_step(self, index: int) -> int:
        """Return the newest step that a pod's worker has finished."""
        return max((int(event["step"]) for event in self.events(index, "step")), default=0)

    def read_log(self, index: int) -> str:
        """Return what the agents of an index have printed."""
        return self._log(index).read_text(errors="replace")

    def wait_world(self, size: int, after: int = 0) -> int:
        """Wait until a world of this size has trained beyond a step; check that it repeated none."""

        def find() -> Event | None:  # rank 0 is in the first pod, and reports for all
            resume = next(iter(self.events(0, "resume")[-1:]), None)
            if resume is None or (resume["world_size"], resume["step"] >= after) != (size, True):
                return None
            return resume if self.newest_step(0) > resume["step"] + 2 else None

        resume = self.wait(find, f"a world of {size} after step {after}")
        assert resume["recomputed_steps"] == 0
        return self.newest_step(0)

    def wait(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait for a condition; the error has the newest output of every pod."""
        try:
            found: T = wait_for(condition, what, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(
                "\n".join([str(error), *(self.read_log(i)[-2500:] for i in INDICES)])
            ) from None
        return found

    def _log(self, index: int) -> Path:
        return self._directory / f"{self.hosts[index]}.log"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_job_loses_no_step_by_late_dns_deleted_pods_and_a_lost_node(tmp_path: Path) -> None:
    """A replaced pod is empty, has a new address, and gets the state from its peers."""
    why = virtual_network.unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)
    with Pods(tmp_path) as pods:
        for index in INDICES:
            pods.start(index, knows_peers=False)
        pods.wait(lambda: all("checkpoints in" in pods.read_log(i) for i in INDICES), "three agents")
        assert not any(pods.newest_step(index) for index in INDICES)
        pods.update_dns(*INDICES)
        pods.wait_world(3)

        pods.delete(1)
        step = pods.newest_step(1)
        assert list(pods.node_dir(1).glob(f"g*-s{step:010}/manifest.json")), "the last step is not on disk"
        pods.remove(1)
        pods.start(1)
        step = pods.wait_world(3, step)
        assert pods.newest_step(1) > 0

        pods.remove(2)
        step = pods.wait_world(2, step)
        if "ELASTIC_RESUME_SOAK_KILLS" not in os.environ:  # each start of an agent imports torch, for 5 s
            return
        pods.start(2)
        pods.wait_world(3, step)

        # As those of a claim, the volumes outlive the pods.
        pods.delete(*INDICES)
        step = max(map(pods.newest_step, INDICES))
        for index in INDICES:
            pods.start(index)
        pods.wait_world(3, step)
