"""What a start means that leaves its flags to the scheduler: how many nodes, where they meet, their secret.

Promise: a flag, the file of ``--config`` and torchrun's own variables beat what the scheduler tells; a start
that has to rely on what it tells oddly is a ConfigError. Does not know schedulers (`cluster.node` does), nor
what the flags do.
"""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import contract
from elastic_resume.agent import preflight
from elastic_resume.cluster.node import ELEMENT, Node
from elastic_resume.cluster.shared import SharedDir
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.address import Resolve, lookup, own_addresses, read_address

OFF = "off"
MEETING = {"rdzv_endpoint", "standalone", "master_addr", "master_port", "node_rank"}
"""Who gives one of these says where nodes meet, or that there is but one."""


# CoreDNS keeps an answer for 30 s: those who hold the job do not find candidates that were all replaced
# any sooner. So long a first world that is not full waits for who may be there.
SETTLE_S = "35"


class JobOverError(Exception):
    """The job was done before this node came back. Not an error."""


@dataclass(frozen=True)
class Scheduled:
    """What was filled in: ``given`` are the names of flags that hold now, ``shared`` the job's directory."""

    given: frozenset[str]
    shared: SharedDir | None = None
    resolve: Resolve = lookup


def fill(args: argparse.Namespace, given: set[str], here: Node) -> Scheduled:
    """Fill in what ``args`` leaves open. ``given``: what flags, file or torchrun's variables say.

    Raises:
        ConfigError: what the scheduler tells does not do, or the shared directory does not.
        JobOverError: there is nothing to be started.

    """
    found = set(given)
    if here.tasks > 1:  # they would fight for the node's directory and ports, whatever the flags are
        raise ConfigError(f"{here.scheduler}: {'; '.join(here.problems)}.")
    if "nproc_per_node" not in given and here.workers:
        args.nproc_per_node = str(here.workers)
    if given & MEETING and not (here.scheduler == "pet" and _by_trainer(given)):
        return Scheduled(frozenset(found))
    # Also where one node is told: a number of nodes that cannot be read would make each a job of its own.
    if here.problems and ("nnodes" not in given or preflight.check_nodes(args.nnodes)[1] > 1):
        raise ConfigError(f"{here.scheduler}: {'; '.join(here.problems)}.")
    if "nnodes" not in given and here.nodes > 1:
        args.nnodes = f"{here.min_nodes}:{here.nodes}"
    if preflight.check_nodes(args.nnodes)[1] == 1:
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
    """Let the nodes of a Slurm job share a directory, where they need one."""
    wanted = args.shared_dir or os.environ.get(contract.ENV_SHARED_DIR) or ""
    has_token = "rdzv_token_file" in given or contract.ENV_TOKEN in os.environ
    if wanted == OFF and here.element is not None:
        raise ConfigError(
            "--shared-dir is off, and the elements of an array find each other through a directory that all "
            "of them see: name one."
        )
    if wanted == OFF or (has_token and here.element is None):
        return Scheduled(frozenset(given))
    root = Path(wanted or os.environ.get("SLURM_SUBMIT_DIR") or ".").absolute()
    # Of an allocation each step is a training of its own, whose end takes its directory away.
    step = "" if here.element is not None else f".{os.environ.get('SLURM_STEP_ID', '0')}"
    shared = SharedDir(root, here.job + step)
    if not has_token:
        # Of an array any element may be the first. Else one node alone: where the directory is not shared
        # after all, the others find nothing there, and say so.
        args.rdzv_token_file = str(shared.token(make=here.element is not None or here.order == 0))
        given = given | {"rdzv_token_file"}
    if here.element is None:
        return Scheduled(frozenset(given), shared)
    if shared.done is not None:
        raise JobOverError(f"this job is done ({shared.done} says so; without that file it starts again).")
    args.local_addr = args.local_addr or own_address(here.name)
    shared.tell(f"{ELEMENT}{here.element}", args.local_addr)
    return Scheduled(frozenset(given), shared, shared.resolve)


def own_address(name: str) -> str:
    """Give the address of this machine that its name leads to, else any at which others may reach it.

    Raises:
        ConfigError: it has none but the loopback's.

    """
    own = {one for one in own_addresses() if not (one.is_loopback or one.is_link_local)}
    for known in (name, socket.gethostname()):
        try:
            found = [one for one in map(read_address, lookup(known)) if one in own]
        except OSError:
            continue
        if found:  # Debian's 127.0.1.1 is none of them
            return str(found[0])
    if not own:
        raise ConfigError(
            "this machine has no address at which others could reach it: see to its network, or give one as "
            "--local-addr."
        )
    return str(min(own, key=lambda one: (one.version, int(one))))
