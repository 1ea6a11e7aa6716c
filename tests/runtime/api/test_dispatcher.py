"""The dispatcher, without processes."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.request_state import RequestMetadata
from skiff_runtime.api.dispatch.response_writers import NullChoiceWriter
from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.api.formats.generate import GenerateResponseFormatter
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.messages import SamplingSpec, TextOptions
from skiff_runtime.messages.transport import Sender, TransportError
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import Endpoint


@dataclass
class Tokenizer:
    """A sender to a tokenizer, whose queue may be full."""

    full: bool = True
    sent: list[Any] = field(default_factory=list)

    def send(self, message: object) -> None:
        if self.full:
            raise TransportError("tokenizer0 does not read its messages")
        self.sent.append(message)


def test_request_that_cannot_be_sent_is_not_in_flight() -> None:
    tokenizer, status = Tokenizer(), ServiceStatus()
    metrics = Metrics(
        in_flight=lambda: 0, connections=lambda: 0, ready=lambda: True, phase_seconds=dict, heartbeats=list
    )
    dispatcher = Dispatcher([cast(Sender, tokenizer)], capacity=1, status=status, metrics=metrics)
    spec = RequestSpec(
        prompts=[[1]],
        sampling=SamplingSpec(max_tokens=1, seed=0),
        text=TextOptions(),
        formatter=GenerateResponseFormatter(),
        stream=False,
    )
    status.mark_ready(kv_tokens=64)
    with pytest.raises(TransportError):
        dispatcher.submit(
            spec, [NullChoiceWriter()], RequestMetadata(request_id="a", endpoint=Endpoint.GENERATE)
        )
    assert len(dispatcher) == 0
    tokenizer.full = False
    request = dispatcher.submit(
        spec, [NullChoiceWriter()], RequestMetadata(request_id="b", endpoint=Endpoint.GENERATE)
    )
    assert (len(dispatcher), [each.uid for each in tokenizer.sent]) == (1, [request.first_uid])
