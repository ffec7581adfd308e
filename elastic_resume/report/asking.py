"""Finds the agents of a job, and asks whoever leads how it stands.

Where agents are is told by flags (endpoints, the job's name, its token), by a ``look.json`` that an agent of
this machine or of a shared file system wrote, or by the scheduler. Promise: asks, and changes nothing; each
question has a limit of time; no error text shows a token.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume import contract
from elastic_resume.agent.document import VERSION
from elastic_resume.cluster import node
from elastic_resume.cluster.node import Node
from elastic_resume.config import DEFAULT_CKPT_DIR
from elastic_resume.errors import RendezvousLostError, UsageError
from elastic_resume.rendezvous import looking
from elastic_resume.rendezvous.address import parse_endpoints
from elastic_resume.rendezvous.token import read_token
from elastic_resume.rendezvous.wire import WireError, look_key

PATIENCE_S = 3.0
MAX_HOPS = 3
MAX_KNOWN = 64
"""Addresses of members that are kept, should all that were given be dead by then."""
_MAX_FILE_BYTES = 64 * 1024
_NAMED = 5


@dataclass
class Job:
    """One job, and where its agents were last known to listen."""

    run_id: str
    key: bytes = field(repr=False)
    addresses: list[str]

    def ask(self) -> dict[str, Any]:
        """Give the document of whoever leads; of another agent where that one does not answer.

        Raises:
            RendezvousLostError: nobody answers.

        """
        why: dict[str, str] = {}
        for address in list(self.addresses):
            said = self._ask(address, why)
            for _ in range(MAX_HOPS):
                leader = said and said["leader"]
                if not said or said["leads"] or not leader or leader["address"] in why:
                    break
                said = self._ask(leader["address"], why) or said
            if said:
                self._remember(said)
                return said
        told = "; ".join(f"{address}: {reason}" for address, reason in list(why.items())[:_NAMED])
        raise RendezvousLostError(f"no agent of job {self.run_id!r} answers ({told}).")

    def _ask(self, address: str, why: dict[str, str]) -> dict[str, Any] | None:
        try:
            return ask_agent(address, self.run_id, self.key)
        except WireError as error:
            why[address] = str(error)
        except (OSError, ValueError) as error:
            why[address] = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None

    def _remember(self, said: Mapping[str, Any]) -> None:
        """Whoever answered is asked first, then the members of its world, then those that were given."""
        world = said["world"]
        members = world["addresses"] if world else []
        self.addresses = list(dict.fromkeys([said["address"], *members, *self.addresses]))[:MAX_KNOWN]


def ask_agent(address: str, run_id: str, key: bytes) -> dict[str, Any]:
    """Return the document of one agent; ``key`` is a `wire.look_key`.

    Raises:
        WireError: it is no agent of that job, or refuses the key.
        OSError: it is not reached, or does not answer in time.

    """
    return _document(looking.ask(address, run_id, key, patience_s=PATIENCE_S))


def find(path: Path | None, *, endpoint: str | None, run_id: str | None, token_file: Path | None) -> Job:
    """Find the job that is meant.

    Args:
        path: CKPT_DIR, or the directory of a run or a node in it; None: where a start here would put it.
        endpoint: ``--rdzv-endpoint``; with it ``path`` is not looked at.
        run_id: ``--rdzv-id``.
        token_file: ``--rdzv-token-file``.

    Raises:
        UsageError: it cannot be told which.
        ConfigError: a value is wrong.

    """
    here = node.read(os.environ)
    name = run_id or os.environ.get(contract.ENV_RUN_ID)
    if endpoint is None:
        root = path or Path(os.environ.get(contract.ENV_CKPT_DIR) or DEFAULT_CKPT_DIR)
        found = [job for job in _jobs_in(root) if name in {None, job.run_id}]
        if not name and not path and here.job:
            found = [job for job in found if _is_of(here, job.run_id)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.run_id for one in found[:_NAMED])
            raise UsageError(f"{root}: {len(found)} jobs run here ({names}): say which with --rdzv-id.")
        if path is not None or not here.candidates:
            raise UsageError(
                f"{root}: no agent that runs has left its {contract.LOOK_FILE} here, or this user may not "
                "read it. Give the CKPT_DIR of a node on which the job runs, or --rdzv-endpoint and "
                "--rdzv-id as `elastic-resume run` has them."
            )
    name = name or here.job
    if not name:
        raise UsageError("--rdzv-endpoint says where to ask, and not for which job: add --rdzv-id.")
    token, _ = read_token(token_file, os.environ, name)
    addresses = [str(one) for one in parse_endpoints(endpoint)] if endpoint else list(here.candidates)
    return Job(name, look_key(token), addresses)


def _is_of(here: Node, run_id: str) -> bool:
    """Whether the scheduler's job has that run: in Slurm it is named after job and script."""
    return run_id == here.job or (here.scheduler == "slurm" and run_id.startswith(f"{here.job}-"))


def _jobs_in(root: Path) -> list[Job]:
    """The jobs whose agents have left word there."""
    jobs: dict[str, Job] = {}
    for depth in ("", "*/", "*/*/"):
        try:
            files = sorted(root.glob(f"{depth}{contract.LOOK_FILE}"))
        except OSError:
            files = []
        for file in files:
            job = read_look(file)
            if job is None:
                continue
            known = jobs.setdefault(job.run_id, job)
            known.addresses = list(dict.fromkeys([*known.addresses, *job.addresses]))
    return [job for _, job in sorted(jobs.items())]


def read_look(path: Path) -> Job | None:
    """Read what an agent has left; None where there is nothing of the kind."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            said = json.loads(file.read(_MAX_FILE_BYTES))
        addresses = [said["address"], *said["endpoints"]]
        if all(isinstance(one, str) for one in (said["run_id"], *addresses)):
            return Job(said["run_id"], bytes.fromhex(said["key"]), list(dict.fromkeys(addresses)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _document(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except RecursionError:
        said = None
    if not isinstance(said, dict) or "error" in said:
        raise WireError(str(said.get("error"))[:500] if isinstance(said, dict) else "not a document")
    if said.get("version") != VERSION:
        raise WireError(f"it tells in version {str(said.get('version'))[:16]!r}, this is version {VERSION}")
    leader, world = said.get("leader"), said.get("world")
    who = [said, *([leader] if leader is not None else [])]
    places = [one.get("address") if isinstance(one, dict) else None for one in who]
    if world is not None:
        members = world.get("addresses") if isinstance(world, dict) else None
        places += members if isinstance(members, list) else [None]
    if not all(isinstance(one, str) for one in places) or not isinstance(said.get("leads"), bool):
        raise WireError("it answers with a document that is not one of ours")
    return said
