"""A stream's events, each with its number."""

from __future__ import annotations

from typing import Any

import msgspec

from ....bus.public import Completion
from ....config import NanoInferenceError
from ...http import SendEvent
from ...samples import Piece
from ..logprobs import Scored, scored
from .answers import Answer, Answers

_ENDS = {"completed": "response.completed", "failed": "response.failed"}
_INCOMPLETE = "response.incomplete"


class Events:
    """Sends what comes of a response, in the order that OpenAI's clients count on."""

    def __init__(self, answers: Answers, send: SendEvent) -> None:
        self._answers = answers
        self._send = send
        self._number = 0
        self._begun = False
        # Tokens whose text was not certain yet, and which no event has shown.
        self._pending: list[Scored] = []
        self._place = {"item_id": answers.call.item_id, "output_index": 0, "content_index": 0}

    async def take(self, piece: Piece) -> None:
        """The next of the text."""
        await self._begin()
        self._pending += scored(piece.token_ids, piece.logprobs, piece.top_logprobs)
        if piece.text:
            await self._delta(piece.text)

    async def end(self, completion: Completion) -> Answer:
        """The last ones. Gives the response."""
        await self._begin()
        if self._pending and self._answers.call.logprobs:
            # Of a stop token, or a stop string, which has no text.
            await self._delta("")
        response = self._answers.whole(completion)
        for item in response["output"]:
            (part,) = item["content"]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            await self._tell("response.output_text.done", self._place | done)
            await self._tell("response.content_part.done", self._place | {"part": part})
            await self._tell("response.output_item.done", {"output_index": 0, "item": item})
        kind = _ENDS.get(response["status"], _INCOMPLETE)
        await self._tell(kind, {"response": response})
        return response

    async def fail(self, error: NanoInferenceError) -> Answer:
        """The last one, of a response that the engine did not make. Gives the response."""
        await self._begin()
        response = self._answers.failed(error)
        await self._tell("response.failed", {"response": response})
        return response

    async def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        response = {"response": self._answers.begun()}
        await self._tell("response.created", response)
        await self._tell("response.in_progress", response)
        item = self._answers.item("in_progress", [])
        await self._tell("response.output_item.added", {"output_index": 0, "item": item})
        part = self._answers.part("", [])
        await self._tell("response.content_part.added", self._place | {"part": part})

    async def _delta(self, text: str) -> None:
        logprobs = self._answers.logprobs(self._pending)
        self._pending = []
        told = {"delta": text, "logprobs": logprobs}
        await self._tell("response.output_text.delta", self._place | told)

    async def _tell(self, kind: str, told: dict[str, Any]) -> None:
        event = {"type": kind, "sequence_number": self._number} | told
        self._number += 1
        await self._send(msgspec.json.encode(event), name=kind)
