"""LoRA adapters by a running operator: loaded into running pods and into later ones, unloaded, refused, and reported."""

from contextlib import ExitStack

import pytest
from apiserver import ApiServer
from lora_objects import BAD, LAW, SQL, TOO_LARGE, adapter, condition, ready, reported, service, template
from lora_pods import LoRAPods
from operator_process import OperatorProcess, eventually


@pytest.mark.usefixtures("operator")
def test_adapters_come_and_go_without_a_restart(api: ApiServer) -> None:
    api.create("inferenceservices", service(adapters=[{"name": "sql", "uri": SQL}]))
    with ExitStack() as stack:
        pods = LoRAPods(api, 1, stack)
        first, second = pods.serve(2)
        eventually(lambda: reported(api).get("sql", {}).get("loadedPods") == 2, "both pods have it")
        assert condition(api) == ("True", "Loaded")
        assert first.adapters == second.adapters == {"sql": SQL}
        assert reported(api)["sql"] == {
            "name": "sql",
            "uri": SQL,
            "ready": True,
            "loadedPods": 2,
            "reason": "Loaded",
            "message": "2 of 2 ready pods answer for it",
        }
        before = template(api)
        api.create("loraadapters", adapter("law", LAW))
        eventually(lambda: ready(api, "law")[:2] == ("True", "Loaded"), "both pods have the LoRAAdapter")
        assert first.adapters == second.adapters == {"sql": SQL, "law": LAW}
        assert api.get("loraadapters", "law")["status"]["loadedPods"] == 2
        assert reported(api)["law"]["source"] == "law"
        eventually(
            lambda: pods.config().get("adapters") == f"sql={SQL},law={LAW}", "new pods start with both"
        )

        api.merge("inferenceservices", "llama", {"spec": {"replicas": 3}})
        (third,) = [each for each in pods.serve(3) if each not in (first, second)]
        eventually(
            lambda: api.get("loraadapters", "law")["status"]["loadedPods"] == 3, "a later pod has it, too"
        )
        assert third.calls == [], "it had both before it was ready"

        api.merge("loraadapters", "law", {"spec": {"uri": "hf://org/law-2"}})
        eventually(
            lambda: ready(api, "law")[0] == "True" and third.adapters["law"] == "hf://org/law-2",
            "another uri",
        )
        assert first.adapters["law"] == second.adapters["law"] == "hf://org/law-2"
        assert ("unload", "law") not in first.calls, "it was replaced in place"

        api.delete("loraadapters", "law")
        eventually(lambda: first.adapters == second.adapters == third.adapters == {"sql": SQL}, "unloaded")
        eventually(lambda: pods.config().get("adapters") == f"sql={SQL}", "new pods start without it")
        # spec.lora keeps LoRA on, so that the last adapter may go without a restart, too.
        api.merge("inferenceservices", "llama", {"spec": {"lora": {}, "adapters": None}})
        eventually(lambda: first.adapters == second.adapters == third.adapters == {}, "none is left")
        eventually(lambda: condition(api) == ("", ""), "the condition goes, too")
        assert "adapters" not in pods.config()
        assert template(api) == before
        assert len(api.list("controllerrevisions")) == 1


def count_loads(operator: OperatorProcess) -> dict[str, float]:
    """The requests to load adapters so far, by result."""
    samples = operator.metrics()
    return {
        result: samples[f"skiff_operator_adapter_requests_total{{action=load,result={result}}}"]
        for result in ("done", "failed", "refused")
    }


def test_a_bad_adapter_is_refused_and_touches_nobody(api: ApiServer, operator: OperatorProcess) -> None:
    before = count_loads(operator)
    api.create("inferenceservices", service(adapters=[{"name": "sql", "uri": SQL}]))
    with ExitStack() as stack:
        pods = LoRAPods(api, 2, stack)
        pods.refused[BAD] = TOO_LARGE
        first, second = pods.serve(2)
        eventually(lambda: reported(api).get("sql", {}).get("loadedPods") == 2, "the good one")
        api.create("loraadapters", adapter("bad", BAD))
        eventually(lambda: ready(api, "bad")[:2] == ("False", "AdapterRefused"), "refused")
        assert TOO_LARGE in ready(api, "bad")[2]
        eventually(lambda: condition(api) == ("False", "AdapterRefused"), "the service reports it")
        assert reported(api)["sql"]["ready"]
        conditions = api.get("inferenceservices", "llama")["status"]["conditions"]
        assert {each["type"]: each["status"] for each in conditions}["Ready"] == "True"
        assert pods.config()["adapters"] == f"sql={SQL}", "no pod starts with it"
        notes = eventually(
            lambda: [each["note"] for each in api.list("events") if each["reason"] == "AdapterRefused"],
            "an Event",
        )
        assert any(TOO_LARGE in note for note in notes)
        calls = len(first.calls) + len(second.calls)
        api.create("loraadapters", adapter("law", LAW))
        eventually(lambda: ready(api, "law")[0] == "True", "others load")
        assert len(first.calls) + len(second.calls) == calls + 2, "what was refused is not tried again soon"
        loads = count_loads(operator)
        assert (loads["done"] - before["done"], loads["refused"] - before["refused"]) == (4, 2)
        api.merge("loraadapters", "bad", {"spec": {"uri": "hf://org/good"}})
        eventually(lambda: ready(api, "bad")[0] == "True", "another uri is tried at once")


@pytest.mark.usefixtures("operator")
def test_what_can_be_loaded_nowhere_says_why(api: ApiServer) -> None:
    api.create("loraadapters", adapter("early", SQL))
    eventually(lambda: ready(api, "early")[1] == "ServiceNotFound", "no such InferenceService")
    api.create("inferenceservices", service(replicas=0))
    eventually(lambda: ready(api, "early")[1] == "LoRANotEnabled", "LoRA is off")
    assert "spec.lora: {}" in ready(api, "early")[2]
    api.merge("inferenceservices", "llama", {"spec": {"lora": {"maxLoraRank": 32}}})
    eventually(lambda: ready(api, "early")[1] == "NoPods", "it waits for pods")
    eventually(
        lambda: "--max-lora-rank 32" in " ".join(template(api)["spec"]["containers"][0]["args"]), "its flags"
    )
    for name, wanted, reason in (
        ("late", adapter("late", LAW, name="early"), "NameConflict"),
        ("model", adapter("model", LAW, name="llama"), "NameConflict"),
        ("claim", adapter("claim", "pvc://weights/law"), "InvalidSpec"),
    ):
        api.create("loraadapters", wanted)
        eventually(lambda name=name, reason=reason: ready(api, name)[1] == reason, reason)  # type: ignore[misc]
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 2}})
    with ExitStack() as stack:
        first, second = LoRAPods(api, 3, stack).serve(2)
        eventually(
            lambda: api.get("loraadapters", "early").get("status", {}).get("loadedPods") == 2,
            "the others do not disturb it",
        )
        assert ready(api, "early")[0] == "True"
        assert first.adapters == second.adapters == {"early": SQL}


@pytest.mark.usefixtures("operator")
def test_pods_that_fail_are_tried_again(api: ApiServer) -> None:
    api.create("inferenceservices", service(lora={}))
    with ExitStack() as stack:
        pods = LoRAPods(api, 4, stack)
        first, _ = pods.serve(2)
        first.failing = True
        api.merge("inferenceservices", "llama", {"spec": {"adapters": [{"name": "sql", "uri": SQL}]}})
        eventually(lambda: condition(api) == ("False", "LoadFailed"), "the source of one pod fails")
        assert "the hub does not answer" in reported(api)["sql"]["message"]
        first.failing = False
        eventually(lambda: condition(api) == ("True", "Loaded"), "it is tried again")
        # A container that starts again has what the ConfigMap names, even where the operator had loaded more by hand.
        name = next(iter(pods.servers))
        eventually(lambda: pods.config().get("adapters") == f"sql={SQL}", "new pods start with it")
        pods.servers[name].adapters["stray"] = LAW
        pods.restart(name, 1)
        pods.servers[name].adapters.clear()
        pods.servers[name].adapters["stray"] = LAW
        eventually(
            lambda: pods.servers[name].adapters == {"sql": SQL},
            "loaded again, and the stray one unloaded",
            90,
        )


@pytest.mark.usefixtures("operator")
def test_a_slow_load_delays_no_other(api: ApiServer) -> None:
    api.create("inferenceservices", service(replicas=1, adapters=[{"name": "sql", "uri": SQL}]))
    with ExitStack() as stack:
        (pod,) = LoRAPods(api, 5, stack).serve(1)
        eventually(lambda: condition(api) == ("True", "Loaded"), "the first one")
        pod.slow.clear()
        api.create("loraadapters", adapter("law", LAW))
        eventually(lambda: ("load", "law") in pod.calls, "its load goes on")
        assert ready(api, "law")[0] != "True"
        api.merge("inferenceservices", "llama", {"spec": {"lora": {}, "adapters": None}})
        eventually(lambda: pod.adapters == {}, "another one is unloaded meanwhile")
        pod.slow.set()
        eventually(lambda: ready(api, "law")[0] == "True", "it is loaded")
