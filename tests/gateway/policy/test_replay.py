"""`POST /v1/replay/{id}`: a caller's own requests, computed again as a call of its own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from nano_inference.bus.public import Completion, GenerateRequest, Output, Recipe
from nano_inference.gateway.policy.administration import Administration
from nano_inference.pipeline.replay import PRIORITY

from ..errors import error_of
from ..fake import Client, FakeEngine, completion, refused, sample
from ..sampled import WORDS
from .conftest import Made, bearer
from .spoken import spoken


def recorded(request: GenerateRequest, **changed: Any) -> Completion:
    samples = [sample(sample_index=index, **changed) for index in range(request.n)]
    recipe = Recipe(
        tenant=request.tenant,
        sampling=request.sampling,
        seeds=request.sample_seeds or tuple(range(7, 7 + request.n)),
    )
    return completion(request, *samples, model="tiny", prompt_token_ids=(1, 2), recipe=recipe)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lambda request: [recorded(request)])


async def asked(http: Client, key: dict[str, Any], **fields: Any) -> str:
    """The id of a call that has been answered."""
    body = {"prompt": "one", "temperature": 0.7, "max_tokens": 2, **fields}
    answer = await http.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.is_success, answer.text
    id: str = answer.json()["id"]
    return id


async def test_a_request_is_replayed_at_low_priority_for_its_caller(
    http: Client, made: Made
) -> None:
    key = await made(tenant="anna")
    id = await asked(http, key, n=2)
    answer = await http.post(f"/v1/replay/{id}", headers=bearer(key))
    body = answer.json()
    assert (answer.status_code, body["object"], body["id"]) == (200, "replay", id)
    assert (body["verdict"], body["reasons"]) == ("equal", [])
    assert body["summary"] == "equal: 4 tokens, 4 logprobs to the bit"
    assert [each["request_id"] for each in body["requests"]] == [id]
    again = http.engine.requests[-1]
    assert (again.tenant, again.priority, again.stream) == ("anna", PRIORITY, False)
    assert (again.prompt_token_ids, again.n, again.sample_seeds) == ((1, 2), 2, (7, 8))
    assert again.cache_salt.startswith("replay-")


async def test_all_requests_of_a_call_are_replayed_and_the_first_difference_is_reported(
    http: Client, made: Made
) -> None:
    key = await made()
    id = await asked(http, key, prompt=["one", "two"])

    def outputs(request: GenerateRequest) -> list[Output]:
        return [recorded(request, token_ids=(5, 9))]

    http.engine.outputs = outputs
    body = (await http.post(f"/v1/replay/{id}", headers=bearer(key))).json()
    assert [each["request_id"] for each in body["requests"]] == [f"{id}_0", f"{id}_1"]
    assert body["verdict"] == "different"
    assert body["summary"] == ("parts at sample 0, token 1: recorded 6 (-1.5), computed 9 (-1.5)")
    assert body["reasons"]


async def test_requests_of_other_tenants_are_unknown_except_to_an_administrator(
    http: Client, made: Made
) -> None:
    id = await asked(http, await made(tenant="anna"))
    other = await made(tenant="ben")
    answer = await http.post(f"/v1/replay/{id}", headers=bearer(other))
    missing = await http.post("/v1/replay/nothing", headers=bearer(other))
    assert error_of(answer, 404) == error_of(missing, 404) == "unknown_request"
    admin = await made("generate", "admin", tenant="root")
    assert (await http.post(f"/v1/replay/{id}", headers=bearer(admin))).is_success
    reader = await made("read", tenant="anna")
    answer = await http.post(f"/v1/replay/{id}", headers=bearer(reader))
    assert error_of(answer, 403) == "insufficient_scope"


async def test_a_replay_that_fails_is_an_error(http: Client, made: Made) -> None:
    key = await made()
    id = await asked(http, key)
    http.engine.outputs = refused("lane_failed")
    answer = await http.post(f"/v1/replay/{id}", headers=bearer(key))
    assert error_of(answer, 500) == "lane_failed"


@pytest.fixture
async def guarded(http: Client, made: Made, administration: Administration) -> Client:
    await administration.set_guardrails({"literals": ["bad"]})
    http.headers.update(bearer(await made()))
    return http


async def replay_of_spoken(http: Client, prompt: str, answer: str, **fields: Any) -> httpx.Response:
    """The replay of a completion of which the bus has the answer that the engine made."""

    def outputs(request: GenerateRequest) -> list[Output]:
        answers = [WORDS.token_ids(answer, add_special=False)]
        *chunks, end = spoken(request, answers, range(0, 99, 3))
        assert isinstance(end, Completion)
        prompt_ids = tuple(WORDS.token_ids(prompt, add_special=False))
        recipe = recorded(request).recipe
        return [*chunks, replace(end, prompt_token_ids=prompt_ids, recipe=recipe)]

    http.engine.outputs = outputs
    body = {"prompt": prompt, "logprobs": 0, **fields}
    assert (await http.post("/v1/completions", json=body)).is_success
    request = http.engine.requests[-1]
    http.engine.bus.results.last_outputs[request.request_id] = outputs(request)[-1]
    return await http.post(f"/v1/replay/{request.request_id}")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replay_ends_before_a_guardrails_match(guarded: Client, stream: bool) -> None:
    left = len(WORDS.token_ids("so it is(", add_special=False))
    answer = await replay_of_spoken(guarded, "a", "so it is(BAD, they say, and on", stream=stream)
    assert answer.json()["summary"] == f"equal: {left} tokens, {left} logprobs to the bit"
    (told,) = answer.json()["requests"][0]["samples"]
    assert told["tokens"] == told["equal_tokens"] == left
    assert told["finish_reason"] == told["computed_finish_reason"] == "content_filter"
    assert told["parting"] is None


async def test_a_replay_of_nothing_delivered_is_refused(guarded: Client) -> None:
    answer = await replay_of_spoken(guarded, "so b", "ad, they say, and so on", echo=True)
    assert error_of(answer, 400) == "not_replayable"
