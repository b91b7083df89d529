"""A gateway that is killed in mid-stream: a WebSocket goes on at another one, commands at its
successor."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from ..commands import Command, run_command
from .servers import free_ports
from .test_submit import started

LIMIT_S = 240
ASKED = {"type": "response.create", "input": "98 + 25 =", "max_output_tokens": 200}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


async def _until_ready(port: int) -> None:
    async with httpx.AsyncClient() as http, asyncio.timeout(LIMIT_S):
        while True:
            try:
                if (await http.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.soak(only=True)
async def test_a_response_of_a_killed_gateway_is_resumed_without_a_gap(tmp_path: Path) -> None:
    bus = free_ports(3)
    first = bus + 1
    with ExitStack() as stack:

        def run(*arguments: str) -> Command:
            log = tmp_path / arguments[0]
            return stack.enter_context(Command(*arguments, log=log))

        run("up", "--port", str(bus), "--gateway", str(first))
        await _until_ready(first)
        address = f"redis://127.0.0.1:{bus}"
        killed = run("gateway", "--bus", address, "--port", str(first + 1))
        await _until_ready(first + 1)
        events: list[dict[str, Any]] = []
        async with asyncio.timeout(LIMIT_S):
            async with connect(f"ws://127.0.0.1:{first + 1}/v1/responses") as socket:
                await socket.send(json.dumps(ASKED | {"ignore_eos": True, "temperature": 0}))
                with pytest.raises(ConnectionClosed):
                    while True:
                        events.append(json.loads(await socket.recv()))
                        if len(events) == 20:
                            killed.kill()
            assert events[-1]["type"] not in ENDS
            resume = {
                "type": "response.resume",
                "response_id": events[0]["response"]["id"],
                "starting_after": events[-1]["sequence_number"],
            }
            async with connect(f"ws://127.0.0.1:{first}/v1/responses") as socket:
                await socket.send(json.dumps(resume))
                while events[-1]["type"] not in ENDS:
                    events.append(json.loads(await socket.recv()))
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    response = events[-1]["response"]
    text = "".join(each["delta"] for each in events if each["type"].endswith("text.delta"))
    assert response["usage"]["output_tokens"] == 200
    assert text == response["output"][0]["content"][0]["text"]


@pytest.mark.slow
@pytest.mark.soak(only=True)
async def test_commands_go_on_when_their_gateway_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    """Each answer is that of an undisturbed run, however often its gateway was killed."""
    bus = free_ports(3)
    with ExitStack() as stack:
        up = ("up", "--port", str(bus), "--gateway", str(bus + 1))
        stack.enter_context(Command(*up, log=tmp_path / "up"))
        await _until_ready(bus + 1)
        at = ("gateway", "--bus", f"redis://127.0.0.1:{bus}", "--port", str(bus + 2))
        long = ("--max-tokens", "1500", "--sampling", "ignore_eos=true")
        url = ("--url", f"http://127.0.0.1:{bus + 2}")
        for command in ("complete", "submit"):
            gateway = stack.enter_context(Command(*at, log=tmp_path / "gateway"))
            await _until_ready(bus + 2)
            asked = (command, "Story about Emma, a dog and", *long, *url)
            undisturbed = run_command(*asked)
            assert undisturbed.status == 0, undisturbed.stderr
            folder = tmp_path / command
            folder.mkdir()
            with started(folder, *asked) as (program, stdout):
                came = stdout.read(200)
                for _ in range(2):
                    gateway.kill()
                    gateway = stack.enter_context(Command(*at, log=tmp_path / "gateway"))
                    came += stdout.read(200)
                came += stdout.read()
                assert program.wait(LIMIT_S) == 0
                assert "the answer goes on when" in program.output.read()
            assert came == undisturbed.stdout
            gateway.kill()
