"""Conversations as prompts, by the model's chat template.

A template comes with the model, from whoever made that, and is a program. It runs in Transformers'
sandbox, in a thread, and for a limited time.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from jinja2 import TemplateError

from ..config import RequestError, shown
from .http import FieldError, field_name
from .words import LazyWords, Words

T = TypeVar("T")

_AT_ONCE = 2
"""Templates that run at a time. Each thread keeps a core busy."""

Turn = dict[str, Any]
"""A message as templates read it."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a template makes a prompt of.

    Attributes:
        turns: The messages.
        add_generation_prompt: Whether the prompt ends with the beginning of the assistant's turn.
        continue_final_message: Whether it ends within the last message, which is to be continued.
        variables: What else the template is given.
    """

    turns: list[Turn]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}


class ChatTemplates:
    """Makes prompts of conversations, a few at a time."""

    def __init__(self, words: LazyWords, max_model_len: int, timeout_s: float) -> None:
        """Args: the tokenizer, tokens that a prompt may have, and seconds that it may take."""
        self._words = words
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._few = anyio.Semaphore(_AT_ONCE)

    async def token_ids(self, conversation: Conversation) -> tuple[int, ...]:
        """A prompt's tokens. The template writes its special tokens itself.

        Raises:
            RequestError: no_chat_template, invalid_messages, chat_template_failed, unsupported,
                prompt_too_long.
        """
        words = await self._words.required()

        def work() -> tuple[int, ...]:
            return _token_ids(words, conversation, self._max_model_len)

        async with self._few:
            return await _within(self._timeout_s, work)


def _token_ids(words: Words, conversation: Conversation, max_model_len: int) -> tuple[int, ...]:
    # Before the template, however much it takes of them, and after it, however much it adds.
    sent = "".join(str(turn.get("content") or "") for turn in conversation.turns)
    words.check_fits(sent, max_model_len)
    text = _render(words.tokenizer, conversation)
    words.check_fits(text, max_model_len)
    return words.token_ids(text, add_special=False)


def _render(tokenizer: Any, conversation: Conversation) -> str:
    template = _template_of(tokenizer)
    _check_variables(conversation.variables, template, tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            _known_roles(conversation.turns, template),
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
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


def _template_of(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise RequestError(
            "the model has no chat template; send the conversation as a prompt, to /v1/completions",
            code="no_chat_template",
        )
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        # Several, and none of them the default.
        raise RequestError(
            f"the model's chat template can't be chosen: {shown(str(error))}",
            code="no_chat_template",
        ) from None


def _known_roles(turns: list[Turn], template: str) -> list[Turn]:
    """A developer's messages are the system's to a template that knows no developer."""
    if "developer" in template:
        return turns
    return [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]


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


class _TimeOver(BaseException):
    """Not an Exception, which a template's filters might catch."""


class _Work:
    """What runs in a thread, and can be stopped there between two of Python's instructions."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread_id = 0
        self._stopped = False

    def run(self, begun: Callable[[], None]) -> Any:
        """Raises _TimeOver after `stop`."""
        self._thread_id = threading.get_ident()
        begun()
        try:
            return self._work()
        finally:
            with self._lock:
                self._thread_id = 0
            # An error that is yet to come must not meet whatever this thread does next. It is not
            # taken back: Python 3.11 would for ever look for one, and hang in a debugger.
            rounds = 2 if self._stopped else 0
            while rounds:
                rounds -= 1  # raised at a jump back at the latest

    def stop(self) -> None:
        with self._lock:
            if self._thread_id:
                self._stopped = True
                _raise_in(self._thread_id, _TimeOver)


def _raise_in(thread_id: int, error: type[BaseException]) -> None:
    """Has a thread raise an error soon."""
    wanted = ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), wanted)


async def _within(limit_s: float, do: Callable[[], T]) -> T:
    """What `do` gives, in a thread, where it is stopped after so many seconds.

    Raises:
        RequestError: chat_template_failed.
    """
    loop = asyncio.get_running_loop()
    work = _Work(do)
    timers: list[asyncio.TimerHandle] = []

    def begun() -> None:
        loop.call_soon_threadsafe(lambda: timers.append(loop.call_later(limit_s, work.stop)))

    try:
        result: T = await anyio.to_thread.run_sync(work.run, begun)
    except _TimeOver:
        raise RequestError(
            f"the model's chat template took longer than {limit_s:g} s "
            "(gateway.template_timeout_s) for these messages; send fewer",
            code="chat_template_failed",
        ) from None
    finally:
        for timer in timers:
            timer.cancel()
    return result
