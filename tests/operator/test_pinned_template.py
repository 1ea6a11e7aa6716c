"""`skiff plan`: pods restart exactly when the operator would give them another template than the recorded one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from services import raw

from skiff_operator import plan, revisions, spec
from skiff_operator.cli import capacity, installation, pinned_template
from skiff_operator.cli.pinned_template import Live
from skiff_operator.errors import ApiRefused
from skiff_operator.kinds import Kind
from skiff_operator.resources import controller_revision, deployment
from skiff_operator.revisions import Observed
from skiff_operator.settings import VERSION, Settings
from skiff_operator.status import Facts, report

ROOT = Path(__file__).parents[2]
OPERATOR = Settings(runtime_image_cuda="registry.local/runtime-cuda:7", gpu_resource_name="amd.com/gpu")
"""Settings that the command does not know, unless pods show them."""
OLDER = Settings(runtime_image_cuda="registry.local/runtime-cuda:6", gpu_resource_name="amd.com/gpu")
SPEC: dict[str, Any] = {"runtime": {"maxModelLen": 4096}, "parallelism": {"tensor": 2}}


def with_generation(generation: int, fields: dict[str, Any], **annotations: str) -> dict[str, Any]:
    obj = raw(**fields)
    obj["metadata"] |= {"generation": generation, "annotations": annotations}
    return obj


class OperatedService:
    """An InferenceService under the operator's own functions: its spec's history, with the Deployment it leads to."""

    def __init__(self) -> None:
        self.service = with_generation(1, SPEC)
        self.records: list[dict[str, Any]] = []
        self.deployment: dict[str, Any] = {}
        self.status: dict[str, Any] = {}

    def observed(self, generation: int) -> Observed:
        if not self.deployment:
            return Observed()
        meta = self.deployment["spec"]["template"]["metadata"]["labels"]
        status = self.status
        return Observed(
            revisions=tuple(revisions.read(each) for each in self.records),
            live_revision=meta["serving.skiff.dev/revision"],
            live_spec_hash=self.deployment["metadata"]["annotations"]["serving.skiff.dev/spec-hash"],
            settled_revision=status["updateRevision"] if status["observedGeneration"] == generation else "",
            current_revision=status["currentRevision"],
        )

    def target(self, obj: dict[str, Any], settings: Settings) -> revisions.Target:
        service = spec.parse(obj)
        made = plan.built_deployment(plan.objects(service, settings))
        return revisions.choose(service, deployment.revision(made), self.observed(service.generation))

    def reconcile(self, settings: Settings) -> None:
        """Do what a reconcile does: record the template, write it, and report."""
        service = spec.parse(self.service)
        made = plan.built_deployment(plan.objects(service, settings))
        target = self.target(self.service, settings)
        template = made["spec"]["template"]
        if target.source == "stored":
            [data] = [each["data"] for each in self.records if each["metadata"]["name"] == target.stored]
            template = revisions.restarted(data["template"], target) if target.restart else data["template"]
        known = next((each for each in self.records if each["metadata"]["name"] == target.name), None)
        if known is None:
            number = len(self.records) + 1
            self.records.append(controller_revision.build(service, target, template, number=number))
        elif target.renew:
            known["revision"] = 1 + max(each["revision"] for each in self.records)
            known["metadata"]["annotations"] |= revisions.requests(service)
        self.deployment = deployment.with_template(made, template, target.spec_hash)
        facts = Facts(
            name=service.name,
            generation=service.generation,
            replicas=1,
            revision=target.revision,
            url="",
            synced=True,
            rollout=None,
            pods=(),
            problem=None,
            outdated=target.outdated,
        )
        written = msgspec.structs.replace(report(facts, None, "now"), current_revision=target.deployed)
        self.status = msgspec.to_builtins(written)

    def edit(self, fields: dict[str, Any], **annotations: str) -> None:
        generation = self.service["metadata"]["generation"] + 1
        self.service = with_generation(generation, {**SPEC, **fields}, **annotations)

    def planned(self, fields: dict[str, Any]) -> tuple[bool, bool]:
        """Return whether the command says that pods restart, and whether the operator would restart them."""
        meta = self.service["metadata"]
        edited = with_generation(meta["generation"] + 1, {**SPEC, **fields}, **meta["annotations"])
        if edited["spec"] == self.service["spec"]:
            edited["metadata"]["generation"] -= 1
        live = Live({**self.service, "status": self.status}, self.deployment, tuple(self.records))
        template = self.deployment["spec"]["template"]["spec"]
        shown = installation.shown_settings(spec.parse(self.service), template)
        candidates = tuple(installation.Installation().candidates(shown))
        said = pinned_template.choose(live, spec.parse(edited), candidates)
        truth = self.target(edited, OPERATOR)
        running = self.deployment["spec"]["template"]["metadata"]["labels"]["serving.skiff.dev/revision"]
        return said.restarts, truth.deployed != running


def fresh() -> OperatedService:
    made = OperatedService()
    made.reconcile(OPERATOR)
    return made


def outdated() -> OperatedService:
    """An older operator built the template, which stays in force."""
    made = OperatedService()
    made.reconcile(OLDER)
    made.reconcile(OPERATOR)
    assert "UpgradeAvailable" in str(made.status)
    return made


def edited_before() -> OperatedService:
    made = outdated()
    made.edit({"drain": {"timeoutSeconds": 5}})
    made.reconcile(OPERATOR)
    return made


def restarted() -> OperatedService:
    made = fresh()
    made.edit({}, **{spec.ANNOTATION_RESTARTED_AT: "2026-01-01T00:00:00Z"})
    made.reconcile(OPERATOR)
    return made


def rolled_back() -> OperatedService:
    made = fresh()
    made.edit({"drain": {"timeoutSeconds": 5}})
    made.reconcile(OPERATOR)
    made.records[-1]["metadata"]["annotations"][revisions.ANNOTATION_FAILED] = "CrashLoop"
    made.reconcile(OPERATOR)
    return made


EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "replicas": {"replicas": 3},
    "autoscaling": {"autoscaling": {"maxReplicas": 3}},
    "rollout": {"rollout": {"maxSurge": 2}},
    "a default": {"drain": {"timeoutSeconds": 60}},
    "a policy, which no pod shows": {"networkPolicy": {"from": []}},
    "the context": {"runtime": {"maxModelLen": 8192}},
    "drain": {"drain": {"timeoutSeconds": 5}},
    "drain and a policy": {"drain": {"timeoutSeconds": 5}, "networkPolicy": {}},
    "the default image": {"runtime": {"maxModelLen": 4096, "image": OPERATOR.runtime_image_cuda}},
    "the default GPU": {"runtime": {"maxModelLen": 4096, "gpuResourceName": "amd.com/gpu"}},
    "another GPU": {"runtime": {"maxModelLen": 4096, "gpuResourceName": "nvidia.com/mig-3g.40gb"}},
}


@pytest.mark.parametrize("history", [fresh, outdated, edited_before, restarted, rolled_back])
@pytest.mark.parametrize("fields", EDITS.values(), ids=EDITS.keys())
def test_pods_restart_when_the_operator_would_replace_them(history: Any, fields: dict[str, Any]) -> None:
    said, truth = history().planned(fields)
    assert said is truth


def test_what_a_comparison_of_two_specs_cannot_know() -> None:
    """Pods restart with a field that no pod shows, and do not with a spec whose recorded template runs already."""
    policy: dict[str, Any] = {"networkPolicy": {"from": []}}
    assert [each().planned(policy)[0] for each in (fresh, outdated, restarted)] == [False, True, True]
    drain = {"drain": {"timeoutSeconds": 5}}
    assert [rolled_back().planned(fields)[0] for fields in (drain, {**drain, **policy}, {})] == [
        False,
        True,
        False,
    ]


def test_the_template_of_a_revision_that_comes_back_is_the_recorded_one() -> None:
    made = edited_before()
    live = Live({**made.service, "status": made.status}, made.deployment, tuple(made.records))
    back = pinned_template.choose(live, spec.parse(with_generation(9, SPEC)), (Settings(),))
    [runtime] = back.deployment["spec"]["template"]["spec"]["containers"]
    assert runtime["image"] == OLDER.runtime_image_cuda and "amd.com/gpu" in runtime["resources"]["limits"]


def test_the_installed_operator_is_read_from_its_deployment() -> None:
    deployment_of = yaml.safe_load((ROOT / "manifests/operator/deployment.yaml").read_text())
    [container] = deployment_of["spec"]["template"]["spec"]["containers"]
    found = installation.read(deployment_of)
    assert found.version == VERSION and found.difference() == ""
    assert found.settings == Settings(identity=found.settings.identity if found.settings else "")
    container["args"] = ["--gpu-resource-name", "amd.com/gpu", "--allow-host-path", "--no-leader-elect", "--namespaces=a,b"]  # fmt: skip
    deployment_of["metadata"]["labels"]["app.kubernetes.io/version"] = "0.2.0"
    found = installation.read(deployment_of)
    assert found.settings is not None
    assert (found.settings.gpu_resource_name, found.settings.namespaces) == ("amd.com/gpu", ("a", "b"))
    assert found.settings.allow_host_path and not found.settings.leader_elect
    assert found.difference() == f"the operator is 0.2.0, and this command {VERSION}"
    container["args"] = ["--workers=many"]
    assert installation.read(deployment_of) == installation.Installation("0.2.0", None, is_exact=True)


def test_a_version_that_only_the_revisions_show_is_called_that() -> None:
    older = installation.Installation("0.0.9")
    assert (
        older.difference()
        == f"the newest pod template was built by operator 0.0.9, and this command {VERSION}"
    )
    assert installation.Installation(VERSION).difference() == installation.Installation().difference() == ""


class RefusingClient:
    """A client of a user who may read nothing outside of a namespace."""

    async def list(self, kind: Kind, *_: object, **__: object) -> AsyncIterator[dict[str, Any]]:
        raise ApiRefused(f"{kind.plural} is forbidden", status=403)
        yield {}


def test_without_rights_to_the_whole_cluster_what_is_not_known_is_not_guessed() -> None:
    client: Any = RefusingClient()
    records = (revisions.read(fresh().records[0]),)
    found = asyncio.run(installation.find(client, "default", records))
    assert found == installation.Installation(VERSION)
    assert [each.allow_host_path for each in found.candidates(Settings())] == [False, True]
    assert asyncio.run(capacity.gather(client, {})) is None


def test_a_network_adapter_is_not_taken_for_a_gpu() -> None:
    for limits in ({"rdma/hca": "2"}, {"amd.com/gpu": "2"}):
        service = spec.parse(raw(parallelism={"tensor": 2}, resources={"limits": limits}))
        made, _ = pinned_template.build(service, [OPERATOR])
        pod_spec = made["spec"]["template"]["spec"]
        assert installation.shown_gpu_resource(service, [pod_spec]) == "amd.com/gpu"
