"""Compare a run of a script under faults with an undisturbed run, on simulated nodes.

The end of a run is the newest checkpoint of rank 0's node: position, tensors bit for bit, and all other
tracked state. If the script prints a line per step (samples, loss), these lines are compared too. When
`assert_same_run` returns or raises, the nodes are gone and the files are removed.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.errors import ConfigError
from elastic_resume.events import Event
from elastic_resume.testing import fault_runner
from elastic_resume.testing.cluster import Cluster, Hosts
from elastic_resume.testing.fault_runner import DONE, FaultInjector, FaultOutcome
from elastic_resume.testing.faults import Fault, JobShape, check_faults

if TYPE_CHECKING:
    from elastic_resume.state.diff import Difference

KILL_FAULTS = ("kill-worker", "kill-agent", "kill-node")
POLL_S = 0.001  # a step of a small model takes a few milliseconds
IDLE_POLL_S, EVENT_POLL_S = 0.05, 0.5
INTERNAL_PREFIX, SEED_NAME = "elastic_resume.", "elastic_resume.seed"
SEED_HINT = "the seed that random numbers come from: give er.resume() a seed, or torch.manual_seed one"
FOLLOWS_RANK0_HINT = " (follows rank 0, and may be another rank's after its node is gone)"
MAX_SHOWN_DIFFERENCES = 8  # differences in an error


@dataclass(frozen=True)
class RunResult:
    """The result of one run: its newest checkpoint, and each compared line once, in order."""

    path: Path
    manifest: Manifest
    lines: tuple[str, ...]
    resumes: tuple[Event, ...]


@dataclass(frozen=True)
class RunSpec:
    """What is run twice."""

    script: Path
    args: tuple[str, ...]
    nodes: int
    workers_per_node: int
    hosts: Hosts
    flags: tuple[str, ...]
    env: Mapping[str, str]
    line_pattern: str | None
    timeout_s: float

    def run(self, directory: Path, faults: Sequence[Fault]) -> RunResult:
        """Run it to its end under these faults.

        Raises:
            AssertionError: it failed, or its end cannot be compared.

        """
        logs = directory / "logs"
        # A file for each worker: lines that several workers write to one may be mixed.
        flags = ["--snapshot-every", "1", *self.flags, "--tee", "3", "--log-dir", str(logs)]
        with Cluster(
            directory,
            nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            run_id="same-run",
            flags=flags,
            env=self.env,
            hosts=self.hosts,
        ) as cluster:
            cluster.start(self.script, *self.args)
            _Run(self, cluster, faults).run_to_end()
            cluster.stop()  # no process writes any more, so the results can be read
            return self._read_result(cluster, logs)

    def _read_result(self, cluster: Cluster, logs: Path) -> RunResult:
        resumes = tuple(cluster.events("resume"))
        if not resumes:
            raise make_error(
                cluster, f"{self.script.name} never called er.resume(): there is nothing to compare"
            )
        found = [
            (entry.path, entry.manifest)
            for index in range(self.nodes)
            for entry in cluster.checkpoints(index)[:1]
            if entry.manifest is not None
        ]
        # Ranks may have moved; tensors of the script's own objects are those of rank 0, wherever it runs.
        newest = max(found, key=lambda one: (one[1].version, one[1].rank == 0), default=None)
        if newest is None:
            raise make_error(
                cluster,
                f"{self.script.name} ended without a checkpoint: its last step is saved where the loop is "
                "`for epoch in run.epochs(EPOCHS)`, or by run.close()",
            )
        return RunResult(*newest, self._matching_lines(logs), resumes)

    def _matching_lines(self, logs: Path) -> tuple[str, ...]:
        if self.line_pattern is None:
            return ()
        wanted = re.compile(self.line_pattern)
        files = sorted(logs.rglob("std*.log"), key=lambda file: file.stat().st_mtime)
        printed = (line for file in files for line in file.read_text(errors="replace").splitlines())
        return tuple(
            dict.fromkeys(line for line in printed if wanted.search(line) and not _is_own_log_line(line))
        )


def _is_own_log_line(line: str) -> bool:
    return line.startswith("elastic_resume")


class _Run:
    """A run in progress, with its fault injector."""

    def __init__(self, spec: RunSpec, cluster: Cluster, faults: Sequence[Fault]) -> None:
        self._spec, self._cluster, self._faults = spec, cluster, faults
        self._injector = FaultInjector(cluster, faults)
        # The first rank that finishes the step waits for the injector: on a busy machine a small job takes a
        # hundred steps before this process runs again.
        self._step_waits = [
            cluster.failpoints.arm("step=wait", step=fault.step)
            for fault in faults
            if fault.step is not None and not fault_runner.failpoint_entry(fault)
        ]
        self._deadline = time.monotonic() + spec.timeout_s
        self._next_event_poll = 0.0

    def run_to_end(self) -> None:
        """Inject the faults, and return when all nodes have ended well."""
        try:
            while not self._injector.is_over:
                waiting = [one for one in self._step_waits if self._cluster.failpoints.is_waiting(one)]
                self._injector.poll()
                for failpoint_id in waiting:
                    self._step_waits.remove(failpoint_id)
                    self._cluster.failpoints.release(failpoint_id)
                if time.monotonic() > self._next_event_poll:
                    self._next_event_poll = time.monotonic() + EVENT_POLL_S
                    self._poll_events()
                time.sleep(POLL_S if self._injector.pending else IDLE_POLL_S)
        finally:
            outcomes = [replace(outcome) for outcome in self._injector.outcomes]
            self._injector.close()
        codes = self._cluster.wait_exit(only=range(self._spec.nodes))
        if any(codes):
            raise self._make_error(f"ended with exit codes {codes}")
        for outcome in outcomes:
            if outcome.state != DONE:
                reason = f" ({outcome.reason})" if outcome.reason else ""
                raise self._make_error(
                    f"was over before this came: {outcome.fault}{reason}; let it come earlier"
                )
        self._require_resumes([outcome for outcome in outcomes if outcome.fault.what in KILL_FAULTS])

    def _poll_events(self) -> None:
        """Fail early on an error of the script itself, which would otherwise be tried again."""
        if time.monotonic() > self._deadline:
            raise self._make_error(f"did not end within {self._spec.timeout_s:.0f} s")
        if not self._faults:
            self._require_no_failure()

    def _require_no_failure(self) -> None:
        ended = [event for event in self._cluster.events("worker-exit") if not event.get("stopped")]
        failed = [event for event in ended if event.get("exit_code") or event.get("signal")]
        if failed:
            end = failed[0].get("signal") or f"exit code {failed[0].get('exit_code')}"
            failure = next(iter(self._cluster.events("failure")), {})
            text = failure.get("traceback") or failure.get("message") or ""
            raise self._make_error(
                f"failed undisturbed: rank {failed[0].get('rank')} ended with {end}\n{text}"
            )

    def _require_resumes(self, kills: Sequence[FaultOutcome]) -> None:
        later = [event for event in self._cluster.events("resume") if event["generation"] > 1]
        last = max(kills, key=lambda outcome: outcome.generation, default=None)
        if last is not None and (not later or later[-1]["generation"] <= last.generation):
            raise self._make_error(f"was over before it noticed {last.fault}: let it come earlier")
        if any(event["kind"] != "resumed" for event in later):
            raise self._make_error(
                "began anew after a fault: there was no saved state to continue from, so nothing is proven"
            )

    def _make_error(self, message: str) -> AssertionError:
        under = f" (under: {', '.join(map(str, self._faults))})" if self._faults else ""
        return make_error(self._cluster, f"{self._spec.script.name} {message}{under}")


def make_error(cluster: Cluster, message: str) -> AssertionError:
    """Make an error with ``message`` and the nodes' output."""
    return AssertionError(f"{message}.\n{cluster.output_tails()}")


def assert_same_run(
    script: Path | str,
    *words: str,
    faults: Sequence[Fault] = (),
    nodes: int = 3,
    workers_per_node: int = 1,
    hosts: Hosts = "loopback",
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    lines: str | None = None,
    ignore: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> None:
    """Run a script undisturbed and under faults; fail unless both end in the same state, bit for bit.

    Without faults it compares two undisturbed runs, which must be equal too.

    Args:
        script: the script that ``elastic-resume run`` starts; it runs to its end twice.
        *words: its arguments.
        faults: ``[Fault("kill-worker", rank=1, step=20)]``. A killed node or agent is restarted, with its
            disk.
        nodes: number of simulated nodes. The job trains on all of them and waits for those that are down.
        workers_per_node: ranks on each.
        hosts: "namespaces" (as root) for faults of links and disks; see `Cluster`.
        flags: further flags of ``elastic-resume run``. Each step has a snapshot unless they say otherwise.
        env: added to the environment.
        lines: regular expression. Each matching line that the script prints must also be a line of the
            undisturbed run. So print the step's number with the loss or the samples:
            ``print(f"step {run.position.step + 1}: {loss.item()}")``. A recomputed step prints its line
            again, and each fault may cost each rank one line.
        ignore: names that need not be equal, with * and ?: ``"*running_*"``; ``"timer"`` is the whole object.
        timeout_s: limit for each of the two runs.

    Raises:
        AssertionError: it names the first difference, or shows the output of a script that failed.
        ConfigError: a fault cannot happen here.

    """
    check_faults(faults, JobShape(nodes, workers_per_node, hosts))
    job = RunSpec(
        script=Path(script),
        args=words,
        nodes=nodes,
        workers_per_node=workers_per_node,
        hosts=hosts,
        flags=tuple(flags),
        env=dict(env or {}),
        line_pattern=lines,
        timeout_s=timeout_s,
    )
    with tempfile.TemporaryDirectory(prefix="same-run-") as temporary:
        directory = Path(temporary)
        undisturbed = job.run(directory / "undisturbed", [])
        steps = undisturbed.manifest.step
        late = [fault for fault in faults if fault.step is not None and fault.step >= steps]
        if late:
            raise ConfigError(f"{late[0]} cannot come: {job.script.name} ends with step {steps}.")
        disturbed = job.run(directory / "disturbed", faults)
        max_missing = len(faults) * nodes * workers_per_node
        lines_differ = compare_lines(undisturbed.lines, disturbed.lines, max_missing=max_missing)
        state_differs = compare_state(undisturbed, disturbed, ignore)
    if lines_differ or state_differs:
        raise AssertionError(_format_failure(job, faults, disturbed, lines_differ, state_differs))


def compare_lines(undisturbed: Sequence[str], disturbed: Sequence[str], *, max_missing: int) -> list[str]:
    """Return the first line that only one of the runs printed. A line that a kill cut off does not count."""
    expected, printed = set(undisturbed), set(disturbed)
    torn = {line for line in printed - expected if any(one.startswith(line) for one in expected)}
    others = [line for line in disturbed if line not in expected and line not in torn]
    missing = [line for line in undisturbed if line not in printed]
    if others:
        return [f"it printed {others[0]!r}, which it does not print undisturbed ({len(others)} such lines)"]
    if len(missing) > max_missing:
        return [f"it did not print {missing[0]!r} ({len(missing)} such lines; {max_missing} may be missing)"]
    return []


def compare_state(undisturbed: RunResult, disturbed: RunResult, ignore: Sequence[str]) -> dict[str, str]:
    """Describe each name at which two states differ, beginning with the seed."""
    from elastic_resume.state import diff  # noqa: PLC0415  imports torch, seconds

    found = diff.compare(undisturbed.path, disturbed.path).differences
    follows = {*undisturbed.manifest.rank0_tensors, *disturbed.manifest.rank0_tensors}
    lines = {SEED_NAME: SEED_HINT} if any(one.name.startswith(SEED_NAME) for one in found) else {}
    for difference in found:
        name = difference.name
        if name.startswith(INTERNAL_PREFIX):
            continue
        if any(_matches_pattern(name, pattern) for pattern in ignore):
            continue
        lines[name] = _format_difference(difference) + (FOLLOWS_RANK0_HINT if name in follows else "")
    return lines


def _matches_pattern(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}/")


def _format_difference(difference: Difference) -> str:
    if difference.kind.startswith("only"):
        run = "undisturbed" if difference.kind == "only in A" else "under faults"
        return f"{difference.name}: is there only {run}"
    if difference.kind == "values":
        return (
            f"{difference.name} {difference.value_a}: {difference.differing_elements} of "
            f"{difference.total_elements} numbers differ, by {difference.max_abs_difference:.3g} at most"
        )
    return f"{difference.name}: {difference.value_b}, undisturbed {difference.value_a}"


def _format_failure(
    spec: RunSpec,
    faults: Sequence[Fault],
    result: RunResult,
    lines_differ: Sequence[str],
    state_differs: Mapping[str, str],
) -> str:
    differences = [*lines_differ, *state_differs.values()]
    under = ", ".join(map(str, faults)) or "nothing befell it"
    went = "".join(
        f"\n  generation {event['generation']} went on after step {event['step']}"
        for event in result.resumes[1:]
    )
    more = (
        f"\n  … and {len(differences) - MAX_SHOWN_DIFFERENCES} more"
        if len(differences) > MAX_SHOWN_DIFFERENCES
        else ""
    )
    listed = "".join(f"\n  {one}" for one in differences[:MAX_SHOWN_DIFFERENCES])
    names = [name for name in state_differs if name != SEED_NAME][:MAX_SHOWN_DIFFERENCES]
    hint = f"\n  Only for values that may differ, such as a time: ignore={names}" if names else ""
    head = f"{spec.script.name} does not end as it ends undisturbed ({under}):"
    return f"{head}{listed}{more}{hint}{went}\n{_format_advice(faults)}"


def _format_advice(faults: Sequence[Fault]) -> str:
    if not faults:
        return (
            "Two undisturbed runs differ, so a resumed one cannot be equal: seed what is random, and let no "
            "clock, thread or process number decide what is computed."
        )
    return (
        "What er.resume() was not given is not restored; random numbers that are not torch's, numpy's or "
        "random's are not drawn again. Without faults two undisturbed runs are compared."
    )
