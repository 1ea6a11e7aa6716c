"""The dispatcher, without processes."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.request_state import RequestMetadata
from skiff_runtime.api.dispatch.response_writers import NullChoiceWriter
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.api.formats.generate import GenerateResponseFormatter
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import (
    AbortRequest,
    ChatPrompt,
    EncodeRequest,
    RequestFailed,
    SamplingSpec,
    TextOptions,
    TokenizeRequest,
    ToTokenizer,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender, TransportError
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


def make_dispatcher(tokenizer: object, status: ServiceStatus, capacity: int) -> Dispatcher:
    metrics = Metrics(
        in_flight=lambda: 0, connections=lambda: 0, ready=lambda: True, phase_seconds=dict, heartbeats=list
    )
    status.mark_ready(kv_tokens=64)
    return Dispatcher([cast(Sender, tokenizer)], capacity=capacity, status=status, metrics=metrics)


def make_spec(*prompts: list[int] | ChatPrompt) -> RequestSpec:
    return RequestSpec(
        prompts=list(prompts),
        sampling=SamplingSpec(max_tokens=1, seed=0),
        text=TextOptions(),
        formatter=GenerateResponseFormatter(),
        stream=False,
    )


def test_request_that_cannot_be_sent_is_not_in_flight() -> None:
    tokenizer, status = Tokenizer(), ServiceStatus()
    dispatcher = make_dispatcher(tokenizer, status, capacity=1)
    spec = make_spec([1])
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


UNSENDABLE: list[dict[str, Any]] = [{"a": 10**30}, {"a": [-(2**63) - 1]}, {"a": "\ud800"}, {"\udfff": 1}]


@pytest.mark.parametrize("value", UNSENDABLE, ids=ascii)
def test_request_that_no_message_can_carry_is_invalid(value: dict[str, Any], tmp_path: Path) -> None:
    """The prompts before it are not left in flight, and later requests are accepted."""
    endpoints, status = Endpoints(tmp_path), ServiceStatus()
    receiver: Receiver[Any] = Receiver(endpoints.tokenizer(0), ToTokenizer)
    sender = Sender(endpoints.tokenizer(0))
    prompt = ChatPrompt([{"role": "user", "content": "x"}], template_options=value)
    dispatcher = make_dispatcher(sender, status, capacity=2)
    rpc = RpcClient([sender], status)
    metadata = RequestMetadata(request_id="a", endpoint=Endpoint.CHAT)

    async def send_all() -> None:
        with pytest.raises(InvalidRequest, match=r"64 bits.*surrogate"):
            dispatcher.submit(make_spec([1], prompt), [NullChoiceWriter()] * 2, metadata)
        for uid in (1, 2):  # the first prompt was sent already, and its abort follows it
            dispatcher.fail(RequestFailed(uid, 400, "x", "x"))
        assert len(dispatcher) == 0
        with pytest.raises(InvalidRequest, match=r"64 bits.*surrogate"):
            await rpc.call(lambda uid: EncodeRequest(uid, prompt))
        assert not rpc._pending
        dispatcher.submit(make_spec([1]), [NullChoiceWriter()], metadata)

    asyncio.run(send_all())
    kinds = [type(receiver.receive(5)) for _ in range(3)]
    assert kinds == [TokenizeRequest, AbortRequest, TokenizeRequest]
    sender.close()
    receiver.close()
