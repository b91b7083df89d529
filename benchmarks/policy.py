"""Cost of keys, limits, guardrails and the audit log per call.

    python benchmarks/policy.py [--calls 600] [--tokens 8] [--rounds 7] [--redis] [--json FILE]

One pipeline with the bundled model (shape T, the worst case: its steps take a millisecond) behind
three gateways: without a policy, with keys in a file, and with all features and the bus. A client
in another process calls each in turn, one call after another and with many at a time. With --redis
the bus is a server.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from harness import Worker, http_post, options, print_table, ratios, redis_server, write

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
    """Return the seconds of so many calls."""
    body = json.dumps(BODY | {"max_tokens": tokens}).encode()
    request = http_post("/v1/completions", body, f"Authorization: Bearer {key}")
    left = calls

    async def one_after_another() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left > 0:
            left -= 1
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer.startswith(b"http/1.1 200"), answer
            length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return time.perf_counter() - started


def config_of(url: str, **more: Any) -> Config:
    overrides = {"bus.url": url, "engine.dtype": "float32", "telemetry.log_level": "error"}
    return load_config(env={}, overrides=overrides | more)


async def measure(url: str, tokens: int, calls: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return milliseconds of single calls, and calls per second, of each turn by policy."""
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
        client = stack.enter_context(Worker(sys.executable, __file__, "--client"))
        found: dict[str, dict[int, list[float]]] = {name: {1: [], AT_ONCE: []} for name in configs}
        for turn in range(rounds + 1):
            for at_once, number in ((1, calls // 10), (AT_ONCE, calls)):
                for name, gateway in gateways.items():
                    wanted = [gateway.port, keys[name], tokens, number, at_once]
                    took_s = await asyncio.to_thread(client.ask, wanted)
                    if turn:  # the first turn warms up
                        found[name][at_once].append(took_s / number)
    return {
        name: {
            "alone_ms": [each * 1000 for each in times[1]],
            "per_s": [1 / each for each in times[AT_ONCE]],
        }
        for name, times in found.items()
    }


def main() -> None:
    arguments = options(
        __doc__,
        calls=600,
        tokens=(8, "of each answer"),
        rounds=7,
        redis=False,
        client=(False, "for the program itself: the calling process"),
    ).parse_args()
    if arguments.client:
        for line in sys.stdin:
            print(asyncio.run(call_all(*json.loads(line))), flush=True)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(redis_server(None if arguments.redis else "memory"))
        results = asyncio.run(
            measure(url, arguments.tokens, arguments.calls, arguments.rounds, folder)
        )
    off, rows = results["off"], {}
    for name, found in results.items():
        more = [a - b for a, b in zip(found["alone_ms"], off["alone_ms"], strict=True)]
        figures = {**found, "ratio": ratios(found["per_s"], off["per_s"]), "more": more}
        rows[name] = {key: statistics.median(values) for key, values in figures.items()}
    columns = {
        "a call alone, ms": "{alone_ms:.3f}",
        f"calls/s, {AT_ONCE} at once": "{per_s:.1f}",
        "of 'off'": "{ratio:.3f}",
        "more a call, ms": "{more:.3f}",
    }
    print_table(columns, rows, "policy")
    write(arguments.json, results)


if __name__ == "__main__":
    main()
