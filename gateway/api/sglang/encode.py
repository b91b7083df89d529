"""`/encode`: the vectors of texts or tokens, as SGLang's EmbeddingReqInput asks for them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....bus.public import EmbedParams
from ....config import Config, Int64, RequestError
from ....pipeline.scoring import EmbeddedPrompt
from ...server.http import answer_while_connected, convert
from ...serving.embedding import EmbedCall, Prompt, embed_all, worked_out
from ...serving.fields import read_part
from ...serving.origin import origin_of
from ...serving.submissions import Submissions
from ...serving.tenants import tenant_of
from ...serving.words import LazyWords
from .fields import read_sglang_object


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


class Encoding:
    """The endpoint."""

    def __init__(self, submissions: Submissions, config: Config, words: LazyWords) -> None:
        self._submissions = submissions
        self._config = config
        self._words = words

    async def encode(self, request: Request) -> Response:
        """Answers a text with an object, and a list with a list of them."""
        found = await read_sglang_object(request, self._config)
        body = read_part(found, EncodeBody)
        prompts, batch = _prompts(body)
        if len(prompts) > (most := self._config.gateway.max_prompts):
            raise RequestError(
                f"the call has {len(prompts)} inputs, and {most} are taken (gateway.max_prompts); "
                "send several calls",
                code="too_many_prompts",
            )
        origin = origin_of(request, tenant_of(request), body.budget_ms)
        call = EmbedCall(
            id=body.rid or uuid.uuid4().hex,
            params=EmbedParams(dimensions=body.dimensions),
            priority=body.priority,
        )
        ids = [each.request_id for each in call.requests(prompts, origin.tenant)]

        async def work() -> Response:
            embedded = await embed_all(self._submissions, origin, call, prompts, lower_first=False)
            written = await worked_out(self._words, embedded, partial(_write, ids, embedded, batch))
            return Response(written, media_type="application/json")

        return await answer_while_connected(request, work)


def _prompts(body: EncodeBody) -> tuple[list[Prompt], bool]:
    """The inputs, and whether they came as a list."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give one of text and input_ids", code="invalid_prompt")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        return _some(list(body.text)), True
    ids = body.input_ids or []
    if ids and isinstance(ids[0], list):
        return _some(list(convert(ids, list[tuple[int, ...]], "input_ids"))), True
    return _some([convert(ids, tuple[int, ...], "input_ids")] if ids else []), False


def _some(prompts: Sequence[Prompt]) -> list[Prompt]:
    if not prompts:
        raise RequestError("there is nothing to encode; give a text", code="empty_prompt")
    return list(prompts)


def _write(ids: Sequence[str], embedded: Sequence[EmbeddedPrompt], batch: bool) -> bytes:
    answers: list[dict[str, Any]] = [
        {
            "embedding": each.vector,
            "meta_info": {"id": name, "prompt_tokens": each.prompt_tokens},
        }
        for name, each in zip(ids, embedded, strict=True)
    ]
    return msgspec.json.encode(answers if batch else answers[0])
