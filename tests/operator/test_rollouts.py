"""Rollouts by `kubectl skiff rollout`, and the rollback of a revision that fails, against a real API server."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from apiserver import ApiServer
from metrics_pages import MetricsPage, request_counts, served
from operator_checks import condition, place, revision
from operator_process import OperatorProcess, eventually
from play_kubelet import REVISION, PlayKubelet

Start = Callable[..., OperatorProcess]
Run = Callable[..., tuple[int, str]]


def create(api: ApiServer, **fields: Any) -> PlayKubelet:
    """Create a demo service, and serve it."""
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, **fields}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService"}
    api.create("inferenceservices", {**body, "metadata": {"name": "llama"}, "spec": spec})
    kubelet = PlayKubelet(api, "llama")
    kubelet.serve(1)
    eventually(lambda: condition(api, "Ready") == ("True", "Serving"), "ready")
    return kubelet


def edit(api: ApiServer, **fields: Any) -> None:
    api.merge("inferenceservices", "llama", {"spec": fields})


def roll(api: ApiServer, kubelet: PlayKubelet, old: str) -> str:
    """Wait for another template, and let its pod replace the old one."""
    new = eventually(lambda: (found := revision(api)) != old and found, "another template")
    assert isinstance(new, str)

    def replaced() -> bool:
        kubelet.serve(1, new)
        kubelet.remove_deleted()
        return not kubelet.pods(old)

    eventually(replaced, "the old pods are deleted")
    return new


def test_rollouts_from_the_command_line(api: ApiServer, start: Start, skiff: Run) -> None:
    start("operator", "--resync-seconds", "0.5").start()
    kubelet = create(api, rollout={"revisionHistoryLimit": 2})
    first = revision(api)
    assert skiff("status") == (0, 'inferenceservice "llama" successfully rolled out\n')
    edit(api, drain={"timeoutSeconds": 5})
    eventually(lambda: condition(api, "Progressing") == ("True", "RolloutInProgress"), "the edit")
    code, said = skiff("status", "--timeout", "1ms")
    assert code == 1 and "Waiting for the rollout to finish" in said and "timed out" in said
    second = roll(api, kubelet, first)
    assert skiff("status", "--revision", "2")[0] == 0
    code, said = skiff("status", "--revision", "1")
    assert code == 1 and "revision 1 is not in force: revision 2 is" in said

    code, said = skiff("history")
    rows = [line.split()[0:3:2] for line in said.splitlines()]
    assert (code, rows) == (0, [["REVISION", "PODS"], ["1", first], ["2", second]])
    assert '"timeoutSeconds": 5' in skiff("history", "--revision", "2")[1]
    assert "there is no revision 9; there are: 1, 2" in skiff("history", "--revision", "9")[1]

    edit(api, replicas=2, inferencePool={"endpointPicker": {"name": "picker"}})
    assert skiff("undo") == (0, "inferenceservice/llama rolled back to revision 1\n")
    assert roll(api, kubelet, second) == first
    spec = api.get("inferenceservices", "llama")["spec"]
    assert (spec["drain"]["timeoutSeconds"], spec["replicas"]) == (60, 2)
    assert spec["inferencePool"]["endpointPicker"]["name"] == "picker", "no pod depends on it, so it is kept"
    edit(api, replicas=1)
    assert skiff("undo", "--to-revision", "3")[1].endswith(
        "skipped rollback (its spec is that of revision 3)\n"
    )

    assert skiff("restart") == (0, "inferenceservice/llama restarted\n")
    restarted = roll(api, kubelet, first)
    template = api.get("deployments", "llama")["spec"]["template"]
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]
    assert skiff("status")[0] == 0

    assert skiff("pause") == (0, "inferenceservice/llama paused\n")
    assert "already paused" in skiff("pause")[1]
    eventually(lambda: api.get("deployments", "llama")["spec"].get("paused"), "the Deployment is paused")
    edit(api, drain={"timeoutSeconds": 6})
    eventually(lambda: condition(api, "Progressing") == ("False", "RolloutPaused"), "the status says so")
    assert kubelet.pods(restarted) and len(kubelet.pods()) == 1
    assert skiff("resume") == (0, "inferenceservice/llama resumed\n")
    edited = roll(api, kubelet, restarted)
    assert skiff("status")[0] == 0

    def kept() -> list[str]:
        return sorted(each["metadata"]["labels"][REVISION] for each in api.list("controllerrevisions"))

    eventually(lambda: kept() == sorted([first, restarted, edited]), "the oldest is beyond the limit")
    assert skiff("upgrade")[0] == skiff("status", "--timeout", "1m")[0] == 0
    assert revision(api) == edited, "it is the template of this operator already"


def test_a_revision_that_fails_is_rolled_back(api: ApiServer, start: Start, skiff: Run) -> None:
    operator = start("operator", "--resync-seconds", "0.3", "--rollback-after-seconds", "0.5")
    operator.start()
    kubelet = create(api, rollout={"autoRollback": True})
    good = revision(api)
    edit(api, runtime={"args": ["--max-running-requests=0"]})
    bad = eventually(lambda: (found := revision(api)) != good and found, "the new template")
    [pod] = eventually(lambda: kubelet.pods(str(bad)), "its pod")
    kubelet.crash(pod, code=2, log="must be greater than 0")
    eventually(lambda: revision(api) == good, "the last good template is back")
    eventually(lambda: condition(api, "Ready") == ("False", "RolledBack"), "the status reports it")
    status = api.get("inferenceservices", "llama")["status"]
    assert (status["currentRevision"], status["updateRevision"]) == (good, bad)
    assert condition(api, "Degraded") == ("True", "RolledBack") and condition(api, "Available")[0] == "True"
    message = next(each["message"] for each in status["conditions"] if each["type"] == "Ready")
    assert "CrashLoop" in message and "skiff rollout restart" in message
    assert api.get("inferenceservices", "llama")["spec"]["runtime"]["args"], "the spec is the user's"
    assert "RolledBack" in skiff("status")[1] and "failed: CrashLoop" in skiff("history")[1]
    eventually(lambda: not kubelet.pods(str(bad)), "its pods are deleted")
    kubelet.remove_deleted()

    assert skiff("restart")[0] == 0
    again = roll(api, kubelet, good)
    assert again not in (good, bad), "a new attempt, which succeeds"
    eventually(lambda: condition(api, "Ready") == ("True", "Serving"), "it serves")

    # A changed spec starts anew, even if it is one that failed before.
    edit(api, runtime={"image": "absent:1"})
    absent = eventually(lambda: (found := revision(api)) != again and found, "the next template")
    [pod] = eventually(lambda: kubelet.pods(str(absent)), "its pod")
    kubelet.report(pod, state={"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
    eventually(lambda: condition(api, "Degraded") == ("True", "RolledBack"), "rolled back")
    edit(api, runtime={"image": None})
    eventually(lambda: condition(api, "Ready") == ("True", "Serving"), "the old spec serves")
    edit(api, runtime={"image": "absent:1"})
    eventually(lambda: revision(api) == absent, "the failed spec is tried again")
    assert condition(api, "Degraded")[1] != "RolledBack"


def analysis(api: ApiServer) -> Any:
    """The analysis in the status; empty until there is one."""
    return api.get("inferenceservices", "llama").get("status", {}).get("analysis", {})


def requests(api: ApiServer) -> tuple[int, int]:
    """The requests of the new revision that the status shows, and those that failed."""
    found = analysis(api)["candidate"]
    return found.get("requests", 0), found.get("failedRequests", 0)


def test_a_revision_that_serves_worse_is_rolled_back_after_its_rollout(
    api: ApiServer, start: Start, skiff: Run
) -> None:
    """The old pods are gone by then, and so is the operator that read their metrics."""
    flags = ("--resync-seconds", "0.3", "--rollout-metrics-seconds", "0.2")
    first = start("first", *flags)
    first.start()
    old, new = MetricsPage(request_counts(400)), MetricsPage(request_counts(0))
    with ExitStack() as stack:
        stack.enter_context(served("127.1.8.2", old))
        stack.enter_context(served("127.1.8.3", new))
        kubelet = create(api, rollout={"autoRollback": True, "revisionHistoryLimit": 0})
        good = revision(api)
        place(api, kubelet.pods()[0]["metadata"]["name"], "127.1.8.2")
        edit(api, replicas=2)
        eventually(lambda: len(kubelet.pods()) == 2, "scaling is no rollout")
        edit(api, replicas=1)
        eventually(lambda: condition(api, "Progressing") == ("False", "RolloutComplete"), "scaled in")
        kubelet.remove_deleted()
        scaled_in = old.reads
        edit(api, runtime={"args": ["--max-running-requests=8"]})
        bad = eventually(lambda: (found := revision(api)) != good and found, "the new template")
        assert isinstance(bad, str)
        assert old.reads > scaled_in, "the old pod was read before the write that begins the rollout"
        [pod] = eventually(lambda: kubelet.pods(bad), "its pod") or []
        place(api, pod["metadata"]["name"], "127.1.8.3")
        assert roll(api, kubelet, good) == bad
        eventually(lambda: analysis(api).get("phase") == "Observing", "the rollout is complete")
        eventually(lambda: condition(api, "Ready") == ("True", "Serving"), "and looks well")
        assert analysis(api)["baseline"] == {"revision": good, "requests": 400}
        first.stop()
        start("second", *flags).start()

        new.text = request_counts(110, 30)
        eventually(lambda: requests(api) == (140, 30), "the figures in the status")
        assert revision(api) == bad, "a single event proves nothing"
        new.text = request_counts(120, 40)
        eventually(lambda: revision(api) == good, "the old template is back")
    figures = f"ErrorRate: error rate 40 of 160 against 0 of 400 of revision {good}"
    eventually(lambda: condition(api, "Degraded") == ("True", "RolledBack"), "the status reports it")
    assert figures in skiff("status")[1] and "failed: ErrorRate" in skiff("history")[1]
    notes = eventually(
        lambda: [each["note"] for each in api.list("events") if each["reason"] == "RolledBack"], "the Event"
    )
    assert notes and figures in notes[0]
    roll_back = api.get("inferenceservices", "llama")["status"]
    assert roll_back["analysis"]["phase"] == "Failed"

    def restored() -> bool:
        kubelet.serve(1, good)
        kubelet.remove_deleted()
        return not kubelet.pods(bad)

    eventually(restored, "the pods of the worse revision are replaced")
    eventually(
        lambda: api.get("inferenceservices", "llama")["status"]["currentRevision"] == good, "it serves again"
    )
    assert revision(api) == good and condition(api, "Available")[0] == "True"
