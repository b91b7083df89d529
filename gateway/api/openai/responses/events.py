"""The events of a response's stream, each with its number."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.lowlevel
import msgspec

from .....bus.public import Completion, CompletionChunk
from .....config import NanoInferenceError
from ....server.http import SendEvent, error_body
from ..errors import as_openai
from ..positions import invalid_event
from .output import Answer, ItemEvent, ResponseWriter
from .requests import ResponseRecord

_ENDS = {"completed": "response.completed", "failed": "response.failed"}
_INCOMPLETE = "response.incomplete"
_EVENT_ID = re.compile(r"(resp_[0-9a-f]{1,64})\.([0-9]{1,9})")

NOTHING = -1
"""In place of an event's number: the client has no event of the stream."""

Beside = Callable[[int, Callable[[], list[ItemEvent]]], Awaitable[list[ItemEvent]]]


@dataclass(eq=False)
class ResponseEvents:
    """Sends the events of a response in OpenAI's order.

    An output becomes the same events with the same numbers at every gateway.

    Attributes:
        beside: Reads so many tokens, many of them in a thread.
        keep: Keeps a response that has ended in its conversation.
        after: Events up to this number are counted and not sent.
    """

    writer: ResponseWriter
    send: SendEvent
    beside: Beside
    keep: Callable[[ResponseRecord, Answer], Awaitable[None]]
    after: int
    _number: int = 0
    _created: bool = False
    _in_progress: bool = False
    _num_tokens: int = 0

    def __post_init__(self) -> None:
        self._items = self.writer.output_items()

    async def create(self) -> None:
        """Send the first events, of a response that may wait for its place."""
        if self._created:
            return
        self._created = True
        waits = self.writer.record.background
        response = {"response": self.writer.begun("queued" if waits else "in_progress")}
        await self._send_event("response.created", response)
        if waits:
            await self._send_event("response.queued", response)

    async def add(self, chunks: Sequence[CompletionChunk]) -> None:
        """Send the events of the next chunks. Each has its own, so that their numbers stay."""
        await self._progress()
        for chunk in chunks:
            self._num_tokens += len(chunk.token_ids)
            await self._send_events(self._items.add([chunk]))
            # The server takes what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()

    async def end(self, completion: Completion) -> None:
        """Send the last events of a response that has ended."""
        await self.rest(completion)
        await self.finish(self.writer.ended(completion, self._items))

    async def rest(self, completion: Completion) -> None:
        """Send the events of what did not come in chunks."""
        await self._progress()
        if completion.samples:
            sample = completion.samples[0]
            unread = len(sample.token_ids) - self._num_tokens
            await self._send_events(await self.beside(unread, partial(self._items.end, sample)))

    async def finish(self, response: Answer) -> None:
        """Send the last event of a response that has ended."""
        # A client that has this event may continue.
        await self.keep(self.writer.record, response)
        kind = _ENDS.get(response["status"], _INCOMPLETE)
        await self._send_event(kind, {"response": response})

    async def fail(self, error: NanoInferenceError) -> None:
        """Send the last event of a response that failed."""
        await self._progress()
        await self._send_event("response.failed", {"response": self.writer.failed(error)})

    async def interrupt(self, error: NanoInferenceError) -> None:
        """End the stream of a response that goes on.

        The event has the number of the one before it, so that a client that resumes after it
        misses nothing.
        """
        shown = as_openai(error, "responses")
        event = {
            "type": "error",
            "sequence_number": max(self.after, self._number - 1, 0),
            "code": shown.code,
            "message": shown.message,
            "param": shown.param,
            # Open Responses has it nested, OpenAI does not.
            **error_body(shown),
        }
        await self.send(msgspec.json.encode(event), self._event_id(event), name="error")

    async def _progress(self) -> None:
        if self._in_progress:
            return
        self._in_progress = True
        await self.create()
        await self._send_event(
            "response.in_progress", {"response": self.writer.begun("in_progress")}
        )

    async def _send_events(self, events: Iterable[ItemEvent]) -> None:
        for event in events:
            await self._send_event(event.type, event.fields)

    async def _send_event(self, kind: str, fields: dict[str, Any]) -> None:
        event: Answer = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        if event["sequence_number"] > self.after:
            await self.send(msgspec.json.encode(event), self._event_id(event), name=kind)

    def _event_id(self, event: Answer) -> str:
        return f"{self.writer.call.id}.{event['sequence_number']}"


def response_of(event_id: str) -> str:
    """Return the id of the response that an event belongs to.

    Raises:
        RequestError: invalid_event_id.
    """
    return _parsed(event_id)[1]


def read_number(event_id: str, response_id: str) -> int:
    """Return the number of an event of a response.

    Raises:
        RequestError: invalid_event_id: it belongs to another response.
    """
    return int(_parsed(event_id, response_id)[2])


def _parsed(event_id: str, response_id: str = "") -> re.Match[str]:
    found = _EVENT_ID.fullmatch(event_id)
    if found is None or response_id not in ("", found[1]):
        raise invalid_event(event_id)
    return found
