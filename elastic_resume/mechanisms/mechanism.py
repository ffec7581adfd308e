"""Define what a mechanism may add to workers, agents, leader and descriptions, and how its values travel.

A *mechanism* is optional: training, restart and resume work without it. Its package holds what it measures in
the workers, what the leader judges, what the agents do, and how people read of it. The rest of elastic_resume
knows it by its entry in `mechanisms.registry`. Kinds of failures are the core's words: a hang, a broken GPU
and ranks that differ are told apart in `policy/` and `events.py` too.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from elastic_resume.events import Event
from elastic_resume.option import Option
from elastic_resume.rendezvous.facts import FactBody, Topic
from elastic_resume.rendezvous.net.codec import ProtocolError, dump_json, from_json_value, to_json_value

if TYPE_CHECKING:
    from subprocess import Popen

    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from elastic_resume.checkpoint.manifest import Position
    from elastic_resume.policy.failure_classification import Failure
    from elastic_resume.policy.resume_plan import Inventory, ResumePlan
    from elastic_resume.rendezvous.client import RendezvousClient
    from elastic_resume.rendezvous.core.interface import StartWorkers
    from elastic_resume.slots.committer import CheckpointCommitter

T = TypeVar("T")


class StepObserver:
    """Measures steps in a worker, in one generation."""

    def watch(self, ddp: DistributedDataParallel) -> None:
        """Note a wrapper of a tracked model; it may be noted before."""

    def end_step(self, step: int) -> None:
        """Note the end of a step, which is the job's ``step``-th; its snapshot has begun."""

    def is_held(self) -> bool:
        """Return whether the rank must not go on from this step boundary yet; the core asks repeatedly."""
        return False

    def ask(self) -> None:
        """Note that the script asks for notices; other ranks' need not."""

    def find_notice(self) -> object:
        """Return what the script may know of a node's end, or None; at a step boundary all ranks agree."""
        return None

    def may_end(self, requested_at: float) -> bool:
        """Return whether a drain that was requested then, of the monotonic clock, may end the process now.

        If not, it is asked again at the next step boundary.
        """
        del requested_at
        return True

    def log(self, values: Mapping[str, Any], *, of_last_step: bool = False, may_drop: bool = False) -> None:
        """Note values that were logged; they belong to the step that is being computed, or to the last one.

        What belongs to the last step is logged once more if the job goes on from that step. ``may_drop``:
        leave out what cannot be recorded, with a warning, in place of an error.
        """

    def close_step(self, position: Position) -> None:
        """Note that the script's work since the last step belongs to that one: an epoch ends, or it saves.

        ``position`` is that of a state with this work; after an epoch's last step the next epoch's begin.
        """

    def was_finished_before(self, step: int) -> bool:
        """Return whether ``step`` was finished before, in an earlier generation."""
        del step
        return False

    def close(self) -> None:
        """Observe no more."""


class WorkerContext(NamedTuple):
    """What a mechanism's part in a worker works with, in one generation.

    All ranks make their observers at the same time, after the restore, so these may use the collectives.
    """

    rank: int
    local_rank: int
    world_size: int
    generation: int
    step: int
    """The step at which the generation begins."""
    node_dir: Path
    settings: Mapping[str, Any]
    """The value of each `Option` that `is_for_workers`, by its field: rank 0's on all ranks."""
    tracked: Mapping[str, Any]
    """The script's objects by name, and records of elastic_resume."""
    emit: Callable[..., Any]
    """It takes an event's kind and fields."""
    record: Callable[[int], None]
    """Record a number for the mechanism's part in the agent, if it `is_measuring`."""
    count_collectives: Callable[[], int]
    """Count those that this rank has started in the default group; 0 if unknown."""
    gather: Callable[[Any], list[Any]]
    """Return the JSON value of each rank; a collective."""
    broadcast_tensors: Callable[[Sequence[Tensor], int], None]
    """Overwrite tensors with those of a source rank; a collective."""
    read_position: Callable[[], Position]
    plan: ResumePlan
    """From which state the generation begins."""
    notes: tuple[tuple[str, Any], ...] = ()
    """Each node and its note (`Mechanism.make_note`), or None, in the order of ranks."""


class ReadingCosts(NamedTuple):
    """What it costs this node to have a snapshot read at a step; None before it is measured."""

    settings: Mapping[str, Any]
    """The fields of `config.Settings`."""
    step_s: float | None
    snapshot_s: float | None
    """Processor seconds, as are the next."""
    read_s: float | None
    """What the mechanisms have needed for the last snapshot."""
    cores: float


class EventSummary(NamedTuple):
    """What the report says about one event, as far as the event alone tells."""

    is_bad: bool
    """A person should look."""
    text: str


class AgentContext(NamedTuple):
    """What a mechanism's part in an agent works with."""

    node_dir: Path
    local_world_size: int
    node_timeout_s: float
    emit: Callable[..., Any]
    """It takes an event's kind and fields."""
    read_evidence: Callable[[], list[Event]]
    """Return the events of this generation of the kinds `events.FAILURE_EVIDENCE_KINDS`."""
    drain: Callable[[str], None]
    """Drain this node alone; it takes the cause. Safe in any thread."""
    settings: Mapping[str, Any]
    """The parsed value of each `Option` by its field."""
    committer: CheckpointCommitter
    start_early: Callable[[int, int], Popen[bytes]] | None
    """Start the launcher shim of a local rank before its generation is known, with the size of its state."""
    is_parked: Callable[[int], bool]
    """Return whether the worker of a local rank waits for its next generation."""
    measurement_index: int = -1
    """If it `is_measuring`: where `ProgressRecord.measurements` has its number."""
    summarize_event: Callable[[Event], EventSummary | None] = lambda _: None
    """Return what the report says about an event; None if it says nothing."""


class AgentPart:
    """A mechanism's part in an agent.

    The main thread, which runs torchelastic, calls all methods but three. The agent's status thread calls
    `update` and `observe`, a thread of the signal handler `begin_stop`. No call may wait for long.
    """

    def update(self, client: RendezvousClient) -> object:
        """Act once a second; return the node's `StatusMember`, or None. In the status thread."""

    def find_generation(self) -> int:
        """Return the newest generation of the job that this part knows of; before `start`."""
        return 0

    def start(self, client: RendezvousClient) -> None:
        """Begin, before the node joins a view."""

    def before_join(self) -> None:
        """Act before the node joins a view, and when a verdict changes meanwhile."""

    def begin_generation(self, view: StartWorkers) -> None:
        """Note that the workers of a view start now."""

    def observe(self, event: Event) -> None:
        """Note an event of this node's agent or workers, within about a second.

        In the status thread; in the main thread after that one has ended.
        """

    def begin_stop(self, cause: str) -> None:
        """Note a signal to stop: workers may be slow from now on. In a thread of its own."""

    def handle_failure(self, failure: Failure) -> None:
        """Note how a worker has failed; what `find_failures` returns then may precede it."""

    def find_streams(self, local_rank: int) -> tuple[str, str]:
        """Return the paths to which a worker's stdout and stderr go; empty: the agent's own."""
        del local_rank
        return "", ""

    def find_failures(self) -> tuple[Failure, ...]:
        """Return failures of this node in its generation that no worker has reported."""
        return ()

    def find_faults(self) -> tuple[Failure, ...]:
        """Return faults of this machine; it is asked before each start of workers."""
        return ()

    def close(self) -> None:
        """End what `start` began."""

    def finish(self) -> None:
        """Act after the agent's last event, `agent-end`; the agent's process waits for it."""


class AlertKind(NamedTuple):
    """A kind of event that a report lists, unless its description is empty."""

    kind: str
    describe: Callable[[Event], str]
    is_bad: bool = False
    """A person should look; not after an event of the kind `ended_by` of the same rank and generation."""
    ended_by: str = ""
    is_worst: bool = False
    """A report names it before all others."""
    is_of_job: bool = False
    """All nodes emit it, and the job ends with the same sentence."""
    same_by: tuple[str, ...] = ()
    """Fields by which events are of one problem; none: all fields but times, generation and process."""


class ReportLine(NamedTuple):
    """A line at the end of a report of a run that has events of a kind."""

    kind: str
    describe: Callable[[Sequence[Event], float], str]
    """It takes these events by time, and the Unix time of the run's end."""


class Chart(NamedTuple):
    """A number by step, for the report's page."""

    name: str
    points: Sequence[tuple[int, float]]
    """In the order of steps, each once; a value may be nan or infinite."""
    restarts: Sequence[int]
    """The steps at which later generations began."""


class StatusMember(NamedTuple):
    """A member of each node in `status`; its kind is a frozen dataclass."""

    name: str
    kind: type
    describe: Callable[[Any], str]


class Gauge(NamedTuple):
    """A metric of each node."""

    name: str
    text: str
    sample: Callable[[dict[str, Any]], float]
    """Return the value from the `StatusMember`."""
    label: str = ""
    """The field of the `StatusMember` that is a label beside the node's; empty: none is."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One mechanism, and the seams that it uses."""

    topic: Topic | None = None
    """What its agents tell the leader, and how the leader judges it."""
    make_observer: Callable[[WorkerContext], StepObserver | None] | None = None
    """It may return None, on all ranks: then it observes nothing in this generation."""
    open_evidence: Callable[[Callable[[], int]], tuple[int, int]] | None = None
    """Return the descriptors of the file into which a worker writes evidence, and of the pipe by which its
    agent requests that. It takes `WorkerContext.count_collectives`; one mechanism may have it."""
    make_note: Callable[[Path], Any] | None = None
    """Return what the local leader of a node's directory tells those of all nodes at a restore; small, and
    JSON. None: nothing."""
    pass_over: Callable[[Sequence[Inventory], Sequence[Any]], list[Inventory]] | None = None
    """Leave out saved states of all nodes, by their notes. Pure, as all ranks call it."""
    is_measuring: bool = False
    """Whether its observer records a number for its part of the agent; four mechanisms may."""
    make_agent_part: Callable[[AgentContext], AgentPart] | None = None
    needs_setting: str = ""
    """The field of the setting without which agents have no such part, and need not import it."""
    is_reading_due: Callable[[int, ReadingCosts], bool] | None = None
    """Whether the agent's part reads a snapshot of this step (`CheckpointCommitter.offer_snapshot`)."""
    alerts: tuple[AlertKind, ...] = ()
    report_line: ReportLine | None = None
    load_charts: Callable[[Sequence[Path]], list[Chart]] | None = None
    """Return the charts of a run from the directories of its nodes."""
    status: StatusMember | None = None
    gauge: Gauge | None = None
    options: tuple[Option, ...] = ()


@dataclass(frozen=True)
class LazyCall:
    """Calls a function of a module, and imports the module only then."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """Import the module and call the function."""
        return getattr(importlib.import_module(self.module), self.name)(*args)


def lazily(module: str, name: str) -> LazyCall:
    """Return a function that calls ``name`` of a mechanism's module, and imports the module only then."""
    return LazyCall(f"{__package__}.{module}", name)


def encode_body(value: Any) -> FactBody:
    """Return a frozen dataclass as the body of a fact."""
    return FactBody(dump_json(to_json_value(value)).decode())


def decode_body(kind: type[T], body: FactBody) -> T:
    """Return the dataclass that `encode_body` encoded.

    Raises:
        ValueError: it is malformed.

    """
    try:
        return from_json_value(kind, json.loads(body))
    except (ProtocolError, RecursionError) as error:
        raise ValueError(str(error)) from error
