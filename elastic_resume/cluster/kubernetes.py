"""What a pod of an Indexed Job knows of itself and of its peers, and which names and sizes Kubernetes takes.

A pod is not told how many peers it has nor where they are: `deploy/kubernetes` and `manifest` say it in the
variables of `VARIABLES`, the Job controller gives the index. All names follow from these, so nothing is asked
of an API server, and no address is kept: a replaced pod has another one under the same name.

Promise: reads the environment and this pod's own line of /etc/hosts, nothing else. What contradicts itself is
a ConfigError that names the variable. Does not know whether a peer lives, nor what a node is used for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from elastic_resume.errors import ConfigError

PORT = 29400
MAX_CANDIDATES = 3  # more than half of them have to be there at the first start, any may be lost later
MAX_NODES = 10_000
DOMAIN = "cluster.local"  # where the pod's /etc/hosts does not say another

# Concept -> variable. The manifest sets those with our prefix and those of the downward API (POD_*).
VARIABLES = {
    "index": "JOB_COMPLETION_INDEX",  # by the Job controller, in every pod of an Indexed Job
    "host name": "HOSTNAME",  # by Kubernetes: JOB-INDEX
    "job": "ELASTIC_RESUME_JOB",  # the pod's label batch.kubernetes.io/job-name: true in a JobSet too
    "nodes": "ELASTIC_RESUME_NODES",  # N or MIN:MAX
    "service": "ELASTIC_RESUME_SERVICE",  # the headless Service, spec.template.spec.subdomain
    "workers": "ELASTIC_RESUME_WORKERS",
    "grace": "ELASTIC_RESUME_TERMINATION_GRACE_S",  # terminationGracePeriodSeconds
    "namespace": "POD_NAMESPACE",
    "address": "POD_IP",
    "pod": "POD_NAME",  # JOB-INDEX-xxxxx: another one for each pod of an index
    "uid": "POD_UID",
}

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")  # DNS-1123, of 63 characters at most
MAX_LABEL = 63
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]{1,2})?")
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** (n + 1) for n, unit in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{unit: Decimal(1024) ** (n + 1) for n, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
}


@dataclass(frozen=True)
class Pod:
    """This pod, as one of ``nodes`` of a Job. ``nodes`` is None where the environment does not say it."""

    job: str
    index: int
    least: int = 1
    nodes: int | None = None
    service: str = ""
    namespace: str = ""
    domain: str = DOMAIN
    address: str = ""
    workers: int | None = None
    grace_s: float | None = None
    pod: str = ""
    uid: str = ""

    @property
    def name(self) -> str:
        """This node's name: the same for every pod that replaces this one."""
        return f"{self.job}-{self.index}"

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of all nodes of the job, this one's among them, in order."""
        return tuple(f"{self.job}-{index}" for index in range(self.nodes or 0))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Where newcomers ask, as HOST:PORT; none where no Service gives the pods names."""
        if not self.service:
            return ()
        return tuple(f"{self._host(peer)}:{PORT}" for peer in self.peers[:MAX_CANDIDATES])

    def _host(self, peer: str) -> str:
        # In full: a pod's own /etc/hosts has this form, so it knows itself before DNS does.
        if not self.namespace:
            return f"{peer}.{self.service}"
        return f"{peer}.{self.service}.{self.namespace}.svc.{self.domain}"


def read(environ: Mapping[str, str], hosts: Path = Path("/etc/hosts")) -> Pod | None:
    """Read what this pod is told; None outside of a pod of an Indexed Job.

    Args:
        environ: the environment.
        hosts: where kubelet writes this pod's address and full name.

    Raises:
        ConfigError: a variable holds what it cannot.

    """
    told = {concept: environ.get(variable, "").strip() for concept, variable in VARIABLES.items()}
    if "KUBERNETES_SERVICE_HOST" not in environ or not told["index"]:
        return None
    index = _whole("index", told["index"], least=0)
    job = told["job"] or told["host name"].removesuffix(f"-{index}")
    if not is_label(job):
        raise ConfigError(f"{VARIABLES['job']} is {job!r}, which is no name of a Job.")
    least, nodes = _nodes(told["nodes"])
    if nodes is not None and index >= nodes:
        raise ConfigError(
            f"{VARIABLES['index']} is {index}, and {VARIABLES['nodes']} is {told['nodes']}: "
            "give it the number of spec.completions."
        )
    service, namespace, domain = _full_name(hosts, f"{job}-{index}")
    return Pod(
        job,
        index,
        least=least,
        nodes=nodes,
        service=told["service"] or service,
        namespace=told["namespace"] or namespace,
        domain=domain,
        address=told["address"],
        workers=_whole("workers", told["workers"], least=1) if told["workers"] else None,
        grace_s=termination_grace_s(environ),
        pod=told["pod"],
        uid=told["uid"],
    )


def termination_grace_s(environ: Mapping[str, str]) -> float | None:
    """Seconds between SIGTERM and SIGKILL for this pod; None where it is not told.

    Raises:
        ConfigError: it is no number of seconds.

    """
    text = environ.get(VARIABLES["grace"], "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e6:
        raise ConfigError(
            f"{VARIABLES['grace']} is {text!r}: write the number of terminationGracePeriodSeconds."
        )
    return value


def _whole(concept: str, text: str, *, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise ConfigError(
            f"{VARIABLES[concept]} is {text!r}: a whole number, {least} or more, belongs there."
        )
    return int(text)


def _nodes(text: str) -> tuple[int, int | None]:
    if not text:
        return 1, None
    match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", text)
    least, most = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not 1 <= least <= most <= MAX_NODES:
        raise ConfigError(f"{VARIABLES['nodes']} is {text!r}: write N or MIN:MAX with 1 <= MIN <= MAX.")
    return least, most


def _full_name(hosts: Path, name: str) -> tuple[str, str, str]:
    """Service, namespace and domain, from the line that kubelet writes: ADDRESS FULL-NAME NAME."""
    try:
        lines = hosts.read_text(errors="replace").splitlines()[:1000]
    except OSError:
        lines = []
    for line in lines:
        for word in line.partition("#")[0].split()[1:]:
            labels = word.split(".", 4)
            if len(labels) == 5 and labels[0] == name and labels[3] == "svc":
                return labels[1], labels[2], labels[4].rstrip(".") or DOMAIN
    return "", "", DOMAIN


# ---- names and sizes ---------------------------------------------------------------------------------


def is_label(text: str) -> bool:
    """Whether it is a DNS-1123 label."""
    return len(text) <= MAX_LABEL and LABEL.fullmatch(text) is not None


def check_name(name: str, nodes: int, *, between: str = "") -> None:
    """Check a job's name: the host names of its pods are made of it, and its Service has it too.

    Args:
        name: of the Job and the Service.
        nodes: how many pods there are.
        between: what comes between name and index in a pod's host name (of a JobSet).

    Raises:
        ConfigError: Kubernetes would refuse it, at once or when the first pod is to start.

    """
    if not is_label(name) or not name[0].isalpha():
        raise ConfigError(
            f"--name is {name!r}: write lower-case letters, digits and dashes, a letter first, no dash last, "
            f"{MAX_LABEL} characters at most (DNS-1123, and DNS-1035 for the Service)."
        )
    longest = f"{name}{between}-{nodes - 1}"
    if len(longest) > MAX_LABEL:
        raise ConfigError(
            f"--name is {len(name)} characters long: the host name {longest} has {len(longest)}, "
            f"and {MAX_LABEL} are allowed. Shorten it by {len(longest) - MAX_LABEL}."
        )


def size_bytes(text: str, what: str) -> int:
    """Bytes of a Kubernetes quantity, such as 4Gi or 500M.

    Raises:
        ConfigError: it is none, or less than a byte.

    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what} is {text!r}: write a size as 4Gi, 512Mi or 2G.")
    unit = match[2] or ""
    value = Decimal(match[1]) * (_UNITS[unit] if unit in _UNITS else Decimal(10) ** int(unit[1:]))
    if unit == "m":
        raise ConfigError(f"{what} is {text!r}, and m is for thousandths of a byte: write Mi or M.")
    if not 1 <= value < 1 << 63:
        raise ConfigError(f"{what} is {text!r}: more than nothing, and less than 8Ei.")
    return int(value)
