"""What a cluster's API server says of the pods of this job: which of them are gone.

It is asked with the service account that Kubernetes mounts into a pod, over TLS with the cluster's own CA;
``get`` and ``list`` of pods in its own namespace is all that takes. A pod is dead when it is deleted (its
name is gone, or another pod's) or has ended with all of its containers. One that is being deleted is not:
where a node cannot be reached its pods stay so, and train on. A pod that somebody deleted *by force* cannot
be told from one that has ended: the API forgets both. One that waits to be started knows nothing yet.

Promise: what is not answered, not understood, or not about this pod's own job, is no proof.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastic_resume.cluster.asking import Answer, AskError, ask
from elastic_resume.cluster.verdict import Verdict

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LABELS = (
    "jobset.sigs.k8s.io/jobset-name",
    "training.kubeflow.org/job-name",
    "batch.kubernetes.io/job-name",
    "job-name",
)
"""Who of these has this pod's value is of this job; the first that this pod has counts."""
PAGE = 100
MAX_PAGES = 100
MAX_BYTES = 8 << 20  # a page; a pod is some 10 kB
MAX_TOKEN = 64 * 1024
TIMEOUT_S = 5.0
_HOME = re.compile(r"pod/([a-z0-9-]{1,63})/([a-z0-9.-]{1,253})/([A-Za-z0-9-]{1,64})")


def home(environ: Mapping[str, str]) -> str:
    """What the API knows this pod by, if POD_NAMESPACE, POD_NAME and POD_UID tell it."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    text = "/".join(["pod", *(environ.get(name, "") for name in ("POD_NAMESPACE", "POD_NAME", "POD_UID"))])
    return text if _HOME.fullmatch(text) else ""


def oracle(environ: Mapping[str, str], account: Path = ACCOUNT) -> Pods | None:
    """Give the API server, where this pod has what it takes to ask it."""
    match = _HOME.fullmatch(home(environ))
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or environ.get("KUBERNETES_SERVICE_PORT") or "443"
    if match is None or not (account / "token").is_file() or not re.fullmatch(r"[0-9]{1,5}", port):
        return None
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except (OSError, ssl.SSLError):
        return None
    base = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Pods(base, match[1], match[2], account / "token", tls=tls)


@dataclass(frozen=True)
class Pod:
    """A pod as the API tells of it."""

    name: str
    uid: str
    waits: bool
    has_ended: bool

    @property
    def may_live(self) -> bool:
        """Whether an agent may run in it."""
        return not (self.waits or self.has_ended)


class Pods:
    """The pods of this pod's namespace, and those of its job among them."""

    def __init__(self, api: str, namespace: str, name: str, token: Path, *, tls: ssl.SSLContext) -> None:
        """``api``: its address; ``namespace``, ``name``: of this pod; ``token``: a file that changes."""
        self._url = f"{api}/api/v1/namespaces/{namespace}/pods"
        self._namespace = namespace
        self._name = name
        self._token = token
        self._tls = tls
        self._selector = ""

    def ask(self, missing: Collection[str], here: Collection[str]) -> Verdict:
        """See `verdict.Oracle`."""
        matches = {one: _HOME.fullmatch(one) for one in (*missing, *here)}
        uids = {one: match[3] for one, match in matches.items() if match and match[1] == self._namespace}
        if len(uids) < len({*missing, *here}):
            return Verdict(why="some run where Kubernetes does not know them")
        try:
            listed = {pod.uid: pod for pod in self._list()}
            ours = {uids[one] for one in here}
            if not ours <= {uid for uid, pod in listed.items() if pod.may_live}:
                return Verdict(why="the API server does not list the pods that are here")
            dead = frozenset(one for one in missing if self._is_dead(one, listed))
        except AskError as error:
            return Verdict(why=f"the API server: {error}")
        doubts = [pod.name for uid, pod in listed.items() if uid not in ours and pod.may_live]
        doubts += [one.split("/")[2] for one in missing if one not in dead]
        why = f"{', '.join(sorted(set(doubts))[:4])} may be alive" if doubts else ""
        return Verdict(dead, alone=not doubts, why=why)

    def _is_dead(self, one: str, listed: Mapping[str, Pod]) -> bool:
        _, _, name, uid = one.split("/")
        if uid in listed:
            return listed[uid].has_ended
        answer = self._get(f"{self._url}/{quote(name)}")  # it may have other labels
        if answer.status == 404:
            told = _object(answer)
            return told.get("reason") == "NotFound" and _part(told, "details").get("name") == name
        pod = read_pod(_object(_good(answer)))
        return pod.uid != uid or pod.has_ended

    def _list(self) -> Iterator[Pod]:
        if not self._selector:
            self._selector = selector_of(_object(_good(self._get(f"{self._url}/{quote(self._name)}"))))
        following = ""
        for _ in range(MAX_PAGES):
            url = f"{self._url}?limit={PAGE}&labelSelector={quote(self._selector, safe='')}"
            url += f"&continue={quote(following, safe='')}" if following else ""
            page = _object(_good(self._get(url)))
            items, meta = page.get("items"), page.get("metadata")
            if not isinstance(items, list) or not isinstance(meta, dict):
                raise AskError("what it says is no list of pods")
            yield from map(read_pod, items)
            following = str(meta.get("continue") or "")
            if not following:
                return
        raise AskError(f"it lists more than {PAGE * MAX_PAGES} pods")

    def _get(self, url: str) -> Answer:
        try:
            with open(self._token, "rb") as file:
                token = file.read(MAX_TOKEN).decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise AskError(f"the service account's token cannot be read: {error}") from error
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        return ask(url, headers=headers, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES, tls=self._tls)


def selector_of(pod: Mapping[str, Any]) -> str:
    """Give the labels by which the pods of this pod's job are found."""
    labels = _part(pod, "metadata").get("labels")
    if not isinstance(labels, dict):
        labels = {}
    for name in LABELS:
        value = labels.get(name)
        if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,63}", value):
            return f"{name}={value}"
    raise AskError("this pod has no label that names its job")


def read_pod(told: Any) -> Pod:
    """Read a pod. It has ended where its phase says so, and none of its containers is said to run on.

    Where a node is lost the control plane itself may write the phase of its pods, of which it knows nothing.
    """
    if not isinstance(told, dict):
        raise AskError("what it says is no pod")
    meta, status = _part(told, "metadata"), _part(told, "status")
    name, uid, phase = meta.get("name"), meta.get("uid"), status.get("phase")
    if not (isinstance(name, str) and isinstance(uid, str) and isinstance(phase, str) and uid):
        raise AskError("what it says is no pod")
    containers = status.get("containerStatuses")
    containers = containers if isinstance(containers, list) else []
    states = [one.get("state") for one in containers if isinstance(one, dict)]
    runs = any(isinstance(state, dict) and "running" in state for state in states)
    waits, has_ended = phase == "Pending" and not runs, phase in {"Succeeded", "Failed"} and not runs
    return Pod(name, uid, waits, has_ended)


def _good(answer: Answer) -> Answer:
    if answer.status in {401, 403}:
        raise AskError(f"it answers {answer.status}: the service account may not get and list pods")
    if answer.status != 200:
        raise AskError(f"it answers {answer.status}")
    return answer


def _object(answer: Answer) -> dict[str, Any]:
    try:
        told = json.loads(answer.body)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise AskError("what it says is no JSON object")
    return told


def _part(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = told.get(name)
    return part if isinstance(part, dict) else {}
