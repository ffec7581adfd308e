"""Node lists of Slurm: by table, by chance, and against Slurm's own expansion."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError
from elastic_resume.schedulers.slurm import MAX_NAMES, expand_node_list

# All of these Slurm 22.05 itself expands, but for those in BEYOND.
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
    "n[1-2]n[1-2]n[1-2]": "n1n1n1 n1n1n2 n2n1n1 n2n1n2 n1n2n1 n1n2n2 n2n2n1 n2n2n2",
    "[1-3]": "1 2 3",
    "5[1-2]": "51 52",
    "ip-10-0-1-[7-8]": "ip-10-0-1-7 ip-10-0-1-8",
    "n0.example.com": "n0.example.com",
}
BEYOND = {
    "n[1-2]-ib": "n1-ib n2-ib",
    "r[1-2]n[1-2].site": "r1n1.site r1n2.site r2n1.site r2n2.site",
}
WRONG = [
    "", ",", "n1,", ",n1", "n1,,n2", "(null)", "None assigned", "a b", "n1\n", "n/../x", "n{1,2}", "n\u0661",
    "n[", "n[1", "n]", "n[1-2", "n[1-2]]", "n[[1-2]]", "n[]", "n[1-]", "n[-1]", "n[1,]", "n[3-1]", "n[a-c]",
    "n[1 -2]", "n[\u0661]", f"n[1-{'9' * 30}]",
]  # fmt: skip


@pytest.mark.parametrize(("text", "names"), [*LISTS.items(), *BEYOND.items()])
def test_a_node_list_is_expanded_in_slurms_order(text: str, names: str) -> None:
    """Ranges, zero padding, several prefixes, several brackets."""
    assert expand_node_list(text) == names.split()


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_node_list_is_refused_and_shown(text: str) -> None:
    """Half of a list would be a world with too few nodes."""
    with pytest.raises(ConfigError) as caught:
        expand_node_list(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"n[0-{MAX_NAMES}]", "n[1-1000]x[1-1000]y[1-1000]", f"n[1-{MAX_NAMES}],m", f"n[1-{10**17}]"]
)
def test_no_list_makes_us_build_more_names_than_slurm_does(text: str) -> None:
    """The limit is looked at before names are made."""
    with pytest.raises(ConfigError, match="more than 65536"):
        expand_node_list(text)
    assert len(expand_node_list(f"n[1-{MAX_NAMES}]")) == MAX_NAMES


def test_a_long_list_is_not_repeated_in_whole() -> None:
    """An error fits a line or two."""
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
def test_single_names_come_back_as_they_are(parts: list[tuple[str, int, int]]) -> None:
    """Without brackets a list is its names, in order."""
    names = [f"{prefix}{number:0{width}d}" for prefix, number, width in parts]
    assert expand_node_list(",".join(names)) == names


@given(st.text("n[]-,0123456789 ", max_size=30))
def test_any_text_is_a_list_of_sound_names_or_refused(text: str) -> None:
    """No other error, and no name that holds what belongs to the list."""
    try:
        names = expand_node_list(text)
    except ConfigError:
        return
    assert names
    assert not set("".join(names)) & set("[], ")


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that ``scontrol show hostnames`` needs: no controller is asked."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n[1-3]\n")
    return path


def of_slurm(texts: list[str], conf: Path) -> list[list[str]]:
    """Slurm's own expansions: one process for many lists, told apart by a name that none of them holds."""
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
def test_slurm_itself_expands_the_table_so(slurm_conf: Path) -> None:
    """The table above says what Slurm does, and not what we believe."""
    assert of_slurm(list(LISTS), slurm_conf) == [names.split() for names in LISTS.values()]


@needs_slurm
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(node_lists(), min_size=1, max_size=20))
def test_slurm_and_we_expand_alike(slurm_conf: Path, texts: list[str]) -> None:
    """Lists drawn by chance, twenty to a process."""
    assert of_slurm(texts, slurm_conf) == [expand_node_list(text) for text in texts]
