"""A request of one sample on its way through the engine: whole, or as a stream of chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from ...bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    FinishReason,
    GenerateRequest,
    Output,
    token_columns,
)
from ...config import NanoInferenceError
from ..call import Call
from ..server.http import task_group
from .durable_calls import Attachment
from .submissions import Submissions

MOST_UNSENT = 4096
"""Tokens of a stream buffered here for a slow client. The rest waits on the bus."""

T = TypeVar("T")

TakeChunks = Callable[[Sequence[CompletionChunk]], Awaitable[None]]


def all_samples(completion: Completion, n: int) -> list[CompletionSample]:
    """Return all n samples. One that never began is aborted, and has no tokens."""
    made = {sample.sample_index: sample for sample in completion.samples}
    return [
        made.get(index)
        or CompletionSample(
            sample_index=index, text="", token_ids=(), logprobs=(), finish_reason="abort"
        )
        for index in range(n)
    ]


def rest_of(sample: CompletionSample, tokens: int = 0, chars: int = 0) -> Iterator[CompletionChunk]:
    """Yield the rest of an ended sample as chunks: one for each version of the weights, one at
    least.

    Args:
        tokens, chars: The part that came in chunks before.
    """
    spans = sample.weight_versions or ((sample.weight_version, 0),)
    ends = [*(begin for _, begin in spans[1:]), len(sample.token_ids)]
    left = [(*span, end) for span, end in zip(spans, ends, strict=True) if end > tokens]
    for version, begin, end in left or [(sample.weight_version, tokens, tokens)]:
        first, is_last = max(begin, tokens), end == max(tokens, len(sample.token_ids))
        yield CompletionChunk(
            request_id="",
            entry_id="",
            sample_index=sample.sample_index,
            token_offset=first,
            token_ids=sample.token_ids[first:end],
            logprobs=sample.logprobs[first:end],
            text=sample.text[chars:] if is_last else "",
            finish_reason=sample.finish_reason if is_last else None,
            weight_version=version,
            top_logprobs=sample.top_logprobs and sample.top_logprobs[first:end],
            **token_columns(sample, first, end),
        )


class SampleWriter(Protocol):
    """Writes one sample in an interface's format.

    Attributes:
        due: Whether there is anything to send.
        unsent: Tokens that wait.
    """

    @property
    def due(self) -> bool: ...

    @property
    def unsent(self) -> int: ...

    def add(self, chunk: CompletionChunk) -> None:
        """Add the next tokens."""

    def end(self, sample: CompletionSample, completion: Completion) -> None:
        """Add what did not come in chunks, of a sample that has ended."""


W = TypeVar("W", bound=SampleWriter)


class Unsent(ABC, Generic[W]):
    """The outputs of a call's requests that wait for a client, which may read slowly.

    Attributes:
        unsent: Tokens that wait.
    """

    def __init__(self, writers: Sequence[Sequence[W]]) -> None:
        """`writers`: of the samples of each request."""
        self.unsent = 0
        self._writers = writers
        self._due: dict[W, None] = {}
        self._read = anyio.Event()
        self._changed = anyio.Event()
        self._closed = False

    def put(self, index: int, output: Output) -> None:
        """Add an output of a request."""
        writers = self._writers[index]
        if isinstance(output, CompletionChunk):
            writer = writers[output.sample_index]
            self.unsent -= writer.unsent
            writer.add(output)
            self._note(writer)
            return
        for writer, sample in zip(writers, all_samples(output, len(writers)), strict=True):
            self.unsent -= writer.unsent
            writer.end(sample, output)
            self._note(writer)

    def _note(self, writer: W) -> None:
        """Count what waits of a sample, and send it if it is due."""
        self.unsent += writer.unsent
        if writer.due:
            self._due[writer] = None
            self._changed.set()

    @abstractmethod
    async def send_next(self) -> None:
        """Send what is due, or a part of it."""

    async def take(self, index: int, output: Output) -> None:
        """Add an output of a request, and wait while too much waits for the client."""
        self.put(index, output)
        await self.room()

    async def send_all(self) -> None:
        """Send until it is closed and nothing is left."""
        while self._due or not self._closed:
            if not self._due:
                self._changed = anyio.Event()
                await self._changed.wait()
                continue
            await self.send_next()
            if self._due:
                # The server takes what fits its buffers without a pause.
                await anyio.lowlevel.checkpoint()

    async def send_while(self, run: Callable[[], Awaitable[T]]) -> T:
        """Send outputs as fast as they are read, while `run` puts them here.

        Raises:
            NanoInferenceError: `run` failed, and all outputs before were sent; or an output could
                not be sent.
        """
        failure: NanoInferenceError | None = None
        async with task_group() as group:
            group.start_soon(self.send_all)
            try:
                result = await run()
            except NanoInferenceError as error:
                failure = error
            self.close()
        if failure is not None:
            raise failure
        return result

    async def room(self) -> None:
        """Wait while too much waits for the client."""
        while self.unsent > MOST_UNSENT and self._due:
            if self._read.is_set():
                self._read = anyio.Event()
            await self._read.wait()

    def close(self) -> None:
        """Declare that no more outputs come."""
        self._closed = True
        self._changed.set()


class Piece:
    """The chunks of one sample that were not sent; with its end, those that did not come.

    Attributes:
        finish_reason: Finish reason of the sample; None while it goes on.
    """

    def __init__(self) -> None:
        self.unsent = 0
        self.finish_reason: FinishReason | None = None
        self._chunks: list[CompletionChunk] = []
        self._tokens = self._chars = 0

    @property
    def due(self) -> bool:
        return bool(self._chunks)

    def add(self, chunk: CompletionChunk) -> None:
        ends = chunk.finish_reason is not None and self.finish_reason is None
        if not (chunk.text or chunk.token_ids or ends):
            return
        self._chars += len(chunk.text)
        self._tokens += len(chunk.token_ids)
        self.unsent += len(chunk.token_ids)
        self.finish_reason = self.finish_reason or chunk.finish_reason
        self._chunks.append(chunk)

    def end(self, sample: CompletionSample, completion: Completion) -> None:
        for chunk in rest_of(sample, self._tokens, self._chars):
            self.add(chunk)

    def take(self) -> list[CompletionChunk]:
        """Return the chunks, which are sent."""
        chunks, self._chunks, self.unsent = self._chunks, [], 0
        return chunks


class UnsentPieces(Unsent[Piece]):
    """The samples of one request; all that waits goes on at once."""

    def __init__(self, n: int, take: Callable[[Sequence[Piece]], Awaitable[None]]) -> None:
        self._pieces = [Piece() for _ in range(n)]
        super().__init__([self._pieces])
        self._take = take

    async def send_next(self) -> None:
        self._due.clear()
        self.unsent = 0
        self._read.set()
        await self._take(self._pieces)


class SampleChunks(UnsentPieces):
    """The chunks of one sample. The end of the sample has what did not come in chunks."""

    def __init__(self, take: TakeChunks) -> None:
        async def send(pieces: Sequence[Piece]) -> None:
            await take(pieces[0].take())

        super().__init__(1, send)

    def put(self, index: int, output: Output) -> None:
        if isinstance(output, CompletionChunk):
            super().put(index, output)


async def stream_unsent(
    submissions: Submissions,
    call: Call,
    request: GenerateRequest,
    unsent: Unsent[Any],
    attachment: Attachment | None = None,
) -> Completion:
    """Run a request, and send its outputs as fast as they are read.

    Raises:
        NanoInferenceError: The engine did not do it, or its outputs could not be sent.
    """
    run = partial(submissions.run, call, [request], unsent.take, attachment)
    return (await unsent.send_while(run))[0]


def session_usage(completion: Completion) -> dict[str, Any]:
    """Return the field of an answer's usage with what became of its KV; {} without a session."""
    result = completion.kv_session
    return {} if result is None else {"kv_session": msgspec.to_builtins(result)}
