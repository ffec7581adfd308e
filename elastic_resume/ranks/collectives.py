"""Join the ranks, and run the collectives of restores and step boundaries: of JSON, and of tensors.

All but `Collectives.broadcast_tensors` of GPUs run over a gloo group of our own, so the script's NCCL stream
is not involved. JSON travels as byte tensors and nothing is unpickled. A gather is one collective, or two if
a value exceeds `FIRST_BYTES`. A c10d store would cost rank 0 requests from every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from elastic_resume import constants
from elastic_resume.errors import CorruptError
from elastic_resume.policy.devices import choose_gpu
from elastic_resume.ranks import torchrun_store
from elastic_resume.ranks.group_connections import GroupConnections
from elastic_resume.ranks.node_mesh import NodeMesh
from elastic_resume.state.state_dict import view_bytes

# Most values fit, so that one collective suffices. On busy nodes each costs milliseconds, whatever its size.
FIRST_BYTES = 1024
MAX_JSON_BYTES = 256 * 1024 * 1024  # the manifest of a model with a million tensors
# A large state is read and sent between two collectives. A dead peer closes its connection, so this bounds
# only a peer that hangs.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
DESTROY_TIMEOUT_S = 5.0  # ending idle gloo threads takes a millisecond


class Collectives:
    """This process's rank, the number of ranks, and the collectives among them."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        """``group`` is a gloo group of all ranks, or None for a single rank without a process group."""
        self.rank = rank
        self.size = size
        self._group = group
        self.connections = GroupConnections()
        self.created_default_group = False
        self._created_groups = [] if group is None else [group]
        self._pid = os.getpid()

    @classmethod
    def join(
        cls, model_gpus: Collection[int] = (), connections: GroupConnections | None = None
    ) -> Collectives:
        """Join the ranks: use the existing process group, or create it from torchrun's environment.

        Without both this process is the only rank. ``model_gpus`` are the GPUs of the script's models.
        ``connections`` records the groups.
        """
        if not dist.is_available():
            return cls(0, 1, None)
        creates_default = not dist.is_initialized()
        if creates_default and not _has_launcher():
            return cls(0, 1, None)
        connections = connections or GroupConnections()
        node_mesh = NodeMesh.current
        if node_mesh is not None and node_mesh.is_in_world():
            connections.add(node_mesh.connections)
            creates_default = node_mesh.owns_world
            atexit.unregister(_destroy_default_group)
        try:
            with connections.record():
                if not dist.is_initialized():
                    _create_default_group(model_gpus)
                    if node_mesh is not None:
                        node_mesh.join()
                group = dist.new_group(
                    backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc="elastic_resume"
                )
        except BaseException:
            _destroy_process_groups([], creates_default)  # this process may join others
            raise
        collectives = cls(dist.get_rank(), dist.get_world_size(), group)
        collectives.connections = connections
        connections.groups += [default, group] if (default := dist.group.WORLD) is not None else [group]
        if node_mesh is not None and node_mesh.is_in_world():
            connections.groups.append(node_mesh.group)
        collectives.created_default_group = creates_default
        atexit.register(collectives._destroy_groups)
        return collectives

    def new_group(self, *args: Any, **kwargs: Any) -> Any:
        """Make a group with the arguments of ``dist.new_group``; it ends with the generation."""
        with self.connections.record():
            group = dist.new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):  # this rank is in it
            self.connections.groups.append(group)
        return group

    def leave(self) -> None:
        """Destroy the groups, so that this process can join others. Their connections must be cut."""
        atexit.unregister(self._destroy_groups)
        self.connections.groups.clear()
        self._group = None
        _destroy_process_groups(self._created_groups, self.created_default_group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (small, and JSON), in the order of ranks, on every rank.

        Raises:
            CorruptError: a peer sent something that is not JSON, or more than MAX_JSON_BYTES.

        """
        if self._group is None:
            return [json.loads(json.dumps(value))]
        own = json.dumps(value, separators=(",", ":")).encode()
        rows = self._gather_rows(_frame(own, FIRST_BYTES))
        sizes = [_read_size(row) for row in rows]
        if 8 + max(sizes) > FIRST_BYTES:
            rows = self._gather_rows(_frame(own, 8 + max(sizes)))
        return [_parse_json(view_bytes(row)[8 : 8 + size]) for row, size in zip(rows, sizes, strict=True)]

    def _gather_rows(self, own: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self._group)
        return rows

    def broadcast_json(self, value: Any, source_rank: int) -> Any:
        """Return the ``value`` of ``source_rank`` on every rank, up to MAX_JSON_BYTES."""
        own = json.dumps(value, separators=(",", ":")).encode() if self.rank == source_rank else b""
        if self._group is None:
            return json.loads(own)
        row = _frame(own, FIRST_BYTES)
        self.broadcast(row, source_rank)
        size = _read_size(row)
        if 8 + size > FIRST_BYTES:
            row = _frame(own, 8 + size)
            self.broadcast(row, source_rank)
        return _parse_json(view_bytes(row)[8 : 8 + size])

    def broadcast(self, tensor: Tensor, source_rank: int) -> None:
        """Overwrite ``tensor`` (contiguous, CPU) with that of ``source_rank``."""
        if self._group is not None:
            dist.broadcast(tensor, src=source_rank, group=self._group)

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Sequence[Tensor], source_rank: int) -> None:
        """Overwrite ``tensors`` with those of ``source_rank``, in one broadcast per device.

        They may have any dtypes and strides. Those of a GPU travel over the default process group, in the
        order of the current stream, and the host does not wait for them.
        """
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            # The widest first, which aligns all of them.
            for tensor in sorted(tensors, key=lambda tensor: -tensor.itemsize):
                if tensor.device == device:
                    by_dtype.setdefault(tensor.dtype, []).append(tensor)
            flats = [_flatten_dense_tensors(group) for group in by_dtype.values()]
            # Bytes: gloo knows few dtypes.
            packed = torch.cat([flat.resolve_conj().resolve_neg().view(torch.uint8) for flat in flats])
            dist.broadcast(packed, src=source_rank, group=self._group if device.type == "cpu" else None)
            if self.rank == source_rank:
                continue
            for group, part in zip(by_dtype.values(), packed.split([f.nbytes for f in flats]), strict=True):
                received = _unflatten_dense_tensors(part.view(group[0].dtype), group)
                torch._foreach_copy_(group, received)

    def _destroy_groups(self) -> None:
        """Destroy the groups that were created here, at process exit.

        A gloo thread that frees tensors at interpreter exit aborts the process (pytorch#190489). A gloo
        thread that waits for a peer would delay the exit, so wait at most `DESTROY_TIMEOUT_S`.
        """
        if os.getpid() != self._pid:  # a forked child has none of those threads
            return
        self._group = None
        self.connections.groups.clear()
        thread = threading.Thread(
            target=_destroy_process_groups,
            args=(self._created_groups, self.created_default_group),
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # Python 3.12.0 starts no thread at exit
            thread.start()
            thread.join(DESTROY_TIMEOUT_S)


def _select_gpu(model_gpus: Collection[int]) -> int | None:
    """Select this rank's GPU, and return it; None without GPUs."""
    gpu = choose_gpu(
        int(os.environ.get("LOCAL_RANK", "0")),
        torch.cuda.device_count() if torch.cuda.is_available() else 0,
        current=torch.cuda.current_device() if torch.cuda.is_initialized() else 0,
        model_gpus=model_gpus,
    )
    if gpu is not None:
        torch.cuda.set_device(gpu)  # otherwise every rank allocates on GPU 0 first
    return gpu


def _create_default_group(model_gpus: Collection[int]) -> None:
    """Create the default process group, with NCCL for tensors on GPUs."""
    gpu = _select_gpu(model_gpus)
    bound: dict[str, Any] = {}
    if constants.ENV_AGENT_PID not in os.environ and (store := torchrun_store.open_store()) is not None:
        bound = {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if gpu is None or not dist.is_nccl_available():
        dist.init_process_group("gloo", **bound)
        return
    options: Any = dist.ProcessGroupNCCL.Options()
    # NCCL of torch 2.15 takes the GPU of LOCAL_RANK unless the group is bound to one. Earlier versions take
    # each tensor's, and would connect the ranks at once if bound. NCCL refuses ranks that share a GPU, which
    # do no harm while their tensors are on CPUs.
    if hasattr(options, "lazy_init") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0":
        options.lazy_init = True
        bound |= {"device_id": torch.device("cuda", gpu), "pg_options": options}
    dist.init_process_group("cpu:gloo,cuda:nccl", **bound)


def _has_launcher() -> bool:
    """Return whether a launcher has set the variables that a process needs to join its group."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def make_node_mesh() -> Any:
    """Return the mesh of this node's ranks; see `NodeMesh`.

    A default process group is created if there is none, and `Collectives.join` takes it over. In a worker
    that starts early only `Collectives.join` creates it. Without a launcher this process is the only rank.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # noqa: PLC0415

    node_mesh = NodeMesh.current = NodeMesh.current or NodeMesh()
    if constants.ENV_EARLY_START in os.environ and not dist.is_initialized():
        _select_gpu([])
        return node_mesh.mesh
    if node_mesh.is_in_world():
        return node_mesh.mesh
    node_mesh.connections = GroupConnections()
    node_mesh.owns_world = not dist.is_initialized()
    with node_mesh.connections.record():
        if node_mesh.owns_world:
            atexit.register(_destroy_default_group, os.getpid())
            if _has_launcher():
                _create_default_group([])
            else:
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        node_mesh.join()
    return node_mesh.mesh


def _frame(data: bytes, size: int) -> Tensor:
    """Return the number of bytes in ``data``, 8 bytes, and ``data``: cut or filled up to ``size`` bytes."""
    framed = bytearray(len(data).to_bytes(8, "big") + data[: size - 8])
    return torch.frombuffer(framed.ljust(size, b"\0"), dtype=torch.uint8)


def _read_size(row: Tensor) -> int:
    """Return the number of bytes in a frame."""
    size = int.from_bytes(view_bytes(row)[:8], "big")
    if not 0 < size <= MAX_JSON_BYTES:
        raise CorruptError(f"a rank announced {size} bytes of JSON; 1 to {MAX_JSON_BYTES} are allowed.")
    return size


def _parse_json(data: bytes | memoryview) -> Any:
    try:
        return json.loads(bytes(data))
    except ValueError as error:
        raise CorruptError(f"a rank sent bytes that are not JSON: {error}.") from error


def _reset_group_names() -> None:
    """Let the next default group have the name of a first one, as in a new process.

    torch counts the groups of a process, and resets the count with the default group only. If that could not
    be made, the next one would have another name than on other ranks, and they would never meet. Not public.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and not dist.is_initialized():
        world.group_count = 0


def _destroy_default_group(owner: int) -> None:
    """Destroy the group at the exit of ``owner``; a child that it forks inherits the registration."""
    if os.getpid() == owner:
        _destroy_process_groups([], destroy_default=True)


def _destroy_process_groups(groups: list[dist.ProcessGroup], destroy_default: bool) -> None:
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the script may have destroyed it
        if destroy_default:
            _reset_group_names()
            dist.destroy_process_group()
    while groups:
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(groups[-1])
        groups.pop()  # dropping the last reference joins the group's threads
