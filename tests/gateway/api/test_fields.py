"""Bodies declare their fields; the documents have one row for each, and all endpoints."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from nano_inference.config import field_name
from nano_inference.config.sampling import PARAMETERS
from nano_inference.gateway.api.anthropic.bodies import CountBody, MessagesBody
from nano_inference.gateway.api.ollama.bodies import BODIES as OLLAMA_BODIES
from nano_inference.gateway.api.openai.call_bodies import BODIES
from nano_inference.gateway.api.sglang.requests import SGLangSampling
from nano_inference.gateway.server.http import FieldError
from nano_inference.gateway.serving.fields import check_fields, collect_ignored, read_part
from nano_inference.gateway.serving.sampling_fields import (
    ANTHROPIC,
    OLLAMA,
    RESPONSE_SAMPLING,
    SGLANG,
    TEXT_SAMPLING,
    VLLM,
)

from ..fake import Client, FakeEngine, app_of

DOCS = Path(__file__).parents[3] / "docs"
Bodies = Mapping[str, type[msgspec.Struct]]
INTERFACES: dict[str, Bodies] = {
    "openai": {**BODIES},
    "anthropic": {"messages": MessagesBody, "count_tokens": CountBody},
    "ollama": OLLAMA_BODIES,
}
WRITER = runpy.run_path(str(DOCS / "write_compatibility.py"))
READ_FROM_BODIES: list[type[msgspec.Struct]] = WRITER["all_structs"]()
ALL = [kind for bodies in INTERFACES.values() for kind in bodies.values()] + [SGLangSampling]


def rows(document: str) -> list[tuple[str, str, str]]:
    text = (DOCS / f"{document}.md").read_text()
    fields = text.partition("\n## Fields\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", fields, re.M)


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_document_has_each_honoured_field_of_each_call(interface: str) -> None:
    documented = [(call, name) for name, calls, _ in rows(interface) for call in calls.split(", ")]
    declared = [
        (call, name)
        for call, kind in INTERFACES[interface].items()
        for name in {*kind.__struct_fields__, *getattr(kind, "SAMPLING", ())}
    ]
    assert sorted(documented) == sorted(declared)


def test_the_page_of_compatibility_has_the_kind_of_each_field() -> None:
    """`python docs/write_compatibility.py` writes the page."""
    assert WRITER["page"]() == WRITER["PAGE"].read_text()


@pytest.mark.parametrize("kind", READ_FROM_BODIES, ids=lambda kind: kind.__name__)
def test_each_field_has_one_kind_and_a_reason(kind: type[msgspec.Struct]) -> None:
    neutral, refused = getattr(kind, "NEUTRAL", {}), getattr(kind, "REFUSED", {})
    honoured = {*kind.__struct_fields__, *getattr(kind, "SAMPLING", ())}
    kinds = [*honoured, *neutral, *refused]
    assert len(set(kinds)) == len(kinds), {name for name in kinds if kinds.count(name) > 1}
    assert all(neutral.values())
    assert all(each.why for each in refused.values())


@pytest.mark.parametrize("kind", READ_FROM_BODIES, ids=lambda kind: kind.__name__)
def test_a_refused_field_is_named(kind: type[msgspec.Struct]) -> None:
    for name, refused in getattr(kind, "REFUSED", {}).items():
        with pytest.raises(FieldError) as raised:
            check_fields({name: [{"some": "thing"}]}, kind, "within")
        assert (raised.value.code, raised.value.param) == ("unsupported", f"within.{name}")
        assert refused.why in raised.value.message


@pytest.mark.parametrize("kind", READ_FROM_BODIES, ids=lambda kind: kind.__name__)
def test_a_neutral_field_is_named_and_taken(kind: type[msgspec.Struct]) -> None:
    neutral = getattr(kind, "NEUTRAL", {})
    ignored = collect_ignored()
    check_fields({name: [{"some": "thing"}] for name in neutral}, kind, "within[3]")
    assert list(ignored) == [f"within[].{field_name(name)}" for name in neutral]


@pytest.mark.parametrize(("interface", "names"), [("openai", TEXT_SAMPLING), ("openai", VLLM)])
def test_the_document_has_the_meaning_of_each_sampling_parameter(
    interface: str, names: Mapping[str, str]
) -> None:
    meanings = {name: what for name, _, what in rows(interface)}
    own = {"max_tokens", "logprobs"}  # with a line about each call
    for name, parameter in names.items():
        assert name in own or meanings[name] == PARAMETERS[parameter].meaning


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_document_has_the_endpoints(interface: str) -> None:
    found = set()
    text = (DOCS / f"{interface}.md").read_text()
    for cell in re.findall(r"^\| (`(?:GET|POST|DELETE) .+?`) \|", text, re.M):
        method = ""
        for named, path in re.findall(r"`(?:([A-Z]+) )?(.+?)`", cell):
            method = named or method
            found.add((method, path))
    module = f"nano_inference.gateway.api.{interface}"
    app = app_of(FakeEngine())
    served = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route) and route.endpoint.__module__.startswith(module)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert found == served


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_null_and_default_values_are_accepted(
    kind: type[msgspec.Struct],
) -> None:
    names = [*kind.__struct_fields__, *getattr(kind, "SAMPLING", ())]
    refused = getattr(kind, "REFUSED", {})
    names += [*getattr(kind, "NEUTRAL", ()), *refused]
    assert read_part(dict.fromkeys(names), kind) == kind()
    for name, each in refused.items():
        for nothing in each.nothing:
            assert read_part({name: nothing}, kind) == kind()


GIVEN: dict[str, Any] = {
    "temperature": 0.5,
    "max_tokens": 9,
    "stop_token_ids": [8],
    "top_k": 3,
    "top_p": 0.75,
    "min_p": 0.125,
    "seed": 7,
    "stop": ["x", ""],
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"7": -1.5},
    "min_tokens": 1,
    "logprobs": 4,
    "prompt_logprobs": 0,
    "prompt_logprob_token_ids": [[1, -1], []],
    "prompt_logprob_start": 1,
    "return_routed_experts": True,
    "routed_experts_prompt_start": 2,
    "max_draft_tokens": 3,
    "response_cache": False,
    "return_sampling_mask": True,
    "forced_tokens": [7, 8],
    "prompt_sampling_masks": [[1, 2], []],
}
READ = GIVEN | {"stop_token_ids": {8}, "stop": ("x",), "logit_bias": {7: -1.5}}
READ |= {"prompt_logprob_token_ids": ((1, -1), ())}
READ |= {"forced_tokens": (7, 8), "prompt_sampling_masks": ((1, 2), ())}
HELLO = [{"role": "user", "content": "a"}]
INCLUDE = ["message.output_text.logprobs"]
RESPONSE = {"input": "a", "top_logprobs": 4, "include": INCLUDE, "max_output_tokens": 9}
CALLS: list[tuple[str, dict[str, Any], str, Mapping[str, str]]] = [
    ("/v1/completions", {"prompt": "a", "logprobs": 4, "max_tokens": 9}, "", TEXT_SAMPLING),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9}, "", TEXT_SAMPLING),
    ("/v1/responses", RESPONSE, "", RESPONSE_SAMPLING),
    ("/inference/v1/generate", {"token_ids": [5]}, "sampling_params", VLLM),
    ("/generate", {"text": "a"}, "sampling_params", SGLANG),
    ("/v1/messages", {"messages": HELLO}, "", ANTHROPIC),
    ("/api/chat", {"messages": HELLO}, "options", OLLAMA),
]


@pytest.mark.parametrize(("path", "body", "within", "names"), CALLS)
async def test_each_field_reaches_the_engine(
    http: Client, path: str, body: dict[str, Any], within: str, names: Mapping[str, str]
) -> None:
    is_sglang = path == "/generate"
    # Lower priorities are earlier for vLLM, and later for SGLang.
    fields = {"priority": -2 if is_sglang else 2, "budget_ms": 60_000}
    fields |= {"extra_key" if is_sglang else "cache_salt": "s"}
    samples = {"n": 2} if within.startswith("sampling") or "completions" in path else {}
    given = {name: GIVEN[own] for name, own in names.items()} | samples
    answer = await http.post(path, json=body | fields | ({within: given} if within else given))
    assert answer.status_code == 200, answer.text
    (request,) = http.engine.requests
    wanted = {*names.values(), *(("max_tokens",) if "max" in str(body) else ())}
    wanted |= {"logprobs"} if "logprobs" in str(body) else set()
    found = {own: getattr(request.sampling, own) for own in wanted}
    assert found == {own: READ[own] for own in wanted}
    assert (request.cache_salt, request.n) == ("s", 2 if samples else 1)
    assert request.priority == -2
    assert 0 < (request.budget_ns or 0) <= 60_000 * 10**6
