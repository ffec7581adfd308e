"""What `prepare_launch` makes of flags, environment and scheduler, and how a generation begins."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, PropertyMock

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import determine_local_world_size

from elastic_resume import config, constants
from elastic_resume.agent import torchelastic
from elastic_resume.commands import doctor
from elastic_resume.errors import NodeFileError
from elastic_resume.policy.restart import GaveUp, GenerationReport, RestartsExhausted
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.rendezvous.core.messages import FailJob, Header
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.rendezvous.net import protocol
from elastic_resume.schedulers import environment
from tests.unit.schedulers.test_environment import MINIMUM, OPERATOR, POD, SKYPILOT, STEP, TRAINER

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n0",
    "ELASTIC_RESUME_TOKEN": "x" * 20,
}


def prepare(*words: str) -> torchelastic.LaunchSpec:
    """Prepare the launch of a script with these flags, in the environment of the process."""
    args, given = config.parse_flags(torchelastic.build_parser(), [*words, "train.py"])
    here = environment.read_context(os.environ)
    with torchelastic.prepare_launch(args, given, "job", here) as spec:
        return spec


def test_signal_that_is_ignored_at_the_start_stays_ignored() -> None:
    """As by nohup: the end of the terminal is not the end of the job. A drain signal is handled."""
    assert prepare().config.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    assert prepare().config.signals_to_handle == "SIGTERM,SIGQUIT,SIGUSR1"


def test_each_start_of_workers_has_its_own_logs(tmp_path: Path) -> None:
    """After the failure of another node torchelastic counts no restart."""
    config = prepare("--log-dir", str(tmp_path / "logs"), "--redirects=3").config
    assert config.logs_specs is not None
    starts = []
    for _ in range(2):
        envs = {0: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}}
        starts.append(config.logs_specs.reify(envs).stdouts[0])
        assert envs[0]["TORCHELASTIC_RESTART_COUNT"] == "0", "workers see torchelastic's own count"
        assert envs[0]["TORCHELASTIC_ERROR_FILE"]
    assert [Path(path).parent.parent.name for path in starts] == ["attempt_0", "attempt_1"]
    assert Path(starts[0]).parent.is_dir()


@pytest.fixture(autouse=True)
def in_slurm_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be one of two nodes of a Slurm step, in a directory with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name in [name for name in os.environ if name.startswith(("SLURM", "PET_", "ELASTIC_RESUME"))]:
        monkeypatch.delenv(name)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for name in (constants.ENV_GENERATION, constants.ENV_MTBF_S, torchelastic.ENV_WORKERS_IDENTICAL):
        monkeypatch.setenv(name, "")  # a handler sets these for its workers


@pytest.mark.parametrize(
    ("variables", "words"),
    [({}, []), ({"PET_STANDALONE": "0"}, []), ({"PET_RDZV_ENDPOINT": ""}, []), ({}, ["--rdzv-endpoint="])],
)
def test_rendezvous_flag_without_value_leaves_the_scheduler_in_charge(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: list[str]
) -> None:
    """Otherwise each node of the step would train alone."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = prepare(*words)
    assert (spec.config.min_nodes, spec.config.max_nodes) == (1, 2)


@pytest.mark.parametrize(
    ("environ", "nodes", "endpoint"),
    [
        (TRAINER, "3", "job-node-0-0.job:29500,job-node-0-1.job:29500,job-node-0-2.job:29500"),
        ({**TRAINER, MINIMUM: "2"}, "2 to 3", "job-node-0-0.job:29500,job-node-0-1.job:29500,…"),
        (OPERATOR, "2 to 4", "job-worker-0:23456"),
        (POD, "2 to 4", "train-0.peers.ml.svc:29400,…"),
        ({**POD, "PET_NPROC_PER_NODE": "3"}, "2 to 4", "train-0.peers.ml.svc:29400,…"),
        (SKYPILOT, "1 to 4", "10.0.0.4:29400,…"),
        ({**STEP, "ELASTIC_RESUME_TOKEN": "x" * 20}, "1 to 4", "gpu07:24567,…"),
    ],
)
def test_start_without_flags_is_the_one_that_doctor_shows(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], nodes: str, endpoint: str
) -> None:
    """Nodes, workers and candidates."""
    monkeypatch.setattr(socket, "gethostname", lambda: "job-node-0-1")
    for name in SLURM:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    shown = {row.name: row.value for row in doctor.check_scheduler(environment.read_context(os.environ))}
    config = prepare().config
    least, most = config.min_nodes, config.max_nodes
    assert shown["nodes"] == nodes == (f"{least} to {most}" if least < most else str(most))
    assert shown["candidates"].replace(" ", "") == config.rdzv_endpoint
    assert config.rdzv_endpoint.startswith(endpoint.partition("…")[0])
    assert determine_local_world_size(shown["workers"]) == config.nproc_per_node


def test_flag_beats_the_variables_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person types it in the pod."""
    for name, value in {**TRAINER, MINIMUM: "2"}.items():
        monkeypatch.setenv(name, value)
    for name in SLURM:
        monkeypatch.delenv(name)
    assert prepare("--nnodes", "1:3").config.min_nodes == 1
    assert prepare("--master-addr", "10.0.0.7").config.rdzv_endpoint == "10.0.0.7:29500"


def test_several_workers_get_one_thread_each_without_a_banner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it torchrun prints four lines of warning."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    prepare("--nproc-per-node", "2")
    assert os.environ.pop("OMP_NUM_THREADS") == "1"
    assert "OMP_NUM_THREADS" not in caplog.text
    prepare("--nproc-per-node", "1")
    assert "OMP_NUM_THREADS" not in os.environ


def test_node_timeout_reaches_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the flag, of the variable, and the default."""
    assert prepare().rendezvous_config.settings.node_timeout_s == 3
    monkeypatch.setenv(constants.ENV_NODE_TIMEOUT, "500ms")
    assert prepare().rendezvous_config.settings.node_timeout_s == 0.5
    assert prepare("--node-timeout", "5").rendezvous_config.settings.node_timeout_s == 5


def test_strict_reaches_the_rendezvous() -> None:
    """No vote of a dead node counts then. Without the key it does."""
    words = ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29400"]
    for conf, is_strict in (([], False), (["--rdzv-conf", "strict=true"], True)):
        config = prepare(*words, *conf).rendezvous_config
        assert config.settings_at("127.0.0.1:29400").is_strict is is_strict


@pytest.mark.parametrize(("conf", "launch"), [([], "slurm 77 0"), (["--rdzv-conf", "strict=true"], "")])
def test_strict_job_keeps_its_votes_across_a_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: list[str], launch: str
) -> None:
    """Slurm requeues a job although it does not reach one of its nodes, which may still train."""
    opened = Mock(side_effect=NodeFileError("not now"))
    monkeypatch.setattr(torchelastic, "DurableStateFile", opened)
    config, context = prepare(*conf).rendezvous_config, environment.read_context(os.environ)
    node_dir = Mock(path=tmp_path / "n0")
    with (
        pytest.raises(NodeFileError),
        torchelastic.open_rendezvous(
            config, node_dir, Mock(), context, known_generation=0, on_log=Mock(), status_reporter=Mock()
        ),
    ):
        pass
    opened.assert_called_once_with(tmp_path / "n0", launch_id=launch, node="n0")


def test_store_port_is_used_again_and_another_if_it_is_taken() -> None:
    """Each generation has a store of its own at `--master-port`."""
    first = torchelastic._start_store_server("127.0.0.1", 0)
    port = first.port
    assert torchelastic._start_store_server("127.0.0.1", port).port != port
    del first
    assert torchelastic._start_store_server("127.0.0.1", port).port == port


def make_handler(client: Mock, controller: Mock) -> torchelastic.ElasticRendezvousHandler:
    """Return the handler of a node with one worker."""
    controller.report_generation.return_value = GenerationReport()
    controller.mtbf_s, controller.limit_last_step.return_value = 60.0, ""
    spec = Mock(store_port=0, script="train.py", arguments="", **{"config.nproc_per_node": 1})
    session = torchelastic.RendezvousSession(client, "127.0.0.1", 0)
    return torchelastic.ElasticRendezvousHandler(spec, session, controller)


def test_view_that_ended_before_its_workers_start_is_judged_all_the_same() -> None:
    """Its failures may be why another node has left, and no later view carries them."""
    members = tuple(Incarnation(name, name, 1, f"{name}:1") for name in ("n0", "n1"))
    first = StartWorkers(3, 0, members, "n0:1", (1, 1))
    client, controller = Mock(view_end=None, verdicts={}), Mock(parts=())
    client.join.side_effect = [first, StartWorkers(4, 0, members[:1], "n0:1", (1,))]
    type(client).restart_requested = PropertyMock(side_effect=[True, False])
    handler = make_handler(client, controller)
    assert handler.next_rendezvous().world_size == 1
    judged = [call.args[0].generation for call in controller.start_generation.call_args_list]
    assert judged == [3, 4]


@pytest.mark.parametrize(("preparing", "is_change"), [(("n1",), False), ((), True)])
def test_node_that_prepares_is_no_change_of_membership(
    preparing: tuple[str, ...], *, is_change: bool
) -> None:
    """A failure of its worker counts, as it does where all nodes wait for it."""
    members = tuple(Incarnation(name, name, 1, f"{name}:1") for name in ("n0", "n1"))
    last = StartWorkers(4, 0, members[:1], "n0:1", (1,), preparing_nodes=preparing)
    client, controller = Mock(view_end=None, verdicts={}), Mock(parts=())
    client.join.side_effect = [StartWorkers(3, 0, members, "n0:1", (1, 1)), last]
    type(client).restart_requested = PropertyMock(side_effect=[True, False])
    make_handler(client, controller).next_rendezvous()
    assert controller.start_generation.call_args.kwargs == {"membership_changed": is_change}


def test_no_handler_of_torchelastic_outlives_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, and what the agent does afterwards must not be interrupted."""
    monkeypatch.setattr(torchelastic, "rendezvous_handler_registry", Mock())
    handler = signal.getsignal(signal.SIGTERM)

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, torchelastic._raise_signal_exception)

    monkeypatch.setattr(torchelastic, "launch_agent", end)
    torchelastic.run_workers(prepare(), Mock(), Mock(client=Mock(job_end=None)))
    assert signal.getsignal(signal.SIGTERM) == handler


def test_mechanisms_act_before_the_node_joins_and_when_a_verdict_changes() -> None:
    """Then the generation begins for them, before the workers start."""
    calls = Mock()
    calls.client.view_end, calls.client.restart_requested = None, False
    calls.controller.parts = [calls.part]
    world = StartWorkers(3, 0, (Incarnation("n0", "n0", 1, "n0:1"),), "n0:1", (1,))

    def join(_: object, on_verdict: Callable[[], None]) -> StartWorkers:
        on_verdict()
        return world

    calls.client.join.side_effect = join
    make_handler(calls.client, calls.controller).next_rendezvous()
    acts = [c[0] for c in calls.mock_calls if c[0] == "client.join" or c[0].startswith("part.")]
    assert acts == ["part.before_join", "client.join", "part.before_join", "part.begin_generation"]
    calls.part.begin_generation.assert_called_once_with(world)


@pytest.mark.parametrize(("code", "name"), [(-9, "SIGKILL"), (3, "")])
def test_end_of_a_worker_without_evidence_reaches_other_nodes(code: int, name: str) -> None:
    """No message holds a negative number: receivers would drop the connection, and never learn of the end."""
    error = ChildFailedError("train.py", {1: ProcessFailure(1, 77, code, "no such file")})
    failure = torchelastic._make_failure("b", error)
    assert getattr(failure.cause, "signal", None) == name
    message = FailJob(GaveUp("b", RestartsExhausted(failure)))
    line = protocol.encode(Header(1, 1), message)
    assert protocol.decode(line.rstrip())[1] == message


@pytest.mark.parametrize("workers", [(2, 1, 3), (1, 4)])
def test_torchelastic_reads_the_ranks_of_nodes_with_different_numbers_of_workers(
    workers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of its store are not public: this calls what reads them."""
    monkeypatch.setenv(torchelastic.ENV_WORKERS_IDENTICAL, "0")
    agent: Any = object.__new__(LocalElasticAgent)
    found = []
    for node, count in enumerate(workers):
        spec = SimpleNamespace(role="default", local_world_size=count)
        store = torchelastic._create_rank_store(workers)
        found += agent._assign_worker_ranks(store, node, len(workers), spec)
    total = sum(workers)
    ranks = [(worker.global_rank, worker.role_rank, worker.world_size) for worker in found]
    assert ranks == [(rank, rank, total) for rank in range(total)]
