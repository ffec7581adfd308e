"""Define the exit codes, environment variables and file names that several processes share.

An agent and its workers are different processes, and after an upgrade in place they may run different
versions. This module holds names only.
"""

from __future__ import annotations

# How to install an extra: nothing is on PyPI yet, and the README installs from a clone.
EXTRA_INSTALL = "pip install '.[{}]' in the clone of elastic_resume"

# ---- exit codes of `elastic-resume run`; schedulers have rules for them -----------------------------------
EXIT_SUCCESS = 0
EXIT_JOB_ERROR = 1  # the job itself has an error: do not requeue
EXIT_USAGE = 2  # wrong flags, settings or script name; argparse's own code for a malformed command line
EXIT_NO_FAULT = 3  # `chaos`: the job ended well, but no fault was injected
EXIT_MACHINE_ERROR = 74  # EX_IOERR: this machine's disk or directory prevented the start
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: run the same job again
EXIT_NEEDS_GENERATION = 77  # of a launcher shim only: its worker cannot start before its generation is known
EXIT_PARKED = 76  # of a launcher shim only: its worker stays for the next generation
EXIT_SIGNAL_BASE = 128  # plus the signal's number: 143 after SIGTERM

# ---- environment, agent -> worker. A user may set the variables marked (user). ----------------------------
ENV_PREFIX = "ELASTIC_RESUME_"  # before the name of each setting in config.py
ENV_CKPT_DIR = "ELASTIC_RESUME_CKPT_DIR"  # (user) root of all checkpoints
ENV_RUN_ID = "ELASTIC_RESUME_RUN_ID"  # (user) the job's name
ENV_NODE_NAME = "ELASTIC_RESUME_NODE_NAME"  # (user) this node's name
ENV_CONFIG = "ELASTIC_RESUME_CONFIG"  # (user) the file of --config
ENV_PROVE = "ELASTIC_RESUME_PROVE"  # (user) when to prove a resume
ENV_RESUME_FROM = "ELASTIC_RESUME_RESUME_FROM"  # (user) the state to which the job goes back
ENV_NODE_TIMEOUT = "ELASTIC_RESUME_NODE_TIMEOUT"  # (user) TIME after which an unreachable node is lost
ENV_STEP_MARK_S = "ELASTIC_RESUME_STEP_MARK_S"  # (user) least time between two `step` events of a rank
ENV_TOKEN = "ELASTIC_RESUME_TOKEN"  # noqa: S105 - (user) the secret that all nodes of a job share
ENV_QUIET = "ELASTIC_RESUME_QUIET"  # (user) 1: log warnings and errors only
ENV_LOG_LEVEL = "ELASTIC_RESUME_LOG_LEVEL"  # (user) DEBUG, INFO, WARNING or ERROR
ENV_FAILPOINTS = "ELASTIC_RESUME_FAILPOINTS"  # tests: see failpoints.py
ENV_FAULTS_DIR = "ELASTIC_RESUME_FAULTS_DIR"  # tests: where the fault injector arms failpoints
ENV_AGENT_PID = "ELASTIC_RESUME_AGENT_PID"  # set when an agent holds the node's directory for the worker
ENV_EVENTS_PATH = "ELASTIC_RESUME_EVENTS_PATH"  # the node's event file, for the launcher shim
ENV_EVIDENCE = "ELASTIC_RESUME_EVIDENCE"  # a memfd of the agent for the events that it decides by
ENV_GENERATION = "ELASTIC_RESUME_GENERATION"  # the generation that the rendezvous assigned
ENV_LAST_STEP = "ELASTIC_RESUME_LAST_STEP"  # "STEP NODES": nodes have finished; no step after this one
ENV_LOCAL_HOST = "ELASTIC_RESUME_LOCAL_HOST"  # address or name at which other nodes reach this agent
ENV_LEASE_PAGE = "ELASTIC_RESUME_LEASE_PAGE"  # path of the page with the lease, for worker supervisors
ENV_FORK_SERVER = "ELASTIC_RESUME_FORK_SERVER"  # abstract unix socket at which launcher shims request workers
ENV_MAX_RESTARTS = "ELASTIC_RESUME_TORCH_MAX_RESTARTS"  # of --max-restarts, for the worker's environment
ENV_FIXED_NODES = "ELASTIC_RESUME_FIXED_NODES"  # 1: --nnodes is one number, so the ranks stay as many
ENV_EARLY_START = "ELASTIC_RESUME_EARLY_START"  # 1: the worker starts before its generation is known
ENV_STATE_BYTES = "ELASTIC_RESUME_STATE_BYTES"  # with it: size of the job's state; 0 if unknown
ENV_WORKER_KEY = "ELASTIC_RESUME_WORKER_KEY"  # in hex: `rendezvous.net.protocol.derive_worker_key`
ENV_PARKED = "ELASTIC_RESUME_PARKED"  # the agent's file with the socket of each local rank's parked worker
ENV_NEW_PROCESS = "ELASTIC_RESUME_NEW_PROCESS"  # "MONOTONIC_S VARIABLES": why and when the worker began again
ENV_SUPERVISOR_FD = "ELASTIC_RESUME_SUPERVISOR_FD"  # descriptor of a worker's socket to its supervisor
ENV_LOCAL_RANK = "ELASTIC_RESUME_LOCAL_RANK"  # the true local rank: --virtual-local-rank sets LOCAL_RANK to 0
ENV_OUTER_JOB = (
    "ELASTIC_RESUME_OUTER_JOB"  # "RUN_ID-rLOCAL_RANK" of the worker that has started this launcher
)
ENV_COMMITTER = "ELASTIC_RESUME_COMMITTER"  # abstract unix socket of the agent's committer
ENV_SLOTS = "ELASTIC_RESUME_SLOTS"  # path of the slots' control block, for worker supervisors
ENV_NOTICE_PAGE = "ELASTIC_RESUME_NOTICE_PAGE"  # path of the agent's page by which ranks get notices
ENV_MTBF_S = "ELASTIC_RESUME_MTBF_S"  # mean seconds between failures, as the agent has measured them
ENV_LAUNCH = "ELASTIC_RESUME_LAUNCH"  # "CALL,RESULTS": the agent's descriptors of what `launch` runs
ENV_DRAIN_SIGNALS = "ELASTIC_RESUME_DRAIN_SIGNALS"  # (user) signals that drain a node, with commas
ENV_GRACE = "ELASTIC_RESUME_GRACE"  # (user) TIME between SIGTERM and SIGKILL; in seconds for supervisors
ENV_TERMINATION_GRACE_S = "ELASTIC_RESUME_TERMINATION_GRACE_S"  # (user) a pod's terminationGracePeriodSeconds
ENV_EXCLUDED_DIR = "ELASTIC_RESUME_EXCLUDED_DIR"  # of train.sbatch: a node that is excluded leaves a file
ENV_CKPT_LIMIT = "ELASTIC_RESUME_CKPT_LIMIT"  # (user) size limit of ENV_CKPT_DIR's volume: 4Gi

# ---- names on disk, under CKPT_DIR/RUN_ID/NODE/ ----------------------------------------------------------
EVENTS_FILE = "events.jsonl"  # appended by the agent, its worker supervisors and its workers
AGENT_ENDPOINT_FILE = "agent-endpoint.json"  # 0600: the agent's status address and its read-only key
FAULTS_FILE = "faults.jsonl"  # injected faults and wiped nodes' events; beside the nodes' directories
GENERATION_FILE = "generation.json"  # the greatest generation this node has been part of
RENDEZVOUS_STATE_FILE = "rendezvous.json"  # what this node knows of views
LOCK_FILE = "lock"  # held by the node's agent, or by its local rank 0 when there is no agent
OWNER_LEASE_FILE = "owner-lease"  # in place of the lock where locks exclude nobody
LOCK_OWNER_FILE = "lock-owner.json"  # the lock's owner, for the message to a second process
IDENTITY_FILE = "identity.json"  # a random id that distinguishes nodes of the same name
ENUMERATE_HINT_FILE = "enumerate-hint"  # empty: the log has said what enumerate() does in a resumed epoch
SAVED_FOLDERS_FILE = "accelerate-folders.json"  # directories in which accelerator.save_state() wrote
LOGGER_VERSIONS_FILE = "lightning-versions.json"  # the versions of the Trainer's loggers
SETTINGS_FILE = "settings.yaml"  # the settings of the last start, each with its source
PROGRESS_FILE = "progress"  # memory-mapped: the last step each local rank finished
QUARANTINE_DIR = "quarantine"  # checkpoints that failed verification, kept for a person
STACKS_DIR = "hangs"  # one file per hang: the stacks of all ranks of the node
TEMPORARY_PREFIX = ".tmp-"  # a checkpoint being written; never read, removed by the next owner
STATE_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"
MILESTONES_FILE = "milestones.json"  # beside a manifest: the names that keep its checkpoint

SAFE_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"  # names that become directories and shell words

STATUS_VERSION = 4
"""Version of an agent's reply and of `status --json`; it grows when a member changes or goes."""

MAX_NODES = 10_000  # limit of --nnodes MAX: with more names a rendezvous message exceeds its size limit
