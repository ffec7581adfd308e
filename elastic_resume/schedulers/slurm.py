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
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from elastic_resume.errors import ConfigError

# Slurm itself expands at most this many names, of one bracket and of one list.
MAX_NAMES = 65536
_NUMBER_PATTERN = r"[0-9]{1,18}"
_RANGE_PATTERN = re.compile(rf"({_NUMBER_PATTERN})(?:-({_NUMBER_PATTERN}))?")
_PIECE_PATTERN = re.compile(r"([A-Za-z0-9._-]*)(?:\[([^][]*)\])?")


def expand_node_list(text: str) -> list[str]:
    """Expand a node list as ``scontrol show hostnames`` does, in its order: ``n[1-2,07],gpu3``.

    Several brackets in a name (``r[1-2]n[01-10]``) are understood. A name that is listed twice is returned
    twice.

    Args:
        text: SLURM_JOB_NODELIST or a similar variable.

    Raises:
        ConfigError: it is no node list, or has more than `MAX_NAMES` names.

    """
    names: list[str] = []
    for word in _split_node_list(text):
        literals, ranges = _split_brackets(word, text)
        count = 1
        for bracket in ranges:
            count *= sum(last - first + 1 for first, last, _ in bracket)
        if len(names) + count > MAX_NAMES:
            raise _node_list_error(text, f"it stands for more than {MAX_NAMES} names")
        names += _expand_names(literals, [list(_expand_ranges(bracket)) for bracket in ranges])
    return names


def _split_node_list(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    start = depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _split_brackets(word: str, text: str) -> tuple[list[str], list[list[tuple[int, int, int]]]]:
    """Split a word into the texts around its brackets and the ranges in each."""
    literals, ranges, at = [""], [], 0
    while at < len(word):
        match = _PIECE_PATTERN.match(word, at)
        if match is None or match.end() == at:
            raise _node_list_error(text, f"{word[at]!r} at {word[:100]!r}")
        at = match.end()
        literals[-1] += match[1]
        if match[2] is not None:
            ranges.append([_parse_range(part, text) for part in match[2].split(",")])
            literals.append("")
    if not word:
        raise _node_list_error(text, "a name is missing")
    return literals, ranges


def _parse_range(part: str, text: str) -> tuple[int, int, int]:
    """Parse ``3``, ``3-5`` or ``08-11`` to first, last, and the least number of digits."""
    match = _RANGE_PATTERN.fullmatch(part)
    if match is None:
        raise _node_list_error(text, f"[{part[:100]}] holds no range of numbers")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _node_list_error(text, f"[{part}] ends before it begins")
    return first, last, len(match[1])


def _expand_ranges(ranges: list[tuple[int, int, int]]) -> Iterator[str]:
    for first, last, width in ranges:
        for number in range(first, last + 1):
            yield f"{number:0{width}d}"


def _expand_names(literals: list[str], brackets: list[list[str]]) -> Iterator[str]:
    """List all names of one word in Slurm's order: the last bracket fastest, then the first, ..."""
    *earlier, last = brackets or [[""]]
    for slow_to_fast in product(*reversed(earlier), last):
        *others, fastest = slow_to_fast
        numbers = [*reversed(others), fastest]
        name = literals[0]
        for number, literal in zip(numbers, [*literals[1:], ""][: len(numbers)], strict=True):
            name += number + literal
        yield name


def _node_list_error(text: str, why: str) -> ConfigError:
    shown = text if len(text) <= 200 else text[:200] + "…"
    return ConfigError(f"the Slurm node list {shown!r} cannot be read: {why}.")


QUERY_TIMEOUT_S = 10.0  # a controller that is down lets commands wait for 4 to 9 s, by MessageTimeout
MAX_OUTPUT_BYTES = 64 * 1024
# Print times in UTC and in full, whatever format the user has set.
TIME_FORMAT_ENVIRONMENT = {"SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}
_TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


@dataclass(frozen=True)
class CommandResult:
    """The output of a command; ``code`` is None if it did not start or did not end in time."""

    exit_code: int | None
    output: str


CommandRunner = Callable[[Sequence[str], float], CommandResult]


def run_command(
    argv: Sequence[str],
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    stderr: int = subprocess.STDOUT,
) -> CommandResult:
    """Run a command in a session of its own; kill it and its children when it has ended or time is over."""
    try:
        # The output goes to memory: disks may be full, and a child that stays must not keep a pipe open.
        with open(os.memfd_create("output"), "w+b") as output:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=stderr,
                env=environ,
                start_new_session=True,
            )
            try:
                exit_code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return CommandResult(None, f"{argv[0]} did not end within {timeout_s:g} s")
            finally:
                with contextlib.suppress(OSError):  # the whole group has ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return CommandResult(exit_code, output.read(MAX_OUTPUT_BYTES).decode(errors="replace").strip())
    except OSError as error:
        return CommandResult(None, f"{argv[0]} cannot be run: {error.strerror}")


def run_slurm_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a Slurm command without the user's variables for display.

    SQUEUE_STATES=PENDING, for example, hides a running job.
    """
    shown = {name: text for name, text in os.environ.items() if not name.startswith("SQUEUE_")}
    return run_command(argv, timeout_s, {**shown, **TIME_FORMAT_ENVIRONMENT})


# ---- the job's end -------------------------------------------------------------------------------------


def query_end_time(job: str, runner: CommandRunner = run_slurm_command) -> float | None:
    """Query the Unix time at which Slurm ends a job: infinite without a limit, None without an answer."""
    answer = runner(["squeue", "-h", "-j", job, "-o", "%e|%l"], QUERY_TIMEOUT_S)
    end, separator, limit = answer.output.partition("|")
    if answer.exit_code != 0 or not separator:
        return None
    # Without a limit 22.05 gives NONE, or a time in a year.
    if limit.strip().upper() in {"UNLIMITED", "INFINITE", "NOT_SET"}:
        return math.inf
    return parse_utc_time(end)


def find_deadline(
    job: str, runner: CommandRunner = run_slurm_command, environ: Mapping[str, str] = os.environ
) -> float | None:
    """Return the Unix time at which Slurm ends a job; None without a limit or an answer.

    If ``squeue`` does not answer, SLURM_JOB_END_TIME of later versions counts. A limit may change while the
    job runs.
    """
    end_time = query_end_time(job, runner)
    if end_time is None and re.fullmatch(r"[0-9]{1,12}", environ.get("SLURM_JOB_END_TIME", "")):
        end_time = float(environ["SLURM_JOB_END_TIME"])
    return end_time if end_time is not None and math.isfinite(end_time) else None


def parse_utc_time(text: str) -> float | None:
    """Parse a time in UTC as Slurm writes it; None for NONE, Unknown and N/A."""
    if not _TIME_PATTERN.fullmatch(text.strip()):
        return None
    try:
        return float(calendar.timegm(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


# ---- the shared token ----------------------------------------------------------------------------------

SHARED_DIR_NAME = ".elastic_resume"
TOKEN_FILE_NAME = "token"  # noqa: S105 - the file's name
TOKEN_TIMEOUT_S = 60.0
NAME_ANOTHER = (
    "Name a directory that all nodes see: ELASTIC_RESUME_SHARED_DIR, or shared-dir in the file of --config"
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
            raise ConfigError(f"{need} there is no {root} on this one. {NAME_ANOTHER}.")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
        except OSError as error:
            raise ConfigError(
                f"{need} {self.path} cannot be made: {error.strerror}. {NAME_ANOTHER}."
            ) from error
        if owner != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to another user (uid {owner}), who would know the job's token. "
                f"{NAME_ANOTHER}."
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
                        f"or this directory is not the same on all nodes. {NAME_ANOTHER}, or set "
                        "ELASTIC_RESUME_TOKEN to a secret before srun."
                    )
                time.sleep(TOKEN_POLL_S)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be made: {error.strerror}. {NAME_ANOTHER}, or set ELASTIC_RESUME_TOKEN to a "
                "secret before srun."
            ) from error
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
