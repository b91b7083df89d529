"""From OpenAI's messages to a conversation as chat templates read it."""

from __future__ import annotations

from typing import Any

import msgspec

from ....config import shown
from ...server.http import field_error
from ...serving.chat_templates import Conversation, Turn, reasoning_of_effort
from ...serving.fields import read_part
from ...serving.tools import tool_call
from .bodies import CalledTool, ChatBody, OpenAIMessage, RefusalPart, TextPart, TokenizeBody

_IMAGES = frozenset({"image", "image_url", "input_image"})


def conversation_of(body: ChatBody | TokenizeBody) -> Conversation:
    """Return the conversation for the chat template, without tools.

    Raises:
        FieldError: A message is invalid, or holds no text; the options contradict each other.
    """
    begin = body.add_generation_prompt
    if begin and body.continue_final_message:
        raise field_error(
            "continue_final_message",
            "goes on within the last message, and add_generation_prompt "
            "begins one behind it; ask for one of them",
        )
    if not body.messages:
        raise field_error("messages", "is empty; give at least one")
    turns = [turn_of(message, f"messages[{place}]") for place, message in enumerate(body.messages)]
    if body.continue_final_message and not turns[-1]["content"]:
        raise field_error(
            "continue_final_message", "needs a last message with text that it can go on from"
        )
    return Conversation(
        turns=turns,
        add_generation_prompt=not body.continue_final_message if begin is None else begin,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
        reasoning=reasoning_of_effort(body.reasoning_effort, "reasoning_effort"),
    )


def turn_of(given: dict[str, Any], where: str) -> Turn:
    """Return a message as templates read it: text in one piece, calls' arguments as objects.

    Raises:
        FieldError: It is invalid, or holds no text. `where` is its path in the body.
    """
    message = read_part(given, OpenAIMessage, where)
    calls = [
        _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
    ]
    content = message.refusal if message.content is None else message.content
    reasoning = message.reasoning_content or message.reasoning
    if content is None and not (message.role == "assistant" and (calls or reasoning)):
        raise field_error(
            f"{where}.content", "is missing; it is a text, or a list of parts of text"
        )
    turn: Turn = {"role": message.role, "content": text_of(content or "", f"{where}.content")}
    optional = {
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
    }
    return turn | {name: value for name, value in optional.items() if value is not None}


def text_of(content: str | list[dict[str, Any]], where: str) -> str:
    """Return the text of a message's content; `where` is its path in the body.

    Raises:
        FieldError: A part is no text.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        kind, param = part.get("type"), f"{where}[{place}]"
        if kind in ("text", "input_text", "output_text"):
            texts.append(read_part(part, TextPart, param).text)
            continue
        if kind == "refusal":
            texts.append(read_part(part, RefusalPart, param).refusal)
            continue
        what = (
            "images are"
            if isinstance(kind, str) and kind in _IMAGES
            else f"a part of type {shown(kind)} is"
        )
        raise field_error(param, f": {what} not supported here; send text", code="unsupported")
    return "\n".join(texts)


def _call(call: CalledTool, where: str) -> dict[str, Any]:
    """Return a tool call of the history, with its arguments as an object."""
    arguments = arguments_of(call.function.arguments, f"{where}.function.arguments")
    # Without additions of clients' libraries, which templates would write out.
    return tool_call(call.id, call.function.name, arguments)


def arguments_of(given: str | dict[str, Any] | None, param: str) -> dict[str, Any]:
    """Return a call's arguments, an object or its JSON.

    Raises:
        FieldError: They are no object. `param` is their path in the body.
    """
    if isinstance(given, dict) or not given:
        return given or {}
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (ValueError, RecursionError):
        raise field_error(param, "must be an object, as JSON") from None
