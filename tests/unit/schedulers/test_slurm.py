"""Answers of Slurm's commands as recorded from 22.05, and node lists."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError
from elastic_resume.schedulers import slurm
from elastic_resume.schedulers.slurm import MAX_NAMES, expand_node_list
from tests.support.processes import write_command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-21T23:44:56|10:00", 1795304696.0),
        ("2027-11-21T23:23:34|UNLIMITED", math.inf),
        ("NONE|UNLIMITED", math.inf),
        ("NONE|10:00", None),
        ("Unknown|1-00:00:00", None),
        ("2026-13-45T00:00:00|10:00", None),
        ("23:44:56|10:00", None),
        ("2026-11-21T23:44:56", None),
        ("", None),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", None),
    ],
)
def test_end_time_is_read_from_squeue(
    text: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit differs from no answer; neither is a deadline."""
    asked: list[list[str]] = []

    def answer(words: list[str]) -> str:
        asked.append(words)
        return text

    monkeypatch.setattr(slurm, "run_slurm_command", answer)
    assert slurm.query_end_time("7_1") == expected
    assert asked == [["squeue", "-h", "-j", "7_1", "-o", "%e|%l"]]


def test_command_has_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: an answer, a failure, a hang, a missing program."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    write_command(tmp_path, "answers", 'echo "yes: $SLURM_TIME_FORMAT $TZ$SQUEUE_STATES"')
    assert slurm.run_slurm_command(["answers"], 60) == "yes: standard UTC"
    write_command(tmp_path, "fails", "echo no; exit 3")
    assert not slurm.run_slurm_command(["fails"], 60)
    write_command(tmp_path, "hangs", "exec sleep 60")
    assert not slurm.run_slurm_command(["hangs"], 0.1)
    assert not slurm.run_slurm_command(["no-such-command"], 1)


# ---- node lists ----------------------------------------------------------------------------------------

# Slurm 22.05 expands all of these, except those in BEYOND.
LISTS = {
    "n1": "n1",
    "localhost": "localhost",
    "a,b,c": "a b c",
    "n[1-3]": "n1 n2 n3",
    "n[1-3,07-09]": "n1 n2 n3 n07 n08 n09",
    "n[08-11]": "n08 n09 n10 n11",
    "n[9-11]": "n9 n10 n11",
    "n[099-101]": "n099 n100 n101",
    "n[001-3]": "n001 n002 n003",
    "n[2,1,5]": "n2 n1 n5",
    "n[1,1]": "n1 n1",
    "node-a[1-2],gpu-b-[01,03],login": "node-a1 node-a2 gpu-b-01 gpu-b-03 login",
    "r[1-2]n[01-03]": "r1n01 r1n02 r1n03 r2n01 r2n02 r2n03",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "[1-3]": "1 2 3",
    "5[1-2]": "51 52",
    "ip-10-0-1-[7-8]": "ip-10-0-1-7 ip-10-0-1-8",
    "n0.example.com": "n0.example.com",
}
BEYOND = {
    # Slurm lists these in another order. Which nodes there are counts, and that all nodes list them alike.
    "n[1-2]n[1-2]n[1-2]": "n1n1n1 n1n1n2 n1n2n1 n1n2n2 n2n1n1 n2n1n2 n2n2n1 n2n2n2",
    "n[1-2]-ib": "n1-ib n2-ib",
    "r[1-2]n[1-2].site": "r1n1.site r1n2.site r2n1.site r2n2.site",
}
WRONG = [
    "", ",", "n1,", ",n1", "n1,,n2", "(null)", "None assigned", "a b", "n1\n", "n/../x", "n{1,2}", "n\u0661",
    "n[", "n[1", "n]", "n[1-2", "n[1-2]]", "n[[1-2]]", "n[]", "n[1-]", "n[-1]", "n[1,]", "n[3-1]", "n[a-c]",
    "n[1 -2]", "n[\u0661]", f"n[1-{'9' * 30}]",
]  # fmt: skip


@pytest.mark.parametrize(("text", "names"), [*LISTS.items(), *BEYOND.items()])
def test_node_list_is_expanded(text: str, names: str) -> None:
    """Ranges, zero padding, several prefixes, several brackets."""
    assert expand_node_list(text) == names.split()


@pytest.mark.parametrize("text", WRONG)
def test_invalid_node_list_is_refused_and_format_job_record(text: str) -> None:
    """A partial list would be a world with too few nodes."""
    with pytest.raises(ConfigError) as caught:
        expand_node_list(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"n[0-{MAX_NAMES}]", "n[1-1000]x[1-1000]y[1-1000]", f"n[1-{MAX_NAMES}],m", f"n[1-{10**17}]"]
)
def test_node_list_above_slurms_limit_is_refused(text: str) -> None:
    """The limit is checked before names are created."""
    with pytest.raises(ConfigError, match="more than 65536"):
        expand_node_list(text)
    assert len(expand_node_list(f"n[1-{MAX_NAMES}]")) == MAX_NAMES


def test_node_list_error_is_short() -> None:
    """An error has a line or two."""
    with pytest.raises(ConfigError) as caught:
        expand_node_list("n1," * 10000)
    assert len(str(caught.value)) < 300


prefixes = st.text("abcxyz019-", min_size=1, max_size=4).filter(lambda text: text[0] != "-")


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """The inside of a bracket, as Slurm writes it."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 120))
        width = draw(st.integers(0, 4))
        last = first + draw(st.integers(0, 12))
        parts.append(f"{first:0{width}d}-{last:0{width}d}" if last > first else f"{first:0{width}d}")
    return ",".join(parts)


@st.composite
def node_lists(draw: st.DrawFn) -> str:
    """Lists of up to four words with up to two brackets each."""
    words = []
    for _ in range(draw(st.integers(1, 4))):
        brackets = draw(st.integers(0, 2))
        words.append(
            "".join(f"{draw(prefixes)}[{draw(ranges())}]" for _ in range(brackets)) or draw(prefixes)
        )
    return ",".join(words)


@given(st.lists(st.tuples(prefixes, st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=50))
def test_node_list_without_brackets_is_split_at_commas(parts: list[tuple[str, int, int]]) -> None:
    """Without brackets a list is its names, in order."""
    names = [f"{prefix}{number:0{width}d}" for prefix, number, width in parts]
    assert expand_node_list(",".join(names)) == names


@given(st.text("n[]-,0123456789 ", max_size=30))
def test_node_list_of_any_text_is_names_or_error(text: str) -> None:
    """There is no other error, and no name contains brackets or commas."""
    try:
        names = expand_node_list(text)
    except ConfigError:
        return
    assert names
    assert not set("".join(names)) & set("[], ")


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration for ``scontrol show hostnames``, which queries no controller."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n[1-3]\n")
    return path


def expand_by_slurm(texts: list[str], conf: Path) -> list[list[str]]:
    """Return Slurm's expansions of many lists, which a separator name delimits."""
    separator = "SEPARATOR"
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", ",".join(f"{text},{separator}" for text in texts)],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    return [part.split() for part in answer.split(f"{separator}\n")[:-1]]


needs_slurm = pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's scontrol")


@needs_slurm
def test_table_of_node_lists_agrees_with_slurm(slurm_conf: Path) -> None:
    """The table holds Slurm's behaviour."""
    assert expand_by_slurm(list(LISTS), slurm_conf) == [names.split() for names in LISTS.values()]


@needs_slurm
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(node_lists(), min_size=1, max_size=20))
def test_random_node_lists_are_expanded_as_by_slurm(slurm_conf: Path, texts: list[str]) -> None:
    """Up to twenty lists per process."""
    assert expand_by_slurm(texts, slurm_conf) == [expand_node_list(text) for text in texts]
