"""Chat templates are untrusted programs: their time is limited, and their failures are reported."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nano_inference.config import Config, ConfigError, RequestError, load_config
from nano_inference.gateway.server.http import FieldError
from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.serving import chat_templates
from nano_inference.gateway.serving.capacity import Capacity
from nano_inference.gateway.serving.chat_templates import (
    ChatTemplates,
    Conversation,
    Reasoning,
    reasoning_asked,
    reasoning_of_effort,
    reasoning_variables,
)
from nano_inference.gateway.serving.fields import collect_ignored
from nano_inference.gateway.serving.tokenizer import LazyTokenizer
from nano_inference.text import template_process
from nano_inference.text.chat_template import TemplateWorkers
from nano_inference.text.conversation import names_read
from nano_inference.text.messages import Tool

from ..fake import FakeEngine, app_of

LIMIT_S = 60
TENANT = "http:127.0.0.1"
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = (
    "{% set many = range(90000) %}{% for a in many %}{% for b in many %}{% endfor %}{% endfor %}"
)

ENDLESS_IN_MACRO = (
    "{% macro all(name) %}{% for a in range(90000) %}{% endfor %}{% endmacro %}"
    "{% for a in range(90000) %}{{ messages | map(attribute='role') | map('upper') | list }}"
    "{{ all(a) }}{% endfor %}"
)

SLOW_C_CALL = "{{ 7 ** 100000000 % 2 }}"


async def _length() -> int:
    return 100


def capacity() -> Capacity:
    return Capacity(chat_templates.AT_ONCE, 100, Measures())


@functools.cache
def workers(limit_s: float) -> TemplateWorkers:
    """Shared by the tests: their processes take a second to start."""
    return TemplateWorkers(chat_templates.AT_ONCE, limit_s)


class Model:
    """A folder with the bundled model's tokenizer and a template of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(Config().engine.model_folder, folder, dirs_exist_ok=True)

    def with_template(self, template: str | None, timeout_s: float = LIMIT_S) -> ChatTemplates:
        path = self.folder / "chat_template.jinja"
        path.unlink(missing_ok=True)
        if template is not None:
            path.write_text(template)
        self.tokenizer = LazyTokenizer(self.folder)
        return ChatTemplates(self.tokenizer, _length, workers(timeout_s), capacity())

    async def text(self, template: str, conversation: Conversation) -> str:
        found = (await self.with_template(template).render(conversation, TENANT)).token_ids
        return (await self.tokenizer.get()).text(found, skip_special=False)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


async def refused(templates: ChatTemplates, turns: list[dict[str, Any]] | None = None) -> str:
    """The code of an error with a message."""
    with pytest.raises(RequestError) as raised:
        await templates.render(Conversation(turns=HELLO if turns is None else turns), TENANT)
    assert raised.value.message
    return raised.value.code


async def test_a_conversation_without_a_template_is_refused(model: Model) -> None:
    assert await refused(model.with_template(None)) == "no_chat_template"


async def test_a_template_that_loops_over_tools_serves_calls_without_tools(model: Model) -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"
    assert await model.text(template, Conversation(turns=HELLO)) == HELLO[0]["content"]


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ raise_exception('only two turns') }}", "invalid_messages"),
        ("{{ messages[7].content }}", "invalid_messages"),
        ("{{ 1 / 0 }}", "invalid_messages"),
        ("{% for %}", "invalid_messages"),
        ("{{ messages.__class__.__mro__ }}", "invalid_messages"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "chat_template_failed"),
        ("{{ 'x' * 10 ** 11 }}", "chat_template_failed"),
    ],
)
async def test_a_template_that_fails(model: Model, template: str, code: str) -> None:
    assert await refused(model.with_template(template)) == code


@pytest.mark.parametrize("template", [ENDLESS, ENDLESS_IN_MACRO, SLOW_C_CALL])
async def test_an_endless_template_is_stopped(model: Model, template: str) -> None:
    templates = model.with_template(template, timeout_s=0.1)
    # Its workers are free again, however often it is called.
    codes = [await refused(templates) for _ in range(3)]
    assert codes == ["chat_template_failed"] * 3


async def test_calls_are_served_while_a_template_runs(model: Model) -> None:
    templates = model.with_template(ENDLESS + "{{ messages[0].content }}", timeout_s=0.1)
    running = asyncio.create_task(refused(templates))
    other = Model(model.folder.parent / f"{model.folder.name}-other")
    assert await other.text("{{ messages[0].content }}", Conversation(turns=HELLO)) == "hello"
    assert await running == "chat_template_failed"


async def test_looping_templates_of_one_tenant_hold_up_no_other(model: Model) -> None:
    """Ten conversations in which the template loops until its time is over, and one of another
    tenant, which waits for none of them."""
    loop = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}"
    templates = model.with_template(loop + "{{ messages[0].content }}", timeout_s=0.1)
    endless = [{"role": "user", "content": "loop"}]
    looping = [asyncio.create_task(refused(templates, endless)) for _ in range(10)]
    while templates._capacity.waiting < 8:  # noqa: ASYNC110
        await asyncio.sleep(0)
    rendered = await templates.render(Conversation(turns=HELLO), "other")
    assert rendered.token_ids
    # In order of arrival it would have been last.
    assert sum(task.done() for task in looping) < 7
    assert set(await asyncio.gather(*looping)) == {"chat_template_failed"}


async def test_too_long_a_rendered_prompt_is_refused(model: Model) -> None:
    templates = model.with_template(
        "{% for a in range(50000) %}{{ messages[0].content }}{% endfor %}"
    )
    assert await refused(templates) == "prompt_too_long"


async def test_too_long_messages_are_not_rendered(model: Model) -> None:
    templates = model.with_template("x")
    turns = [{"role": "user", "content": "a" * 100_000}]
    assert await refused(templates, turns) == "prompt_too_long"


async def test_variables_reach_the_template(model: Model) -> None:
    conversation = Conversation(turns=HELLO, variables={"mood": "glad"})
    assert await model.text("{{ mood }} {{ messages[0].content }}", conversation) == "glad hello"


async def test_calls_in_the_history_reach_the_template(model: Model) -> None:
    call = {"function": {"name": "f", "arguments": {"city": "x"}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert json.loads(await model.text(template, Conversation(turns=turns))) == {"city": "x"}


WEATHER = Tool(name="weather")


async def test_tools_are_refused_if_the_template_reads_none(model: Model) -> None:
    templates = model.with_template("{{ messages[0].content }} tools {{ messages[0].tools }}")
    with pytest.raises(FieldError) as raised:
        await templates.render(Conversation(turns=HELLO, tools=(WEATHER,)), TENANT)
    assert (raised.value.code, raised.value.param) == ("unsupported", "tools")
    await templates.render(Conversation(turns=HELLO), TENANT)


async def test_the_template_for_tools_is_chosen(model: Model) -> None:
    """Transformers' choice: the template for tools with tools, else the default."""
    templates = model.with_template("none of these")
    tokenizer = await model.tokenizer.get()
    tokenizer.transformers.chat_template = {
        "default": "plain",
        "tool_use": "{{ tools[0].function.name }}",
    }
    plain = await templates.render(Conversation(turns=HELLO), TENANT)
    with_tools = await templates.render(Conversation(turns=HELLO, tools=(WEATHER,)), TENANT)
    shown = [tokenizer.text(each.token_ids, skip_special=False) for each in (plain, with_tools)]
    assert shown == ["plain", "weather"]
    tokenizer.transformers.chat_template = {"default": "plain"}
    with pytest.raises(FieldError):
        await templates.render(Conversation(turns=HELLO, tools=(WEATHER,)), TENANT)


@pytest.mark.parametrize(("begins", "opening"), [(True, "<think>\n"), (False, "")])
async def test_the_opening_of_the_answer_is_returned(
    model: Model, begins: bool, opening: str
) -> None:
    """If the template opens no answer, the opening of an earlier answer isn't returned."""
    (model.folder / "chat_template.jinja").write_text(
        "<|im_start|>assistant\nbefore<|im_end|>\n"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    lazy = LazyTokenizer(model.folder, "qwen")
    templates = ChatTemplates(lazy, _length, workers(LIMIT_S), capacity())
    rendered = await templates.render(
        Conversation(turns=HELLO, add_generation_prompt=begins), TENANT
    )
    assert rendered.opening == opening


# --- templates of calls ---------------------------------------------------------------------------


def test_a_process_ends_after_a_call_s_own_template() -> None:
    """Transformers keeps each compiled template with its constants, which may be of any size."""
    own, theirs = Pipe()
    pid = template_process._fork_worker(theirs, [own, theirs])
    call: dict[str, Any] = dict.fromkeys(("add_generation_prompt", "continue_final_message"), False)
    call |= {"messages": HELLO, "tools": None, "variables": {}, "limit_s": LIMIT_S}
    for is_own in (True, True, False):
        own.send_bytes(json.dumps(call | {"template": "a", "own": is_own}).encode())
        assert json.loads(own.recv_bytes()) == {"text": "a"}
    _, status = os.waitpid(pid, 0)
    assert os.WEXITSTATUS(status) == template_process._RENEWED


def test_the_code_of_a_template_is_found_in_linear_time() -> None:
    """Marks that nothing closes: by a regular expression that takes minutes."""
    assert names_read("{{ a['b'] }}{%- if c.d %}{{ " + "{% {{ " * 50_000) == {"a", "if", "c"}


@pytest.mark.parametrize("asked", ["qwenn", "/nowhere/format.json"])
def test_an_unknown_format_is_refused_at_start(asked: str) -> None:
    config = load_config(env={}, overrides={"gateway.message_format": asked})
    with pytest.raises(ConfigError, match=r"gateway\.message_format"):
        app_of(FakeEngine(), config)


# --- requests for reasoning -----------------------------------------------------------------------

QWEN = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
GPT_OSS = (
    '{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{% endif %}'
)
BOTH = QWEN + GPT_OSS
ALWAYS = "{{ messages }}<think>"


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


def refusal_of(*given: Any) -> tuple[str, str | None]:
    """The code and the field of the error for a request for reasoning."""
    with pytest.raises(FieldError) as raised:
        reasoning_variables(*given)
    return raised.value.code, raised.value.param


@pytest.mark.parametrize("always", [True, False])
def test_an_unread_effort_is_neutral(always: bool) -> None:
    """Also of a model that always reasons: how much can't be said to it."""
    ignored = collect_ignored()
    effort = reasoning_of_effort("low", "reasoning.effort")
    assert reasoning_variables(effort, {"a": 1}, ALWAYS, always) == {"a": 1}
    assert list(ignored) == ["reasoning.effort"]


ON = Reasoning(on=True, on_param="thinking.type", effort_param="output_config.effort")


def test_a_model_that_always_reasons_needs_no_variable() -> None:
    assert reasoning_variables(ON, {}, ALWAYS, always=True) == {}
    assert reasoning_variables(ON, {}, GPT_OSS, always=False) == {}
    ignored = collect_ignored()
    assert reasoning_variables(ON, {}, ALWAYS, always=False) == {}
    assert list(ignored) == ["thinking.type"]


def test_a_model_that_always_reasons_goes_on_when_asked_not_to() -> None:
    asked = reasoning_of_effort("none", "reasoning_effort")
    for always, named in ((True, ["reasoning_effort"]), (False, [])):
        ignored = collect_ignored()
        assert reasoning_variables(asked, {}, ALWAYS, always=always) == {}
        assert list(ignored) == named


def test_an_effort_beside_a_switch_is_not_the_switch() -> None:
    ignored = collect_ignored()
    asked = msgspec.structs.replace(ON, effort="low")
    assert reasoning_variables(asked, {}, QWEN, always=True) == {"enable_thinking": True}
    assert list(ignored) == ["output_config.effort"]
    found = reasoning_variables(asked, {}, BOTH, always=True)
    assert found == {"enable_thinking": True, "reasoning_effort": "low"}


def test_a_contradicting_variable_is_refused() -> None:
    asked, same = reasoning_of_effort("low", "reasoning_effort"), {"enable_thinking": True}
    assert reasoning_variables(asked, same, QWEN, always=False) == same
    refusal = refusal_of(asked, {"enable_thinking": False}, QWEN, False)
    assert refusal == ("invalid_request", "chat_template_kwargs.enable_thinking")


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
