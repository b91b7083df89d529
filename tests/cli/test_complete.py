"""complete, cancel and models, against a gateway and against a bus; the client of servers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import msgspec
import pytest
from starlette.responses import Response
from structlog.testing import capture_logs

from nano_inference.bus.public import CompletionChunk, GenerateRequest, Output
from nano_inference.cli.clients import ServerClient
from nano_inference.cli.connection import ServerAddress
from nano_inference.config import Config, GatewayConfig, RequestError
from nano_inference.gateway.app import make_app

from ..gateway.fake import FakeEngine, completion, refused, sample
from ..gateway.served import serve
from .conftest import LIMIT_S, Ran, Run, assert_refused, paused, wait_until

# --- complete -------------------------------------------------------------------------------------


def test_a_completion(run: Run, place: list[str]) -> None:
    assert run("complete", "98 + 25 =", *place) == Ran(0, " 123\n", "")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_prompt_on_standard_input(run: Run, place: list[str], arguments: list[str]) -> None:
    """All of it, without the line break that `echo` adds."""
    assert run("complete", *arguments, *place, stdin="98 + 25 =\n") == Ran(0, " 123\n", "")


def test_options_reach_the_engine(run: Run, place: list[str]) -> None:
    assert run("complete", "98 + 25 =", "--max-tokens", "3", *place).stdout == " 12\n"
    assert run("complete", "98 + 25 =", "--stop", "3", *place).stdout == " 12\n"
    drawn = ("complete", "Story about", "-t", "1", "--seed", "7", "--max-tokens", "16", *place)
    assert run(*drawn).stdout == run(*drawn).stdout


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--temperature", "-3", r"temperature is -3.0;.*\(invalid_temperature\)"),
        ("--model", "gpt-7", ".*gpt-7.*"),
    ],
)
def test_a_refused_request(run: Run, place: list[str], option: str, value: str, words: str) -> None:
    ran = run("complete", "x", option, value, *place)
    assert (ran.status, ran.stdout) == (1, "")
    assert re.fullmatch(f"nano-inference: {words}\n", ran.stderr)


@pytest.mark.parametrize(("stdin", "words"), [(b"\n", "nothing on standard"), (b"\xff", "UTF-8")])
def test_no_prompt(run: Run, url: str, stdin: bytes, words: str) -> None:
    assert_refused(run("complete", "--url", url, stdin=stdin), words)


# --- models and cancel --------------------------------------------------------------------------


def test_models(run: Run, place: list[str]) -> None:
    assert run("models", *place).stdout.split()[0] == "tiny"
    (model,) = run("models", "--json", *place).stdout.splitlines()
    assert msgspec.json.decode(model)["id"] == "tiny"


def test_a_server_s_root_will_do(run: Run, url: str) -> None:
    assert run("models", "--url", f"{url}/").stdout.startswith("tiny ")


def test_a_request_is_cancelled(run: Run, place: list[str], url: str) -> None:
    """Its client gets an answer all the same."""
    body = {"text": "98 + 25 =", "rid": f"mine-{len(place)}"}
    with ThreadPoolExecutor() as pool, paused(url):
        answer = pool.submit(httpx.post, f"{url}/generate", json=body, timeout=LIMIT_S)
        wait_until(url, in_flight=True)
        assert run("cancel", body["rid"], *place) == Ran(0, "", "")
        result = answer.result(LIMIT_S).json()
    assert result["meta_info"]["finish_reason"]["type"] == "abort"


def test_cancelling_an_unknown_request_says_so(
    run: Run, place: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.cli.cancel._LOOKS_S", (0.0,))
    ran = run("cancel", "unknown", *place)
    assert (ran.status, ran.stdout) == (1, "")
    assert "no request 'unknown' is in flight here" in ran.stderr


# --- nobody there -------------------------------------------------------------------------------

EACH = [["chat"], ["complete", "x"], ["cancel", "x"], ["models"]]


@pytest.mark.parametrize("command", EACH)
def test_without_a_server_or_a_bus(run: Run, closed_port: int, command: list[str]) -> None:
    ran = run(*command, "--url", f"http://127.0.0.1:{closed_port}/v1")
    assert_refused(ran, f"can't reach http://127.0.0.1:{closed_port}/v1")
    ran = run(*command, "--bus", f"redis://127.0.0.1:{closed_port}")
    assert_refused(ran, f"127.0.0.1:{closed_port}")


@pytest.mark.parametrize("command", EACH)
def test_a_bus_without_a_pipeline(run: Run, on_nobody: str, command: list[str]) -> None:
    assert_refused(run(*command), "no stage is running")


@pytest.mark.parametrize("command", EACH)
def test_the_default_is_the_server_of_serve(
    run: Run, monkeypatch: pytest.MonkeyPatch, closed_port: int, command: list[str]
) -> None:
    server = f"http://127.0.0.1:{closed_port}/v1"
    monkeypatch.setattr("nano_inference.cli.connection.DEFAULT_SERVER", server)
    assert_refused(run(*command), "start one with `nano-inference serve`")


# --- constraints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        ("regex=[0-9]{4}", re.compile("[0-9]{4}")),
        ("choice=[perhaps, never]", re.compile("perhaps|never")),
        ('json_schema={"enum": [7]}', re.compile("7")),
        ("json_schema=@schema.json", re.compile("8")),
        ("choice=[yes, 12, null]", re.compile("yes|12|null")),
        ('gbnf=root ::= "yes" | "no"', re.compile("yes|no")),
        ('lark=start: "yes" | "no"', re.compile("yes|no")),
    ],
)
def test_an_answer_follows_its_constraint(
    run: Run,
    place: list[str],
    constraint: str,
    answer: re.Pattern[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"enum": [8]}')
    ran = run("complete", "98 + 25 =", "--constraint", constraint, *place)
    assert ran.status == 0, ran.stderr
    assert answer.fullmatch(ran.stdout.strip())


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("regexp=a", "no kind 'regexp'"),
        ("regex", "regex=value"),
        ("json_schema=[]", "no JSON object"),
        ("json_object=false", "takes no value"),
        ("choice=yes", "no list"),
        ("choice=[[yes]]", "no list"),
        ("choice=[yes", "no list"),
        ("lark=@nowhere", "can't read nowhere"),
    ],
)
def test_a_bad_constraint_is_refused(run: Run, url: str, constraint: str, words: str) -> None:
    assert_refused(run("complete", "x", "--constraint", constraint, "--url", url), words)


# --- client of servers ----------------------------------------------------------------------------


URL = "http://127.0.0.1:8000/v1"


def answerer_of(app: Any) -> ServerClient:
    """One that reaches an application without a socket."""
    answerer = ServerClient(ServerAddress(URL))
    answerer._client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return answerer


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def answerer(engine: FakeEngine) -> AsyncIterator[ServerClient]:
    app = make_app(engine, Config())  # type: ignore[arg-type]
    async with answerer_of(app) as answerer:
        yield answerer


async def text_of(
    answerer: ServerClient, request: dict[str, Any], came: list[str] | None = None
) -> str:
    """Return the answer; its parts go to `came` too."""
    came = [] if came is None else came
    async with asyncio.timeout(LIMIT_S), aclosing(answerer.ask(request)) as pieces:
        async for piece in pieces:
            came.append(piece.text)
    return "".join(came)


SAMPLING = {
    "temperature": 0.5,
    "max_tokens": 9,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {17: 2.5},
    "min_tokens": 2,
    "max_draft_tokens": 3,
    "response_cache": False,
}


async def test_each_field_reaches_the_engine_as_over_the_bus(
    answerer: ServerClient, engine: FakeEngine
) -> None:
    request = {
        "prompt": "a",
        "model": "tiny",
        "sampling": SAMPLING,
        "stream": True,
        "tenant": "lab",
        "priority": -3,
        "budget_ns": 5 * 10**9,
        "prediction": "five seven",
    }
    assert await text_of(answerer, request) == "five six"
    (asked,) = engine.requests
    wanted = msgspec.convert(request, GenerateRequest)
    for name in ("prompt", "prediction", "sampling", "tenant", "priority"):
        assert getattr(asked, name) == getattr(wanted, name)
    assert asked.budget_ns is not None
    assert 0 < asked.budget_ns <= 5 * 10**9


def chunk(request: GenerateRequest, text: str) -> CompletionChunk:
    return CompletionChunk(
        request_id=request.request_id,
        entry_id="1-0",
        sample_index=0,
        token_offset=0,
        token_ids=(7,),
        logprobs=(-1.0,),
        text=text,
    )


@asynccontextmanager
async def over_a_socket(
    engine: FakeEngine, **settings: bool
) -> AsyncIterator[tuple[ServerClient, Any]]:
    """A client of a server; without a socket, httpx gives an answer when it is complete."""
    async with (
        serve(engine, GatewayConfig(**settings)) as served,
        ServerClient(ServerAddress(f"http://127.0.0.1:{served.port}/v1")) as answerer,
    ):
        yield answerer, served.server


async def test_text_is_streamed_and_leaving_cancels(engine: FakeEngine) -> None:
    engine.outputs = lambda request: [chunk(request, "Zürich 東京")]
    async with over_a_socket(engine) as (answerer, _):
        async with aclosing(answerer.ask({"prompt": "a"})) as pieces:
            assert (await anext(pieces)).text == "Zürich 東京"
        await engine.until(lambda: len(engine.left) == 1)


async def test_an_answer_is_read_to_its_end(engine: FakeEngine) -> None:
    """Behind the last event, so that no server takes us for a client that has left."""
    async with over_a_socket(engine, access_log=True) as (answerer, server):
        with capture_logs() as lines:
            assert await text_of(answerer, {"prompt": "a"}) == "five six"
            await server.calls.idle()
    (line,) = lines
    assert (line["status"], line["completion_tokens"]) == (200, 2)
    assert "complete" not in line


async def test_a_refusal_says_why(answerer: ServerClient, engine: FakeEngine) -> None:
    engine.outputs = refused("overloaded", "too many wait")
    with pytest.raises(RequestError, match="too many wait") as raised:
        await text_of(answerer, {"prompt": "a"})
    assert raised.value.code == "overloaded"


async def test_an_error_during_an_answer(answerer: ServerClient, engine: FakeEngine) -> None:
    def fail(request: GenerateRequest) -> list[Output]:
        return [chunk(request, "one"), *refused("lane_failed", "it died")(request)]

    engine.outputs = fail
    came: list[str] = []
    with pytest.raises(RequestError, match="it died") as raised:
        await text_of(answerer, {"prompt": "a"}, came)
    assert (came, raised.value.code) == (["one"], "lane_failed")


async def test_a_request_cancelled_elsewhere(answerer: ServerClient, engine: FakeEngine) -> None:
    engine.outputs = lambda request: [
        completion(request, sample(finish_reason="abort"), status="cancelled")
    ]
    with pytest.raises(RequestError, match="cancelled elsewhere"):
        await text_of(answerer, {"prompt": "a"})


# --- servers of other kinds ---------------------------------------------------------------------


CUT_SHORT = 'data: {"choices": [{"index": 0, "text": "one"}]}\n\n'
STREAM = {"media_type": "text/event-stream"}


@pytest.mark.parametrize(
    ("answer", "code", "why"),
    [
        (Response(CUT_SHORT, **STREAM), "connection_lost", "ended before its answer did"),
        (Response("data: hello\n\n", **STREAM), "malformed_output", "is not such a server"),
        (Response("hello", media_type="text/plain"), "malformed_output", "text/event-stream"),
        (Response("<html>" + "x" * 9000, 502), "502", "status 502"),
    ],
)
async def test_bad_servers_are_refused(answer: Response, code: str, why: str) -> None:
    async with answerer_of(answer) as answerer:
        with pytest.raises(RequestError, match=why) as raised:
            await text_of(answerer, {"prompt": "a"})
    assert raised.value.code == code
    assert len(raised.value.message) < 1000
