"""The jobs of deploy/kubernetes, and what controllers make of them: a pod's variables and its end."""

from __future__ import annotations

import copy
import secrets
from typing import Any

import yaml

from tests.support.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
NAME = "elastic-resume-train"
NAMESPACE = "ml"
CONTENT_OF_KEY = "what all pods share, and nobody else"
JOB = ("claim.yaml", "pdb.yaml", "service.yaml", "job.yaml")
JOBSET = ("jobset.yaml",)
TRAINJOB = ("clustertrainingruntime.yaml", "trainjob.yaml")


def load_documents(files: tuple[str, ...] = JOB) -> list[dict[str, Any]]:
    """Load files of deploy/kubernetes."""
    return [yaml.safe_load((KUBERNETES / file).read_text()) for file in files]


def job_spec(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the Job's spec, which a JobSet has inside."""
    spec: dict[str, Any] = documents[-1]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def job_name(documents: list[dict[str, Any]]) -> str:
    """Return the Job's name, which a JobSet derives from its own."""
    top = documents[-1]
    name: str = top["metadata"]["name"]
    return f"{name}-{top['spec']['replicatedJobs'][0]['name']}-0" if top["kind"] == "JobSet" else name


def render_trainjob(runtime: dict[str, Any], trainjob: dict[str, Any]) -> dict[str, Any]:
    """Return the JobSet that Kubeflow's Trainer makes of a TrainJob (its plugins torch and jobset)."""
    name, trainer = trainjob["metadata"]["name"], trainjob["spec"].get("trainer")
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": spec,
    }
    job = job_spec([jobset])
    nodes = (trainer or {}).get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    job["completions"] = job["parallelism"] = nodes
    job["template"]["spec"]["subdomain"] = name  # of the JobSet's network
    if trainer is None:
        return jobset
    node = container(job)
    node["args"], node["resources"] = trainer["args"], trainer["resourcesPerNode"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    node["env"] += [
        *trainer.get("env", ()),
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    return jobset


def container(job: dict[str, Any]) -> dict[str, Any]:
    """Return the container of a Job."""
    found: dict[str, Any]
    (found,) = job["template"]["spec"]["containers"]
    return found


def adapt_to_kubernetes_1_29(job: dict[str, Any]) -> None:
    """Edit a Job's spec as docs/guides/kubernetes.md says for Kubernetes 1.29 and 1.30."""
    del job["successPolicy"]
    job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"].remove(75)


def pod_environment(documents: list[dict[str, Any]], index: int, address: str) -> dict[str, str]:
    """Return the variables of a new pod of an index."""
    job = job_name(documents)
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.name": f"{job}-{index}-{secrets.token_hex(3)}",
        "metadata.namespace": NAMESPACE,
        "metadata.uid": secrets.token_hex(16),
        "metadata.labels['batch.kubernetes.io/job-name']": job,
        "status.podIP": address,
    }
    found = {
        "JOB_COMPLETION_INDEX": str(index),
        "HOSTNAME": f"{job}-{index}",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }
    for variable in container(job_spec(documents))["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = CONTENT_OF_KEY if source else variable["value"]
    return found


def failure_action(job: dict[str, Any], exit_code: int, *, is_disrupted: bool = False) -> str:
    """Return the action of the first rule of podFailurePolicy that matches; Count if none does."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        assert codes["operator"] == "In"
        if exit_code in codes["values"] or (is_disrupted and "onPodConditions" in rule):
            return str(rule["action"])
    return "Count"
