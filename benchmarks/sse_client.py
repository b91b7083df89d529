"""A client of `/v1/completions` in its own process, written by hand so that it costs little CPU.

For gateway.py and connections.py. It answers each line of JSON with one. A line is a job `{port,
bodies, reads}`: all bodies are posted at once, on a connection each. Without `reads` the answers
stay unread: the line comes when all bodies are sent, and the connections stay open until the next
job.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import sys
import time
from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import Any

from harness import Worker, http_post

LIMIT_S = 600.0
"""Limit of a job."""

SMALL_BUFFER = 4096
"""Receive buffer of an unread connection; by default the kernel grows it to some megabytes."""

_EVENT = re.compile(rb"data: (\{.*\})\r?\n")


class Client(Worker):
    """The process, while the context is open."""

    def __init__(self) -> None:
        super().__init__(sys.executable, __file__)

    def post(self, port: int, bodies: list[dict[str, Any]], *, reads: bool = True) -> Any:
        """Post all bodies at once; return what `_run` returns.

        Raises:
            RuntimeError: A body was not answered with status 200.
        """
        found = self.ask({"port": port, "bodies": bodies, "reads": reads})
        refused = {each["error"] for each in found["replies"] if each["error"]}
        if refused:
            raise RuntimeError(f"not answered: {sorted(refused)[:3]}")
        return found


class Answer:
    """The bytes of an answer and when they came; parsed only at the end."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._parts: list[bytes] = []
        self._at: list[float] = []

    async def read(self, reader: asyncio.StreamReader) -> None:
        while part := await reader.read(1 << 16):
            self._at.append(time.perf_counter())
            self._parts.append(part)

    def result(self) -> dict[str, Any]:
        """Return the text, and seconds: to the first event, to the end, and between events."""
        whole = b"".join(self._parts)
        if not whole.startswith(b"HTTP/1.1 200"):
            return {"error": whole[:200].decode(errors="replace") or "the connection was closed"}
        head, _, body = whole.partition(b"\r\n\r\n")
        at, text, error = [], "", ""
        if b"text/event-stream" in head:
            ends = list(accumulate(map(len, self._parts)))
            for event in _EVENT.finditer(body):
                content = json.loads(event[1])
                error = error or str(content.get("error", ""))
                if any(choice["text"] for choice in content.get("choices", ())):
                    text += "".join(choice["text"] for choice in content["choices"])
                    at.append(self._at[bisect_left(ends, len(head) + 4 + event.end())])
        else:
            text = json.loads(body)["choices"][0]["text"]
        return {
            "error": error,
            "text": text,
            "first_s": at[0] - self._start if at else None,
            "total_s": self._at[-1] - self._start,
            "gaps_s": [round(after - before, 6) for before, after in pairwise(at)],
        }


async def _connect(port: int, body: bytes, buffer: int | None) -> Any:
    connection = socket.socket()
    connection.setblocking(False)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
    writer.write(http_post("/v1/completions", body, "Connection: close"))
    return reader, writer


async def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the wall time, this process's CPU time, and the result of each body."""
    bodies = [json.dumps(body).encode() for body in job["bodies"]]

    async def one(body: bytes) -> Answer:
        answer = Answer()
        reader, writer = await _connect(job["port"], body, None)
        try:
            await answer.read(reader)
        finally:
            writer.close()
        return answer

    start, cpu = time.perf_counter(), time.process_time()
    async with asyncio.timeout(LIMIT_S):
        answers = await asyncio.gather(*map(one, bodies))
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    replies = [answer.result() for answer in answers]
    return {"seconds": seconds, "cpu_s": cpu_s, "replies": replies}


async def _leave_unread(job: dict[str, Any]) -> list[Any]:
    """Return connections on which all bodies are sent, and whose answers are not read."""
    bodies = [json.dumps(body).encode() for body in job["bodies"]]
    connected = [await _connect(job["port"], body, SMALL_BUFFER) for body in bodies]
    for _, writer in connected:
        await writer.drain()
        writer.transport.pause_reading()
    return connected


async def serve() -> None:
    """Do jobs until the input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    unread: list[Any] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        for _, writer in unread:
            writer.transport.abort()
        unread = [] if job["reads"] else await _leave_unread(job)
        found = {"replies": []} if unread else await _run(job)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(serve())
