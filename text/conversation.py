"""Conversations from any interface in the form that a model's chat template reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..config import FieldError, RequestError, field_error, field_name, shown
from .chat_template import Run, render, template_of
from .messages import MessageFormat, Tool, opening_of
from .template_process import render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Turn = dict[str, Any]
"""A message in OpenAI's form, as most templates read it: the arguments of calls are objects, and a
content is a text, or with images a list of parts in Transformers' form: `{"type": "text", "text":
…}` and `{"type": "image"}`."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Templates' names for an assistant's reasoning, the most usual first."""

_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
_SHORT_ID = 9
_CODE = re.compile(r"\{([%{])")
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")
_LOOPS = re.compile(r"for\s+\w+\s+in\s+\w+(?:\.content|\[['\"]content['\"]\])")
_IS_TEXT = re.compile(r"\bis\s+(?:not\s+)?string\b")


class RenderedConversation(NamedTuple):
    """A conversation as a text.

    Attributes:
        text: With the special tokens that the template writes.
        opening: Its part of the assistant's message, for `Reading`; "" in an unknown format.
    """

    text: str
    opening: str


def render_conversation(
    tokenizer: PreTrainedTokenizerFast,
    turns: Iterable[Turn],
    *,
    placeholder: str | None,
    form: MessageFormat | None = None,
    tools: Iterable[Tool] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    where: str = "",
    template: str | None = None,
    run: Run = render_template,
) -> RenderedConversation:
    """Render a conversation: of requests on the bus, of calls over HTTP, and in Python.

    Args:
        placeholder: An image in a text; None for a model without images.
        form: The format of the model's messages, if known.
        tools: Functions that the model may call.
        add_generation_prompt, continue_final_message, variables, template, run: As for `render`.
        where: The path of the variables in the request, with a dot at its end.

    Raises:
        FieldError: unsupported: the template reads no tools, or no such variable;
            images_not_supported.
        RequestError: As `render`; messages of one role that follow each other are joined where the
            template refuses them.
    """
    known = tools_read(tools)
    read_by = template_of(tokenizer, known, template)
    check_variables(variables or {}, read_by, tokenizer, where)
    if known and "tools" not in names_read(read_by):
        raise field_error(
            "tools",
            f": the {'model' if template is None else 'call'}'s chat template does not read tools; "
            "leave them out, or serve a model that was trained to call them",
            code="unsupported",
        )
    render_turns = partial(
        render,
        tokenizer,
        tools=known,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        template=template,
        run=run,
    )
    ids = form.call_ids if form else ""

    def render_in(shape: Iterable[Turn]) -> str:
        read = as_read_by(read_by, shape, placeholder)
        return render_turns(with_call_ids(read, ids) if ids else read)

    text = _in_a_form_that_is_taken(list(turns), render_in)
    begun = add_generation_prompt or continue_final_message
    return RenderedConversation(text, opening_of(form, text) if form and begun else "")


def tools_read(tools: Iterable[Tool]) -> list[dict[str, Any]] | None:
    """Return tools as templates read them; None without tools."""
    return [tool.as_templates_read() for tool in tools] or None


@lru_cache(maxsize=64)
def names_read(template: str) -> frozenset[str]:
    """Return the names in a template's code: its variables, and Jinja's own names; no attributes,
    and nothing in strings."""
    code = " ; ".join(_TEXT.sub("''", each) for each in _code_in(template))
    return frozenset(_NAME.findall(code))


def _code_in(template: str) -> Iterator[str]:
    """Yield what stands between a template's marks of code, in linear time."""
    at, last = 0, {end: template.rfind(end) for end in ("%}", "}}")}
    while (found := _CODE.search(template, at)) is not None:
        at, end = found.end(), "%}" if found[1] == "%" else "}}"
        if at <= last[end]:
            close = template.find(end, at)
            yield template[at:close]
            at = close + len(end)


def check_variables(
    variables: Mapping[str, Any], template: str, tokenizer: PreTrainedTokenizerFast, where: str = ""
) -> None:
    """Refuse variables that the template does not read, and parameters of Transformers' call.

    Args:
        where: The path of the variables in the request, with a dot at its end.

    Raises:
        FieldError: unsupported.
    """
    for name in variables:
        if not may_be_given(name, tokenizer):
            why = "that can't be given to a chat template"
        elif not reads(template, name):
            why = "the model's chat template does not read it"
        else:
            continue
        param = f"{where}{field_name(name)}"
        raise FieldError(f"{param}: {why}; leave it out", param=param, code="unsupported")


def may_be_given(name: str, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a variable may have this name: no parameter of Transformers' call has it."""
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    return name.isidentifier() and name not in reserved and name not in tokenizer.special_tokens_map


def reads(template: str, name: str) -> bool:
    """Return whether a template reads a variable of a valid name."""
    # A pattern of megabytes takes seconds to compile.
    return name in template and re.search(rf"\b{name}\b", template) is not None


# --- messages -----------------------------------------------------------------------------------


def arguments_of(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a call's arguments, an object or its JSON; none for null and blank.

    Raises:
        ValueError: They are no object.
    """
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    try:
        return msgspec.json.decode(given, type=dict[str, Any] | None) or {} if given.strip() else {}
    except RecursionError as error:
        raise ValueError("the arguments are nested too deeply") from error


def check_results(turns: Sequence[Turn]) -> None:
    """Check that each tool's result belongs to a call of the assistant's message before it, which
    only other results may follow in between.

    Results may come in any order. One without an id belongs to the first open call.

    Raises:
        FieldError: invalid_messages.
    """
    calls: list[str | None] = []
    for place, turn in enumerate(turns):
        if turn["role"] != "tool":
            calls = [call.get("id") or None for call in turn.get("tool_calls") or ()]
            continue
        call_id = turn.get("tool_call_id") or None
        if call_id in calls:
            calls.remove(call_id)
        elif call_id is None and calls:
            del calls[0]
        else:
            param = f"messages[{place}]"
            if call_id is None:
                why = ": a tool's result needs an open call in the assistant's message before it"
            else:
                param += ".tool_call_id"
                why = (
                    f"is {shown(call_id)}, and the assistant's message before it has no open "
                    "call of that id"
                )
            raise field_error(
                param,
                f"{why}; send that message with its tool_calls, or leave the result out",
                code="invalid_messages",
            )


def as_read_by(template: str, turns: Iterable[Turn], placeholder: str | None) -> list[Turn]:
    """Return messages in the form, and with the names, that a template reads.

    Raises:
        FieldError: images_not_supported: an image, without a placeholder.
    """
    found = [dict(turn) for turn in turns]
    read = (name for name in _REASONING if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
    reasoning = next(read, _REASONING[0])
    # Mistral's templates take ids of nine characters only.
    shortens = _SHORT_IDS.search(template) is not None
    for place, turn in enumerate(found):
        if turn["role"] == "developer" and "developer" not in template:
            turn["role"] = "system"
        if _REASONING[0] in turn:
            turn[reasoning] = turn.pop(_REASONING[0])
        if shortens:
            turn |= _short_ids(turn)
        if "content" in turn:
            turn["content"] = _content(template, turn["content"], placeholder, place)
    return found


# --- conversations that templates refuse ----------------------------------------------------------

_INSTRUCTIONS = ("system", "developer")


def _in_a_form_that_is_taken(turns: list[Turn], render_turns: Callable[[list[Turn]], str]) -> str:
    """Return a rendered conversation, in the first form in which the template renders all of it.

    Many templates read a system message at the beginning only, or none: they refuse others, or
    leave them out. Many refuse two messages of one role in a row.

    Raises:
        RequestError: As `render`, of the conversation as it came.
    """
    later = [text_of(turn).strip() for turn in turns[1:] if turn["role"] in _INSTRUCTIONS]
    refusal: RequestError | None = None
    texts: list[str] = []
    tried: list[Turn] = []
    for form in _forms(turns):
        if form == tried:
            continue
        tried = form
        try:
            texts.append(render_turns(form))
        except RequestError as error:
            refusal = refusal or error
            # A template that takes its whole time is not run again and again.
            if error.code != "invalid_messages":
                break
            continue
        if all(each in texts[-1] for each in later):
            return texts[-1]
    if refusal is not None and not texts:
        raise refusal
    # A template that changes texts.
    return texts[:2][-1]


def _forms(turns: list[Turn]) -> Iterator[list[Turn]]:
    """Return a conversation as it is, then in forms for templates that refuse that."""
    yield turns
    turns = with_instructions_inside(turns)
    yield turns
    yield joined_turns(turns)
    yield joined_turns(
        [turn | {"role": "user"} if turn["role"] in _INSTRUCTIONS else turn for turn in turns]
    )


def joined_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return messages of which those of one role that follow each other are one, with an empty line
    between their texts. Calls and their results stay apart."""
    found: list[Turn] = []
    for turn in turns:
        last = found[-1] if found else {}
        plain = all(each.keys() == {"role", "content"} for each in (last, turn))
        if plain and last["role"] == turn["role"]:
            found[-1] = last | {"content": _joined(last["content"], turn["content"])}
        else:
            found.append(turn)
    return found


def with_call_ids(turns: Iterable[Turn], syntax: str) -> list[Turn]:
    """Return messages whose calls have ids as the model writes them: its own stay, others are made
    of the name and the number of the call.

    Args:
        syntax: As in `MessageFormat.call_ids`.
    """
    found, ids, numbers = list[Turn](), dict[Any, str](), count()
    for turn in turns:
        if calls := turn.get("tool_calls"):
            made = [
                call | {"id": _own_id(call.get("id"), call["function"]["name"], number, syntax)}
                for call, number in zip(calls, numbers, strict=False)
            ]
            ids = {call.get("id"): own["id"] for call, own in zip(calls, made, strict=True)}
            found.append(turn | {"tool_calls": made})
        elif turn.get("tool_call_id") in ids:
            found.append(turn | {"tool_call_id": ids[turn["tool_call_id"]]})
        else:
            found.append(turn)
    return found


def _own_id(given: Any, name: str, number: int, syntax: str) -> str:
    own = syntax.replace("{name}", name)
    pattern = re.escape(own).replace(re.escape("{number}"), "[0-9]+")
    if isinstance(given, str) and re.fullmatch(pattern, given) is not None:
        return given
    return own.replace("{number}", str(number))


def text_of(turn: Turn) -> str:
    """Return the text of a turn, as one of the template's."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def with_instructions_inside(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with at most one system message, the first one.

    Those at the beginning are joined. A later one stands at the end of the message of the user, or
    of the tool's result, before it, in the tags that models know from agents' reminders; after one
    of the assistant it stands before the user's next message.
    """
    found: list[Turn] = []
    began = False  # whether the last turn of the user holds instructions alone
    for turn in turns:
        last = found[-1] if found else None
        if turn["role"] not in _INSTRUCTIONS:
            if began and last is not None and turn["role"] == "user":
                last["content"] = _joined(last["content"], turn.get("content") or "")
            else:
                found.append(dict(turn))
            began = False
        elif last is None:
            found.append(dict(turn))
        elif last["role"] in _INSTRUCTIONS:
            last["content"] = _joined(last["content"], text_of(turn))
        else:
            note = f"<system-reminder>\n{text_of(turn)}\n</system-reminder>"
            if last["role"] == "assistant":
                found.append({"role": "user", "content": note})
                began = True
            else:
                last["content"] = _joined(last.get("content") or "", note)
    return found


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}" if first else second
    parts = [
        [{"type": "text", "text": each}] if isinstance(each, str) else [*each]
        for each in (first, second)
    ]
    return [*parts[0], *parts[1]]


def _short_ids(turn: Turn) -> Turn:
    """Return ids of calls as their last letters and digits, in which the gateway's ids differ."""
    found: Turn = {}
    if calls := turn.get("tool_calls"):
        found["tool_calls"] = [
            call | {"id": _short(call["id"])} if isinstance(call.get("id"), str) else call
            for call in calls
        ]
    if isinstance(turn.get("tool_call_id"), str):
        found["tool_call_id"] = _short(turn["tool_call_id"])
    return found


def _short(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-_SHORT_ID:].rjust(_SHORT_ID, "0")


def _content(
    template: str, content: str | Sequence[Mapping[str, Any]], placeholder: str | None, place: int
) -> Any:
    """Return a content in the form that a template reads.

    Templates of vision models loop over a content's parts, some take texts as well, and others
    take texts only.
    """
    loops = placeholder is not None and _LOOPS.search(template) is not None
    if isinstance(content, str):
        if loops and not _IS_TEXT.search(template):
            return [{"type": "text", "text": content}]
        return content
    if placeholder is None and any(part["type"] == "image" for part in content):
        raise field_error(
            f"messages[{place}].content",
            "has images, and this model takes none; leave them out, or ask another model",
            code="images_not_supported",
        )
    if loops:
        return list(content)
    return "\n".join(
        placeholder or "" if part["type"] == "image" else part["text"] for part in content
    )
