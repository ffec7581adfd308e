"""The ranks of this generation, as the resume protocol needs them.

Everything is exchanged as tensors of bytes over a gloo group of our own: JSON in, JSON out, nothing is
unpickled, and neither the user's NCCL stream nor a private store of torch is touched. A gather costs one
collective; a store would cost rank 0 as many requests as there are ranks, twice.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_resume.errors import CorruptError
from elastic_resume.state.tensor_buffer import view_bytes

MAX_JSON_BYTES = 256 * 1024 * 1024  # a manifest of a model with a million tensors
# Reading and sending a large state happens between two collectives; a dead peer is noticed by its closed
# connection at once, so this bounds only a peer that hangs.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
DESTROY_TIMEOUT_S = 5.0  # to end threads that wait for nobody takes a millisecond


class Collectives:
    """This process's place among the ranks, and ways to talk to them."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        """``group`` is a gloo group of all ranks; None in a world of one without a process group."""
        self.rank = rank
        self.size = size
        self._group = group
        self._created_groups = [] if group is None else [group]  # groups to let go of at the end
        self._created_default_group = False
        self._pid = os.getpid()

    @classmethod
    def join(cls) -> Collectives:
        """Use the process group that exists, make one when torchrun's environment is there, or be alone."""
        if not dist.is_available():
            return cls(0, 1, None)
        launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        makes_default = not dist.is_initialized()
        if makes_default:
            if not launched:
                return cls(0, 1, None)
            if torch.cuda.is_available() and torch.cuda.device_count() > local_rank:
                torch.cuda.set_device(local_rank)  # or every rank's first allocation lands on GPU 0
            cuda = torch.cuda.is_available() and dist.is_nccl_available()
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        world = cls(dist.get_rank(), dist.get_world_size(), group)
        world._created_default_group = makes_default
        atexit.register(world._destroy_groups)
        return world

    def gather(self, value: Any) -> list[Any]:
        """Give every rank every rank's ``value`` (anything JSON can say), by rank. Keep it small.

        Raises:
            CorruptError: a peer sent what is not JSON, or more than MAX_JSON_BYTES.

        """
        if self._group is None:
            return [json.loads(json.dumps(value))]
        mine = json.dumps(value, separators=(",", ":")).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(size) for size in sizes)
        _check_json_size(longest)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self._group)
        return [_parse_json(view_bytes(row)[: int(size)]) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_json(self, value: Any, source_rank: int) -> Any:
        """Give every rank the ``value`` of ``source_rank``, however large (up to MAX_JSON_BYTES)."""
        if self._group is None:
            return json.loads(json.dumps(value))
        return Channel(self._group).broadcast_json(value, source_rank)

    def create_channel(self, ranks: Sequence[int]) -> Channel | None:
        """Make a channel among ``ranks``; every rank of the world must call this, with the same ranks."""
        if self._group is None:
            return None
        group = dist.new_group(sorted(ranks), backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        if self.rank not in ranks:
            return None
        self._created_groups.append(group)
        return Channel(group)

    def all_ranks_channel(self) -> Channel | None:
        """Give a channel among all ranks, or None in a world of one."""
        return None if self._group is None else Channel(self._group)

    def _destroy_groups(self) -> None:
        """Destroy the groups that were made here, when the process ends.

        A gloo thread that frees tensors at interpreter exit aborts the process (pytorch#190489). Destroy the
        groups in a thread; wait at most `LEAVE_S`, since a gloo thread that waits for a peer takes longer.
        """
        if os.getpid() != self._pid:  # a forked child has none of those threads
            return
        self._group = None
        leaving = threading.Thread(
            target=_destroy_process_groups,
            args=(self._created_groups, self._created_default_group),
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # Python 3.12.0 starts no thread any more
            leaving.start()
            leaving.join(DESTROY_TIMEOUT_S)


class Channel:
    """Broadcasts of tensors of host memory among some ranks; any one thread of each may use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """``group`` is a gloo group that this rank belongs to."""
        self._group = group

    def broadcast(self, tensor: Tensor, source_rank: int) -> None:
        """Overwrite ``tensor`` (contiguous, on the CPU) with that of ``source_rank``, a rank of the world."""
        dist.broadcast(tensor, src=source_rank, group=self._group)

    def start_broadcast(self, tensor: Tensor, source_rank: int) -> dist.Work:
        """Begin what `broadcast` does; several may be under way, in the same order on all ranks."""
        work: dist.Work = dist.broadcast(tensor, src=source_rank, group=self._group, async_op=True)
        return work

    def broadcast_json(self, value: Any, source_rank: int) -> Any:
        """Give every rank of the channel the ``value`` of ``source_rank`` (up to MAX_JSON_BYTES)."""
        mine = json.dumps(value, separators=(",", ":")).encode() if dist.get_rank() == source_rank else b""
        size = torch.tensor([len(mine)])
        dist.broadcast(size, src=source_rank, group=self._group)
        _check_json_size(int(size))
        row = torch.frombuffer(bytearray(mine or int(size)), dtype=torch.uint8)
        dist.broadcast(row, src=source_rank, group=self._group)
        return _parse_json(view_bytes(row))


def _check_json_size(size: int) -> None:
    if not 0 < size <= MAX_JSON_BYTES:
        raise CorruptError(f"a rank wants to send {size} bytes of JSON; 1 to {MAX_JSON_BYTES} are allowed.")


def _parse_json(data: memoryview) -> Any:
    try:
        return json.loads(bytes(data))
    except ValueError as error:
        raise CorruptError(f"a rank sent what is not JSON: {error}.") from error


def _destroy_process_groups(groups: list[dist.ProcessGroup], destroy_default: bool) -> None:
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the script has done it
        if destroy_default:
            dist.destroy_process_group()
    while groups:
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(groups[-1])
        groups.pop()  # the last reference to it: its threads are joined here
