"""The plan of the adapters of one InferenceService: which its pods shall have, and the next steps of each pod. Pure.

Deleted adapters leave no record: an adapter that a pod lists and that is not wanted is unloaded. An adapter that was
loaded manually is therefore unloaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from skiff_operator import model_uri
from skiff_operator.errors import InvalidSpec
from skiff_operator.lora import report
from skiff_operator.lora.spec import LoRAAdapter
from skiff_operator.resources import volumes
from skiff_operator.spec import Adapter, InferenceService
from skiff_operator.status import AdapterStatus, Problem

MAX_ADAPTERS: Final = 256
"""Adapters of one InferenceService: its status lists all of them."""
MAX_STARTUP_BYTES: Final = 96 << 10
"""Bytes of the variable with the adapters that pods load before they are ready; a program starts with at most 128 KiB in one."""
_MESSAGE_CHARACTERS: Final = 512
_FIRST_RETRY_SECONDS: Final = 2.0
_LAST_RETRY_SECONDS: Final = 120.0
_REFUSED_RETRY_SECONDS: Final = 300.0


class DesiredAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that every pod of the service should load.

    `path`: its URI as pods resolve it; `source`: the LoRAAdapter, or empty. `problem`: why it cannot be loaded; with
    `awaited` it is not available yet, and pods that have it keep it.
    """

    name: str
    uri: str
    path: str = ""
    source: str = ""
    problem: Problem | None = None
    awaited: bool = False


class Fault(msgspec.Struct, frozen=True):
    """A failed request to a pod. `permanent`: the pod has refused the adapter, and would do so again."""

    reason: str
    message: str
    permanent: bool = False


class Attempt(msgspec.Struct, frozen=True):
    """The last failed load of an adapter by a pod, of `times` in a row, at `at` seconds of any clock; of an unload without a path."""

    path: str
    fault: Fault
    times: int
    at: float

    @property
    def not_before(self) -> float:
        """The time of the next load of the same files."""
        if self.fault.permanent:
            return self.at + _REFUSED_RETRY_SECONDS
        delay: float = _FIRST_RETRY_SECONDS * 2 ** min(self.times - 1, 16)
        return self.at + min(delay, _LAST_RETRY_SECONDS)


class Step(NamedTuple):
    """One request to a pod. `replace`: it has other files under this name."""

    action: Literal["load", "unload"]
    name: str
    path: str = ""
    replace: bool = False


def desired_adapters(service: InferenceService, adapters: Sequence[LoRAAdapter]) -> list[DesiredAdapter]:
    """Return the adapters of a service: those of its spec, then those of `adapters`, the oldest first.

    Of several with one name, the first is loaded and the others are not.
    """
    found: list[DesiredAdapter] = []
    taken = {service.model_name: "the model"}
    if service.spec.lora is None:
        text = (
            f"InferenceService {service.name} serves no LoRA adapters; set spec.lora: {{}} in it, which replaces "
            "its pods once"
        )
        return [_refused(each, Problem("LoRANotEnabled", text)) for each in adapters]
    for given in service.spec.adapters:
        found.append(_wanted(service, given, "", taken, len(found)))
    for each in adapters:
        if each.spec.credentials_secret_ref is not None and not volumes.shares_adapters(service):
            text = (
                "credentials stay with the pod that downloads, which needs a claim that the serving pods share; set "
                f"spec.lora.cache.claimName, spec.cache.claimName or size in InferenceService {service.name}"
            )
            found.append(_refused(each, Problem("NoSharedCache", text)))
            continue
        given = Adapter(name=each.served_name, uri=each.spec.uri)
        found.append(_wanted(service, given, each.name, taken, len(found)))
    return found


def awaiting(each: DesiredAdapter, problem: Problem) -> DesiredAdapter:
    """Return an adapter whose files are not there yet, for the reason of `problem`."""
    return msgspec.structs.replace(each, problem=problem, awaited=True)


def adapters_without_service(adapters: Iterable[LoRAAdapter]) -> list[DesiredAdapter]:
    """Return the adapters of an InferenceService that does not exist."""
    return [
        _refused(
            each,
            Problem("ServiceNotFound", f"there is no InferenceService {each.service[1]} in this namespace"),
        )
        for each in adapters
    ]


def _refused(adapter: LoRAAdapter, problem: Problem) -> DesiredAdapter:
    return DesiredAdapter(
        name=adapter.served_name, uri=adapter.spec.uri, source=adapter.name, problem=problem
    )


def _wanted(
    service: InferenceService, given: Adapter, source: str, taken: dict[str, str], count: int
) -> DesiredAdapter:
    """Check one adapter against those before it, whose names are `taken`."""
    problem, path = None, ""
    if given.name in taken:
        text = f"the name {given.name} is that of {taken[given.name]}; give the adapter another one"
        problem = Problem("NameConflict", text)
    elif count >= MAX_ADAPTERS:
        problem = Problem("TooManyAdapters", f"an InferenceService has at most {MAX_ADAPTERS} adapters")
    else:
        taken[given.name] = f"LoRAAdapter {source}" if source else "an adapter in spec.adapters"
        try:
            path = _path(service, given.uri)
        except InvalidSpec as error:
            problem = Problem(error.reason, str(error))
    return DesiredAdapter(name=given.name, uri=given.uri, path=path, source=source, problem=problem)


def _path(service: InferenceService, uri: str) -> str:
    """Return the URI of an adapter as pods understand it. Raises `InvalidSpec` for one that they cannot reach."""
    if "," in uri:
        raise InvalidSpec(f"uri: {uri!r} has a comma, which separates adapters")
    source, model = model_uri.parse(uri, field="uri"), service.source
    if source.is_fetched:
        return uri
    if source.scheme == "pvc" and (model.scheme, model.location) == ("pvc", source.location):
        return f"{volumes.MODEL_DIRECTORY}/{source.path}"
    mounted = f"; the pods mount claim {model.location}" if model.scheme == "pvc" else ""
    raise InvalidSpec(
        f"uri: {uri} is not in a volume of the pods{mounted}; use hf://, s3://, gs:// or oci://, or the claim of the model"
    )


def steps(
    adapters: Sequence[DesiredAdapter],
    listed: Mapping[str, str],
    loaded: Mapping[str, str],
    attempts: Mapping[str, Attempt],
    busy: Iterable[str],
    now: float,
) -> list[Step]:
    """Return the next requests to one pod.

    `listed`: its adapters with their roots, as it says; `loaded`: the paths by name that this process had it load;
    `attempts`: its failed loads by name; `busy`: names with a request in flight.
    """
    desired = {each.name: each.path for each in adapters if each.problem is None}
    kept = {each.name for each in adapters if each.awaited}
    in_flight = set(busy)

    def is_due(name: str, path: str) -> bool:
        last = attempts.get(name)
        return name not in in_flight and (last is None or last.path != path or last.not_before <= now)

    surplus = sorted(listed.keys() - desired.keys() - kept)
    found = [Step("unload", name) for name in surplus if is_due(name, "")]
    for name, path in desired.items():
        if is_due(name, path) and not has(name, path, listed, loaded):
            found.append(Step("load", name, path, replace=name in listed))
    return found


def has(name: str, path: str, listed: Mapping[str, str], loaded: Mapping[str, str]) -> bool:
    """Return whether a pod serves an adapter from this path, by the root that it lists or by our own load request."""
    return name in listed and path in (listed[name], loaded.get(name))


class PodAdapters(NamedTuple):
    """One ready pod: its name, its adapters (None: it does not answer, for the reason of `fault`), and its failed loads."""

    pod: str
    listed: Mapping[str, str] | None
    loaded: Mapping[str, str]
    attempts: Mapping[str, Attempt]
    fault: Fault | None = None


def status(each: DesiredAdapter, views: Sequence[PodAdapters]) -> AdapterStatus:
    """Compute the status of one adapter from the ready pods."""
    having = [view for view in views if view.listed and has(each.name, each.path, view.listed, view.loaded)]
    ready, reason, message = _verdict(each, views, len(having))
    return AdapterStatus(
        name=each.name,
        uri=each.uri,
        source=each.source,
        ready=ready,
        loaded_pods=0 if each.problem else len(having),
        reason=reason,
        message=message[:_MESSAGE_CHARACTERS],
    )


def _verdict(each: DesiredAdapter, views: Sequence[PodAdapters], having: int) -> tuple[bool, str, str]:
    if each.problem is not None:
        return False, each.problem.reason, each.problem.message
    if not views:
        return False, report.NO_PODS, "no pod is ready; pods load it when they start"
    count = f"{having} of {len(views)} ready pods answer for it"
    if having == len(views):
        return True, report.LOADED, count
    failed = [
        (view.pod, attempt.fault)
        for view in views
        if (attempt := view.attempts.get(each.name)) is not None and attempt.path == each.path
    ]
    failed += [(view.pod, view.fault) for view in views if view.fault is not None]
    if failed:
        pod, fault = min(failed, key=_permanent_first)
        return False, fault.reason, f"{count}; pod {pod}: {fault.message}"
    return False, report.LOADING, count


def _permanent_first(failed: tuple[str, Fault]) -> tuple[bool, str]:
    return not failed[1].permanent, failed[0]


def startup_adapters(adapters: Sequence[DesiredAdapter], views: Sequence[PodAdapters]) -> list[Adapter]:
    """Return the adapters that new pods load before they are ready: those that at least one pod serves and none refuses.

    A pod that cannot load one of these might not start. They are one environment variable, and Linux bounds its length: those
    beyond are loaded when the pod is ready.
    """
    found: list[Adapter] = []
    size = 0
    for each in adapters:
        if (
            each.problem is None
            and any(view.listed and has(each.name, each.path, view.listed, view.loaded) for view in views)
            and not any(
                attempt.path == each.path and attempt.fault.permanent
                for view in views
                if (attempt := view.attempts.get(each.name)) is not None
            )
        ):
            size += len(each.name.encode()) + len(each.path.encode()) + 2  # as NAME=URI, with a comma
            if size > MAX_STARTUP_BYTES:
                break
            found.append(Adapter(name=each.name, uri=each.path))
    return found
