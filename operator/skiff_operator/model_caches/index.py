"""The index of ModelCaches, by which a reconcile chooses the one of an InferenceService."""

import asyncio
from collections.abc import Iterable

import msgspec

from skiff_operator import model_uri
from skiff_operator.errors import Retryable
from skiff_operator.model_caches import prefetch
from skiff_operator.model_caches.spec import DEFAULT_REVISION, ModelCache
from skiff_operator.settings import Settings
from skiff_operator.spec import Cache, InferenceService, MountedCache


class Index:
    """The ModelCaches as they were last listed. `wanted` is set when one must be made that does not exist."""

    def __init__(self, settings: Settings) -> None:
        """Create an index that is not listed yet."""
        self.wanted = asyncio.Event()
        self._settings = settings
        self._caches: dict[str, ModelCache] = {}
        self._listed = self._refused = False

    def replace(self, caches: Iterable[ModelCache]) -> None:
        """Store the result of a list."""
        self._caches = {cache.name: cache for cache in caches}
        self._listed, self._refused = True, False

    def give_up(self) -> None:
        """Work with what is known, because the API server refuses the list: InferenceServices must not wait for it."""
        self._listed = self._refused = True

    def choose(self, service: InferenceService) -> MountedCache:
        """Return the ModelCache that the pods of `service` mount.

        A choice that was made stays while its ModelCache has the model, also when that is being deleted, or unknown:
        another choice restarts pods. So a service that runs without a cache does not begin to use one. With
        `cache.prefetch`, the choice may be one that is yet to be made.

        Raises:
            Retryable: no choice was made, and the ModelCaches are not listed yet.
        """
        current = service.model_cache
        if current is not None and (
            current.name not in self._caches or self._has_model(self._caches[current.name], service)
        ):
            return current
        if not self._listed:
            raise Retryable("the ModelCaches are not listed yet")
        found = [
            cache for cache in self._caches.values() if not cache.deleting and self._has_model(cache, service)
        ]
        if found:
            chosen = min(found, key=_name)
            return MountedCache(chosen.name, chosen.claim_name)
        if service.spec.cache.prefetch and not self._refused:
            self.wanted.set()
            return MountedCache(prefetch.name(service, self._settings))
        return MountedCache()

    def _has_model(self, cache: ModelCache, service: InferenceService) -> bool:
        return has_model(cache, service, self._settings)


def has_model(cache: ModelCache, service: InferenceService, settings: Settings) -> bool:
    """Return whether the cache has the model that `service` would download, where its pods can mount it.

    The model is known by uri, revision and the address of its source. A claim is mounted in its own namespace. What was
    made by `cache.prefetch` is only on the nodes of the InferenceServices that need the same.
    """
    if msgspec.structs.replace(service.spec.cache, prefetch=False) != Cache():
        return False
    if cache.managed:
        return cache.name == prefetch.name(service, settings)
    model, kept, scheme = service.spec.model, cache.spec.model, service.source.scheme
    address = model_uri.address(scheme, model.endpoint, service.spec.runtime.env)
    return (
        model.uri == kept.uri
        and (model.revision or DEFAULT_REVISION) == cache.revision
        and address is not None
        and address == model_uri.address(scheme, kept.endpoint, cache.spec.env)
        and (cache.claim is None or cache.claim.namespace == service.namespace)
    )


def _name(cache: ModelCache) -> str:
    return cache.name
