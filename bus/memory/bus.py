"""The bus within one process: messages pass by reference, unencoded.

For one event loop; a hop costs one deque operation and, for a waiting receiver, one wake-up.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from ...config import STAGES, BusConfig, BusError, role_of_sender, split_role
from ...config.errors import bus_closed
from ...config.forks import check_not_forked
from ...store.records import MemoryRecords
from ...store.redis.keys import Keys
from ...store.store import memory_store
from ..backlog import Backlog
from ..channel import Bus, Inbox
from ..codec import check_request
from ..dead_letters import DeadLetter, dead_letter
from ..ending import end_entries
from ..entries import Answer, RequestEntry, usable_trace
from ..envelope import Envelope
from ..links import AnyLink
from ..public import AnyRequest, Completion, ErrorInfo
from ..queue import BoundedQueue
from ..replies import Replies
from ..routing import RequestRouting
from ..sender import Numbering, Sender
from ..shards import Layout
from .kv_events import MemoryKVEvents
from .results import MemoryResults

KEPT_DEAD = 1024
"""Limit on dead letters in memory."""


class MemoryInbox:
    """`Inbox` of a stage: all its links in one queue, in order of arrival."""

    def __init__(self, stage: str, link_capacity: int) -> None:
        self._queue: BoundedQueue[Envelope] = BoundedQueue(f"the inbox of {stage}")
        self._link_capacity = link_capacity

    def __len__(self) -> int:
        return len(self._queue)

    async def receive(self, max_items: int = 64) -> list[Envelope]:
        return await self._queue.take(max_items)

    def put(self, link: AnyLink, envelope: Envelope) -> Awaitable[None]:
        """Append a message; wait while `link` uses its share of the queue.

        Clients have a separate share on control links, which they could otherwise fill.

        Raises:
            ChannelClosed: The inbox was closed.
        """
        if link.closes_circle and _stage_of(envelope.sender) not in STAGES:
            return self._queue.put(envelope, f"{link.name} of clients", self._link_capacity)
        capacity = None if link.closes_circle else self._link_capacity
        return self._queue.put(envelope, link.name, capacity)

    def take_over(self, older: MemoryInbox) -> None:
        """Close an older inbox of the same stage; its waiting senders continue with this one."""
        older._queue.move_waiting_to(self._queue)
        older._queue.close()

    def close(self) -> None:
        """Accept no more messages; queued ones can still be received."""
        self._queue.close()


def _stage_of(sender: str) -> str:
    return split_role(role_of_sender(sender))[0]


class Inboxes:
    """The inboxes of this process, by stage."""

    def __init__(self) -> None:
        self._by_stage: dict[str, MemoryInbox] = {}
        self.closed = False

    def add(self, stage: str, inbox: MemoryInbox) -> None:
        older = self._by_stage.get(stage)
        self._by_stage[stage] = inbox
        if older is not None:
            inbox.take_over(older)

    def get(self, stage: str) -> MemoryInbox | None:
        """Return the stage's inbox, or None if it was never opened.

        Raises:
            ChannelClosed: The bus was closed.
        """
        if self.closed:
            raise bus_closed()
        return self._by_stage.get(stage)

    def close(self) -> None:
        self.closed = True
        for inbox in self._by_stage.values():
            inbox.close()


class MemorySender(Sender):
    """`Sender` of a link whose receiver is in this process."""

    def __init__(self, inboxes: Inboxes, numbering: Numbering, link: AnyLink, sender: str) -> None:
        super().__init__(numbering, link, sender)
        self._inboxes = inboxes

    def _put(self, envelope: Envelope) -> Awaitable[None]:
        inbox = self._inboxes.get(self._link.receiver)
        # Without an inbox the message is lost.
        return self.flush() if inbox is None else inbox.put(self._link, envelope)

    async def flush(self) -> None:
        """Do nothing: messages are in the receiver's inbox."""


class MemoryRequests:
    """`RequestQueue` within one process. Entry ids are "0-1", "0-2" and so on."""

    def __init__(self, config: BusConfig, results: MemoryResults) -> None:
        self._config = config
        self._results = results
        # With the time of publication.
        self._queue: BoundedQueue[tuple[RequestEntry, int]] = BoundedQueue("the requests queue")
        self._taken: dict[str, tuple[RequestEntry, int]] = {}
        self._dead: OrderedDict[str, DeadLetter] = OrderedDict()
        self._begun = 0
        self._last = 0

    async def publish(
        self, request: AnyRequest, *, traceparent: str = "", tracestate: str = ""
    ) -> str:
        check_not_forked()
        checked = check_request(request, self._config.max_request_bytes)
        self._last += 1
        entry_id = f"0-{self._last}"
        # Outputs can arrive as soon as the entry is queued, so their stream is created first.
        self._results.expect(entry_id, checked.request_id)
        entry = RequestEntry(entry_id, checked, *usable_trace(traceparent, tracestate))
        item = (entry, time.monotonic_ns())
        try:
            await self._queue.put(item, capacity=self._config.link_capacity)
        except (BusError, asyncio.CancelledError):
            self._results.forget(entry_id)
            raise
        return entry_id

    async def pending(self) -> list[RequestEntry]:
        return [_aged(*item) for item in self._taken.values()]

    async def take(self, max_items: int = 64) -> list[RequestEntry]:
        items = await self._queue.take(max_items)
        self._taken.update((entry.entry_id, (entry, since)) for entry, since in items)
        return [_aged(*item) for item in items]

    async def acknowledge(self, entry_id: str, request_id: str | None = None) -> None:
        self._taken.pop(entry_id, None)

    async def renew(self, lease_s: float) -> set[str]:
        """Return nothing lost: there is no other lane."""
        return set()

    def mark_possibly_lost(self) -> None:
        """Do nothing: there is no server."""

    async def take_over(self, lease_s: float, max_items: int) -> list[RequestEntry]:
        return []

    async def shed(
        self, max_queued: int, answer: Callable[[RequestEntry, int], Completion], epoch: int
    ) -> int:
        """Refuse nothing: `publish` waits instead."""
        return 0

    async def end_all(self, answer: Answer, epoch: int) -> int:
        if len(self._queue):
            await self.take(len(self._queue))
        entries = [entry for entry, _ in self._taken.values()]
        ended = await end_entries(self._results, entries, answer, epoch)
        for entry_id in ended:
            await self.acknowledge(entry_id)
        return len(ended)

    async def add_dead_letter(self, entry: RequestEntry, error: ErrorInfo, deaths: int) -> None:
        """Keeps a letter; the oldest go when there are more than `KEPT_DEAD`."""
        letter = dead_letter(entry, error, deaths, time.time_ns())
        self._dead[entry.entry_id] = msgspec.structs.replace(letter, letter_id=entry.entry_id)
        if len(self._dead) > KEPT_DEAD:
            self._dead.popitem(last=False)

    async def dead_letters(self) -> list[DeadLetter]:
        return list(self._dead.values())

    async def shards(self) -> Layout:
        return Layout()

    async def shard_lengths(self) -> list[int]:
        numbers = await self.backlog()
        return [numbers.waiting + numbers.pending]

    async def set_shards(self, shards: int) -> Layout:
        raise BusError(
            "a bus in memory has one requests queue, without shards; use a Redis URL for bus.url",
            code="shards_in_memory",
        )

    async def drop_dead_letter(self, letter_id: str) -> bool:
        return self._dead.pop(letter_id, None) is not None

    async def count_queue(self, begun: int | None) -> int:
        self._begun = self._begun if begun is None else begun
        return (await self.backlog()).queue_length

    async def backlog(self) -> Backlog:
        waiting, pending = len(self._queue), len(self._taken)
        length = max(0, waiting + pending - self._begun)
        return Backlog(waiting, pending, len(self._dead), length)

    def close(self) -> None:
        self._queue.close()


def _aged(entry: RequestEntry, since_ns: int) -> RequestEntry:
    waited_ns = time.monotonic_ns() - since_ns
    limited_ns = 0 if entry.budget_ns is None else waited_ns
    return msgspec.structs.replace(entry, waited_ns=limited_ns, queued_ns=waited_ns)


class MemoryBus:
    """`Bus` within one process and event loop. Its contents end with the process."""

    model = ""
    durable = False
    reconnects = 0

    def __init__(self, config: BusConfig) -> None:
        self._config = config
        self._inboxes = Inboxes()
        self._numbering = Numbering()
        self._epoch = 0
        self.results = MemoryResults()
        self.requests = MemoryRequests(config, self.results)
        self.replies = Replies(Keys(config.prefix, config.lane), MemoryRecords())
        self.kv_events = MemoryKVEvents(config.kv_events_maxlen)
        self.store = memory_store(config)

    def __repr__(self) -> str:
        return f"MemoryBus({self._config!r})"

    def of_model(self, model: str) -> Bus:
        """Raise BusError: the memory bus serves one model."""
        raise _one_model()

    @property
    def routing(self) -> RequestRouting:
        """Raise BusError: with one model there is nothing to route."""
        raise _one_model()

    async def open_inbox(self, stage: str) -> Inbox:
        self._check_open()
        inbox = MemoryInbox(stage, self._config.link_capacity)
        self._inboxes.add(stage, inbox)
        return inbox

    async def lanes(self) -> list[str]:
        """Return the one lane."""
        return [self._config.lane]

    def sender(self, link: AnyLink, sender: str, lane: str | None = None) -> Sender:
        return MemorySender(self._inboxes, self._numbering, link, sender)

    async def next_epoch(self) -> int:
        self._check_open()
        self._epoch += 1
        return self._epoch

    async def is_epoch(self, number: int) -> bool:
        return number <= self._epoch

    async def is_newest(self, stage: str) -> bool:
        """Return True: no other process has this bus."""
        return True

    async def ping(self) -> None:
        """Returns at once; raises ChannelClosed after `aclose`."""
        self._check_open()

    async def aclose(self) -> None:
        self._inboxes.close()
        self.requests.close()
        self.results.close()
        self.kv_events.close()

    def _check_open(self) -> None:
        if self._inboxes.closed:
            raise bus_closed()


def _one_model() -> BusError:
    return BusError(
        "a pipeline in memory serves one model; several take a Redis URL as bus.url",
        code="unknown_model",
    )
