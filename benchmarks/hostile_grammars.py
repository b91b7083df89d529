"""Attacks of hostile.py by constraints: grammars of 100 bytes that take hours to compile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from hostile_attacker import HOLD_S, Attacker

AT_ONCE = 16

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def _lark(number: int) -> str:
    """Return a grammar that was not sent before, so that no refusal is cached."""
    return f"start: T\nT: /(.*a.{{12}}.*)/ & /(.*b.{{12}}.*)/ & ~/(.*c.{{12}}.*)/\n// {number}"


def _schema(number: int) -> dict[str, Any]:
    """Return a schema whose patterns no text matches together."""
    patterns = [{"type": "string", "pattern": f"^.*{c}.{{12}}$"} for c in "ab"]
    return {"type": "object", "properties": {f"p{number}": {"allOf": patterns}}}


def _by_each_way(number: int) -> tuple[str, dict[str, Any]]:
    """Return a path and a body with a grammar; each interface in turn."""
    chat = {"messages": [{"role": "user", "content": "a"}], "model": "tiny", "max_tokens": 60}
    function = {"name": f"f{number}", "parameters": _schema(number), "strict": True}
    strict = {"tools": [{"type": "function", "function": function}]}
    answer = {"structured_outputs": {"grammar": _lark(number)}}
    beside = {"tools": [{"type": "function", "function": {"name": "g", "parameters": _CITY}}]}
    form = {"format": {"type": "json_schema", "schema": _schema(number)}}
    blank = {"text": "a", "sampling_params": {"ebnf": "root ::= x" + "\n" * (15_000 + number)}}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a", "model": "tiny", "max_tokens": 60} | answer),
        ("/v1/chat/completions", chat | answer),
        ("/v1/chat/completions", chat | answer | beside),
        ("/v1/chat/completions", chat | strict),
        ("/v1/chat/completions", chat | strict | {"tool_choice": "required"}),
        ("/v1/messages", chat | {"output_config": form}),
        ("/generate", blank),
    ]
    return ways[number % len(ways)]


async def _keep_asking(
    attacker: Attacker, make: Callable[[int], tuple[str, dict[str, Any]]]
) -> None:
    """Send `AT_ONCE` requests at a time, repeatedly."""
    numbers, end = itertools.count(time.time_ns() % 1_000_000), time.monotonic() + HOLD_S

    async def one() -> None:
        while time.monotonic() < end:
            path, body = make(next(numbers))
            await attacker.call(path, body)

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))


async def grammars(attacker: Attacker) -> None:
    """Sixteen costly grammars at once, over each interface."""
    await _keep_asking(attacker, _by_each_way)


def _costly_masks(number: int) -> tuple[str, dict[str, Any]]:
    regex = f"(((a{{1,100}}){{1,100}}){{1,100}}){{1,{100 + number % 100}}}"
    params = {"regex": regex, "max_new_tokens": 400, "n": 4}
    return "/generate", {"text": "aaaa", "sampling_params": params}


async def masks(attacker: Attacker) -> None:
    """Grammars that compile quickly, and whose states grow with each step."""
    await _keep_asking(attacker, _costly_masks)
