"""What this node is called, and its place among the others: by its scheduler, else by its host name.

A node keeps its name when it comes back, so that it finds its own checkpoints again. One dict per
scheduler says where that name is found. Does not know what a name is used for.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

# Scheduler -> variables that hold the node's name and its place, the first that is set wins.
SLURM: dict[str, tuple[str, ...]] = {"name": ("SLURMD_NODENAME",), "order": ("SLURM_NODEID",)}
# An Indexed Job gives its pods stable host names (JOB-INDEX); POD_NAME is the downward API's usual name.
KUBERNETES: dict[str, tuple[str, ...]] = {
    "name": ("POD_NAME", "HOSTNAME"),
    "order": ("JOB_COMPLETION_INDEX",),
}
SCHEDULERS = {"slurm": SLURM, "kubernetes": KUBERNETES}


def scheduler(environ: Mapping[str, str]) -> str | None:
    """``slurm``, ``kubernetes`` or None."""
    if "SLURM_JOB_ID" in environ:
        return "slurm"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else None


def default_name(environ: Mapping[str, str]) -> str:
    """This node's name where the user gives none, safe as the name of a directory."""
    found = scheduler(environ)
    names = SCHEDULERS[found]["name"] if found else ()
    for variable in names:
        if environ.get(variable):
            return safe_name(environ[variable], "node")
    return safe_name(socket.gethostname(), "node")


def order(environ: Mapping[str, str]) -> int:
    """This node's place in its scheduler's own order of nodes; 0 where none is told."""
    found = scheduler(environ)
    for variable in SCHEDULERS[found]["order"] if found else ():
        if re.fullmatch(r"\d{1,9}", environ.get(variable, "")):
            return int(environ[variable])
    return 0


def launch(environ: Mapping[str, str]) -> str:
    """Name this start of the whole job where the scheduler ends every process before the next; else empty.

    Slurm does so when it requeues a job. An element of an array is requeued alone: its siblings live on.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job or "SLURM_ARRAY_JOB_ID" in environ:
        return ""
    return f"slurm {job} {environ.get('SLURM_RESTART_COUNT', '0')}"


def safe_name(text: str, fallback: str) -> str:
    """``text`` with every character that `contract.SAFE_NAME_PATTERN` forbids replaced by a dash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:128].rstrip("-")
    return name or fallback
