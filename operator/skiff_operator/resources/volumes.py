"""Volumes of the serving pod, and the path of the model's files in it."""

from typing import Any, Final, NamedTuple

from skiff_operator.resources import cache_claim, model_cache_claim
from skiff_operator.spec import InferenceService, SharedVolume

MODEL_DIRECTORY: Final = "/model"
CACHE_DIRECTORY: Final = "/cache"
SCRATCH: Final = "tmp"
CACHE: Final = "cache"
ADAPTERS: Final = "adapters"
"""Names of the volumes of temporary files, of downloaded weights, and of adapters."""
ADAPTERS_DIRECTORY: Final = "/adapters"
SCRATCH_DIRECTORY: Final = "/tmp"  # a path inside the pod, on its own volume
API_KEYS_DIRECTORY: Final = "/etc/skiff/api-keys"
API_KEYS_FILE: Final = f"{API_KEYS_DIRECTORY}/keys"
SCRATCH_LIMIT: Final = "10Gi"
"""Limit of `/tmp`: a pod that exceeds it is evicted before it fills the node's disk. Compiled kernels take less."""


ADAPTERS_LIMIT: Final = "20Gi"
"""Limit of the adapters of a pod that has a volume of its own for them."""


class Volume(NamedTuple):
    """One volume and its mount. `source`: the volume without its name; `sub_path`: the folder of it that is mounted.

    `serving`: the download does not mount it.
    """

    name: str
    source: dict[str, Any]
    path: str
    read_only: bool = False
    serving: bool = False
    sub_path: str = ""

    def volume(self) -> dict[str, Any]:
        """The entry of `spec.volumes`."""
        return {"name": self.name, **self.source}

    def mount(self, *, writable: bool = False) -> dict[str, Any]:
        """The entry of `volumeMounts`. `writable`: even if the server may only read it."""
        mount: dict[str, Any] = {"name": self.name, "mountPath": self.path}
        if self.read_only and not writable:
            mount["readOnly"] = True
        if self.sub_path:
            mount["subPath"] = self.sub_path
        return mount


def build(service: InferenceService) -> list[Volume]:
    """Build the volumes: scratch space, shared memory for ranks, and the model or cache volume by URI scheme.

    Files in shared memory count as memory of the container that writes them. NCCL's documentation recommends
    1 GiB for a container; here each rank gets that.
    """
    volumes = [Volume(SCRATCH, {"emptyDir": {"sizeLimit": SCRATCH_LIMIT}}, SCRATCH_DIRECTORY)]
    ranks = service.spec.parallelism.tensor
    if ranks > 1:
        shared = {"emptyDir": {"medium": "Memory", "sizeLimit": f"{ranks}Gi"}}
        volumes.append(Volume("dshm", shared, "/dev/shm"))
    source = service.source
    if source.scheme == "pvc":
        claim = {"persistentVolumeClaim": {"claimName": source.location, "readOnly": True}}
        volumes.append(Volume("model", claim, MODEL_DIRECTORY, read_only=True))
    elif source.scheme == "file":
        host = {"hostPath": {"path": source.location, "type": "Directory"}}
        volumes.append(Volume("model", host, MODEL_DIRECTORY, read_only=True))
    elif source.is_fetched:
        # Adapters are downloaded by the server, when it runs.
        writable = service.spec.lora is not None and not has_adapters_volume(service)
        volumes.append(Volume(CACHE, _cache_source(service), CACHE_DIRECTORY, read_only=not writable))
    if has_adapters_volume(service):
        volumes.append(Volume(ADAPTERS, _adapters_source(service), ADAPTERS_DIRECTORY, serving=True))
    keys = service.spec.api_keys_secret_ref
    if keys is not None:
        # A mount without subPath: the kubelet keeps it up to date.
        items = [{"key": keys.key, "path": API_KEYS_FILE.rpartition("/")[2]}]
        secret = {"secret": {"secretName": keys.name, "items": items, "defaultMode": 0o440}}
        volumes.append(Volume("api-keys", secret, API_KEYS_DIRECTORY, read_only=True, serving=True))
    return volumes


def model_argument(service: InferenceService) -> str:
    """Return the value of `--model` inside the pod."""
    source = service.source
    if source.scheme == "pvc":
        return f"{MODEL_DIRECTORY}/{source.path}".rstrip("/")
    return MODEL_DIRECTORY if source.scheme == "file" else service.spec.model.uri


def download_directory(service: InferenceService) -> str:
    """Return the directory of downloaded models inside the pod."""
    cache = service.mounted_cache
    return f"{CACHE_DIRECTORY}/{model_cache_claim.directory(cache.name)}" if cache.claim else CACHE_DIRECTORY


def needs_claim(service: InferenceService) -> bool:
    """Return whether the operator must create the cache's claim."""
    return service.source.is_fetched and service.spec.cache.size is not None


def has_adapters_volume(service: InferenceService) -> bool:
    """Return whether adapters have a volume of their own.

    It is that of `lora.cache`, or a volume per pod where a ModelCache mounts the model read-only.
    """
    lora = service.spec.lora
    return lora is not None and (lora.cache is not None or bool(service.mounted_cache.name))


def shares_adapters(service: InferenceService) -> bool:
    """Return whether all pods see the same downloaded adapters, those on other nodes too."""
    lora, cache = service.spec.lora, service.spec.cache
    if lora is not None and lora.cache is not None:
        return lora.cache.claim_name is not None
    return not service.mounted_cache.name and (cache.claim_name is not None or cache.size is not None)


def adapters_directory(service: InferenceService) -> str:
    """Return the directory of downloaded adapters inside the pod."""
    return ADAPTERS_DIRECTORY if has_adapters_volume(service) else download_directory(service)


def _adapters_source(service: InferenceService) -> dict[str, Any]:
    lora = service.spec.lora
    cache = lora.cache if lora is not None else None
    return {"emptyDir": {"sizeLimit": ADAPTERS_LIMIT}} if cache is None else shared_source(cache)


def shared_source(volume: SharedVolume) -> dict[str, Any]:
    """Return the source of a volume that pods share."""
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    return {"persistentVolumeClaim": {"claimName": volume.claim_name}}


def downloads_to_node(service: InferenceService) -> bool:
    """Return whether downloaded weights use the node's disk, which the scheduler must count."""
    return service.source.is_fetched and _cache_source(service) == {"emptyDir": {}}


def _cache_source(service: InferenceService) -> dict[str, Any]:
    cache = service.spec.cache
    mounted = service.mounted_cache
    if mounted.name:
        claim = mounted.claim or model_cache_claim.name(service.name, mounted.name)
        return {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "Directory"}}
    if cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache.size is not None:
        return {"persistentVolumeClaim": {"claimName": cache_claim.name(service)}}
    return {"emptyDir": {}}
