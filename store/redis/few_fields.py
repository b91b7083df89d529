"""Entries of streams with few fields, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis

MOST_FIELDS = 64
"""Of an entry. Ours have fewer; of others so many are kept, which is enough to refuse them."""

_OF_STREAMS = ("XREAD", "XREADGROUP")
_OF_ONE = ("XRANGE", "XREVRANGE")

Parse = Callable[..., Any]


def limit_fields(redis: Redis) -> None:
    """Have a client keep `MOST_FIELDS` and one more of each entry that it reads.

    Any client may write an entry of a million fields. To make a dictionary of them takes longer
    than to read them, and holds up the event loop.
    """
    callbacks: Any = redis.response_callbacks
    for command in (*_OF_STREAMS, *_OF_ONE):
        redis.set_response_callback(command, _limited(command, callbacks[command]))


def _limited(command: str, parse: Parse) -> Parse:
    def parse_few(response: Any, **options: Any) -> Any:
        if response:
            for entries in response.values() if command in _OF_STREAMS else (response,):
                _cut(entries)
        return parse(response, **options)

    return parse_few


def _cut(entries: list[Any]) -> None:
    for entry in entries:
        if entry is not None and entry[1] is not None:
            del entry[1][2 * (MOST_FIELDS + 1) :]
