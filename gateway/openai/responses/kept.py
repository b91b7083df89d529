"""Responses that are under way, and those that have ended and may be asked for again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import anyio
import msgspec

from ....config import RequestError, shown

MOST_BYTES = 64 << 20
"""What all that have ended may take in memory; the oldest go first."""


class KeptResponse:
    """A response, as far as it is known.

    Attributes:
        store: Whether it may be asked for when it has ended.
        ended: Set when it has.
        body: As JSON.
    """

    def __init__(self, begun: dict[str, Any], store: bool) -> None:
        self.store = store
        self.ended = anyio.Event()
        self.body = msgspec.json.encode(begun)
        self.status: str = begun["status"]
        self.until_s = 0.0

    def end(self, response: dict[str, Any], until_s: float) -> None:
        """What it has become, and until when it is kept."""
        self.body = msgspec.json.encode(response)
        self.status = response["status"]
        self.until_s = until_s
        self.ended.set()


class KeptResponses:
    """Those of one gateway."""

    def __init__(self, lasts_s: float) -> None:
        """`lasts_s`: how long one is kept when it has ended."""
        self._lasts_s = lasts_s
        self._under_way: dict[str, KeptResponse] = {}
        # The first to have ended comes first.
        self._ended: OrderedDict[str, KeptResponse] = OrderedDict()
        self._bytes = 0

    def begin(self, response: dict[str, Any]) -> None:
        """One that is made from now on."""
        self._under_way[response["id"]] = KeptResponse(response, response["store"])

    def end(self, response: dict[str, Any]) -> None:
        """One that is made."""
        kept = self._under_way.pop(response["id"])
        kept.end(response, anyio.current_time() + self._lasts_s)
        if kept.store:
            self._ended[response["id"]] = kept
            self._bytes += len(kept.body)
        self._forget_old()

    def drop(self, response_id: str) -> None:
        """One that nobody waits for any more; none is fine."""
        if kept := self._under_way.pop(response_id, None):
            kept.ended.set()

    def under_way(self, response_id: str) -> KeptResponse | None:
        """One that is being made, stored or not."""
        return self._under_way.get(response_id)

    def find(self, response_id: str) -> KeptResponse:
        """One that is stored.

        Raises:
            RequestError: unknown_response.
        """
        self._forget_old()
        kept = self._under_way.get(response_id) or self._ended.get(response_id)
        if kept is None or not kept.store:
            raise RequestError(
                f"there is no response {shown(response_id)} at this gateway: it was not stored, or "
                "was deleted, or is too old",
                code="unknown_response",
            )
        return kept

    def delete(self, response_id: str) -> None:
        """Has one not be stored any more.

        Raises:
            RequestError: unknown_response.
        """
        self.find(response_id).store = False
        if kept := self._ended.pop(response_id, None):
            self._bytes -= len(kept.body)

    def _forget_old(self) -> None:
        now_s = anyio.current_time()
        while self._ended:
            response_id, oldest = next(iter(self._ended.items()))
            if oldest.until_s > now_s and self._bytes <= MOST_BYTES:
                break
            del self._ended[response_id]
            self._bytes -= len(oldest.body)
