"""LoRA adapters on a cluster: two in one service, under load while pods are replaced and adapters come and go; 0 failed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import adapter_files
import pytest
from helm import Helm
from hub_in_cluster import running_hub
from kube import Kube, inference_service, wait
from router_in_cluster import URL, routers, upgrade
from traffic_run import TrafficRun

NAME: Final = "adapted"
CLAIM: Final = "lora-adapters"
PODS: Final = f"serving.skiff.dev/inferenceservice={NAME}"
ADAPTERS: Final = {"sql": (1, 8), "law": (2, 4), "late": (3, 8), "large": (4, 64)}
"""Seeds and ranks of the adapters in the hub; the last one has more than the service allows."""
RATE: Final = 3.0
"""Requests a second for each adapter."""
SETTLE_SECONDS: Final = 300.0


def lora_adapter(name: str) -> dict[str, Any]:
    """A LoRAAdapter whose files the hub has."""
    return {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name},
        "spec": {"modelRef": {"name": NAME}, "uri": f"hf://skiff/{name}"},
    }


def ready(kube: Kube, name: str) -> tuple[str, str, str]:
    """Status, reason and message of the condition Ready of a LoRAAdapter; empty before it has one."""
    conditions = (kube.get("loraadapter", name) or {}).get("status", {}).get("conditions", [])
    return next(((each["status"], each["reason"], each["message"]) for each in conditions), ("", "", ""))


def adapters(kube: Kube) -> list[dict[str, Any]]:
    """The adapters in the status of the InferenceService."""
    found: list[dict[str, Any]] = (kube.get("infsvc", NAME) or {}).get("status", {}).get("adapters", [])
    return found


def template_hash(kube: Kube) -> str:
    """The hash of the pod template of the newest pods."""
    found: str = (kube.get("infsvc", NAME) or {})["status"]["updateRevision"]
    return found


def ask(kube: Kube, pod: str, model: str) -> tuple[int, str]:
    """Return the status and the text of a greedy answer through the router."""
    body = {"model": model, "prompt": "What is a pod?", "temperature": 0, "max_tokens": 12}
    words = ["curl", "-sS", "-w", "\n%{http_code}", f"{URL}/v1/completions"]
    words += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    text, _, status = kube.execute(pod, *words).rpartition("\n")
    reply = json.loads(text)
    return int(status), reply["choices"][0]["text"] if "choices" in reply else text


@pytest.fixture(scope="module")
def hub(kube: Kube) -> Iterator[str]:
    """The URL of a hub that has the adapters."""
    source = Path(adapter_files.__file__).read_text()
    with running_hub(kube) as url:
        for name, (seed, rank) in ADAPTERS.items():
            config, directory = "/tmp/models/skiff/demo/config.json", f"/tmp/models/skiff/{name}"
            words = ["python3", "-", config, directory, str(seed), str(rank)]
            kube.execute("hub", *words, text=source)
        yield url


@pytest.fixture(scope="module")
def adapted(kube: Kube, client: str, helm: Helm, operator: Kube, hub: str) -> Iterator[str]:
    """A service of two pods with an adapter of its spec and one of a LoRAAdapter, behind two routers. Returns the client's pod."""
    env = [{"name": "HF_ENDPOINT", "value": hub}, {"name": "SKIFF_CPU_THREADS", "value": "1"}]
    with helm.values_restored(namespace=operator.namespace):
        upgrade(helm, operator, "router.enabled=true", "router.drainTimeoutSeconds=30")
        wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
        kube.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": CLAIM},
                "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
            },
            inference_service(
                NAME,
                model={"uri": "demo://", "name": NAME},
                runtime={"device": "cpu", "dtype": "float32", "env": env},
                replicas=2,
                lora={"maxLoras": 4, "maxLoraRank": 16, "cache": {"claimName": CLAIM}},
                adapters=[{"name": "sql", "uri": "hf://skiff/sql"}],
            ),
            lora_adapter("law"),
        )
        kube.wait_ready(NAME)
        wait(
            lambda: (
                kube.condition(NAME, "AdaptersReady").get("status") == "True" and len(adapters(kube)) == 2
            ),
            timeout_seconds=SETTLE_SECONDS,
            explain=lambda: json.dumps(adapters(kube), indent=1),
        )
        yield client
        kube.run("delete", "loraadapters", "--all", "--timeout=60s")
        kube.run("delete", "infsvc", NAME, "--timeout=120s", timeout_seconds=150)
        kube.run("delete", "pvc", CLAIM, "--timeout=60s", timeout_seconds=90)


def test_each_adapter_answers_by_its_name_and_unlike_the_model(kube: Kube, adapted: str) -> None:
    answers = {model: ask(kube, adapted, model) for model in (NAME, "sql", "law")}
    assert {status for status, _ in answers.values()} == {200}, answers
    assert len({text for _, text in answers.values()}) == 3, answers
    key = f"{kube.namespace}/{NAME}/sql"
    assert ask(kube, adapted, key) == answers["sql"]
    listed = json.loads(kube.execute(adapted, "curl", "-sS", f"{URL}/v1/models"))["data"]
    parents = {each["id"]: each.get("parent") for each in listed}
    assert parents["sql"] == parents["law"] == NAME
    assert ready(kube, "law")[:2] == ("True", "Loaded")


def test_adapters_are_downloaded_once_for_all_pods(kube: Kube, adapted: str) -> None:
    """Both pods see the same files in the claim, one for each adapter."""
    program = (
        "import os, pathlib; print(sorted(os.stat(path).st_ino for path in "
        "pathlib.Path('/adapters').rglob('adapter_model.safetensors')))"
    )
    pods = kube.run("get", "pods", "-l", PODS, "-o", "jsonpath={.items[*].metadata.name}").split()
    files = [json.loads(kube.execute(pod, "python3", "-c", program)) for pod in pods]
    assert len(pods) == 2 and files[0] == files[1] and len(files[0]) == len(set(files[0])) == 2, files


def test_a_bad_adapter_is_refused_and_the_others_stay(kube: Kube, adapted: str) -> None:
    kube.apply(lora_adapter("large"))
    wait(
        lambda: ready(kube, "large")[1] == "AdapterRefused",
        timeout_seconds=SETTLE_SECONDS,
        explain=lambda: str(ready(kube, "large")),
    )
    assert "64" in ready(kube, "large")[2], "the reason names the rank"
    assert {ask(kube, adapted, model)[0] for model in (NAME, "sql", "law")} == {200}
    assert ask(kube, adapted, "large")[0] == 404
    assert kube.is_ready(NAME)
    kube.run("delete", "loraadapter", "large", "--timeout=60s")


def test_a_rollout_under_load_loses_no_request_of_any_adapter(kube: Kube, adapted: str) -> None:
    runs = {
        name: TrafficRun(kube, adapted, name=f"lora-{name}", port=port)
        for name, port in (("sql", 8760), ("law", 8761))
    }
    for name, run in runs.items():
        run.record(URL, name, f"lora-{name}")
    for name, run in runs.items():
        run.start(URL, name, rate=RATE, revisions=(f"lora-{name}",))
    before = template_hash(kube)
    for run in runs.values():
        run.mark("adapter")
    kube.apply(lora_adapter("late"))
    wait(
        lambda: ready(kube, "late")[0] == "True",
        timeout_seconds=SETTLE_SECONDS,
        explain=lambda: str(ready(kube, "late")),
    )
    assert template_hash(kube) == before, "an adapter changes no template"
    assert ask(kube, adapted, "late")[0] == 200
    for run in runs.values():
        run.mark("rollout")
    patch = {"spec": {"runtime": {"args": ["--max-running-requests=63"]}}}
    kube.run("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps(patch))
    wait(lambda: template_hash(kube) != before, timeout_seconds=60)
    wait(
        lambda: kube.is_ready(NAME) and len(kube.list("pods", PODS)) == 2,
        timeout_seconds=SETTLE_SECONDS,
        explain=lambda: json.dumps(kube.get("infsvc", NAME), indent=1),
    )
    wait(
        lambda: all(each["ready"] for each in adapters(kube)) and len(adapters(kube)) == 3,
        timeout_seconds=SETTLE_SECONDS,
        explain=lambda: json.dumps(adapters(kube), indent=1),
    )
    for run in runs.values():
        run.mark("unload")
    kube.run("delete", "loraadapter", "late", "--timeout=60s")
    wait(lambda: ask(kube, adapted, "late")[0] == 404, timeout_seconds=60)
    reports = {name: run.stop() for name, run in runs.items()}
    for name, report in reports.items():
        assert report["failed"] == 0 and report["not_sent"] == 0, json.dumps(report, indent=1)
        assert report["requests"] > 30, name
    print(json.dumps({name: [report["requests"], report["failed"]] for name, report in reports.items()}))
