"""What this node is called: by its scheduler, else by its host name.

A node keeps its name when it comes back, so that it finds its own checkpoints again. One dict per
scheduler says where that name is found. Does not know what a name is used for.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

# Scheduler -> variables that hold the node's name, the first that is set wins.
SLURM: dict[str, tuple[str, ...]] = {"name": ("SLURMD_NODENAME",)}
# An Indexed Job gives its pods stable host names (JOB-INDEX); POD_NAME is the downward API's usual name.
KUBERNETES: dict[str, tuple[str, ...]] = {"name": ("POD_NAME", "HOSTNAME")}
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


def safe_name(text: str, fallback: str) -> str:
    """``text`` with every character that `contract.SAFE_NAME_PATTERN` forbids replaced by a dash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:128].rstrip("-")
    return name or fallback
