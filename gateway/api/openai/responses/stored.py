"""Responses that are kept on the bus: found, told, continued, cancelled, forgotten."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio

from .....bus.public import Completion
from .....config import Config, NanoInferenceError, shown
from .....store.calls import DurableCall
from .....telemetry import TraceContext
from ....policy.caller import Caller
from ....server.http import EngineError, FieldError
from ....serving.account import Account
from ....serving.chat_templates import ChatTemplates
from ....serving.durable_calls import DurableCalls
from ....serving.origin import Origin
from ....serving.submissions import Submissions
from ....serving.words import LazyWords
from ..idempotency import Keyed
from ..resuming import BegunAnswers, Found
from .answers import UNENDED, Answers
from .items import Item, answered
from .output_items import Answer
from .records import Record, decode_record
from .running import Background

T = TypeVar("T")

_PREVIOUS = "previous_response_id"
_NOT_FOUND, _UNFINISHED = "previous_response_not_found", "previous_response_unfinished"
_CONTINUED = ("completed", "incomplete")

_CANCEL_TIMEOUT_S = 10.0
"""How long a cancelled response may take to end before what is known of it is told."""

_AT_ONCE = 1024
"""Tokens that are read at once, which takes some 20 microseconds each; more take a thread."""

_FIRST_LOOK_S, _LONGEST_WAIT_S = 0.01, 0.5


class StoredResponses:
    """Those of all gateways on the bus."""

    def __init__(
        self,
        kept: DurableCalls,
        submissions: Submissions,
        background: Background,
        words: LazyWords,
        templates: ChatTemplates,
        config: Config,
    ) -> None:
        self._kept = kept
        self._submissions = submissions
        self._background = background
        self._words = words
        self._templates = templates
        self._config = config
        self._begun = BegunAnswers(kept, decode_record, unknown)

    async def find(
        self, response_id: str, tenant: str, caller: Caller, again: Keyed | None = None
    ) -> Found[Record]:
        """One of a tenant that was stored, by a model that the caller may use.

        Args:
            again: What the call that asks for it is known by, if it has a key.

        Raises:
            RequestError: unknown_response, idempotency_key_reused.
        """
        found = await self._begun.find(response_id, tenant, caller, again)
        if not found.shape.call.fields.store:
            raise unknown(response_id)
        return found

    async def claim(self, record: Record) -> Found[Record] | None:
        """As `BegunAnswers.claim`."""
        return await self._begun.claim(record, record.caller, background=record.background)

    async def answers(self, record: Record, *, first: bool = False) -> Answers:
        """What writes a response.

        Args:
            first: Nobody has read its output before, so that metrics tell of it.

        Raises:
            RequestError: unsupported: the gateway lacks the tokenizer that it takes.
        """
        form = await self._templates.message_format()
        sampling = record.request(self._config).sampling
        measures = self._submissions.measures if first else None
        return Answers(record, await self._words.required(), form, sampling, measures)

    async def known(self, found: Found[Record]) -> Answer:
        """What there is of one now, without waiting for more.

        Raises:
            RequestError: unknown_response.
        """
        record, kept = found
        try:
            last = await self._kept.last_output(record.id, kept, record.id)
        except EngineError as error:
            raise as_response_error(error, record.id) from None
        if isinstance(last, Completion):
            origin = Origin(record.tenant, TraceContext(), None, Account(), record.caller)
            last = await self._submissions.filtered_end(origin, record.request(self._config), last)
        answers = await self.answers(record)
        made = last.usage.completion_tokens if isinstance(last, Completion) else 0
        return await self.beside(made, partial(answers.known, kept, last))

    async def ended(self, answers: Answers, completion: Completion) -> Answer:
        """One that has ended."""
        made = completion.usage.completion_tokens
        return await self.beside(made, partial(answers.ended, completion))

    async def beside(self, tokens: int, work: Callable[[], T]) -> T:
        """Reads an output, a long one in a thread. Args: how many tokens of it are to be read."""
        return await self._words.beside(work) if tokens > _AT_ONCE else work()

    async def conversation(self, response_id: str, tenant: str, caller: Caller) -> list[Item]:
        """All items of a response that has ended, its output among them.

        Raises:
            FieldError: It is not known, or has not ended well.
        """
        try:
            found = await self.find(response_id, tenant, caller)
            answer = await self.known(found)
        except EngineError as error:
            raise FieldError(
                f"{_PREVIOUS}: {error.message}", param=_PREVIOUS, code=_NOT_FOUND
            ) from None
        if answer["status"] not in _CONTINUED:
            raise FieldError(
                f"{_PREVIOUS}: the response is {answer['status']}; one that is completed or "
                "incomplete can be continued",
                param=_PREVIOUS,
                code=_UNFINISHED,
            )
        return [*found.shape.items, *answered(answer["output"])]

    async def settled(self, found: Found[Record]) -> DurableCall:
        """What is kept of one when it is published, or could have been by who began it.

        One in the background is left to those who run it, however long it waits for its place.

        Raises:
            NeverBegun: Nothing will come of it.
            RequestError: unknown_response: it was deleted meanwhile.
        """
        if not found.shape.background:
            return await self._begun.published(found)
        wait_s = _FIRST_LOOK_S
        while not found.kept.entries and "cancelled" not in found.kept.marks:
            if found.shape.failure is not None:
                raise found.shape.failure.error()
            run = self._background.running(found.shape.id)
            if run is not None:
                await run.settled.wait()
            else:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            found = await self._begun.look_again(found)
        return found.kept

    async def cancel(self, found: Found[Record]) -> Answer:
        """Ends one in the background; what it has until then stays.

        Raises:
            RequestError: unknown_response; it is none that can be cancelled.
        """
        record = found.shape
        if not record.background:
            raise FieldError(
                "only a response with background: true can be cancelled; any other ends when its "
                "connection is closed",
                param=None,
            )
        answer = await self.known(found)
        if answer["status"] in UNENDED:
            await self.end(found)
            answer = await self._ended(found, answer)
        elif answer["status"] != "cancelled":
            raise FieldError(
                f"the response is {answer['status']}; one that has ended can't be cancelled",
                param=None,
            )
        return answer

    async def end(self, found: Found[Record]) -> None:
        """Ends one, whoever waits for it, as `DurableCalls.cancel` does."""
        self._submissions.end_waiting(found.shape.id)
        await self._kept.cancel(found.shape.id)

    async def delete(self, found: Found[Record]) -> None:
        """Forgets one. In the background it ends; who waits for another one gets it.

        Raises:
            BusError: The bus can't be reached.
        """
        record = found.shape
        if (await self.known(found))["status"] not in UNENDED:
            await self._kept.forget(record.id, record.name)
            return
        if record.background:
            await self.end(found)
        # That it was cancelled stays known, for who may just be about to publish it.
        await self._kept.replace(record.id, b"")

    async def _ended(self, found: Found[Record], answer: Answer) -> Answer:
        """What there is of one when it has ended, or should have."""
        wait_s = _FIRST_LOOK_S
        with anyio.move_on_after(_CANCEL_TIMEOUT_S):
            while True:
                answer = await self.known(await self._begun.look_again(found))
                if answer["status"] not in UNENDED:
                    break
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return answer


def unknown(response_id: str) -> EngineError:
    """There is no such response, it is another tenant's, or by a model that the key is not for."""
    return EngineError(
        f"there is no response {shown(response_id)} here: it was not stored, was deleted, is "
        "another tenant's (X-Tenant) or by a model that the key is not for, or ended longer ago "
        "than its results are kept (bus.results_ttl_s)",
        code="unknown_response",
    )


def as_response_error(error: NanoInferenceError, response_id: str) -> NanoInferenceError:
    """The same error, where it is about a stream in words of responses."""
    return unknown(response_id) if error.code == "stream_not_found" else error
