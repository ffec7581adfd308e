"""Job records that Slurm 22.05 gave, and commands in the place of Slurm's."""

from __future__ import annotations

from pathlib import Path

from elastic_resume.policy.requeue import TerminationReason

RECORD_FORMAT = (
    "JobId=2 JobName=b.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901758 Nice=0 "
    "Account=(null) QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:01 TimeLimit=UNLIMITED TimeMin=N/A "
    "StartTime=2026-11-21T23:23:25 EndTime={end} Deadline=N/A PreemptEligibleTime=2026-11-21T23:23:25 "
    "PreemptTime={preempted} SuspendTime=None Command=/a/EndTime=1/JobState=b.sh WorkDir=/"
)
# What was done to the job: JobState, Reason, EndTime and PreemptTime at the first SIGTERM, and the reason.
JOB_RECORDS = {
    "preempted with a grace": (
        "RUNNING None 2026-11-21T23:24:39 2026-11-21T23:24:27",
        TerminationReason.PREEMPTED,
    ),
    "the same without a time limit": (
        "RUNNING None Unknown 2026-11-21T23:23:25",
        TerminationReason.PREEMPTED,
    ),
    "preempted at once": (
        "COMPLETING None 2026-11-21T23:34:34 2026-11-21T23:34:34",
        TerminationReason.PREEMPTED,
    ),
    "scancel": ("COMPLETING None 2026-11-21T23:25:21 None", TerminationReason.JOB_ENDING),
    "scancel within the grace": (
        "COMPLETING None 2026-11-21T23:34:45 2026-11-21T23:34:42",
        TerminationReason.JOB_ENDING,
    ),
    "scontrol requeue": ("COMPLETING None Unknown None", TerminationReason.JOB_ENDING),
    "time limit": ("COMPLETING TimeLimit 2026-11-21T23:25:54 None", TerminationReason.TIME_LIMIT),
    "scancel --signal=TERM": ("RUNNING None Unknown None", TerminationReason.RUNNING),
}


def format_job_record(fields: str) -> str:
    """Return the line of ``scontrol show job -o``."""
    state, reason, end, preempted = fields.split()
    return RECORD_FORMAT.format(state=state, reason=reason, end=end, preempted=preempted)


def write_command(directory: Path, name: str, text: str) -> None:
    """Create a command."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
