"""`/generate`: submits the prompts of a call and answers, at once or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import anyio
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...bus.codec import encode_request
from ...bus.public import Completion, GenerateRequest, Output
from ...config import BusError, Config, ModelError, NanoInferenceError, RequestError
from ...pipeline.client import BusClient
from ...telemetry import TraceContext, instruments, now_ns
from ..budgets import HEADER, call_deadline_ns
from ..calls import arrival_of
from ..http import (
    EngineError,
    EventStream,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    error_body,
    read_object,
)
from ..measures import Measures
from ..tenants import tenant_of
from ..turns import Turns, WaitingCall
from ..words import LazyWords, Words
from .answers import ENDED_EARLY, Answer, Answers
from .events import Events
from .labels import VersionLabels
from .requests import Wanted, read_call

_DONE = b"[DONE]"

# Prompts that are made ready before others are served.
_AT_ONCE = 16

# How often lanes are counted while requests wait.
_COUNT_LANES_S = 10.0

# Characters of a text that are tokenised at once; more take a thread.
_SHORT_TEXT = 4096

# The same of an answer, in tokens, those of logprobs included.
_SHORT_ANSWER = 4096


class Origin(NamedTuple):
    """Where a call comes from.

    Attributes:
        tenant: Whose it is.
        trace: Where the spans of its requests belong.
        deadline_ns: When its time is over, on the clock of `now_ns`; None when it has no limit.
    """

    tenant: str
    trace: TraceContext
    deadline_ns: int | None

    @property
    def left_ns(self) -> int | None:
        """What is left of its time, perhaps less than nothing."""
        return None if self.deadline_ns is None else self.deadline_ns - now_ns()


class _TooLate(EngineError):
    """A call's time was over before all of its requests were in the pipeline."""

    def __init__(self) -> None:
        super().__init__(
            f"the call's time ({HEADER}, or budget_ms) was over before all of it could run; give "
            "it more",
            code="expired",
        )


class Generation:
    """The calls of `/generate` that are under way."""

    def __init__(
        self,
        engine: BusClient,
        config: Config,
        words: LazyWords,
        labels: VersionLabels,
        measures: Measures,
    ) -> None:
        self._engine = engine
        self._config = config
        self._words = words
        self._labels = labels
        self._measures = measures
        self._turns = Turns(config.gateway_places, config.gateway.max_waiting, measures)
        self._count_lanes_at = 0.0
        self._request_ids: set[str] = set()
        measures.watch(instruments.GATEWAY_WAITING, lambda: self.waiting)

    @property
    def in_flight(self) -> int:
        """How many requests of this gateway are in the pipeline."""
        return len(self._request_ids)

    @property
    def waiting(self) -> int:
        """How many wait here until there is a place for them."""
        return self._turns.waiting

    async def generate(self, request: Request) -> Response:
        """The endpoint."""
        gateway = self._config.gateway
        arrival, tenant = arrival_of(request), tenant_of(request)
        body = await read_object(request, gateway.max_body_bytes)
        call = read_call(body, gateway.max_prompts, gateway.max_priority)
        deadline_ns = call_deadline_ns(request, arrival.at_ns, call.budget_ms)
        origin = Origin(tenant, arrival.trace, deadline_ns)
        writers = await self._writers(call.prompts, tenant)
        if call.stream:
            return EventStream(partial(self._stream, origin, writers, call.batch))

        async def work() -> Response:
            answers = await self._complete_all(origin, writers)
            return JsonResponse(answers if call.batch else answers[0])

        return await answer_while_connected(request, work)

    async def abort(self, rid: str) -> None:
        """Ends a request, and those of a batch to which `rid` was given as a whole."""

        def concerns(request_id: str) -> bool:
            return request_id == rid or request_id.startswith(f"{rid}_")

        self._turns.end(concerns)
        for request_id in sorted({*filter(concerns, self._request_ids), rid}):
            await self._engine.cancel(request_id)

    async def abort_all(self) -> None:
        """Ends what waits here, and all requests in the pipeline, whoever sent them."""
        self._turns.end(lambda request_id: True)
        await self._engine.cancel_all()

    # --- before -------------------------------------------------------------------------------

    async def _writers(self, prompts: Iterator[Wanted], tenant: str) -> list[Answers]:
        """What writes the answer to each prompt, which is ready to be submitted."""
        ready: list[Wanted] = []
        for wanted in prompts:
            self._check_size(wanted)
            request = msgspec.structs.replace(wanted.request, tenant=tenant)
            ready.append(msgspec.structs.replace(wanted, request=request))
            if len(ready) % _AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        words = None
        if any(wanted.needs_words or wanted.needs_token_ids for wanted in ready):
            words = await self._tokenizer()
            for wanted in ready:
                if wanted.needs_token_ids:
                    words.check_fits(wanted.request.prompt or "", self._max_model_len)
        writers: list[Answers] = []
        for wanted in ready:
            writers.append(await self._answers(wanted, words))
            self._check_encoded(writers[-1].wanted.request)
            if len(writers) % _AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        return writers

    @property
    def _max_model_len(self) -> int:
        return self._config.engine.max_model_len

    def _check_size(self, wanted: Wanted) -> None:
        """Refuses what the bus or admission would refuse, before it costs them anything."""
        text, token_ids = wanted.request.prompt or "", wanted.request.prompt_token_ids or ()
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; prompt and completion together may have "
                f"{self._max_model_len}, so shorten it to {self._max_model_len - 1} or fewer",
                code="prompt_too_long",
            )
        max_bytes = self._config.bus.max_request_bytes
        # Most texts need not be encoded to see that they are short enough.
        if len(text) * 4 > max_bytes and len(text.encode(errors="surrogatepass")) > max_bytes:
            raise RequestError(
                f"the prompt alone has more than {max_bytes} bytes, which is the most that a "
                "request may have (bus.max_request_bytes); shorten it",
                code="request_too_large",
            )

    def _check_encoded(self, request: GenerateRequest) -> None:
        """Refuses what the bus would refuse for its size, before any of the call is published."""
        size, most = len(encode_request(request)[1]), self._config.bus.max_request_bytes
        if size > most:
            raise RequestError(
                f"the prompt with its parameters makes a request of {size} bytes, and a request "
                f"may have {most} (bus.max_request_bytes); send less",
                code="request_too_large",
            )

    async def _tokenizer(self) -> Words:
        try:
            return await self._words.get()
        except ModelError as error:
            raise RequestError(
                f"this takes the model's tokenizer, which the gateway does not have: "
                f"{error.message}",
                code="unsupported",
            ) from None

    async def _answers(self, wanted: Wanted, words: Words | None) -> Answers:
        if words is None or not (wanted.needs_words or wanted.needs_token_ids):
            return Answers(wanted, None, self._labels)
        if wanted.needs_token_ids:
            text = wanted.request.prompt or ""
            if len(text) <= _SHORT_TEXT:
                token_ids = words.token_ids(text)
            else:
                token_ids = await self._words.beside(partial(words.token_ids, text))
            asked = msgspec.structs.replace(wanted.request, prompt=None, prompt_token_ids=token_ids)
            wanted = msgspec.structs.replace(wanted, request=asked)
        return Answers(wanted, words, self._labels)

    # --- after --------------------------------------------------------------------------------

    async def _complete_all(self, origin: Origin, writers: list[Answers]) -> list[Answer]:
        """All answers, in order. The first error ends the other requests as well."""
        answers: list[list[Answer]] = [[] for _ in writers]

        async def run(index: int, begun: bool) -> None:
            async with aclosing(self._outputs(origin, writers[index], begun)) as outputs:
                async for output in outputs:
                    if isinstance(output, Completion):
                        answers[index] = await self._final(writers[index], output)

        await self._in_turn(origin, writers, run)
        return [answer for each in answers for answer in each]

    async def _stream(
        self, origin: Origin, writers: list[Answers], batch: bool, send: SendEvent
    ) -> None:
        """Events of all prompts as they come. The first error is the last of them.

        Raises:
            NanoInferenceError: The engine did not do it, and no event was sent.
        """
        places = [0, *accumulate(each.wanted.request.n for each in writers)]
        events = Events(send, indexed=batch)

        async def run(index: int, begun: bool) -> None:
            writer, place = writers[index], places[index]
            async with aclosing(self._outputs(origin, writer, begun)) as outputs:
                async for output in outputs:
                    if isinstance(output, Completion):
                        for sample, answer in enumerate(await self._final(writer, output)):
                            events.put(place + sample, answer)
                    elif not writer.wanted.scores_only:
                        growing = writer.growing(output.sample_index)
                        growing.add(output)
                        if growing.due:
                            events.put(place + output.sample_index, growing)
                    await anyio.lowlevel.checkpoint()

        failure: NanoInferenceError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(events.send_all)
            try:
                await self._in_turn(origin, writers, run)
            except NanoInferenceError as error:
                failure = error
            events.close()
        if failure is not None:
            if not events.any_sent:
                raise failure
            await send(msgspec.json.encode(error_body(failure)))
        await send(_DONE)

    async def _final(self, writer: Answers, completion: Completion) -> list[Answer]:
        tokens = sum(len(each.token_ids) for each in completion.samples)
        tokens += len(completion.prompt_logprobs or ())
        if tokens * (1 + writer.wanted.top_logprobs) <= _SHORT_ANSWER:
            return writer.final(completion)
        return await self._words.beside(partial(writer.final, completion))

    async def _outputs(
        self, origin: Origin, writer: Answers, begun: bool
    ) -> AsyncGenerator[Output, None]:
        """What the engine makes of a prompt; when it was not `begun`, that it was ended.

        Raises:
            NanoInferenceError: The engine did not do it.
        """
        request = writer.wanted.request
        if not begun:
            yield Completion(
                request_id=request.request_id, entry_id="", status="cancelled", error=ENDED_EARLY
            )
            return
        if (left_ns := origin.left_ns) is not None:
            if left_ns <= 0:
                raise _TooLate
            request = msgspec.structs.replace(request, budget_ns=left_ns)
        with self._counted(request.request_id):
            async with aclosing(self._engine.submit(request, origin.trace)) as outputs:
                async for output in outputs:
                    if isinstance(output, Completion):
                        _check(output)
                    yield output

    @contextmanager
    def _counted(self, request_id: str) -> Iterator[None]:
        self._request_ids.add(request_id)
        try:
            yield
        finally:
            self._request_ids.discard(request_id)

    async def _in_turn(
        self, origin: Origin, writers: list[Answers], run: Callable[[int, bool], Awaitable[None]]
    ) -> None:
        """Runs all, each from when there is a place for it. The first error ends the others.

        Args:
            run: Takes the index of a writer, and whether it may begin; it was ended if not.
        """
        failure: NanoInferenceError | None = None

        async def run_one(index: int, begun: bool) -> None:
            nonlocal failure
            try:
                await run(index, begun)
            except NanoInferenceError as error:
                failure = failure or error
                group.cancel_scope.cancel()
            finally:
                if begun:
                    self._turns.give_back(origin.tenant)

        request_ids = [each.wanted.request.request_id for each in writers]
        async with anyio.create_task_group() as group:
            with self._turns.wait(origin.tenant, request_ids) as call:
                try:
                    await self._count_lanes()
                    for index, request_id in enumerate(request_ids):
                        begun = await _take(call, request_id, origin)
                        group.start_soon(run_one, index, begun)
                        if index % _AT_ONCE == 0 or failure is not None:
                            await anyio.lowlevel.checkpoint()
                except NanoInferenceError as error:
                    failure = failure or error
                    group.cancel_scope.cancel()
        if failure is not None:
            if isinstance(failure, _TooLate):
                self._measures.refused("expired")
            raise failure

    async def _count_lanes(self) -> None:
        """Makes places for each lane, unless a setting says how many there are in all."""
        now = anyio.current_time()
        if not self.waiting or now < self._count_lanes_at:
            return
        self._count_lanes_at = now + _COUNT_LANES_S
        if self._config.gateway.max_in_flight is None:
            with suppress(BusError):
                lanes = {report.lane for report in await self._engine.reports()}
                self._turns.resize(self._config.gateway_places * max(1, len(lanes)))


async def _take(call: WaitingCall, request_id: str, origin: Origin) -> bool:
    """As `WaitingCall.take`, while the call has time."""
    left_ns = origin.left_ns
    try:
        with anyio.fail_after(None if left_ns is None else max(0, left_ns) / 1e9):
            return await call.take(request_id)
    except TimeoutError:
        raise _TooLate from None


def _check(completion: Completion) -> None:
    """Raises unless it was done, or aborted: then there may be tokens, as SGLang has it."""
    error = completion.error
    if error is not None and completion.status != "cancelled":
        raise EngineError(error.message, code=error.code, retry_after_s=error.retry_after_s)
