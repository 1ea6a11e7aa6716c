"""LoRA adapters at run time: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies."""

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from skiff_runtime import contract
from skiff_runtime.api.dispatch.adapter_manager import AdapterManager
from skiff_runtime.api.http.auth import get_principal
from skiff_runtime.api.routes.json_body import BoundedRoute, JsonBody
from skiff_runtime.api.routes.openapi import error_responses
from skiff_runtime.api.schemas.request_bodies import StrictModel

AdapterName = Annotated[str, Field(min_length=1, max_length=512)]
AdapterUri = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterBody(StrictModel):
    """Body of POST /v1/load_lora_adapter. ``lora_path``: a directory or URI; ``load_inplace``: the name may be taken."""

    lora_name: AdapterName
    lora_path: AdapterUri
    load_inplace: bool | None = None


class UnloadAdapterBody(StrictModel):
    """Body of POST /v1/unload_lora_adapter. ``lora_int_id`` is accepted, as in vLLM, and not read."""

    lora_name: AdapterName
    lora_int_id: int | None = None


def make_adapter_routes(adapters: AdapterManager) -> APIRouter:
    """Return the operations that load and unload adapters."""
    router = APIRouter(tags=["administration"], route_class=BoundedRoute)

    @router.post(
        contract.PATH_LOAD_ADAPTER,
        summary="Load a LoRA adapter",
        response_class=PlainTextResponse,
        responses=error_responses(400, 403, 404, 408, 413, 429, 500, 503),
    )
    async def load_lora_adapter(body: JsonBody[LoadAdapterBody], request: Request) -> PlainTextResponse:
        """Fetch an adapter if needed, check it, and let requests choose it by its name as the model. Needs an admin key."""
        get_principal(request.scope).require_admin()
        await adapters.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(
        contract.PATH_UNLOAD_ADAPTER,
        summary="Unload a LoRA adapter",
        response_class=PlainTextResponse,
        responses=error_responses(400, 403, 404, 408, 413, 500, 503),
    )
    async def unload_lora_adapter(body: JsonBody[UnloadAdapterBody], request: Request) -> PlainTextResponse:
        """Refuse further requests of an adapter; those that run finish. Needs an admin key."""
        get_principal(request.scope).require_admin()
        adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
