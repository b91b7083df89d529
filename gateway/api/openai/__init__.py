"""OpenAI's HTTP interface, with what vLLM's has beyond it; docs/openai.md lists it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ...policy.chain import PolicyRoute
from ...policy.document import Needed
from ...serving.services import Services
from .bodies import CallName
from .embeddings import EmbeddingCalls
from .errors import Endpoint, in_openai_words
from .generate import GenerationCalls
from .info import AdapterCalls, ModelInfoCalls
from .responses import ID_PREFIX, ResponseCalls


def openai_routes(
    services: Services, info: ModelInfoCalls, responses: ResponseCalls
) -> list[PolicyRoute]:
    """Return the endpoints."""
    generation = GenerationCalls(services)
    embeddings = EmbeddingCalls(services)
    adapters = AdapterCalls(services)

    def route(
        path: str,
        endpoint: Endpoint,
        method: str,
        call: CallName = "completions",
        needed: Needed = "generate",
    ) -> PolicyRoute:
        return PolicyRoute(path, in_openai_words(endpoint, call), needed=needed, methods=[method])

    def by_id(of_generation: Endpoint, of_responses: Endpoint) -> Endpoint:
        """The id of a stream may be a response's."""

        async def answer(request: Request) -> Response:
            is_response = request.path_params["stream"].startswith(ID_PREFIX)
            return await (of_responses if is_response else of_generation)(request)

        return answer

    stream = by_id(generation.stream, responses.stream)
    cancel = by_id(generation.cancel, responses.end)
    return [
        route("/v1/completions", generation.completions, "POST"),
        route("/v1/chat/completions", generation.chat, "POST", "chat"),
        route("/inference/v1/generate", generation.tokens, "POST", "generate"),
        route("/v1/streams/{stream}", stream, "GET"),
        route("/v1/streams/{stream}", cancel, "DELETE"),
        route("/v1/streams/{stream}/cancel", cancel, "POST"),
        route("/v1/responses", responses.create, "POST", "responses"),
        route("/v1/responses/input_tokens", responses.input_tokens, "POST", "responses"),
        route("/v1/responses/{response_id}", responses.retrieve, "GET", "responses"),
        route("/v1/responses/{response_id}", responses.delete, "DELETE", "responses"),
        route("/v1/responses/{response_id}/cancel", responses.cancel, "POST", "responses"),
        route("/v1/responses/{response_id}/input_items", responses.items, "GET", "responses"),
        route("/v1/models", info.models, "GET", needed="read"),
        route("/v1/models/{model:path}", info.model, "GET", needed="read"),
        route("/tokenize", info.tokenize, "POST"),
        route("/detokenize", info.detokenize, "POST"),
        route("/tokenizer_info", info.tokenizer_info, "GET", needed="read"),
        route("/version", info.version, "GET", needed="nothing"),
        route("/v1/embeddings", embeddings.embeddings, "POST", "embeddings"),
        route("/score", embeddings.score, "POST", "score"),
        route("/v1/score", embeddings.score, "POST", "score"),
        route("/rerank", embeddings.rerank, "POST", "rerank"),
        route("/v1/rerank", embeddings.rerank, "POST", "rerank"),
        route("/v1/load_lora_adapter", adapters.load, "POST", needed="weights"),
        route("/v1/unload_lora_adapter", adapters.unload, "POST", needed="weights"),
    ]


__all__ = ["ModelInfoCalls", "ResponseCalls", "openai_routes"]
