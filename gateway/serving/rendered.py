"""Calls of any interface as the bodies of `/inference/v1/generate`, in vLLM's form."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...bus.public import GenerateRequest
from ...config import Constraint, RequestError, SamplingParams
from .fields import engine_priority
from .prepared import check_request, tokens_of
from .sampling_fields import VLLM
from .services import Services
from .token_images import features_of

_DEFAULTS = SamplingParams()


async def rendered(
    services: Services,
    request: GenerateRequest,
    model: str,
    *,
    name: str = "",
    logprobs: int | None = None,
) -> dict[str, Any]:
    """Return the body of `/inference/v1/generate` that makes a request.

    Args:
        model: The name of the model or adapter.
        name: The body's `request_id`; "" for the request's own.
        logprobs: The number of likeliest tokens to show at each position; None shows no logprobs.

    Raises:
        RequestError: As `check_request`; unsupported: a constraint that the body can't have.
    """
    features, images = None, request.images
    if images:
        prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
        assert prompt is not None
        tokens = await tokens_of(services, prompt, images, request.tenant)
        token_ids, places = await services.images.located(
            services.tokenizer, tokens, images, request.tenant
        )
        request = replace(request, prompt=None, prompt_token_ids=token_ids)
        features = features_of(images, places)
    request = await check_request(services, request, as_tokens=not images)
    body: dict[str, Any] = {
        "request_id": name or request.request_id,
        "model": model,
        "token_ids": request.prompt_token_ids,
        "features": features,
        "sampling_params": _sampling(request.sampling, request.n, logprobs),
        "stream": request.stream,
        "stream_options": None,
        "cache_salt": request.cache_salt or None,
        # In vLLM's order, too, of which this is its own inverse.
        "priority": engine_priority(request.priority),
    }
    return body if request.kv_session is None else body | {"kv_session": request.kv_session}


def _sampling(sampling: SamplingParams, n: int, logprobs: int | None) -> dict[str, Any]:
    """Return the `sampling_params` that `/inference/v1/generate` reads as these."""
    given: dict[str, Any] = {"n": n, "max_tokens": sampling.max_tokens}
    for name, own in VLLM.items():
        value = getattr(sampling, own)
        if value != getattr(_DEFAULTS, own) and own != "logprobs":
            given[name] = sorted(value) if isinstance(value, frozenset) else value
    if logprobs is not None:
        given["logprobs"] = logprobs
    if sampling.constraint is not None:
        given["structured_outputs"] = _written(sampling.constraint)
    return given


def _written(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint by vLLM's names.

    Raises:
        RequestError: unsupported: its grammar would be read in another form.
    """
    found = {
        "json": constraint.json_schema,
        "json_object": constraint.json_object or None,
        "regex": constraint.regex,
        "choice": constraint.choice,
        "grammar": constraint.gbnf or constraint.lark,
    }
    if constraint.lark is not None and "::=" in constraint.lark:
        raise RequestError(
            "the constraint is a grammar in Lark's form with '::=' in it, which "
            "/inference/v1/generate would read in llama.cpp's form; leave '::=' out of schemas and "
            "tools, or send the call itself",
            code="unsupported",
        )
    return {name: value for name, value in found.items() if value is not None}
