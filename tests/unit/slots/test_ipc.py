"""Test that snapshots are served to this user alone, with processes of another user."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.errors import ElasticResumeError
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import SnapshotClient, SnapshotServer
from elastic_resume.slots.slot_pool import SlotPool
from tests.support.snapshot_samples import SLOT_BYTES

OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
BEGIN = "import os, socket, sys; os.setuid(int(sys.argv[2])); peer = socket.socket(socket.AF_UNIX)\n"
CLIENT = f"""{BEGIN}
peer.connect("\\0" + sys.argv[1])
try:
    peer.sendall(b'{{"operation": "hello"}}\\n')
    data, descriptors, _, _ = socket.recv_fds(peer, 100, 1)
    print(data, len(descriptors))
except (ConnectionResetError, BrokenPipeError):
    print(b"", 0)
"""
LISTENER = f"""{BEGIN}
peer.bind("\\0" + sys.argv[1])
peer.listen()
print(flush=True)
connection, _ = peer.accept()
if connection.recv(100):
    socket.send_fds(connection, [b"{{}}\\n"], [0])
    sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SnapshotServer]:
    """Yield a running snapshot server."""
    with NodeDir.claim(tmp_path, "job", "a") as node_dir:
        pool = SlotPool(3 * SLOT_BYTES)
        committer = CheckpointCommitter(node_dir.path, "job", pool, emit=lambda *_, **__: None)
        committer.start()
        server = SnapshotServer(committer)
        server.start()
        yield server
        server.close()
        committer.close()


@needs_root
@pytest.mark.parametrize(("user", "answer"), [(0, "b'{}\\n' 1\n"), (OTHER_USER, "b'' 0\n")])
def test_server_answers_its_own_user_only(user: int, answer: str, server: SnapshotServer) -> None:
    """Another user would get the descriptor of the control block, and then those of all slots."""
    command = [sys.executable, "-I", "-c", CLIENT, server.socket_name, str(user)]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == answer


@needs_root
@pytest.mark.parametrize("user", [0, OTHER_USER])
def test_client_accepts_server_of_its_own_user_only(user: int) -> None:
    """Any user may bind the name of a socket after its server has ended."""
    name = f"elastic_resume-test-{secrets.token_hex(8)}"
    command = [sys.executable, "-I", "-c", LISTENER, name, str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        if user == 0:
            SnapshotClient(name).close()
        else:
            with pytest.raises(ElasticResumeError, match="belongs to another user"):
                SnapshotClient(name)
