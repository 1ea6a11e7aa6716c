"""Rollouts beside or in place of old pods, on a real API server with pretended nodes, and what is said about them."""

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from apiserver import MERGE, ApiServer, Refused
from installation import Installation
from operator_checks import settle
from operator_process import OperatorProcess, eventually
from play_kubelet import PlayKubelet
from services import service

from skiff_operator import plan, rollout_strategy
from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.resources import deployment
from skiff_operator.rollout_strategy import ANNOTATION_REPLACE_REASON, Choice
from skiff_operator.room import LISTS_PER_RESYNC
from skiff_operator.settings import Settings

pytestmark = pytest.mark.usefixtures("operator")
GPU = "nvidia.com/gpu"
NODES = "/api/v1/nodes"
SURGE, REPLACE = {"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": 0, "maxUnavailable": 1}
AddNode = Callable[[int], str]


@pytest.fixture(scope="module")
def operator(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """An operator that looks at the nodes anew for each test."""
    flags = ("--status-delay-seconds", "0.1", "--resync-seconds", "2")
    with installation.operator(tmp_path_factory.mktemp("operator"), "operator", *flags) as process:
        yield process
        assert '"traceback"' not in process.log.read_text()


@pytest.fixture
def add_node(server: ApiServer, api: ApiServer) -> Iterator[AddNode]:
    """Add a node with some GPUs for this test's pods alone; the pool that selects it is its name."""
    name = f"node-{api.namespace}"[:60].rstrip("-")

    def add(gpus: int) -> str:
        server.request("POST", NODES, {"metadata": {"name": name, "labels": {"pool": name}}})
        server.request("PATCH", f"{NODES}/{name}", {"spec": {"taints": None}}, kind=MERGE)
        set_gpus(server, name, gpus)
        return name

    yield add
    server.request("DELETE", f"{NODES}/{name}")


def set_gpus(server: ApiServer, node: str, gpus: int) -> None:
    """Pretend that a ready node has this many GPUs, and plenty of everything else."""
    amounts = {GPU: str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"}
    ready = [{"type": "Ready", "status": "True", "lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}]
    status = {"status": {"allocatable": amounts, "capacity": amounts, "conditions": ready}}
    server.request("PATCH", f"{NODES}/{node}/status", status, kind=MERGE)
    server.request("PATCH", f"{NODES}/{node}", {"spec": {"taints": None}}, kind=MERGE)


def stamp(age_seconds: float = 0.0) -> str:
    """A time in the past."""
    moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def serve(api: ApiServer, node: str, count: int = 1, revision: str = "") -> PlayKubelet:
    """Play scheduler and kubelet: bind all pods of a revision to the node, and make them ready."""
    kubelet = PlayKubelet(api, "llama")
    eventually(lambda: len(kubelet.pods(revision)) >= count, f"{count} pods")
    for pod in kubelet.pods(revision):
        if "nodeName" not in pod["spec"]:
            target = {"target": {"kind": "Node", "name": node}}
            api.request("POST", f"{api.path('pods', pod['metadata']['name'])}/binding", {
                "metadata": {"name": pod["metadata"]["name"]}, **target,
            })  # fmt: skip
    kubelet.serve(count, revision)
    return kubelet


def create(api: ApiServer, node: str, **fields: Any) -> str:
    """Create a service of one GPU on the node and make it serve; its resource version."""
    spec = {"model": {"uri": "demo://"}, "nodeSelector": {"pool": node}, **fields}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService", "spec": spec}
    api.create("inferenceservices", {**body, "metadata": {"name": "llama"}})
    serve(api, node, fields.get("replicas", 1))
    eventually(lambda: condition(api, "Ready")["status"] == "True", "it serves")
    found: str = api.get("inferenceservices", "llama")["metadata"]["resourceVersion"]
    return found


def condition(api: ApiServer, kind: str = "Progressing") -> dict[str, Any]:
    """A condition for the present generation; empty until there is one."""
    found = api.get("inferenceservices", "llama")
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return {"status": "", "reason": "", "message": ""}
    return next(each for each in status["conditions"] if each["type"] == kind)


def edit(api: ApiServer, **fields: Any) -> str:
    """Merge into the spec, by default a flag that changes the pods; the new revision once it is rolled out."""
    before = api.get("deployments", "llama")["spec"]["template"]["metadata"]["labels"]
    fields = fields or {"runtime": {"maxModelLen": 512 + int(datetime.datetime.now().timestamp()) % 4096}}
    api.merge("inferenceservices", "llama", {"spec": fields})
    label = "serving.skiff.dev/revision"

    def template() -> Any:
        return api.get("deployments", "llama")["spec"]["template"]["metadata"]["labels"]

    eventually(lambda: template()[label] != before[label], "the Deployment has the new template")
    new: str = template()[label]
    return new


def strategy(api: ApiServer) -> dict[str, Any]:
    """The parameters of the Deployment's rolling update."""
    found: dict[str, Any] = api.get("deployments", "llama")["spec"]["strategy"]["rollingUpdate"]
    return found


def replace_reason(api: ApiServer) -> str:
    """The recorded reason to replace pods in place."""
    found: str = api.get("deployments", "llama")["metadata"]["annotations"].get(ANNOTATION_REPLACE_REASON, "")
    return found


def events(api: ApiServer, reason: str) -> list[str]:
    """The texts of the operator's Events of a reason."""
    return [each["note"] for each in api.list("events") if each["reason"] == reason]


def test_without_room_pods_are_replaced_in_place_and_it_is_said_before(
    api: ApiServer, server: ApiServer, operator: OperatorProcess, add_node: AddNode
) -> None:
    node = add_node(1)
    since = create(api, node)
    new = edit(api)
    assert strategy(api) == REPLACE
    said = (
        f"no room for a pod beside the old ones (needs 1 {GPU}, 0 free): "
        "the service is interrupted while its only pod is replaced"
    )
    assert replace_reason(api) == said.partition(": the")[0]
    statuses = [each["object"] for each in api.watched("inferenceservices", since)]
    announced = next(each for each in statuses if _progressing(each)["reason"] == "ReplacingPods")
    assert _progressing(announced)["message"].startswith(said)
    rolled = next(
        each["object"]
        for each in api.watched("deployments", since)
        if each["object"]["spec"]["strategy"]["rollingUpdate"] == REPLACE
    )
    assert int(announced["metadata"]["resourceVersion"]) < int(rolled["metadata"]["resourceVersion"])
    [event] = events(api, "ReplacingPods")
    assert event.startswith(said)

    kubelet = PlayKubelet(api, "llama")
    eventually(lambda: kubelet.pods(new), "a new pod takes the place")
    eventually(lambda: len(kubelet.pods()) == len(kubelet.pods(new)), "the old pod drains")
    unschedulable(api, new, age_seconds=40)
    eventually(lambda: "finishes its requests, until" in condition(api)["message"], "the wait is explained")
    assert condition(api, "Degraded")["status"] == "False"
    operator.stop()
    operator.start()
    settle(operator)
    assert strategy(api) == REPLACE and len(events(api, "ReplacingPods")) == 1
    kubelet.remove_deleted()
    serve(api, node, 1, new)
    eventually(lambda: condition(api)["reason"] == "RolloutComplete", "it is rolled out")
    assert strategy(api) == REPLACE, "the end of a rollout changes nothing"

    set_gpus(server, node, 2)
    eventually(lambda: api.get("inferenceservices", "llama")["status"]["readyReplicas"] == 1, "it serves")
    time.sleep(2 / LISTS_PER_RESYNC)
    edit(api)
    assert strategy(api) == SURGE and not replace_reason(api)


def _progressing(obj: Any) -> dict[str, Any]:
    conditions = obj.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == "Progressing"), {"reason": ""})


def unschedulable(
    api: ApiServer, revision: str, *, age_seconds: float, message: str = f"1 Insufficient {GPU}"
) -> None:
    """Play the scheduler that finds no node for the new pods."""
    verdict = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": f"0/1 nodes are available: {message}. preemption: not eligible due to lack of victims.",
        "lastTransitionTime": stamp(age_seconds),
    }
    for pod in PlayKubelet(api, "llama").pods(revision):
        if "nodeName" not in pod["spec"]:
            api.merge("pods", pod["metadata"]["name"], {"status": {"conditions": [verdict]}}, "status")


def test_a_larger_pod_that_fits_nowhere_never_takes_an_old_one_away(
    api: ApiServer, add_node: AddNode
) -> None:
    create(api, add_node(1))
    new = edit(api, parallelism={"tensor": 2})
    assert strategy(api) == SURGE
    unschedulable(api, new, age_seconds=40)
    eventually(lambda: condition(api)["reason"] == "RolloutBlocked", "it is blocked")
    assert (
        "NoNodeLargeEnough" in condition(api)["message"] and "revert the change" in condition(api)["message"]
    )
    assert strategy(api) == SURGE and condition(api, "Available")["status"] == "True"


@pytest.mark.parametrize("announced", [False, True])
def test_a_pod_that_finds_no_node_leads_to_replacement(
    api: ApiServer, add_node: AddNode, announced: bool
) -> None:
    """The scheduler knows more than the estimate, here of a node with room. A node that is announced is awaited."""
    node = add_node(8)
    create(api, node, replicas=2)
    new = edit(api)
    assert strategy(api) == SURGE
    kubelet = PlayKubelet(api, "llama")
    eventually(lambda: kubelet.pods(new), "a pod beside the old ones")
    [pod] = kubelet.pods(new)
    if announced:
        report_event(api, pod, "TriggeredScaleUp", "pod triggered scale-up: [{pool 1->2 (max: 4)}]")
    unschedulable(api, new, age_seconds=0)
    blocked = f"InsufficientGPU: pod {pod['metadata']['name']}: 0/1 nodes are available"
    eventually(lambda: blocked in condition(api)["message"], "it is blocked", 20)
    assert (
        condition(api)["reason"] == "RolloutBlocked" and "Way out: free or add" in condition(api)["message"]
    )
    if announced:
        unschedulable(api, new, age_seconds=60)
        time.sleep(2.5)  # a resync: the operator has looked again
        assert strategy(api) == SURGE
        return
    assert strategy(api) == SURGE
    unschedulable(api, new, age_seconds=31)
    eventually(lambda: strategy(api) == REPLACE, "old pods are replaced")
    assert replace_reason(api).endswith(f"(0/1 nodes are available: 1 Insufficient {GPU})")
    eventually(lambda: events(api, "ReplacingPods"), "it is announced")
    assert "one at a time; 1 of 2 keep serving" in events(api, "ReplacingPods")[0]


def report_event(api: ApiServer, pod: Any, reason: str, message: str) -> None:
    """Post an Event about a pod, as an autoscaler and the attach controller do."""
    meta = pod["metadata"]
    about = {"kind": "Pod", "namespace": api.namespace, "name": meta["name"], "uid": meta["uid"]}
    body = {
        "metadata": {"generateName": "about-"},
        "involvedObject": about,
        "reason": reason,
        "type": "Normal",
        "lastTimestamp": stamp(),
        "message": message,
    }
    api.request("POST", f"/api/v1/namespaces/{api.namespace}/events", body)


def test_a_quota_without_room_for_one_more_pod_leads_to_replacement(
    api: ApiServer, add_node: AddNode
) -> None:
    create(api, add_node(8))
    quota = {"metadata": {"name": "gpus"}, "spec": {"hard": {f"requests.{GPU}": "1"}}}
    api.create("resourcequotas", quota)
    eventually(
        lambda: api.get("resourcequotas", "gpus").get("status", {}).get("used"), "the quota is in force"
    )
    edit(api)
    eventually(lambda: strategy(api) == REPLACE, "old pods are replaced")
    assert "exceeded quota" in replace_reason(api)


ENDED = {"exitCode": 137, "reason": "OOMKilled", "startedAt": stamp(), "finishedAt": stamp()}
BLOCKERS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}},
        "ImagePullFailed",
        "correct runtime.image",
    ),
    (
        {
            "state": {
                "waiting": {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
            }
        },
        "ContainerConfigError",
        "create what is missing",
    ),
    (
        {
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "last": {"terminated": {**ENDED, "reason": "Error"}},
        },
        "CrashLoop",
        "see lastFailure.logTail",
    ),
    (
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "last": {"terminated": ENDED}},
        "OutOfMemory",
        "raise resources.limits.memory",
    ),
]


SCHEDULER_VERDICTS = (
    ("1 node(s) had volume node affinity conflict", "the claim's volume is on another node"),
    ("1 node(s) didn't match pod affinity rules", "make room on the node where the claim is in use"),
    ("1 node(s) had untolerated taint {gpu: yes}", "add tolerations or nodes"),
    ('persistentvolumeclaim "models" not found', "create the claim"),
    (f"1 Insufficient {GPU}", "let spec.rollout.strategy: Replace take an old pod away first"),
)


def test_each_blocker_is_named_with_the_way_out(api: ApiServer, add_node: AddNode) -> None:
    node = add_node(8)
    create(api, node, rollout={"strategy": "Surge"})
    new = edit(api)
    kubelet = PlayKubelet(api, "llama")
    eventually(lambda: kubelet.pods(new), "a pod beside the old one")
    [pod] = kubelet.pods(new)
    name = pod["metadata"]["name"]

    def assert_named(reason: str, way_out: str, text: str = "") -> None:
        def named() -> bool:
            found = condition(api)
            wanted = (f"{reason}: pod {name}", way_out, text, "Way out: ")
            return found["reason"] == "RolloutBlocked" and all(each in found["message"] for each in wanted)

        eventually(named, f"{reason}: {way_out}", 15)
        assert condition(api, "Ready")["reason"] == reason
        assert condition(api, "Available")["status"] == "True"

    for message, way_out in SCHEDULER_VERDICTS:
        unschedulable(api, new, age_seconds=60, message=message)
        assert_named("InsufficientGPU" if GPU in message else "Unschedulable", way_out, message)
    for state, reason, way_out in BLOCKERS:
        kubelet.report(pod, **state)
        assert_named(reason, way_out)
    waits = {"name": "runtime", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    waits["state"] = {"waiting": {"reason": "ContainerCreating"}}
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(20)}
    status = {"phase": "Pending", "conditions": [placed], "containerStatuses": [waits]}
    multi_attach = 'Multi-Attach error for volume "pvc-1": Volume is already used by pod(s) llama-1'
    report_event(api, pod, "FailedAttachVolume", multi_attach)
    api.merge("pods", name, {"status": status}, "status")
    assert_named("VolumeNotMounted", "a claim that one node at a time may use must be free", multi_attach)
    assert strategy(api) == SURGE


def built(choice: Choice | None = None, **rollout: Any) -> dict[str, Any]:
    """The Deployment of a service with this policy."""
    of = service(rollout=rollout)
    found = plan.objects(of, Settings())
    return deployment.with_strategy(found[(DEPLOYMENT, "llama")], of.spec.rollout, choice)


REVISION = built()["spec"]["template"]["metadata"]["labels"]["serving.skiff.dev/revision"]
CHOSEN = Choice(REVISION, "no room")


@pytest.mark.parametrize(
    ("policy", "choice", "expected"),
    [
        ({}, None, (1, 0)),
        ({}, CHOSEN, (0, 1)),
        ({}, Choice("another", "no room"), (1, 0)),
        ({"maxSurge": "25%", "maxUnavailable": 3}, None, ("25%", 0)),
        ({"maxSurge": "25%", "maxUnavailable": 3}, CHOSEN, (0, 3)),
        ({"strategy": "Surge", "maxSurge": 2}, CHOSEN, (2, 0)),
        ({"strategy": "Surge", "maxUnavailable": "10%"}, None, (1, "10%")),
        ({"strategy": "Replace"}, None, (0, 1)),
        ({"strategy": "Replace", "maxUnavailable": "50%"}, None, (0, "50%")),
    ],
)
def test_policies_become_rolling_updates(
    policy: dict[str, Any], choice: Choice | None, expected: tuple[int | str, int | str]
) -> None:
    made = built(choice, **policy)
    surge, unavailable = expected
    assert made["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": unavailable}
    recorded = made["metadata"]["annotations"].get(ANNOTATION_REPLACE_REASON)
    assert recorded == ("no room" if choice == CHOSEN and "strategy" not in policy else None)
    assert made["spec"]["template"] == built()["spec"]["template"], "no policy changes the pods"


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "Replace", "maxSurge": 1}, "strategy Replace has no pod beside the old ones"),
    ({"maxSurge": 0}, "must be 1 or more; use strategy Replace"),
    ({"maxUnavailable": "0%"}, "use strategy Surge to keep every"),
    (
        {"strategy": "Surge", "maxUnavailable": "some"},
        "a number of pods such as 1, or a percentage such as 25%",
    ),
    ({"maxSurge": -1}, "a number of pods such as 1, or a percentage such as 25%"),
]


def test_contradictions_are_refused(api: ApiServer) -> None:
    """By the API server, and by an operator whose CRD is older."""
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "llama"},
    }
    for policy, said in CONTRADICTIONS:
        with pytest.raises(InvalidSpec, match=said):
            built(**policy)
        with pytest.raises(Refused, match=said):
            api.create(
                "inferenceservices", {**body, "spec": {"model": {"uri": "demo://"}, "rollout": policy}}
            )
    accepted = {"strategy": "Surge", "maxSurge": "25%", "maxUnavailable": 0, "progressDeadlineSeconds": 60}
    api.create("inferenceservices", {**body, "spec": {"model": {"uri": "demo://"}, "rollout": accepted}})
    deployment = eventually(lambda: api.find("deployments", "llama"), "the Deployment")["spec"]
    assert deployment["progressDeadlineSeconds"] == 60
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 0}


def test_announcements_say_what_keeps_serving() -> None:
    def said(replicas: int, **policy: Any) -> str:
        return rollout_strategy.announcement(service(rollout=policy).spec.rollout, "no room", replicas)

    assert said(1) == "no room: the service is interrupted while its only pod is replaced"
    assert said(3) == "no room: pods are replaced one at a time; 2 of 3 keep serving"
    assert said(8, maxUnavailable="25%") == "no room: pods are replaced 2 at a time; 6 of 8 keep serving"
    assert said(3, maxUnavailable="25%") == "no room: pods are replaced one at a time; 2 of 3 keep serving"
    assert said(2, maxUnavailable=5) == "no room: the service is interrupted while all 2 pods are replaced"
