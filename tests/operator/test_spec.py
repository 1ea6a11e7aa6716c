"""Raw objects become structs with defaults; what is impossible is refused with a message that helps."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import hub, raw, service

from skiff_operator import model_uri, plan, policy, spec
from skiff_operator.errors import InvalidSpec
from skiff_operator.settings import Settings


def test_only_the_uri_is_needed() -> None:
    parsed = service()
    assert parsed.spec.replicas == 1
    assert parsed.spec.runtime.device == "cuda"
    assert parsed.spec.startup.timeout_seconds == 1800
    assert parsed.model_name == "llama"


def test_there_and_back_again() -> None:
    fields: dict[str, Any] = {
        "model": hub(revision="main", credentialsSecretRef={"name": "hub"}),
        "runtime": {"args": ["--page-size", "16"], "env": [{"name": "A", "value": "b"}], "maxModelLen": 4096},
        "cache": {"size": "40Gi"},
        "podTemplate": {"metadata": {"labels": {"team": "a"}}},
    }
    parsed = service(**fields)
    again = raw()
    again["spec"] = spec.to_dict(parsed.spec)
    assert spec.parse(again) == parsed


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "missing required field `maxReplicas`"),
        ({"maxReplicas": 0}, "maxReplicas 1 or more"),
        ({"minReplicas": 3, "maxReplicas": 2}, "minReplicas: 3 exceeds maxReplicas, 2"),
        ({"maxReplicas": 2, "targets": {}}, "targets: set at least one of concurrency, queuedTokens"),
        ({"maxReplicas": 2, "targets": {"ttftSeconds": 0}}, "targets.ttftSeconds: must be greater than 0"),
        ({"maxReplicas": 2, "targets": {"cpu": 1}}, "unknown field `cpu`"),
        ({"maxReplicas": 2, "scaleToZeroAfterSeconds": 9}, "remove it, or set minReplicas to 0"),
        ({"maxReplicas": 2, "engine": "VPA"}, "Invalid enum value 'VPA'"),
        ({"minReplicas": 0, "maxReplicas": 2, "engine": "HPA"}, "keeps at least one pod; set 1"),
        ({"maxReplicas": 2, "engine": "HPA", "targets": {"ttftSeconds": 1}}, "reads gauges only; remove it"),
        ({"maxReplicas": 2, "engine": "KEDA", "scaleDownDelaySeconds": 9999}, "allows 3600 at most"),
    ],
)
def test_autoscaling_that_contradicts_itself_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpec) as invalid:
        service(autoscaling=given)
    assert says in str(invalid.value), invalid.value


def test_autoscaling_knows_its_targets_and_how_many_pods_there_may_be() -> None:
    assert service(replicas=3).spec.most_replicas == 3
    scaled = service(
        replicas=0, autoscaling={"maxReplicas": 5, "targets": {"ttftSeconds": 2, "queuedTokens": 9}}
    ).spec
    assert scaled.most_replicas == 5
    assert scaled.autoscaling is not None
    assert scaled.autoscaling.targets.given == {"queuedTokens": 9, "ttftSeconds": 2}
    assert scaled.autoscaling.idle_seconds == 600


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("demo://", ("demo", "", "")),
        ("hf://Qwen/Qwen3-0.6B", ("hf", "Qwen/Qwen3-0.6B", "")),
        ("hf://Qwen/Qwen3-0.6B-GGUF:Q8_0", ("hf", "Qwen/Qwen3-0.6B-GGUF:Q8_0", "")),
        ("s3://models/llama/8b/", ("s3", "models", "llama/8b")),
        ("gs://models", ("gs", "models", "")),
        ("oci://ghcr.io/org/llama:v1", ("oci", "ghcr.io", "org/llama:v1")),
        (
            "oci://localhost:5000/llama@sha256:" + "0a" * 32,
            ("oci", "localhost:5000", "llama@sha256:" + "0a" * 32),
        ),
        ("pvc://models", ("pvc", "models", "")),
        ("pvc://models/a/b/", ("pvc", "models", "a/b")),
        ("file:///srv/llama", ("file", "/srv/llama", "")),
    ],
)
def test_model_uris(uri: str, source: tuple[str, str, str]) -> None:
    assert model_uri.parse(uri) == source


@given(st.text(max_size=40))
def test_any_text_is_a_model_uri_or_invalid(text: str) -> None:
    try:
        assert model_uri.parse(text).scheme in text
    except InvalidSpec as error:
        assert "spec.model.uri" in str(error)


NAMES = st.sampled_from(
    [
        "name",
        "metadata",
        "labels",
        "spec",
        "containers",
        "runtime",
        "env",
        "volumes",
        "limits",
        "cpu",
        "size",
        "egress",
        "ports",
        "x",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["model", "runtime", "replicas", "cache", "resources", "podTemplate", "networkPolicy", "tolerations", "x"]
)


@given(st.dictionaries(FIELDS, JSON, max_size=3))
def test_no_spec_does_more_harm_than_being_refused(fields: dict[str, Any]) -> None:
    obj = raw()
    obj["spec"] = {**obj["spec"], **fields}
    try:
        built = plan.objects(spec.parse(obj), Settings())
    except InvalidSpec as error:
        assert str(error).startswith("spec")
    else:
        assert len(built) >= 3


BAD: list[tuple[dict[str, Any], str]] = [
    ({"replica": 2}, "unknown field `replica`"),
    ({"replicas": "two"}, "Expected `int`"),
    ({"replicas": -1}, "0 or more"),
    ({"model": {"uri": "s3://"}}, "s3://BUCKET/PREFIX"),
    ({"model": {"uri": "s3://models/../b"}}, "must not contain '..'"),
    ({"model": {"uri": "oci://ghcr.io"}}, "oci://REGISTRY/REPOSITORY:TAG"),
    ({"model": {"uri": "s3://models/a", "revision": "main"}}, "only hf:// models have revisions"),
    (
        {"model": {"uri": "s3://models/a", "credentialsSecretRef": {"name": "a", "key": "b"}}},
        "AWS_ACCESS_KEY_ID",
    ),
    ({"model": {"uri": "demo://", "endpoint": "http://a"}}, "endpoint: only gs://, hf://, oci://, s3://"),
    ({"model": {"uri": "s3://models/a", "endpoint": "http://user:password@a"}}, "without user and password"),
    ({"model": {"uri": "hf://org/name:_x"}}, "hf://ORGANISATION/NAME"),
    ({"model": {"uri": "hf://org/name:\u00c4"}}, "hf://ORGANISATION/NAME"),
    ({"model": {"uri": "hf://org/name:../x"}}, "hf://ORGANISATION/NAME"),
    ({"model": {"uri": "pvc://a/../b"}}, "must not contain '..'"),
    ({"model": {"uri": "demo://", "revision": "main"}}, "only hf:// models have revisions"),
    (
        {"model": {"uri": "demo://", "fetch": {"resources": {"limits": {"cpu": 1}}}}},
        "spec.model.fetch: only gs",
    ),
    ({"kernelCache": {}}, "exactly one of claimName and hostPath"),
    ({"lora": {"cache": {}}}, "spec.lora.cache: set exactly one of claimName and hostPath"),
    (
        {"lora": {"cache": {"claimName": "a", "hostPath": "/a"}}},
        "spec.lora.cache: set exactly one of claimName and hostPath",
    ),
    ({"kernelCache": {"claimName": "a"}, "runtime": {"device": "cpu"}}, "only device cuda compiles"),
    ({"runtime": {"device": "cpu", "gpuResourceName": "a.b/c"}}, "only device cuda takes GPUs"),
    ({"runtime": {"device": "tpu"}}, "Invalid enum value 'tpu'"),
    ({"model": hub(), "cache": {"size": "1Gi", "claimName": "a"}}, "only one of"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_specs_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        service(**fields)


UNWELCOME: list[tuple[dict[str, Any], str]] = [
    ({"model": {"uri": "file:///models/a"}}, "--allow-host-path"),
    ({"model": hub(), "cache": {"hostPath": "/srv"}}, "--allow-host-path"),
    ({"kernelCache": {"hostPath": "/srv"}}, "kernelCache.hostPath: host paths are off"),
    ({"lora": {"cache": {"hostPath": "/srv"}}}, "spec.lora.cache.hostPath: host paths are off"),
    (
        {"kernelCache": {"claimName": "a"}, "runtime": {"args": ["--kernel-cache-dir=/a"]}},
        "--kernel-cache-dir is set by spec.kernelCache",
    ),
    ({"runtime": {"args": ["--port=1"]}}, "--port is set by the operator"),
    ({"runtime": {"args": ["--tp", "2"]}}, "use spec.parallelism.tensor"),
    (
        {"apiKeysSecretRef": {"name": "a"}, "runtime": {"args": ["--api-key-file=/keys"]}},
        "use spec.apiKeysSecretRef alone",
    ),
    ({"resources": {"limits": {"nvidia.com/gpu": 2}}}, "the pod needs 1"),
    ({"runtime": {"device": "cpu"}, "resources": {"limits": {"nvidia.com/gpu": 1}}}, "the pod needs 0"),
    ({"runtime": {"gpuResourceName": "a.b/c"}, "resources": {"limits": {"a.b/c": 2}}}, "a.b/c. is 2, but"),
    ({"podTemplate": {"kind": "Pod"}}, "podTemplate.kind: not supported"),
    ({"podTemplate": {"metadata": {"name": "a"}}}, "only labels and annotations"),
    ({"podTemplate": {"metadata": {"labels": {"app.kubernetes.io/name": "a"}}}}, "set by the operator"),
    ({"podTemplate": {"spec": {"restartPolicy": "Never"}}}, "restartPolicy: is set by the operator"),
    ({"podTemplate": {"spec": {"containers": [{"name": "runtime", "args": []}]}}}, "use spec.runtime.args"),
    (
        {"podTemplate": {"spec": {"initContainers": [{"name": "fetch", "resources": {}}]}}},
        "use spec.model.fetch.resources",
    ),
    ({"podTemplate": {"spec": {"containers": [{"image": "a"}]}}}, "entries have a name"),
    ({"podTemplate": {"spec": {"containers": None}}}, "must be a list"),
    ({"podTemplate": {"metadata": {"labels": None}}}, "must be a map"),
    (
        {"podTemplate": {"spec": {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}}},
        "hostPath volumes are off",
    ),
]


@pytest.mark.parametrize(("fields", "message"), UNWELCOME)
def test_what_this_operator_cannot_serve_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        policy.check(service(**fields), Settings())


@pytest.mark.parametrize("number", [0, 1, -1])
def test_host_paths_are_served_when_allowed(number: int) -> None:
    allowing = Settings(allow_host_path=True)
    assert plan.objects(service(**UNWELCOME[number][0]), allowing)


def test_privileged_pods_do_not_permit_host_paths() -> None:
    with pytest.raises(InvalidSpec, match="--allow-host-path"):
        plan.objects(service(**UNWELCOME[-1][0]), Settings(allow_privileged_pods=True))
