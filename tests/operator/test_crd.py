"""The CRD on a real API server: it takes the samples and fills in defaults; test_bad_specs.py has what it refuses."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import ApiServer, Refused
from services import hub, raw

from skiff_operator import spec

SAMPLES = sorted((Path(__file__).parents[2] / "manifests/samples").glob("*.yaml"))


def manifest(name: str = "llama", **fields: Any) -> dict[str, Any]:
    """A spec as a user would write it."""
    body = raw(name, **fields)
    body["metadata"] = {"name": name}
    return body


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_taken(api: ApiServer, sample: Path) -> None:
    for body in yaml.safe_load_all(sample.read_text()):
        api.create(f"{body['kind'].lower()}s", body)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"uri": "hf://org/a,b"}, "without commas"),
        ({"uri": "hf://org/a:Q4"}, "without commas"),
        ({"uri": "demo://"}, "must be hf://ORGANISATION/NAME"),
        ({"uri": "s3://bucket/a/../b"}, "name the directory itself"),
        ({"uri": "pvc://claim/a", "credentialsSecretRef": {"name": "x"}}, "remove credentialsSecretRef"),
        (
            {"uri": "s3://bucket/a", "credentialsSecretRef": {"name": "x", "key": "y"}},
            "remove credentialsSecretRef.key",
        ),
        ({"uri": "hf://org/a", "name": "a,b"}, "spec.name"),
        ({"uri": "hf://org/a", "name": "a=b"}, "spec.name"),
        ({"uri": "hf://org/a", "modelRef": {}}, "spec.modelRef.name"),
        ({"uri": "hf://org/a", "rank": 8}, "unknown field"),
    ],
)
def test_wrong_lora_adapters_are_refused_with_advice(api: ApiServer, spec: dict[str, Any], says: str) -> None:
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": "sql"},
        "spec": {"modelRef": {"name": "llama"}, **spec},
    }
    with pytest.raises(Refused) as refused:
        api.create("loraadapters", body)
    assert says in refused.value.message


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


def test_autoscaling_has_defaults_of_its_own(api: ApiServer) -> None:
    made = api.create("inferenceservices", manifest(autoscaling={"minReplicas": 0, "maxReplicas": 4}))
    assert made["spec"]["autoscaling"] == {
        "minReplicas": 0,
        "maxReplicas": 4,
        "targets": {"concurrency": 32},
        "scaleDownDelaySeconds": 300,
        "engine": "Builtin",
    }
    assert spec.parse(made).spec.autoscaling == spec.Autoscaling(min_replicas=0, max_replicas=4)
    chosen = {"maxReplicas": 4, "targets": {"ttftSeconds": 0.5, "queuedTokens": 4096}}
    made = api.create("inferenceservices", manifest("other", autoscaling=chosen))
    assert made["spec"]["autoscaling"]["targets"] == chosen["targets"]


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
