"""Tools of the attacks of hostile.py: HTTP, Redis, connections, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio
from hostile_rig import Target

from nano_inference.store.redis.embedded import EmbeddedPassword

LIMIT_S = 25.0
"""Limit of an attack."""

HOLD_S = 12.0
"""Time for which idle connections are held, and repeated attacks go on."""


class Attacker:
    """An attack's tools and results.

    Attributes:
        told: Its answers, and how often each came.
        broken: Answers that break a promise.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.folder = Path(target.folder)
        self.told: Counter[str] = Counter()
        self.broken: list[str] = []

    async def call(
        self, path: str, body: Any = None, *, method: str = "POST", name: str = "", **options: Any
    ) -> httpx.Response | None:
        """Send one HTTP request; return None if it got no answer.

        Args:
            body: Bytes, or an object to send as JSON.
            name: Its name in `told`; default: the path.
            options: `headers`, and the limit `limit_s`.
        """
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-Tenant": "flood"}
        headers |= options.get("headers", {})
        start, answer = time.monotonic(), None
        try:
            async with httpx.AsyncClient(
                timeout=options.get("limit_s", LIMIT_S), verify=False
            ) as client:
                answer = await client.request(
                    method, f"{self.target.url}{path}", content=content, headers=headers
                )
            word = str(answer.status_code)
        except httpx.HTTPError as error:
            word = type(error).__name__
        took_s = time.monotonic() - start
        self.told[f"{name or path} {word}" + (f" in {took_s:.0f} s" if took_s >= 1 else "")] += 1
        if answer is not None and answer.status_code == 500:
            self.broken.append(f"{name or path}: status 500")
        return answer

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[redis.asyncio.Redis]:
        """Connect with plain redis-py."""
        port = self.target.redis_port
        password = EmbeddedPassword(port)
        async with redis.asyncio.Redis(
            port=port, protocol=2, credential_provider=password
        ) as client:
            yield client

    async def publish(self, requests: list[dict[str, Any]], **fields: Any) -> list[bytes]:
        """Publish requests, 500 per pipeline; return the entries' ids."""
        ids: list[bytes] = []
        async with self.bus() as client:
            for start in range(0, len(requests), 500):
                pipeline = client.pipeline(transaction=False)
                for request in requests[start : start + 500]:
                    pipeline.xadd("nano:requests", {"json": json.dumps(request), **fields})
                ids += await pipeline.execute()
        return ids

    async def ends(self, entry_ids: list[bytes]) -> None:
        """Wait for these requests' terminal messages, and count their statuses."""
        async with self.bus() as client:
            for entry_id in entry_ids:
                key, output = b"nano:out:" + entry_id, {"type": ""}
                while output["type"] != "completion":
                    last = await client.xrevrange(key, count=1)
                    output = json.loads(last[0][1][b"json"]) if last else output
                    await asyncio.sleep(0.05)
                error = output.get("error") or {}
                self.told[f"{output['status']} {error.get('code', '')}".strip()] += 1

    async def open(
        self, count: int, first: bytes = b"", *, port: int | None = None
    ) -> list[asyncio.StreamWriter]:
        """Open connections to the HTTP port, or another one, 200 at a time, and send `first`."""
        writers: list[asyncio.StreamWriter] = []

        async def one() -> None:
            try:
                _, writer = await asyncio.wait_for(
                    asyncio.open_connection("127.0.0.1", port or self.target.http_port), 5
                )
                writer.write(first)
                writers.append(writer)
            except OSError as error:
                self.told[f"not connected: {type(error).__name__}"] += 1

        for start in range(0, count, 200):
            await asyncio.gather(*(one() for _ in range(min(200, count - start))))
        self.told["connected"] += len(writers)
        return writers

    def hang_up(self, writers: list[asyncio.StreamWriter]) -> None:
        still = sum(not writer.transport.is_closing() for writer in writers)
        self.told["still connected"] += still
        for writer in writers:
            writer.transport.abort()


def attacks_of(module: dict[str, Any]) -> dict[str, Callable[[Attacker], Awaitable[None]]]:
    """Return the attacks of a module, given its globals: its public coroutine functions."""
    return {
        name: value
        for name, value in module.items()
        if inspect.iscoroutinefunction(value)
        and value.__module__ == module["__name__"]
        and not name.startswith("_")
    }
