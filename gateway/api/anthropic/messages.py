"""From Anthropic's messages to a conversation as chat templates read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ....config import shown
from ...server.http import FieldError, field_error
from ...serving.chat_templates import Conversation, Turn
from ...serving.fields import read_part
from .bodies import (
    AnthropicMessage,
    Blocks,
    CountBody,
    RedactedThinkingBlock,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from .requests import check_thinking, reasoning_of

Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock

_THINGS = {"image": "images are", "document": "documents are"}
_TEXT: dict[str, type[Block]] = {"text": TextBlock}
_BLOCKS: dict[Role, dict[str, type[Block]]] = {
    "system": _TEXT,
    "user": _TEXT | {"tool_result": ToolResultBlock},
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
        text = _text(block.content, f"{where}.content")
        if block.is_error and not text.lower().startswith("error"):
            # Templates have no field for errors.
            text = f"Error: {text}" if text else "Error"
        turns.append({"role": "tool", "content": text, "tool_call_id": call_id, "name": name})
    return turns


def _turns(said: _Said) -> list[Turn]:
    """Return the turn of text, thinking and calls; none where there are only results."""
    blocks = [placed.block for placed in said.blocks]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if not texts and any(isinstance(block, ToolResultBlock) for block in blocks):
        return []
    optional = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
    turn: Turn = {"role": said.role, "content": "\n".join(texts)}
    return [turn | {name: value for name, value in optional.items() if value}]


def _text(content: str | Blocks, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, block in enumerate(content):
        param = f"{where}[{place}]"
        if block.get("type") != "text":
            raise _unsupported(block.get("type"), param)
        texts.append(read_part(block, TextBlock, param).text)
    return "\n".join(texts)
