"""Sessions: ten-turn histories as clients send them back, by the tokens that were sampled."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx2
import msgspec
import pytest

from nano_inference.bus.public import Completion, GenerateRequest, Output, TreeSession
from nano_inference.bus.trees import keep
from nano_inference.config import Config
from nano_inference.store.store import memory_store

from ..soaking import in_soak
from .fake import app_of, observed, sample
from .histories import TURNS, HistoryEngine
from .saying import TEMPLATE, calling_model
from .test_histories import chat, messages, responses

SESSION, TENANT = "agent-7", "t"
ROOM = 1 << 24

FORGETFUL = TEMPLATE.replace("message.reasoning_content %}", "false %}")
"""A template that leaves earlier reasoning out."""


class KeepingEngine(HistoryEngine):
    """Keeps its requests as streaming does. It writes each character as a token of its own, which
    no tokenizer would; so no prompt that is tokenised anew has the sampled tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bus.store = memory_store(config.bus)
        self.sampled: list[tuple[int, ...]] = []

    def _answer(self, request: GenerateRequest) -> list[Output]:
        *_, end = super()._answer(msgspec.structs.replace(request, stream=False))
        assert isinstance(end, Completion)
        (own,) = end.samples
        text = self._words.text(own.token_ids[:-1], skip_special=False)
        marks = {
            name: number for name, number in self._words.special_tokens.items() if name in text
        }
        end_of_message = self._words.special_tokens["<|im_end|>"]
        token_ids = [*_by_character(text, marks, self._words.token_ids), end_of_message]
        self.sampled.append(tuple(token_ids))
        made = sample(
            tuple(token_ids),
            text=own.text,
            logprobs=tuple(-float(len(self.sampled)) for _ in token_ids),
            finish_reason="stop",
        )
        session = request.session
        return [
            msgspec.structs.replace(
                end,
                entry_id=f"{len(self.requests)}-0",
                model="tiny",
                samples=(made,),
                prompt_token_ids=request.prompt_token_ids or (),
                session=session
                and TreeSession(id=session.id, note=session.note, tenant=request.tenant),
            )
        ]

    async def _made(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        async with aclosing(super()._made(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Completion):
                    await keep(self.bus.store.trees, [output], 1)
                yield output


def _by_character(
    text: str, marks: dict[str, int], encode: Callable[..., tuple[int, ...]]
) -> list[int]:
    found = list[int]()
    while text:
        mark = next((each for each in marks if text.startswith(each)), "")
        found += [marks[mark]] if mark else encode(text[0], add_special=False)
        text = text[len(mark) or 1 :]
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    made = calling_model(tmp_path_factory.mktemp("model") / "tiny")
    bus = msgspec.structs.replace(made.bus, trees_max_bytes=ROOM)
    return msgspec.structs.replace(made, bus=bus)


class Agent:
    """A client's connection, with the headers of a session, and its engine."""

    def __init__(self, config: Config, **headers: str) -> None:
        self.engine = KeepingEngine(config)
        self._headers = {"X-Session-ID": SESSION, "X-Tenant": TENANT, **headers}
        self._app = observed(app_of(self.engine, config))
        self.http = self._client()
        # OpenAI's and Anthropic's clients close theirs.
        self.options = {"api_key": "none", "max_retries": 0, "http_client": self._client()}

    def _client(self) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(self._app)
        return httpx2.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=self._headers
        )

    async def samples(self, session: str = SESSION, **headers: str) -> list[dict[str, Any]]:
        answer = await self.http.get(f"/v1/sessions/{session}/samples", headers=headers)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return found


def check_sampled(samples: list[dict[str, Any]], engine: KeepingEngine) -> set[str]:
    """Each sampled token is in the samples with its logprob; returns the whole ones' requests."""
    by_request = dict(
        zip((each.request_id for each in engine.requests), engine.sampled, strict=True)
    )
    numbers = {request_id: place for place, request_id in enumerate(by_request, 1)}
    whole = set()
    for each in samples:
        for span in each["spans"]:
            own = by_request[span["request_id"]][: span["stop"] - span["start"]]
            place = slice(span["start"], span["stop"])
            assert tuple(each["token_ids"][place]) == own
            assert set(each["logprobs"][place]) == {-float(numbers[span["request_id"]])}
            if len(own) == span["num_tokens"]:
                whole.add(span["request_id"])
        assert sum(each["loss_mask"]) == sum(x["stop"] - x["start"] for x in each["spans"])
    return whole


Conversing = Callable[..., Awaitable[None]]


@pytest.mark.parametrize("turns", [2, in_soak(TURNS)])
@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL], ids=["all", "forgetful"])
@pytest.mark.parametrize("converse", [chat, responses, messages])
async def test_prompts_go_on_by_tokens(
    config: Config, converse: Conversing, template: str, turns: int
) -> None:
    """No token differs between what was sampled and what is trained on."""
    (config.engine.model_folder / "chat_template.jinja").write_text(template)
    agent = Agent(config, **{"X-Continue-By-Tokens": "true"})
    await converse(agent.options, turns, streamed=False)
    (found,) = await agent.samples()
    assert check_sampled([found], agent.engine) == {
        each.request_id for each in agent.engine.requests
    }
    assert len(found["spans"]) == 2 * turns
    trained = [
        token for token, mask in zip(found["token_ids"], found["loss_mask"], strict=True) if mask
    ]
    assert trained == [token for each in agent.engine.sampled for token in each]
    text = agent.engine._words.text(found["token_ids"], skip_special=False)
    assert text.count("<|im_end|>\n<|im_start|>") == len(text.split("<|im_start|>")) - 2


async def test_histories_that_are_rendered_anew_fork(config: Config) -> None:
    """Each sample stays whole in a path of its own."""
    agent = Agent(config)
    await chat(agent.options, 2, streamed=False)
    found = await agent.samples()
    assert len(found) == 4
    assert len(check_sampled(found, agent.engine)) == 4
    answer = await agent.http.get(f"/v1/sessions/{SESSION}/samples?format=jsonl")
    assert [msgspec.json.decode(line) for line in answer.content.splitlines()] == found
    tree = (await agent.http.get(f"/v1/sessions/{SESSION}/tree")).json()
    assert len(tree["nodes"]) >= 8
    assert {each["parent"] for each in tree["nodes"]} >= {-1}


ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}]}


async def said(agent: Agent, messages: list[Any], **headers: str) -> tuple[dict[str, Any], str]:
    answer = await agent.http.post(
        "/v1/chat/completions", json=ASKED | {"messages": messages}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"], answer.headers["x-session-prompt"]


async def test_a_prompt_goes_on_by_tokens_after_a_kept_answer_only(config: Config) -> None:
    agent = Agent(config, **{"X-Continue-By-Tokens": "true"})
    asked = ASKED["messages"]
    answer, how = await said(agent, asked)
    assert how == "rendered"
    later = {"role": "user", "content": "And now?"}
    assert (await said(agent, [*asked, answer, later]))[1] == "continued"
    edited = answer | {"content": answer["content"] + " No."}
    assert (await said(agent, [*asked, edited, later]))[1] == "rendered"
    other = [{"role": "user", "content": "Hello!"}]
    assert (await said(agent, [*other, answer, later]))[1] == "rendered"
    again = {"X-Continue-By-Tokens": "false"}
    assert (await said(agent, [*asked, answer, later], **again))[1] == "rendered"
    assert (await said(agent, [*asked, answer, later], **{"X-Session-ID": "b"}))[1] == "rendered"
    assert (await said(agent, [*asked, answer, later], **{"X-Tenant": "b"}))[1] == "rendered"
    wrong = await agent.http.post(
        "/v1/chat/completions", json=ASKED, headers={"X-Continue-By-Tokens": "perhaps"}
    )
    assert wrong.json()["error"]["code"] == "invalid_session"


async def test_responses_are_of_the_session_of_the_first(config: Config) -> None:
    agent = Agent(config, **{"X-Session-ID": "", "X-Continue-By-Tokens": "true"})

    async def respond(**more: Any) -> httpx2.Response:
        asked = {"model": "tiny", "input": "Hello.", **more}
        answer = await agent.http.post("/v1/responses", json=asked)
        assert answer.status_code == 200, answer.text
        return answer

    first = await respond()
    second = await respond(previous_response_id=first.json()["id"])
    assert second.headers["x-session-id"] == first.headers["x-session-id"] == first.json()["id"]
    third = await respond(previous_response_id=second.json()["id"])
    assert third.headers["x-session-prompt"] == "continued"
    (found,) = await agent.samples(first.json()["id"])
    assert len(check_sampled([found], agent.engine)) == 3
    assert "x-session-id" not in (await respond(store=False)).headers


async def test_without_room_for_trees_that_is_the_cause(config: Config) -> None:
    off = msgspec.structs.replace(
        config, bus=msgspec.structs.replace(config.bus, trees_max_bytes=0)
    )
    answer = await Agent(off).http.get(f"/v1/sessions/{SESSION}/tree")
    assert answer.status_code == 404
    assert "since bus.trees_max_bytes is 0; set it" in answer.json()["error"]["message"]


async def test_a_session_is_of_one_tenant_and_may_be_deleted(config: Config) -> None:
    agent = Agent(config)
    await said(agent, ASKED["messages"])
    path = f"/v1/sessions/{SESSION}"
    for call in ("GET", "/samples"), ("GET", "/tree"), ("DELETE", ""):
        answer = await agent.http.request(call[0], path + call[1], headers={"X-Tenant": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_session")
    assert len(await agent.samples()) == 1
    assert (await agent.http.delete(path)).json()["deleted"]
    assert (await agent.http.get(f"{path}/samples")).status_code == 404
    too_long = await agent.http.post(
        "/v1/chat/completions", json=ASKED, headers={"X-Session-ID": "x" * 129}
    )
    assert too_long.json()["error"]["code"] == "invalid_session"


async def test_lost_turns_are_an_error_unless_partial(config: Config) -> None:
    agent = Agent(config)
    await said(agent, ASKED["messages"])
    bus = msgspec.structs.replace(config.bus, trees_max_bytes=100)
    full = Agent(msgspec.structs.replace(config, bus=bus))
    await said(full, ASKED["messages"])
    answer = await full.http.get(f"/v1/sessions/{SESSION}/samples")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_incomplete")
    assert (await full.http.get(f"/v1/sessions/{SESSION}/samples?partial=true")).json()[
        "data"
    ] == []


async def test_without_room_for_trees_a_session_has_no_effect(config: Config) -> None:
    bus = msgspec.structs.replace(config.bus, trees_max_bytes=0)
    agent = Agent(msgspec.structs.replace(config, bus=bus))
    answer = await agent.http.post("/v1/chat/completions", json=ASKED)
    assert answer.status_code == 200
    assert "x-session-id" not in answer.headers
    assert agent.engine.requests[0].session is None
