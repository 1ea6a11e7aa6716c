"""The router as the chart installs it: models by name, routers that are killed or replaced under load, keys and limits."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from helm import Helm
from kube import Kube, inference_service, wait
from router_in_cluster import ROUTER, URL, routers, upgrade
from traffic_run import TrafficRun

NAMES: Final = ("routed-a", "routed-b")
KEYS: Final = "router-keys"
RATE: Final = 6.0
STREAMS_PER_ROUTER: Final = 4
STREAM_SECONDS: Final = 25
KILL_AFTER_SECONDS: Final = 8
NOTICE_SECONDS: Final = 20.0
"""Time from the deletion of a router's pod until its clients see closed connections. A busy kubelet kills the process late, but the
bound is below the clients' own timeout of 30 s."""

STREAMS = """
import asyncio, json, sys, time
import httpx2

seconds, number, *urls = sys.argv[1:]
end = time.monotonic() + float(seconds)

async def stream(client, url, model):
    body = {"model": model, "prompt": "What is a pod?", "max_tokens": 120, "ignore_eos": True, "stream": True}
    async with client.stream("POST", url + "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return f"status {reply.status_code}: {(await reply.aread()).decode()}"
        text = "".join([part async for part in reply.aiter_text()])
    return "" if text.endswith("data: [DONE]\\n\\n") else "no terminal event: " + text[-200:]

async def worker(url, model, result):
    async with httpx2.AsyncClient(timeout=30) as client:
        while time.monotonic() < end:
            try:
                error = await stream(client, url, model)
            except httpx2.HTTPError as failed:
                error = f"{type(failed).__name__}: {failed}"
            if error:
                result["errors"].append([time.time(), error])
                return
            result["finished"] += 1

async def main():
    results = {url: {"finished": 0, "errors": []} for url in urls}
    models = ("routed-a", "routed-b")
    await asyncio.gather(*(
        worker(url, models[each % 2], results[url]) for url in urls for each in range(int(number))
    ))
    print(json.dumps(results))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def routed(kube: Kube, client: str, helm: Helm, operator: Kube) -> Iterator[str]:
    """Two services of different models behind two routers. Returns the client's pod."""
    for name in NAMES:
        model = {"uri": "demo://", "name": name}
        kube.apply(inference_service(name, model=model, networkPolicy={}))
    for name in NAMES:
        kube.wait_ready(name)
    with helm.values_restored(namespace=operator.namespace):
        upgrade(
            helm,
            operator,
            "router.enabled=true",
            "router.drainTimeoutSeconds=30",
            "router.exclusive=true",
            "router.usageLog=true",
        )
        wait(lambda: len(routers(operator)) == 2, timeout_seconds=60)
        yield client
    operator.run("delete", "secret", KEYS, "--ignore-not-found")
    kube.run("delete", "infsvc", *NAMES, "--timeout=120s", timeout_seconds=150)


def request(
    kube: Kube, pod: str, path: str, body: Any = None, *headers: str
) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and JSON of a request through the router's Service."""
    words = ["curl", "-sS", "-i", f"{URL}{path}", *(word for header in headers for word in ("-H", header))]
    if body is not None:
        words += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    head, _, text = kube.execute(pod, *words).replace("\r\n", "\n").partition("\n\n")
    status, *lines = head.split("\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), fields, json.loads(text)


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "What is a pod?"}],
        "temperature": 0,
        "max_tokens": 8,
        **fields,
    }


def test_each_model_is_served_by_its_names_under_one_url(kube: Kube, routed: str) -> None:
    status, _, listed = request(kube, routed, "/v1/models")
    found = {model["id"]: model for model in listed["data"]}
    assert status == 200 and set(NAMES) <= found.keys()
    for name in NAMES:
        assert (found[name]["state"], found[name]["service"]) == ("ready", f"{kube.namespace}/{name}")
        for model in (name, f"{kube.namespace}/{name}"):
            status, _, reply = request(kube, routed, "/v1/chat/completions", chat(model))
            assert (status, reply["model"]) == (200, name)
    status, _, reply = request(kube, routed, "/v1/chat/completions", chat("absent"))
    assert status == 404 and all(name in reply["error"]["message"] for name in NAMES)
    status, _, reply = request(
        kube, routed, "/generate", {"text": "A pod is", "max_tokens": 4}, f"x-skiff-model: {NAMES[1]}"
    )
    assert status == 200 and reply["text"]


def test_pods_accept_only_the_operators_namespace_where_the_router_is(
    kube: Kube, operator: Kube, routed: str
) -> None:
    def peers() -> Any:
        policy = kube.get("networkpolicy", NAMES[0])
        assert policy is not None
        return policy["spec"]["ingress"][0]["from"]

    own = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator.namespace}}}
    wait(lambda: bool(peers() == [own]), timeout_seconds=60, explain=lambda: str(peers()))


def test_routers_killed_one_after_the_other_end_only_their_own_streams(
    kube: Kube, operator: Kube, routed: str
) -> None:
    for _ in range(2):
        wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
        before = routers(operator)
        killed, spared = sorted(before)
        words = ["python3", "-", str(STREAM_SECONDS), str(STREAMS_PER_ROUTER), *before.values()]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(kube.execute, routed, *words, text=STREAMS, timeout_seconds=120)
            time.sleep(KILL_AFTER_SECONDS)
            killed_at = time.time()
            operator.run("delete", "pod", killed, "--grace-period=0", "--force")
            results = json.loads(running.result())
        dead, alive = results[before[killed]], results[before[spared]]
        assert alive["errors"] == [] and alive["finished"] >= STREAMS_PER_ROUTER, alive
        assert len(dead["errors"]) == STREAMS_PER_ROUTER, dead
        for at, error in dead["errors"]:
            assert error, "a client sees why its stream ended"
            # Clocks of the test and of the client's node may differ by a little.
            assert -2 < at - killed_at < NOTICE_SECONDS, (at - killed_at, error)


def test_rollout_of_the_routers_loses_no_request(kube: Kube, operator: Kube, routed: str) -> None:
    wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
    run = TrafficRun(kube, routed, name="router", port=8720)
    run.record(URL, NAMES[0], "routed")
    run.start(URL, NAMES[0], rate=RATE, revisions=("routed",))
    time.sleep(3)
    run.mark("rollout")
    operator.run("rollout", "restart", f"deployment/{ROUTER}")
    operator.run("rollout", "status", f"deployment/{ROUTER}", "--timeout=180s", timeout_seconds=210)
    run.mark("after")
    time.sleep(3)
    report = run.stop()
    assert report["failed"] == 0 and report["requests"] > 30, json.dumps(report, indent=1)


def test_keys_limits_and_usage(kube: Kube, helm: Helm, operator: Kube, routed: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEYS}}
    operator.apply({**secret, "stringData": {"keys": "team-a: sk-team-a\nbatch: sk-batch\n"}})
    limits = json.dumps({"keys": {"batch": {"requestsPerMinute": 2}}})
    upgrade(
        helm, operator, f'router.apiKeysSecret.name="{KEYS}"', f"router.limits={limits}", "router.replicas=2"
    )
    wait(lambda: len(routers(operator)) == 2, timeout_seconds=120)
    wait(
        lambda: all("peer_found" in operator.run("logs", router) for router in routers(operator)),
        timeout_seconds=60,
    )

    def post(key: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
        header = [f"authorization: Bearer {key}"] if key else []
        return request(kube, routed, "/v1/chat/completions", chat(NAMES[0], **fields), *header)

    assert [post(key)[0] for key in ("", "sk-other", "sk-team-a")] == [401, 401, 200]
    assert [post("sk-batch")[0] for _ in range(2)] == [200, 200]
    status, headers, reply = post("sk-batch")
    assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 30

    def read_logs() -> list[str]:
        return [line for router in routers(operator) for line in operator.run("logs", router).splitlines()]

    wait(lambda: sum(line.startswith("{") for line in read_logs()) >= 4, timeout_seconds=30)
    log = read_logs()
    lines = sorted(
        (json.loads(line) for line in log if line.startswith("{")), key=lambda line: str(line["time"])
    )
    assert [line["key"] for line in lines] == ["team-a", "batch", "batch", "batch"]
    assert [line["status"] for line in lines] == [200, 200, 200, 429]
    assert all(line["completion_tokens"] == 8 and not line["estimated"] for line in lines[:3])
    assert not [line for line in log if "sk-" in line]
