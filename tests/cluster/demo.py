"""The demo: `demo.py up` goes from nothing to an answer that a pod streams; `demo.py down` takes all of it down.

It does what a user would do, with the commands that a user would type, and shows each before it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from commands import ClusterError, output, say, step, succeeds
from operator_installation import OPERATOR_NAMESPACE, OperatorInstallation
from paths import REPOSITORY, layout
from providers import made

CLUSTER: Final = Path(__file__).with_name("cluster.py")
CHART: Final = REPOSITORY / "charts" / "skiff"
SAMPLES: Final = REPOSITORY / "manifests" / "samples"
SAMPLE: Final = SAMPLES / "llama-service.yaml"
FROM_ZERO: Final = SAMPLES / "llama-from-zero.yaml"
NAMESPACE: Final = "default"
SERVICE: Final = "llama"
MODEL_AT_ZERO: Final = "llama-from-zero"
ROUTER: Final = f"http://skiff-router.{OPERATOR_NAMESPACE}"
QUESTION: Final = "How do I deploy a model with Skiff?"
READY_SECONDS: Final = 300.0
ANSWER_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.5

NEXT: Final = """
The cluster is still up. What to try next:

  export KUBECONFIG={kubeconfig}
  export PATH={bin}:$PATH
  kubectl get infsvc                                   # short for inferenceservices
  kubectl describe infsvc {service}
  kubectl scale infsvc {service} --replicas=2
  kubectl run -it --rm chat --image={image} --restart=Never -- chat --url http://{service}
  kubectl run -it --rm chat --image={image} --restart=Never -- chat --url {router} --model {at_zero}
  kubectl get --raw /api/v1/namespaces/{namespace}/services/{service}:http/proxy/metrics | grep ^skiff

`make demo-down` removes all of it.
"""


class Kubectl:
    """kubectl against the demo's cluster."""

    def __init__(self, program: str, kubeconfig: str) -> None:
        self._base = [program, "--kubeconfig", kubeconfig]

    def command(self, *words: str | Path) -> list[str]:
        """Return the whole command line."""
        return [*self._base, *(str(word) for word in words)]

    def show(self, *words: str | Path) -> None:
        """Print a command as a user would type it, and run it."""
        say(f"$ kubectl {' '.join(str(word) for word in words)}")
        say(output(self.command(*words), timeout_seconds=120))

    def object(self, kind: str, name: str) -> dict[str, Any]:
        """Return one object of the demo's namespace."""
        loaded = json.loads(output(self.command("-n", NAMESPACE, "get", kind, name, "-o", "json")))
        assert isinstance(loaded, dict)
        return loaded


def cluster(*words: str) -> str:
    """Run one command of cluster.py with its progress shown, and return its answer."""
    done = subprocess.run([sys.executable, CLUSTER, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"`cluster.py {' '.join(words)}` failed; the reason is above")
    return done.stdout.strip()


def install_operator(helm: str, kubeconfig: str) -> None:
    """Install or upgrade the operator with Helm, with the image that was just built."""
    repository, _, tag = cluster("image", "operator").rpartition(":")
    runtime = cluster("image", "runtime")
    words = [
        "upgrade",
        "--install",
        "skiff",
        str(CHART.relative_to(REPOSITORY)),
        "--namespace",
        OPERATOR_NAMESPACE,
    ]
    words += ["--wait", "--timeout", "3m"]
    words += ["--set", f"image.repository={repository},image.tag={tag},runtimeImage.cpu={runtime}"]
    words += ["--set", "router.enabled=true"]
    command = [helm, "--kubeconfig", kubeconfig]
    if output([*command, "list", "--pending", "--short", "--namespace", OPERATOR_NAMESPACE]):
        with step("removing what an interrupted installation left"):
            output(
                [*command, "uninstall", "skiff", "--wait", "--namespace", OPERATOR_NAMESPACE],
                timeout_seconds=180,
            )
    say(f"$ helm {' '.join(words)}")
    with step("installing the operator"):
        output([*command, *words], timeout_seconds=240)


def wait_ready(kubectl: Kubectl) -> None:
    """Show the Ready condition as it changes until the service answers; raises ClusterError with the reason."""
    deadline = time.monotonic() + READY_SECONDS
    started, shown = time.monotonic(), ""
    while time.monotonic() < deadline:
        status = kubectl.object("inferenceservice", SERVICE).get("status", {})
        conditions = {each["type"]: each for each in status.get("conditions", [])}
        ready = conditions.get("Ready", {})
        line = f"{ready.get('reason', 'Pending')}: {ready.get('message', 'the operator has not seen it yet')}"
        if line != shown:
            say(f"  {time.monotonic() - started:5.1f} s  {line}")
            shown = line
        if ready.get("status") == "True":
            return
        time.sleep(POLL_SECONDS)
    raise ClusterError(
        f"inferenceservice/{SERVICE} is not Ready after {READY_SECONDS:.0f} s; last seen: {shown}"
    )


def ask(kubectl: Kubectl, image: str, url: str, *, model: str = "") -> None:
    """Ask one question from a pod; the answer streams to the terminal, after the progress of a start if it must wait for one."""
    say(f"\nA pod asks {url}{f' for {model}' if model else ''}: {QUESTION}\n")
    words = [
        "-n",
        NAMESPACE,
        "run",
        f"question-{os.getpid()}{'-router' if model else ''}",
        "--image",
        image,
        "--restart=Never",
        "--rm",
        "-i",
    ]
    words += ["--image-pull-policy=IfNotPresent", "--quiet", "--pod-running-timeout=2m"]
    chat = ["chat", "--url", url, "--temperature", "0", *(["--model", model] if model else [])]
    command = kubectl.command(*words, "--", *chat)
    done = subprocess.run(command, input=QUESTION + "\n", text=True, timeout=ANSWER_SECONDS, check=False)
    if done.returncode != 0:
        raise ClusterError("the question was not answered; run `kubectl describe infsvc`")


def up() -> None:
    """Run the whole demo."""
    started = time.monotonic()
    kubeconfig = cluster("up").splitlines()[-1]
    program = cluster("kubectl-path")
    kubectl = Kubectl(program, kubeconfig)
    helm = cluster("helm-path")
    OperatorInstallation(program, kubeconfig).claim()
    cluster("images")
    install_operator(helm, kubeconfig)
    kubectl.show("apply", "-n", NAMESPACE, "-f", SAMPLE.relative_to(REPOSITORY))
    wait_ready(kubectl)
    kubectl.show("-n", NAMESPACE, "get", "inferenceservices")
    image = cluster("image", "runtime")
    ask(kubectl, image, f"http://{SERVICE}.{NAMESPACE}")
    say("\nNow a service without a pod: the router holds the question, and asks for one.\n")
    kubectl.show("apply", "-n", NAMESPACE, "-f", FROM_ZERO.relative_to(REPOSITORY))
    kubectl.show("-n", NAMESPACE, "get", "inferenceservices")
    ask(kubectl, image, ROUTER, model=MODEL_AT_ZERO)
    kubectl.show("-n", NAMESPACE, "get", "inferenceservices")
    say(f"\nThe demo took {time.monotonic() - started:.0f} s.")
    bin_dir = Path(helm).parent
    names = {"service": SERVICE, "namespace": NAMESPACE, "router": ROUTER, "at_zero": MODEL_AT_ZERO}
    say(NEXT.format(kubeconfig=kubeconfig, bin=bin_dir, image=image, **names))


def down() -> None:
    """Remove what `up` made: the service, the operator, its CRD, and the cluster if it is ours; not what was built."""
    paths = layout()
    provider = made(paths)
    if provider is None and not os.environ.get("KUBECONFIG"):
        say("no demo is up")
        return
    kubeconfig = cluster("kubeconfig")
    program = cluster("kubectl-path")
    kubectl, operator_installation = Kubectl(program, kubeconfig), OperatorInstallation(program, kubeconfig)
    if succeeds(kubectl.command("get", "--raw", "/readyz")) and operator_installation.ours:
        with step("removing the service and the operator"):
            output(
                kubectl.command(
                    "delete", "--ignore-not-found", "-n", NAMESPACE, "-f", SAMPLE, "-f", FROM_ZERO
                ),
                timeout_seconds=180,
            )
            output([cluster("helm-path"), "--kubeconfig", kubeconfig, "uninstall", "skiff", "--ignore-not-found", "--wait",
                    "--namespace", OPERATOR_NAMESPACE], timeout_seconds=180)  # fmt: skip
            operator_installation.remove()
    cluster("down")


def main() -> int:
    """Run the command line; 1 with a message when it cannot be done."""
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__)
    parser.add_argument("command", choices=("up", "down"))
    try:
        (up if parser.parse_args().command == "up" else down)()
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
