"""Limits on Redis: a hash per limit, with a field per gateway.

A gateway writes its own fields only, each as a whole, and sequentially. So a retried write after a
lost reply loses nothing, and no script is needed. To reserve, a gateway writes its share and reads
all shares in the same transaction: if the sum fits, the reservation is granted, else the share is
rewritten without it. Of two simultaneous reservations of the last room, both may see the other's
and fail; they retry once. Waiting reservations are batched, so that many cost little more than one.

Only the server's clock counts. A server with an unknown `run_id` may have lost its data: it
restarted, or is a promoted replica. Each active gateway checks for that every `BEAT_S`, and then
writes all its fields; for `PATIENCE_S` nothing is granted, and reservations wait. So only
reservations of a gateway that died or was cut off in the same seconds as the server are lost.

Concurrency has a lease, which its gateway renews; a killed gateway's is free after `HELD_S`. In
windows its usage keeps counting.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from ...config import BusError, ChannelClosed
from ...config.errors import bus_closed
from ...config.logger import get_logger
from ..limits import SLICES, Charge, Limit, Reservation
from ..shares import Counted, commit, reserve
from .client import Commands, end_tasks, transact, watched
from .keys import Keys

HELD_S = 30.0
"""Lease of concurrency."""

BEAT_S = 0.5
"""Interval at which an active gateway checks the server's identity."""

PATIENCE_S = 2.0
"""Time that a new server waits for all gateways' shares before it grants anything."""

COMMITTED_S = 0.05
"""Time that a commit waits to be written together with a reservation."""

AT_ONCE = 100
"""Reservations decided together."""

PAGE = 200
"""Limits written together, besides those of these reservations."""

_RUN = re.compile(rb"run_id:(\w+)")
_UPTIME = re.compile(rb"uptime_in_seconds:(\d+)")


class _Wish:
    """A pending reservation.

    Attributes:
        tried: The part written to test whether it fits; None for nothing.
        tries: Number of attempts that failed although they seemed to fit.
    """

    def __init__(self, charges: tuple[Charge, ...]) -> None:
        self.charges = charges
        self.answer: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self.tried: Reservation | None = None
        self.tries = 0


class _Told(NamedTuple):
    """A transaction's replies, with the server's identity and time."""

    run: bytes
    uptime_s: int
    now_ms: int
    replies: list[Any]


class RedisLimits:
    """`LimitStore` over one Redis server."""

    def __init__(self, keys: Keys, commands: Commands) -> None:
        self._keys = keys
        self._commands = commands
        self._gateway = uuid.uuid4().hex[:16].encode()
        self._reservations = 0
        self._wishes: list[_Wish] = []
        self._counted: dict[bytes, Counted] = {}
        # A superset of the limits to write.
        self._touched: set[bytes] = set()
        # The server that has all fields, the time from which it grants, and the offset of its
        # clock.
        self._run = b""
        self._opens_ms = 0
        self._ahead_ms = 0.0
        self._urgent = asyncio.Event()
        self._in_use = asyncio.Event()
        self._committing: asyncio.TimerHandle | None = None
        self._tidied_s = 0.0
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def reserve(self, charges: Sequence[Charge]) -> Reservation:
        if self._closing:
            raise bus_closed()
        if self._task is None or self._task.done():
            self._task = watched(self._serve(), "limits", self._fail_all)
        wish = _Wish(tuple(charges))
        self._wishes.append(wish)
        self._wake()
        try:
            return await wish.answer
        except asyncio.CancelledError:
            # It may have been granted at the same moment.
            if not wish.answer.cancelled() and wish.answer.exception() is None:
                self._undo(wish.answer.result())
                self._wake()
            raise

    def commit(self, reservation: Reservation, amounts: Sequence[int]) -> None:
        commit(reservation, amounts, self._find)
        if self._committing is None:
            self._committing = asyncio.get_running_loop().call_later(COMMITTED_S, self._wake)

    async def aclose(self, patience_s: float) -> None:
        """Write pending shares, within `patience_s`."""
        self._closing = True
        if self._task is not None:
            self._wake()
            await asyncio.wait([self._task], timeout=patience_s)
            await end_tasks({self._task})
        self._fail_all()

    # --- reservations ------------------------------------------------------------------------

    async def _serve(self) -> None:
        is_away = False
        while True:
            wishes, self._wishes = self._wishes[:AT_ONCE], self._wishes[AT_ONCE:]
            try:
                await self._round(wishes)
                is_away = False
            except BusError as error:
                self._fail(wishes, error)
                if isinstance(error, ChannelClosed) or self._closing:
                    return
                if not is_away:
                    get_logger().warning("bus.limits_not_written", error=str(error))
                is_away = True
            except BaseException:
                self._fail(wishes, bus_closed())
                raise
            if self._closing and not self._wishes and not any(self._unwritten()):
                return
            await self._rest(is_away)

    async def _rest(self, is_away: bool) -> None:
        """Wait until there is something to do."""
        self._tidy()
        if not (self._counted or self._wishes):
            self._in_use.clear()
        await self._in_use.wait()
        if is_away and not self._wishes:
            self._urgent.clear()  # what is to be written can wait for the next beat
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._urgent.wait()

    async def _round(self, wishes: list[_Wish]) -> None:
        """Answer reservations, or queue them for a retry; write pending shares."""
        self._urgent.clear()
        if not self._run:
            await self._meet()
        now_ms = self._now_ms()
        if now_ms < self._opens_ms:
            await asyncio.sleep((self._opens_ms - now_ms) / 1000)
        wishes = [each for each in wishes if not each.answer.done()]
        for wish in wishes:
            self._try(wish)
        asked = {self._find(charge.limit).key for wish in wishes for charge in wish.charges}
        reply = await self._write(asked)
        tried = [self._release(wish) for wish in wishes]
        if reply.run != self._run:
            self._run, again = b"", wishes
        else:
            # One after the other, each seeing only those before it.
            again = [
                wish
                for wish, reservation in zip(wishes, tried, strict=True)
                if not self._answer(wish, reservation, reply.now_ms)
            ]
        self._wishes = again + self._wishes
        if self._wishes or not self._run or any(self._unwritten()):
            self._wake()

    def _try(self, wish: _Wish) -> None:
        """Reserve what seems to fit by the sums read last."""
        self._reservations += 1
        reservation_id = f"{self._gateway.decode()}-{self._reservations}"
        reservation = reserve(reservation_id, wish.charges, self._find, self._now_ms())
        wish.tried = reservation if reservation.granted else None

    def _release(self, wish: _Wish) -> Reservation | None:
        """Undo an attempt."""
        tried, wish.tried = wish.tried, None
        if tried is not None:
            self._undo(tried)
        return tried

    def _undo(self, reservation: Reservation) -> None:
        if reservation.granted:
            commit(reservation, [0] * len(reservation.charges), self._find)

    def _answer(self, wish: _Wish, tried: Reservation | None, now_ms: int) -> bool:
        """Return whether a reservation could be answered by the current sums."""
        if wish.answer.done():
            return True
        reservation_id = "" if tried is None else tried.reservation_id
        reservation = reserve(reservation_id, wish.charges, self._find, now_ms)
        if reservation.granted and (tried is None or tried.slices != reservation.slices):
            # It was not written, or to a server that doesn't count.
            self._undo(reservation)
            return False
        if not reservation.granted and tried is not None and not wish.tries:
            wish.tries += 1
            return False
        wish.answer.set_result(reservation)
        return True

    def _fail(self, wishes: list[_Wish], error: BusError) -> None:
        for wish in wishes:
            self._release(wish)
            if not wish.answer.done():
                wish.answer.set_exception(error)

    def _fail_all(self) -> None:
        wishes, self._wishes = self._wishes, []
        self._fail(wishes, bus_closed())

    def _wake(self) -> None:
        if self._committing is not None:
            self._committing.cancel()
            self._committing = None
        self._in_use.set()
        self._urgent.set()

    # --- writing -----------------------------------------------------------------------------

    async def _meet(self) -> None:
        """Write everything to a server that may lack it."""
        key = self._keys.limits_servers
        reply = await self._transact([("HGETALL", key)])
        (known,) = reply.replies
        run = reply.run
        if run not in known:
            # A server without a record of itself has lost its data, or was empty at its start.
            since_ms = reply.now_ms - (0 if known else reply.uptime_s * 1000)
            note = [("HDEL", key, *known)] if known else []
            reply = await self._transact([*note, ("HSETNX", key, run, since_ms), ("HGETALL", key)])
            known = reply.replies[-1]
        for counted in self._counted.values():
            counted.written = None
        self._touched.update(self._counted)
        while any(self._unwritten()) and reply.run == run:
            reply = await self._write(())
        since_ms = min(int(known.get(run, reply.now_ms)), reply.now_ms)
        self._opens_ms = since_ms + int(PATIENCE_S * 1000)
        self._run = run if reply.run == run else b""

    async def _write(self, asked: Collection[bytes]) -> _Told:
        """Write some pending shares, and read all shares of some limits."""
        now_s, until_ms = time.monotonic(), self._now_ms() + int(HELD_S * 1000)
        reads = [self._counted[key] for key in asked]
        others = (each for each in self._unwritten() if each.key not in asked)
        page = [*reads, *islice(others, max(0, PAGE - len(reads)))]
        sent: list[tuple[Counted, dict[int, int]]] = []
        commands: list[Sequence[Any]] = []
        for counted in page:
            if counted.is_unwritten(now_s):
                commands += self._share(counted, until_ms)
                counted.written = None
                sent.append((counted, dict(counted.own)))
                counted.renew_at_s = now_s + HELD_S / 3
        commands += [("HGETALL", each.key) for each in reads]
        reply = await self._transact(commands)
        for counted, own in sent:
            counted.written = own
        for counted, shares in zip(reads, reply.replies[len(commands) - len(reads) :], strict=True):
            await self._read(counted, shares, reply.now_ms)
        return reply

    def _share(self, counted: Counted, until_ms: int) -> list[Sequence[Any]]:
        if not counted.own:
            counted.expire_at_s = 0.0  # it may have been the last field, with which the key goes
            return [("HDEL", counted.key, self._gateway)]
        share = ("HSET", counted.key, self._gateway, counted.encoded(until_ms))
        counts_s = SLICES * counted.step_ms / 1000 or HELD_S
        now_s = time.monotonic()
        if counted.written is not None and now_s < counted.expire_at_s:
            return [share]
        counted.expire_at_s = now_s + counts_s / 4
        return [share, ("PEXPIRE", counted.key, int(2000 * counts_s))]

    async def _read(self, counted: Counted, shares: Mapping[bytes, bytes], now_ms: int) -> None:
        others = {name: share for name, share in shares.items() if name != self._gateway}
        counted.read_others(others.values(), now_ms)
        if counted.written and len(others) == len(shares):
            counted.written = None  # it was evicted or flushed
        if gone := counted.forgotten(others, now_ms):
            await self._transact([("HDEL", counted.key, *gone)])

    async def _transact(self, commands: Sequence[Sequence[Any]]) -> _Told:
        redis, key = self._commands.redis, self._keys.limits_servers
        whole = (("TIME",), ("INFO", "server"), *commands)
        time_, info, *replies = await self._commands.once(partial(transact, redis, key, whole))
        run, uptime = _RUN.search(info), _UPTIME.search(info)
        if run is None or uptime is None:
            raise BusError(
                "the server does not tell its run_id, without which nothing is limited",
                remedy="use a Redis or Valkey server itself, and no proxy",
            )
        now_ms = int(time_[0]) * 1000 + int(time_[1]) // 1000
        self._ahead_ms = now_ms - time.monotonic() * 1000
        return _Told(run[1], int(uptime[1]), now_ms, replies)

    def _now_ms(self) -> int:
        return int(time.monotonic() * 1000 + self._ahead_ms)

    def _find(self, limit: Limit) -> Counted:
        key = self._keys.limit(limit.name, limit.window_s)
        if (counted := self._counted.get(key)) is None:
            counted = self._counted[key] = Counted(key, limit)
        self._touched.add(key)
        return counted

    def _unwritten(self) -> Iterator[Counted]:
        now_s = time.monotonic()
        for key in list(self._touched):
            counted = self._counted.get(key)
            if counted is not None and counted.is_unwritten(now_s):
                yield counted
            else:
                self._touched.discard(key)

    def _tidy(self) -> None:
        """Drop unused limits, and find leases to renew."""
        now_s, now_ms = time.monotonic(), self._now_ms()
        if now_s < self._tidied_s + HELD_S / 6:
            return
        self._tidied_s = now_s
        for key, counted in list(self._counted.items()):
            counted.advance(now_ms)
            if counted.is_unwritten(now_s):
                self._touched.add(key)
            elif not counted.own:
                del self._counted[key]
