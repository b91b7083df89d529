"""A request of one sample on its way through the engine: whole, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

import anyio
import anyio.lowlevel

from ...bus.public import Completion, CompletionChunk, GenerateRequest, Output
from ...config import NanoInferenceError
from .origin import Origin
from .submissions import Submissions

MOST_UNSENT = 4096
"""Tokens of a stream buffered here for a slow client. The rest waits on the bus."""

Take = Callable[[Sequence[CompletionChunk]], Awaitable[None]]


class Unsent:
    """A bounded buffer of outputs that were not sent yet. `unsent`: its tokens."""

    def __init__(self) -> None:
        self.unsent = 0
        self._read = anyio.Event()
        self._changed = anyio.Event()
        self._closed = False

    def put(self, output: Output) -> None:
        """Add an output."""
        raise NotImplementedError

    async def room(self) -> None:
        """Wait while the buffer is full."""
        while self.unsent > MOST_UNSENT:
            self._read = anyio.Event()
            await self._read.wait()

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._changed.set()

    def _came(self, tokens: int) -> None:
        self.unsent += tokens
        self._changed.set()

    def _taken(self) -> None:
        self.unsent = 0
        self._read.set()

    async def _change(self) -> None:
        self._changed = anyio.Event()
        await self._changed.wait()


class SampleChunks(Unsent):
    """The chunks of one sample, sent in batches. What they lack is in the sample's end."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[CompletionChunk] = []

    def put(self, output: Output) -> None:
        if isinstance(output, CompletionChunk):
            self._waiting.append(output)
            self._came(len(output.token_ids))

    async def send_all(self, take: Take) -> None:
        """Pass chunks to `take` until the stream has ended and the buffer is empty."""
        while self._waiting or not self._closed:
            if not self._waiting:
                await self._change()
                continue
            chunks, self._waiting = self._waiting, []
            self._taken()
            await take(chunks)
            # The server returns without a pause while its buffers have room.
            await anyio.lowlevel.checkpoint()


async def stream_sample(
    submissions: Submissions, origin: Origin, request: GenerateRequest, take: Take
) -> Completion:
    """Run a request of one sample, and pass its chunks to `take` as fast as they are taken.

    Raises:
        NanoInferenceError: The engine has failed. All earlier chunks were passed on.
    """
    chunks = SampleChunks()
    return await stream_unsent(submissions, origin, request, chunks, partial(chunks.send_all, take))


async def stream_unsent(
    submissions: Submissions,
    origin: Origin,
    request: GenerateRequest,
    unsent: Unsent,
    send_all: Callable[[], Awaitable[None]],
) -> Completion:
    """Run a request, and put its outputs into a buffer that `send_all` empties until its end.

    Raises:
        NanoInferenceError: The engine, or `send_all`, has failed.
    """
    failure: NanoInferenceError | None = None

    async def put(output: Output) -> None:
        unsent.put(output)
        await unsent.room()

    async def send() -> None:
        nonlocal failure
        try:
            await send_all()
        except NanoInferenceError as error:
            # Outside the group, which would wrap it.
            failure = error
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(send)
        try:
            completion = await complete_sample(submissions, origin, request, put)
        except NanoInferenceError as error:
            failure = failure or error
        unsent.close()
    if failure is not None:
        raise failure
    return completion


async def complete_sample(
    submissions: Submissions,
    origin: Origin,
    request: GenerateRequest,
    put: Callable[[Output], Awaitable[None]] | None = None,
    before: str = "",
) -> Completion:
    """Run a request, and return its completion.

    Args:
        put: Called with each output, and awaited.
        before: The part of the prompt that the answer shows before each sample.

    Raises:
        NanoInferenceError: The engine has failed.
    """
    ended: list[Completion] = []

    async def run(index: int, begun: bool) -> None:
        async with aclosing(submissions.outputs(origin, request, begun, before=before)) as outputs:
            async for output in outputs:
                if put is not None:
                    await put(output)
                if isinstance(output, Completion):
                    ended.append(output)
                await anyio.lowlevel.checkpoint()

    await submissions.run(origin, [request], run)
    return ended[0]
