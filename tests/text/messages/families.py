"""Each family's way of writing messages, stated independently of the formats."""

# ruff: noqa: RUF001 (DeepSeek's marks are made of such characters.)

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from nano_inference.config import RequestError
from nano_inference.text.messages import (
    Delta,
    MessageFormat,
    MessageReader,
    Reading,
    Tool,
    find_format,
)
from nano_inference.text.messages.message_format import known_formats

from .listed_families import LISTED, MARK_OF_M3
from .tagged_families import TAGGED

TOOLS = (
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "places": {"type": "array"},
            },
        },
    ),
    Tool(name="stop-now.v2"),
)

Arguments = dict[str, Any]


class Family(NamedTuple):
    """A family of models.

    Attributes:
        format: The name of its format.
        model_type: `model_type` of one of its models.
        chat_template: What matters in theirs.
        turn: What a prompt ends with.
        reasoning: What stands before and after the reasoning; empty where there is none.
        call, between: A call with {name} and {arguments}, and what stands between two.
        open, close: What stands around all calls.
        answer, answered: What stands before a text, and between it and calls.
        is_json: Whether arguments are written as JSON.
        argument: An argument with {key} and {value} between tags, and {type} or {is_text};
            "python"; or "elements".
    """

    format: str
    model_type: str
    chat_template: str
    turn: str
    call: str
    between: str = ""
    open: str = ""
    close: str = ""
    reasoning: tuple[str, str] = ("", "")
    answer: str = ""
    answered: str = "\n\n"
    is_json: bool = True
    argument: str = ""

    def written(self, calls: Iterable[tuple[str, Arguments]]) -> str:
        """The calls as a model writes them."""
        texts = (
            self.call.replace("{name}", name).replace("{arguments}", self._arguments(arguments))
            for name, arguments in calls
        )
        return self.open + self.between.join(texts) + self.close

    def rendered(self, turns: Sequence[Mapping[str, Any]], begin: bool) -> str:
        """A conversation as the family's chat templates write it."""
        return "".join(map(self._turn, turns)) + (self.turn if begin else "")

    def _turn(self, turn: Mapping[str, Any]) -> str:
        if turn["role"] != "assistant":
            return f"<{turn['role']}>{turn['content']}</{turn['role']}>"
        text = self.turn
        if self.reasoning[0] and "reasoning_content" in turn:
            text += turn["reasoning_content"].join(self.reasoning)
        if turn["content"]:
            text += self.answer + turn["content"]
        if turn.get("tool_calls") and self.call == "refused":
            raise RequestError("no calls", code="invalid_messages")
        functions = [call["function"] for call in turn.get("tool_calls", ())]
        calls = [(function["name"], function["arguments"]) for function in functions]
        return text + (self.written(calls) if calls else "")

    def _arguments(self, arguments: Arguments) -> str:
        if self.is_json:
            return json.dumps(arguments, ensure_ascii=False)
        if self.argument == "python":
            return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        if self.argument == "elements":
            return "".join(_element(key, value) for key, value in arguments.items())
        if self.argument:
            return "".join(_tagged(self.argument, key, arguments[key]) for key in arguments)
        quote = "<escape>" if "<escape>" in self.chat_template else '<|"|>'
        return _unquoted(arguments, quote)


def _element(name: str, value: Any) -> str:
    if isinstance(value, dict):
        text = "".join(_element(key, each) for key, each in value.items())
    elif isinstance(value, list):
        text = "".join(_element("item", each) for each in value)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return f"{MARK_OF_M3}<{name}>{text}{MARK_OF_M3}</{name}>"


def _tagged(argument: str, key: str, value: Any) -> str:
    types = {str: "string", bool: "boolean", list: "array", dict: "object"}
    parts = {
        "{key}": key,
        "{type}": types.get(type(value), "number"),
        "{is_text}": json.dumps(isinstance(value, str)),
        "{value}": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
    }
    for name, part in parts.items():
        argument = argument.replace(name, part)
    return argument


def _unquoted(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_unquoted(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_unquoted(each, quote) for each in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


_CHATML = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"
_HERMES = _CHATML + '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
_HERMES_CALL = '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>'
_THINK = ("<think>\n", "\n</think>\n\n")
_DEEPSEEK = "{{ '<｜User｜>' + message.content }}<｜Assistant｜>"

_QWEN = Family("qwen", "qwen2", _HERMES, "<|im_start|>assistant\n", _HERMES_CALL, between="\n")
_NO_THINKING = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
_DEEPSEEK_V3 = Family(
    "deepseek-v3.1",
    "deepseek_v3",
    _DEEPSEEK + "</think><｜tool▁call▁begin｜>name<｜tool▁sep｜>",
    "<｜Assistant｜>",
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    reasoning=("<think>", "</think>"),
)
_LLAMA = Family(
    "llama",
    "llama",
    '<|start_header_id|>{{ role }} {"name": function name, "parameters": dictionary}',
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    '{"name": "{name}", "parameters": {arguments}}',
    between="; ",
)
_MAGISTRAL = Family(
    "mistral-args",
    "mistral3",
    "[INST]{{ content }}[/INST] [TOOL_CALLS]name[ARGS] [THINK]",
    "[/INST]",
    "[TOOL_CALLS]{name}[ARGS]{arguments}",
    reasoning=("[THINK]", "[/THINK]"),
)
_GPT_OSS = Family(
    "gpt-oss",
    "gpt_oss",
    "<|start|>assistant<|channel|>analysis<|message|><|end|>",
    "<|start|>assistant",
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
    between="<|start|>assistant",
    reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    answer="<|channel|>final<|message|>",
    answered="<|end|><|start|>assistant",
)

FAMILIES = {
    "Qwen2.5": _QWEN,
    "Qwen3": _QWEN._replace(
        model_type="qwen3", chat_template=_HERMES + _NO_THINKING, reasoning=_THINK
    ),
    "Qwen3-Coder": _QWEN._replace(
        format="qwen-xml",
        model_type="qwen3_moe",
        chat_template=_CHATML
        + "<tool_call>\n<function=name>\n<parameter=key>\n</parameter></tool_call>",
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        argument="<parameter={key}>\n{value}\n</parameter>\n",
        is_json=False,
    ),
    "Hermes": _QWEN._replace(format="hermes", model_type="llama"),
    "Hermes with Llama's headers": _QWEN._replace(
        format="hermes",
        model_type="llama",
        chat_template='<|start_header_id|><tool_call>{"name", "parameters": }</tool_call> <think>',
        turn=_LLAMA.turn,
        reasoning=_THINK,
    ),
    "DeepSeek-R1": _DEEPSEEK_V3._replace(
        format="deepseek-r1",
        chat_template=_DEEPSEEK
        + "<think>\n</think><｜tool▁call▁begin｜>function<｜tool▁sep｜>```json",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>",
        between="\n",
        reasoning=_THINK,
    ),
    "DeepSeek-V3.1": _DEEPSEEK_V3,
    "Llama 3": _LLAMA,
    "Llama 3 with python_tag": _LLAMA._replace(
        call='{"type": "function", "name": "{name}", "parameters": {arguments}}',
        open="<|python_tag|>",
        close="<|eom_id|>",
    ),
    "Mistral": Family(
        "mistral",
        "mistral",
        "[INST]{{ content }}[/INST] [TOOL_CALLS] [",
        "[/INST]",
        '{"name": "{name}", "arguments": {arguments}, "id": "abcdefghi"}',
        between=", ",
        open="[TOOL_CALLS] [",
        close="]</s>",
    ),
    "Magistral": _MAGISTRAL,
    "Mistral with ids": _MAGISTRAL._replace(
        chat_template="[INST]{{ content }}[/INST] [TOOL_CALLS]name[CALL_ID]id[ARGS]",
        turn="[/TOOL_RESULTS]",
        call="[TOOL_CALLS]{name}[CALL_ID]abc123XYZ[ARGS]{arguments}",
        close="</s>",
        reasoning=("", ""),
    ),
    "Gemma 4": Family(
        "gemma",
        "gemma4",
        "<|turn>model <|tool_call>call:name{ <|channel>thought\n<channel|>",
        "<|turn>model\n",
        "<|tool_call>call:{name}{arguments}<tool_call|>",
        reasoning=("<|channel>thought\n", "\n<channel|>"),
        is_json=False,
    ),
    "FunctionGemma": Family(
        "functiongemma",
        "gemma3_text",
        "<start_of_turn>model <start_function_call>call: <escape>",
        "<start_of_turn>model\n",
        "<start_function_call>call:{name}{arguments}<end_function_call>",
        is_json=False,
    ),
    "gpt-oss": _GPT_OSS,
    "gpt-oss with recipients of the role": _GPT_OSS._replace(
        call=" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
    ),
    **{name: Family(**({"is_json": False} | given)) for name, given in TAGGED.items()},
    **{name: Family(**given) for name, given in LISTED.items()},
}


def found_for(family: Family, model_type: str, own: Any = None) -> MessageFormat | None:
    """The format that is found by what the family's chat templates write."""
    return find_format("auto", own, family.chat_template, model_type, family.rendered)


@cache
def format_of_family(family: Family) -> MessageFormat:
    """Return the format that is found for the family."""
    form = found_for(family, family.model_type)
    assert form is not None
    return form


def named(name: str) -> MessageFormat:
    """A known format."""
    return next(form for form in known_formats() if form.name == name)


class Read(NamedTuple):
    """A whole message."""

    reasoning: str
    content: str
    calls: list[tuple[str, Arguments]]
    malformed: int


def joined(deltas: Iterable[Delta]) -> Delta:
    """All of them as one."""
    known = list(deltas)
    return Delta(
        "".join(delta.reasoning for delta in known),
        "".join(delta.content for delta in known),
        tuple(call for delta in known for call in delta.calls),
    )


def deltas_of(reader: MessageReader, pieces: Iterable[str], *, cut_off: bool = False) -> Delta:
    """Return the delta of the pieces and of the end."""
    return joined([*map(reader.feed, pieces), reader.finish(cut_off=cut_off)])


def read(
    form: MessageFormat,
    pieces: Sequence[str],
    *,
    opening: str = "",
    tools: tuple[Tool, ...] = TOOLS,
    cut_off: bool = False,
    separates_reasoning: bool = True,
) -> Read:
    """A message, read in these pieces; a text by its characters."""
    reading = Reading(opening=opening, tools=tools, separates_reasoning=separates_reasoning)
    reader = MessageReader(form, reading, "seed")
    delta = deltas_of(reader, pieces, cut_off=cut_off)
    assert [call.place for call in delta.calls] == list(range(reader.calls))
    calls = [(call.name, json.loads(call.arguments)) for call in delta.calls]
    return Read(delta.reasoning, delta.content, calls, reader.malformed)


def both(form: MessageFormat, text: str, opening: str = "", *, cut_off: bool = False) -> Read:
    """A message read at once and by its characters, which is the same."""
    whole = read(form, [text], opening=opening, cut_off=cut_off)
    assert read(form, text, opening=opening, cut_off=cut_off) == whole
    return whole
