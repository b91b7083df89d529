"""Durable calls: found again by the id of their answer, or by their idempotency key."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import anyio
import msgspec

from ...bus.public import GenerateRequest
from ...config import RequestError
from ...store.calls import CallStore, DurableCall
from ..call import Call
from ..caller import check_allowed, may_use
from ..server.http import EngineError
from .durable_calls import (
    Attachment,
    CallHead,
    DurableCalls,
    DurableRecord,
    IdempotencyKey,
    not_found,
)
from .fields import Body

HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 255
"""Characters; as many as other services accept."""

PUBLISH_PATIENCE_S = 5.0
"""Seconds to wait for the gateway that has begun a call to publish its requests. It may have
stopped; a request that is published twice is refused once.
"""

MOST_ATTEMPTS = 64
"""Calls of one key that are made because those before have failed. After that the last one's error
is the answer.
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

    async def claim(self, call: Call, record: R) -> tuple[R, Found[R] | None]:
        """Store a call under its key, unless there is a call with the key that runs or has an
        answer.

        Returns:
            The record as it is stored; and the call that has the key, if any.

        Raises:
            RequestError: idempotency_key_reused, model_not_found.
        """
        key = record.keyed
        assert key is not None, "it has a key"
        check_allowed(call.caller, record.call.model)
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                key = msgspec.structs.replace(key, attempt=attempt)
                record = msgspec.structs.replace(record, keyed=key)
            owner = await self.durable.claim(record)
            if owner == record.id:
                return record, None
            try:
                found = await self.find(call, owner, key)
            except RequestError as error:
                if error.code == self.missing(owner).code:
                    # The call was dropped a moment ago, and its key with it or soon.
                    check_same(None, key)
                raise
            if not await self.durable.has_failed(*found):
                break
            # So that calls that come later find the next attempt.
            await self.durable.extend(found.record)
        return record, found

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


class BodyRecord(DurableRecord, frozen=True, kw_only=True):
    """A call whose answer follows from its body and the outputs of its requests. A client that
    comes back sends the body again, so the record has no more than ids.

    Attributes:
        requests: Ids of the requests, in order.
    """

    requests: tuple[str, ...]

    @property
    def request_ids(self) -> list[str]:
        return [*self.requests]

    @property
    def is_complete(self) -> bool:
        return True

    @property
    def is_durable(self) -> bool:
        return True


class BodyCall(NamedTuple):
    """A call of a `BodyRecord`, new or begun before.

    Attributes:
        requests: Its requests, with the ids of the first call.
        created: When the first call came, seconds since the Unix epoch.
        attach: Attaches to it; to nothing without an idempotency key.
    """

    requests: list[GenerateRequest]
    created: int
    attach: Attach


@dataclass(eq=False)
class BodyCalls:
    """The calls with idempotency keys of interfaces that store no more than a `BodyRecord`.

    Attributes:
        model: The id of their model.
    """

    durable: DurableCalls
    model: str

    async def begin(
        self, call: Call, key: IdempotencyKey | None, requests: Sequence[GenerateRequest]
    ) -> BodyCall:
        """Begin a call, or find the one that was begun with its key.

        Args:
            requests: Its requests, checked; of one model.

        Raises:
            RequestError: idempotency_key_reused, model_not_found, stored_calls_full.
        """
        created = int(time.time())
        if key is None:
            return BodyCall([*requests], created, nullcontext)
        first = requests[0]
        head = CallHead(
            id=first.request_id,
            created=created,
            model=first.model or self.model,
            of_model=self.model,
        )
        record = BodyRecord(
            tenant=call.tenant,
            call=head,
            keyed=key,
            requests=tuple(each.request_id for each in requests),
        )
        begun = BegunCalls(self.durable, BodyRecord)
        record, found = await begun.claim(call, record)
        if found is None:
            return BodyCall([*requests], created, partial(self.durable.begun, record))
        record = found.record
        return BodyCall(
            [
                msgspec.structs.replace(request, request_id=request_id)
                for request, request_id in zip(requests, record.requests, strict=True)
            ],
            record.call.created,
            partial(begun.attach, found),
        )


def pauses_s(longest_s: float) -> Iterator[float]:
    """Yield the pauses between looks at a call, without end."""
    pause_s = 0.01
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def last_event_id(call: Call) -> str:
    """Return the last event that a returning client has of a stream; "" for none."""
    return call.header("last-event-id") or ""


def reads_event_ids(call: Call) -> bool:
    """Return whether a client resumes a stream, or accepts event streams by name, as a browser's
    EventSource does."""
    accepted = call.header("accept") or ""
    return call.method == "GET" or "text/event-stream" in accepted or bool(last_event_id(call))


def keyed(call: Call, body: Body | GenerateRequest) -> IdempotencyKey | None:
    """Return the identity of a call with an idempotency key; None without one.

    Raises:
        RequestError: invalid_idempotency_key.
    """
    if (key := key_of(call)) is None:
        return None
    return identity_of(call, key, msgspec.json.encode(body, order="deterministic"))


def key_of(call: Call, *others: str) -> str | None:
    """Return the idempotency key of a call; None without one.

    Args:
        others: Keys that it has elsewhere than in its header.

    Raises:
        RequestError: invalid_idempotency_key.
    """
    keys = [*call.header_values(HEADER), *others]
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise RequestError(
            f"{HEADER} must be 1 to {MAX_KEY_LENGTH} visible ASCII characters, and come once",
            code="invalid_idempotency_key",
        )
    return keys[0]


def identity_of(call: Call, key: str, body: bytes) -> IdempotencyKey:
    """Return the identity of a call with a key; `body`: equal for equal calls."""
    # A model's own address takes the place of its name in the body.
    about = [call.path, body.hex(), *([call.model] if call.model else [])]
    return IdempotencyKey(_digest(call.tenant, key), _digest(*about))


def name_of_key(tenant: str, key: str) -> str:
    """Return the name that a tenant's first call with a key claims."""
    return IdempotencyKey(_digest(tenant, key), "").claimed


async def call_of_key(store: CallStore, call: Call) -> str:
    """Return the id of the last call that a request's tenant has made with its key.

    Raises:
        RequestError: invalid_idempotency_key, stream_not_found.
    """
    if (key := key_of(call)) is None:
        raise RequestError(
            f"DELETE /v1/streams ends the call of the header {HEADER}; send it, or DELETE "
            "/v1/streams/{id}",
            code="invalid_idempotency_key",
        )
    name, found = _digest(call.tenant, key), ""
    for attempt in range(MOST_ATTEMPTS):
        if not (owner := await store.named(IdempotencyKey(name, "", attempt).claimed)):
            break
        found = owner
    if not found:
        raise not_found(key)
    return found


def check_same(first: IdempotencyKey | None, again: IdempotencyKey) -> None:
    """Raises RequestError (idempotency_key_reused) unless both are the same call."""
    if first is None or (first.name, first.digest) != (again.name, again.digest):
        raise RequestError(
            f"this {HEADER} came with another call before, which is kept for as long as its "
            "results; take a new key for each call, and the same body with the same key",
            code="idempotency_key_reused",
        )


def _digest(*parts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
