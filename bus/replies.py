"""Replies to control messages."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from ..store.records import Records
from ..store.redis.keys import Keys
from .kv_sessions import KVSessionResult

KEPT_S = 600
"""Seconds that a reply is kept."""

_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.1


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of an operation in one lane.

    Attributes:
        lane: The lane.
        role: Role of the replying stage.
        code: An error's stable code; "" for success.
        message: The error's message.
        weight_version: Version of the weights in place afterwards, for weight operations.
        newest_version: The lane's newest known version, if larger.
        kv_session: Result of a ControlSession message.
        logged: Of prepared weights: their run in the log of weights, and the digest of all.
        checksums: Result of a ChecksumWeights message, by parameter.
    """

    lane: str
    role: str
    code: str = ""
    message: str = ""
    weight_version: int = 0
    newest_version: int = 0
    kv_session: KVSessionResult | None = None
    checksums: dict[str, str] | None = None
    logged: str = ""


class Replies:
    """Replies by operation id, each in one expiring list. Not durable; kept for `KEPT_S`.

    Callers poll, since operations are rare and slow. A reply of this process wakes them.
    """

    def __init__(self, keys: Keys, records: Records) -> None:
        self._keys = keys
        self._records = records
        self._answered = asyncio.Event()

    async def answer(self, operation_id: str, outcome: Outcome) -> None:
        """Reply to the sender of an operation; without an id do nothing.

        Raises:
            BusError: The transport can't be reached.
        """
        if not operation_id:
            return
        key = self._keys.reply(operation_id)
        commands = [("RPUSH", key, msgspec.json.encode(outcome)), ("EXPIRE", key, KEPT_S)]
        await self._records.run_all(commands)
        self._answered.set()

    async def outcomes(self, operation_id: str, number: int, timeout_s: float) -> list[Outcome]:
        """Wait for `number` replies, and return those that arrived in time. May be called again.

        Raises:
            BusError: The transport can't be reached.
        """
        now = asyncio.get_running_loop().time
        end, wait_s = now() + timeout_s, _FIRST_WAIT_S
        while True:
            self._answered.clear()
            raw = await self._records.run("LRANGE", self._keys.reply(operation_id), 0, -1)
            left_s = end - now()
            if len(raw) >= number or left_s <= 0:
                return [msgspec.json.decode(answer, type=Outcome) for answer in raw]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, left_s)):
                    await self._answered.wait()
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
