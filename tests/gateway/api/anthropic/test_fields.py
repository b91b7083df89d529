"""The table of fields is what the document says and what the bodies hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from starlette.routing import Route

from nano_inference.config import Config
from nano_inference.gateway.api.anthropic.bodies import CountBody, MessagesBody
from nano_inference.gateway.api.anthropic.fields import FIELDS, CallName, read_fields
from nano_inference.gateway.app import make_app
from nano_inference.gateway.serving.fields import Field

from ...fake import FakeEngine

DOCUMENT = Path(__file__).parents[4] / "docs" / "anthropic.md"
BODIES: dict[str, type[msgspec.Struct]] = {"messages": MessagesBody, "count_tokens": CountBody}


def test_the_document_has_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (honoured|harmless|refused) \| (.+) \|$",
        DOCUMENT.read_text(),
        re.M,
    )
    wanted = [(each.name, ", ".join(each.calls), each.becomes, each.what) for each in FIELDS]
    assert rows == wanted


def test_the_document_has_the_endpoints() -> None:
    found = set(re.findall(r"^\| `(GET|POST) (.+?)` \|", DOCUMENT.read_text(), re.M))
    module = "nano_inference.gateway.api.anthropic"
    app = make_app(FakeEngine(), Config())  # type: ignore[arg-type]
    served = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route) and route.endpoint.__module__.startswith(module)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert found == served


@pytest.mark.parametrize("call", get_args(CallName))
def test_a_body_holds_the_fields_that_are_honoured(call: CallName) -> None:
    honoured = {each.name for each in FIELDS if each.becomes == "honoured" and call in each.calls}
    assert set(BODIES[call].__struct_fields__) == honoured


def test_no_field_stands_there_twice() -> None:
    places = [(each.name, call) for each in FIELDS for call in each.calls]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("field", FIELDS, ids=[each.name for each in FIELDS])
def test_null_is_a_default(field: Field) -> None:
    for call in get_args(CallName):
        if call in field.calls:
            assert read_fields({field.name: None}, BODIES[call], call) == BODIES[call]()
