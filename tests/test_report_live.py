"""The report of a job that runs: nobody waits long for it, and a long log costs little."""

from __future__ import annotations

import json
from pathlib import Path

from elastic_resume import contract
from elastic_resume.events import Event
from elastic_resume.report import story
from elastic_resume.report.live import Report
from elastic_resume.report.thinning import thin
from tests.stations import until


def log(node: str, *, steps: int = 300, shift: float = 0.0) -> list[Event]:
    """Of one node with two ranks and three generations, each ended by a death."""
    told: list[Event] = []
    t = 1e9
    for generation in (1, 2, 3):
        told.append({"event": "round", "t": t, "generation": generation})
        for step in range(steps * (generation - 1) + 1, steps * generation + 1, 3):
            t += 3.0
            told += [{"event": "step", "t": t, "generation": generation, "rank": rank, "step": step}
                     for rank in (0, 1)]  # fmt: skip
            if step % 10 == 0:
                told.append({"event": "commit", "t": t, "generation": generation, "step": step})
        told.append({"event": "worker-exit", "t": t, "generation": generation, "exit_code": 1})
        t += 10.0
    return [{"node": node, **one, "t": one["t"] + shift} for one in told]


def test_a_thinned_log_gives_the_same_story() -> None:
    """First and last steps stay, all else that happened too."""
    logs = [log("a"), log("b"), log("c", shift=50.0)]
    whole = [event for one in logs for event in one]
    few = [event for one in logs for event in thin(one, 10)]
    assert len(few) < len(whole) / 3
    assert [one for one in few if one["event"] != "step"] == [one for one in whole if one["event"] != "step"]
    one, other = story.tell(whole), story.tell(few)
    assert other.goodput.parts == one.goodput.parts
    assert [(row.first_step, row.last_step) for row in other.report.generations] == [
        (row.first_step, row.last_step) for row in one.report.generations
    ]
    assert list(thin(whole, 1)) == whole


def test_marks_of_any_form_are_taken() -> None:
    """A log may hold anything."""
    marks: list[object] = [None, -1, "x", 10**30, {}, 1.5]
    odd: list[Event] = [{"event": "step", "t": 1.0, "step": step, "rank": []} for step in marks]
    assert {repr(one) for one in thin(odd, 5)} <= {repr(one) for one in odd}


def test_metrics_do_not_wait_for_a_report_and_pages_get_it(tmp_path: Path) -> None:
    """Whoever asks first has it told; what cannot be told is said, and told once it can be."""
    node = tmp_path / "run" / "a"
    node.mkdir(parents=True)
    report = Report(node, 80)
    assert report.parts() == {}
    until(lambda: "no events of a run here" in report.page("The agent is not here."), "it is said")
    (node / contract.EVENTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in log("a")))
    report = Report(node, 80)
    assert report.parts() == {}, "it is told when somebody asks"
    until(lambda: report.parts().get("productive", 0) > 0, "it is told")
    page = report.page("The agent is not here.")
    assert "The agent is not here." in page
    assert 'http-equiv="refresh"' in page
