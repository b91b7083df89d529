"""Whatever stands in a body, the answer is JSON, and 500 is never the client's doing."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import msgspec
import pytest

from nano_inference.bus.codec import decode_request, encode_request
from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import nearest
from nano_inference.gateway.api.anthropic import bodies as anthropic_bodies
from nano_inference.gateway.api.openai import bodies as openai_bodies
from nano_inference.gateway.api.sglang import generate, info, requests, weights
from nano_inference.gateway.server.http import MOST_CONTAINERS
from nano_inference.gateway.serving import sampling_fields

from ..gateway.errors import error_of
from ..gateway.fake import FakeEngine, completion
from .conftest import OpenHttp
from .mutations.bodies import NO_JSON, NO_OBJECT, OF_JSON
from .mutations.tensors import odd_json
from .mutations.wire import spoiled

JSON = {"Content-Type": "application/json"}


HELLO = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
PART = {"type": "t" * 3_000_000}
PIECE = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
CALLS = [
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "b", "tool_call_id": "c", "name": "d"},
]


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
async def test_what_can_not_be_read_is_malformed(http: httpx.AsyncClient, path: str) -> None:
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
    modules = (generate, info, requests, weights, openai_bodies, anthropic_bodies, sampling_fields)
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
            assert found.ge in (0, -(2**63)), kind
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
        ("/v1/chat/completions", HELLO | {"chat_template_kwargs": {"k" * 3_000_000: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "\x00" * 1_000_000: 1}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART]}]}),
        ("/v1/responses", {"input": [{"type": "t" * 3_000_000}]}),
        ("/v1/responses", {"input": "a", "include": ["i" * 3_000_000]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [PART]}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "\x00" * 1_000_000: 1}], "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"y" * 3_000_000: 1}}),
    ],
)
async def test_what_is_quoted_is_short_and_plain(
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

SEEDS: list[tuple[str, Any]] = [
    ("/generate", {"text": "a", "sampling_params": {"stop": ["b"], "logit_bias": {"7": 1}}}),
    ("/generate", {"input_ids": [[1], [2, 3]], "rid": ["r", "s"], "return_logprob": [True, False]}),
    ("/generate", {"text": ["a", "b"], "stream": True, "sampling_params": [{"n": 2}, {}]}),
    ("/v1/completions", {"prompt": ["a", [3]], "echo": True, "logprobs": 2, "n": 2}),
    ("/v1/completions", {"prompt": [[1], [2]], "stream": True, "stream_options": {}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True, "prompt_logprobs": 1}),
    ("/v1/chat/completions", HELLO | {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", HELLO | {"chat_template_kwargs": {"a": [1]}, "seed": 1, "stop": "b"}),
    ("/v1/chat/completions", {"messages": CALLS, "return_token_ids": True, "priority": 1}),
    ("/v1/responses", {"input": "a", "metadata": {"b": "c"}, "top_logprobs": 0, "stop": ["d"]}),
    ("/v1/responses", {"input": HELLO["messages"], "stream": True, "include": [], "store": True}),
    ("/v1/messages", HELLO | {"max_tokens": 3, "system": [PIECE], "stop_sequences": ["b"]}),
    ("/v1/messages", HELLO | {"max_tokens": 3, "stream": True, "thinking": {"type": "disabled"}}),
    ("/v1/messages/count_tokens", HELLO | {"system": "a", "tool_choice": {"type": "auto"}}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"n": 2, "logprobs": 1}}),
    ("/inference/v1/generate", {"token_ids": [1], "stream": True, "sampling_params": {"seed": 1}}),
    ("/tokenize", HELLO | {"return_token_strs": True}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/abort_request", {"rid": "r", "abort_all": False}),
    ("/init_weights_update_group", GROUP | {"group_name": "g", "backend": "gloo"}),
    ("/update_weights_from_distributed", WEIGHTS | {"group_name": "g"}),
    ("/pause_generation", {"mode": "retract"}),
    ("/update_weight_version", {"new_version": "7"}),
]

LAST = {"/v1/messages": "event: message_stop", "/v1/responses": "event: response.incomplete"}
"""What a stream ends with that does not end with [DONE]."""


@pytest.mark.parametrize("seed", range(8))
async def test_mutated_bodies_never_fail_the_gateway(
    open_http: OpenHttp, engine: FakeEngine, seed: int
) -> None:
    rng = random.Random(seed)
    http = open_http(gateway__sync_timeout_s=0.05)
    for _ in range(60):
        path, body = rng.choice(SEEDS)
        for _ in range(rng.randrange(1, 4)):
            body = odd_json(body, rng)
        raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        if rng.random() < 0.4:
            raw = spoiled(raw, rng, OF_JSON)
        answer = await http.post(path, content=raw, headers=JSON)
        assert answer.status_code < 500, (path, raw, answer.text)
        if answer.status_code != 200:
            error_of(answer, answer.status_code)
        elif answer.headers.get("content-type", "").startswith("text/event-stream"):
            last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2].split("\n")
            assert last[last[0].startswith("id: ")] == LAST.get(path, "data: [DONE]")
        elif answer.content:
            answer.json()
