"""LoRA adapters when an operator ends and another one begins: pods say what they have, and nothing is loaded twice."""

from collections.abc import Callable
from contextlib import ExitStack

from apiserver import ApiServer
from lora_objects import LAW, SQL, adapter, condition, ready, service
from lora_pods import LoRAPods
from operator_process import OperatorProcess, eventually

Start = Callable[..., OperatorProcess]


def test_another_operator_goes_on_with_what_pods_have(api: ApiServer, start: Start) -> None:
    lease = ("--lease-duration-seconds", "4", "--lease-renew-seconds", "1")
    operator = start("first", *lease)
    operator.start()
    api.create("inferenceservices", service(adapters=[{"name": "sql", "uri": SQL}]))
    api.create("loraadapters", adapter("law", LAW))
    with ExitStack() as stack:
        pods = LoRAPods(api, 6, stack)
        first, second = pods.serve(2)
        eventually(lambda: ready(api, "law")[0] == "True" and condition(api)[0] == "True", "loaded")
        calls = [*first.calls, *second.calls]
        digest = pods.config()["adminKeySha256"]
        operator.kill()
        api.delete("loraadapters", "law")
        again = start("second", *lease)
        again.start()
        eventually(
            lambda: first.adapters == second.adapters == {"sql": SQL},
            "what was deleted meanwhile is unloaded",
        )
        assert pods.config()["adminKeySha256"] == digest
        assert [*first.calls, *second.calls].count(("load", "sql")) == calls.count(("load", "sql")) == 2
