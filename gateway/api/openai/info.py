"""OpenAI's and vLLM's calls about the model, its tokens and its adapters."""

from __future__ import annotations

import time
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from msgspec.structs import replace

from ....bus.weights import InFlight
from ....config import AdapterError, shown
from ...call import Call
from ...caller import Caller, check_allowed, shown_path
from ...server.http import (
    FieldError,
    JsonResponse,
    PlainTextResponse,
    Response,
    field_error,
    read_object,
)
from ...serving.chat_templates import check_template
from ...serving.fields import read_part
from ...serving.lane_state import unknown_model
from ...serving.model_names import adapter_of
from ...serving.prepared import conversation_tokens
from ...serving.services import Services
from .bodies import DetokenizeBody, TokenizeBody
from .catalog import models_response
from .messages import chat_tools, conversation_of

_MOST_BYTES = 1 << 16


class ModelInfoCalls:
    """The endpoints about the model and its tokens."""

    def __init__(self, services: Services) -> None:
        self._config, self._served = services.config, services.served
        self._services, self._tokenizer = services, services.tokenizer
        self._length = services.length
        self._created = int(time.time())

    async def models(self, call: Call) -> Response:
        return models_response(call, await self.cards(call.caller))

    async def cards(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the cards of the model and its adapters that a caller may use."""
        allowed = caller.models
        cards = await self._cards(caller)
        return [card for card in cards if allowed is None or card["id"] in allowed]

    async def model(self, call: Call) -> Response:
        return JsonResponse(await self.card_of(call))

    async def card_of(self, call: Call) -> dict[str, Any]:
        """Return the card of the model in a call's path."""
        return await self.card(call.params["model"], call.caller)

    async def card(self, name: str, caller: Caller) -> dict[str, Any]:
        """Return the card of a model or an adapter.

        Raises:
            RequestError: unknown_model; model_not_found, when the caller may not use it.
        """
        wanted = adapter_of(name, self._config) or self._served.default
        check_allowed(caller, wanted)
        for card in await self._cards(caller):
            if card["id"] == wanted:
                return card
        raise unknown_model(name, self._served.default)

    async def version(self, call: Call) -> Response:
        return JsonResponse({"version": metadata.version("nano-inference")})

    async def tokenize(self, call: Call) -> Response:
        """Tokenise a text or a conversation, as for a prompt."""
        found = await read_object(call, self._config.gateway.max_body_bytes)
        body = read_part(found, TokenizeBody)
        check_template(body.chat_template, self._config)
        await self._served.check(body.model, call.caller)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("give exactly one of prompt and messages", param="prompt")
        tokenizer, max_model_len = await self._tokenizer.required(), await self._length.get()
        if body.prompt is None:
            conversation = conversation_of(body)
            form = await self._services.templates.form(conversation.template, call.tenant)
            conversation = replace(conversation, tools=chat_tools(body.tools, form))
            tenant = call.tenant
            token_ids = await conversation_tokens(self._services, conversation, tenant)
        else:
            tokenizer.check_fits(body.prompt, max_model_len)
            token_ids = await self._tokenizer.token_ids(
                body.prompt, add_special=body.add_special_tokens
            )
        told: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_model_len}
        texts = None
        if body.return_token_strs:
            texts = [tokenizer.token_bytes(each).decode(errors="replace") for each in token_ids]
        return JsonResponse(told | {"tokens": token_ids, "token_strs": texts})

    async def detokenize(self, call: Call) -> Response:
        """Return the text of tokens, with the names of special tokens."""
        found = await read_object(call, self._config.gateway.max_body_bytes)
        body = read_part(found, DetokenizeBody)
        await self._served.check(body.model, call.caller)
        if body.tokens is None:
            raise FieldError("give tokens, a list of token ids", param="tokens")
        tokenizer = await self._tokenizer.required()
        most = len(tokenizer.transformers) - 1
        if wrong := [each for each in body.tokens if not 0 <= each <= most]:
            raise field_error(
                "tokens",
                f"holds {shown(wrong[0])}; it must be ids of the tokenizer, 0 to {most}",
                code="invalid_token_ids",
            )
        text = await self._tokenizer.beside(
            partial(tokenizer.text, body.tokens, skip_special=False)
        )
        return JsonResponse({"prompt": text})

    async def tokenizer_info(self, call: Call) -> Response:
        """Return facts about the tokenizer, by the names of Transformers."""
        tokenizer = (await self._tokenizer.required()).transformers
        told = {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "model_max_length": await self._length.get(),
            "chat_template": tokenizer.chat_template or None,
        }
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return JsonResponse(told | {name: getattr(tokenizer, name) for name in names})

    async def _cards(self, caller: Caller) -> list[dict[str, Any]]:
        """Return a card for the model and each adapter, whose parent is the model."""
        name = self._served.default
        found: list[tuple[str, str, str | None]] = [(name, self._config.engine.model_path, None)]
        found += [(each.id, each.folder, name) for each in await self._served.adapters()]
        length, owners = await self._length.get(), await self._served.expert_owners()
        more: dict[str, Any] = {"expert_owners": owners} if owners else {}
        more |= await self._served.model_facts()
        return [
            {
                "id": id,
                "object": "model",
                "created": self._created,
                "owned_by": "nano-inference",
                "root": shown_path(caller, root),
                "parent": parent,
                "max_model_len": length,
                **more,
            }
            for id, root, parent in found
        ]


# --- LoRA adapters ------------------------------------------------------------------------------


class LoadAdapterBody(msgspec.Struct, frozen=True):
    """`/v1/load_lora_adapter`: as vLLM's; `in_flight` is not vLLM's."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    in_flight: InFlight = "keep"


class UnloadAdapterBody(msgspec.Struct, frozen=True):
    """`/v1/unload_lora_adapter`: as vLLM's; `in_flight` is not vLLM's."""

    lora_name: str
    lora_int_id: int | None = None
    in_flight: InFlight = "keep"


class AdapterCalls:
    """The endpoints about LoRA adapters."""

    def __init__(self, services: Services) -> None:
        self._client = services.client
        self._served = services.served

    async def load(self, call: Call) -> Response:
        body = read_part(await read_object(call, _MOST_BYTES), LoadAdapterBody)
        name = body.lora_name
        if not body.load_inplace and name in [each.id for each in await self._served.adapters()]:
            raise AdapterError(
                f"the adapter {name!r:.80} is loaded already; give it new weights with "
                "load_inplace: true",
                code="adapter_loaded",
            )
        await self._client.load_adapter(name, body.lora_path, in_flight=body.in_flight)
        await self._served.wait_for(name, loaded=True)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(self, call: Call) -> Response:
        body = read_part(await read_object(call, _MOST_BYTES), UnloadAdapterBody)
        await self._client.unload_adapter(body.lora_name, in_flight=body.in_flight)
        await self._served.wait_for(body.lora_name, loaded=False)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
