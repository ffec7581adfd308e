"""The Job of deploy/kubernetes, edited as people edit their copies of it."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
NAME = "elastic-resume-train"
JOB = ("service.yaml", "job.yaml")
JOBSET = ("jobset.yaml",)


def load_documents(files: tuple[str, ...] = JOB, name: str = NAME) -> list[dict[str, Any]]:
    """Load files of deploy/kubernetes, with another name for the job."""
    return [yaml.safe_load((KUBERNETES / file).read_text().replace(NAME, name)) for file in files]


def job_spec(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the Job's spec, which a JobSet has inside."""
    spec: dict[str, Any] = documents[-1]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def adapt_to_kubernetes_1_29(job: dict[str, Any]) -> None:
    """Edit a Job's spec as docs/guides/kubernetes.md says for Kubernetes 1.29 and 1.30."""
    del job["successPolicy"]
    job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"].remove(75)


def render_manifest(
    nodes: str = "2:3",
    *,
    args: tuple[str, ...] = ("train.py",),
    files: tuple[str, ...] = JOB,
    memory: str = "512Mi",
    shm: str = "128Mi",
    disk: str = "30Mi",
    grace_s: int = 120,
    claim: str = "",
) -> str:
    """Return the YAML of a job called train, with these values as docs/guides/kubernetes.md says."""
    loaded = load_documents(files, "train")
    job = job_spec(loaded)
    least, most = map(int, nodes.split(":"))
    job.update(completions=most, parallelism=most, maxFailedIndexes=most - least)
    pod = job["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = grace_s
    container = pod["containers"][0]
    container["args"] = list(args)
    container["resources"]["requests"]["memory"] = container["resources"]["limits"]["memory"] = memory
    values = {
        "ELASTIC_RESUME_NODES": nodes,
        "ELASTIC_RESUME_TERMINATION_GRACE_S": str(grace_s),
        "ELASTIC_RESUME_CKPT_LIMIT": disk,
    }
    for variable in container["env"]:
        variable.update({"value": values[variable["name"]]} if variable["name"] in values else {})
    checkpoints, shared = pod["volumes"]
    shared["emptyDir"]["sizeLimit"] = shm
    checkpoints["emptyDir"]["sizeLimit"] = disk
    if claim:
        pod["volumes"][0] = {"name": checkpoints["name"], "persistentVolumeClaim": {"claimName": claim}}
        container["env"] = [one for one in container["env"] if one["name"] != "ELASTIC_RESUME_CKPT_LIMIT"]
    return yaml.safe_dump_all(loaded)
