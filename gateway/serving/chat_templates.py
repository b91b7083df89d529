"""Conversations as prompts, by the model's chat template in worker processes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio.to_thread
import msgspec

from ...config import AdmissionConfig, field_name
from ...text.chat_template import TemplateWorkers, render, template_of
from ...text.messages import MessageFormat, Tool, opening_of
from ..server.http import FieldError
from .message_formats import LazyFormat
from .template_turns import Turn, as_read_by
from .template_variables import Reasoning, names_read, reasoning_variables
from .turns import Turns
from .words import LazyWords

__all__ = ["ChatTemplates", "Conversation", "Rendered", "Turn"]

AT_ONCE = 3
"""Templates that run at a time. Each keeps a core busy, and one tenant alone has two."""

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
        self._workers = TemplateWorkers(AT_ONCE, timeout_s)
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
        if not self._workers.started:
            # They load Transformers while this process loads the tokenizer.
            await anyio.to_thread.run_sync(self._workers.start)
        words, max_model_len = await self._words.required(), await self._max_model_len()
        form = await self.message_format()

        def work() -> Rendered:
            # Before the template, whatever it takes of them, and after it, whatever it adds.
            sent = "".join(str(turn.get("content") or "") for turn in conversation.turns)
            words.check_fits(sent, max_model_len)
            text = self._rendered(words.tokenizer, conversation, form)
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

    def _rendered(
        self, tokenizer: Any, conversation: Conversation, form: MessageFormat | None
    ) -> str:
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
        return render(
            tokenizer,
            as_read_by(template, conversation.turns),
            tools=tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=variables,
            run=self._workers.run,
        )


def _check_variables(variables: dict[str, Any], template: str, tokenizer: Any) -> None:
    """Refuse variables that the template does not read, and parameters of Transformers' call."""
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
