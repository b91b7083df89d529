"""OpenAI's HTTP interface, with what vLLM's has beyond it; docs/openai.md lists it."""

from __future__ import annotations

from ...call import Call
from ...caller import Needed
from ...server.http import Endpoint, Response
from ...serving.services import Services
from ..routes import PolicyRoute
from .call_bodies import CallName
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
    return [
        *_generation_routes(generation),
        *_render_routes(RenderCalls(services)),
        *_stream_routes(generation, responses),
        *_response_routes(responses),
        *_conversation_routes(services, responses),
        *_info_routes(info),
        *_embedding_routes(EmbeddingCalls(services)),
        *_state_routes(SessionCalls(services), AdapterCalls(services)),
    ]


def _route(
    where: str, endpoint: Endpoint, of: CallName = "completions", needed: Needed = "generate"
) -> PolicyRoute:
    return PolicyRoute(where, needed, in_openai_words(endpoint, of))


def _generation_routes(generation: GenerationCalls) -> list[PolicyRoute]:
    return [
        _route("POST /v1/completions", generation.completions),
        _route("POST /v1/chat/completions", generation.chat, "chat"),
        _route("POST /inference/v1/generate", generation.tokens, "generate"),
    ]


def _render_routes(render: RenderCalls) -> list[PolicyRoute]:
    return [
        _route("POST /v1/completions/render", render.completions),
        _route("POST /v1/completions/derender", render.text_of_tokens),
        _route("POST /v1/chat/completions/render", render.chat, "chat"),
        _route("POST /v1/chat/completions/derender", render.chat_of_tokens, "chat"),
    ]


def _stream_routes(generation: GenerationCalls, responses: ResponseCalls) -> list[PolicyRoute]:
    """Return the endpoints of streams that were begun before; one may be a response's."""

    def by_id(of_generation: Endpoint, of_responses: Endpoint) -> Endpoint:
        async def answer(call: Call) -> Response:
            is_response = call.params["stream"].startswith(ID_PREFIX)
            return await (of_responses if is_response else of_generation)(call)

        return answer

    cancel = by_id(generation.cancel, responses.end)
    return [
        _route("GET /v1/streams/{stream}", by_id(generation.stream, responses.stream)),
        _route("DELETE /v1/streams/{stream}", cancel),
        _route("DELETE /v1/streams", generation.cancel_keyed),
        _route("POST /v1/streams/{stream}/cancel", cancel),
    ]


def _response_routes(responses: ResponseCalls) -> list[PolicyRoute]:
    def route(where: str, endpoint: Endpoint) -> PolicyRoute:
        method, _, path = where.partition(" ")
        return _route(f"{method} /v1/responses{path}", endpoint, "responses")

    return [
        route("POST ", responses.create),
        route("GET ", upgrade),
        route("POST /input_tokens", responses.input_tokens),
        route("POST /compact", responses.compact),
        route("POST /render", responses.render),
        route("GET /{response_id}", responses.retrieve),
        route("DELETE /{response_id}", responses.delete),
        route("POST /{response_id}/cancel", responses.cancel),
        route("GET /{response_id}/input_items", responses.items),
    ]


def _conversation_routes(services: Services, responses: ResponseCalls) -> list[PolicyRoute]:
    stored = responses.stored.conversations
    conversations = ConversationCalls(services, stored, responses.resolved)

    def route(where: str, endpoint: Endpoint) -> PolicyRoute:
        method, _, path = where.partition(" ")
        return _route(f"{method} /v1/conversations{path}", endpoint, "responses")

    one, item = "/{conversation_id}", "/{conversation_id}/items/{item_id}"
    return [
        route("POST ", conversations.create),
        route(f"GET {one}", conversations.retrieve),
        route(f"POST {one}", conversations.update),
        route(f"DELETE {one}", conversations.delete),
        route(f"GET {one}/items", conversations.items),
        route(f"POST {one}/items", conversations.add_items),
        route(f"GET {item}", conversations.item),
        route(f"DELETE {item}", conversations.delete_item),
    ]


def _info_routes(info: ModelInfoCalls) -> list[PolicyRoute]:
    return [
        _route("GET /v1/models", info.models, needed="read"),
        _route("GET /v1/models/{model:path}", info.model, needed="read"),
        _route("POST /tokenize", info.tokenize),
        _route("POST /detokenize", info.detokenize),
        _route("GET /tokenizer_info", info.tokenizer_info, needed="read"),
        _route("GET /version", info.version, needed="nothing"),
    ]


def _embedding_routes(embeddings: EmbeddingCalls) -> list[PolicyRoute]:
    return [
        _route("POST /v1/embeddings", embeddings.embeddings, "embeddings"),
        _route("POST /score", embeddings.score, "score"),
        _route("POST /v1/score", embeddings.score, "score"),
        _route("POST /rerank", embeddings.rerank, "rerank"),
        _route("POST /v1/rerank", embeddings.rerank, "rerank"),
    ]


def _state_routes(sessions: SessionCalls, adapters: AdapterCalls) -> list[PolicyRoute]:
    """Return the endpoints that change a state of the model's."""
    return [
        _route("POST /v1/kv_sessions/{session:path}", sessions.change, "kv_sessions"),
        _route("POST /finish_session", sessions.finish, "kv_sessions"),
        _route("POST /v1/load_lora_adapter", adapters.load, needed="weights"),
        _route("POST /v1/unload_lora_adapter", adapters.unload, needed="weights"),
    ]


__all__ = ["ModelInfoCalls", "ResponseCalls", "openai_routes"]
