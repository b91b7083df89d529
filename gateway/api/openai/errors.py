"""Errors as OpenAI's clients read them: with the field that they are about, and OpenAI's codes."""

from __future__ import annotations

from ....config import NanoInferenceError
from ...call import Call
from ...server.http import Endpoint, FieldError, Response
from ...serving.fields import fields_of
from .call_bodies import BODIES, CallName

_CODES = {"unknown_model": "model_not_found", "prompt_too_long": "context_length_exceeded"}
"""Codes that programs expect by OpenAI's names."""

_PROMPT = "prompt"
_PARAMS = {
    "unknown_model": "model",
    "prompt_too_long": _PROMPT,
    "empty_prompt": _PROMPT,
    "invalid_token_ids": _PROMPT,
    "too_many_prompts": _PROMPT,
    "no_chat_template": "messages",
    "chat_template_failed": "messages",
    "exceeds_kv_capacity": "max_tokens",
    "invalid_budget": "budget_ms",
    "invalid_constraint": "response_format",
}

_RENAMED: dict[CallName, dict[str, str]] = {
    "chat": {_PROMPT: "messages", "logprobs": "top_logprobs"},
    "embeddings": {_PROMPT: "input"},
    "score": {_PROMPT: "text_2"},
    "rerank": {_PROMPT: "documents"},
    "generate": {_PROMPT: "token_ids", "response_format": "structured_outputs"},
    "responses": {
        _PROMPT: "input",
        "messages": "input",
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
    },
}
"""Fields that have another name than in completions."""


def as_openai(error: NanoInferenceError, call: CallName) -> NanoInferenceError:
    """The same error in OpenAI's words, where it is about what a client may change.

    Args:
        call: Whose fields it is about.
    """
    if not _known(error.code):
        return error
    param = error.param or _param(error.code, call)
    if param is None:
        return error
    own, rest = error.code.removeprefix("invalid_"), error.message
    return FieldError(
        f"{param}{rest.removeprefix(own)}" if rest.startswith(f"{own} ") else rest,
        param=param,
        code=_CODES.get(error.code, error.code),
        retry_after_s=error.retry_after_s,
    )


def in_openai_words(endpoint: Endpoint, of: CallName = "completions") -> Endpoint:
    """An endpoint whose errors are `as_openai`."""

    async def answer(call: Call) -> Response:
        try:
            return await endpoint(call)
        except NanoInferenceError as error:
            raise as_openai(error, of) from error

    return answer


def _known(code: str) -> bool:
    return code in _PARAMS or code.startswith("invalid_")


def _param(code: str, call: CallName) -> str | None:
    name = _PARAMS.get(code) or code.removeprefix("invalid_")
    name = _RENAMED.get(call, {}).get(name, name)
    if name in fields_of(BODIES[call]):
        return name
    if call == "generate" and name in fields_of(BODIES["sampling_params"]):
        return f"sampling_params.{name}"
    return name if any(name in fields_of(body) for body in BODIES.values()) else None
