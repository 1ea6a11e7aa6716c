"""The volume of compiled GPU kernels: kernels compiled by one pod are reused by the next.

The kernels are code that the server loads, and the only thing that it writes to a volume. So they have a folder of their
own on the volume, apart from weights, and in it one for each namespace and image: libraries of another version never
read them. Below that, the compilers' own keys distinguish GPUs, flags and shapes. A claim is shared by one namespace at
most; a hostPath by every namespace that may use host paths, and each of them could replace the kernels of the others.
"""

import hashlib
from typing import Any, Final

from skiff_operator.resources.volumes import Volume, shared_source
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

DIRECTORY: Final = "/kernels"
FOLDER: Final = "skiff-kernels"
"""The folder on a claim, which may also be that of the weights. A hostPath is mounted whole: it must belong to the
pods' user, and the kubelet would create a folder in it for root."""
_DIGITS: Final = 16


def build(service: InferenceService) -> list[Volume]:
    """Build the volume, if the spec has one; only the server mounts it."""
    given = service.spec.kernel_cache
    if given is None:
        return []
    folder = FOLDER if given.claim_name is not None else ""
    return [Volume("kernels", shared_source(given), DIRECTORY, sub_path=folder)]


def variables(service: InferenceService, image: str) -> list[dict[str, Any]]:
    """Return the variable that names the folder of this namespace and image."""
    if service.spec.kernel_cache is None:
        return []
    key = hashlib.sha256(f"{service.namespace} {image}".encode()).hexdigest()[:_DIGITS]
    return [{"name": contract.ENV_KERNEL_CACHE_DIR, "value": f"{DIRECTORY}/{key}"}]
