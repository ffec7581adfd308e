"""Pages over HTTP about a job that runs: a small process beside the agent serves them (`report.serve`).

The agent listens, so that a page is at the same address however often that process is started, and hands it
the socket, what it may not know from elsewhere, and a pipe whose end is its own. The password travels over
plain HTTP, so it joins nothing: it is the key for looking (`wire.look_key`), or a random text where the job
has no secret token. That process gets no more than a digest of it.

Promise: whatever becomes of pages, training does not notice. A port that is taken, or a process that dies or
hangs, costs a line, and is tried again. Modules in the directory where a job is started are not imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import contract, values
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.token import read_token

# Python 3.10 has no -P: the empty word is the working directory. Ours goes last, should it be in there.
SERVER = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from elastic_resume.report.serve import main; main()"
)
PACKAGES = Path(__file__).parents[2]
AGAIN_S = 10.0
HUNG_S = 60.0
"""A process that serves says so twice a second."""
MAX_WHY_BYTES = 4096
CLOSE_S = 2.0
BACKLOG = 16


@dataclass(frozen=True)
class Wanted:
    """Where pages are to be served, and whether metrics are among them."""

    address: str
    port: int
    metrics: bool = False


def wanted(http: str | None, environ: Mapping[str, str], *, metrics: bool) -> Wanted | None:
    """Read ``--http`` and ``--metrics``; None where there are to be no pages.

    Raises:
        ConfigError: a value is wrong, or what metrics are written with is not installed.

    """
    text = http if http is not None else environ.get(contract.ENV_HTTP)
    if not text:
        if metrics:
            raise ConfigError("--metrics are served beside the other pages: add --http [ADDRESS:]PORT.")
        return None
    address, port = values.listening("http", text)
    if metrics and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "--metrics needs prometheus-client, which is not installed: "
            "pip install 'elastic-resume[metrics]'."
        )
    return Wanted(address, port, metrics)


@contextlib.contextmanager
def served(
    asked: Wanted | None, node_dir: Path, key: bytes | None, *, say: Callable[[str], None]
) -> Iterator[None]:
    """Serve pages within the context, where they are asked for.

    Args:
        asked: of `wanted`.
        node_dir: of this node, where the process finds events, and its agent (``look.json``).
        key: the run's `wire.look_key`, where its token is a secret.
        say: gets lines for people.

    """
    if asked is None:
        yield
        return
    pages = Pages(asked, node_dir, key, say=say)
    pages.start()
    try:
        yield
    finally:
        pages.close()


class Pages:
    """The pages of one agent, from `start` to `close`."""

    def __init__(
        self, asked: Wanted, node_dir: Path, key: bytes | None, *, say: Callable[[str], None]
    ) -> None:
        """See `served`."""
        self._asked = asked
        self._node_dir = node_dir
        self._key = key
        self._say = say
        self._said = ""
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        # The kernel kills the process when the thread that started it ends: this one lives as long as we do.
        self._thread = threading.Thread(target=self._live, name="elastic-resume-pages", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._closing.set()
        process = self._process
        if process is not None:
            process.kill()
        self._thread.join(CLOSE_S)

    def _live(self) -> None:
        with contextlib.ExitStack() as stack:
            while not self._closing.is_set():
                try:
                    if self._listener is None:
                        self._listener = stack.enter_context(self._listen())
                        self._tell()
                    why = f"the process that serves pages {self._serve(self._listener)}"
                except (OSError, ConfigError) as error:
                    why = f"no pages at {self._asked.address}:{self._asked.port}: {error}"
                if not self._closing.is_set() and why != self._said:
                    self._said = why
                    self._say(f"{why}; trying again every {AGAIN_S:g} s. Training goes on.")
                self._closing.wait(AGAIN_S)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._asked.address else socket.AF_INET
        return socket.create_server((self._asked.address, self._asked.port), family=family, backlog=BACKLOG)

    def _tell(self) -> None:
        assert self._listener is not None  # noqa: S101 - for the type checker
        host, port = self._listener.getsockname()[:2]
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        path = password_file(self._node_dir, self._key)
        self._say(
            f"status and report at http://{where}/ (any user name, the password is the text of {path})."
        )

    def _serve(self, listener: socket.socket) -> str:
        """Have a process serve until it ends; say how it did."""
        password = password_file(self._node_dir, self._key).read_bytes().strip()
        told = {
            "descriptor": listener.fileno(),
            "node_dir": str(self._node_dir),
            "password": hashlib.sha256(password).hexdigest(),
            "metrics": self._asked.metrics,
        }
        with open(os.memfd_create("stderr"), "rb+") as wrong:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(PACKAGES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=wrong,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
            self._process = process
            with process:
                if self._closing.is_set():
                    process.kill()
                assert process.stdin is not None  # noqa: S101 - for the type checker
                assert process.stdout is not None  # noqa: S101
                with contextlib.suppress(BrokenPipeError):  # it has ended already, and said why
                    process.stdin.write(json.dumps(told).encode() + b"\n")
                    process.stdin.flush()  # and left open: its end tells the process of ours
                while beat := _beat(process.stdout.fileno()):
                    pass
                if beat is None:
                    process.kill()
                    return f"does nothing any more since {HUNG_S:g} s, and was killed"
            wrong.seek(max(0, wrong.seek(0, os.SEEK_END) - MAX_WHY_BYTES))
            said = wrong.read().decode(errors="replace").strip().splitlines()
            return f"has ended with exit code {process.returncode}{f' ({said[-1]:.300})' if said else ''}"


def _beat(pipe: int) -> bytes | None:
    """What the process at the other end says next, nothing at its end; None where that takes too long."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return os.read(pipe, 4096) if poll.poll(HUNG_S * 1000) else None


def password_file(node_dir: Path, key: bytes | None) -> Path:
    """Return the file with the password of this node's pages; write it if it is missing or outdated.

    Args:
        node_dir: the node's directory.
        key: the look key, in hexadecimal in the file; None: the one that stands there, or a random one.

    Raises:
        ConfigError: others may read the password that stands there, or it holds nothing.
        OSError: it cannot be written.

    """
    path = node_dir / contract.HTTP_KEY_FILE
    if key is not None:  # what stands there may be of another token, or open to others
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        _write_new(new, key.hex())
        new.replace(path)
        return path
    with contextlib.suppress(FileExistsError):
        _write_new(path, secrets.token_urlsafe(24))
    read_token(path, {}, "")
    return path


def _write_new(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
