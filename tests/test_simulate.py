"""A job with failures on fake time: its parts add up, it agrees with the closed form where that holds."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume import cli
from elastic_resume.errors import ConfigError
from elastic_resume.faults import expected, rates, simulate_job
from elastic_resume.faults.rates import KINDS, Strike
from elastic_resume.faults.simulate import Outcome, play
from elastic_resume.faults.simulate_job import JOINED, Job, Pace, pace
from elastic_resume.policy.cadence import Every
from elastic_resume.worker import saver

DAY = 86400.0
AWAY = {"agent": 20.0, "reboot": 600.0, "replacement": 7200.0}
JOB = Job(
    nodes=4,
    min_nodes=1,
    state_bytes=10**9,
    snapshot_every=Every(steps=1),
    save_every=Every(steps=100),
    start_s=10.0,
    cold_s=0.0,
    away_s=AWAY,
)


def strike(at_s: float, kind: str, *nodes: int) -> Strike:
    """One failure."""
    return Strike(at_s, kind, nodes)


def failing(job: Job, mtbf_node_s: float, seconds: float, seed: str = "0", **mix: float) -> Outcome:
    """What becomes of a job whose nodes fail so often."""
    strikes = rates.strikes(
        nodes=job.nodes,
        spares=job.spares,
        mtbf_node_s=mtbf_node_s,
        mix=mix or rates.MIX,
        rack_nodes=2,
        seed=seed,
    )
    return play(job, strikes, seconds)


# ---- failures one by one ---------------------------------------------------------------------------------


def test_a_job_that_never_fails_loses_its_start_and_its_copies() -> None:
    """One minus what copies cost, and nothing else."""
    job = replace(
        JOB, snapshot_s=0.05, snapshot_every=Every(steps=10), start_s=0.0, save_every=Every(steps=100)
    )
    out = play(job, (), DAY)
    assert out.recoveries == ()
    assert out.spent_s["stalled"] / out.total_s == pytest.approx(0.005, rel=0.01)
    assert out.goodput == pytest.approx(1 / 1.005, abs=1e-4)


@pytest.mark.parametrize(
    ("job", "strikes", "lost", "tiers"),
    [
        # A node, an agent, a worker: the others hold the newest step in memory.
        (JOB, [strike(1000.5, "node", 1)], [0, 0], ["memory", "memory"]),
        (JOB, [strike(1000.5, "agent", 1)], [0, 0], ["memory", "memory"]),
        (JOB, [strike(1000.5, "worker", 1)], [0], ["memory"]),
        # All at once: back to the newest checkpoint. 1000.5 s are 987 steps, after settling and starting.
        (JOB, [strike(1000.5, "cluster", 0, 1, 2, 3)], [87], ["disk"]),
        # A worker of a world of one dies while it copies its newest step.
        (replace(JOB, nodes=1), [strike(1000.25, "worker", 0)], [1], ["memory"]),
        (replace(JOB, nodes=1), [strike(1000.6, "worker", 0)], [0], ["memory"]),
        # Snapshots at every 50th step: what comes after them is lost, but not to a newcomer.
        (replace(JOB, snapshot_every=Every(steps=50)), [strike(1000.5, "agent", 1)], [37, 0], ["memory"] * 2),
        # Without memory for snapshots the newest checkpoint counts, whoever dies.
        (replace(JOB, slots=0), [strike(1000.5, "worker", 1)], [None], ["disk"]),
    ],
)
def test_a_failure_costs_the_steps_that_nobody_left_holds(
    job: Job, strikes: list[Strike], lost: list[int | None], tiers: list[str]
) -> None:
    """`policy/source.py` chooses among what survivors have."""
    out = play(job, strikes, 4000.0)
    assert [one.tier for one in out.recoveries] == tiers
    for one, count in zip(out.recoveries, lost, strict=True):
        assert one.lost == count if count is not None else 0 < one.lost <= 100


def test_who_returns_causes_a_restart_and_a_spare_steps_in_at_once() -> None:
    """With a spare a lost node costs one restart, without one two, and slower steps in between."""
    alone = play(JOB, [strike(1000.0, "node", 1)], 4000.0)
    assert [one.kind for one in alone.recoveries] == ["node", JOINED]
    assert alone.spent_s["fewer"] > 100
    spare = play(replace(JOB, spares=1), [strike(1000.0, "node", 1)], 4000.0)
    assert [one.kind for one in spare.recoveries] == ["node"]
    assert spare.spent_s["fewer"] == 0
    rigid = play(replace(JOB, min_nodes=4), [strike(1000.0, "node", 1)], 4000.0)
    assert rigid.missing_s == pytest.approx(600, abs=10)


def test_half_a_world_that_falls_silent_is_waited_for() -> None:
    """Two of four might train on behind a cut link; with the lowest rank among them the others go on."""
    lower = play(JOB, [strike(1000.0, "rack", 2, 3)], 4000.0)
    assert lower.missing_s == 0
    upper = play(JOB, [strike(1000.0, "rack", 0, 1)], 4000.0)
    assert upper.missing_s == pytest.approx(600, abs=10)


def test_a_job_whose_workers_die_faster_than_they_start_gives_up() -> None:
    """As `policy/restart.py` says, with its own words, and the rest of the time counts as waited."""
    dying = [strike(100.0 + 5 * i, "worker", 0) for i in range(800)]
    out = play(replace(JOB, nodes=1), dying, 4000.0)
    assert "starts in a row failed without progress" in out.gave_up
    assert sum(out.spent_s.values()) == pytest.approx(4000.0)
    assert out.ended_s > 3500
    assert out.goodput < 0.03


def test_a_node_whose_workers_die_again_and_again_is_left_out() -> None:
    """Where the others are enough: after three such starts they train on without it."""
    dying = [strike(100.0 + 5 * i, "worker", 0) for i in range(800)]
    out = play(JOB, dying, 4000.0)
    assert out.gave_up == ""
    assert out.struck == {"worker": 4}
    assert out.steps > 2500


# ---- whatever happens ------------------------------------------------------------------------------------

JOBS = st.builds(
    Job,
    nodes=st.integers(1, 6),
    min_nodes=st.just(1),
    spares=st.integers(0, 2),
    state_bytes=st.sampled_from([10**6, 10**10]),
    step_s=st.sampled_from([0.1, 3.7]),
    snapshot_every=st.sampled_from([Every(), Every(steps=1), Every(steps=7), Every(off=True)]),
    save_every=st.sampled_from([Every(), Every(steps=20), Every(seconds=50.0)]),
    slots=st.integers(0, 3),
    snapshot_s=st.sampled_from([0.0, 0.5]),
    start_s=st.sampled_from([0.0, 12.0]),
    away_s=st.just(AWAY),
)
STRIKES = st.lists(
    st.builds(
        lambda gap, kind, nodes: (gap, kind, sorted(nodes)),
        st.floats(0.0, 400.0),
        st.sampled_from(list(KINDS)),
        st.sets(st.integers(0, 7), min_size=1),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(JOBS, STRIKES)
def test_the_parts_of_the_time_add_up_and_no_step_counts_twice(
    job: Job, gaps: list[tuple[float, str, list[int]]]
) -> None:
    """For any job and any failures, several in one moment and some of nodes that are away among them."""
    times = itertools.accumulate(gap for gap, _, _ in gaps)
    machines = job.nodes + job.spares
    strikes = [
        Strike(at_s, kind, [node for node in nodes if node < machines] or [0])
        for at_s, (_, kind, nodes) in zip(times, gaps, strict=True)
    ]
    out = play(job, strikes, 3000.0)
    # Of the step under way at the end, of as few nodes as may train.
    spare_s = job.step_on(job.min_nodes) + 2 * job.snapshot_s + job.commit_s + 1e-6
    assert sum(out.spent_s.values()) == pytest.approx(3000.0)
    assert all(share >= -1e-6 for share in out.spent_s.values())
    assert out.steps * job.step_s == pytest.approx(out.spent_s["productive"], abs=spare_s)
    assert all(one.lost >= 0 and one.seconds >= 0 for one in out.recoveries)
    assert play(job, strikes, 3000.0) == out


PACES = st.builds(
    Pace,
    start=st.integers(0, 1000),
    step_s=st.sampled_from([0.25, 2.0]),
    gap=st.integers(0, 40),
    warm=st.integers(0, 4),
    snapshot_s=st.sampled_from([0.0, 0.5]),
    first_save=st.integers(1, 50),
    save_gap=st.integers(1, 50),
    save_s=st.sampled_from([0.0, 1.5]),
    commit_s=st.sampled_from([0.0, 3.0]),
)


@given(PACES, st.integers(0, 300))
def test_a_pace_counted_at_once_is_the_one_counted_step_by_step(one: Pace, steps: int) -> None:
    """Copies, stalls, and how far it is at any moment."""
    took, newest, saved = 0.0, 0, 0
    for step in range(1, steps + 1):
        due = one.gap and (step <= one.warm or (one.start + step) % one.gap == 0)
        save = step >= one.first_save and (step - one.first_save) % one.save_gap == 0
        took += one.step_s + (one.snapshot_s if due else 0) + (one.save_s if save else 0)
        newest, saved = (step if due or save else newest), (step if save else saved)
    assert one.time_of(steps) == pytest.approx(took)
    assert one.steps_in(one.time_of(steps)) == steps
    assert one.steps_in(one.time_of(steps + 1) - 1e-6) == steps
    assert one.newest_snapshot(steps) == newest
    assert one.newest_commit(one.time_of(steps) + one.commit_s) == saved


def test_a_generation_begins_with_the_snapshots_that_its_saver_takes() -> None:
    """The number is the saver's own; and `auto` then comes to what `policy/cadence.py` says."""
    assert simulate_job.WARM_SNAPSHOTS == saver.WARM_UP + 1
    job = replace(JOB, snapshot_every=Every(), save_every=Every(), snapshot_s=0.05)
    one = pace(job, start=0, nodes=4, mtbf_s=4 * 3600.0)
    assert (one.gap, one.first_save, one.save_gap) == (8, 1, 5)  # 1 %, and a tenth of the disk's time
    assert pace(replace(job, save_every=Every(steps=1)), start=0, nodes=4, mtbf_s=1e6).save_gap == 1


# ---- the closed form -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [20, 60, 180])
def test_where_every_failure_sets_back_to_the_last_copy_the_closed_form_is_met(gap: int) -> None:
    """Whole clusters that are back at once: what Young and Daly thought of. Within half a point."""
    job = replace(
        JOB,
        state_bytes=10**6,
        slots=0,
        disk_bytes_per_s=10**6,  # a save stalls for one second
        snapshot_every=Every(off=True),
        save_every=Every(steps=gap),
        noticed_s=dict.fromkeys(KINDS, 0.0),
        away_s={"reboot": 0.001},
    )
    mtbf_s = 3600.0
    out = failing(job, mtbf_s * job.nodes, 60 * DAY, cluster=1.0)
    form = expected.shares(mtbf_s=mtbf_s, down_s=10.0 + simulate_job.FORM_S, interval_s=gap * 1.0, cost_s=1.0)
    assert out.goodput == pytest.approx(form.productive, abs=0.005)
    assert out.spent_s["repeated"] / out.total_s == pytest.approx(form.repeated, abs=0.004)
    assert out.spent_s["stalled"] / out.total_s == pytest.approx(form.copies, abs=0.004)


def test_the_closed_form_is_greatest_at_its_optimum_and_adds_up() -> None:
    """To a hundredth of a point; and failures faster than it can hold for leave nothing."""
    best = expected.best_interval_s(2.0, 7200.0)
    found = {
        factor: expected.shares(mtbf_s=7200.0, down_s=30.0, interval_s=best * factor, cost_s=2.0)
        for factor in (0.8, 1.0, 1.25)
    }
    assert max(found, key=lambda factor: found[factor].productive) == 1.0
    for one in found.values():
        assert one.productive + one.down + one.repeated + one.copies == pytest.approx(1.0)
    assert expected.shares(mtbf_s=10.0, down_s=30.0, interval_s=60.0, cost_s=1.0).productive == 0.0


def test_failures_come_at_their_rate_and_in_their_mix() -> None:
    """A thousand machines that fail every hundred days, for a hundred days; the same seed, the same ones."""
    kinds = {"worker": 70.0, "rack": 30.0}
    drawn = [
        list(
            itertools.takewhile(
                lambda one: one.at_s < 100 * DAY,
                rates.strikes(nodes=1000, mtbf_node_s=100 * DAY, mix=kinds, rack_nodes=4, seed=seed),
            )
        )
        for seed in ("a", "a", "b")
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == pytest.approx(1000, rel=0.1)
    racks = [one for one in drawn[0] if one.kind == "rack"]
    assert len(racks) == pytest.approx(300, rel=0.2)
    assert all(len(one.nodes) == 4 and one.nodes[0] % 4 == 0 for one in racks)


def test_spares_change_no_failure_of_the_others_and_cause_none_of_many() -> None:
    """More of them fail themselves, each at its rate; power cuts and racks come as often as without."""
    kinds = {"worker": 50.0, "rack": 25.0, "cluster": 25.0}
    end_s = 100 * DAY
    drawn = {}
    for spares in (0, 5, 8, 100):
        drew = rates.strikes(nodes=99, spares=spares, mtbf_node_s=10 * DAY, mix=kinds, rack_nodes=2, seed="a")
        drawn[spares] = list(itertools.takewhile(lambda one: one.at_s < end_s, drew))
    plain = {spares: [s for s in found if s.nodes[0] < 99] for spares, found in drawn.items()}
    for found in plain.values():
        assert [(s.at_s, s.kind, s.nodes[0]) for s in found] == [
            (s.at_s, s.kind, s.nodes[0]) for s in plain[0]
        ]
    eight = {s.at_s: s.nodes for s in drawn[8] if s.kind == "worker"}
    assert {s.at_s: s.nodes for s in drawn[5] if s.kind == "worker"}.items() <= eight.items()
    assert all(max(s.nodes) == 98 + spares for spares in drawn for s in drawn[spares] if s.kind == "cluster")
    # A spare beside the last node shares its rack; the 99 others have racks that fail too, but no cluster.
    assert len(drawn[100]) - len(drawn[0]) == pytest.approx(0.75 * 1000, rel=0.15)


# ---- the command -----------------------------------------------------------------------------------------

WORDS = ["plan", "--nodes", "90:100", "--state", "30GB", "--duration", "5d", "--runs", "2"]


def test_plan_says_what_cadence_to_use_and_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    """In words, with the closed form beside; twice the same; and no line is wider than a screen."""
    assert cli.main(WORDS) == 0
    said = capsys.readouterr().out
    assert "100 nodes, 90 at least, 30 GB of state. A node fails every 263 days" in said
    assert said.startswith("Expect 9")
    assert "Use --snapshot-every" in said
    assert "closed form" in said
    assert max(len(line) for line in said.splitlines()) <= 120
    assert cli.main(WORDS) == 0
    assert capsys.readouterr().out == said


def test_plan_as_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """And its shares add up."""
    assert cli.main([*WORDS, "--json", "--spares", "2", "--mtbf-node", "20d"]) == 0
    told = json.loads(capsys.readouterr().out)
    for one in (told["asked"], told["use"], *told["others"]):
        assert sum(one["shares"].values()) == pytest.approx(1.0)
    assert told["use"]["goodput"] >= told["asked"]["goodput"] - 0.001
    assert told["use"]["recovery_s"]["median"] > 30
    assert any(one["flags"] == "--spares 0" for one in told["others"])
    assert cli.main([*WORDS, "--json", "--mtbf-node", "never"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["use"]["goodput"] == pytest.approx(told["closed_form"]["productive"], abs=0.005)
    assert len(told["use"]["goodput_by_run"]) == 1


@pytest.mark.parametrize(
    ("flags", "first", "never"),
    [
        # Spares are the lever, where the lack of nodes costs most.
        (
            "--nodes 2000 --state 30GB --duration 10d --runs 2",
            "1 spare node is worth more than any cadence: 9",
            "!",
        ),
        # It gives up: no cadence is recommended, nor the closed form's difference explained.
        (
            "--nodes 8 --mtbf-node 20m --state 1TB --duration 10h --mix worker=1 --runs 3",
            "The job gives up in 3 of 3 runs, even with --snapshot-every ",
            "se this|Use --|it counts",
        ),
        # Failures without a single recovery are failures.
        (
            "--nodes 2 --mtbf-node 30s --state 1GB --duration 1h --mix node=1",
            "Training never goes on after a failure: 0 % of the time is training that counts, as nodes are ",
            "No failure came|Use --",
        ),
        # What is less than all is not said to be 100 %, nor a short time to be none.
        (
            "--nodes 1 --mtbf-node never --state 1GB --step-time 1ms",
            "Expect >99.9 % of the time to be training that counts; ",
            r"\b0\.00 s\)| in \d runs|100\.0%",
        ),
        # Nothing fails and nothing is held: many nodes are as quick as one, and one run says all.
        ("--nodes 100000 --mtbf-node never --state 1GB --duration 1h --runs 9", "Expect 98.5 %", " runs"),
    ],
)
def test_the_first_sentence_tells_what_matters_most(
    flags: str, first: str, never: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing beneath it says otherwise."""
    assert cli.main(["plan", *flags.split()]) == 0
    said = capsys.readouterr().out
    assert " ".join(said.split()).startswith(first)
    assert not re.search(never, said)


def test_a_cadence_that_only_the_first_run_likes_is_not_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The mean of all runs decides."""
    flags = "--nodes 4:8 --spares 3 --state 1TB --mtbf-node 1d --mix rack=1 --rack-nodes 100"
    more = "--snapshot-every off --duration 6h --runs 3 --seed 292 --json"
    assert cli.main(["plan", *flags.split(), *more.split()]) == 0
    told = json.loads(capsys.readouterr().out)
    liked = max(told["others"], key=lambda one: one["goodput_by_run"][0] if one["spares"] == 3 else 0)
    assert liked["goodput_by_run"][0] > told["asked"]["goodput_by_run"][0]
    assert liked["goodput"] < told["asked"]["goodput"] <= told["use"]["goodput"]


@pytest.mark.parametrize(
    ("flag", "value", "error"),
    [
        ("--nodes", "0", "nodes is '0': write a whole number, 1 or more"),
        ("--nodes", "9:3", "at least 9 of 3 nodes"),
        ("--state", "30", "30 bytes"),
        ("--state", "lots", "state is 'lots': write a size"),
        ("--mtbf-node", "200", "a longer --mtbf-node. Is its unit the one you mean?"),  # seconds, not days
        ("--mtbf-node", "200x", "mtbf-node is '200x': write a time in seconds (30) or with a unit"),
        ("--mtbf-node", "1s", "fail"),
        ("--network", "10Gb/s", "network is '10Gb/s': write a speed, as 2GB/s, 500MB/s or 25Gbit/s"),
        ("--disk", "0GB/s", "disk is '0GB/s'"),
        ("--mix", "worker=1,nod=2", "there is no failure 'nod'"),
        ("--mix", "worker=0", "nothing would ever fail"),
        ("--snapshot-every", "5x", "snapshot-every is '5x': write a number of steps (100), a time (30s, 5m)"),
        ("--duration", "1s", "duration is '1s': write a time of 60s or more."),
        ("--duration", "59", "of 60s or more"),
    ],
)
def test_plan_refuses_what_cannot_be_meant(
    flag: str, value: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the flag and what may be written."""
    assert cli.main([*WORDS, flag, value]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert error in told


def test_speeds_are_read_in_bytes_and_bits() -> None:
    """A link's are told in bits, a disk's in bytes."""
    from elastic_resume import values  # noqa: PLC0415

    found = {text: values.speed("disk", text) for text in ("2GB/s", "1.5GiB/s", "10Gbit/s", "800Mbit/s")}
    assert found == {"2GB/s": 2e9, "1.5GiB/s": 1.5 * 2**30, "10Gbit/s": 1.25e9, "800Mbit/s": 1e8}
    with pytest.raises(ConfigError):
        values.speed("disk", "2GB")
