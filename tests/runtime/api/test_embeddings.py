"""Embeddings, reranking and scores over HTTP, with real frontend processes and an echoing scheduler."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from embedding_models import QUERY_PROMPT, append_eos, write_embedding_files
from frontend import HIDDEN, NAME, TIMEOUT_SECONDS, Frontend, echoing_frontend, vector_of, write_model
from openai import OpenAI
from tiny_models import edit_json

from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.request_state import RequestMetadata, RequestState
from skiff_runtime.api.dispatch.response_writers import make_choice_writers
from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.api.formats.embeddings import prepare_embeddings
from skiff_runtime.api.formats.scores import prepare_rerank, prepare_score
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.http.asgi import AsgiWriter, Message
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import NO_TOKEN, FinishReason, PoolingKind, PoolingSpec, Usage, Wire
from skiff_runtime.messages.pooling import PooledVector
from skiff_runtime.messages.text_batch import TextBatch
from skiff_runtime.messages.token_batch import StepStats
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import Endpoint, Outcome
from skiff_runtime.models.config import SamplingDefaults
from skiff_runtime.models.embedding_config import EmbeddingConfig

TEXTS = ["The small boat", "A pod starts", "The operator"]
EMBEDDING = EmbeddingConfig(size=HIDDEN, prompts=(("query", "find "),), default_prompt="the ")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """Serve a decoder without an output head, with the files of sentence-transformers."""
    model = write_model(tmp_path_factory.mktemp("model"))
    edit_json(model / "config.json", architectures=["LlamaModel"])
    append_eos(model)
    write_embedding_files(model)
    with echoing_frontend(model) as front:
        yield front


def make_client(front: Frontend, *, strict: bool) -> OpenAI:
    return OpenAI(
        base_url=front.url + "/v1",
        api_key="none",
        timeout=TIMEOUT_SECONDS,
        max_retries=0,
        _strict_response_validation=strict,
    )


@pytest.fixture(scope="module")
def client(front: Frontend) -> Iterator[OpenAI]:
    with make_client(front, strict=False) as client:
        yield client


@pytest.fixture(scope="module")
def strict_client(front: Frontend) -> Iterator[OpenAI]:
    """Validate responses by the client's own types, which describe floats alone: it decodes base64 after the validation."""
    with make_client(front, strict=True) as client:
        yield client


def ids_of(front: Frontend, text: str) -> list[int]:
    return front.rank.tokenizer.encode(text).ids


def unit(vector: list[float]) -> Any:
    return np.array(vector) / np.linalg.norm(vector)


def test_vectors_are_those_of_the_inputs_in_their_order(
    front: Frontend, client: OpenAI, strict_client: OpenAI
) -> None:
    """Without an encoding, OpenAI's client asks for base64."""
    ids = [ids_of(front, text) for text in TEXTS]
    expected = [unit(vector_of(each)) for each in ids]
    replies = [
        client.embeddings.create(model=NAME, input=TEXTS),
        strict_client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float", user="me"),
        client.embeddings.create(model=NAME, input=ids),
    ]
    for reply in replies:
        assert [each.index for each in reply.data] == [0, 1, 2]
        np.testing.assert_allclose([each.embedding for each in reply.data], expected, atol=1e-6)
        assert (reply.object, reply.model, reply.data[0].object) == ("list", NAME, "embedding")
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
    one = client.embeddings.create(model=NAME, input=TEXTS[1])
    same = strict_client.embeddings.create(model=NAME, input=ids[1], encoding_format="float")
    np.testing.assert_allclose(one.data[0].embedding, expected[1], atol=1e-6)
    np.testing.assert_allclose(same.data[0].embedding, expected[1], atol=1e-6)


def test_base64_holds_little_endian_floats(front: Frontend) -> None:
    body = {"model": NAME, "input": TEXTS[0]}
    [encoded] = front.post("/v1/embeddings", **body, encoding_format="base64").json()["data"]
    [plain] = front.post("/v1/embeddings", **body).json()["data"]
    decoded = np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4")
    np.testing.assert_array_equal(decoded, np.array(plain["embedding"], np.float32))


def test_vectors_are_cut_before_they_are_normalized(front: Frontend, client: OpenAI) -> None:
    whole = vector_of(ids_of(front, TEXTS[0]))
    reply = client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=3)
    np.testing.assert_allclose(reply.data[0].embedding, unit(whole[:3]), atol=1e-6)
    plain = client.embeddings.create(model=NAME, input=TEXTS[0], extra_body={"normalize": False})
    np.testing.assert_allclose(plain.data[0].embedding, whole, atol=1e-6)


def test_named_prompt_and_special_tokens(front: Frontend) -> None:
    def first(**body: Any) -> list[float]:
        reply = front.post("/v1/embeddings", model=NAME, normalize=False, **body).json()
        found: list[float] = reply["data"][0]["embedding"][:3]
        return found

    ids = ids_of(front, QUERY_PROMPT + "boat")
    assert first(input="boat", prompt_name="query") == [len(ids), ids[0], ids[-1]]
    bare = front.rank.encode("boat")
    assert first(input="boat", add_special_tokens=False) == [len(bare), bare[0], bare[-1]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_similarity(front: Frontend, path: str) -> None:
    query, *documents = (unit(vector_of(ids_of(front, text))) for text in ("boat", *TEXTS))
    scores = [float(query @ each) for each in documents]
    order = sorted(range(3), key=lambda index: -scores[index])
    mixed = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    reply = front.post(path, model=NAME, query="boat", documents=mixed).json()
    assert [each["index"] for each in reply["results"]] == order
    assert [each["document"]["text"] for each in reply["results"]] == [TEXTS[index] for index in order]
    found = [each["relevance_score"] for each in reply["results"]]
    np.testing.assert_allclose(found, [scores[index] for index in order], atol=1e-6)
    assert reply["usage"]["total_tokens"] == sum(len(ids_of(front, text)) for text in ("boat", *TEXTS))
    best = front.post(path, query="boat", documents=TEXTS, top_n=1, return_documents=False).json()
    assert best["results"] == [{"index": order[0], "relevance_score": pytest.approx(max(scores))}]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_pairs_are_scored_one_to_many_or_one_by_one(
    front: Frontend, path: str, names: tuple[str, str]
) -> None:
    first, *vectors = (unit(vector_of(ids_of(front, text))) for text in ("boat", *TEXTS))
    one = front.post(path, model=NAME, **dict(zip(names, ("boat", TEXTS), strict=True))).json()
    assert [(each["index"], each["object"]) for each in one["data"]] == [(n, "score") for n in range(3)]
    np.testing.assert_allclose(
        [each["score"] for each in one["data"]], [first @ v for v in vectors], atol=1e-6
    )
    same = front.post(path, **dict(zip(names, (TEXTS, TEXTS), strict=True))).json()
    np.testing.assert_allclose([each["score"] for each in same["data"]], [1, 1, 1], atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("embeddings", {"model": NAME}, "'input' is missing"),
        ("embeddings", {"model": NAME, "input": []}, "at least 1 item"),
        ("embeddings", {"model": NAME, "input": {"a": 1}}, "must be a text, a list of token ids, or a list"),
        ("embeddings", {"model": NAME, "input": [[]]}, "the prompt is empty"),
        ("embeddings", {"model": NAME, "input": "x", "dimensions": 65}, "request at most as many"),
        ("embeddings", {"model": NAME, "input": "x", "prompt_name": "q"}, "it has 'query', 'document'"),
        ("embeddings", {"model": NAME, "input": [5], "prompt_name": "query"}, "token ids take no prompt"),
        ("embeddings", {"model": NAME, "input": "x", "encoding_format": "int8"}, "'float' or 'base64'"),
        ("embeddings", {"model": NAME, "input": "x " * 2000}, "the model's context holds 512"),
        ("embeddings", {"model": NAME, "input": ["x"] * 2049}, "at most 2048 items"),
        ("embeddings", {"model": NAME, "input": ["x"] * 2048}, "can run or wait at a time"),
        ("embeddings", {"model": NAME, "input": [400]}, "outside the model's vocabulary"),
        ("rerank", {"query": "x", "documents": []}, "at least 1 item"),
        ("rerank", {"query": "x", "documents": ["y"], "instruct": "z"}, "'instruct' is for rerankers"),
        ("rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "greater than or equal to 0"),
        ("score", {"text_1": "x"}, "send one of 'text_2' and 'documents'"),
        ("score", {"text_1": ["x", "y"], "text_2": ["z"]}, "2 texts cannot be paired with 1"),
        ("completions", {"model": NAME, "prompt": "x"}, "computes embeddings, at /v1/embeddings"),
        (
            "chat/completions",
            {"model": NAME, "messages": [{"role": "user", "content": "x"}]},
            "no output head",
        ),
    ],
)
def test_invalid_request_is_rejected(front: Frontend, path: str, body: dict[str, Any], words: str) -> None:
    reply = front.post(f"/v1/{path}", **body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


def test_unknown_model_is_404(front: Frontend) -> None:
    assert front.post("/v1/embeddings", model="other", input="x").status_code == 404
    assert front.post("/v1/rerank", model="other", query="x", documents=["y"]).status_code == 404


def test_requests_are_counted_by_endpoint(front: Frontend) -> None:
    assert front.post("/v1/score", text_1="x", text_2="y").status_code == 200
    for endpoint in ("embeddings", "rerank", "score"):
        assert front.metric(f'skiff_requests_total{{endpoint="{endpoint}",outcome="finished"}}') >= 1
    assert front.metric("skiff_requests_in_flight") == 0


# Without processes


def served(**changes: Any) -> ServedModel:
    fields = {"name": NAME, "fingerprint": "fp", "vocab_size": 400, "max_model_len": 512}
    return ServedModel(**{**fields, "defaults": SamplingDefaults(), "embedding": EMBEDDING, **changes})


def encode(**body: Any) -> bytes:
    return json.dumps(body).encode()


def test_default_prompt_precedes_texts() -> None:
    spec = prepare_embeddings(encode(model=NAME, input=["boat", [5]]), served())
    assert spec.prompts == ["the boat", [5]]
    named = prepare_embeddings(encode(model=NAME, input="boat", prompt_name="query"), served())
    assert named.prompts == ["find boat"] and named.pooling == PoolingSpec(PoolingKind.LAST)
    scored = prepare_score(encode(text_1="boat", text_2=["pod", "node"]), served())
    assert scored.prompts == ["the boat", "the pod", "the node"]


def test_shared_fields_reach_the_request() -> None:
    shared = {"priority": 3, "cache_salt": "s", "user": "me"}
    for prepare, body in (
        (prepare_embeddings, {"model": NAME, "input": "x"}),
        (prepare_rerank, {"query": "x", "documents": ["y"]}),
        (prepare_score, {"text_1": "x", "text_2": "y"}),
    ):
        spec = prepare(encode(**body, **shared), served())
        assert (spec.priority, spec.cache_salt, spec.user) == (3, "s", "me")


@pytest.mark.parametrize(
    ("dimensions", "words"), [((), "'is_matryoshka'"), ((16, 32), "can be cut to 16, 32 only")]
)
def test_checkpoint_restricts_dimensions(dimensions: tuple[int, ...], words: str) -> None:
    model = served(embedding=EmbeddingConfig(size=HIDDEN, dimensions=dimensions))
    with pytest.raises(InvalidRequest, match=words):
        prepare_embeddings(encode(model=NAME, input="x", dimensions=8), model)
    for allowed in (*dimensions, HIDDEN):
        prepare_embeddings(encode(model=NAME, input="x", dimensions=allowed), model)


def test_unsupported_pooling_is_named() -> None:
    model = served(embedding=EmbeddingConfig(size=HIDDEN, unsupported="1_Pooling/config.json: cls"))
    for prepare, body in (
        (prepare_embeddings, {"model": NAME, "input": "x"}),
        (prepare_rerank, {"query": "x", "documents": ["y"]}),
    ):
        with pytest.raises(InvalidRequest, match=r"cls.*--pooling-type last or mean"):
            prepare(encode(**body), model)


def test_reranker_reads_both_texts_in_one_prompt() -> None:
    model = served(rerank_template="qwen3")
    spec = prepare_rerank(encode(query="q", documents=["a", "b"], instruct="find"), model)
    assert spec.pooling == PoolingSpec(PoolingKind.LOGITS, labels=("no", "yes"))
    assert spec.prompt_options.add_special_tokens is False
    first, second = map(str, spec.prompts)
    assert "<Instruct>: find\n<Query>: q\n<Document>: a<|im_end|>" in first and ": b<|im_end|>" in second
    logits = [np.array(each, Wire.VECTOR) for each in ([900.0, -900.0], [0.0, 0.0])]
    choices = [spec.formatter.format_vector(index, each) for index, each in enumerate(logits)]  # type: ignore[attr-defined]
    results = json.loads(spec.formatter.format_full(choices, Usage(9, 0, 0)))["results"]
    assert [(each["index"], each["relevance_score"]) for each in results] == [(1, 0.5), (0, 0.0)]
    pairs = prepare_score(encode(text_1=["q", "r"], text_2=["a", "b"]), model)
    assert "<Query>: r\n<Document>: b" in str(pairs.prompts[1])


class _Tokenizer:
    def send(self, message: object) -> None:
        """Accept a message, and compute nothing."""


@pytest.mark.parametrize(
    ("finish", "status", "code", "outcome"),
    [
        (FinishReason.TIMEOUT, 408, "request_timeout", Outcome.REJECTED),
        (FinishReason.ABORT, 499, "aborted", Outcome.ABORTED),
    ],
)
def test_request_that_ends_early_fails(
    finish: FinishReason, status: int, code: str, outcome: Outcome
) -> None:
    """There is no half of a response: the vector of one input is there, and that of the other is not.

    The log and the metrics agree with the status that the client got.
    """
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    spec = prepare_embeddings(encode(model=NAME, input=["x", "y"]), served())
    writers = make_choice_writers(spec, AsgiWriter(send, on_overflow=lambda: None), [], request_id="r1")
    service, ended = ServiceStatus(), list[RequestState]()
    service.mark_ready(kv_tokens=64)
    metrics = Metrics(
        in_flight=lambda: 0, connections=lambda: 0, ready=lambda: True, phase_seconds=dict, heartbeats=list
    )
    tokenizers: Any = [_Tokenizer()]
    dispatcher = Dispatcher(tokenizers, capacity=2, status=service, metrics=metrics, on_end=ended.append)
    request = dispatcher.submit(spec, writers, RequestMetadata(request_id="r1", endpoint=Endpoint.EMBEDDINGS))
    uids = [request.first_uid, request.first_uid + 1]
    dispatcher.deliver(
        TextBatch(
            np.array(uids, Wire.UID).tobytes(),
            ["", ""],
            np.array([NO_TOKEN] * 2, Wire.TOKEN).tobytes(),
            bytes([FinishReason.STOP, finish]),
            [Usage(3, 0, 0), Usage(0, 0, 0)],
            [],
            StepStats(),
            pooled=[PooledVector(uids[0], np.ones(HIDDEN, Wire.VECTOR).tobytes())],
        )
    )
    assert ended == [request] and request.outcome() is outcome
    assert request.log_fields()["status"] == status
    start, body = sent
    assert start["status"] == status and json.loads(body["body"])["error"]["code"] == code
