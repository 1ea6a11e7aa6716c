"""`skiff plan`: the changes of a manifest, the room that they need, and the size of the model."""

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from fake_hub import running_hub
from services import service

from skiff_operator.capacity import Amounts, Node
from skiff_operator.cli import main, plan
from skiff_operator.cli.capacity import NodeRoom
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


GPU = "nvidia.com/gpu"
MUCH = {"cpu": 48, "memory": 400, "pods": 100}


def amounts(**values: int) -> Amounts:
    """Amounts by resource, with memory in GiB; by default those of a pod, or of a node with its pods."""
    given = {
        "memory": values.pop("memory", 16) << 30,
        GPU: values.pop("gpu", 2),
        "cpu": 4,
        "pods": 1,
        **values,
    }
    return {name: Decimal(value) for name, value in given.items()}


def room(name: str, gpus: int, *, admits: bool = True, labels: dict[str, str] | None = None) -> NodeRoom:
    """A node with eight GPUs, `gpus` of them free, and more than enough of every other resource."""
    total = amounts(gpu=8, cpu=64, memory=512, pods=110)
    return NodeRoom(Node(name, labels or {}, (), total), admits, amounts(gpu=gpus, **MUCH))


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
        "replacement": "",
        "requests": amounts(),
        "gpus": 2,
        "nodes": (room("node-1", 3), room("node-2", 1), room("node-3", 8, admits=False)),
        "operator": "",
        "memory": MEMORY,
        **fields,
    }
    return Plan(**values)


def test_a_plan_names_pods_room_and_memory() -> None:
    text = render(planned())
    assert "default/llama: 1 field would change" in text
    assert "Pods: 2 restart: llama-a, llama-b" in text
    assert "Room: 1 pod beside the running ones, each with nvidia.com/gpu 2, cpu 4, memory 16Gi" in text
    assert "free on node-1: nvidia.com/gpu 3 of 8, cpu 48 of 64, memory 400Gi of 512Gi" in text
    assert "free on node-2: nvidia.com/gpu 1 of 8" in text and "node-3" not in text
    assert "not enough" not in text
    assert "weights 15 GiB in bfloat16, KV cache 128 KiB a token" in text
    assert "H100 (80 GiB): fits, 441,000 tokens of KV cache: 53.9 requests of 8,192 tokens" in text
    assert "L4 (22 GiB): does not fit" in text


def test_pods_that_would_wait_are_counted_by_every_resource() -> None:
    assert "not enough: room for 1 of 4 pods now; the others wait" in render(planned(started=3))
    one_short = {
        "cpu": (3, "needs 4 cpu, 3 free"),
        "memory": (8, "needs 16Gi memory, 8Gi free"),
        "pods": (0, "needs 1 pods, 0 free"),
    }
    for name, (value, shortage) in one_short.items():
        text = render(
            planned(nodes=(room("node-1", 8)._replace(free=amounts(gpu=8, **{**MUCH, name: value})),))
        )
        assert f"not enough: room for 0 of 1 pods now ({shortage})" in text
    other = amounts(gpu=0) | {"amd.com/gpu": Decimal(2)}
    assert "needs 2 amd.com/gpu, 0 free" in render(planned(requests=other))
    assert "room for 0 of 1 pods now (no node admits the pod)" in render(planned(nodes=()))
    for nodes in (None, (room("node-1", 3)._replace(free=None),)):
        assert "free resources are not known" in render(planned(nodes=nodes))


def test_a_rollout_in_place_needs_no_room_and_is_announced() -> None:
    replacement = "no room for a pod beside the old ones (needs 2 nvidia.com/gpu, 1 free): the service is interrupted while its only pod is replaced"
    text = render(planned(surge=0, replacement=replacement))
    assert f"Rollout: {replacement}" in text and "Room" not in text


def test_an_operator_of_another_version_is_named() -> None:
    text = render(planned(operator="the operator is 0.2.0, and this command 0.1.0"))
    assert "Versions: the operator is 0.2.0, and this command 0.1.0: a pod template" in text


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
    node = room("node-1", 1, labels={f"{GPU}.memory": str(24 << 10)})
    found = plan._model_memory(service(), [node], GPU)
    assert isinstance(found, plan.ModelMemory), found
    [fit] = found.gpus
    assert fit.name == "the GPUs of node-1" and fit.memory_bytes == 24 << 30
    assert fit.fits and fit.kv_tokens > 100_000
    assert plan._model_memory(service(model={"uri": "pvc://claim/path"}), None, GPU) == (
        "not known here: the model's files are in the cluster (pvc://)"
    )


@pytest.mark.parametrize(
    ("gib", "args", "env", "fits"),
    [
        (16, [], [], False),
        (16, [], [{"name": "SKIFF_QUANTIZATION", "value": "fp8"}], True),
    ],
)
def test_whether_a_model_fits_follows_from_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, args: list[str], env: list[Any], fits: bool
) -> None:
    """Weights of 15 GiB fit no GPU of 16 GiB beside the working memory, and in FP8 they do; the hub has no weights here."""
    folder = tmp_path / "hub" / "org" / "llama-8b"
    folder.mkdir(parents=True)
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    config = {**architecture, **shape, **heads, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"no weights")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with running_hub(tmp_path / "hub") as hub:
        model = {"uri": "hf://org/llama-8b", "endpoint": hub.url}
        given = service(model=model, runtime={"args": args, "env": env})
        labels = {f"{GPU}.memory": str(gib << 10), f"{GPU}.product": "GPU"}
        found = plan._model_memory(given, [room("node-1", 8, labels=labels)], GPU)
        assert not [seen for seen in hub.seen if seen.path.endswith(".safetensors")]
    assert isinstance(found, plan.ModelMemory), found
    assert [(fit.name, fit.fits) for fit in found.gpus] == [("GPU", fits)]
    assert found.each_rank.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2


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
