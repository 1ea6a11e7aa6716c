"""`skiff explain`, `plan` and `top` against a cluster, and the status that they show."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube import Kube, inference_service, skiff, tool, wait

ROOT = Path(__file__).parents[2]
CHAT = """
import json, sys, urllib.request
for number in range(40):
    body = {"model": "skiff-demo", "max_tokens": 64, "messages": [{"role": "user", "content": "What is a pod?"}]}
    request = urllib.request.Request(sys.argv[1], json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()
"""
STEPS = ("scheduled", "pulled", "loaded", "profiled", "captured", "ready")


def test_the_startup_of_a_pod_is_in_its_status(kube: Kube, operator: Kube, llama: str) -> None:
    def startup() -> dict[str, float]:
        found = (kube.get("infsvc", llama) or {}).get("status", {}).get("startup", {})
        return {
            name.removesuffix("Seconds"): value for name, value in found.items() if name.endswith("Seconds")
        }

    wait(lambda: set(startup()) == set(STEPS), timeout_seconds=30, explain=lambda: json.dumps(startup()))
    found = startup()
    assert found["loaded"] > 0 and found["captured"] >= 0
    assert found["ready"] >= found["scheduled"] + found["pulled"]
    code, screen = skiff(kube, "explain", llama)
    assert code == 0 and f"{kube.namespace}/{llama} is Ready" in screen and "Nothing: all is well." in screen


def test_top_shows_the_load(kube: Kube, client: str, llama: str) -> None:
    url = f"http://{llama}/v1/chat/completions"
    command = kube.command("exec", "-i", client, "--", "python3", "-", url)
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as load:
        assert load.stdin is not None
        load.stdin.write(CHAT)
        load.stdin.close()
        code, screen = skiff(kube, "top", "--interval", "3")
        assert load.wait(timeout=120) == 0
    assert code == 0
    [row] = [line.split() for line in screen.splitlines() if line.startswith(llama)]
    assert row[1] == "1/1"
    assert float(row[4]) > 0 and float(row[6].replace(",", "")) > 0, row
    assert skiff(kube, "top", llama, "--once")[0] == 0


def test_plan_names_the_pod_that_would_restart(kube: Kube, llama: str) -> None:
    manifest = (ROOT / "manifests/samples/llama-service.yaml").read_text()
    code, text = skiff(kube, "plan", "-f", "-", text=manifest)
    assert code == 0 and "no difference" in text
    live = kube.get("infsvc", llama)
    assert live is not None
    body = {key: live[key] for key in ("apiVersion", "kind")}
    spec = {**live["spec"], "runtime": {**live["spec"]["runtime"], "maxModelLen": 1024}}
    changed = json.dumps({**body, "metadata": {"name": llama}, "spec": spec})
    code, text = skiff(kube, "plan", "-f", "-", text=changed)
    assert code == 1 and "spec.runtime.maxModelLen" in text
    [pod] = kube.list("pods", f"serving.skiff.dev/inferenceservice={llama}")
    assert f"Pods: 1 restart: {pod['metadata']['name']}" in text
    assert "Memory of each rank: weights" in text
    code, text = skiff(kube, "plan", "-f", "-", text=changed.replace("1024", "-1"))
    assert code == 2 and "maxModelLen" in text


def test_explain_shows_the_log_of_a_pod_that_fails(kube: Kube, operator: Kube) -> None:
    runtime = {"device": "cpu", "args": ["--max-modellen=1024"]}
    kube.apply(inference_service("mistyped", runtime=runtime))

    def failure() -> dict[str, object]:
        found: dict[str, object] = (
            (kube.get("infsvc", "mistyped") or {}).get("status", {}).get("lastFailure", {})
        )
        return found

    wait(
        lambda: failure().get("reason") == "InvalidArgument",
        timeout_seconds=120,
        explain=lambda: str(failure()),
    )
    assert "--max-modellen" in str(failure()["remedy"])
    code, screen = skiff(kube, "explain", "mistyped")
    assert code == 0 and "is not Ready: CrashLoop" in screen
    assert (
        "End of the log of runtime in mistyped-" in screen
        and "unrecognized arguments: --max-modellen" in screen
    )
    assert "Correct or remove --max-modellen in spec.runtime.args" in " ".join(screen.split())
    kube.run("delete", "infsvc", "mistyped", "--timeout=60s")


@pytest.fixture
def gpus(operator: Kube) -> Iterator[str]:
    """The name of a node that pretends to have two GPUs, as a device plugin and the GPU feature discovery would show them."""
    name: str = operator.list("nodes")[0]["metadata"]["name"]
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}

    def pretend(count: str | None) -> None:
        amounts = {"nvidia.com/gpu": count}
        status = {"status": {"capacity": amounts, "allocatable": amounts}}
        marked = {"metadata": {"labels": labels if count else dict.fromkeys(labels)}}
        operator.run("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        operator.run("patch", "node", name, "--type=merge", "-p", json.dumps(marked))

    pretend("2")
    yield name
    pretend(None)


def test_pods_that_wait_for_gpus(kube: Kube, gpus: str) -> None:
    """The first takes both GPUs, and its container sees neither of them; the second finds none free."""
    runtime = {"device": "cuda", "image": tool("image", "runtime")}  # the only image there is
    taker = inference_service("taker", runtime=runtime, parallelism={"tensor": 2})
    code, text = skiff(kube, "plan", "-f", "-", text=json.dumps(taker))
    assert code == 1 and f"free on {gpus}: nvidia.com/gpu 2 of 2" in text and "not enough" not in text
    assert "NVIDIA-H100-80GB-HBM3 (79.65 GiB): fits" in text
    kube.apply(taker)

    def cause() -> str:
        status = (kube.get("infsvc", "taker") or {}).get("status", {})
        return str(status.get("lastFailure", {}).get("reason"))

    wait(lambda: cause() == "NoGPU", timeout_seconds=120, explain=cause)
    waiter = inference_service("waiter", runtime=runtime)
    code, text = skiff(kube, "plan", "-f", "-", text=json.dumps(waiter))
    assert code == 1 and "not enough: room for 0 of 1 pods now (needs 1 nvidia.com/gpu, 0 free" in text, text
    kube.apply(waiter)
    wait(lambda: kube.condition("waiter").get("reason") == "InsufficientGPU", timeout_seconds=60)
    code, screen = skiff(kube, "explain", "waiter")
    assert code == 0 and "Add or free GPUs" in screen
    [row] = [line.split() for line in screen.splitlines() if line.split()[:1] == [gpus]]
    assert row[1:] == ["0", "2", "NVIDIA-H100-80GB-HBM3"]
    kube.run("delete", "infsvc", "taker", "waiter", "--timeout=60s")
