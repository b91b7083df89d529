"""A limit on the fields of stream entries, which any client may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis

MOST_FIELDS = 64
"""Fields kept per entry. The package's own entries have fewer; more suffice to refuse an entry."""

_OF_STREAMS = ("XREAD", "XREADGROUP")
_OF_ONE = ("XRANGE", "XREVRANGE")

Parse = Callable[..., Any]


def limit_fields(redis: Redis) -> None:
    """Make a client keep at most `MOST_FIELDS` + 1 fields of each entry it reads.

    Building a dictionary of a million fields takes longer than reading them, and blocks the event
    loop.
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
