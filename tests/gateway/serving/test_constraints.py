"""Fields for constraints, in each interface."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.gateway.server.http import FieldError
from nano_inference.gateway.serving.constraints import of_response_format, of_text_format

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    "given",
    [
        {"schema": SCHEMA},
        {"name": "answer", "schema": SCHEMA},
        {"json_schema": None},
        {"json_schema": SCHEMA},
        {"json_schema": "{}"},
    ],
)
def test_schema_outside_json_schema_is_refused_with_the_right_form(given: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as refused:
        of_response_format({"type": "json_schema", **given}, "response_format")
    assert refused.value.param == "response_format.json_schema"
    assert '"json_schema": {"name": "answer", "schema": {...}}' in refused.value.message


def test_nested_schema_of_responses_is_refused_with_the_right_form() -> None:
    given = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    with pytest.raises(FieldError) as refused:
        of_text_format(given, "text.format")
    assert refused.value.param == "text.format"
    assert '{"type": "json_schema", "schema": {...}}' in refused.value.message
