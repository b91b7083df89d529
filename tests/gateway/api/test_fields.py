"""Bodies declare their fields; the documents have one row for each, and all endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from starlette.routing import Route

from nano_inference.config import Config
from nano_inference.config.sampling import PARAMETERS
from nano_inference.gateway.api.anthropic.bodies import CountBody, MessagesBody
from nano_inference.gateway.api.openai.bodies import BODIES
from nano_inference.gateway.api.sglang.requests import SamplingBody
from nano_inference.gateway.app import make_app
from nano_inference.gateway.serving.fields import read_part
from nano_inference.gateway.serving.sampling_fields import (
    ANTHROPIC,
    SGLANG,
    TEXT_SAMPLING,
    VLLM,
    read_sampling,
)

from ..fake import FakeEngine

DOCS = Path(__file__).parents[3] / "docs"
Bodies = Mapping[str, type[msgspec.Struct]]
INTERFACES: dict[str, Bodies] = {
    "openai": {**BODIES},
    "anthropic": {"messages": MessagesBody, "count_tokens": CountBody},
}
ALL = [kind for bodies in INTERFACES.values() for kind in bodies.values()] + [SamplingBody]


def rows(document: str) -> list[tuple[str, str, str, str]]:
    text = (DOCS / f"{document}.md").read_text()
    row = r"^\| `(\w+)` \| (.+?) \| (honoured|harmless|refused) \| (.+) \|$"
    return re.findall(row, text, re.M)


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_document_has_each_field_of_each_call(interface: str) -> None:
    documented = [
        (call, name, becomes)
        for name, calls, becomes, _ in rows(interface)
        for call in calls.split(", ")
    ]
    declared = []
    for call, kind in INTERFACES[interface].items():
        honoured = {*kind.__struct_fields__, *getattr(kind, "SAMPLING", ())}
        for becomes, names in (
            ("honoured", honoured),
            ("harmless", getattr(kind, "HARMLESS", ())),
            ("refused", getattr(kind, "REFUSED", ())),
        ):
            declared += [(call, name, becomes) for name in names]
    assert sorted(documented) == sorted(declared)


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_document_says_why_a_field_is_refused(interface: str) -> None:
    for name, calls, becomes, what in rows(interface):
        for call in calls.split(", ") if becomes == "refused" else ():
            refused = getattr(INTERFACES[interface][call], "REFUSED")  # noqa: B009
            assert refused[name].why == what, (call, name)


@pytest.mark.parametrize(("interface", "names"), [("openai", TEXT_SAMPLING), ("openai", VLLM)])
def test_the_document_has_the_meaning_of_each_sampling_parameter(
    interface: str, names: Mapping[str, str]
) -> None:
    meanings = {name: what for name, _, becomes, what in rows(interface) if becomes == "honoured"}
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
    app = make_app(FakeEngine(), Config())  # type: ignore[arg-type]
    served = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route) and route.endpoint.__module__.startswith(module)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert found == served


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_null_is_a_default(kind: type[msgspec.Struct]) -> None:
    names = [*kind.__struct_fields__, *getattr(kind, "SAMPLING", ())]
    names += [*getattr(kind, "HARMLESS", ()), *getattr(kind, "REFUSED", ())]
    assert read_part(dict.fromkeys(names), kind) == kind()


@pytest.mark.parametrize("names", [VLLM, SGLANG, ANTHROPIC], ids=["vllm", "sglang", "anthropic"])
def test_each_sampling_parameter_is_read_by_its_own_name(names: Mapping[str, str]) -> None:
    values = {
        "stop_token_ids": [3],
        "seed": 3,
        "stop": ["a"],
        "ignore_eos": True,
        "logit_bias": {"3": 3.0},
    }
    for name, parameter in names.items():
        value = values.get(parameter, 3)
        sampling = read_sampling({name: value}, names)
        default = read_sampling({name: None}, names)
        changed = {
            each
            for each in sampling.__struct_fields__
            if getattr(sampling, each) != getattr(default, each)
        }
        assert changed == {parameter}
