"""Durable calls: found again by the id of their answer, or by their idempotency key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import anyio
import msgspec

from ....config import RequestError
from ....store.calls import DurableCall
from ...call import Call
from ...caller import check_allowed, may_use
from ...server.http import EngineError
from ...serving.durable_calls import (
    Attachment,
    DurableCalls,
    DurableRecord,
    IdempotencyKey,
    not_found,
)
from ...serving.fields import Body

HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 255
"""Characters; as many as other services accept."""

PUBLISH_PATIENCE_S = 5.0
"""Seconds to wait for the gateway that has begun a call to publish its requests. It may have
stopped; a request that is published twice is refused once.
"""

_LONGEST_WAIT_S = 0.2
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}")


R = TypeVar("R", bound=DurableRecord)
S = TypeVar("S", bound=msgspec.Struct)

Attach = Callable[[], AbstractAsyncContextManager[Attachment | None]]
"""Attach to a call while the context is open, if the call is durable."""


def decode_record(record: bytes, kind: type[S]) -> S | None:
    """Decode a record; None for one of another kind, or of an incompatible version."""
    try:
        return msgspec.json.decode(record, type=kind)
    except (ValueError, RecursionError):
        return None


class Found(NamedTuple, Generic[R]):
    """A call that was begun before."""

    record: R
    kept: DurableCall


@dataclass(eq=False)
class BegunCalls(Generic[R]):
    """The durable calls of one kind. `missing`: makes the error for an unknown id."""

    durable: DurableCalls
    kind: type[R]
    missing: Callable[[str], EngineError] = not_found

    async def find(self, call: Call, call_id: str, again: IdempotencyKey | None = None) -> Found[R]:
        """Find a call of a request's tenant, by a model that the caller may use.

        Args:
            again: The identity of the call that looks for it, if that has a key.

        Raises:
            RequestError: The one for an unknown id, idempotency_key_reused.
        """
        found = await self.look(call_id, call.tenant)
        # Other keys of the tenant may be for other models.
        if not may_use(call.caller, found.record.call.model):
            raise self.missing(call_id)
        if again is not None:
            check_same(found.record.keyed, again)
        return found

    async def look(self, call_id: str, tenant: str) -> Found[R]:
        """Read the present state of a tenant's call.

        Raises:
            RequestError: The one for an unknown id.
        """
        kept = await self.durable.find(call_id)
        record = decode_record(kept.record, self.kind) if kept is not None else None
        if kept is None or record is None or record.tenant != tenant:
            raise self.missing(call_id)
        if not (record.is_complete or kept.entries):
            # It was never published, so no client has any of it.
            raise self.missing(call_id)
        return Found(record, kept)

    async def claim(self, call: Call, record: R) -> Found[R] | None:
        """Store a call under its key. Returns the call that has the key already, if any.

        Raises:
            RequestError: idempotency_key_reused, model_not_found.
        """
        assert record.keyed is not None, "it has a key"
        check_allowed(call.caller, record.call.model)
        owner = await self.durable.claim(record)
        if owner == record.id:
            return None
        try:
            return await self.find(call, owner, record.keyed)
        except RequestError as error:
            if error.code == self.missing(owner).code:
                # The call was dropped a moment ago, and its key with it or soon.
                check_same(None, record.keyed)
            raise

    @asynccontextmanager
    async def attach(self, found: Found[R]) -> AsyncIterator[Attachment]:
        """Attach to a call that was begun before, once it is published."""
        record, kept = found.record, await self.published(found)
        async with self.durable.resumed(record, kept) as attachment:
            yield attachment

    async def published(self, found: Found[R]) -> DurableCall:
        """Wait until all requests of a call are published, or could have been."""
        record, kept = found
        pauses = pauses_s(_LONGEST_WAIT_S)
        with anyio.move_on_after(PUBLISH_PATIENCE_S):
            while len(kept.entries) < len(record.request_ids) and "cancelled" not in kept.marks:
                await anyio.sleep(next(pauses))
                kept = await self.durable.find(record.id) or kept
        return kept


def pauses_s(longest_s: float) -> Iterator[float]:
    """Yield the pauses between looks at a call, without end."""
    pause_s = 0.01
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def last_event_id(call: Call) -> str:
    """Return the last event that a returning client has of a stream; "" for none."""
    return call.header("last-event-id") or ""


def keyed(call: Call, body: Body) -> IdempotencyKey | None:
    """Return the identity of a call with an idempotency key; None without one.

    Raises:
        RequestError: invalid_idempotency_key.
    """
    keys = call.header_values(HEADER)
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise RequestError(
            f"{HEADER} must be 1 to {MAX_KEY_LENGTH} visible ASCII characters, and come once",
            code="invalid_idempotency_key",
        )
    # A model's own address takes the place of its name in the body.
    encoded = msgspec.json.encode(body, order="deterministic").hex()
    about = [call.path, encoded, *([call.model] if call.model else [])]
    return IdempotencyKey(_digest(call.tenant, keys[0]), _digest(*about))


def check_same(first: IdempotencyKey | None, again: IdempotencyKey) -> None:
    """Raises RequestError (idempotency_key_reused) unless both are the same call."""
    if first != again:
        raise RequestError(
            f"this {HEADER} came with another call before, which is kept for as long as its "
            "results; take a new key for each call, and the same body with the same key",
            code="idempotency_key_reused",
        )


def _digest(*parts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
