"""Result streams in memory: outputs by reference, kept from publishing until followed."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Self

from ...config import BusError
from ...config.errors import bus_closed
from ..positions import invalid_position, results_lost
from ..public import Completion, Output, OutputBatch
from ..recipes import has_id
from .broadcast import Broadcast, Signal, Tail

KEPT_FINISHED = 1024
"""Limit on ended requests with unfollowed outputs."""

KEPT_OUTPUTS = 65_536
"""Limit on followed outputs that are kept (`keep`), over all requests."""

KEPT_RECORDS = 256
"""Limit on terminal messages that are kept for `recorded`."""

KEPT_RECORD_TOKENS = 65_536
"""Limit on their tokens, prompts included; top logprobs count as tokens, too."""

REMEMBERED_ENDED = 16_384
"""Limit on remembered entry ids of ended requests, which can't end twice."""

TAIL_CAPACITY = 1024
"""Buffer of terminal messages for a slow reader of `tail`; older ones are dropped."""


class _Route:
    """Outputs of one entry, and their keys."""

    __slots__ = ("changed", "claimed", "ended", "entry_id", "keys", "outputs")

    def __init__(self, entry_id: str) -> None:
        self.entry_id = entry_id
        self.keys: set[str] = set()
        self.claimed: set[str] = set()
        self.outputs: list[Output] = []
        self.ended = False
        self.changed = Signal()


class MemoryResults:
    """`ResultStreams` within one event loop.

    Outputs are stored by entry id, so requests with equal ids never mix. Running requests keep
    their outputs; of ended and unfollowed ones, the latest `KEPT_FINISHED` do.
    """

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}
        self._by_key: dict[str, _Route] = {}
        self._finished: dict[str, None] = {}
        # Followed and kept: the number of outputs of each, and in total.
        self._followed: dict[str, int] = {}
        self._kept_outputs = 0
        self._ended: dict[str, None] = {}
        # Each with its number of tokens.
        self._records: deque[tuple[Completion, int]] = deque()
        self._record_tokens = 0
        self._num_ended = 0
        self._recorded = Signal()
        # Positions of another process are not of this one.
        self._id = uuid.uuid4().hex[:8]
        self._terminal = Broadcast[Completion](TAIL_CAPACITY)
        self._appeared = Signal()
        self._closed = False

    def expect(self, entry_id: str, request_id: str) -> None:
        """Create the stream of an entry. `request_id` may be "", or in use."""
        self._check_open()
        route = self._routes[entry_id] = _Route(entry_id)
        for key in {entry_id, request_id} - {""}:
            self._lead(key, route)

    def forget(self, entry_id: str) -> None:
        """Drop an entry's outputs and keys."""
        self._finished.pop(entry_id, None)
        self._kept_outputs -= self._followed.pop(entry_id, 0)
        route = self._routes.pop(entry_id, None)
        if route is not None:
            for key in route.keys:
                self._by_key.pop(key, None)

    def followed(self, entry_id: str, *, keep: bool) -> None:
        """Record that an entry was followed to its end."""
        route = self._routes.get(entry_id)
        if not keep or route is None:
            self.forget(entry_id)
            return
        self._finished.pop(entry_id, None)
        self._kept_outputs += len(route.outputs) - self._followed.pop(entry_id, 0)
        self._followed[entry_id] = len(route.outputs)
        while self._kept_outputs > KEPT_OUTPUTS or len(self._followed) > KEPT_FINISHED:
            self.forget(next(iter(self._followed)))

    async def deliver(self, batch: OutputBatch, epoch: int = 1) -> set[str]:
        """Ignore the epoch: a replaced stage of this process is gone."""
        self._check_open()
        append = self._append
        for key, outputs in batch:
            for output in outputs:
                append(key, output)
        return set()

    async def recover(self, keys: Sequence[str], epoch: int) -> list[list[Output]]:
        self._check_open()
        routes = [self._by_key.get(key) for key in keys]
        return [[] if route is None else list(route.outputs) for route in routes]

    async def claim(self, claims: Sequence[tuple[str, str]]) -> list[str | None]:
        return [self._claim(key, entry_id) for key, entry_id in claims]

    def follow(
        self, request_id: str, entry_id: str, *, just_published: bool = False, keep: bool = False
    ) -> _Follow:
        return _Follow(self, request_id, entry_id, keep)

    async def last(self, request_id: str, entry_id: str) -> Output | None:
        self._check_open()
        route = self._entry(entry_id) if entry_id else self._by_key.get(request_id)
        return route.outputs[-1] if route is not None and route.outputs else None

    async def tail(self) -> Tail[Completion]:
        self._check_open()
        return Tail(self._terminal)

    async def ended(self, after: str = "") -> _Ended:
        self._check_open()
        return _Ended(self, self._number_of(after) if after else self._num_ended)

    def _number_of(self, position: str) -> int:
        """Return the number of ends before a position of `ended`.

        Raises:
            RequestError: invalid_position.
            BusError: results_lost.
        """
        bus, _, number = position.partition("-")
        if not (number.isdecimal() and number.isascii() and len(number) < 16):
            raise invalid_position(position)
        if bus != self._id or int(number) > self._num_ended:
            raise results_lost("the pipeline in memory that had them was replaced")
        return int(number)

    async def newest(self, within_s: float) -> AsyncIterator[Completion]:
        kept = [each for each, _ in self._records]
        since = kept[-1].timings.finished_ns - within_s * 1e9 if kept else 0
        for completion in kept:
            if completion.timings.finished_ns >= since:
                yield completion

    async def recorded(self, id: str, *, search: bool = True) -> list[Completion]:
        self._check_open()
        return [each for each, _ in self._records if has_id(each, id)]

    def close(self) -> None:
        """End all followers and tails once they have read the remaining outputs."""
        self._closed = True
        self._appeared.notify()
        for route in self._routes.values():
            route.changed.notify()
        self._terminal.close()
        self._recorded.notify()

    def _lead(self, key: str, route: _Route) -> None:
        """Map a key to a stream; the first of two entries with the same request id has the key."""
        if self._by_key.setdefault(key, route) is route:
            route.keys.add(key)
            self._appeared.notify()

    def _claim(self, key: str, entry_id: str) -> str | None:
        """Map a claimed key to its owner, whichever entry was published first."""
        holder = self._by_key.get(key)
        if holder is not None and key in holder.claimed:
            return holder.entry_id
        route = self._routes.get(entry_id)
        if route is None and entry_id not in self._ended:
            route = self._routes[entry_id] = _Route(entry_id)
        if route is None:
            return None
        if holder is not None and holder is not route:
            holder.keys.discard(key)
        self._by_key[key] = route
        route.keys.add(key)
        route.claimed.add(key)
        return None

    def _append(self, key: str, output: Output) -> None:
        entry_id = output.entry_id
        route = self._routes.get(entry_id)
        if route is None and entry_id not in self._ended:
            route = self._routes[entry_id] = _Route(entry_id)
        if route is None or route.ended:
            return
        if key not in route.claimed or key not in route.keys:
            self._lead(key, route)
            route.claimed.add(key)
        route.outputs.append(output)
        if isinstance(output, Completion):
            self._end(route, output)
        route.changed.notify()

    def _end(self, route: _Route, completion: Completion) -> None:
        route.ended = True
        self._record(completion)
        _remember(self._ended, route.entry_id, REMEMBERED_ENDED)
        oldest = _remember(self._finished, route.entry_id, KEPT_FINISHED)
        if oldest is not None:
            self.forget(oldest)
        self._terminal.push(completion)

    def _record(self, completion: Completion) -> None:
        size = _tokens_of(completion)
        self._records.append((completion, size))
        self._record_tokens += size
        while self._record_tokens > KEPT_RECORD_TOKENS or len(self._records) > KEPT_RECORDS:
            self._record_tokens -= self._records.popleft()[1]
        self._num_ended += 1
        self._recorded.notify()

    def _check_open(self) -> None:
        if self._closed:
            raise bus_closed()

    def _entry(self, entry_id: str) -> _Route:
        route = self._routes.get(entry_id)
        if route is None:
            raise BusError(
                f"entry {entry_id} is not in flight, and its outputs are no longer kept; "
                "each request can be followed once",
                code="unknown_request",
            )
        return route

    async def _find(self, request_id: str, entry_id: str) -> _Route:
        if entry_id:
            return self._entry(entry_id)
        while (route := self._by_key.get(request_id)) is None:
            self._check_open()
            await self._appeared.wait()
        return route


class _Follow:
    """Reader of one entry's outputs from the first on."""

    def __init__(self, results: MemoryResults, request_id: str, entry_id: str, keep: bool) -> None:
        self._results = results
        self._keep = keep
        self._wanted = (request_id, entry_id)
        self._route: _Route | None = None
        self._position = 0
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._done:
            raise StopAsyncIteration
        if self._route is None:
            self._route = await self._results._find(*self._wanted)
        route, position = self._route, self._position
        while position == len(route.outputs):
            self._results._check_open()
            await route.changed.wait()
            if self._done:  # by `aclose`
                raise StopAsyncIteration
        output = route.outputs[position]
        self._position = position + 1
        if isinstance(output, Completion):
            self._done = True
            self._results.followed(route.entry_id, keep=self._keep)
        return output

    async def aclose(self) -> None:
        """Stops reading; the outputs stay."""
        self._done = True
        if self._route is not None:
            self._route.changed.notify()


class _Ended:
    """Reader of all ends, from one of them on."""

    def __init__(self, results: MemoryResults, number: int) -> None:
        """`number`: of the ends before."""
        self._results = results
        self._number = number
        self._done = False

    @property
    def position(self) -> str:
        return f"{self._results._id}-{self._number}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Completion:
        results = self._results
        while not self._done:
            behind = results._num_ended - self._number
            if behind > len(results._records):
                raise results_lost("in memory only the last ones are kept; use Redis for more")
            if behind:
                self._number += 1
                return results._records[-behind][0]
            results._check_open()
            await results._recorded.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading."""
        self._done = True
        self._results._recorded.notify()


def _tokens_of(completion: Completion) -> int:
    """Return the tokens of a completion's prompt and samples, of their top logprobs and masks."""
    size = len(completion.prompt_token_ids)
    size += sum(map(len, completion.prompt_top_logprobs or ()))
    for sample in completion.samples:
        size += len(sample.token_ids) + len(sample.embedding or ())
        size += sum(map(len, sample.top_logprobs or ()))
        size += sum(map(len, sample.sampling_masks or ())) // 4
    return size


def _remember(names: dict[str, None], name: str, most: int) -> str | None:
    """Record a name; drop and return the oldest beyond `most`."""
    names[name] = None
    if len(names) <= most:
        return None
    oldest = next(iter(names))
    del names[oldest]
    return oldest
