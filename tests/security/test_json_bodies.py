"""Whatever stands in a body, the answer is JSON, and 500 is never the client's doing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import httpx
import msgspec
import pytest

from nano_inference.bus.codec import decode_request, encode_request
from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import nearest
from nano_inference.gateway.api.anthropic import bodies as anthropic_bodies
from nano_inference.gateway.api.ollama import bodies as ollama_bodies
from nano_inference.gateway.api.openai import bodies as openai_bodies
from nano_inference.gateway.api.openai import response_bodies
from nano_inference.gateway.api.sglang import generate, info, requests, weights
from nano_inference.gateway.server.http import MOST_CONTAINERS
from nano_inference.gateway.serving import sampling_fields

from ..gateway.errors import error_of
from ..gateway.fake import FakeEngine, completion
from .conftest import OpenHttp
from .mutations.bodies import NO_JSON, NO_OBJECT

JSON = {"Content-Type": "application/json"}


HELLO = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
PART = {"type": "t" * 3_000_000}


@pytest.fixture
def engine() -> FakeEngine:
    """One that encodes what it is given, as a bus does."""
    engine = FakeEngine()

    def outputs(request: GenerateRequest) -> list[Output]:
        field, raw = encode_request(request)
        assert field == "json"
        assert isinstance(decode_request(raw, "json", 1 << 30), GenerateRequest)
        return [completion(request)]

    engine.outputs = outputs
    return engine


UNREADABLE = (
    *(b'{"text": "a", "x": %s}' % value for value in NO_JSON),
    *NO_OBJECT,
    *(b'{"\\udfff": 1}', b'{"\xff": 1}', b'{"text": "a'),
    *(b'\xef\xbb\xbf{"text": "a"}', '{"text": "a"}'.encode("utf-16")),
)


PATHS = ("/generate", "/abort_request", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", [*PATHS, "/inference/v1/generate", "/tokenize"])
async def test_an_unreadable_body_is_malformed(http: httpx.AsyncClient, path: str) -> None:
    for body in UNREADABLE:
        answer = await http.post(path, content=body, headers=JSON)
        assert (error_of(answer, 400), body[:50]) == ("malformed", body[:50])


@pytest.mark.parametrize("each", [b"[]", b"{}", b'{"a":["[[["]}'])
async def test_millions_of_lists_are_not_made(http: httpx.AsyncClient, each: bytes) -> None:
    body = b'{"text": "a", "x": [' + b",".join([each] * MOST_CONTAINERS) + b"]}"
    answer = await http.post("/generate", content=body, headers=JSON)
    assert error_of(answer, 413) == "request_too_large"


@pytest.mark.parametrize("text", ["[{", "\\[{", '"[{', '\\"[{', "[{\n", "\u00e9[{"])
async def test_text_may_have_any_number_of_brackets(http: httpx.AsyncClient, text: str) -> None:
    body = {"text": [text * (MOST_CONTAINERS // 4)] * 3}
    assert (await http.post("/generate", json=body)).status_code == 200


LARGE = 10**30
WEIGHTS = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]}
GROUP = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "priority": LARGE}),
        ("/generate", {"text": "a", "top_logprobs_num": -LARGE, "return_logprob": True}),
        ("/generate", {"text": ["a"], "logprob_start_len": [LARGE], "return_logprob": True}),
        ("/generate", {"input_ids": [1, LARGE]}),
        ("/generate", {"input_ids": [[1], [LARGE]]}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": LARGE}}),
        ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [LARGE]}}),
        ("/generate", {"text": "a", "sampling_params": {"logit_bias": {str(LARGE): 1}}}),
        ("/generate", {"text": "a", "sampling_params": {"sampling_seed": 2**63}}),
        ("/init_weights_update_group", GROUP | {"world_size": LARGE}),
        ("/init_weights_update_group", GROUP | {"master_port": LARGE}),
        ("/init_weights_update_group", GROUP | {"rank_offset": -LARGE}),
        ("/update_weights_from_distributed", WEIGHTS | {"shapes": [[LARGE]]}),
    ],
)
async def test_a_number_beyond_64_bits_is_refused_with_its_place(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_request", "invalid_prompt")
    assert answer.json()["error"]["param"]


def test_no_field_of_a_body_takes_a_number_beyond_64_bits() -> None:
    modules: tuple[ModuleType, ...] = (
        generate,
        info,
        requests,
        weights,
        openai_bodies,
        anthropic_bodies,
        ollama_bodies,
    )
    modules += (response_bodies, sampling_fields)
    bodies = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__name__.endswith("Body")
    ]
    assert len(bodies) >= 6
    for kind in bodies:
        for found in integers(msgspec.inspect.type_info(kind)):
            assert found.ge in (0, -1, -(2**63)), kind
            assert found.le == 2**63 - 1, kind


def integers(found: Any) -> list[msgspec.inspect.IntType]:
    """Those within a type."""
    if isinstance(found, msgspec.inspect.IntType):
        return [found]
    if isinstance(found, list | tuple):
        return [each for part in found for each in integers(part)]
    if not isinstance(found, msgspec.inspect.Type | msgspec.inspect.Field):
        return []
    return [each for name in found.__struct_fields__ for each in integers(getattr(found, name))]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "x" * 3_000_000: 1}),
        ("/generate", {"text": "a", "sampling_params": {"y" * 3_000_000: 1}}),
        ("/generate", {"text": "a", "\x00\x1b[31m\u202e": 1}),
        ("/abort_request", {"z" * 3_000_000: 1}),
        ("/update_weights_from_distributed", {"z" * 3_000_000: 1}),
        ("/begin_weight_update", {"selector": "s" * 3_000_000}),
        ("/v1/completions", {"prompt": "a", "x" * 3_000_000: 1}),
        ("/v1/chat/completions", {"messages": [{"role": "r" * 3_000_000, "content": "a"}]}),
        ("/v1/chat/completions", HELLO | {"chat_template_kwargs": {"k-" * 1_500_000: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "\x00" * 1_000_000: 1}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART]}]}),
        ("/v1/responses", {"input": [{"type": "t" * 3_000_000}]}),
        ("/v1/responses", {"input": "a", "include": ["i" * 3_000_000]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [PART]}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "\x00" * 1_000_000: 1}], "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"y" * 3_000_000: 1}}),
    ],
)
async def test_quoted_input_is_short_and_plain(
    open_http: OpenHttp, path: str, body: dict[str, Any]
) -> None:
    # Which a busy machine may need for texts of megabytes.
    http = open_http(gateway__template_timeout_s=120)
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert len(answer.content) < 5000
    assert answer.json()["error"]["message"].isprintable()


async def test_a_long_path_is_cut(http: httpx.AsyncClient) -> None:
    answer = await http.get("/" + "p" * 50_000)
    assert error_of(answer, 404) == "not_found"
    assert len(answer.content) < 3000


def test_names_are_compared_only_when_they_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(name: str, known: list[str], **options: Any) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr("difflib.get_close_matches", compare)
    assert (
        nearest("x" * 200, ["abc", "def"]) == nearest("xx", ["abc", "def"]) == ("; known: abc, def")
    )
    assert compared == ["xx"]


# --- mutations ----------------------------------------------------------------------------------


LAST = {"/v1/messages": "event: message_stop", "/v1/responses": "event: response.incomplete"}
"""The last event of streams that don't end with [DONE]."""
