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
from elastic_resume.rendezvous.endpoint import local_addresses, parse_address
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.schedulers.shared_dir import SharedDir

SHARED_DIR_OFF = "off"
RENDEZVOUS_FLAGS = {"rdzv_endpoint", "standalone", "master_addr", "master_port", "node_rank"}
"""Who gives one of these says where nodes meet, or that there is but one."""


# CoreDNS keeps an answer for 30 s: those who hold the job do not find candidates that were all replaced
# any sooner. So long a first world that is not full waits for who may be there.
LAST_CALL_TIMEOUT_S = "35"


@dataclass(frozen=True)
class FilledOptions:
    """What was filled in: ``given`` are the names of flags that hold now, ``shared`` the job's directory."""

    given_flags: frozenset[str]
    shared_dir: SharedDir | None = None


def fill_from_scheduler(
    args: argparse.Namespace, given_flags: set[str], scheduler_context: SchedulerContext
) -> FilledOptions:
    """Fill in what ``args`` leaves open. ``given``: what flags, file or torchrun's variables say.

    Raises:
        ConfigError: what the scheduler tells does not do, or the shared directory does not.

    """
    found = set(given_flags)
    if (
        scheduler_context.tasks_per_node > 1
    ):  # they would fight for the node's directory and ports, whatever the flags are
        raise ConfigError(f"{scheduler_context.scheduler}: {'; '.join(scheduler_context.problems)}.")
    if "nproc_per_node" not in given_flags and scheduler_context.workers_per_node:
        args.nproc_per_node = str(scheduler_context.workers_per_node)
    if given_flags & RENDEZVOUS_FLAGS and not (
        scheduler_context.scheduler == "pet" and _is_set_by_training_operator(given_flags)
    ):
        return FilledOptions(frozenset(found))
    # Also where one node is told: a number of nodes that cannot be read would make each a job of its own.
    if scheduler_context.problems and (
        "nnodes" not in given_flags or validation.parse_nnodes(args.nnodes)[1] > 1
    ):
        raise ConfigError(f"{scheduler_context.scheduler}: {'; '.join(scheduler_context.problems)}.")
    if "nnodes" not in given_flags and scheduler_context.max_nodes > 1:
        args.nnodes = f"{scheduler_context.min_nodes}:{scheduler_context.max_nodes}"
    if validation.parse_nnodes(args.nnodes)[1] == 1:
        return FilledOptions(frozenset(found))
    if not scheduler_context.candidates:
        return FilledOptions(frozenset(found))
    args.rdzv_endpoint = ",".join(scheduler_context.candidates)
    if (
        scheduler_context.address
        and not args.local_addr
        and parse_address(scheduler_context.address) in local_addresses()
    ):
        args.local_addr = (
            scheduler_context.address
        )  # one that is another's is left alone: this node has its own name yet
    found -= {"master_addr", "master_port", "node_rank"}  # a trainer's, and said by the endpoint now
    if (
        scheduler_context.scheduler == "kubernetes"
        and "settle" not in given_flags
        and "settle=" not in args.rdzv_conf
    ):
        args.settle = LAST_CALL_TIMEOUT_S
        found.add("settle")
    if scheduler_context.scheduler != "slurm":
        return FilledOptions(frozenset(found))
    return _share_token_in_slurm(args, found, scheduler_context)


def _is_set_by_training_operator(given_flags: set[str]) -> bool:
    """Whether nothing but a trainer's variables says where nodes meet."""
    names = {f"PET_{name.upper()}" for name in given_flags & RENDEZVOUS_FLAGS}
    return not given_flags & {"rdzv_endpoint", "standalone"} and names <= set(os.environ)


def _share_token_in_slurm(
    args: argparse.Namespace, given_flags: set[str], scheduler_context: SchedulerContext
) -> FilledOptions:
    """Let the nodes of a Slurm job share a directory with their token, where they need one."""
    wanted = args.shared_dir or os.environ.get(constants.ENV_SHARED_DIR) or ""
    if wanted == SHARED_DIR_OFF or "rdzv_token_file" in given_flags or constants.ENV_TOKEN in os.environ:
        return FilledOptions(frozenset(given_flags))
    root = Path(wanted or os.environ.get("SLURM_SUBMIT_DIR") or ".").absolute()
    # Each step is a training of its own, whose end takes its directory away.
    shared = SharedDir(root, f"{scheduler_context.job}.{os.environ.get('SLURM_STEP_ID', '0')}")
    # One node alone makes the token: where the directory is not shared after all, the others find nothing
    # there, and say so.
    args.rdzv_token_file = str(shared.wait_for_token(create=scheduler_context.node_index == 0))
    return FilledOptions(frozenset(given_flags | {"rdzv_token_file"}), shared)
