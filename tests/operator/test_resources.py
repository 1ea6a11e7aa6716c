"""Built objects: the pod's command, volumes, probes and security, and the objects around it."""

from typing import Any

import pytest
from services import hub, raw, service

from skiff_operator import plan, spec
from skiff_operator.resources import containers, deployment
from skiff_operator.settings import Settings

SETTINGS = Settings(runtime_image_cpu="cpu:1", runtime_image_cuda="cuda:1", allow_host_path=True)


def built(**fields: Any) -> dict[str, dict[str, Any]]:
    """The objects by kind."""
    return {kind.name: obj for (kind, _), obj in plan.objects(service(**fields), SETTINGS).items()}


def pod(**fields: Any) -> dict[str, Any]:
    """The pod spec."""
    spec: dict[str, Any] = built(**fields)["Deployment"]["spec"]["template"]["spec"]
    return spec


def runtime(**fields: Any) -> dict[str, Any]:
    """The serving container."""
    container: dict[str, Any] = pod(**fields)["containers"][0]
    return container


def volume(name: str, **fields: Any) -> dict[str, Any] | None:
    """One of the pod's volumes."""
    return next((each for each in pod(**fields)["volumes"] if each["name"] == name), None)


def test_the_demo_model_needs_no_volume_and_no_download() -> None:
    container = runtime(runtime={"device": "cpu"})
    assert container["command"] == ["skiff"]
    assert container["args"][:5] == ["serve", "--model", "demo://", "--served-model-name", "llama"]
    assert container["image"] == "cpu:1"
    assert "initContainers" not in pod()
    assert [each["name"] for each in pod()["volumes"]] == ["tmp"]


def test_arguments_follow_the_spec_and_the_users_come_last() -> None:
    fields = {"dtype": "bfloat16", "maxModelLen": 4096, "args": ["--page-size", "16"]}
    arguments = runtime(
        model={"uri": "demo://", "name": "m"},
        runtime=fields,
        parallelism={"tensor": 2},
        drain={"timeoutSeconds": 7},
    )["args"]
    pairs = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert pairs["--served-model-name"] == "m"
    assert (pairs["--tp"], pairs["--device"], pairs["--port"]) == ("2", "cuda", "8000")
    assert (pairs["--dtype"], pairs["--max-model-len"]) == ("bfloat16", "4096")
    assert pairs["--drain-timeout-seconds"] == "7"
    assert arguments[-2:] == ["--page-size", "16"]


def test_a_hub_model_is_fetched_first_and_only_the_download_sees_the_token() -> None:
    fields = {
        "model": hub(revision="abc", credentialsSecretRef={"name": "hub", "key": "t"}),
        "runtime": {"env": [{"name": "HF_ENDPOINT", "value": "http://hub"}]},
    }
    fetch = pod(**fields)["initContainers"][0]
    where = ["--model", fields["model"]["uri"], "--revision", "abc", "--download-dir", "/cache"]
    assert fetch["args"] == ["fetch", *where]
    assert runtime(**fields)["args"][1:7] == where
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}}
    assert token in fetch["env"] and token not in runtime(**fields)["env"]
    assert {"name": "HF_ENDPOINT", "value": "http://hub"} in fetch["env"]


@pytest.mark.parametrize(
    ("uri", "variables", "address"),
    [
        (
            "s3://models/llama",
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_SESSION_TOKEN": True},
            "AWS_ENDPOINT_URL",
        ),
        ("gs://models/llama", {"GOOGLE_SERVICE_ACCOUNT_KEY": "key.json"}, "GOOGLE_BASE_URL"),
        ("oci://ghcr.io/org/llama:v1", {"DOCKER_AUTH_CONFIG": ".dockerconfigjson"}, "OCI_ENDPOINT"),
        ("hf://org/llama", {"HF_TOKEN": "token"}, "HF_ENDPOINT"),
    ],
)
def test_every_source_is_fetched_into_the_cache_with_credentials_for_the_download_alone(
    uri: str, variables: dict[str, Any], address: str
) -> None:
    model = {"uri": uri, "credentialsSecretRef": {"name": "access"}, "endpoint": "http://source"}
    fields: dict[str, Any] = {"model": model, "cache": {"claimName": "weights"}}
    fetch, server = pod(**fields)["initContainers"][0], runtime(**fields)
    assert fetch["args"] == ["fetch", "--model", uri, "--download-dir", "/cache"]
    assert server["args"][1:5] == fetch["args"][1:]
    given = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in fetch["env"] if "valueFrom" in each}
    assert given.keys() == variables.keys()
    for name, key in variables.items():
        optional = {"optional": True} if key is True else {}
        assert given[name] == {"name": "access", "key": name if key in (None, True) else key, **optional}
    assert not [each for each in server["env"] if "valueFrom" in each]
    for container in (fetch, server):
        assert {"name": address, "value": "http://source"} in container["env"]
    assert volume("cache", **fields) is not None
    if not uri.startswith("s3"):
        model["credentialsSecretRef"] = {"name": "access", "key": "mine"}
        entry = pod(**fields)["initContainers"][0]["env"][-1]
        assert entry["valueFrom"]["secretKeyRef"] == {"name": "access", "key": "mine"}


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({}, {"emptyDir": {}}),
        ({"claimName": "weights"}, {"persistentVolumeClaim": {"claimName": "weights"}}),
        ({"hostPath": "/srv"}, {"hostPath": {"path": "/srv", "type": "Directory"}}),
        ({"size": "40Gi"}, {"persistentVolumeClaim": {"claimName": "llama-cache"}}),
    ],
)
def test_the_cache_is_what_was_asked_for(cache: dict[str, Any], source: dict[str, Any]) -> None:
    assert volume("cache", model=hub(), cache=cache) == {"name": "cache", **source}
    objects = built(model=hub(), cache=cache)
    assert ("PersistentVolumeClaim" in objects) == ("size" in cache)
    assert ("affinity" in pod(model=hub(), cache=cache)) == ("size" in cache)


def test_models_in_volumes_are_mounted_read_only() -> None:
    container = runtime(model={"uri": "pvc://models/llama/8b"})
    assert container["args"][1:3] == ["--model", "/model/llama/8b"]
    assert {"name": "model", "mountPath": "/model", "readOnly": True} in container["volumeMounts"]
    claim = {"claimName": "models", "readOnly": True}
    assert volume("model", model={"uri": "pvc://models/llama/8b"}) == {
        "name": "model",
        "persistentVolumeClaim": claim,
    }
    assert runtime(model={"uri": "file:///srv/llama"})["args"][2] == "/model"


def test_weights_are_read_only_for_the_server_and_writable_for_the_download() -> None:
    fields: dict[str, Any] = {"model": hub(), "cache": {"claimName": "weights"}}
    mount = {"name": "cache", "mountPath": "/cache"}
    assert {**mount, "readOnly": True} in runtime(**fields)["volumeMounts"]
    assert mount in pod(**fields)["initContainers"][0]["volumeMounts"]


def kernel_directory(namespace: str = "default", **fields: Any) -> str:
    parsed = spec.parse(raw(namespace=namespace, **fields))
    objects = {kind.name: obj for (kind, _), obj in plan.objects(parsed, SETTINGS).items()}
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    [value] = [each["value"] for each in container["env"] if each["name"] == "SKIFF_KERNEL_CACHE_DIR"]
    return str(value)


def test_kernels_of_one_image_and_namespace_are_kept_apart_from_weights() -> None:
    fields: dict[str, Any] = {
        "model": hub(),
        "cache": {"claimName": "weights"},
        "kernelCache": {"claimName": "weights"},
        "runtime": {"env": [{"name": "SKIFF_KERNEL_CACHE_DIR", "value": "/elsewhere"}]},
    }
    mount = {"name": "kernels", "mountPath": "/kernels", "subPath": "skiff-kernels"}
    assert mount in runtime(**fields)["volumeMounts"]
    fetch = pod(**fields)["initContainers"][0]
    assert "kernels" not in [each["name"] for each in fetch["volumeMounts"]]
    assert volume("kernels", **fields) == {
        "name": "kernels",
        "persistentVolumeClaim": {"claimName": "weights"},
    }
    path = kernel_directory(**fields)
    assert path.startswith("/kernels/")
    assert path == kernel_directory(kernelCache={"claimName": "other"}, runtime={"args": ["--seed", "1"]})
    assert path != kernel_directory(kernelCache={"claimName": "other"}, runtime={"image": "cuda:2"})
    assert path != kernel_directory("elsewhere", **fields)


def test_a_nodes_directory_of_kernels_is_mounted_whole() -> None:
    fields: dict[str, Any] = {"kernelCache": {"hostPath": "/var/kernels"}}
    assert {"name": "kernels", "mountPath": "/kernels"} in runtime(**fields)["volumeMounts"]
    host = {"path": "/var/kernels", "type": "Directory"}
    assert volume("kernels", **fields) == {"name": "kernels", "hostPath": host}


def test_gpus_come_from_parallelism() -> None:
    assert runtime(parallelism={"tensor": 4})["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert "limits" not in runtime(runtime={"device": "cpu"})["resources"]
    assert runtime(runtime={"gpuResourceName": "a.b/c"})["resources"]["limits"] == {"a.b/c": "1"}
    shared = {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volume("dshm", parallelism={"tensor": 2}) == {"name": "dshm", "emptyDir": shared}
    assert volume("dshm") is None


def test_the_operators_gpu_resource_is_the_default() -> None:
    settings = Settings(gpu_resource_name="a.b/gpu")
    assert containers.resources(service(), settings)["limits"] == {"a.b/gpu": "1"}


def test_the_download_has_what_the_server_has() -> None:
    given = {"limits": {"cpu": "2", "memory": "1Gi", "rdma/hca": "1"}, "requests": {"cpu": "500m"}}
    fetch = pod(model=hub(), resources=given)["initContainers"][0]["resources"]
    assert fetch == {
        "requests": {"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "20Gi"},
        "limits": {"cpu": "2", "memory": "1Gi"},
    }


def test_the_downloads_own_resources_replace_the_servers_by_name() -> None:
    own = {"limits": {"memory": "512Mi"}, "requests": {"ephemeral-storage": "90Gi"}}
    model = hub(fetch={"resources": own})
    fetch = pod(model=model, resources={"limits": {"cpu": "2", "memory": "64Gi"}})["initContainers"][0]
    assert fetch["resources"] == {
        "requests": {"cpu": "2", "ephemeral-storage": "90Gi"},
        "limits": {"cpu": "2", "memory": "512Mi"},
    }


@pytest.mark.parametrize(
    ("fields", "storage"),
    [
        ({"model": hub()}, "20Gi"),
        ({"model": hub(), "runtime": {"device": "cpu"}}, "4Gi"),
        ({"model": hub(), "resources": {"limits": {"ephemeral-storage": "200Gi"}}}, "200Gi"),
        ({"model": hub(), "resources": {"requests": {"ephemeral-storage": "0"}}}, "0"),
        ({"model": hub(), "cache": {"size": "40Gi"}}, None),
        ({}, None),
    ],
)
def test_weights_on_the_nodes_disk_are_requested(fields: dict[str, Any], storage: str | None) -> None:
    assert runtime(**fields)["resources"]["requests"].get("ephemeral-storage") == storage


def test_a_limit_is_the_default_request() -> None:
    container = runtime(runtime={"device": "cpu"}, resources={"limits": {"memory": "1Gi"}})
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "1Gi"},
        "limits": {"memory": "1Gi"},
    }


def test_probes_and_grace_follow_the_timeouts() -> None:
    fields = {"startup": {"timeoutSeconds": 61}, "drain": {"timeoutSeconds": 100}}
    container = runtime(**fields)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 61
    assert probe["httpGet"] == {"path": "/startupz", "port": "http"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(**fields)["terminationGracePeriodSeconds"] > 100 + pause
    assert built(**fields)["Deployment"]["spec"]["progressDeadlineSeconds"] > 61


@pytest.mark.parametrize(
    "fields", [{}, {"model": hub(), "cache": {"size": "1Gi"}}, {"parallelism": {"tensor": 2}}]
)
def test_pods_meet_the_restricted_level(fields: dict[str, Any]) -> None:
    spec = pod(**fields)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
    assert not [each for each in spec["volumes"] if "hostPath" in each]


def test_everything_is_owned_and_labelled() -> None:
    for obj in built(model=hub(), cache={"size": "1Gi"}, replicas=2).values():
        owner = obj["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("InferenceService", "u1", True)
        assert obj["metadata"]["labels"]["serving.skiff.dev/inferenceservice"] == "llama"
        assert obj["metadata"]["annotations"]["serving.skiff.dev/desired-hash"]


def test_a_budget_exists_only_for_more_than_one_replica() -> None:
    assert "PodDisruptionBudget" not in built()
    assert built(replicas=2)["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_the_revision_is_the_pods_and_not_the_number_of_them() -> None:
    def revision(**fields: Any) -> str:
        return deployment.revision(built(**fields)["Deployment"])

    assert revision() == revision(replicas=3)
    assert revision() != revision(runtime={"dtype": "bfloat16"})
    assert revision() != revision(podTemplate={"metadata": {"annotations": {"a": "b"}}})


def test_building_twice_gives_the_same_objects() -> None:
    fields = {"model": hub(), "cache": {"size": "1Gi"}, "resources": {"requests": {"cpu": 2}}}
    assert built(**fields) == built(**fields)


def test_default_pull_secrets_reach_the_pod_and_the_users_join_them() -> None:
    settings = Settings(default_image_pull_secrets=("registry", "mirror"))
    overlay = {"spec": {"imagePullSecrets": [{"name": "own"}, {"name": "mirror"}]}}
    for template, expected in ((None, ["registry", "mirror"]), (overlay, ["registry", "mirror", "own"])):
        fields: dict[str, Any] = {"podTemplate": template} if template else {}
        objects = {kind.name: obj for (kind, _), obj in plan.objects(service(**fields), settings).items()}
        spec = objects["Deployment"]["spec"]["template"]["spec"]
        assert [each["name"] for each in spec["imagePullSecrets"]] == expected
    assert "imagePullSecrets" not in pod()


def test_api_keys_are_mounted_in_the_serving_container_alone() -> None:
    fields: dict[str, Any] = {"model": hub(), "apiKeysSecretRef": {"name": "llama-keys"}}
    secret = volume("api-keys", **fields)
    assert secret is not None and secret["secret"]["secretName"] == "llama-keys"
    assert secret["secret"]["items"] == [{"key": "keys", "path": "keys"}]
    assert secret["secret"]["defaultMode"] == 0o440  # for the pod's fsGroup
    mount = {"name": "api-keys", "mountPath": "/etc/skiff/api-keys", "readOnly": True}
    assert mount in runtime(**fields)["volumeMounts"]
    assert "api-keys" not in str(pod(**fields)["initContainers"])
    arguments = runtime(**fields)["args"]
    assert arguments[arguments.index("--api-key-file") + 1] == "/etc/skiff/api-keys/keys"
    assert "--api-key-file" not in runtime(model=hub())["args"]
