"""The fetcher, the pod that keeps a model on one node or on a shared claim, and the pod that removes it.

It has the builders, and reads the state of live pods.
"""

import json
import re
import secrets
from typing import Any, Final

import msgspec

from skiff_operator import failure
from skiff_operator.kinds import POD, SECRET
from skiff_operator.model_caches.spec import ModelCache, owner_reference
from skiff_operator.ownership import controller_uid
from skiff_operator.redact import redact, redact_tail
from skiff_operator.resources import credentials
from skiff_operator.resources.metadata import FETCHER, FIELD_MANAGER, digest
from skiff_operator.resources.pod import USER_ID
from skiff_operator.settings import Settings
from skiff_operator.workload import LOG_TAIL_CHARACTERS
from skiff_runtime import contract

ANNOTATION_NODE: Final = f"{contract.API_GROUP}/node"
ANNOTATION_GENERATION: Final = f"{contract.API_GROUP}/generation"
LABEL_TASK: Final = f"{contract.API_GROUP}/task"
FETCH: Final = "fetch"
REMOVE: Final = "remove"
_DIRECTORY: Final = "/models"
_NAME_CHARACTERS: Final = 40
_DEFAULT_RESOURCES: Final = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
_TOKEN_BYTES: Final = 32
_MESSAGE_CHARACTERS: Final = 512
_REMOVE_ALL: Final = 'rm -rf -- "$0"/* "$0"/.[!.]*'
"""A mount itself cannot be removed."""
_REMOVE_DIRECTORY: Final = 'rm -rf -- "$0"'


class Fetcher(msgspec.Struct, frozen=True, kw_only=True):
    """A live pod of one node, or of a shared claim, whose place stands for a node. `task` is `fetch` or `remove`.

    `ready`: the model is there, or is removed.

    `reason` and `message` explain a failure, and are empty while there is none.
    """

    name: str
    uid: str
    node: str
    task: str
    generation: int
    ready: bool = False
    running: bool = False
    terminating: bool = False
    address: str = ""
    reason: str = ""
    message: str = ""

    @property
    def url(self) -> str:
        """The address at which peers read the model."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{contract.PEER_PORT}"


def namespace(cache: ModelCache, settings: Settings) -> str:
    """Return the namespace of the fetchers: that of the operator, or that of the shared claim, which no other can mount."""
    return settings.lease_namespace if cache.claim is None else cache.claim.namespace


def secret_name(cache: ModelCache) -> str:
    """Return the name of the Secret with the token of the cache's peers."""
    return f"{_prefix(cache)}-peers"


def build_secret(cache: ModelCache, settings: Settings) -> dict[str, Any]:
    """Build the Secret, with a new token. It is created once and never read."""
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.name,
        "metadata": _metadata(cache, settings, secret_name(cache)),
        "type": "Opaque",
        "stringData": {"token": secrets.token_urlsafe(_TOKEN_BYTES)},
    }


def build(cache: ModelCache, settings: Settings, *, node: str, peers: list[str]) -> dict[str, Any]:
    """Build the fetcher of a node, or of a shared claim. It asks `peers` before the source."""
    model = cache.spec.model
    arguments = [contract.COMMAND_FETCH, contract.FLAG_MODEL, model.uri]
    if model.revision is not None:
        arguments += [contract.FLAG_REVISION, model.revision]
    arguments += [contract.FLAG_DOWNLOAD_DIR, _directory(cache)]
    arguments += [contract.FLAG_SERVE_PEERS, str(contract.PEER_PORT)]
    for peer in peers:
        arguments += [contract.FLAG_PEER, peer]
    environment = {each["name"]: each for each in cache.spec.env}
    environment.setdefault("HOME", {"name": "HOME", "value": "/tmp"})
    if cache.claim is None:  # else there are no peers
        reference = {"secretKeyRef": {"name": secret_name(cache), "key": "token"}}
        environment[contract.ENV_PEER_TOKEN] = {"name": contract.ENV_PEER_TOKEN, "valueFrom": reference}
    for each in (
        *credentials.endpoint(cache.scheme, model.endpoint),
        *credentials.variables(cache.scheme, model.credentials_secret_ref),
    ):
        environment[each["name"]] = each
    container = {
        **_container(FETCH, settings),
        "command": ["skiff"],
        "args": arguments,
        "env": list(environment.values()),
        "resources": cache.spec.resources or _DEFAULT_RESOURCES,
        "ports": [{"name": "peers", "containerPort": contract.PEER_PORT, "protocol": "TCP"}],
        # Without a limit of time: how long a download may take depends on the model and the network.
        "readinessProbe": _probe(contract.PATH_READYZ, period_seconds=2, failures=3),
        "livenessProbe": _probe(contract.PATH_LIVEZ, period_seconds=20, failures=3),
    }
    return _pod(cache, settings, node, task=FETCH, container=container, restart_policy="Always")


def build_removal(cache: ModelCache, settings: Settings, *, node: str) -> dict[str, Any]:
    """Build the pod that removes the model from a node or from a shared claim."""
    script = _REMOVE_ALL if cache.claim is None else _REMOVE_DIRECTORY
    container = {
        **_container(REMOVE, settings),
        "command": ["sh", "-c", script, _directory(cache)],
        "resources": _DEFAULT_RESOURCES,
    }
    return _pod(cache, settings, node, task=REMOVE, container=container, restart_policy="OnFailure")


def belongs(pod: dict[str, Any], cache: ModelCache, settings: Settings) -> bool:
    """Return whether a pod is a fetcher, or a removal, of the cache.

    Everyone may write any owner into pods of their own namespace, and must not become a peer that way.
    """
    return controller_uid(pod) == cache.uid and pod["metadata"]["namespace"] == namespace(cache, settings)


def read(pod: dict[str, Any]) -> Fetcher:
    """Read the state of a fetcher or a removal from its pod."""
    meta, status = pod["metadata"], pod.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    task = meta["labels"].get(LABEL_TASK, FETCH)
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    is_ready = conditions.get("Ready", {}).get("status") == "True"
    done = status.get("phase") == "Succeeded" if task == REMOVE else is_ready
    reason, message = ("", "") if done else _failure(status, conditions, containers)
    annotations = meta.get("annotations") or {}
    return Fetcher(
        name=meta["name"],
        uid=meta["uid"],
        node=annotations.get(ANNOTATION_NODE, ""),
        task=task,
        generation=_read_generation(annotations.get(ANNOTATION_GENERATION, "")),
        ready=done,
        running=any("running" in each.get("state", {}) for each in status.get("containerStatuses") or []),
        terminating="deletionTimestamp" in meta,
        address=status.get("podIP", ""),
        reason=reason,
        message=redact(message)[:_MESSAGE_CHARACTERS],
    )


def _read_generation(text: str) -> int:
    """Return the generation in an annotation; 0 if it is no number: the operator has not written it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _failure(
    status: dict[str, Any], conditions: dict[str, Any], containers: list[dict[str, Any]]
) -> tuple[str, str]:
    """Return reason and message, with the remedy, of what keeps the pod from its task; empty while it merely works."""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        remedy = (
            "lower spec.resources, tolerate its taints in spec.tolerations, leave the node out by spec.nodeSelector, "
            "or look at the claim of spec.storage"
        )
        return "Unschedulable", f"{scheduled.get('message', '')}; {remedy}"
    if status.get("phase") == "Failed":
        return status.get("reason") or "Failed", status.get("message") or "the pod failed"
    for container in containers:
        waiting = container.get("state", {}).get("waiting", {})
        text = waiting.get("message") or waiting.get("reason", "")
        if waiting.get("reason") in (
            "ErrImagePull",
            "ImagePullBackOff",
            "InvalidImageName",
            "ErrImageNeverPull",
        ):
            return "ImagePullFailed", f"image {container['image']}: {text}"
        if waiting.get("reason") in (
            "CreateContainerConfigError",
            "CreateContainerError",
            "RunContainerError",
        ):
            return (
                "ContainerConfigError",
                f"{text}; spec.model.credentialsSecretRef and spec.env name Secrets of the namespace of the fetchers, which "
                "is the operator's, or that of spec.storage.claim",
            )
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
            "terminated"
        )
        if ended and ended["exitCode"] != 0:
            return _diagnose(ended)
    return "", ""


_CREDENTIALS: Final = (
    "name a Secret with valid credentials in spec.model.credentialsSecretRef, or a ServiceAccount with a workload identity "
    "in spec.serviceAccountName"
)
_ANOTHER: Final = "create another ModelCache with a uri and a revision that exist"
_SOURCE: Final = "correct spec.model.endpoint, or set HTTPS_PROXY in spec.env"
_REMEDIES: Final = {
    "AccessDenied": _CREDENTIALS,
    "InvalidCredentials": _CREDENTIALS,
    "NoCredentials": _CREDENTIALS,
    "Unauthorized": _CREDENTIALS,
    "WrongRegion": "set AWS_REGION in spec.env",
    "ModelNotFound": _ANOTHER,
    "InvalidModelURI": "create another ModelCache with the folder of one model, or the digest of one manifest, as its uri",
    "UnsupportedArtifact": "push the model again as safetensors files, in raw, tar or tar+gzip layers, and name that artifact",
    "UnsupportedModel": "create another ModelCache with a model that Skiff supports",
    "DiskFull": "free the node's disk, leave the node out by spec.nodeSelector, or use a larger claim",
    "VolumeNotWritable": "let the chart prepare it (modelCache.chownHostPath), or give it to user 65532; a claim to group 65532",
    "SourceUnreachable": _SOURCE,
    "UnexpectedResponse": _SOURCE,
    "TLSFailed": "correct http or https in spec.model.endpoint",
    "SourceChanged": "wait for the end of the upload: the download is repeated",
    "ChecksumMismatch": "look for a proxy that changes files, or a faulty disk",
    "OutOfMemory": "raise spec.resources.limits.memory",
}
"""The remedy, in fields of a ModelCache, for each reason of a failed download."""


def _diagnose(ended: dict[str, Any]) -> tuple[str, str]:
    """Return reason and message, with the remedy, of a container that ended with an error."""
    tail = redact_tail(str(ended.get("message", "")), limit=LOG_TAIL_CHARACTERS).strip()
    if ended.get("reason") == failure.OOM_KILLED:
        cause, text = "OutOfMemory", "the fetcher ran out of memory"
    else:
        cause = failure.find_cause(tail) or ""
        found = re.findall(r'fetch_failed .*?message=("(?:[^"\\]|\\.)*"|\S+)', tail)
        text = _unquote(found[-1]) if found else tail.rpartition("\n")[2] or f"exit code {ended['exitCode']}"
    remedy = _REMEDIES.get(cause)
    return (cause, f"{text}; {remedy}") if remedy else ("FetchFailed", text)


def _unquote(text: str) -> str:
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text


def _prefix(cache: ModelCache) -> str:
    """Return the beginning of names, which the uid makes unique: a ModelCache may follow another of the same name."""
    return f"mcache-{cache.name[:_NAME_CHARACTERS].rstrip('-')}-{digest([cache.name, cache.uid])[:8]}"


def _metadata(cache: ModelCache, settings: Settings, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": namespace(cache, settings),
        "labels": {
            contract.LABEL_NAME: FETCHER,
            contract.LABEL_INSTANCE: cache.name,
            contract.LABEL_MANAGED_BY: FIELD_MANAGER,
            contract.LABEL_MODEL_CACHE: cache.name,
        },
        "ownerReferences": [owner_reference(cache)],
    }


def _pod(
    cache: ModelCache,
    settings: Settings,
    node: str,
    *,
    task: str,
    container: dict[str, Any],
    restart_policy: str,
) -> dict[str, Any]:
    metadata = _metadata(cache, settings, f"{_prefix(cache)}-{task}-{digest(node)[:8]}")
    metadata["labels"][LABEL_TASK] = task
    metadata["annotations"] = {ANNOTATION_NODE: node, ANNOTATION_GENERATION: str(cache.generation)}
    mount = {"name": "models", "mountPath": _DIRECTORY}
    scratch = {"name": "tmp", "mountPath": "/tmp"}
    spec: dict[str, Any] = {
        **_storage(cache, node),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": 15,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [{**container, "volumeMounts": [mount, scratch]}],
    }
    spec["volumes"] = [*spec["volumes"], {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]
    if cache.claim is not None:
        # The kubelet gives most kinds of volumes to this group; a namespace may forbid containers that are root.
        spec["securityContext"] |= {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    elif settings.model_cache_chown:
        spec["initContainers"] = [_chown(settings, mount)]
    if cache.spec.service_account_name is not None:
        spec["serviceAccountName"] = cache.spec.service_account_name
    if cache.spec.tolerations:
        spec["tolerations"] = list(cache.spec.tolerations)
    if settings.default_image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.default_image_pull_secrets]
    return {"apiVersion": POD.api_version, "kind": POD.name, "metadata": metadata, "spec": spec}


def _storage(cache: ModelCache, node: str) -> dict[str, Any]:
    """Return the volume with the model, and the nodes on which a pod can use it."""
    if cache.claim is not None:
        claim = {"name": "models", "persistentVolumeClaim": {"claimName": cache.claim_name}}
        return {"nodeSelector": cache.spec.node_selector, "volumes": [claim]}
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    directory = {
        "name": "models",
        "hostPath": {"path": cache.directory, "type": "DirectoryOrCreate"},
    }
    return {"affinity": {"nodeAffinity": nodes}, "volumes": [directory]}


def _directory(cache: ModelCache) -> str:
    """Return the directory of the model inside the pod. A shared claim may contain other files than the model."""
    return _DIRECTORY if cache.claim is None else f"{_DIRECTORY}/{cache.directory}"


def _chown(settings: Settings, mount: dict[str, Any]) -> dict[str, Any]:
    """Build the init container that is root, with one capability, to give the directory to the fetcher's user."""
    container = _container("prepare", settings)
    security = container["securityContext"]
    return {
        **container,
        "command": ["chown", f"{USER_ID}:{USER_ID}", _DIRECTORY],
        "resources": _DEFAULT_RESOURCES,
        "securityContext": {
            **security,
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
        "volumeMounts": [mount],
    }


def _container(name: str, settings: Settings) -> dict[str, Any]:
    return {
        "name": name,
        "image": settings.runtime_image("cpu"),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _probe(path: str, *, period_seconds: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "peers"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
