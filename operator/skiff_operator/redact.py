"""Redaction of secrets in text that leaves a container: the tail of a log, a message, a line on a terminal. Pure.

Logs are meant to hold no secrets, but a library's traceback may print a URL or a header with one, and a status can be
read by everyone who may read InferenceServices. Patterns match the form of known credentials and the names that
usually stand before others. The text around a secret stays readable.
"""

import re
from typing import Final

MASK: Final = "***"

_SECRET_NAME: Final = (
    r"[\w.-]{0,40}(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key)"
)
_SECRET_PARAMETER: Final = r"(?:X-Amz-(?:Signature|Credential|Security-Token)|X-Goog-(?:Signature|Credential)|AWSAccessKeyId|Signature|sig|Key-Pair-Id|Policy)"
_RULES: Final = (
    (re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    # The same key in a text that was cut behind its first line.
    (re.compile(r"\A(?:(?!-----BEGIN).)*?-----END [A-Z ]{0,30}PRIVATE KEY-----", re.DOTALL), MASK),
    # The user and the password of a URL; an @ behind the first slash belongs to the path.
    (re.compile(r"(?<=://)[^\s/@'\"<>]{1,512}@"), f"{MASK}@"),
    (re.compile(rf"([?&]{_SECRET_PARAMETER}=)[^\s&'\"<>]+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(
            r"((?:proxy-)?authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?)(?:(?:bearer|basic|token|digest|aws4-hmac-sha256)\s+)?[^\r\n\"']+",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(rf"(?<![\w-])((?:--)?{_SECRET_NAME}\\?[\"']?\s{{0,4}}[:=]\s{{0,4}}\\?[\"']?)[^\s\"';\\&]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"(?<![\w-])(--{_SECRET_NAME}\s+)(?!-)[^\s\"';]+", re.IGNORECASE), rf"\1{MASK}"),
    # Tokens that are known by their form: Hugging Face, AWS, OpenAI and Anthropic, GitHub, GitLab, Slack, Google, NVIDIA.
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{6,}|(?:AKIA|ASIA|AROA)[A-Z0-9]{12,}|sk-[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}"
            r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w.-]{10,}|nvapi-[\w-]{16,})"
        ),
        MASK,
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{0,}"), MASK),  # a JSON Web Token
)  # fmt: skip


def redact(text: str) -> str:
    """Return the text with every credential that is recognized replaced by `***`; a second call changes nothing."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_tail(text: str, *, limit: int) -> str:
    """Return the last `limit` characters, redacted.

    A text as long as the limit is cut, by us or by the kubelet. Its first word may be the rest of a secret without the
    prefix by which it would be recognized, so what stands before the first white space of it is dropped.
    """
    if len(text.encode()) < limit:
        return redact(text)
    _, _, whole = redact(text[-limit:]).partition("\n")
    if not whole:
        parts = text[-limit:].split(maxsplit=1)
        whole = redact(parts[1]) if len(parts) > 1 else ""
    return whole[-limit:]
