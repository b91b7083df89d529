"""`/v1/embeddings`, `/score` and `/rerank`: what is submitted, and what clients are told."""

from __future__ import annotations

import base64
import struct
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from nano_inference.bus.public import EmbedParams
from nano_inference.gateway.serving.tokenizer import Tokenizer

from ...fake import Client, FakeEngine, app_of, http_of, refused
from ...made import embedded, vector_of

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(embedded)


async def test_openai_s_library_reads_vectors(client: AsyncOpenAI, engine: FakeEngine) -> None:
    """By itself it asks for base64."""
    answer = await client.embeddings.create(model="tiny", input=["ab", "c"], user="me")
    assert [each.embedding for each in answer.data] == [
        list(vector_of(request)) for request in engine.requests
    ]
    assert [each.index for each in answer.data] == [0, 1]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("tiny", 6, 6)
    as_numbers = await client.embeddings.create(
        model="tiny", input=[[7, 8], [9]], encoding_format="float"
    )
    assert [each.embedding for each in as_numbers.data] == [[2.0, -0.5, 15.0], [1.0, -0.5, 9.0]]


async def test_base64_is_float32_little_endian(http: Client) -> None:
    answer = await http.post(EMBEDDINGS, json={"input": [5, 6], "encoding_format": "base64"})
    (data,) = answer.json()["data"]
    assert struct.unpack("<3f", base64.b64decode(data["embedding"])) == (2.0, -0.5, 11.0)


async def test_a_call_says_how_its_prompts_are_embedded(http: Client) -> None:
    body = {
        "model": "tiny",
        "input": "abc",
        "dimensions": 2,
        "pooling": "cls",
        "normalize": False,
        "priority": 3,
        "cache_salt": "s",
    }
    answer = await http.post(EMBEDDINGS, json=body, headers={"X-Tenant": "team"})
    assert answer.status_code == 200
    (request,) = http.engine.requests
    assert request.embed == EmbedParams(pooling="cls", normalize=False, dimensions=2)
    assert (request.prompt, request.priority, request.cache_salt) == ("abc", -3, "s")
    assert (request.tenant, request.stream, request.n) == ("team", False, 1)
    assert answer.json()["id"] == request.request_id


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": ["5 + 5 = 10 + 0", "98 + 25 = 123"]}),
        ("/score", {"text_1": [1, 2, 3, 4], "text_2": "98 + 25 = 123"}),
        ("/rerank", {"query": "98 + 25 = 123", "documents": ["5 + 5 = 10 + 0"]}),
    ],
)
async def test_truncation_keeps_so_many_tokens_of_each_text(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    kept: dict[str, list[tuple[int, ...]]] = {}
    for side in ("left", "right"):
        http.engine.requests.clear()
        fields = {"truncate_prompt_tokens": 2, "truncation_side": side}
        whole = await http.post(path, json=body | fields)
        assert whole.status_code == 200, whole.text
        kept[side] = [tuple(each.prompt_token_ids or ()) for each in http.engine.requests]
        assert [len(each) for each in kept[side]] == [2, 2]
    http.engine.requests.clear()
    await http.post(path, json=body | {"truncate_prompt_tokens": 2000})
    for place, request in enumerate(http.engine.requests):
        token_ids = tuple(request.prompt_token_ids or ())
        assert (kept["left"][place], kept["right"][place]) == (token_ids[-2:], token_ids[:2])


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "empty_prompt", "input"),
        ({"input": []}, "empty_prompt", "input"),
        ({"input": {}}, "invalid_request", "input"),
        ({"input": ["a", 5]}, "invalid_request", "input[1]"),
        ({"input": ["a"] * 8193}, "request_too_large", None),
        ({"input": "a", "dimensions": 1.5}, "invalid_request", "dimensions"),
        ({"input": "a", "dimensions": "NaN"}, "invalid_request", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_request", "encoding_format"),
        ({"input": "a", "pooling": "max"}, "invalid_request", "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "empty_prompt", "truncate_prompt_tokens"),
        ({"input": "a", "temperature": 1}, "unsupported", "temperature"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
        ({"input": [[1] * 9000]}, "request_too_large", None),
    ],
)
async def test_a_bad_call_is_refused_by_its_field(
    body: dict[str, Any], code: str, param: str | None, http: Client
) -> None:
    answer = await http.post(EMBEDDINGS, json=body)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert 400 <= answer.status_code < 500
    assert not http.engine.requests
    nan = await http.post(EMBEDDINGS, content=b'{"input": "a", "dimensions": NaN}')
    assert nan.status_code == 400


async def test_too_many_inputs_are_refused(engine: FakeEngine) -> None:
    async with http_of(app_of(engine, {"gateway.max_prompts": 3})) as http:
        answer = await http.post(EMBEDDINGS, json={"input": ["a"] * 4})
        assert answer.json()["error"]["code"] == "too_many_prompts"
        assert (await http.post(EMBEDDINGS, json={"input": ["a"] * 3})).status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "told", "param"),
    [
        ("prompt_too_long", 400, "context_length_exceeded", "input"),
        ("invalid_dimensions", 400, "invalid_dimensions", "dimensions"),
        ("cannot_embed", 400, "cannot_embed", None),
        ("overloaded", 429, "overloaded", None),
    ],
)
async def test_engine_errors_have_openai_s_names(
    code: str, status: int, told: str, param: str | None, client: AsyncOpenAI, engine: FakeEngine
) -> None:
    """The first error is the answer, and the other inputs end."""
    engine.outputs = lambda request: refused(code)(request) if request.prompt == "b" else []
    with pytest.raises(openai.APIStatusError) as raised:
        await client.embeddings.create(model="tiny", input=["a", "b", "c"])
    error = raised.value
    assert (error.status_code, error.code, error.param) == (status, told, param)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_are_cosines(path: str, http: Client) -> None:
    """A text with each of several, or each with its own."""
    one = await http.post(path, json={"text_1": "ab", "text_2": ["ab", "xyz"]})
    first, second = (each["score"] for each in one.json()["data"])
    assert first == pytest.approx(1.0)
    assert second < 1.0
    pairs = {"text_1": ["xyz", "ab"], "text_2": ["ab", "ab"]}
    each = (await http.post(path, json=pairs)).json()["data"]
    assert [one["score"] for one in each] == pytest.approx([second, first])
    bad = await http.post(path, json={"text_1": ["a", "b"], "text_2": ["c"]})
    assert bad.json()["error"]["param"] == "text_1"


async def test_an_empty_text_without_tokens_is_similar_to_no_other(http: Client) -> None:
    body = {"query": "ab", "documents": ["", "ab", {"text": ""}], "return_documents": False}
    answer = await http.post("/rerank", json=body)
    assert answer.json()["results"] == [
        {"index": 1, "relevance_score": pytest.approx(1.0)},
        {"index": 0, "relevance_score": 0.0},
        {"index": 2, "relevance_score": 0.0},
    ]
    answer = await http.post("/score", json={"text_1": "", "text_2": ["", "ab"]})
    assert [each["score"] for each in answer.json()["data"]] == [0.0, 0.0]
    assert all(request.prompt for request in http.engine.requests)
    answer = await http.post("/score", json={"text_1": "", "text_2": ""})
    assert answer.json()["error"]["code"] == "empty_prompt"


async def test_an_empty_text_is_embedded_with_its_special_tokens(
    http: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By models whose tokenizers add some to each text, as encoders' do."""
    monkeypatch.setattr(Tokenizer, "token_ids", lambda *_, **__: (0,))
    for path, body in (
        ("/rerank", {"query": "ab", "documents": [""]}),
        ("/score", {"text_1": "ab", "text_2": ""}),
        (EMBEDDINGS, {"input": ""}),
    ):
        assert (await http.post(path, json=body)).status_code == 200
        assert http.engine.requests[-1].prompt == ""


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_documents_are_ranked_by_their_cosines(path: str, http: Client) -> None:
    body = {"query": "ab", "documents": ["~~~~~~~~~~~", {"text": "ab"}, "aaa"]}
    answer = (await http.post(path, json=body)).json()
    assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["index"] == 1
    assert answer["results"][0]["document"] == {"text": "ab"}
    less = await http.post(path, json=body | {"top_n": 1, "return_documents": False})
    (only,) = less.json()["results"]
    assert only == {"index": 1, "relevance_score": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "a"}, "documents"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": [{"title": "a"}]}, "documents[0]"),
        ({"query": "a", "documents": [{"text": "a", "image": "b"}]}, "documents[0].image"),
        ({"query": "a", "documents": [{"text": 5}]}, "documents[0].text"),
    ],
)
async def test_a_bad_ranking_is_refused(body: dict[str, Any], param: str, http: Client) -> None:
    answer = await http.post("/rerank", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not http.engine.requests
