"""What the tokenizer files of a model directory say: where tokenizer.json is, the chat template, special tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import read_json

MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_TEMPLATE_BYTES: Final = 1 << 20

_NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_DEFAULT_TEMPLATE: Final = "default"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """``template``: source of the chat template, or None. ``special_tokens``: ``bos_token`` and its like."""

    tokenizer: Path
    template: str | None
    special_tokens: dict[str, str]


def read_tokenizer_files(directory: Path, converted: Path | None = None) -> TokenizerFiles:
    """Read ``directory``; raises ``ModelError`` that names the file and what is wrong with it.

    ``converted`` is the directory of the tokenizer.json, where that is another.
    """
    config = _optional_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(directory, config)
    if converted is not None and converted != directory:
        made = _optional_json(converted / "tokenizer_config.json")
        special_tokens = _special_tokens(converted, made) | special_tokens
    return TokenizerFiles(
        tokenizer=_tokenizer_path(converted or directory),
        template=_template(directory, config),
        special_tokens=special_tokens,
    )


def _tokenizer_path(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist; a model needs its tokenizer in this format, or as the file of SentencePiece "
            "(tokenizer.model), tiktoken (*.tiktoken) or tekken (tekken.json) that it is converted from"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{path} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
    return path


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path} is not valid UTF-8: {error}") from None
    source = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):
        template = _named_template(source, template)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{source}: 'chat_template' must be a string or a list of named templates")
    return template


def _named_template(source: Path, templates: list[Any]) -> Any:
    for each in templates:
        if not isinstance(each, dict) or "name" not in each or "template" not in each:
            raise ModelError(f"{source}: each entry of 'chat_template' must have 'name' and 'template'")
        if each["name"] == _DEFAULT_TEMPLATE:
            return each["template"]
    return None


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    older = _optional_json(directory / "special_tokens_map.json")
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if value is None:
            value = older.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
        elif value is not None:
            raise ModelError(
                f"{directory / 'tokenizer_config.json'}: {name!r} must be a string, not {value!r}"
            )
    return tokens


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
