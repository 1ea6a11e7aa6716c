"""Writes against a real API server in the worst moment: between the read of a child and the write to it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from apiserver import ApiServer
from controlplane import ControlPlane
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from strangers import inference_service

from skiff_operator import plan, spec
from skiff_operator.apply import Applier, Failure, Goal
from skiff_operator.cache import Cache, Entry
from skiff_operator.client import Client
from skiff_operator.errors import ApiAlreadyExists, ApiConflict
from skiff_operator.kinds import CLAIM, INFERENCE_SERVICE, SERVICE, SERVICE_ACCOUNT, Kind
from skiff_operator.observe import Observer
from skiff_operator.ownership import NameTaken
from skiff_operator.settings import Settings
from skiff_operator.status import Status

KEY_NAME = "llama"
STATUS = Status(
    observed_generation=1,
    replicas=0,
    ready_replicas=0,
    updated_replicas=0,
    selector="",
    url="",
    update_revision="",
    conditions=(),
)
Interference = Callable[[], None]


class LateClient(Client):
    """A client whose reads are out of date at once, for as long as there is interference left."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration, connections=2)
        self.interference: list[Interference] = []
        self.tried: list[tuple[Kind, str]] = []

    async def create(self, kind: Kind, namespace: str | None, body: dict[str, Any]) -> dict[str, Any]:
        """Remember what was to be created."""
        self.tried.append((kind, body["metadata"]["name"]))
        return await super().create(kind, namespace, body)

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        """Read, then let the next one interfere."""
        live = await super().get(kind, namespace, name)
        if self.interference:
            await asyncio.to_thread(self.interference.pop(0))
        return live


class Scene:
    """One InferenceService that no operator watches, and an applier for it."""

    def __init__(self, api: ApiServer, client: LateClient) -> None:
        self.api, self.client = api, client
        self.key = (api.namespace, KEY_NAME)
        made = api.create("inferenceservices", inference_service(KEY_NAME))
        self.observer = Observer(Cache(), Settings())
        self.observer.observe(INFERENCE_SERVICE, made, "ADDED")
        self.applier = Applier(client, self.observer, reporter="tests")
        objects = plan.objects(spec.parse(made), Settings())
        self.goal = Goal(made["metadata"]["uid"], plan.desired_state(objects), objects)

    @property
    def entry(self) -> Entry:
        """All that is known of the InferenceService."""
        return self.observer.cache.get_or_create(self.key)

    async def run(self, *steps: plan.Step) -> list[Failure]:
        """Take these steps, or all that are due."""
        due = list(steps) or plan.steps(self.entry, self.goal.desired)
        return await self.applier.run(self.key, self.entry, due, self.goal)

    def step(self, action: Any, kind: Kind, name: str = KEY_NAME) -> plan.Step:
        """A write to a child that is known."""
        return plan.Step(action, kind, name, self.entry.children[(kind, name)].uid)

    def usurp(self, kind: Kind, name: str = KEY_NAME) -> None:
        """Delete a child, and make the same object again as somebody else's."""
        obj = self.goal.objects[(kind, name)]
        self.api.delete(kind.plural, name)
        meta = {key: value for key, value in obj["metadata"].items() if key != "ownerReferences"}
        self.api.create(kind.plural, {**obj, "metadata": meta})

    def release(self, kind: Kind) -> None:
        """Take our reference away from a child."""
        self.api.merge(kind.plural, KEY_NAME, {"metadata": {"ownerReferences": None}})

    def touch(self, kind: Kind) -> None:
        """Change a child in a way that is no concern of ours."""
        self.api.merge(kind.plural, KEY_NAME, {"metadata": {"annotations": {"touched": "yes"}}})


def play(api: ApiServer, plane: ControlPlane, acts: Callable[[Scene], Awaitable[None]]) -> None:
    """Run a test in a scene whose children have all been made."""

    async def run() -> None:
        configuration = Configuration()
        await config.load_kube_config(str(plane.kubeconfig), client_configuration=configuration)
        client = LateClient(configuration)
        try:
            scene = Scene(api, client)
            assert await scene.run() == []
            await acts(scene)
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("action", ["first update", "update", "delete"])
@pytest.mark.parametrize("taking", [Scene.usurp, Scene.release])
def test_what_is_taken_behind_a_read_is_not_written_to(
    api: ApiServer, plane: ControlPlane, action: str, taking: Callable[[Scene, Kind], None]
) -> None:
    async def acts(scene: Scene) -> None:
        after: list[Any] = []
        if action == "update":  # behind the first one it is an apply alone
            assert await scene.run(scene.step("update", SERVICE)) == []

        def take() -> None:
            taking(scene, SERVICE)
            after.append(api.get("services", KEY_NAME))

        scene.client.interference = [take]
        failures = await scene.run(scene.step(action.rpartition(" ")[2], SERVICE))
        kinds = [type(failure.error) for failure in failures]
        assert kinds == ([] if action == "delete" else [NameTaken])
        assert api.get("services", KEY_NAME) == after[0]

    play(api, plane, acts)


def test_what_is_deleted_behind_a_read_is_not_made_by_an_update(api: ApiServer, plane: ControlPlane) -> None:
    async def acts(scene: Scene) -> None:
        await scene.run(scene.step("update", SERVICE))  # from here on it is an apply alone
        scene.client.interference = [lambda: api.delete("services", KEY_NAME)]
        [failure] = await scene.run(scene.step("update", SERVICE))
        assert isinstance(failure.error, ApiConflict)
        assert api.find("services", KEY_NAME) is None
        assert (SERVICE, KEY_NAME) not in scene.entry.children
        assert await scene.run() == []
        assert api.find("services", KEY_NAME)

    play(api, plane, acts)


def test_a_change_of_others_is_read_again_and_kept(api: ApiServer, plane: ControlPlane) -> None:
    async def acts(scene: Scene) -> None:
        scene.client.interference = [lambda: scene.touch(SERVICE), lambda: scene.touch(SERVICE)]
        assert await scene.run(scene.step("update", SERVICE)) == []
        assert api.get("services", KEY_NAME)["metadata"]["annotations"]["touched"] == "yes"
        scene.client.interference = [lambda: scene.touch(SERVICE)]
        assert await scene.run(scene.step("delete", SERVICE)) == []
        assert api.find("services", KEY_NAME) is None

    play(api, plane, acts)


def test_a_creation_whose_answer_was_lost_is_taken_up(api: ApiServer, plane: ControlPlane) -> None:
    async def acts(scene: Scene) -> None:
        before = api.get("serviceaccounts", KEY_NAME)["metadata"]["uid"]
        scene.entry.children.clear()
        assert await scene.run() == []
        assert api.get("serviceaccounts", KEY_NAME)["metadata"]["uid"] == before

    play(api, plane, acts)


def test_of_a_predecessor_nothing_is_taken_over(api: ApiServer, plane: ControlPlane) -> None:
    """Its children are the garbage collector's, until they are gone."""

    async def acts(scene: Scene) -> None:
        successor = scene.goal._replace(uid="00000000-0000-0000-0000-000000000000")
        scene.goal, scene.entry.uid = successor, successor.uid
        failures = await scene.run()
        assert {type(failure.error) for failure in failures} == {NameTaken}
        assert "earlier InferenceService llama" in str(failures[0].error)

    play(api, plane, acts)


def test_a_status_is_not_written_to_a_successor(api: ApiServer, plane: ControlPlane) -> None:
    """The API server itself ignores the uid in a status."""

    async def acts(scene: Scene) -> None:
        api.delete("inferenceservices", KEY_NAME)
        api.create("inferenceservices", inference_service(KEY_NAME))
        await scene.applier.write_status(scene.key, scene.entry, STATUS)
        assert "status" not in api.get("inferenceservices", KEY_NAME)
        assert scene.entry.status is None

    play(api, plane, acts)


def test_the_namespaces_own_account_is_not_created_before_its_time(
    api: ApiServer, plane: ControlPlane
) -> None:
    """Until the controller manager makes it, or makes it again, its name is free, and still not ours."""

    async def acts(scene: Scene) -> None:
        made = api.create("inferenceservices", inference_service("default"))
        scene.observer.observe(INFERENCE_SERVICE, made, "ADDED")
        key = (api.namespace, "default")
        entry = scene.observer.cache.get_or_create(key)
        objects = plan.objects(spec.parse(made), Settings())
        goal = Goal(made["metadata"]["uid"], plan.desired_state(objects), objects)
        failures = await scene.applier.run(key, entry, plan.steps(entry, goal.desired), goal)
        assert [(failure.step.kind, type(failure.error)) for failure in failures] == [
            (SERVICE_ACCOUNT, NameTaken)
        ]
        assert (SERVICE, "default") in scene.client.tried
        assert (SERVICE_ACCOUNT, "default") not in scene.client.tried

    play(api, plane, acts)


def test_conflicts_are_distinguished_by_their_reason(api: ApiServer, plane: ControlPlane) -> None:
    async def acts(scene: Scene) -> None:
        account = scene.goal.objects[(SERVICE_ACCOUNT, KEY_NAME)]
        with pytest.raises(ApiAlreadyExists):
            await scene.client.create(SERVICE_ACCOUNT, api.namespace, account)
        namespaced_name = api.namespace, "llama-cache"
        with pytest.raises(ApiConflict):
            await scene.client.edit(CLAIM, *namespaced_name, {}, version="1")
        with pytest.raises(ApiConflict):
            await scene.client.delete(CLAIM, *namespaced_name, uid=scene.goal.uid, version="1")

    play(api, plane, acts)
