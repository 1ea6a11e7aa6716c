"""Show what a manifest would change: fields, pods that restart, the room that a rollout needs, and whether the model fits.

The API server validates the manifest in a dry run, as `kubectl apply` would send it; nothing is changed. Pods restart if
the operator would give them another template than the recorded one that they have. The model's config.json alone decides
whether the weights and the KV cache fit a GPU: of an hf:// model nothing else is downloaded. This part needs the runtime's
packages (`pip install 'skiff[runtime]'`). Exit codes are those of `kubectl diff`: 0 without a difference, 1 with one, and
2 for an error.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import yaml

from skiff_operator import capacity, ownership, rollout_strategy, spec, strategy_chooser, workload
from skiff_operator.capacity import Amounts
from skiff_operator.cli import capacity as cluster_capacity
from skiff_operator.cli import cluster, installation, pinned_template, table
from skiff_operator.cli.capacity import NodeRoom
from skiff_operator.cli.cluster import Cluster
from skiff_operator.cli.pinned_template import Live, PlannedTemplate
from skiff_operator.client import MERGE_PATCH, Client
from skiff_operator.errors import ApiNotFound, InvalidSpec, OperatorError
from skiff_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, INFERENCE_SERVICE, POD
from skiff_operator.redact import redact
from skiff_operator.resources import containers, credentials, deployment, volumes
from skiff_operator.resources.metadata import LABEL_REVISION
from skiff_operator.room import RoomFinder
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

NO_DIFFERENCE: Final = 0
DIFFERENCE: Final = 1
MAX_BYTES: Final = 4 << 20
MAX_DOCUMENTS: Final = 100
_INFO_SECONDS: Final = 120.0
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_SIZED_BY: Final = (
    "--quantization",
    "--rope-scaling",
    "--max-running-requests",
    "--max-num-batched-tokens",
    "--page-size",
    "--kv-cache-dtype",
    "--mem-fraction-static",
)
"""Flags of `skiff serve` with a value that change the sizes; `skiff info` accepts them too."""
_EXPERT_PARALLEL: Final = "--expert-parallel"
NODES: Final = 6
ZERO: Final = Decimal(0)


class Change(msgspec.Struct, frozen=True):
    """A field with its old and its new value as text, which is empty where the field is absent."""

    field: str
    old: str
    new: str


class GpuFit(msgspec.Struct, frozen=True):
    """The KV cache that remains beside the weights on one kind of GPU, as `skiff info` computes it."""

    name: str
    memory_bytes: int
    fits: bool
    kv_tokens: int
    full_length_requests: float


class RankMemory(msgspec.Struct, frozen=True):
    """The memory that each rank needs."""

    weight_bytes: int
    kv_bytes_per_token: int
    working_bytes: int


class ModelMemory(msgspec.Struct, frozen=True):
    """The output of `skiff info --json`, as far as it is shown here."""

    dtype: str
    max_model_len: int
    each_rank: RankMemory
    gpus: tuple[GpuFit, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The effect of one manifest. `exists` is False for a new InferenceService.

    `pods` are the names of those that restart, `surge` the number of pods that a rollout needs beside them, and `started`
    those that are added or, below 0, removed by `replicas`. `replacement` describes a rollout that stops old pods first;
    `paused`: the rollout waits for `skiff rollout resume`. `requests` are the resources of one pod, and `nodes` the room
    for it; None where it is not known. `operator` describes an operator of another version. `memory` is a text where the
    sizes are not known.
    """

    namespace: str
    name: str
    exists: bool
    changes: tuple[Change, ...]
    restarts: bool
    paused: bool
    pods: tuple[str, ...]
    surge: int
    started: int
    replacement: str
    requests: Amounts
    gpus: int
    nodes: tuple[NodeRoom, ...] | None
    operator: str
    memory: ModelMemory | str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "-f",
        "--filename",
        required=True,
        metavar="FILE",
        help="manifest with InferenceServices; - for standard input",
    )
    parser.add_argument(
        "--no-model",
        action="store_true",
        help="do not read the model's configuration, which may need the network",
    )
    cluster.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of each InferenceService in the file, and return `kubectl diff`'s exit code."""
    manifests = read_manifests(arguments.filename)
    with cluster.connected(arguments) as connected:
        plans = [_plan(connected, each, with_model=not arguments.no_model) for each in manifests]
    print("\n\n".join(render(each) for each in plans))
    return DIFFERENCE if any(each.changes or not each.exists for each in plans) else NO_DIFFERENCE


def read_manifests(filename: str) -> list[dict[str, Any]]:
    """Return the InferenceServices of a YAML or JSON file.

    Raises:
        OperatorError: it cannot be read, or contains something else.
    """
    try:
        with sys.stdin if filename == "-" else Path(filename).open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise OperatorError(f"{filename} has more than {MAX_BYTES >> 20} MiB")
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OperatorError(f"{filename}: {error}") from error
    if len(documents) > MAX_DOCUMENTS:
        raise OperatorError(f"{filename} has more than {MAX_DOCUMENTS} documents")
    for each in documents:
        meta = each.get("metadata") if isinstance(each, dict) else None
        if not isinstance(meta, dict) or not isinstance(meta.get("name"), str):
            raise OperatorError(f"{filename}: a document is no Kubernetes object with a metadata.name")
        if each.get("kind") != INFERENCE_SERVICE.name:
            raise OperatorError(
                f"{filename}: {each.get('kind')} {meta['name']}: only InferenceServices can be planned"
            )
    if not documents:
        raise OperatorError(f"{filename} contains no InferenceService")
    return documents


def compare(live: dict[str, Any], planned: dict[str, Any]) -> tuple[Change, ...]:
    """Return the fields of two specs that differ; entries of lists with names are compared by name."""
    old, new = dict(_flatten(live, "spec")), dict(_flatten(planned, "spec"))
    fields = [*new, *(field for field in old if field not in new)]
    return tuple(
        Change(field, _shown(field, old), _shown(field, new))
        for field in fields
        if old.get(field) != new.get(field) and not _is_filled(field, old, new)
    )


def merge_patch(manifest: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    """Return the patch that `kubectl apply` sends: the manifest's spec, and null for what it removed since the last apply."""
    applied = (live["metadata"].get("annotations") or {}).get(_LAST_APPLIED, "{}")
    try:
        last = json.loads(applied).get("spec") or {}
    except (ValueError, AttributeError):
        last = {}
    return {"spec": _with_removals(manifest.get("spec") or {}, last)}


def info_arguments(service: InferenceService, gpu_bytes: int) -> list[str]:
    """Return the arguments of `skiff info` for a service; `gpu_bytes` is the memory of its GPUs, or 0."""
    parsed, arguments = service.spec, ["info", service.spec.model.uri, "--json"]
    arguments += [contract.FLAG_TENSOR_PARALLEL, str(parsed.parallelism.tensor)]
    if parsed.model.revision is not None:
        arguments += [contract.FLAG_REVISION, parsed.model.revision]
    if parsed.runtime.dtype != "auto":
        arguments += [contract.FLAG_DTYPE, parsed.runtime.dtype]
    if parsed.runtime.max_model_len is not None:
        arguments += [contract.FLAG_MAX_MODEL_LEN, str(parsed.runtime.max_model_len)]
    arguments += _sizing_flags(parsed.runtime.args)
    if gpu_bytes:
        arguments += ["--gpu-memory", f"{gpu_bytes / (1 << 30):.6g}"]
    return arguments


def render(planned: Plan) -> str:
    """Return the plan as text."""
    lines = [*_headline(planned), *_operator(planned), *_pods(planned), *_rooms(planned), *_memory(planned)]
    return "\n".join(lines)


def _plan(connected: Cluster, manifest: dict[str, Any], *, with_model: bool) -> Plan:
    namespace = manifest["metadata"].get("namespace") or connected.namespace
    name, client = manifest["metadata"]["name"], connected.client
    live, after = connected.run(_dry_run(client, namespace, manifest))
    found = connected.run(_read_live(client, namespace, live)) if live is not None else None
    operator = connected.run(
        installation.find(client, namespace, found.records() if found is not None else ())
    )
    try:
        service = spec.parse(after)
        planned = _choose_template(found, service, operator)
    except InvalidSpec as error:
        if not (difference := operator.difference()):
            raise
        raise OperatorError(f"{error} ({difference})") from error
    new, template = planned.deployment["spec"], planned.deployment["spec"]["template"]
    replicas = live["spec"].get("replicas", 1) if live is not None else 0
    restarting = planned.restarts and min(replicas, service.spec.replicas) > 0
    reason = connected.run(_reason_to_replace(client, service, planned)) if restarting else ""
    policy = service.spec.rollout
    own = connected.run(_own_pods(client, namespace, name)) if live is not None else ()
    resource = installation.shown_gpu_resource(service, [template["spec"]])
    nodes = connected.run(_room(client, service, template["spec"], own))
    return Plan(
        namespace=namespace,
        name=name,
        exists=live is not None,
        # The fields of a new one are those of its manifest; the API server adds every default.
        changes=compare(live["spec"], after["spec"])
        if live is not None
        else compare({}, manifest.get("spec") or {}),
        restarts=planned.restarts,
        paused=bool(new.get("paused")),
        pods=tuple(sorted(pod["metadata"]["name"] for pod in own if _revision(pod) != planned.revision))
        if planned.restarts
        else (),
        surge=_surge(new) if restarting and not reason else 0,
        started=service.spec.replicas - replicas,
        replacement=rollout_strategy.announcement(policy, reason, service.spec.replicas) if reason else "",
        requests=capacity.requests(template["spec"]),
        gpus=containers.gpus(service),
        nodes=nodes,
        operator=operator.difference(),
        memory=_model_memory(service, nodes, resource) if with_model else "not computed (--no-model)",
    )


async def _read_live(client: Client, namespace: str, service: dict[str, Any]) -> Live:
    """Read the Deployment and the revisions of an InferenceService; those that others control are not its own."""
    meta = service["metadata"]
    selector = f"{contract.LABEL_SERVICE}={meta['name']}"
    deployments = [
        each
        async for each in client.list(DEPLOYMENT, namespace, selector=selector)
        if each["metadata"]["name"] == meta["name"] and ownership.controller_uid(each) == meta["uid"]
    ]
    revisions = [
        each
        async for each in client.list(CONTROLLER_REVISION, namespace, selector=selector)
        if ownership.controller_uid(each) == meta["uid"]
    ]
    return Live(service, deployments[0] if deployments else None, tuple(revisions))


def _choose_template(
    live: Live | None, service: InferenceService, operator: installation.Installation
) -> PlannedTemplate:
    """Choose the template of the pods. Raises `InvalidSpec` for a spec that the operator refuses."""
    before, template = None, None
    if live is not None and live.deployment is not None:
        template = live.deployment["spec"]["template"]["spec"]
        with contextlib.suppress(InvalidSpec):
            before = spec.parse(live.service)
    candidates = tuple(operator.candidates(installation.shown_settings(before, template)))
    if live is not None:
        return pinned_template.choose(live, service, candidates)
    made, _ = pinned_template.build(service, candidates)
    return PlannedTemplate(made, deployment.revision(made), restarts=False)


async def _reason_to_replace(client: Client, service: InferenceService, planned: PlannedTemplate) -> str:
    """Return the reason why the operator would replace pods in place, by its own estimate; empty if it would not."""
    choice = None
    if service.spec.rollout.strategy == "Auto":
        pod_spec = planned.deployment["spec"]["template"]["spec"]
        room = await RoomFinder(client, Settings()).find(service, planned.revision, pod_spec)
        choice = strategy_chooser.choose(planned.revision, room)
    return rollout_strategy.replaces(service.spec.rollout, choice, planned.revision)


async def _room(
    client: Client, service: InferenceService, pod_spec: dict[str, Any], own: Sequence[dict[str, Any]]
) -> tuple[NodeRoom, ...] | None:
    """Return the room of the cluster's nodes for one pod; a volume of one node keeps all pods of a service there."""
    nodes = await cluster_capacity.gather(client, pod_spec)
    held = {pod["spec"].get("nodeName") for pod in own} - {None}
    if nodes is None or not held or not volumes.needs_claim(service):
        return nodes
    return tuple(each._replace(admits=each.admits and each.node.name in held) for each in nodes)


async def _dry_run(
    client: Client, namespace: str, manifest: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the live object, or None, and the one that the API server would store.

    Raises:
        OperatorError: the API server refuses the manifest; the message is its own.
    """
    query = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": cluster.FIELD_MANAGER}
    name = quote(manifest["metadata"]["name"], safe="")
    try:
        live = await client.get(INFERENCE_SERVICE, namespace, name)
    except ApiNotFound:
        path = INFERENCE_SERVICE.path(namespace)
        return None, await client.request("POST", path, manifest, query=query)
    path, patch = INFERENCE_SERVICE.path(namespace, name), merge_patch(manifest, live)
    return live, await client.request("PATCH", path, patch, query=query, content_type=MERGE_PATCH)


async def _own_pods(client: Client, namespace: str, name: str) -> tuple[dict[str, Any], ...]:
    """Return the pods of an InferenceService that have not ended and are not being deleted."""
    selector = f"{contract.LABEL_SERVICE}={name}"
    found = [pod async for pod in client.list(POD, namespace, selector=selector)]
    return tuple(
        pod
        for pod in found
        if workload.runs_in(pod, name)
        and "deletionTimestamp" not in pod["metadata"]
        and (pod.get("status") or {}).get("phase") in ("Pending", "Running")
    )


def _revision(pod: dict[str, Any]) -> str:
    return str((pod["metadata"].get("labels") or {}).get(LABEL_REVISION, ""))


def _surge(deployment_spec: dict[str, Any]) -> int:
    """Return the number of pods that a rollout may start before it stops old ones."""
    rolling = deployment_spec["strategy"].get("rollingUpdate") or {}
    surge, replicas = rolling.get("maxSurge", 0), deployment_spec["replicas"]
    return math.ceil(int(surge[:-1]) * replicas / 100) if isinstance(surge, str) else int(surge)


def _model_memory(
    service: InferenceService, nodes: Sequence[NodeRoom] | None, resource: str
) -> ModelMemory | str:
    """Return the memory that the model needs, or a text with the reason why it is not known.

    The computation is a process of its own, `skiff info`: the operator imports nothing of the runtime but the contract,
    and the runtime's dependencies may be missing.
    """
    if service.source.scheme not in ("hf", "demo"):
        return f"not known here: the model's files are in the cluster ({service.source.scheme}://)"
    known = [room for room in nodes or () if room.admits and room.gpu_memory_bytes(resource)]
    smallest = min(known, key=lambda room: room.gpu_memory_bytes(resource), default=None)
    gpu_bytes = smallest.gpu_memory_bytes(resource) if smallest is not None else 0
    command = [sys.executable, "-m", "skiff_runtime", *info_arguments(service, gpu_bytes)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_INFO_SECONDS,
            env=_environment(service),
        )
    except subprocess.TimeoutExpired:
        return f"not known: skiff info took longer than {_INFO_SECONDS:g} s"
    if not done.stdout:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        missing = "ModuleNotFoundError" in lines[-1]
        return "not computed: pip install 'skiff[runtime]'" if missing else f"not known: {redact(lines[-1])}"
    try:
        memory = msgspec.json.decode(done.stdout, type=ModelMemory)
    except msgspec.MsgspecError as error:
        return f"not known: skiff info printed something else ({error})"
    if smallest is None:
        return memory
    name = smallest.gpu_product(resource) or f"the GPUs of {smallest.node.name}"
    return msgspec.structs.replace(
        memory, gpus=tuple(msgspec.structs.replace(fit, name=name) for fit in memory.gpus)
    )


def _environment(service: InferenceService) -> dict[str, str]:
    """Return the environment of `skiff info`: options and hub of the service, not those of this machine's server."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(contract.ENV_PREFIX)}
    flags = (*_SIZED_BY, _EXPERT_PARALLEL, contract.FLAG_DTYPE, contract.FLAG_MAX_MODEL_LEN)
    sizing = {contract.ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper() for flag in flags}
    given = (
        *service.spec.runtime.env,
        *credentials.endpoint(service.source.scheme, service.spec.model.endpoint),
    )
    names = sizing | {contract.ENV_HUB_ENDPOINT}
    return own | {
        each["name"]: each["value"] for each in given if each.get("name") in names and "value" in each
    }


def _sizing_flags(arguments: Sequence[str]) -> list[str]:
    """Return the flags that change the sizes, from both `--flag=value` and `--flag value`."""
    found, following = [], ""
    for argument in arguments:
        flag, separator, _ = argument.partition("=")
        if following:
            found += [following, argument]
            following = ""
        elif flag in _SIZED_BY and separator:
            found.append(argument)
        elif flag in _SIZED_BY:
            following = flag
        elif flag == _EXPERT_PARALLEL:
            found.append(argument)
    return found


def _with_removals(new: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {name: None for name in last if name not in new}
    for name, value in new.items():
        before = last.get(name)
        both = isinstance(value, dict) and isinstance(before, dict)
        patch[name] = _with_removals(value, before) if both and before is not None else value
    return patch


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{path}.{name}")
    elif (
        isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value)
    ):
        for each in value:
            rest = {name: inner for name, inner in each.items() if name != "name"}
            yield from _flatten(rest, f"{path}[{each['name']}]")
    else:
        yield path, value


def _is_filled(field: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return True for a field that is empty in one spec and has fields of its own in the other, which are shown in its place."""
    inside = (f"{field}.", f"{field}[")
    return any(name.startswith(inside) for name in (old if field in new else new))


def _shown(field: str, values: dict[str, Any]) -> str:
    """Return a value as text. The value of an environment variable is masked if its name is that of a secret."""
    if field not in values:
        return ""
    value = values[field]
    text = value if isinstance(value, str) else json.dumps(value)
    name = field.removesuffix(".value").rpartition("[")[2].rstrip("]")
    return redact(f"{name}={text}").removeprefix(f"{name}=") if field.endswith("].value") else redact(text)


def _headline(planned: Plan) -> Iterator[str]:
    name = f"{planned.namespace}/{planned.name}"
    if not planned.exists:
        yield f"{name}: a new InferenceService"
        yield table.render(("  FIELD", "VALUE"), [(f"  {each.field}", each.new) for each in planned.changes])
    elif planned.changes:
        yield f"{name}: {len(planned.changes)} field{'s' if len(planned.changes) > 1 else ''} would change"
        rows = [(f"  {each.field}", each.old or "-", each.new or "-") for each in planned.changes]
        yield table.render(("  FIELD", "NOW", "PLANNED"), rows)
    else:
        yield f"{name}: no difference"


def _operator(planned: Plan) -> Iterator[str]:
    if planned.operator:
        yield f"Versions: {planned.operator}: a pod template that it builds anew may differ from the one shown here"


def _pods(planned: Plan) -> Iterator[str]:
    if planned.exists and not planned.changes:
        return
    if planned.restarts:
        names = f": {', '.join(planned.pods)}" if planned.pods else ""
        when = ", once the rollout is resumed" if planned.paused else ""
        yield f"Pods: {len(planned.pods)} restart{when}{names}"
    elif planned.exists:
        yield "Pods: none restarts"
    if planned.started:
        more = "start" if planned.started > 0 else "stop"
        yield f"Replicas: {abs(planned.started)} {more}"


def _rooms(planned: Plan) -> Iterator[str]:
    if planned.replacement:
        yield f"Rollout: {planned.replacement}"
    pods = planned.surge + max(planned.started, 0)
    if not pods:
        return
    needed = [
        (name, value) for name, value in capacity.devices_first(planned.requests) if name != capacity.PODS
    ]
    each = ", ".join(f"{name} {capacity.quantity(name, value)}" for name, value in needed)
    why = "beside the running ones" if planned.exists else "in all"
    yield f"Room: {pods} pod{'s' if pods > 1 else ''} {why}, each with {each}"
    if planned.nodes is None or any(room.free is None for room in planned.nodes):
        yield "  free resources are not known: you may not list the nodes and pods of the cluster"
        return
    admitting = [room for room in planned.nodes if room.admits]
    shown = sorted(admitting, key=lambda room: -room.pods(planned.requests))[:NODES]
    for room in shown:
        free = ", ".join(
            f"{name} {capacity.quantity(name, max((room.free or {}).get(name, ZERO), ZERO))}"
            f" of {capacity.quantity(name, room.node.allocatable.get(name, ZERO))}"
            for name, _ in needed
        )
        yield f"  free on {room.node.name}: {free}"
    if len(admitting) > len(shown):
        yield f"  and {len(admitting) - len(shown)} more nodes"
    places = sum(room.pods(planned.requests) for room in admitting)
    if places < pods:
        candidates = [(room.node._replace(allocatable=room.free or {}), ()) for room in admitting]
        shortage = capacity.find_room(planned.requests, candidates).shortage if not places else ""
        because = f" ({shortage})" if shortage else ""
        yield f"  not enough: room for {places} of {pods} pods now{because}; the others wait"


def _memory(planned: Plan) -> Iterator[str]:
    memory = planned.memory
    if isinstance(memory, str):
        yield f"Memory: {memory}"
        return
    need = memory.each_rank
    yield (
        f"Memory of each rank: weights {_size(need.weight_bytes)} in {memory.dtype}, KV cache "
        f"{_size(need.kv_bytes_per_token)} a token, working memory up to {_size(need.working_bytes)}"
    )
    if not planned.gpus:
        yield "  on a CPU the KV cache takes its share of the free memory; see resources.limits.memory"
        return
    for fit in memory.gpus:
        result = (
            f"fits, {fit.kv_tokens:,} tokens of KV cache: {fit.full_length_requests:.1f} requests of "
            f"{memory.max_model_len:,} tokens"
            if fit.fits
            else "does not fit"
        )
        yield f"  {fit.name} ({_size(fit.memory_bytes)}): {result}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"
