"""A pipeline, asked over its bus."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..bus.public import Completion, CompletionChunk
from ..config import BusError, RequestError
from ..pipeline.client import BusClient
from .answerer import AnswerPiece, ServedModel
from .terminal import complain


class BusAnswerer:
    """An `Answerer`."""

    def __init__(self, client: BusClient) -> None:
        self._client = client
        self._complained = False

    async def check(self) -> str:
        if trouble := await self._client.trouble():
            if not await self._client.reports():
                raise BusError(trouble)
            if not self._complained:
                complain(f"waiting: {trouble}")
            self._complained = True
        return ""

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        told = 0
        async with aclosing(self._client.submit(request)) as outputs:
            async for output in outputs:
                if isinstance(output, CompletionChunk):
                    told += len(output.text)
                    yield AnswerPiece(output.text)
                else:
                    if output.samples and (rest := output.samples[0].text[told:]):
                        yield AnswerPiece(rest)
                    _check(output)

    async def cancel(self, request_id: str) -> None:
        await self.check()
        await self._client.cancel(request_id)

    async def models(self) -> list[ServedModel]:
        await self.check()
        return [
            ServedModel(model.id, model.max_model_len or None, model.path)
            for model in await self._client.models()
            if model.takes_requests
        ]


def _check(completion: Completion) -> None:
    if completion.error is not None:
        raise RequestError(completion.error.message, code=completion.error.code)
