"""Which models a caller may use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ...bus.public import GenerateRequest
from ...config import RequestError
from ..serving.origin import Origin
from .caller import Caller
from .chain import PolicyCall


class AllowedModels:
    """Refuses models that a caller may not use, as if they were not there."""

    def __init__(self, default: str) -> None:
        """`default`: the name of the model of requests that name none."""
        self._default = default

    async def check(self, call: PolicyCall) -> None:
        if call.needed != "nothing":
            check_allowed(call.caller, self._default)

    @asynccontextmanager
    async def admit(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[None]:
        for request in requests:
            check_allowed(origin.caller, request.model or self._default)
        yield


def may_use(caller: Caller, model: str) -> bool:
    """Return whether a caller may use a model or an adapter."""
    return caller.models is None or model in caller.models


def check_allowed(caller: Caller, model: str) -> None:
    """Raises RequestError `model_not_found` when a caller may not use a model."""
    if not may_use(caller, model):
        raise RequestError(
            f"there is no model {model!r:.80} for this key; /v1/models lists those that there are",
            code="model_not_found",
        )
