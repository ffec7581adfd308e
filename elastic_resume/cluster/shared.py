"""A directory that all nodes of one job see: in it they find each other's addresses, and the job's token.

For Slurm, which gives a job neither names that stay with the elements of an array, wherever they run, nor a
secret. ``ROOT/.elastic_resume/JOB/`` holds ``token`` (mode 0600) and one file for each element, which holds
its address.

Promise: whoever creates the token creates it whole, and nobody changes it; no error text shows it. A file
system that keeps what it knows for a while (NFS) delays an answer and never makes it wrong: files are opened
in ways that ask the server. Does not know what an address or the token is for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import time
from pathlib import Path

from elastic_resume.errors import ConfigError

DIRECTORY = ".elastic_resume"
DONE = "done"
TOKEN = "token"  # noqa: S105 - the file's name
MAX_ADDRESS_BYTES = 64
PATIENCE_S = 60.0
_PAUSE_S = 0.25


class SharedDir:
    """The directory of one job."""

    def __init__(self, root: Path, job: str) -> None:
        """Make it.

        Raises:
            ConfigError: that is not possible, or it belongs to another user.

        """
        self.path = root / DIRECTORY / job
        if not root.is_dir():  # to make it would be to have one on each node
            raise ConfigError(
                f"the nodes of {job} need a directory that all of them see, and there is no {root} on this "
                "one. Name another with --shared-dir."
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
        except OSError as error:
            raise ConfigError(
                f"the nodes of {job} need a directory that all of them see, and {self.path} cannot be made: "
                f"{error.strerror}. Name another with --shared-dir."
            ) from error
        if owner != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to another user (uid {owner}), who would know the job's token. Name "
                "another directory with --shared-dir."
            )

    # ---- token ---------------------------------------------------------------------------------------

    def token(self, *, make: bool, patience_s: float = PATIENCE_S) -> Path:
        """Give the file of the job's token.

        Args:
            make: create it where there is none. Several may do so at once: all get the same.
            patience_s: how long another's is waited for.

        Raises:
            ConfigError: it cannot be made, or does not come.

        """
        path = self.path / TOKEN
        try:
            if make:
                self._make_token(path)
            limit = time.monotonic() + patience_s
            while not _is_there(path):
                if time.monotonic() >= limit:
                    raise ConfigError(
                        f"no {path} after {patience_s:.0f} s: either the first node of the job does not run, "
                        "or this directory is not the same on all nodes. Name one that is with --shared-dir, "
                        "or set ELASTIC_RESUME_TOKEN to a secret before srun."
                    )
                time.sleep(_PAUSE_S)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be made: {error.strerror}. Name another directory with --shared-dir, or set "
                "ELASTIC_RESUME_TOKEN to a secret before srun."
            ) from error
        return path

    def _make_token(self, path: Path) -> None:
        """Whole under its name or not there: others read it while it is made."""
        mine = path.with_name(f"{TOKEN}.{secrets.token_hex(8)}")
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)
        finally:
            mine.unlink(missing_ok=True)

    # ---- addresses -----------------------------------------------------------------------------------

    def tell(self, name: str, address: str) -> None:
        """Say where ``name`` is from now on.

        Raises:
            ConfigError: the file cannot be written.

        """
        try:
            descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w") as file:
                os.ftruncate(descriptor, 0)
                file.write(f"{address}\n")
        except OSError as error:
            raise ConfigError(
                f"{self.path / name} cannot be written: {error.strerror}. Name another with --shared-dir."
            ) from error

    def resolve(self, name: str) -> list[str]:
        """Look up where ``name`` is.

        Raises:
            OSError: nobody has told (yet): as of a name that is not known.

        """
        # With O_CREAT an NFS client asks the server, instead of remembering for half a minute that there is
        # no such file. What it leaves is an empty one.
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "rb") as file:
            text = file.read(MAX_ADDRESS_BYTES + 1).decode(errors="replace").strip()
        try:
            return [str(ipaddress.ip_address(text))]
        except ValueError as error:
            raise socket.gaierror(socket.EAI_NONAME, f"{self.path / name} holds no address yet") from error

    # ---- the end -------------------------------------------------------------------------------------

    @property
    def done(self) -> Path | None:
        """The file that says that the job is done; None while it is not."""
        path = self.path / DONE
        return path if _is_there(path) else None

    def finish(self, *, remember: bool) -> None:
        """The job is done: take all of it away. Others may do so at the same time.

        ``remember``: leave word of it, for an element that was on its way back at that moment: alone it would
        wait for the others in vain.
        """
        with contextlib.suppress(OSError):
            if remember:
                (self.path / DONE).touch(mode=0o600)
                return
            for path in self.path.iterdir():
                path.unlink(missing_ok=True)
            self.path.rmdir()  # and not its parent, in which another job may be making its own


def _is_there(path: Path) -> bool:
    """Look with an open, which makes an NFS client ask the server."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    except FileNotFoundError:
        # A name known to be absent is remembered; a change of the directory makes it forgotten.
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())
        return False
    return True
