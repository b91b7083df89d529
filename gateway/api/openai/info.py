"""OpenAI's and vLLM's calls about the model and its tokens."""

from __future__ import annotations

import time
from functools import partial
from importlib import metadata
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ....config import Config
from ...policy.caller import Caller, caller_of, check_allowed
from ...server.http import FieldError, JsonResponse, read_object
from ...serving.chat_templates import ChatTemplates
from ...serving.fields import adapter_of, read_part
from ...serving.lane_state import ModelLength, ServedModels, unknown_model
from ...serving.origin import tenant_of
from ...serving.words import LazyWords, Words
from .bodies import DetokenizeBody, TokenizeBody
from .messages import conversation_of
from .tools import chat_tools


class InfoCalls:
    """The endpoints."""

    def __init__(
        self,
        config: Config,
        words: LazyWords,
        templates: ChatTemplates,
        length: ModelLength,
        served: ServedModels,
    ) -> None:
        self._config = config
        self._length = length
        self._served = served
        self._words = words
        self._templates = templates
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": await self.cards(caller_of(request))})

    async def cards(self, caller: Caller) -> list[dict[str, Any]]:
        """What is told of the model and its adapters, as far as a caller may use them."""
        allowed = caller.models
        return [card for card in await self._cards() if allowed is None or card["id"] in allowed]

    async def model(self, request: Request) -> Response:
        return JsonResponse(await self.card_of(request))

    async def card_of(self, request: Request) -> dict[str, Any]:
        """As `card`, of the name in a call's path."""
        return await self.card(request.path_params["model"], caller_of(request))

    async def card(self, name: str, caller: Caller) -> dict[str, Any]:
        """What is told of what has a name.

        Raises:
            RequestError: unknown_model; model_not_found, when the caller may not use it.
        """
        wanted = adapter_of(name, self._config) or self._served.default
        check_allowed(caller, wanted)
        for card in await self._cards():
            if card["id"] == wanted:
                return card
        raise unknown_model(name, self._served.default)

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": metadata.version("nano-inference")})

    async def tokenize(self, request: Request) -> Response:
        """A text or a conversation as tokens, as they would be a prompt."""
        found = await read_object(request, self._config.gateway.max_body_bytes)
        body = read_part(found, TokenizeBody)
        await self._served.check(body.model, caller_of(request))
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("give exactly one of prompt and messages", param="prompt")
        words, max_model_len = await self._words.required(), await self._length.get()
        if body.prompt is None:
            conversation = replace(conversation_of(body), tools=chat_tools(body.tools))
            token_ids = (await self._templates.render(conversation, tenant_of(request))).token_ids
        else:
            words.check_fits(body.prompt, max_model_len)
            token_ids = await self._words.token_ids(
                body.prompt, add_special=body.add_special_tokens
            )
        told: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_model_len}
        texts = None
        if body.return_token_strs:
            texts = [words.token_bytes(each).decode(errors="replace") for each in token_ids]
        return JsonResponse(told | {"tokens": token_ids, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, with the names of special ones."""
        found = await read_object(request, self._config.gateway.max_body_bytes)
        body = read_part(found, DetokenizeBody)
        await self._served.check(body.model, caller_of(request))
        if body.tokens is None:
            raise FieldError("give tokens, a list of token ids", param="tokens")
        words = await self._words.required()
        _check_vocabulary(body.tokens, words)
        text = await self._words.beside(partial(words.text, body.tokens, skip_special=False))
        return JsonResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """What programs that make prompts themselves ask for, by the names of Transformers."""
        words = await self._words.required()
        tokenizer = words.tokenizer
        told = {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "model_max_length": await self._length.get(),
            "chat_template": tokenizer.chat_template or None,
        }
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return JsonResponse(told | {name: getattr(tokenizer, name) for name in names})

    async def _cards(self) -> list[dict[str, Any]]:
        """The model and its adapters, whose parent it is, with where they come from."""
        name = self._served.default
        found: list[tuple[str, str, str | None]] = [(name, self._config.engine.model_path, None)]
        found += [(each.id, each.folder, name) for each in await self._served.adapters()]
        length = await self._length.get()
        return [
            {
                "id": id,
                "object": "model",
                "created": self._created,
                "owned_by": "nano-inference",
                "root": root,
                "parent": parent,
                "max_model_len": length,
            }
            for id, root, parent in found
        ]


def _check_vocabulary(token_ids: list[int], words: Words) -> None:
    most = len(words.tokenizer) - 1
    if any(not 0 <= token_id <= most for token_id in token_ids):
        raise FieldError(
            f"tokens holds an id that is none; the tokenizer's are 0 to {most}",
            param="tokens",
            code="invalid_token_ids",
        )
