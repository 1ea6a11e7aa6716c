"""Tokenizer files of a model directory: the path of tokenizer.json, the chat template and the special tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import read_json

MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_TEMPLATE_BYTES: Final = 1 << 20
DEFAULT_CLASS: Final = "PreTrainedTokenizerFast"
"""The class in transformers that reads any tokenizer.json."""

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
    """``tokenizer`` is the path of tokenizer.json, ``template`` the source of the chat template, if there is one.

    ``special_tokens`` maps names such as ``bos_token`` to tokens. ``tokenizer_class`` is the class in transformers.
    """

    tokenizer: Path
    template: str | None
    special_tokens: dict[str, str]
    tokenizer_class: str = DEFAULT_CLASS


def read_tokenizer_files(
    directory: Path, converted: Path | None = None, *, chat_template: str | None = None
) -> TokenizerFiles:
    """Read the tokenizer files of ``directory``. Raises ``ModelError`` that names the file and the fault.

    ``converted`` is the directory of tokenizer.json, if it is another one; where ``directory`` is a GGUF file, it holds
    the template and the special tokens as well. ``chat_template`` is the file of a template to use instead.
    """
    if converted is not None and directory.is_file():
        directory = converted
    config = _read_optional_json(directory / "tokenizer_config.json")
    special_tokens = _read_special_tokens(directory, config)
    if converted is not None and converted != directory:
        converted_config = _read_optional_json(converted / "tokenizer_config.json")
        # Tokens that the model names itself win over those that the conversion found.
        special_tokens = _read_special_tokens(converted, converted_config) | special_tokens
    return TokenizerFiles(
        tokenizer=_find_tokenizer(converted or directory),
        template=_read_template(directory, config)
        if chat_template is None
        else read_template(Path(chat_template)),
        special_tokens=special_tokens,
        tokenizer_class=str(config.get("tokenizer_class") or DEFAULT_CLASS),
    )


def _find_tokenizer(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist; a model needs this file, or a SentencePiece (tokenizer.model), tiktoken (*.tiktoken) "
            "or tekken (tekken.json) file to convert"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{path} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
    return path


def read_template(path: Path) -> str:
    """Read a chat template. Raises ``ModelError`` that names the file and the fault."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not valid UTF-8: {error}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_template(path)
    source = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):
        template = _choose_template(source, template)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{source}: 'chat_template' must be a string or a list of named templates")
    return template


def _choose_template(source: Path, templates: list[Any]) -> Any:
    for each in templates:
        if not isinstance(each, dict) or "name" not in each or "template" not in each:
            raise ModelError(f"{source}: each entry of 'chat_template' must have 'name' and 'template'")
        if each["name"] == _DEFAULT_TEMPLATE:
            return each["template"]
    return None


def _read_special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    fallback = _read_optional_json(directory / "special_tokens_map.json")
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if value is None:
            value = fallback.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
        elif value is not None:
            raise ModelError(
                f"{directory / 'tokenizer_config.json'}: {name!r} must be a string, not {value!r}"
            )
    return tokens


def _read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
