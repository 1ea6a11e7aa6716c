"""The NetworkPolicy of a service that sets `spec.networkPolicy`: what its pods may connect to, and who may connect."""

from typing import Any, Final
from urllib.parse import urlsplit

from skiff_operator.kinds import NETWORK_POLICY
from skiff_operator.resources.metadata import child, selector
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

_NAMESPACE: Final[dict[str, Any]] = {"podSelector": {}}
"""All pods of the InferenceService's namespace."""
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_DNS: Final = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def build(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Build the policy. Connections of the kubelet, such as its probes, are allowed by every policy.

    The operator's namespace always reaches the pods, for the operator's reads of load and startup and for the router's
    requests. Metrics are on the API's port, so peers that scrape can reach the API; API keys protect it.
    """
    policy = service.spec.network_policy
    assert policy is not None, "the policy is built only where the spec has one"
    operator = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: settings.lease_namespace}}}
    default = () if settings.router_exclusive else (_NAMESPACE,)
    sources = default if policy.sources is None else policy.sources
    port = {"port": contract.API_PORT_NAME, "protocol": "TCP"}
    downloads = (
        [{"ports": [_tcp(port) for port in _download_ports(service)]}]
        if service.source.is_fetched or service.spec.lora is not None
        else []
    )
    return child(
        NETWORK_POLICY,
        service,
        spec={
            "podSelector": {"matchLabels": selector(service)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [operator, *sources, *policy.metrics_from], "ports": [port]}],
            "egress": [_DNS, *downloads, *map(_with_protocol, policy.egress)],
        },
    )


def _download_ports(service: InferenceService) -> list[int]:
    """Return the ports of the model's source; 443 is always one, because stores redirect to others."""
    endpoint, source = service.spec.model.endpoint, service.source
    ports = {443}
    if endpoint is not None:
        parts = urlsplit(endpoint)
        ports.add(parts.port or _DEFAULT_PORTS[parts.scheme])
    elif source.scheme == "oci" and ":" in source.location:
        ports.add(int(source.location.rpartition(":")[2]))
    return sorted(ports)


def _tcp(port: int) -> dict[str, Any]:
    return {"port": port, "protocol": "TCP"}


def _with_protocol(rule: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return an egress rule with the protocol that the API server would fill in."""
    if "ports" not in rule:
        return rule
    return {**rule, "ports": [{"protocol": "TCP", **port} for port in rule["ports"]]}
