"""Guardrails of every interface, for whole answers and streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.document import Guardrails

from ..errors import code_of
from ..fake import Client, FakeEngine, app_of, data_of
from ..sampled import WORDS
from .conftest import Made, bearer
from .spoken import spoken

Json = dict[str, Any]

SAID = "so it is(BAD, they say, and go on for a while"
LEFT = "so it is("
GUARDRAILS = {"literals": ["bad"], "patterns": [r"worse\b"]}
LONGER = "all is well, and nobody has ever said anything about it that was not so at all"
CHAT = [{"role": "user", "content": "a"}]


class Interface(NamedTuple):
    """An interface that generates tokens.

    Attributes:
        body: Body of a call whose prompt is blocked.
        blocked: Blocked of a call whose prompt is blocked.
        text: Text of an answer in one piece.
        delta: What an event of a stream adds to its text.
        reason: Why an answer ended, in one piece.
        streamed_reason: The same by an event of a stream; None of most.
        streams: Whether it has a stream.
        stream_path: Where it has that, where that is another path.
    """

    path: str
    body: Json
    blocked: Json
    text: Callable[[Json], str]
    delta: Callable[[Json], str]
    reason: Callable[[Json], Any]
    streamed_reason: Callable[[Json], Any]
    streams: bool = True
    stream_path: str = ""


def choice(answer: Json) -> Json:
    (found,) = answer["choices"] or [{}]
    return found


def output(answer: Json) -> Json:
    response: Json = answer.get("response", answer)
    return response


def tensor(name: str, datatype: str, value: Any) -> Json:
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value]}


def in_tensor(name: str, answer: Json) -> Any:
    """The only element of a KServe output."""
    (found,) = (each["data"] for each in answer["outputs"] if each["name"] == name)
    return found[0]


def only(kind: str, event: Json, *path: str) -> Any:
    """Something of an event of one kind."""
    found: Any = event if event["type"] == kind else None
    for name in path:
        found = found and found[name]
    return found


CHATS = {"messages": CHAT, "max_tokens": 99, "logprobs": True, "top_logprobs": 1}
TENSORS = {
    "inputs": [tensor("text_input", "BYTES", "a"), tensor("exclude_input_in_output", "BOOL", True)],
    "outputs": [{"name": "text_output"}, {"name": "finish_reason"}],
}
GENERATE = Interface(
    "/generate",
    {"text": "a", "return_logprob": True, "return_text_in_logprobs": True},
    {"text": ["fine", "bad"]},
    lambda answer: answer["text"],
    lambda event: event["text"],
    lambda answer: answer["meta_info"]["finish_reason"]["err_type"],
    lambda event: (event["meta_info"]["finish_reason"] or {}).get("err_type"),
)
INTERFACES = {
    "completions": Interface(
        "/v1/completions",
        {"prompt": "a", "logprobs": 1, "return_token_ids": True},
        {"prompt": ["fine", "so \uff42ad"]},
        lambda answer: choice(answer)["text"],
        lambda event: choice(event).get("text", ""),
        lambda answer: choice(answer)["finish_reason"],
        lambda event: choice(event).get("finish_reason"),
    ),
    "chat": Interface(
        "/v1/chat/completions",
        CHATS | {"return_token_ids": True},
        {"messages": [{"role": "user", "content": "b\u00adad"}]},
        lambda answer: choice(answer)["message"]["content"],
        lambda event: choice(event).get("delta", {}).get("content", ""),
        lambda answer: choice(answer)["finish_reason"],
        lambda event: choice(event).get("finish_reason"),
    ),
    "responses": Interface(
        "/v1/responses",
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 1},
        {"input": "WORSE"},
        lambda answer: output(answer)["output"][0]["content"][0]["text"],
        lambda event: only("response.output_text.delta", event, "delta") or "",
        lambda answer: output(answer)["incomplete_details"],
        lambda event: only("response.incomplete", event, "response", "incomplete_details"),
    ),
    "messages": Interface(
        "/v1/messages",
        {"model": "tiny", "max_tokens": 99, "messages": CHAT},
        {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Bad"}]},
        lambda answer: answer["content"][0]["text"],
        lambda event: only("content_block_delta", event, "delta", "text") or "",
        lambda answer: answer["stop_reason"],
        lambda event: only("message_delta", event, "delta", "stop_reason"),
    ),
    "ollama's chats": Interface(
        "/api/chat",
        {"messages": CHAT, "stream": False, "logprobs": True, "top_logprobs": 1},
        {"messages": [{"role": "user", "content": "b\u00adad"}]},
        lambda answer: answer["message"]["content"],
        lambda event: event["message"]["content"],
        lambda answer: answer["done_reason"],
        lambda event: event.get("done_reason"),
    ),
    "ollama's prompts": Interface(
        "/api/generate",
        {"prompt": "a", "stream": False},
        {"prompt": "WORSE"},
        lambda answer: answer["response"],
        lambda event: event["response"],
        lambda answer: answer["done_reason"],
        lambda event: event.get("done_reason"),
    ),
    "generate": GENERATE,
    "generate, special tokens": GENERATE._replace(
        body={"text": "a", "sampling_params": {"skip_special_tokens": False, "no_stop_trim": True}},
        blocked={"input_ids": [[5], [69, 68, 71]]},
    ),
    "requests of the bus": Interface(
        "/v1/requests",
        {"prompt": "a", "sampling": {"logprobs": 1}, "stream": False},
        {"prompt": None, "messages": [{"role": "user", "content": "b\u00adad"}]},
        lambda answer: answer["samples"][0]["text"],
        lambda event: only("chunk", event, "text") or "",
        lambda answer: answer["samples"][0]["finish_reason"],
        lambda event: event.get("samples", [{}])[0].get("finish_reason"),
    ),
    "kserve, infer": Interface(
        "/v2/models/tiny/infer",
        TENSORS,
        TENSORS | {"inputs": [tensor("text_input", "BYTES", "so b\u00adad")]},
        partial(in_tensor, "text_output"),
        partial(in_tensor, "text_output"),
        partial(in_tensor, "finish_reason"),
        partial(in_tensor, "finish_reason"),
        streams=False,
    ),
    "kserve, generate": Interface(
        "/v2/models/tiny/generate",
        {"text_input": "a", "exclude_input_in_output": True, "return_finish_reason": True},
        {"text_input": "WORSE"},
        lambda answer: answer["text_output"],
        lambda event: event["text_output"],
        lambda answer: answer["finish_reason"],
        lambda event: event["finish_reason"].replace("None", ""),
        stream_path="/v2/models/tiny/generate_stream",
    ),
}
REASONS = {"responses": {"reason": "content_filter"}, "messages": "refusal"}
NAMES = list(INTERFACES)
STREAMED = [name for name, interface in INTERFACES.items() if interface.streams]


@pytest.fixture
async def caller(http: Client, made: Made, administration: Administration) -> Client:
    """A client with a key, where something is blocked."""
    await administration.set_guardrails(GUARDRAILS)
    http.headers.update(bearer(await made()))
    return http


def saying(engine: FakeEngine, *texts: str, every: int = 1) -> None:
    """Set the engine's outputs: each of `n` samples is one of the texts."""
    said = [WORDS.token_ids(text, add_special=False) for text in texts]

    def outputs(request: GenerateRequest) -> list[Output]:
        answers = [said[index % len(said)] for index in range(request.n)]
        return spoken(request, answers, range(0, 99, every))

    engine.outputs = outputs


def strings(found: Any) -> Iterator[str]:
    """All strings of a body, without random ids."""
    if isinstance(found, str):
        yield re.sub("[0-9a-f]{16,}", "", found)
    elif isinstance(found, dict):
        for value in found.values():
            yield from strings(value)
    elif isinstance(found, list):
        for value in found:
            yield from strings(value)


def token_lists(found: Any) -> Iterator[list[int]]:
    """All tokens' ids."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name in ("token_ids", "output_ids"):
                yield value
            yield from token_lists(value)
    elif isinstance(found, list):
        for value in found:
            yield from token_lists(value)


def streamed_text(interface: Interface, sent: list[Json]) -> str:
    if interface.path == "/generate":  # each event repeats what came before
        return interface.delta(sent[-1])
    return "".join(map(interface.delta, sent))


@pytest.mark.parametrize("name", NAMES)
async def test_a_whole_answer_ends_before_a_match(caller: Client, name: str) -> None:
    interface = INTERFACES[name]
    saying(caller.engine, SAID)
    answer = await caller.post(interface.path, json=interface.body)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert interface.text(body) == LEFT
    assert interface.reason(body) == REASONS.get(name, "content_filter")
    assert not any("bad" in each.lower() for each in strings(body))
    for token_ids in token_lists(body):
        assert WORDS.text(token_ids, skip_special=True) == LEFT


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("every", [1, 2, 5, 99])
async def test_a_stream_ends_before_a_match(caller: Client, name: str, every: int) -> None:
    interface = INTERFACES[name]
    saying(caller.engine, SAID, every=every)
    path = interface.stream_path or interface.path
    answer = await caller.post(path, json=interface.body | {"stream": True})
    assert answer.status_code == 200, answer.text
    sent = data_of(answer)
    assert streamed_text(interface, sent) == LEFT
    reasons = [reason for event in sent if (reason := interface.streamed_reason(event))]
    assert reasons == [REASONS.get(name, "content_filter")]
    assert not any("bad" in each.lower() for event in sent for each in strings(event))
    token_ids = [ids for event in sent for ids in token_lists(event)]
    if token_ids:
        has_all = interface.path in ("/generate", "/v1/requests")  # in the last event
        joined = token_ids[-1] if has_all else list(chain(*token_ids))
        assert WORDS.text(joined, skip_special=True) == LEFT


@pytest.mark.parametrize("name", NAMES)
async def test_a_blocked_prompt_reaches_no_engine(caller: Client, name: str) -> None:
    interface = INTERFACES[name]
    for more in ({}, {"stream": True})[: 1 + interface.streams]:
        body = interface.body | interface.blocked | more
        if "input_ids" in body:
            del body["text"]
        path = interface.stream_path if more and interface.stream_path else interface.path
        answer = await caller.post(path, json=body)
        assert code_of(answer, 400) == "content_filter"
    assert caller.engine.requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_token_ids_end_before_a_match(caller: Client, path: str) -> None:
    saying(caller.engine, SAID)
    name = "prompt" if path == "/v1/completions" else "token_ids"
    body = {name: [5]} | ({"return_token_ids": True} if name == "prompt" else {})
    (found,) = (await caller.post(path, json=body)).json()["choices"]
    assert found["token_ids"] == list(WORDS.token_ids(LEFT, add_special=False))
    assert found["finish_reason"] == "content_filter"
    refused = await caller.post(path, json=body | {name: list(WORDS.token_ids("bad"))})
    assert code_of(refused, 400) == "content_filter"


async def test_a_match_may_begin_in_an_echoed_prompt(caller: Client) -> None:
    saying(caller.engine, "d as it is")
    body = {"prompt": "so ba", "echo": True}
    (found,) = (await caller.post("/v1/completions", json=body)).json()["choices"]
    assert (found["text"], found["finish_reason"]) == ("so ba", "content_filter")


async def test_each_sample_is_judged_by_itself(caller: Client) -> None:
    saying(caller.engine, SAID, LONGER, every=3)
    for stream in (False, True):
        body = {"prompt": "a", "n": 3, "stream": stream}
        answer = await caller.post("/v1/completions", json=body)
        sent = data_of(answer) if stream else [answer.json()]
        found = [each for event in sent for each in event["choices"]]
        texts = ["".join(each["text"] for each in found if each["index"] == i) for i in range(3)]
        assert texts == [LEFT, LONGER, LEFT]
        reasons = {each["index"]: each["finish_reason"] for each in found if each["finish_reason"]}
        assert reasons == {0: "content_filter", 1: "length", 2: "content_filter"}
    # One sample goes on, so the engine does.
    assert "cancel" not in caller.engine.names


async def test_a_blocked_request_is_cancelled(caller: Client) -> None:
    saying(caller.engine, SAID)
    await caller.post("/v1/completions", json={"prompt": "a", "stream": True})
    (request,) = caller.engine.requests
    assert caller.engine.last("cancel") == {"request_id": request.request_id}
    # Its tokens until then are counted.
    assert caller.engine.ended == [request.request_id]


@pytest.mark.parametrize("name", ["completions", "chat"])
async def test_a_resumed_stream_ends_at_the_same_place(
    caller: Client, app: GatewayApp, name: str
) -> None:
    interface = INTERFACES[name]
    saying(caller.engine, SAID, every=2)
    whole = await caller.post(interface.path, json=interface.body | {"stream": True})
    ids = [line[4:] for line in whole.text.splitlines() if line.startswith("id: ")]
    sent = data_of(whole)
    assert len(ids) == len(sent) + 1
    for number, event_id in enumerate(ids[:-1], 1):
        last = {"Last-Event-ID": event_id}
        rest = await caller.get(f"/v1/streams/{event_id.partition('.')[0]}", headers=last)
        assert rest.status_code == 200
        behind = data_of(rest)
        assert streamed_text(interface, sent[:number] + behind) == LEFT
        reasons = map(interface.streamed_reason, sent[:number] + behind)
        assert [reason for reason in reasons if reason] == ["content_filter"]


async def test_without_a_block_list_nothing_is_held_back(http: Client, made: Made) -> None:
    saying(http.engine, SAID)
    headers = bearer(await made())
    body = {"prompt": "bad", "stream": True}
    sent = data_of(await http.post("/v1/completions", json=body, headers=headers))
    assert len(sent) == len(WORDS.token_ids(SAID))
    assert "cancel" not in http.engine.names


async def test_a_change_holds_for_the_next_call(
    caller: Client, administration: Administration
) -> None:
    body = {"prompt": "all good"}
    assert (await caller.post("/v1/completions", json=body)).status_code == 200
    await administration.set_guardrails({"literals": ["good"]})
    assert (await caller.post("/v1/completions", json=body)).status_code == 400
    await administration.set_guardrails({})
    assert (await caller.post("/v1/completions", json=body)).status_code == 200


async def test_an_invalid_stored_block_list_refuses_all_calls(
    caller: Client, app: GatewayApp
) -> None:
    broken = Guardrails(patterns=("(a",))

    def edit(document: Any) -> Any:
        return type(document)(document.keys, document.tenants, broken)

    await app.policy.store.change(edit)
    answer = await caller.post("/v1/completions", json={"prompt": "a"})
    assert code_of(answer, 503) == "policy_unavailable"
    assert caller.engine.requests == []


async def test_a_conversation_is_compacted_under_the_block_list(caller: Client) -> None:
    saying(caller.engine, SAID)
    blocked = await caller.post("/v1/responses/compact", json={"input": "WORSE"})
    assert blocked.status_code == 400
    assert not caller.engine.requests
    answer = await caller.post("/v1/responses/compact", json={"input": "a"})
    assert code_of(answer, answer.status_code) == "compaction_failed"
    assert LEFT not in answer.text


def test_every_route_that_generates_is_tested(engine: FakeEngine, config: Config) -> None:
    """An interface that is added has to be added above."""
    app = app_of(engine, config)
    posts = {
        each.path_format
        for each in app.routes
        if getattr(each, "needed", "") == "generate" and "POST" in (getattr(each, "methods", ()))
    }
    paths = [path for each in INTERFACES.values() for path in (each.path, each.stream_path) if path]
    model = "/v2/models/{model}"
    known = {path.replace("/v2/models/tiny", model) for path in paths} | {"/inference/v1/generate"}
    known |= {path.replace(model, f"{model}/versions/{{version}}") for path in known}
    no_answers = """
        /abort_request /tokenize /detokenize /encode /v1/embeddings /score /v1/score /rerank
        /v1/rerank /v1/messages/count_tokens /v1/responses/input_tokens
        /v1/responses/{response_id}/cancel /v1/streams/{stream}/cancel /v1/kv_sessions/{session}
        /v1/replay/{id} /admin/operations/kv_session /finish_session /api/embed /api/embeddings
        /v1/chat/completions/render /v1/chat/completions/derender
        /v1/completions/render /v1/completions/derender /v1/messages/render /v1/responses/render
        /v1/conversations /v1/conversations/{conversation_id}
        /v1/conversations/{conversation_id}/items
        /v1/files /v1/batches /v1/batches/{batch_id}/cancel /v1/messages/batches
        /v1/messages/batches/{batch_id}/cancel /v1/uploads /v1/uploads/{upload_id}/parts
        /v1/uploads/{upload_id}/complete /v1/uploads/{upload_id}/cancel
    """
    known.add("/v1/responses/compact")
    known |= {*no_answers.split(), *(each for each in posts if "sharedmemory" in each)}
    assert posts == known
