"""Fill in the flags of ``run`` that the user left to the scheduler: nodes, workers, rendezvous, token.

A flag, the file of ``--config`` and torchrun's own variables take precedence over the scheduler. If the
scheduler's variables contradict each other and the job depends on them, the start fails with a ConfigError.
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
from elastic_resume.schedulers.slurm import SharedDir

SHARED_DIR_OFF = "off"
# Each of these flags names the rendezvous, or says that there is one node only.
RENDEZVOUS_FLAGS = {"rdzv_endpoint", "standalone", "master_addr", "master_port", "node_rank"}
# CoreDNS caches an answer for 30 s, so nodes may need that long to find candidates that were all replaced.
LAST_CALL_TIMEOUT_S = "35"


@dataclass(frozen=True)
class FilledOptions:
    """The names of the flags that now have a value, and the job's shared directory if it has one."""

    given_flags: frozenset[str]
    shared_dir: SharedDir | None = None


def fill_from_scheduler(
    args: argparse.Namespace, given_flags: set[str], scheduler_context: SchedulerContext
) -> FilledOptions:
    """Fill in the flags of ``args`` that are not in ``given_flags``.

    Raises:
        ConfigError: the scheduler's variables, or the shared directory, cannot be used.

    """
    context, filled = scheduler_context, set(given_flags)
    if context.tasks_per_node > 1:  # the tasks would share the node's directory and ports
        raise _scheduler_error(context)
    if "nproc_per_node" not in given_flags and context.workers_per_node:
        args.nproc_per_node = str(context.workers_per_node)
    if given_flags & RENDEZVOUS_FLAGS and not (
        context.scheduler == "pet" and _is_set_by_training_operator(given_flags)
    ):
        return FilledOptions(frozenset(filled))
    # Also where the scheduler says one node: if it misreads the number, each node would be a job of its own.
    if context.problems and ("nnodes" not in given_flags or validation.parse_nnodes(args.nnodes)[1] > 1):
        raise _scheduler_error(context)
    if "nnodes" not in given_flags and context.max_nodes > 1:
        args.nnodes = f"{context.min_nodes}:{context.max_nodes}"
    if validation.parse_nnodes(args.nnodes)[1] == 1 or not context.candidates:
        return FilledOptions(frozenset(filled))
    args.rdzv_endpoint = ",".join(context.candidates)
    # The address may belong to another node; then this node finds its own by name.
    if context.address and not args.local_addr and parse_address(context.address) in local_addresses():
        args.local_addr = context.address
    filled -= {"master_addr", "master_port", "node_rank"}  # the endpoint replaces what the operator set
    if context.scheduler == "kubernetes" and "settle" not in given_flags and "settle=" not in args.rdzv_conf:
        args.settle = LAST_CALL_TIMEOUT_S
        filled.add("settle")
    if context.scheduler != "slurm":
        return FilledOptions(frozenset(filled))
    return _share_token_in_slurm(args, filled, context)


def _scheduler_error(context: SchedulerContext) -> ConfigError:
    return ConfigError(f"{context.scheduler}: {'; '.join(context.problems)}.")


def _is_set_by_training_operator(given_flags: set[str]) -> bool:
    """Whether only the PET_* variables of a training operator name the rendezvous."""
    names = {f"PET_{name.upper()}" for name in given_flags & RENDEZVOUS_FLAGS}
    return not given_flags & {"rdzv_endpoint", "standalone"} and names <= set(os.environ)


def _share_token_in_slurm(
    args: argparse.Namespace, given_flags: set[str], scheduler_context: SchedulerContext
) -> FilledOptions:
    """Share a generated token between the nodes of a Slurm job, unless the user gave one."""
    root = args.shared_dir or ""
    if root == SHARED_DIR_OFF or "rdzv_token_file" in given_flags or constants.ENV_TOKEN in os.environ:
        return FilledOptions(frozenset(given_flags))
    root_path = Path(root or os.environ.get("SLURM_SUBMIT_DIR") or ".").absolute()
    # Each step is a run of its own; the end of the run removes its directory.
    shared_dir = SharedDir(root_path, f"{scheduler_context.job}.{os.environ.get('SLURM_STEP_ID', '0')}")
    # Only node 0 creates the token: if the directory is not shared, the other nodes fail with that message.
    args.rdzv_token_file = str(shared_dir.wait_for_token(create=scheduler_context.node_index == 0))
    return FilledOptions(frozenset(given_flags | {"rdzv_token_file"}), shared_dir)
