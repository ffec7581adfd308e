"""Every error this package raises on purpose.

The tree, from general to particular::

    ElasticResumeError
     ├─ UsageError             the caller's code or flags are wrong            exit 1
     │   ├─ ConfigError          a flag, key or variable is unknown or out of range    exit 2 of ``run``
     │   ├─ UntrackableError     an object holds state that cannot be stored
     │   ├─ MismatchError        the model does not fit the checkpoint
     │   └─ WorldChangedError    another number of ranks, where the script wants that to be an error
     ├─ MachineError           the machine is wrong: disk full, not writable   exit 1; 74: unstarted ``run``
     │   ├─ NodeTakenError       another agent holds this node's directory
     │   └─ RecordError          a small file of the node's directory is damaged
     ├─ CheckpointError        bytes on disk or from a peer are wrong
     │   ├─ TornError            incomplete
     │   ├─ CorruptError         digest mismatch, or not what the format says
     │   ├─ ForeignError         another job, or not a checkpoint of ours
     │   ├─ NewerFormatError     written by a newer elastic_resume
     │   └─ UnreadableError      this machine could not read it now; nothing is known of its bytes
     ├─ NoValidCheckpointError copies exist and none can be loaded             exit 1
     ├─ GaveUpError            the restart policy ended the job                exit 1
     ├─ RendezvousLostError    the agents cannot reach each other any more     exit 75
     ├─ NodeUnfitError         this node leaves, the others go on              exit 75
     └─ DivergenceError        replicas that must be equal are not             exit 1

Exit codes are those of the command line. ``chaos`` and ``diff`` exit 2 for any of these errors, since their 1
means that the job ended wrong, or that two files differ.

An error's text says what, where, why and what to do, in one or two lines: it is all that a user sees.
``at_fault`` tells the agent that a restart would meet the same error again, so none is tried.
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
    """The number of ranks is not that of the checkpoint, and ``on_world_change="error"`` was asked for."""


class MachineError(ElasticResumeError):
    """The machine refuses: a directory cannot be written, a disk is full."""


class NodeLockedError(MachineError):
    """Another live process holds this node's directory."""


class NodeFileError(MachineError):
    """A small file of a node's directory is not what it must be; the text says which one to remove.

    At fault, unlike a bad checkpoint: there is no other copy of it, and a restart reads the same bytes.
    """


class CheckpointError(ElasticResumeError):
    """Bytes on disk or from a peer are not a checkpoint that may be loaded.

    Not at fault by itself: another copy may be valid. ``kind`` is how inventories and events name the class.
    """

    is_deterministic = False
    kind = "corrupt"


class TornError(CheckpointError):
    """A file or part of one is missing."""

    kind = "torn"


class CorruptError(CheckpointError):
    """A digest does not match, or a file is not what its format says."""


class ForeignError(CheckpointError):
    """A checkpoint of another job, or a directory that is not a checkpoint: not ours to move."""

    kind = "foreign"


class NewerFormatError(CheckpointError):
    """Written by a newer elastic_resume than this one: valid, and newer than all that this one can read."""

    kind = "newer"


class UnreadableError(CheckpointError):
    """This machine could not read a copy just now (I/O error, no memory, no descriptor, no permission).

    That says nothing about its bytes: it is passed over by this resume, and stays where it is.
    """

    kind = "unreadable"


class NoValidCheckpointError(ElasticResumeError):
    """Copies exist and none of them is valid: never a silent fresh start."""


class JobFailedError(ElasticResumeError):
    """Starting again would not help; the text says what failed, on this node or on the one that gave up."""


class RendezvousLostError(ElasticResumeError):
    """The agents cannot form a world: the rendezvous is out of reach. The job itself is not at fault."""

    is_deterministic = False


class NodeExcludedError(ElasticResumeError):
    """This node cannot take part, or fails alone again and again: it leaves, and the others go on."""

    is_deterministic = False


class DivergenceError(ElasticResumeError):
    """Replicas that data-parallel training keeps equal are not; the text names the first tensor and ranks."""
