"""From Anthropic's messages to a conversation as chat templates read it."""

from __future__ import annotations

from typing import Any, TypeVar

from ...config import field_name, shown
from ..chat_templates import Conversation, Turn
from ..http import FieldError, convert
from .bodies import Blocks, CountBody, Message, TextBlock

T = TypeVar("T")

_THINGS = {
    "image": "images are",
    "document": "documents are",
    "tool_use": "tools are",
    "tool_result": "tools are",
    "thinking": "thinking is",
    "redacted_thinking": "thinking is",
}


def conversation_of(body: CountBody) -> Conversation:
    """What the template is given.

    Raises:
        FieldError: A message is none, or holds what is not text.
    """
    if not body.messages:
        raise FieldError("messages is empty; give at least one", param="messages")
    turns: list[Turn] = []
    if body.system:
        turns.append({"role": "system", "content": _text(body.system, "system")})
    for place, given in enumerate(body.messages):
        turn = _turn(given, f"messages[{place}]")
        if turns and turns[-1]["role"] == turn["role"] != "system":
            # Those of one side that follow each other are one turn.
            turns[-1]["content"] = "\n".join((turns[-1]["content"], turn["content"]))
        else:
            turns.append(turn)
    continued = turns[-1]["role"] == "assistant"
    if continued and not turns[-1]["content"]:
        where = f"messages[{len(body.messages) - 1}].content"
        raise FieldError(
            f"{where} is empty; the assistant's last message is continued, so give it a text or "
            "leave it out",
            param=where,
        )
    return Conversation(
        turns=turns,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        variables=body.chat_template_kwargs,
    )


def _turn(given: dict[str, Any], where: str) -> Turn:
    message = _read(given, Message, where)
    return {"role": message.role, "content": _text(message.content, f"{where}.content")}


def _text(content: str | Blocks, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, block in enumerate(content):
        kind, param = block.get("type"), f"{where}[{place}]"
        if kind != "text":
            known = _THINGS.get(kind) if isinstance(kind, str) else None
            what = known or f"a block of type {shown(kind)} is"
            raise FieldError(
                f"{param}: {what} not supported here; send text", param=param, code="unsupported"
            )
        texts.append(_read(block, TextBlock, param).text)
    return "\n".join(texts)


def _read(given: dict[str, Any], kind: type[T], where: str) -> T:
    """A part of the body; fields that ask for what is not there are refused."""
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    for name, value in given.items():
        if name not in fields and value:
            param = f"{where}.{field_name(name)}"
            raise FieldError(f"{param} is not supported here", param=param, code="unsupported")
    known = {name: given[name] for name in fields if given.get(name) is not None}
    try:
        return convert(known, kind, where)
    except FieldError as error:
        param = f"{where}.{error.param}" if error.param else where
        raise FieldError(error.message, param=param) from None
