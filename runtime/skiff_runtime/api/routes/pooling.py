"""The routes that document the endpoints of embeddings and scores, and are never called: see ``generation_endpoint``."""

from typing import Any, Final

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from skiff_runtime import contract
from skiff_runtime.api.routes.generation_endpoint import document_headers
from skiff_runtime.api.routes.openapi import DEFAULT_RESPONSES, error_responses
from skiff_runtime.api.schemas.pooling_bodies import (
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)

RERANK_PATHS: Final = (contract.PATH_RERANK, contract.PATH_RERANK_BARE, contract.PATH_RERANK_V2)
"""The same operation where Jina's, vLLM's and Cohere's clients expect it."""
SCORE_PATHS: Final = (contract.PATH_SCORE, contract.PATH_SCORE_BARE)


def _document_response(full: type[BaseModel]) -> dict[str, Any]:
    return {"response_class": Response, "responses": {200: {**DEFAULT_RESPONSES[200], "model": full}}}


def make_pooling_routes() -> APIRouter:
    """Return the routes."""
    router = APIRouter(
        tags=["embeddings"],
        dependencies=[Depends(document_headers)],
        responses=error_responses(400, 404, 408, 413, 429, 500, 503, 504),
    )

    @router.post(
        contract.PATH_EMBEDDINGS, summary="Compute embeddings", **_document_response(EmbeddingResponse)
    )
    async def embeddings(body: EmbeddingRequest) -> None:
        """Compute a vector for each input."""

    for path in RERANK_PATHS:

        @router.post(
            path,
            summary="Order documents by their relevance",
            operation_id=f"rerank{path.replace('/', '_')}",
            **_document_response(RerankResponse),
        )
        async def rerank(body: RerankRequest) -> None:
            """Score each document by its relevance to the query, and return the best ones."""

    for path in SCORE_PATHS:

        @router.post(
            path,
            summary="Score pairs of texts",
            operation_id=f"score{path.replace('/', '_')}",
            **_document_response(ScoreResponse),
        )
        async def score(body: ScoreRequest) -> None:
            """Score one text with each of several, or the texts of two lists pair by pair."""

    return router
