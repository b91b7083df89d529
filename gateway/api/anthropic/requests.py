"""From Anthropic's bodies to our requests, and to conversations as chat templates read them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from ....bus.public import GenerateRequest
from ....config import Config, SamplingParams, shown
from ....text.messages import Tool, ToolUse, tool_of, tools_of
from ...call import Call
from ...server.http import FieldError, field_error
from ...serving.chat_templates import Conversation, Reasoning, Turn
from ...serving.constraints import of_text_format, the_one
from ...serving.fields import Body, adapter_of, engine_priority, read_part
from ...serving.images import (
    ImageSource,
    content_of,
    image_part,
    of_base64,
    of_url,
    text_part,
)
from ...serving.prepared import Prepared
from ...serving.sampling_fields import ANTHROPIC, read_sampling
from ...serving.tools import tool_call, tool_use_of, with_named
from .bodies import (
    AnthropicMessage,
    Blocks,
    CountBody,
    CustomTool,
    ImageAddress,
    ImageBlock,
    ImageFile,
    MessagesBody,
    RedactedThinkingBlock,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from .errors import VERSION_HEADER

_VERSIONS = ("2023-06-01", "2026-10-21")


def check_version(call: Call) -> None:
    """Check the interface's version. They differ only in what Anthropic refuses.

    Raises:
        FieldError: Unknown version.
    """
    version = call.header(VERSION_HEADER)
    if version not in (None, *_VERSIONS):
        raise field_error(
            VERSION_HEADER.lower(),
            f"is {shown(version)}; it may be {' or '.join(_VERSIONS)}",
            code="unsupported",
        )


def read_messages(body: Body) -> MessagesBody:
    """Read a body of `/v1/messages`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, MessagesBody)
    if fields.max_tokens is None:
        raise field_error("max_tokens", "is missing; say how many tokens the answer may have")
    check_thinking(fields)
    if (budget_of(fields) or 0) >= fields.max_tokens:
        raise field_error(
            "thinking.budget_tokens", "must be less than max_tokens, of which they are a part"
        )
    return fields


def check_thinking(fields: CountBody) -> None:
    """Raises FieldError: the thinking budget is missing, too small, or has no effect."""
    if (thinking := fields.thinking) is None:
        return
    param, budget, enabled = "thinking.budget_tokens", budget_of(fields), thinking.type == "enabled"
    why = ""
    if enabled and budget is None:
        why = "is missing; say how many tokens it may have"
    elif not enabled and budget is not None:
        why = "takes thinking.type 'enabled'"
    elif budget is not None and budget < 1:
        why = "must be at least 1; or have thinking disabled"
    if why:
        raise field_error(param, why)


def budget_of(fields: CountBody) -> int | None:
    """Return the thinking budget in tokens; None for no limit."""
    return None if fields.thinking is None else fields.thinking.budget_tokens


def reasoning_of(fields: CountBody) -> Reasoning | None:
    """Return the reasoning for the chat template; None leaves it to the template."""
    thinking, effort = fields.thinking, fields.output_config.effort
    if thinking is None and effort is None:
        return None
    return Reasoning(
        on=None if thinking is None else thinking.type != "disabled",
        required=thinking is not None and thinking.type == "enabled",
        effort=effort,
        on_param="thinking",
        effort_param="output_config.effort",
    )


def use_of(body: CountBody) -> ToolUse:
    """Read which tools the model may, or has to, call.

    Raises:
        FieldError: A tool or the choice is invalid.
    """
    tools = tools_of(
        [
            (f"tools[{place}]", _tool(tool, f"tools[{place}]"))
            for place, tool in enumerate(body.tools)
        ],
        schema="input_schema",
    )
    choice = body.tool_choice
    if choice is None:
        return ToolUse(tools=tools)
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto" or choice.type == "none":
        return tool_use_of(tools, choice.type, parallel=parallel)
    use = tool_use_of(tools, "required", parallel=parallel)
    return use if choice.type == "any" else with_named(use, choice.name, "tool_choice.name")


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise field_error(
            where,
            f": a tool of type {shown(kind)} is not supported here; give tools of your own, "
            "with a name and an input_schema",
            code="unsupported",
        )
    found = read_part(given, CustomTool, where)
    return tool_of(found.name, found.description, found.input_schema, found.strict)


def request_of(
    fields: MessagesBody, prepared: Prepared, tenant: str, config: Config
) -> GenerateRequest:
    """Return the request to submit."""
    return GenerateRequest(
        request_id=f"msg_{uuid.uuid4().hex}",
        prompt=prepared.prompt if isinstance(prepared.prompt, str) else None,
        prompt_token_ids=None if isinstance(prepared.prompt, str) else prepared.prompt,
        images=prepared.images,
        add_special_tokens=not prepared.images,
        sampling=prepared.sampling,
        stream=fields.stream,
        priority=engine_priority(fields.priority),
        tenant=tenant,
        cache_salt=fields.cache_salt,
        kv_session=fields.kv_session,
        model=adapter_of(fields.model, config),
    )


def sampling_of(body: Body, fields: MessagesBody) -> SamplingParams:
    """Read the sampling parameters, with the constraint of the text.

    Raises:
        FieldError: One is of the wrong type, or the constraint is not supported.
    """
    formats = {
        "output_config.format": fields.output_config.format,
        "output_format": fields.output_format,  # its older name
    }
    found = {name: of_text_format(each, name) for name, each in formats.items() if each}
    return read_sampling(body, ANTHROPIC, constraint=the_one(found))


Block = (
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)

_THINGS = {"image": "images are", "document": "documents are"}
_SOURCES: dict[str, type[ImageFile | ImageAddress]] = {"base64": ImageFile, "url": ImageAddress}
_TEXT: dict[str, type[Block]] = {"text": TextBlock}
_BLOCKS: dict[Role, dict[str, type[Block]]] = {
    "system": _TEXT,
    "user": _TEXT | {"image": ImageBlock, "tool_result": ToolResultBlock},
    "assistant": _TEXT
    | {
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
    },
}
"""The blocks that messages of each role may hold."""


class _Placed(NamedTuple):
    """A block, with its path in the body."""

    block: Block
    where: str


class _Said(NamedTuple):
    """Adjacent messages of one role."""

    role: Role
    blocks: list[_Placed]


OpenCalls = dict[str, tuple[str, str]]
"""Tool calls without a result, by id: the tool's name, and the call's path in the body."""


def conversation_of(body: CountBody) -> Conversation:
    """Return the conversation for the chat template, without tools.

    Raises:
        FieldError: A message is invalid, holds no text, or calls tools without results; or the
            thinking is invalid.
    """
    check_thinking(body)
    if not body.messages:
        raise field_error("messages", "is empty; give at least one")
    turns: list[Turn] = []
    if body.system:
        turns.append({"role": "system", "content": _text(body.system, "system")})
    calls: OpenCalls = {}
    for said in _joined(body.messages):
        if said.role == "user":
            turns += _results(said, calls)
        if said.role != "system":
            _check_answered(calls)
        turns += _turns(said)
        for block, where in said.blocks:
            if isinstance(block, ToolUseBlock):
                if block.id in calls:
                    param = f"{where}.id"
                    raise field_error(param, "is that of another tool_use")
                calls[block.id] = block.name, where
    _check_answered(calls)
    continued = turns[-1]["role"] == "assistant"
    if continued and not turns[-1]["content"]:
        where = f"messages[{len(body.messages) - 1}].content"
        raise field_error(
            where,
            "is empty; the assistant's last message is continued, so give it a text or "
            "leave it out",
        )
    if continued and body.thinking is not None and body.thinking.type == "enabled":
        raise field_error(
            "thinking",
            "is enabled, and the assistant's last message, which is continued, has begun "
            "its text; leave one of them out",
        )
    return Conversation(
        turns=turns,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        variables=body.chat_template_kwargs,
        reasoning=reasoning_of(body),
    )


def _check_answered(calls: OpenCalls) -> None:
    """Raises FieldError: a call has no result."""
    for _, where in calls.values():
        raise field_error(
            where, ": the message after a tool_use has its tool_result; there is none"
        )


def _joined(messages: Blocks) -> list[_Said]:
    """Join adjacent messages of one role."""
    joined: list[_Said] = []
    for place, given in enumerate(messages):
        where = f"messages[{place}]"
        message = read_part(given, AnthropicMessage, where)
        blocks = list(_blocks(message, f"{where}.content"))
        if joined and joined[-1].role == message.role != "system":
            joined[-1].blocks.extend(blocks)
        else:
            joined.append(_Said(message.role, blocks))
    return joined


def _blocks(message: AnthropicMessage, where: str) -> Iterator[_Placed]:
    if isinstance(message.content, str):
        yield _Placed(TextBlock(type="text", text=message.content), where)
        return
    for place, given in enumerate(message.content):
        yield _Placed(_block(given, message.role, f"{where}[{place}]"), f"{where}[{place}]")


def _block(given: dict[str, Any], role: Role, where: str) -> Block:
    kind = given.get("type")
    found = _BLOCKS[role].get(kind) if isinstance(kind, str) else None
    if found is not None:
        return read_part(given, found, where)
    for other, blocks in _BLOCKS.items():
        if isinstance(kind, str) and kind in blocks:
            raise field_error(
                where, f": a block of type {shown(kind)} stands in messages of role {other!r}"
            )
    raise _unsupported(kind, where)


def _unsupported(kind: object, where: str) -> FieldError:
    known = _THINGS.get(kind) if isinstance(kind, str) else None
    what = known or f"a block of type {shown(kind)} is"
    return field_error(where, f": {what} not supported here; send text", code="unsupported")


def _results(said: _Said, calls: OpenCalls) -> list[Turn]:
    """Return a turn for each result, and close its call. They stand before the user's own text."""
    turns: list[Turn] = []
    for block, where in said.blocks:
        if not isinstance(block, ToolResultBlock):
            continue
        param, call_id = f"{where}.tool_use_id", block.tool_use_id
        if call_id not in calls:
            raise field_error(
                param,
                f"is {shown(call_id)}, and the assistant's message before has no tool_use "
                "of that id without a result",
            )
        name, _ = calls.pop(call_id)
        content = _parts(block.content, f"{where}.content")
        if block.is_error and isinstance(content, str) and not content.lower().startswith("error"):
            # Templates have no field for errors.
            content = f"Error: {content}" if content else "Error"
        turns.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": name})
    return turns


def _turns(said: _Said) -> list[Turn]:
    """Return the turn of text, thinking and calls; none where there are only results."""
    blocks = [placed.block for placed in said.blocks]
    parts = [
        text_part(placed.block.text)
        if isinstance(placed.block, TextBlock)
        else image_part(_source(placed.block, placed.where))
        for placed in said.blocks
        if isinstance(placed.block, TextBlock | ImageBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    calls = [tool_call(block.id, block.name, block.input) for block in uses]
    if not parts and any(isinstance(block, ToolResultBlock) for block in blocks):
        return []
    optional = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
    turn: Turn = {"role": said.role, "content": content_of(parts)}
    return [turn | {name: value for name, value in optional.items() if value}]


def _source(block: ImageBlock, where: str) -> ImageSource:
    """Raises FieldError: the image's source is unknown, or can't be read."""
    param, kind = f"{where}.source", block.source.get("type")
    known = _SOURCES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise field_error(
            f"{param}.type",
            f"is {shown(kind)}; it may be base64 or url",
            code="unsupported",
        )
    source = read_part(block.source, known, param)
    if isinstance(source, ImageFile):
        return of_base64(source.data, f"{param}.data")
    return of_url(source.url, f"{param}.url")


def _parts(content: str | Blocks, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result: text, or with images its parts."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(content):
        param = f"{where}[{place}]"
        if block.get("type") == "image":
            parts.append(image_part(_source(read_part(block, ImageBlock, param), param)))
        else:
            parts.append(text_part(_text([block], where, first=place)))
    return content_of(parts)


def _text(content: str | Blocks, where: str, first: int = 0) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, block in enumerate(content, first):
        param = f"{where}[{place}]"
        if block.get("type") != "text":
            raise _unsupported(block.get("type"), param)
        texts.append(read_part(block, TextBlock, param).text)
    return "\n".join(texts)
