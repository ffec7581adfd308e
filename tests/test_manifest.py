"""What `elastic-resume manifest` prints and what ships under deploy/, as far as it takes no cluster."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate as schemas
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_validate.utils import all_versions

from elastic_resume import cli, contract
from elastic_resume.cluster import filling, kubernetes, kubernetes_rules, manifest, node
from tests.support.pods import expanded

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
# What deploy/kubernetes was printed with.
FLAGS = [
    *("--nodes", "2:3", "--image", "elastic-resume:0.1.0", "--name", "elastic-resume-train"),
    *("--memory", "3Gi", "--shm", "1Gi", "--disk", "4Gi"),
]
COMMAND = ["--", "examples/digits.py", "--epochs=200", "--step-delay=0.1"]
MINORS = [version for version in all_versions() if int(version.split(".")[1]) >= manifest.OLDEST_MINOR]
PAGE = ROOT / "docs" / "kubernetes.md"
Documents = list[dict[str, Any]]


def rendered(*flags: str, command: list[str] | None = None) -> str:
    """What the command line prints, for `FLAGS` and more."""
    words = ["manifest", "kubernetes", *FLAGS, *flags, *(command or COMMAND)]
    return manifest.render_kubernetes(cli._parser().parse_args(words))


@cache
def _loaded(*flags: str) -> Documents:
    return list(yaml.safe_load_all(rendered(*flags)))


def documents(*flags: str) -> Documents:
    """The documents of it, to be changed."""
    return copy.deepcopy(_loaded(*flags))


def job(*flags: str) -> dict[str, Any]:
    """The Job of it."""
    return next(one for one in documents(*flags) if one["kind"] == "Job")


def agent(of: dict[str, Any]) -> dict[str, Any]:
    """The container of a Job."""
    found: dict[str, Any] = of["spec"]["template"]["spec"]["containers"][0]
    return found


def check(found: Documents, version: str) -> None:
    """Hold what a schema is published for against it; a JobSet's Job is one."""
    for one in found:
        checked = one
        if one["kind"] == "JobSet":
            inside = one["spec"]["replicatedJobs"][0]["template"]
            checked = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inside"}, **inside}
        schemas.validate(checked, version, strict=True)


# ---- as it ships ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "flags"), [("service.yaml", ()), ("job.yaml", ()), ("jobset.yaml", ("--kind", "jobset"))]
)
def test_what_ships_is_what_the_command_prints(file: str, flags: tuple[str, ...]) -> None:
    """So deploy/ never falls behind the templates."""
    parts = rendered(*flags).split("\n---\n")
    found = {f"{yaml.safe_load(part)['kind'].lower()}.yaml": part.rstrip("\n") + "\n" for part in parts}
    assert (DEPLOY / "kubernetes" / file).read_text() == found[file]


def test_the_kustomization_names_what_is_there() -> None:
    """A Job and its Service, in that namespace and image that the user says; the JobSet is the other way."""
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    others = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert set(kustomization["resources"]) == others - {"kustomization.yaml", "jobset.yaml"}
    assert set(kustomization) == {"apiVersion", "kind", "resources", "images"}
    image = kustomization["images"][0]
    assert set(image) <= {"name", "newName", "newTag", "digest"}
    assert agent(job())["image"] == f"{image['name']}:{image['newTag']}"


@pytest.mark.parametrize("version", MINORS)
def test_the_published_schemas_take_it(version: str) -> None:
    """Each minor version from the first that has all the fields; before 1.31 there is no successPolicy."""
    asked = ("--kubernetes", ".".join(version.split(".")[:2]))
    for flags in (
        (),
        ("--claim", "shared", "--gpus", "8", "--service-account", "asker"),
        ("--kind", "jobset"),
    ):
        check(documents(*asked, *flags), version)


def test_the_schemas_that_are_there_begin_where_they_should() -> None:
    """Else the test above would check nothing."""
    assert {int(version.split(".")[1]) for version in MINORS} >= set(range(manifest.OLDEST_MINOR, 38))


@pytest.mark.parametrize("flags", [(), ("--kind", "jobset"), ("--claim", "shared"), ("--kubernetes", "1.29")])
def test_our_rules_take_it(flags: tuple[str, ...]) -> None:
    """What the command prints breaks none."""
    assert kubernetes_rules.complaints(documents(*flags)) == []


# ---- mistakes that schemas let pass --------------------------------------------------------------------


def change(path: str, value: Any) -> Callable[[Documents], None]:
    """A change of one field; its path begins with the kind of the document."""

    def make(found: Documents) -> None:
        kind, *keys = path.split("/")
        place: Any = next(one for one in found if one["kind"] == kind)
        for key in keys[:-1]:
            place = place[int(key) if key.isdigit() else key]
        last: Any = int(keys[-1]) if keys[-1].isdigit() else keys[-1]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return make


POD = "Job/spec/template/spec"
RULES = "Job/spec/podFailurePolicy/rules"
MISTAKES = {
    # Those that Kubernetes refuses at once, or that keep every pod from starting.
    "restart policy beside a failure policy": (f"{POD}/restartPolicy", "OnFailure", "restartPolicy: Never"),
    "misspelt completion mode": ("Job/spec/completionMode", "Indexd", "Indexd"),
    "name that is no DNS label": ("Job/metadata/name", "ER_1", "ER_1"),
    "size that is none": (f"{POD}/volumes/0/emptyDir/sizeLimit", "lots", "lots"),
    "0 among the codes of failures": (f"{RULES}/1/onExitCodes/values", [0, 75], "0 is no failure"),
    "name too long with its index": ("Job/metadata/name", "x" * 62, "64 characters of 63"),
    "mount of no volume": (f"{POD}/containers/0/volumeMounts/0/name", "chekpoints", "no such volume"),
    # More of them.
    "thousandths of a byte": (f"{POD}/containers/0/resources/limits/memory", "512m", "thousandths"),
    "decimal comma unit": (f"{POD}/containers/0/resources/limits/memory", "3GB", "3GB"),
    "codes out of order": (f"{RULES}/1/onExitCodes/values", [143, 75], "in order"),
    "a code that no process has": (f"{RULES}/1/onExitCodes/values", [75, 271], "from 0 to 255"),
    "codes of another container": (f"{RULES}/1/onExitCodes/containerName", "main", "no container 'main'"),
    "misspelt action": (f"{RULES}/2/action", "failJob", "failJob"),
    "misspelt operator": (f"{RULES}/1/onExitCodes/operator", "in", "'in'"),
    "two pods of an index at once": (
        "Job/spec/podReplacementPolicy",
        "TerminatingOrFailed",
        "must be Failed",
    ),
    "unknown field of the pod": (
        f"{POD}/containers/0/env/8/valueFrom/fieldRef/fieldPath",
        "status.podIp",
        "nothing that a pod can be told",
    ),
    "an argument that nobody fills in": (f"{POD}/containers/0/args/0", "$(POD_ID)", "$(POD_ID)"),
    "memory of no kind": (f"{POD}/volumes/1/emptyDir/medium", "memory", "'memory'"),
    "a volume that fills all memory": (f"{POD}/volumes/1/emptyDir/sizeLimit", "3Gi", "whole limit of memory"),
    "more retries than indexes": ("Job/spec/maxFailedIndexes", 4, "more than the 3 completions"),
    "retries without a limit for each index": ("Job/spec/backoffLimitPerIndex", None, "backoffLimitPerIndex"),
    "success of more than there are": ("Job/spec/successPolicy/rules/0/succeededCount", 4, "more than the 3"),
    "other number of nodes": (f"{POD}/containers/0/env/0/value", "2:4", "3 completions"),
    "fewer pods than nodes": ("Job/spec/parallelism", 2, "must be completions"),
    "other grace": (f"{POD}/terminationGracePeriodSeconds", 30, "terminationGracePeriodSeconds"),
    "other subdomain": (f"{POD}/subdomain", "train", "Service's name"),
    "address in front of the pods": ("Service/spec/clusterIP", "10.96.0.7", "headless"),
    "names only of ready pods": ("Service/spec/publishNotReadyAddresses", False, "before they are ready"),
    "selector of others": ("Service/spec/selector", {"app": "other"}, "selects none"),
    "port of nobody": ("Service/spec/ports/0/targetPort", "rdzv", "no container has a port"),
    "port name too long": (f"{POD}/containers/0/ports/0/name", "rendezvous-of-all", "15 characters"),
    "service that begins with a digit": ("Service/metadata/name", "3d", "DNS-1035"),
    "number of nodes that is none": (f"{POD}/containers/0/env/0/value", "2-3", "neither N nor MIN:MAX"),
    "no number of nodes": (f"{POD}/containers/0/env/0", None, "a job of its own"),
    "SIGTERM is the job's fault": (f"{RULES}/2/onExitCodes/values", [1, 2, 143], "[143]: with these"),
    "host name of one's own": (f"{POD}/hostname", "trainer", "JOB-INDEX"),
    "64 MB of shared memory": (f"{POD}/containers/0/volumeMounts/1", None, "DataLoader"),
    "checkpoints in the container": (
        f"{POD}/containers/0/env/5/value",
        "/elsewhere",
        "/elsewhere is no volume",
    ),
    "other limit of the disk": (f"{POD}/containers/0/env/6/value", "5Gi", "sizeLimit is 4Gi"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_that_schemas_let_pass_are_found(name: str) -> None:
    """Each passes the strict schema of the newest version, and breaks a rule of ours."""
    path, value, told = MISTAKES[name]
    found = documents()
    change(path, value)(found)
    check(found, MINORS[-1])
    assert told in " ".join(kubernetes_rules.complaints(found))


def test_a_file_that_was_edited_can_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each mistake; nothing for what ships."""
    assert [cli.main(["manifest", "check", str(path)]) for path in (DEPLOY / "kubernetes").iterdir()] == [
        0
    ] * 4
    found = documents()
    for name in ("other grace", "fewer pods than nodes"):
        change(*MISTAKES[name][:2])(found)
    edited = tmp_path / "edited.yaml"
    edited.write_text(yaml.safe_dump_all(found))
    capsys.readouterr()
    assert cli.main(["manifest", "check", str(edited)]) == contract.EXIT_AT_FAULT
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_each_job_of_a_file_is_checked_with_its_own_service() -> None:
    """Also the first of two; and a number where a text must be is found without a schema."""
    first, second = documents(), documents("--name", "second")
    assert kubernetes_rules.complaints([*first, *second]) == []
    change("Job/spec/parallelism", 2)(first)
    change("Service/spec/clusterIP", "10.96.0.7")(second)
    wrong = kubernetes_rules.complaints([*first, *second])
    assert [line.split(": ")[:2] for line in wrong] == [
        ["elastic-resume-train", "spec.parallelism"],
        ["second", "Service.spec.clusterIP"],
    ]
    third = documents()
    change(f"{POD}/containers/0/env/6/value", 4294967296)(third)
    assert "4294967296 is no text" in " ".join(kubernetes_rules.complaints(third))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kind: Jobb",
        "kind: Job\na: &a [*a]",
        "kind: Job\nmetadata: {name: a}\nspec: {template: {spec: {containers: []}}}",
        "kind: Job",
        "kind: Job\nspec: 3",
        "[1, 2]",
        "a: b: c",
        "\0",
        "kind: Job\nspec: {template: []}",
        "[" * 4000,
    ],
)
def test_what_is_no_manifest_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """And no traceback."""
    (tmp_path / "odd.yaml").write_text(text)
    assert cli.main(["manifest", "check", str(tmp_path / "odd.yaml")]) == contract.EXIT_AT_FAULT
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_a_schema_finds_is_left_to_it() -> None:
    """An unknown field, and a wrong type: the test of the mistakes would not notice an idle schema."""
    for path, value in (("Job/spec/completion", 3), ("Job/spec/completions", "three")):
        found = documents()
        change(path, value)(found)
        with pytest.raises(schemas.ValidationError):
            check(found, MINORS[-1])


# ---- what it says --------------------------------------------------------------------------------------


def test_the_entrypoint_has_no_flags() -> None:
    """All that a pod has to know is in its environment."""
    assert agent(job())["command"] == ["elastic-resume", "run"]
    assert agent(job())["args"] == COMMAND[1:]


def test_every_variable_that_a_pod_reads_is_set() -> None:
    """By the manifest, by the Job controller, or by Kubernetes; and a pod reads what the manifest sets."""
    env = {one["name"]: one.get("value", "") for one in agent(job())["env"]}
    given = {
        "JOB_COMPLETION_INDEX": "2",
        "HOSTNAME": "elastic-resume-train-2",
        "KUBERNETES_SERVICE_HOST": "x",
    }
    read = {variable for variables in node.KUBERNETES.values() for variable in variables}
    assert read <= set(env) | set(given)
    filled_in = {"ELASTIC_RESUME_JOB": "elastic-resume-train", "POD_NAMESPACE": "ml", "POD_IP": "10.1.2.3"}
    here = node.read({**env, **given, **filled_in})
    assert here.problems == ()
    assert (here.name, here.job, here.order) == ("elastic-resume-train-2", "elastic-resume-train", 2)
    assert (here.min_nodes, here.nodes, here.workers) == (2, 3, 1)
    assert here.candidates[0] == "elastic-resume-train-0.elastic-resume-train.ml.svc:29400"
    assert kubernetes.termination_grace_s(env) == manifest.DEFAULT_GRACE_S


def test_exit_codes_mean_what_the_contract_says() -> None:
    """Eviction is looked at first: an agent that is evicted may end with any code."""
    evicted, again, fault = job()["spec"]["podFailurePolicy"]["rules"]
    assert (evicted["action"], again["action"], fault["action"]) == ("Ignore", "Ignore", "FailJob")
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert again["onExitCodes"]["values"] == [contract.EXIT_REQUEUE, contract.EXIT_SIGNALLED + 15]
    assert fault["onExitCodes"]["values"] == [contract.EXIT_AT_FAULT, contract.EXIT_USAGE]


def test_before_1_31_a_node_that_comes_back_too_late_does_not_try_for_ever() -> None:
    """There is no successPolicy, so 75 counts against the limit of the index."""
    old = job("--kubernetes", "1.30.4")["spec"]
    assert "successPolicy" not in old
    assert old["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [contract.EXIT_SIGNALLED + 15]
    assert job()["spec"]["successPolicy"]["rules"] == [{"succeededCount": 1}]


def test_checkpoints_lie_on_the_nodes_disk_or_on_a_claim() -> None:
    """And /dev/shm is memory of a stated size, within the pod's."""
    assert agent(job())["env"][5] == {"name": contract.ENV_CKPT_DIR, "value": "/checkpoints"}
    volumes = {one["name"]: one for one in job()["spec"]["template"]["spec"]["volumes"]}
    assert volumes["checkpoints"]["emptyDir"] == {"sizeLimit": "4Gi"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    on_claim = job("--claim", "shared")
    assert on_claim["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"] == {
        "claimName": "shared"
    }
    assert "ephemeral-storage" not in agent(on_claim)["resources"]["limits"]


def test_the_pod_runs_as_the_user_that_the_image_makes() -> None:
    """A volume is writable for the group of the image's user, who is not root."""
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    context = job()["spec"]["template"]["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == tuple(int(number) for number in user.groups())
    assert context["fsGroup"] == context["runAsGroup"]
    assert context["runAsNonRoot"] is True


def test_the_example_of_the_job_is_in_the_image() -> None:
    """And takes the arguments that the Job gives it."""
    script, *words = COMMAND[1:]
    source = (ROOT / script).read_text()
    assert [word for word in words if f'"{word.partition("=")[0]}"' not in source] == []


def test_values_that_yaml_takes_for_numbers_stay_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """An API server refuses a number where a text must be, and it reads 1e10 as one where PyYAML does not."""
    for flags in (("--disk", "10000000000", "--image", "1.5"), ("--disk", "1e10", "--claim", "123")):
        text = rendered(*flags, "--service-account", "null")
        (found,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Job")
        check([found], MINORS[-1])
        assert found["spec"]["template"]["spec"]["serviceAccountName"] == "null"
        assert '1e10"' in text or "1e10" not in text
    assert cli.main(["manifest", "kubernetes", *FLAGS, "--", "train.py", "\udcff"]) == contract.EXIT_AT_FAULT
    assert "is no text" in capsys.readouterr().err


def test_words_of_the_script_reach_it_as_they_are() -> None:
    """Kubernetes fills in $(NAME) and makes one dollar of two; YAML has its own ideas of yes and 1:30."""
    words = [
        "train.py",
        "--tag",
        "$(HOME)",
        "$$5",
        "yes",
        "1:30",
        'a "b"',
        "ü\n#",
        "é\u2028\x85x\x7f\ufffe😀",
    ]
    found = agent(list(yaml.safe_load_all(rendered(command=["--", *words])))[1])["args"]
    assert [expanded(word, {"HOME": "/root"}) for word in found] == words


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nodes", "4:3"], "--nodes is '4:3'"),
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "three"], "--nodes"),
        (["--name", "ER_1"], "--name"),
        (["--name", "x" * 62], "Shorten it by 1"),
        (["--kind", "jobset", "--name", "x" * 60], "Shorten it by 6"),
        (["--image", "my image"], "--image"),
        (["--image", "img:"], "--image"),
        (["--name", "yes"], "--name is 'yes', which YAML"),
        (["--memory", "lots"], "--memory"),
        (["--memory", "512m"], "thousandths"),
        (["--shm", "3Gi"], "part of the memory"),
        (["--shm", "32Mi"], "64Mi"),
        (["--disk", "0"], "--disk"),
        (["--grace", "10"], "too short for saving"),
        (["--grace", "soon"], "--grace"),
        (["--gpus", "-1"], "--gpus"),
        (["--claim", "My_Claim"], "--claim"),
        (["--kubernetes", "1.28"], "--kubernetes"),
        (["--replicas", "3"], "unknown flag --replicas"),
    ],
)
def test_what_could_not_run_is_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the flag, and nothing is printed for `kubectl` to take."""
    code = cli.main(["manifest", "kubernetes", *FLAGS, *flags, *COMMAND])
    out, err = capsys.readouterr()
    assert (code, out) == (contract.EXIT_AT_FAULT, "")
    assert told in err


def test_a_job_is_called_as_its_script() -> None:
    """Unless it is given a name."""
    words = ["manifest", "kubernetes", "--nodes", "2", "--image", "i", "--", "src/3_Train_me.py"]
    text = manifest.render_kubernetes(cli._parser().parse_args(words))
    assert [one["metadata"]["name"] for one in yaml.safe_load_all(text)] == ["job-3-train-me"] * 2


def test_what_follows_the_script_is_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """With and without the two dashes; its flags may have the names of ours."""
    for dashes in ([], ["--"]):
        found = agent(list(yaml.safe_load_all(rendered(command=[*dashes, "a.py", "--name", "x", "--"])))[1])
        assert found["args"] == ["a.py", "--name", "x", "--"]
    words = ["manifest", "kubernetes", "--nodes", "2", "--image", "i", "--", "--nproc-per-node", "2", "b.py"]
    assert "name: b\n" in manifest.render_kubernetes(cli._parser().parse_args(words)).replace(" #", "\n#")
    assert cli.main(["manifest", "slurm", "--nodes", "2"]) == contract.EXIT_AT_FAULT
    assert "script is missing" in capsys.readouterr().err


def test_the_commands_of_the_docs_print_manifests() -> None:
    """Each `elastic-resume manifest` in a block of docs/kubernetes.md, as it stands there."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [
        line for block in blocks for line in block.splitlines() if line.startswith("elastic-resume manifest")
    ]
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])[1:]
        assert manifest.render_kubernetes(cli._parser().parse_args(words))


def test_the_account_of_the_docs_is_one() -> None:
    """Role, account and binding in docs/kubernetes.md name each other, and the schemas take them."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    account, role, binding = yaml.safe_load_all(block)
    for one in (account, role, binding):
        schemas.validate(one, MINORS[0], strict=True)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    pod = job("--service-account", "asks-for-pods")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is True


# ---- templates -----------------------------------------------------------------------------------------


def test_a_template_without_a_value_is_an_error() -> None:
    """Never an empty place."""
    with pytest.raises(KeyError):
        filling.fill("a: {{b}}\n", {})


@given(st.text(alphabet="ab{}$()#^/\n ", max_size=40))
def test_what_is_no_marker_is_left_alone(text: str) -> None:
    """Shells and Kubernetes have braces of their own."""
    if "{{" not in text:
        assert filling.fill(text, {}) == text
