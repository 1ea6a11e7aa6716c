"""Requests in flight, without processes."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from skiff_runtime.api.dispatcher import Dispatcher
from skiff_runtime.api.flight import Caller
from skiff_runtime.api.generate import GenerateFormat
from skiff_runtime.api.generation import Generation
from skiff_runtime.api.sinks import NullSink
from skiff_runtime.api.status import ServiceStatus
from skiff_runtime.messages import SamplingParams, TextOptions
from skiff_runtime.metric_labels import Endpoint
from skiff_runtime.metrics import Metrics
from skiff_runtime.transport import Sender, TransportError


@dataclass
class Tokenizer:
    """A tokenizer's queue that may be full."""

    full: bool = True
    taken: list[Any] = field(default_factory=list)

    def send(self, message: object) -> None:
        if self.full:
            raise TransportError("tokenizer0 does not read its messages")
        self.taken.append(message)


def test_a_request_that_no_tokenizer_takes_is_not_in_flight() -> None:
    tokenizer, status = Tokenizer(), ServiceStatus()
    metrics = Metrics(
        in_flight=lambda: 0, connections=lambda: 0, ready=lambda: True, phase_seconds=dict, heartbeats=list
    )
    dispatcher = Dispatcher([cast(Sender, tokenizer)], capacity=1, status=status, metrics=metrics)
    generation = Generation(
        prompts=[[1]],
        sampling=SamplingParams(max_tokens=1, seed=0),
        text=TextOptions(),
        reply=GenerateFormat(),
        stream=False,
    )
    status.make_ready(kv_tokens=64)
    with pytest.raises(TransportError):
        dispatcher.submit(generation, [NullSink()], Caller(request_id="a", endpoint=Endpoint.GENERATE))
    assert len(dispatcher) == 0
    tokenizer.full = False
    flight = dispatcher.submit(generation, [NullSink()], Caller(request_id="b", endpoint=Endpoint.GENERATE))
    assert (len(dispatcher), [each.uid for each in tokenizer.taken]) == (1, [flight.first])
