"""Talk to Slurm: expand node lists, query the time limit of the job, share the job's token.

Node lists are expanded without ``scontrol``, which containers often lack. Commands have time limits. A
command that is missing, refuses, or cannot reach the controller raises nothing and gives no answer. Fields
and texts are those of Slurm 22.05.

Slurm gives a job no secret of its own. ``ROOT/.elastic_resume/JOB.STEP/token`` (mode 0600), in a directory
that all nodes see, holds one.
"""

from __future__ import annotations

import calendar
import contextlib
import math
import os
import re
import secrets
import subprocess
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from elastic_resume.errors import ConfigError

# Slurm itself expands at most this many names, of one bracket and of one list.
MAX_NAMES = 65536
_NUMBER_PATTERN = r"[0-9]{1,18}"
_RANGE_PATTERN = re.compile(rf"({_NUMBER_PATTERN})(?:-({_NUMBER_PATTERN}))?")
_WORD_PATTERN = re.compile(r"((?:\[[^]]*\]|[^,])*),")
_BRACKET_PATTERN = re.compile(r"\[([^][]*)\]")
_LITERAL_PATTERN = re.compile(r"[A-Za-z0-9._-]*")


def expand_node_list(text: str) -> list[str]:
    """Expand a node list as ``scontrol show hostnames`` does: ``n[1-2,07],gpu3``.

    Several brackets in a name (``r[1-2]n[01-10]``) are understood. A name that is listed twice is returned
    twice.

    Args:
        text: SLURM_JOB_NODELIST or a similar variable.

    Raises:
        ConfigError: it is no node list, or has more than `MAX_NAMES` names.

    """
    names: list[str] = []
    for word in _WORD_PATTERN.findall(f"{text},"):
        pieces = _BRACKET_PATTERN.split(word)
        literals, brackets = pieces[::2], pieces[1::2]
        if not word or not all(map(_LITERAL_PATTERN.fullmatch, literals)):
            raise _node_list_error(text, f"{word[:100]!r} is no name")
        ranges = [[_parse_range(part, text) for part in bracket.split(",")] for bracket in brackets]
        count = math.prod(sum(last - first + 1 for first, last, _ in bracket) for bracket in ranges)
        if len(names) + count > MAX_NAMES:
            raise _node_list_error(text, f"it stands for more than {MAX_NAMES} names")
        numbers = (
            [f"{number:0{width}d}" for first, last, width in bracket for number in range(first, last + 1)]
            for bracket in ranges
        )
        names += ["".join(map(str.__add__, literals, (*chosen, ""))) for chosen in product(*numbers)]
    return names


def _parse_range(part: str, text: str) -> tuple[int, int, int]:
    """Parse ``3``, ``3-5`` or ``08-11`` to first, last, and the least number of digits."""
    match = _RANGE_PATTERN.fullmatch(part)
    if match is None:
        raise _node_list_error(text, f"[{part[:100]}] holds no range of numbers")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _node_list_error(text, f"[{part}] ends before it begins")
    return first, last, len(match[1])


def _node_list_error(text: str, why: str) -> ConfigError:
    shown = text if len(text) <= 200 else text[:200] + "…"
    return ConfigError(f"the Slurm node list {shown!r} cannot be read: {why}.")


QUERY_TIMEOUT_S = 10.0  # a controller that is down lets commands wait for 4 to 9 s, by MessageTimeout
# Print times in UTC and in full, whatever format the user has set.
TIME_FORMAT_ENVIRONMENT = {"SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}
_TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def run_slurm_command(argv: Sequence[str], timeout_s: float = QUERY_TIMEOUT_S) -> str:
    """Run a Slurm command without the user's variables for display; return its output, empty if it fails.

    SQUEUE_STATES=PENDING, for example, hides a running job.
    """
    shown = {name: text for name, text in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**shown, **TIME_FORMAT_ENVIRONMENT},
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


# ---- the job's end -------------------------------------------------------------------------------------


def query_end_time(job: str) -> float | None:
    """Query the Unix time at which Slurm ends a job: infinite without a limit, None without an answer.

    The limit may change while the job runs.
    """
    end, separator, limit = run_slurm_command(["squeue", "-h", "-j", job, "-o", "%e|%l"]).partition("|")
    if not separator:
        return None
    # Without a limit 22.05 gives NONE, or a time in a year.
    if limit.strip().upper() in {"UNLIMITED", "INFINITE", "NOT_SET"}:
        return math.inf
    return parse_utc_time(end)


def parse_utc_time(text: str) -> float | None:
    """Parse a time in UTC as Slurm writes it; None for NONE, Unknown and N/A."""
    if not _TIME_PATTERN.fullmatch(text.strip()):
        return None
    try:
        return float(calendar.timegm(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


# ---- excluded nodes ------------------------------------------------------------------------------------


def record_excluded_node(directory: str, node: str) -> None:
    """Leave an empty file of the node's name, for the batch script's next ``scontrol update ExcNodeList``."""
    with contextlib.suppress(OSError):  # the requeued job may get this node again then
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / node).touch()


# ---- the shared token ----------------------------------------------------------------------------------

SHARED_DIR_NAME = ".elastic_resume"
TOKEN_FILE_NAME = "token"  # noqa: S105 - the file's name
TOKEN_TIMEOUT_S = 60.0
REMEDY = (
    "Submit the job from a directory that all nodes see, or set ELASTIC_RESUME_TOKEN to a secret before srun"
)
TOKEN_POLL_S = 0.25


class SharedDir:
    """The shared directory of one job."""

    def __init__(self, root: Path, job: str) -> None:
        """Create the directory.

        Raises:
            ConfigError: it cannot be created, or belongs to another user.

        """
        self.path = root / SHARED_DIR_NAME / job
        self.token_path = self.path / TOKEN_FILE_NAME
        need = f"the nodes of {job} need a directory that all of them see, and"
        if not root.is_dir():  # a new root would be another one on each node
            raise ConfigError(f"{need} there is no {root} on this one. {REMEDY}.")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
        except OSError as error:
            raise ConfigError(f"{need} {self.path} cannot be made: {error.strerror}. {REMEDY}.") from error
        if owner != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to another user (uid {owner}), who would know the token. {REMEDY}."
            )

    def wait_for_token(self, *, create: bool, timeout_s: float = TOKEN_TIMEOUT_S) -> Path:
        """Return the path of the token's file; with ``create``, create the token if there is none.

        Several nodes may create it at once; all get the same token.

        Raises:
            ConfigError: it cannot be created, or does not appear in time.

        """
        path = self.token_path
        try:
            if create:
                self._create_token(path)
            limit = time.monotonic() + timeout_s
            while not _exists_on_server(path):
                if time.monotonic() >= limit:
                    raise ConfigError(
                        f"no {path} after {timeout_s:.0f} s: either the first node of the job does not run, "
                        f"or this directory is not the same on all nodes. {REMEDY}."
                    )
                time.sleep(TOKEN_POLL_S)
        except OSError as error:
            raise ConfigError(f"{path} cannot be made: {error.strerror}. {REMEDY}.") from error
        return path

    def _create_token(self, path: Path) -> None:
        """Create the token's file whole under its name: other nodes may read it at any moment."""
        mine = path.with_name(f"{TOKEN_FILE_NAME}.{secrets.token_hex(8)}")
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)
        finally:
            mine.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory when the job is done. Other nodes may do so at the same time."""
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                path.unlink(missing_ok=True)
            self.path.rmdir()  # keep its parent: another job may be creating its own directory there


def _exists_on_server(path: Path) -> bool:
    """Check existence by opening the file, which makes an NFS client ask the server."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    except FileNotFoundError:
        # The client caches that a name is absent; reading the directory refreshes the cache.
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())
        return False
    return True
