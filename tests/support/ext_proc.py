"""A client of Envoy's external processing protocol, as far as an endpoint picker needs it: which pod gets this request.

It sends one gRPC call over HTTP/2 without TLS, and reads the picker's messages. Header blocks of the answer are not decoded,
because the messages have what is asked for.
"""

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

DESTINATION: Final = "x-gateway-destination-endpoint"
_PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_STREAM: Final = 1
_TIMEOUT_SECONDS: Final = 30.0
_FIELDS: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "ProcessingRequest": {"request_headers": (2, "HttpHeaders"), "request_body": (4, "HttpBody")},
    "HeaderValueOption": {"header": (1, "HeaderValue")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "body": (3, "bytes")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
    },
}
"""Numbers and types of the fields that are used here; a ``*`` stands for a repeated field. Others are skipped."""


class NotPicked(Exception):
    """The picker refused the request, or ended the call."""


def _make_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc.proto", package="picker", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "string": kinds.TYPE_STRING,
        "bytes": kinds.TYPE_BYTES,
        "bool": kinds.TYPE_BOOL,
        "int32": kinds.TYPE_INT32,
    }
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removeprefix("*")
            label = kinds.LABEL_REPEATED if plain != kind else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if plain in scalars:
                added.type = scalars[plain]
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".picker.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"picker.{name}"))
        for name in _FIELDS
    }


_MESSAGES: Final = _make_messages()


def pick(port: int, path: str, body: Mapping[str, object]) -> str:
    """Ask the picker that listens on ``port`` of the loopback interface where a POST goes; return the pod's IP:port.

    Raises:
        NotPicked: It named none.
    """
    headers = {":method": "POST", ":path": path, ":authority": "test", "content-type": "application/json"}
    values = [{"key": key, "raw_value": value.encode()} for key, value in headers.items()]
    request = _MESSAGES["ProcessingRequest"]
    messages = (
        request(request_headers={"headers": {"headers": values}}),
        request(request_body={"body": json.dumps(body).encode(), "end_of_stream": True}),
    )
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_SECONDS) as connection:
        connection.sendall(
            _PREFACE + _frame(_SETTINGS, 0, b"", stream=0) + _frame(_HEADERS, _END_HEADERS, _head())
        )
        for message in messages:
            data = message.SerializeToString()
            connection.sendall(_frame(_DATA, 0, struct.pack(">BI", 0, len(data)) + data))
        for data in _read_messages(connection):
            answer = _MESSAGES["ProcessingResponse"].FromString(data)
            if answer.HasField("immediate_response"):
                refused = answer.immediate_response
                raise NotPicked(f"{refused.status.code}: {refused.body.decode()}")
            for option in answer.request_headers.response.header_mutation.set_headers:
                if option.header.key == DESTINATION:
                    return str(option.header.raw_value.decode())
    raise NotPicked("the picker ended the call without an answer")


def _head() -> bytes:
    """Return the call's header block: HPACK literals that are not indexed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": _PATH,
        ":authority": "picker",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())


def _string(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, payload: bytes, *, stream: int = _STREAM) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _read_messages(connection: socket.socket) -> Iterator[bytes]:
    """Yield the messages of the answer; acknowledge settings and pings."""
    buffer = b""
    with connection.makefile("rb") as stream:
        while head := stream.read(9):
            kind, flags = head[3], head[4]
            payload = stream.read(int.from_bytes(head[:3], "big"))
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                connection.sendall(_frame(kind, _ACK, payload if kind == _PING else b"", stream=0))
            elif kind in (_RESET, _GOAWAY):
                return
            elif kind == _DATA:
                buffer += payload
                while len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
                    yield buffer[5 : 5 + size]
                    buffer = buffer[5 + size :]
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                return
