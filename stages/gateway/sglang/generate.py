"""`/generate`: submits the prompts of a call and answers, at once or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....bus.public import Completion
from ....config import GatewayConfig, ModelError, NanoInferenceError, RequestError
from ..engine import EngineClient
from ..http import (
    EngineError,
    EventStream,
    JsonResponse,
    SendEvent,
    answer_while_connected,
    error_body,
    read_object,
)
from ..words import LazyWords
from .answers import Answer, Answers
from .labels import VersionLabels
from .requests import Call, Wanted, read_call

_DONE = b"[DONE]"


class Generation:
    """The calls of `/generate` that are under way.

    Attributes:
        in_flight: How many requests of this gateway have not ended.
    """

    def __init__(
        self,
        engine: EngineClient,
        config: GatewayConfig,
        words: LazyWords,
        labels: VersionLabels,
    ) -> None:
        self._engine = engine
        self._config = config
        self._words = words
        self._labels = labels
        self._request_ids: set[str] = set()

    @property
    def in_flight(self) -> int:
        return len(self._request_ids)

    async def generate(self, request: Request) -> Response:
        """The endpoint."""
        call = read_call(await read_object(request, self._config.max_body_bytes))
        writers = [await self._answers(wanted) for wanted in call.prompts]
        if call.stream:
            return EventStream(partial(self._stream, call, writers))

        async def work() -> Response:
            answers = await self._complete_all(writers)
            return JsonResponse(answers if call.batch else answers[0])

        return await answer_while_connected(request, work)

    async def abort(self, rid: str) -> None:
        """Ends a request, and those of a batch to which `rid` was given as a whole."""
        own = {each for each in self._request_ids if each.startswith(f"{rid}_")}
        for request_id in sorted(own | {rid}):
            await self._engine.cancel(request_id)

    async def _answers(self, wanted: Wanted) -> Answers:
        if not (wanted.needs_words or wanted.needs_token_ids):
            return Answers(wanted, None, self._labels)
        try:
            words = await self._words.get()
        except ModelError as error:
            raise RequestError(
                f"this takes the model's tokenizer, which the gateway does not have: "
                f"{error.message}",
                code="unsupported",
            ) from None
        if wanted.needs_token_ids:
            token_ids = words.token_ids(wanted.request.prompt or "")
            asked = msgspec.structs.replace(wanted.request, prompt=None, prompt_token_ids=token_ids)
            wanted = msgspec.structs.replace(wanted, request=asked)
        return Answers(wanted, words, self._labels)

    async def _complete_all(self, writers: list[Answers]) -> list[Answer]:
        """All answers, in order. The first error ends the other requests as well."""
        answers: list[list[Answer]] = [[] for _ in writers]

        async def run(index: int) -> None:
            async with aclosing(self._follow(writers[index])) as followed:
                answers[index] += [answer async for _, answer in followed]

        await _side_by_side(run, len(writers))
        return [answer for each in answers for answer in each]

    async def _stream(self, call: Call, writers: list[Answers], send: SendEvent) -> None:
        """Events of all prompts as they come. The first error is the last of them."""

        async def run(index: int) -> None:
            place = sum(each.wanted.request.n for each in writers[:index])
            async with aclosing(self._follow(writers[index], chunks=True)) as followed:
                async for sample, answer in followed:
                    where = {"index": place + sample} if call.batch else {}
                    await send(msgspec.json.encode(answer | where))

        try:
            await _side_by_side(run, len(writers))
        except NanoInferenceError as failure:
            await send(msgspec.json.encode(error_body(failure)))
        await send(_DONE)

    async def _follow(
        self, writer: Answers, *, chunks: bool = False
    ) -> AsyncGenerator[tuple[int, Answer], None]:
        """The final answers to a prompt by sample, and before them those to its chunks.

        Raises:
            NanoInferenceError: The engine did not do it.
        """
        request = writer.wanted.request
        with self._counted(request.request_id):
            async with aclosing(self._engine.submit(request)) as outputs:
                async for output in outputs:
                    if isinstance(output, Completion):
                        _check(output)
                        for final in enumerate(writer.final(output)):
                            yield final
                    elif chunks and not writer.wanted.scores_only:
                        yield output.sample_index, writer.growing(output)

    @contextmanager
    def _counted(self, request_id: str) -> Iterator[None]:
        self._request_ids.add(request_id)
        try:
            yield
        finally:
            self._request_ids.discard(request_id)


async def _side_by_side(run: Callable[[int], Awaitable[None]], number: int) -> None:
    """Runs so many. The first error of ours ends the others, and is raised by itself."""
    failure: NanoInferenceError | None = None

    async def run_one(index: int) -> None:
        nonlocal failure
        try:
            await run(index)
        except NanoInferenceError as error:
            failure = failure or error
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index in range(number):
            group.start_soon(run_one, index)
    if failure is not None:
        raise failure


def _check(completion: Completion) -> None:
    """Raises unless it was done, or aborted: then there may be tokens, as SGLang has it."""
    error = completion.error
    if error is not None and completion.status != "cancelled":
        raise EngineError(error.message, code=error.code, retry_after_s=error.retry_after_s)
