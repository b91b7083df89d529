"""From Anthropic's messages to a conversation as chat templates read it."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from ....config import shown
from ....text.messages import ToolUse
from ...server.http import field_error
from ...serving.chat_templates import Conversation, Reasoning, Turn
from ...serving.fields import ignore, read_part
from ...serving.images import content_of
from ...serving.tools import tool_call
from .bodies import (
    AnthropicMessage,
    Blocks,
    CompactionBlock,
    CountBody,
    DocumentBlock,
    Effort,
    ImageBlock,
    LeftOutBlock,
    Role,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChangeBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from .content import Block, parts_of, read_block, result_parts, text_of
from .signatures import thinking_of
from .tools import ToolChange, use_of


class _Placed(NamedTuple):
    """A block, with its path in the body."""

    block: Block
    where: str


class _Said(NamedTuple):
    """Adjacent messages of one role."""

    role: Role
    blocks: list[_Placed]


class _History(NamedTuple):
    """The messages of a call.

    Attributes:
        said: In order.
        changes: The changes of the offered tools.
        effort: That of the last system message with one; None for that of the call.
    """

    said: list[_Said]
    changes: list[ToolChange]
    effort: Effort | None


OpenCalls = dict[str, tuple[str, str]]
"""Tool calls without a result, by id: the tool's name, and the call's path in the body."""


def read_conversation(body: CountBody, tenant: str) -> tuple[Conversation, ToolUse]:
    """Return the conversation for the chat template, without tools; and the use of tools.

    Args:
        tenant: The one for whom signatures were made.

    Raises:
        FieldError: A message is invalid, holds no text, or calls tools without results; a tool is
            invalid.
    """
    if not body.messages:
        raise field_error("messages", "is empty; give at least one")
    history = _history(body.messages)
    turns: list[Turn] = []
    if body.system:
        turns.append({"role": "system", "content": text_of(body.system, "system")})
    turns += _turns(history.said, tenant)
    if not turns:
        raise field_error("messages", "have no content; give at least one text")
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
    conversation = Conversation(
        turns=turns,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        variables=body.chat_template_kwargs,
        reasoning=_reasoning(body, history.effort),
    )
    return conversation, use_of(body, history.changes)


def _reasoning(body: CountBody, later: Effort | None) -> Reasoning | None:
    """Return the reasoning for the chat template; None leaves it to the template."""
    thinking, effort = body.thinking, later or body.output_config.effort
    if thinking is None and effort is None:
        return None
    return Reasoning(
        on=None if thinking is None else thinking.type != "disabled",
        required=thinking is not None and thinking.type == "enabled",
        effort=effort,
        on_param="thinking",
        effort_param="output_config.effort",
    )


# --- messages -------------------------------------------------------------------------------------


def _history(messages: Blocks) -> _History:
    """Read the messages, and join adjacent ones of one role."""
    said: list[_Said] = []
    changes: list[ToolChange] = []
    effort: Effort | None = None
    read = [
        read_part(given, AnthropicMessage, f"messages[{place}]")
        for place, given in enumerate(messages)
    ]
    last_user = max((place for place, each in enumerate(read) if each.role == "user"), default=-1)
    for place, message in enumerate(read):
        where = f"messages[{place}]"
        if message.role == "system":
            effort = message.output_config.effort or effort
            if message.clear_at == "next_user_message" and place < last_user:
                message = replace(message, content=None)
        elif message.content is None:
            raise field_error(f"{where}.content", "is missing; give a text, or blocks")
        blocks = _blocks(message, f"{where}.content")
        kept: list[_Placed] = []
        for placed in blocks:
            if isinstance(placed.block, CompactionBlock) and placed.block.content:
                # It stands for all before it.
                said, kept = [], []
                summary = TextBlock(type="text", text=placed.block.content)
                said.append(_Said("user", [placed._replace(block=summary)]))
            elif _is_kept(placed, changes):
                kept.append(placed)
        if blocks and not kept:
            continue
        if message.role == "system" and not kept:
            continue
        if said and said[-1].role == message.role != "system":
            said[-1].blocks.extend(kept)
        else:
            said.append(_Said(message.role, kept))
    return _History(said, changes, effort)


def _blocks(message: AnthropicMessage, where: str) -> list[_Placed]:
    if message.content is None:
        return []
    if isinstance(message.content, str):
        return [_Placed(TextBlock(type="text", text=message.content), where)]
    return [
        _Placed(read_block(given, message.role, f"{where}[{place}]"), f"{where}[{place}]")
        for place, given in enumerate(message.content)
    ]


def _is_kept(placed: _Placed, changes: list[ToolChange]) -> bool:
    """Return whether a block is a part of the conversation; add its changes of tools."""
    block, where = placed
    if isinstance(block, ToolChangeBlock):
        tool, offered = block.tool, block.type == "tool_addition"
        definition = tool.definition if tool.type == "tool_definition" else None
        name = tool.name if definition is None else str(definition.get("name", ""))
        changes.append(ToolChange(name, offered, where, definition))
        return False
    if isinstance(block, LeftOutBlock | CompactionBlock):
        ignore(where)
        return False
    if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
        for place, each in enumerate(block.content):
            if each.get("type") == "tool_reference":
                param = f"{where}.content[{place}]"
                name = str(each.get("tool_name", ""))
                changes.append(ToolChange(name, True, param, must_exist=False))
    return True


# --- turns ----------------------------------------------------------------------------------------


def _turns(history: list[_Said], tenant: str) -> list[Turn]:
    turns: list[Turn] = []
    calls: OpenCalls = {}
    for said in history:
        if said.role == "user":
            turns += _results(said, calls)
        if said.role != "system":
            _check_answered(calls)
        turns += _turn(said, tenant)
        for block, where in said.blocks:
            if isinstance(block, ToolUseBlock):
                if block.id in calls:
                    param = f"{where}.id"
                    raise field_error(
                        param,
                        "is that of another tool_use",
                        remedy="give each tool_use an id of its own",
                    )
                calls[block.id] = block.name, where
    _check_answered(calls)
    return turns


def _check_answered(calls: OpenCalls) -> None:
    """Raises FieldError: a call has no result."""
    for _, where in calls.values():
        raise field_error(
            where, ": the message after a tool_use has its tool_result; there is none; add one"
        )


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
                "of that id without a result; send the id of a tool_use of that message",
            )
        name, _ = calls.pop(call_id)
        content = content_of(result_parts(block.content, f"{where}.content"))
        if block.is_error and isinstance(content, str) and not content.lower().startswith("error"):
            # Templates have no field for errors.
            content = f"Error: {content}" if content else "Error"
        turns.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": name})
    return turns


def _turn(said: _Said, tenant: str) -> list[Turn]:
    """Return the turn of text, thinking and calls; none where there are only results."""
    parts: list[dict[str, Any]] = []
    for block, where in said.blocks:
        if isinstance(block, TextBlock | ImageBlock | DocumentBlock | SearchResultBlock):
            parts += parts_of(block, where)
    blocks = [placed.block for placed in said.blocks]
    thoughts = [thinking_of(each, tenant) for each in blocks if isinstance(each, ThinkingBlock)]
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    calls = [tool_call(block.id, block.name, block.input) for block in uses]
    if not parts and any(isinstance(block, ToolResultBlock) for block in blocks):
        return []
    optional = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
    turn: Turn = {"role": said.role, "content": content_of(parts)}
    return [turn | {name: value for name, value in optional.items() if value}]
