"""Embeddings; and what follows from them: scores of pairs, and the order of documents."""

from __future__ import annotations

import base64
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from ....bus.public import EmbedParams
from ....config import RequestError, shown
from ....pipeline.scoring import EmbeddedPrompt
from ...call import Call
from ...server.http import Response, field_error, read_object
from ...serving.embedding import EmbedCall, Prompt, answer_embedded, similarity
from ...serving.fields import engine_priority, read_part
from ...serving.model_names import adapter_of
from ...serving.request_ids import new_id
from ...serving.services import Services
from .bodies import Document, EmbeddingBody, EmbeddingCommon, RerankBody, ScoreBody
from .requests import prompts_of

Fields = TypeVar("Fields", bound=EmbeddingCommon)


class EmbeddingCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def embeddings(self, call: Call) -> Response:
        """Return the vectors of the inputs."""
        fields = await self._read(call, EmbeddingBody)
        prompts = prompts_of(fields.input, "input", may_be_empty=True)
        write = partial(_embeddings, encode=_ENCODINGS[fields.encoding_format])
        return await self._answer(call, fields, "embd", prompts, write)

    async def score(self, call: Call) -> Response:
        """Return the similarity of pairs: one text with each of several, or each with its own."""
        fields = await self._read(call, ScoreBody)
        ones, others = (
            prompts_of(given, name, may_be_empty=True)
            for name, given in (("text_1", fields.text_1), ("text_2", fields.text_2))
        )
        if len(ones) not in (1, len(others)):
            raise field_error(
                "text_1",
                f"has {len(ones)} texts and text_2 has {len(others)}; give one in text_1, "
                "or as many as in text_2",
            )
        write = partial(_scores, ones=len(ones))
        return await self._compare(call, fields, "score", [*ones, *others], write)

    async def rerank(self, call: Call) -> Response:
        """Return documents by their similarity to a query, the most similar first."""
        fields = await self._read(call, RerankBody)
        texts = [_text_of(each, place) for place, each in enumerate(fields.documents or ())]
        if not texts or not fields.query:
            missing = "query" if texts else "documents"
            raise field_error(missing, "is empty; give a text", code="empty_prompt")
        if fields.top_n is not None and fields.top_n < 1:
            raise field_error(
                "top_n", f"is {shown(fields.top_n)}; it must be at least 1, or left out"
            )
        write = partial(
            _ranked, texts=texts if fields.return_documents else None, top_n=fields.top_n
        )
        return await self._compare(call, fields, "rerank", [fields.query, *texts], write)

    async def _read(self, call: Call, kind: type[Fields]) -> Fields:
        most = self._services.config.gateway.max_body_bytes
        return read_part(await read_object(call, most), kind)

    async def _compare(
        self,
        call: Call,
        fields: EmbeddingCommon,
        kind: str,
        prompts: Sequence[Prompt],
        write: Callable[[list[EmbeddedPrompt]], dict[str, Any]],
    ) -> Response:
        """Answer like `_answer`, with zeros as the vector of an empty text that has no tokens: it
        is similar to no other.
        """
        kept = [each for each in prompts if each != ""]
        if kept == prompts or await self._services.tokenizer.token_ids(""):
            return await self._answer(call, fields, kind, prompts, write)
        if not kept:
            raise RequestError("all texts are empty; give at least one", code="empty_prompt")

        def write_all(embedded: list[EmbeddedPrompt]) -> dict[str, Any]:
            zeros = (0.0,) * len(embedded[0].vector)
            empty = EmbeddedPrompt(zeros, 0, embedded[0].weight_version)
            found = iter(embedded)
            return write([next(found) if each != "" else empty for each in prompts])

        return await self._answer(call, fields, kind, kept, write_all)

    async def _answer(
        self,
        call: Call,
        fields: EmbeddingCommon,
        kind: str,
        prompts: Sequence[Prompt],
        write: Callable[[list[EmbeddedPrompt]], dict[str, Any]],
    ) -> Response:
        config = self._services.config
        wanted = EmbedCall(
            id=new_id(f"{kind}-"),
            params=EmbedParams(
                pooling=fields.pooling, normalize=fields.normalize, dimensions=fields.dimensions
            ),
            priority=engine_priority(fields.priority),
            cache_salt=fields.cache_salt,
            adapter=adapter_of(fields.model, config),
            model=fields.model,
            budget_ms=fields.budget_ms,
            truncation=fields.truncate_prompt_tokens,
            truncation_side=fields.truncation_side,
        )
        head = {
            "id": wanted.id,
            "created": int(time.time()),
            "model": wanted.adapter or config.engine.model_name,
        }

        def write_all(embedded: list[EmbeddedPrompt], time: dict[str, Any]) -> dict[str, Any]:
            tokens = sum(each.prompt_tokens for each in embedded)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens} | time
            return head | {"usage": usage} | write(embedded)

        return await answer_embedded(call, self._services, wanted, prompts, write_all)


def _embeddings(
    embedded: list[EmbeddedPrompt], encode: Callable[[tuple[float, ...]], object]
) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": encode(each.vector)}
        for index, each in enumerate(embedded)
    ]
    return {"object": "list", "data": data}


def _scores(embedded: list[EmbeddedPrompt], ones: int) -> dict[str, Any]:
    vectors = [each.vector for each in embedded]
    others = vectors[ones:]
    pairs = zip(vectors[:ones] if ones > 1 else vectors[:1] * len(others), others, strict=True)
    data = [
        {"object": "score", "index": index, "score": similarity(*pair)}
        for index, pair in enumerate(pairs)
    ]
    return {"object": "list", "data": data}


def _ranked(
    embedded: list[EmbeddedPrompt], texts: list[str] | None, top_n: int | None
) -> dict[str, Any]:
    query, *documents = (each.vector for each in embedded)
    scored = [(similarity(query, each), index) for index, each in enumerate(documents)]
    results = [
        {"index": index, "relevance_score": score}
        | ({} if texts is None else {"document": {"text": texts[index]}})
        for score, index in sorted(scored, key=lambda pair: (-pair[0], pair[1]))[:top_n]
    ]
    return {"results": results}


def _text_of(document: str | dict[str, Any], place: int) -> str:
    if isinstance(document, str):
        return document
    return read_part(document, Document, f"documents[{place}]").text


def _base64(vector: tuple[float, ...]) -> str:
    """Return the vector in base64 of float32, little-endian, the form that openai-python reads."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


_ENCODINGS: dict[str, Callable[[tuple[float, ...]], object]] = {
    "float": lambda vector: vector,
    "base64": _base64,
}
