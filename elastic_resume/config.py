"""Settings of one job on one node: from flags, then the file of ``--config``, then the environment.

`OPTIONS` declares each setting once: its flag, help, variable, default and parser. Everything is parsed here,
so a `Settings` instance is valid. A wrong value or an unknown key is a ConfigError of one or two lines with
the setting, the value and the accepted forms. Parsing changes nothing on disk. torchrun's own flags come in
as an argparse parser, so this module does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
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
DEFAULT_KEEP = 3  # MIN_KEEP + 1: one may be corrupt while another is written
DEFAULT_STEP_MARK_S = 5.0  # a report dates the step that a failure interrupted with this precision
MAX_MEMORY_BYTES = 2**60  # a larger value is surely a typo; this one fits every integer type in use
AGENT_SETTINGS = ("ckpt_dir", "run_id", "node_name")
"""Settings that the agent's flags decide, and the script's arguments do not: see `Settings.for_worker`."""
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)
_YAML_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def suggest_similar(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean …?`` with known names similar to ``name``, or an empty text."""
    matches = list(
        dict.fromkeys(n.replace("_", "-") for n in difflib.get_close_matches(name, list(known), 6))
    )
    return f" Did you mean {' or '.join(matches[:3])}?" if matches else ""


# ---- values: each parser gets the name of the setting, for its error, and the given value ----------------


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
    setting = setting.replace("-", " ")
    if not re.fullmatch(constants.SAFE_NAME_PATTERN, str(name)):
        raise ConfigError(
            f"{setting} {name!r} cannot be the name of a directory: use at most 128 letters, digits, '.', "
            "'_' and '-', beginning with a letter or digit."
        )
    return str(name)


def parse_absolute_path(setting: str, value: object) -> Path:
    """Return ``value`` as an absolute path, because the script may change its working directory."""
    text = str(value)
    try:
        path = Path(text).expanduser().absolute()
        with contextlib.suppress(PermissionError):  # the later access reports it
            path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # unknown user's home, name too long, NUL byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting} is {text[:200]!r}, which cannot be a path here: {reason}.") from error
    return path


def parse_keep(setting: str, value: object) -> int:
    """Parse the number of checkpoints that each node keeps."""
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,9}", text):
        raise ConfigError(
            f"{setting} is {text[:100]!r}: write a whole number of checkpoints, {MIN_KEEP} or more."
        )
    if int(text) < MIN_KEEP:
        raise ConfigError(
            f"{setting} is {text}, which is too few: with one kept, a checkpoint that turns out corrupt "
            f"leaves nothing to resume from. Write {MIN_KEEP} or more."
        )
    return int(text)


def parse_snapshot_memory(setting: str, value: object) -> int | None:
    """Parse the bytes of a node's memory for snapshots. ``auto`` is None, ``off`` is 0."""
    text = str(value).strip()
    if text in {"auto", "off"}:
        return None if text == "auto" else 0
    hint = "write a size (4GB, 512MiB, 1.5G), auto or off." + suggest_similar(text, ("auto", "off"))
    size = parse_size(setting, value, hint=hint)
    if size > MAX_MEMORY_BYTES:
        raise ConfigError(f"{setting} is {text!r}, which is more than any node has.")
    return size


def parse_choice(setting: str, value: object, choices: Sequence[str], hint: str = "") -> str:
    """Return ``value`` if it is one of ``choices``; ``hint`` ends the error message otherwise."""
    text = str(value)
    if text not in choices:
        *others, last = choices
        similar = suggest_similar(text, choices)
        raise ConfigError(f"{setting} is {text[:100]!r}: write {', '.join(others)} or {last}.{similar}{hint}")
    return text


def parse_interval(setting: str, value: object, **allowed: bool) -> IntervalSetting:
    """Parse an interval; see `IntervalSetting.parse`."""
    return IntervalSetting.parse(value, setting, **allowed)


# ---- the table -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One flag, its key in the file, and its variable. With ``parse`` it is a field of `Settings`.

    Attributes:
        name: of the flag and the key; with underscores, of the field and of the argument of `er.resume()`.
        metavar: the accepted forms; None for a switch.
        help: for ``--help``; empty if there is no such flag.
        parse: gets the name and the given value; None if the package that uses the flag parses it.
        default: value for ``parse`` if nothing is given.
        has_variable: whether ELASTIC_RESUME_NAME is read; always for fields of `Settings`.
        is_list: the flag may be repeated; its values are joined by commas.
    """

    name: str
    metavar: str | None
    help: str
    parse: Callable[[str, Any], Any] | None = None
    default: Any = None
    has_variable: bool = False
    is_list: bool = False

    @property
    def field(self) -> str:
        """The name of the setting's field or of the flag's destination."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable; empty if there is none."""
        return constants.ENV_PREFIX + self.field.upper() if self.parse or self.has_variable else ""


_RESUME_HINT = (
    " To begin with a checkpoint, load it into the model and the optimizer before er.resume(): a first start "
    "takes rank 0's values."
)
_interval_or_off = partial(parse_interval, allow_off=True)
OPTIONS = (
    Option("ckpt-dir", "DIR", "root of all checkpoints", parse_absolute_path, DEFAULT_CKPT_DIR),
    Option("run-id", "NAME", "", validate_directory_name),  # the flag is torchrun's --rdzv-id
    Option(
        "node-name",
        "NAME",
        "this node's name (default: the scheduler's, else the host's)",
        validate_directory_name,
    ),
    Option(
        "save-every", "N|TIME|auto", "steps (100) or time (5m) between two checkpoints", parse_interval, AUTO
    ),
    Option(
        "snapshot-every",
        "N|TIME|auto|off",
        "steps (100) or time (30s) between two snapshots in memory, which outlive a worker",
        _interval_or_off,
        AUTO,
    ),
    Option(
        "snapshot-memory",
        "auto|off|SIZE",
        "memory of this node for snapshots, as 4GB or 512MiB; auto: at most half of the free memory",
        parse_snapshot_memory,
        "auto",
    ),
    Option(
        "check-replicas",
        "N|auto|off",
        "steps between two comparisons of all replicas",
        partial(_interval_or_off, allow_seconds=False),
        AUTO,
    ),
    Option(
        "on-divergence",
        "|".join(DIVERGENCE_POLICIES),
        "when replicas differ",
        partial(parse_choice, choices=DIVERGENCE_POLICIES),
        "stop",
    ),
    Option("keep", "N", f"checkpoints kept on each node, {MIN_KEEP} or more", parse_keep, DEFAULT_KEEP),
    Option(
        "resume",
        "|".join(RESUME_MODES),
        "what to resume from; auto: the newest valid snapshot or checkpoint, if any",
        partial(parse_choice, choices=RESUME_MODES, hint=_RESUME_HINT),
        "auto",
    ),
    Option("step-mark-s", "TIME", "", parse_duration, DEFAULT_STEP_MARK_S),
    Option(
        "shared-dir",
        "DIR|off",
        "Slurm: a directory that all nodes see, for the job's token (default: the submit directory)",
        has_variable=True,
    ),
    Option(
        "node-timeout",
        "TIME",
        "a node that is unreachable for this long is lost; use the same on all nodes (default 3s)",
    ),
    Option(
        "settle",
        "TIME",
        "last-call timeout: how long a first start waits for more nodes (default 3s; in pods 35s)",
    ),
    Option("join-timeout", "TIME", "how long a node waits for a rendezvous (default 10m)"),
    Option(
        "rdzv-token-file",
        "FILE",
        "0600 file with the secret of all nodes, 16 bytes or more (or ELASTIC_RESUME_TOKEN)",
    ),
    Option(
        "grace",
        "TIME",
        "time between SIGTERM and SIGKILL for a worker when this agent is drained (default 5s)",
    ),
    Option(
        "drain-signals",
        "NAME,...",
        "signals that drain this node (default SIGTERM,SIGUSR1)",
        has_variable=True,
    ),
    Option(
        "requeue",
        "|".join(REQUEUE_MODES),
        "Slurm: requeue a job that is drained before its end (default auto)",
        has_variable=True,
    ),
    Option(
        "max-no-progress",
        "N",
        "end the job after N failed starts in a row without a new step (default 3; none with --max-restarts)",
    ),
    Option(
        "exclude-after",
        "N",
        "exclude a node that alone causes N failures in a row, if --nnodes allows (default 0: only if the "
        "job would end otherwise)",
    ),
    Option(
        "hang-timeout",
        "TIME",
        "a rank that finishes no step for this long is hung (default: 30s, or ten times the longest step if "
        "that is more; 0: never)",
    ),
    Option(
        "metrics",
        "[ADDRESS:]PORT",
        "serve metrics for Prometheus, at 127.0.0.1 if no address is given (default off; "
        "needs pip install 'elastic-resume[metrics]')",
        has_variable=True,
    ),
    Option("preload", "MODULE,...", "modules to import once, ahead of all workers, beside torch"),
    Option("no-warm", None, "start each worker as a new process, as torchrun does"),
    Option(
        "preemption-notice",
        "aws|gcp|azure|file:PATH|command:COMMAND",
        "drain this node when this source announces its preemption; join several by commas (default off)",
        has_variable=True,
        is_list=True,
    ),
    Option("quiet", None, "log warnings and errors only"),
    Option("config", "FILE.yaml", "flags from a file: the same names, ours and torchrun's"),
)
_SETTING_OPTIONS = tuple(option for option in OPTIONS if option.parse is not None)


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
    step_mark_s: float = DEFAULT_STEP_MARK_S  # minimum seconds between a rank's `step` events; 0: each step
    snapshot_every: IntervalSetting = AUTO
    snapshot_memory: int | None = None  # bytes for this node's snapshots; None: auto, 0: off
    check_replicas: IntervalSetting = AUTO  # steps or auto, not time: all nodes compare the same step
    on_divergence: str = "stop"  # "stop" or "resume-from-majority"

    def to_env(self) -> dict[str, str]:
        """Return the environment variables from which `for_worker` reads the same settings."""
        values = {option.variable: getattr(self, option.field) for option in _SETTING_OPTIONS}
        return {variable: "auto" if value is None else str(value) for variable, value in values.items()}

    @classmethod
    def for_agent(
        cls,
        args: argparse.Namespace,
        environ: Mapping[str, str],
        scheduler: environment.SchedulerContext | None = None,
    ) -> Settings:
        """Build the settings of ``elastic-resume run``.

        ``args`` are from `parse_flags_and_file`; None means neither flag nor file gave the value. The
        scheduler's name of the job is the fallback for the run id.
        """
        given = {field.name: getattr(args, field.name, None) for field in fields(cls)}
        script = args.training_script.rpartition(".")[2] if args.module else args.training_script
        # torchrun's default for --rdzv-id is the word "none"; PET_RDZV_ID may have replaced it.
        fallback = args.rdzv_id if args.rdzv_id != "none" else None
        if fallback is None and scheduler is not None:
            fallback = scheduler.job
            if scheduler.scheduler == "slurm":
                # Two training scripts in one allocation must not resume from each other's checkpoints.
                fallback = environment.sanitize_name(f"{fallback}-{Path(script).stem}", fallback)
        return cls._build(given, environ, fallback, script)

    @classmethod
    def for_worker(cls, environ: Mapping[str, str], argv0: str, **overrides: Any) -> Settings:
        """Build the settings of a training process, under any launcher.

        The stem of ``argv0`` is the last fallback for the run id. ``overrides`` are arguments of
        ``er.resume()``, named as the fields here; None means not given.
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
        defaults = {
            "run_id": fallback_run_id or environment.sanitize_name(Path(script).stem, "job"),
            "node_name": environment.default_node_name(environ),
        }
        values = {}
        for option in _SETTING_OPTIONS:
            value = given.get(option.field)
            if value is None or (option.field in defaults and not value):
                value = environ.get(option.variable) or defaults.get(option.field, option.default)
            if option.parse is not None:
                label = option.name if option.help or option.name == "run-id" else option.variable
                values[option.field] = option.parse(label, value)
        return cls(**values)


# ---- flags and the file --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one-line ConfigErrors that suggest names for unknown flags."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting with 2."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            unknown = [word for word in message[len(prefix) :].split() if word.startswith("-")]
            flag = (unknown or [message[len(prefix) :]])[0].partition("=")[0]
            message = f"unknown {'flag' if unknown else 'argument'} {flag}." + suggest_similar(
                flag, actions_by_flag(self)
            )
        raise ConfigError(f"{message} (see {self.prog} --help)")


class CommaJoinAction(argparse.Action):
    """A flag that may be repeated: its values are joined by commas."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, value: Any, _option: Any = None) -> None:
        """Append to the value of earlier flags."""
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{value}" if isinstance(before, str) else value)


def actions_by_flag(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return each option string of ``parser`` with its action; argparse has no public accessor."""
    return {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add elastic_resume's flags to torchrun's parser, in their own group. None means not given."""
    group = parser.add_argument_group(
        "elastic_resume",
        "A flag beats the --config file, the file beats the environment (ELASTIC_RESUME_*, PET_*). TIME is a "
        "number of seconds, or has a unit: 500ms, 30s, 5m, 1.5h. For --save-every and --snapshot-every a "
        "bare number is steps.",
    )
    for option in OPTIONS:
        names = dict.fromkeys([f"--{option.name}", f"--{option.field}"])
        if option.metavar is None:
            group.add_argument(*names, help=option.help, action="store_true")
        elif option.help:
            default = f" (default {option.default})" if option.default is not None else ""
            action = CommaJoinAction if option.is_list else "store"
            group.add_argument(*names, help=option.help + default, action=action, metavar=option.metavar)


def parse_flags_and_file(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[argparse.Namespace, set[str]]:
    """Parse the flags and the ``--config`` file; take other flags' values from their variables.

    Returns the values, and the names of those given by flag or file; the others come from the environment or
    are defaults. Variables of `Settings` are left to `Settings.for_agent`. ``args.run_id`` is ``--rdzv-id``
    if that was given, else None.
    """
    missing = object()
    dests = {action.dest for action in actions_by_flag(parser).values()}
    flags = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(dests, missing)))
    given = {dest for dest in dests if getattr(flags, dest) is not missing}
    from_file = read_flags_file(Path(flags.config), parser) if "config" in given else {}
    words = {dest: word for dest, word in from_file.items() if dest not in given}
    parser.set_defaults(**{dest: False for dest, word in words.items() if not word})
    args = parser.parse_args([*filter(None, words.values()), *argv])
    given |= words.keys()
    for option in OPTIONS:
        if option.variable and option.parse is None and getattr(args, option.field) is None:
            setattr(args, option.field, environ.get(option.variable) or None)
    args.run_id = args.rdzv_id if "rdzv_id" in given else None
    return args, given


def read_flags_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Read the YAML file of ``--config`` into words of a command line, by destination.

    A value is the flag's text, and the parser checks it. YAML's own types would be wrong: YAML 1.1 reads
    ``1:3`` as 63 and ``no`` as false. So only the node tree is built, and no object of any tag. A switch that
    is false has an empty word.

    Raises:
        ConfigError: not readable, not a flat mapping, an unknown or repeated key, a wrong value.

    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())[:200]}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must hold lines of the form NAME: VALUE at its top, named as the flags.")
    known = {flag[2:]: action for flag, action in actions_by_flag(parser).items() if flag.startswith("--")}
    del known["help"], known["config"]
    words: dict[str, str] = {}
    for key_node, value_node in root.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be the name of a flag, and not a list or mapping.")
        key = str(key_node.value)
        action = known.get(key)
        if action is None:
            raise ConfigError(f"{where}: unknown key {key!r}." + suggest_similar(key, known))
        if action.dest in words:
            raise ConfigError(f"{where}: {key!r} is given twice.")
        word = words[action.dest] = _format_as_flag(key, action, value_node, where)
        try:
            parser.parse_known_args([*filter(None, [word]), "script"])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return words


def _format_as_flag(key: str, action: argparse.Action, value: yaml.Node, where: str) -> str:
    """Return one key of the file as a word of a command line; a list's items are joined by commas."""
    items = value.value if isinstance(value, yaml.SequenceNode) else [value]
    texts = [item.value for item in items if isinstance(item, yaml.ScalarNode)]
    if len(texts) < len(items) or not all(texts) or value.tag.endswith(":null"):
        raise ConfigError(f"{where}: {key} must be one value, or a list of plain values.")
    text = ",".join(texts)
    if action.nargs != 0:
        return f"--{key}={text}"
    if text.lower() not in _YAML_BOOLEANS:
        raise ConfigError(f"{where}: {key} must be true or false.")
    return f"--{key}" if _YAML_BOOLEANS[text.lower()] else ""
