"""From zero pods and back: 200 requests in the first second through the router, and bursts while the last pod goes. All are answered."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from helm import Helm
from kube import Kube, Object, inference_service, wait
from router_in_cluster import URL, upgrade

NAME: Final = "scaled"
PODS: Final = f"serving.skiff.dev/inferenceservice={NAME}"
BURST: Final = 200
IDLE_SECONDS: Final = 15
START_SECONDS: Final = 240

REQUESTS: Final = """
import asyncio, json, sys, time
import httpx2

url, model, number = sys.argv[1], sys.argv[2], int(sys.argv[3])

async def ask(client, index):
    await asyncio.sleep(index / number)
    streams = index % 2 == 0
    body = {"model": model, "prompt": "What is a pod?", "max_tokens": 4, "temperature": 0, "stream": streams}
    found = {"begun": time.time(), "status": 0, "text": "", "comments": [], "error": ""}
    try:
        async with client.stream("POST", url + "/v1/completions", json=body) as reply:
            found["status"] = reply.status_code
            raw = (await reply.aread()).decode()
        if reply.status_code != 200:
            found["error"] = raw
        elif streams:
            lines = raw.splitlines()
            found["comments"] = [line for line in lines if line.startswith(": ")]
            events = [line[6:] for line in lines if line.startswith("data: ")]
            if events[-1:] != ["[DONE]"] or '"error"' in raw:
                found["error"] = raw[-500:]
            else:
                choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
                found["text"] = "".join(choice["text"] for choice in choices)
        else:
            found["text"] = json.loads(raw)["choices"][0]["text"]
    except (httpx2.HTTPError, ValueError, KeyError) as failed:
        found["error"] = f"{type(failed).__name__}: {failed}"
    found["seconds"] = time.time() - found["begun"]
    return found

async def main():
    limits = httpx2.Limits(max_connections=number)
    async with httpx2.AsyncClient(timeout=500, limits=limits) as client:
        print(json.dumps(await asyncio.gather(*(ask(client, index) for index in range(number)))))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def routed(kube: Kube, client: str, helm: Helm, operator: Kube) -> Iterator[str]:
    """A service at zero replicas behind the chart's routers. Returns the client's pod."""
    with helm.values_restored(namespace=operator.namespace):
        upgrade(helm, operator, "router.enabled=true")
        policy = {
            "minReplicas": 0,
            "maxReplicas": 1,
            "targets": {"concurrency": 64},
            "scaleDownDelaySeconds": 5,
            "scaleToZeroAfterSeconds": IDLE_SECONDS,
        }
        model = {"uri": "demo://", "name": NAME}
        kube.apply(inference_service(NAME, model=model, replicas=0, autoscaling=policy))
        kube.wait_ready(NAME)
        yield client
        kube.run("delete", "infsvc", NAME, "--timeout=120s", timeout_seconds=150)


def replicas(kube: Kube) -> int:
    """Return the number of pods that shall be."""
    found = kube.get("infsvc", NAME)
    assert found is not None
    wanted: int = found["spec"]["replicas"]
    return wanted


def ask(kube: Kube, pod: str, number: int) -> list[Any]:
    """Send requests within one second, and return what became of each."""
    words = ("python3", "-", URL, NAME, str(number))
    answers: list[Any] = json.loads(kube.execute(pod, *words, text=REQUESTS, timeout_seconds=520))
    failed = [each for each in answers if each["error"] or each["status"] != 200]
    assert not failed, failed[:5]
    assert len(answers) == number
    assert len({each["text"] for each in answers}) == 1, "they all ask the same"
    return answers


def events(kube: Kube) -> list[tuple[str, str]]:
    """Return reason and note of each Event about the service's scale."""
    found: list[Object] = kube.list("events.events.k8s.io")
    about = [each for each in found if each.get("regarding", {}).get("name") == NAME]
    return [(each["reason"], each["note"]) for each in about if each["reason"] in ("ScaledUp", "ScaledDown")]


def wait_until_zero(kube: Kube) -> None:
    """Wait until the operator has removed the last pod for idleness."""
    wait(lambda: replicas(kube) == 0, timeout_seconds=IDLE_SECONDS + 60)


def test_200_requests_in_the_first_second_at_zero_are_all_answered(kube: Kube, routed: str) -> None:
    assert replicas(kube) == 0 and not kube.list("pods", PODS)
    answers = ask(kube, routed, BURST)
    slowest = max(each["seconds"] for each in answers)
    print(f"{BURST} requests from zero: slowest {slowest:.1f} s")
    assert slowest < START_SECONDS
    comments = {comment for each in answers for comment in each["comments"]}
    assert comments, "a start takes longer than a second"
    assert len(kube.list("pods", PODS)) == 1
    wait_until_zero(kube)
    wait(lambda: not kube.list("pods", PODS), timeout_seconds=120)
    found = kube.get("infsvc", NAME)
    assert found is not None
    assert found["status"]["autoscaling"]["message"] == f"no request for {IDLE_SECONDS} s"
    assert kube.condition(NAME)["reason"] == "ScaledToZero"
    assert {reason for reason, _ in events(kube)} == {"ScaledUp", "ScaledDown"}


def test_a_burst_while_the_last_pod_goes_is_answered(kube: Kube, routed: str) -> None:
    ask(kube, routed, 1)
    wait_until_zero(kube)
    ask(kube, routed, 20)  # the pod may still be there, and drains
    wait_until_zero(kube)
    wait(lambda: not kube.list("pods", PODS), timeout_seconds=120)
    ask(kube, routed, 20)
