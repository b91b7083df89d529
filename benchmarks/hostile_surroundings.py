"""Attacks of hostile.py on a pipeline's surroundings: its log, files, parent process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time

import hostile_images
from harness import command_line, descendants, engine_command, free_port
from hostile_attacker import HOLD_S, Attacker, attacks_of
from hostile_rig import Surroundings

from nano_inference.store.redis.embedded import read_password

ENDED_S = 1.0
"""Limit from the SIGKILL of `up` to the end of its last process."""


# --- the log --------------------------------------------------------------------------------------


async def log_lines(attacker: Attacker) -> None:
    """20,000 entries on a link that are no messages, and 200 refused regexes: a log line each."""
    async with attacker.bus() as client:
        for _ in range(40):
            pipeline = client.pipeline(transaction=False)
            for number in range(500):
                pipeline.xadd("nano:control.admission", {"msgpack": f"no message {number}"})
            await pipeline.execute()
    regex = {"text": "a", "sampling_params": {"regex": "(", "max_new_tokens": 1}}
    for _ in range(20):
        await asyncio.gather(*(attacker.call("/generate", regex) for _ in range(10)))


# --- files and processes --------------------------------------------------------------------------


async def idle_both(attacker: Attacker) -> None:
    """400 idle connections over HTTP and 400 over gRPC, with a limit of 256 open files."""
    writers = await attacker.open(400, port=attacker.target.grpc_port)
    writers += await attacker.open(400)
    await asyncio.sleep(HOLD_S)
    attacker.hang_up(writers)


async def killed_up(attacker: Attacker) -> None:
    """SIGKILL of another `up`, whose processes load their model."""
    command = engine_command("up", "--port", free_port(), "--gateway", free_port())
    environment = os.environ | {"TMPDIR": attacker.target.folder}
    process = subprocess.Popen(  # noqa: ASYNC220
        ["nice", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    ends: list[int] = []
    try:
        while len(_children_of(process.pid)) < 6:  # noqa: ASYNC110  (it sends no event)
            await asyncio.sleep(0.05)
        ends = [os.pidfd_open(pid) for pid in descendants(process.pid)[1:]]
        start = time.monotonic()
        process.kill()
        for end in ends:
            # A process's descriptor is readable once the process has ended.
            await asyncio.to_thread(select.select, [end], [], [], 20)
        took_s = time.monotonic() - start
        attacker.told[f"{len(ends)} processes ended within {took_s:.2f} s"] += 1
        if took_s > ENDED_S:
            attacker.broken.append(f"processes live {took_s:.1f} s longer than `up`")
    finally:
        process.kill()
        process.wait()
        for end in ends:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
            os.close(end)


def _children_of(pid: int) -> list[int]:
    """Return the stages and the gateway of an `up`."""
    return [each for each in descendants(pid) if "--with-parent" in command_line(each)]


# --- Redis ----------------------------------------------------------------------------------------


async def many_fields(attacker: Attacker) -> None:
    """An entry of a million fields on the requests stream, and another on a link."""
    for key in (b"nano:requests", b"nano:control.admission"):
        await _add_many_fields(attacker, key, 1_000_000)
        await asyncio.sleep(4.0)


async def _add_many_fields(attacker: Attacker, key: bytes, fields: int) -> None:
    """Send the command in the server's protocol, which clients take seconds to encode."""
    words = [b"XADD", key, b"*"]
    for number in range(fields):
        words += (b"f%d" % number, b"v")
    parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    port = attacker.target.redis_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"AUTH %s\r\n" % read_password(port).encode())
    await reader.readline()
    writer.write(b"*%d\r\n" % len(words) + b"".join(parts))
    attacker.told[f"{(await reader.readline())[:1].decode()} from the server"] += 1
    writer.close()


SURROUNDINGS = {
    "idle_connections": Surroundings(descriptors=1024),
    "idle_both": Surroundings(descriptors=256, grpc=True),
    "full_log": Surroundings(log="full"),
    "closed_log": Surroundings(log="closed"),
    "unread_log": Surroundings(log="unread"),
    **{name: Surroundings(images=True) for name in attacks_of(vars(hostile_images))},
    "serve_grammars": Surroundings(serve=True),
    "serve_masks": Surroundings(serve=True),
    "serve_stored_responses": Surroundings(serve=True),
}
"""By attack, how the pipeline is started for it."""
