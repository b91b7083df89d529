"""Answers that were begun before: found again by their id, or by the key of their call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import anyio
from starlette.requests import Request

from ....config import RequestError
from ....store.calls import DurableCall
from ...policy.caller import Caller, check_allowed, may_use
from ...server.http import EngineError
from ...serving.durable_calls import DurableCalls, not_found
from .idempotency import Keyed, check_same

PUBLISH_PATIENCE_S = 5.0
"""How long whoever comes to a call that others have begun leaves it to them to publish it. Then
they may be gone; a request that is published twice is refused once."""

_FIRST_LOOK_S, _LONGEST_WAIT_S = 0.01, 0.2


class Record(Protocol):
    """What is kept of a call."""

    @property
    def id(self) -> str:
        """The answer's."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def model(self) -> str:
        """The model, or the adapter, that its requests are for."""

    @property
    def number(self) -> int:
        """Of its requests."""

    @property
    def whole(self) -> bool:
        """Whether it has what is submitted."""

    @property
    def keyed(self) -> Keyed | None:
        """What it is known by, if it came with a key."""

    def encode(self) -> bytes:
        """As it stands on the bus."""


R = TypeVar("R", bound=Record)


class Found(NamedTuple, Generic[R]):
    """A call that was begun before."""

    shape: R
    kept: DurableCall


class BegunAnswers(Generic[R]):
    """Those of one kind that are kept on the bus."""

    def __init__(
        self,
        kept: DurableCalls,
        decode: Callable[[bytes], R | None],
        missing: Callable[[str], EngineError] = not_found,
    ) -> None:
        """Args: `decode` gives None of what is none; `missing` the error for an unknown id."""
        self._kept = kept
        self._decode = decode
        self._missing = missing

    async def find(
        self, call_id: str, tenant: str, caller: Caller, again: Keyed | None = None
    ) -> Found[R]:
        """A call of a tenant, by a model that the caller may use.

        Args:
            again: What the call that asks for it is known by, if it has a key.

        Raises:
            RequestError: The one for an unknown id, idempotency_key_reused.
        """
        found = await self._look(call_id, tenant)
        # Other keys of the tenant may be for other models.
        if not may_use(caller, found.shape.model):
            raise self._missing(call_id)
        if again is not None:
            check_same(found.shape.keyed, again)
        return found

    async def look_again(self, found: Found[R]) -> Found[R]:
        """A call that was found before, as it is now.

        Raises:
            RequestError: The one for an unknown id.
        """
        return await self._look(found.shape.id, found.shape.tenant)

    async def _look(self, call_id: str, tenant: str) -> Found[R]:
        kept = await self._kept.find(call_id)
        shape = self._decode(kept.record) if kept is not None else None
        if kept is None or shape is None or shape.tenant != tenant:
            raise self._missing(call_id)
        if not (shape.whole or kept.entries):
            # It was never published, so nobody has seen anything of it.
            raise self._missing(call_id)
        return Found(shape, kept)

    async def claim(self, shape: R, caller: Caller, *, background: bool = False) -> Found[R] | None:
        """Keeps a call under its key. Gives the call that has the key, unless it is this one.

        Raises:
            RequestError: idempotency_key_reused, model_not_found.
        """
        assert shape.keyed is not None, "it has a key"
        check_allowed(caller, shape.model)
        owner = await self._kept.claim(
            shape.keyed.name, shape.id, shape.encode(), background=background
        )
        if owner == shape.id:
            return None
        try:
            return await self.find(owner, shape.tenant, caller, shape.keyed)
        except RequestError as error:
            if error.code == self._missing(owner).code:
                # Its call was dropped a moment ago, and the key with it or soon.
                check_same(None, shape.keyed)
            raise

    async def published(self, found: Found[R]) -> DurableCall:
        """What is kept of a call when all of it is published, or could have been."""
        call_id, kept, wait_s = found.shape.id, found.kept, _FIRST_LOOK_S
        with anyio.move_on_after(PUBLISH_PATIENCE_S):
            while len(kept.entries) < found.shape.number and "cancelled" not in kept.marks:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                kept = await self._kept.find(call_id) or kept
        return kept


def last_event_id(request: Request) -> str:
    """What a client that comes back to a stream had of it; "" for nothing."""
    return request.headers.get("last-event-id", "")
