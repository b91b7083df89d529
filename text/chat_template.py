"""Chat templates: conversations as prompts, by the model's own template.

A template comes with the model, or with a call, and is a program. It runs in Transformers' sandbox,
in this process or in a worker process with a time limit.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RequestError, cut, shown
from . import template_process
from .children import end_child, start_child
from .template_process import render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""`render_template`, or the same in a worker process."""


def template_of(
    tokenizer: PreTrainedTokenizerFast,
    tools: list[dict[str, Any]] | None = None,
    given: str | None = None,
) -> str:
    """Return the template for a conversation with these tools.

    Args:
        given: The call's own, or the name of one of the model's; None for the model's.

    Raises:
        RequestError: no_chat_template.
    """
    if not (tokenizer.chat_template or given):
        raise RequestError(
            "the model has no chat template; send the conversation as a prompt",
            code="no_chat_template",
        )
    try:
        return str(tokenizer.get_chat_template(chat_template=given, tools=tools))
    except ValueError as error:
        # Several templates, and none of them the default.
        raise RequestError(
            f"the model's chat template can't be chosen: {shown(str(error))}",
            code="no_chat_template",
            remedy="send the conversation as a prompt",
        ) from None


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
    run: Run = render_template,
) -> str:
    """Return a conversation as text, with the special tokens that the template writes.

    Args:
        tokenizer: The model's tokenizer, with the template.
        messages: Messages in OpenAI's form.
        tools: Functions that the model may call, in OpenAI's form.
        add_generation_prompt: Whether the text ends with the begin of the assistant's turn.
        continue_final_message: Whether it ends within the last message, which is to be continued.
        variables: More variables of the template.
        template: The call's own; None for the model's.
        run: Renders it; in this process by default.

    Raises:
        RequestError: no_chat_template, invalid_messages, chat_template_failed.
    """
    call = {
        "template": template_of(tokenizer, tools, template),
        "own": template is None,
        "messages": [dict(message) for message in messages],
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "variables": {**tokenizer.special_tokens_map, **(variables or {})},
    }
    found = run(call)
    if tools is None and "NoneType" in found.get("refused", ""):
        # Some templates of models that call tools loop over them without a look.
        found = run(call | {"tools": []})
    if "text" in found:
        return str(found["text"])
    whose = _named(call)
    if "refused" in found:
        raise RequestError(
            f"{whose} refuses these messages: {shown(found['refused'])}",
            code="invalid_messages",
            remedy="send other messages, or another template",
        )
    raise RequestError(
        f"{whose} fails: {shown(found['failed'])}",
        code="chat_template_failed",
        remedy="send other messages, or mend the template",
    )


def _named(call: Mapping[str, Any]) -> str:
    return f"the {'model' if call['own'] else 'call'}'s chat template"


class TemplateWorkers:
    """Renders templates under a time limit, in worker processes; any thread may call it.

    The processes start with the first call, and again if they have ended.
    """

    def __init__(self, number: int, limit_s: float) -> None:
        """`number` templates at a time, each of which may take `limit_s`."""
        self._number = number
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[Connection] | None = None

    @property
    def started(self) -> bool:
        """Whether the processes run."""
        return self._idle is not None

    def start(self) -> queue.SimpleQueue[Connection]:
        """Start the processes, unless they run; return the connections of idle workers."""
        with self._lock:
            if self._idle is None:
                own, theirs = zip(*(Pipe() for _ in range(self._number)), strict=True)
                process = start_child(Path(template_process.__file__), theirs)
                self._finalizer = weakref.finalize(self, end_child, process, own)
                self._idle = queue.SimpleQueue()
                for connection in own:
                    self._idle.put(connection)
            return self._idle

    def run(self, call: dict[str, Any]) -> dict[str, Any]:
        """Render a template; see `render_template`.

        Raises:
            RequestError: chat_template_failed: the time limit has passed. internal_error: the
                processes can't be used.
        """
        data = json.dumps(call | {"limit_s": self._limit_s}).encode()
        for _ in range(2):
            idle = self.start()
            connection = idle.get()
            try:
                connection.send_bytes(data)
                found: dict[str, Any] = json.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                reason = error
                self._stop(idle)
                continue
            finally:
                idle.put(connection)
            if (number := found.get("signal")) is None:
                return found
            raise RequestError(
                f"{_named(call)} took longer than {self._limit_s:g} s of CPU time "
                "(gateway.template_timeout_s) for these messages; send fewer"
                if number == signal.SIGPROF
                else f"{_named(call)} ended its process by signal {number}",
                code="chat_template_failed",
            )
        raise RequestError(
            f"the processes that render chat templates can't be used: "
            f"{cut(str(reason) or type(reason).__name__, 200)}; try again",
            code="internal_error",
        )

    def _stop(self, idle: queue.SimpleQueue[Connection]) -> None:
        with self._lock:
            if self._idle is idle:
                self._finalizer()
                self._idle = None
