"""Which calls are attended at this gateway, and what becomes of those that nobody attends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio

from ...config import BusError, ChannelClosed, Config
from ...config.logger import get_logger
from ...store.calls import Calls, KeptCall
from .durable_calls import KeptCalls, telling_period_s

# Calls that are ended in one go because nobody came back to them.
_AT_ONCE = 64


class AbandonedCalls:
    """Says on the bus which calls are attended here, and ends those that nobody attends, also of
    gateways that were killed."""

    def __init__(
        self,
        calls: Calls,
        config: Config,
        attending: Callable[[], Iterable[KeptCalls]],
        owner_of: Callable[[KeptCall], KeptCalls | None],
    ) -> None:
        """Args: `attending` gives whoever attends calls here; `owner_of` who ends a call or goes on
        with it, None where that was its model's and the model is gone."""
        self._calls = calls
        self._period_s = telling_period_s(config)
        self._attending = attending
        self._owner_of = owner_of
        self._log = get_logger()

    @classmethod
    def of(cls, kept: KeptCalls, calls: Calls, config: Config) -> AbandonedCalls:
        """Where there is one model, whose all calls are."""
        return cls(calls, config, lambda: [kept], lambda found: kept)

    async def run_forever(self) -> None:
        """Returns when the bus was closed."""
        told = False
        while True:
            await anyio.sleep(self._period_s)
            try:
                for each in list(self._attending()):
                    await each.tell()
                # Each is told once: what this gateway took now would be lost with it.
                if not any(each.stopping for each in self._attending()):
                    await self._end_abandoned()
                told = False
            except ChannelClosed:
                return
            except BusError as error:
                if not told:
                    self._log.warning("calls_not_attended", error=error.message)
                told = True

    async def _end_abandoned(self) -> None:
        for call_id in await self._calls.abandoned(_AT_ONCE):
            if any(each.attends(call_id) for each in self._attending()):
                continue  # said again in the next round
            kept = await self._calls.read(call_id)
            owner = self._owner_of(kept) if kept is not None else None
            if kept is not None and owner is not None:
                await owner.end_abandoned(call_id, kept)
