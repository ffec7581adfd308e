"""Create the addresses, ports, networks and disks of simulated nodes.

`LoopbackBackend` gives each node a loopback address. `NetnsBackend` gives each node a network namespace,
whose links can be cut, and a small tmpfs as its disk (`TmpfsDisk`); it needs root. A backend that lacks a
resource refuses the request and says what is needed. All processes of a node die with the node, and with the
process that made the backend.

No two clusters on a machine share an address: the owner of a loopback network holds an abstract socket with
its name until it ends. Ports lie outside the kernel's ephemeral range. Otherwise another process could get
the port at random.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import subprocess
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Literal

import psutil

from elastic_resume import linux
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.testing import fork_server
from elastic_resume.testing.virtual_network import INTERFACE, VirtualNetwork

DISK_BYTES = 256 << 20
_MOUNT_POINT = "/tmp"  # noqa: S108  in a mount namespace of its own
_MOUNT_SCRIPT = f'mount -t tmpfs -o "size=$1" tmpfs {_MOUNT_POINT} && echo && cat'
_FILLER_FILE = ".ballast"
_MIN_FILL_BYTES = 1 << 12


class TmpfsDisk:
    """A small disk of one node: a tmpfs of fixed size. It is mounted in no namespace of the host.

    The descriptor of this process keeps it alive. Other processes of root reach it through /proc.
    """

    def __init__(self, size_bytes: int = DISK_BYTES) -> None:
        """Create it, empty.

        Raises:
            MachineError: it cannot be mounted.

        """
        self.size_bytes = size_bytes
        command = ["unshare", "--mount", "sh", "-c", _MOUNT_SCRIPT, "sh", str(size_bytes)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as holder:
            if holder.stdout is None or holder.stderr is None:
                raise RuntimeError("Popen made no pipes")
            if not holder.stdout.readline():
                reason = holder.stderr.read().decode(errors="replace").strip()
                raise MachineError(f"a disk of a simulated node cannot be mounted: {reason}.")
            self._root_fd = os.open(
                f"/proc/{holder.pid}/root{_MOUNT_POINT}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )

    @property
    def path(self) -> Path:
        """Return its root directory, as every process of root on this machine sees it.

        Raises:
            UsageError: it is closed.

        """
        if self._root_fd < 0:
            raise UsageError("this simulated disk is closed.")
        return Path(f"/proc/{os.getpid()}/fd/{self._root_fd}")

    def fill(self) -> None:
        """Fill it to the last block: writes fail with ENOSPC until `free`."""
        ballast = os.open(self.path / _FILLER_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            piece = self.size_bytes
            while piece >= _MIN_FILL_BYTES:
                try:
                    os.posix_fallocate(ballast, os.fstat(ballast).st_size, piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 2
        finally:
            os.close(ballast)

    def free(self) -> None:
        """Undo `fill`."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / _FILLER_FILE).unlink()

    def close(self) -> None:
        """Remove it. A second call does nothing."""
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1


_FIRST_PORT = 10000
_EPHEMERAL_PORTS_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MAX_ATTEMPTS = 200


def claim_loopback_network() -> tuple[str, int]:
    """Claim a /24 of loopback addresses; return its prefix and the descriptor that holds the claim.

    Raises:
        MachineError: all networks are claimed.

    """
    for _ in range(_MAX_ATTEMPTS):
        prefix = f"127.{1 + secrets.randbelow(253)}.{secrets.randbelow(256)}"
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0elastic-resume-network-{prefix}")  # abstract: no file
            return prefix, claim.detach()
        except OSError:
            claim.close()
    raise MachineError("no loopback network is free: other simulated clusters have taken them.")


def find_free_port(address: str) -> int:
    """Find a free TCP port at ``address`` outside the ephemeral range.

    Raises:
        MachineError: there is none.

    """
    try:
        end = int(_EPHEMERAL_PORTS_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32768  # the default of Linux
    for _ in range(_MAX_ATTEMPTS):
        port = _FIRST_PORT + secrets.randbelow(max(1, end - _FIRST_PORT))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise MachineError(f"no port from {_FIRST_PORT} to {end} is free at {address}.")


Hosts = Literal["loopback", "namespaces"]
AGENT_PORT = 29400  # fixed, because each node has a network with all ports of its own
REQUIRES_NAMESPACES = (
    'these nodes are processes that share {}: make the Cluster with hosts="namespaces", which takes root.'
)


class LoopbackBackend:
    """Nodes are processes of this machine. Each has a loopback address that no other cluster has."""

    interface = "lo"
    has_disks = False
    """Whether each node has a disk of its own, which `close` removes."""

    def __init__(self) -> None:
        """Claim a network of loopback addresses."""
        self._network_prefix, claim = claim_loopback_network()
        self._release_network = weakref.finalize(self, os.close, claim)
        self._agents: dict[int, fork_server.AgentProcess] = {}

    def address(self, index: int) -> str:
        """Return the node's IPv4 address."""
        return f"{self._network_prefix}.{index + 1}"

    def port(self, index: int) -> int:
        """Return the port at which the node's agent may listen."""
        return find_free_port(self.address(index))

    def start(
        self, index: int, command: list[str], env: Mapping[str, str], log: IO[bytes], *, fresh: bool
    ) -> fork_server.AgentProcess:
        """Start a node's agent: forked from the fork server if possible, as a new process if ``fresh``."""
        forked = None if fresh else fork_server.start(command, env, log, network=self._namespace_path(index))
        self._agents[index] = forked or fork_server.start_with_lasting_parent(
            lambda: subprocess.Popen(
                self._wrap_command(index, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=linux.die_with_parent,  # noqa: PLW1509  one system call, before any thread matters
            )
        )
        return self._agents[index]

    def processes(self, index: int) -> list[psutil.Process]:
        """List a node's agent and its living descendants."""
        agent = self._agents.get(index)
        try:
            process = psutil.Process(agent.pid) if agent else None
            return [process, *process.children(recursive=True)] if process else []
        except psutil.NoSuchProcess:
            return []

    def crash(self, indices: Collection[int]) -> None:
        """Send SIGKILL to every process of these nodes at once. The kernel closes their connections."""
        victims = [process for index in indices for process in self.processes(index)]
        for process in victims:
            fork_server.kill(process)
        for index in indices:
            if index in self._agents:
                self._agents[index].wait()
        # The kernel kills processes that were started since: they have lost their parent.
        for process in victims:
            fork_server.wait_for_exit(process)

    @property
    def network(self) -> VirtualNetwork:
        """Return the network of the nodes."""
        raise UsageError(REQUIRES_NAMESPACES.format("one network"))

    def poweroff(self, indices: Collection[int]) -> None:
        """Drop all packets of these nodes, then kill them. Their peers see no connection end."""
        for index in indices:
            self.network.cut(index)
        self.crash(indices)

    def disk(self, index: int) -> TmpfsDisk:
        """Return the node's disk."""
        del index
        raise UsageError(REQUIRES_NAMESPACES.format("one disk"))

    def prepare_disk(self, index: int, ckpt_dir: Path) -> Path:
        """Return the path under which this process finds the contents of a node's ``ckpt_dir``."""
        del index
        return ckpt_dir

    def temporary_dir(self, directory: Path) -> str:
        """Return a path of the nodes' temporary directory that is short enough for unix sockets."""
        directory.mkdir(exist_ok=True)
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._release_temporary_dir = weakref.finalize(self, os.close, held)
        return f"/proc/{os.getpid()}/fd/{held}"

    def close(self) -> None:
        """Release everything; the nodes must be dead."""
        self._release_network()

    def _namespace_path(self, index: int) -> str:
        del index
        return ""

    def _wrap_command(self, index: int, command: list[str]) -> list[str]:
        del index
        return command


class NetnsBackend(LoopbackBackend):
    """Nodes have a network namespace and a small disk each, and share all else. Needs root."""

    interface = INTERFACE
    has_disks = True

    def __init__(self, network: VirtualNetwork | int, disk_bytes: int = DISK_BYTES) -> None:
        """Use ``network``, which its maker closes, or create one for so many nodes.

        Raises:
            MachineError: network namespaces are not available here.

        """
        self._owns_network = isinstance(network, int)
        self._virtual_network = VirtualNetwork(network) if isinstance(network, int) else network
        self._disk_bytes = disk_bytes
        self._disks: dict[int, TmpfsDisk] = {}
        self._agents = {}
        self._powered_off: set[int] = set()

    def address(self, index: int) -> str:
        """Return the node's IPv4 address; only other nodes can reach it."""
        return self.network.address(index)

    def port(self, index: int) -> int:
        """Return the port at which the node's agent listens; the node has all ports for itself."""
        del index
        return AGENT_PORT

    def start(
        self, index: int, command: list[str], env: Mapping[str, str], log: IO[bytes], *, fresh: bool
    ) -> fork_server.AgentProcess:
        """Start a node's agent; after a power cut, restore its link."""
        if index in self._powered_off:
            self._powered_off.remove(index)
            self.network.restore_link(index)
        return super().start(index, command, env, log, fresh=fresh)

    def poweroff(self, indices: Collection[int]) -> None:
        """Drop all packets of these nodes until they are started again, then kill them."""
        self._powered_off.update(indices)
        super().poweroff(indices)

    @property
    def network(self) -> VirtualNetwork:
        """Return the network, whose links can be cut."""
        return self._virtual_network

    def prepare_disk(self, index: int, ckpt_dir: Path) -> Path:
        """Create the node's disk and let ``ckpt_dir`` point to it."""
        self._disks[index] = TmpfsDisk(self._disk_bytes)
        ckpt_dir.parent.mkdir(parents=True, exist_ok=True)
        ckpt_dir.symlink_to(self._disks[index].path)
        return ckpt_dir

    def disk(self, index: int) -> TmpfsDisk:
        """Return the node's disk.

        Raises:
            UsageError: the nodes share a directory of this machine.

        """
        if index not in self._disks:
            raise UsageError("these nodes share one disk, that of this machine.")
        return self._disks[index]

    def close(self) -> None:
        """Remove the disks, and the network if it was created here. A second call does nothing."""
        for disk in self._disks.values():
            disk.close()
        if self._owns_network:
            self._virtual_network.close()

    def _namespace_path(self, index: int) -> str:
        return self.network.namespace_path(index)

    def _wrap_command(self, index: int, command: list[str]) -> list[str]:
        return self.network.wrap_command(index, command)


def make_backend(
    hosts: Hosts | VirtualNetwork | LoopbackBackend, nodes: int, disk_bytes: int | None
) -> LoopbackBackend:
    """Create the requested backend, or return the given one.

    Raises:
        UsageError: there is no such backend, or it has no disks of a given size.
        MachineError: it is not available here.

    """
    if isinstance(hosts, LoopbackBackend):
        return hosts
    if hosts == "namespaces" or isinstance(hosts, VirtualNetwork):
        return NetnsBackend(nodes if hosts == "namespaces" else hosts, disk_bytes or DISK_BYTES)
    if disk_bytes is not None:
        raise UsageError('disk_bytes: nodes have disks of their own with hosts="namespaces".')
    if hosts != "loopback":
        raise UsageError(f'hosts={hosts!r}: simulated hosts are "loopback" or "namespaces".')
    return LoopbackBackend()
