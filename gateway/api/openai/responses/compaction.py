"""`/v1/responses/compact`: a conversation as its user's messages and a summary by the model."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar, Protocol

import msgspec

from ....call import Call
from ....server.http import EngineError, JsonResponse, Response, connected, read_object
from ....serving.fields import read_part
from ....serving.sealed import seal
from ....serving.services import Services
from ..response_bodies import ResponseBody
from .items import COMPACTION, SUMMARY, Item, items_of
from .output import Answer
from .requests import ID_PREFIX, ResponseCall, ResponseRecord, read_response
from .stored import StoredResponses

_ASKED = (
    "Summarise this conversation for an assistant that continues it without seeing it. Keep what "
    "was asked for, what was decided and done and with what result, the facts, names, paths, "
    "numbers and code that may be needed again, and what remains to be done. Write nothing but the "
    "summary."
)
_SHARE = 4
"""A summary may have this part of the model's length."""


class CompactBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/responses/compact`."""

    NEUTRAL: ClassVar = {
        name: ResponseBody.NEUTRAL[name]
        for name in (
            "client_metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
        )
    }

    model: str = ""
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    priority: int = 0
    budget_ms: float | None = None
    cache_salt: str = ""


class Making(Protocol):
    """The steps by which a response is made."""

    @property
    def stored(self) -> StoredResponses: ...

    async def whole(
        self, call: Call, wanted: ResponseCall, items: list[Item]
    ) -> ResponseRecord: ...

    async def prepared(self, call: Call, record: ResponseRecord) -> ResponseRecord: ...

    async def check(self, record: ResponseRecord) -> None: ...


async def compact(services: Services, responses: Making, call: Call) -> Response:
    """Return the user's messages of a conversation, and an item with a summary of all of it.

    Raises:
        RequestError: As of a response; compaction_failed: the summary is empty or was cut.
    """
    config = services.config
    given = await read_object(call, config.gateway.max_body_bytes)
    body = read_part(given, CompactBody)
    length = await services.length.get()
    asked = {name: given[name] for name in CompactBody.__struct_fields__ if name in given}
    more = {"store": False, "temperature": 0, "max_output_tokens": max(1, length // _SHARE)}
    wanted, items = read_response(asked | more, config, length, call.tenant)
    await services.served.check(body.model, call.caller)
    whole = await responses.whole(call, wanted, items)
    call.begin(body.budget_ms, body.model)
    summarised = msgspec.structs.replace(whole, items=[*whole.items, *items_of(_ASKED)])
    record = msgspec.structs.replace(
        await responses.prepared(call, summarised), deadline_ns=call.deadline_ns, caller=call.caller
    )
    await responses.check(record)
    answer = await _summary(services, responses, call, record)
    texts = [
        part["text"]
        for item in answer["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    text = "".join(texts).strip()
    if answer["status"] != "completed" or not text:
        raise EngineError(
            "the model wrote no whole summary of this conversation; send less of it, or go on "
            "without compaction",
            code="compaction_failed",
        )
    compaction = {
        "id": f"cmp_{uuid.uuid4().hex}",
        "type": COMPACTION,
        "encrypted_content": seal(COMPACTION, call.tenant, SUMMARY + text),
    }
    users = [each for each in whole.items if each["type"] == "message" and each["role"] == "user"]
    return JsonResponse(
        {
            "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*users, compaction],
            "usage": answer["usage"],
        }
    )


async def _summary(
    services: Services, responses: Making, call: Call, record: ResponseRecord
) -> Answer:
    """Return the response with the summary."""
    writer = await responses.stored.writer(record, first=True)
    async with connected(call.cancelled):
        (completion,) = await services.submissions.run(call, [record.request(services.config)])
        return await responses.stored.ended(writer, completion)
    raise AssertionError("connected() raises when the client has left")
