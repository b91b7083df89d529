"""A request on its way through the engine: at once, or in chunks as it grows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

import anyio
import anyio.lowlevel

from ...bus.public import (
    Completion,
    CompletionChunk,
    GenerateRequest,
    Output,
)
from ...config import NanoInferenceError
from .origin import Origin
from .submissions import Submissions

MOST_UNSENT = 4096
"""Tokens of a stream that wait here for a client that does not read. The others wait on the bus."""


Take = Callable[[Sequence[CompletionChunk]], Awaitable[None]]


class Unsent:
    """What has come of a request and was not sent yet.

    Attributes:
        unsent: Its tokens.
    """

    def __init__(self) -> None:
        self.unsent = 0
        self._read = anyio.Event()
        self._changed = anyio.Event()
        self._closed = False

    def put(self, output: Output) -> None:
        """There is something new of it."""
        raise NotImplementedError

    async def room(self) -> None:
        """Waits while too much waits for the client."""
        while self.unsent > MOST_UNSENT:
            self._read = anyio.Event()
            await self._read.wait()

    def close(self) -> None:
        """Nothing more comes."""
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


class Chunks(Unsent):
    """Of one sample: all that have come, at once. What they did not tell stands in its end."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[CompletionChunk] = []

    def put(self, output: Output) -> None:
        """There is something new of it."""
        if isinstance(output, CompletionChunk):
            self._waiting.append(output)
            self._came(len(output.token_ids))

    async def send_all(self, take: Take) -> None:
        """Hands chunks over until it is closed and nothing is left."""
        while self._waiting or not self._closed:
            if not self._waiting:
                await self._change()
                continue
            chunks, self._waiting = self._waiting, []
            self._taken()
            await take(chunks)
            # The server takes what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()


async def stream_sample(
    submissions: Submissions, origin: Origin, request: GenerateRequest, take: Take
) -> Completion:
    """Runs a request of one sample, and hands over the chunks of it as fast as they are taken.

    Raises:
        NanoInferenceError: The engine did not do it. All that came before was handed over.
    """
    chunks = Chunks()
    return await stream_unsent(submissions, origin, request, chunks, partial(chunks.send_all, take))


async def stream_unsent(
    submissions: Submissions,
    origin: Origin,
    request: GenerateRequest,
    unsent: Unsent,
    send_all: Callable[[], Awaitable[None]],
) -> Completion:
    """Runs a request, and puts what comes of it where `send_all` takes it from until it is closed.

    Raises:
        NanoInferenceError: The engine did not do it, or `send_all` could not send it.
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
            # Not through the group, which would wrap it.
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
    """Runs a request, and gives its end.

    Args:
        put: Is told of all that comes, and waited for.
        before: What of the prompt the answer shows before each sample.

    Raises:
        NanoInferenceError: The engine did not do it.
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
