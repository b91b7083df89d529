"""From our outputs to Ollama's answers: whole, or as the lines of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, assert_never

import msgspec

from ....bus.public import Completion, CompletionChunk, CompletionSample
from ....text.messages import ToolCall
from ...serving.logprobs import TokenNames, token_entries
from ...serving.message_parts import MessageParts, NewParts

Answer = dict[str, Any]


def written(created: float) -> str:
    """Return a time, in seconds since the Unix epoch, as clients read it."""
    return datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")


def message_of(
    chat: bool, content: str = "", thinking: str = "", calls: Iterable[Answer] = ()
) -> Answer:
    """Return the fields of an answer, or of a line, with a part of the message."""
    made = list(calls)
    optional = {
        name: value for name, value in (("thinking", thinking), ("tool_calls", made)) if value
    }
    if chat:
        return {"message": {"role": "assistant", "content": content} | optional}
    return {"response": content} | optional


def without_tokens(model: str, chat: bool, reason: str) -> Answer:
    """Return the answer to a call without a prompt, which loads a model or unloads it."""
    head = {"model": model, "created_at": written(time.time())}
    return head | message_of(chat) | {"done": True, "done_reason": reason}


@dataclass(eq=False)
class AnswerWriter:
    """Writes the answer to a request: as a whole, or line by line.

    Attributes:
        model: The model's name as the client wrote it.
        created: When the answer began, seconds since the Unix epoch.
        chat: Whether it answers a chat.
        parts: The reader of the sample.
        names: The names of tokens, for logprobs; None without them.
        shows_context: Whether the end has the tokens of prompt and answer.
    """

    model: str
    created: int
    chat: bool
    parts: MessageParts
    names: TokenNames | None
    shows_context: bool
    _calls: int = 0
    _whole: list[NewParts] = field(default_factory=list)

    def add(self, chunks: Sequence[CompletionChunk]) -> list[Answer]:
        """Add the next chunks; return their line, if any."""
        return self._lines([self.parts.add(chunk) for chunk in chunks])

    def end(self, completion: Completion) -> list[Answer]:
        """Add the end, with what did not come in chunks; return the last lines."""
        sample = next(iter(completion.samples), None)
        lines = [] if sample is None else self._lines([self.parts.end(sample)])
        last = self._head() | message_of(self.chat)
        return [*lines, last | self._done(completion, sample)]

    def whole(self, completion: Completion) -> Answer:
        """Return the whole answer."""
        sample = next(iter(completion.samples), None)
        new = [] if sample is None else [self.parts.end(sample)]
        return self._head() | self._fields(new) | self._done(completion, sample)

    def quiet(self) -> bytes:
        """Return a line that says nothing new."""
        return msgspec.json.encode(self._head() | message_of(self.chat) | {"done": False})

    # --- pieces -----------------------------------------------------------------------------------

    def _head(self) -> Answer:
        return {"model": self.model, "created_at": written(self.created)}

    def _lines(self, new: list[NewParts]) -> list[Answer]:
        if not any(each.deltas or (self.names and each.records) for each in new):
            return []
        return [self._head() | self._fields(new) | {"done": False}]

    def _fields(self, new: list[NewParts]) -> Answer:
        deltas = [delta for each in new for delta in each.deltas]
        found = message_of(
            self.chat,
            "".join(delta.content for delta in deltas),
            "".join(delta.reasoning for delta in deltas),
            [self._called(call) for delta in deltas for call in delta.calls],
        )
        if self.names is not None:
            records = [record for each in new for record in each.records]
            found["logprobs"] = token_entries(records, self.names)
        return found

    def _called(self, call: ToolCall) -> Answer:
        index, self._calls = self._calls, self._calls + 1
        # Verbatim, with numbers of any size.
        arguments = msgspec.Raw(call.arguments.encode())
        function = {"index": index, "name": call.name, "arguments": arguments}
        return {"id": call.id, "function": function}

    def _done(self, completion: Completion, sample: CompletionSample | None) -> Answer:
        done: Answer = {"done": True, "done_reason": _reason(sample)}
        if self.shows_context and sample is not None:
            done["context"] = [*completion.prompt_token_ids, *sample.token_ids]
        return done | _durations(completion)


def _durations(completion: Completion) -> Answer:
    """Return the numbers of tokens, and their times in nanoseconds.

    Clients divide by times, so that none of an evaluation is 0.
    """
    timings, usage = completion.timings, completion.usage
    first_ns = timings.first_token_ns or timings.finished_ns
    causes = usage.time or {}
    before_ns = causes.get("http", 0) + causes.get("queue", 0)
    prompt_ns, answer_ns = first_ns - timings.received_ns, timings.finished_ns - first_ns
    return {
        "total_duration": before_ns + max(1, prompt_ns) + max(1, answer_ns),
        "load_duration": before_ns,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": max(1, prompt_ns),
        "eval_count": usage.completion_tokens,
        "eval_duration": max(1, answer_ns),
    }


def _reason(sample: CompletionSample | None) -> str:
    if sample is None:
        return "abort"
    match sample.finish_reason:
        case "stop" | "length" | "abort" | "content_filter" as reason:
            return reason
        case unknown:
            assert_never(unknown)
