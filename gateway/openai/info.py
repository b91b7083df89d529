"""OpenAI's and vLLM's calls about the model and its tokens."""

from __future__ import annotations

import time
from functools import partial
from importlib import metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...config import Config, RequestError
from ..chat_templates import ChatTemplates
from ..fields import check_model
from ..http import FieldError, JsonResponse, read_object
from ..policy.caller import caller_of
from ..policy.models import check_allowed
from ..words import LazyWords, Words
from .bodies import DetokenizeBody, TokenizeBody
from .fields import read_fields
from .messages import conversation_of


class InfoCalls:
    """The endpoints."""

    def __init__(self, config: Config, words: LazyWords, templates: ChatTemplates) -> None:
        self._config = config
        self._words = words
        self._templates = templates
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        allowed, name = caller_of(request).models, self._config.engine.model_name
        shown = [self._model()] if allowed is None or name in allowed else []
        return JsonResponse({"object": "list", "data": shown})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._config)
        check_allowed(caller_of(request), self._config.engine.model_name)
        return JsonResponse(self._model())

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": metadata.version("nano-inference")})

    async def tokenize(self, request: Request) -> Response:
        """A text or a conversation as tokens, as they would be a prompt."""
        found = await read_object(request, self._config.gateway.max_body_bytes)
        body = read_fields(found, TokenizeBody, "tokenize")
        check_model(body.model, self._config)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("give exactly one of prompt and messages", param="prompt")
        words, max_model_len = await self._words.required(), self._config.engine.max_model_len
        if body.prompt is None:
            token_ids = await self._templates.token_ids(conversation_of(body))
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
        body = read_fields(found, DetokenizeBody, "detokenize")
        check_model(body.model, self._config)
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
            "model_max_length": self._config.engine.max_model_len,
            "chat_template": tokenizer.chat_template or None,
        }
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return JsonResponse(told | {name: getattr(tokenizer, name) for name in names})

    async def refused(self, request: Request) -> Response:
        """An endpoint that people look for, and that is not there."""
        raise RequestError(
            f"{request.url.path} is not supported here: the engine generates text",
            code="unsupported",
        )

    def _model(self) -> dict[str, Any]:
        engine = self._config.engine
        return {
            "id": engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "nano-inference",
            "root": engine.model_name,
            "parent": None,
            "max_model_len": engine.max_model_len,
        }


def _check_vocabulary(token_ids: list[int], words: Words) -> None:
    most = len(words.tokenizer) - 1
    if any(not 0 <= token_id <= most for token_id in token_ids):
        raise FieldError(
            f"tokens holds an id that is none; the tokenizer's are 0 to {most}",
            param="tokens",
            code="invalid_token_ids",
        )
