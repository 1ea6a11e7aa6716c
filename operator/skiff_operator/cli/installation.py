"""The operator that serves a namespace: its version and its settings, which decide what a spec becomes.

Both are in the operator's Deployment, whose namespace the user may not be allowed to read. Then the version is that of
the newest pod template that it recorded, and of the settings only those are known that its pods show.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from skiff_operator import settings as settings_of
from skiff_operator.client import Client
from skiff_operator.errors import ApiRefused, SettingsError
from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.resources import containers
from skiff_operator.revisions import Revision, newest
from skiff_operator.settings import ENV_PREFIX, VERSION, Settings
from skiff_operator.spec import InferenceService

LABELS: Final = "app.kubernetes.io/name=skiff-operator"
_LABEL_VERSION: Final = "app.kubernetes.io/version"
_CONTAINER: Final = "operator"


class Installation(NamedTuple):
    """The operator of a namespace. `version` is empty and `settings` are None where they are not known.

    `is_exact`: both are the Deployment's; else the version is that of the operator that built the newest template.
    """

    version: str = ""
    settings: Settings | None = None
    is_exact: bool = False

    def difference(self) -> str:
        """Describe another version of the operator than the one of this program; empty if it is the same, or unknown."""
        if self.version in ("", VERSION):
            return ""
        what = "the operator is" if self.is_exact else "the newest pod template was built by operator"
        return f"{what} {self.version}, and this command {VERSION}"

    def candidates(self, shown: Settings) -> Iterator[Settings]:
        """Yield the settings to build with: the operator's, or, restricted first, those that its pods show."""
        if self.settings is not None:
            yield self.settings
        else:
            yield shown
            yield dataclasses.replace(shown, allow_host_path=True, allow_privileged_pods=True)


async def find(client: Client, namespace: str, revisions: Sequence[Revision]) -> Installation:
    """Return the operator of a namespace; `revisions` are those of an InferenceService in it."""
    try:
        found = [each async for each in client.list(DEPLOYMENT, None, selector=LABELS)]
    except ApiRefused:
        found = []
    for deployment in found:
        installation = read(deployment)
        served = installation.settings.namespaces if installation.settings is not None else ()
        if not served or namespace in served:
            return installation
    last = newest(tuple(revisions))
    return Installation(last.operator_version if last is not None else "")


def read(deployment: dict[str, Any]) -> Installation:
    """Read the operator's Deployment."""
    version = (deployment["metadata"].get("labels") or {}).get(_LABEL_VERSION, "")
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        if container["name"] == _CONTAINER:
            environ = {each["name"]: each["value"] for each in container.get("env") or [] if "value" in each}
            try:
                settings = settings_of.from_arguments([], environ | _flags(container.get("args") or []))
            except SettingsError:  # another version may accept what this one does not
                return Installation(version, None, is_exact=True)
            return Installation(version, settings, is_exact=True)
    return Installation(version, None, is_exact=True)


def shown_settings(service: InferenceService | None, pod_spec: dict[str, Any] | None) -> Settings:
    """Return the settings that pods of an InferenceService show: the default image and the GPUs' resource."""
    if service is None or pod_spec is None:
        return Settings()
    given: dict[str, Any] = {}
    runtime = next((each for each in pod_spec["containers"] if each["name"] == containers.RUNTIME), None)
    if runtime is not None and service.spec.runtime.image is None:
        given[f"runtime_image_{service.spec.runtime.device}"] = runtime["image"]
    if resource := shown_gpu_resource(service, [pod_spec]):
        given["gpu_resource_name"] = resource
    return Settings(**given)


def shown_gpu_resource(service: InferenceService, pod_specs: Iterable[dict[str, Any]]) -> str:
    """Return the extended resource of the GPUs: the one of the spec, else one that pods show; empty if they show none.

    It is a device that serving containers take once for each rank, rather none that the spec lists in its `resources`,
    such as network adapters.
    """
    wanted = containers.gpus(service)
    if not wanted or service.spec.runtime.gpu_resource_name is not None:
        return service.spec.runtime.gpu_resource_name or ""
    listed = service.spec.resources.get("limits", {})
    found = [
        name
        for pod_spec in pod_specs
        for each in pod_spec["containers"]
        for name, amount in ((each.get("resources") or {}).get("limits") or {}).items()
        if each["name"] == containers.RUNTIME and "/" in name and str(amount) == str(wanted)
    ]
    return min(found, key=lambda name: name in listed, default="")


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return flags of the operator as the variables that have the same effect."""
    found: dict[str, str] = {}
    last = ""
    for argument in arguments:
        if not argument.startswith("--"):
            found[last] = argument
            continue
        flag, separator, value = argument.removeprefix("--").partition("=")
        negated = not separator and flag.startswith("no-")
        last = ENV_PREFIX + (flag.removeprefix("no-") if negated else flag).replace("-", "_").upper()
        found[last] = value if separator else "false" if negated else "true"
    return found
