"""Give simulated nodes a network of their own, whose links can drop packets.

A killed process cannot show what an unreachable node shows: its kernel closes its connections, so its peers
notice at once. Here each node has a network namespace with one interface, joined by a bridge in another
namespace. To cut a link, the sender's neighbour entry gets a hardware address that nobody has. Then nothing
answers, nothing is refused, no interface goes down, and a connection continues when the link is restored.
(With a bridge port down, new connections fail with EHOSTUNREACH after 3 s. With an interface down, they fail
with ENETUNREACH at once.)

Packet loss and rate limits are applied on the bridge with nft and tc, as a switch would. A sender whose own
machine dropped packets would get EPERM.

Nothing is named, mounted or configured on the host. Open descriptors of the creating process keep the
namespaces alive, so the kernel removes them when it ends. Any number of networks exist side by side. The
network carries IPv4 between nodes; it has no route out, and a process on the host cannot reach a node.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from elastic_resume.errors import MachineError, UsageError

NodePair = tuple[int, int]  # sender and receiver

_LOSS_RESOLUTION = 100_000
_BURST_S = 0.02
_MIN_BURST_BYTES = 3200  # two packets of Ethernet
_MAX_QUEUE_MS = 400  # packets that would wait longer are dropped


def links_of(node: int, nodes: int) -> frozenset[NodePair]:
    """Return the links from and to a node."""
    return frozenset(pair for pair in itertools.permutations(range(nodes), 2) if node in pair)


def links_between(groups: Sequence[Collection[int]], nodes: int) -> frozenset[NodePair]:
    """Return the links between nodes of different groups.

    Raises:
        UsageError: a node is in no group, or in two.

    """
    if sorted(itertools.chain(*groups)) != list(range(nodes)):
        raise UsageError(f"a partition of nodes 0 to {nodes - 1} names each once; got {groups}.")
    return frozenset(
        (sender, receiver)
        for group in groups
        for sender, receiver in itertools.product(group, range(nodes))
        if receiver not in group
    )


def nft_rules(losses: Mapping[str, float]) -> Iterator[str]:
    """Format the lost fraction of each bridge port as an `nft` script that replaces all rules atomically."""
    yield "table bridge losses"  # the next line can delete the table only if it exists
    yield "delete table bridge losses"
    yield "table bridge losses {"
    yield "chain forward {"
    yield "type filter hook forward priority 0;"
    for port, fraction in losses.items():
        parts = round(fraction * _LOSS_RESOLUTION)
        for side in ("oifname", "iifname") if parts else ():
            yield f'{side} "{port}" numgen random mod {_LOSS_RESOLUTION} <= {parts - 1} drop'
    yield "}"
    yield "}"


def tc_command(device: str, bytes_per_s: float) -> str:
    """Format a rate limit for `tc`; 0 removes the limit."""
    if not bytes_per_s:
        return f"qdisc replace dev {device} root noqueue"
    burst = max(_MIN_BURST_BYTES, round(bytes_per_s * _BURST_S))
    rate = f"rate {round(bytes_per_s * 8)}bit burst {burst}b latency {_MAX_QUEUE_MS}ms"
    return f"qdisc replace dev {device} root tbf {rate}"


INTERFACE = "net0"  # not eth0: /sys shows the host's interfaces too
MAX_NODES = 250
_MAX_KILL_ROUNDS, _KILL_INTERVAL_S = 1000, 0.01  # a process may sleep in the kernel for longer
_UNUSED_HARDWARE_ADDRESS = "02:65:72:ff:ff:ff"
_REQUIRED_TOOLS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_TOOL_PACKAGES = {**_REQUIRED_TOOLS, "nft": "nftables", "tc": "iproute2"}  # nft, tc: loss and rates
_STDIN_FLAGS = {"nft": ["-f", "-"]}
_PROBE_COMMANDS = [
    "link add hub type bridge",
    "link add n0 type veth peer name net0",
    "link set n0 master hub",
]


def unavailable_reason() -> str:
    """Return why this process cannot create a `VirtualNetwork`; empty if it can."""
    missing = [tool for tool in _REQUIRED_TOOLS if _find_tool(tool) is None]
    if missing:
        packages = " ".join(sorted({_REQUIRED_TOOLS[tool] for tool in missing}))
        return f"no {' or '.join(missing)} on this machine: apt-get install {packages}"
    tried = _run_with_input(
        [str(_find_tool("unshare")), "--net", str(_find_tool("ip")), "-batch", "-"], _PROBE_COMMANDS
    )
    if tried.returncode == 0:
        return ""
    return (
        f"no network namespace with a bridge can be made here ({_last_line(tried.stderr)}): it takes root "
        "with CAP_SYS_ADMIN and CAP_NET_ADMIN, and a kernel with bridge and veth"
    )


class VirtualNetwork:
    """A network namespace per node, all on one bridge. Use it as a context manager, or call `close`."""

    def __init__(self, nodes: int = 3) -> None:
        """Create the network; every node reaches every other.

        Raises:
            MachineError: network namespaces are not available here (`unavailable_reason`).

        """
        if not 1 <= nodes <= MAX_NODES:
            raise UsageError(f"{nodes} simulated hosts: there can be 1 to {MAX_NODES}.")
        why = unavailable_reason()
        if why:
            raise MachineError(f"simulated hosts: {why}.")
        # Chosen at random, so that a process of one cluster does not find nodes of another.
        self._network_prefix = f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
        self._host_numbers = list(range(1, nodes + 1))  # the last part of each node's address
        self._namespaces: list[int] = []  # descriptors: one for each node, then the bridge's
        # What silences links, and which; a link works when nothing names it.
        self._silences: dict[Hashable, frozenset[NodePair]] = {}
        self._applied_silent_pairs: set[NodePair] = set()
        self._packet_losses: dict[int, float] = {}
        self._rate_limited: set[int] = set()
        try:
            self._namespaces.extend(_make_namespace() for _ in range(nodes))
            self._connect_nodes()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._host_numbers)

    def __enter__(self) -> VirtualNetwork:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, index: int) -> str:
        """Return the node's IPv4 address; only other nodes can reach it."""
        self._require_open(index)
        return f"{self._network_prefix}.{self._host_numbers[index]}"

    def wrap_command(self, index: int, argv: Sequence[str]) -> list[str]:
        """Return a command that runs ``argv`` in a node's network.

        The started process becomes ``argv`` by exec. So its process id is the one to signal and to wait for,
        and an earlier PR_SET_PDEATHSIG still holds. Directory and environment are unchanged.
        """
        self._require_open(index)
        return [str(_find_tool("nsenter")), f"--net={_descriptor_path(self._namespaces[index])}", "--", *argv]

    def namespace_path(self, index: int) -> str:
        """Return a path of a node's network namespace, for a process that enters it itself."""
        self._require_open(index)
        return _descriptor_path(self._namespaces[index])

    # ---- faults of links ----------------------------------------------------------------------

    def cut(self, index: int) -> None:
        """Drop all packets to and from a node."""
        self._require_open(index)
        self._silences["node", index] = links_of(index, len(self))
        self._apply_silence()

    def lose_packets(self, index: int, percent: float) -> None:
        """Drop 0 to 100 percent of the packets to and from a node at random.

        Raises:
            MachineError: nft is not installed.

        """
        self._require_open(index)
        if not 0 <= percent <= 100:
            raise UsageError(f"a link loses 0 to 100 percent of its packets; got {percent}.")
        self._packet_losses[index] = percent / 100
        self._apply_losses()

    def limit_rate(self, index: int, bytes_per_s: float) -> None:
        """Limit a node's link to so many bytes per second each way; 0 removes the limit.

        Raises:
            MachineError: tc is not installed.

        """
        self._require_open(index)
        if bytes_per_s < 0:
            raise UsageError(
                f"a link carries more than 0 bytes a second, or 0 for no limit; got {bytes_per_s}."
            )
        _run_tool("tc", self._namespaces[-1], [tc_command(f"n{index}", bytes_per_s)])
        _run_tool("tc", self._namespaces[index], [tc_command(INTERFACE, bytes_per_s)])
        self._rate_limited.add(index)

    def silence_links(self, pairs: Iterable[NodePair]) -> Callable[[], None]:
        """Drop packets between these pairs until the returned function is called.

        Other faults of these links, and `restore_link`, do not affect it.
        """
        cut = frozenset(pairs)
        self._require_open(*{index for pair in cut for index in pair})
        key = object()
        self._silences[key] = cut
        self._apply_silence()

        def restore() -> None:
            if self._silences.pop(key, None) is not None:  # `heal` removes it too
                self._apply_silence()

        return restore

    def restore_link(self, index: int) -> None:
        """Undo `cut`, `cut_link`, loss and rate of a node. A partition and `silence_links` stay."""
        self._require_open(index)
        for key in [("node", index), *((link,) for link in links_of(index, len(self)))]:
            self._silences.pop(key, None)
        self._apply_silence()
        self._clear_loss_and_rate([index])

    def cut_link(self, sender: int, receiver: int, *, one_way: bool = False) -> None:
        """Drop what one node sends to another and, unless ``one_way``, what that one sends back."""
        self._require_open(sender, receiver)
        for link in [(sender, receiver)] if one_way else [(sender, receiver), (receiver, sender)]:
            self._silences[link,] = frozenset([link])
        self._apply_silence()

    def partition(self, groups: Sequence[Collection[int]]) -> None:
        """Let nodes reach only those of their own group; it replaces an earlier partition.

        Raises:
            UsageError: a node is in no group, or in two.

        """
        self._silences["partition"] = links_between(groups, len(self))
        self._apply_silence()

    def heal(self) -> None:
        """Undo every cut, partition, loss and rate limit."""
        self._silences.clear()
        self._apply_silence()
        self._clear_loss_and_rate(range(len(self)))

    def close(self) -> None:
        """Kill all processes on the nodes and remove the network. A second call does nothing."""
        spaces, self._namespaces = self._namespaces, []
        inside = {_namespace_id(_descriptor_path(space)) for space in spaces}
        for _ in range(_MAX_KILL_ROUNDS):  # the next round finds processes that were just forked
            if not _kill_in_namespaces(inside):
                break
            time.sleep(_KILL_INTERVAL_S)
        for space in spaces:
            os.close(space)

    # ---- inside --------------------------------------------------------------------------------------

    def _connect_nodes(self) -> None:
        """Create an interface for every node, and its port on the bridge."""
        hub = _make_namespace()
        try:
            lines = ["link add hub type bridge", "link set hub addrgenmode none", "link set hub up"]
            for index, space in enumerate(self._namespaces):
                lines += [
                    f"link add n{index} type veth peer name {INTERFACE} netns {_descriptor_path(space)}",
                    f"link set n{index} addrgenmode none",
                    f"link set n{index} master hub up",
                    f"link set n{index} type bridge_slave bcast_flood off mcast_flood off",
                ]
            _run_ip(hub, lines)
        except BaseException:
            os.close(hub)
            raise
        # It is closed last: with the bridge all links end, whatever still runs on the nodes.
        self._namespaces.append(hub)
        for index in range(len(self)):
            _run_ip(self._namespaces[index], self._interface_commands(index))

    def _interface_commands(self, index: int) -> Iterable[str]:
        yield "link set lo up"
        yield f"link set {INTERFACE} address {_hardware_address(index)} addrgenmode none"
        yield f"addr add {self.address(index)}/24 dev {INTERFACE}"
        yield f"link set {INTERFACE} up"
        yield from (self._neighbor_command(other, lost=False) for other in range(len(self)) if other != index)

    def _neighbor_command(self, receiver: int, *, lost: bool) -> str:
        hardware = _UNUSED_HARDWARE_ADDRESS if lost else _hardware_address(receiver)
        return f"neigh replace {self.address(receiver)} lladdr {hardware} nud permanent dev {INTERFACE}"

    def _apply_silence(self) -> None:
        """Make the kernel drop exactly what the cuts, links and groups say."""
        wanted = set[NodePair]().union(*self._silences.values())
        changed = wanted ^ self._applied_silent_pairs
        for sender in sorted({pair[0] for pair in changed}):
            receivers = sorted(pair[1] for pair in changed if pair[0] == sender)
            _run_ip(
                self._namespaces[sender],
                [self._neighbor_command(to, lost=(sender, to) in wanted) for to in receivers],
            )
        self._applied_silent_pairs = wanted

    def _apply_losses(self) -> None:
        losses = {f"n{index}": loss for index, loss in self._packet_losses.items()}
        _run_tool("nft", self._namespaces[-1], nft_rules(losses))

    def _clear_loss_and_rate(self, indices: Iterable[int]) -> None:
        """Remove loss and rate limits of these nodes."""
        for index in self._rate_limited.intersection(indices):
            self.limit_rate(index, 0)
        self._rate_limited.difference_update(indices)
        lossy = self._packet_losses.keys() & set(indices)
        for index in lossy:
            del self._packet_losses[index]
        if lossy:
            self._apply_losses()

    def _require_open(self, *indices: int) -> None:
        if not self._namespaces:
            raise UsageError("these simulated hosts are closed.")
        if not all(0 <= index < len(self) for index in indices):
            raise UsageError(f"simulated hosts are 0 to {len(self) - 1}; got {indices}.")


def _make_namespace() -> int:
    """Create a network namespace; it lives as long as the returned descriptor."""
    unshare = [str(_find_tool("unshare")), "--net", "cat"]
    with subprocess.Popen(
        unshare, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as first:
        if first.stdin is None or first.stdout is None or first.stderr is None:
            raise RuntimeError("Popen made no pipes")
        with contextlib.suppress(BrokenPipeError):
            first.stdin.write(b"\n")
        # The echo shows that the process has entered its namespace; before, it may be in ours.
        if not first.stdout.read(1):
            raise MachineError(f"no network namespace: {_last_line(first.stderr.read().decode())}.")
        return os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY)


def _run_ip(namespace: int, lines: Iterable[str]) -> None:
    """Run lines of `ip` in a namespace, up to the first that fails."""
    _run_tool("ip", namespace, lines)


def _run_tool(tool: str, namespace: int, lines: Iterable[str]) -> None:
    """Run a tool in a namespace with lines as its input."""
    found = _find_tool(tool)
    if found is None:
        raise MachineError(f"no {tool} on this machine: apt-get install {_TOOL_PACKAGES[tool]}.")
    command = [found, *_STDIN_FLAGS.get(tool, ["-batch", "-"])]
    done = _run_with_input(
        [str(_find_tool("nsenter")), f"--net={_descriptor_path(namespace)}", *command], lines
    )
    if done.returncode:
        raise MachineError(f"the network of the simulated hosts cannot be changed: {done.stderr.strip()}.")


def _run_with_input(command: list[str], lines: Iterable[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)


def _kill_in_namespaces(namespaces: Collection[tuple[int, int]]) -> bool:
    """Send SIGKILL to every process of these namespaces; return whether there was one."""
    if _namespace_id("/proc/self/ns/net") in namespaces:
        raise RuntimeError("this process would kill all processes of its own namespace")
    found = False
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # the process has ended
            if _namespace_id(f"/proc/{pid}/ns/net") in namespaces:
                os.kill(pid, signal.SIGKILL)
                found = True
    return found


def _namespace_id(path: str) -> tuple[int, int]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino


def _descriptor_path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _hardware_address(index: int) -> str:
    return f"02:65:72:00:00:{index + 1:02x}"


def _find_tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
