"""Conversations as prompts, by the model's chat template in worker processes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import anyio.to_thread
import msgspec

from ...config import field_name
from ...text.chat_template import TemplateWorkers, as_contents_read, render, template_of
from ...text.messages import EFFORT, SWITCHES, MessageFormat, Tool, asked_to_reason, opening_of
from ..server.http import FieldError
from .images import sources_in, text_in, without_sources
from .turns import Turns
from .words import LazyWords, Words

AT_ONCE = 3
"""Templates that run at a time. Each keeps a core busy, and one tenant alone has two."""

Turn = dict[str, Any]
"""A message as most templates read it."""

_PLACE = "conversation"
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Templates' names for an assistant's reasoning, the most usual first."""

_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
_SHORT_ID = 9
_CODE = re.compile(r"\{%(.*?)%\}|\{\{(.*?)\}\}", re.DOTALL)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """A call's request for reasoning, from any interface.

    Attributes:
        on: Whether to reason; None if the call doesn't say.
        effort: The effort, in templates' words; None if the call doesn't say.
        on_param: The call's field for `on`.
        effort_param: The call's field for `effort`; may be the same.
    """

    on: bool | None = None
    effort: str | None = None
    on_param: str = "reasoning_effort"
    effort_param: str = "reasoning_effort"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a chat template.

    Attributes:
        turns: The messages. A content is a text, or with images a list of parts (`serving.images`).
        add_generation_prompt: Whether the prompt ends with the begin of the assistant's turn.
        continue_final_message: Whether the prompt ends within the last message, to be continued.
        variables: Other variables of the template.
        tools: Tools that the model may call.
        reasoning: None leaves reasoning to the template.
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
        prompt: Its tokens; with images its text, with one placeholder for each.
        opening: Its part of the assistant's turn, for `Reading`.
    """

    prompt: str | tuple[int, ...]
    opening: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of a prompt without images."""
        assert not isinstance(self.prompt, str), "an image's tokens depend on its size"
        return self.prompt


class ChatTemplates:
    """Renders conversations, a few at a time."""

    def __init__(
        self,
        words: LazyWords,
        max_model_len: Callable[[], Awaitable[int]],
        timeout_s: float,
        turns: Turns,
    ) -> None:
        """Args: the tokenizer, the most tokens of a prompt, the time limit, and `AT_ONCE` places
        shared by tenants."""
        self._words = words
        self._max_model_len = max_model_len
        self._workers = TemplateWorkers(AT_ONCE, timeout_s)
        self._turns = turns
        self._threads = anyio.CapacityLimiter(AT_ONCE)

    async def start(self) -> None:
        """Start the processes, unless they run. They take seconds to load Transformers."""
        if not self._workers.started:
            await anyio.to_thread.run_sync(self._workers.start, limiter=anyio.CapacityLimiter(1))

    async def render(self, conversation: Conversation, tenant: str) -> Rendered:
        """Return the prompt of a conversation. The template writes its own special tokens.

        Args:
            tenant: A tenant with slow templates doesn't delay other tenants.

        Raises:
            RequestError: no_chat_template, invalid_messages, chat_template_failed, unsupported,
                prompt_too_long.
            EngineError: overloaded.
        """
        await self.start()  # while this process loads the tokenizer
        words, max_model_len = await self._words.required(), await self._max_model_len()
        form = await self._words.message_format()

        def work() -> Rendered:
            # Before the template, which may drop text, and after it, which may add text.
            sent = "".join(map(text_in, conversation.turns))
            words.check_fits(sent, max_model_len)
            text = self._rendered(words, conversation, form)
            words.check_fits(text, max_model_len)
            prompt: str | tuple[int, ...] = text
            if not sources_in(conversation.turns):
                prompt = words.token_ids(text, add_special=False)
            begun = conversation.add_generation_prompt or conversation.continue_final_message
            opening = opening_of(form, text) if form is not None and begun else ""
            return Rendered(prompt, opening)

        with self._turns.wait(tenant, [_PLACE]) as call:
            await call.take(_PLACE)
            try:
                return await anyio.to_thread.run_sync(work, limiter=self._threads)
            finally:
                self._turns.give_back(tenant)

    def _rendered(
        self, words: Words, conversation: Conversation, form: MessageFormat | None
    ) -> str:
        tokenizer = words.tokenizer
        tools = [tool.as_templates_read() for tool in conversation.tools] or None
        template = template_of(tokenizer, tools)
        if tools and "tools" not in names_read(template):
            raise FieldError(
                "tools: the model's chat template does not read tools; leave them out, or serve a "
                "model that was trained to call them",
                param="tools",
                code="unsupported",
            )
        _check_variables(conversation.variables, template, tokenizer)
        variables = reasoning_variables(
            conversation.reasoning,
            conversation.variables,
            template,
            always=form is not None and form.reasoning is not None,
        )
        turns = as_read_by(template, [without_sources(turn) for turn in conversation.turns])
        if words.images is not None:
            turns = as_contents_read(template, turns, words.images.placeholder)
        return render(
            tokenizer,
            turns,
            tools=tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=variables,
            run=self._workers.run,
        )


def _check_variables(variables: dict[str, Any], template: str, tokenizer: Any) -> None:
    """Refuse variables that the template does not read, and parameters of Transformers' call."""
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in reserved or not name.isidentifier() or name in tokenizer.special_tokens_map:
            why = "that can't be given to a chat template"
        # A pattern of megabytes takes seconds to compile.
        elif name not in template or re.search(rf"\b{name}\b", template) is None:
            why = "the model's chat template does not read it"
        else:
            continue
        param = f"chat_template_kwargs.{field_name(name)}"
        raise FieldError(f"{param}: {why}; leave it out", param=param, code="unsupported")


# --- messages in a template's form --------------------------------------------------------------


def as_read_by(template: str, turns: list[Turn]) -> list[Turn]:
    """Return messages in the form, and with the names, that a template reads."""
    if "developer" not in template:
        turns = [
            turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns
        ]
    read = (name for name in _REASONING if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
    if (name := next(read, _REASONING[0])) != _REASONING[0]:
        turns = [
            {name if key == _REASONING[0] else key: value for key, value in turn.items()}
            for turn in turns
        ]
    # Mistral's templates take ids of nine characters only.
    return [_with_short_ids(turn) for turn in turns] if _SHORT_IDS.search(template) else turns


def _with_short_ids(turn: Turn) -> Turn:
    """Shorten ids of calls to their last letters and digits, in which the gateway's ids differ."""
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


# --- reasoning ----------------------------------------------------------------------------------


def reasoning_of_effort(effort: str | None, param: str) -> Reasoning | None:
    """Return the request of OpenAI's effort, of which "none" turns reasoning off."""
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
    """Return the names in a template's code: its variables, and Jinja's own names; no attributes,
    and nothing in strings."""
    code = " ; ".join(_TEXT.sub("''", a or b) for a, b in _CODE.findall(template))
    return frozenset(_NAME.findall(code))


def reasoning_variables(
    reasoning: Reasoning | None, given: Mapping[str, Any], template: str, always: bool
) -> dict[str, Any]:
    """Return a template's variables, with those that request reasoning.

    Args:
        given: Variables that the caller gave by name.
        always: Whether the model reasons without a request.

    Raises:
        FieldError: unsupported: the template reads no such variable. invalid_request: `given` has
            another value.
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
    """Refuse what the template can't obey. A model without reasoning obeys a request for none."""
    if reasoning.effort is not None:
        same = reasoning.on_param == reasoning.effort_param
        obeyed = EFFORT in found or (same and (bool(found) or reasoning.on is False))
        param = reasoning.effort_param
    else:
        obeyed = not reasoning.on or bool(found) or always
        param = reasoning.on_param
    if not obeyed:
        raise FieldError(
            f"{param}: the model's chat template does not read it; leave it out",
            param=param,
            code="unsupported",
        )
