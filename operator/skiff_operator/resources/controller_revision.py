"""The ControllerRevision that records a pod template, the spec behind it, and the version of the operator."""

from typing import Any

from skiff_operator import revisions
from skiff_operator.kinds import CONTROLLER_REVISION
from skiff_operator.resources.metadata import ANNOTATION_SPEC_HASH, LABEL_REVISION, child
from skiff_operator.revisions import Target
from skiff_operator.settings import VERSION
from skiff_operator.spec import InferenceService


def build(
    service: InferenceService, target: Target, template: dict[str, Any], *, number: int
) -> dict[str, Any]:
    """Build the record of a template; the API server refuses any change of its data."""
    body = child(
        CONTROLLER_REVISION,
        service,
        name=target.name,
        revision=number,
        data={"operatorVersion": VERSION, "spec": revisions.pod_spec(service), "template": template},
    )
    requests = {name: at for name, at in revisions.requests(service).items() if at}
    body["metadata"]["labels"] = {**body["metadata"]["labels"], LABEL_REVISION: target.revision}
    body["metadata"]["annotations"] = {
        ANNOTATION_SPEC_HASH: target.spec_hash,
        revisions.ANNOTATION_BASE: target.base,
        revisions.ANNOTATION_CAUSE: target.cause,
        **requests,
    }
    return body
