"""What agent and worker have agreed on: environment variables, exit codes, names on disk.

The agent and the worker are different processes, perhaps of different ages after an upgrade in
place. They meet only here and in `store`. Nothing in this module does anything.
"""

from __future__ import annotations

# ---- exit codes, above all of `elastic-resume run` (what schedulers' rules match on) ----------------------
EXIT_SUCCESS = 0
EXIT_JOB_ERROR = 1  # the job itself is wrong: do not requeue
EXIT_USAGE = 2  # wrong flags, settings or script name; argparse's own code for a malformed command line
EXIT_MACHINE_ERROR = (
    74  # EX_IOERR: nothing was started, for want of a disk, a directory or the like on this machine
)
EXIT_PLAN_INCOMPLETE = 3  # of chaos: the job ended right, but not all that was asked for came
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: run the same job again
EXIT_SIGNAL_BASE = 128  # plus the signal's number: 143 after SIGTERM

# ---- environment, agent -> worker. A user may set those marked (user) by hand. ----------------------
ENV_PREFIX = "ELASTIC_RESUME_"
ENV_CKPT_DIR = "ELASTIC_RESUME_CKPT_DIR"  # (user) root of all checkpoints
ENV_RUN_ID = "ELASTIC_RESUME_RUN_ID"  # (user) the job's name
ENV_NODE_NAME = "ELASTIC_RESUME_NODE_NAME"  # (user) this node's name
ENV_SAVE_EVERY = "ELASTIC_RESUME_SAVE_EVERY"  # (user) N, TIME or auto
ENV_SNAPSHOT_EVERY = "ELASTIC_RESUME_SNAPSHOT_EVERY"  # (user) N, TIME, auto or off
ENV_SNAPSHOT_MEMORY = "ELASTIC_RESUME_SNAPSHOT_MEMORY"  # (user) auto, off or a size: 4GB, 512MiB, 1.5G
ENV_CHECK_REPLICAS = "ELASTIC_RESUME_CHECK_REPLICAS"  # (user) N, auto or off
ENV_ON_DIVERGENCE = "ELASTIC_RESUME_ON_DIVERGENCE"  # (user) stop or resume-from-majority
ENV_KEEP = "ELASTIC_RESUME_KEEP"  # (user) checkpoints kept on each node, >= 2
ENV_RESUME = "ELASTIC_RESUME_RESUME"  # (user) auto, must or never
ENV_STEP_MARK_S = "ELASTIC_RESUME_STEP_MARK_S"  # (user) least time between two step marks of a rank
ENV_SHARED_DIR = "ELASTIC_RESUME_SHARED_DIR"  # (user) Slurm: a directory that all nodes see, or off
ENV_PREEMPTION_NOTICE = "ELASTIC_RESUME_PREEMPTION_NOTICE"  # (user) off, aws, file:PATH, … with commas
ENV_METRICS = "ELASTIC_RESUME_METRICS"  # (user) [ADDRESS:]PORT at which an agent serves metrics
ENV_TOKEN = "ELASTIC_RESUME_TOKEN"  # noqa: S105 - (user) the secret that all nodes of a job share
ENV_FAILPOINTS = "ELASTIC_RESUME_FAILPOINTS"  # tests: see failpoints.py
ENV_FAULTS_DIR = "ELASTIC_RESUME_FAULTS_DIR"  # tests: where the laboratory arms them
ENV_AGENT_PID = "ELASTIC_RESUME_AGENT_PID"  # set when an agent holds the node's directory for the worker
ENV_EVENTS_PATH = "ELASTIC_RESUME_EVENTS_PATH"  # the node's event file, for the stub
ENV_ROUND_EVENTS = "ELASTIC_RESUME_ROUND_EVENTS"  # the same in the agent's memory, for what decides
ENV_ROUND = "ELASTIC_RESUME_ROUND"  # how many rendezvous this agent has been through
ENV_GENERATION = "ELASTIC_RESUME_GENERATION"  # the generation that the rendezvous gave this world
ENV_LEASE_PAGE = (
    "ELASTIC_RESUME_LEASE_PAGE"  # where the page lies that says until when workers may run, for guards
)
ENV_FORK_SERVER = "ELASTIC_RESUME_FORK_SERVER"  # the abstract unix socket at which stubs ask for warm workers
ENV_LOCAL_RANK = "ELASTIC_RESUME_LOCAL_RANK"  # the true one: --virtual-local-rank makes LOCAL_RANK 0
ENV_COMMITTER = "ELASTIC_RESUME_KEEPER"  # the abstract unix socket of the agent that keeps snapshots
ENV_SLOTS = "ELASTIC_RESUME_SLOTS"  # where the control block of its slots lies, for guards
ENV_MTBF_S = "ELASTIC_RESUME_MTBF_S"  # mean seconds between failures, as the agent has seen them
ENV_DRAIN_SIGNALS = "ELASTIC_RESUME_DRAIN_SIGNALS"  # (user) SIGTERM and what is sent ahead of it, with commas
ENV_REQUEUE = "ELASTIC_RESUME_REQUEUE"  # (user) auto or off
ENV_GRACE_S = "ELASTIC_RESUME_GRACE_S"  # (user) TIME a worker has to end after SIGTERM; seconds for guards
ENV_TERMINATION_GRACE_S = "ELASTIC_RESUME_TERMINATION_GRACE_S"  # (user) a pod's terminationGracePeriodSeconds
ENV_CKPT_LIMIT = "ELASTIC_RESUME_CKPT_LIMIT"  # (user) size that ENV_CKPT_DIR's volume may not exceed: 4Gi

# ---- names on disk, under CKPT_DIR/RUN_ID/NODE/ -----------------------------------------------------
EVENTS_FILE = "events.jsonl"  # appended by the agent, its stubs and its workers
PEER_EVENTS_FILE = (
    "peers.jsonl"  # what other nodes told this one of theirs, while it led or stood next to lead
)
AGENT_ENDPOINT_FILE = (
    "agent-endpoint.json"  # 0600: where this node's agent listens, and the key that lets one look, no more
)
FAULTS_FILE = "faults.jsonl"  # beside the nodes' directories: what somebody broke on purpose, as events
GENERATION_FILE = "generation.json"  # the greatest generation this node has been part of
LOCK_FILE = "lock"  # held by the node's agent, or by its local rank 0 when there is no agent
LOCK_OWNER_FILE = "lock-owner.json"  # who holds it, for the message to the second one
IDENTITY_FILE = "identity.json"  # a random id: tells this directory from another node's of the same name
PROGRESS_FILE = "board"  # memory-mapped: the last step each local rank finished
QUARANTINE_DIR = "quarantine"  # what failed verification, kept for a human
HANGS_DIR = "hangs"  # where every rank of the node stood in a hang, a file for each
TEMPORARY_PREFIX = ".tmp-"  # a checkpoint being written; never read, swept by the next owner
STATE_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"

# A name that becomes a directory: no separators, no leading dot or dash, no surprises in a shell.
SAFE_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"

STATUS_VERSION = 2
"""Of the document that `elastic-resume status --json` prints; grows when a member changes its meaning or goes."""
