"""A directory that all nodes of one Slurm job see, with the job's token: Slurm itself gives a job no secret.

``ROOT/.elastic_resume/JOB.STEP/`` holds ``token`` (mode 0600).

Promise: whoever creates the token creates it whole, and nobody changes it; no error text shows it. A file
system that keeps what it knows for a while (NFS) delays an answer and never makes it wrong: files are opened
in ways that ask the server. Does not know what the token is for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from elastic_resume.errors import ConfigError

DIRECTORY_NAME = ".elastic_resume"
TOKEN_FILE_NAME = "token"  # noqa: S105 - the file's name
TOKEN_TIMEOUT_S = 60.0
_POLL_S = 0.25


class SharedDir:
    """The directory of one job."""

    def __init__(self, root: Path, job: str) -> None:
        """Make it.

        Raises:
            ConfigError: that is not possible, or it belongs to another user.

        """
        self.path = root / DIRECTORY_NAME / job
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

    def wait_for_token(self, *, create: bool, timeout_s: float = TOKEN_TIMEOUT_S) -> Path:
        """Give the file of the job's token.

        Args:
            make: create it where there is none. Several may do so at once: all get the same.
            patience_s: how long another's is waited for.

        Raises:
            ConfigError: it cannot be made, or does not come.

        """
        path = self.path / TOKEN_FILE_NAME
        try:
            if create:
                self._create_token(path)
            limit = time.monotonic() + timeout_s
            while not _exists_on_server(path):
                if time.monotonic() >= limit:
                    raise ConfigError(
                        f"no {path} after {timeout_s:.0f} s: either the first node of the job does not run, "
                        "or this directory is not the same on all nodes. Name one that is with --shared-dir, "
                        "or set ELASTIC_RESUME_TOKEN to a secret before srun."
                    )
                time.sleep(_POLL_S)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be made: {error.strerror}. Name another directory with --shared-dir, or set "
                "ELASTIC_RESUME_TOKEN to a secret before srun."
            ) from error
        return path

    def _create_token(self, path: Path) -> None:
        """Whole under its name or not there: others read it while it is made."""
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
        """Remove the directory: the job is done. Others may do so at the same time."""
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                path.unlink(missing_ok=True)
            self.path.rmdir()  # and not its parent, in which another job may be making its own


def _exists_on_server(path: Path) -> bool:
    """Look with an open, which makes an NFS client ask the server."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    except FileNotFoundError:
        # A name known to be absent is remembered; a change of the directory makes it forgotten.
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())
        return False
    return True
