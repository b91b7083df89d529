"""The endpoints of the console: its files, the live feed, and the requests of this gateway."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from importlib import metadata
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from ...config import (
    BUNDLED_MODEL,
    BUNDLED_VISION_MODEL,
    Config,
    ConfigError,
    ModelError,
    RequestError,
    shown,
)
from ...config.models import default_of
from ..api.routes import PolicyRoute
from ..call import Call
from ..caller import Caller
from ..server.http import EventStream, JsonResponse, Response, SendEvent
from ..serving.lane_state import Readiness
from ..serving.request_log import PREVIEW_TOKENS, PROMPT_TOKENS, LoggedRequest, RequestLog
from ..serving.services import Services
from ..serving.tokenizer import Tokenizer
from .feed import Feed, viewer_of
from .files import file_routes

STREAM_S = 60.0
"""Longest time of one stream of snapshots: the page opens the next one, and a revoked key ends."""

PAGE = 1000
"""Most requests of one answer."""

_LONG_BYTES = 16 << 10
"""Shorter pages of requests are not compressed."""

_COMPRESSING = anyio.CapacityLimiter(1)

_NO_SNIFFING = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def console_routes(
    config: Config,
    feed: Feed,
    log: RequestLog,
    readiness: Readiness,
    models: Callable[[], Sequence[Services]],
) -> list[PolicyRoute]:
    """Return the endpoints. `models`: returns the services of each model."""

    async def session(call: Call) -> Response:
        """Return the caller's permissions and this gateway's features."""
        return _json(await _session(config, call.caller, models()))

    async def events(call: Call) -> Response:
        """Snapshots as server-sent events."""

        async def produce(send: SendEvent) -> None:
            with anyio.move_on_after(STREAM_S):
                async with aclosing(feed.snapshots(viewer_of(call.caller))) as snapshots:
                    async for name, data in snapshots:
                        if readiness.draining:  # it waits for its calls to end
                            return
                        await send(data, name=name)

        return EventStream(produce, config.gateway.comment_s, ids=False)

    async def history(call: Call) -> Response:
        """The points of the charts."""
        return await _compressed(call, msgspec.json.encode(feed.points(viewer_of(call.caller))))

    async def requests(call: Call) -> Response:
        """The requests that changed after `after`, a change's number."""
        caller = call.caller
        after, limit = _number(call, "after", 0), _number(call, "limit", PAGE)
        found, newest = log.changed_after(after, min(limit, PAGE))
        rows = [each for each in found if each.seen_by(caller)]
        for each in rows:
            await _read_prompt(each, models())
        page = {"requests": rows, "next": newest, "more": newest < log.changes}
        return await _compressed(call, msgspec.json.encode(page))

    async def one(call: Call) -> Response:
        """One request with its times, its text and its tokens."""
        request_id = call.params["request_id"]
        found = log.find(call.caller, request_id)
        if found is None:
            raise RequestError(
                f"this gateway has no request {shown(request_id)}: it was another gateway's, is "
                "another tenant's, or came before the last ten thousand; see its trace",
                code="not_found",
            )
        await _read_prompt(found, models())
        detail = log.detail(found.id)
        if detail and (tokenizer := await _tokenizer(found, models())) is not None:
            _add_texts(detail, tokenizer, found.prompt_tokens)
        return _json({"request": found, "detail": detail})

    return [
        *file_routes(),
        PolicyRoute("GET /console/session", "read", session),
        PolicyRoute("GET /console/events", "read", events),
        PolicyRoute("GET /console/history", "read", history),
        PolicyRoute("GET /console/requests", "read", requests),
        PolicyRoute("GET /console/requests/{request_id:path}", "read", one),
    ]


async def _session(config: Config, caller: Caller, models: Sequence[Services]) -> dict[str, Any]:
    return {
        "version": metadata.version("nano-inference"),
        "keys": config.policy.knows_callers,
        "policy": config.policy.backend != "off",
        "name": caller.name,
        "tenant": caller.tenant,
        "scopes": sorted(caller.scopes),
        "several_models": bool(config.models),
        "stall_timeout_s": config.pipeline.stall_timeout_s,
        "resume_grace_s": config.gateway.resume_grace_s,
        "default_model": default_of(config.models) or config.engine.model_name,
        "models": await _abilities(models, caller),
    }


def _json(content: Any) -> Response:
    return JsonResponse(content, headers=_NO_SNIFFING)


async def _compressed(call: Call, body: bytes) -> Response:
    """Return JSON, compressed if it is long and the client reads that."""
    headers = dict(_NO_SNIFFING)
    if len(body) > _LONG_BYTES and "gzip" in (call.header("accept-encoding") or ""):
        body = await anyio.to_thread.run_sync(gzip.compress, body, 1, limiter=_COMPRESSING)
        headers |= {"Content-Encoding": "gzip"}
    return Response(body, media_type="application/json", headers=headers)


def _number(call: Call, name: str, default: int) -> int:
    text = call.query.get(name, str(default))
    if not (text.isdecimal() and text.isascii() and len(text) < 16):
        raise RequestError(
            f"{name} is {shown(text)}; it must be a whole number", code="invalid_request"
        )
    return int(text)


async def _abilities(models: Sequence[Services], caller: Caller) -> list[dict[str, Any]]:
    """Return what the playground needs to know of each model: whether it is bundled, and, where its
    tokenizer can be read, whether it takes images, conversations and tools."""
    found = []
    for each in models:
        engine = each.config.engine
        if caller.models is not None and engine.model_name not in caller.models:
            continue
        able: dict[str, Any] = {
            "id": engine.model_name,
            "bundled": engine.model_path in (BUNDLED_MODEL, BUNDLED_VISION_MODEL),
        }
        with suppress(ModelError, RequestError, ConfigError):
            tokenizer = await each.tokenizer.required()
            able["images"] = tokenizer.images is not None
            able["chat"] = bool(tokenizer.transformers.chat_template)
            form = await each.tokenizer.message_format() if able["chat"] else None
            able["tools"] = form is not None and form.reads_calls
        found.append(able)
    return found


async def _tokenizer(found: LoggedRequest, models: Sequence[Services]) -> Tokenizer | None:
    for each in models:
        if each.config.engine.model_name == found.of_model:
            with suppress(ModelError):
                return await each.tokenizer.get()
    return None


async def _read_prompt(found: LoggedRequest, models: Sequence[Services]) -> None:
    """Replace the tokens of a prompt by their text, when it is first read."""
    if isinstance(found.prompt, tuple):
        tokenizer = await _tokenizer(found, models)
        text = "" if tokenizer is None else tokenizer.text(found.prompt, skip_special=True)
        found.prompt = _marked(text, len(found.prompt), PREVIEW_TOKENS, found.prompt_tokens)


def _add_texts(detail: dict[str, Any], tokenizer: Tokenizer, tokens: int) -> None:
    """Add the texts of tokens. `tokens`: of the whole prompt."""
    if not detail["prompt"]:
        text = tokenizer.text(detail["prompt_token_ids"], skip_special=False)
        detail["prompt"] = _marked(text, len(detail["prompt_token_ids"]), PROMPT_TOKENS, tokens)
    del detail["prompt_token_ids"]
    for sample in detail["samples"]:
        sample["tokens_text"] = [tokenizer.token(each) for each in sample.pop("token_ids")]


def _marked(text: str, kept: int, most: int, tokens: int) -> str:
    """Return a prompt's text, with a mark if only its last tokens are kept."""
    return f"…{text}" if kept == most < tokens else text
