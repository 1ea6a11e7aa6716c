"""The kubelet for Helm's hooks: runs their pods' commands as local processes, as the ServiceAccount that each pod names."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from apiserver import ApiServer, Refused
from operator_process import PACKAGES, token_kubeconfig

POLL_SECONDS: Final = 0.1
TIMEOUT_SECONDS: Final = 120


class HookRunner:
    """Runs each pending pod that carries `label` until the block ends.

    `substitutes` maps texts of a command line to what they are here, such as a Service's URL to a local port.
    """

    def __init__(self, server: ApiServer, kubeconfig: Path, label: str) -> None:
        self._server, self._kubeconfig, self._label = server, kubeconfig, label
        self.substitutes: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.outputs: list[str] = []
        """Return the output of each pod, in the order of their ends."""

    def __enter__(self) -> "HookRunner":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(TIMEOUT_SECONDS)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            pods = self._server.request("GET", f"/api/v1/pods?labelSelector={self._label}")["items"]
            for pod in pods:
                if pod["status"].get("phase") == "Pending":
                    self._run(pod)

    def _run(self, pod: Any) -> None:
        """Run the pod's only container to its end and report that end as a kubelet does."""
        api = self._server.in_namespace(pod["metadata"]["namespace"])
        (container,) = pod["spec"]["containers"]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            words = self._words(api, pod, container, folder)
            kubeconfig = folder / "kubeconfig"
            account = pod["spec"]["serviceAccountName"]
            kubeconfig.write_text(token_kubeconfig(api, account, self._kubeconfig))
            given = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
            environ = {**os.environ, **given, "KUBECONFIG": str(kubeconfig)}
            environ["PYTHONPATH"] = os.pathsep.join(PACKAGES)
            done = subprocess.run(
                words, env=environ, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
            )
        self.outputs.append(done.stdout + done.stderr)
        ended = {"exitCode": done.returncode, "reason": "Error" if done.returncode else "Completed"}
        status = {
            "phase": "Failed" if done.returncode else "Succeeded",
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"terminated": ended},
                }
            ],
        }
        try:
            api.merge("pods", pod["metadata"]["name"], {"status": status}, "status")
        except Refused as refused:
            if refused.status != 404:  # helm was interrupted and has removed it
                raise

    def _words(self, api: ApiServer, pod: Any, container: Any, folder: Path) -> list[str]:
        """Return the command line, with this machine's Python and the ConfigMaps' files where they lie here."""
        substitutes = dict(self.substitutes)
        maps = {
            each["name"]: each["configMap"]["name"] for each in pod["spec"]["volumes"] if "configMap" in each
        }
        for mount in container.get("volumeMounts", []):
            if mount["name"] in maps:
                found = api.request(
                    "GET", f"/api/v1/namespaces/{api.namespace}/configmaps/{maps[mount['name']]}"
                )
                for file, text in found["data"].items():
                    (folder / file).write_text(text)
                substitutes[mount["mountPath"]] = str(folder)
        words: list[str] = [*container["command"], *container.get("args", [])]
        assert words[0] == "python3", json.dumps(words)
        for text, local in substitutes.items():
            words = [word.replace(text, local) for word in words]
        return [sys.executable, *words[1:]]
