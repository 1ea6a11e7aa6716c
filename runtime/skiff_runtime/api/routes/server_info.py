"""Model list and server information: GET /v1/models, /server_info, /version and /tokenizer_info."""

import dataclasses
import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from skiff_runtime import contract
from skiff_runtime.api.dispatch.service_status import ServiceState, ServiceStatus
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.routes.openapi import error_responses
from skiff_runtime.processes.launch import Launch
from skiff_runtime.version import __version__
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files


class ModelCard(BaseModel):
    """The served model, or one of its LoRA adapters. ``root``: the URI of its files; ``parent``: an adapter's model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


class ModelList(BaseModel):
    """List of the served model and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class ServerInfo(BaseModel):
    """Version, model, configuration (without secrets), capacity and startup times."""

    version: str
    status: ServiceState
    model: dict[str, Any]
    config: dict[str, Any]
    kv_tokens: int
    start_phase_seconds: dict[str, float]


class Version(BaseModel):
    """The version of Skiff."""

    version: str


class TokenizerInfo(BaseModel):
    """The tokenizer's class, special tokens and chat template, as in the model's own tokenizer_config.json.

    Only the tokens and the template that the model has are present.
    """

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    chat_template: str | None = None


def make_server_info_routes(launch: Launch, model: ServedModel, status: ServiceStatus) -> APIRouter:
    """Return the operations that describe the service."""
    router = APIRouter(tags=["service"])
    started = int(time.time())

    def make_card(served: ServedModel) -> ModelCard:
        return ModelCard(
            id=served.name,
            object="model",
            created=started,
            owned_by="skiff",
            max_model_len=served.max_model_len,
            root=served.root,
            parent=served.parent,
        )

    @router.get(contract.PATH_MODELS, summary="List the served model and its adapters")
    async def models() -> ModelList:
        """List the served model and its LoRA adapters in OpenAI's shape."""
        return ModelList(object="list", data=[make_card(each) for each in (model, *model.adapters.values())])

    @router.get(
        contract.PATH_MODELS + "/{name:path}",
        summary="Show the served model or an adapter",
        responses=error_responses(404),
    )
    async def one_model(name: str) -> ModelCard:
        """Show one entry of that list."""
        return make_card(model.choose(name))

    @router.get(contract.PATH_SERVER_INFO, summary="Show version and configuration")
    async def server_info() -> ServerInfo:
        """Show the version, model, configuration, capacity and startup times."""
        description = {
            field: value
            for field, value in dataclasses.asdict(launch.model).items()
            if isinstance(value, str | int | float | list | tuple)
        }
        return ServerInfo(
            version=__version__,
            status=status.state,
            model={"name": model.name, **description},
            config=launch.config.public_fields(),
            kv_tokens=status.kv_tokens,
            start_phase_seconds=status.phase_seconds(),
        )

    @router.get(contract.PATH_VERSION, summary="Show the version")
    async def version() -> Version:
        """Show the version in vLLM's format."""
        return Version(version=__version__)

    @router.get(contract.PATH_TOKENIZER_INFO, summary="Show the tokenizer", response_model_exclude_none=True)
    def tokenizer_info() -> TokenizerInfo:
        """Show the tokenizer's class, special tokens and chat template in vLLM's format.

        The files are read again, on a thread: few services are ever asked, and a template may be large.
        """
        files = read_tokenizer_files(
            launch.model.path, launch.model.tokenizer_path, chat_template=launch.config.chat_template
        )
        return TokenizerInfo(
            tokenizer_class=files.tokenizer_class,
            model_max_length=model.max_model_len,
            chat_template=files.template,
            **files.special_tokens,
        )

    return router
