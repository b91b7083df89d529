"""`/v1/messages`: what reaches the engine, what is answered, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from httpx import Response

from nano_inference.bus.public import GenerateRequest, Output

from ... import by_hand
from ...errors import invalid
from ...fake import Client, FakeEngine, app_of, completion, poster, refused
from ...made import TEXTS, TOKENS, interleaved, told, whole
from ...sampled import WORDS

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEXT = "".join(TEXTS)
HELLO: dict[str, Any] = {"role": "user", "content": "How much is 6 + 6?"}
BAD = "invalid_request_error"
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [HELLO]}


# The engine makes up texts, of which its tokens know nothing.
SETTINGS = {"gateway.message_format": "off"}

posted = poster(PATH, ASKED)


def prompt_of(engine: FakeEngine) -> str:
    """The text of the only request's prompt."""
    (request,) = engine.requests
    return WORDS.text(request.prompt_token_ids or (), skip_special=False)


def refusal(answer: Response, status: int = 400) -> tuple[str, str, str | None]:
    """(type, code, param)."""
    assert answer.status_code == status, answer.text[:1000]
    body = answer.json()
    assert body["type"] == "error"
    assert 0 < len(body["error"]["message"]) < 2000
    return body["error"]["type"], body["error"]["code"], body["error"]["param"]


def events(answer: Response) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


async def test_an_answer_has_anthropic_s_fields(http: Client) -> None:
    http.engine.outputs = whole
    answer = await posted(http)
    (request,) = http.engine.requests
    assert answer == {
        "id": request.request_id,
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 3,
        },
    }
    assert answer["id"].startswith("msg_")


@pytest.mark.parametrize(
    "system",
    ["Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]],
)
async def test_the_prompt_equals_openai_s(http: Client, system: Any) -> None:
    blocks = [{"type": "text", "text": "6"}, {"type": "text", "text": "+"}]
    messages = [
        {"role": "user", "content": blocks},
        {"role": "user", "content": "6?"},
        {"role": "assistant", "content": "12"},
        HELLO,
    ]
    await posted(http, system=system, messages=messages)
    prompt = http.engine.requests.pop().prompt_token_ids
    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "6\n+\n6?"},
        {"role": "assistant", "content": "12"},
        HELLO,
    ]
    await http.post("/v1/chat/completions", json={"messages": same})
    assert prompt == http.engine.requests[0].prompt_token_ids
    body = {"system": system, "messages": messages}
    assert (await http.post(COUNT, json=body)).json() == {"input_tokens": len(prompt or ())}


async def test_the_assistant_s_last_message_is_continued(http: Client) -> None:
    await posted(http, messages=[HELLO, {"role": "assistant", "content": "That is 1"}])
    assert prompt_of(http.engine).endswith("That is 1")


async def test_the_stop_reason_is_reported(http: Client) -> None:
    last = WORDS.text(TOKENS[2:], skip_special=True)
    http.engine.outputs = whole
    answer = await posted(http, stop_sequences=["nothing", last])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", last)
    http.engine.outputs = lambda request: [completion(request)]
    answer = await posted(http, max_tokens=2)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    answer = await posted(http, max_tokens=3)
    assert answer["stop_reason"] == "model_context_window_exceeded"

    def aborted(request: GenerateRequest) -> list[Output]:
        return [completion(request, told(request, 0, "abort"), status="cancelled")]

    http.engine.outputs = aborted
    assert (await posted(http))["stop_reason"] == "pause_turn"


async def test_a_stream_s_events_come_in_order(http: Client) -> None:
    http.engine.outputs = interleaved
    answer = await http.post(PATH, json=ASKED | {"stream": True})
    found = events(answer)
    names = [name for name, _ in found]
    before = ["message_start", "content_block_start", "ping"]
    after = ["content_block_stop", "message_delta", "message_stop"]
    assert names == [*before, *["content_block_delta"] * (len(names) - 6), *after]
    start = found[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["id"] == http.engine.requests[0].request_id
    prompt = len(http.engine.requests[0].prompt_token_ids or ())
    assert start["usage"]["input_tokens"] == prompt
    assert "".join(each["delta"]["text"] for _, each in found[3:-3]) == TEXT
    http.engine.outputs = whole
    message = await posted(http)
    delta = found[-2][1]
    assert delta["usage"] == message["usage"]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_top_p", 400, "invalid_request_error"),
        ("prompt_too_long", 400, "invalid_request_error"),
        ("unknown_model", 404, "not_found_error"),
        ("overloaded", 429, "rate_limit_error"),
        ("shutting_down", 503, "overloaded_error"),
        ("expired", 504, "timeout_error"),
        ("lane_failed", 500, "api_error"),
    ],
)
async def test_errors_have_anthropic_s_types(
    http: Client, code: str, status: int, kind: str, stream: bool
) -> None:
    http.engine.outputs = refused(code)
    answer = await http.post(PATH, json=ASKED | {"stream": stream})
    assert refusal(answer, status) == (kind, code, None)
    assert ("retry-after" in answer.headers) == (status == 429)


UNSUPPORTED = (415, "invalid_request_error", "unsupported_media_type")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind", "code"),
    [
        ("GET", PATH, {}, 405, "invalid_request_error", "method_not_allowed"),
        ("POST", f"{PATH}/other", {}, 404, "not_found_error", "not_found"),
        ("POST", PATH, {"Content-Type": "text/plain"}, *UNSUPPORTED),
        ("POST", COUNT, {"Content-Encoding": "gzip"}, *UNSUPPORTED),
    ],
)
async def test_errors_without_an_endpoint_have_anthropic_s_form(
    http: Client, method: str, path: str, headers: dict[str, str], status: int, kind: str, code: str
) -> None:
    answer = await http.request(method, path, headers=headers, content=b"{}")
    assert refusal(answer, status) == (kind, code, None)


async def test_internal_errors_have_anthropic_s_form(http: Client) -> None:
    def fails(request: GenerateRequest) -> list[Output]:
        raise ZeroDivisionError

    http.engine.outputs = fails
    assert refusal(await http.post(PATH, json=ASKED), 500)[0] == "api_error"


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_the_version_must_be_known_or_absent(http: Client, path: str) -> None:
    body = {"messages": [HELLO]} | ({"max_tokens": 5} if path == PATH else {})
    for known in ("2023-06-01", "2026-10-21"):
        headers = {"anthropic-version": known, "anthropic-beta": "a-beta"}
        answer = await http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    answer = await http.post(path, json=body, headers={"anthropic-version": "2023-01-01"})
    assert refusal(answer) == ("invalid_request_error", "unsupported", "anthropic-version")


def user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


BLOCK: dict[str, Any] = {"type": "text", "text": "a"}
NOT_SUPPORTED = "images_not_supported"
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    invalid("model", model=3),
    invalid("max_tokens", max_tokens=None),
    invalid("max_tokens", max_tokens=1.5),
    invalid("messages", messages=None),
    invalid("messages", messages=[]),
    invalid("messages", messages="a"),
    invalid("messages[0].role", messages=[{"role": "tool", "content": "a"}]),
    invalid("messages[0].content", messages=[{"role": "user"}]),
    invalid("messages[0].content", messages=[{"role": "user", "content": None}]),
    invalid("messages", messages=[{"role": "system", "content": []}]),
    invalid("messages[1].content", messages=[HELLO, {"role": "assistant", "content": ""}]),
    invalid("messages[0].content[0].text", messages=user(BLOCK | {"text": 5})),
    invalid("messages[0].content[1].source.url", NOT_SUPPORTED, messages=user(BLOCK, IMAGE)),
    invalid("messages[0].content[0]", "unsupported", messages=user({"type": {"a": 1}})),
    invalid("system", system=5),
    invalid("system[0]", "unsupported", system=[IMAGE]),
    invalid("stop_sequences", stop_sequences="a"),
    invalid("service_tier", "unsupported", service_tier="flex"),
    invalid("inference_geo", "unsupported", inference_geo="eu"),
    invalid("compaction", "unsupported", compaction={"type": "compaction"}),
    invalid("budget_ms", "invalid_budget", budget_ms=1e300),
    invalid("max_token", "unsupported", max_token=5),
    invalid(
        "chat_template_kwargs.tokenize", "unsupported", chat_template_kwargs={"tokenize": False}
    ),
]


async def test_unsupported_fields_are_refused_by_name(http: Client) -> None:
    for fields, code, param in REFUSED:
        answer = await http.post(PATH, json=ASKED | fields)
        kind, found, name = refusal(answer)
        assert (kind, found) == (BAD, code), fields
        assert name == param or (name is None and param in answer.json()["error"]["message"])
    assert not http.engine.requests


async def test_an_unknown_model_is_not_found(http: Client) -> None:
    for path in (PATH, COUNT):
        answer = await http.post(path, json={"model": "claude", "messages": [HELLO]})
        assert refusal(answer, 404)[:2] == ("not_found_error", "unknown_model")


async def test_a_body_that_is_none_has_anthropic_s_error(http: Client) -> None:
    answer = await http.post(PATH, content=b"{")
    assert refusal(answer) == ("invalid_request_error", "malformed", None)
    large = {"messages": [HELLO | {"content": "a" * (17 << 20)}]}
    assert refusal(await http.post(PATH, json=large), 413)[0] == "request_too_large"


async def test_a_stream_with_nothing_to_say_pings() -> None:
    """Also before its first event."""
    pinged = anyio.Event()
    sent = b""

    class Slow(FakeEngine):
        async def submit(self, request: GenerateRequest, trace: Any = None) -> Any:
            await pinged.wait()
            for output in whole(request):
                yield output

    app = app_of(Slow(), {"gateway.comment_s": 0.01})

    async def send(message: Any) -> None:
        nonlocal sent
        if message["type"] == "http.response.body":
            sent += message["body"]
            pinged.set()

    await by_hand.post(app, PATH, ASKED | {"stream": True}, send)
    assert sent.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')
    assert b"event: message_start\n" in sent
    assert sent.endswith(b'data: {"type":"message_stop"}\n\n')
