"""Answers that were begun before: found again by their id, or by the key of their call."""

from __future__ import annotations

from typing import NamedTuple

import anyio

from ...bus import KeptCall
from ...config import RequestError
from ..kept_calls import KeptCalls, not_found
from .idempotency import Keyed, check_same
from .shapes import Shape, decode_shape

PUBLISH_PATIENCE_S = 5.0
"""How long whoever comes to a call that others have begun leaves it to them to publish it. Then
they may be gone; a request that is published twice is refused once."""

_FIRST_LOOK_S, _LONGEST_WAIT_S = 0.01, 0.2


class Found(NamedTuple):
    """A call that was begun before."""

    shape: Shape
    kept: KeptCall


class BegunAnswers:
    """Those that are kept on the bus."""

    def __init__(self, kept: KeptCalls) -> None:
        self._kept = kept

    async def find(self, call_id: str, tenant: str, again: Keyed | None = None) -> Found:
        """A call of a tenant.

        Args:
            again: What the call that asks for it is known by, if it has a key.

        Raises:
            RequestError: stream_not_found, idempotency_key_reused.
        """
        kept = await self._kept.find(call_id)
        shape = decode_shape(kept.record) if kept is not None else None
        if kept is None or shape is None or shape.tenant != tenant:
            raise not_found(call_id)
        if not (shape.whole or kept.entries):
            # It was never published, so nobody has seen anything of it.
            raise not_found(call_id)
        if again is not None:
            check_same(shape.keyed, again)
        return Found(shape, kept)

    async def claim(self, shape: Shape) -> Found | None:
        """Keeps a call under its key. Gives the call that has the key, unless it is this one.

        Raises:
            RequestError: idempotency_key_reused.
        """
        assert shape.keyed is not None, "it has a key"
        owner = await self._kept.claim(shape.keyed.name, shape.call.id, shape.encode())
        if owner == shape.call.id:
            return None
        try:
            return await self.find(owner, shape.tenant, shape.keyed)
        except RequestError as error:
            if error.code == "stream_not_found":
                # Its call was dropped a moment ago, and the key with it or soon.
                check_same(None, shape.keyed)
            raise

    async def published(self, found: Found) -> KeptCall:
        """What is kept of a call when all of it is published, or could have been."""
        call_id, kept, wait_s = found.shape.call.id, found.kept, _FIRST_LOOK_S
        with anyio.move_on_after(PUBLISH_PATIENCE_S):
            while len(kept.entries) < found.shape.number and "cancelled" not in kept.marks:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                kept = await self._kept.find(call_id) or kept
        return kept
