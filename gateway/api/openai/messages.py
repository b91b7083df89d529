"""From OpenAI's messages and tools to what chat templates read.

Tools of chats nest a function in a tool; those of responses don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from ....config import shown
from ....text.conversation import arguments_of as called_with
from ....text.conversation import check_results
from ....text.messages import MessageFormat, Tool, ToolUse, tool_of, tools_of
from ...server.http import field_error
from ...serving.chat_templates import Conversation, Reasoning, Turn, reasoning_of_effort
from ...serving.documents import tagged, text_of_file
from ...serving.fields import read_part
from ...serving.images import content_of as joined_content
from ...serving.images import image_part, of_url, sources_in, text_part, unsupported_here
from ...serving.tools import tool_call, tool_use_of, with_allowed, with_named
from .bodies import (
    CACHE_MARKS,
    CalledFunction,
    ChatBody,
    ChatFilePart,
    FilePart,
    ImageUrlPart,
    OpenAIMessage,
    RefusalPart,
    TextPart,
    Thought,
    TokenizeBody,
)
from .custom_tools import INPUT, CustomFormat, custom_tool

_IMAGES = frozenset({"image_url", "input_image"})
THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})
"""Types of parts with an assistant's reasoning."""

_ROLES = {"function": "tool"}


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
            "begins one after it; ask for one of them",
        )
    if not body.messages:
        raise field_error("messages", "is empty; give at least one")
    turns = [turn_of(message, f"messages[{place}]") for place, message in enumerate(body.messages)]
    check_results(turns)
    if body.continue_final_message and not turns[-1]["content"]:
        raise field_error(
            "continue_final_message", "needs a last message with text that it can go on from"
        )
    return Conversation(
        turns=turns,
        add_generation_prompt=not body.continue_final_message if begin is None else begin,
        continue_final_message=body.continue_final_message,
        variables=_variables(body),
        may_be_longer=getattr(body, "truncate_prompt_tokens", None) is not None,
        template=body.chat_template or None,
        reasoning=_requested_reasoning(body),
    )


def _requested_reasoning(body: ChatBody | TokenizeBody) -> Reasoning | None:
    """Return a chat's request for reasoning, which has several names.

    Raises:
        FieldError: Two fields contradict each other.
    """
    effort, effort_param = body.reasoning_effort, "reasoning_effort"
    if not isinstance(body, ChatBody):
        return reasoning_of_effort(effort, effort_param)
    if effort is None and body.reasoning is not None:
        effort, effort_param = body.reasoning.effort, "reasoning.effort"
    asked = {
        "enable_thinking": body.enable_thinking,
        "thinking": body.thinking.on if body.thinking else None,
        "reasoning": body.reasoning.enabled if body.reasoning else None,
        effort_param: False if effort == "none" else None,
    }
    asked = {param: on for param, on in asked.items() if on is not None}
    if len(set(asked.values())) > 1:
        param, *others = asked
        raise field_error(param, f"says otherwise than {' and '.join(others)}; give one of them")
    if not asked or effort_param in asked:
        return reasoning_of_effort(effort, effort_param)
    param, on = next(iter(asked.items()))
    return Reasoning(on=on, effort=effort, on_param=param, effort_param=effort_param)


def _variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Return the variables of the chat template.

    Raises:
        FieldError: `documents` are there twice.
    """
    given = body.chat_template_kwargs
    if not (documents := getattr(body, "documents", [])):
        return given
    if given.get("documents", documents) != documents:
        raise field_error("documents", "are others in chat_template_kwargs; give them once")
    return given | {"documents": documents}


def turn_of(given: dict[str, Any], where: str) -> Turn:
    """Return a message as templates read it: text in one piece, or with images a list of parts;
    calls' arguments as objects.

    Raises:
        FieldError: It is invalid, or has no content and is not the assistant's. `where` is its path
            in the body.
    """
    message = read_part(given, OpenAIMessage, where)
    role = _ROLES.get(message.role, message.role)
    content = message.refusal if message.content is None else message.content
    if content is None and role not in ("assistant", "tool"):
        raise field_error(
            f"{where}.content", "is missing; it is a text, or a list of parts of text; add one"
        )
    place = f"{where}.content"
    turn: Turn = {"role": role}
    if role == "assistant":
        turn["content"], thoughts = text_and_thoughts(content or "", place)
        turn["tool_calls"] = _calls_of(message, where)
        turn["reasoning_content"] = _reasoning_of(message, thoughts)
    else:
        turn["content"] = content_of(content or "", place)
    turn |= {"name": message.name, "tool_call_id": message.tool_call_id}
    return {name: value for name, value in turn.items() if value or name == "content"}


def text_and_thoughts(content: str | list[dict[str, Any]], where: str) -> tuple[str, list[Thought]]:
    """Return the text of an assistant's content, and its parts with reasoning; `where` is its path.

    Raises:
        FieldError: A part is neither.
    """
    thoughts: list[Thought] = []
    found = content_of(content, where, thoughts)
    if isinstance(found, str):
        return found, thoughts
    raise unsupported_here(sources_in([{"content": found}])[0].where)


def _reasoning_of(message: OpenAIMessage, thoughts: Sequence[Thought]) -> str:
    """Return an assistant's reasoning; several fields of a message have the same."""
    details = message.reasoning_details or ()
    return (
        message.reasoning_content
        or message.reasoning
        or message.reasoning_text
        or _joined(thoughts)
        or _joined(message.thinking_blocks or ())
        # Programs collect the pieces of a stream in this list.
        or "".join(each.written for each in details)
    )


def _joined(thoughts: Sequence[Thought]) -> str:
    return "\n".join(filter(None, (each.written for each in thoughts)))


def content_of(
    content: str | list[dict[str, Any]], where: str, thoughts: list[Thought] | None = None
) -> str | list[dict[str, Any]]:
    """Return a message's content: its text, or with images its parts.

    Args:
        where: Its path in the body.
        thoughts: Gets the parts with reasoning; None if there may be none.

    Raises:
        FieldError: A part is none of text, a text file and an image.
    """
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        kind, param = part.get("type"), f"{where}[{place}]"
        if kind in ("text", "input_text", "output_text"):
            parts.append(text_part(read_part(part, TextPart, param).text))
        elif kind == "refusal":
            parts.append(text_part(read_part(part, RefusalPart, param).refusal))
        elif thoughts is not None and isinstance(kind, str) and kind in THOUGHTS:
            thoughts.append(read_part(part, Thought, param))
        elif isinstance(kind, str) and kind in _IMAGES:
            url = read_part(part, ImageUrlPart, param).url
            parts.append(image_part(of_url(url, f"{param}.image_url")))
        elif kind == "file":
            parts += _file(read_part(part, ChatFilePart, param).file, f"{param}.file")
        elif kind == "input_file":
            parts += _file(read_part(part, FilePart, param), param)
        else:
            raise field_error(
                param,
                f": a part of type {shown(kind)} is not supported here; send text, text files or "
                "images",
                code="unsupported",
            )
    return joined_content(parts)


def _file(file: FilePart, where: str) -> list[dict[str, Any]]:
    text = text_of_file(file.file_data, f"{where}.file_data")
    return tagged("document", {"title": file.filename}, [text_part(text)])


def _calls_of(message: OpenAIMessage, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message, with their arguments as objects."""
    calls: list[tuple[str | None, CalledFunction, str]] = []
    for place, call in enumerate(message.tool_calls or ()):
        param, called = f"{where}.tool_calls[{place}]", call.function
        if call.custom is not None:
            called = CalledFunction(name=call.custom.name, arguments={INPUT: call.custom.input})
        elif called is None:
            raise field_error(param, "has no 'function'; give it with its name and arguments")
        calls.append((call.id, called, f"{param}.function"))
    if message.function_call is not None and not calls:
        calls.append((None, message.function_call, f"{where}.function_call"))
    # Without additions of clients' libraries, which templates would write out.
    return [
        tool_call(call_id, called.name, arguments_of(called.arguments, f"{path}.arguments"))
        for call_id, called, path in calls
    ]


def arguments_of(given: str | dict[str, Any] | None, param: str) -> dict[str, Any]:
    """Return a call's arguments, an object or its JSON; none for null and blank.

    Raises:
        FieldError: They are no object. `param` is their path in the body.
    """
    try:
        return called_with(given)
    except ValueError:
        raise field_error(param, "must be an object, as JSON") from None


_CHOICE, _CUSTOM = "tool_choice", "custom"


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NestedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a chat."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS

    type: Literal["function"]
    function: Function


class FlatTool(Function, frozen=True, kw_only=True):
    """A tool of a response, and of some programs' chats: the function itself."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] = []

    @property
    def function(self) -> Function:
        return self


class NestedGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar of a custom tool's input."""

    definition: str
    syntax: Literal["lark", "regex"]


class NestedCustomFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a custom tool's input, in a chat."""

    type: Literal["text", "grammar"]
    grammar: NestedGrammar | None = None


class CustomFields(msgspec.Struct, frozen=True, kw_only=True):
    """A custom tool of a chat."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS

    name: str
    description: str | None = None
    format: NestedCustomFormat | None = None


class NestedCustom(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a chat that takes a text."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS

    type: Literal["custom"]
    custom: CustomFields


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function in a choice, by its name. Its parameters stand in the call's tools."""

    NEUTRAL: ClassVar = CACHE_MARKS | dict.fromkeys(
        ("description", "parameters", "strict"), "those in `tools` count"
    )

    name: str


class NamedCustom(msgspec.Struct, frozen=True, kw_only=True):
    """A custom tool in a chat's choice."""

    OPEN: ClassVar = True

    type: Literal["custom"]
    custom: NamedFunction


class NestedNamed(msgspec.Struct, frozen=True, kw_only=True):
    """A tool in a chat's choice."""

    NEUTRAL: ClassVar = CACHE_MARKS

    type: Literal["function"]
    function: NamedFunction


class ChoiceMode(msgspec.Struct, frozen=True, kw_only=True):
    """A choice by its mode alone, in an object."""

    type: Literal["none", "auto", "required"]


class FlatNamed(NamedFunction, frozen=True, kw_only=True):
    """A flat tool in a chat's choice."""

    type: Literal["function"]

    @property
    def function(self) -> NamedFunction:
        return self


class NestedAllowed(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a chat's tools."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class NestedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A chat's choice among some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: NestedAllowed


class _Form(NamedTuple):
    """The form of tools, and the paths of fields in it."""

    tool: type[NestedTool | FlatTool]
    named: type[NestedNamed | FlatNamed]
    kind: str
    function: str


_NESTED = _Form(NestedTool, NestedNamed, ".type", ".function")
_FLAT = _Form(FlatTool, FlatNamed, "", "")


def chat_tools(given: list[dict[str, Any]], form: MessageFormat | None) -> tuple[Tool, ...]:
    """Read the tools of a chat.

    Args:
        form: The model's message format, which may enforce the inputs of custom tools.

    Raises:
        FieldError: A tool is neither a function nor a custom tool, or its name, schema or format is
            invalid.
    """
    return tools_of(_tool(tool, f"tools[{place}]", form) for place, tool in enumerate(given))


def custom_names(given: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the names of the custom tools among a chat's, which `chat_tools` has read."""
    return tuple(tool["custom"]["name"] for tool in given if tool.get("type") == _CUSTOM)


def _form_of(given: Any) -> _Form:
    """Return the form of a tool or a choice; some programs send flat ones, as in responses."""
    return _FLAT if "name" in given and "function" not in given else _NESTED


def tool_use(fields: ChatBody, form: MessageFormat | None) -> ToolUse:
    """Read which tools a model may, or has to, call.

    Args:
        form: As for `chat_tools`.

    Raises:
        FieldError: As `chat_tools`, or the choice is invalid.
    """
    use = ToolUse(tools=chat_tools(fields.tools, form), parallel=fields.parallel_tool_calls)
    match choice := fields.tool_choice:
        case None:
            return use
        case "none" | "auto" | "required":
            return tool_use_of(use.tools, choice, parallel=use.parallel)
        case {"type": "none" | "auto" | "required"}:
            mode = read_part(choice, ChoiceMode, _CHOICE).type
            return tool_use_of(use.tools, mode, parallel=use.parallel)
        case {"type": "function" | "custom"}:
            assert isinstance(choice, dict)
            param, named = _named(choice, _CHOICE)
            return with_named(use, named, param)
        case {"type": "allowed_tools"}:
            allowed = read_part(choice, NestedChoice, _CHOICE).allowed_tools
            where = f"{_CHOICE}.allowed_tools.tools"
            names = [_named(tool, f"{where}[{place}]") for place, tool in enumerate(allowed.tools)]
            return with_allowed(use, allowed.mode, names, _CHOICE)
    raise field_error(
        _CHOICE,
        f"is {shown(choice)}; it may be none, auto, required, a function, a custom tool or "
        "allowed_tools",
    )


def _named(given: dict[str, Any], where: str) -> tuple[str, str]:
    """Return the name of a tool in a choice, after its path."""
    if given.get("type") == _CUSTOM:
        return f"{where}.custom.name", read_part(given, NamedCustom, where).custom.name
    form = _form_of(given)
    return f"{where}{form.function}.name", read_part(given, form.named, where).function.name


def _tool(given: dict[str, Any], where: str, form: MessageFormat | None) -> tuple[str, Tool]:
    """Return a tool, after the path of its fields."""
    if (kind := given.get("type")) == _CUSTOM:
        custom = read_part(given, NestedCustom, where).custom
        where, wanted = f"{where}.custom", None
        if custom.format is not None and custom.format.grammar is not None:
            grammar = custom.format.grammar
            wanted = CustomFormat(
                type=custom.format.type, syntax=grammar.syntax, definition=grammar.definition
            )
        inner = f"{where}.format.grammar"
        return where, custom_tool(custom.name, custom.description or "", wanted, inner, form)
    shape = _form_of(given)
    if kind is None:
        raise field_error(
            f"{where}.type",
            "is missing",
            remedy='write {"type": "function", "function": {"name": …, "parameters": …}}',
        )
    if kind != "function":
        raise field_error(
            f"{where}{shape.kind}",
            f": a tool of type {shown(kind)} is not supported here; give tools of the types "
            "'function' and 'custom', which you call yourself",
            code="unsupported",
        )
    function = read_part(given, shape.tool, where).function
    tool = tool_of(function.name, function.description, function.parameters, function.strict)
    return f"{where}{shape.function}", tool
