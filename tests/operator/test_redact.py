"""Redaction: no credential leaves a container's log, and the text around it stays readable."""

import pytest

from skiff_operator.failure import REMEDIES
from skiff_operator.redact import redact, redact_tail

HUB = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz"
AWS_ID, AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TEXTS = [
    (f"downloads with {HUB} failed", "downloads with *** failed", HUB),
    (f"Authorization: Bearer {HUB}", "Authorization: ***", HUB),
    ("headers={'authorization': 'Basic dXNlcjpwYXNz', 'accept': '*/*'}", "headers={'authorization': '***', 'accept': '*/*'}", "dXNlcjpwYXNz"),
    ("GET https://user:pa55word@files.example.com/a failed", "GET https://***@files.example.com/a failed", "pa55word"),
    ("redis://:pa55word@cache:6379/0", "redis://***@cache:6379/0", "pa55word"),
    (f"aws_access_key_id={AWS_ID} aws_secret_access_key={AWS_KEY} region=eu", "aws_access_key_id=*** aws_secret_access_key=*** region=eu", AWS_KEY),
    (f"InvalidAccessKeyId: {AWS_ID} does not exist", "InvalidAccessKeyId: *** does not exist", AWS_ID),
    ("https://b.s3.amazonaws.com/w?X-Amz-Credential=abc&X-Amz-Expires=60&X-Amz-Signature=0123abcd", "https://b.s3.amazonaws.com/w?X-Amz-Credential=***&X-Amz-Expires=60&X-Amz-Signature=***", "0123abcd"),
    ("https://x.blob.core.windows.net/w?sv=2020&sig=Zm9v%3D", "https://x.blob.core.windows.net/w?sv=2020&sig=***", "Zm9v"),
    ("serve --api-key s3cr3tkey1 --port 8000", "serve --api-key *** --port 8000", "s3cr3tkey1"),
    ("SKIFF_API_KEY=s3cr3tkey1,s3cr3tkey2 HOME=/tmp", "SKIFF_API_KEY=*** HOME=/tmp", "s3cr3tkey2"),
    ('{"password": "hunter2", "user": "me"}', '{"password": "***", "user": "me"}', "hunter2"),
    ("token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl expired", "token *** expired", "eyJhbGciOiJSUzI1NiJ9"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nbye", "***\nbye", "MIIE"),
    ("MIIEpAIBAAKCAQEA\n-----END PRIVATE KEY-----\nbye", "***\nbye", "MIIEpAIBAAKCAQEA"),
    ("OpenAI key sk-proj-abcdefghijklmnopqrstuv", "OpenAI key ***", "sk-proj"),
]  # fmt: skip
HARMLESS = [
    "2026-11-24T20:28:38.952Z info supervisor service_ready url=http://127.0.0.1:8766 kv_tokens=131072 seconds=1.19057",
    "set HF_TOKEN (in an InferenceService: model.credentialsSecretRef)",
    'secret "hub" not found',
    "couldn't find key token in Secret default/hub",
    "--max-num-batched-tokens 8192 --max-total-tokens=100",
    "https://example.com/a@b/c?max_tokens=5&policy_name=x",
    "the tokenizer: fast",
]


@pytest.mark.parametrize(("text", "expected", "secret"), TEXTS)
def test_secrets_are_masked(text: str, expected: str, secret: str) -> None:
    found = redact(text)
    assert secret not in found
    assert found == redact(found)
    assert found == expected


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("separator", ["\n", " "])
def test_the_rest_of_a_cut_secret_is_dropped(separator: str) -> None:
    """The kubelet cuts a log anywhere; half of a token has no prefix by which it is recognized."""
    half = "QrStUvWxYz"
    tail = half + separator + "x" * (200 - len(half) - 1)
    assert redact_tail(tail, limit=200) == "x" * 189
    assert redact_tail(f"{half}{separator}x", limit=200) == f"{half}{separator}x", "this one is whole"
    assert redact_tail("x" * 300, limit=200) == ""


@pytest.mark.timeout(10)
def test_a_hostile_text_does_not_hang() -> None:
    for text in (
        "a" * 2048,
        "token" * 400,
        "://" * 700,
        "authorization:" * 150,
        "-----BEGIN PRIVATE KEY-----" * 70,
    ):
        assert redact(redact(text)) == redact(text)


def test_no_remedy_looks_like_a_secret() -> None:
    for remedy in REMEDIES.values():
        assert redact(remedy) == remedy
