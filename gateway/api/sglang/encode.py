"""`/encode`: the vectors of texts or tokens, as SGLang's EmbeddingReqInput."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....bus.public import EmbedParams
from ....config import Int64
from ....pipeline.scoring import EmbeddedPrompt
from ...serving.embedding import EmbedCall, answer_embedded
from ...serving.fields import read_part
from ...serving.services import Services
from .fields import read_sglang_object
from .requests import read_prompts


class EncodeBody(msgspec.Struct, frozen=True):
    """SGLang's EmbeddingReqInput."""

    # They say how to route, log or trace a request.
    HARMLESS: ClassVar = frozenset(
        {"log_metrics", "background", "routing_key", "external_trace_header"}
    )

    rid: str | None = None
    text: str | list[str] | None = None
    input_ids: list[Int64 | list[Int64]] | None = None
    dimensions: Int64 | None = None
    priority: Int64 = 0
    # Not SGLang's.
    budget_ms: float | None = None


async def encode(services: Services, request: Request) -> Response:
    """Answer a text with an object, and a list with a list of objects."""
    found = await read_sglang_object(request, services.config)
    body = read_part(found, EncodeBody)
    prompts, batch = read_prompts(body.text, body.input_ids)
    call = EmbedCall(
        id=body.rid or uuid.uuid4().hex,
        params=EmbedParams(dimensions=body.dimensions),
        priority=body.priority,
    )

    def write(embedded: list[EmbeddedPrompt]) -> Any:
        ids = [each.request_id for each in call.requests(prompts, "")]
        answers = [
            {
                "embedding": each.vector,
                "meta_info": {"id": name, "prompt_tokens": each.prompt_tokens},
            }
            for name, each in zip(ids, embedded, strict=True)
        ]
        return answers if batch else answers[0]

    return await answer_embedded(
        request, services, call, prompts, write, budget_ms=body.budget_ms, lower_first=False
    )
