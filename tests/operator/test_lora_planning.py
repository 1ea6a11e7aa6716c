"""LoRA adapters: the pure parts. Which adapters pods shall have, the next requests, statuses, and what changes a pod template."""

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from services import service

from skiff_operator import plan as objects_plan
from skiff_operator import revisions
from skiff_operator.errors import InvalidSpec
from skiff_operator.lora import fetcher, plan
from skiff_operator.lora.plan import Attempt, DesiredAdapter, Fault, PodAdapters, Step
from skiff_operator.lora.spec import LoRAAdapter, parse
from skiff_operator.resources import deployment, lora_config
from skiff_operator.settings import Settings
from skiff_operator.spec import Adapter, InferenceService, MountedCache
from skiff_operator.status import Problem

SQL, LAW = {"name": "sql", "uri": "hf://org/sql"}, {"name": "law", "uri": "hf://org/law"}
REFUSED = Fault("AdapterRefused", "rank 64 exceeds 16", permanent=True)
BROKEN = Fault("PodUnreachable", "timeout")


def lora_adapter(
    name: str, uri: str = "hf://org/x", /, *, created: str = "2026-01-01T00:00:00Z", **spec: Any
) -> LoRAAdapter:
    meta = {"namespace": "default", "name": name, "uid": name, "generation": 1, "resourceVersion": "1"}
    body = {"modelRef": {"name": "llama"}, "uri": uri, **spec}
    return parse({"metadata": {**meta, "creationTimestamp": created}, "spec": body})


def wanted(name: str = "sql", path: str = "hf://org/sql", **fields: Any) -> DesiredAdapter:
    return DesiredAdapter(name=name, uri=path, path=path, **fields)


def view(
    listed: Mapping[str, str] | None, *, pod: str = "a", fault: Fault | None = None, **failed: Fault
) -> PodAdapters:
    attempts = {name: Attempt("hf://org/sql", each, 1, 0.0) for name, each in failed.items()}
    return PodAdapters(pod, listed, {}, attempts, fault)


def revision(of: InferenceService) -> tuple[str, str]:
    """Label of the template, and hash of the spec behind it."""
    built = objects_plan.built_deployment(objects_plan.objects(of, Settings()))
    return deployment.revision(built), revisions.spec_hash(of)


def test_adapters_change_no_template_and_only_enabling_lora_does() -> None:
    plain = revision(service())
    some = [revision(service(lora={}, adapters=each)) for each in ([], [SQL], [SQL, LAW])]
    assert len({plain, *some}) == 2
    assert revision(service(adapters=[SQL])) == some[0], "adapters imply lora"
    assert (
        len(
            {
                revision(service(lora=each))
                for each in ({}, {"maxLoras": 9}, {"maxLoraRank": 9}, {"maxCpuLoras": 9})
            }
        )
        == 4
    )


def test_the_server_gets_its_flags_and_what_changes_from_the_config_map() -> None:
    of = service(lora={"maxLoras": 4, "maxLoraRank": 32, "maxCpuLoras": 64})
    (container,) = objects_plan.built_deployment(objects_plan.objects(of, Settings()))["spec"]["template"][
        "spec"
    ]["containers"]
    arguments = container["args"]
    at = arguments.index("--enable-lora")
    assert arguments[at : at + 7] == [
        "--enable-lora",
        "--max-loras",
        "4",
        "--max-lora-rank",
        "32",
        "--max-cpu-loras",
        "64",
    ]
    found = {
        each["name"]: each["valueFrom"]["configMapKeyRef"] for each in container["env"] if "valueFrom" in each
    }
    assert found == {
        "SKIFF_ADMIN_API_KEY_SHA256": {"name": "llama.lora", "key": "adminKeySha256"},
        "SKIFF_LORA": {"name": "llama.lora", "key": "adapters", "optional": True},
    }
    adapters = [Adapter(name="sql", uri="hf://org/sql"), Adapter(name="law", uri="s3://bucket/law")]
    made = lora_config.build(of, "ab", adapters)
    assert made["data"]["adapters"] == "sql=hf://org/sql,law=s3://bucket/law"
    assert lora_config.read(made) == ("ab", tuple(adapters))
    assert "adapters" not in lora_config.build(of, "ab", [])["data"], "the runtime refuses an empty list"
    assert lora_config.read({"data": None}) == ("", ())


def test_adapters_are_written_to_what_pods_share_unless_a_model_cache_keeps_it() -> None:
    def mounts(of: InferenceService) -> dict[str, bool]:
        spec = objects_plan.built_deployment(objects_plan.objects(of, Settings()))["spec"]["template"]["spec"]
        return {each["mountPath"]: not each.get("readOnly") for each in spec["containers"][0]["volumeMounts"]}

    hub: dict[str, Any] = {"model": {"uri": "hf://org/base"}}
    assert not mounts(service(**hub))["/cache"]
    assert mounts(service(**hub, lora={}))["/cache"], "the server downloads into it"
    cached = msgspec.structs.replace(service(**hub, lora={}), model_cache=MountedCache("base"))
    assert (mounts(cached)["/cache"], mounts(cached)["/adapters"]) == (False, True)
    assert "/adapters" not in mounts(
        msgspec.structs.replace(service(**hub), model_cache=MountedCache("base"))
    )


@pytest.mark.parametrize("model", ["hf://org/base", "pvc://weights/base", "demo://"])
@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({"claimName": "adapters"}, {"persistentVolumeClaim": {"claimName": "adapters"}}),
        ({"hostPath": "/srv/lora"}, {"hostPath": {"path": "/srv/lora", "type": "Directory"}}),
    ],
)
def test_adapters_have_a_cache_of_their_own(
    model: str, cache: dict[str, str], source: dict[str, Any]
) -> None:
    """Whatever keeps the model: one download for all pods that share the cache."""
    of = service(model={"uri": model}, lora={"cache": cache})
    for each in (of, msgspec.structs.replace(of, model_cache=MountedCache("base"))):
        settings = Settings(allow_host_path=True)
        spec = objects_plan.built_deployment(objects_plan.objects(each, settings))["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "adapters"]
        assert volume == {"name": "adapters", **source}
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        assert "/adapters" in writable and "/cache" not in writable and "/model" not in writable
        flag = container["args"].index("--lora-download-dir")
        assert container["args"][flag + 1] == "/adapters"


@pytest.mark.parametrize(
    ("fields", "shared"),
    [
        ({"lora": {}}, False),
        ({"lora": {}, "cache": {"size": "1Gi"}}, True),
        ({"lora": {}, "cache": {"claimName": "weights"}}, True),
        ({"lora": {}, "cache": {"hostPath": "/srv"}}, False),
        ({"lora": {"cache": {"claimName": "adapters"}}}, True),
        ({"lora": {"cache": {"hostPath": "/srv"}}, "cache": {"size": "1Gi"}}, False),
    ],
)
def test_credentials_need_a_claim_that_pods_share(fields: dict[str, Any], shared: bool) -> None:
    of = service(model={"uri": "hf://org/base"}, **fields)
    private = lora_adapter("law", "hf://org/law", credentialsSecretRef={"name": "hub"})
    (found,) = plan.desired_adapters(of, [private])
    assert (found.problem is None) == shared
    if shared:
        made = fetcher.build(of, private, Settings())["spec"]
        (container,) = made["containers"]
        directory = container["args"][container["args"].index("--download-dir") + 1]
        assert directory in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert not [mount for mount in container["volumeMounts"] if mount.get("readOnly")]
        assert {volume["name"] for volume in made["volumes"]} == {"tmp", directory.strip("/")}
        name = fetcher.name(of, private)
        assert name == fetcher.name(service(model={"uri": "hf://org/base"}, **fields), private)
        elsewhere = service(model={"uri": "hf://org/base"}, lora={}, cache={"claimName": "elsewhere"})
        assert name != fetcher.name(elsewhere, private) and name != fetcher.name(of, private, "uid")


REQUESTS: dict[str, str] = {"cpu": "100m", "memory": "256Mi"}


@pytest.mark.parametrize(
    ("fetch", "expected"),
    [
        ({}, {"requests": REQUESTS}),
        (
            {"requests": {"memory": "1Gi", "ephemeral-storage": "2Gi"}},
            {"requests": {"cpu": "100m", "memory": "1Gi", "ephemeral-storage": "2Gi"}},
        ),
        ({"limits": {"memory": "128Mi"}}, {"requests": {"cpu": "100m"}, "limits": {"memory": "128Mi"}}),
    ],
    ids=["default", "requests", "limits"],
)
def test_a_fetcher_never_requests_what_the_server_does(
    fetch: dict[str, Any], expected: dict[str, Any]
) -> None:
    server = {"requests": {"memory": "64Gi"}, "limits": {"cpu": "8", "ephemeral-storage": "200Gi"}}
    model = {"uri": "hf://org/base", "fetch": {"resources": fetch}}
    of = service(model=model, lora={}, cache={"claimName": "models"}, resources=server)
    private = lora_adapter("law", credentialsSecretRef={"name": "hub"})
    (container,) = fetcher.build(of, private, Settings())["spec"]["containers"]
    assert container["resources"] == expected


def test_names_are_given_in_the_order_of_age() -> None:
    of = service(adapters=[SQL])
    younger = lora_adapter("b", name="law", created="2026-01-02T00:00:00Z")
    found = plan.desired_adapters(
        of, [lora_adapter("a", name="law"), younger, lora_adapter("c", name="sql"), lora_adapter("llama")]
    )
    assert [(each.name, each.source, each.problem and each.problem.reason) for each in found] == [
        ("sql", "", None),
        ("law", "a", None),
        ("law", "b", "NameConflict"),
        ("sql", "c", "NameConflict"),
        ("llama", "llama", "NameConflict"),
    ]


@pytest.mark.parametrize(
    ("model", "uri", "path"),
    [
        ("demo://", "s3://bucket/sql", "s3://bucket/sql"),
        ("pvc://weights/base", "pvc://weights/loras/sql", "/model/loras/sql"),
        ("pvc://weights/base", "pvc://other/sql", None),
        ("demo://", "pvc://weights/sql", None),
        ("demo://", "file:///sql", None),
        ("demo://", "hf://org/a,b", None),
    ],
)
def test_pods_reach_sources_and_the_claim_of_their_model(model: str, uri: str, path: str | None) -> None:
    (found,) = plan.desired_adapters(service(model={"uri": model}, lora={}), [lora_adapter("sql", uri)])
    assert (found.path or None, found.problem is None) == (path, path is not None)


def test_there_is_a_limit() -> None:
    many = [lora_adapter(f"a{number:03d}") for number in range(plan.MAX_ADAPTERS + 2)]
    found = plan.desired_adapters(service(lora={}), many)
    assert [each.problem.reason for each in found if each.problem] == ["TooManyAdapters"] * 2
    with pytest.raises(InvalidSpec, match="at most 64"):
        service(adapters=[{"name": f"a{number}", "uri": "hf://org/x"} for number in range(65)])
    with pytest.raises(InvalidSpec, match="maxCpuLoras"):
        service(lora={"maxLoras": 8, "maxCpuLoras": 4})


@pytest.mark.parametrize(
    ("listed", "loaded", "steps"),
    [
        ({}, {}, [Step("load", "sql", "hf://org/sql")]),
        ({"sql": "hf://org/sql"}, {}, []),
        ({"sql": "/somewhere"}, {"sql": "hf://org/sql"}, []),
        ({"sql": "hf://org/old"}, {}, [Step("load", "sql", "hf://org/sql", replace=True)]),
        (
            {"sql": "hf://org/old"},
            {"sql": "hf://org/old"},
            [Step("load", "sql", "hf://org/sql", replace=True)],
        ),
        ({"sql": "hf://org/sql", "old": "x"}, {}, [Step("unload", "old")]),
    ],
)
def test_next_requests_to_a_pod(listed: dict[str, str], loaded: dict[str, str], steps: list[Step]) -> None:
    assert plan.steps([wanted()], listed, loaded, {}, [], 0.0) == steps
    assert plan.steps([wanted()], listed, loaded, {}, [step.name for step in steps], 0.0) == [], (
        "they are under way"
    )


def test_what_failed_waits_longer_each_time_and_what_was_refused_waits_long() -> None:
    def is_due(fault: Fault, times: int, now: float) -> bool:
        attempts = {"sql": Attempt("hf://org/sql", fault, times, 100.0)}
        return bool(plan.steps([wanted()], {}, {}, attempts, [], now))

    delays = [next(at for at in range(400) if is_due(BROKEN, times, 100.0 + at)) for times in range(1, 9)]
    assert delays == [2, 4, 8, 16, 32, 64, 120, 120]
    assert not is_due(REFUSED, 1, 399.0) and is_due(REFUSED, 1, 400.0)
    other = {"sql": Attempt("hf://org/old", REFUSED, 1, 100.0)}
    assert plan.steps([wanted()], {}, {}, other, [], 100.0), "other files are tried at once"


def test_an_adapter_whose_files_are_awaited_is_neither_loaded_nor_unloaded() -> None:
    waiting = plan.awaiting(wanted(), Problem("Fetching", "pod x downloads it"))
    assert plan.steps([waiting], {}, {}, {}, [], 0.0) == []
    assert plan.steps([waiting], {"sql": "hf://org/sql"}, {}, {}, [], 0.0) == []
    refused = wanted(problem=Problem("NoSharedCache", "no claim"))
    assert plan.steps([refused], {"sql": "hf://org/sql"}, {}, {}, [], 0.0) == [Step("unload", "sql")]


HAS = view({"sql": "hf://org/sql"})


@pytest.mark.parametrize(
    ("views", "ready", "reason", "count"),
    [
        ([], False, "NoPods", 0),
        ([HAS], True, "Loaded", 1),
        ([HAS, view({})], False, "Loading", 1),
        ([HAS, view({}, sql=REFUSED), view({}, pod="c", sql=BROKEN)], False, "AdapterRefused", 1),
        ([HAS, view(None, fault=BROKEN)], False, "PodUnreachable", 1),
    ],
)
def test_an_adapter_is_ready_when_every_ready_pod_answers_for_it(
    views: list[PodAdapters], ready: bool, reason: str, count: int
) -> None:
    found = plan.status(wanted(), views)
    assert (found.ready, found.reason, found.loaded_pods) == (ready, reason, count)


def test_pods_start_only_with_adapters_that_one_has_and_none_refuses() -> None:
    law = wanted("law", "hf://org/law")
    views = [
        view({"sql": "hf://org/sql", "law": "hf://org/law"}),
        view({"law": "hf://org/law"}, pod="b", sql=REFUSED),
    ]
    assert plan.startup_adapters([wanted(), law], views) == [Adapter(name="law", uri="hf://org/law")]
    assert plan.startup_adapters([wanted()], [view({"sql": "hf://org/old"})]) == []


def test_adapters_of_the_start_fit_into_an_environment_variable() -> None:
    many = [wanted(f"{number:0>253}", f"pvc://claim/{number:0>500}") for number in range(256)]
    found = plan.startup_adapters(many, [view({each.name: each.path for each in many})])
    text = ",".join(f"{each.name}={each.uri}" for each in found)
    assert 90 << 10 < len(text) <= 96 << 10
    assert [each.name for each in found] == [each.name for each in many[: len(found)]]


def test_any_state_of_a_pod_comes_to_what_is_wanted() -> None:
    """Play the pod, for every combination of what it has, what this process had it load, and what is wanted."""
    uris = (None, "hf://org/x", "hf://org/y")
    for first, second, before in itertools.product(uris, uris, itertools.product(uris, uris, (False, True))):
        adapters = [wanted(name, uri) for name, uri in (("p", first), ("q", second)) if uri is not None]
        listed = {name: uri for name, uri in zip("pq", before[:2], strict=True) if uri is not None}
        loaded = dict(listed) if before[2] else {}
        for _ in range(3):
            for step in plan.steps(adapters, dict(listed), dict(loaded), {}, [], 0.0):
                if step.action == "unload":
                    del listed[step.name]
                    loaded.pop(step.name, None)
                else:
                    assert step.replace == (step.name in listed)
                    listed[step.name] = loaded[step.name] = step.path
        assert listed == {each.name: each.path for each in adapters}
        assert plan.steps(adapters, listed, loaded, {}, [], 0.0) == []
