"""Tokens of many sequences, found again by those in front of them, in memory that does not grow.

The tokens lie in a ring of chunks, each of one sequence, so that what follows a place is a slice.
For each of some orders n, places with the same n tokens up to them are chained, newest first, from
a table of buckets by a rolling hash. The oldest chunk is the next to be used. Nothing is looked for
in order to remove it: the chunk loses its tags, and chains that lead there find nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ..batch import IntArray

CHUNK_TOKENS = 32
_SHIFT = CHUNK_TOKENS.bit_length() - 1
_IN_CHUNK = CHUNK_TOKENS - 1
_NONE = -1

WHOLE = 0
"""The order of all tokens of a sequence, from its first one on."""

_WORD = (1 << 64) - 1
_TAG = (1 << 31) - 1
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_FEWEST_AT_ONCE = 64
"""So many tokens are faster in numpy than one by one."""

_MOST_STEPS = 32
"""Along a chain, for one order: siblings in step have nothing behind their places yet."""

_Words = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Writer:
    """Where in an index a sequence is written.

    Attributes:
        number: Tells it from other writers of the index.
        scope: Sequences are found only by those of the same one; 63 bits.
        tail: Its last tokens, at least as many as the largest order.
        hashes: For each order, the rolling hash of its last tokens.
        place: Of its last token; -1 before the first, or if it has been forgotten.
    """

    number: int
    scope: int
    tail: list[int]
    hashes: list[int]
    place: int = _NONE


@dataclass(frozen=True, slots=True)
class Match:
    """Places at which the last tokens of a sequence stand too, and what came behind them.

    Attributes:
        length: So many tokens are the same at each.
        continuations: For each place, newest first, tokens behind it, at least one.
        lengths: For each place, how many tokens are the same; up to the next larger order only, and
            empty where all continuations are one.
    """

    length: int
    continuations: list[list[int]]
    lengths: list[int] = field(default_factory=list)


class _Order:
    """The chains of places with the same n tokens up to them."""

    def __init__(self, length: int, places: int, buckets: int) -> None:
        self.length = length
        # Takes what the token n places back adds out of a hash; of all tokens none ever leaves.
        self.leaving = -pow(_BASE, length + 1, 1 << 64) & _WORD if length else 0
        self.back = length or 1
        # Zeros are no memory yet: it is taken page by page as it is written. A place is stored
        # plus one. Single elements are read from a memoryview in half the time.
        self.heads_array = np.zeros(buckets, np.int32)
        self.chain_array = np.zeros(places, np.int32)
        self.tags_array = np.zeros(places, np.int32)
        self.heads = self.heads_array.data
        self.chain = self.chain_array.data
        self.tags = self.tags_array.data


class TokenIndex:
    """An index of at most so many tokens.

    A token takes 8 bytes, and 12 to 16 for each order.
    """

    def __init__(self, max_tokens: int, orders: tuple[int, ...], most_places: int = 8) -> None:
        """
        Args:
            max_tokens: Most tokens that are kept, rounded down to whole chunks, but at least two.
            orders: The lengths of contexts by which places are found, falling; `WHOLE` is longest.
            most_places: So many of the newest places are looked at.
        """
        self._num_chunks = max(2, max_tokens // CHUNK_TOKENS)
        places = self._num_chunks * CHUNK_TOKENS
        bits = (places - 1).bit_length()
        self._high = 64 - bits
        self._orders = [_Order(length, places, 1 << bits) for length in orders]
        # As locals of a loop they cost half of what attributes do.
        self._to_append = [(-o.back, o.leaving, o.heads, o.chain, o.tags) for o in self._orders]
        self._longest = max(orders)
        self._most_places = most_places
        self._tokens_array: IntArray = np.zeros(places, np.int64)
        self._tokens = self._tokens_array.data
        # Of each chunk: its writer's number, its scope, its tokens, and the chunks beside it.
        self._owners = [_NONE] * self._num_chunks
        self._scopes = [_NONE] * self._num_chunks
        self._filled = [0] * self._num_chunks
        self._nexts = [_NONE] * self._num_chunks
        self._befores = [_NONE] * self._num_chunks
        self._next_chunk = 0
        self._num_writers = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, once all of it has been written."""
        orders = self._orders
        views = [view for order in orders for view in (order.heads, order.chain, order.tags)]
        return sum(view.nbytes for view in (self._tokens, *views))

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept."""
        return sum(self._filled)

    def writer(self, scope: int, before: IntArray) -> Writer:
        """A writer of a sequence that begins behind some tokens, which are not kept themselves."""
        self._num_writers += 1
        last = before[-self._longest :].tolist() if before.size else []
        tail = [0] * (self._longest - len(last)) + last
        hashes = []
        for order in self._orders:
            whole = order.length == WHOLE
            value = _digest(before.tobytes()) if whole else 0
            for token in () if whole else tail[-order.length :]:
                value = (value + token) * _BASE & _WORD
            hashes.append(value)
        return Writer(self._num_writers, scope, tail, hashes)

    def extend(self, writer: Writer, tokens: IntArray) -> None:
        """A sequence has got tokens."""
        if len(tokens) < _FEWEST_AT_ONCE:
            for token in tokens.tolist():
                self._append(writer, token)
        else:
            self._append_many(writer, tokens)

    def find(self, writer: Writer, limit: int) -> Match | None:
        """The newest places of the longest context that is found, and what follows them.

        Args:
            writer: Of the sequence whose last tokens are the context.
            limit: Most tokens of a continuation. One that reaches the end of the sequence itself
                begins anew, as a text does that repeats itself.
        """
        if writer.place == _NONE:
            return None
        scope, own, high = writer.scope, writer.place, self._high
        longer = self._longest
        for order, value in zip(self._orders, writer.hashes, strict=True):
            value ^= scope
            stored = order.heads[value >> high]
            if stored == own + 1:
                stored = order.chain[own]
            length = order.length or longer
            if stored and (places := self._places(order, stored, value & _TAG, writer)):
                found = [self._read(place, limit, writer) for place in places]
                if length == longer or found.count(found[0]) == len(found):
                    return Match(length, found)
                lengths = [self._same(place, writer.tail, length, longer) for place in places]
                return Match(length, found, lengths)
            longer = length
        return None

    def _append(self, writer: Writer, token: int) -> None:
        tail, hashes = writer.tail, writer.hashes
        place = self._room(writer)
        scope, high = writer.scope, self._high
        self._tokens[place] = token
        self._filled[place >> _SHIFT] += 1
        for index, (back, leaving, heads, chain, tags) in enumerate(self._to_append):
            value = ((hashes[index] + token) * _BASE + tail[back] * leaving) & _WORD
            hashes[index] = value
            value ^= scope
            bucket = value >> high
            chain[place] = heads[bucket]
            heads[bucket] = place + 1
            tags[place] = value & _TAG
        writer.place = place
        tail.append(token)
        if len(tail) > 4 * self._longest:
            del tail[: -self._longest]

    def _append_many(self, writer: Writer, tokens: IntArray) -> None:
        tokens = tokens[-(self._num_chunks - 1) * CHUNK_TOKENS :]
        places = self._rooms(writer, len(tokens))
        self._tokens_array[places] = tokens
        around = np.concatenate((writer.tail[-self._longest :], tokens)).astype(np.uint64)
        powers, inverses = _powers(len(around) + 1)
        # All tokens up to each, the newest times the base: sum of t[j] * base ** (i - j + 1).
        sums: _Words = np.cumsum(around * inverses[: len(around)], dtype=np.uint64)
        sums = sums * powers[1:]
        new = sums[self._longest :]
        for index, order in enumerate(self._orders):
            if order.length == WHOLE:
                before = (writer.hashes[index] - int(sums[self._longest - 1])) & _WORD
                values = new + powers[1 : len(new) + 1] * np.uint64(before)
            else:
                left = np.concatenate((np.zeros(1, np.uint64), sums))[: len(sums)]
                left = left[self._longest - order.length + 1 :][: len(new)]
                values = new - left * powers[order.length]
            writer.hashes[index] = int(values[-1])
            self._chain(order, values ^ np.uint64(writer.scope), places)
        writer.place = int(places[-1])
        writer.tail = around[-self._longest :].astype(np.int64).tolist()

    def _chain(self, order: _Order, values: _Words, places: IntArray) -> None:
        """Puts places, in order, at the heads of their chains."""
        buckets = (values >> np.uint64(self._high)).astype(np.int64)
        by_bucket = np.argsort(buckets, kind="stable")
        buckets, stored = buckets[by_bucket], places[by_bucket] + 1
        first = np.append(True, buckets[1:] != buckets[:-1])
        before = np.append(0, stored[:-1])
        before[first] = order.heads_array[buckets[first]]
        order.chain_array[stored - 1] = before
        last = np.append(first[1:], True)
        order.heads_array[buckets[last]] = stored[last]
        order.tags_array[places] = (values & np.uint64(_TAG)).astype(np.int32)

    def _room(self, writer: Writer) -> int:
        """The place for a writer's next token."""
        place = writer.place
        if place == _NONE:
            return self._take_chunk(writer, _NONE)
        chunk = place >> _SHIFT
        if self._owners[chunk] != writer.number:
            return self._take_chunk(writer, _NONE)
        if place & _IN_CHUNK == _IN_CHUNK:
            return self._take_chunk(writer, chunk)
        return place + 1

    def _rooms(self, writer: Writer, count: int) -> IntArray:
        """The places for a writer's next tokens."""
        places: list[int] = []
        while len(places) < count:
            start = self._room(writer)
            chunk = start >> _SHIFT
            stop = min((chunk + 1) << _SHIFT, start + count - len(places))
            self._filled[chunk] = stop - (chunk << _SHIFT)
            places.extend(range(start, stop))
            writer.place = stop - 1
        return np.array(places, np.int64)

    def _take_chunk(self, writer: Writer, before: int) -> int:
        """Forgets the oldest chunk, gives it to a writer, and says where it begins."""
        chunk = self._next_chunk
        self._next_chunk = (chunk + 1) % self._num_chunks
        beside = self._nexts[chunk], self._befores[chunk]
        if beside[0] != _NONE:
            self._befores[beside[0]] = _NONE
        if beside[1] != _NONE:
            self._nexts[beside[1]] = _NONE
        start = chunk << _SHIFT
        if self._filled[chunk]:
            for order in self._orders:
                order.tags_array[start : start + CHUNK_TOKENS] = 0
        self._owners[chunk], self._scopes[chunk] = writer.number, writer.scope
        self._filled[chunk] = 0
        self._nexts[chunk], self._befores[chunk] = _NONE, before
        if before != _NONE:
            self._nexts[before] = chunk
        return start

    def _places(self, order: _Order, stored: int, tag: int, writer: Writer) -> list[int]:
        """Places of a context, newest first, behind which there is something.

        Args:
            order: The order of the context.
            stored: Where its chain begins.
            tag: Of the context.
            writer: Of the sequence that asks.
        """
        tags, chain, filled, scopes = order.tags, order.chain, self._filled, self._scopes
        scope, own = writer.scope, writer.place
        places: list[int] = []
        for _ in range(_MOST_STEPS):
            place = stored - 1
            if tags[place] == tag and place != own:
                chunk = place >> _SHIFT
                goes_on = (place & _IN_CHUNK) + 1 < filled[chunk] or self._nexts[chunk] != _NONE
                if goes_on and scopes[chunk] == scope:
                    places.append(place)
                    if len(places) == self._most_places:
                        break
            stored = chain[place]
            if not stored:
                break
        return places

    def _read(self, place: int, limit: int, writer: Writer) -> list[int]:
        """What stands behind a place."""
        chunk = place >> _SHIFT
        start = place + 1
        if (start & _IN_CHUNK) + limit <= self._filled[chunk] and start & _IN_CHUNK:
            return self._tokens[start : start + limit].tolist()
        tokens: list[int] = []
        while True:
            stop = min((chunk << _SHIFT) + self._filled[chunk], start + limit - len(tokens))
            tokens += self._tokens[start:stop].tolist()
            if len(tokens) >= limit:
                return tokens
            if self._nexts[chunk] == _NONE:
                break
            chunk = self._nexts[chunk]
            start = chunk << _SHIFT
        if self._owners[chunk] == writer.number and chunk == writer.place >> _SHIFT:
            return (tokens * (limit // len(tokens) + 1))[:limit]
        return tokens

    def _same(self, place: int, tail: list[int], known: int, most: int) -> int:
        """How many tokens up to a place are a sequence's last ones: of `known` one knows it."""
        chunk, stop = place >> _SHIFT, place + 1
        start = max(stop - most, chunk << _SHIFT)
        tokens = self._tokens[start:stop].tolist()
        before = self._befores[chunk]
        if len(tokens) < most and before != _NONE:
            stop = (before + 1) << _SHIFT
            tokens = self._tokens[stop - most + len(tokens) : stop].tolist() + tokens
        for count in range(known, len(tokens)):
            if tokens[-1 - count] != tail[-1 - count]:
                return count
        return max(known, len(tokens))


@lru_cache(256)
def scope_number(scope: str) -> int:
    """63 bits that stand for a scope."""
    return _digest(scope.encode("utf-8", "surrogatepass")) >> 1


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


@lru_cache(1)
def _most_powers(count: int) -> tuple[_Words, _Words]:
    """base ** i and base ** -i modulo 2 ** 64, `[count]` each."""
    ones = np.ones(count, np.uint64)
    powers, inverses = ones * np.uint64(_BASE), ones * np.uint64(_INVERSE)
    powers[0] = inverses[0] = 1
    return np.multiply.accumulate(powers), np.multiply.accumulate(inverses)


def _powers(count: int) -> tuple[_Words, _Words]:
    powers, inverses = _most_powers(1 << (count - 1).bit_length())
    return powers[:count], inverses[:count]
