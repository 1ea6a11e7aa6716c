"""The CRD on a real API server: it takes the samples, fills in defaults, and refuses the rest helpfully."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import ApiServer, Refused
from services import hub, raw

SAMPLES = sorted((Path(__file__).parents[2] / "manifests/samples").glob("*.yaml"))


def manifest(name: str = "llama", **fields: Any) -> dict[str, Any]:
    """A spec as a user would write it."""
    body = raw(name, **fields)
    body["metadata"] = {"name": name}
    return body


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_taken(api: ApiServer, sample: Path) -> None:
    for body in yaml.safe_load_all(sample.read_text()):
        api.create("inferenceservices", body)


def test_defaults_are_filled_in(api: ApiServer) -> None:
    spec = api.create("inferenceservices", manifest())["spec"]
    assert spec == {
        "model": {"uri": "demo://"},
        "runtime": {"dtype": "auto", "device": "cuda"},
        "parallelism": {"tensor": 1},
        "replicas": 1,
        "startup": {"timeoutSeconds": 1800},
        "drain": {"timeoutSeconds": 60},
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": {}}, "spec.model.uri: Required value"),
    ({"model": {"uri": "s3://B/llama"}}, "s3://BUCKET/PREFIX"),
    ({"model": {"uri": "s3://bucket/a/../b"}}, "name the directory itself"),
    ({"model": {"uri": "oci://ghcr.io"}}, "oci://REGISTRY/REPOSITORY:TAG"),
    (
        {"model": {"uri": "s3://bucket/a", "credentialsSecretRef": {"name": "a", "key": "b"}}},
        "remove model.credentialsSecretRef.key",
    ),
    ({"model": {"uri": "pvc://a", "endpoint": "http://a"}}, "remove model.endpoint"),
    ({"model": {"uri": "s3://bucket/a", "endpoint": "http://user:word@a"}}, "spec.model.endpoint"),
    ({"model": {"uri": "gcs://bucket/llama"}}, "must be demo://, hf://ORGANISATION/NAME, pvc://CLAIM/PATH"),
    ({"model": {"uri": "hf://org/name:_x"}}, "must be demo://, hf://ORGANISATION/NAME, pvc://CLAIM/PATH"),
    ({"model": {"uri": "hf://org/name:Q4 K"}}, "must be demo://, hf://ORGANISATION/NAME, pvc://CLAIM/PATH"),
    ({"model": {"uri": "pvc://a/../b"}}, "name the directory itself"),
    ({"model": {"uri": "file://relative"}}, "file:///ABSOLUTE/PATH"),
    ({"model": {"uri": "demo://", "revision": "main"}}, "remove model.revision"),
    (
        {"model": {"uri": "demo://", "credentialsSecretRef": {"name": "a"}}},
        "remove model.credentialsSecretRef",
    ),
    (
        {"model": {"uri": "demo://", "fetch": {}}},
        "oci:// and s3:// models are downloaded; remove model.fetch",
    ),
    ({"runtime": {"gpuResourceName": "gpu"}}, "spec.runtime.gpuResourceName"),
    ({"runtime": {"device": "cpu", "gpuResourceName": "a.b/c"}}, "only device cuda takes GPUs"),
    ({"model": hub(fetch={"resources": {"limits": {"cpu": "much"}}})}, "fetch.resources.limits.cpu"),
    ({"cache": {"size": "1Gi"}}, "s3:// models are downloaded into a cache; remove cache"),
    ({"kernelCache": {}}, "set exactly one of claimName and hostPath"),
    ({"kernelCache": {"claimName": "a", "hostPath": "/a"}}, "set exactly one of claimName and hostPath"),
    ({"kernelCache": {"claimName": "a"}, "runtime": {"device": "cpu"}}, "remove kernelCache"),
    ({"model": hub(), "cache": {}}, "set exactly one of claimName, hostPath and size"),
    (
        {"model": hub(), "cache": {"size": "1Gi", "claimName": "a"}},
        "set exactly one of claimName, hostPath and size",
    ),
    ({"model": hub(), "cache": {"size": "big"}}, "spec.cache.size"),
    ({"model": hub(), "cache": {"size": "0Gi"}}, "size must be greater than 0"),
    ({"model": hub(), "cache": {"size": -1}}, "size must be greater than 0"),
    ({"model": hub(), "cache": {"claimName": "llama-cache"}}, "the one that cache.size makes and deletes"),
    ({"runtime": {"device": "tpu"}}, 'supported values: "cuda", "cpu"'),
    (
        {"runtime": {"env": [{"name": "A", "value": "1", "valueFrom": {}}]}},
        "set value or valueFrom, not both",
    ),
    ({"runtime": {"env": [{"name": "A"}, {"name": "A"}]}}, "Duplicate value"),
    ({"parallelism": {"tensor": 0}}, "greater than or equal to 1"),
    ({"replicas": -1}, "greater than or equal to 0"),
    ({"resources": {"limits": {"memory": "lots"}}}, "spec.resources.limits.memory"),
    ({"autoscaling": {"maxReplicas": 3}}, 'unknown field "spec.autoscaling"'),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_specs_are_refused_with_advice(server: ApiServer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refusal:
        server.create("inferenceservices", manifest(**fields))
    assert message in refusal.value.message


@pytest.mark.parametrize("name", ["1llama", "my.llama", "l" * 58])
def test_names_that_no_service_can_have_are_refused(server: ApiServer, name: str) -> None:
    with pytest.raises(Refused, match="also names a Service"):
        server.create("inferenceservices", manifest(name))


def test_an_edit_is_checked_too(api: ApiServer) -> None:
    api.create("inferenceservices", manifest())
    with pytest.raises(Refused, match="only hf:// models have revisions"):
        api.merge("inferenceservices", "llama", {"spec": {"model": {"revision": "main"}}})


SIZES = [
    ("10Gi", "9Gi", False),
    ("10Gi", "10G", False),
    ("1Gi", 1073741823, False),
    ("1Gi", "1024Mi", True),
    ("1000Mi", "1Gi", True),
    (1000, "1k", True),
]


@pytest.mark.parametrize(("old", "new", "taken"), SIZES)
def test_a_cache_can_grow_and_never_shrink(
    api: ApiServer, old: str | int, new: str | int, taken: bool
) -> None:
    api.create("inferenceservices", manifest(model=hub(), cache={"size": old}))
    resized = {"spec": {"cache": {"size": new}}}
    with contextlib.nullcontext() if taken else pytest.raises(Refused, match="size cannot shrink"):
        api.merge("inferenceservices", "llama", resized)
    assert api.get("inferenceservices", "llama")["spec"]["cache"]["size"] == (new if taken else old)


def test_a_cache_may_be_given_up_and_be_smaller_later(api: ApiServer) -> None:
    api.create("inferenceservices", manifest(model=hub(), cache={"size": "2Gi"}))
    api.merge("inferenceservices", "llama", {"spec": {"cache": {"size": None, "claimName": "models"}}})
    api.merge("inferenceservices", "llama", {"spec": {"cache": {"claimName": None, "size": "1Gi"}}})


def test_kubectl_get_shows_the_columns(api: ApiServer) -> None:
    api.create("inferenceservices", manifest())
    table = api.table("inferenceservices")
    shown = [column["name"] for column in table["columnDefinitions"] if column["priority"] == 0]
    assert shown == ["Name", "Ready", "Replicas", "Model", "URL", "Age"]


def test_scale(api: ApiServer) -> None:
    api.create("inferenceservices", manifest())
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 3}}, "scale")
    assert api.get("inferenceservices", "llama")["spec"]["replicas"] == 3
    assert api.get("inferenceservices", "llama", "scale")["spec"]["replicas"] == 3
