"""Requests for reasoning, as variables of the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.gateway.server.http import FieldError
from nano_inference.gateway.serving.chat_templates import (
    Reasoning,
    names_read,
    reasoning_asked,
    reasoning_of_effort,
    reasoning_variables,
)

QWEN = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
GPT_OSS = (
    '{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{% endif %}'
)
BOTH = QWEN + GPT_OSS
ALWAYS = "{{ messages }}<think>"


@pytest.mark.parametrize(
    ("template", "name", "read"),
    [
        (QWEN, "enable_thinking", True),
        (GPT_OSS, "reasoning_effort", True),
        ("{%- for tool in tools -%}{%- endfor -%}", "tools", True),
        ("{{- tools|tojson }}", "tools", True),
        ("Use tools, if thinking helps.", "tools", False),
        ("{{ message.thinking }}{{ builtin_tools }}", "thinking", False),
        ("{{ builtin_tools }}{{ message.tools }}", "tools", False),
        ("{{ 'tools' }}{% if \"tools\" in message %}{% endif %}", "tools", False),
        ("{{ 'it\\'s' + tools }}", "tools", True),
        ("{# tools #}{{ messages }}", "tools", False),
        ("", "tools", False),
    ],
)
def test_which_names_a_template_reads(template: str, name: str, read: bool) -> None:
    assert (name in names_read(template)) is read


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        (QWEN, "none", {"enable_thinking": False}),
        (QWEN, "low", {"enable_thinking": True}),
        (DEEPSEEK, "high", {"thinking": True}),
        (DEEPSEEK, "none", {"thinking": False}),
        (GPT_OSS, "high", {"reasoning_effort": "high"}),
        (GPT_OSS, "none", {"reasoning_effort": "none"}),
        (BOTH, "low", {"enable_thinking": True, "reasoning_effort": "low"}),
        (ALWAYS, "none", {}),
        (QWEN, None, {}),
    ],
)
def test_an_effort_becomes_the_template_s_variables(
    template: str, effort: str | None, variables: dict[str, Any]
) -> None:
    reasoning = reasoning_of_effort(effort, "reasoning_effort")
    assert reasoning_variables(reasoning, {"a": 1}, template, always=False) == {"a": 1} | variables


@pytest.mark.parametrize("always", [True, False])
def test_an_unread_effort_is_refused(always: bool) -> None:
    """Also of a model that always reasons: how much can't be said to it."""
    with pytest.raises(FieldError) as raised:
        reasoning_variables(reasoning_of_effort("low", "reasoning.effort"), {}, ALWAYS, always)
    assert (raised.value.code, raised.value.param) == ("unsupported", "reasoning.effort")


ON = Reasoning(on=True, on_param="thinking.type", effort_param="output_config.effort")


def test_a_model_that_always_reasons_needs_no_variable() -> None:
    assert reasoning_variables(ON, {}, ALWAYS, always=True) == {}
    assert reasoning_variables(ON, {}, GPT_OSS, always=False) == {}
    with pytest.raises(FieldError) as raised:
        reasoning_variables(ON, {}, ALWAYS, always=False)
    assert (raised.value.code, raised.value.param) == ("unsupported", "thinking.type")


def test_an_effort_beside_a_switch_is_not_the_switch() -> None:
    asked = Reasoning(
        on=True, effort="low", on_param="thinking.type", effort_param="output_config.effort"
    )
    with pytest.raises(FieldError) as raised:
        reasoning_variables(asked, {}, QWEN, always=True)
    assert raised.value.param == "output_config.effort"
    found = reasoning_variables(asked, {}, BOTH, always=True)
    assert found == {"enable_thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize(("given", "agrees"), [(True, True), (False, False)])
def test_a_contradicting_variable_is_refused(given: bool, agrees: bool) -> None:
    asked, by_name = reasoning_of_effort("low", "reasoning_effort"), {"enable_thinking": given}
    if agrees:
        assert reasoning_variables(asked, by_name, QWEN, always=False) == by_name
        return
    with pytest.raises(FieldError) as raised:
        reasoning_variables(asked, by_name, QWEN, always=False)
    assert raised.value.param == "chat_template_kwargs.enable_thinking"
    assert raised.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("reasoning", "given", "asked"),
    [
        (None, {}, None),
        (None, {"enable_thinking": True}, True),
        (None, {"thinking": False}, False),
        (None, {"reasoning_effort": "low"}, True),
        (None, {"reasoning_effort": "none"}, False),
        (Reasoning(on=False), {}, False),
        (Reasoning(on=True, effort="low"), {}, True),
        (Reasoning(effort="low"), {}, True),
    ],
)
def test_requests_for_reasoning(
    reasoning: Reasoning | None, given: dict[str, Any], asked: bool | None
) -> None:
    assert reasoning_asked(reasoning, given) is asked
