"""``elastic-resume manifest``: what a scheduler is given to run a job, filled in and checked.

Promise: what is printed has passed `kubernetes_rules`; input that a scheduler would refuse, at once or hours
later when the first pod is to start, is a ConfigError. Writes nothing but what it prints; asks no cluster.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from elastic_resume import contract
from elastic_resume.cluster import kubernetes, kubernetes_rules, sbatch
from elastic_resume.cluster.filling import filled
from elastic_resume.cluster.inputs import add_command, name_of, nodes_of, whole
from elastic_resume.durations import parse_duration
from elastic_resume.errors import ConfigError

MAX_FILE_BYTES = 1 << 20  # an API server takes no more
MIN_GRACE_S = 15
DEFAULT_GRACE_S = 120
MAX_GRACE_S = 86_400
MIN_SHM_BYTES = 64 << 20  # what a pod has anyway
OTHERS_BYTES = 1 << 30  # of ephemeral storage beside the checkpoints: logs, what the script writes
SINCE_SUCCESS_POLICY = 31  # Kubernetes 1.31 has it without a feature gate
OLDEST_MINOR = 29  # the first with backoffLimitPerIndex and podReplacementPolicy without a feature gate
CHECKED = {"Job", "JobSet", "Service", "Kustomization"}
_IMAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/@-]{0,510}[A-Za-z0-9])?")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._:/@-]*|[0-9]+[kMGTPE]i?")
_NO_TEXT = {
    "y",
    "n",
    "yes",
    "no",
    "on",
    "off",
    "true",
    "false",
    "null",
}  # for YAML, in small or large letters


def register(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to the parser of ``elastic-resume``."""
    one = commands.add_parser("manifest", help="print what Kubernetes or Slurm needs to run a job")
    kinds = one.add_subparsers(title="schedulers", metavar="SCHEDULER", required=True)
    _add_kubernetes(kinds)
    sbatch.add(kinds)
    _add_check(kinds)


def _add_check(kinds: argparse._SubParsersAction[Any]) -> None:
    one = kinds.add_parser(
        "check", help="look for what Kubernetes' schemas let pass, in a file that was edited"
    )
    one.add_argument("file", type=Path, metavar="FILE.yaml")
    one.set_defaults(function=check)


def check(args: argparse.Namespace) -> int:
    """``elastic-resume manifest check``: print what is wrong, one line each; 1 where something is.

    Raises:
        ConfigError: the file cannot be read, or is no manifest.

    """
    try:
        with open(args.file, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{args.file}: larger than {MAX_FILE_BYTES} bytes; this is no manifest of a job."
            )
        documents = [one for one in yaml.safe_load_all(data.decode()) if one is not None]
    except OSError as error:
        raise ConfigError(f"{args.file}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{args.file}: is not YAML: {' '.join(str(error).split())[:200]}") from error
    try:
        kinds = {str(one.get("kind")) for one in documents}
        if not kinds & CHECKED:
            told = ", ".join(sorted(kinds)) or "nothing"
            raise ConfigError(f"{args.file}: there is no Job, JobSet or Service in it, but {told}.")
        wrong = kubernetes_rules.complaints(documents)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{args.file}: a field that every Job has is missing or of a wrong kind ({error!r}): "
            "kubectl apply --dry-run=server says which."
        ) from error
    for line in wrong or [f"nothing wrong was found ({', '.join(sorted(kinds & CHECKED))})"]:
        print(f"{args.file}: {line}")
    return contract.EXIT_AT_FAULT if wrong else contract.EXIT_DONE


def print_kubernetes(args: argparse.Namespace) -> int:
    """``elastic-resume manifest kubernetes``."""
    print(render_kubernetes(args), end="")
    return 0


def _add_kubernetes(kinds: argparse._SubParsersAction[Any]) -> None:
    one = kinds.add_parser(
        "kubernetes",
        help="an Indexed Job and its Service, or a JobSet, as YAML",
        epilog="example: elastic-resume manifest kubernetes --nodes 2:3 --image registry.example/train:1 "
        "--gpus 8 --memory 200Gi -- train.py --epochs 90 | kubectl apply --filename -",
    )
    add = one.add_argument
    add(
        "--nodes",
        required=True,
        metavar="N|MIN:MAX",
        help="pods; and on how few training goes on (default 1)",
    )
    add("--image", required=True, metavar="IMAGE", help="with elastic-resume and the script in it")
    add("--name", metavar="NAME", help="of the Job and its Service (default: the script's)")
    add("--gpus", default="0", metavar="N", help="of each node, and as many workers (default 0: one worker)")
    add("--cpus", default="1", metavar="N", help="asked for each node (default %(default)s)")
    add(
        "--memory",
        default="4Gi",
        metavar="SIZE",
        help="of each node, /dev/shm included (default %(default)s)",
    )
    add("--shm", metavar="SIZE", help="of /dev/shm (default: a quarter of the memory)")
    add("--disk", default="10Gi", metavar="SIZE", help="of each node, for checkpoints (default %(default)s)")
    add("--claim", default="", metavar="NAME", help="PersistentVolumeClaim for checkpoints instead")
    add(
        "--grace",
        default=str(DEFAULT_GRACE_S),
        metavar="TIME",
        help="from SIGTERM to SIGKILL: longer than a step and a checkpoint take (default %(default)s)",
    )
    add(
        "--service-account",
        default="",
        metavar="NAME",
        help="one that may get and list pods, to ask whether silent ones are gone",
    )
    add("--kind", choices=("job", "jobset"), default="job", help="default %(default)s")
    add(
        "--kubernetes",
        default=f"1.{SINCE_SUCCESS_POLICY}",
        metavar="VERSION",
        help=f"oldest version to run on, 1.{OLDEST_MINOR} or newer (default %(default)s)",
    )
    add_command(one)
    one.set_defaults(function=print_kubernetes)


def render_kubernetes(args: argparse.Namespace) -> str:
    """Give the YAML.

    Raises:
        ConfigError: Kubernetes would refuse it, or the job could not survive with it.

    """
    values = kubernetes_values(args)
    names = ("jobset.yaml",) if args.kind == "jobset" else ("service.yaml", "job.yaml")
    text = "---\n".join(kubernetes_file(name, values) for name in names)
    wrong = kubernetes_rules.complaints(yaml.safe_load_all(text))
    if wrong:
        raise ConfigError("Kubernetes would not take this: " + "; ".join(wrong[:5]))
    return text


def kubernetes_file(name: str, values: dict[str, str]) -> str:
    """Fill one of the templates of Kubernetes."""
    return filled(f"kubernetes/{name}", {**values, "job": filled("kubernetes/spec.yaml", values)})


def kubernetes_values(args: argparse.Namespace) -> dict[str, str]:
    """Read the flags into the words of the templates.

    Raises:
        ConfigError: one is wrong, or two do not go together.

    """
    least, nodes = nodes_of(args.nodes)
    name = args.name or name_of(args.command)
    kubernetes.check_name(name, nodes, between="-node-0" if args.kind == "jobset" else "")
    if name in _NO_TEXT:
        raise ConfigError(f"--name is {name!r}, which YAML does not take for a text: choose another.")
    if not _IMAGE.fullmatch(args.image):
        raise ConfigError(f"--image is {args.image!r}, which is no name of an image.")
    gpus = whole("--gpus", args.gpus, 0, 64)
    memory = kubernetes.size_bytes(args.memory, "--memory")
    shm_text = args.shm or _mebibytes(max(MIN_SHM_BYTES, memory // 4))
    shm = kubernetes.size_bytes(shm_text, "--shm")
    if shm < MIN_SHM_BYTES:
        raise ConfigError(f"--shm is {shm_text}: a pod has 64Mi anyway, and DataLoader workers need more.")
    if shm >= memory:
        raise ConfigError(f"--shm is {shm_text} and --memory {args.memory}: /dev/shm is part of the memory.")
    disk = kubernetes.size_bytes(args.disk, "--disk")
    minor = _minor(args.kubernetes)
    for flag, text in (("--claim", args.claim), ("--service-account", args.service_account)):
        if text and not kubernetes.is_label(text):
            raise ConfigError(f"{flag} is {text!r}, which is no name.")
    return {
        "name": name,
        "image": _text(args.image),
        "least": str(least),
        "nodes": str(nodes),
        "spare": str(nodes - least),
        "workers": str(gpus or 1),
        "gpus": str(gpus) if gpus else "",
        "cpus": str(whole("--cpus", args.cpus, 1, 100_000)),
        "memory": _text(args.memory),
        "shm": _text(shm_text),
        "disk": _text(args.disk),
        "storage": _mebibytes(disk + OTHERS_BYTES),
        "claim": args.claim and _text(args.claim),
        "account": args.service_account and _text(args.service_account),
        "grace": str(_grace(args.grace)),
        "success": "yes" if minor >= SINCE_SUCCESS_POLICY else "",
        "command": _words(args.command),
    }


def _text(word: str) -> str:
    """Write a text so that YAML takes it for one: 123, 1e3 and yes are none."""
    plain = _PLAIN.fullmatch(word) and word.lower() not in _NO_TEXT
    return word if plain else json.dumps(word)


def _words(command: Sequence[str]) -> str:
    """Write a list of texts.

    Kubernetes fills in $(NAME), and makes one dollar of two: what is meant as it stands has them twice.
    """
    text = json.dumps([word.replace("$", "$$") for word in command], ensure_ascii=False)
    if re.search("[\ud800-\udfff]", text):
        raise ConfigError("an argument of the script is no text: a manifest is UTF-8.")
    # JSON leaves as they are what YAML takes for the end of a line, or refuses.
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _grace(text: str) -> int:
    seconds = math.ceil(parse_duration("--grace", text, most_s=MAX_GRACE_S))  # Kubernetes takes whole ones
    if seconds < MIN_GRACE_S:
        raise ConfigError(
            f"--grace is {seconds} s, too short for saving: half of it is for workers that end their "
            f"step, the rest for a checkpoint to reach the disk. Write {MIN_GRACE_S} or more."
        )
    return seconds


def _minor(text: str) -> int:
    match = re.fullmatch(r"v?1\.(\d{1,3})(\.\d+)?", text)
    if match is None or int(match[1]) < OLDEST_MINOR:
        raise ConfigError(f"--kubernetes is {text!r}: write a version from 1.{OLDEST_MINOR} on.")
    return int(match[1])


def _mebibytes(size: int) -> str:
    """Write a size as Kubernetes does, in Gi where that is exact."""
    mebibytes = size >> 20
    return f"{mebibytes >> 10}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"
