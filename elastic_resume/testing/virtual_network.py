"""Simulated hosts: a network namespace for each node, and links that go silent.

What a killed process cannot show is silence. Its kernel closes its connections, so its peers learn of the
death at once; of a machine without power, or behind a dead switch, they learn nothing. Here each node has an
interface of its own, on a bridge that lives in yet another namespace, and a packet for a node that is out of
reach is sent to a hardware address that nobody has. Nothing answers, nothing is refused, no interface goes
down, and a connection that was silent goes on when the link is back.

**Measured**, with a link cut for a minute, on an established connection and on a new one. A neighbour that
nobody is: both wait without an error until TCP itself gives up. A bridge port taken down, or disabled: the
same while hardware addresses are given; where they are asked for (ARP), a new connection fails with
EHOSTUNREACH after 3 s. The node's own interface taken down: ENETUNREACH at once. Hence fixed addresses, and
one way to lose a packet for whole nodes, single directions and partitions; it takes no packet filter, and no
kernel module but bridge and veth. A change takes 2 ms for each node that sends otherwise, one after another.
Only links that lose some of their packets, or are narrow, take more (`links.py`): nft, and tc with tbf.

**Promises.** Nothing is named, mounted or configured on the host: the namespaces have no names and live by
descriptors of the process that made them. When it ends, in whatever way, the kernel takes down the bridge
and every link. So no run finds what another left, and any number of them go side by side. The processes
inside are bound by whoever starts them (`lab.Cluster` does); `close` ends those that are left.

**Does not know** agents, jobs or torch. It carries IPv4 from node to node, no broadcasts and no way out; a
process on the host cannot reach a node.

Links: which of them are silent, and what the kernel is told of those that lose packets or are narrow.

Pure: `hosts.Namespaces` has it carried out, on the bridge that joins the nodes. Packets are lost there,
as in a switch: a sender whose own machine dropped them would be told (EPERM). A packet is what the kernel
hands over at once, which for TCP is up to 64 kB.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil

from elastic_resume.errors import MachineError, UsageError

Pair = tuple[int, int]  # of nodes: who sends, and to whom

_PARTS = 100_000  # chances are counted in these
_BURST_S = 0.02
_LEAST_BURST = 3200  # two packets of Ethernet
_QUEUE_MS = 400  # what waits for longer than that is dropped, as a router does


@dataclass
class Silence:
    """What silences links. Each of these ends for itself: a link works when none of them names it."""

    side: list[int]  # of a partition, by node
    cut: set[int] = field(default_factory=set)  # nodes
    links: set[Pair] = field(default_factory=set)
    held: list[frozenset[Pair]] = field(default_factory=list)  # by whoever lets go of it later

    def pairs(self) -> set[Pair]:
        """Between whom nothing arrives."""
        named = self.links.union(*self.held)
        return {
            (sender, receiver)
            for sender, receiver in itertools.permutations(range(len(self.side)), 2)
            if (sender, receiver) in named
            or self.cut.intersection((sender, receiver))
            or self.side[sender] != self.side[receiver]
        }


def sides(groups: Sequence[Collection[int]], nodes: int) -> list[int]:
    """In which of these groups each node is.

    Raises:
        UsageError: one is in none, or in two.

    """
    if sorted(itertools.chain(*groups)) != list(range(nodes)):
        raise UsageError(f"a partition of nodes 0 to {nodes - 1} names each once; got {groups}.")
    return [next(side for side, group in enumerate(groups) if node in group) for node in range(nodes)]


@dataclass(frozen=True)
class Loss:
    """Which share of the packets to and from a node is lost, 0 to 1."""

    to: float
    off: float


def filter_rules(losses: Mapping[str, Loss]) -> Iterator[str]:
    """What `nft` reads: these losses, by port of the bridge, in place of all former ones, in one moment."""
    yield "table bridge losses"  # so that there is one to delete
    yield "delete table bridge losses"
    yield "table bridge losses {"
    yield "chain forward {"
    yield "type filter hook forward priority 0;"
    for port, loss in losses.items():
        for side, share in (("oifname", loss.to), ("iifname", loss.off)):
            parts = round(share * _PARTS)
            if parts:
                yield f'{side} "{port}" numgen random mod {_PARTS} <= {parts - 1} drop'
    yield "}"
    yield "}"


def shape(device: str, bytes_per_s: float) -> str:
    """What `tc` reads: send no more than this; 0: as fast as it goes."""
    if not bytes_per_s:
        return f"qdisc replace dev {device} root noqueue"
    burst = max(_LEAST_BURST, round(bytes_per_s * _BURST_S))
    rate = f"rate {round(bytes_per_s * 8)}bit burst {burst}b latency {_QUEUE_MS}ms"
    return f"qdisc replace dev {device} root tbf {rate}"


INTERFACE = "net0"  # not eth0: /sys still shows the host's interfaces, and one name must not mean two things
MAX_NODES = 250
_NUMBERS_MAX = 254
_KILLS_MAX, _KILL_S = 1000, 0.01  # one that sleeps in the kernel past ten seconds is left to it
_NOBODY = "02:65:72:ff:ff:ff"
_TOOLS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_PACKAGES = {**_TOOLS, "nft": "nftables", "tc": "iproute2"}  # these two only for loss and rates
_READS = {"nft": ["-f", "-"]}
_TRIAL = ["link add hub type bridge", "link add n0 type veth peer name net0", "link set n0 master hub"]


def available() -> str:
    """Why this process cannot make `Namespaces`, in words; empty when it can."""
    missing = [tool for tool in _TOOLS if _tool(tool) is None]
    if missing:
        packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
        return f"no {' or '.join(missing)} on this machine: apt-get install {packages}"
    tried = _call([str(_tool("unshare")), "--net", str(_tool("ip")), "-batch", "-"], _TRIAL)
    if tried.returncode == 0:
        return ""
    return (
        f"no network namespace with a bridge can be made here ({_last_line(tried.stderr)}): it takes root "
        "with CAP_SYS_ADMIN and CAP_NET_ADMIN, and a kernel with bridge and veth"
    )


class Namespaces:
    """A network namespace for each node, all on one bridge. Use it as a context manager, or call `close`."""

    def __init__(self, nodes: int = 3) -> None:
        """Make the network; every node reaches every other.

        Raises:
            MachineError: `available` says why not.

        """
        if not 1 <= nodes <= MAX_NODES:
            raise UsageError(f"{nodes} simulated hosts: there can be 1 to {MAX_NODES}.")
        why = available()
        if why:
            raise MachineError(f"simulated hosts: {why}.")
        # Chance makes it seen when a process of one cluster looks for a node of another.
        self._network = f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
        self._numbers = list(range(1, nodes + 1))  # the last part of each node's address
        self._unused = nodes + 1
        self._spaces: list[int] = []  # one for each node, then the bridge's
        self._silence = Silence([0] * nodes)
        self._lost: set[Pair] = set()  # which the kernel has been told
        self._losses: dict[int, Loss] = {}
        self._narrow: set[int] = set()
        try:
            self._spaces.extend(_namespace() for _ in range(nodes))
            self._wire()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._numbers)

    def __enter__(self) -> Namespaces:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, index: int) -> str:
        """The node's IPv4 address; it can be reached from the other nodes alone."""
        self._check(index)
        return f"{self._network}.{self._numbers[index]}"

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """``argv``, so that it runs on a node's network; folder, environment and process id stay its own.

        The process that is started becomes ``argv`` by exec: its id is the one to signal and to wait for,
        and a parent-death signal that was asked for before (prctl) still holds.
        """
        self._check(index)
        return [str(_tool("nsenter")), f"--net={_path(self._spaces[index])}", "--", *argv]

    def path(self, index: int) -> str:
        """Where a node's network namespace can be opened, for a process that enters it by itself."""
        self._check(index)
        return _path(self._spaces[index])

    def renumber(self, index: int) -> str:
        """Give a node an address that none had before, and give that back; its former one answers no more.

        Raises:
            UsageError: all addresses of the network have been used.

        """
        self._check(index)
        if self._unused > _NUMBERS_MAX:
            raise UsageError(f"these simulated hosts have used all of their {_NUMBERS_MAX} addresses.")
        former, self._numbers[index] = self.address(index), self._unused
        self._unused += 1
        others = [other for other in range(len(self)) if other != index]
        # With its last address an interface forgets its neighbours.
        lines = [
            f"addr del {former}/24 dev {INTERFACE}",
            f"addr add {self.address(index)}/24 dev {INTERFACE}",
        ]
        lines += [self._route(other, lost=(index, other) in self._lost) for other in others]
        _ip(self._spaces[index], lines)
        for other in others:
            forget = f"neigh replace {former} lladdr {_NOBODY} nud permanent dev {INTERFACE}"
            _ip(self._spaces[other], [forget, self._route(index, lost=(other, index) in self._lost)])
        return self.address(index)

    # ---- what befalls the links ----------------------------------------------------------------------

    def cut(self, index: int) -> None:
        """Let all that a node sends and all that is sent to it vanish."""
        self._check(index)
        self._silence.cut.add(index)
        self._apply()

    def lose_packets(
        self, index: int, percent: float, *, one_way: Literal["in", "out"] | None = None
    ) -> None:
        """Let a node's link lose this share of its packets, by chance, and no longer what it lost before.

        Args:
            index: whose.
            percent: of the packets, 0 to 100.
            one_way: only of those to the node ("in"), or of those that it sends ("out").

        Raises:
            MachineError: there is no nft here.

        """
        self._check(index)
        if not 0 <= percent <= 100:
            raise UsageError(f"a link loses 0 to 100 percent of its packets; got {percent}.")
        share = percent / 100
        self._losses[index] = Loss(0 if one_way == "out" else share, 0 if one_way == "in" else share)
        self._apply_losses()

    def limit_rate(self, index: int, bytes_per_s: float) -> None:
        """Let a node's link carry no more than so many bytes a second each way; 0: as many as it can.

        Raises:
            MachineError: there is no tc here.

        """
        self._check(index)
        if bytes_per_s < 0:
            raise UsageError(
                f"a link carries more than 0 bytes a second, or 0 for no limit; got {bytes_per_s}."
            )
        _run("tc", self._spaces[-1], [shape(f"n{index}", bytes_per_s)])
        _run("tc", self._spaces[index], [shape(INTERFACE, bytes_per_s)])
        self._narrow.add(index)

    def silence(self, pairs: Iterable[Pair]) -> Callable[[], None]:
        """Let what is sent from one node to another vanish, by pairs, until what is given back is called.

        Whatever else silences one of these links, and whatever `restore` does, the other goes on.
        """
        held = frozenset(pairs)
        self._check(*{index for pair in held for index in pair})
        self._silence.held.append(held)
        self._apply()

        def let_go() -> None:
            if held in self._silence.held:  # else `heal` was before it
                self._silence.held.remove(held)
                self._apply()

        return let_go

    def restore(self, index: int) -> None:
        """Undo `cut`, every `cut_link`, loss and rate; a partition stays, and what `silence` holds."""
        self._check(index)
        self._silence.cut.discard(index)
        self._silence.links = {link for link in self._silence.links if index not in link}
        self._apply()
        self._clear([index])

    def cut_link(self, sender: int, receiver: int, *, one_way: bool = False) -> None:
        """Let what one node sends to another vanish; and, unless ``one_way``, what that sends back."""
        self._check(sender, receiver)
        self._silence.links.add((sender, receiver))
        if not one_way:
            self._silence.links.add((receiver, sender))
        self._apply()

    def partition(self, groups: Sequence[Collection[int]]) -> None:
        """Let nodes reach only those of their own group, in place of any earlier partition.

        Raises:
            UsageError: a node is in no group, or in two.

        """
        self._silence.side = sides(groups, len(self))
        self._apply()

    def heal(self) -> None:
        """Let every node reach every other again: no cut, partition, loss or rate is left."""
        self._silence = Silence([0] * len(self))
        self._apply()
        self._clear(range(len(self)))

    def close(self) -> None:
        """End the processes that are left on the nodes, and the network. A second call does nothing."""
        spaces, self._spaces = self._spaces, []
        inside = {_identity(_path(space)) for space in spaces}
        for _ in range(_KILLS_MAX):  # what had just been forked is found by the next look
            if not _kill_inside(inside):
                break
            time.sleep(_KILL_S)
        for space in spaces:
            os.close(space)

    # ---- inside --------------------------------------------------------------------------------------

    def _wire(self) -> None:
        """Give every node its interface, and the bridge a port for each."""
        hub = _namespace()
        try:
            lines = ["link add hub type bridge", "link set hub addrgenmode none", "link set hub up"]
            for index, space in enumerate(self._spaces):
                lines += [
                    f"link add n{index} type veth peer name {INTERFACE} netns {_path(space)}",
                    f"link set n{index} addrgenmode none",
                    f"link set n{index} master hub up",
                    f"link set n{index} type bridge_slave bcast_flood off mcast_flood off",
                ]
            _ip(hub, lines)
        except BaseException:
            os.close(hub)
            raise
        # The bridge is the last to be left: with it go all links, whatever still runs on the nodes.
        self._spaces.append(hub)
        for index in range(len(self)):
            _ip(self._spaces[index], self._setup(index))

    def _setup(self, index: int) -> Iterable[str]:
        yield "link set lo up"
        yield f"link set {INTERFACE} address {_hardware(index)} addrgenmode none"
        yield f"addr add {self.address(index)}/24 dev {INTERFACE}"
        yield f"link set {INTERFACE} up"
        yield from (self._route(other, lost=False) for other in range(len(self)) if other != index)

    def _route(self, receiver: int, *, lost: bool) -> str:
        hardware = _NOBODY if lost else _hardware(receiver)
        return f"neigh replace {self.address(receiver)} lladdr {hardware} nud permanent dev {INTERFACE}"

    def _apply(self) -> None:
        """Make the network lose what the cuts, links and groups say, and nothing else."""
        wanted = self._silence.pairs()
        changed = wanted ^ self._lost
        for sender in sorted({pair[0] for pair in changed}):
            receivers = sorted(pair[1] for pair in changed if pair[0] == sender)
            _ip(self._spaces[sender], [self._route(to, lost=(sender, to) in wanted) for to in receivers])
        self._lost = wanted

    def _apply_losses(self) -> None:
        losses = {f"n{index}": loss for index, loss in self._losses.items()}
        _run("nft", self._spaces[-1], filter_rules(losses))

    def _clear(self, indices: Iterable[int]) -> None:
        """Undo loss and rates of these nodes."""
        for index in self._narrow.intersection(indices):
            self.limit_rate(index, 0)
        self._narrow.difference_update(indices)
        lossy = self._losses.keys() & set(indices)
        for index in lossy:
            del self._losses[index]
        if lossy:
            self._apply_losses()

    def _check(self, *indices: int) -> None:
        if not self._spaces:
            raise UsageError("these simulated hosts are closed.")
        if not all(0 <= index < len(self) for index in indices):
            raise UsageError(f"simulated hosts are 0 to {len(self) - 1}; got {indices}.")


def _namespace() -> int:
    """Make a network namespace; it lives as long as the descriptor that is given back."""
    unshare = [str(_tool("unshare")), "--net", "cat"]
    with subprocess.Popen(
        unshare, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as first:
        if first.stdin is None or first.stdout is None or first.stderr is None:
            raise RuntimeError("pipes were asked for")
        with contextlib.suppress(BrokenPipeError):
            first.stdin.write(b"\n")
        # Its echo comes from inside: before, the process may be in the namespace of this one.
        if not first.stdout.read(1):
            raise MachineError(f"no network namespace: {_last_line(first.stderr.read().decode())}.")
        return os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY)


def _ip(namespace: int, lines: Iterable[str]) -> None:
    """Run lines of `ip` in a namespace, up to the first that fails."""
    _run("ip", namespace, lines)


def _run(tool: str, namespace: int, lines: Iterable[str]) -> None:
    """Have a tool read lines in a namespace."""
    found = _tool(tool)
    if found is None:
        raise MachineError(f"no {tool} on this machine: apt-get install {_PACKAGES[tool]}.")
    command = [found, *_READS.get(tool, ["-batch", "-"])]
    done = _call([str(_tool("nsenter")), f"--net={_path(namespace)}", *command], lines)
    if done.returncode:
        raise MachineError(f"the network of the simulated hosts cannot be changed: {done.stderr.strip()}.")


def _call(command: list[str], lines: Iterable[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)


def _kill_inside(namespaces: Collection[tuple[int, int]]) -> bool:
    """Send SIGKILL to every process of these namespaces; whether there was one."""
    if _identity("/proc/self/ns/net") in namespaces:
        raise RuntimeError("the namespace of this process is none of a node's")
    found = False
    for pid in psutil.pids():
        # Gone meanwhile, or a zombie, which is in no namespace.
        with contextlib.suppress(OSError):
            if _identity(f"/proc/{pid}/ns/net") in namespaces:
                os.kill(pid, signal.SIGKILL)
                found = True
    return found


def _identity(path: str) -> tuple[int, int]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino


def _path(namespace: int) -> str:
    # Not /proc/self: another process is to open it.
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _hardware(index: int) -> str:
    return f"02:65:72:00:00:{index + 1:02x}"


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
