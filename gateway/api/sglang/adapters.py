"""SGLang's calls about LoRA adapters."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....config import NanoInferenceError
from ....pipeline.client import BusClient
from ...server.http import JsonResponse, error_response, read_object
from ...serving.fields import read_part
from ...serving.lane_state import ServedModels

_MOST_BYTES = 1 << 16


class LoadBody(msgspec.Struct, frozen=True):
    """LoadLoRAAdapterReqInput."""

    # The engine has no pool of adapters beside those that are loaded.
    HARMLESS: ClassVar = frozenset({"pinned", "added_tokens_config"})

    lora_name: str
    lora_path: str


class UnloadBody(msgspec.Struct, frozen=True):
    """UnloadLoRAAdapterReqInput."""

    lora_name: str


class AdapterCalls:
    """The endpoints."""

    def __init__(self, engine: BusClient, served: ServedModels) -> None:
        self._engine = engine
        self._served = served

    async def load(self, request: Request) -> Response:
        """A name that is taken gets new weights."""
        body = read_part(await read_object(request, _MOST_BYTES), LoadBody)
        try:
            await self._engine.load_adapter(body.lora_name, body.lora_path)
        except NanoInferenceError as error:
            return await self._failed(error)
        await self._served.wait_for(body.lora_name, loaded=True)
        return await self._succeeded()

    async def unload(self, request: Request) -> Response:
        """Requests in flight that have it finish first."""
        body = read_part(await read_object(request, _MOST_BYTES), UnloadBody)
        try:
            await self._engine.unload_adapter(body.lora_name)
        except NanoInferenceError as error:
            return await self._failed(error)
        await self._served.wait_for(body.lora_name, loaded=False)
        return await self._succeeded()

    async def _loaded(self) -> dict[str, str]:
        return {each.id: each.folder for each in await self._served.adapters()}

    async def _succeeded(self) -> Response:
        told = {"success": True, "error_message": "", "loaded_adapters": await self._loaded()}
        return JsonResponse(told)

    async def _failed(self, error: NanoInferenceError) -> Response:
        told = {"success": False, "error_message": error.message}
        return error_response(error, told | {"loaded_adapters": await self._loaded()})
