"""Tools of MCP servers in `/v1/responses`: listed, called once, approved, kept, refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest
import uvicorn
from mcp.server import MCPServer
from openai import APIStatusError, AsyncOpenAI
from starlette.types import ASGIApp, Receive, Scope, Send

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config, ConfigError
from nano_inference.gateway.api.openai.responses.items import answered, turns_of
from nano_inference.gateway.call import Call
from nano_inference.gateway.caller import Caller
from nano_inference.gateway.serving.mcp_servers import Connection, Outcome

from ...fake import Client, FakeEngine, app_of, http_of, refused
from ...saying import Model, saying
from .streamed import response_events

PATH = "/v1/responses"
SECRET = "Bearer s3cret"
JSON = ((b"content-type", b"application/json"),)


class Served(NamedTuple):
    """A server of the package, on a port.

    Attributes:
        calls: The calls that it has had.
        headers: Authorization headers that it has had.
        slow: Set once its slow tool is called.
    """

    url: str
    calls: list[Any]
    headers: set[str]
    slow: threading.Event


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    calls: list[Any] = []
    headers: set[str] = set()
    slow_begun = threading.Event()
    tools = MCPServer("calculator")

    @tools.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        calls.append((a, b))
        return f"{a + b}"

    waiting: list[anyio.Event] = []

    @tools.tool()
    async def meet() -> str:
        """Return once two calls are here."""
        waiting.append(anyio.Event())
        if len(waiting) % 2 == 0:
            waiting[-2].set()
            waiting[-1].set()
        await waiting[-1].wait()
        return f"{len(waiting)} met"

    @tools.tool()
    def long() -> str:
        """Return a long text."""
        return "x" * 5000

    @tools.tool()
    async def slow() -> str:
        """Return nothing in time."""
        calls.append("slow")
        slow_begun.set()
        await anyio.sleep(60)
        return "late"

    app: ASGIApp = tools.streamable_http_app()

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        headers.update(
            value.decode() for name, value in scope.get("headers", ()) if name == b"authorization"
        )
        await app(scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(noting, port=0, log_level="critical", timeout_graceful_shutdown=0)
    )
    started = threading.Event()

    async def startup(sockets: Any = None) -> None:
        await uvicorn.Server.startup(server, sockets)
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    started.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Served(f"http://127.0.0.1:{port}/mcp", calls, headers, slow_begun)
    server.should_exit = True
    thread.join()


@pytest.fixture(autouse=True)
def no_calls(served: Served) -> None:
    served.calls.clear()
    served.slow.clear()


@pytest.fixture
def config(calling: Config, served: Served) -> Config:
    mcp = {
        "servers": "",
        "server_hosts": ("127.0.0.1",),
        "server_networks": ("127.0.0.0/8",),
        "server_ports": (int(served.url.split(":")[2].split("/")[0]),),
        "timeout_s": 5.0,
        "max_result_bytes": 4096,
        "max_rounds": 3,
    }
    return msgspec.structs.replace(calling, mcp=msgspec.structs.replace(calling.mcp, **mcp))


@pytest.fixture
def tool(served: Served) -> dict[str, Any]:
    return {
        "type": "mcp",
        "server_label": "sums",
        "server_url": served.url,
        "headers": {"Authorization": SECRET},
        "allowed_tools": ["add", "meet", "slow", "long"],
        "require_approval": "never",
    }


def call(name: str, **arguments: Any) -> str:
    called = {"name": f"sums__{name}", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(called)}\n</tool_call>"


def says(model: Model, texts: Sequence[str]) -> None:
    """Let the model answer one request after the other with these texts."""
    left = iter(texts)

    def outputs(request: GenerateRequest) -> list[Output]:
        return saying(next(left), model.tokenizer, 1, "stop")(request)

    model.engine.outputs = outputs


TWO_ROUNDS = (call("add", a=1, b=2), call("add", a=3, b=4), "It is 7.")


async def test_calls_are_made_until_there_is_an_answer(
    http: Client, other: Client, model: Model, served: Served, tool: dict[str, Any]
) -> None:
    says(model, TWO_ROUNDS)
    answer = (await http.post(PATH, json={"input": "Sum?", "tools": [tool]})).json()
    tools, first, second, message = answer["output"]
    assert tools["type"] == "mcp_list_tools"
    assert [each["name"] for each in tools["tools"]] == ["add", "meet", "long", "slow"]
    assert [(each["status"], each["output"], each["error"]) for each in (first, second)] == [
        ("completed", "3", None),
        ("completed", "7", None),
    ]
    assert (first["type"], first["server_label"], first["name"]) == ("mcp_call", "sums", "add")
    assert message["content"][0]["text"] == "It is 7."
    assert served.calls == [(1, 2), (3, 4)]
    # Each round is a request, and continues the prompt of the one before with its result.
    assert '"name": "sums__add"' in model.prompt(0)
    assert model.prompt(2).count("<|im_start|>tool\n") == 2
    assert "tool\n3(sums__add)" in model.prompt(1)
    assert answer["usage"]["input_tokens"] == 3 * 4
    # Secrets are sent to the server, and nowhere else.
    assert SECRET in served.headers
    (shown,) = answer["tools"]
    assert (shown["headers"], shown["server_url"]) == (None, served.url.removesuffix("/mcp"))
    assert (await other.get(f"{PATH}/{answer['id']}")).json() == answer
    stored = await http.engine.bus.store.calls.read(answer["id"])
    assert stored is not None
    assert b"s3cret" not in stored.record


async def test_the_events_are_openai_s(
    client: AsyncOpenAI, model: Model, tool: dict[str, Any]
) -> None:
    says(model, TWO_ROUNDS)
    stream = await client.responses.create(
        input="Sum?",
        model="tiny",
        tools=[tool],
        stream=True,  # type: ignore[list-item]
    )
    found = [event async for event in stream]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    names = [event.type.removeprefix("response.") for event in found]
    begun = names.index("mcp_call.in_progress")
    assert names[:6] == [
        *("created", "in_progress", "output_item.added", "mcp_list_tools.in_progress"),
        *("mcp_list_tools.completed", "output_item.done"),
    ]
    assert names[begun - 3 : begun + 3] == [
        *("output_item.added", "mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("mcp_call.in_progress", "mcp_call.completed", "output_item.done"),
    ]
    last = found[-1]
    assert last.type == "response.completed"
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert done == last.response.output
    places = [event.output_index for event in found if hasattr(event, "output_index")]
    assert places == sorted(places)
    with pytest.raises(APIStatusError, match="are sent once"):
        await client.responses.retrieve(last.response.id, stream=True)


async def test_a_call_waits_for_its_approval_and_is_made_once(
    client: AsyncOpenAI, model: Model, served: Served, tool: dict[str, Any]
) -> None:
    says(model, [call("add", a=1, b=2), "3, then.", "Then not."])
    tools: Any = [tool | {"require_approval": {"never": {"tool_names": ["long"]}}}]
    first = await client.responses.create(input="Sum?", model="tiny", tools=tools)
    asked = first.output[-1]
    assert asked.type == "mcp_approval_request"
    assert (asked.name, json.loads(asked.arguments), served.calls) == ("add", {"a": 1, "b": 2}, [])
    approved: Any = {
        "type": "mcp_approval_response",
        "approval_request_id": asked.id,
        "approve": True,
    }
    again = {"model": "tiny", "tools": tools, "previous_response_id": first.id}
    second = await client.responses.create(input=[approved], **again)
    made = second.output[0]
    assert (made.type, made.output, made.approval_request_id) == ("mcp_call", "3", asked.id)
    assert second.output_text == "3, then."
    with pytest.raises(APIStatusError, match="was used before") as failed:
        await client.responses.create(input=[approved], **again)
    assert failed.value.status_code == 409
    assert served.calls == [(1, 2)]
    third = await client.responses.create(
        input=[approved | {"approve": False, "reason": "Too dear."}], **again
    )
    assert third.output[0].status == "failed"
    assert "Error: not approved. Too dear." in model.prompt()
    assert served.calls == [(1, 2)]


async def test_failed_calls_are_results(
    http: Client, model: Model, served: Served, tool: dict[str, Any], config: Config
) -> None:
    says(model, [call("add", a="x", b=1), call("long"), "Sorry."])
    answer = (await http.post(PATH, json={"input": "Sum?", "tools": [tool]})).json()
    _, wrong, long, _ = answer["output"]
    assert (wrong["status"], wrong["error"]["type"]) == ("failed", "mcp_tool_execution_error")
    assert "mcp.max_result_bytes" in long["error"]["message"]
    assert "Error: the call was made" in model.prompt()


async def test_calls_of_a_round_run_at_once(
    client: AsyncOpenAI, model: Model, tool: dict[str, Any]
) -> None:
    """Their items are in the order of the calls."""
    says(model, ["\n".join([call("meet"), call("add", a=1, b=2), call("meet")]), "Done."])
    stream = await client.responses.create(
        input="Meet.",
        model="tiny",
        tools=[tool],  # type: ignore[list-item]
        stream=True,
    )
    found = [event async for event in stream]
    last = found[-1].response
    assert [each.output for each in last.output[1:4]] == ["2 met", "3", "2 met"]
    for kind in ("added", "done"):
        events = [each for each in found if each.type == f"response.output_item.{kind}"]
        assert [each.output_index for each in events] == [*range(5)]
        assert [each.item.id for each in events] == [each.id for each in last.output]


async def test_a_key_may_use_its_mcp_servers_only(
    engine: FakeEngine, config: Config, model: Model, tool: dict[str, Any]
) -> None:
    caller = Caller(key_id="k", tenant="acme", scopes=frozenset({"generate"}))
    app = app_of(engine, config)
    says(model, ["Fine."])
    statuses = []
    for servers in (("127.0.0.1",), ("sums",), ()):
        own = msgspec.structs.replace(caller, mcp_servers=servers)
        body = {"input": "a", "model": "tiny", "tools": [tool]}
        made = Call(id="c", caller=own, path=PATH, headers=JSON, batch_line=True)
        answer = await app.answer_own(made, msgspec.json.encode(body))
        statuses.append((answer.status, b"insufficient_scope" in answer.body))
    assert statuses == [(200, False), (403, True), (403, True)]
    named = {name: tool[name] for name in ("type", "server_label")}
    made = Call(id="c", caller=own, path=PATH, headers=JSON, batch_line=True)
    body = {"input": "a", "model": "tiny", "tools": [named]}
    answer = await app.answer_own(made, msgspec.json.encode(body))
    assert (answer.status, b"for this key" in answer.body) == (400, True)


async def test_an_approval_is_its_tenants_own(
    http: Client, model: Model, served: Served, tool: dict[str, Any]
) -> None:
    """Another tenant that knows its id can neither use it nor use it up."""
    says(model, [call("add", a=1, b=2), "Forged.", "3."])
    tools = [tool | {"require_approval": "always"}]
    mine, other = {"X-Tenant": "acme"}, {"X-Tenant": "blue"}
    first = (await http.post(PATH, json={"input": "Sum?", "tools": tools}, headers=mine)).json()
    request = first["output"][-1]
    approved = {
        "type": "mcp_approval_response",
        "approval_request_id": request["id"],
        "approve": True,
    }
    again = {"input": [approved], "tools": tools, "previous_response_id": first["id"]}
    refused_to = await http.post(PATH, json=again, headers=other)
    assert "another tenant's" in refused_to.text, refused_to.text
    assert served.calls == []
    forged = {"input": [request | {"arguments": '{"a":5,"b":5}'}, approved], "tools": tools}
    assert (await http.post(PATH, json=forged, headers=other)).status_code == 200
    assert served.calls == [(5, 5)], "a call of its own"
    second = await http.post(PATH, json=again, headers=mine)
    assert second.json()["output"][0]["output"] == "3"
    assert served.calls == [(5, 5), (1, 2)]


async def test_rounds_and_calls_are_limited(
    http: Client, model: Model, served: Served, tool: dict[str, Any]
) -> None:
    again = call("add", a=1, b=1)
    says(model, [again, again, again, again])
    answer = (await http.post(PATH, json={"input": "Sum?", "tools": [tool]})).json()
    # In the last round there are no tools, so a call is text.
    assert len(served.calls) == 3
    assert answer["output"][-1]["content"][0]["text"] == again
    served.calls.clear()
    says(model, [f"{again}\n{again}", "2."])
    asked = {"input": "Sum?", "tools": [tool], "max_tool_calls": 1}
    answer = (await http.post(PATH, json=asked)).json()
    assert [each["status"] for each in answer["output"][1:3]] == ["completed", "failed"]
    assert len(served.calls) == 1


async def test_a_response_with_a_key_is_made_once(
    http: Client, other: Client, model: Model, served: Served, tool: dict[str, Any]
) -> None:
    says(model, TWO_ROUNDS)
    headers = {"Idempotency-Key": "one"}
    asked = {"input": "Sum?", "tools": [tool]}
    first = await http.post(PATH, json=asked, headers=headers)
    assert (await other.post(PATH, json=asked, headers=headers)).json() == first.json()
    assert served.calls == [(1, 2), (3, 4)]


@pytest.mark.parametrize("end", ["the client leaves", "the gateway is killed"])
async def test_a_call_in_flight_is_never_made_again(
    engine: FakeEngine,
    config: Config,
    http: Client,
    other: Client,
    model: Model,
    served: Served,
    tool: dict[str, Any],
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stored response shows the call, which may have had its effect."""
    kept: list[str] = []
    calls = engine.bus.store.calls
    keep = calls.keep

    async def noting(call_id: str, *rest: Any) -> None:
        kept.append(call_id)
        await keep(call_id, *rest)

    monkeypatch.setattr(calls, "keep", noting)
    says(model, [call("slow"), "Sorry."])
    asked = {"input": "Wait.", "tools": [tool]}
    headers = {"Idempotency-Key": "one"}

    async def post() -> None:
        await http.post(PATH, json=asked, headers=headers)

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        await anyio.to_thread.run_sync(served.slow.wait)
        if end == "the gateway is killed":
            stored = await calls.read(kept[0])
            assert stored is not None
            (durable,) = app_of(engine, config).durable_calls()
            await durable.end_orphaned(kept[0], stored)
            await anyio.wait_all_tasks_blocked()
            answer = (await other.get(f"{PATH}/{kept[0]}")).json()
            assert (answer["status"], answer["error"]["code"]) == (
                *("failed", "response_interrupted"),
            )
            assert answer["output"][-1]["status"] == "in_progress"
        group.cancel_scope.cancel()
    answer = (await other.post(PATH, json=asked, headers=headers)).json()
    assert answer["status"] == "cancelled"
    assert (answer["output"][-1]["name"], answer["output"][-1]["status"]) == ("slow", "incomplete")
    assert served.calls == ["slow"]
    assert (len(engine.requests), kept[0]) == (1, answer["id"])


@pytest.mark.parametrize("end", ["ended", "deleted"])
async def test_a_response_that_is_ended_makes_no_further_call(
    http: Client,
    other: Client,
    model: Model,
    served: Served,
    tool: dict[str, Any],
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says(model, TWO_ROUNDS)
    make = Connection.call

    async def ending(connection: Connection, name: str, arguments: str) -> Outcome:
        outcome = await make(connection, name, arguments)
        response_id = model.requests[0].request_id
        if end == "deleted":
            assert (await other.delete(f"{PATH}/{response_id}")).status_code == 200
        else:
            await http.engine.bus.store.calls.mark(response_id, "cancelled")
        return outcome

    monkeypatch.setattr(Connection, "call", ending)
    answer = (await http.post(PATH, json={"input": "Sum?", "tools": [tool]})).json()
    assert (answer["status"], answer["output"][-1]["output"]) == ("cancelled", "3")
    assert (served.calls, len(model.requests)) == ([(1, 2)], 1)
    kept = await other.get(f"{PATH}/{answer['id']}")
    assert kept.status_code == (404 if end == "deleted" else 200)


async def test_a_failure_within_a_stream_is_its_last_event(
    http: Client, engine: FakeEngine, tool: dict[str, Any]
) -> None:
    engine.outputs = refused("lane_failed")
    asked = {"input": "Sum?", "tools": [tool], "stream": True}
    found = response_events(await http.post(PATH, json=asked))
    assert [each["type"] for each in found].count("response.created") == 1
    assert found[-1]["type"] == "response.failed"
    assert [each["type"] for each in found[-1]["response"]["output"]] == ["mcp_list_tools"]


async def test_calls_of_the_client_end_the_response(
    http: Client, model: Model, served: Served, tool: dict[str, Any]
) -> None:
    clock = {"type": "function", "name": "clock", "parameters": None}
    own = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    says(model, [f"{own}\n{call('add', a=1, b=2)}", "Noon."])
    tools = [clock, tool]
    first = (await http.post(PATH, json={"input": "When?", "tools": tools})).json()
    assert [each["type"] for each in first["output"]] == [
        *("mcp_list_tools", "function_call", "mcp_call")
    ]
    called = first["output"][1]["call_id"]
    result = {"type": "function_call_output", "call_id": called, "output": "12"}
    again = {"input": [result], "tools": tools, "previous_response_id": first["id"]}
    answer = await http.post(PATH, json=again)
    assert answer.status_code == 200, answer.text
    # The list of tools is in the conversation.
    assert [each["type"] for each in answer.json()["output"]] == ["message"]
    roles = [turn["role"] for turn in turns_of(answered(first["output"]))]
    assert roles == ["assistant", "tool"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a private address": (
        {"server_url": "http://[::1]:{port}/mcp"},
        "mcp_host_refused",
        "server_hosts",
    ),
    "another port": ({"server_url": "http://127.0.0.1:1/mcp"}, "invalid_mcp_url", "server_ports"),
    "no server": ({"server_url": None, "headers": None}, "invalid_request", "mcp.servers"),
    "a connector": ({"connector_id": "connector_gmail"}, "unsupported", "server_url"),
    "an unknown field": ({"allow": True}, "unknown_field", "allow"),
}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED.keys())
async def test_servers_that_are_not_allowed_are_refused(
    http: Client, tool: dict[str, Any], given: tuple[dict[str, Any], str, str]
) -> None:
    changed, code, named = given
    port = tool["server_url"].split(":")[2].split("/")[0]
    if url := changed.get("server_url"):
        changed = {"server_url": url.replace("{port}", port)}
    answer = await http.post(PATH, json={"input": "a", "tools": [tool | changed]})
    assert answer.status_code == 400
    assert code in answer.text
    assert named in answer.text


async def test_background_is_refused(http: Client, tool: dict[str, Any]) -> None:
    asked = {"input": "a", "tools": [tool], "background": True}
    assert "ends with its connection" in (await http.post(PATH, json=asked)).text


async def test_a_server_of_the_gateway_is_named_by_its_label(
    config: Config, engine: FakeEngine, model: Model, served: Served, tmp_path: Path
) -> None:
    path = tmp_path / "servers.json"
    changed = msgspec.structs.replace(config.mcp, servers=str(path), server_hosts=())
    config = msgspec.structs.replace(config, mcp=changed)
    with pytest.raises(ConfigError, match=r"mcp\.servers: can't read"):
        app_of(engine, config)
    own = {"sums": {"url": served.url, "headers": {"Authorization": "Bearer own"}}}
    path.write_text(json.dumps({"mcpServers": own}))
    says(model, TWO_ROUNDS)
    named = {"type": "mcp", "server_label": "sums", "require_approval": "never"}
    choice = {"type": "mcp", "server_label": "sums", "name": "add"}
    asked = {"input": "Sum?", "tools": [named], "tool_choice": choice}
    async with http_of(app_of(engine, config)) as client:
        answer = (await client.post(PATH, json=asked)).json()
        by_url = asked | {"tools": [named | {"server_url": served.url}]}
        by_its_url = await client.post(PATH, json=by_url)
    assert (served.calls, answer["tool_choice"]) == ([(1, 2), (3, 4)], choice)
    assert "Bearer own" in served.headers
    assert by_its_url.json()["error"]["code"] == "mcp_off"


async def test_without_the_setting_a_server_is_refused(
    calling: Config, engine: FakeEngine, tool: dict[str, Any]
) -> None:
    async with http_of(app_of(engine, calling)) as client:
        answer = await client.post(PATH, json={"input": "a", "tools": [tool]})
    assert answer.status_code == 400
    assert "mcp.servers or mcp.server_hosts" in answer.text
