"""The Kubernetes kinds that the operator reads and writes, and where the API serves them."""

from enum import IntEnum
from typing import Final, NamedTuple

from skiff_runtime import contract


class Stage(IntEnum):
    """Priority of work over all InferenceServices; a lower stage is more urgent."""

    CHILDREN = 0
    NETWORK = 1
    STATUS = 2


class Kind(NamedTuple):
    """One resource of the API. `versioned_spec`: its metadata.generation counts changes of the spec."""

    name: str
    group: str
    version: str
    plural: str
    stage: Stage
    versioned_spec: bool

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects, such as `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Return the URL path of a collection (in all namespaces or one), of an object, or of its subresource."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


INFERENCE_SERVICE: Final = Kind(
    "InferenceService", contract.API_GROUP, contract.API_VERSION, "inferenceservices", Stage.STATUS, True
)
SERVICE_ACCOUNT: Final = Kind("ServiceAccount", "", "v1", "serviceaccounts", Stage.CHILDREN, False)
CLAIM: Final = Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims", Stage.CHILDREN, False)
CONTROLLER_REVISION: Final = Kind(
    "ControllerRevision", "apps", "v1", "controllerrevisions", Stage.CHILDREN, False
)
NETWORK_POLICY: Final = Kind(
    "NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", Stage.CHILDREN, True
)
DEPLOYMENT: Final = Kind("Deployment", "apps", "v1", "deployments", Stage.CHILDREN, True)
SERVICE: Final = Kind("Service", "", "v1", "services", Stage.NETWORK, False)
DISRUPTION_BUDGET: Final = Kind(
    "PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets", Stage.NETWORK, True
)
POD_AUTOSCALER: Final = Kind(
    "HorizontalPodAutoscaler", "autoscaling", "v2", "horizontalpodautoscalers", Stage.NETWORK, False
)
SCALED_OBJECT: Final = Kind("ScaledObject", "keda.sh", "v1alpha1", "scaledobjects", Stage.NETWORK, True)
INFERENCE_POOL: Final = Kind(
    "InferencePool", "inference.networking.k8s.io", "v1", "inferencepools", Stage.NETWORK, True
)
HTTP_ROUTE: Final = Kind("HTTPRoute", "gateway.networking.k8s.io", "v1", "httproutes", Stage.NETWORK, True)
MODEL_CACHE: Final = Kind(
    "ModelCache", contract.API_GROUP, contract.API_VERSION, "modelcaches", Stage.STATUS, True
)
LORA_ADAPTER: Final = Kind(
    "LoRAAdapter", contract.API_GROUP, contract.API_VERSION, "loraadapters", Stage.STATUS, True
)
CONFIG_MAP: Final = Kind("ConfigMap", "", "v1", "configmaps", Stage.STATUS, False)
PERSISTENT_VOLUME: Final = Kind("PersistentVolume", "", "v1", "persistentvolumes", Stage.STATUS, False)
SECRET: Final = Kind("Secret", "", "v1", "secrets", Stage.STATUS, False)
POD: Final = Kind("Pod", "", "v1", "pods", Stage.STATUS, True)
NODE: Final = Kind("Node", "", "v1", "nodes", Stage.STATUS, False)
LEASE: Final = Kind("Lease", "coordination.k8s.io", "v1", "leases", Stage.STATUS, False)
EVENT: Final = Kind("Event", "events.k8s.io", "v1", "events", Stage.STATUS, False)

CHILDREN: Final = (
    SERVICE_ACCOUNT,
    CLAIM,
    NETWORK_POLICY,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    SERVICE,
    DISRUPTION_BUDGET,
)
"""The kinds of children, in order of creation: a pod needs its ServiceAccount and its claim, and is never unprotected.

A template is recorded in a ControllerRevision before the Deployment gets it.
"""

NEEDED_BY_PODS: Final = (SERVICE_ACCOUNT, CLAIM)
"""Children that a pod needs to start; it must not start with an object of another owner in their place."""

CREATED_BEFORE_PODS: Final = (*NEEDED_BY_PODS, NETWORK_POLICY, CONTROLLER_REVISION)
"""Children without which no pod may be created.

Without its policy it would accept connections from everywhere; a template that is not recorded would be lost.
"""

ENGINES: Final = {"HPA": POD_AUTOSCALER, "KEDA": SCALED_OBJECT}
"""The kinds of children of other autoscaling engines, which an operator has only if it was started with them."""

GATEWAY_KINDS: Final = (INFERENCE_POOL, HTTP_ROUTE)
"""The kinds of children for gateways, which an operator has only if it was started with them."""

BY_NAME: Final = {kind.name: kind for kind in (*CHILDREN, *ENGINES.values(), *GATEWAY_KINDS)}


class Addon(NamedTuple):
    """A part of a cluster that defines a kind, and the advice for an InferenceService where it is not installed."""

    name: str
    advice: str


ADDONS: Final = {
    SCALED_OBJECT: Addon("KEDA", "use spec.autoscaling.engine Builtin"),
    INFERENCE_POOL: Addon("the Gateway API Inference Extension", "remove spec.inferencePool"),
    HTTP_ROUTE: Addon("the Gateway API", "remove spec.inferencePool.httpRoute"),
}
"""The addons that define the kinds which an API server may not serve."""
