"""Run the Job of a Kubernetes manifest on simulated machines, one per pod.

`SimulatedPods` reads the YAML and does what kubelet and the Job controller do: the environment with fieldRef,
Secrets and $(NAME); host names; DNS names also for pods that are not ready; each emptyDir as a file system in
memory of its size; 64 MB of /dev/shm unless something is mounted there; the memory limit; a pod's end by
SIGTERM, grace and SIGKILL; a new pod with a new address and empty disks, when the policies say so.

**Not simulated**: images (pods see the host's files, in ``cwd``), users and security contexts, the scheduler,
quotas, probes, init containers, eviction for a full disk. The sources are named in `job_controller`; nothing
was compared with an API server.
"""

from __future__ import annotations

import re
import secrets as chance
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from elastic_resume.errors import UsageError
from elastic_resume.units import parse_kubernetes_quantity
from tests.support import job_controller
from tests.support.closing import ClosedAtExit
from tests.support.machines import Machines

T = TypeVar("T")
POLL_S = 0.02
UNLIMITED_BYTES = 1 << 30  # size of an emptyDir without a sizeLimit
DOMAIN = "cluster.local"
_VARIABLE_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")
# Variables that an image would set.
IMAGE_ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONUNBUFFERED": "1",
}


class PodsTimeoutError(AssertionError):
    """A wait failed. The text ends with the last output of each pod."""


@dataclass
class Pod:
    """One pod that was started. ``exit_code`` is None while it runs."""

    index: int
    name: str
    uid: str
    machine_index: int
    address: str
    process: subprocess.Popen[bytes]
    exit_code: int | None = None
    reason: str = ""  # as in `kubectl describe`: OOMKilled, or the reason of a disruption
    disrupted: bool = False
    is_tracked: bool = True  # the controller knows it: not after `force_delete`
    kill_at: float = field(default=float("inf"))


class SimulatedPods(ClosedAtExit):
    """The pods of a manifest's Job. Use it as a context manager, or call `close`; `wait` drives it."""

    def __init__(
        self,
        manifest: str,
        directory: Path,
        *,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        claims: Mapping[str, Path] | None = None,
        bind: Mapping[str, Path] | None = None,
        image: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        namespace: str = "default",
    ) -> None:
        """Create the network; `start` starts the pods.

        Args:
            manifest: YAML with a Job (and its Service), or a JobSet with one job.
            directory: gets a log for each pod.
            secrets: Secrets by name, each with its keys.
            claims: PersistentVolumeClaim -> directory of the host.
            bind: further path inside -> directory of the host.
            image: variables that the image sets, beside `IMAGE_ENVIRONMENT`.
            cwd: working directory of the image; default: of this process.
            namespace: namespace of all objects.

        """
        kinds = {str(one["kind"]): one for one in yaml.safe_load_all(manifest)}
        spec, prefix = _job_spec(kinds)
        if spec is None:
            raise UsageError("this manifest has neither a Job nor a JobSet.")
        self.job = job_controller.JobController(spec)
        self.prefix, self._namespace = prefix, namespace
        self._template = spec["template"]
        self._pod_spec = self._template["spec"]
        (self._container,) = self._pod_spec["containers"]
        self._has_dns = "Service" in kinds or "JobSet" in kinds
        self._secrets, self._claims, self._bind = secrets or {}, claims or {}, bind or {}
        self._image = {**IMAGE_ENVIRONMENT, **(image or {})}
        self._cwd = cwd or Path.cwd()
        self._directory = directory
        slots = self.job.completions + 2
        self._machines = Machines([f"machine{slot}" for slot in range(slots)])
        self.pods: list[Pod] = []
        """All pods that were started, in this order."""
        self.dns_paused = False
        """If true, new pods get no name in DNS."""
        self._dns: dict[str, str] = {}
        self._due_starts: list[int] = []

    def close(self) -> None:
        """End everything."""
        self._machines.close()

    # ---- act -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a pod for each index."""
        for index in range(self.job.completions):
            self._create_pod(index)

    def newest_pod(self, index: int) -> Pod:
        """Return the newest pod of an index."""
        return next(pod for pod in reversed(self.pods) if pod.index == index)

    def delete(self, index: int, *, disruption: str = "") -> Pod:
        """Delete a pod: SIGTERM, then SIGKILL after its grace period. ``disruption``: why it is evicted."""
        pod = self.newest_pod(index)
        pod.disrupted, pod.reason = bool(disruption), disruption
        pod.kill_at = time.monotonic() + float(self._pod_spec.get("terminationGracePeriodSeconds", 30))
        pod.process.send_signal(signal.SIGTERM)
        if self.job.spec.get("podReplacementPolicy", "TerminatingOrFailed") != "Failed":
            self._due_starts.append(index)
            pod.is_tracked = False
        return pod

    def evict(self, index: int) -> Pod:
        """Delete a pod as the eviction API, a preemption or a drained node does."""
        return self.delete(index, disruption="EvictionByEvictionAPI")

    def lose_node(self, index: int) -> Pod:
        """Cut the power of a pod's machine. `give_up_node` tells the controller."""
        pod = self.newest_pod(index)
        self._machines.poweroff(pod.machine_index)
        pod.is_tracked = False
        return pod

    def give_up_node(self, index: int) -> None:
        """Give up a lost node, as after five minutes or by a taint: its pod failed by disruption."""
        pod = self.newest_pod(index)
        pod.exit_code, pod.disrupted, pod.reason = 137, True, "DeletionByTaintManager"
        pod.is_tracked = True
        self._apply_verdict(pod)

    def force_delete(self, index: int) -> Pod:
        """Delete the object alone, as ``--force --grace-period=0`` does: two pods of one index may run."""
        pod = self.newest_pod(index)
        pod.is_tracked = False
        self._due_starts.append(index)
        return pod

    def kill(self, pod: Pod) -> None:
        """Kill a pod's container."""
        pod.process.kill()

    def cut(self, pod: Pod) -> None:
        """Drop all packets of a pod's machine."""
        self._machines.cut(pod.machine_index)

    def update_dns(self) -> None:
        """Give every running pod its name in DNS."""
        self.dns_paused = False
        self._update_names()

    # ---- observe -------------------------------------------------------------------------------------

    def read_log(self, pod: Pod) -> str:
        """Return all output of a pod."""
        return self._log_path(pod.name).read_text(errors="replace")

    def path(self, pod: Pod, path_inside: str) -> Path:
        """Return the path of a running pod's file for this process."""
        return self._machines.path(pod.machine_index, path_inside)

    def wait(self, condition: Callable[[], T | None], description: str, timeout_s: float = 60.0) -> T:
        """Act as kubelet and the controller until ``condition`` returns a true value; return it.

        Raises:
            PodsTimeoutError: not within ``timeout_s``.

        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._reconcile()
            found = condition()
            if found:
                return found
            if time.monotonic() > deadline:
                tails = "\n".join(
                    f"--- {pod.name} {pod.exit_code}\n{self.read_log(pod)[-2500:]}" for pod in self.pods
                )
                raise PodsTimeoutError(f"{description}: {timeout_s:.0f} s went by.\n{tails}")
            time.sleep(POLL_S)

    def wait_for_exit(self, pod: Pod, timeout_s: float = 60.0) -> int:
        """Wait for a pod's end; return its exit code as Kubernetes shows it."""
        self.wait(lambda: pod.exit_code is not None, f"the end of {pod.name}", timeout_s)
        return -1 if pod.exit_code is None else pod.exit_code

    # ---- kubelet and the controller ------------------------------------------------------------------

    def _reconcile(self) -> None:
        for pod in list(self.pods):
            if pod.exit_code is not None or not self._owns_machine(pod):
                continue
            if time.monotonic() > pod.kill_at:
                pod.process.kill()
            # Since Kubernetes 1.28 with cgroup v2, kubelet has the whole container killed.
            if self._machines.oom_kill_count(pod.machine_index):
                pod.reason = "OOMKilled"
                pod.process.kill()
            code = pod.process.poll()
            if code is not None:
                pod.exit_code = 128 - code if code < 0 else code
                self._machines.crash(pod.machine_index)  # the rest of its processes, and its disks
                self._apply_verdict(pod)
        while self._due_starts:
            self._create_pod(self._due_starts.pop(0))

    def _owns_machine(self, pod: Pod) -> bool:
        """Whether no later pod runs on the pod's machine."""
        return all(
            other.machine_index != pod.machine_index for other in self.pods[self.pods.index(pod) + 1 :]
        )

    def _apply_verdict(self, pod: Pod) -> None:
        if not pod.is_tracked:
            return
        codes = {self._container["name"]: int(pod.exit_code or 0)}
        verdict = self.job.handle_pod_end(pod.index, codes, disrupted=pod.disrupted)
        if verdict == "replace":
            self._due_starts.append(pod.index)
        elif self.job.outcome:
            self._due_starts.clear()
            for other in self.pods:
                if other.exit_code is None and other.process.poll() is None:
                    other.process.send_signal(signal.SIGTERM)
                    other.kill_at = time.monotonic() + self._pod_spec.get("terminationGracePeriodSeconds", 30)
        self._update_names()

    def _create_pod(self, index: int) -> None:
        used = {pod.machine_index for pod in self.pods if pod.exit_code is None}
        free = [slot for slot in range(len(self._machines)) if slot not in used]
        # Take the free machine that was used least recently.
        slot = min(
            free,
            key=lambda one: max(
                (n for n, pod in enumerate(self.pods) if pod.machine_index == one), default=-1
            ),
        )
        host = f"{self.prefix}-{index}"
        name, uid = f"{host}-{chance.token_hex(3)[:5]}", str(uuid.uuid4())
        address = self._machines.network.change_address(slot)
        volumes = {one["name"]: one for one in self._pod_spec.get("volumes", [])}
        disks: dict[str, int] = {"/scratch": 0}
        bind = {to: str(source) for to, source in self._bind.items()}
        for mount in self._container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                size = (volume["emptyDir"] or {}).get("sizeLimit")
                disks[mount["mountPath"]] = (
                    parse_kubernetes_quantity("sizeLimit", size) if size else UNLIMITED_BYTES
                )
            else:
                bind[mount["mountPath"]] = str(self._claims[volume["persistentVolumeClaim"]["claimName"]])
        memory = self._container.get("resources", {}).get("limits", {}).get("memory")
        env = self._environment(index, name, uid, address)
        command = [*self._container["command"], *self._container.get("args", [])]
        self._machines.set_known_names(slot, self._resolvable_names(index, address))
        with open(self._log_path(name), "ab") as log:
            (process,) = self._machines.boot(
                slot,
                name=host,
                disks=disks,
                bind=bind,
                memory_bytes=parse_kubernetes_quantity("memory", memory) if memory else 0,
                argv=[expand_variables(str(word), env) for word in command],
                env=env,
                cwd=self._cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pods.append(Pod(index, name, uid, slot, address, process))
        self._update_names()

    def _environment(self, index: int, name: str, uid: str, address: str) -> dict[str, str]:
        """Return the variables of the image, of Kubernetes and of the manifest."""
        labels = {
            **self._template.get("metadata", {}).get("labels", {}),
            **dict.fromkeys(("batch.kubernetes.io/job-name", "job-name"), self.prefix),
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        fields = {
            "metadata.name": name,
            "metadata.namespace": self._namespace,
            "metadata.uid": uid,
            "status.podIP": address,
            **{f"metadata.labels['{key}']": value for key, value in labels.items()},
        }
        env = {
            **self._image,
            "HOSTNAME": f"{self.prefix}-{index}",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
        }
        given = {"JOB_COMPLETION_INDEX": str(index)}
        for one in self._container.get("env", []):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                given[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                ref = source["secretKeyRef"]
                given[one["name"]] = self._secrets[ref["name"]][ref["key"]]
            else:
                given[one["name"]] = expand_variables(str(one["value"]), given)
        return {**env, **given}

    def _log_path(self, name: str) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / f"{name}.log"

    def _resolvable_names(self, index: int, address: str) -> dict[str, str]:
        """Return the names that a pod resolves: its own line of /etc/hosts, and DNS."""
        own = self._host_names(f"{self.prefix}-{index}")
        dns = {line: at for line, at in self._dns.items() if line != own}
        return {f"{own} {self.prefix}-{index}": address, **dns}

    def _host_names(self, host: str) -> str:
        """Return a pod's names: the full name first, then the forms of the search path."""
        if not self._has_dns:
            return host
        short = f"{host}.{self._pod_spec['subdomain']}.{self._namespace}.svc"
        return f"{short}.{DOMAIN} {short} {host}.{self._pod_spec['subdomain']}"

    def _update_names(self) -> None:
        live = [pod for pod in self.pods if pod.exit_code is None]
        if not self.dns_paused and self._has_dns:
            self._dns = {self._host_names(f"{self.prefix}-{pod.index}"): pod.address for pod in live}
        for pod in live:
            if self._machines.is_up(pod.machine_index):
                self._machines.set_known_names(
                    pod.machine_index, self._resolvable_names(pod.index, pod.address)
                )


def _job_spec(kinds: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Any] | None, str]:
    """Return the Job's spec, and the prefix of its pods' host names."""
    if "JobSet" not in kinds:
        job = kinds.get("Job")
        return (job["spec"], job["metadata"]["name"]) if job else (None, "")
    jobset = kinds["JobSet"]
    (job,) = jobset["spec"]["replicatedJobs"]
    return job["template"]["spec"], f"{jobset['metadata']['name']}-{job['name']}-0"


def expand_variables(text: str, env: Mapping[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does: an unknown name stays, and $$ becomes $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else env.get(match[2], match[0])

    return _VARIABLE_REFERENCE.sub(value, text)
