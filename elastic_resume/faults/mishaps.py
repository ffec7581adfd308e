"""What can befall simulated nodes: one method for each fault, done for real by the kernel.

Processes are killed and stopped by signals, checkpoints damaged in their files; a disk fails or is slow by a
failpoint of whoever uses it. Links fail and disks are full where each node has its own; elsewhere the method
says what that takes. What a method does
lasts until its counterpart is called, or the node is started again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import psutil

from elastic_resume import contract
from elastic_resume.errors import UsageError
from elastic_resume.faults.arming import Arming
from elastic_resume.faults.grounds import Loopback
from elastic_resume.faults.hosts import Namespaces
from elastic_resume.faults.moments import Planned
from elastic_resume.faults.nodes import Nodes
from elastic_resume.store.board import Line
from elastic_resume.store.catalog import Entry


class Mishaps(Nodes):
    """Nodes, and what befalls them."""

    def __init__(self, directory: Path, run_id: str, ground: Loopback, workers_per_node: int) -> None:
        """See `Nodes`."""
        super().__init__(directory, run_id, ground, workers_per_node)
        self.arming = Arming(directory / "armed")
        """For what processes of the nodes do to themselves, with more conditions than `arm` has."""
        self._disk_marks: dict[tuple[int, str], str] = {}  # of failpoints, by node and action

    # ---- processes -----------------------------------------------------------------------------------

    def kill_worker(self, index: int, local_rank: int = 0, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send ``sig`` to one worker; give its process id. SIGSTOP makes it hang, SIGCONT goes on."""
        starts = [e for e in self.events_of(index, "worker-start") if e.get("local_rank") == local_rank]
        if not starts:
            raise UsageError(f"node {self.nodes[index].name} has not started a worker {local_rank} yet.")
        return self.signal_process(index, int(starts[-1]["pid"]), sig)

    def signal_process(self, index: int, pid: int, sig: signal.Signals) -> int:
        """Send ``sig`` to a process of a node; give its id."""
        process = self.process(index, pid)
        if process is None:
            raise UsageError(f"process {pid} of node {self.nodes[index].name} has ended already.")
        process.send_signal(sig)
        return process.pid

    def kill_agent(self, index: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send ``sig`` to a node's agent alone."""
        node = self.nodes[index]
        if node.agent is not None and node.agent.poll() is None:
            node.killed = node.killed or sig == signal.SIGKILL
            node.agent.send_signal(sig)

    def kill_node(self, index: int) -> None:
        """Let a node die at once, agent and all it has started; its peers see their connections end."""
        self.kill_nodes([index])

    def kill_nodes(self, indices: Sequence[int]) -> None:
        """Let several nodes die in the same moment."""
        for index in indices:
            self.nodes[index].killed = True
        self._ground.crash(indices)

    def poweroff(self, index: int) -> None:
        """Let a node lose its power: its link falls silent, then all its processes are gone.

        Its peers are told nothing, and have to find out by its silence. Starting the node again gives it its
        link back.
        """
        self.nodes[index].killed = True
        self._ground.poweroff([index])

    def give_notice(self, index: int) -> None:
        """Tell a node that it will be taken away, as a cloud does: it saves what it has, and leaves.

        Its agent looks for a notice once a second. Starting the node again takes the notice back.
        """
        self._notice(index).touch()

    # ---- links ---------------------------------------------------------------------------------------

    @property
    def hosts(self) -> Namespaces:
        """The nodes' networks, for what this class has no word for."""
        return self._ground.network

    def cut(self, index: int) -> None:
        """Let a node's link go silent, both ways: nothing is refused, no connection ends."""
        self.hosts.cut(index)

    def restore(self, index: int) -> None:
        """Let a node's link work again, and fully, within its side of a partition."""
        self.hosts.restore(index)

    def cut_link(self, sender: int, receiver: int, *, one_way: bool = False) -> None:
        """Let what one node sends to another vanish; and, unless ``one_way``, what that sends back."""
        self.hosts.cut_link(sender, receiver, one_way=one_way)

    def partition(self, *groups: Collection[int]) -> None:
        """Let nodes reach only those of their own group; each is in one. Silence, as with `cut`."""
        self.hosts.partition(groups)

    def heal(self) -> None:
        """Let every node reach every other: no cut, partition, loss or rate is left."""
        self.hosts.heal()

    def lose_packets(self, index: int, percent: float) -> None:
        """Let so many of a hundred packets that a node sends or is sent vanish, by chance; 0: none."""
        self.hosts.lose_packets(index, percent)

    def limit_rate(self, index: int, bytes_per_s: float) -> None:
        """Let a node's link carry so much, each way; 0: as much as it can."""
        self.hosts.limit_rate(index, bytes_per_s)

    # ---- disks ---------------------------------------------------------------------------------------

    def fill_disk(self, index: int) -> None:
        """Fill a node's disk to the last block: who writes gets ENOSPC, until `free_disk`."""
        self._ground.disk(index).fill()

    def free_disk(self, index: int) -> None:
        """Undo `fill_disk`."""
        self._ground.disk(index).free()

    def break_disk(self, index: int) -> None:
        """Let all that checkpoints and records of a node ask of its disk fail with EIO, until `mend_disk`."""
        self._set_disk(index, "raise")

    def mend_disk(self, index: int) -> None:
        """Undo `break_disk`."""
        self._reset_disk(index, "raise")

    def slow_disk(self, index: int, delay_s: float) -> None:
        """Let each of those requests take so much longer; 0: no longer."""
        self._set_disk(index, "delay", f":{delay_s}") if delay_s else self._reset_disk(index, "delay")

    def wipe(self, index: int) -> None:
        """Empty a dead node's disk: its checkpoints, its events, all of its directory.

        What it has told so far is kept beside the nodes' directories: `lost_steps` and the report need it.
        """
        node = self.nodes[index]
        if node.alive:
            raise UsageError(f"node {node.name} is running: kill it before its disk is wiped.")
        with contextlib.suppress(OSError):  # it has told nothing, or its disk fails
            told = (node.directory / contract.EVENTS_FILE).read_bytes()
            self._keep_events(line + b"\n" for line in told.splitlines())
        shutil.rmtree(node.directory, ignore_errors=True)

    def truncate_newest(self, index: int, keep: float = 0.5) -> Path:
        """Cut off the end of a node's newest checkpoint; give the path of its directory."""
        path = self._newest(index).path
        state = path / contract.STATE_FILE
        os.truncate(state, int(state.stat().st_size * keep))
        return path

    def corrupt(self, index: int, at: float = 0.9) -> Path:
        """Flip one bit in the data of a node's newest checkpoint; give the path of its directory.

        ``at``: where, as a fraction of its size.
        """
        path = self._newest(index).path
        with open(path / contract.STATE_FILE, "r+b") as file:
            place = int(file.seek(0, os.SEEK_END) * at)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))
        return path

    # ---- the rest ------------------------------------------------------------------------------------

    def arm(self, index: int, point: str) -> str:
        """Let a process of a node do something to itself at a named point; once, whichever comes first.

        ``point`` is written as `failpoints.py` says: "commit.after-data=kill", "step=raise;step=20". Gives
        the mark by which `arming` can be asked whether it has happened.
        """
        return self.arming.arm(point, node=self.nodes[index].name)

    # ---- at a step -----------------------------------------------------------------------------------

    def at(self, *, step: int, rank: int | None = None, node: int | None = None) -> Moment:
        """Plan what happens as soon as a rank has finished a step: ``cluster.at(step=20, rank=1).kill()``.

        Args:
            step: or a later one, if that is seen first; milliseconds pass.
            rank: of this rank; default: of any.
            node: of a rank on this node; default: on any.

        """
        return Moment(self, step, rank, node)

    def plan(self, planned: Planned) -> None:
        """Do something when its moment has come; errors come up where the test waits."""
        self._moments.plan(planned)

    # ---- inside --------------------------------------------------------------------------------------

    def _newest(self, index: int) -> Entry:
        found = self.checkpoints(index)
        if not found:
            raise UsageError(f"node {self.nodes[index].name} has no checkpoint.")
        return found[0]

    def _set_disk(self, index: int, action: str, value: str = "") -> None:
        """Arm for one node the failpoint that every request to the disk passes."""
        self._reset_disk(index, action)
        mark = self.arming.arm(f"disk.request={action}{value}", node=self.nodes[index].name, once="")
        self._disk_marks[index, action] = mark

    def _reset_disk(self, index: int, action: str) -> None:
        self.arming.disarm(self._disk_marks.pop((index, action), ""))

    def _keep_events(self, lines: Iterable[bytes]) -> None:
        """Write down events as told by others, as far as readers know."""
        with open(self.run_dir / contract.PEERS_FILE, "ab") as log:
            log.writelines(lines)

    def _notice(self, index: int) -> Path:
        """The file that is a node's notice of preemption."""
        return self.directory / "notices" / self.nodes[index].name


class Moment:
    """A moment of a job. Each method plans something for it, once, and returns at once."""

    def __init__(self, nodes: Mishaps, step: int, rank: int | None, node: int | None) -> None:
        """See `Mishaps.at`."""
        self._nodes, self._step, self._rank, self._node = nodes, step, rank, node

    def do(self, act: Callable[..., object], *words: object) -> None:
        """Call ``act(*words)``, in a thread of its own: any method of the cluster, or what you like."""

        def do(*_: object) -> None:
            act(*words)

        self._plan(getattr(act, "__name__", str(act)), do)

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kill: with ``rank=`` that rank's worker (by this signal), with ``node=`` the whole node."""
        if self._rank is not None:
            self._plan(f"{sig.name}", lambda index, line: self._signal(index, line, sig))
        elif self._node is not None and sig == signal.SIGKILL:
            self._plan("the kill", lambda index, _: self._nodes.kill_node(index))
        else:
            raise UsageError("at(…).kill() kills the worker of rank=, by any signal, or all of node=.")

    def poweroff(self) -> None:
        """Let the node lose its power: that of ``node=``, or the one on which ``rank=`` is."""
        self._on_node("poweroff", self._nodes.poweroff)

    def cut(self) -> None:
        """Let the node's link go silent."""
        self._on_node("cut", self._nodes.cut)

    def fill_disk(self) -> None:
        """Fill the node's disk."""
        self._on_node("fill_disk", self._nodes.fill_disk)

    def corrupt(self) -> None:
        """Flip a bit in the node's newest checkpoint."""
        self._on_node("corrupt", self._nodes.corrupt)

    def partition(self, *groups: Collection[int]) -> None:
        """Let nodes reach only those of their own group."""
        self._plan("partition", lambda _, __: self._nodes.partition(*groups))

    def heal(self) -> None:
        """Let every node reach every other again."""
        self._plan("heal", lambda _, __: self._nodes.heal())

    def _on_node(self, what: str, act: Callable[[int], object]) -> None:
        if self._rank is None and self._node is None:
            raise UsageError(f"at(…).{what}() takes the rank= or the node= that it befalls.")

        def do(index: int, _: Line) -> None:
            act(index)

        self._plan(what, do)

    def _signal(self, index: int, line: Line, sig: signal.Signals) -> bool:
        """Send a signal to a worker; False: it is just ending, and the next one of its rank is meant."""
        process = self._nodes.process(index, line.worker.pid)
        try:
            if process is not None:
                process.send_signal(sig)
        except psutil.NoSuchProcess:
            return False
        return process is not None

    def _plan(self, what: str, act: Callable[[int, Line], object]) -> None:
        self._nodes.plan(Planned(what, self._step, self._rank, self._node, act))
