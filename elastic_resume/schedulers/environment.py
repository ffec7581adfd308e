"""Read the variables that Slurm, Kubernetes, Kubeflow (``PET_*``) or SkyPilot sets in a node's environment.

One dict per scheduler maps each concept to its variable, and `SchedulerContext.sources` says where each value
came from. A node keeps its name when it comes back, so it finds its own checkpoints. A job keeps its name
over requeues. `read_context` never fails: it lists an invalid value in ``problems``, and a start that relies
on the value is refused.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.schedulers import slurm
from elastic_resume.units import format_address, parse_duration

# The fewest nodes that train, where the scheduler names one number of nodes. A user or a runtime sets it.
_MIN_NODES = ("ELASTIC_RESUME_MIN_NODES",)
_PET_WORKERS = "PET_NPROC_PER_NODE"  # stands for torchrun's flag, also beside a scheduler's own variable
# Concept -> variables that may hold it, the first that is set wins.
SLURM_VARIABLES: dict[str, tuple[str, ...]] = {
    "name": ("SLURMD_NODENAME",),
    "job": ("SLURM_JOB_ID",),
    "order": ("SLURM_NODEID",),
    "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "min_nodes": _MIN_NODES,
    "peers": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "workers": (_PET_WORKERS, "SLURM_GPUS_ON_NODE"),
    "restarts": ("SLURM_RESTART_COUNT",),  # not set before the first restart
    "deadline": ("SLURM_JOB_END_TIME",),  # set since Slurm 23.02; before, squeue is asked
}
KUBERNETES_VARIABLES: dict[str, tuple[str, ...]] = {
    # The pods of an Indexed Job have lasting host names (JOB-INDEX). The name of a pod itself, which the
    # downward API often sets as POD_NAME, ends in random letters.
    "name": ("HOSTNAME",),
    "order": ("JOB_COMPLETION_INDEX",),
    "job": ("ELASTIC_RESUME_JOB",),
    "nodes": ("ELASTIC_RESUME_NODES",),
    "min_nodes": _MIN_NODES,
    "service": ("ELASTIC_RESUME_SERVICE",),
    "namespace": ("POD_NAMESPACE",),
    "address": ("POD_IP",),
    "workers": (_PET_WORKERS, "ELASTIC_RESUME_WORKERS"),
}
PET_VARIABLES: dict[str, tuple[str, ...]] = {
    "order": ("PET_NODE_RANK",),
    "nodes": ("PET_NNODES",),
    "min_nodes": _MIN_NODES,
    "endpoint": ("PET_RDZV_ENDPOINT",),
    "peers": ("PET_MASTER_ADDR",),
    "port": ("PET_MASTER_PORT",),
    "job": ("PET_RDZV_ID",),
    "address": ("POD_IP",),
    "workers": (_PET_WORKERS,),
}
SKYPILOT_VARIABLES: dict[str, tuple[str, ...]] = {
    "job": ("SKYPILOT_TASK_ID",),
    "order": ("SKYPILOT_NODE_RANK",),
    "nodes": ("SKYPILOT_NODE_IPS",),
    "min_nodes": _MIN_NODES,
    "peers": ("SKYPILOT_NODE_IPS",),
    "workers": (_PET_WORKERS, "SKYPILOT_NUM_GPUS_PER_NODE"),
}
HOST_VARIABLES: dict[str, tuple[str, ...]] = {"workers": (_PET_WORKERS,)}
MAX_CANDIDATES = 3  # any one of them may be absent
DEFAULT_PORT = 29400  # torchrun's own
SLURM_PORTS = range(20000, 30000)  # below the ports that Linux chooses itself (32768 and up)
PORT_STRIDE_PER_STEP = 101  # a job's steps do not collide with the next jobs


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """One node of one job, as the scheduler describes it.

    Attributes:
        scheduler: ``slurm``, ``kubernetes``, ``skypilot``, ``pet`` (``PET_*`` variables, as Kubeflow sets
            them) or ``host``.
        name: name of the node, safe as a directory name.
        job: name of the job, the same after each requeue; empty if unknown.
        node_order: index of the node among the others.
        max_nodes: largest number of nodes.
        min_nodes: smallest number of nodes that train.
        peers: names of all nodes in order, as far as known.
        candidates: ``HOST:PORT`` of the nodes that newcomers call; empty if unknown.
        address: address at which others reach this node, if known.
        workers_per_node: workers per node, as torchrun takes them (``8``, ``auto``); empty if unknown.
        restarts: number of earlier starts of the job.
        launch_id: name of this start of the whole job, if the scheduler had ended all of it before; else
            empty.
        slurm_job: Slurm's id of the job, for its commands; else empty.
        deadline: Unix time at which the scheduler ends the job, if a variable has it.
        tasks_per_node: number of tasks started on one node; more than one is a mistake.
        problems: why a start without flags would fail.
        sources: maps each concept to where its value comes from.
    """

    scheduler: str
    name: str
    job: str = ""
    node_order: int = 0
    max_nodes: int = 1
    min_nodes: int = 1
    peers: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    address: str = ""
    workers_per_node: str = ""
    restarts: int = 0
    launch_id: str = ""
    slurm_job: str = ""
    deadline: float | None = None
    tasks_per_node: int = 1
    problems: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def replaced_variables(self) -> frozenset[str]:
        """Return the ``PET_*`` variables that this context stands for."""
        variables = PET_VARIABLES.values() if self.scheduler == "pet" else ()
        return frozenset(name for names in variables for name in names)


def read_context(environ: Mapping[str, str]) -> SchedulerContext:
    """Read what the scheduler tells this node."""
    read, variables = _READERS[detect_scheduler(environ)]
    reader = _VariableReader(environ, variables)
    context = read(reader)
    return replace(context, sources=MappingProxyType(reader.sources), problems=tuple(reader.problems))


def detect_scheduler(environ: Mapping[str, str]) -> str:
    """Return ``slurm``, ``kubernetes``, ``pet``, ``skypilot`` or ``host``."""
    if "SKYPILOT_NODE_IPS" in environ:  # its nodes may be pods, or the nodes of a Slurm job
        return "skypilot"
    if "SLURM_JOB_ID" in environ:
        return "slurm"
    if "PET_NNODES" in environ or "PET_MASTER_ADDR" in environ:
        return "pet"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else "host"


def read_termination_grace_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds between SIGTERM and SIGKILL for this pod; None if unknown.

    Raises:
        ConfigError: the value is no duration.

    """
    text = environ.get(constants.ENV_TERMINATION_GRACE_S, "").strip()
    setting = f"{constants.ENV_TERMINATION_GRACE_S} (the pod's terminationGracePeriodSeconds)"
    return parse_duration(setting, text, max_s=1e6) if text else None


def sanitize_name(text: str, fallback: str) -> str:
    """Replace every character that `constants.SAFE_NAME_PATTERN` forbids by a dash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:128].rstrip("-")
    return name or fallback


class _VariableReader:
    """Reads variables and records which of them were read."""

    def __init__(self, environ: Mapping[str, str], variables: Mapping[str, tuple[str, ...]]) -> None:
        self.environ = environ
        self.variables = variables
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []

    def read_text(self, concept: str, default: str = "") -> str:
        for variable in self.variables.get(concept, ()):
            if self.environ.get(variable):
                self.sources[concept] = variable
                return self.environ[variable]
        return default

    def read_number(self, concept: str, default: int) -> int:
        text = self.read_text(concept)
        if re.fullmatch(r"[0-9]{1,12}", text):
            return int(text)
        if text:
            self.problems.append(f"{self.sources.pop(concept)} is {text!r}, which is no number")
        return default

    def read_nodes(self, *, is_exact: bool = False) -> tuple[int, int]:
        """Parse ``MIN:MAX`` or ``N``: N nodes if ``is_exact``, else 1 to N, or as `read_min_nodes` says."""
        text = self.read_text("nodes")
        match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", text or "1")
        min_nodes, max_nodes = (int(match[1] or 0), int(match[2])) if match else (0, 0)
        if match and match[1] is None and max_nodes > 0:
            min_nodes = self.read_min_nodes(max_nodes, max_nodes if is_exact else 1)
        if not 1 <= min_nodes <= max_nodes:
            self.problems.append(f"{self.sources.pop('nodes')} is {text!r}, which is neither N nor MIN:MAX")
            return 1, 1
        return min_nodes, max_nodes

    def read_min_nodes(self, max_nodes: int, default: int) -> int:
        """Return the fewest nodes that train, at most ``max_nodes``: a runtime sets it for many jobs."""
        min_nodes = self.read_number("min_nodes", default)
        variable = self.sources.pop("min_nodes", "")
        if variable and min_nodes > 1 and "nodes" not in self.sources:
            self.problems.append(
                f"{variable} is {min_nodes}, and nothing says how many nodes there are: a TrainJob needs "
                "spec.trainer, another pod ELASTIC_RESUME_NODES"
            )
        elif variable and "nodes" in self.sources:
            self.sources["nodes"] = f"{variable} and {self.sources['nodes']}"
        return max(1, min(min_nodes, max_nodes))

    def read_workers(self) -> str:
        text = self.read_text("workers")
        if self.sources.get("workers") == _PET_WORKERS:
            return text  # torch judges it: a number, or auto, cpu or gpu
        if self.read_number("workers", 0) > 0:
            return text
        self.sources.pop("workers", None)
        return ""

    def read_name(self) -> str:
        text = self.read_text("name")
        if not text:
            self.sources["name"] = "the host's name"
        return sanitize_name(text or socket.gethostname(), "node")


# ---- Slurm ---------------------------------------------------------------------------------------------


def _read_slurm(reader: _VariableReader) -> SchedulerContext:
    environ = reader.environ
    number = reader.read_text("job")
    # An array's element may have the whole array's number.
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        number = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
        reader.sources["job"] = "SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID"
    peers = _read_slurm_peers(reader)
    nodes = reader.read_number("nodes", max(1, len(peers)))
    restarts = reader.read_number("restarts", 0)
    port = derive_slurm_port(environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", ""))
    reader.problems.extend(_find_slurm_problems(environ, nodes))
    return SchedulerContext(
        "slurm",
        reader.read_name(),
        job=sanitize_name(f"slurm-{number}", "slurm"),
        node_order=reader.read_number("order", 0),
        max_nodes=nodes,
        min_nodes=reader.read_min_nodes(nodes, 1),
        peers=peers,
        candidates=tuple(f"{peer}:{port}" for peer in peers[:MAX_CANDIDATES]),
        workers_per_node=reader.read_workers(),
        restarts=restarts,
        launch_id=f"slurm {number} {restarts}",
        slurm_job=number,
        deadline=reader.read_number("deadline", 0) or None,
        tasks_per_node=_count_tasks_per_node(reader.environ),
    )


def derive_slurm_port(job: str, step: str) -> int:
    """Derive the rendezvous port from job and step: equal on all nodes, different from most other jobs."""
    numbers = [int(re.sub(r"\D", "", text)[-9:] or "0") for text in (job, step)]
    return SLURM_PORTS[(numbers[0] + PORT_STRIDE_PER_STEP * numbers[1]) % len(SLURM_PORTS)]


def _read_slurm_peers(reader: _VariableReader) -> tuple[str, ...]:
    text = reader.read_text("peers")
    try:
        return tuple(slurm.expand_node_list(text)) if text else ()
    except ConfigError as error:
        reader.problems.append(f"{reader.sources.pop('peers')}: {error}")
        return ()


def _find_slurm_problems(environ: Mapping[str, str], nodes: int) -> list[str]:
    problems = []
    if nodes > 1 and "SLURM_STEP_ID" not in environ:
        problems.append(
            f"this is one process in a Slurm job of {nodes} nodes, and not one on each: start it with srun "
            "(srun elastic-resume run …)"
        )
    tasks = _count_tasks_per_node(environ)
    if tasks > 1:
        problems.append(
            f"srun starts {tasks} tasks on a node, and elastic-resume starts the workers by itself: "
            "give srun --ntasks-per-node=1, and the number of workers as --nproc-per-node"
        )
    return problems


def _count_tasks_per_node(environ: Mapping[str, str]) -> int:
    """Return the largest number of tasks on a node; ``2(x3),1`` gives 2."""
    counts = re.findall(r"(?:^|,)(\d{1,6})", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(map(int, counts), default=1)


# ---- Kubernetes and others -----------------------------------------------------------------------------


def _read_kubernetes(reader: _VariableReader) -> SchedulerContext:
    """Read the variables of a pod of an Indexed Job, as in deploy/kubernetes."""
    name, index = reader.read_name(), reader.read_number("order", 0)
    min_nodes, nodes = reader.read_nodes()
    job = reader.read_text("job") or _job_from_pod_name(reader, name)
    service, space = reader.read_text("service"), reader.read_text("namespace")
    domain = f".{service}.{space}.svc" if service and space else f".{service}"
    peers = tuple(f"{job}-{at}" for at in range(nodes)) if job else ()
    if nodes > 1 and not (job and service):
        reader.problems.append(
            f"a pod of {nodes}: without the Job's and the Service's name it cannot find the others (see "
            "deploy/kubernetes)"
        )
    return SchedulerContext(
        "kubernetes",
        name,
        job=sanitize_name(job, "") if job else "",
        node_order=index,
        max_nodes=nodes,
        min_nodes=min_nodes,
        peers=peers,
        # The domain is left to the pod's search path: it need not be cluster.local. The full name in the
        # pod's own /etc/hosts begins with this name, so the pod resolves itself before DNS does.
        candidates=tuple(f"{peer}{domain}:{DEFAULT_PORT}" for peer in peers[:MAX_CANDIDATES])
        if nodes > 1
        else (),
        address=reader.read_text("address"),
        workers_per_node=reader.read_workers(),
    )


def _job_from_pod_name(reader: _VariableReader, name: str) -> str:
    """Remove the index from an Indexed Job's host name."""
    index = reader.environ.get("JOB_COMPLETION_INDEX", "")
    if index.isdigit() and name.endswith(f"-{index}"):
        reader.sources["job"] = "HOSTNAME and JOB_COMPLETION_INDEX"
        return name.removesuffix(f"-{index}")
    return ""


def _read_pet(reader: _VariableReader) -> SchedulerContext:
    """Read the variables that Kubeflow sets in place of torchrun's flags."""
    name, order = reader.read_name(), reader.read_number("order", 0)
    min_nodes, nodes = reader.read_nodes(is_exact=True)
    host, port = reader.read_text("peers"), reader.read_number("port", DEFAULT_PORT)
    job = reader.read_text("job")
    job = "" if job == "none" else job  # torchrun's default is this word
    peers: tuple[str, ...] = (host,) if host else ()
    # The hosts of Kubeflow's Trainer are numbered: STEM-0.REST leads, and the host STEM-ORDER is this one.
    numbered = re.fullmatch(r"([^.]+)-0(\..+)?", host)
    if numbered and name == f"{numbered[1]}-{order}":
        peers = tuple(f"{numbered[1]}-{at}{numbered[2] or ''}" for at in range(nodes))
        if not job:
            job, reader.sources["job"] = numbered[1], reader.sources["peers"]
    endpoint = reader.read_text("endpoint")
    by_peer = [format_address(peer, port) for peer in peers[:MAX_CANDIDATES]]
    return SchedulerContext(
        "pet",
        name,
        job=sanitize_name(job, "") if job else "",
        node_order=order,
        max_nodes=nodes,
        min_nodes=min_nodes,
        peers=peers,
        candidates=tuple(endpoint.split(",") if endpoint else by_peer),
        address=reader.read_text("address"),
        workers_per_node=reader.read_workers(),
    )


def _read_skypilot(reader: _VariableReader) -> SchedulerContext:
    """Read SkyPilot's variables. A recovered job has other machines, so a node's name is its rank."""
    order, peers = reader.read_number("order", 0), tuple(reader.read_text("peers").split())
    nodes, job = max(1, len(reader.read_text("nodes").split())), reader.read_text("job")
    if not job.startswith("sky-managed-"):  # sky launch gives each start another id
        job, _ = "", reader.sources.pop("job", "")
    if nodes > 1 and ("order" not in reader.sources or order >= nodes):  # two nodes would have one name
        reader.problems.append(f"SKYPILOT_NODE_RANK names none of the {nodes} nodes of SKYPILOT_NODE_IPS")
    reader.sources["name"] = reader.sources.get("order", "default")
    return SchedulerContext(
        "skypilot",
        f"node{order}",
        job=sanitize_name(job, "") if job else "",
        node_order=order,
        max_nodes=nodes,
        min_nodes=reader.read_min_nodes(nodes, 1),
        peers=peers,
        candidates=tuple(format_address(peer, DEFAULT_PORT) for peer in peers[:MAX_CANDIDATES]),
        address=peers[order] if order < len(peers) else "",
        workers_per_node=reader.read_workers(),
    )


def _read_host(reader: _VariableReader) -> SchedulerContext:
    return SchedulerContext("host", reader.read_name(), workers_per_node=reader.read_workers())


_READERS: dict[str, tuple[Callable[[_VariableReader], SchedulerContext], dict[str, tuple[str, ...]]]] = {
    "slurm": (_read_slurm, SLURM_VARIABLES),
    "kubernetes": (_read_kubernetes, KUBERNETES_VARIABLES),
    "pet": (_read_pet, PET_VARIABLES),
    "skypilot": (_read_skypilot, SKYPILOT_VARIABLES),
    "host": (_read_host, HOST_VARIABLES),
}
