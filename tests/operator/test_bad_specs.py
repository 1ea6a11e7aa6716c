"""Bad specs, each refused with a message that names the field and says how to mend it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import ApiServer, Refused
from services import raw

from skiff_operator import plan, spec
from skiff_operator.errors import InvalidSpec
from skiff_operator.settings import Settings

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("bad_specs.yaml").read_text())
ENOUGH = 60


def body(case: dict[str, Any]) -> dict[str, Any]:
    """An InferenceService with the case's spec over one that can be served."""
    given = case["spec"]
    served: dict[str, Any] = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}}
    merged = {**served, **given}
    for part, fields in served.items():
        if isinstance(given.get(part), dict) and given[part]:
            merged[part] = {**fields, **given[part]}
    obj = raw(**merged)
    obj["metadata"] = {"name": "llama"}
    return obj


def create(server: ApiServer, obj: dict[str, Any]) -> Any:
    """Ask the API server to create an object, as kubectl does: defaults filled in, unknown fields refused."""
    path = f"{server.path('inferenceservices')}?fieldValidation=Strict&dryRun=All"
    return server.request("POST", path, obj)


def test_the_spec_beneath_can_be_served(server: ApiServer) -> None:
    made = create(server, body({"spec": {}}))
    assert plan.objects(spec.parse(made), Settings())


def test_there_are_enough_of_them() -> None:
    assert len({yaml.safe_dump(case["spec"]) for case in CASES}) == len(CASES) >= ENOUGH
    assert len([case for case in CASES if case.get("by") == "operator"]) >= ENOUGH // 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["field"])
def test_a_bad_spec_is_refused_with_its_remedy(server: ApiServer, case: dict[str, Any]) -> None:
    if case.get("by") == "operator":
        made = create(server, body(case))
        with pytest.raises(InvalidSpec) as invalid:
            plan.objects(spec.parse(made), Settings())
        message = str(invalid.value)
    else:
        with pytest.raises(Refused) as refused:
            create(server, body(case))
        message = refused.value.message
    assert case["field"] in message and case["says"] in message, message
