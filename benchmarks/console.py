"""The console's cost for a gateway: CPU time of its process with viewers, and of each request.

python benchmarks/console.py [--viewers 50] [--seconds 15]

A gateway listens in this process, on an engine that reports a lane of two replicas and generates
nothing; the viewers are in another process. CPU time depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time

from nano_inference import BusClient, load_config
from nano_inference.bus.memory.bus import MemoryBus
from nano_inference.bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    GenerateRequest,
    Usage,
)
from nano_inference.config import BusConfig, all_roles
from nano_inference.gateway.app import make_app
from nano_inference.gateway.server.server import HttpServer
from nano_inference.gateway.serving.request_log import RequestLog
from nano_inference.store.board import StageReport

VIEWERS = """
import asyncio, sys

async def look(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /console/events HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    while await reader.read(65536):
        pass

async def main():
    port, number = map(int, sys.argv[1:])
    await asyncio.gather(*(look(port) for _ in range(number)))

asyncio.run(main())
"""

TOKENS = 128


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    bus = MemoryBus(BusConfig())
    load = {"running": 3, "kv_total": 9, "received": "fairness=123,executor=456", "inbox": 1}
    reports = [
        StageReport(
            lane="0", stage=role, incarnation="1", host="h", pid=1, epoch=1, state="ready",
            load=dict(load),
        )
        for role in all_roles(2)
    ]  # fmt: skip
    app = make_app(BusClient(bus), load_config(env={}))
    server = HttpServer(app, load_config(env={}).gateway)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    shares = {}
    for viewers in (0, 1, options.viewers):
        command = [sys.executable, "-c", VIEWERS, str(listener.getsockname()[1]), str(viewers)]
        child = subprocess.Popen(command) if viewers else None  # noqa: ASYNC220
        await asyncio.sleep(2)
        began, cpu = time.monotonic(), time.process_time()
        while time.monotonic() < began + options.seconds:
            await bus.store.board.report(reports)
            await asyncio.sleep(1)
        shares[viewers] = (time.process_time() - cpu) / (time.monotonic() - began)
        if child is not None:
            child.kill()
            child.wait()
    app.stop()
    server.should_exit = True
    await task
    for viewers, share in shares.items():
        print(f"{viewers:>3} viewers  {share:.2%} of a core")
    print(f"a request of {TOKENS} tokens in as many chunks: {_request_us():.0f} µs")
    print(json.dumps({"shares": shares}))


def _request_us() -> float:
    """Return the CPU time that the log takes for one request."""
    log, number = RequestLog(), 2000
    began = time.process_time()
    for index in range(number):
        request = GenerateRequest(request_id=f"r{index}", prompt_token_ids=tuple(range(512)))
        log.arrived("acme", [request], "tiny")
        log.began(request.request_id)
        for token in range(TOKENS):
            log.output(request, CHUNKS[token])
        log.output(request, END)
    return (time.process_time() - began) / number * 1e6


CHUNKS = [
    CompletionChunk(
        request_id="", entry_id="", sample_index=0, token_offset=token, token_ids=(token,),
        logprobs=(-1.0,), text="word ",
    )
    for token in range(TOKENS)
]  # fmt: skip

END = Completion(
    request_id="",
    entry_id="",
    status="done",
    usage=Usage(prompt_tokens=512, completion_tokens=TOKENS),
    samples=(
        CompletionSample(
            sample_index=0, text="word " * TOKENS, token_ids=tuple(range(TOKENS)),
            logprobs=(-1.0,) * TOKENS, finish_reason="length", weight_versions=((0, 0),),
        ),
    ),
)  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
