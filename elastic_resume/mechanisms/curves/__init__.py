"""Bring what rank 0 logs to the user's trackers: each step once, whatever dies.

`recorder` writes a step's values to a file of the node's directory (`journal`), `link` copies the file to
other nodes while it grows, and `writer` in the agent of rank 0's node writes the points to the trackers
(`exporter`). `notes` lets a restore pass over a state whose values no node has. The events are::

    curves-lost         error (rank 0's disk refuses), or first and last (steps without values, after a
                        restart), of_generation
    curves-failed       tracker, error; once until it is written again
    curves-recovered    tracker
    curves-abandoned    tracker, step: the job has gone back to it, and the tracker keeps later points
"""

from __future__ import annotations

from elastic_resume.mechanisms.curves import description
from elastic_resume.mechanisms.mechanism import Mechanism, lazily
from elastic_resume.option import Option

CURVES = Mechanism(
    make_observer=lazily("curves.recorder", "observe"),
    make_note=lazily("curves.notes", "make_note"),
    pass_over=lazily("curves.notes", "pass_over_unrecorded"),
    make_agent_part=lazily("curves.writer", "CurveWriter"),
    needs_setting="log_metrics",
    alerts=description.ALERTS,
    status=description.STATUS,
    load_charts=lazily("curves.charts", "load_charts"),
    options=(
        Option(
            "log-metrics",
            "TRACKER,...",
            "where run.log() writes, such as csv:FILE",
            lazily("curves.writer", "parse_trackers"),
            has_flag=True,
            details="csv:FILE, jsonl:FILE, tensorboard:DIR, wandb, wandb:PROJECT, mlflow, mlflow:URI; each "
            "step once, whatever dies; what libraries log too. Use the same on all nodes",
            default_help="off",
        ),
    ),
)
