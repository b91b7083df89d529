"""OpenAI's HTTP interface, with what vLLM's has beyond it; docs/openai.md lists it."""

from __future__ import annotations

from ...call import Call
from ...caller import Needed
from ...server.http import Endpoint, Response
from ...serving.services import Services
from ..routes import PolicyRoute
from .bodies import CallName
from .embeddings import EmbeddingCalls
from .errors import in_openai_words
from .generate import GenerationCalls
from .info import AdapterCalls, ModelInfoCalls
from .render import RenderCalls
from .responses import ID_PREFIX, ConversationCalls, ResponseCalls, upgrade
from .sessions import SessionCalls


def openai_routes(
    services: Services, info: ModelInfoCalls, responses: ResponseCalls
) -> list[PolicyRoute]:
    """Return the endpoints."""
    generation = GenerationCalls(services)
    embeddings = EmbeddingCalls(services)
    render = RenderCalls(services)
    adapters = AdapterCalls(services)
    sessions = SessionCalls(services)
    stored = responses.stored.conversations
    conversations = ConversationCalls(services, stored, responses.resolved)

    def route(
        where: str, endpoint: Endpoint, of: CallName = "completions", needed: Needed = "generate"
    ) -> PolicyRoute:
        return PolicyRoute(where, needed, in_openai_words(endpoint, of))

    def by_id(of_generation: Endpoint, of_responses: Endpoint) -> Endpoint:
        """The id of a stream may be a response's."""

        async def answer(call: Call) -> Response:
            is_response = call.params["stream"].startswith(ID_PREFIX)
            return await (of_responses if is_response else of_generation)(call)

        return answer

    stream = by_id(generation.stream, responses.stream)
    cancel = by_id(generation.cancel, responses.end)
    return [
        route("POST /v1/completions", generation.completions),
        route("POST /v1/chat/completions", generation.chat, "chat"),
        route("POST /inference/v1/generate", generation.tokens, "generate"),
        route("POST /v1/completions/render", render.completions),
        route("POST /v1/completions/derender", render.text_of_tokens),
        route("POST /v1/chat/completions/render", render.chat, "chat"),
        route("POST /v1/chat/completions/derender", render.chat_of_tokens, "chat"),
        route("GET /v1/streams/{stream}", stream),
        route("DELETE /v1/streams/{stream}", cancel),
        route("POST /v1/streams/{stream}/cancel", cancel),
        route("POST /v1/responses", responses.create, "responses"),
        route("GET /v1/responses", upgrade, "responses"),
        route("POST /v1/responses/input_tokens", responses.input_tokens, "responses"),
        route("POST /v1/responses/compact", responses.compact, "responses"),
        route("GET /v1/responses/{response_id}", responses.retrieve, "responses"),
        route("DELETE /v1/responses/{response_id}", responses.delete, "responses"),
        route("POST /v1/responses/{response_id}/cancel", responses.cancel, "responses"),
        route("GET /v1/responses/{response_id}/input_items", responses.items, "responses"),
        route("POST /v1/conversations", conversations.create, "responses"),
        route("GET /v1/conversations/{conversation_id}", conversations.retrieve, "responses"),
        route("POST /v1/conversations/{conversation_id}", conversations.update, "responses"),
        route("DELETE /v1/conversations/{conversation_id}", conversations.delete, "responses"),
        route("GET /v1/conversations/{conversation_id}/items", conversations.items, "responses"),
        route(
            "POST /v1/conversations/{conversation_id}/items", conversations.add_items, "responses"
        ),
        route(
            "GET /v1/conversations/{conversation_id}/items/{item_id}",
            conversations.item,
            "responses",
        ),
        route(
            "DELETE /v1/conversations/{conversation_id}/items/{item_id}",
            conversations.delete_item,
            "responses",
        ),
        route("GET /v1/models", info.models, needed="read"),
        route("GET /v1/models/{model:path}", info.model, needed="read"),
        route("POST /tokenize", info.tokenize),
        route("POST /detokenize", info.detokenize),
        route("GET /tokenizer_info", info.tokenizer_info, needed="read"),
        route("GET /version", info.version, needed="nothing"),
        route("POST /v1/embeddings", embeddings.embeddings, "embeddings"),
        route("POST /score", embeddings.score, "score"),
        route("POST /v1/score", embeddings.score, "score"),
        route("POST /rerank", embeddings.rerank, "rerank"),
        route("POST /v1/rerank", embeddings.rerank, "rerank"),
        route("POST /v1/kv_sessions/{session:path}", sessions.change, "kv_sessions"),
        route("POST /v1/load_lora_adapter", adapters.load, needed="weights"),
        route("POST /v1/unload_lora_adapter", adapters.unload, needed="weights"),
    ]


__all__ = ["ModelInfoCalls", "ResponseCalls", "openai_routes"]
