"""Run as process 1 of a simulated machine: mount its file systems, then reap orphans.

`machines.py` starts it in new namespaces with one JSON argument. Its root contains each top-level entry of
the host's root, mounted one by one, beside directories of its own; so a mount point like /scratch needs no
directory on the host. It writes "ready", or what failed, to a given descriptor. It uses the standard library
only and imports nothing of this package, so that three machines start in half a second.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_STAGING_DIR = "/tmp"  # noqa: S108  it exists on every system; only this process sees the mounts

_OWN_DEVICES: set[int] = set()  # of the file systems mounted here


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or bind a directory to another place.

    Raises:
        OSError: with the target's name.

    """
    words = [os.fsencode(word) if word else None for word in (source, target, kind)]
    if _LIBC.mount(*words, ctypes.c_ulong(flags), options.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}", target)


def make_root(config: dict[str, Any]) -> None:
    """Build this machine's root above the host's and change to it."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    # Held open, because the new mount hides everything below /tmp.
    held = {target: os.open(source, os.O_PATH) for target, source in config["bind"].items()}
    top = list(os.scandir("/"))
    _mount_tmpfs(_STAGING_DIR, 16 << 20, "755")
    for entry in top:
        place = _STAGING_DIR + entry.path
        if entry.is_symlink():
            Path(place).symlink_to(Path(entry.path).readlink())
        elif entry.name == "proc" or entry.path == _STAGING_DIR:
            Path(place).mkdir()
        else:
            _create_mount_point(place, is_dir=entry.is_dir())
            mount(entry.path, place, flags=MS_BIND | MS_REC)
    mount("proc", _STAGING_DIR + "/proc", "proc")
    Path(_STAGING_DIR + _STAGING_DIR).chmod(0o1777)
    for target, size_bytes in config["disks"].items():
        _create_mount_point(_STAGING_DIR + target, is_dir=True)
        _mount_tmpfs(_STAGING_DIR + target, size_bytes, "1777")
    for target, descriptor in held.items():
        source = f"/proc/self/fd/{descriptor}"
        _create_mount_point(_STAGING_DIR + target, is_dir=Path(source).is_dir())
        # With the mounts below it, except for the staging directory itself.
        recursive = 0 if config["bind"][target] == _STAGING_DIR else MS_REC
        mount(source, _STAGING_DIR + target, flags=MS_BIND | recursive)
        os.close(descriptor)
    os.chdir(_STAGING_DIR)
    mount(".", "/", flags=MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def _mount_tmpfs(target: str, size_bytes: int, mode: str) -> None:
    mount("tmpfs", target, "tmpfs", options=f"size={size_bytes},mode={mode}")
    _OWN_DEVICES.add(Path(target).stat().st_dev)


def _create_mount_point(target: str, *, is_dir: bool) -> None:
    """Create a mount point if it is missing, but never on the host's disks."""
    path = Path(target)
    if path.exists():
        return
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if parent.stat().st_dev not in _OWN_DEVICES:
        raise OSError(0, "it would have to be made on the host's disk", target.removeprefix(_STAGING_DIR))
    if is_dir:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def reap_orphans() -> None:
    """Wait for exited children for ever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait([signal.SIGCHLD])


def main() -> None:
    """Set up the machine, then reap orphans."""
    config = json.loads(sys.argv[1])
    status_fd = config["line"]
    try:
        _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if config["group"]:
            Path(config["group"], "cgroup.procs").write_text("0")
        name = config["name"].encode()
        _LIBC.sethostname(name, len(name))
        make_root(config)
    except OSError as error:
        os.write(status_fd, f"{error.filename}: {error.strerror}\n".encode())
        sys.exit(1)
    os.write(status_fd, b"ready\n")
    os.close(status_fd)
    reap_orphans()


main()
