"""Conversations as prompts, by the model's or the call's chat template in worker processes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio.to_thread
import msgspec

from ...config import Config, RequestError, field_error, field_name
from ...text.chat_template import TemplateWorkers, template_of
from ...text.conversation import (
    RenderedConversation,
    may_be_given,
    names_read,
    reads,
    render_conversation,
    tools_read,
)
from ...text.conversation import Turn as Turn
from ...text.messages import EFFORT, SWITCHES, MessageFormat, Tool, asked_to_reason
from ..server.http import FieldError
from .capacity import Capacity
from .fields import ignore
from .images import sources_in, text_in, without_sources
from .tokenizer import LazyTokenizer, Tokenizer

_TEMPLATE, _VARIABLES = "chat_template", "chat_template_kwargs"

AT_ONCE = 3
"""Templates that run at a time. Each keeps a core busy, and one tenant alone has two."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """A call's request for reasoning, from any interface.

    Attributes:
        on: Whether to reason; None if the call doesn't say.
        required: Whether `on` is refused where it is unknown how the model writes its reasoning.
        effort: The effort, in templates' words; None if the call doesn't say.
        on_param: The call's field for `on`.
        effort_param: The call's field for `effort`; may be the same.
    """

    on: bool | None = None
    required: bool = False
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
        may_be_longer: Whether the prompt may have more tokens than the model takes; it is cut.
        template: The call's own chat template, that `check_template` has accepted; None for the
            model's.
    """

    turns: list[Turn]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    tools: tuple[Tool, ...] = ()
    reasoning: Reasoning | None = None
    may_be_longer: bool = False
    template: str | None = None


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
        tokenizer: LazyTokenizer,
        max_model_len: Callable[[], Awaitable[int]],
        workers: TemplateWorkers,
        capacity: Capacity,
        *,
        drops_billing: bool = True,
    ) -> None:
        """Args: the tokenizer, the most tokens of a prompt, `AT_ONCE` workers, and as many slots
        shared by tenants; `drops_billing`: whether `gateway.billing_lines` is "drop"."""
        self._tokenizer = tokenizer
        self._drops_billing = drops_billing
        self.max_model_len = max_model_len
        self._workers = workers
        self._capacity = capacity
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
        conversation = self.normal(conversation)
        await self.start()  # while this process loads the tokenizer
        tokenizer, max_model_len = await self._tokenizer.required(), await self.max_model_len()
        form = await self.form(conversation.template, tenant)

        def work() -> Rendered:
            # Before the template, which may drop text, and after it, which may add text.
            sent = "".join(map(text_in, conversation.turns))
            if not conversation.may_be_longer:
                tokenizer.check_fits(sent, max_model_len)
            text, opening = self._rendered(tokenizer, conversation, form)
            if not conversation.may_be_longer:
                tokenizer.check_fits(text, max_model_len)
            prompt: str | tuple[int, ...] = text
            if not sources_in(conversation.turns):
                prompt = tokenizer.token_ids(text, add_special=False)
            return Rendered(prompt, opening)

        async with self._capacity.slot(tenant):
            try:
                return await anyio.to_thread.run_sync(work, limiter=self._threads)
            except RequestError as error:
                if conversation.template is None or error.code != "chat_template_failed":
                    raise
                raise FieldError(error.message, param=_TEMPLATE, code=error.code) from None

    async def form(self, template: str | None, tenant: str) -> MessageFormat | None:
        """Return the format of the messages that a template writes; None if it is unknown.

        Args:
            template: The call's own; None for the model's.

        Raises:
            RequestError: As `LazyTokenizer.message_format`.
            EngineError: overloaded.
        """
        if template is None:
            return await self._tokenizer.message_format()
        await self.start()
        find = await self._tokenizer.finds_format(template)
        async with self._capacity.slot(tenant):
            return await anyio.to_thread.run_sync(find, limiter=self._threads)

    def normal(self, conversation: Conversation) -> Conversation:
        """Return a conversation as it is rendered: without lines for billing, by the setting."""
        return without_billing(conversation) if self._drops_billing else conversation

    async def texts(
        self, conversations: Sequence[Conversation], tenant: str
    ) -> list[RenderedConversation]:
        """Return conversations of one template as texts, in `normal` form; arguments and errors as
        of `render`."""
        await self.start()
        tokenizer = await self._tokenizer.required()
        form = await self.form(conversations[0].template, tenant)

        def work() -> list[RenderedConversation]:
            return [self._rendered(tokenizer, each, form) for each in conversations]

        async with self._capacity.slot(tenant):
            return await anyio.to_thread.run_sync(work, limiter=self._threads)

    def _rendered(
        self, tokenizer: Tokenizer, conversation: Conversation, form: MessageFormat | None
    ) -> RenderedConversation:
        template = template_of(
            tokenizer.transformers, tools_read(conversation.tools), conversation.template
        )
        variables = reasoning_variables(
            conversation.reasoning,
            self._variables_read(conversation.variables, template, tokenizer),
            template,
            always=form is not None and form.reasoning is not None,
        )
        return render_conversation(
            tokenizer.transformers,
            map(without_sources, conversation.turns),
            placeholder=tokenizer.images.placeholder if tokenizer.images is not None else None,
            form=form,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=variables,
            where=f"{_VARIABLES}.",
            template=conversation.template,
            run=self._workers.run,
        )

    @staticmethod
    def _variables_read(
        given: Mapping[str, Any], template: str, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the variables that a template reads. Others, which programs send to every model,
        are neutral; those that no template may have are left for the error."""
        found = dict(given)
        for name in given:
            if may_be_given(name, tokenizer.transformers) and not reads(template, name):
                ignore(f"{_VARIABLES}.{field_name(name)}")
                del found[name]
        return found


# --- templates of calls -------------------------------------------------------------------------

_MOST_TEMPLATE_CHARS = 1 << 16


def check_template(template: str, config: Config) -> str | None:
    """Return a call's own chat template; None without one.

    Raises:
        FieldError: unsupported: `gateway.chat_template_in_requests` is off; invalid_request: it is
            too long.
    """
    if not template:
        return None
    if not config.gateway.chat_template_in_requests:
        raise field_error(
            _TEMPLATE,
            "is not taken here, since a template is a program; leave it out, or set "
            "gateway.chat_template_in_requests, or send the rendered text or tokens to "
            "/v1/completions",
            code="unsupported",
        )
    if len(template) > _MOST_TEMPLATE_CHARS:
        raise field_error(
            _TEMPLATE,
            f"has {len(template)} characters; it may have {_MOST_TEMPLATE_CHARS}",
        )
    return template


# --- billing --------------------------------------------------------------------------------------

_BILLING = re.compile(r"(x-anthropic-[a-z0-9-]+):[^\n]*\n*")


def without_billing(conversation: Conversation) -> Conversation:
    """Return a conversation without lines for Anthropic's billing at its beginning.

    They are no instruction, and change from call to call. A program writes them as the first text
    of its system message, or as a system message of their own.
    """
    turns = conversation.turns
    first = turns[0] if turns else {}
    content = first.get("content")
    if first.get("role") != "system" or not isinstance(content, str):
        return conversation
    while (line := _BILLING.match(content)) is not None:
        ignore(line[1])
        content = content[line.end() :]
    if content == first["content"]:
        return conversation
    kept = [first | {"content": content}] if content else []
    return msgspec.structs.replace(conversation, turns=[*kept, *turns[1:]])


# --- reasoning ----------------------------------------------------------------------------------


def reasoning_of_effort(effort: str | None, param: str) -> Reasoning | None:
    """Return the request of OpenAI's effort, of which "none" turns reasoning off."""
    if effort is None:
        return None
    return Reasoning(on=effort != "none", effort=effort, on_param=param, effort_param=param)


def reasoning_asked(reasoning: Reasoning | None, given: Mapping[str, Any]) -> bool | None:
    """Return whether a call requests reasoning, by its own fields or by the template's variables
    that the caller gave; None if it doesn't say."""
    if reasoning is None:
        return asked_to_reason(given)
    return asked_to_reason({EFFORT: reasoning.effort}) if reasoning.on is None else reasoning.on


def reasoning_variables(
    reasoning: Reasoning | None, given: Mapping[str, Any], template: str, always: bool
) -> dict[str, Any]:
    """Return a template's variables, with those that request reasoning.

    Args:
        given: Variables that the caller gave by name.
        always: Whether the model reasons without a request.

    Raises:
        FieldError: `given` has another value.
    """
    if reasoning is None:
        return dict(given)
    read = names_read(template)
    found: dict[str, Any] = {}
    if reasoning.on is not None:
        found = dict.fromkeys((name for name in SWITCHES if name in read), reasoning.on)
    if reasoning.effort is not None and EFFORT in read:
        found[EFFORT] = reasoning.effort
    _report_without_effect(reasoning, found, always=always or EFFORT in read)
    for name, value in found.items():
        if name in given and given[name] != value:
            param = f"{_VARIABLES}.{name}"
            fields = " and ".join(dict.fromkeys((reasoning.on_param, reasoning.effort_param)))
            raise FieldError(f"{param} says otherwise than {fields}; give one of them", param=param)
    return dict(given) | found


def _report_without_effect(reasoning: Reasoning, found: Mapping[str, Any], *, always: bool) -> None:
    """Report fields without effect on this template as neutral: the model answers as it can.

    A model without reasoning obeys a request for none; one that always reasons goes on.
    """
    if reasoning.on and not (found or always):
        ignore(reasoning.on_param)
    if reasoning.on is False and always and not found:
        ignore(reasoning.on_param)
    by_switch = reasoning.on_param == reasoning.effort_param and (found or not reasoning.on)
    if reasoning.effort is not None and EFFORT not in found and not by_switch:
        ignore(reasoning.effort_param)
