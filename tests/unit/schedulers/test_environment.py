"""The scheduler's context of a node, flags filled from it, and the shared token."""

from __future__ import annotations

import argparse
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume import constants
from elastic_resume.agent import options
from elastic_resume.errors import ConfigError
from elastic_resume.rendezvous.net.protocol import load_token
from elastic_resume.schedulers import environment
from elastic_resume.schedulers.slurm import SharedDir

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,11]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_JOB_NODELIST": "gpu[07-11]",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURMD_NODENAME": "gpu08",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_END_TIME": "1900000000",
}
# As sbatch --array=0-3 -N1 sets them for the first element, whose job id is the array's own.
ELEMENT = {
    "SLURM_JOB_ID": "77",
    "SLURM_ARRAY_JOB_ID": "77",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n2",
    "SLURMD_NODENAME": "n2",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "train-2",
    "JOB_COMPLETION_INDEX": "2",
    "ELASTIC_RESUME_JOB": "train",
    "ELASTIC_RESUME_NODES": "2:4",
    "ELASTIC_RESUME_SERVICE": "peers",
    "POD_NAMESPACE": "ml",
    "POD_IP": "10.1.2.3",
}
# As the second pod of a TrainJob, and the first worker of a PyTorchJob.
TRAINER = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
OPERATOR = {
    "PET_NNODES": "2:4",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ID": "job",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.2\n10.0.0.9\n10.0.0.1",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-06-21-18-31-563597_digits_1-0",
    "SLURM_JOB_ID": "5",  # its nodes may be those of a Slurm job
}
MINIMUM = "ELASTIC_RESUME_MIN_NODES"


# ---- reading -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def in_second_pod_of_trainjob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have its host name; other schedulers name nodes by a variable."""
    monkeypatch.setattr(socket, "gethostname", lambda: "job-node-0-1")


def test_slurm_context_describes_nodes_of_step() -> None:
    """A step may have fewer nodes than its job; the run id stays over requeues."""
    here = environment.read_context(STEP)
    assert (here.scheduler, here.name, here.job) == ("slurm", "gpu08", "slurm-1234567")
    assert (here.node_order, here.max_nodes, here.workers_per_node, here.restarts) == (1, 4, "8", 2)
    assert here.peers == ("gpu07", "gpu08", "gpu09", "gpu11")
    assert here.candidates == ("gpu07:24567", "gpu08:24567", "gpu09:24567")
    assert (here.launch_id, here.slurm_job, here.deadline) == ("slurm 1234567 2", "1234567", 1900000000)
    assert here.problems == ()
    assert here.sources["nodes"] == "SLURM_STEP_NUM_NODES"
    assert environment.read_context({**STEP, "SLURM_RESTART_COUNT": ""}).job == here.job
    # The steps of one job and of the next jobs have different ports.
    steps = [
        {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(77, 87) for step in range(9)
    ]
    assert len({environment.read_context({**STEP, **step}).candidates for step in steps}) == len(steps)


def test_slurm_array_element_is_job_of_its_own() -> None:
    """Its job id may be the whole array's."""
    here = environment.read_context(ELEMENT)
    assert (here.job, here.slurm_job, here.max_nodes, here.candidates) == (
        "slurm-77_1",
        "77_1",
        1,
        ("n2:20077",),
    )
    assert here.launch_id == "slurm 77_1 0"


def test_kubernetes_context_names_peers_of_indexed_job() -> None:
    """A new pod of the same index has the same name."""
    here = environment.read_context({**POD, "POD_NAME": "train-2-x7gq1"})
    assert (here.scheduler, here.name, here.job, here.node_order) == ("kubernetes", "train-2", "train", 2)
    assert (here.max_nodes, here.min_nodes, here.address) == (4, 2, "10.1.2.3")
    assert here.candidates[0].startswith("train-0.peers.ml.svc")
    assert len(here.candidates) == 3


def test_context_of_trainjob_names_its_numbered_pods() -> None:
    """The loss of the first pod at the start is survived."""
    here = environment.read_context({**TRAINER, "POD_IP": "10.1.2.3"})
    assert (here.scheduler, here.name, here.job, here.node_order) == ("pet", "job-node-0-1", "job-node-0", 1)
    assert here.candidates == tuple(f"job-node-0-{index}.job:29500" for index in range(3))
    assert (here.workers_per_node, here.address, here.problems) == ("auto", "10.1.2.3", ())
    assert len(environment.read_context({**TRAINER, "PET_NNODES": "64"}).candidates) == 3


@pytest.mark.parametrize(("job", "domain"), [("sweep-0", "sweep-0"), ("job", "job.team-0.svc")])
def test_zero_in_a_name_of_a_trainjob_is_not_taken_for_a_pods(
    job: str, domain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the pod is at the end of the host's own name."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"{job}-node-0-1")
    here = environment.read_context({**TRAINER, "PET_MASTER_ADDR": f"{job}-node-0-0.{domain}"})
    assert here.job == f"{job}-node-0"
    assert here.candidates == tuple(f"{job}-node-0-{index}.{domain}:29500" for index in range(3))


def test_candidates_by_address_of_ipv6_have_brackets() -> None:
    """As --rdzv-endpoint takes them."""
    here = environment.read_context({**SKYPILOT, "SKYPILOT_NODE_IPS": "fd00::1\nfd00::2"})
    assert here.candidates == ("[fd00::1]:29400", "[fd00::2]:29400")
    assert environment.read_context({**TRAINER, "PET_MASTER_ADDR": "fd00::1"}).candidates == (
        "[fd00::1]:29500",
    )


@pytest.mark.parametrize(
    ("host", "master"),
    [
        ("job-worker-0", "job-master-0"),  # a PyTorchJob without elasticPolicy
        ("n1", "n0"),
        ("job-node-0-2", "job-node-0-0.job"),  # not where this rank is
        ("job-node-0-1", "10.0.0.7"),
    ],
)
def test_pet_context_has_master_as_only_candidate_of_other_hosts(
    host: str, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names say nothing about the others."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    here = environment.read_context({**TRAINER, "PET_MASTER_ADDR": master})
    assert here.candidates == (f"{master}:29500",)
    assert (here.job, here.problems) == ("", ())


def test_context_of_skypilot_job_has_its_machines_as_candidates() -> None:
    """A recovered job has other machines and the same task, so nodes are named after their rank."""
    here = environment.read_context(SKYPILOT)
    assert (here.scheduler, here.name, here.node_order) == ("skypilot", "node1", 1)
    assert here.job == SKYPILOT["SKYPILOT_TASK_ID"]
    assert here.candidates == ("10.0.0.4:29400", "10.0.0.2:29400", "10.0.0.9:29400")
    assert (here.address, here.workers_per_node, here.problems) == ("10.0.0.2", "8", ())
    # Each `sky launch` has another task, and continues the run that is named after the script.
    launched = {**SKYPILOT, "SKYPILOT_TASK_ID": "sky-2026-11-06-21-18-31-563597_dev_1"}
    assert environment.read_context({**launched, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}).job == ""
    for rank in ({"SKYPILOT_NODE_RANK": "4"}, {"SKYPILOT_NODE_RANK": ""}):  # two nodes would be node0
        assert "names none of the 4 nodes" in environment.read_context({**SKYPILOT, **rank}).problems[0]


@pytest.mark.parametrize(
    ("environ", "least", "most"),
    [
        (TRAINER, 3, 3),  # as torchrun: exactly 3
        ({**TRAINER, MINIMUM: "2"}, 2, 3),
        ({**TRAINER, MINIMUM: "2", "PET_NNODES": "1"}, 1, 1),  # one runtime serves jobs of any size
        ({**TRAINER, MINIMUM: "0"}, 1, 3),
        ({**OPERATOR, MINIMUM: "3"}, 2, 4),  # MIN:MAX says it
        (POD, 2, 4),
        ({**POD, "ELASTIC_RESUME_NODES": "4"}, 1, 4),
        ({**POD, "ELASTIC_RESUME_NODES": "4", MINIMUM: "3"}, 3, 4),
        (SKYPILOT, 1, 4),
        ({**SKYPILOT, MINIMUM: "3"}, 3, 4),
        ({**STEP, MINIMUM: "3"}, 3, 4),
    ],
)
def test_minimum_stands_beside_a_number_of_nodes(environ: dict[str, str], least: int, most: int) -> None:
    """A scheduler names one number, and a job continues with fewer nodes."""
    here = environment.read_context(environ)
    assert (here.min_nodes, here.max_nodes, here.problems) == (least, most, ())


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({k: v for k, v in STEP.items() if not k.startswith("SLURM_STEP")}, "srun elastic-resume run"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "--ntasks-per-node=1"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[07-"}, "SLURM_STEP_NODELIST"),
        ({**STEP, "SLURM_NODEID": "first"}, "SLURM_NODEID is 'first'"),
        ({k: v for k, v in POD.items() if k != "ELASTIC_RESUME_SERVICE"}, "Service"),
        ({**POD, "ELASTIC_RESUME_NODES": "4:2"}, "MIN:MAX"),
        ({**POD, "ELASTIC_RESUME_NODES": ""} | {MINIMUM: "2"}, "TrainJob needs spec.trainer"),
        ({**TRAINER, MINIMUM: "two"}, f"{MINIMUM} is 'two'"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "head"}, "SKYPILOT_NODE_RANK is 'head'"),
    ],
)
def test_context_lists_invalid_variable_as_problem(environ: dict[str, str], problem: str) -> None:
    """Reading never fails, because flags may replace the variable."""
    assert problem in " ".join(environment.read_context(environ).problems)


NAMES = sorted({
    variable
    for _, concepts in environment._READERS.values()
    for variables in concepts.values()
    for variable in variables
} | {"SLURM_STEP_ID", "KUBERNETES_SERVICE_HOST", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"})  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=12) | st.sampled_from(["1", "3"])))
def test_context_of_any_environment_is_usable(environ: dict[str, str]) -> None:
    """Names are safe, and there is at least one node."""
    here = environment.read_context(environ)
    assert here.max_nodes >= 1
    assert environment.sanitize_name(here.name, "") == here.name
    assert here.job == environment.sanitize_name(here.job, "")
    assert len(here.candidates) <= environment.MAX_CANDIDATES


def test_termination_grace_error_names_variable_and_value() -> None:
    """The variable is in the pod's manifest."""
    with pytest.raises(ConfigError, match=f"{constants.ENV_TERMINATION_GRACE_S} .*is '2 min'"):
        environment.read_termination_grace_s({constants.ENV_TERMINATION_GRACE_S: "2 min"})


# ---- filling in ----------------------------------------------------------------------------------------


def start(
    here: environment.SchedulerContext, *given: str, **values: str | bool
) -> tuple[argparse.Namespace, options.FilledOptions]:
    """Fill the flags that are not given."""
    args = argparse.Namespace(
        nnodes="1:1",
        nproc_per_node="1",
        rdzv_endpoint="",
        local_addr=None,
        rdzv_conf="",
    )
    vars(args).update(values)
    return args, options.fill_from_scheduler(args, {*given, *values}, here)


def test_fill_without_flags_takes_everything_from_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, endpoint, workers, and a token in the directory of the submission."""
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path))
    monkeypatch.delenv("ELASTIC_RESUME_TOKEN", raising=False)
    args, found = start(environment.read_context({**STEP, "SLURM_NODEID": "0"}))
    assert (args.nnodes, args.nproc_per_node) == ("1:4", "8")
    assert args.rdzv_endpoint == "gpu07:24567,gpu08:24567,gpu09:24567"
    _, secret = load_token(Path(found.rendezvous_conf["token_file"]), {}, "job")
    assert secret
    _, again = start(environment.read_context(STEP))
    assert again.rendezvous_conf == found.rendezvous_conf
    assert found.shared_dir is not None
    monkeypatch.setenv("SLURM_STEP_ID", "1")  # another training of the same job
    _, other = start(environment.read_context({**STEP, "SLURM_NODEID": "0"}))
    found.shared_dir.remove()
    assert Path(other.rendezvous_conf["token_file"]).exists()


def test_fill_keeps_given_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag of the rendezvous replaces all that the scheduler says about it."""
    monkeypatch.setenv("ELASTIC_RESUME_TOKEN", "a secret of 22 letters")
    here = environment.read_context(STEP)
    args, _ = start(here, nnodes="2:3", nproc_per_node="2")
    assert (args.nnodes, args.nproc_per_node) == ("2:3", "2")
    assert args.rdzv_endpoint.startswith("gpu07:")
    args, _ = start(here, rdzv_endpoint="elsewhere")
    assert (args.nnodes, args.rdzv_endpoint) == ("1:1", "elsewhere")
    args, _ = start(here, nnodes="1")
    assert args.rdzv_endpoint == ""


def test_fill_refuses_problem_unless_flags_replace_it() -> None:
    """With flags the same environment is accepted."""
    here = environment.read_context({**STEP, "SLURM_NODEID": "first"})
    with pytest.raises(ConfigError, match="SLURM_NODEID is 'first'"):
        start(here)
    assert start(here, rdzv_endpoint="gpu07", nnodes="4")[0].nnodes == "4"


@pytest.mark.parametrize("tasks", ["4", "2(x3),1", "1,8"])
@pytest.mark.parametrize("flags", [{}, {"nnodes": "1"}, {"rdzv_endpoint": "gpu07", "nnodes": "4"}])
def test_fill_refuses_several_tasks_on_node(tasks: str, flags: dict[str, str]) -> None:
    """The agents of one node would need the same directory."""
    here = environment.read_context({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": tasks})
    with pytest.raises(ConfigError, match="ntasks-per-node=1"):
        start(here, **flags)


def test_fill_refuses_invalid_number_of_pods() -> None:
    """Otherwise each pod would train alone, and the job would succeed."""
    here = environment.read_context({**POD, "ELASTIC_RESUME_NODES": "2-4"})
    with pytest.raises(ConfigError, match="ELASTIC_RESUME_NODES is '2-4'"):
        start(here)
    assert start(here, nnodes="1")[0].rdzv_endpoint == ""


def test_fill_in_pod_sets_last_call_timeout_above_dns_ttl() -> None:
    """DNS may keep the address of a dead pod for 30 s. It is a default: --rdzv-conf overrides it."""
    for pod in (POD, TRAINER):
        assert start(environment.read_context(pod))[1].rendezvous_conf == {"last_call_timeout": "35s"}
    one_node = environment.read_context({**STEP, "SLURM_STEP_NUM_NODES": "1"})
    assert start(one_node)[1].rendezvous_conf == {}


def test_fill_keeps_token_file_of_user() -> None:
    """No shared directory is made then."""
    _, found = start(environment.read_context(STEP), rdzv_conf="token_file=/run/secret")
    assert (found.rendezvous_conf, found.shared_dir) == ({}, None)


# ---- the shared token ----------------------------------------------------------------------------------


def test_shared_token_created_by_several_processes_is_equal_and_private(tmp_path: Path) -> None:
    """No process reads a part of the token."""
    code = (
        "import sys; from pathlib import Path; from elastic_resume.schedulers.slurm import SharedDir\n"
        "print(SharedDir(Path(sys.argv[1]), 'slurm-1').wait_for_token(create=True).read_text())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    (token,) = {process.communicate(timeout=60)[0].strip() for process in started}
    assert len(token) == 64
    path = tmp_path / ".elastic_resume" / "slurm-1" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["token"]


def test_shared_dir_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    """The error says what to do."""
    with pytest.raises(ConfigError, match="not the same on all nodes"):
        SharedDir(tmp_path, "slurm-1").wait_for_token(create=False, timeout_s=0.1)
    with pytest.raises(ConfigError, match=r"there is no .*/elsewhere on this one"):
        SharedDir(tmp_path / "elsewhere", "slurm-1")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ELASTIC_RESUME_TOKEN"):
        SharedDir(tmp_path / "file", "slurm-1")


def test_shared_dir_remove_keeps_parent(tmp_path: Path) -> None:
    """Another job may be creating its directory in the parent."""
    shared = SharedDir(tmp_path, "slurm-1")
    shared.wait_for_token(create=True)
    shared.remove()
    assert not shared.path.exists()
    assert shared.path.parent.exists()
