"""Settings, parsed once at the edge: from flags, then the file of ``--config``, then the environment.

Promise: a `Settings` that exists is valid, an unknown key or a wrong value is a ConfigError of one or two
lines, and reading settings changes nothing on disk. Does not import torch: torchrun's own flags come in as
an argparse parser. Does not know what the settings do.

What the value of each setting may be: from text, or what a script passed, to a value that is valid.

Promise: what comes back is valid, and anything else is a ConfigError that names the setting, what was given
and what may be written. Does not know where a value came from, nor what it does.
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
from elastic_resume.units import parse_duration

MIN_KEEP = 2
RESUME_MODES = ("auto", "must", "never")
DIVERGENCE_POLICIES = ("stop", "resume-from-majority")
REQUEUE_MODES = ("auto", "off")
MAX_MEMORY_BYTES = 2**60  # more is a typing error; and the number still fits every word it may be kept in
_POWER_BY_UNIT = {unit: power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?) ?(?:([kmgt])(i?b|i)?)?", re.IGNORECASE)


def suggest_similar(name: str, known: Iterable[str]) -> str:
    """`` Did you mean …?``, or nothing when no known name is like ``name``."""
    found = list(dict.fromkeys(n.replace("_", "-") for n in difflib.get_close_matches(name, list(known), 6)))
    return f" Did you mean {' or '.join(found[:3])}?" if found else ""


def parse_listen_address(flag: str, text: str) -> tuple[str, int]:
    """``[ADDRESS:]PORT`` as address and port: loopback where none is given, any port with 0."""
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
    """``name``, which can be the name of a directory."""
    if not re.fullmatch(constants.SAFE_NAME_PATTERN, str(name)):
        raise ConfigError(
            f"{setting} {name!r} cannot be the name of a directory: use at most 128 letters, digits, '.', '_' "
            "and '-', beginning with a letter or digit."
        )
    return str(name)


def parse_absolute_path(setting: str, text: str) -> Path:
    """``text`` as an absolute path that the system can at least look for."""
    try:
        path = Path(text).expanduser().absolute()
        with contextlib.suppress(PermissionError):  # whoever uses it says what that needs
            path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user's home, a name too long, a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting} is {text[:200]!r}, which cannot be a path here: {reason}.") from error
    return path


def parse_keep(value: Any) -> int:
    """How many checkpoints are kept on each node."""
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,9}", text):
        raise ConfigError(f"keep is {text!r}: write a whole number of checkpoints, {MIN_KEEP} or more.")
    if int(text) < MIN_KEEP:
        raise ConfigError(
            f"keep is {text}, which is too few: with one copy kept, a copy that turns out corrupt leaves "
            f"nothing to resume from. Write {MIN_KEEP} or more."
        )
    return int(text)


def parse_resume_mode(value: str) -> str:
    """Return one of `RESUME_MODES`. A path, which earlier versions took, is told what to do instead."""
    if value not in RESUME_MODES:
        raise ConfigError(
            f"resume is {value[:100]!r}: write auto, must or never.{suggest_similar(value, RESUME_MODES)} To begin with "
            "a checkpoint, load it into the model and the optimizer before er.resume(): a first start takes "
            "rank 0's values."
        )
    return value


def parse_step_mark_s(value: Any) -> float:
    """Least seconds between two step marks, 0 for every step; the setting has no flag, only a variable."""
    return parse_duration(constants.ENV_STEP_MARK_S, value)


def parse_snapshot_memory(value: Any) -> int | None:
    """How many bytes of a node's memory snapshots may take; None: ``auto``, 0: ``off``.

    4GB is four times 10⁹ bytes. 4G, 4Gi and 4GiB are four times 2³⁰, as Slurm reads the first and Kubernetes
    the second. A number alone is bytes.
    """
    text = str(value).strip()
    if text in {"auto", "off"}:
        return None if text == "auto" else 0
    size = None if isinstance(value, bool) else _parse_bytes(text)
    if size is None:
        raise ConfigError(
            f"snapshot-memory is {text[:100]!r}: write a size (4GB, 512MiB, 1.5G), auto or off."
            + suggest_similar(text, ("auto", "off"))
        )
    if size > MAX_MEMORY_BYTES:
        raise ConfigError(f"snapshot-memory is {text!r}, which is more than any node has.")
    return size


def parse_size(setting: str, text: str) -> int:
    """``text`` as bytes: 4GB is four times 10⁹, 4G, 4Gi and 4GiB four times 2³⁰."""
    found = _parse_bytes(str(text).strip())
    if found is None:
        raise ConfigError(f"{setting} is {str(text)[:100]!r}: write a size, as 4GB, 512MiB, 1.5G.")
    return found


def _parse_bytes(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    # Half a byte is nothing that anybody means: a point needs a unit.
    if match is None or (match[2] is None and "." in text):
        return None
    power = _POWER_BY_UNIT[match[2].lower()] if match[2] else 0
    # A whole number is not rounded on its way through a float: `to_env` may have written it.
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * (1000 if (match[3] or "").lower() == "b" else 1024) ** power)


def parse_choice(setting: str, value: str, choices: Sequence[str]) -> str:
    """One of ``choices``, which are all that ``setting`` may be."""
    if value not in choices:
        raise ConfigError(
            f"{setting} is {value[:100]!r}: write {' or '.join(choices)}." + suggest_similar(value, choices)
        )
    return value


def parse_on_divergence(value: str) -> str:
    """What is done when replicas differ: one of `DIVERGENCE_POLICIES`."""
    return parse_choice("on-divergence", value, DIVERGENCE_POLICIES)


DEFAULT_CKPT_DIR = "./checkpoints"
DEFAULT_KEEP = 3  # one more than the least, so that one may turn out corrupt while another is written
DEFAULT_STEP_MARK_S = 5.0  # what a report may be wrong by about the step that a failure interrupted
MAX_CONFIG_FILE_BYTES = 64 * 1024
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)


# Under an agent its flags say these, and not the script's arguments: see `Settings.for_worker`.
AGENT_SETTINGS = ("ckpt_dir", "run_id", "node_name")


@dataclass(frozen=True)
class Settings:
    """What a user decides about one job on one node. Every instance holds valid values."""

    ckpt_dir: Path
    run_id: str
    node_name: str
    save_every: IntervalSetting
    keep: int
    resume: str
    step_mark_s: float = DEFAULT_STEP_MARK_S  # least seconds between two step marks of a rank; 0: every step
    snapshot_every: IntervalSetting = AUTO
    snapshot_memory: int | None = None  # bytes of this node for snapshots; None: auto, 0: off
    check_replicas: IntervalSetting = AUTO  # by steps or auto only: all nodes compare the same step
    on_divergence: str = "stop"  # or resume-from-majority

    def to_env(self) -> dict[str, str]:
        """The variables from which `for_worker` reads the same settings again."""
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
        """Settings of ``elastic-resume run``.

        Args:
            args: of `parse_layers`; an attribute that is None was given neither by flag nor by file.
            environ: the environment, asked only for what ``args`` leaves open.
            here: what the scheduler tells, which counts where nobody names the job.

        """
        given = {field.name: getattr(args, field.name, None) for field in fields(cls)}
        script = args.training_script.rpartition(".")[2] if args.module else args.training_script
        # torchrun's default for --rdzv-id is the word "none"; PET_RDZV_ID may have replaced it.
        spare = args.rdzv_id if args.rdzv_id != "none" else scheduler.job if scheduler is not None else None
        if scheduler is not None and scheduler.scheduler == "slurm" and spare == scheduler.job:
            # Two trainings of one allocation must not go on from each other's checkpoints.
            spare = environment.sanitize_name(f"{scheduler.job}-{Path(script).stem}", scheduler.job)
        return cls._build({**given, "run_id": args.run_id}, environ, spare, script)

    @classmethod
    def for_worker(cls, environ: Mapping[str, str], argv0: str, **overrides: Any) -> Settings:
        """Settings inside the training process, whoever started it.

        Args:
            environ: the process's environment.
            argv0: ``sys.argv[0]``; its stem is the job's name when nothing else says it.
            **overrides: arguments of ``er.resume()`` named as the fields here; None means not given.

        """
        unknown = set(overrides) - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}.")
        if constants.ENV_AGENT_PID in environ:
            # The agent holds the directory that these name: in another one the worker would be unguarded.
            overrides = {k: v for k, v in overrides.items() if k not in AGENT_SETTINGS}
        launcher = environ.get("TORCHELASTIC_RUN_ID", "none")
        # torchrun --standalone invents a uuid at each start: as the job's name it would never be found again.
        spare = None if launcher == "none" or _UUID.fullmatch(launcher) else launcher
        path = Path(argv0)
        script = path.parent.name if path.name == "__main__.py" else argv0
        return cls._build(overrides, environ, spare, script)

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
            on_divergence=parse_on_divergence(
                str(choose("on_divergence", constants.ENV_ON_DIVERGENCE, "stop"))
            ),
        )


# ---- flags and the file --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors of one line, with the near names of unknown flags."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the whole usage and exiting with 2."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            unknown = [word for word in message[len(prefix) :].split() if word.startswith("-")]
            flag = (unknown or [message[len(prefix) :]])[0].partition("=")[0]
            message = f"unknown flag {flag}." + suggest_similar(flag, actions_by_flag(self))
        raise ConfigError(f"{message} (see {self.prog} --help)")


class CommaJoinAction(argparse.Action):
    """A flag that may be given more than once: its texts, with commas between them."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, value: Any, _option: Any = None) -> None:
        """Add one to those of the command line; what a file says is replaced, as for any flag."""
        before = getattr(namespace, self.dest, None)
        more = isinstance(before, str) and before is not self.default
        setattr(namespace, self.dest, f"{before},{value}" if more else value)


def actions_by_flag(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every option string of ``parser`` with its action. argparse has no public way to ask."""
    return {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001


AddFlag = Callable[[str, str, str], None]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our own flags, in a group of their own. None stands for: not given."""
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
        help="drain this node when this says that it will be taken away; again, or with commas, for several "
        "(default off)",
    )
    add("config", "FILE.yaml", "flags from a file: the same names, ours and torchrun's")


def _add_state_flags(add: AddFlag) -> None:
    """What is kept, and where."""
    add("ckpt-dir", "DIR", f"root of all checkpoints (default {DEFAULT_CKPT_DIR})")
    add("node-name", "NAME", "this node's name (default: the scheduler's name for it, else the host's)")
    add("save-every", "N|TIME|auto", "steps (100) or time (5m) between two checkpoints (default auto)")
    add(
        "snapshot-every",
        "N|TIME|auto|off",
        "steps (100) or time (30s) between two copies in memory, which outlive a worker (default auto)",
    )
    add(
        "snapshot-memory",
        "auto|off|SIZE",
        "memory of this node for them, as 4GB or 512MiB (default auto: at most half of what is free)",
    )
    add("check-replicas", "N|auto|off", "steps between two comparisons of all replicas (default auto)")
    add("on-divergence", "|".join(DIVERGENCE_POLICIES), "when replicas differ (default stop)")
    add("keep", "N", f"checkpoints kept on each node, {MIN_KEEP} or more (default {DEFAULT_KEEP})")
    add("resume", "auto|must|never", "what to resume from (default auto: the newest valid copy, if any)")


def _add_rendezvous_flags(add: AddFlag) -> None:
    """How nodes find each other."""
    add(
        "shared-dir",
        "DIR|off",
        "Slurm: a directory that all nodes see, for the job's token (default: where it was submitted)",
    )
    add("node-timeout", "TIME", "a node that is silent for so long is lost; the same on all (default 3s)")
    add("settle", "TIME", "how long a first start waits for one more node (default 3s; in pods 35s)")
    add("join-timeout", "TIME", "how long a node waits for a world to form (default 10m)")
    add(
        "rdzv-token-file",
        "FILE",
        "0600 file whose text, 16 bytes or more, all nodes share (or ELASTIC_RESUME_TOKEN)",
    )


def _add_failure_flags(add: AddFlag) -> None:
    """What ends a worker, a node, the job."""
    add(
        "grace",
        "TIME",
        "how long a worker has to end after SIGTERM when this agent is drained (default 5s)",
    )
    add("drain-signals", "NAME,...", "signals that drain this node (default SIGTERM,SIGUSR1)")
    add(
        "requeue",
        "|".join(REQUEUE_MODES),
        "Slurm: have a job that is drained ahead of its end run again (default auto)",
    )
    add(
        "max-no-progress",
        "N",
        "failed starts in a row without a new step that end the job (default 3; none with --max-restarts)",
    )
    add(
        "exclude-after",
        "N",
        "a node that alone causes N failures in a row leaves, if --nnodes allows (default 0: only where the "
        "job would end otherwise)",
    )
    add(
        "hang-timeout",
        "TIME",
        "a rank that finishes no step for so long is hung (default: 30s, or ten times the longest step if "
        "that is more; 0: never)",
    )


def parse_flags_and_file(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, set[str]]:
    """Read flags and the file they name.

    Returns the values and the names of those that were given by flag or by file: what is not among them
    came from the environment or is a default. ``args.run_id`` is ``--rdzv-id`` if given, else None.
    """
    missing = object()
    dests = {action.dest for action in actions_by_flag(parser).values()}
    flags = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(dests, missing)))
    given = {dest for dest in dests if getattr(flags, dest) is not missing}
    if "config" in given:
        found = read_flags_file(Path(flags.config), parser)
        parser.set_defaults(**found)
        given |= set(found)
    args = parser.parse_args(argv)
    args.run_id = args.rdzv_id if "rdzv_id" in given else None
    return args, given


def read_flags_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read the YAML file of ``--config`` into values by destination.

    The text of a value is read as a flag's text would be, and not as YAML's types: in YAML 1.1 ``1:3``
    is the number 63 and ``no`` is false, and ``nnodes: 1:3`` must mean what ``--nnodes 1:3`` means. So only
    the node tree is built, no object of any tag.

    Raises:
        ConfigError: not readable, not a flat mapping, an unknown or doubled key, a value of a wrong type.

    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_FILE_BYTES + 1)
        if len(data) > MAX_CONFIG_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_CONFIG_FILE_BYTES} bytes; this is no file of flags.")
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
    found: dict[str, Any] = {}
    for key_node, value_node in root.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be the name of a flag, and not a list or mapping.")
        key = str(key_node.value)
        action = known.get(key)
        if action is None:
            raise ConfigError(f"{where}: unknown key {key!r}." + suggest_similar(key, known))
        if action.dest in found:
            raise ConfigError(f"{where}: {key!r} is given twice.")
        found[action.dest] = _parse_file_value(action, value_node, f"{where}: {key}")
    return found


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
    spelt = value.value in str(action.metavar).split(
        "|"
    )  # "off" is a truth value to YAML, and a form of ours
    if value.tag.endswith(":bool") and value.style is None and action.choices is None and not spelt:
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
