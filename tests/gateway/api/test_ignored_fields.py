"""Neutral and unknown fields: named in the response and once in the log; or refused."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from nano_inference.config import Config, load_config
from nano_inference.gateway.call import MOST_IGNORED

from ..fake import Client, refused

CHAT = "/v1/chat/completions"
HEADER = "X-Ignored-Fields"
HELLO = {"role": "user", "content": "a"}
SENT_BACK: list[dict[str, Any]] = [
    HELLO | {"provider": {"a": 1}},
    {"role": "assistant", "content": [{"type": "text", "text": "b", "more": 1}], "id": "msg_1"},
    HELLO,
]
BODY = {"messages": SENT_BACK, "user": "me"}
NAMED = "messages[].provider, messages[].content[].more, messages[].id, user"


def names(header: str) -> list[str]:
    return sorted(header.split(", "))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_names_the_ignored_fields(http: Client, stream: bool) -> None:
    answer = await http.post(CHAT, json=BODY | {"stream": stream})
    assert answer.status_code == 200, answer.text
    assert names(answer.headers[HEADER]) == names(NAMED)
    plain = await http.post(CHAT, json={"messages": [HELLO], "stream": stream})
    assert HEADER not in plain.headers


async def test_an_empty_object_may_be_a_request_and_is_named(http: Client) -> None:
    answer = await http.post(CHAT, json={"messages": [HELLO], "web_search_options": {}, "user": ""})
    assert answer.headers[HEADER] == "web_search_options"


async def test_an_error_names_the_ignored_fields(http: Client) -> None:
    http.engine.outputs = refused("invalid_top_p")
    answer = await http.post(CHAT, json=BODY)
    assert answer.status_code == 400
    assert names(answer.headers[HEADER]) == names(NAMED)


async def test_a_header_names_few_fields_and_plain_ones(http: Client) -> None:
    many = {f"x{number}": 1 for number in range(MOST_IGNORED + 9)}
    answer = await http.post(CHAT, json={"messages": [HELLO | {"é": 1, "a b": 1} | many]})
    listed = answer.headers[HEADER].split(", ")
    assert len(listed) <= MOST_IGNORED + 1
    assert listed[-1] == "..."
    assert "messages[].x1" in listed


async def test_each_set_of_ignored_fields_is_logged_once(http: Client) -> None:
    with capture_logs() as lines:
        for _ in range(3):
            await http.post(CHAT, json=BODY)
        await http.post(CHAT, json={"messages": [HELLO], "user": "me"})
    told = [names(line["fields"]) for line in lines if line["event"] == "fields_ignored"]
    assert told == [names(NAMED), ["user"]]


TYPOS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [HELLO], "temprature": 1}, "temprature"),
    (CHAT, {"messages": [HELLO], "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (
        CHAT,
        {"messages": [HELLO], "response_format": {"type": "text", "x": 1}},
        "response_format.x",
    ),
    ("/v1/responses", {"input": "a", "reasoning": {"efort": "none"}}, "reasoning.efort"),
    (
        "/inference/v1/generate",
        {"token_ids": [5], "sampling_params": {"temprature": 1}},
        "sampling_params.temprature",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"temprature": 1}},
        "sampling_params.temprature",
    ),
    ("/v1/messages", {"messages": [HELLO], "max_tokens": 5, "temprature": 1}, "temprature"),
    ("/v1/embeddings", {"input": "a", "dimension": 5}, "dimension"),
    ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token"),
]


@pytest.mark.parametrize(("path", "body", "param"), TYPOS, ids=lambda each: str(each)[:40])
async def test_a_misspelt_field_is_refused_with_the_nearest_name(
    http: Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", param)
    if not param.endswith("x"):
        assert "is not known here; did you mean " in error["message"]


class TestUnknownFieldsAreIgnored:
    """With `gateway.unknown_fields: ignore`."""

    @pytest.fixture
    def config(self) -> Config:
        overrides = {"gateway.message_format": "off", "gateway.unknown_fields": "ignore"}
        return load_config(env={}, overrides=overrides)

    @pytest.mark.parametrize(("path", "body", "param"), TYPOS[:7], ids=lambda each: str(each)[:40])
    async def test_unknown_fields_are_left_out_and_named(
        self, http: Client, path: str, body: dict[str, Any], param: str
    ) -> None:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == param

    async def test_fields_that_would_change_the_answer_are_still_refused(
        self, http: Client
    ) -> None:
        for fields in ({"use_beam_search": True}, {"temperature": "hot"}):
            answer = await http.post(CHAT, json={"messages": [HELLO]} | fields)
            assert answer.status_code == 400, answer.text
