"""Settings of one job on one node: from flags, then the file of ``--config``, then the environment.

Everything is parsed once, here. A `Settings` instance is valid; a wrong value or an unknown key is a
ConfigError of one or two lines with the setting, the value and the accepted forms. Parsing changes nothing on
disk. torchrun's own flags come in as an argparse parser, so this module does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from elastic_resume import constants
from elastic_resume.errors import ConfigError
from elastic_resume.policy.checkpoint_interval import AUTO, IntervalSetting
from elastic_resume.schedulers import environment
from elastic_resume.units import parse_duration, parse_size

MIN_KEEP = 2
RESUME_MODES = ("auto", "must", "never")
DIVERGENCE_POLICIES = ("stop", "resume-from-majority")
REQUEUE_MODES = ("auto", "off")
DEFAULT_CKPT_DIR = "./checkpoints"
DEFAULT_KEEP = 3  # one more than the least: one may be corrupt while another is written
DEFAULT_STEP_MARK_S = 5.0  # a report dates the step that a failure interrupted with this precision
MAX_MEMORY_BYTES = 2**60  # more is a typing error, and this fits every integer that may hold it
MAX_CONFIG_FILE_BYTES = 64 * 1024
AGENT_SETTINGS = ("ckpt_dir", "run_id", "node_name")
"""Settings that the agent's flags decide, and the script's arguments do not: see `Settings.for_worker`."""
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)


def suggest_similar(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean …?`` with known names similar to ``name``, or an empty text."""
    matches = list(
        dict.fromkeys(n.replace("_", "-") for n in difflib.get_close_matches(name, list(known), 6))
    )
    return f" Did you mean {' or '.join(matches[:3])}?" if matches else ""


# ---- values --------------------------------------------------------------------------------------------


def parse_listen_address(flag: str, text: str) -> tuple[str, int]:
    """Parse ``[ADDRESS:]PORT`` into address and port. The default address is loopback."""
    host, _, port = text.strip().rpartition(":")
    address = host.strip("[]") or "127.0.0.1"
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"\d{1,5}", port) and int(port) < 1 << 16:
            return str(ipaddress.ip_address(address)), int(port)
    raise ConfigError(
        f"--{flag} is {text[:100]!r}: write PORT (of 127.0.0.1), or ADDRESS:PORT with a number for the "
        "address; 0.0.0.0:9400 is every network of this machine."
    )


def validate_directory_name(setting: str, name: object) -> str:
    """Return ``name`` if it can be the name of a directory."""
    if not re.fullmatch(constants.SAFE_NAME_PATTERN, str(name)):
        raise ConfigError(
            f"{setting} {name!r} cannot be the name of a directory: use at most 128 letters, digits, '.', "
            "'_' and '-', beginning with a letter or digit."
        )
    return str(name)


def parse_absolute_path(setting: str, text: str) -> Path:
    """Return ``text`` as an absolute path that the operating system accepts."""
    try:
        path = Path(text).expanduser().absolute()
        with contextlib.suppress(PermissionError):  # the later access reports it
            path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # unknown user's home, name too long, NUL byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting} is {text[:200]!r}, which cannot be a path here: {reason}.") from error
    return path


def parse_keep(value: Any) -> int:
    """Parse the number of checkpoints that each node keeps."""
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,9}", text):
        raise ConfigError(f"keep is {text!r}: write a whole number of checkpoints, {MIN_KEEP} or more.")
    if int(text) < MIN_KEEP:
        raise ConfigError(
            f"keep is {text}, which is too few: with one kept, a checkpoint that turns out corrupt "
            f"leaves nothing to resume from. Write {MIN_KEEP} or more."
        )
    return int(text)


def parse_resume_mode(value: str) -> str:
    """Return one of `RESUME_MODES`. The error explains what replaced a path, which was once accepted."""
    if value not in RESUME_MODES:
        raise ConfigError(
            f"resume is {value[:100]!r}: write auto, must or never."
            f"{suggest_similar(value, RESUME_MODES)} To begin with a checkpoint, load it into the model and "
            "the optimizer before er.resume(): a first start takes rank 0's values."
        )
    return value


def parse_step_mark_s(value: Any) -> float:
    """Parse the least seconds between two ``step`` events; 0 means every step. There is no flag for it."""
    return parse_duration(constants.ENV_STEP_MARK_S, value)


def parse_snapshot_memory(value: Any) -> int | None:
    """Parse the bytes of a node's memory for snapshots. ``auto`` is None, ``off`` is 0."""
    text = str(value).strip()
    if text in {"auto", "off"}:
        return None if text == "auto" else 0
    hint = "write a size (4GB, 512MiB, 1.5G), auto or off." + suggest_similar(text, ("auto", "off"))
    size = parse_size("snapshot-memory", value, hint=hint)
    if size > MAX_MEMORY_BYTES:
        raise ConfigError(f"snapshot-memory is {text!r}, which is more than any node has.")
    return size


def parse_choice(setting: str, value: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if value not in choices:
        raise ConfigError(
            f"{setting} is {value[:100]!r}: write {' or '.join(choices)}." + suggest_similar(value, choices)
        )
    return value


# ---- settings ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What a user decides about one job on one node. Every instance is valid."""

    ckpt_dir: Path
    run_id: str
    node_name: str
    save_every: IntervalSetting
    keep: int
    resume: str
    step_mark_s: float = DEFAULT_STEP_MARK_S  # least seconds between two `step` events of a rank
    snapshot_every: IntervalSetting = AUTO
    snapshot_memory: int | None = None  # bytes of this node for snapshots; None: auto, 0: off
    check_replicas: IntervalSetting = AUTO  # steps or auto, not time: all nodes compare the same step
    on_divergence: str = "stop"  # or resume-from-majority

    def to_env(self) -> dict[str, str]:
        """Return the environment variables from which `for_worker` reads the same settings."""
        return {
            constants.ENV_CKPT_DIR: str(self.ckpt_dir),
            constants.ENV_RUN_ID: self.run_id,
            constants.ENV_NODE_NAME: self.node_name,
            constants.ENV_SAVE_EVERY: str(self.save_every),
            constants.ENV_KEEP: str(self.keep),
            constants.ENV_RESUME: self.resume,
            constants.ENV_STEP_MARK_S: f"{self.step_mark_s:.9f}",
            constants.ENV_SNAPSHOT_EVERY: str(self.snapshot_every),
            constants.ENV_SNAPSHOT_MEMORY: {None: "auto", 0: "off"}.get(
                self.snapshot_memory, str(self.snapshot_memory)
            ),
            constants.ENV_CHECK_REPLICAS: str(self.check_replicas),
            constants.ENV_ON_DIVERGENCE: self.on_divergence,
        }

    @classmethod
    def for_agent(
        cls,
        args: argparse.Namespace,
        environ: Mapping[str, str],
        scheduler: environment.SchedulerContext | None = None,
    ) -> Settings:
        """Build the settings of ``elastic-resume run``.

        Args:
            args: from `parse_flags_and_file`; None means neither flag nor file gave the value.
            environ: the environment, for values that ``args`` leaves open.
            scheduler: the scheduler's job name is the fallback for the run id.

        """
        given = {field.name: getattr(args, field.name, None) for field in fields(cls)}
        script = args.training_script.rpartition(".")[2] if args.module else args.training_script
        # torchrun's default for --rdzv-id is the word "none"; PET_RDZV_ID may have replaced it.
        fallback = (
            args.rdzv_id if args.rdzv_id != "none" else scheduler.job if scheduler is not None else None
        )
        if scheduler is not None and scheduler.scheduler == "slurm" and fallback == scheduler.job:
            # Two training scripts in one allocation must not resume from each other's checkpoints.
            fallback = environment.sanitize_name(f"{scheduler.job}-{Path(script).stem}", scheduler.job)
        return cls._build({**given, "run_id": args.run_id}, environ, fallback, script)

    @classmethod
    def for_worker(cls, environ: Mapping[str, str], argv0: str, **overrides: Any) -> Settings:
        """Build the settings of a training process, under any launcher.

        Args:
            environ: the process's environment.
            argv0: ``sys.argv[0]``; its stem is the last fallback for the run id.
            **overrides: arguments of ``er.resume()``, named as the fields here; None means not given.

        """
        unknown = set(overrides) - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}.")
        if constants.ENV_AGENT_PID in environ:
            # They name the directory that the agent has locked; another one would have no owner.
            overrides = {k: v for k, v in overrides.items() if k not in AGENT_SETTINGS}
        launcher = environ.get("TORCHELASTIC_RUN_ID", "none")
        # torchrun --standalone invents a uuid at each start; under that name nothing would be found again.
        fallback = None if launcher == "none" or _UUID.fullmatch(launcher) else launcher
        path = Path(argv0)
        script = path.parent.name if path.name == "__main__.py" else argv0
        return cls._build(overrides, environ, fallback, script)

    @classmethod
    def _build(
        cls, given: Mapping[str, Any], environ: Mapping[str, str], fallback_run_id: str | None, script: str
    ) -> Settings:
        def choose(name: str, variable: str, default: Any) -> Any:
            value = given.get(name)
            return value if value is not None else environ.get(variable) or default

        run_id = choose("run_id", constants.ENV_RUN_ID, fallback_run_id)
        name = choose("node_name", constants.ENV_NODE_NAME, None)
        directory = str(choose("ckpt_dir", constants.ENV_CKPT_DIR, DEFAULT_CKPT_DIR))
        return cls(
            # Absolute, because the script may change its working directory.
            ckpt_dir=parse_absolute_path("ckpt-dir", directory),
            run_id=validate_directory_name("run id", run_id)
            if run_id
            else environment.sanitize_name(Path(script).stem, "job"),
            node_name=validate_directory_name("node name", name)
            if name
            else environment.default_node_name(environ),
            save_every=IntervalSetting.parse(choose("save_every", constants.ENV_SAVE_EVERY, "auto")),
            keep=parse_keep(choose("keep", constants.ENV_KEEP, DEFAULT_KEEP)),
            resume=parse_resume_mode(str(choose("resume", constants.ENV_RESUME, "auto"))),
            step_mark_s=parse_step_mark_s(
                choose("step_mark_s", constants.ENV_STEP_MARK_S, DEFAULT_STEP_MARK_S)
            ),
            snapshot_every=IntervalSetting.parse(
                choose("snapshot_every", constants.ENV_SNAPSHOT_EVERY, "auto"),
                "snapshot-every",
                allow_off=True,
            ),
            snapshot_memory=parse_snapshot_memory(
                choose("snapshot_memory", constants.ENV_SNAPSHOT_MEMORY, "auto")
            ),
            check_replicas=IntervalSetting.parse(
                choose("check_replicas", constants.ENV_CHECK_REPLICAS, "auto"),
                "check-replicas",
                allow_off=True,
                allow_seconds=False,
            ),
            on_divergence=parse_choice(
                "on-divergence",
                str(choose("on_divergence", constants.ENV_ON_DIVERGENCE, "stop")),
                DIVERGENCE_POLICIES,
            ),
        )


# ---- flags and the file --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one-line ConfigErrors that suggest names for unknown flags."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting with 2."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            unknown = [word for word in message[len(prefix) :].split() if word.startswith("-")]
            flag = (unknown or [message[len(prefix) :]])[0].partition("=")[0]
            message = f"unknown flag {flag}." + suggest_similar(flag, actions_by_flag(self))
        raise ConfigError(f"{message} (see {self.prog} --help)")


class CommaJoinAction(argparse.Action):
    """A flag that may be repeated: its values are joined by commas."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, value: Any, _option: Any = None) -> None:
        """Append to the command line's value. A value from the file is replaced, as for any flag."""
        before = getattr(namespace, self.dest, None)
        more = isinstance(before, str) and before is not self.default
        setattr(namespace, self.dest, f"{before},{value}" if more else value)


def actions_by_flag(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return each option string of ``parser`` with its action; argparse has no public accessor."""
    return {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001


AddFlag = Callable[[str, str, str], None]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add elastic_resume's flags to torchrun's parser, in their own group. None means not given."""
    group = parser.add_argument_group(
        "elastic_resume",
        "A flag beats the --config file, the file beats the environment (ELASTIC_RESUME_*, PET_*). TIME is a "
        "number of seconds, or has a unit: 500ms, 30s, 5m, 1.5h. For --save-every and --snapshot-every a "
        "bare number is steps.",
    )

    def add(name: str, metavar: str, text: str) -> None:
        names = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        is_switch = {"action": "store_true"} if not metavar else {"metavar": metavar, "default": None}
        group.add_argument(*names, help=text, **is_switch)

    _add_state_flags(add)
    _add_rendezvous_flags(add)
    _add_failure_flags(add)
    add(
        "metrics",
        "[ADDRESS:]PORT",
        "serve metrics for Prometheus, at 127.0.0.1 if no address is given (default off; "
        "needs pip install 'elastic-resume[metrics]')",
    )
    add("preload", "MODULE,...", "modules to import once, ahead of all workers, beside torch")
    add("no-warm", "", "start each worker as a new process, as torchrun does")
    group.add_argument(
        *("--preemption-notice", "--preemption_notice"),
        metavar="aws|gcp|azure|file:PATH|command:COMMAND",
        default=None,
        action=CommaJoinAction,
        help="drain this node when this source announces its preemption; join several by commas "
        "(default off)",
    )
    add("config", "FILE.yaml", "flags from a file: the same names, ours and torchrun's")


def _add_state_flags(add: AddFlag) -> None:
    add("ckpt-dir", "DIR", f"root of all checkpoints (default {DEFAULT_CKPT_DIR})")
    add("node-name", "NAME", "this node's name (default: the scheduler's name for it, else the host's)")
    add("save-every", "N|TIME|auto", "steps (100) or time (5m) between two checkpoints (default auto)")
    add(
        "snapshot-every",
        "N|TIME|auto|off",
        "steps (100) or time (30s) between two snapshots in memory, which outlive a worker (default auto)",
    )
    add(
        "snapshot-memory",
        "auto|off|SIZE",
        "memory of this node for snapshots, as 4GB or 512MiB (default auto: at most half of the free memory)",
    )
    add("check-replicas", "N|auto|off", "steps between two comparisons of all replicas (default auto)")
    add("on-divergence", "|".join(DIVERGENCE_POLICIES), "when replicas differ (default stop)")
    add("keep", "N", f"checkpoints kept on each node, {MIN_KEEP} or more (default {DEFAULT_KEEP})")
    add(
        "resume",
        "auto|must|never",
        "what to resume from (default auto: the newest valid snapshot or checkpoint, if any)",
    )


def _add_rendezvous_flags(add: AddFlag) -> None:
    add(
        "shared-dir",
        "DIR|off",
        "Slurm: a directory that all nodes see, for the job's token (default: the submit directory)",
    )
    add(
        "node-timeout",
        "TIME",
        "a node that is unreachable for this long is lost; use the same on all nodes (default 3s)",
    )
    add(
        "settle",
        "TIME",
        "last-call timeout: how long a first start waits for more nodes (default 3s; in pods 35s)",
    )
    add("join-timeout", "TIME", "how long a node waits for a rendezvous (default 10m)")
    add(
        "rdzv-token-file",
        "FILE",
        "0600 file with the secret of all nodes, 16 bytes or more (or ELASTIC_RESUME_TOKEN)",
    )


def _add_failure_flags(add: AddFlag) -> None:
    add(
        "grace",
        "TIME",
        "time between SIGTERM and SIGKILL for a worker when this agent is drained (default 5s)",
    )
    add("drain-signals", "NAME,...", "signals that drain this node (default SIGTERM,SIGUSR1)")
    add(
        "requeue",
        "|".join(REQUEUE_MODES),
        "Slurm: requeue a job that is drained before its end (default auto)",
    )
    add(
        "max-no-progress",
        "N",
        "end the job after N failed starts in a row without a new step (default 3; none with --max-restarts)",
    )
    add(
        "exclude-after",
        "N",
        "exclude a node that alone causes N failures in a row, if --nnodes allows (default 0: only if the "
        "job would end otherwise)",
    )
    add(
        "hang-timeout",
        "TIME",
        "a rank that finishes no step for this long is hung (default: 30s, or ten times the longest step if "
        "that is more; 0: never)",
    )


def parse_flags_and_file(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, set[str]]:
    """Parse the flags and the ``--config`` file.

    Returns the values, and the names of those given by flag or file; the others come from the environment or
    are defaults. ``args.run_id`` is ``--rdzv-id`` if that was given, else None.
    """
    missing = object()
    dests = {action.dest for action in actions_by_flag(parser).values()}
    flags = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(dests, missing)))
    given = {dest for dest in dests if getattr(flags, dest) is not missing}
    if "config" in given:
        from_file = read_flags_file(Path(flags.config), parser)
        parser.set_defaults(**from_file)
        given |= set(from_file)
    args = parser.parse_args(argv)
    args.run_id = args.rdzv_id if "rdzv_id" in given else None
    return args, given


def read_flags_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read the YAML file of ``--config`` into values by destination.

    A value is parsed as the flag's text would be. YAML's own types would be wrong: YAML 1.1 reads ``1:3`` as
    63 and ``no`` as false. So only the node tree is built, and no object of any tag.

    Raises:
        ConfigError: not readable, not a flat mapping, an unknown or repeated key, a value of a wrong type.

    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_FILE_BYTES + 1)
        if len(data) > MAX_CONFIG_FILE_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_CONFIG_FILE_BYTES} bytes; so it is not a file of flags."
            )
        root = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())[:200]}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must hold lines of the form NAME: VALUE at its top, named as the flags.")
    known = {flag[2:]: action for flag, action in actions_by_flag(parser).items() if flag.startswith("--")}
    for name in ("help", "config"):
        known.pop(name, None)
    values: dict[str, Any] = {}
    for key_node, value_node in root.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be the name of a flag, and not a list or mapping.")
        key = str(key_node.value)
        action = known.get(key)
        if action is None:
            raise ConfigError(f"{where}: unknown key {key!r}." + suggest_similar(key, known))
        if action.dest in values:
            raise ConfigError(f"{where}: {key!r} is given twice.")
        values[action.dest] = _parse_file_value(action, value_node, f"{where}: {key}")
    return values


def _parse_file_value(action: argparse.Action, value: yaml.Node, location: str) -> Any:
    if action.nargs == 0:
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if not isinstance(value, yaml.ScalarNode) or value.value.lower() not in words:
            raise ConfigError(f"{location} must be true or false.")
        return words[value.value.lower()]
    convert: Callable[[str], Any] = action.type if callable(action.type) else str
    if isinstance(value, yaml.SequenceNode) and isinstance(action.default, list):
        if not all(isinstance(item, yaml.ScalarNode) for item in value.value):
            raise ConfigError(f"{location} must be a list of plain values.")
        return [str(item.value) for item in value.value]
    if not isinstance(value, yaml.ScalarNode) or not value.value or value.tag.endswith(":null"):
        raise ConfigError(f"{location} must be one value.")
    # YAML reads an unquoted "off" as false; for some flags it is one of the accepted words.
    is_accepted_word = value.value in str(action.metavar).split("|")
    if (
        value.tag.endswith(":bool")
        and value.style is None
        and action.choices is None
        and not is_accepted_word
    ):
        raise ConfigError(
            f"{location} is a truth value and takes {action.metavar or 'text'}; quote it if meant."
        )
    try:
        converted = convert(value.value)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        kind = getattr(convert, "__name__", "value")
        raise ConfigError(f"{location} is {value.value!r}, which is no {kind}.") from error
    if action.choices is not None and converted not in action.choices:
        raise ConfigError(f"{location} is {value.value!r}: choose {', '.join(map(str, action.choices))}.")
    return converted
