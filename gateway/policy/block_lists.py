"""The block list that the policy has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread

from ...config import RequestError
from .backend import PolicyUnavailable
from .block_list import BlockList
from .document import Guardrails


class BlockLists:
    """The block list as the policy has it now. It is made anew when that has changed."""

    def __init__(self, read: Callable[[], Awaitable[Guardrails]], max_match: int) -> None:
        self._read = read
        self._max_match = max_match
        self._made_of = Guardrails()
        self._made = BlockList((), (), max_match)
        self._making = anyio.Lock()

    async def get(self) -> BlockList:
        """Raises PolicyUnavailable when nobody knows what it is."""
        guardrails = await self._read()
        if guardrails is self._made_of:
            return self._made
        async with self._making:
            if guardrails != self._made_of:
                self._made = await self._make(guardrails)
            self._made_of = guardrails
            return self._made

    async def _make(self, guardrails: Guardrails) -> BlockList:
        try:
            return await block_list_of(guardrails, self._max_match)
        except RequestError as error:
            # It came past the administration.
            raise PolicyUnavailable(
                f"the block list can't be read, so nothing is let through: {error.message}"
            ) from None


async def block_list_of(guardrails: Guardrails, max_match: int) -> BlockList:
    """Makes it in a thread, since it may be long.

    Raises:
        RequestError: invalid_guardrails.
    """
    make = partial(BlockList, guardrails.literals, guardrails.patterns, max_match)
    return await anyio.to_thread.run_sync(make)
