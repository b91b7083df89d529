"""`/api/embed` and `/api/embeddings`."""

from __future__ import annotations

from typing import Any, TypeVar

from ....bus.public import EmbedParams
from ....pipeline.scoring import EmbeddedPrompt
from ....telemetry import now_ns
from ...call import Call
from ...server.http import JsonResponse, Response, read_object
from ...serving.embedding import EmbedCall, Prompt, answer_embedded
from ...serving.fields import engine_priority, read_part
from ...serving.model_names import adapter_of
from ...serving.request_ids import new_id
from ...serving.services import Services
from .bodies import EmbedBody, EmbeddingCommon, EmbeddingsBody
from .requests import model_of

Fields = TypeVar("Fields", bound=EmbeddingCommon)


class EmbeddingCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def embed(self, call: Call) -> Response:
        """Return the vectors of texts, of length 1. A text that is too long loses its end."""
        fields = await self._read(call, EmbedBody)
        texts = [fields.input] if isinstance(fields.input, str) else fields.input
        head = {"model": fields.model or self._services.config.engine.model_name}
        if not any(texts):
            return JsonResponse(head | {"embeddings": []})

        def write(embedded: list[EmbeddedPrompt], time: dict[str, Any]) -> dict[str, Any]:
            return head | {
                "embeddings": [each.vector for each in embedded],
                "total_duration": max(1, now_ns() - call.at_ns),
                "load_duration": 0,
                "prompt_eval_count": sum(each.prompt_tokens for each in embedded),
            }

        params = EmbedParams(normalize=True, dimensions=fields.dimensions or None)
        prompts = [await self._cut(text) if fields.truncate else text for text in texts]
        wanted = self._wanted(fields, params)
        return await answer_embedded(call, self._services, wanted, prompts, write)

    async def embeddings(self, call: Call) -> Response:
        """Return the vector of one text, of any length."""
        fields = await self._read(call, EmbeddingsBody)
        if not fields.prompt:
            return JsonResponse({"embedding": []})

        def write(embedded: list[EmbeddedPrompt], time: dict[str, Any]) -> dict[str, Any]:
            return {"embedding": embedded[0].vector}

        wanted = self._wanted(fields, EmbedParams(normalize=False))
        prompts = [await self._cut(fields.prompt)]
        return await answer_embedded(call, self._services, wanted, prompts, write)

    async def _read(self, call: Call, kind: type[Fields]) -> Fields:
        config = self._services.config
        fields = read_part(await read_object(call, config.gateway.max_body_bytes), kind)
        await self._services.served.check(model_of(fields.model, config), call.caller)
        return fields

    def _wanted(self, fields: EmbeddingCommon, params: EmbedParams) -> EmbedCall:
        config = self._services.config
        return EmbedCall(
            id=new_id("embd-"),
            params=params,
            priority=engine_priority(fields.priority),
            cache_salt=fields.cache_salt,
            adapter=adapter_of(model_of(fields.model, config), config),
            model=fields.model,
            budget_ms=fields.budget_ms,
        )

    async def _cut(self, text: str) -> Prompt:
        """Return a text, or the first tokens of one that is too long, with its special end."""
        most, words = await self._services.length.get(), self._services.tokenizer
        # A token has a byte at least, and few special ones are added.
        if len(text) * 4 < most // 2:
            return text
        token_ids = await words.token_ids(text)
        if len(token_ids) <= most:
            return text
        ends = (await words.required()).special_name(token_ids[-1]) != ""
        return token_ids[: most - ends] + token_ids[len(token_ids) - ends :]
