"""Test what is read from torch's flight recorder, and which rank has not started a collective."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy.flight_recorder import (
    MAX_COLLECTIVES,
    MAX_TEXT_CHARS,
    Collective,
    RecordedCollectives,
    find_missing,
    parse_dumps,
)

DEFAULT = ("0", "default_pg")


def entry(number: int, name: str = "gloo:all_reduce", **more: Any) -> dict[str, Any]:
    """Return an entry as torch 2.13 dumps it for gloo: a retired one stays in the state "scheduled"."""
    fields = {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4, 3]],
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[4, 3]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "record_id": number,
        "retired": True,
        "state": "scheduled",
        "thread_id": "139842294279040",
        "thread_name": "python",
        "time_created_ns": 1795770400696954230 + number,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 8000,
    }
    return fields | more


def nccl(number: int, name: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """Return an entry of NCCL's recorder: a retired one is completed."""
    return (
        entry(number, f"nccl:{name}", state="completed" if more.get("retired", True) else "scheduled") | more
    )


def dump(*entries: Any, **groups: str) -> dict[str, Any]:
    """Return a recorder's dump; ``groups`` are the ranks by the group's name, which gloo leaves empty."""
    config = {name[1:]: {"name": name[1:], "desc": "x", "ranks": ranks} for name, ranks in groups.items()}
    status = {"0": {"last_completed_collective": "11", "last_enqueued_collective": "12"}}
    return {"version": "2.10", "pg_config": config, "pg_status": status, "entries": list(entries)}


OPEN: dict[str, Any] = {"retired": False}
TP: dict[str, Any] = {"process_group": ["3", "tp"]}


def describe(items: tuple[Collective, ...]) -> list[str]:
    """Return backend, name, number and group of each."""
    return [f"{item.backend}:{item.name} {item.number} {item.group}".rstrip() for item in items]


@pytest.mark.parametrize(
    ("dumps", "pending", "last"),
    [
        ({"gloo": dump(entry(1), entry(2, **OPEN))}, ["gloo:all_reduce 2"], ["gloo:all_reduce 2"]),
        ({"gloo": dump(entry(1), entry(2))}, [], ["gloo:all_reduce 2"]),
        # Two recorders of one default group that has two backends: each counts for itself.
        (
            {"nccl": dump(nccl(7, **OPEN)), "gloo": dump(entry(2))},
            ["nccl:all_reduce 7"],
            ["gloo:all_reduce 2", "nccl:all_reduce 7"],
        ),
        # An asynchronous gloo collective may end before an earlier one.
        ({"gloo": dump(entry(1, **OPEN), entry(2))}, ["gloo:all_reduce 1"], ["gloo:all_reduce 2"]),
        # NCCL retires only the whole of a coalesced call.
        (
            {"nccl": dump(nccl(4, "_all_gather_base", **OPEN), nccl(4, "coalesced"), nccl(5, **OPEN))},
            ["nccl:all_reduce 5"],
            ["nccl:all_reduce 5"],
        ),
        # Sends and receives have a number of their own.
        (
            {"nccl": dump(nccl(4), nccl(4, "send 0->1", is_p2p=True, p2p_seq_id=90, **OPEN))},
            ["nccl:send 0->1 90"],
            ["nccl:all_reduce 4"],
        ),
        ({"nccl": dump(), "gloo": dump()}, None, None),  # the recorder is off
        ({"gloo": {}}, None, None),
        ([1], None, None),
        (None, None, None),
    ],
)
def test_dumps_are_parsed(dumps: object, pending: list[str] | None, last: list[str] | None) -> None:
    """Pending collectives are in the order of their calls."""
    found = parse_dumps(dumps)
    if found is None or pending is None or last is None:
        assert (found, pending, last) == (None, None, None)
        return
    assert describe(found.pending) == [f"{item} 0 (default_pg)" for item in pending]
    assert describe(found.last) == [f"{item} 0 (default_pg)" for item in last]


@pytest.mark.parametrize(
    "damage",
    [
        {"collective_seq_id": None},
        {"collective_seq_id": "x"},
        {"time_created_ns": math.inf},
        {"time_created_ns": []},
        {"process_group": 1},
        {"process_group": []},
        {"profiling_name": None},
        {"process_group": [[], {}, 1]},
    ],
)
def test_unreadable_entry_is_left_out(damage: dict[str, Any]) -> None:
    """The other entries count."""
    found = parse_dumps({"gloo": dump(entry(1), entry(2) | damage, 7, None)})
    assert found is not None
    assert describe(found.last) == ["gloo:all_reduce 1 0 (default_pg)"]


def test_long_dump_is_bounded() -> None:
    """Texts are cut and printable."""
    entries = [
        entry(number, f"gloo:\n{'x' * 1000}", input_sizes=[[1]] * 1000, **OPEN) for number in range(50)
    ]
    found = parse_dumps({"gloo": dump(*entries)})
    assert found is not None
    assert len(found.pending) == MAX_COLLECTIVES
    for text in (found.last[0].name, found.last[0].sizes):
        assert len(text) == MAX_TEXT_CHARS
        assert text.isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(entry(1))), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from(list(entry(1))), JSON, max_size=3), max_size=4), JSON)
def test_any_json_is_survived(changes: list[dict[str, Any]], config: object) -> None:
    """Whatever the worker's process writes, its hang is diagnosed."""
    entries = [entry(index) | change for index, change in enumerate(changes)]
    parse_dumps({"gloo": dump(*entries) | {"pg_config": config}, "nccl": config})


def recorded(*entries: dict[str, Any], **groups: str) -> RecordedCollectives:
    """Return what one rank's recorder shows."""
    return parse_dumps({"nccl": dump(*entries, **groups)}) or RecordedCollectives()


WAITS = recorded(nccl(12), nccl(13, **OPEN))
RUNS = recorded(nccl(12), nccl(13, state="started", **OPEN))


@pytest.mark.parametrize(
    ("own", "others", "missing"),
    [
        (recorded(nccl(12)), {0: WAITS, 2: WAITS}, ("all_reduce", 13, (0, 2))),
        (recorded(nccl(12, **OPEN)), {0: WAITS}, ("all_reduce", 13, (0,))),
        # The others called more since: the GPU has not finished the oldest.
        (recorded(nccl(12)), {0: recorded(nccl(13, **OPEN), nccl(14, **OPEN))}, ("all_reduce", 13, (0,))),
        (WAITS, {0: WAITS}, None),
        (recorded(nccl(13)), {0: WAITS}, None),
        (recorded(nccl(13, "barrier", **OPEN)), {0: WAITS}, None),  # another collective of the same number
        (RecordedCollectives(), {0: WAITS}, None),  # its recorder is unknown
        (recorded(entry(2)), {0: WAITS}, None),  # it has never used NCCL, as far as is known
        # Its kernel has not started, those of the others have.
        (WAITS, {0: RUNS, 2: RUNS}, ("all_reduce", 13, (0, 2))),
        (RUNS, {0: WAITS}, None),
        # Most wait in the second one.
        (
            recorded(nccl(12), nccl(4, **TP)),
            {0: WAITS, 1: recorded(nccl(5, **TP, **OPEN)), 2: recorded(nccl(5, **TP, **OPEN))},
            ("all_reduce", 5, (1, 2)),
        ),
        # Two groups of one split have the same name, and other ranks.
        (
            recorded(nccl(4, **TP), g3="[0, 1]"),
            {2: recorded(nccl(5, **TP, **OPEN), g3="[2, 3]")},
            None,
        ),
    ],
)
def test_missing_collective_is_found(
    own: RecordedCollectives,
    others: dict[int, RecordedCollectives],
    missing: tuple[str, int, tuple[int, ...]] | None,
) -> None:
    """A rank lacks what others wait in if its own last number in that group is lower."""
    found = find_missing(own, {rank: other.pending[0] for rank, other in others.items()})
    assert (found and (found[0].name, found[0].number, found[1])) == missing


def test_newest_collective_is_of_the_default_group() -> None:
    """Others, such as our own group, say less to the user."""
    own = recorded(nccl(12), nccl(4, time_created_ns=1 << 62, **TP))
    assert own.newest == own.last[0]
    assert own.last[0].number == 12
    assert recorded(nccl(4, **TP)).newest is not None
    assert RecordedCollectives().newest is None


@pytest.mark.parametrize(("name", "sizes"), [("all_reduce", "[[4, 3]]"), ("scatter", ""), ("all_to_all", "")])
def test_sizes_count_where_they_must_be_equal(name: str, sizes: str) -> None:
    """Only the source of a scatter has inputs, and each rank of an all_to_all its own."""
    assert recorded(nccl(1, name)).last[0].sizes == sizes
