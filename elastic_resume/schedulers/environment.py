"""What this node is to its scheduler: one value from the environment, with where each part comes from.

Slurm, Kubernetes, the ``PET_*`` variables that Kubeflow's trainers set for torchrun, and a plain host. One
dict per scheduler says which variable holds what. A node keeps its name when it comes back, so that it finds
its own checkpoints again; a job keeps its own over requeues.

Promise: reads nothing but ``environ`` and the host's name, and never fails: what is odd is told in
``problems``, which end a start that has to rely on them. Does not know what anything here is used for.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from elastic_resume.errors import ConfigError
from elastic_resume.schedulers import slurm

# Concept -> variables that may hold it, the first that is set wins.
SLURM: dict[str, tuple[str, ...]] = {
    "name": ("SLURMD_NODENAME",),
    "job": ("SLURM_JOB_ID",),
    "order": ("SLURM_NODEID",),
    "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "peers": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "workers": ("SLURM_GPUS_ON_NODE",),
    "restarts": ("SLURM_RESTART_COUNT",),  # not set in a job's first life
    "deadline": ("SLURM_JOB_END_TIME",),  # since Slurm 23.02; else `slurm_job.deadline` asks
}
KUBERNETES: dict[str, tuple[str, ...]] = {
    # An Indexed Job gives its pods stable host names (JOB-INDEX); POD_NAME is the downward API's usual name,
    # and that has a random end.
    "name": ("HOSTNAME",),
    "order": ("JOB_COMPLETION_INDEX",),
    "job": ("ELASTIC_RESUME_JOB",),
    "nodes": ("ELASTIC_RESUME_NODES",),
    "service": ("ELASTIC_RESUME_SERVICE",),
    "namespace": ("POD_NAMESPACE",),
    "address": ("POD_IP",),
    "workers": ("ELASTIC_RESUME_WORKERS",),
}
PET: dict[str, tuple[str, ...]] = {
    "order": ("PET_NODE_RANK",),
    "nodes": ("PET_NNODES",),
    "peers": ("PET_MASTER_ADDR",),
    "port": ("PET_MASTER_PORT",),
    "job": ("PET_RDZV_ID",),
    "workers": ("PET_NPROC_PER_NODE",),
}
SCHEDULERS = {"slurm": SLURM, "kubernetes": KUBERNETES, "pet": PET, "host": {}}

CANDIDATES = 3  # any one of them may be absent
PORT = 29400  # torchrun's own
SLURM_PORTS = range(20000, 30000)  # below those that Linux hands out by itself (32768 and up)
STEP_PORTS = 101  # apart from each other: the next jobs' steps are not met


@dataclass(frozen=True, slots=True)
class Node:
    """One node of one job.

    Attributes:
        scheduler: ``slurm``, ``kubernetes``, ``pet`` or ``host``.
        name: of the node, safe as the name of a directory.
        job: the job's name, the same after each requeue; empty where nobody gives it one.
        order: the node's place among the others.
        nodes: how many there are, at most.
        min_nodes: with so few training goes on.
        peers: names of all nodes in their order, as far as they are told.
        candidates: ``HOST:PORT`` of those at which newcomers ask; empty where nothing is told.
        address: at which others reach this node, where that is told.
        workers: per node; None where nothing is told.
        restarts: lives of the job before this one.
        launch: names this start of the whole job where the scheduler has ended all of it before; else empty.
        requeue: what the scheduler knows the part by that this node's requeue concerns; else empty.
        deadline: unix seconds at which the scheduler ends the job, where a variable tells.
        tasks: how many are started on this node, or another; more than one are none of ours.
        problems: why a start without flags would go wrong.
        sources: concept -> where it comes from.

    """

    scheduler: str
    name: str
    job: str = ""
    order: int = 0
    nodes: int = 1
    min_nodes: int = 1
    peers: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    address: str = ""
    workers: int | None = None
    restarts: int = 0
    launch: str = ""
    requeue: str = ""
    deadline: float | None = None
    tasks: int = 1
    problems: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


def read(environ: Mapping[str, str]) -> Node:
    """Read what the scheduler tells."""
    found = scheduler(environ)
    told = _Told(environ, SCHEDULERS[found])
    node = _READERS[found](told)
    return replace(node, sources=MappingProxyType(told.sources))


def scheduler(environ: Mapping[str, str]) -> str:
    """``slurm``, ``kubernetes``, ``pet`` or ``host``."""
    if "SLURM_JOB_ID" in environ:
        return "slurm"
    if "PET_NNODES" in environ or "PET_MASTER_ADDR" in environ:
        return "pet"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else "host"


def default_name(environ: Mapping[str, str]) -> str:
    """This node's name where the user gives none."""
    return read(environ).name


def safe_name(text: str, fallback: str) -> str:
    """``text`` with every character that `contract.SAFE_NAME_PATTERN` forbids replaced by a dash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:128].rstrip("-")
    return name or fallback


class _Told:
    """What variables say, and which of them was asked."""

    def __init__(self, environ: Mapping[str, str], variables: Mapping[str, tuple[str, ...]]) -> None:
        self.environ = environ
        self.variables = variables
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []

    def text(self, concept: str, default: str = "") -> str:
        for variable in self.variables.get(concept, ()):
            if self.environ.get(variable):
                self.sources[concept] = variable
                return self.environ[variable]
        return default

    def number(self, concept: str, default: int) -> int:
        text = self.text(concept)
        if re.fullmatch(r"[0-9]{1,12}", text):
            return int(text)
        if text:
            self.problems.append(f"{self.sources.pop(concept)} is {text!r}, which is no number")
        return default

    def span(self, concept: str) -> tuple[int, int]:
        """Read ``N``, which is any number up to that, or ``MIN:MAX``."""
        text = self.text(concept, "1")
        match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", text)
        least, most = (int(match[1] or 1), int(match[2])) if match else (0, 0)
        if not 1 <= least <= most:
            self.problems.append(
                f"{self.sources.pop(concept, concept)} is {text!r}, which is neither N nor MIN:MAX"
            )
            return 1, 1
        return least, most

    def name(self) -> str:
        text = self.text("name")
        if not text:
            self.sources["name"] = "the host's name"
        return safe_name(text or socket.gethostname(), "node")


# ---- Slurm ---------------------------------------------------------------------------------------------


def _slurm(told: _Told) -> Node:
    environ = told.environ
    number = told.text("job")
    # An array's element may have the whole array's number: a requeue of that would take its siblings along.
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        number = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
        told.sources["job"] = "SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID"
    peers = _slurm_peers(told)
    nodes = told.number("nodes", max(1, len(peers)))
    restarts = told.number("restarts", 0)
    # Two steps may run at once, on the same nodes.
    port = slurm_port(environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", ""))
    told.problems.extend(_slurm_problems(environ, nodes))
    return Node(
        "slurm",
        told.name(),
        job=safe_name(f"slurm-{number}", "slurm"),
        order=told.number("order", 0),
        nodes=nodes,
        peers=peers,
        candidates=tuple(f"{peer}:{port}" for peer in peers[:CANDIDATES]),
        workers=told.number("workers", 0) or None,
        restarts=restarts,
        launch=f"slurm {number} {restarts}",
        requeue=number,
        deadline=_deadline(told),
        tasks=_tasks(told.environ),
        problems=tuple(told.problems),
    )


def slurm_port(job: str, step: str) -> int:
    """Where the nodes of a job meet: the same for all, and another than most other jobs'."""
    numbers = [int(re.sub(r"\D", "", text)[-9:] or "0") for text in (job, step)]
    return SLURM_PORTS[(numbers[0] + STEP_PORTS * numbers[1]) % len(SLURM_PORTS)]


def _slurm_peers(told: _Told) -> tuple[str, ...]:
    text = told.text("peers")
    try:
        return tuple(slurm.hostnames(text)) if text else ()
    except ConfigError as error:
        told.problems.append(f"{told.sources.pop('peers')}: {error}")
        return ()


def _slurm_problems(environ: Mapping[str, str], nodes: int) -> list[str]:
    problems = []
    if nodes > 1 and "SLURM_STEP_ID" not in environ:
        problems.append(
            f"this is one process in a Slurm job of {nodes} nodes, and not one on each: start it with srun "
            "(srun elastic-resume run …)"
        )
    tasks = _tasks(environ)
    if tasks > 1:
        problems.append(
            f"srun starts {tasks} tasks on a node, and elastic-resume starts the workers by itself: "
            "give srun --ntasks-per-node=1, and the number of workers as --nproc-per-node"
        )
    return problems


def _tasks(environ: Mapping[str, str]) -> int:
    """How many tasks the step starts on a node, at most; ``2(x3),1`` are 2."""
    told = re.findall(r"(?:^|,)(\d{1,6})", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(map(int, told), default=1)


def _deadline(told: _Told) -> float | None:
    return told.number("deadline", 0) or None


# ---- Kubernetes and others -----------------------------------------------------------------------------


def _kubernetes(told: _Told) -> Node:
    """A pod of an Indexed Job, as `deploy/kubernetes` describes it."""
    name, index = told.name(), told.number("order", 0)
    least, nodes = told.span("nodes")
    job = told.text("job") or _job_of_pod(told, name)
    service, space = told.text("service"), told.text("namespace")
    domain = f".{service}.{space}.svc" if service and space else f".{service}"
    peers = tuple(f"{job}-{at}" for at in range(nodes)) if job else ()
    if nodes > 1 and not (job and service):
        told.problems.append(
            f"a pod of {nodes}: without the Job's and the Service's name it cannot find the others (see "
            "deploy/kubernetes)"
        )
    if nodes > 1 and index >= nodes:
        told.problems.append(
            f"JOB_COMPLETION_INDEX is {index}, and ELASTIC_RESUME_NODES tells of {nodes} nodes"
        )
    return Node(
        "kubernetes",
        name,
        job=safe_name(job, "") if job else "",
        order=index,
        nodes=nodes,
        min_nodes=least,
        peers=peers,
        # The domain is left to the pod's search path: it need not be cluster.local. The full name in the
        # pod's own /etc/hosts begins with this one, so it knows itself before DNS does.
        candidates=tuple(f"{peer}{domain}:{PORT}" for peer in peers[:CANDIDATES]) if nodes > 1 else (),
        address=told.text("address"),
        workers=told.number("workers", 0) or None,
        problems=tuple(told.problems),
    )


def _job_of_pod(told: _Told, name: str) -> str:
    """Take the index from an Indexed Job's host name."""
    index = told.environ.get("JOB_COMPLETION_INDEX", "")
    if index.isdigit() and name.endswith(f"-{index}"):
        told.sources["job"] = "HOSTNAME and JOB_COMPLETION_INDEX"
        return name.removesuffix(f"-{index}")
    return ""


def _pet(told: _Told) -> Node:
    """Kubeflow's trainers: node 0 is where all meet. What else they set torchrun's own parser reads."""
    host, port = told.text("peers"), told.number("port", PORT)
    least, nodes = told.span("nodes")
    job = told.text("job")
    return Node(
        "pet",
        told.name(),
        job=safe_name(job, "") if job and job != "none" else "",
        order=told.number("order", 0),
        nodes=nodes,
        min_nodes=least,
        peers=(host,) if host else (),
        candidates=(f"{host}:{port}",) if host else (),
        problems=tuple(told.problems),
    )


def _host(told: _Told) -> Node:
    return Node("host", told.name())


_READERS: dict[str, Callable[[_Told], Node]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "pet": _pet,
    "host": _host,
}
