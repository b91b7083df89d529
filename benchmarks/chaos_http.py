"""`chaos.py --http`: streams over two gateways, of which one or a stage is killed again and again.

Each client reads its stream as a browser's EventSource would, and when the connection breaks comes
back with the id of the last event, to the other gateway: half of them by the same POST with its
`Idempotency-Key`, the others by `GET /v1/streams/{id}`. What each has put together is compared with
an undisturbed run, and with the places that the stream itself tells (`return_weight_versions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import chaos_rig
import httpx
from chaos_rig import STAGES, House, RedisServer, free_port, make_requests, running_house

GATEWAYS = ("gateway-0", "gateway-1")
TARGETS = (*STAGES, *GATEWAYS)
READ_TIMEOUT_S = 60.0
_AGAIN_S = 0.05
# What a client gets while something is away, beside connections that break.
_PASSING = frozenset({429, 500, 502, 503, 504})


class GatewayProcess:
    """`nano-inference gateway`, which can be killed and is then started again."""

    def __init__(self, bus: str, log: Path, settings: dict[str, object]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = ["gateway", "--bus", bus, "--port", str(self.port)]
        for name, value in settings.items():
            self._command += ["--set", f"{name}={value}"]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Starts it; it answers somewhat later."""
        self._process = chaos_rig.start_command(self._command, self._log)

    async def start(self) -> None:
        """Starts it and waits until it answers."""
        self.launch()
        async with httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await client.get(f"{self.url}/version")
                    return
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeError(f"the gateway has ended; see {self._log}")
                await asyncio.sleep(_AGAIN_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Reading:
    """What a client has put together of its stream.

    Attributes:
        tokens, texts, reasons: By choice.
        doubled, gaps: Tokens that came twice, and places at which some are missing.
        returns: How often it came back.
        ended: Whether all of it has come.
        error: What the stream ended with instead.
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
        """Takes an event. Returns whether the client is to come back behind it."""
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


class HttpLoad:
    """So many clients at a time, each with a stream.

    Attributes:
        readings: What each has read, by index.
        finished: How many have ended.
        quota: How many may have begun by now.
    """

    def __init__(
        self, name: str, bodies: Sequence[dict[str, Any]], urls: Sequence[str], concurrency: int
    ) -> None:
        self._name, self._bodies, self._urls = name, bodies, urls
        self._concurrency = concurrency
        self.readings = [Reading() for _ in bodies]
        self.finished = 0
        self.quota = len(bodies)
        self._changed = asyncio.Condition()

    async def allow(self, quota: int) -> None:
        async with self._changed:
            self.quota = quota
            self._changed.notify_all()

    async def until(self, finished: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.finished >= finished)

    async def run(self) -> None:
        """Until every stream has ended."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=READ_TIMEOUT_S) as client,
            asyncio.TaskGroup() as group,
        ):
            for index in range(len(self._bodies)):
                async with self._changed:
                    await self._changed.wait_for(lambda i=index: self._may_begin(i))  # type: ignore[misc]
                group.create_task(self._read(client, index))

    def _may_begin(self, index: int) -> bool:
        return index < self.quota and index - self.finished < self._concurrency

    async def _read(self, client: httpx.AsyncClient, index: int) -> None:
        reading = self.readings[index]
        attempt = index
        while not await self._connect(client, index, attempt, reading):
            reading.returns += 1
            attempt += 1
            await asyncio.sleep(_AGAIN_S)
        async with self._changed:
            self.finished += 1
            self._changed.notify_all()

    async def _connect(
        self, client: httpx.AsyncClient, index: int, attempt: int, reading: Reading
    ) -> bool:
        """Reads from behind the last event on. Returns whether it need not come back."""
        url = self._urls[attempt % len(self._urls)]
        headers = {"X-Tenant": "chaos"}
        asked: dict[str, Any] = {"json": self._bodies[index]}
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
                    told = await answer.aread()
                    if answer.status_code in _PASSING:
                        return False
                    reading.error = told.decode(errors="replace")
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
    """(id, data) of the events that came whole."""
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
    """The requests of `chaos.py` as calls of `/v1/completions`."""
    bodies = []
    for request in make_requests(count, seed, longest):
        body = {"prompt": request["prompt"], "n": request["n"], "stream": True}
        body |= {"return_token_ids": True, "return_weight_versions": True} | request["sampling"]
        if constraint := body.pop("constraint", None):
            body["structured_outputs"] = constraint
        bodies.append(body)
    return bodies


async def break_things(
    house: House,
    gateways: Sequence[GatewayProcess],
    load: HttpLoad,
    kills: int,
    concurrency: int,
    rng: random.Random,
) -> Counter[str]:
    """Kills each target in turn, each round in an order of its own, spread over the load."""
    done: Counter[str] = Counter()
    spread = max(0, len(load.readings) - concurrency)
    targets: list[str] = []
    while len(targets) < kills:
        targets += rng.sample(TARGETS, len(TARGETS))
    for number, target in enumerate(targets[:kills]):
        await load.allow(concurrency + spread * (number + 1) // kills)
        await load.until(spread * number // kills + 1)
        await asyncio.sleep(rng.uniform(0, 0.3))
        if target in STAGES:
            while not house.kill(target):  # noqa: ASYNC110
                await asyncio.sleep(_AGAIN_S)
        else:
            gateway = gateways[GATEWAYS.index(target)]
            gateway.kill()
            await gateway.start()
        done[target] += 1
    return done


async def http_storm(
    folder: Path,
    settings: dict[str, object],
    *,
    requests: int,
    kills: int,
    seed: int,
    concurrency: int,
    duration_s: float = 900.0,
    longest: int = 120,
    server: str = "valkey",
) -> dict[str, Any]:
    """Both runs, the faults, the comparison. Raises TimeoutError when a run takes too long."""
    rng = random.Random(seed)
    bodies = make_bodies(requests, seed, longest)
    redis_server = RedisServer(folder / "data", binary=server)
    async with AsyncExitStack() as stack:
        await redis_server.start()
        stack.callback(redis_server.kill)
        house = await stack.enter_async_context(
            running_house(redis_server.url, folder / "up.log", settings)
        )
        gateways = [
            GatewayProcess(redis_server.url, folder / f"{name}.log", settings) for name in GATEWAYS
        ]
        for gateway in gateways:
            stack.callback(gateway.kill)
            await gateway.start()
        urls = [gateway.url for gateway in gateways]
        calm = HttpLoad("calm", bodies, urls, concurrency)
        async with asyncio.timeout(duration_s):
            await calm.run()
        load = HttpLoad("storm", bodies, urls, concurrency)
        start = time.monotonic()
        async with asyncio.timeout(duration_s), asyncio.TaskGroup() as group:
            group.create_task(load.run())
            breaking = group.create_task(
                break_things(house, gateways, load, kills, concurrency, rng)
            )
        wall_s = time.monotonic() - start
        still_up = house.process.poll() is None
    return compared(load.readings, calm.readings, bodies) | {
        "requests": requests,
        "concurrency": concurrency,
        "seed": seed,
        "kills": dict(breaking.result()),
        "up_survived": still_up,
        "wall_s": round(wall_s, 1),
    }


FAULTS = ("lost", "doubled", "gaps", "different")


def compared(
    readings: Sequence[Reading], calm: Sequence[Reading], bodies: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """How many streams are not as they were undisturbed, and in which way.

    Sampled ones that differ are counted apart, since rounding may decide there.
    """
    counts: Counter[str] = Counter()
    remarks = []
    for index, (reading, before, body) in enumerate(zip(readings, calm, bodies, strict=True)):
        found = set()
        if not reading.ended:
            found.add("lost")
        if reading.doubled or any(len(each) > 1 for each in reading.reasons.values()):
            found.add("doubled")
        if reading.gaps:
            found.add("gaps")
        if not found and not reading.same(before):
            found.add("different_sampled" if body["temperature"] > 0 else "different")
        counts.update(found)
        if found:
            remarks.append(f"{index}: {', '.join(sorted(found))} {reading.error[:200]}")
    return {
        **{name: counts[name] for name in (*FAULTS, "different_sampled")},
        "clean": not any(counts[name] for name in FAULTS),
        "completed": sum(reading.ended for reading in readings),
        "returns": sum(reading.returns for reading in readings),
        "remarks": remarks[:50],
    }


def print_http_result(result: dict[str, Any]) -> None:
    """The table."""
    print(f"\n{'target':14}{'kills':>7}")
    for target, count in result["kills"].items():
        print(f"{target:14}{count:7}")
    print()
    names = ("requests", "completed", *FAULTS, "different_sampled", "returns")
    for name in (*names, "up_survived", "wall_s"):
        print(f"{name:20}{result[name]:>10}")
    for remark in result["remarks"]:
        print(f"  {remark}")
