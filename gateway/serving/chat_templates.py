"""Conversations as prompts, by the model's chat template.

A template comes with the model, from whoever made that, and is a program. It runs in Transformers'
sandbox, in a thread, and for a limited time.
"""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio.to_thread
import msgspec
from jinja2 import TemplateError

from ...config import AdmissionConfig, Config, RequestError, field_name, shown
from ...text.gguf import folder_of
from ...text.messages import (
    EFFORT,
    SWITCHES,
    MessageFormat,
    Tool,
    asked_to_reason,
    find_format,
    format_of,
    opening_of,
)
from ..server.http import FieldError
from .turns import Turns
from .words import LazyWords

if TYPE_CHECKING:
    from _typeshed import TraceFunction


class LazyFormat:
    """The message format, found when the tokenizer is first needed."""

    def __init__(self, config: Config, words: LazyWords) -> None:
        self._config = config
        self._words = words
        self._found: tuple[MessageFormat | None] | None = None

    async def get(self) -> MessageFormat | None:
        """None where the model has none that is known.

        Raises:
            RequestError: unsupported: there is no tokenizer.
            ConfigError: `gateway.message_format` names none.
        """
        if self._found is None:
            tokenizer = (await self._words.required()).tokenizer
            folder = folder_of(self._config.engine.model_folder)
            asked = self._config.gateway.message_format
            self._found = (format_of(tokenizer, folder, asked),)
        return self._found[0]


def check_format(config: Config) -> None:
    """Raises ConfigError: `gateway.message_format` names none, whatever the model is."""
    find_format(config.gateway.message_format, None, "", "")


Turn = dict[str, Any]
"""A message as most templates read it."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""What templates call an assistant's reasoning, the most usual first."""

_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
_SHORT_ID = 9


def as_read_by(template: str, turns: list[Turn]) -> list[Turn]:
    """The same messages, as this template wants them."""
    if "developer" not in template:
        # To a template that knows no developer, his messages are the system's.
        turns = [
            turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns
        ]
    turns = _with_reasoning(template, turns)
    # Mistral's take no others than its own.
    return [_with_short_ids(turn) for turn in turns] if _SHORT_IDS.search(template) else turns


def _with_reasoning(template: str, turns: list[Turn]) -> list[Turn]:
    read = (name for name in _REASONING if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
    name = next(read, _REASONING[0])
    if name == _REASONING[0]:
        return turns
    return [
        {name if key == _REASONING[0] else key: value for key, value in turn.items()}
        for turn in turns
    ]


def _with_short_ids(turn: Turn) -> Turn:
    """Ids of calls as the last letters and digits of theirs; ours differ in these."""
    found = dict(turn)
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


_CODE = re.compile(r"\{%(.*?)%\}|\{\{(.*?)\}\}", re.DOTALL)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How much a model is asked to reason, by whichever interface.

    Attributes:
        on: Whether it should; None where nobody said.
        effort: How much, as templates know it; None where nobody said.
        on_param: The field of the call that says whether.
        effort_param: The one that says how much; it may be the same.
    """

    on: bool | None = None
    effort: str | None = None
    on_param: str = "reasoning_effort"
    effort_param: str = "reasoning_effort"


def reasoning_of_effort(effort: str | None, param: str) -> Reasoning | None:
    """OpenAI's effort, of which "none" turns reasoning off; None where nobody said."""
    if effort is None:
        return None
    return Reasoning(on=effort != "none", effort=effort, on_param=param, effort_param=param)


def reasoning_asked(reasoning: Reasoning | None, given: Mapping[str, Any]) -> bool | None:
    """Return whether a call asks for reasoning, by its own fields or by the template's variables
    that the caller gave; None if it doesn't say."""
    if reasoning is None:
        return asked_to_reason(given)
    return asked_to_reason({EFFORT: reasoning.effort}) if reasoning.on is None else reasoning.on


@lru_cache(maxsize=64)
def names_read(template: str) -> frozenset[str]:
    """The names that stand in a template's code: variables, and what Jinja has itself. What
    follows a dot, and what stands in texts, are none."""
    code = " ; ".join(_TEXT.sub("''", a or b) for a, b in _CODE.findall(template))
    return frozenset(_NAME.findall(code))


def reasoning_variables(
    reasoning: Reasoning | None, given: Mapping[str, Any], template: str, always: bool
) -> dict[str, Any]:
    """The variables of a template, with those that make the model reason as asked.

    Args:
        given: Those that the caller gave by name.
        always: Whether the model reasons without being told.

    Raises:
        FieldError: unsupported: the template does not read them. invalid_request: those given by
            name say otherwise.
    """
    if reasoning is None:
        return dict(given)
    read = names_read(template)
    found: dict[str, Any] = {}
    if reasoning.on is not None:
        found = dict.fromkeys((name for name in SWITCHES if name in read), reasoning.on)
    if reasoning.effort is not None and EFFORT in read:
        found[EFFORT] = reasoning.effort
    _check_obeyed(reasoning, found, always=always or EFFORT in read)
    for name, value in found.items():
        if name in given and given[name] != value:
            param = f"chat_template_kwargs.{name}"
            fields = " and ".join(dict.fromkeys((reasoning.on_param, reasoning.effort_param)))
            raise FieldError(f"{param} says otherwise than {fields}; give one of them", param=param)
    return dict(given) | found


def _check_obeyed(reasoning: Reasoning, found: Mapping[str, Any], *, always: bool) -> None:
    """Who asks for no reasoning gets none of a model that has none."""
    why = "the model's chat template does not read it; leave it out"
    same = reasoning.on_param == reasoning.effort_param
    if reasoning.effort is not None:
        obeyed = EFFORT in found or (same and (bool(found) or reasoning.on is False))
        if not obeyed:
            param = reasoning.effort_param
            raise FieldError(f"{param}: {why}", param=param, code="unsupported")
    elif reasoning.on and not found and not always:
        param = reasoning.on_param
        raise FieldError(f"{param}: {why}", param=param, code="unsupported")


__all__ = ["ChatTemplates", "Conversation", "Rendered", "Turn"]

AT_ONCE = 3
"""Templates that run at a time. Each thread keeps a core busy, and one tenant alone has two."""

_THE_ONE = "conversation"
"""Of what waits for a place together."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a template makes a prompt of.

    Attributes:
        turns: The messages.
        add_generation_prompt: Whether the prompt ends with the beginning of the assistant's turn.
        continue_final_message: Whether it ends within the last message, which is to be continued.
        variables: What else the template is given.
        tools: What the model is told that it may call.
        reasoning: How much it is asked to reason; None leaves that to the template.
    """

    turns: list[Turn]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    tools: tuple[Tool, ...] = ()
    reasoning: Reasoning | None = None


class Rendered(NamedTuple):
    """A conversation as a prompt.

    Attributes:
        opening: What of the assistant's turn it has, as `chat.Reading` takes it.
    """

    token_ids: tuple[int, ...]
    opening: str


class ChatTemplates:
    """Makes prompts of conversations, a few at a time."""

    def __init__(
        self,
        words: LazyWords,
        max_model_len: Callable[[], Awaitable[int]],
        timeout_s: float,
        turns: Turns,
        message_format: LazyFormat | None = None,
        max_constraint_bytes: int = AdmissionConfig().max_constraint_bytes,
    ) -> None:
        """Args: the tokenizer, tokens that a prompt may have, seconds that it may take, `AT_ONCE`
        places that tenants share, how the model writes messages, and bytes that a constraint may
        have."""
        self.max_constraint_bytes = max_constraint_bytes
        self._words = words
        self._format = message_format
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._turns = turns

    async def message_format(self) -> MessageFormat | None:
        """How the model writes messages; None where nobody knows.

        Raises:
            RequestError: unsupported: there is no tokenizer.
        """
        return await self._format.get() if self._format is not None else None

    async def render(self, conversation: Conversation, tenant: str) -> Rendered:
        """The prompt. The template writes its special tokens itself.

        Args:
            tenant: Whose it is; a tenant whose templates take long keeps none of another waiting.

        Raises:
            RequestError: no_chat_template, invalid_messages, chat_template_failed, unsupported,
                prompt_too_long.
            EngineError: overloaded.
        """
        words, max_model_len = await self._words.required(), await self._max_model_len()
        form = await self.message_format()

        def work() -> Rendered:
            # Before the template, whatever it takes of them, and after it, whatever it adds.
            sent = "".join(str(turn.get("content") or "") for turn in conversation.turns)
            words.check_fits(sent, max_model_len)
            with _limited(self._timeout_s):
                text = _render(words.tokenizer, conversation, form)
            words.check_fits(text, max_model_len)
            token_ids = words.token_ids(text, add_special=False)
            begun = conversation.add_generation_prompt or conversation.continue_final_message
            opening = opening_of(form, text) if form is not None and begun else ""
            return Rendered(token_ids, opening)

        with self._turns.wait(tenant, [_THE_ONE]) as call:
            await call.take(_THE_ONE)
            try:
                return await anyio.to_thread.run_sync(work)
            finally:
                self._turns.give_back(tenant)


def _render(tokenizer: Any, conversation: Conversation, form: MessageFormat | None) -> str:
    tools = [tool.as_templates_read() for tool in conversation.tools] or None
    template = _template_of(tokenizer, tools)
    _check_variables(conversation.variables, template, tokenizer)
    variables = reasoning_variables(
        conversation.reasoning,
        conversation.variables,
        template,
        always=form is not None and form.reasoning is not None,
    )
    try:
        text = tokenizer.apply_chat_template(
            as_read_by(template, conversation.turns),
            tools=tools,
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **variables,
        )
    # Templates refuse (TemplateError), and stumble as any program does.
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise RequestError(
            f"the model's chat template refuses these messages: {shown(str(error))}",
            code="invalid_messages",
        ) from error
    # Whatever else a stranger's program may raise.
    except Exception as error:
        raise RequestError(
            f"the model's chat template fails: {shown(str(error) or type(error).__name__)}",
            code="chat_template_failed",
        ) from error
    return str(text)


def _template_of(tokenizer: Any, tools: list[dict[str, Any]] | None) -> str:
    """Raises RequestError: there is none, or none that reads tools."""
    if not tokenizer.chat_template:
        raise RequestError(
            "the model has no chat template; send the conversation as a prompt, to /v1/completions",
            code="no_chat_template",
        )
    try:
        template = str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:
        # Several, and none of them the default.
        raise RequestError(
            f"the model's chat template can't be chosen: {shown(str(error))}",
            code="no_chat_template",
        ) from None
    if tools and "tools" not in names_read(template):
        raise FieldError(
            "tools: the model's chat template does not tell it of any; leave them out, or serve a "
            "model that was trained to call them",
            param="tools",
            code="unsupported",
        )
    return template


def _check_variables(variables: dict[str, Any], template: str, tokenizer: Any) -> None:
    """Refuses what the template would not look at, and what says how Transformers calls it."""
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in taken or not name.isidentifier() or name in tokenizer.special_tokens_map:
            why = "that can't be given to a chat template"
        # A pattern of megabytes takes seconds to compile.
        elif name not in template or re.search(rf"\b{name}\b", template) is None:
            why = "the model's chat template does not read it"
        else:
            continue
        param = f"chat_template_kwargs.{field_name(name)}"
        raise FieldError(f"{param}: {why}; leave it out", param=param, code="unsupported")


# --- a limit on time --------------------------------------------------------------------------

_TEMPLATE = "<template>"
"""The file that Jinja compiles a template's code for, when that comes from none."""


class _TimeOver(BaseException):
    """Not an Exception, which a template's filters might catch."""


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Stops the templates of this thread after so many seconds, when they come to their next line.

    By a trace function, since it ends with its thread's work. An exception that another thread
    sends (PyThreadState_SetAsyncExc) would leave the interpreter looking for it for ever, also when
    it is taken back: everything is slower then, and under any other trace Python 3.11 hangs.

    Raises:
        RequestError: chat_template_failed.
    """
    deadline = time.monotonic() + limit_s

    def on_line(frame: FrameType, event: str, argument: object) -> TraceFunction:
        if time.monotonic() > deadline:
            raise _TimeOver
        return on_line

    def on_call(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        return on_line if frame.f_code.co_filename == _TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    except _TimeOver:
        raise RequestError(
            f"the model's chat template took longer than {limit_s:g} s "
            "(gateway.template_timeout_s) for these messages; send fewer",
            code="chat_template_failed",
        ) from None
    finally:
        sys.settrace(before)
