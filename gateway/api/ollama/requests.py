"""From Ollama's bodies to our requests, and to conversations as chat templates read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from ....bus.public import GenerateRequest
from ....config import Config, Constraint, SamplingParams, shown
from ....text.conversation import check_results
from ....text.messages import Tool, ToolUse, tool_of, tools_of
from ...server.http import field_error
from ...serving.chat_templates import Conversation, Reasoning, Turn
from ...serving.constraints import the_one
from ...serving.fields import Body, engine_priority, ignore, read_part
from ...serving.images import content_of, image_part, of_base64, text_part
from ...serving.model_names import adapter_of
from ...serving.prepared import Prepared
from ...serving.request_ids import new_id
from ...serving.sampling_fields import OLLAMA, read_sampling
from ...serving.tools import tool_call
from .bodies import (
    AnswerBody,
    ChatBody,
    FunctionTool,
    GenerateBody,
    KeepAlive,
    OllamaMessage,
    Options,
)

LATEST = ":latest"
"""The tag of a model's name without a tag."""

_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, by the names of `SamplingParams`."""

_ALL_TOKENS = -1
_PENALTIES = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}

# Go's durations.
_DURATION = re.compile(r"[-+]?(0|([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)")
_NOT_ZERO = re.compile("[1-9]")


def untagged(name: str, known: Collection[str]) -> str:
    """Return a model's name without Ollama's default tag, unless a model is called so."""
    return name if name in known else name.removesuffix(LATEST)


def model_of(name: str, config: Config) -> str:
    """Return the name of one of a gateway's only model or its adapters."""
    return untagged(name, (config.engine.model_name, *config.engine.model_aliases))


def ends_now(keep_alive: KeepAlive | None) -> bool:
    """Return whether a call without a prompt has its model unloaded.

    Raises:
        FieldError: The duration is no number of seconds, and none of Go's.
    """
    if isinstance(keep_alive, str):
        if not _DURATION.fullmatch(keep_alive):
            raise field_error(
                "keep_alive",
                f"is {shown(keep_alive)}; it is a number of seconds, or a duration such as '5m'",
            )
        return not _NOT_ZERO.search(keep_alive)
    return keep_alive == 0


# --- sampling -------------------------------------------------------------------------------------


def sampling_of(fields: AnswerBody, max_tokens: int) -> SamplingParams:
    """Read the options, with the constraint of the text.

    Args:
        max_tokens: The most tokens of an answer without `num_predict`.

    Raises:
        FieldError: An option is of the wrong type or not supported, or the format is unknown.
    """
    if fields.top_logprobs and not fields.logprobs:
        raise field_error("top_logprobs", "takes logprobs: true")
    given: Body = {name: value for name, value in fields.options.items() if value is not None}
    options = read_part(given, Options, "options")
    # -1 is as many as there is room for; -2 fills the context, which is the same here.
    if given.get("num_predict") in (-1, -2):
        del given["num_predict"]
    if given.get("seed") == -1:
        del given["seed"]
    given = _with_window(given, options.repeat_last_n)
    return read_sampling(
        given,
        OLLAMA,
        "options",
        **_DEFAULTS,
        max_tokens=max_tokens,
        logprobs=fields.top_logprobs,
        constraint=_constraint(fields.format),
    )


def _with_window(given: Body, last_n: int | None) -> Body:
    """Apply the number of tokens to which penalties apply.

    Raises:
        FieldError: unsupported: it is neither 0 nor all of them, and there is a penalty.
    """
    on = [name for name, off in _PENALTIES.items() if given.get(name, off) != off]
    if last_n is None or last_n == _ALL_TOKENS or not on:
        if last_n is not None and not on:
            ignore("options.repeat_last_n")
        return given
    if last_n == 0:
        return {name: value for name, value in given.items() if name not in _PENALTIES}
    raise field_error(
        "options.repeat_last_n",
        f"is {shown(last_n)}; with {on[0]} it may be {_ALL_TOKENS}, for all tokens, or 0 for no "
        "penalty. Leave it out",
        code="unsupported",
    )


def _constraint(format: str | dict[str, Any] | None) -> Constraint | None:
    found = None
    if isinstance(format, dict):
        found = Constraint(json_schema=format)
    elif format == "json":
        found = Constraint(json_object=True)
    elif format:
        raise field_error("format", f"is {shown(format)}; it may be 'json' or a JSON schema")
    return the_one({"format": found})


# --- conversations --------------------------------------------------------------------------------


def conversation_of(fields: ChatBody) -> Conversation:
    """Return the conversation of a chat for the chat template, without tools.

    An assistant's text at the end is continued.

    Raises:
        FieldError: A message is invalid.
    """
    turns: list[Turn] = []
    for place, given in enumerate(fields.messages):
        turns.append(_turn(given, f"messages[{place}]", turns))
    check_results(turns)
    last = turns[-1]
    continued = last["role"] == "assistant" and last["content"] and "tool_calls" not in last
    return Conversation(
        turns=turns,
        add_generation_prompt=not continued,
        continue_final_message=bool(continued),
        reasoning=_reasoning(fields),
    )


def prompt_conversation(fields: GenerateBody) -> Conversation:
    """Return a prompt as a conversation."""
    turns: list[Turn] = []
    if fields.system:
        turns.append({"role": "system", "content": fields.system})
    turns.append({"role": "user", "content": _content(fields.prompt, fields.images, "images")})
    return Conversation(turns=turns, reasoning=_reasoning(fields))


def _reasoning(fields: AnswerBody) -> Reasoning | None:
    if fields.think is None:
        return None
    effort = None if isinstance(fields.think, bool) else fields.think
    return Reasoning(
        on=fields.think is not False, effort=effort, on_param="think", effort_param="think"
    )


def _turn(given: dict[str, Any], where: str, before: Sequence[Turn]) -> Turn:
    role = given.get("role")
    message = read_part(
        given | {"role": role.lower() if isinstance(role, str) else role}, OllamaMessage, where
    )
    calls = [
        # Some templates need an id for each.
        tool_call(call.id or f"call_{len(before)}_{place}", *_called(call.function))
        for place, call in enumerate(message.tool_calls)
    ]
    call_id = message.tool_call_id
    if message.role == "tool" and not call_id:
        call_id = _open_call(before, message.tool_name)
    optional: dict[str, Any] = {
        "reasoning_content": message.thinking,
        "tool_calls": calls,
        "tool_call_id": call_id,
        "name": message.tool_name,
    }
    content = _content(message.content, message.images, f"{where}.images")
    turn: Turn = {"role": message.role, "content": content}
    return turn | {name: value for name, value in optional.items() if value}


def _called(function: Any) -> tuple[str, dict[str, Any]]:
    return function.name, function.arguments


def _open_call(before: Sequence[Turn], name: str) -> str:
    """Return the id of the first call without a result, of a tool if it is named; "" for none."""
    answered: set[str] = set()
    for turn in reversed(before):
        if turn["role"] != "tool":
            open_calls = [call for call in turn.get("tool_calls", ()) if call["id"] not in answered]
            of_name = [call for call in open_calls if call["function"]["name"] == name]
            return next((str(call["id"]) for call in of_name or open_calls), "")
        answered.add(turn.get("tool_call_id", ""))
    return ""


def _content(text: str, images: Sequence[str], where: str) -> str | list[dict[str, Any]]:
    parts = [image_part(of_base64(data, f"{where}[{i}]")) for i, data in enumerate(images)]
    return content_of([*parts, text_part(text)])


def use_of(fields: ChatBody) -> ToolUse:
    """Read the tools that the model may call.

    Raises:
        FieldError: A tool is not a function, or its name or schema is invalid.
    """
    return ToolUse(
        tools=tools_of(
            (f"tools[{place}].function", _tool(tool, f"tools[{place}]"))
            for place, tool in enumerate(fields.tools)
        )
    )


def _tool(given: dict[str, Any], where: str) -> Tool:
    function = read_part(given, FunctionTool, where).function
    return tool_of(function.name, function.description, function.parameters, function.strict)


def request_of(
    fields: AnswerBody, prepared: Prepared, tenant: str, config: Config, *, plain: bool = False
) -> GenerateRequest:
    """Return the request to submit. `plain`: its prompt is a text without a template."""
    prompt = prepared.prompt
    return GenerateRequest(
        request_id=new_id("ollama-"),
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=None if isinstance(prompt, str) else prompt,
        images=prepared.images,
        add_special_tokens=plain,
        sampling=prepared.sampling,
        stream=fields.stream,
        priority=engine_priority(fields.priority),
        tenant=tenant,
        cache_salt=fields.cache_salt,
        model=adapter_of(model_of(fields.model, config), config),
        is_chat=not plain,
    )
