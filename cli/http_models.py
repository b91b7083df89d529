"""The models of a server, asked over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from ..config import ModelConfig, RequestError
from ..pipeline.models import ModelStatus
from .answerer import ServedModel
from .http_calls import HttpCalls

_Answer = TypeVar("_Answer")


class _Card(msgspec.Struct, frozen=True):
    """What everybody is told of a model; a server of several tells its state too."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    state: str = ""


class _Cards(msgspec.Struct, frozen=True):
    data: list[_Card] = []


class _Statuses(msgspec.Struct, frozen=True):
    data: list[ModelStatus] = []


class _Removed(msgspec.Struct, frozen=True):
    id: str


class HttpModels(HttpCalls):
    """An `AdministersModels`. Use it as an async context."""

    async def models(self) -> Sequence[ServedModel | ModelStatus]:
        cards = (await self._call("GET", f"{self.url}/models", _Cards)).data
        if any(card.state for card in cards):
            try:
                return (await self._call("GET", f"{self.root}/admin/models", _Statuses)).data
            except RequestError:
                pass  # who may not administer it is told what everybody is
        return [ServedModel(card.id, card.max_model_len, card.root) for card in cards]

    async def load(self, model: str | ModelConfig) -> ModelStatus:
        if isinstance(model, str):
            return await self._call("POST", f"{self._at(model)}/load", ModelStatus)
        body = msgspec.to_builtins(model)
        return await self._call("POST", f"{self.root}/admin/models", ModelStatus, body)

    async def unload(self, model: str, timeout_s: float | None) -> ModelStatus:
        body = _limit(timeout_s)
        return await self._call("POST", f"{self._at(model)}/unload", ModelStatus, body)

    async def remove(self, model: str, timeout_s: float | None) -> str:
        return (await self._call("DELETE", self._at(model), _Removed, _limit(timeout_s))).id

    def _at(self, model: str) -> str:
        return f"{self.root}/admin/models/{quote(model, safe='')}"

    async def _call(self, method: str, url: str, kind: type[_Answer], body: Any = None) -> _Answer:
        if method != "GET" and body is None:
            body = {}
        async with self.answer(method, url, body) as response:
            raw = await response.aread()
        try:
            return msgspec.json.decode(raw, type=kind)
        except ValueError:
            raise RequestError(
                f"what {url} answers is not what a server of models says", code="malformed_output"
            ) from None


def _limit(timeout_s: float | None) -> dict[str, float]:
    return {} if timeout_s is None else {"timeout_s": timeout_s}
