"""Upgrades of the operator restart no pod: templates are pinned until the spec changes, on request, or in waves."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import operator_process
import pytest
from apiserver import ApiServer
from operator_process import OperatorProcess, eventually
from play_kubelet import REVISION, PlayKubelet

ROOT = Path(__file__).parents[2]
Start = Callable[..., OperatorProcess]
HASH = "serving.skiff.dev/spec-hash"
UPGRADED_AT = "serving.skiff.dev/upgraded-at"
NEWER = {"name": "SKIFF_BUILT_BY", "value": "newer"}


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Operators that start after the call are of a release whose builder gives pods one more variable."""
    shutil.copytree(ROOT / "operator", tmp_path / "newer", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "newer/skiff_operator/resources/containers.py"
    line = '"env": variables(home, *runtime.env, *endpoint),'
    assert line in source.read_text()
    source.write_text(
        source.read_text().replace(line, f'"env": variables(home, {NEWER!r}, *runtime.env, *endpoint),')
    )
    packages = [str(tmp_path / "newer"), str(ROOT / "runtime")]
    return lambda: monkeypatch.setattr(operator_process, "PACKAGES", packages)


def create(api: ApiServer, name: str = "llama", **fields: Any) -> PlayKubelet:
    """Create a demo service, and serve it."""
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, **fields}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService"}
    api.create("inferenceservices", {**body, "metadata": {"name": name}, "spec": spec})
    kubelet = PlayKubelet(api, name)
    kubelet.serve(1)
    eventually(lambda: is_ready(api, name), f"{name} is ready")
    return kubelet


def is_ready(api: ApiServer, name: str = "llama") -> bool:
    return condition(api, "Ready", name)[0] == "True"


def condition(api: ApiServer, kind: str, name: str = "llama") -> tuple[str, str]:
    """Status and reason of a condition; empty without it."""
    found = api.get("inferenceservices", name).get("status", {}).get("conditions", [])
    return next(((each["status"], each["reason"]) for each in found if each["type"] == kind), ("", ""))


def template(api: ApiServer, name: str = "llama") -> Any:
    """The Deployment's pod template."""
    return api.get("deployments", name)["spec"]["template"]


def is_newer(api: ApiServer, name: str = "llama") -> bool:
    """Return whether the Deployment has the template of the newer release."""
    return NEWER in template(api, name)["spec"]["containers"][0]["env"]


def restart(old: OperatorProcess, start: Start, *flags: str) -> OperatorProcess:
    """Stop an operator, and start the next one."""
    old.stop()
    process = start("second", "--resync-seconds", "0.5", *flags)
    process.start()
    return process


def upgrade(api: ApiServer, at: str, name: str = "llama") -> None:
    """Ask for the present template, as `skiff rollout upgrade` does."""
    api.merge("inferenceservices", name, {"metadata": {"annotations": {UPGRADED_AT: at}}})


def make_legacy(api: ApiServer, name: str) -> None:
    """Make a service as an operator without revisions leaves it."""
    for each in api.list("controllerrevisions", f"serving.skiff.dev/inferenceservice={name}"):
        api.delete("controllerrevisions", each["metadata"]["name"])
    api.merge("deployments", name, {"metadata": {"annotations": {HASH: None}}})


def test_a_newer_operator_changes_pods_with_their_spec_or_on_request_only(
    api: ApiServer, start: Start, newer: Callable[[], None]
) -> None:
    first = start("first")
    first.start()
    kubelets = {name: create(api, name) for name in ("llama", "legacy")}
    awkward = [{"name": "AWKWARD", "value": '<a&b> \x7f\x85 é \u2028 🙂 \ufeff "quoted" \\n: #'}]
    create(api, "edited", runtime={"device": "cpu", "env": awkward})
    before = {name: template(api, name) for name in kubelets}
    uids = {name: {pod["metadata"]["uid"] for pod in kubelets[name].pods()} for name in kubelets}
    old = template(api, "edited")["metadata"]["labels"][REVISION]
    first.stop()
    make_legacy(api, "legacy")
    newer()
    start("second", "--resync-seconds", "0.5", "--runtime-image-cpu", "other:2").start()
    pinned = ("True", "TemplatePinned")
    for name, kubelet in kubelets.items():
        eventually(lambda: condition(api, "UpgradeAvailable", name) == pinned, "the status reports it")  # noqa: B023
        assert template(api, name) == before[name] and is_ready(api, name)
        assert uids[name] == {pod["metadata"]["uid"] for pod in kubelet.pods()}
    assert HASH in api.get("deployments", "legacy")["metadata"]["annotations"], "it is adopted"

    # Drift is repaired from the ControllerRevision. A paused Deployment replaces no pods meanwhile.
    container = {**before["llama"]["spec"]["containers"][0], "image": "drift:1"}
    api.merge("deployments", "llama", {"spec": {"paused": True}})
    api.merge("deployments", "llama", {"spec": {"template": {"spec": {"containers": [container]}}}})
    eventually(lambda: template(api) == before["llama"], "the pinned template is back")
    api.merge("deployments", "llama", {"spec": {"paused": None}})
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 2}})
    eventually(lambda: api.get("deployments", "llama")["spec"]["replicas"] == 2, "scaling")
    assert template(api) == before["llama"]
    assert uids["llama"] <= {pod["metadata"]["uid"] for pod in kubelets["llama"].pods()}

    for name in kubelets:
        upgrade(api, "2026-01-01T00:00:00Z", name)
        eventually(lambda: is_newer(api, name), "the present template on request")  # noqa: B023
        assert template(api, name)["spec"]["containers"][0]["image"] == "other:2"
        eventually(lambda: condition(api, "UpgradeAvailable", name) == ("", ""), "nothing to upgrade")  # noqa: B023
    revisions = api.list("controllerrevisions", "serving.skiff.dev/inferenceservice=llama")
    assert sorted(each["revision"] for each in revisions) == [1, 2]
    assert len({each["metadata"]["annotations"][HASH] for each in revisions}) == 1, (
        "two templates of one spec"
    )

    api.merge("inferenceservices", "edited", {"spec": {"drain": {"timeoutSeconds": 5}}})
    eventually(lambda: is_newer(api, "edited"), "an edit takes the new template")
    api.merge("inferenceservices", "edited", {"spec": {"drain": {"timeoutSeconds": 60}}})
    reverted = "the recorded revision of the old spec"
    eventually(lambda: template(api, "edited")["metadata"]["labels"][REVISION] == old, reverted)


def test_waves_take_a_few_services_at_a_time(api: ApiServer, start: Start, newer: Callable[[], None]) -> None:
    first = start("first")
    first.start()
    kubelets = {name: create(api, name) for name in ("a", "b", "c")}
    newer()
    restart(first, start, "--upgrade-policy", "Waves")
    upgraded: list[str] = []
    while len(upgraded) < len(kubelets):
        rest = [name for name in kubelets if name not in upgraded]
        [name] = eventually(lambda: [each for each in rest if is_newer(api, each)], "the next wave")  # noqa: B023
        for _ in range(3):  # resyncs
            assert [each for each in rest if is_newer(api, each)] == [name], "one at a time"
        revision = template(api, name)["metadata"]["labels"][REVISION]
        kubelets[name].serve(1, revision)
        eventually(lambda: len(kubelets[name].pods()) == 1, "the old pod is deleted")  # noqa: B023
        kubelets[name].remove_deleted()
        upgraded.append(name)
    eventually(lambda: all(is_ready(api, name) for name in kubelets), "all are ready")
