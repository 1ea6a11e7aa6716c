"""On a control plane without nodes, tests play the kubelet: they write the status that a kubelet would."""

import datetime
from typing import Any

from apiserver import ApiServer, Refused
from operator_process import eventually

REVISION = "serving.skiff.dev/revision"
TIME = "2026-01-01T00:00:00Z"
NOT_FOUND = 404


class PlayKubelet:
    """The kubelet of all pods of one InferenceService."""

    def __init__(self, api: ApiServer, service: str) -> None:
        self._api = api
        self._service = service

    def pods(self, revision: str = "") -> list[Any]:
        """Pods that neither failed nor are being deleted, of one revision or all."""
        found = self._api.list("pods", f"serving.skiff.dev/inferenceservice={self._service}")
        whole = [pod for pod in found if pod["status"].get("phase") != "Failed"]
        alive = [pod for pod in whole if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in alive if not revision or pod["metadata"]["labels"][REVISION] == revision]

    def serve(self, count: int, revision: str = "") -> None:
        """Wait for `count` pods and make all of them ready."""
        pods = eventually(lambda: len(self.pods(revision)) >= count and self.pods(revision), f"{count} pods")
        for pod in pods or []:
            self.report(pod, ready=True, state={"running": {"startedAt": TIME}})

    def report(
        self,
        pod: Any,
        *,
        state: Any,
        ready: bool = False,
        last: Any = None,
        restarts: int = 0,
        init: bool = False,
    ) -> None:
        """Write one container's state (the init container's with `init`) and the pod's readiness."""
        inits, mains = pod["spec"].get("initContainers", []), pod["spec"]["containers"]
        done = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": TIME, "finishedAt": TIME}}
        status = {"state": state, "lastState": last or {}, "ready": ready, "restartCount": restarts}
        waits = {"state": {"waiting": {"reason": "PodInitializing"}}}
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": TIME}],
            "initContainerStatuses": [
                _container(spec, status if init else {"state": done}) for spec in inits
            ],
            "containerStatuses": [_container(spec, waits if init else status) for spec in mains],
        }
        self._api.merge("pods", pod["metadata"]["name"], {"status": status}, "status")

    def crash(self, pod: Any, *, code: int, log: str, reason: str = "Error", init: bool = False) -> None:
        """A container that ended and waits to be started again."""
        ended = {"exitCode": code, "reason": reason, "message": log, "startedAt": TIME, "finishedAt": TIME}
        back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
        self.report(pod, state=back_off, last={"terminated": ended}, restarts=1, init=init)

    def evict(self, pod: Any, *, code: int, log: str) -> None:
        """End a pod as a whole, as under disk pressure; its object stays, and another pod takes its place."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"exitCode": code, "reason": "Error", "message": log, "startedAt": TIME, "finishedAt": now}
        stopped = {"state": {"terminated": ended}}
        status = {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "The node was low on resource: ephemeral-storage.",
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}],
            "containerStatuses": [_container(spec, stopped) for spec in pod["spec"]["containers"]],
        }
        self._api.merge("pods", pod["metadata"]["name"], {"status": status}, "status")

    def remove_deleted(self) -> None:
        """Let pods go that are being deleted, as a kubelet does when their containers have stopped."""
        for pod in self._api.list("pods", f"serving.skiff.dev/inferenceservice={self._service}"):
            if "deletionTimestamp" in pod["metadata"]:
                name = pod["metadata"]["name"]
                try:
                    self._api.request("DELETE", self._api.path("pods", name), {"gracePeriodSeconds": 0})
                except Refused as refused:
                    if refused.status != NOT_FOUND:  # else the garbage collector was quicker
                        raise


def _container(spec: Any, status: dict[str, Any]) -> dict[str, Any]:
    """One container's status, with what the API server demands of it."""
    fixed = {"name": spec["name"], "image": spec["image"], "imageID": "", "ready": False, "restartCount": 0}
    return {**fixed, **status}
