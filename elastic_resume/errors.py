"""Define every error that this package raises on purpose, for ``except er.errors.CheckpointError``.

::

    ElasticResumeError
     ├─ UsageError              the caller's code or flags are wrong            exit 1
     │   ├─ ConfigError           a flag or variable is unknown or out of range         exit 2 of ``run``
     │   ├─ UntrackableError      an object holds state that cannot be stored
     │   ├─ MismatchError         the model does not fit the checkpoint
     │   └─ WorldChangedError     the number of ranks changed and the script forbids that
     ├─ MachineError            the machine is wrong: disk full, not writable   exit 1; 74: unstarted ``run``
     │   ├─ NodeLockedError       another agent holds this node's directory
     │   ├─ NodeFileError         a small file of the node's directory is damaged
     │   └─ HardwareError         the machine of this rank computes wrongly
     ├─ ArchiveError            the archive refuses, or cannot be reached       exit 1
     │   ├─ SecondWriterError     another job archives under the same run id
     │   └─ ArchiveOutageError    a start needs the archive, and has waited     exit 75
     ├─ CheckpointError         bytes on disk, in the archive or from a peer are wrong
     │   ├─ TornError             incomplete
     │   ├─ CorruptError          digest mismatch, or a format violation
     │   ├─ ForeignError          another job's, or not a checkpoint
     │   ├─ NewerFormatError      written by a newer elastic_resume
     │   └─ UnreadableError       this machine cannot read it now; its bytes may be valid
     │       └─ PeerFailedError     another rank could not send it
     ├─ NoValidCheckpointError  checkpoints exist and none can be loaded        exit 1
     ├─ JobFailedError          the restart policy ended the job                exit 1
     ├─ LaunchError             a job of ``launch`` ended without success, in the process that called it
     ├─ RendezvousLostError     the agents cannot reach each other any more     exit 75
     ├─ NodeExcludedError       this node leaves, the others continue           exit 75
     ├─ OtherRankFailedError    another rank cannot continue, so none can       exit 1
     ├─ DivergenceError         replicas that must be equal are not             exit 1
     └─ NotProvedError          a resume led to another state than the run     exit 1 with ``--prove stop``
    WorldChanged               leaves a `run.restartable` function; a BaseException, and never an error

The exit codes are those of the command line. ``chaos`` and ``diff`` exit 2 for all of these errors.

A message says what failed, where, why, and what to do, in one or two lines. If ``is_deterministic`` is true,
a restart would fail in the same way, and the agent does not try one.
"""

from __future__ import annotations

from enum import Enum

__all__ = [
    "ArchiveError",
    "ArchiveOutageError",
    "CheckpointError",
    "ConfigError",
    "CorruptError",
    "DivergenceError",
    "ElasticResumeError",
    "ForeignError",
    "HardwareError",
    "JobFailedError",
    "LaunchError",
    "MachineError",
    "MismatchError",
    "NewerFormatError",
    "NoValidCheckpointError",
    "NodeExcludedError",
    "NodeFileError",
    "NodeLockedError",
    "NotProvedError",
    "OtherRankFailedError",
    "PeerFailedError",
    "RendezvousLostError",
    "SecondWriterError",
    "TornError",
    "UnreadableError",
    "UntrackableError",
    "UsageError",
    "WorldChanged",
    "WorldChangedError",
]


class ElasticResumeError(Exception):
    """Base of all errors that this package raises on purpose.

    It is raised itself if the state of the job is inconsistent and no other class fits. The text says what
    to do.
    """

    is_deterministic = True
    is_worth_requeue = False  # another start, some time later, may not meet it

    def __init__(self, *args: object, reason: object = None) -> None:
        """``reason`` is the fact that the text describes, for events; see `policy.reasons`."""
        super().__init__(*args)
        self.reason = reason


class UsageError(ElasticResumeError):
    """The caller's code or flags are wrong.

    Raised by `er.resume` and the methods of `Run`, before they change anything. Correct the call that the
    text names.
    """


class ConfigError(UsageError):
    """An argument, flag or environment variable is unknown or out of range.

    Raised by `er.resume` and by every command before it starts. Correct the setting that the text names.
    """


class UntrackableError(UsageError):
    """An object holds state that is neither a tensor nor plain data.

    Raised by `er.resume`, or by `Run.step` and `Run.save` if an object comes to hold such state later. The
    text names the path and type. Remove the value from ``state_dict()``, or keep it as a tensor.
    """


class MismatchError(UsageError):
    """The tracked objects do not fit the checkpoint.

    Raised by `er.resume`, before it loads anything. The text lists the names that differ. Build the same
    objects as in the run that saved, or start over with ``resume="never"``.
    """


class WorldChangedError(UsageError):
    """The number of ranks differs from the checkpoint's.

    Raised by `er.resume` under ``on_world_change="error"`` only. Start as many ranks as before, or choose
    another policy.
    """


class MachineError(ElasticResumeError):
    """The machine is wrong: a directory cannot be written, a disk is full.

    Raised by `er.resume`, by commands, and when a run cannot save its final state. The text names the path
    and the system's reason. Repair it, and start the job again.
    """


class NodeLockedError(MachineError):
    """Another live process holds this node's directory.

    Raised when an agent starts, or by `er.resume` without an agent. End that process, which the text names,
    or choose another node name or run id.
    """


class NodeFileError(MachineError):
    """A small file of a node's directory is damaged.

    Raised at the start of an agent or of a generation. Remove the file that the text names. The error is
    deterministic, unlike a bad checkpoint: no other node has a copy of the file.
    """


class HardwareError(MachineError):
    """The machine of this rank computes wrongly.

    Raised by `Run.step` on a rank whose gradients differed from all others' twice, from the same batch. Its
    agent leaves the job. Test the machine, or replace it: the text names the node and the GPU.
    """

    is_deterministic = False  # the others continue


class ArchiveErrorKind(str, Enum):
    """Why the archive refuses, or cannot be reached."""

    CREDENTIALS = "credentials"
    FORBIDDEN = "forbidden"
    MISSING_BUCKET = "missing-bucket"
    REGION = "region"
    QUOTA = "quota"
    CLOCK_SKEW = "clock-skew"
    FROZEN = "frozen"
    UNAVAILABLE = "unavailable"
    SLOW = "slow"
    CUT = "cut"
    UNSUPPORTED = "unsupported"
    MISPLACED = "misplaced"
    SECOND_WRITER = "second-writer"

    @property
    def can_pass(self) -> bool:
        """Whether waiting may mend it; a person must mend the others."""
        return self in {ArchiveErrorKind.UNAVAILABLE, ArchiveErrorKind.SLOW, ArchiveErrorKind.CUT}


class ArchiveError(ElasticResumeError):
    """The archive cannot be reached, or refuses a request.

    Raised by commands that are given an archive's address, and by `er.resume` if no node holds a state. An
    agent that uploads logs it and tries again; training continues. The text names the cause and the remedy,
    and ``kind`` is an `ArchiveErrorKind`.
    """

    is_deterministic = False

    def __init__(self, *args: object, kind: ArchiveErrorKind = ArchiveErrorKind.UNAVAILABLE) -> None:
        super().__init__(*args)
        self.kind = kind


class SecondWriterError(ArchiveError):
    """Another job has archived a checkpoint under the same run id since this one began an attempt.

    Raised in the agent, which archives no more. Let one of the jobs use another run id or address.
    """

    def __init__(self, *args: object, number: int = 0, attempt: str = "") -> None:
        """``number`` and ``attempt`` are those of the other job's entry; "" if it cannot be read."""
        super().__init__(*args, kind=ArchiveErrorKind.SECOND_WRITER)
        self.number = number
        self.attempt = attempt


class ArchiveOutageError(ArchiveError):
    """A start that needs the archive has waited for it for minutes.

    Raised by `er.resume` if no node holds a state. Nothing was changed. Run the same command again when the
    archive is back.
    """

    is_deterministic = True  # another try at once would wait as long
    is_worth_requeue = True


class CheckpointError(ElasticResumeError):
    """Bytes on disk or from a peer are not a checkpoint that may be loaded.

    Raised by `er.load`, ``verify`` and other commands, with one of the subclasses. `er.resume` passes over
    such a checkpoint, because another node's may be valid. Inventories and events carry the class as
    ``kind``.
    """

    is_deterministic = False
    kind = "corrupt"


class TornError(CheckpointError):
    """A file or part of one is missing.

    Raised for a checkpoint that was copied incompletely or cut short. Load another checkpoint.
    """

    kind = "torn"


class CorruptError(CheckpointError):
    """A digest does not match, or a file violates its format.

    Raised when bytes changed after they were written. Load another checkpoint, and check the disk.
    """


class ForeignError(CheckpointError):
    """A checkpoint of another job, or a directory that is not a checkpoint. It is never moved.

    Raised for a path that holds something else. Check the path and the run id.
    """

    kind = "foreign"


class NewerFormatError(CheckpointError):
    """A checkpoint in the format of a newer elastic_resume; it counts as valid and newest.

    Raised when it is read. Upgrade elastic_resume on every node.
    """

    kind = "newer"


class UnreadableError(CheckpointError):
    """This machine cannot read a checkpoint now (I/O error, no memory, no descriptor, no permission).

    Its bytes may be valid: a restore skips the checkpoint and leaves it in place. Remove the cause that the
    text names, and read it again.
    """

    kind = "unreadable"


class PeerFailedError(UnreadableError):
    """Another rank could not send its bytes. This node's checkpoints are not to blame.

    Raised while a restore is in progress, which then takes another copy. The other rank reports the reason.
    """


class OtherRankFailedError(ElasticResumeError):
    """Another rank cannot continue, so this one cannot either.

    Raised on every rank but the one that failed, whose own error and remedy the text repeats. Agents count it
    as a secondary failure.
    """


class NoValidCheckpointError(ElasticResumeError):
    """Checkpoints exist, or must exist, and none can be loaded. The job never starts over silently.

    Raised by `er.resume` and `er.load`. Bring the checkpoints back, which the text names, or start over on
    purpose with ``resume="never"``.
    """


class JobFailedError(ElasticResumeError):
    """A restart would not help.

    Raised in the agent, never in a script. The text says what failed, on this node or on another.
    """


class LaunchError(ElasticResumeError):
    """A job that `launch` has started ended without success.

    Raised by `launch`. The text has the agent's last line, and the traceback of the root cause if that is a
    worker of this node. Correct what it names, and call `launch` again: the job continues.
    """

    exit_code: int = 1
    """The exit code that ``elastic-resume run`` would have had."""
    node: str = ""
    """The node with the root cause; empty if there is none, as after SIGTERM."""
    rank: int | None = None
    """Its rank; None if the node itself failed."""
    error_type: str = ""
    """The class of the worker's exception; empty if it ended otherwise."""
    traceback: str = ""
    """The traceback of that exception; empty if it was raised on another node."""


class RendezvousLostError(ElasticResumeError):
    """The agents cannot form a view because too many are unreachable.

    Raised in the agent, and by ``status`` if no agent answers. Start the job again when the nodes are back.
    """

    is_deterministic = False


class NodeExcludedError(ElasticResumeError):
    """This node cannot take part, or fails alone repeatedly: it leaves, and the others continue.

    Raised in the agent, never in a script. Repair or replace the node for the reason that the text gives.
    """

    is_deterministic = False


class DivergenceError(ElasticResumeError):
    """Replicas that must be equal differ.

    Raised by `Run.assert_ranks_equal`, and by `er.resume` after loading. The text names the first tensor and
    the ranks. Look for a step that ranks take differently, or for a faulty GPU.
    """


MIXED_HARDWARE_HINT = (
    "Machines of different kinds round differently: with ELASTIC_RESUME_CHECK_REPLICAS=off they continue, "
    "and one node's values count at each resume."
)


class NotProvedError(ElasticResumeError):
    """A resume computed the newest steps again, and the result differs from what the run had computed.

    Raised by `Run.step`, `Run.end_epoch` or `Run.close` on all ranks. The job then restarts from the state
    that it had, unless ``--prove stop`` is given. Rank 0 logs the values that differ.
    """

    is_deterministic = False


class WorldChanged(BaseException):
    """Leaves the function of `Run.restartable`, which is called again in the next generation.

    Let it pass: ``except Exception`` does not catch it. After a bare ``except:`` or in ``finally`` raise it
    again, or the process is restarted.
    """
