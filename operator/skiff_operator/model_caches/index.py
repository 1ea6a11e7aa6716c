"""The index of ModelCaches, by which a reconcile chooses the one of an InferenceService."""

from collections.abc import Iterable

from skiff_operator.errors import Retryable
from skiff_operator.model_caches.spec import DEFAULT_REVISION, ModelCache
from skiff_operator.spec import Cache, InferenceService
from skiff_runtime import contract


class Index:
    """The ModelCaches as they were last listed."""

    def __init__(self) -> None:
        """Create an index that is not listed yet."""
        self._caches: dict[str, ModelCache] = {}
        self._listed = False

    def replace(self, caches: Iterable[ModelCache]) -> None:
        """Store the result of a list."""
        self._caches = {cache.name: cache for cache in caches}
        self._listed = True

    def give_up(self) -> None:
        """Work with what is known, because the API server refuses the list: InferenceServices must not wait for it."""
        self._listed = True

    def choose(self, service: InferenceService) -> str:
        """Return the ModelCache that the pods of `service` mount; empty for none.

        A choice that was made stays while its ModelCache has the model, also when that is being deleted, or unknown:
        another choice restarts pods. So a service that runs without a cache does not begin to use one.

        Raises:
            Retryable: no choice was made, and the ModelCaches are not listed yet.
        """
        current = service.model_cache
        if current is not None and (current not in self._caches or has_model(self._caches[current], service)):
            return current
        if not self._listed:
            raise Retryable("the ModelCaches are not listed yet")
        return min(
            (
                cache.name
                for cache in self._caches.values()
                if not cache.deleting and has_model(cache, service)
            ),
            default="",
        )


def has_model(cache: ModelCache, service: InferenceService) -> bool:
    """Return whether the cache has the model that `service` would download: by uri, revision and hub."""
    model = service.spec.model
    return (
        service.spec.cache == Cache()
        and model.uri == cache.spec.model.uri
        and (model.revision or DEFAULT_REVISION) == cache.revision
        and _hub(service.spec.runtime.env) == _hub(cache.spec.env) is not None
    )


def _hub(env: Iterable[dict[str, object]]) -> object:
    """Return the address of the hub in an environment: empty by default, None if it is not known here."""
    for each in env:
        if each.get("name") == contract.ENV_HUB_ENDPOINT:
            return None if "valueFrom" in each else each.get("value", "")
    return ""
