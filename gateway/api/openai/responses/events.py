"""A stream's events, each with its number."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from .....bus.public import Completion, CompletionChunk, Output
from .....config import NanoInferenceError, RequestError, shown
from ....server.http import SendEvent
from ..errors import as_openai
from .answers import Answers
from .output_items import Answer, ItemEvent

_ENDS = {"completed": "response.completed", "failed": "response.failed"}
_INCOMPLETE = "response.incomplete"
_EVENT_ID = re.compile(r"(resp_[0-9a-f]{1,64})\.([0-9]{1,9})")

NOTHING = -1
"""In place of an event's number: a client has none of the stream."""

Beside = Callable[[int, Callable[[], list[ItemEvent]]], Awaitable[list[ItemEvent]]]


class Events:
    """Sends what comes of a response, in the order that OpenAI's clients count on.

    One output on the bus becomes the same events each time, so that an event has the same number
    whoever sends it.
    """

    def __init__(
        self,
        answers: Answers,
        send: SendEvent,
        beside: Beside,
        after: int = NOTHING,
        *,
        ids: bool = True,
    ) -> None:
        """Args: `beside` reads so many tokens. Events up to number `after` are counted and not
        sent. `ids`: whether they have ids, behind which a client may go on."""
        self._answers = answers
        self._send = send
        self._beside = beside
        self._after = after
        self._ids = ids
        self._number = 0
        # How much of the beginning was sent.
        self._created = False
        self._in_progress = False
        self._items = answers.output_items()
        self._num_tokens = 0

    async def create(self) -> None:
        """The first ones, of a response that may wait."""
        if self._created:
            return
        self._created = True
        waits = self._answers.record.background
        response = {"response": self._answers.begun("queued" if waits else "in_progress")}
        await self._tell("response.created", response)
        if waits:
            await self._tell("response.queued", response)

    async def take(self, output: Output) -> None:
        """The next output; the last one ends the stream."""
        await self._progress()
        if isinstance(output, CompletionChunk):
            self._num_tokens += len(output.token_ids)
            await self._tell_all(self._items.add(output))
        else:
            await self._end(output)

    async def fail(self, error: NanoInferenceError) -> None:
        """The last one, of a response that the engine did not make."""
        await self._progress()
        await self._tell("response.failed", {"response": self._answers.failed(error)})

    async def interrupt(self, error: NanoInferenceError) -> None:
        """The stream ends here, and its response does not.

        The event has the number of the one before it: who comes back behind it misses nothing.
        """
        told = as_openai(error, "responses")
        event = {
            "type": "error",
            "sequence_number": max(self._after, self._number - 1, 0),
            "code": told.code,
            "message": told.message,
            "param": getattr(told, "param", None),
        }
        await self._send(msgspec.json.encode(event), self._event_id(event), name="error")

    async def _progress(self) -> None:
        if self._in_progress:
            return
        self._in_progress = True
        await self.create()
        await self._tell("response.in_progress", {"response": self._answers.begun("in_progress")})

    async def _end(self, completion: Completion) -> None:
        if completion.samples:
            sample = completion.samples[0]
            unread = len(sample.token_ids) - self._num_tokens
            await self._tell_all(await self._beside(unread, partial(self._items.end, sample)))
        response = self._answers.ended(completion, self._items)
        kind = _ENDS.get(response["status"], _INCOMPLETE)
        await self._tell(kind, {"response": response})

    async def _tell_all(self, events: Iterable[ItemEvent]) -> None:
        for event in events:
            await self._tell(event.type, event.told)

    async def _tell(self, kind: str, told: dict[str, Any]) -> None:
        event: Answer = {"type": kind, "sequence_number": self._number} | told
        self._number += 1
        if event["sequence_number"] > self._after:
            await self._send(msgspec.json.encode(event), self._event_id(event), name=kind)

    def _event_id(self, event: Answer) -> str:
        return f"{self._answers.call.id}.{event['sequence_number']}" if self._ids else ""


def response_of(event_id: str) -> str:
    """The id of the response that an event belongs to.

    Raises:
        RequestError: invalid_event_id.
    """
    found = _EVENT_ID.fullmatch(event_id)
    if found is None:
        raise _invalid(event_id)
    return found[1]


def read_number(event_id: str, response_id: str) -> int:
    """The number of an event of a response.

    Raises:
        RequestError: invalid_event_id: it is none of this one's.
    """
    found = _EVENT_ID.fullmatch(event_id)
    if found is None or found[1] != response_id:
        raise _invalid(event_id)
    return int(found[2])


def _invalid(event_id: str) -> RequestError:
    return RequestError(
        f"{shown(event_id)} is no event of this response; give the id of the last one that came",
        code="invalid_event_id",
    )
