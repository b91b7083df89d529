"""vLLM's calls about LoRA adapters."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....bus.weights import InFlight
from ....config import AdapterError
from ....pipeline.client import BusClient
from ...policy.chain import PolicyRoute
from ...server.http import read_object
from ...serving.fields import read_part
from ...serving.lane_state import ServedModels
from .errors import in_openai_words

_MOST_BYTES = 1 << 16


class LoadBody(msgspec.Struct, frozen=True):
    """LoadLoRAAdapterRequest; `in_flight` is not vLLM's."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    in_flight: InFlight = "keep"


class UnloadBody(msgspec.Struct, frozen=True):
    """UnloadLoRAAdapterRequest; `in_flight` is not vLLM's."""

    lora_name: str
    lora_int_id: int | None = None
    in_flight: InFlight = "keep"


class AdapterCalls:
    """The endpoints."""

    def __init__(self, engine: BusClient, served: ServedModels) -> None:
        self._engine = engine
        self._served = served

    async def load(self, request: Request) -> Response:
        body = read_part(await read_object(request, _MOST_BYTES), LoadBody)
        name = body.lora_name
        if not body.load_inplace and name in [each.id for each in await self._served.adapters()]:
            raise AdapterError(
                f"the adapter {name!r:.80} is loaded already; give it new weights with "
                "load_inplace: true",
                code="adapter_loaded",
            )
        await self._engine.load_adapter(name, body.lora_path, in_flight=body.in_flight)
        await self._served.wait_for(name, loaded=True)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(self, request: Request) -> Response:
        body = read_part(await read_object(request, _MOST_BYTES), UnloadBody)
        await self._engine.unload_adapter(body.lora_name, in_flight=body.in_flight)
        await self._served.wait_for(body.lora_name, loaded=False)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def adapter_routes(engine: BusClient, served: ServedModels) -> list[PolicyRoute]:
    """Their routes."""
    calls = AdapterCalls(engine, served)
    return [
        PolicyRoute(
            path, in_openai_words(endpoint, "completions"), needed="weights", methods=["POST"]
        )
        for path, endpoint in (
            ("/v1/load_lora_adapter", calls.load),
            ("/v1/unload_lora_adapter", calls.unload),
        )
    ]
