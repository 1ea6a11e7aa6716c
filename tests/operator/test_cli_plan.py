"""`skiff plan`: the changes of a manifest, the room that they need, and the size of the model."""

import io
import json
from typing import Any

import pytest
from services import service

from skiff_operator.cli import main, plan
from skiff_operator.cli.capacity import NodeGpus
from skiff_operator.cli.plan import Plan, compare, info_arguments, merge_patch, render
from skiff_operator.errors import OperatorError

MEMORY = plan.ModelMemory(
    dtype="bfloat16",
    max_model_len=8192,
    each_rank=plan.RankMemory(15 << 30, 131_072, 1 << 30),
    gpus=(
        plan.GpuFit("H100", 80 << 30, True, 441_000, 53.9),
        plan.GpuFit("L4", 22 << 30, False, 0, 0.0),
    ),
)


def planned(**fields: Any) -> Plan:
    """A change of the arguments of two replicas with two GPUs each."""
    values: dict[str, Any] = {
        "namespace": "default",
        "name": "llama",
        "exists": True,
        "changes": (plan.Change("spec.parallelism.tensor", "1", "2"),),
        "restarts": True,
        "paused": False,
        "pods": ("llama-a", "llama-b"),
        "surge": 1,
        "started": 0,
        "requests": (("cpu", "4"), ("nvidia.com/gpu", "2")),
        "gpus": 2,
        "gpu_resource": "nvidia.com/gpu",
        "nodes": (
            NodeGpus("node-1", True, 8, 3),
            NodeGpus("node-2", True, 8, 1),
            NodeGpus("node-3", False, 8, 8),
        ),
        "memory": MEMORY,
        **fields,
    }
    return Plan(**values)


def test_a_plan_names_pods_room_and_memory() -> None:
    text = render(planned())
    assert "default/llama: 1 field would change" in text
    assert "Pods: 2 restart: llama-a, llama-b" in text
    assert "Room: 1 pod beside the running ones, each with cpu 4, nvidia.com/gpu 2" in text
    assert "free nvidia.com/gpu: node-1 3 of 8, node-2 1 of 8" in text
    assert "not enough" not in text
    assert "weights 15 GiB in bfloat16, KV cache 128 KiB a token" in text
    assert "H100 (80 GiB): fits, 441,000 tokens of KV cache: 53.9 requests of 8,192 tokens" in text
    assert "L4 (22 GiB): does not fit" in text


def test_pods_that_would_wait_for_gpus_are_counted() -> None:
    text = render(planned(started=3))
    assert "not enough: GPUs are free for 1 of 4 now" in text
    for nodes in (None, (NodeGpus("node-1", True, 8, None),)):
        assert "free GPUs are not known" in render(planned(nodes=nodes))


def test_without_a_restart_nothing_needs_room() -> None:
    assert "Pods: 2 restart, once the rollout is resumed: llama-a" in render(planned(paused=True))
    text = render(planned(restarts=False, pods=(), surge=0))
    assert "Pods: none restarts" in text and "Room" not in text
    assert "no difference" in render(planned(changes=(), restarts=False, surge=0, memory="not computed"))


def test_fields_are_compared_one_by_one_and_secrets_masked() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "SKIFF_API_KEY", "value": "s3cr3t"}]
    old = {"replicas": 1, "runtime": {"args": ["--x"], "env": env[:1], "device": "cuda"}}
    new = {"replicas": 2, "runtime": {"args": ["--x", "--y"], "env": env}, "cache": {"size": "10Gi"}}
    found = [(each.field, each.old, each.new) for each in compare(old, new)]
    assert found == [
        ("spec.replicas", "1", "2"),
        ("spec.runtime.args", '["--x"]', '["--x", "--y"]'),
        ("spec.runtime.env[SKIFF_API_KEY].value", "", "***"),
        ("spec.cache.size", "", "10Gi"),
        ("spec.runtime.device", "cuda", ""),
    ]


def test_an_object_that_was_empty_is_shown_by_its_fields() -> None:
    assert [each.field for each in compare({}, {"replicas": 1})] == ["spec.replicas"]
    assert [each.field for each in compare({"cache": {}}, {"cache": {"size": "1Gi"}})] == ["spec.cache.size"]
    volume = {"name": "tmp", "emptyDir": {}}
    assert [each.field for each in compare({"volumes": []}, {"volumes": [volume]})] == [
        "spec.volumes[tmp].emptyDir"
    ]
    assert [each.field for each in compare({"cache": {}}, {})] == ["spec.cache"]


def test_the_patch_removes_what_the_last_apply_had() -> None:
    """And nothing else: a field that an autoscaler wrote stays, as with `kubectl apply`."""
    last = {"spec": {"model": {"uri": "demo://", "name": "a"}, "cache": {"size": "1Gi"}, "drain": {}}}
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(last)}
    live = {"metadata": {"annotations": annotations}, "spec": {**last["spec"], "replicas": 3}}
    patch = merge_patch({"spec": {"model": {"uri": "demo://"}}}, live)
    assert patch == {"spec": {"model": {"uri": "demo://", "name": None}, "cache": None, "drain": None}}
    assert merge_patch({"spec": {"replicas": 1}}, {"metadata": {}}) == {"spec": {"replicas": 1}}


def test_the_models_size_is_computed_from_the_same_flags() -> None:
    args = ["--kv-cache-dtype=fp8_e4m3", "--page-size", "16", "--enable-metrics", "--expert-parallel"]
    given = service(
        model={"uri": "hf://org/name", "revision": "v1"},
        runtime={"args": args, "maxModelLen": 8192, "dtype": "bfloat16"},
        parallelism={"tensor": 4},
    )
    assert info_arguments(given, 80 << 30) == [
        *("info", "hf://org/name", "--json", "--tp", "4", "--revision", "v1", "--dtype", "bfloat16"),
        *("--max-model-len", "8192", "--kv-cache-dtype=fp8_e4m3", "--page-size", "16", "--expert-parallel"),
        *("--gpu-memory", "80"),
    ]


def test_the_runtime_computes_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable for the server on this machine does not change the sizes in the cluster."""
    monkeypatch.setenv("SKIFF_MAX_MODEL_LEN", "nonsense")
    node = NodeGpus("node-1", True, 1, 1, memory_bytes=24 << 30)
    found = plan._model_memory(service(), [node])
    assert isinstance(found, plan.ModelMemory), found
    [fit] = found.gpus
    assert fit.name == "the GPUs of node-1" and fit.memory_bytes == 24 << 30
    assert fit.fits and fit.kv_tokens > 100_000
    assert plan._model_memory(service(model={"uri": "pvc://claim/path"}), None) == (
        "not known here: the model's files are in the cluster (pvc://)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "while parsing"),
        ("", "contains no InferenceService"),
        ("kind: Pod\nmetadata: {name: a}", "only InferenceServices"),
        ("- 1", "no Kubernetes object"),
        ("kind: InferenceService", "metadata.name"),
        ("---\nkind: Pod\nmetadata: {name: a}\n" * 101, "more than 100"),
    ],
)
def test_a_file_that_cannot_be_planned_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(OperatorError, match=message):
        plan.read_manifests("-")


def test_errors_have_the_exit_code_of_kubectl_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan"]) == main.main(["plan", "-f", "/no/such/file"]) == 2
    assert "/no/such/file" in capsys.readouterr().err
