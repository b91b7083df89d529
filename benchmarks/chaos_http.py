"""`chaos.py --http`: streams over two gateways, under kills of gateways and stages.

Each client reads its stream as a browser's EventSource does. After a disconnect it resumes at the
other gateway from its last event id: half of the clients by the same POST with its
`Idempotency-Key`, the others by `GET /v1/streams/{id}`. Each client's stream is compared with an
undisturbed run, and with the token offsets in the stream itself (`return_weight_versions`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import chaos_rig
import httpx
from chaos_rig import PAUSE_S, STAGES, Clients, Restartable
from harness import settings_arguments, wait_until_answered

GATEWAYS = ("gateway-0", "gateway-1")
TARGETS = (*STAGES, *GATEWAYS)
HTTP_FAULTS = ("lost", "doubled", "gaps", "different")
READ_TIMEOUT_S = 60.0
PASSING = frozenset({429, 500, 502, 503, 504})
"""Statuses of calls while a process is down, after which a client tries again."""


class GatewayProcess(Restartable):
    """`nano-inference gateway`."""

    def __init__(self, bus: str, log: Path, settings: dict[str, object]) -> None:
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = ["gateway", "--bus", bus, "--port", str(self.port)]
        self._command += settings_arguments(settings)

    def _start(self) -> Any:
        return chaos_rig.start_command(self._command, self._log)

    async def start(self) -> None:
        """Start the process, and wait until it answers."""
        self.launch()
        await asyncio.to_thread(wait_until_answered, f"{self.url}/version", self.process)


class Reading:
    """A client's stream so far.

    Attributes:
        tokens, texts, reasons: By choice.
        doubled, gaps: Repeated tokens, and places with missing ones.
        returns: Resumptions.
        ended: Whether the stream is complete.
        error: The error that ended it instead.
    """

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, list[str]] = {}
        self.doubled = self.gaps = self.returns = 0
        self.last_id = ""
        self.ended = False
        self.error = ""

    def take(self, event_id: str, data: str) -> bool:
        """Take an event; return whether the client must resume after it."""
        if data == "[DONE]":
            self.ended = not self.error
            return False
        self.last_id = event_id
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]["code"]
            return self.error == "bus_unavailable"
        self.error = ""
        for choice in chunk["choices"]:
            index = choice["index"]
            tokens = self.tokens.setdefault(index, [])
            for span in choice["weight_versions"]:
                self.doubled += max(0, len(tokens) - span["start"])
                self.gaps += span["start"] > len(tokens)
                first = span["start"] - choice["weight_versions"][0]["start"]
                tokens += choice["token_ids"][first : first + span["end"] - span["start"]]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                self.reasons.setdefault(index, []).append(choice["finish_reason"])
        return False

    def same(self, other: Reading) -> bool:
        mine = (self.tokens, self.texts, self.reasons)
        return mine == (other.tokens, other.texts, other.reasons)


class HttpLoad(Clients):
    """SSE clients, each with one stream; `readings` has what each one has read."""

    def __init__(
        self, name: str, bodies: Sequence[dict[str, Any]], urls: Sequence[str], concurrency: int
    ) -> None:
        super().__init__(bodies, concurrency)
        self._name, self._urls = name, urls
        self.readings = [Reading() for _ in bodies]

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=READ_TIMEOUT_S) as client,
            asyncio.TaskGroup() as group,
        ):
            async for index in self.in_turn():
                group.create_task(self._read(client, index))

    async def _read(self, client: httpx.AsyncClient, index: int) -> None:
        reading = self.readings[index]
        while not await self._connect(client, index, reading):
            reading.returns += 1
            await asyncio.sleep(PAUSE_S)
        async with self._changed:
            self.finished += 1
            self._changed.notify_all()

    async def _connect(self, client: httpx.AsyncClient, index: int, reading: Reading) -> bool:
        """Read from the last event on; return whether the stream has ended."""
        url = self._urls[(index + reading.returns) % len(self._urls)]
        headers = {"X-Tenant": "chaos", "Accept": "text/event-stream"}
        asked: dict[str, Any] = {"json": self.requests[index]}
        method, path = "POST", "/v1/completions"
        if index % 2 == 0:
            headers["Idempotency-Key"] = f"{self._name}-{index}"
        if reading.last_id:
            headers["Last-Event-ID"] = reading.last_id
            if index % 2:
                method, asked = "GET", {}
                path = f"/v1/streams/{reading.last_id.partition('.')[0]}"
        try:
            async with client.stream(method, url + path, headers=headers, **asked) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    if answer.status_code in PASSING:
                        return False
                    reading.error = text
                    return True
                async for event_id, data in events_of(answer):
                    if reading.take(event_id, data):
                        return False
                    if data == "[DONE]":
                        return True
        except httpx.TransportError:
            pass
        return False


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield (id, data) of each complete event."""
    event_id, data = "", ""
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            yield event_id, data
            data = ""


def make_bodies(count: int, seed: int, longest: int) -> list[dict[str, Any]]:
    """Return the requests of `chaos.py` as bodies of `/v1/completions`."""
    bodies = []
    for request in chaos_rig.make_requests(count, seed, longest):
        body = {"prompt": request["prompt"], "n": request["n"], "stream": True}
        body |= {"return_token_ids": True, "return_weight_versions": True} | request["sampling"]
        if constraint := body.pop("constraint", None):
            body["structured_outputs"] = constraint
        bodies.append(body)
    return bodies


async def http_storm(folder: Path, settings: dict[str, object], **options: Any) -> dict[str, Any]:
    """Do both runs of a `Size`, and compare them; return the result file's content."""
    size = chaos_rig.Size(**options)
    rng = random.Random(size.seed)
    bodies = make_bodies(size.requests, size.seed, size.longest)
    redis_server = chaos_rig.RedisServer(folder / "data", binary=size.server)
    done: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        await redis_server.start()
        stack.callback(redis_server.kill)
        deployment = await stack.enter_async_context(
            chaos_rig.running_deployment(redis_server.url, folder / "up.log", settings)
        )
        gateways = {
            name: GatewayProcess(redis_server.url, folder / f"{name}.log", settings)
            for name in GATEWAYS
        }
        for gateway in gateways.values():
            stack.callback(gateway.kill)
            await gateway.start()
        urls = [gateway.url for gateway in gateways.values()]

        async def hit(target: str) -> None:
            if target in STAGES:
                await deployment.kill(target)
            else:
                gateways[target].kill()
                await gateways[target].start()
            done[target] += 1

        calm = HttpLoad("calm", bodies, urls, size.concurrency)
        await chaos_rig.bounded(calm, deployment, size.duration_s)
        load = HttpLoad("storm", bodies, urls, size.concurrency)
        faults = chaos_rig.spread_faults(load, TARGETS, size.kills, rng, hit)
        ended = await chaos_rig.disturbed(load, deployment, size.duration_s, faults)
    found = compared(load.readings, calm.readings, bodies)
    return {**size.fields(), "kills": dict(done), **found, **ended}


def compared(
    readings: Sequence[Reading], calm: Sequence[Reading], bodies: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Check each stream by itself, and against its undisturbed run."""
    results = []
    for reading, before, body in zip(readings, calm, bodies, strict=True):
        found = set()
        if not reading.ended:
            found.add("lost")
        if reading.doubled or any(len(each) > 1 for each in reading.reasons.values()):
            found.add("doubled")
        if reading.gaps:
            found.add("gaps")
        if not found and not reading.same(before):
            found.add("different_sampled" if body["temperature"] > 0 else "different")
        results.append((found, reading.error[:200]))
    return chaos_rig.tally(results, HTTP_FAULTS) | {
        "returns": sum(each.returns for each in readings)
    }
