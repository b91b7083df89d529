"""An Open Policy Agent decides about each prompt; only allowed prompts are served."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from nano_inference.config import Config, load_config
from nano_inference.gateway.policy.guardrail import AT_ONCE, MOST_BYTES
from nano_inference.store.loaded_adapter import LoadedAdapter

from ..deployment.deployed import Deployment, Front
from ..fake import Client, FakeEngine, app_of, http_of, report
from ..interfaces import BODIES, STREAMED

PATH = "/v1/completions"


class Agent:
    """A fake agent on a real connection.

    Attributes:
        answer: The bytes that it sends.
        stays: Whether the connection stays open after them.
        drops: Sent after them for as long as the connection lasts, a piece at a time.
        asked: What it was asked, decoded.
        paths: Where.
    """

    def __init__(self) -> None:
        self.answer = http_response({"result": True})
        self.stays = True
        self.drops = b""
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.port = 0
        self._open: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/data/nano/allow"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[asyncio.current_task()] = writer
        try:
            while self.stays or not self.asked:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                self.paths.append(head.split(" ")[1])
                self.asked.append(json.loads(await reader.readexactly(size))["input"])
                writer.write(self.answer)
                await writer.drain()
                while self.drops:
                    writer.write(self.drops)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def leave(self) -> None:
        """Close the connections."""
        for writer in self._open.values():
            writer.close()
        await self.left()

    async def left(self) -> None:
        """Waits until nothing is open."""
        _, open_still = await asyncio.wait([task for task in self._open if task], timeout=20)
        assert not open_still


def http_response(body: Any, status: str = "200 OK", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode() + data


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    agent = Agent()
    server = await asyncio.start_server(agent.serve, "127.0.0.1", 0)
    agent.port = server.sockets[0].getsockname()[1]
    yield agent
    server.close()
    if agent.asked:
        await agent.leave()


@pytest.fixture
def unused() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def client_of(
    engine: FakeEngine, url: str, timeout_s: float = 20, **settings: Any
) -> httpx.AsyncClient:
    given = {"policy.opa_url": url, "policy.opa_timeout_s": timeout_s}
    return http_of(app_of(engine, given | settings))


@pytest.fixture
def config(agent: Agent) -> Config:
    return load_config(env={}, overrides={"policy.opa_url": agent.url, "policy.opa_timeout_s": 20})


async def code(http: httpx.AsyncClient, **body: Any) -> tuple[int, str]:
    answer = await http.post(PATH, json={"prompt": "hello"} | body)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


async def test_the_input_of_the_agent(http: Client, agent: Agent) -> None:
    body = {"prompt": ["one", [69, 68]], "n": 2, "temperature": 0.5, "max_tokens": 7}
    assert await code(http, **body) == (200, "")
    assert agent.paths == ["/v1/data/nano/allow"] * 2
    assert sorted(each["prompt"] for each in agent.asked) == ["ba", "one"]
    asked = agent.asked[0]
    assert (asked["tenant"], asked["n"]) == ("http:127.0.0.1", 2)
    assert (asked["sampling"]["temperature"], asked["sampling"]["max_tokens"]) == (0.5, 7)
    assert len(http.engine.requests) == 2


INTERFACES = [
    *((path, body) for path, body in BODIES.items() if path not in ("/score", "/rerank")),
    *((path, body | {"stream": True}) for path, body in STREAMED.items()),
    ("/v1/responses", {"input": "a", "background": True}),
    ("/v2/models/tiny/generate_stream", {"text_input": "a"}),
]
SERVED = {"engine.model_id": "served", "engine.model_aliases": ("other",)}
NAMES = ("", "served", "other", "finetuned")


def named(path: str, body: dict[str, Any], requested: str) -> tuple[str, dict[str, Any]] | None:
    """A call that names a model; None if the interface can't name it."""
    if path.startswith("/v2"):
        is_model = requested not in ("", "finetuned")
        return (path.replace("tiny", requested), body) if is_model else None
    if requested == "finetuned" and path in ("/generate", "/encode"):
        return (path, body | {"lora_path": requested}) if path == "/generate" else None
    return path, body | ({"model": requested} if requested else {})


@pytest.mark.parametrize(("path", "body"), INTERFACES)
async def test_every_interface_names_the_serving_model(
    engine: FakeEngine, agent: Agent, path: str, body: dict[str, Any]
) -> None:
    """With the name that the caller gave."""
    agent.answer = http_response({"result": False})
    engine.stage_reports = [report(adapters=(LoadedAdapter(id="finetuned", version=1),))]
    calls = {requested: call for requested in NAMES if (call := named(path, body, requested))}
    async with client_of(engine, agent.url, **SERVED) as http:
        for number, (place, asked) in enumerate(calls.values(), 1):
            await http.post(place, json=asked)
            # The request of a background response follows its answer.
            while len(agent.asked) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    names = [(each["model"], each["requested_model"]) for each in agent.asked]
    assert names == [("finetuned" if each == "finetuned" else "served", each) for each in calls]


@pytest.mark.parametrize(
    ("path", "body"),
    [(PATH, {"model": "other"}), (f"{PATH}?model=other", {}), (f"/models/other{PATH}", {})],
    ids=["body", "query", "address"],
)
async def test_one_of_several_models_is_named(
    agent: Agent, config: Config, path: str, body: dict[str, Any]
) -> None:
    deployment = Deployment()
    await deployment.put("served", aliases=("other",))
    agent.answer = http_response({"result": False})
    front = Front(deployment, config)
    await front.seen()
    async with front.client() as http:
        await http.post(path, json={"prompt": "hello"} | body)
    names = [(each["model"], each["requested_model"]) for each in agent.asked]
    assert names == [("served", "other")]


@pytest.mark.parametrize("result", [True, {"allow": True}, {"allow": True, "reason": "friends"}])
async def test_an_allowed_prompt_is_served(http: Client, agent: Agent, result: Any) -> None:
    agent.answer = http_response({"result": result, "decision_id": "1"})
    assert await code(http) == (200, "")


@pytest.mark.parametrize("result", [False, {"allow": False}, {"allow": False, "reason": "no way"}])
async def test_a_refused_prompt_is_refused(http: Client, agent: Agent, result: Any) -> None:
    agent.answer = http_response({"result": result})
    assert await code(http) == (400, "content_filter")
    answer = await http.post(PATH, json={"prompt": "hello", "stream": True})
    assert ("no way" in answer.text) == (isinstance(result, dict) and "reason" in result)
    assert http.engine.requests == []


ELSE: dict[str, bytes] = {
    "undefined": http_response({}),
    "null": http_response({"result": None}),
    "a word": http_response({"result": "true"}),
    "a number": http_response({"result": 1}),
    "a word within": http_response({"result": {"allow": "true"}}),
    "no decision": http_response({"result": {"reason": "forgot"}}),
    "a list": http_response({"result": [True]}),
    "nothing": http_response(b""),
    "no text": http_response(b"\xff\xfe"),
    "no object": http_response(b"true"),
    "a failure": http_response({"result": True}, "500 Internal Server Error"),
    "a redirect": http_response({"result": True}, "302 Found", Location="/v1/data/other"),
    "too much": http_response({"result": True, "more": "x" * MOST_BYTES}),
    "half of it": b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"result": true}',
    "no HTTP": b"true\r\n\r\n",
    "it hangs up": b"",
}


@pytest.mark.parametrize("answer", ELSE.values(), ids=ELSE.keys())
async def test_any_other_answer_refuses_the_call(http: Client, agent: Agent, answer: bytes) -> None:
    agent.answer, agent.stays = answer, False
    assert await code(http) == (503, "policy_unavailable")
    assert http.engine.requests == []
    assert "/v1/data/other" not in agent.paths


async def test_a_silent_agent_refuses_the_call(engine: FakeEngine, agent: Agent) -> None:
    agent.answer = b""
    async with client_of(engine, agent.url, 0.5) as http:
        assert await code(http) == (503, "policy_unavailable")
    assert len(agent.asked) == 1
    assert engine.requests == []


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Padding: ", b"a"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
)
async def test_an_endless_answer_refuses_the_call(
    engine: FakeEngine, agent: Agent, beginning: bytes, piece: bytes
) -> None:
    """Other calls are answered meanwhile."""
    agent.answer, agent.drops = beginning, piece
    async with client_of(engine, agent.url, 0.3) as http:
        waiting = [asyncio.create_task(code(http)) for _ in range(20)]
        while not all(call.done() for call in waiting):
            assert (await http.get("/v1/models")).status_code == 200
        assert set(await asyncio.gather(*waiting)) == {(503, "policy_unavailable")}
        # It is left alone, although it would go on.
        await agent.left()
    assert engine.requests == []


async def test_an_unreachable_agent_refuses_the_call(engine: FakeEngine, unused: int) -> None:
    async with client_of(engine, f"http://127.0.0.1:{unused}/v1/data/nano") as http:
        assert await code(http) == (503, "policy_unavailable")
        assert (await http.get("/v1/models")).status_code == 200
    assert engine.requests == []


async def test_one_refused_prompt_refuses_the_call(http: Client, agent: Agent) -> None:
    """All prompts of the concurrent group are refused, and the rest of the fifty are not sent."""
    agent.answer = http_response({"result": False})
    assert await code(http, prompt=["hello"] * 50) == (400, "content_filter")
    assert len(agent.asked) <= AT_ONCE
    assert http.engine.requests == []


async def test_proxies_of_the_environment_are_ignored(
    http: Client, agent: Agent, monkeypatch: pytest.MonkeyPatch, unused: int
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{unused}")
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{unused}")
    assert await code(http) == (200, "")
    assert len(agent.asked) == 1
