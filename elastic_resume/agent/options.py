"""What a start means that leaves its flags to the scheduler: how many nodes, where they meet, their secret.

Promise: a flag, the file of ``--config`` and torchrun's own variables beat what the scheduler tells; a start
that has to rely on what it tells oddly is a ConfigError. Does not know schedulers (`cluster.node` does), nor
what the flags do.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import constants
from elastic_resume.agent import validation
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.endpoint import own_addresses, read_address
from elastic_resume.schedulers.environment import Node
from elastic_resume.schedulers.shared_dir import SharedDir

OFF = "off"
MEETING = {"rdzv_endpoint", "standalone", "master_addr", "master_port", "node_rank"}
"""Who gives one of these says where nodes meet, or that there is but one."""


# CoreDNS keeps an answer for 30 s: those who hold the job do not find candidates that were all replaced
# any sooner. So long a first world that is not full waits for who may be there.
SETTLE_S = "35"


@dataclass(frozen=True)
class Scheduled:
    """What was filled in: ``given`` are the names of flags that hold now, ``shared`` the job's directory."""

    given: frozenset[str]
    shared: SharedDir | None = None


def fill(args: argparse.Namespace, given: set[str], here: Node) -> Scheduled:
    """Fill in what ``args`` leaves open. ``given``: what flags, file or torchrun's variables say.

    Raises:
        ConfigError: what the scheduler tells does not do, or the shared directory does not.

    """
    found = set(given)
    if here.tasks > 1:  # they would fight for the node's directory and ports, whatever the flags are
        raise ConfigError(f"{here.scheduler}: {'; '.join(here.problems)}.")
    if "nproc_per_node" not in given and here.workers:
        args.nproc_per_node = str(here.workers)
    if given & MEETING and not (here.scheduler == "pet" and _by_trainer(given)):
        return Scheduled(frozenset(found))
    # Also where one node is told: a number of nodes that cannot be read would make each a job of its own.
    if here.problems and ("nnodes" not in given or validation.check_nodes(args.nnodes)[1] > 1):
        raise ConfigError(f"{here.scheduler}: {'; '.join(here.problems)}.")
    if "nnodes" not in given and here.nodes > 1:
        args.nnodes = f"{here.min_nodes}:{here.nodes}"
    if validation.check_nodes(args.nnodes)[1] == 1:
        return Scheduled(frozenset(found))
    if not here.candidates:
        return Scheduled(frozenset(found))
    args.rdzv_endpoint = ",".join(here.candidates)
    if here.address and not args.local_addr and read_address(here.address) in own_addresses():
        args.local_addr = here.address  # one that is another's is left alone: this node has its own name yet
    found -= {"master_addr", "master_port", "node_rank"}  # a trainer's, and said by the endpoint now
    if here.scheduler == "kubernetes" and "settle" not in given and "settle=" not in args.rdzv_conf:
        args.settle = SETTLE_S
        found.add("settle")
    if here.scheduler != "slurm":
        return Scheduled(frozenset(found))
    return _meet_in_slurm(args, found, here)


def _by_trainer(given: set[str]) -> bool:
    """Whether nothing but a trainer's variables says where nodes meet."""
    names = {f"PET_{name.upper()}" for name in given & MEETING}
    return not given & {"rdzv_endpoint", "standalone"} and names <= set(os.environ)


def _meet_in_slurm(args: argparse.Namespace, given: set[str], here: Node) -> Scheduled:
    """Let the nodes of a Slurm job share a directory with their token, where they need one."""
    wanted = args.shared_dir or os.environ.get(constants.ENV_SHARED_DIR) or ""
    if wanted == OFF or "rdzv_token_file" in given or constants.ENV_TOKEN in os.environ:
        return Scheduled(frozenset(given))
    root = Path(wanted or os.environ.get("SLURM_SUBMIT_DIR") or ".").absolute()
    # Each step is a training of its own, whose end takes its directory away.
    shared = SharedDir(root, f"{here.job}.{os.environ.get('SLURM_STEP_ID', '0')}")
    # One node alone makes the token: where the directory is not shared after all, the others find nothing
    # there, and say so.
    args.rdzv_token_file = str(shared.token(make=here.order == 0))
    return Scheduled(frozenset(given | {"rdzv_token_file"}), shared)
