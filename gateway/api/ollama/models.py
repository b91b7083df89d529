"""The models of a gateway, as Ollama lists and shows them; loading and unloading by its calls."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Protocol

import anyio
import anyio.to_thread
import msgspec

from ....config import NanoInferenceError, RequestError
from ....pipeline.models import facts_of
from ....text.model_folder import folder_of, read_json
from ...call import Call
from ...caller import Caller
from ...policy.keys import check_scope
from ...server.http import (
    JsonResponse,
    LineStream,
    Response,
    SendEvent,
    connected,
    field_error,
    read_object,
)
from ...serving.fields import read_part
from ...serving.services import Services
from ..routes import NO_LOADING, PolicyRoute
from .bodies import ModelBody, PullBody, ShowBody
from .requests import LATEST, model_of

INTERFACE_VERSION = "0.13.0"
"""The version of Ollama whose interface this is. Clients compare it."""

Entry = dict[str, Any]
Card = dict[str, Any]
"""A model's card in OpenAI's form, with `id`, `created`, `parent` and `max_model_len`."""

_MOST_BYTES = 1 << 16
_NEVER = "9999-12-31T23:59:59Z"
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""Facts of a model by GGUF's names, with their fields in config.json."""


class Manager(Protocol):
    """Loads and unloads models by their names. Methods raise NanoInferenceError."""

    async def entries(self, caller: Caller) -> list[Entry]:
        """Return the entries of all models that a caller may use."""

    async def load(self, call: Call, name: str) -> None:
        """Load a model, if it is not loaded."""

    async def unload(self, call: Call, name: str, *, remove: bool = False) -> None:
        """Unload a model; with `remove` take it out of the deployment."""


class ModelCalls:
    """The endpoints about a model, and the entries of it and its adapters.

    Attributes:
        manager: Loads and unloads models; that of one model refuses.
    """

    def __init__(
        self, services: Services, cards: Callable[[Caller], Awaitable[list[Card]]]
    ) -> None:
        """`cards`: returns the cards of the model and its adapters that a caller may use."""
        self._services = services
        self._cards = cards
        self.manager: Manager = OnlyModel(self)

    async def entries(self, caller: Caller) -> list[Entry]:
        """Return the entries of the model and its adapters that a caller may use.

        An entry of a loaded model has a size above 0.
        """
        facts, config = await self._facts(), await self._config()
        entries: list[Entry] = []
        for card in await self._cards(caller):
            name, created = card["id"], datetime.fromtimestamp(card["created"], UTC)
            tagged = name if ":" in name else f"{name}{LATEST}"
            entries.append(
                {
                    "name": tagged,
                    "model": tagged,
                    "modified_at": _written(created),
                    "size": facts["weight_bytes"],
                    # Nothing here is found by a digest, and clients tell models apart by it.
                    "digest": hashlib.sha256(name.encode()).hexdigest(),
                    "details": _details(facts, config, card),
                }
            )
        return entries

    async def check(self, call: Call, name: str) -> None:
        """Raises RequestError for a name of no model here."""
        await self._services.served.check(model_of(name, self._services.config), call.caller)

    async def unload(self, call: Call, name: str) -> None:
        """Unload a model for a caller who may.

        Raises:
            NanoInferenceError: As `Manager.unload`; insufficient_scope.
        """
        check_scope(call.caller, "admin")
        await self.manager.unload(call, name)

    async def show(self, call: Call) -> Response:
        body = read_part(await read_object(call, _MOST_BYTES), ShowBody)
        name = body.model or body.name
        await self.check(call, name)
        wanted = model_of(name, self._services.config) or self._services.served.default
        own = (wanted, self._services.served.default)
        cards = {card["id"]: card for card in await self._cards(call.caller)}
        card = next(cards[each] for each in own if each in cards)
        facts, config = await self._facts(), await self._config()
        text = config.get("text_config") or config
        kind = str(config.get("model_type", ""))
        information = {
            "general.architecture": kind,
            "general.basename": card["id"],
            "general.parameter_count": facts["parameters"],
            f"{kind}.context_length": card["max_model_len"],
        }
        information |= {
            f"{kind}.{ours}": text[theirs] for ours, theirs in _SIZES.items() if theirs in text
        }
        created = datetime.fromtimestamp(card["created"], UTC)
        return JsonResponse(
            {
                "modelfile": f"FROM {card['id']}\n",
                "parameters": "",
                "template": await self._template(),
                "details": _details(facts, config, card),
                "model_info": information,
                "capabilities": await self._capabilities(facts["capabilities"]),
                "modified_at": _written(created),
            }
        )

    async def _facts(self) -> dict[str, Any]:
        """Return the model's facts, as far as its lanes report them."""
        try:
            reports = await self._services.client.deployment.reports()
        except NanoInferenceError:
            reports = []
        return facts_of(reports)

    async def _config(self) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            folder = folder_of(self._services.config.engine.model_folder)
            found: dict[str, Any] = read_json(folder / "config.json", {})
            return found

        return await anyio.to_thread.run_sync(read, limiter=anyio.CapacityLimiter(1))

    async def _template(self) -> str:
        try:
            return (await self._services.tokenizer.required()).transformers.chat_template or ""
        except RequestError:  # a model without a tokenizer serves tokens
            return ""

    async def _capabilities(self, reported: tuple[str, ...]) -> list[str]:
        found = [] if reported and "generate" not in reported else ["completion"]
        found += ["embedding"] if "embed" in reported else []
        try:
            tokenizer = await self._services.tokenizer.required()
            form = await self._services.tokenizer.message_format()
        except RequestError:
            return found
        if form is not None and tokenizer.transformers.chat_template:
            found += ["tools"] if form.reads_calls else []
            found += ["thinking"] if form.reads_reasoning else []
        return found + (["vision"] if tokenizer.images is not None else [])


class OnlyModel:
    """A gateway's only model, which stays."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    async def entries(self, caller: Caller) -> list[Entry]:
        return await self._calls.entries(caller)

    async def load(self, call: Call, name: str) -> None:
        await self._calls.check(call, name)

    async def unload(self, call: Call, name: str, *, remove: bool = False) -> None:
        await self._calls.check(call, name)
        raise RequestError(NO_LOADING, code="unsupported")


def model_routes(manager: Manager, needed_to_load: Any = "read") -> list[PolicyRoute]:
    """Return the endpoints about all models. `needed_to_load`: the scope for it."""

    async def tags(call: Call) -> Response:
        return JsonResponse({"models": await manager.entries(call.caller)})

    async def running(call: Call) -> Response:
        """The loaded models. None is unloaded by this interface's times."""
        entries = [each for each in await manager.entries(call.caller) if each["size"]]
        return JsonResponse({"models": [_running(each) for each in entries]})

    async def version(call: Call) -> Response:
        own = metadata.version("nano-inference")
        return JsonResponse({"version": INTERFACE_VERSION, "nano_inference": own})

    async def pull(call: Call) -> Response:
        """Load a model of this server. There is nothing to download it from."""
        body = read_part(await read_object(call, _MOST_BYTES), PullBody)
        name = _named(body)
        if not body.stream:
            async with connected(call.cancelled):
                await manager.load(call, name)
            return JsonResponse({"status": "success"})

        async def produce(send: SendEvent) -> None:
            await manager.load(call, name)
            for status in ("pulling manifest", "success"):
                await send(msgspec.json.encode({"status": status}))

        return LineStream(produce)

    async def delete(call: Call) -> Response:
        """Take a model out of the deployment. Its files stay."""
        body = read_part(await read_object(call, _MOST_BYTES), ModelBody)
        async with connected(call.cancelled):
            await manager.unload(call, _named(body), remove=True)
        return Response()

    def refuse(why: str) -> Callable[[Call], Awaitable[Response]]:
        async def refused(call: Call) -> Response:
            raise RequestError(why, code="unsupported")

        return refused

    no_making = refuse(
        "models are not made or uploaded by this interface; serve their folder, with --model or "
        "the setting models"
    )
    no_copies = refuse("a model's other names are settings (engine.model_aliases, models.aliases)")
    return [
        PolicyRoute("GET /api/tags", "read", tags),
        PolicyRoute("GET /api/ps", "read", running),
        PolicyRoute("GET /api/version", "nothing", version),
        PolicyRoute("POST /api/pull", needed_to_load, pull),
        PolicyRoute("DELETE /api/delete", "admin", delete),
        PolicyRoute("POST /api/copy", "admin", no_copies),
        PolicyRoute("POST /api/create", "admin", no_making),
        PolicyRoute("POST /api/push", "admin", no_making),
        PolicyRoute("POST /api/blobs/{digest}", "admin", no_making),
    ]


def _named(body: ModelBody) -> str:
    if not (name := body.model or body.name):
        raise field_error("model", "is missing; name a model")
    return name


def _running(entry: Entry) -> Entry:
    shown = {name: entry[name] for name in ("name", "model", "size", "digest", "details")}
    return shown | {
        "expires_at": _NEVER,
        "size_vram": entry["size"] if entry["details"]["device"] not in ("", "cpu") else 0,
        "context_length": entry["details"]["context_length"],
    }


def _details(facts: dict[str, Any], config: dict[str, Any], card: Card) -> Entry:
    kind = str(config.get("model_type", ""))
    text = config.get("text_config") or config
    return {
        "parent_model": card["parent"] or "",
        "format": "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": _short(facts["parameters"]),
        "quantization_level": facts["quantization"] or facts["dtype"],
        "context_length": card["max_model_len"],
        "embedding_length": int(text.get("hidden_size") or 0),
        "device": facts["device"],
    }


def _short(parameters: int) -> str:
    """Return a number of parameters as Ollama writes it: 7.6B; "" if unknown."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters or "")


def _written(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
