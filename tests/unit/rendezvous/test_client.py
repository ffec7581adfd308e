"""The number of an agent's process, by which others tell copies of its directory apart."""

from __future__ import annotations

import socket
from dataclasses import replace

from elastic_resume.rendezvous.client import MAX_BOOT_STEP, make_incarnation
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation, PersistentState
from elastic_resume.rendezvous.endpoint import ListenEndpoint


def test_process_of_a_copied_directory_has_another_number() -> None:
    """Each is later than the former process, and a twin is a voter of its own."""
    state = PersistentState(Incarnation("n", "disk", 7), NO_VIEW, Ballot(), None, max_generation=0)
    with socket.socket() as listener:
        endpoint = ListenEndpoint(listener, "host", "host:1", 0)
        first, second = (make_incarnation("n", state, endpoint) for _ in range(2))
        twin = make_incarnation("n", replace(state, is_twin=True), endpoint)
        new = make_incarnation("n", None, endpoint)
    assert first.disk_id == second.disk_id == "disk"
    assert 7 < first.boot <= 7 + MAX_BOOT_STEP
    assert 7 < second.boot <= 7 + MAX_BOOT_STEP
    assert first != second  # but for one of a million
    assert len({"disk", twin.disk_id, new.disk_id}) == 3
