"""The scripted model writes and reads a file over each interface, and its calls are recorded."""

from __future__ import annotations

import json
import runpy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ..gateway.fake import LIMIT_S
from .conversations import Task
from .programs import PROGRAMS
from .results import BODIES, RESULTS
from .scripted import MODEL, ScriptedGateway, scripted_config

TASK = Task("walnut", "/tmp/note.txt")
WRITE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
BASH = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
DOCS = Path(__file__).parents[2] / "docs"
RECORDED = json.loads(BODIES.read_text())

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[ScriptedGateway]:
    with scripted_config() as config:
        gateway = ScriptedGateway(config)
        async with gateway:
            yield gateway


def chat(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("write_file", WRITE), ("bash", BASH))
    ]
    return "/v1/chat/completions", {"messages": history, "tools": tools, "user": "someone"}


def read_chat(answer: dict[str, Any], history: list[Any]) -> str:
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    history.append(message)
    history += [{"role": "tool", "tool_call_id": call["id"], "content": "walnut"} for call in calls]
    return str(calls[0]["function"]["name"] if calls else message["content"])


def response(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [
        {"type": "function", "name": name, "parameters": schema}
        for name, schema in (("write_file", WRITE), ("bash", BASH))
    ]
    return "/v1/responses", {"input": history, "tools": tools, "user": "someone"}


def read_response(answer: dict[str, Any], history: list[Any]) -> str:
    (item,) = answer["output"]
    history.append(item)
    if item["type"] != "function_call":
        return str(item["content"][0]["text"])
    said = {"type": "function_call_output", "call_id": item["call_id"], "output": "walnut"}
    history.append(said)
    return str(item["name"])


def message(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [
        {"name": name, "input_schema": schema}
        for name, schema in (("write_file", WRITE), ("bash", BASH))
    ]
    body = {"messages": history, "tools": tools, "max_tokens": 999, "metadata": {"user_id": "1"}}
    return "/v1/messages", body


def read_message(answer: dict[str, Any], history: list[Any]) -> str:
    (part,) = answer["content"]
    history.append({"role": "assistant", "content": [part]})
    if part["type"] == "text":
        return str(part["text"])
    result = {"type": "tool_result", "tool_use_id": part["id"], "content": "walnut"}
    history.append({"role": "user", "content": [result]})
    return str(part["name"])


@pytest.mark.parametrize(
    ("ask", "read"),
    [(chat, read_chat), (response, read_response), (message, read_message)],
    ids=["chat", "response", "message"],
)
async def test_the_script_is_followed_over_each_interface(
    gateway: ScriptedGateway,
    ask: Callable[[list[Any]], tuple[str, dict[str, Any]]],
    read: Callable[[dict[str, Any], list[Any]], str],
) -> None:
    history: list[Any] = [{"role": "user", "content": TASK.prompt}]
    said = []
    first = len(gateway.recorder.calls)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as client:
        for _ in range(3):
            path, body = ask(history)
            answer = await client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
            said.append(read(answer.json(), history))
    assert said == ["write_file", "bash", "The tool returned: walnut"]
    calls = gateway.recorder.calls[first:]
    assert [(call.path, call.status) for call in calls] == [(path, 200)] * 3
    assert [call.ignored[0] for call in calls] == [[*body][-1]] * 3
    assert calls[0].body["model"] == MODEL


async def test_the_page_has_the_results_of_all_programs() -> None:
    """`python docs/write_agents.py` writes the page."""
    results = json.loads(RESULTS.read_text())
    assert {name: each["version"] for name, each in results.items()} == {
        name: program.version for name, program in PROGRAMS.items()
    }
    writer = runpy.run_path(str(DOCS / "write_agents.py"))
    assert writer["page"]() == writer["PAGE"].read_text()


async def test_a_failed_call_is_recorded(gateway: ScriptedGateway) -> None:
    first = len(gateway.recorder.calls)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as client:
        await client.post("/v1/chat/completions", json={"model": MODEL, "messages": []})
    (call,) = gateway.recorder.calls[first:]
    assert call in gateway.recorder.failed
    assert '"error"' in call.answer


@pytest.mark.parametrize(("path", "body", "neutral"), RECORDED.values(), ids=RECORDED)
async def test_a_body_as_a_program_sends_it_is_taken(
    gateway: ScriptedGateway, path: str, body: dict[str, Any], neutral: list[str]
) -> None:
    """Its fields are those of the program's last call in the soak."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert sorted(gateway.recorder.calls[-1].ignored) == neutral
