"""What ships under deploy/, as far as it can be checked without a cluster.

The schemas of Kubernetes let pass a wrong name, a policy that contradicts the restart policy, or an exit
code that means something else, so the rules here are our own. The Slurm script runs for real, with stand-ins
for `srun` and `scontrol` that note how they were called.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from elastic_resume import config, contract

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SBATCH = DEPLOY / "slurm" / "train.sbatch"
DNS_1123 = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
UNITS = {"Mi": 2**20, "Gi": 2**30}


def manifest(name: str) -> dict[str, Any]:
    """One document of deploy/kubernetes."""
    parsed = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())
    assert isinstance(parsed, dict)
    return parsed


def flags(words: list[str]) -> argparse.Namespace:
    """What `elastic-resume run` makes of these words; an unknown flag ends the test."""
    parser = get_args_parser()
    config.add_flags(parser)
    return parser.parse_args(words)


SERVICE = manifest("service.yaml")
JOB = manifest("job.yaml")
POD = JOB["spec"]["template"]["spec"]
AGENT = POD["containers"][0]


def nodes() -> tuple[int, int]:
    """Least and most nodes, as the agents are told."""
    least, _, most = flags(AGENT["args"]).nnodes.partition(":")
    return int(least), int(most)


# ---- Kubernetes --------------------------------------------------------------------------------------


def test_names_are_dns_labels() -> None:
    """A pod's host name is JOB-INDEX: that must fit too."""
    names = [
        SERVICE["metadata"]["name"],
        JOB["metadata"]["name"],
        f"{JOB['metadata']['name']}-{JOB['spec']['completions'] - 1}",
        POD["subdomain"],
        *(container["name"] for container in POD["containers"]),
        *(volume["name"] for volume in POD["volumes"]),
        *(port["name"] for port in SERVICE["spec"]["ports"]),
    ]
    assert [name for name in names if not DNS_1123.fullmatch(name)] == []


def test_port_names_are_short_enough() -> None:
    """A port's name has 15 characters at most."""
    ports = [*SERVICE["spec"]["ports"], *AGENT["ports"]]
    assert all(len(port["name"]) <= 15 for port in ports)


def test_the_service_gives_names_to_the_jobs_pods_before_they_are_ready() -> None:
    """Headless, selecting the pods' labels, under the name that the pods use as subdomain."""
    labels = JOB["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["publishNotReadyAddresses"] is True
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    assert POD["subdomain"] == SERVICE["metadata"]["name"]


def test_the_rendezvous_is_at_the_first_pods_on_the_services_port() -> None:
    """Job, Service, endpoints and container agree on names and port."""
    for index, endpoint in enumerate(flags(AGENT["args"]).rdzv_endpoint.split(",")):
        host, _, port = endpoint.rpartition(":")
        pod, service, namespace, rest = host.split(".", 3)
        assert pod == f"{JOB['metadata']['name']}-{index}"
        assert index < JOB["spec"]["completions"]
        assert service == SERVICE["metadata"]["name"]
        assert (namespace, rest) == ("$(POD_NAMESPACE)", "svc.cluster.local")
        assert {int(port)} == {SERVICE["spec"]["ports"][0]["port"], AGENT["ports"][0]["containerPort"]}
    assert SERVICE["spec"]["ports"][0]["targetPort"] == AGENT["ports"][0]["name"]


def test_every_variable_in_the_arguments_is_there() -> None:
    """Kubernetes leaves an unknown $(NAME) as it stands and says nothing."""
    used = set(re.findall(r"\$\(([A-Z_]+)\)", " ".join(AGENT["args"])))
    assert used == {variable["name"] for variable in AGENT["env"]} | {"JOB_COMPLETION_INDEX"}


def test_a_replaced_pod_keeps_its_node_name() -> None:
    """The name comes from the index, not from the pod's own random one."""
    name = flags(AGENT["args"]).node_name
    assert name == f"{JOB['metadata']['name']}-$(JOB_COMPLETION_INDEX)"
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert JOB["spec"]["podReplacementPolicy"] == "Failed"


def test_all_nodes_start_and_as_many_may_fail_as_training_can_do_without() -> None:
    """--nnodes, completions, parallelism and maxFailedIndexes say the same."""
    least, most = nodes()
    spec = JOB["spec"]
    assert spec["completions"] == spec["parallelism"] == most
    assert spec["maxFailedIndexes"] == most - least
    assert spec["backoffLimitPerIndex"] > 0
    assert "backoffLimit" not in spec


def test_exit_codes_mean_what_the_contract_says() -> None:
    """Eviction is looked at first: an agent that is evicted may end with any code."""
    evicted, again, fault = JOB["spec"]["podFailurePolicy"]["rules"]
    assert (evicted["action"], again["action"], fault["action"]) == ("Ignore", "Ignore", "FailJob")
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert again["onExitCodes"]["values"] == [contract.EXIT_REQUEUE, contract.EXIT_SIGNALLED + 15]
    assert fault["onExitCodes"]["values"] == [contract.EXIT_AT_FAULT, contract.EXIT_USAGE]


def test_the_failure_policy_is_one_that_kubernetes_accepts() -> None:
    """It refuses: restartPolicy other than Never, unsorted codes, 0 with In, an unknown container."""
    assert POD["restartPolicy"] == "Never"
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None:
            assert codes["operator"] == "In"
            assert codes["values"] == sorted(set(codes["values"]))
            assert 0 not in codes["values"]
            assert codes["containerName"] == AGENT["name"]


def test_a_finished_training_does_not_wait_for_a_node_that_comes_back_late() -> None:
    """One agent that ends with 0 ends the Job: it does so only when the training is done."""
    assert JOB["spec"]["successPolicy"]["rules"] == [{"succeededCount": 1}]


def test_checkpoints_and_shared_memory_are_mounted() -> None:
    """The directory of --ckpt-dir is the node's disk; /dev/shm is memory of a stated size."""
    mounts = {mount["mountPath"]: mount["name"] for mount in AGENT["volumeMounts"]}
    volumes = {volume["name"]: volume["emptyDir"] for volume in POD["volumes"]}
    assert "medium" not in volumes[mounts[flags(AGENT["args"]).ckpt_dir]]
    assert volumes[mounts["/dev/shm"]]["medium"] == "Memory"  # noqa: S108  a mount point
    assert set(mounts.values()) == set(volumes)


def test_sizes_are_quantities_and_volumes_fit_their_limits() -> None:
    """What the volumes may hold counts against the pod's memory and ephemeral storage."""
    sizes = {volume["name"]: volume["emptyDir"]["sizeLimit"] for volume in POD["volumes"]}
    limits = AGENT["resources"]["limits"]
    quantities = [*sizes.values(), *limits.values(), *AGENT["resources"]["requests"].values()]
    assert [quantity for quantity in quantities if not QUANTITY.fullmatch(quantity)] == []
    assert size_bytes(sizes["shm"]) < size_bytes(limits["memory"])
    assert size_bytes(sizes["checkpoints"]) < size_bytes(limits["ephemeral-storage"])


def size_bytes(quantity: str) -> int:
    """A whole quantity in Mi or Gi."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_the_pod_runs_as_the_user_that_the_image_makes() -> None:
    """A volume is writable for the group of the image's user, who is not root."""
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    context = POD["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == tuple(int(number) for number in user.groups())
    assert context["fsGroup"] == context["runAsGroup"]
    assert context["runAsNonRoot"] is True


def test_the_kustomization_names_what_is_there() -> None:
    """Its resources are all the other files, its image the Job's."""
    kustomization = manifest("kustomization.yaml")
    others = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == others
    image = kustomization["images"][0]
    assert AGENT["image"] == f"{image['name']}:{image['newTag']}"


# ---- the image ---------------------------------------------------------------------------------------


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    """Every COPY from the source tree; the .dockerignore lets in just these."""
    text = (DEPLOY / "Dockerfile").read_text()
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    sources = {word for words in copies if not words[0].startswith("--from") for word in words}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == sources


def test_the_agent_is_process_1_of_the_container() -> None:
    """A shell in its place would swallow SIGTERM."""
    assert 'ENTRYPOINT ["elastic-resume", "run"]' in (DEPLOY / "Dockerfile").read_text()


def test_the_example_of_the_job_is_in_the_image() -> None:
    """And takes the arguments that the Job gives it."""
    args = flags(AGENT["args"])
    script = ROOT / args.training_script
    assert script.is_file()
    source = script.read_text()
    names = [word.partition("=")[0] for word in args.training_script_args]
    assert [name for name in names if f'"{name}"' not in source] == []


# ---- Slurm -------------------------------------------------------------------------------------------

STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" '' >> "$CALLS/$(basename "$0")"
case "$(basename "$0") $1" in
  "srun "*) exit "$SRUN_EXIT" ;;
  "scontrol show") printf '%s\\n' $NODES ;;
  "scontrol requeue") exit "$REQUEUE_EXIT" ;;
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
    def agent(self) -> argparse.Namespace:
        """The flags of `elastic-resume run`."""
        (words,) = self.srun
        return flags(words[words.index("run") + 1 :])


def submit(tmp_path: Path, *words: str, srun_exit: int = 0, requeue_exit: int = 0, **variables: str) -> Ended:
    """Run the batch script in the environment that Slurm would give it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "USER": "ada",
        "CALLS": str(tmp_path),
        "NODES": "n7 n8 n9",
        "SRUN_EXIT": str(srun_exit),
        "REQUEUE_EXIT": str(requeue_exit),
        "REQUEUE_RETRY_S": "0",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "n[7-9]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "4",
        **variables,
    }
    command = ["bash", str(SBATCH), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return Ended(done.returncode, done.stderr, calls(tmp_path / "srun"), calls(tmp_path / "scontrol"))


def calls(path: Path) -> list[list[str]]:
    """Read what a stand-in noted: words by line, calls divided by an empty line."""
    text = path.read_text() if path.exists() else ""
    return [call.split("\n") for call in text.split("\n\n") if call]


def test_bash_reads_the_batch_script() -> None:
    """`bash -n`: no syntax error in a branch that is rarely taken."""
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=60)


def test_sbatch_sees_the_options_that_a_flaky_cluster_needs() -> None:
    """They stand before the first command, where sbatch stops reading."""
    head = SBATCH.read_text().split("\nset -euo")[0]
    options = set(re.findall(r"^#SBATCH (\S+)$", head, re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--no-kill", "--ntasks-per-node=1"} <= options


def test_srun_starts_one_agent_per_node_that_meet_at_the_first_ones(tmp_path: Path) -> None:
    """Endpoints from the node list, port from the job id, the script and its arguments unchanged."""
    ended = submit(tmp_path, "train.py", "--lr", "0.1 0.2")
    assert ended.code == 0
    words = ended.srun[0]
    assert {"--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    agent = ended.agent
    assert agent.nnodes == "1:3"
    assert agent.rdzv_endpoint == "n7:24567,n8:24567,n9:24567"
    assert agent.rdzv_id == "slurm-1234567"
    assert agent.node_name is None
    assert Path(agent.ckpt_dir).is_absolute()
    assert (agent.training_script, agent.training_script_args) == ("train.py", ["--lr", "0.1 0.2"])


def test_an_array_element_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Its job id may be the whole array's: requeueing that takes the siblings along."""
    ended = submit(
        tmp_path,
        "train.py",
        srun_exit=contract.EXIT_REQUEUE,
        SLURM_ARRAY_JOB_ID="1234567",
        SLURM_ARRAY_TASK_ID="2",
    )
    assert ended.agent.rdzv_id == "slurm-1234567_2"
    assert ended.scontrol[-1] == ["requeue", "1234567_2"]


@pytest.mark.parametrize("code", [0, contract.EXIT_AT_FAULT, contract.EXIT_USAGE, 137, 143])
def test_only_the_code_that_asks_for_it_requeues(tmp_path: Path, code: int) -> None:
    """A job at fault would fail again, and a user's scancel (143) must not be undone."""
    ended = submit(tmp_path, "train.py", srun_exit=code)
    assert ended.code == code
    assert [call[0] for call in ended.scontrol] == ["show"]


def test_requeueing_has_an_end(tmp_path: Path) -> None:
    """The first life has no SLURM_RESTART_COUNT; the last has MAX_REQUEUES."""
    ended = submit(
        tmp_path, "train.py", srun_exit=contract.EXIT_REQUEUE, SLURM_RESTART_COUNT="3", MAX_REQUEUES="3"
    )
    assert ended.code == contract.EXIT_REQUEUE
    assert [call[0] for call in ended.scontrol] == ["show"]
    assert "not again" in ended.stderr


def test_a_controller_that_is_away_is_asked_five_times(tmp_path: Path) -> None:
    """Then the job ends with the code that says what to do, and a line that says it in words."""
    ended = submit(tmp_path, "train.py", srun_exit=contract.EXIT_REQUEUE, requeue_exit=1)
    assert ended.code == contract.EXIT_REQUEUE
    assert [call[0] for call in ended.scontrol] == ["show"] + ["requeue"] * 5
    assert "requeue it by hand" in ended.stderr


def test_without_a_node_list_no_agent_starts(tmp_path: Path) -> None:
    """On localhost each node would train alone."""
    ended = submit(tmp_path, "train.py", NODES="")
    assert (ended.code, ended.srun) == (1, [])
    assert "n[7-9]" in ended.stderr


def test_a_long_node_list_is_read_to_its_end(tmp_path: Path) -> None:
    """`scontrol | head -n 1` dies of SIGPIPE now and then, and with it the job, under pipefail."""
    ended = submit(tmp_path, "train.py", NODES=" ".join(f"node{number:05}" for number in range(9_000)))
    assert (ended.code, ended.agent.rdzv_endpoint.partition(",")[0]) == (0, "node00000:24567")


def test_without_a_script_the_usage_is_told(tmp_path: Path) -> None:
    """Before anything is started."""
    ended = submit(tmp_path)
    assert (ended.code, ended.srun) == (contract.EXIT_USAGE, [])
