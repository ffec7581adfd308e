"""The files under deploy/ are valid and agree, as far as a test without a cluster can check.

The Slurm script runs for real, with stand-ins for `srun` and `scontrol` that note how they were called.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate as schemas
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from elastic_resume import config, constants
from elastic_resume.agent import torchelastic
from elastic_resume.schedulers import environment, slurm
from elastic_resume.units import parse_kubernetes_quantity
from tests.support import manifests
from tests.support.manifests import container
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
SCRIPT = DEPLOY / "slurm" / "train.sbatch"
MINORS = {int(version.split(".")[1]): version for version in all_versions()}


def test_flags_in_the_files_are_flags_of_run() -> None:
    """Those of the Job, and those of the examples in the comments."""
    examples = re.compile(
        r"^#   (?:sbatch .*?\.sbatch|docker run .*?elastic-resume:\S+) (.+?)(?:  +#.*)?$", re.MULTILINE
    )
    commands = [" ".join(container(shipped_job())["args"])]
    for path in (DEPLOY / "Dockerfile", *(DEPLOY / "slurm").iterdir()):
        commands += examples.findall(path.read_text())
    assert len(commands) > 3
    for command in commands:
        args, _ = config.parse_flags(torchelastic.build_parser(), command.split())
        assert args.training_script.endswith(".py")


# ---- the image ---------------------------------------------------------------------------------------


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    """Every COPY from the source tree; the .dockerignore lets in just these."""
    text = (DEPLOY / "Dockerfile").read_text()
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    sources = {word for words in copies if not words[0].startswith("--from") for word in words}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == sources


def test_the_agent_is_the_child_of_tini_in_the_container() -> None:
    """A shell in its place would swallow SIGTERM: the form is a list, and names a command of this package."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    (form,) = (rest for instruction, rest in lines if instruction == "ENTRYPOINT")
    assert "install --yes --no-install-recommends tini" in text
    first, dashes, program, *words = json.loads(form)
    assert (first, dashes) == ("tini", "--")
    (script,) = entry_points(group="console_scripts", name=program)
    assert script.value.startswith("elastic_resume.")
    module, _, function = script.value.partition(":")
    code = f"import sys, {module}; sys.argv = {[program, *words, '--help']}; sys.exit({module}.{function}())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: elastic-resume run" in done.stdout


# ---- Kubernetes --------------------------------------------------------------------------------------


def shipped_job() -> dict[str, Any]:
    """The spec of job.yaml."""
    return manifests.job_spec(manifests.load_documents())


@pytest.mark.parametrize("minor", range(29, 38))
def test_published_schemas_take_job_and_service(minor: int) -> None:
    """Strictly; before 1.31 with the two changes that docs/guides/kubernetes.md names."""
    loaded = manifests.load_documents()
    if minor < 31:
        manifests.adapt_to_kubernetes_1_29(manifests.job_spec(loaded))
    for document in loaded:
        schemas.validate(document, MINORS[minor], strict=True)


def test_schemas_find_mistakes() -> None:
    """An unknown field, and a wrong type: the test above would not notice an idle schema."""
    for key, value in (("completion", 3), ("completions", "three")):
        loaded = manifests.load_documents()
        manifests.job_spec(loaded)[key] = value
        with pytest.raises(schemas.ValidationError):
            schemas.validate(loaded[-1], MINORS[37], strict=True)


def test_lines_to_uncomment_are_valid() -> None:
    """GPUs, a secret for the registry and a storage class."""
    for file, keys in (
        ("job.yaml", ("imagePullSecrets", "nvidia.com/gpu")),
        ("claim.yaml", ("storageClassName",)),
    ):
        text = (manifests.KUBERNETES / file).read_text()
        for key in keys:
            assert text.count(f"# {key}: ") == 1
            text = text.replace(f"# {key}: ", f"{key}: ")
        schemas.validate(yaml.safe_load(text), MINORS[37], strict=True)


def test_jobset_holds_the_same_job() -> None:
    """Its controller makes the Service that the Job's pods name."""
    loaded = manifests.load_documents(manifests.JOBSET)
    assert manifests.job_spec(loaded) == shipped_job()
    subdomain = shipped_job()["template"]["spec"]["subdomain"]
    assert loaded[0]["spec"]["network"]["subdomain"] == subdomain


def test_kustomization_names_the_other_files_and_the_image() -> None:
    """A Job and its Service; the JobSet is the other way to run the same job."""
    kustomization = yaml.safe_load((manifests.KUBERNETES / "kustomization.yaml").read_text())
    assert tuple(kustomization["resources"]) == manifests.JOB
    (image,) = kustomization["images"]
    assert container(shipped_job())["image"] == f"{image['name']}:{image['newTag']}"


def test_service_is_the_one_that_the_pods_need() -> None:
    """Headless, for pods that are not ready yet, by the name that they have as their subdomain."""
    *_, service, job = manifests.load_documents()
    template = job["spec"]["template"]
    assert service["metadata"]["name"] == template["spec"]["subdomain"]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ports = [port["name"] for port in container(job["spec"])["ports"]]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ports


def test_values_that_stand_in_two_places_agree() -> None:
    """No schema knows that they belong together."""
    job = shipped_job()
    pod, agent = job["template"]["spec"], container(job)
    env = {one["name"]: one.get("value", "") for one in agent["env"]}
    least, most = map(int, env["ELASTIC_RESUME_NODES"].split(":"))
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", most, most)
    assert job["maxFailedIndexes"] == most - least
    # A podFailurePolicy asks for both.
    assert (pod["restartPolicy"], job["podReplacementPolicy"]) == ("Never", "Failed")
    assert env["ELASTIC_RESUME_SERVICE"] == pod["subdomain"]
    assert env[constants.ENV_TERMINATION_GRACE_S] == str(pod["terminationGracePeriodSeconds"])
    mounts = {mount["mountPath"]: mount["name"] for mount in agent["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    disk, shared = volumes[mounts[env[constants.ENV_CKPT_DIR]]], volumes[mounts["/dev/shm"]]["emptyDir"]  # noqa: S108
    assert shared["medium"] == "Memory"
    claim, budget, *_ = manifests.load_documents()
    assert disk["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert budget["spec"]["minAvailable"] == most - 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()
    limits = {
        name: parse_kubernetes_quantity(name, size) for name, size in agent["resources"]["limits"].items()
    }
    assert parse_kubernetes_quantity("shm", shared["sizeLimit"]) < limits["memory"]


def shipped_trainjob() -> list[dict[str, Any]]:
    """The JobSet that the Trainer makes of the TrainJob."""
    return [manifests.render_trainjob(*manifests.load_documents(manifests.TRAINJOB))]


def fields(required: str = "", **properties: object) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others; {} takes any value."""
    found = {"properties": properties, "required": required.split(), "additionalProperties": False}
    return {"type": "object", **found}


ANY: dict[str, Any] = {}
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
LABELS = {"type": "object", "additionalProperties": TEXT}
# The fields of version 2.3 of the Trainer and of its JobSets, as far as these files may need them.
JOBSET_SPEC = fields(
    network=fields(enableDNSHostnames={"type": "boolean"}, subdomain=TEXT),
    failurePolicy=fields(maxRestarts=COUNT, restartStrategy=TEXT, rules=ANY),
    successPolicy=ANY,
    replicatedJobs={
        "type": "array",
        "items": fields("name template", name=TEXT, replicas=COUNT, dependsOn=ANY, template=ANY),
    },
)
RESOURCES = {
    "ClusterTrainingRuntime": fields(
        "mlPolicy template",
        mlPolicy=fields(numNodes=COUNT, torch=fields(envInjection=ANY)),
        podGroupPolicy=ANY,
        template=fields("spec", metadata=ANY, spec=JOBSET_SPEC),
    ),
    "TrainJob": fields(
        "runtimeRef",
        runtimeRef=fields("name", name=TEXT, apiGroup=TEXT, kind=TEXT),
        trainer=fields(
            image=TEXT,
            command=ANY,
            args={"type": "array", "items": TEXT},
            env=ANY,
            numNodes=COUNT,
            numProcPerNode=COUNT,
            resourcesPerNode=fields(requests=ANY, limits=ANY),
        ),
        initializer=ANY,
        runtimePatches=ANY,
        suspend={"type": "boolean"},
        activeDeadlineSeconds=COUNT,
    ),
}


def test_trainer_takes_the_runtime_and_the_trainjob() -> None:
    """By their fields, and by the three rules of its webhook for runtimes."""
    runtime, trainjob = manifests.load_documents(manifests.TRAINJOB)
    for document in (runtime, trainjob):
        spec = RESOURCES[document["kind"]]
        meta = fields("name", name=TEXT, labels=LABELS)
        whole = fields("metadata spec", apiVersion=TEXT, kind=TEXT, metadata=meta, spec=spec)
        jsonschema.validate(document, whole)
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "spec": {**document["spec"], "numNodes": 3}}, whole)
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (job["replicas"], container(job["template"]["spec"])["name"]) == (1, "node")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert trainjob["spec"]["trainer"]["args"] == container(shipped_job())["args"]
    # It names the first pod by the TrainJob, which a subdomain of the runtime's own would not do.
    assert "network" not in runtime["spec"]["template"]["spec"]


def test_trainjob_runs_the_same_job() -> None:
    """Its policies, its pods and the container, but for what the Trainer sets."""
    spec, job = manifests.job_spec(shipped_trainjob()), shipped_job()
    for minor in range(31, 38):
        document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}, "spec": spec}
        schemas.validate(document, MINORS[minor], strict=True)
    named = yaml.safe_load(yaml.dump(job).replace("containerName: agent", "containerName: node"))
    assert without(spec, "template") == without(named, "template")
    pods = [one["template"]["spec"] for one in (spec, job)]
    first, second = (without(pod, "containers", "affinity", "subdomain") for pod in pods)
    assert first == second
    first, second = (without(container(one), "name", "env", "resources", "ports") for one in (spec, job))
    assert first == second


def without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the mapping without these keys."""
    return {key: value for key, value in mapping.items() if key not in keys}


def test_pod_of_a_trainjob_needs_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a TrainJob without a trainer, whose pods get no PET_* variables, does not train three times."""
    monkeypatch.setattr(socket, "gethostname", lambda: "digits-node-0-1")
    here = environment.read_context(manifests.pod_environment(shipped_trainjob(), 1, "10.1.2.3"))
    assert (here.scheduler, here.name, here.job) == ("pet", "digits-node-0-1", "digits-node-0")
    assert (here.min_nodes, here.max_nodes, here.workers_per_node) == (2, 3, "1")
    assert here.candidates[2] == "digits-node-0-2.digits:29500"
    assert (here.address, here.problems) == ("10.1.2.3", ())
    runtime, trainjob = manifests.load_documents(manifests.TRAINJOB)
    del trainjob["spec"]["trainer"]
    alone = [manifests.render_trainjob(runtime, trainjob)]
    (problem,) = environment.read_context(manifests.pod_environment(alone, 1, "10.1.2.3")).problems
    assert "a TrainJob needs spec.trainer" in problem


@pytest.mark.parametrize(
    ("files", "job"),
    [(manifests.JOB, "elastic-resume-train"), (manifests.JOBSET, "elastic-resume-train-node-0")],
)
def test_every_variable_that_a_pod_reads_is_set(files: tuple[str, ...], job: str) -> None:
    """By the Job, by its controller, or by Kubernetes; and each variable of ours is one that exists."""
    env = manifests.pod_environment(manifests.load_documents(files), 2, "10.1.2.3")
    concepts = {k: set(v) for k, v in environment.KUBERNETES_VARIABLES.items() if k != "min_nodes"}
    assert [concept for concept, variables in concepts.items() if not variables & set(env)] == []
    read = set().union(*concepts.values())
    known = {getattr(constants, name) for name in dir(constants) if name.startswith("ENV_")}
    assert {name for name in env if name.startswith(constants.ENV_PREFIX)} <= read | known
    here = environment.read_context(env)
    assert here.problems == ()
    assert (here.name, here.job, here.node_order, here.address) == (f"{job}-2", job, 2, "10.1.2.3")
    assert (here.min_nodes, here.max_nodes, here.workers_per_node) == (2, 3, "1")
    assert here.candidates[0] == f"{job}-0.elastic-resume-train.ml.svc:29400"
    assert environment.read_termination_grace_s(env) == 120


def test_job_does_after_each_exit_code_what_the_guide_says() -> None:
    """Each row of docs/guides/kubernetes.md. An agent that is evicted may end with any code."""
    job = shipped_job()
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    rows = re.findall(r"^\| (\d+)[^|]*\|[^|]*\|([^|]*)\|$", page, re.MULTILINE)
    told = {int(code): words for code, words in rows}
    assert told.keys() >= {
        0,
        constants.EXIT_JOB_ERROR,
        constants.EXIT_USAGE,
        constants.EXIT_REQUEUE,
        137,
        143,
    }
    assert "the Job is done (`successPolicy`)" in told.pop(0)
    assert job["successPolicy"]["rules"] == [{"succeededCount": 1}]
    words = {
        "FailJob": "`FailJob`",
        "Ignore": "any number of times",
        "Count": r"counts against .*\(20\)|as 137",
    }
    for code, text in told.items():
        assert re.search(words[manifests.failure_action(job, code)], text), code
        assert manifests.failure_action(job, code, is_disrupted=True) == "Ignore"
    assert job["backoffLimitPerIndex"] == 20
    evicted, *others = job["podFailurePolicy"]["rules"]
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {rule["onExitCodes"]["containerName"] for rule in others} == {container(job)["name"]}


def test_the_pod_runs_as_the_user_that_the_image_makes() -> None:
    """A volume is writable for the group of the image's user, who is not root."""
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    context = shipped_job()["template"]["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == tuple(int(number) for number in user.groups())
    assert context["fsGroup"] == context["runAsGroup"]
    assert context["runAsNonRoot"] is True


def test_the_example_of_the_job_is_in_the_image() -> None:
    """And takes the arguments that the Job gives it."""
    agent = container(shipped_job())
    assert agent["command"] == ["tini", "--", "elastic-resume", "run"]
    script, *words = agent["args"]
    source = (ROOT / script).read_text()
    assert [word for word in words if f'"{word.partition("=")[0]}"' not in source] == []


# ---- SkyPilot ----------------------------------------------------------------------------------------


def test_task_of_skypilot_runs_without_flags() -> None:
    """Its run command is one of ours, and what it sets is read."""
    task = yaml.safe_load((DEPLOY / "skypilot" / "task.yaml").read_text())
    (line,) = task["run"].splitlines()
    words = line.split()
    assert words[:3] == ["exec", "elastic-resume", "run"]  # a shell in between would swallow SIGTERM
    args, given = config.parse_flags(torchelastic.build_parser(), words[3:], {})
    assert (ROOT / args.training_script).exists()
    assert given == set()
    # As SkyPilot's documentation of a job's environment has it, on the second machine.
    machines = "10.0.0.4\n10.0.0.2\n10.0.0.9"
    nodes = {"SKYPILOT_NODE_IPS": machines, "SKYPILOT_NODE_RANK": "1"}
    here = environment.read_context({**nodes, **task["envs"], "SKYPILOT_NUM_GPUS_PER_NODE": "1"})
    assert (here.name, here.min_nodes, here.max_nodes) == ("node1", 2, task["num_nodes"])
    assert here.workers_per_node == task["resources"]["accelerators"].partition(":")[2]
    assert here.problems == ()
    assert set(task["volumes"]) == {task["envs"][constants.ENV_CKPT_DIR]}
    assert set(task["secrets"]) == {constants.ENV_TOKEN}
    codes = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert codes == [constants.EXIT_REQUEUE, constants.EXIT_SIGNAL_BASE + signal.SIGTERM]


# ---- Slurm -------------------------------------------------------------------------------------------

STAND_IN = """#!/bin/bash
# bash writes line by line: without a lock the lines of two calls at the same time would mix.
{ flock 9; printf '%s\\n' "$@" '' >&9; } 9>> "$CALLS/$(basename "$0")"
case "$(basename "$0") $1" in
  "srun --overlap") ;;
  "srun "*) exit "$SRUN_EXIT" ;;
  # Slurm ends the batch script of a job that it requeues.
  "scontrol requeue") [[ $REQUEUE_EXIT -ne 0 ]] || kill -TERM "$PPID"; exit "$REQUEUE_EXIT" ;;
  "scontrol update") [[ ! -v UPDATE_FAILS_ONCE || -e $CALLS/failed ]] || { touch "$CALLS/failed"; exit 1; } ;;
  "scontrol show") echo "JobId=1 JobName=j $SHOWN" ;;
  "sinfo "*) printf '%s\n' $PARTITION ;;
esac
"""


@dataclass(frozen=True)
class Ended:
    """How the batch script ended, and each call of the stand-ins as a list of words."""

    code: int
    stderr: str
    srun: list[list[str]]
    scontrol: list[list[str]]

    @property
    def agents(self) -> list[str]:
        """The words with which the agents are started."""
        (words,) = (words for words in self.srun if words[0] != "--overlap")
        return words

    @property
    def requeues(self) -> list[list[str]]:
        """What Slurm was asked to queue again."""
        return [call for call in self.scontrol if call[0] == "requeue"]


def submit(tmp_path: Path, *words: str, srun_exit: int = 0, **variables: str) -> Ended:
    """Run a batch script in the environment that Slurm would give it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol", "sinfo"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path),
        "SRUN_EXIT": str(srun_exit),
        "REQUEUE_EXIT": "0",
        "REQUEUE_RETRY_S": "0",
        "WATCH_DELAY_S": "0",
        "SHOWN": "JobState=RUNNING Reason=None PreemptTime=None",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURMD_NODENAME": "n7",
        **variables,
    }
    command = ["bash", str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return Ended(done.returncode, done.stderr, calls(tmp_path / "srun"), calls(tmp_path / "scontrol"))


def calls(path: Path) -> list[list[str]]:
    """Read what a stand-in noted: words by line, calls divided by an empty line."""
    text = path.read_text() if path.exists() else ""
    return [call.split("\n") for call in text.split("\n\n") if call]


ELEMENT = {
    "SLURM_ARRAY_JOB_ID": "1234567",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_JOB_NUM_NODES": "1",
}


def test_sbatch_sees_the_options_that_a_flaky_cluster_needs() -> None:
    """They stand before the first command, where sbatch stops reading; bash reads the rest."""
    head = SCRIPT.read_text().split("\nset -uo")[0]
    options = set(re.findall(r"^#SBATCH (\S+)$", head, re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1", "--no-kill"} <= options


@pytest.mark.parametrize(("nodes", "watching"), [(1, 0), (2, 1), (3, 2), (64, 2)])
def test_agents_start_with_the_given_words_and_watch_the_batch_host(
    tmp_path: Path, nodes: int, watching: int
) -> None:
    """The end of one agent ends no other; a job of one node has nobody to watch it."""
    ended = submit(tmp_path, "train.py", "--lr", "0.1 0.2", SLURM_JOB_NUM_NODES=str(nodes))
    assert ended.code == 0
    words = ended.agents
    assert words[words.index("elastic-resume") + 1 :] == ["run", "train.py", "--lr", "0.1 0.2"]
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    watches = [set(words) for words in ended.srun if words[0] == "--overlap"]
    expected = {"--relative=1", f"--nodes={watching}", f"--ntasks={watching}", "--no-kill"}
    assert [expected <= watch for watch in watches] == [True] * (watching > 0)


def test_agents_get_the_cpus_that_sbatch_was_asked_for(tmp_path: Path) -> None:
    """The script passes the number to srun, which does not take it from sbatch, and has none of its own."""
    assert "#SBATCH --cpus-per" not in SCRIPT.read_text()
    assert "--cpus-per-task=64" in submit(tmp_path, "train.py", SLURM_CPUS_PER_TASK="64").agents


PREEMPTED = {"SHOWN": "JobState=RUNNING Reason=None PreemptTime=2026-11-21T00:00:00"}
CANCELLED = {"SHOWN": "JobState=COMPLETING Reason=None PreemptTime=None"}


@pytest.mark.parametrize(
    ("code", "variables", "ends_with", "requeued"),
    [
        # The job id of an element may be the whole array's: requeueing that takes the siblings along.
        (constants.EXIT_REQUEUE, ELEMENT, 0, ["1234567_2"]),
        (constants.EXIT_REQUEUE, {}, 0, ["1234567"]),
        (143, PREEMPTED, 0, ["1234567"]),
        # A job that is being cancelled would be brought back, also after its limit of restarts.
        (143, CANCELLED, 143, []),
        (constants.EXIT_REQUEUE, CANCELLED, constants.EXIT_REQUEUE, []),
        (143, PREEMPTED | {"SLURM_RESTART_COUNT": "100"}, 143, []),
        (constants.EXIT_REQUEUE, {"SLURM_RESTART_COUNT": "100"}, constants.EXIT_REQUEUE, []),
        # A job at fault would fail again, and a user's scancel (143) must not be undone.
        (constants.EXIT_JOB_ERROR, PREEMPTED, constants.EXIT_JOB_ERROR, []),
        *(
            (code, ELEMENT, code, [])
            for code in (0, constants.EXIT_JOB_ERROR, constants.EXIT_USAGE, 137, 143)
        ),
        # A controller that is away is asked six times.
        (constants.EXIT_REQUEUE, {"REQUEUE_EXIT": "1"}, constants.EXIT_REQUEUE, ["1234567"] * 6),
    ],
)
def test_script_requeues_a_job_that_asks_for_it_or_was_preempted(
    tmp_path: Path, code: int, variables: dict[str, str], ends_with: int, requeued: list[str]
) -> None:
    """No other end of a job, and no more than 100 times."""
    ended = submit(tmp_path, "train.py", srun_exit=code, **variables)
    assert (ended.code, ended.requeues) == (ends_with, [["requeue", job] for job in requeued])


OTHERS = "PARTITION"


@pytest.mark.parametrize(
    ("ages_min", "variables", "excluded"),
    [
        ({}, {}, []),
        ({"n2": 1}, {}, ["n2"]),
        ({"n1": 9, "n2": 5, "n3": 1}, {}, ["n3,n2"]),  # the newest two
        ({"n1": 9, "n2": 5, "n3": 1}, {"MAX_EXCLUDED": "3"}, ["n3,n2,n1"]),
        ({"n1": 2000, "n2": 1}, {}, ["n2"]),  # of a day
        ({"n1": 2000}, {}, [""]),
        ({"n2": 9}, {"EXCLUDE_MINUTES": "5"}, [""]),
        ({"n2": 1}, {"SHOWN": "JobState=RUNNING ExcNodeList=n[8-9] PreemptTime=None"}, ["n[8-9],n2"]),
        ({"n2": 1}, {"SHOWN": "JobState=RUNNING ExcNodeList=(null) PreemptTime=None"}, ["n2"]),
        ({"n2": 1}, {"UPDATE_FAILS_ONCE": "1"}, ["n2", "n2"]),
        ({"n2": 1}, {OTHERS: "n1 n2 n3"}, [""]),  # three nodes that the job needs
        ({"n2": 1}, {OTHERS: "n1 n2 n3 n4"}, ["n2"]),
    ],
)
def test_requeued_job_does_not_get_the_nodes_that_it_excluded(
    tmp_path: Path, ages_min: dict[str, int], variables: dict[str, str], excluded: list[str]
) -> None:
    """Bounded in number and time, beside the user's own list, and only where others are enough."""
    directory = tmp_path / ".elastic_resume" / "1234567.excluded"
    for node, age_min in ages_min.items():
        slurm.record_excluded_node(str(directory), node)
        then = time.time() - 60 * age_min
        os.utime(directory / node, (then, then))
    given = {OTHERS: "n1 n2 n3 n4 n5 n6", "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
    ended = submit(tmp_path, "train.py", srun_exit=constants.EXIT_REQUEUE, **given)
    assert ended.code == 0
    updates = [call for call in ended.scontrol if call[0] == "update"]
    assert updates == [["update", "JobId=1234567", f"ExcNodeList={nodes}"] for nodes in excluded]
    # The next time Slurm shows what the script has set; the user's own list stays what it was.
    if "n[8-9],n2" in excluded:
        os.utime(directory / "n2", (0, 0))
        shown = "JobState=RUNNING ExcNodeList=n[8-9],n2 PreemptTime=None"
        again = tmp_path / "again"
        again.mkdir()
        ended = submit(again, "train.py", srun_exit=constants.EXIT_REQUEUE, **{**given, "SHOWN": shown})
        assert ["update", "JobId=1234567", "ExcNodeList=n[8-9]"] in ended.scontrol


def test_finished_job_forgets_the_excluded_nodes(tmp_path: Path) -> None:
    """And a cluster that cannot be asked excludes none."""
    directory = tmp_path / ".elastic_resume" / "1234567.excluded"
    slurm.record_excluded_node(str(directory), "n2")
    submit(tmp_path, "train.py", SLURM_SUBMIT_DIR=str(tmp_path), PARTITION="")
    assert not directory.exists()


def test_first_script_of_the_guide_survives_a_lost_node() -> None:
    """It has the options by which train.sbatch does so in system/slurm."""
    guide = (ROOT / "docs" / "guides" / "slurm.md").read_text()
    script = guide.partition("```sh\n#!/bin/bash\n")[2].partition("```")[0]
    assert "#SBATCH --no-kill\n" in script
    assert "srun --no-kill --kill-on-bad-exit=0 --wait=0 " in script


def test_without_a_script_the_usage_is_told(tmp_path: Path) -> None:
    """Before anything is started."""
    ended = submit(tmp_path)
    assert (ended.code, ended.srun) == (constants.EXIT_USAGE, [])
    assert "usage: sbatch" in ended.stderr
