"""Run jobs whose training loop a library owns, with kills and in changing worlds, and compare their logs.

A job's script takes ``--records DIRECTORY``, ``--kill PLACE@STEP:RANK[:node]`` and ``--pause STEP``. Each of
its processes writes the samples and losses of its batches, and the library's logs.
"""

from __future__ import annotations

import csv
import json
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_resume.testing import Cluster

FLAGS = ["--snapshot-every", "1", "--save-every", "1000"]
VALUES_FILE = "values.csv"
"""Beside the records: what ``--log-metrics`` got."""
TIMES = ("runtime", "per_second")
"""Parts of the names of values that were measured by a clock."""


def read_values(path: Path) -> dict[int, dict[str, float]]:
    """Return each step's values but times; a step that is there twice fails, or is out of order."""
    if not path.exists():
        return {}
    found: dict[int, dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row["step"])
            assert step > max(found, default=-1), f"step {step} is there twice"
            found[step] = {
                name: float(value)
                for name, value in sorted(row.items())
                if value and name not in {"step", "time", "run"} and not any(time in name for time in TIMES)
            }
    return found


class JobRecords:
    """What the processes of one run have recorded."""

    def __init__(self, directory: Path) -> None:
        self.batches: dict[tuple[int, int], list[list[Any]]] = defaultdict(list)  # (step, rank): by process
        self.read: dict[tuple[int, int], set[int]] = defaultdict(set)  # (step, generation): samples
        self.logs: dict[int, set[str]] = defaultdict(set)  # by rank
        self.loggers: set[str] = set()  # the names that Weights & Biases gets
        for path in directory.glob("*.jsonl"):
            rank = int(path.name.partition("-")[0])
            own: dict[int, list[Any]] = defaultdict(list)
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if "logger" in entry:
                    if entry["step"]:  # without a step there is no state yet, so a kill starts afresh
                        self.loggers.add(entry["logger"])
                elif "logs" in entry:
                    self.logs[rank].add(json.dumps([entry["step"], entry["logs"]], sort_keys=True))
                else:
                    own[entry["step"]].append([entry["read"], entry["loss"]])
                    self.read[entry["step"], entry["generation"]].update(entry["read"])
            for step, batches in own.items():
                self.batches[step, rank].append(batches)
        self.values = read_values(directory.parent / VALUES_FILE)
        self.ends = [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]

    def check_learned(self) -> None:
        """Check that the losses differ: equal runs that learn nothing would show nothing."""
        assert len({batches[0][1] for (batches,) in self.batches.values()}) > 10, "nothing was learnt"

    def check_same_batches(self, undisturbed: JobRecords) -> None:
        """Check that each process computed what the undisturbed one did at its steps, up to its end."""
        assert self.batches.keys() == undisturbed.batches.keys()
        for place, (whole,) in undisturbed.batches.items():
            of_processes = self.batches[place]
            assert whole in of_processes, f"step and rank {place} was never finished"
            assert all(batches == whole[: len(batches)] for batches in of_processes), f"step and rank {place}"

    def check_same_values(self, undisturbed: JobRecords) -> None:
        """Check that the tracker got each step once, with the undisturbed run's values."""
        assert undisturbed.values
        assert repr(self.values) == repr(undisturbed.values)  # nan too

    def check_values(self, logged: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Check that the tracker got all that was ``logged``, by step, and nothing else."""
        expected: dict[int, dict[str, float]] = defaultdict(dict)
        for step, values in logged:
            expected[step].update(values)
        assert self.values == expected

    def check_samples(self, samples_by_step: Mapping[int, set[int]]) -> None:
        """Check that some generation read all samples of each step, and none read others."""
        assert {step for step, _ in self.read} == samples_by_step.keys()
        for step, whole in samples_by_step.items():
            by_generation = [read for (number, _), read in self.read.items() if number == step]
            assert all(read <= whole for read in by_generation)
            assert whole in by_generation, f"step {step}"


@dataclass(frozen=True)
class LibraryJob:
    """A script, and the environment of its nodes."""

    script: Path
    env: dict[str, str]

    def run(
        self,
        directory: Path,
        case: str,
        *kills: str,
        ranks: int = 2,
        nodes: int = 1,
        restartable: bool = False,
    ) -> JobRecords:
        """Train to the end on ``nodes`` of ``ranks`` each; killed ones come back.

        If ``restartable``, check that only killed workers are replaced.
        """
        place = directory / f"{len(kills)}-kills-{ranks}-ranks"
        log = place / "log"
        log.mkdir(parents=True)
        flags = [*FLAGS, "--log-metrics", f"csv:{place / VALUES_FILE}"]
        env = {**self.env, "ELASTIC_RESUME_MAX_NO_PROGRESS": "1000"}  # several kills may be in one step
        settings: dict[str, Any] = {"workers_per_node": ranks, "flags": flags, "env": env}
        with Cluster(place, nodes=nodes, min_nodes=nodes, **settings) as cluster:
            options = [word for kill in kills for word in ("--kill", kill)]
            options += ["--restartable"] * restartable
            cluster.start(self.script, "--case", case, "--records", str(log), *options)
            for where, rank in (kill.split(":")[:2] for kill in kills if kill.endswith(":node")):
                cluster.wait((log / f"killed-{where}").exists, "the kill of a node")
                cluster.kill_node(int(rank) // ranks)
                cluster.start_node(int(rank) // ranks)
            assert cluster.wait_exit() == [0] * nodes, cluster.output_tails()
            generations = [event["generation"] for event in cluster.events("resume")]
            processes = {event["pid"] for event in cluster.events("worker-start")}
        if restartable:
            assert len(processes) == ranks + len(kills)
        killed = {path.name for path in log.glob("killed-*")}
        assert killed == {f"killed-{one.split(':')[0]}" for one in kills}
        # Two ranks that die in one step may need one restart.
        assert generations == list(range(1, len(generations) + 1))
        assert len(kills) / 2 < len(generations) <= len(kills) + 1
        return JobRecords(log)

    def run_in_changing_worlds(
        self, directory: Path, *options: str, pauses: tuple[int, int]
    ) -> tuple[JobRecords, list[dict[str, Any]]]:
        """Train with 3, 2, 3 and 2 ranks; return the records and the `resume` events.

        ``options`` kill node 2. It comes back in the first pause, and node 1 is asked to leave in the second.
        """
        log = directory / "log"
        log.mkdir()
        first, second = pauses
        options = (*options, "--pause", str(first), "--pause", str(second))
        with Cluster(directory, nodes=3, min_nodes=2, flags=FLAGS, env=self.env) as cluster:
            cluster.start(self.script, "--records", str(log), *options)
            cluster.wait(lambda: len(list(log.glob(f"reached-{first}-*"))) == 2, "the pause of two ranks")
            cluster.kill_node(2)
            cluster.start_node(2)
            cluster.wait(generation=3)
            (log / f"go-{first}").touch()
            # A rank that is asked to end before its pause would end with its step, and never pause.
            cluster.wait(lambda: len(list(log.glob(f"reached-{second}-*"))) == 3, "the pause of three ranks")
            cluster.kill_agent(1, signal.SIGTERM)
            cluster.wait((log / "asked").exists, "the request to n1's worker")
            (log / f"go-{second}").touch()
            codes = cluster.wait_exit()
            resumed = cluster.events("resume")
            assert codes == [0, 128 + signal.SIGTERM, 0], cluster.output(0)
            assert cluster.lost_steps == 0
        assert [event["world_size"] for event in resumed] == [3, 2, 3, 2]
        return JobRecords(log), resumed
