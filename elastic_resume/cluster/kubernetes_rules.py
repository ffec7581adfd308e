"""What an API server, a controller or a kubelet refuses or misreads, and the published schemas let pass.

Schemas know fields and types. They do not know that a failure policy needs ``restartPolicy: Never``, which
words a field takes, what a name may look like, or that two places must agree. `complaints` does, for a Job,
a JobSet with one Job in it, and the Service beside them.

Sources: validation.go of batch and core in kubernetes/kubernetes, and the API reference. Not all that is
checked there is checked here: what a schema finds is left to it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from elastic_resume import contract
from elastic_resume.cluster import kubernetes, node
from elastic_resume.errors import ConfigError

Document = Mapping[str, Any]
(ENV_NODES,), (ENV_SERVICE,) = node.KUBERNETES["nodes"], node.KUBERNETES["service"]
(ENV_WORKERS,) = node.KUBERNETES["workers"]
SHARED_MEMORY = "/dev/shm"  # noqa: S108  a mount point

# Field -> what it may hold; the schemas call all of these strings.
WORDS = {
    "completionMode": ("Indexed", "NonIndexed"),
    "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
    "restartPolicy": ("Never", "OnFailure"),
    "action": ("FailIndex", "FailJob", "Ignore", "Count"),
    "operator": ("In", "NotIn"),
    "medium": ("", "Memory", "HugePages"),
    "protocol": ("TCP", "UDP", "SCTP"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
}
TEXTS = {"image", "claimName", "serviceAccountName", "subdomain"}
FIELD_PATHS = re.compile(
    r"metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[^']+'\]|"
    r"spec\.(nodeName|serviceAccountName)|status\.(hostIP|hostIPs|podIP|podIPs)"
)
GIVEN = {
    "JOB_COMPLETION_INDEX",
    "HOSTNAME",
    "KUBERNETES_SERVICE_HOST",
}  # in the environment without being asked
_FREE = {contract.EXIT_REQUEUE, contract.EXIT_SIGNALLED + signal.SIGTERM}
_USED = re.compile(r"(?<!\$)\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def complaints(documents: Iterable[Document]) -> list[str]:
    """Give what is wrong, one sentence each; nothing where all is well."""
    listed = list(documents)
    jobs = [one for one in listed if one.get("kind") in {"Job", "JobSet"}]
    found = []
    for job in jobs or [{}]:
        others = [one for one in listed if one not in jobs and _belongs(one, job, listed)]
        by_kind = {str(one.get("kind")): one for one in [*others, *([job] if job else [])]}
        name = f"{job['metadata']['name']}: " if len(jobs) > 1 else ""
        found += [f"{name}{where}: {what}" for where, what in _all(by_kind)]
    return found


def _belongs(document: Document, job: Document, all_of_them: list[Document]) -> bool:
    """Whether it is to be looked at beside this job: of several Services the one that its pods name."""
    services = [one for one in all_of_them if one.get("kind") == "Service"]
    if document not in services or len(services) == 1 or job.get("kind") != "Job":
        return True
    return bool(document["metadata"]["name"] == job["spec"]["template"]["spec"].get("subdomain"))


def _all(by_kind: Mapping[str, Document]) -> Iterator[tuple[str, str]]:
    for kind, document in by_kind.items():
        yield from _words(document, kind)
        yield from _sizes(document, kind)
    job, prefix, service = job_of(by_kind)
    if job is None:
        return
    pod = job["template"]["spec"]
    yield from _names(by_kind, job, prefix)
    yield from _counts(job)
    yield from _failure_policy(job, pod)
    for container in pod["containers"]:
        yield from _container(container, pod)
    yield from _agreement(job, pod)
    yield from _surroundings(pod)
    if service is not None:
        yield from _service(service, job, pod)


def job_of(by_kind: Mapping[str, Document]) -> tuple[Document | None, str, Document | None]:
    """Give the Job's spec, what its pods' host names begin with, and the Service."""
    if "Job" in by_kind:
        job = by_kind["Job"]
        return job["spec"], job["metadata"]["name"], by_kind.get("Service")
    if "JobSet" in by_kind:
        jobset = by_kind["JobSet"]
        one = jobset["spec"]["replicatedJobs"][0]
        return one["template"]["spec"], f"{jobset['metadata']['name']}-{one['name']}-0", None
    return None, "", by_kind.get("Service")


def _walk(value: Any, where: str) -> Iterator[tuple[str, str, Any]]:
    """Each field of a document: its path, its name, its value."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        path = f"{where}.{key}" if isinstance(key, str) else f"{where}[{key}]"
        yield path, str(key), inner
        yield from _walk(inner, path)


def _words(document: Document, kind: str) -> Iterator[tuple[str, str]]:
    for path, key, value in _walk(document, kind):
        # `operator` of a toleration or a selector is another word.
        meant = key in WORDS and not re.search(r"toleration|matchExpr|failurePolicy", path)
        if meant and isinstance(value, str) and value not in WORDS[key]:
            yield path, f"{value!r} is none of {', '.join(word or repr('') for word in WORDS[key])}"
        is_text = key in TEXTS or (key == "value" and ".env[" in path)
        if is_text and not isinstance(value, str):
            yield path, f"{value!r} is no text: put it into quotes"
        if key == "fieldPath" and not FIELD_PATHS.fullmatch(str(value)):
            yield path, f"{value!r} is nothing that a pod can be told"


def _sizes(document: Document, kind: str) -> Iterator[tuple[str, str]]:
    for path, key, value in _walk(document, kind):
        if key in {"sizeLimit", "memory", "ephemeral-storage"}:
            try:
                kubernetes.size_bytes(str(value), path)
            except ConfigError as error:
                yield path, str(error).removeprefix(f"{path} is ")


def _names(by_kind: Mapping[str, Document], job: Document, prefix: str) -> Iterator[tuple[str, str]]:
    for kind, document in by_kind.items():
        name = str(document.get("metadata", {}).get("name", ""))
        if kind != "Kustomization" and not kubernetes.is_label(name):
            yield f"{kind}.metadata.name", f"{name!r} is no DNS-1123 label of 63 characters at most"
        if kind == "Service" and not name[:1].isalpha():
            yield "Service.metadata.name", f"{name!r} does not begin with a letter (DNS-1035)"
    last = f"{prefix}-{job.get('completions', 1) - 1}"
    if len(last) > kubernetes.MAX_LABEL:
        yield "metadata.name", f"the host name of the last pod, {last}, has {len(last)} characters of 63"
    for path, key, value in _walk(job, "spec"):
        named = key == "name" and re.search(r"(containers|volumes|ports)\[\d+\]\.name$", path)
        if (named or key == "subdomain") and not kubernetes.is_label(str(value)):
            yield path, f"{value!r} is no DNS-1123 label"
        if named and "ports" in path and len(str(value)) > 15:
            yield path, f"{value!r} is longer than 15 characters"


def _counts(job: Document) -> Iterator[tuple[str, str]]:
    completions, indexed = job.get("completions", 1), job.get("completionMode") == "Indexed"
    if not indexed:
        for field in ("backoffLimitPerIndex", "maxFailedIndexes", "successPolicy"):
            if field in job:
                yield f"spec.{field}", "is for completionMode: Indexed only"
    if "backoffLimitPerIndex" in job and job["template"]["spec"].get("restartPolicy") != "Never":
        yield "spec.backoffLimitPerIndex", "needs restartPolicy: Never"
    if "maxFailedIndexes" in job and "backoffLimitPerIndex" not in job:
        yield "spec.maxFailedIndexes", "needs backoffLimitPerIndex"
    if job.get("maxFailedIndexes", 0) > completions:
        yield "spec.maxFailedIndexes", f"is more than the {completions} completions"
    for number, rule in enumerate(job.get("successPolicy", {}).get("rules", [])):
        if not 1 <= rule.get("succeededCount", 1) <= completions:
            yield f"spec.successPolicy.rules[{number}]", f"asks for more than the {completions} completions"


def _failure_policy(job: Document, pod: Document) -> Iterator[tuple[str, str]]:
    policy = job.get("podFailurePolicy")
    if policy is None:
        return
    if pod.get("restartPolicy") != "Never":
        yield "spec.podFailurePolicy", "needs restartPolicy: Never"
    if job.get("podReplacementPolicy", "Failed") != "Failed":
        yield "spec.podReplacementPolicy", "must be Failed beside a podFailurePolicy"
    names = {container["name"] for container in pod["containers"]}
    for number, rule in enumerate(policy["rules"]):
        where = f"spec.podFailurePolicy.rules[{number}]"
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield where, "needs one of onExitCodes and onPodConditions"
        if rule.get("action") == "FailIndex" and "backoffLimitPerIndex" not in job:
            yield where, "FailIndex needs backoffLimitPerIndex"
        for condition in rule.get("onPodConditions", []):
            if (
                str(condition.get("status")) not in {"True", "False", "Unknown"}
                or condition["status"] is True
            ):
                yield where, "a condition's status is the text True, False or Unknown"
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        values = codes["values"]
        if rule.get("action") == "FailJob" and codes["operator"] == "In" and _FREE & set(values):
            yield where, f"{sorted(_FREE & set(values))}: with these an agent asks to be started again"
        if codes["operator"] == "In" and 0 in values:
            yield where, "0 is no failure, and must not be among the codes of In"
        if values != sorted(set(values)) or not values or any(not 0 <= code <= 255 for code in values):
            yield where, f"the codes {values} must be from 0 to 255, in order, each once"
        if codes.get("containerName", next(iter(names))) not in names:
            yield where, f"there is no container {codes['containerName']!r}"


def _container(container: Document, pod: Document) -> Iterator[tuple[str, str]]:
    where = f"container {container['name']}"
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    mounts = container.get("volumeMounts", [])
    for mount in mounts:
        if mount["name"] not in volumes:
            yield where, f"mounts {mount['name']!r}, and there is no such volume"
    paths = [mount["mountPath"] for mount in mounts]
    if len(set(paths)) != len(paths):
        yield where, "mounts two volumes at one path"
    resources = container.get("resources", {})
    for name, asked in resources.get("requests", {}).items():
        limit = resources.get("limits", {}).get(name, asked)
        if name in {"memory", "ephemeral-storage"} and _bytes(asked) > _bytes(limit):
            yield where, f"asks for {asked} of {name} and is limited to {limit}"
    names = [variable["name"] for variable in container.get("env", [])]
    if len(set(names)) != len(names):
        yield where, "sets a variable twice: the last one counts"
    for variable in container.get("env", []):
        if ("value" in variable) == ("valueFrom" in variable):
            yield f"{where}, {variable['name']}", "needs one of value and valueFrom"
    # Kubernetes leaves $(NAME) as it stands where there is no such variable, and says nothing.
    for word in [*container.get("command", []), *container.get("args", [])]:
        for name in _USED.findall(str(word)):
            if name not in names and name not in GIVEN:
                yield where, f"uses $({name}), which its env does not set"


def _agreement(job: Document, pod: Document) -> Iterator[tuple[str, str]]:
    """What our own agent is told must be what the Job says."""
    env = {one["name"]: one.get("value") for one in pod["containers"][0].get("env", [])}
    limits = pod["containers"][0].get("resources", {}).get("limits", {})
    completions = job.get("completions", 1)
    if job.get("parallelism", 1) != completions:
        yield "spec.parallelism", "must be completions: a node without a pod never comes"
    nodes = env.get(ENV_NODES)
    if nodes is None and completions > 1:
        yield ENV_NODES, "is not set: each pod would be a job of its own"
    elif nodes is not None and not re.fullmatch(r"([0-9]{1,6}:)?[0-9]{1,6}", str(nodes)):
        yield ENV_NODES, f"says {nodes}, which is neither N nor MIN:MAX"
    elif nodes is not None:
        least, _, most = nodes.rpartition(":")
        if most != str(completions):
            yield ENV_NODES, f"says {nodes}, and there are {completions} completions"
        elif job.get("maxFailedIndexes", completions - int(least or 1)) != completions - int(least or 1):
            yield (
                "spec.maxFailedIndexes",
                f"must be {completions} less the {least or 1} nodes that train at least",
            )
    grace = env.get(contract.ENV_TERMINATION_GRACE_S)
    if grace is not None and grace != str(pod.get("terminationGracePeriodSeconds", 30)):
        yield (
            contract.ENV_TERMINATION_GRACE_S,
            f"says {grace}, and terminationGracePeriodSeconds another number",
        )
    service = env.get(ENV_SERVICE)
    if service is not None and service != pod.get("subdomain", service):
        yield ENV_SERVICE, f"says {service}, and subdomain is {pod['subdomain']}"
    for volume in pod.get("volumes", []):
        empty = volume.get("emptyDir") or {}
        kind = "memory" if empty.get("medium") == "Memory" else "ephemeral-storage"
        if "sizeLimit" in empty and kind in limits and _bytes(empty["sizeLimit"]) >= _bytes(limits[kind]):
            yield f"volume {volume['name']}", f"may fill the whole limit of {kind}"


def _surroundings(pod: Document) -> Iterator[tuple[str, str]]:
    """What our own agent relies on beside its variables, and what these say of it."""
    container = pod["containers"][0]
    env = {one["name"]: one.get("value") for one in container.get("env", [])}
    mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
    for field in ("hostname", "setHostnameAsFQDN"):
        if pod.get(field):
            yield f"spec.template.spec.{field}", "must not be set: names of pods are JOB-INDEX"
    if SHARED_MEMORY not in mounts:
        yield (
            SHARED_MEMORY,
            "nothing is mounted there: DataLoader workers and NCCL need more than 64 MB",
        )
    directory, limit = env.get(contract.ENV_CKPT_DIR), env.get(contract.ENV_CKPT_LIMIT)
    if directory is not None and not any(directory == at or directory.startswith(f"{at}/") for at in mounts):
        yield contract.ENV_CKPT_DIR, f"{directory} is no volume: checkpoints would go with the container"
    volumes = {one["name"]: one.get("emptyDir") or {} for one in pod.get("volumes", [])}
    size = volumes.get(mounts.get(str(directory), ""), {}).get("sizeLimit")
    if limit is not None and size is not None and _bytes(limit) != _bytes(size):
        yield contract.ENV_CKPT_LIMIT, f"says {limit}, and the volume's sizeLimit is {size}"
    workers = env.get(ENV_WORKERS)
    gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
    if workers is not None and gpus is not None and str(gpus) != workers:
        yield ENV_WORKERS, f"says {workers}, and there are {gpus} GPUs"


def _service(service: Document, job: Document, pod: Document) -> Iterator[tuple[str, str]]:
    spec = service["spec"]
    labels = job["template"].get("metadata", {}).get("labels", {})
    if not spec.get("selector", {}).items() <= labels.items():
        yield "Service.spec.selector", "selects none of the Job's pods"
    if spec.get("clusterIP") != "None":
        yield "Service.spec.clusterIP", "must be the text None: names of pods are those of a headless Service"
    if not spec.get("publishNotReadyAddresses"):
        yield (
            "Service.spec.publishNotReadyAddresses",
            "must be true: nodes look for each other before they are ready",
        )
    if pod.get("subdomain") != service["metadata"]["name"]:
        yield "spec.template.spec.subdomain", "must be the Service's name, else pods have no names in DNS"
    ports = {port.get("name") for container in pod["containers"] for port in container.get("ports", [])}
    for port in spec.get("ports", []):
        target = port.get("targetPort", port["port"])
        if isinstance(target, str) and target not in ports:
            yield "Service.spec.ports", f"no container has a port {target!r}"


def _bytes(quantity: object) -> int:
    try:
        return kubernetes.size_bytes(str(quantity), "")
    except ConfigError:
        return 0  # told by `_sizes`
