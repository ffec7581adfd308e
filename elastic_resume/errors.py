"""Every error that this package raises on purpose.

::

    ElasticResumeError
     ├─ UsageError              the caller's code or flags are wrong            exit 1
     │   ├─ ConfigError           a flag, key or variable is unknown or out of range    exit 2 of ``run``
     │   ├─ UntrackableError      an object holds state that cannot be stored
     │   ├─ MismatchError         the model does not fit the checkpoint
     │   └─ WorldChangedError     the number of ranks changed and the script forbids that
     ├─ MachineError            the machine is wrong: disk full, not writable   exit 1; 74: unstarted ``run``
     │   ├─ NodeLockedError       another agent holds this node's directory
     │   └─ NodeFileError         a small file of the node's directory is damaged
     ├─ CheckpointError         bytes on disk or from a peer are wrong
     │   ├─ TornError             incomplete
     │   ├─ CorruptError          digest mismatch, or a format violation
     │   ├─ ForeignError          another job's, or not a checkpoint
     │   ├─ NewerFormatError      written by a newer elastic_resume
     │   └─ UnreadableError       this machine cannot read it now; its bytes may be valid
     ├─ NoValidCheckpointError  checkpoints exist and none can be loaded        exit 1
     ├─ JobFailedError          the restart policy ended the job                exit 1
     ├─ RendezvousLostError     the agents cannot reach each other any more     exit 75
     ├─ NodeExcludedError       this node leaves, the others continue           exit 75
     └─ DivergenceError         replicas that must be equal are not             exit 1

The exit codes are those of the command line. ``chaos`` and ``diff`` exit 2 for all of these errors.

A message says what failed, where, why, and what to do, in one or two lines. If ``is_deterministic`` is true,
a restart would fail in the same way, and the agent does not try one.
"""

from __future__ import annotations


class ElasticResumeError(Exception):
    """Base of all errors raised on purpose by this package."""

    is_deterministic = True


class UsageError(ElasticResumeError):
    """The caller's code or flags are wrong; nothing was changed."""


class ConfigError(UsageError):
    """A flag, a configuration key or an environment variable is unknown or out of range."""


class UntrackableError(UsageError):
    """An object holds state that is neither a tensor nor plain data; the text names its path and type."""


class MismatchError(UsageError):
    """The tracked objects do not fit the checkpoint; the text lists every differing name."""


class WorldChangedError(UsageError):
    """The number of ranks differs from the checkpoint's, under ``on_world_change="error"``."""


class MachineError(ElasticResumeError):
    """The machine is wrong: a directory cannot be written, a disk is full."""


class NodeLockedError(MachineError):
    """Another live process holds this node's directory."""


class NodeFileError(MachineError):
    """A small file of a node's directory is damaged; the text names the file to remove.

    Deterministic, unlike a bad checkpoint: no other node has a copy of the file.
    """


class CheckpointError(ElasticResumeError):
    """Bytes on disk or from a peer are not a checkpoint that may be loaded.

    Not deterministic: another node's checkpoint may be valid. Inventories and events carry the class as
    ``kind``.
    """

    is_deterministic = False
    kind = "corrupt"


class TornError(CheckpointError):
    """A file or part of one is missing."""

    kind = "torn"


class CorruptError(CheckpointError):
    """A digest does not match, or a file violates its format."""


class ForeignError(CheckpointError):
    """A checkpoint of another job, or a directory that is not a checkpoint. It is never moved."""

    kind = "foreign"


class NewerFormatError(CheckpointError):
    """A checkpoint in the format of a newer elastic_resume; it counts as valid and newest."""

    kind = "newer"


class UnreadableError(CheckpointError):
    """This machine cannot read a checkpoint now (I/O error, no memory, no descriptor, no permission).

    The bytes may be valid: this restore skips the checkpoint and leaves it in place.
    """

    kind = "unreadable"


class NoValidCheckpointError(ElasticResumeError):
    """Checkpoints exist and none can be loaded. The job never starts over silently."""


class JobFailedError(ElasticResumeError):
    """A restart would not help; the text says what failed, on this node or on another."""


class RendezvousLostError(ElasticResumeError):
    """The agents cannot form a view because too many are unreachable."""

    is_deterministic = False


class NodeExcludedError(ElasticResumeError):
    """This node cannot take part, or fails alone repeatedly: it leaves, and the others continue."""

    is_deterministic = False


class DivergenceError(ElasticResumeError):
    """Replicas that must be equal differ; the text names the first tensor and the ranks."""
