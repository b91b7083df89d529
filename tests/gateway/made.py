"""Outputs of a fake engine, token by token."""

from __future__ import annotations

import struct
from typing import Any

from nano_inference.bus.public import (
    CompletionChunk,
    CompletionSample,
    FinishReason,
    GenerateRequest,
    Output,
    TokenLogprob,
    Usage,
)

from . import fake
from .fake import completion, sample

TOKENS = (5, 6, 7)
TEXTS = ("five", " six", " seven")
LOGPROBS = (-0.25, -0.5, -0.75)
SUPPORTS = (-0.125, 0.0, -0.0625)
SUPPORT_IDS = ((5, 6), (6, 9, 70_000), ())


def tops(number: int) -> tuple[tuple[TokenLogprob, ...], ...] | None:
    """Alternatives: at each place the token itself first, and less likely ones."""
    if not number:
        return None
    return tuple(
        tuple(
            TokenLogprob(token_id=token_id + below, logprob=logprob - below)
            for below in range(number)
        )
        for token_id, logprob in zip(TOKENS, LOGPROBS, strict=True)
    )


def columns(request: GenerateRequest) -> dict[str, Any]:
    """Log S with limits of the choice; and on request masks, of which the last is too large."""
    found: dict[str, Any] = {}
    if request.sampling.is_limited:
        found["support_logprobs"] = SUPPORTS
    if request.sampling.return_sampling_mask:
        found["sampling_masks"] = tuple(struct.pack(f"<{len(ids)}i", *ids) for ids in SUPPORT_IDS)
    return found


def told(request: GenerateRequest, index: int, reason: FinishReason = "stop") -> CompletionSample:
    """A sample of three tokens, the last one by newer weights."""
    return sample(
        TOKENS,
        sample_index=index,
        text="".join(TEXTS),
        logprobs=LOGPROBS,
        top_logprobs=tops(request.sampling.logprobs),
        finish_reason=reason,
        weight_versions=((3, 0), (4, 2)),
        **columns(request),
    )


def chunk(request: GenerateRequest, index: int, place: int, number: int = 1) -> CompletionChunk:
    """A token of it, or several."""
    top, here = tops(request.sampling.logprobs), slice(place, place + number)
    return fake.chunk(
        request,
        TOKENS[here],
        "".join(TEXTS[here]),
        sample_index=index,
        token_offset=place,
        logprobs=LOGPROBS[here],
        finish_reason="stop" if place == 2 else None,
        weight_version=4 if place == 2 else 3,
        top_logprobs=top and top[here],
        **{name: each[here] for name, each in columns(request).items()},
    )


def scores(request: GenerateRequest) -> dict[str, Any]:
    """Logprobs of the prompt, if they are requested."""
    number, token_ids = request.sampling.prompt_logprobs, request.prompt_token_ids
    if (targets := request.sampling.num_targets) is not None:
        logprobs = [-0.5 - place for place in range(targets)]
        return {"prompt_token_id_logprobs": struct.pack(f"<{targets}f", *logprobs)} | (
            {"prompt_logprobs": (None,) + (-1.0,) * (len(token_ids or ()) - 1)}
            if number is not None
            else {}
        )
    if number is None or token_ids is None:
        return {}
    found: dict[str, Any] = {
        "prompt_logprobs": (None, *(-1.0 - place for place in range(1, len(token_ids))))
    }
    if number:
        found["prompt_top_logprobs"] = (
            (),
            *((TokenLogprob(token_id=9, logprob=-0.125),) for _ in token_ids[1:]),
        )
    return found


def whole(request: GenerateRequest) -> list[Output]:
    """All samples, at once."""
    samples = [told(request, index) for index in range(request.n)]
    return [completion(request, *samples, **scores(request))]


def interleaved(request: GenerateRequest) -> list[Output]:
    """All samples, token by token, those of the last sample first."""
    chunks = [
        chunk(request, index, place) for place in range(3) for index in reversed(range(request.n))
    ]
    return [*chunks, *whole(request)]


def vector_of(request: GenerateRequest) -> tuple[float, ...]:
    """A function of the prompt, of numbers that float32 holds."""
    numbers = request.prompt_token_ids or tuple((request.prompt or "").encode())
    return (float(len(numbers)), -0.5, float(sum(numbers)))


def embedded(request: GenerateRequest) -> list[Output]:
    vector = sample((), text="", logprobs=(), finish_reason="stop", embedding=vector_of(request))
    return [completion(request, vector, usage=Usage(prompt_tokens=3))]


def cut(request: GenerateRequest) -> list[Output]:
    """One token, and nothing more."""
    return interleaved(request)[:1]
